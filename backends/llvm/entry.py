"""The entry function of a program: one native call that runs every kernel in order on all threads.

`i64 entry(ptr frame, ptr buffers, ptr dims, i64 tid, i64 nthreads)`. Buffers are the inputs, then the outputs. Only this function knows
where values lie: offsets into the arena are literals in a static program and loaded from Frame.offsets in a symbolic one. A barrier
stands between two kernels only where data crosses threads: one reads or overwrites what the other wrote or reads.
"""

from __future__ import annotations

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


def entry_text(calls: list[Call], name: str = "entry") -> str:
    """The LLVM module of an entry function; kernels are declared, to be linked by symbol."""
    e = _Entry()
    for need, c in zip(barriers(calls), calls):
        if need:
            e.barrier()
        e.call(c)
    decls = sorted({f"declare void @{c.symbol}({', '.join(['i64'] * len(c.dims) + ['ptr'] * len(c.args) + ['ptr', 'i64', 'i64'])})" for c in calls})
    head = f"define i64 @{name}(ptr %frame, ptr %buffers, ptr %dims, i64 %tid, i64 %nthreads) nounwind {{"
    tail = [f"  %status.p = getelementptr i64, ptr %frame, i64 {FRAME_STATUS}", "  %status = load i64, ptr %status.p", "  ret i64 %status", "}"]
    return "\n".join([*decls, head, "entry:", *e.top, *e.lines, *tail]) + "\n"


class _Entry:
    def __init__(self) -> None:
        self.top: list[str] = []
        self.lines: list[str] = []
        self.known: dict[tuple[str, int, int, int], str] = {}
        self.count = 0

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

    def call(self, c: Call) -> None:
        args = [f"i64 {self.dim(k)}" for k in c.dims] + [f"ptr {self.address(a)}" for a in c.args]
        text = f"  call void @{c.symbol}({', '.join([*args, 'ptr %frame', 'i64 %tid', 'i64 %nthreads'])})"
        if c.parallel:
            self.lines.append(text)
            return
        self.count += 1
        k = self.count
        if "%alone" not in self.known.values():
            self.top.append("  %alone = icmp eq i64 %tid, 0")
            self.known["alone", 0, 0, 0] = "%alone"
        self.lines += [f"  br i1 %alone, label %s{k}, label %n{k}", f"s{k}:", text, f"  br label %n{k}", f"n{k}:"]
