"""Recipe for prefix sums (cumsum, cumprod): one step for each element, in order.

Where columns lie side by side in memory, vectors go over them. Where sums run along memory, several rows take their
steps in turns, so that no addition waits for the one before it: a core stores one element a cycle, near memory's rate.
"""

from __future__ import annotations

from collections.abc import Mapping

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates.common import fused, parallel_outer, worth
from dnnc.backends.llvm.templates.maps import lanes_for, shares
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, const, free, unwrap
from dnnc.ir.loops.stmt import For, If, Kernel
from dnnc.ir.types import product
from dnnc.passes.schedule.gpu import wrap
from dnnc.passes.schedule.loops import annotate, reorder, single
from dnnc.passes.schedule.memory import vectorize
from dnnc.passes.schedule.problem import Knobs, Problem, varied
from dnnc.passes.schedule.running import LANE, running
from dnnc.passes.schedule.state import Schedule, loops, only

ORDER: tuple[str, ...] = ()  # each sum is added up in the order of its elements
# whose additions are under way at once, as many as an addition takes cycles; each is a stream of memory, and caches
# follow few
ROWS = 4
VECTORS = 8, 4, 2, 1  # of columns side by side: longer pieces of memory, and no fewer than two pieces for each thread


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    if problem.kind != "reduce" or len(problem.lowered.reductions) != 1:
        return []
    s = Schedule(problem.kernel)
    try:
        others, columns = _arranged(s, problem)
        lanes = lanes_for(problem, target)
        found = (("lanes", lanes * (_vectors(s, others, lanes, target) if columns else 1)), ("rows", ROWS))
        apply(problem, dict(found), target)
    except ScheduleError:
        return []
    return [found]


def _vectors(s: Schedule, others: list[str], lanes: int, target: CpuTarget) -> int:
    """Vectors of columns side by side."""
    n, outer = s.extent(others[-1]), product([s.extent(name) for name in others[:-1]])
    if not isinstance(n, int) or not isinstance(outer, int):
        return 1
    return next(k for k in VECTORS if k == 1 or outer * (n // (k * lanes)) >= 2 * target.threads)


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """Vectors, rows under way at once, and whether one thread does all."""
    out: list[Knobs] = []
    for first in candidates(problem, target):
        lanes = int(dict(first)["lanes"])
        sizes = [
            first,
            *(varied(first, lanes=n) for n in (lanes // 2, 2 * lanes) if n > 1),
            *(varied(first, rows=n) for n in (1, 2, 4, 16)),
        ]
        out += [*sizes, *(varied(k, **one) for one in shares(problem) for k in sizes)]
    return out


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    s = Schedule(problem.kernel)
    others, columns = _arranged(s, problem)
    work = unwrap(const(product([*(s.extent(n) for n in others), only(s.loop(others[-1])).extent])))
    mark = s.mark()
    try:
        _grouped(s, others[-1], int(knobs["lanes"]), True) if columns else _grouped(
            s, others[-1], int(knobs["rows"]), False
        )
    except ScheduleError:
        if not columns:
            raise
        s.restore(mark)
        _grouped(s, others[-1], int(knobs["rows"]), False)
    parallel_outer(s, [*others[:-1], others[-1] + "o"], worth(knobs, work))
    return s.done()


def _arranged(s: Schedule, problem: Problem) -> tuple[list[str], bool]:
    """Bring the loop along which sums run inside; the other loops, and whether these walk memory in order."""
    if any(s.extent(n) == 0 for n in problem.lowered.out_loops):
        raise ScheduleError("there is nothing to add up")
    s.apply(single, *(n for n in problem.lowered.out_loops if s.extent(n) == 1)).collapse()
    names = [n for n in problem.lowered.out_loops if s.has(n)]
    guards = [x for loop in loops(s.body) for x in loop.body if isinstance(x, If)]
    along = [n for n in names if len(guards) == 1 and s.loop(n).var in free(guards[0].cond)]
    if len(along) != 1:
        raise ScheduleError("no loop decides how far a sum goes")
    others = [n for n in names if n != along[0]]
    if not others:
        s.apply(wrap, "p")
        return ["p"], False
    if names[-1] != along[0]:
        s.apply(reorder, *others, along[0])
        return others, True
    return [fused(s, others)] if isinstance(s.loop(others[0]).body[0], For) else others, False


def _grouped(s: Schedule, around: str, width: int, vector: bool) -> None:
    """Take iterations of a loop together, as the lanes of a vector or one by one."""
    n: int | Expr = s.extent(around)
    if isinstance(n, int) and n < width and (not vector or n & (n - 1) == 0):
        width = n
    overlap = not vector and isinstance(n, int)
    s.apply(running, around, width, overlap)
    if vector and width > 1:
        s.apply(vectorize, LANE, f"{LANE}_1")
    else:
        s.apply(annotate, "unroll", LANE, f"{LANE}_1")
