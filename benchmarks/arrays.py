"""Array expressions on the CPU: `dnnc.array` beside NumPy, JAX (jit) and torch.compile, where these are installed.

    python benchmarks/arrays.py [--threads 2] [--only WORD,WORD] [--repeats 3] [--budget 20] [--json OUT]

First every result is compared with NumPy's in float64. Then the libraries take turns, all with the same number of
threads; operands are there, results are fresh. GB/s count each operand and each result once. `of copy` compares with
copies of as many bytes, read and written, between two arrays that are there, by as many threads, which take their turns
with the libraries: first the C library's, by NumPy, then the fastest that we know, which goes past the caches where
arrays are large. Then what a call on 1,000 elements costs. The exit status is 1 if a result of ours is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Call = Callable[[], Any]
SMALL = 1000


@dataclass(frozen=True)
class Case:
    """`f`: of a library (NumPy, JAX, torch, dnnc.array) and its arrays of these shapes. `bound`: of the largest error
    over the largest result.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    f: Callable[..., Any]
    bound: float = 2e-5


def chain(m: Any, x: Any) -> Any:
    return m.tanh(2 * x + 1) * m.exp(-x) + x


def polynomial(m: Any, x: Any, y: Any) -> Any:
    return (x * 0.5 + y) * (x - y) + m.abs(x) * 3.0 - y * y


def add(m: Any, a: Any, b: Any) -> Any:
    return a + b


def dot(m: Any, a: Any, b: Any) -> Any:
    return a @ b


def variance(m: Any, a: Any) -> Any:
    return m.mean(m.square(a - m.mean(a, axis=1, keepdims=True)), axis=1)


def columns(m: Any, x: Any, w: Any, b: Any) -> Any:
    """Batch norm of a matrix."""
    return _batch_norm(m, x, w, b, (0,))


def images(m: Any, x: Any, w: Any, b: Any) -> Any:
    """Batch norm of images."""
    return _batch_norm(m, x, w, b, (0, 2, 3))


def _batch_norm(m: Any, x: Any, w: Any, b: Any, axes: tuple[int, ...]) -> Any:
    mean = m.mean(x, axis=axes, keepdims=True)
    var = m.mean(m.square(x - mean), axis=axes, keepdims=True)
    return (x - mean) / m.sqrt(var + 1e-5) * w + b


def cases() -> list[Case]:
    n, image, channels = (10**7,), (32, 64, 56, 56), (1, 64, 1, 1)
    return [
        Case("tanh(2x+1)*exp(-x)+x, 1e7", (n,), chain),
        Case("(x/2+y)*(x-y)+3|x|-y*y, 1e7", (n, n), polynomial),
        Case("x + y, 1e7", (n, n), add),
        Case("x @ y, 1e7", (n, n), dot, 1e-4),
        Case("variance, 16384x4096", ((16384, 4096),), variance),
        Case("batch norm, 4096x512", ((4096, 512), (1, 512), (1, 512)), columns, 1e-4),
        Case("batch norm, 32x64x56x56", (image, channels, channels), images, 1e-4),
    ]


# --- libraries --------------------------------------------------------------------------------------------------------


def contestants(f: Callable[..., Any], arrays: Sequence[Array]) -> dict[str, Call]:
    """Ours first; each call returns what NumPy can read."""
    import dnnc
    import dnnc.array as xp

    mine = [xp.asarray(a, copy=False) for a in arrays]

    def ours() -> Any:
        y = f(xp, *mine)
        xp.evaluate(y)
        return y

    jitted = dnnc.jit(lambda *given: f(xp, *given))
    out: dict[str, Call] = {"dnnc": ours, "dnnc.jit": lambda: jitted(*mine), "NumPy": lambda: f(np, *arrays)}
    return {**out, **jax_call(f, arrays), **torch_call(f, arrays)}


def jax_call(f: Callable[..., Any], arrays: Sequence[Array]) -> dict[str, Call]:
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        return {}
    given = [jnp.asarray(a) for a in arrays]
    compiled = jax.jit(lambda *xs: f(jnp, *xs))
    return {"JAX jit": lambda: compiled(*given).block_until_ready()}


def torch_call(f: Callable[..., Any], arrays: Sequence[Array]) -> dict[str, Call]:
    try:
        import torch
    except ImportError:
        return {}
    given = [torch.from_numpy(a) for a in arrays]
    compiled = torch.compile(lambda *xs: f(torch, *xs), dynamic=False)
    return {"torch.compile": lambda: compiled(*given)}


# --- measuring --------------------------------------------------------------------------------------------------------


def operands(shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s, dtype=np.float32) for s in shapes]


def error(got: Any, want: Array) -> float:
    a = np.asarray(got, dtype=np.float64)
    return (
        float(np.abs(a - want).max() / max(float(np.abs(want).max()), 1e-30)) if a.shape == want.shape else float("inf")
    )


