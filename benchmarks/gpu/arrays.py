"""Array expressions on one GPU: `dnnc.array` beside CuPy, torch.compile and NumPy on the host.

    python benchmarks/gpu/arrays.py [--only WORD,WORD] [--no-host] [--json OUT]
    PYTHONPATH=.types python3 benchmarks/gpu/arrays.py     where dnnc is not installed; `make .types` makes that folder

First every result is compared with NumPy's in float64, on a part of large arrays. Then calls are timed on the device: a
kernel that only waits holds the stream back while the calls are queued behind it, so that they follow each other
without gaps, whatever Python needs for them. GB/s count each operand and each result once; `of copy` compares with a
copy of as many bytes within the device, measured in the same minute. Then what a call costs the thread that makes it,
and what a new expression costs. The exit status is 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gpu_time import host_microseconds

import dnnc
import dnnc.array as xp
from dnnc.array import lazy
from dnnc.array.lazy import PROGRAMS_MADE

Array = np.ndarray[Any, Any]
Call = Callable[[], Any]
GPU = "cuda:0"
SPIN = 20e-3  # seconds that the device waits while calls are queued
QUEUED = 100  # calls at most; their memory, and the host's time for them, are bounded
PART = 1 << 20  # elements of a large result that are compared


@dataclass(frozen=True)
class Case:
    """`f`: of a library (NumPy, CuPy, torch, dnnc.array) and its arrays of these shapes. `kernel`: the same in CuPy's
    notation. `parts`: can a part of the result be computed of a part of the operands? `host`: is NumPy timed too?
    `bound`: of the largest error over the largest result.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    f: Callable[..., Any]
    kernel: tuple[str, str, str] | None = None
    parts: bool = False
    host: bool = False
    bound: float = 2e-5


def chain(m: Any, x: Any) -> Any:
    return m.tanh(2 * x + 1) * m.exp(-x) + x


def variance(m: Any, a: Any) -> Any:
    return m.mean(m.square(a - m.mean(a, axis=1, keepdims=True)), axis=1)


def batch_norm(m: Any, x: Any, w: Any, b: Any) -> Any:
    mean = m.mean(x, axis=(0, 2, 3), keepdims=True)
    var = m.mean(m.square(x - mean), axis=(0, 2, 3), keepdims=True)
    return (x - mean) / m.sqrt(var + 1e-5) * w + b


def add(m: Any, a: Any, b: Any) -> Any:
    return a + b


def dot(m: Any, a: Any, b: Any) -> Any:
    return a @ b


TANH = ("T x", "T y", "y = tanh(2 * x + 1) * exp(-x) + x")


def cases() -> list[Case]:
    n, image, channels = (10**8,), (32, 64, 56, 56), (1, 64, 1, 1)
    return [
        *(Case(f"chain {n:.2g}", ((n,),), chain, TANH, parts=True) for n in (4 * 10**6, 10**7, 1 << 26, 10**8)),
        Case("add 1e+08", (n, n), add, ("T x, T y", "T z", "z = x + y"), parts=True, host=True),
        Case("dot 1e+08", (n, n), dot, host=True, bound=1e-4),
        Case("variance 16384x4096", ((16384, 4096),), variance),
        Case("batch norm 32x64x56x56", (image, channels, channels), batch_norm, bound=1e-4),
    ]


# --- results ----------------------------------------------------------------------------------------------------------


def operands(case: Case) -> list[Any]:
    import cupy

    rng = cupy.random.default_rng(0)
    return [rng.standard_normal(s, dtype=cupy.float32) for s in case.shapes]


def reference(case: Case, arrays: Sequence[Any]) -> Array:
    """NumPy's result in float64; of a case that allows it on the first and last elements."""
    host = [ends(a).get() if case.parts else a.get() for a in arrays]
    return np.asarray(case.f(np, *(a.astype(np.float64) for a in host)))


def ends(a: Any) -> Any:
    import cupy

    return a if a.size <= 2 * PART else cupy.concatenate([a[:PART], a[-PART:]])


