"""Single kernels on one thread as a share of the FMA peak that the same run measures.

    python benchmarks/cpu_kernels.py [--seconds 3] [--only gemm]

Each kernel goes the whole way: graph text, layout, fusion, lowering to a naive nest, the recipe's own first choice, LLVM. Its blocks of
calls alternate with a loop of independent FMAs, so that a change of clock or a busy neighbour meets both.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from dnnc.backends.llvm.build import pack
from dnnc.backends.llvm.compile import compile_text, load_objects
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.features import CpuTarget, parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.backends.runtime import Frame, aligned_empty
from dnnc.ir.dtype import f32
from dnnc.ir.expr import const, fma
from dnnc.ir.graph_text import parse
from dnnc.ir.interp import run
from dnnc.ir.operator.stmt import Buffer, Builder, Func, Kernel
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program

CASES = {
    "gemm 1024^3": "def g(a: f32[1024, 1024], *, b: f32[1024, 1024]):\n    y = matmul(a, b)\n    return y",
    "gemm 128x3072x768": "def g(a: f32[128, 768], *, b: f32[768, 3072]):\n    y = matmul(a, b)\n    return y",
    "gemm 128x768x3072": "def g(a: f32[128, 3072], *, b: f32[3072, 768]):\n    y = matmul(a, b)\n    return y",
    "conv 3x3 64->64 @56": "def g(a: f32[1, 64, 56, 56], *, b: f32[64, 64, 3, 3]):\n    y = conv(a, b, pads=(1, 1, 1, 1))\n    return y",
    "conv 3x3 128->128 @28": "def g(a: f32[1, 128, 28, 28], *, b: f32[128, 128, 3, 3]):\n    y = conv(a, b, pads=(1, 1, 1, 1))\n    return y",
    "conv 3x3 256->256 @14": "def g(a: f32[1, 256, 14, 14], *, b: f32[256, 256, 3, 3]):\n    y = conv(a, b, pads=(1, 1, 1, 1))\n    return y",
    "conv 3x3 512->512 @7": "def g(a: f32[1, 512, 7, 7], *, b: f32[512, 512, 3, 3]):\n    y = conv(a, b, pads=(1, 1, 1, 1))\n    return y",
    "conv 1x1 64->256 @56": "def g(a: f32[1, 64, 56, 56], *, b: f32[256, 64, 1, 1]):\n    y = conv(a, b)\n    return y",
    "conv 1x1 1024->256 @14": "def g(a: f32[1, 1024, 14, 14], *, b: f32[256, 1024, 1, 1]):\n    y = conv(a, b)\n    return y",
    "conv 7x7 s2 3->64 @224": "def g(a: f32[1, 3, 224, 224], *, b: f32[64, 3, 7, 7]):\n    y = conv(a, b, strides=(2, 2), pads=(3, 3, 3, 3))\n    return y",
}
PEAK_STEPS = 20_000


@dataclass
class Timed:
    name: str
    call: object
    flops: int
    choice: str = ""
    error: float = 0.0


def peak(target: CpuTarget) -> Timed:
    """Independent FMAs on all registers but a few: the most that any kernel could reach."""
    n, lanes = target.registers - 4, target.lanes
    b = Builder()
    x = Buffer("x", f32, (const(n * lanes),))
    acc = b.alloc("acc", f32, n, lanes)
    with b.loop("i", n, "unroll") as i:
        b.store(acc, (i, 0), x.at(i * lanes, lanes=lanes), lanes)
    with b.loop("k", PEAK_STEPS), b.loop("j", n, "unroll") as j:
        b.store(acc, (j, 0), fma(acc.at(j, 0, lanes=lanes), const(0.5, f32), const(1.0, f32)), lanes)
    with b.loop("o", n, "unroll") as i:
        b.store(x, (i * lanes,), acc.at(i, 0, lanes=lanes), lanes)
    data = aligned_empty(n * lanes * 4)
    data[:] = 0
    return Timed("peak", native(Kernel((Func("peak", (x,), b.block()),)), target, [data]), 2 * n * lanes * PEAK_STEPS)


def native(kernel: Kernel, target: CpuTarget, buffers: list[np.ndarray]) -> object:
    """The kernel bound to its buffers, as a function without arguments, on one thread."""
    loaded = load_objects([compile_text(emit_kernel(kernel, "k_bench", target.feature_set), target.cpu, target.features)])
    f = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (len(buffers) + 1), ctypes.c_int64, ctypes.c_int64)(loaded.address("k_bench"))
    frame = Frame(64)
    args = [b.ctypes.data for b in buffers]

    def call() -> None:
        f(*args, frame.address, 0, 1)

    call.keep = (loaded, frame, buffers)  # type: ignore[attr-defined]
    return call


def case(name: str, text: str, target: CpuTarget) -> Timed:
    """One contraction of a graph, packed and bound; its error against float64 is checked first."""
    rng = np.random.default_rng(0)
    shapes = {k: [int(d) for d in part.split("]")[0].split(",")] for k, part in ((k, text.split(f"{k}: f32[")[1]) for k in "ab")}
    weights = (rng.standard_normal(shapes["b"]) / np.sqrt(np.prod(shapes["b"][1:] if len(shapes["b"]) > 2 else shapes["b"][0]))).astype(np.float32)
    x = rng.standard_normal(shapes["a"]).astype(np.float32)
    graph = parse(text, {"b": weights})
    want = run(graph, [x], "float64")[0]
    program = compile_program(graph, PassContext(lanes=target.lanes), templates(target))
    step = next(s for s in program.steps if s.group.kind == "contraction")
    bufs = []
    for v in step.params:
        if v in graph.constants:
            data = pack(graph.constants[v], v.type)
        elif v is step.group.output:
            data = np.zeros([int(d) for d in v.type.physical], np.float32)
        else:
            data = pack(x, v.type)
        raw = aligned_empty(data.nbytes)
        raw[:] = data.reshape(-1).view(np.uint8)
        bufs.append(raw)
    timed = Timed(name, native(step.kernel, target, bufs), int(step.flops), str(step.choice))  # type: ignore[arg-type]
    timed.call()  # type: ignore[operator]
    got = bufs[-1].view(np.float32)
    t = step.group.output.type
    expected = pack(want.astype(np.float32), t).reshape(-1)
    timed.error = float(np.abs(got - expected).max() / np.abs(expected).max())
    return timed


def measure(items: list[Timed], seconds: float) -> list[list[float]]:
    """Seconds per call; the items take turns."""
    times: list[list[float]] = [[] for _ in items]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for t, item in zip(times, items):
            start = time.perf_counter()
            item.call()  # type: ignore[operator]
            t.append(time.perf_counter() - start)
    return times


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--seconds", type=float, default=2.0, help="per kernel")
    ap.add_argument("--only", default="", help="part of a name")
    ap.add_argument("--target", default="llvm")
    a = ap.parse_args()
    target = parse_target(a.target)
    top = peak(target)
    table = Table(title=f"{target.cpu}, {target.vector_bits}-bit vectors, one thread; share of the FMA peak of the same run")
    for c in ("kernel", "schedule", "ms (min)", "GFLOP/s", "% of peak (min)", "% of peak (median)", "error / scale"):
        table.add_column(c, justify="left" if c in ("kernel", "schedule") else "right")
    for name, text in CASES.items():
        if a.only not in name:
            continue
        item = case(name, text, target)
        p, t = measure([top, item], a.seconds)
        fast, mid = (item.flops / x / (top.flops / y) * 100 for x, y in ((min(t), min(p)), (np.median(t), np.median(p))))
        table.add_row(name, item.choice, f"{min(t) * 1e3:.3f}", f"{item.flops / min(t) / 1e9:.0f}", f"{fast:.1f}", f"{mid:.1f}", f"{item.error:.1e}")
    table.caption = f"peak: {top.flops / min(p) / 1e9:.0f} GFLOP/s"
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
