"""The entry function of a program: one native call that runs every kernel in order on all threads.

`i64 entry(ptr frame, ptr buffers, ptr dims, i64 tid, i64 nthreads)`. Buffers are the inputs, then the outputs; what
kernels read of parameters has a table of its own in the frame. Only this function knows where values lie: offsets into
the arena are literals in a static program and loaded from Frame.offsets in a symbolic one. A barrier stands between two
kernels only where data crosses threads: one reads or overwrites what the other wrote or reads.

With `flush` denormal numbers are taken and given as zero while it runs: every thread sets and restores its register.

A timed entry function does the same and notes on each thread the time between any two of its steps: a profile's data.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from dnnc.backends.runtime.frames import (
    FRAME_ARENA,
    FRAME_BARRIER,
    FRAME_BOUND,
    FRAME_CONSTANTS,
    FRAME_OFFSETS,
    FRAME_STATUS,
)
from dnnc.backends.runtime.program import Call, MemoryRef


def barriers(calls: Sequence[Call]) -> list[bool]:
    """For each call: must all threads meet before it?"""
    out: list[bool] = []
    reads: list[MemoryRef] = []
    writes: list[MemoryRef] = []
    crowd = False  # has a parallel kernel run since the last barrier?
    for c in calls:
        own = [a for a in c.args if a not in c.writes]
        conflict = any(a.meets(w) for a in own for w in writes) or any(
            w.meets(x) for w in c.writes for x in (*writes, *reads)
        )
        need = conflict and (crowd or c.parallel)  # kernels of thread 0 alone are in order anyway
        if need:
            reads, writes, crowd = [], [], False
        out.append(need)
        reads += own
        writes += c.writes
        crowd = crowd or c.parallel
    return out


COPY = """\
define internal void @copy_bytes(ptr %to, ptr %from, i64 %n) nounwind {
entry:
  %words = lshr i64 %n, 3
  %aligned = shl i64 %words, 3
  %any = icmp ne i64 %words, 0
  br i1 %any, label %word, label %rest
word:
  %k = phi i64 [0, %entry], [%k1, %word]
  %a = getelementptr i64, ptr %from, i64 %k
  %b = getelementptr i64, ptr %to, i64 %k
  %w = load i64, ptr %a, align 1
  store volatile i64 %w, ptr %b, align 1
  %k1 = add i64 %k, 1
  %more = icmp ult i64 %k1, %words
  br i1 %more, label %word, label %rest
rest:
  %left = icmp ult i64 %aligned, %n
  br i1 %left, label %byte, label %done
byte:
  %j = phi i64 [%aligned, %rest], [%j1, %byte]
  %c = getelementptr i8, ptr %from, i64 %j
  %d = getelementptr i8, ptr %to, i64 %j
  %v = load i8, ptr %c
  store volatile i8 %v, ptr %d
  %j1 = add i64 %j, 1
  %again = icmp ult i64 %j1, %n
  br i1 %again, label %byte, label %done
done:
  ret void
}"""  # volatile: the loop must not become a call of memcpy, which is no symbol that objects may need


def entry_text(calls: Sequence[Call], name: str = "entry", functions: Sequence[str] = (), flush: bool = False) -> str:
    """LLVM module of an entry function that declares kernels. `functions`: loops and branches that `calls` call."""
    e = _called(calls, flush)
    lines = [line for text in functions for line in text.splitlines()]
    if any("@copy_bytes(" in line for line in lines):
        lines += COPY.splitlines()
    defined = {line.split("@")[1].split("(")[0] for line in lines if line.startswith("define ")}
    wanted = sorted({*declarations(calls), *(line for line in lines if line.startswith("declare "))})
    decls = [d for d in wanted if d.split("@")[1].split("(")[0] not in defined]
    bodies = [line for line in lines if not line.startswith("declare ")]
    return "\n".join([*decls, *e.declarations(), *bodies, *e.function(name)]) + "\n"


def declarations(calls: Sequence[Call]) -> list[str]:
    """The kernels that are called, declared, each once."""
    types = {c.symbol: ["i64"] * len(c.dims) + ["ptr"] * len(c.args) + ["ptr", "i64", "i64"] for c in calls}
    return sorted(f"declare void @{symbol}({', '.join(t)})" for symbol, t in types.items())


def body_lines(calls: Sequence[Call], name: str, linkage: str = "internal ") -> list[str]:
    """The lines of a function that makes these calls, with barriers where data crosses threads."""
    return _called(calls).function(name, linkage)


def _called(calls: Sequence[Call], flush: bool = False) -> _Entry:
    e = _Entry(flush)
    for need, c in zip(barriers(calls), calls):
        if need:
            e.barrier()
        e.call(c, f"@{c.symbol}")
    return e


# --- time -------------------------------------------------------------------------------------------------------------


def stamp_places(calls: Sequence[Call]) -> list[tuple[int, int]]:
    """For each call: where a thread notes the time before it, and after it. MemoryRef 0 is for the start of the thread.

    Only a barrier lies between the end of one call and the start of the next, so without one they share a place.
    """
    out: list[tuple[int, int]] = []
    last = 0
    for need in barriers(calls):
        before = last + need
        last = before + 1
        out.append((before, last))
    return out


def timed_entry_text(
    calls: Sequence[Call], addresses: Mapping[str, int], buffer: int, stride: int, flush: bool = False
) -> str:
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
    """The intrinsic of a user-readable counter common to all cores: x86's time stamp, ARM's virtual timer."""
    return "readsteadycounter" if platform.machine().lower() in ("aarch64", "arm64") else "readcyclecounter"


# --- text -------------------------------------------------------------------------------------------------------------


ENTRY = "entry"  # the symbol of an entry function
FLUSH = 0x8040  # of MXCSR: results that are denormal are 0, and so are operands


def can_flush() -> bool:
    """True if a register here makes denormals zero, as on x86; elsewhere `flush` changes nothing."""
    return platform.machine().lower() in ("x86_64", "amd64")


class _Entry:
    def __init__(self, flush: bool = False) -> None:
        self.flush = flush and can_flush()
        self.top: list[str] = []
        self.lines: list[str] = []
        self.known: dict[tuple[str, int, int, int], str] = {}
        self.count = 0

    def function(self, name: str, linkage: str = "") -> list[str]:
        """The lines of the whole function."""
        head = f"define {linkage}i64 @{name}(ptr %frame, ptr %buffers, ptr %dims, i64 %tid, i64 %nthreads) nounwind {{"
        tail = [
            f"  %status.p = getelementptr i64, ptr %frame, i64 {FRAME_STATUS}",
            "  %status = load i64, ptr %status.p",
            "  ret i64 %status",
            "}",
        ]
        before, after = self.control()
        return [head, "entry:", *before, *self.top, *self.lines, *after, *tail]

    def declarations(self) -> list[str]:
        return (
            ["declare void @llvm.x86.sse.stmxcsr(ptr)", "declare void @llvm.x86.sse.ldmxcsr(ptr)"] if self.flush else []
        )

    def control(self) -> tuple[list[str], list[str]]:
        """What sets the control register of floating point, and what sets it back."""
        if not self.flush:
            return [], []
        change = [
            "  %control = load i32, ptr %control.p",
            f"  %flushing = or i32 %control, {FLUSH}",
            "  store i32 %flushing, ptr %flushing.p",
        ]
        before = [
            "  %control.p = alloca i32",
            "  %flushing.p = alloca i32",
            "  call void @llvm.x86.sse.stmxcsr(ptr %control.p)",
            *change,
        ]
        return [*before, "  call void @llvm.x86.sse.ldmxcsr(ptr %flushing.p)"], [
            "  call void @llvm.x86.sse.ldmxcsr(ptr %control.p)"
        ]

    def slot(self, k: int, what: str) -> str:
        """A pointer kept in the frame, loaded once."""
        key = ("frame", k, 0, 0)
        if key not in self.known:
            self.top += [
                f"  %{what}.p = getelementptr i64, ptr %frame, i64 {k}",
                f"  %{what} = load ptr, ptr %{what}.p",
            ]
            self.known[key] = f"%{what}"
        return self.known[key]

    def address(self, p: MemoryRef) -> str:
        if p.space == "size":
            return f"inttoptr (i64 {p.number} to ptr)"
        key = (p.space, p.number, p.offset, p.inside)
        if key in self.known:
            return self.known[key]
        self.count += 1
        v = f"%a{self.count}"
        if p.space in ("buffer", "parameter"):
            whole = f"{v}.b" if p.inside else v
            table = "%buffers" if p.space == "buffer" else self.slot(FRAME_BOUND, "bound")
            self.top += [
                f"  {v}.p = getelementptr ptr, ptr {table}, i64 {p.number}",
                f"  {whole} = load ptr, ptr {v}.p",
            ]
            if p.inside:
                self.top.append(f"  {v} = getelementptr i8, ptr {whole}, i64 {p.inside}")
        elif p.space == "constant":
            self.top.append(f"  {v} = getelementptr i8, ptr {self.slot(FRAME_CONSTANTS, 'constants')}, i64 {p.number}")
        elif p.offset >= 0:
            self.top.append(f"  {v} = getelementptr i8, ptr {self.slot(FRAME_ARENA, 'arena')}, i64 {p.offset}")
        else:
            offsets, arena = self.slot(FRAME_OFFSETS, "offsets"), self.slot(FRAME_ARENA, "arena")
            self.top += [
                f"  {v}.p = getelementptr i64, ptr {offsets}, i64 {p.number}",
                f"  {v}.o = load i64, ptr {v}.p",
            ]
            self.top.append(
                f"  {v}.s = getelementptr i8, ptr {arena}, i64 {v}.o"
                if p.inside
                else f"  {v} = getelementptr i8, ptr {arena}, i64 {v}.o"
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
        self.top += [
            f"  %row = mul i64 %tid, {stride}",
            f"  %stamps = getelementptr i64, ptr {self.address(MemoryRef('buffer', buffer))}, i64 %row",
        ]

    def stamp(self, place: int) -> None:
        self.lines += [
            f"  %t{place} = call i64 @llvm.{tick_counter()}()",
            f"  %t{place}.p = getelementptr i64, ptr %stamps, i64 {place}",
            f"  store i64 %t{place}, ptr %t{place}.p",
        ]

    def call(self, c: Call, callee: str) -> None:
        args = [f"i64 {self.dim(k)}" for k in c.dims] + [f"ptr {self.address(a)}" for a in c.args]
        # thread 0 alone does all of a kernel, though it were written for several
        threads = "i64 %nthreads" if c.parallel else "i64 1"
        text = f"  call void {callee}({', '.join([*args, 'ptr %frame', 'i64 %tid', threads])})"
        if c.parallel:
            self.lines.append(text)
            return
        self.count += 1
        k = self.count
        if "%alone" not in self.known.values():
            self.top.append("  %alone = icmp eq i64 %tid, 0")
            self.known["alone", 0, 0, 0] = "%alone"
        self.lines += [f"  br i1 %alone, label %s{k}, label %n{k}", f"s{k}:", text, f"  br label %n{k}", f"n{k}:"]