def error(case: Case, got: Any, want: Array) -> float:
    import cupy

    a = cupy.from_dlpack(got) if not isinstance(got, cupy.ndarray) else got
    a = (ends(a) if case.parts else a).get().astype(np.float64)
    return float(np.abs(a - want).max() / max(np.abs(want).max(), 1e-30)) if a.shape == want.shape else float("inf")


def contestants(case: Case, arrays: Sequence[Any]) -> dict[str, Call]:
    """Ours first. Each call gives an array that CuPy reads by DLPack."""
    import cupy

    mine = [xp.from_dlpack(a) for a in arrays]

    def ours() -> Any:
        y = case.f(xp, *mine)
        xp.evaluate(y)
        return y

    jitted = dnnc.jit(lambda *given: case.f(xp, *given))
    out: dict[str, Call] = {"dnnc": ours, "dnnc.jit": lambda: jitted(*mine), "CuPy": lambda: case.f(cupy, *arrays)}
    if case.kernel is not None:
        one = cupy.ElementwiseKernel(*case.kernel, "one")
        out["CuPy kernel"] = lambda: one(*arrays)
    if (compiled := torch_compiled(case.f, arrays)) is not None:
        out["torch.compile"] = compiled
    return out


def torch_compiled(f: Callable[..., Any], arrays: Sequence[Any]) -> Call | None:
    try:
        import torch
    except ImportError:
        return None
    given = [torch.from_dlpack(a) for a in arrays]
    made = torch.compile(lambda *xs: f(torch, *xs), dynamic=False)
    return lambda: made(*given)


# --- times ------------------------------------------------------------------------------------------------------------


def queued_times(calls: Sequence[Call], repeats: int = 5) -> list[float]:
    """Milliseconds of the device for a call, the median over blocks, which take turns."""
    import cupy

    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }', "spin"
    )
    ticks = np.int64(SPIN * cupy.cuda.Device().attributes["ClockRate"] * 1e3)
    counts = []
    for c in calls:
        for _ in range(3):
            c()
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(5):
            c()
        counts.append(max(3, min(QUEUED, int(SPIN / 2 * 5 / (time.perf_counter() - start)))))
        cupy.cuda.Device().synchronize()

    def block(call: Call, count: int) -> float:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        spin((1,), (1,), (ticks,))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) / count

    found: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for k, c in enumerate(calls):
            found[k].append(block(c, counts[k]))
    return [statistics.median(f) for f in found]


