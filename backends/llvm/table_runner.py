"""One entry function for all loop-free programs: it reads its calls from a table, compiling nothing.

In: calls with places, and the addresses of their kernels. Out: a table of int64, and the address of `i64 plan(frame,
bases, table, tid, nthreads)`, which the pool runs like any entry function. `bases` are addresses: the arena, the
constants, 0, to which a kernel's sizes are added, the buffers of the call; then the sizes that a program with a
symbolic size is told, then a counter for each kernel whose shares are claimed. A program's own entry function saves
about a nanosecond per argument and costs LLVM four milliseconds: models have one, expressions do not.

    table  ::= record* 0
    record ::= kernel address, flags, number of arguments, (base, bytes)*
    flags  ::= BARRIER | PARALLEL | CLAIMED

A thread that the system has taken off its core, or whose core is shared with a neighbour, keeps the others waiting if
each has its fixed half of the work. The threads of a kernel that moves much claim its shares one by one instead: there
are SHARES for each thread, a kernel computes share k when it is told to be thread k of so many, and whoever is free
takes the next. Which thread computes a number changes nothing of it.

Kernels take their arguments, then frame, tid and nthreads, all in the integer class of the C calling convention, in
which a caller may pass more than the callee looks at: one call of WIDTHS words serves every kernel with fewer. A
kernel that thread 0 runs alone is told of one thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dnnc.backends.llvm.compile import Loaded, cached_object, load_objects
from dnnc.backends.llvm.entry import barriers
from dnnc.backends.runtime.frames import FRAME_BARRIER, FRAME_STATUS, has_threads
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.program import Call, MemoryRef

BARRIER, PARALLEL, CLAIMED = 1, 2, 4
COUNTER = 8  # bits of the flags below the base that is the counter of a claimed kernel
SHARES = 16  # of a claimed kernel, for each thread
LARGE = (
    8 << 20
)  # bytes that a kernel moves if it is worth claims: a share takes ten microseconds or more, a claim a tenth of one
WIDTHS = (8, 16, 32, 64)  # words that a call may pass
MOST_ARGUMENTS = WIDTHS[-1] - 3
ARENA, CONSTANTS, ZERO, BUFFERS = 0, 1, 2, 3  # positions among the bases
CPU = "x86-64" if has_threads() else "generic"  # of the runner, which only moves addresses

Table = np.ndarray[Any, np.dtype[np.int64]]


def plan_text() -> str:
    """The LLVM module of the runner."""
    return "\n".join([*_HEAD, *(line for w in WIDTHS for line in _call(w)), *_TAIL]) + "\n"


_HEAD = f"""\
define i64 @plan(ptr %frame, ptr %bases, ptr %table, i64 %tid, i64 %nthreads) nounwind {{
entry:
  %words = alloca [{WIDTHS[-1]} x i64], align 16
  %barrier.p = getelementptr i64, ptr %frame, i64 {FRAME_BARRIER}
  %barrier = load ptr, ptr %barrier.p
  %alone = icmp eq i64 %tid, 0
  %frame.i = ptrtoint ptr %frame to i64
  br label %record
record:
  %at = phi ptr [%table, %entry], [%next, %step]
  %kernel.i = load i64, ptr %at
  %end = icmp eq i64 %kernel.i, 0
  br i1 %end, label %done, label %read
read:
  %kernel = inttoptr i64 %kernel.i to ptr
  %flags.p = getelementptr i64, ptr %at, i64 1
  %flags = load i64, ptr %flags.p
  %count.p = getelementptr i64, ptr %at, i64 2
  %count = load i64, ptr %count.p
  %args = getelementptr i64, ptr %at, i64 3
  %twice = shl i64 %count, 1
  %next = getelementptr i64, ptr %args, i64 %twice
  %meet = and i64 %flags, {BARRIER}
  %meets = icmp ne i64 %meet, 0
  br i1 %meets, label %wait, label %who
wait:
  call void %barrier(ptr %frame)
  br label %who
who:
  %all = and i64 %flags, {PARALLEL}
  %alls = icmp ne i64 %all, 0
  %mine = or i1 %alls, %alone
  br i1 %mine, label %arg, label %step
arg:
  %k = phi i64 [0, %who], [%k1, %fill]
  %more = icmp ult i64 %k, %count
  br i1 %more, label %fill, label %last
fill:
  %pair = shl i64 %k, 1
  %base.p = getelementptr i64, ptr %args, i64 %pair
  %base.k = load i64, ptr %base.p
  %bytes.p = getelementptr i64, ptr %base.p, i64 1
  %bytes = load i64, ptr %bytes.p
  %base.a = getelementptr i64, ptr %bases, i64 %base.k
  %base = load i64, ptr %base.a
  %word = add i64 %base, %bytes
  %word.p = getelementptr i64, ptr %words, i64 %k
  store i64 %word, ptr %word.p
  %k1 = add i64 %k, 1
  br label %arg
last:
  %frame.p = getelementptr i64, ptr %words, i64 %count
  store i64 %frame.i, ptr %frame.p
  %tid.p = getelementptr i64, ptr %frame.p, i64 1
  store i64 %tid, ptr %tid.p
  %nthreads.p = getelementptr i64, ptr %frame.p, i64 2
  %sharers = select i1 %alls, i64 %nthreads, i64 1
  store i64 %sharers, ptr %nthreads.p
  %total = add i64 %count, 3
  %claim = and i64 %flags, {CLAIMED}
  %claims.f = icmp ne i64 %claim, 0
  %several = icmp ugt i64 %nthreads, 1
  %claims = and i1 %claims.f, %several
  %counter.k = lshr i64 %flags, {COUNTER}
  %counter.p = getelementptr i64, ptr %bases, i64 %counter.k
  %shares = mul i64 %nthreads, {SHARES}
  %over = add i64 %shares, %nthreads
  %last.v = sub i64 %over, 1
  br i1 %claims, label %next.v, label %try{WIDTHS[0]}
next.v:
  %v = atomicrmw add ptr %counter.p, i64 1 monotonic
  %some = icmp ult i64 %v, %shares
  br i1 %some, label %share, label %spent
share:
  store i64 %v, ptr %tid.p
  store i64 %shares, ptr %nthreads.p
  br label %try{WIDTHS[0]}
spent:
  %final = icmp eq i64 %v, %last.v
  br i1 %final, label %reset, label %step
reset:
  store atomic i64 0, ptr %counter.p monotonic, align 8
  br label %step""".splitlines()

_TAIL = f"""\
try{2 * WIDTHS[-1]}:
  br label %called
called:
  br i1 %claims, label %next.v, label %step
step:
  br label %record
done:
  %status.p = getelementptr i64, ptr %frame, i64 {FRAME_STATUS}
  %status = load i64, ptr %status.p
  ret i64 %status
}}""".splitlines()


def _call(width: int) -> list[str]:
    """Try a call of so many words."""
    words = [f"%w{width}.{k}" for k in range(width)]
    out = [
        f"try{width}:",
        f"  %fits{width} = icmp ule i64 %total, {width}",
        f"  br i1 %fits{width}, label %do{width}, label %try{2 * width}",
    ]
    out.append(f"do{width}:")
    for k, w in enumerate(words):
        out += [f"  {w}.p = getelementptr i64, ptr %words, i64 {k}", f"  {w} = load i64, ptr {w}.p"]
    return [*out, f"  call void %kernel({', '.join(f'i64 {w}' for w in words)})", "  br label %called"]


@dataclass(frozen=True)
class Runner:
    """The loaded runner: `entry` is its address; keep this as long as it may run."""

    loaded: Loaded
    entry: int


@cache
def _loaded(obj: bytes) -> Runner:
    loaded = load_objects([obj])
    return Runner(loaded, loaded.address("plan"))


def runner(kernels: KernelCache | None = None) -> Runner:
    """The runner of this process, compiled or out of a cache."""
    return _loaded(cached_object(plan_text(), CPU, kernels))


@dataclass(frozen=True)
class Record:
    """A call: its kernel, flags, and base and bytes of each argument. Plain data, which a cache keeps."""

    symbol: str
    flags: int
    args: tuple[int, ...]


def records_of(calls: Sequence[Call], buffers: int = 0, apart: Collection[str] = ()) -> list[Record]:
    """Calls as records.

    Args:
        calls: in order.
        buffers: how many a call of the program has; sizes stand among the bases behind them, counters behind all sizes.
        apart: kernels whose threads do not meet within them, by symbol: these may be computed in shares.
    """
    out = []
    counter = BUFFERS + buffers + max((d + 1 for c in calls for d in c.dims), default=0)
    for need, c in zip(barriers(calls), calls):
        args = [(BUFFERS + buffers + d, 0) for d in c.dims] + [_based(a) for a in c.args]
        flags = BARRIER * need + PARALLEL * c.parallel
        if c.parallel and c.symbol in apart and sum(max(a.nbytes, 0) for a in c.args) >= LARGE:
            flags, counter = flags + CLAIMED + (counter << COUNTER), counter + 1
        out.append(Record(c.symbol, flags, tuple(word for pair in args for word in pair)))
    return out


def counters(records: Sequence[Record]) -> int:
    """The counters among the bases of a program."""
    return sum(1 for r in records if r.flags & CLAIMED)


def table_of(records: Sequence[Record], addresses: Mapping[str, int]) -> Table:
    """The table of calls. `addresses`: of the kernels by symbol."""
    words: list[int] = []
    for r in records:
        words += [addresses[r.symbol], r.flags, len(r.args) // 2, *r.args]
    return np.array([*words, 0], np.int64)


def _based(p: MemoryRef) -> tuple[int, int]:
    if p.space == "buffer":
        return BUFFERS + p.number, p.inside
    if p.space == "size":
        return ZERO, p.number
    return (CONSTANTS, p.number) if p.space == "constant" else (ARENA, p.offset)


def can_run(calls: Sequence[Call]) -> bool:
    """Does the runner take these calls? They have not too many arguments, and know where in the arena these are."""
    return all(
        len(c.dims) + len(c.args) <= MOST_ARGUMENTS and all(a.space != "arena" or a.offset >= 0 for a in c.args)
        for c in calls
    )
