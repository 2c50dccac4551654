"""Times kernels on this CPU as in a model: the pool's threads, a barrier after each, weights cold.

In: tasks and their kernels' objects. Out: seconds of a call. It runs in a process of its own, for a kernel may end it.

A run is one dispatch of the pool: an entry function, whose text is here, calls the kernel many times. Thread 0 reads
the clock after each barrier, so that the times of single calls are known and neither Python nor the dispatch is in
them. Denormals are zero meanwhile: a kernel that works in place on its own results would soon compute on nothing else.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache, lru_cache
from typing import Any

import numpy as np

from dnnc.backends.base import Built
from dnnc.backends.check import FILL, RED_ZONE
from dnnc.backends.check_cost import MAX_STEPS, unchecked
from dnnc.backends.llvm.check import check_kernel
from dnnc.backends.llvm.compile import compile_text, load_objects
from dnnc.backends.llvm.entry import FLUSH, can_flush, tick_counter
from dnnc.backends.llvm.features import CpuTarget, last_level_cache
from dnnc.backends.llvm.runtime import runtime
from dnnc.backends.runtime.frames import ALIGN, FRAME_BARRIER, FRAME_STATUS, Frame, aligned_empty
from dnnc.backends.runtime.operands import COLD, WARM, Noise, Operands, Rotation, Workload
from dnnc.ir.errors import AccuracyError
from dnnc.ir.loops.stmt import stored
from dnnc.ir.loops.text import parse_kernel
from dnnc.passes.schedule.problem import Choice

Array = np.ndarray[Any, Any]
RUN_SECONDS = 8e-3  # of the calls of one repeat
MOST_CALLS = 2000  # of one repeat
LONG = 5e-3  # seconds of a call that needs none before it to warm up
MOST_SETS = 4096  # places of the weights
KEPT = 4  # tasks whose operands stay in memory
CALIBRATION_SECONDS = 0.02


class CpuBench:
    """Operands, kernels and the clock of one process. `target`: for the number of threads."""

    def __init__(self, target: CpuTarget) -> None:
        self.target = target
        self.cold_bytes = 2 * last_level_cache()
        self.noise = Noise()
        self._data_of = lru_cache(KEPT)(lambda task: _Data(task, self))
        self.tick = _seconds_of_a_tick()

    def load(self, task: Workload, built: Built) -> CpuKernel:
        """Make a kernel ready. InternalError where its code cannot be linked."""
        return CpuKernel(self, self._data_of(task), built)


class _Data:
    """The operands of a task in memory, with zones around those that kernels may not touch."""

    def __init__(self, task: Workload, bench: CpuBench) -> None:
        self.operands = Operands(task)
        each = self.operands.each
        self.rotation = Rotation.over(self.operands, bench.cold_bytes, MOST_SETS, ALIGN)
        self.pools = {t: bench.noise.of(t, n + ALIGN) for t, n in self.rotation.pools.items()}
        sizes = [0 if o.role == COLD else o.nbytes for o in each]
        self.starts = np.cumsum([RED_ZONE, *(-(-n // ALIGN) * ALIGN + RED_ZONE for n in sizes)]).tolist()
        self.memory = aligned_empty(self.starts[-1])
        self.parts = [self.memory[at : at + n] for at, n in zip(self.starts, sizes)]
        ends = [0, *(at + n for at, n in zip(self.starts, sizes))]
        self.zones = [self.memory[end:at] for end, at in zip(ends, self.starts)]
        self.next = 0  # where the rotation stands
        self.reset()
        changed = stored(task.rebuilt[2].kernel.entry.body)
        buffers = task.rebuilt[2].kernel.entry.buffers
        self.inplace = [(p, p.copy()) for p, o, b in zip(self.parts, each, buffers) if o.role == WARM and b in changed]
        self.table = self._addresses()

    def reset(self) -> None:
        """Operands as they were drawn, zones whole."""
        self.memory[:] = FILL
        warm = self.operands.warm()
        for part, o in zip(self.parts, self.operands.each):
            if o.role != COLD:
                part[:] = warm[o.value] if o.role == WARM else 0

    def refresh(self) -> None:
        """The operand that is written over as it was drawn."""
        for part, drawn in self.inplace:
            part[:] = drawn

    def intact(self) -> bool:
        """Is nothing written outside of the operands?"""
        return all((z == FILL).all() for z in self.zones)

    def _addresses(self) -> Array:
        """int64[sets, operands]: the arguments of each call."""
        base, r = self.memory.ctypes.data, self.rotation
        columns = []
        for k, o in enumerate(self.operands.each):
            if k in r.strides:
                start = -(-self.pools[o.dtype].ctypes.data // ALIGN) * ALIGN
                columns.append(start + r.starts[k] + np.arange(r.sets) * r.strides[k])
            else:
                columns.append(np.full(r.sets, base + self.starts[k]))
        return np.stack(columns, 1).astype(np.int64, order="C")


class CpuKernel:
    """A kernel of a task, linked and bound to the operands."""

    def __init__(self, bench: CpuBench, data: _Data, built: Built) -> None:
        self.bench, self.data, self.symbol = bench, data, built.symbol
        target = bench.target
        count = len(data.operands.each)
        entry = _entry(built.symbol, count, bool(built.facts["parallel"]), target.cpu, target.features)
        self.loaded = load_objects([entry, built.code])
        self.frame = Frame(64)
        self.stamps = np.zeros(MOST_CALLS + 2, np.int64)
        self.pointers = np.array([data.table.ctypes.data, self.stamps.ctypes.data], np.int64)
        self.numbers = np.zeros(3, np.int64)  # calls, sets, the first set
        self.entry = self.loaded.address("entry")
        self.expected: float | None = None  # seconds of a call

    def run(self, calls: int) -> Array:
        """Seconds of so many calls, one after the other."""
        self.numbers[:] = calls, self.data.rotation.sets, self.data.next
        threads = self.bench.target.threads
        runtime().launch(self.entry, self.frame.address, self.pointers.ctypes.data, self.numbers.ctypes.data, threads)
        self.data.next = (self.data.next + calls) % self.data.rotation.sets
        return np.diff(self.stamps[: calls + 1]) * self.bench.tick

    def measure(self, limit: float | None = None) -> float:
        """Seconds of a call: lower quartile, or the first past `limit`. AccuracyError: writes outside of operands."""
        self.data.refresh()
        if self.expected is None:
            self.expected = float(self.run(1)[0])
            if not self.data.intact():
                self.data.reset()
                raise AccuracyError(f"{self.symbol} writes outside of its operands")
            if limit is not None and self.expected > max(
                limit, LONG
            ):  # the first call is slower than others, so a short one may still be good
                return self.expected
        if self.expected < LONG:
            self.expected = float(self.run(2)[1])
            if limit is not None and self.expected > 2 * limit:
                return self.expected
        calls = int(np.clip(RUN_SECONDS / max(self.expected, 1e-9), 1, MOST_CALLS))
        self.expected = float(np.quantile(self.run(calls), 0.25))
        return self.expected

    def fastest(self, calls: int) -> float:
        """Seconds of the quickest of some calls."""
        return float(self.run(calls).min())

    def check(self, text: str, choice: Choice) -> bool:
        """Compare with float64 as the gate does. False if that takes too long; AccuracyError for a difference."""
        graph, operands = self.data.operands.task.rebuilt[0], self.data.operands
        step = operands.step(parse_kernel(text), choice)
        check_kernel(graph, step, self.loaded.address(self.symbol))
        return unchecked(step, {}, MAX_STEPS) is None


@cache
def _entry(symbol: str, args: int, parallel: bool, cpu: str, features: str) -> bytes:
    """The object of the entry function for kernels with so many buffers."""
    return compile_text(entry_text(symbol, args, parallel), cpu, features)


def entry_text(symbol: str, args: int, parallel: bool) -> str:
    """An entry function that calls a kernel again and again: `buffers` are the addresses of the table of arguments and
    of the stamps, `dims` the calls to make, the rows of the table, and the first row. Thread 0 calls serial kernels.
    """
    kinds = ", ".join(["ptr"] * args + ["ptr", "i64", "i64"])
    loads = [
        line
        for k in range(args)
        for line in (f"  %p{k} = getelementptr ptr, ptr %row, i64 {k}", f"  %a{k} = load ptr, ptr %p{k}")
    ]  # fmt: skip
    given = ", ".join([*(f"ptr %a{k}" for k in range(args)), "ptr %frame", "i64 %tid", "i64 %nthreads"])
    flush = [
        "  call void @llvm.x86.sse.stmxcsr(ptr %old)", "  %control = load i32, ptr %old",
        f"  %flushing = or i32 %control, {FLUSH}",
        "  store i32 %flushing, ptr %new", "  call void @llvm.x86.sse.ldmxcsr(ptr %new)",
    ] if can_flush() else []  # fmt: skip
    back = ["  call void @llvm.x86.sse.ldmxcsr(ptr %old)"] if can_flush() else []
    branch = "  br label %work" if parallel else "  br i1 %first, label %work, label %meet"
    intrinsics = (
        ["declare void @llvm.x86.sse.stmxcsr(ptr)", "declare void @llvm.x86.sse.ldmxcsr(ptr)"] if can_flush() else []
    )
    lines = [
        f"declare void @{symbol}({kinds})", f"declare i64 @llvm.{tick_counter()}()", *intrinsics,
        "define i64 @entry(ptr %frame, ptr %buffers, ptr %dims, i64 %tid, i64 %nthreads) nounwind {",
        "entry:",
        "  %old = alloca i32", "  %new = alloca i32",
        *flush,
        "  %table = load ptr, ptr %buffers",
        "  %stamps.p = getelementptr ptr, ptr %buffers, i64 1", "  %stamps = load ptr, ptr %stamps.p",
        "  %calls = load i64, ptr %dims",
        "  %sets.p = getelementptr i64, ptr %dims, i64 1", "  %sets = load i64, ptr %sets.p",
        "  %start.p = getelementptr i64, ptr %dims, i64 2", "  %start = load i64, ptr %start.p",
        f"  %barrier.p = getelementptr ptr, ptr %frame, i64 {FRAME_BARRIER}", "  %barrier = load ptr, ptr %barrier.p",
        "  %first = icmp eq i64 %tid, 0",
        "  br label %meet",
        "meet:",
        "  %i = phi i64 [ -1, %entry ], [ %next, %work ]" if parallel else "  %i = phi i64 [ -1, %entry ], [ %next, "
            "%work ], [ %next, %call ]",
        "  call void %barrier(ptr %frame)",
        "  %next = add i64 %i, 1",
        "  br i1 %first, label %stamp, label %check",
        "stamp:",
        f"  %t = call i64 @llvm.{tick_counter()}()", "  %t.p = getelementptr i64, ptr %stamps, i64 %next",
        "  store i64 %t, ptr %t.p",
        "  br label %check",
        "check:",
        "  %more = icmp slt i64 %next, %calls",
        "  br i1 %more, label %call, label %done",
        "call:",
        "  %at = add i64 %start, %next", "  %set = urem i64 %at, %sets", f"  %offset = mul i64 %set, {args}",
        "  %row = getelementptr ptr, ptr %table, i64 %offset",
        *loads,
        branch,
        "work:",
        f"  call void @{symbol}({given})",
        "  br label %meet",
        "done:",
        *back,
        f"  %status.p = getelementptr i64, ptr %frame, i64 {FRAME_STATUS}", "  %status = load i64, ptr %status.p",
        "  ret i64 %status",
        "}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


@cache
def _ticks() -> Any:
    """The clock that entry functions read, as a function."""

    counter = f"llvm.{tick_counter()}"
    text = (
        f"declare i64 @{counter}()\ndefine i64 @ticks() nounwind {{\n  %t = call i64 @{counter}()\n  ret i64 %t\n}}\n"
    )
    loaded = load_objects([compile_text(text, "x86-64" if can_flush() else "generic", "")])
    f: Any = ctypes.CFUNCTYPE(ctypes.c_int64)(loaded.address("ticks"))
    f.loaded = loaded
    return f


def _seconds_of_a_tick() -> float:
    """Against the system's clock."""
    ticks = _ticks()
    start, first = time.perf_counter(), ticks()
    time.sleep(CALIBRATION_SECONDS)
    passed: int = ticks() - first
    return (time.perf_counter() - start) / passed