def right_ones(case: Case, arrays: Sequence[Array], calls: dict[str, Call]) -> tuple[dict[str, Call], bool]:
    """The contestants whose results are right, and whether all of ours are."""
    want = np.asarray(case.f(np, *(a.astype(np.float64) for a in arrays)))
    found, right = {}, True
    for name, call in calls.items():
        wrong = error(call(), want)
        if wrong <= case.bound:
            found[name] = call
            continue
        print(f"{case.name}: {name} is wrong by {wrong:.1e}", flush=True)
        right = right and not name.startswith("dnnc")
    return found, right


def memcpy(nbytes: int, threads: int) -> Call:
    """The C library's copy, in as many parts as there are threads, that reads and writes so many bytes in all."""
    n = nbytes // 8 // threads * threads
    x, y = np.ones(n, np.float32).reshape(threads, -1), np.zeros(n, np.float32).reshape(threads, -1)
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(np.copyto, y, x))


def fastest_copy(nbytes: int, threads: int) -> Call:
    """Our own, between the halves of one array."""
    from dnnc.backends.llvm.ceilings import copy_probe
    from dnnc.backends.llvm.features import parse_target
    from dnnc.backends.runtime.frames import aligned_empty

    data = aligned_empty(nbytes)
    data[:] = 1
    return copy_probe(parse_target("llvm"), data, threads).call


def measure(case: Case, threads: int, repeats: int, budget: float) -> tuple[dict[str, Any], bool]:
    """A row of the table, and whether all results of ours were right."""
    from dnnc.array.lazy import PROGRAMS_MADE
    from dnnc.tools.timing import alternate

    arrays = operands(case.shapes)
    calls, right = right_ones(case, arrays, contestants(case.f, arrays))
    kernels = len(PROGRAMS_MADE.last.notes) if hasattr(PROGRAMS_MADE.last, "notes") else 0
    nbytes = sum(a.nbytes for a in arrays) + int(np.asarray(next(iter(calls.values()))()).nbytes)
    copies = {"memcpy": memcpy(nbytes, threads), "fastest": fastest_copy(nbytes, threads)}
    calls |= copies
    times = alternate(list(calls.values()), repeats, budget, lambda _: None)
    ms = {name: statistics.median([statistics.median(r[k]) for r in times]) * 1e3 for k, name in enumerate(calls)}
    return {
        "case": case.name,
        "kernels": kernels,
        "bytes": nbytes,
        "copy": {name: ms.pop(name) for name in copies},
        "ms": ms,
    }, right


def shown(row: dict[str, Any]) -> str:
    ours = row["ms"]["dnnc"]
    peers = {n: t for n, t in row["ms"].items() if not n.startswith("dnnc")}
    told = ", ".join(f"{n} {t:.4g}" for n, t in row["ms"].items() if n != "dnnc")
    return (
        f"{row['case']:<28} {ours:8.3f} ms {row['bytes'] / ours / 1e6:6.1f} GB/s {row['copy']['memcpy'] / ours:5.2f}, "
        f"{row['copy']['fastest'] / ours:.2f} of copy "
        f"{min(peers.values()) / ours:6.2f} x the best peer, {row['kernels']} kernels | {told}"
    )


def call_costs() -> str:
    """Microseconds of a call whose program is known."""
    from dnnc.tools.timing import alternate

    arrays = operands(((SMALL,),))
    calls = contestants(chain, arrays)
    for call in calls.values():
        call()
    times = alternate(list(calls.values()), 1, 2.0, lambda _: None)[0]
    return f"us a call of {SMALL} elements: " + ", ".join(
        f"{n} {statistics.median(t) * 1e6:.1f}" for n, t in zip(calls, times)
    )


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--only", default="", help="cases whose names contain one of these words")
    ap.add_argument("--repeats", type=int, default=3)
    ap.add_argument("--budget", type=float, default=12, help="seconds of each case")
    ap.add_argument("--json", help="where to write the figures")
    a = ap.parse_args()
    limit(a.threads)
    words = [w for w in a.only.split(",") if w]
    rows, right = [], True
    for c in cases():
        if words and not any(w in c.name for w in words):
            continue
        row, ok = measure(c, a.threads, a.repeats, a.budget)
        rows.append(row)
        right = right and ok
        print(shown(row), flush=True)
    print(call_costs())
    if a.json:
        with open(a.json, "w") as f:
            json.dump(rows, f, indent=1)
    return 0 if right else 1


def limit(threads: int) -> None:
    """As many threads for every library; to be called before any of them is loaded."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if hasattr(os, "sched_setaffinity"):  # JAX takes as many threads as there are CPUs
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


if __name__ == "__main__":
    sys.exit(main())
