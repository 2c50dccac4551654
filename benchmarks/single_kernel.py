"""One kernel on one thread, bound to its buffers, and the two speeds that bound it: independent FMAs, and reading memory.

In: the text of a graph with one heavy node. It goes the whole way: graph passes, layout, fusion, lowering to a naive nest, the recipe's
own first choice, LLVM. Out: a function without arguments to be timed. cpu_kernels.py and random_shapes.py measure with it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.backends.llvm.build import pack
from dnnc.backends.llvm.compile import compile_text, load_objects
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates import templates
from dnnc.backends.runtime import Frame, aligned_empty
from dnnc.ir.dtype import f32
from dnnc.ir.expr import const, fma
from dnnc.ir.graph_text import parse
from dnnc.ir.interp import run
from dnnc.ir.operator.stmt import Buffer, Builder, Func, Kernel
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program

Array = np.ndarray[Any, Any]
Call = Callable[[], None]
PEAK_STEPS = 20_000
READ_CHAINS = 8  # accumulators: enough to hide the latency of an addition


@dataclass
class Timed:
    """A kernel that can be called: its work (`flops`, and `bytes` of its operands and result), its schedule, and max error / scale."""

    name: str
    call: Call
    flops: int
    bytes: int = 0
    choice: str = ""
    error: float = 0.0


def native(kernel: Kernel, target: CpuTarget, buffers: list[Array]) -> Call:
    """The kernel bound to its buffers, as a function without arguments, on one thread."""
    loaded = load_objects([compile_text(emit_kernel(kernel, "k_bench", target.feature_set), target.cpu, target.features)])
    f = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (len(buffers) + 1), ctypes.c_int64, ctypes.c_int64)(loaded.address("k_bench"))
    frame = Frame(64)
    args = [b.ctypes.data for b in buffers]

    def call() -> None:
        f(*args, frame.address, 0, 1)

    call.keep = (loaded, frame, buffers)  # type: ignore[attr-defined]
    return call


def aligned(a: Array) -> Array:
    """The bytes of an array at an aligned address."""
    raw = aligned_empty(a.nbytes)
    raw[:] = a.reshape(-1).view(np.uint8)
    return raw


# --- bounds -------------------------------------------------------------------------------------------------------------------


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
    data = aligned(np.zeros(n * lanes, np.float32))
    return Timed("peak", native(Kernel((Func("peak", (x,), b.block()),)), target, [data]), 2 * n * lanes * PEAK_STEPS)


def reading(target: CpuTarget, nbytes: int) -> Timed:
    """A buffer of about `nbytes` read once from its beginning to its end, and added up in independent sums."""
    lanes = target.lanes
    step = READ_CHAINS * lanes
    count = max(nbytes // (4 * step), 1)
    b = Builder()
    x, y = Buffer("x", f32, (const(count * step),)), Buffer("y", f32, (const(step),))
    acc = b.alloc("acc", f32, READ_CHAINS, lanes)
    with b.loop("i", READ_CHAINS, "unroll") as i:
        b.store(acc, (i, 0), y.at(i * lanes, lanes=lanes), lanes)
    with b.loop("k", count) as k, b.loop("j", READ_CHAINS, "unroll") as j:
        b.store(acc, (j, 0), acc.at(j, 0, lanes=lanes) + x.at(k * step + j * lanes, lanes=lanes), lanes)
    with b.loop("o", READ_CHAINS, "unroll") as i:
        b.store(y, (i * lanes,), acc.at(i, 0, lanes=lanes), lanes)
    data = [aligned(np.zeros(count * step, np.float32)), aligned(np.zeros(step, np.float32))]
    return Timed("read", native(Kernel((Func("read", (x, y), b.block()),)), target, data), 0, 4 * count * step)


def empty_call(target: CpuTarget) -> Timed:
    """A kernel of three buffers that stores one number: what a call costs."""
    b = Builder()
    bufs = [Buffer(name, f32, (const(16),)) for name in "xyz"]
    b.store(bufs[2], (0,), const(0.0, f32))
    data = [aligned(np.zeros(16, np.float32)) for _ in bufs]
    return Timed("call", native(Kernel((Func("nothing", tuple(bufs), b.block()),)), target, data), 0)


# --- a kernel of a graph ------------------------------------------------------------------------------------------------------


def case(name: str, text: str, target: CpuTarget, kind: str = "contraction") -> Timed:
    """The kernel of a graph's one group of this kind, packed and bound; its error against float64 is measured first.

    Args:
        name: for tables.
        text: a graph of an input `a` and perhaps a constant `b`, whose numbers are drawn here.
        target: the CPU.
        kind: of the group: "contraction" or "reduction".
    """
    rng = np.random.default_rng(0)
    shapes = {k: [int(d) for d in text.split(f"{k}: f32[")[1].split("]")[0].split(",")] for k in "ab" if f"{k}: f32[" in text}
    x = rng.standard_normal(shapes["a"]).astype(np.float32)
    constants = {"b": _weights(rng, shapes["b"])} if "b" in shapes else {}
    graph = parse(text, constants)
    want = run(graph, [x], "float64")[0]
    program = compile_program(graph, PassContext(lanes=target.lanes), templates(target))
    step = next(s for s in program.steps if s.group.kind == kind)
    buffers, moved = [], 0
    for v in step.params:
        if v is step.group.output:
            data = np.zeros([int(str(d)) for d in v.type.physical], np.float32)
        else:
            data = pack(graph.constants.get(v, x), v.type)
        moved += data.nbytes
        buffers.append(aligned(data))
    timed = Timed(name, native(step.kernel, target, buffers), int(str(step.flops)), moved, str(step.choice))
    timed.call()
    expected = pack(want.astype(np.float32), step.group.output.type).reshape(-1)
    timed.error = float(np.abs(buffers[-1].view(np.float32) - expected).max() / np.abs(expected).max())
    return timed


def _weights(rng: np.random.Generator, shape: list[int]) -> Array:
    terms = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
    return (rng.standard_normal(shape) / np.sqrt(terms)).astype(np.float32)


def measure(items: list[Timed], seconds: float) -> list[list[float]]:
    """Seconds per call; the items take turns."""
    times: list[list[float]] = [[] for _ in items]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for t, item in zip(times, items):
            start = time.perf_counter()
            item.call()
            t.append(time.perf_counter() - start)
    return times
