"""One entry function for all programs without loops: it reads what to call from a table, so that a new program compiles nothing.

In: calls with places, and the addresses of their kernels. Out: a table of int64, and the address of `i64 plan(frame, bases, table, tid,
nthreads)`, which the pool runs like any entry function. `bases` are addresses: the arena, the constants, the buffers of the call; then the
sizes that a program with a symbolic size is told.
A program's own entry function saves about a nanosecond per argument and costs LLVM four milliseconds: models have one, expressions do not.

    table ::= record* 0          record ::= kernel address, flags, number of arguments, (base, bytes)*          flags: BARRIER | PARALLEL

Kernels take their arguments, then frame, tid and nthreads, all in the integer class of the C calling convention, in which a caller may pass
more than the callee looks at: one call of WIDTHS words serves every kernel with fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dnnc.backends.cache import KernelCache
from dnnc.backends.llvm.compile import Loaded, cached_object, load_objects
from dnnc.backends.llvm.entry import barriers
from dnnc.backends.places import Call, Place
from dnnc.backends.runtime import FRAME_BARRIER, FRAME_STATUS, has_threads

BARRIER, PARALLEL = 1, 2
WIDTHS = (8, 16, 32, 64)  # words that a call may pass
MOST_ARGUMENTS = WIDTHS[-1] - 3
ARENA, CONSTANTS, BUFFERS = 0, 1, 2  # positions among the bases
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
  store i64 %nthreads, ptr %nthreads.p
  %total = add i64 %count, 3
  br label %try{WIDTHS[0]}""".splitlines()

_TAIL = f"""\
try{2 * WIDTHS[-1]}:
  br label %step
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
    out = [f"try{width}:", f"  %fits{width} = icmp ule i64 %total, {width}", f"  br i1 %fits{width}, label %do{width}, label %try{2 * width}"]
    out.append(f"do{width}:")
    for k, w in enumerate(words):
        out += [f"  {w}.p = getelementptr i64, ptr %words, i64 {k}", f"  {w} = load i64, ptr {w}.p"]
    return [*out, f"  call void %kernel({', '.join(f'i64 {w}' for w in words)})", "  br label %step"]


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
    """One call: which kernel, its flags, and base and bytes of each argument in turn. Plain data, which a cache keeps."""

    symbol: str
    flags: int
    args: tuple[int, ...]


def records_of(calls: Sequence[Call], buffers: int = 0) -> list[Record]:
    """Calls as records. `buffers`: how many a call has; sizes stand among the bases behind them."""
    out = []
    for need, c in zip(barriers(calls), calls):
        args = [(BUFFERS + buffers + d, 0) for d in c.dims] + [_based(a) for a in c.args]
        out.append(Record(c.symbol, BARRIER * need + PARALLEL * c.parallel, tuple(word for pair in args for word in pair)))
    return out


def table_of(records: Sequence[Record], addresses: Mapping[str, int]) -> Table:
    """The table of calls. `addresses`: of the kernels by symbol."""
    words: list[int] = []
    for r in records:
        words += [addresses[r.symbol], r.flags, len(r.args) // 2, *r.args]
    return np.array([*words, 0], np.int64)


def _based(p: Place) -> tuple[int, int]:
    if p.space == "buffer":
        return BUFFERS + p.number, p.inside
    return (CONSTANTS, p.number) if p.space == "constant" else (ARENA, p.offset)


def can_run(calls: Sequence[Call]) -> bool:
    """Does the runner take these calls? They have not too many arguments, and know where in the arena these are."""
    return all(len(c.dims) + len(c.args) <= MOST_ARGUMENTS and all(a.space != "arena" or a.offset >= 0 for a in c.args) for c in calls)
