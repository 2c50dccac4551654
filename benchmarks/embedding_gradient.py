"""The gradient of a table of embeddings: the time to write the table, and PyTorch's time, beside it.

    python benchmarks/embedding_gradient.py [--target llvm|cuda] [--rows 50257] [--width 768] [--tokens 8192]
    PYTHONPATH=.types python3 benchmarks/embedding_gradient.py     where dnnc is not installed; `make .types` makes that
                                                                   folder

Checks come first: against sums in float64, and equal bits in several runs. Tokens are drawn evenly, by Zipf's law with
the frequent ones first, as in vocabularies of byte pairs, and all equal. The least that has to be moved is one write of
the table and one read of the updates; where rows do not stay in a cache, each update reads and writes one more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dnnc
from dnnc.ir.autodiff.reverse import pullback
from dnnc.ir.dtype import f32, i64
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.types import TensorType
from dnnc.tools.timing import alternate

sys.path.append(str(Path(__file__).parent / "gpu"))

Array = Any
Call = Callable[[], Any]
RUNS = 5  # whose bits must be equal
REPEATS = 5


def gradient(rows: int, width: int, tokens: int) -> Graph:
    """(tokens, cotangents of their embeddings) -> the table's cotangent."""
    g = Graph("embedding")
    table = g.add_input("table", TensorType(f32, (rows, width)))
    at = g.add_input("at", TensorType(i64, (tokens,)))
    y = Builder(g).gather(table, at, axis=0)
    found = pullback(g, {y: g.add_input("g", y.type)}, [table])
    g.outputs = [c for c in found if c is not None]
    return g


def writer(rows: int, width: int) -> Graph:
    """One number -> a table of it."""
    g = Graph("write")
    g.outputs = [Builder(g).expand(g.add_input("x", TensorType(f32, ())), shape=(rows, width))]
    return g


def draws(rows: int, tokens: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, rows + 1)
    return {
        "even": rng.integers(0, rows, tokens),
        "zipf": rng.choice(rows, tokens, p=share / share.sum()),
        "one token": np.full(tokens, rows // 2),
    }


def error(found: Array, at: Array, g: Array) -> float:
    """The largest error against float64, in units of the sum of magnitudes that make an element."""
    want, size = np.zeros(found.shape), np.zeros(found.shape)
    np.add.at(want, at, g)
    np.add.at(size, at, np.abs(g))
    return float((np.abs(found - want) / np.maximum(size, 1e-30)).max())


class Device:
    """Arrays and times of a target."""

    def __init__(self, target: str) -> None:
        self.gpu = target.startswith("cuda")
        if self.gpu:
            import cupy

            self.array: Callable[[Array], Array] = cupy.asarray
            self.host: Callable[[Array], Array] = cupy.asnumpy
            self.empty: Callable[..., Array] = cupy.empty
        else:
            self.array, self.host, self.empty = np.asarray, np.asarray, np.empty

    def milliseconds(self, calls: Sequence[Call]) -> list[tuple[float, float]]:
        """Median and least time of each."""
        if self.gpu:
            from gpu_time import gpu_times

            return [(t, t) for t in gpu_times(calls, REPEATS)]
        times = alternate(calls, REPEATS, 4.0 * len(calls), lambda _: None)
        every = [np.concatenate([r[k] for r in times]) * 1e3 for k in range(len(calls))]
        return [(float(np.median(t)), float(t.min())) for t in every]


def torch_calls(device: Device, at: Array, g: Array, rows: int, threads: int) -> list[tuple[str, Call]]:
    try:
        import torch
    except ImportError:
        return []
    torch.set_num_threads(threads)
    where = "cuda" if device.gpu else "cpu"
    if device.gpu and not torch.cuda.is_available():
        return []
    tokens, updates = torch.tensor(at, device=where), torch.tensor(g, device=where)
    return [("PyTorch", lambda: torch.ops.aten.embedding_dense_backward(updates, tokens, rows, -1, False))]


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--target", default="llvm", help="llvm or cuda")
    ap.add_argument("--threads", type=int, default=2)
    for name, default in (("rows", 50257), ("width", 768), ("tokens", 8192)):
        ap.add_argument(f"--{name}", type=int, default=default)
    a = ap.parse_args()
    device = Device(a.target)
    target = f"llvm -threads={a.threads}" if a.target == "llvm" else a.target
    g = np.random.default_rng(1).standard_normal((a.tokens, a.width)).astype(np.float32)
    f = dnnc.compile(gradient(a.rows, a.width, a.tokens), target=target)
    write = dnnc.compile(writer(a.rows, a.width), target=target)
    table, updates = a.rows * a.width * 4, a.tokens * a.width * 4
    print(f"{a.rows} x {a.width}, {a.tokens} tokens, {target}")
    print(f"the table {table / 1e6:.1f} MB, updates {updates / 1e6:.1f} MB")
    unused = np.zeros((a.rows, a.width), np.float32)
    bad = False
    bound: dict[str, tuple[Call, Array]] = {}
    for name, at in draws(a.rows, a.tokens).items():
        out = device.empty((a.rows, a.width), np.float32)
        given = {"table": unused, "at": at, "g": g}
        call = f.bind([device.array(given[s.name]) for s in f.inputs], [out])
        runs = []
        for _ in range(RUNS):
            out[:] = 7.0  # what was there does not count
            call()
            runs.append(device.host(out).tobytes())
        off, same = error(device.host(out), at, g), len(set(runs)) == 1
        bad |= not same or off > 1e-6 * max(1.0, np.sqrt(a.tokens) / 8)
        print(f"{name:10} error {off:.1e}, {RUNS} runs {'have the same bits' if same else 'DIFFER'}")
        bound[name] = call, at
    if bad:
        return 1
    out = device.empty((a.rows, a.width), np.float32)
    fill: list[tuple[str, Call]] = [
        ("write the table", write.bind([device.array(np.zeros((), np.float32))], [out])),
        ("fill by CuPy" if device.gpu else "fill by NumPy", lambda: out.fill(0)),
    ]
    for name, (call, at) in bound.items():
        named = [*fill, ("gradient", call), *torch_calls(device, at, g, a.rows, a.threads)]
        times = device.milliseconds([c for _, c in named])
        least = times[0]
        for (what, _), (middle, best) in zip(named, times, strict=True):
            print(
                f"{name:10} {what:16} {middle:8.3f} ms (best {best:8.3f}: {table / best / 1e6:6.1f} GB/s of table), "
                f"{middle / least[0]:5.2f} x the write (best {best / least[1]:5.2f})"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
