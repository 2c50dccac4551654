"""What this machine can do at most: multiply-adds per second, and bytes per second from each level of the memory.

In: a CPU and a number of threads. Out: `Ceilings`, which profiles and benchmarks hold a kernel's own rates against.
They are measured by kernels of the operator IR on the threads of the pool, as the best of many runs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dnnc.backends.base import Ceilings, Level
from dnnc.backends.llvm.compile import compile_text, load_objects
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.entry import entry_text
from dnnc.backends.llvm.features import CpuTarget, last_level_cache
from dnnc.backends.llvm.runtime import runtime
from dnnc.backends.runtime.frames import Frame, aligned_empty
from dnnc.backends.runtime.program import Call, MemoryRef
from dnnc.ir.dtype import f32
from dnnc.ir.expr import const, fma
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel

Array = np.ndarray[Any, Any]
FMA_STEPS = 20_000
READ_CHAINS = 8  # accumulators: enough to hide the latency of an addition
COPY_VECTORS = 4  # per step of a copy
PROBE_SECONDS = 0.025  # of one ceiling
PROBE_RUNS = 3
REPEATED = 16  # passes over a buffer that lies in a cache, in one call
MEMORY_BYTES = 64 << 20, 128 << 20  # a buffer that no cache holds: four times the last cache, within these


@dataclass
class Probe:
    """A kernel bound to its buffers: `call()` runs it once. `flops` and `bytes` are its work."""

    name: str
    call: Callable[[], None]
    flops: int
    bytes: int = 0


@cache
def ceilings(target: CpuTarget, threads: int) -> Ceilings:
    """The ceilings of this machine, measured once per process in about 0.2 s."""
    top = fma_probe(target, threads)
    flops = top.flops / shortest(top, PROBE_SECONDS)
    last = last_level_cache()
    near = target.l2 * threads
    levels = [_level("L2", near, near // 2, target, threads)]
    if last > 2 * near:
        levels.append(_level("L3", last, (near + last) // 3, target, threads))
    levels.append(_level("memory", 0, min(max(4 * last, MEMORY_BYTES[0]), MEMORY_BYTES[1]), target, threads))
    return Ceilings(threads, flops, tuple(levels))


def _level(name: str, capacity: int, nbytes: int, target: CpuTarget, threads: int) -> Level:
    data = aligned_empty(nbytes)
    data[:] = 0  # pages that nobody has written are all the same one
    repeat = REPEATED if capacity else 1
    probes = read_probe(target, data, threads, repeat), copy_probe(target, data, threads, repeat)
    read, copy = (p.bytes / shortest(p, PROBE_SECONDS) for p in probes)
    return Level(name, capacity, read, copy)


def shortest(probe: Probe, seconds: float) -> float:
    """Seconds of the shortest call."""
    best, runs, end = float("inf"), 0, time.perf_counter() + seconds
    while runs < PROBE_RUNS or time.perf_counter() < end:
        start = time.perf_counter()
        probe.call()
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return best


# --- kernels ----------------------------------------------------------------------------------------------------------


def fma_probe(target: CpuTarget, threads: int = 1) -> Probe:
    """Independent multiply-adds on all vector registers but a few."""
    n, lanes = target.registers - 4, target.lanes
    b = Builder()
    x = Buffer("x", f32, (const(threads), const(n * lanes)))
    with b.loop("p", threads, "parallel") as p:
        acc = b.alloc("acc", f32, n, lanes)
        with b.loop("i", n, "unroll") as i:
            b.store(acc, (i, 0), x.at(p, i * lanes, lanes=lanes), lanes)
        with b.loop("k", FMA_STEPS), b.loop("j", n, "unroll") as j:
            b.store(acc, (j, 0), fma(acc.at(j, 0, lanes=lanes), const(0.5, f32), const(1.0, f32)), lanes)
        with b.loop("o", n, "unroll") as i:
            b.store(x, (p, i * lanes), acc.at(i, 0, lanes=lanes), lanes)
    data = aligned_empty(4 * threads * n * lanes)
    data[:] = 0
    call = bind(Kernel((Func("peak", (x,), b.block()),)), target, [data], threads)
    return Probe("peak", call, 2 * threads * n * lanes * FMA_STEPS)


def read_probe(target: CpuTarget, data: Array, threads: int = 1, repeat: int = 1) -> Probe:
    """Read the bytes of an aligned buffer once, a part by each thread, in independent sums."""
    lanes = target.lanes
    step = READ_CHAINS * lanes
    count = max(data.nbytes // (4 * step * threads), 1)
    b = Builder()
    x, y = Buffer("x", f32, (const(threads), const(count * step))), Buffer("y", f32, (const(threads), const(step)))
    with b.loop("p", threads, "parallel") as p:
        acc = b.alloc("acc", f32, READ_CHAINS, lanes)
        with b.loop("i", READ_CHAINS, "unroll") as i:
            b.store(acc, (i, 0), y.at(p, i * lanes, lanes=lanes), lanes)
        with b.loop("r", repeat), b.loop("k", count) as k, b.loop("j", READ_CHAINS, "unroll") as j:
            b.store(acc, (j, 0), acc.at(j, 0, lanes=lanes) + x.at(p, k * step + j * lanes, lanes=lanes), lanes)
        with b.loop("o", READ_CHAINS, "unroll") as i:
            b.store(y, (p, i * lanes), acc.at(i, 0, lanes=lanes), lanes)
    sums = aligned_empty(4 * threads * step)
    sums[:] = 0
    call = bind(Kernel((Func("read", (x, y), b.block()),)), target, [data, sums], threads)
    return Probe("read", call, 0, 4 * threads * count * step * repeat)


def copy_probe(target: CpuTarget, data: Array, threads: int = 1, repeat: int = 1) -> Probe:
    """The first half of an aligned buffer copied to its second half, a part by each thread."""
    lanes = target.lanes
    step = COPY_VECTORS * lanes
    count = max(data.nbytes // (8 * step * threads), 1)
    b = Builder()
    x, y = (Buffer(name, f32, (const(threads), const(count * step))) for name in "xy")
    with (
        b.loop("p", threads, "parallel") as p,
        b.loop("r", repeat),
        b.loop("k", count) as k,
        b.loop("j", COPY_VECTORS, "unroll") as j,
    ):
        b.store(y, (p, k * step + j * lanes), x.at(p, k * step + j * lanes, lanes=lanes), lanes)
    operands = [data, data.view(np.uint8)[data.nbytes // 128 * 64 :]]
    call = bind(Kernel((Func("copy", (x, y), b.block()),)), target, operands, threads)
    return Probe("copy", call, 0, 8 * threads * count * step * repeat)


def empty_probe(target: CpuTarget) -> Probe:
    """A kernel that stores one number: what a call costs."""
    b = Builder()
    x = Buffer("x", f32, (const(16),))
    b.store(x, (0,), const(0.0, f32))
    return Probe("call", bind(Kernel((Func("nothing", (x,), b.block()),)), target, [aligned_empty(64)]), 0)


def bind(kernel: Kernel, target: CpuTarget, buffers: Sequence[Array], threads: int = 1) -> Callable[[], None]:
    """Bind a kernel to its buffers, which stay alive, as a function; its parallel loop uses the threads."""
    places = tuple(MemoryRef("buffer", k) for k in range(len(buffers)))
    texts = emit_kernel(kernel, "k_bound", target.feature_set), entry_text([Call("k_bound", places, places, (), True)])
    loaded = load_objects([compile_text(t, target.cpu, target.features) for t in texts])
    entry, frame, launch = loaded.address("entry"), Frame(64), runtime().launch
    pointers = (ctypes.c_void_p * len(buffers))(*(b.ctypes.data for b in buffers))
    address = ctypes.addressof(pointers)

    def call() -> None:
        launch(entry, frame.address, address, 0, threads)

    call.keep = (loaded, frame, buffers, pointers)  # type: ignore[attr-defined]
    return call