def copying(nbytes: int) -> Call:
    """A copy within the device that reads and writes as many bytes in all."""
    import cupy

    source, to = cupy.zeros(nbytes // 2, cupy.uint8), cupy.zeros(nbytes // 2, cupy.uint8)
    return lambda: to.data.copy_from_device_async(source.data, nbytes // 2, cupy.cuda.get_current_stream())


def host_milliseconds(f: Callable[..., Any], arrays: Sequence[Array]) -> float:
    times = []
    for _ in range(4):
        start = time.perf_counter()
        f(*arrays)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


# --- tables -----------------------------------------------------------------------------------------------------------


def measure(case: Case, host: bool) -> tuple[dict[str, Any], bool]:
    """A row of the table, and whether all results were right."""
    import cupy

    arrays = operands(case)
    want = reference(case, arrays)
    calls = contestants(case, arrays)
    errors, right = {}, True
    for name, call in list(calls.items()):
        try:
            made = call()
            errors[name] = error(case, made, want)
        except Exception as e:
            print(f"{case.name}: {name}: {type(e).__name__}: {str(e)[:300]}", flush=True)
            errors[name] = float("inf")
        if not errors[name] <= case.bound:
            right = right and not name.startswith("dnnc")
            print(f"{case.name}: {name} is wrong by {errors[name]:.1e}", flush=True)
            del calls[name]
    kernels = len(PROGRAMS_MADE.last.notes) if hasattr(PROGRAMS_MADE.last, "notes") else 0
    nbytes = sum(a.nbytes for a in arrays) + 4 * int(np.prod(case.f(xp, *map(xp.from_dlpack, arrays)).shape))
    times = queued_times([copying(nbytes), *calls.values()])
    row: dict[str, Any] = {
        "case": case.name,
        "kernels": kernels,
        "bytes": nbytes,
        "copy": times[0],
        "ms": dict(zip(calls, times[1:])),
        "error": errors,
    }
    if host and case.host:
        row["ms"]["NumPy"] = host_milliseconds(lambda *xs: case.f(np, *xs), [a.get() for a in arrays])
    del arrays, calls
    cupy.get_default_memory_pool().free_all_blocks()
    return row, right


def shown(row: dict[str, Any]) -> str:
    ours, rate = row["ms"].get("dnnc", float("nan")), row["bytes"] / 1e6
    peers = ", ".join(f"{n} {t:.4g}" for n, t in row["ms"].items() if n != "dnnc")
    best = min((t for n, t in row["ms"].items() if not n.startswith("dnnc")), default=float("nan"))
    return (
        f"{row['case']:<24} {ours:8.4f} ms {rate / ours:6.0f} GB/s {row['copy'] / ours:5.2f} of copy "
        f"({rate / row['copy']:.0f} GB/s) "
        f"{best / ours:6.2f} x the best peer, {row['kernels']} kernels | {peers}"
    )


def call_costs() -> dict[str, float]:
    """Microseconds of the caller's thread for a call on 1,000 elements whose program is known."""
    import cupy

    a = cupy.ones(1000, cupy.float32)
    x = xp.from_dlpack(a)
    one = cupy.ElementwiseKernel(*TANH, "one")
    jitted = dnnc.jit(lambda v: chain(xp, v))
    calls: dict[str, Call] = {
        "dnnc x * 0.5": lambda: xp.evaluate(x * 0.5),
        "CuPy x * 0.5": lambda: a * 0.5,
        "dnnc chain": lambda: xp.evaluate(chain(xp, x)),
        "dnnc.jit chain": lambda: jitted(x),
        "CuPy chain": lambda: chain(cupy, a),
        "CuPy kernel chain": lambda: one(a),
        "dnnc x[k]": lambda: xp.evaluate(x[8:12]),
        "dnnc from_dlpack": lambda: xp.from_dlpack(a),
        "dnnc to CuPy": lambda: cupy.from_dlpack(x),
    }
    for call in calls.values():
        for _ in range(20):
            call()
    return {name: host_microseconds(call) for name, call in calls.items()}


def compile_costs() -> dict[str, float]:
    """Milliseconds until a new expression is queued: of unknown kernels, of known ones, and of a program that another
    process has left.
    """
    n = 256 + time.time_ns() % 60013  # a size that no cache has seen
    x, y = (xp.ones((k, n), dtype=xp.float32, device=GPU) for k in (64, 96))
    xp.evaluate(x, y)

    def sums(a: Any) -> Any:
        return xp.sum(xp.sin(a * 3) + a, axis=1)

    def cost(*made: Any) -> float:
        start = time.perf_counter()
        xp.evaluate(*made)
        return (time.perf_counter() - start) * 1e3

    out = {"one kernel, unknown": cost(sums(x))}
    xp.evaluate(sums(y))
    out["of two known kernels"] = cost(sums(x), sums(y))
    lazy.compiler.cache_clear()
    PROGRAMS_MADE.made.clear()
    xp.evaluate(x + 1)  # the compiler is there again
    out["that another process has left"] = cost(sums(x), sums(y))
    out["known"] = cost(sums(x), sums(y))
    return out


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--only", default="", help="cases whose names contain one of these words")
    ap.add_argument("--no-host", action="store_true", help="leave NumPy out")
    ap.add_argument("--json", help="where to write the figures")
    a = ap.parse_args()
    words = [w for w in a.only.split(",") if w]
    rows, right = [], True
    for c in cases():
        if words and not any(w in c.name for w in words):
            continue
        row, ok = measure(c, not a.no_host)
        rows.append(row)
        right = right and ok
        print(shown(row), flush=True)
    calls, made = call_costs(), compile_costs()
    print("us a call of 1,000 elements: " + ", ".join(f"{n} {t:.1f}" for n, t in calls.items()))
    print("ms until an expression is queued: " + ", ".join(f"{n} {t:.2f}" for n, t in made.items()))
    if a.json:
        with open(a.json, "w") as f:
            json.dump({"rows": rows, "calls": calls, "new": made}, f, indent=1)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
