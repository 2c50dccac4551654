"""The entry function of a program: one native call that runs every kernel in order on all threads.

`i64 entry(ptr frame, ptr buffers, ptr dims, i64 tid, i64 nthreads)`. Buffers are the inputs, then the outputs. Only this function knows
where values lie: offsets into the arena are literals in a static program and loaded from Frame.offsets in a symbolic one. A barrier
stands between two kernels only where data crosses threads: one reads or overwrites what the other wrote or reads.

With `flush` denormal numbers are taken and given as zero while it runs: every thread sets its own control register, and sets it back.

A timed entry function does the same and notes on each thread the time between any two of its steps: what a profile is made of.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass

from dnnc.backends.runtime import FRAME_ARENA, FRAME_BARRIER, FRAME_CONSTANTS, FRAME_OFFSETS, FRAME_STATUS


@dataclass(frozen=True)
class Place:
    """Memory of one argument: `space` is "buffer" (number), "constant" (byte offset), "arena" (slot; offset and size when static).

    `inside`: the byte at which the argument begins within it; the offset of a static plan counts it already.
    """

    space: str
    number: int
    offset: int = -1
    nbytes: int = -1
    inside: int = 0

    def meets(self, other: Place) -> bool:
        """May the two overlap?"""
        if self.space != other.space or self.space == "constant":
            return False
        if self.space == "buffer":
            apart = self.nbytes >= 0 <= other.nbytes and (self.inside + self.nbytes <= other.inside or other.inside + other.nbytes <= self.inside)
            return self.number == other.number and not apart
        if self.offset < 0 or other.offset < 0:
            return True  # a symbolic plan: offsets differ from call to call
        return self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes


@dataclass(frozen=True)
class Call:
    """One kernel: `writes` are among `args`; `dims` are positions in the dims array."""

    symbol: str
    args: tuple[Place, ...]
    writes: tuple[Place, ...]
    dims: tuple[int, ...]
    parallel: bool


def barriers(calls: list[Call]) -> list[bool]:
    """For each call: must all threads meet before it?"""
    out: list[bool] = []
    reads: list[Place] = []
    writes: list[Place] = []
    crowd = False  # has a parallel kernel run since the last barrier?
    for c in calls:
        own = [a for a in c.args if a not in c.writes]
        conflict = any(a.meets(w) for a in own for w in writes) or any(w.meets(x) for w in c.writes for x in (*writes, *reads))
        need = conflict and (crowd or c.parallel)  # kernels of thread 0 alone are in order anyway
        if need:
            reads, writes, crowd = [], [], False
        out.append(need)
        reads += own
        writes += c.writes
        crowd = crowd or c.parallel
    return out


def entry_text(calls: list[Call], name: str = "entry", flush: bool = False) -> str:
    """The LLVM module of an entry function; kernels are declared, to be linked by symbol."""
    e = _Entry(flush)
    for need, c in zip(barriers(calls), calls):
        if need:
            e.barrier()
        e.call(c, f"@{c.symbol}")
    decls = sorted({f"declare void @{c.symbol}({', '.join(['i64'] * len(c.dims) + ['ptr'] * len(c.args) + ['ptr', 'i64', 'i64'])})" for c in calls})
    return "\n".join([*decls, *e.declarations(), *e.function(name)]) + "\n"


# --- time ---------------------------------------------------------------------------------------------------------------------


def stamp_places(calls: list[Call]) -> list[tuple[int, int]]:
    """For each call: where a thread notes the time before it, and after it. Place 0 is for the start of the thread.

    Only a barrier lies between the end of one call and the start of the next, so without one they share a place.
    """
    out: list[tuple[int, int]] = []
    last = 0
    for need in barriers(calls):
        before = last + need
        last = before + 1
        out.append((before, last))
    return out


def timed_entry_text(calls: list[Call], addresses: Mapping[str, int], buffer: int, stride: int, flush: bool = False) -> str:
    """The LLVM module of an entry function that notes the time: `entry`, and `i64 ticks()`, the clock that it reads.

    Args:
        calls: as for `entry_text`.
        addresses: of the kernels by symbol: they are in memory already, and nothing is linked.
        buffer: which of the buffers is int64[threads, stride], written in places by `stamp_places`.
        stride: int64 of a thread's row. Rows should not share cache lines.
        flush: as for `entry_text`.
    """
    e = _Entry(flush)
    e.stamps(buffer, stride)
    e.stamp(0)
    for need, c, (before, after) in zip(barriers(calls), calls, stamp_places(calls)):
        if need:
            e.barrier()
            e.stamp(before)
        e.call(c, f"inttoptr (i64 {addresses[c.symbol]} to ptr)")
        e.stamp(after)
    counter = f"llvm.{tick_counter()}"
    ticks = ["define i64 @ticks() nounwind {", f"  %t = call i64 @{counter}()", "  ret i64 %t", "}"]
    return "\n".join([f"declare i64 @{counter}()", *ticks, *e.declarations(), *e.function("entry")]) + "\n"


def tick_counter() -> str:
    """The intrinsic of a counter that all cores share and that user code may read: on x86 the time stamp counter, on ARM the virtual timer."""
    return "readsteadycounter" if platform.machine().lower() in ("aarch64", "arm64") else "readcyclecounter"


# --- text ---------------------------------------------------------------------------------------------------------------------


FLUSH = 0x8040  # of MXCSR: results that are denormal are 0, and so are operands


def can_flush() -> bool:
    """Is there a register here that makes denormals zero? Only that of x86 is known; elsewhere `flush` changes nothing."""
    return platform.machine().lower() in ("x86_64", "amd64")


class _Entry:
    def __init__(self, flush: bool = False) -> None:
        self.flush = flush and can_flush()
        self.top: list[str] = []
        self.lines: list[str] = []
        self.known: dict[tuple[str, int, int, int], str] = {}
        self.count = 0

    def function(self, name: str) -> list[str]:
        """The lines of the whole function."""
        head = f"define i64 @{name}(ptr %frame, ptr %buffers, ptr %dims, i64 %tid, i64 %nthreads) nounwind {{"
        tail = [f"  %status.p = getelementptr i64, ptr %frame, i64 {FRAME_STATUS}", "  %status = load i64, ptr %status.p", "  ret i64 %status", "}"]
        before, after = self.control()
        return [head, "entry:", *before, *self.top, *self.lines, *after, *tail]

    def declarations(self) -> list[str]:
        return ["declare void @llvm.x86.sse.stmxcsr(ptr)", "declare void @llvm.x86.sse.ldmxcsr(ptr)"] if self.flush else []

    def control(self) -> tuple[list[str], list[str]]:
        """What sets the control register of floating point, and what sets it back."""
        if not self.flush:
            return [], []
        change = ["  %control = load i32, ptr %control.p", f"  %flushing = or i32 %control, {FLUSH}", "  store i32 %flushing, ptr %flushing.p"]
        before = ["  %control.p = alloca i32", "  %flushing.p = alloca i32", "  call void @llvm.x86.sse.stmxcsr(ptr %control.p)", *change]
        return [*before, "  call void @llvm.x86.sse.ldmxcsr(ptr %flushing.p)"], ["  call void @llvm.x86.sse.ldmxcsr(ptr %control.p)"]

    def slot(self, k: int, what: str) -> str:
        """A pointer kept in the frame, loaded once."""
        key = ("frame", k, 0, 0)
        if key not in self.known:
            self.top += [f"  %{what}.p = getelementptr i64, ptr %frame, i64 {k}", f"  %{what} = load ptr, ptr %{what}.p"]
            self.known[key] = f"%{what}"
        return self.known[key]

    def address(self, p: Place) -> str:
        key = (p.space, p.number, p.offset, p.inside)
        if key in self.known:
            return self.known[key]
        self.count += 1
        v = f"%a{self.count}"
        if p.space == "buffer":
            whole = f"{v}.b" if p.inside else v
            self.top += [f"  {v}.p = getelementptr ptr, ptr %buffers, i64 {p.number}", f"  {whole} = load ptr, ptr {v}.p"]
            if p.inside:
                self.top.append(f"  {v} = getelementptr i8, ptr {whole}, i64 {p.inside}")
        elif p.space == "constant":
            self.top.append(f"  {v} = getelementptr i8, ptr {self.slot(FRAME_CONSTANTS, 'constants')}, i64 {p.number}")
        elif p.offset >= 0:
            self.top.append(f"  {v} = getelementptr i8, ptr {self.slot(FRAME_ARENA, 'arena')}, i64 {p.offset}")
        else:
            offsets, arena = self.slot(FRAME_OFFSETS, "offsets"), self.slot(FRAME_ARENA, "arena")
            self.top += [f"  {v}.p = getelementptr i64, ptr {offsets}, i64 {p.number}", f"  {v}.o = load i64, ptr {v}.p"]
            self.top.append(
                f"  {v}.s = getelementptr i8, ptr {arena}, i64 {v}.o" if p.inside else f"  {v} = getelementptr i8, ptr {arena}, i64 {v}.o"
            )
            if p.inside:
                self.top.append(f"  {v} = getelementptr i8, ptr {v}.s, i64 {p.inside}")
        self.known[key] = v
        return v

    def dim(self, k: int) -> str:
        key = ("dim", k, 0, 0)
        if key not in self.known:
            self.top += [f"  %d{k}.p = getelementptr i64, ptr %dims, i64 {k}", f"  %d{k} = load i64, ptr %d{k}.p"]
            self.known[key] = f"%d{k}"
        return self.known[key]

    def barrier(self) -> None:
        self.lines.append(f"  call void {self.slot(FRAME_BARRIER, 'barrier')}(ptr %frame)")

    def stamps(self, buffer: int, stride: int) -> None:
        """The row of this thread in the buffer of stamps."""
        self.top += [f"  %row = mul i64 %tid, {stride}", f"  %stamps = getelementptr i64, ptr {self.address(Place('buffer', buffer))}, i64 %row"]

    def stamp(self, place: int) -> None:
        self.lines += [
            f"  %t{place} = call i64 @llvm.{tick_counter()}()",
            f"  %t{place}.p = getelementptr i64, ptr %stamps, i64 {place}",
            f"  store i64 %t{place}, ptr %t{place}.p",
        ]

    def call(self, c: Call, callee: str) -> None:
        args = [f"i64 {self.dim(k)}" for k in c.dims] + [f"ptr {self.address(a)}" for a in c.args]
        text = f"  call void {callee}({', '.join([*args, 'ptr %frame', 'i64 %tid', 'i64 %nthreads'])})"
        if c.parallel:
            self.lines.append(text)
            return
        self.count += 1
        k = self.count
        if "%alone" not in self.known.values():
            self.top.append("  %alone = icmp eq i64 %tid, 0")
            self.known["alone", 0, 0, 0] = "%alone"
        self.lines += [f"  br i1 %alone, label %s{k}, label %n{k}", f"s{k}:", text, f"  br label %n{k}", f"n{k}:"]
