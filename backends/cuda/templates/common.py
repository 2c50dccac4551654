"""What the GPU templates share: the perfect nest of independent output loops on top of a kernel, and its fusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dnnc.ir.bounds import nonneg
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Op, Var, free, terms, value, walk
from dnnc.ir.loops.stmt import Block, Buffer, For, Store, accesses, exprs, walk_stmts
from dnnc.passes.schedule.loops import annotate, fuse, split
from dnnc.passes.schedule.parallel_legality import obstacle
from dnnc.passes.schedule.problem import Knobs, Problem
from dnnc.passes.schedule.state import Schedule

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget


def fixed(problem: Problem) -> bool:
    """Are all sizes known? CUDA programs are specialised to theirs."""
    return not problem.lowered.dims


def collapsed(s: Schedule) -> Schedule:
    """Join axes of buffers, but not those whose indices guards keep inside: guards speak of single axes."""
    return s.collapse(
        *sorted(
            {
                x.buf.name
                for x in accesses(s.body)
                if not all(nonneg(i) and nonneg(d - 1 - i) for i, d in zip(x.idx, x.buf.shape))
            }
        )
    )


def outer_loops(s: Schedule, names: tuple[str, ...]) -> list[str]:
    """Output loops perfectly nested from the top whose iterations may run at once and of which there are some."""
    out: list[str] = []
    body = s.body
    while len(body) == 1 and isinstance(loop := body[0], For) and loop.var.name in names and loop.kind == "range":
        if not value(loop.extent) or obstacle(loop):
            break
        out.append(loop.var.name)
        body = loop.body
    return out


def fused(s: Schedule, names: list[str], name: str) -> str:
    """Fuse a perfect nest into one loop `name`, from the inside out; return the outermost loop's name then."""
    while len(names) > 1:
        try:
            s.apply(fuse, names[-2], names[-1], f"{name}{len(names)}")
        except ScheduleError:
            break
        names = [*names[:-2], f"{name}{len(names)}"]
    return names[0]


def offsets(b: Block) -> list[tuple[Buffer, Expr]]:
    """The buffer and the offset of every access to parameters in a block, stores included."""
    reads = [(x.buf, x.buf.offset(x.idx)) for x in accesses(b) if x.buf.space == "global"]
    return reads + [
        (s.buf, s.buf.offset(s.idx)) for s in walk_stmts(b) if isinstance(s, Store) and s.buf.space == "global"
    ]


def walks(b: Block, v: Var) -> list[tuple[Buffer, Expr]]:
    """The accesses of a block that move by one element when v does."""
    return [(buf, e) for buf, e in offsets(b) if _steps(e, v)]


def _steps(e: Expr, v: Var) -> bool:
    ts, _ = terms(e)
    return dict(ts).get(v) == 1 and not any(v in free(t) for t, _ in ts if t is not v)


def jumps(b: Block, v: Var) -> int:
    """How many accesses of a block move by more than one element when v does."""
    return sum(v in free(e) and not _steps(e, v) for _, e in offsets(b))


def width_of(s: Schedule, names: Sequence[str], most: int = 16, ragged: bool = False) -> int:
    """Elements that a thread moves at once in all loops: up to `most` bytes, aligned. `ragged`: fewer at the end."""
    found = [(s.loop(n), walks(s.loop(n).body, s.loop(n).var)) for n in names]
    smallest = min((buf.dtype.bytes for _, ws in found for buf, _ in ws), default=most)
    width = most // smallest
    while width > 1 and not all(_fits(loop, ws, width, ragged) for loop, ws in found):
        width //= 2
    return width


def _fits(loop: For, ws: list[tuple[Buffer, Expr]], width: int, ragged: bool) -> bool:
    if not ragged and value(loop.extent % width) != 0:
        return False
    for _, e in ws:
        ts, k = terms(e)
        if k % width or any(c % width for t, c in ts if t is not loop.var):
            return False
    return True


def flattened(s: Schedule, names: Sequence[str], width: int) -> str:
    """Make a nest a loop over chunks of `width` elements with an unrolled inner loop; return the loop's name."""
    names = list(names)
    if width > 1:
        s.apply(split, names[-1], width, (names[-1] + "c", names[-1] + "v")).apply(annotate, "unroll", names[-1] + "v")
        names[-1] += "c"
    return fused(s, names, names[-1] + "f")


def joined(s: Schedule, names: Sequence[str]) -> list[str]:
    """Fuse neighbours of a perfect nest that walk memory in order with no harder index; return the loops left."""
    names = list(names)
    for at in range(len(names) - 2, -1, -1):
        mark, made = s.mark(), f"{names[at]}j"
        try:
            collapsed(s.apply(fuse, names[at], names[at + 1], made))
        except ScheduleError:
            continue
        if divided(s.body, s.loop(made).var):
            s.restore(mark)
        else:
            names[at : at + 2] = [made]
    return names


def divided(b: Block, v: Var) -> bool:
    """Is a quotient or a remainder of v computed anywhere?"""
    return any(
        isinstance(x, Op) and x.name in ("//", "%") and v in free(x)
        for st in walk_stmts(b)
        for e in exprs(st)
        for x in walk(e)
    )


def applies(apply: Callable[[Problem, Any, GpuTarget], Any], problem: Problem, knobs: Knobs, target: GpuTarget) -> bool:
    """Can a template make a kernel with these knobs?"""
    try:
        apply(problem, dict(knobs), target)
    except ScheduleError:
        return False
    return True
