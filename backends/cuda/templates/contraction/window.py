"""Windows over channels-last images: depthwise convolutions and pooling; a thread has a few pixels' channel vector.

    for t in threads (over images, rows, pieces of rows, vectors of channels):
        acc[row, lanes] = 0
        for tap: for pixel in unroll(row): if inside: acc[pixel] += x[.., pixel + tap, channels] * w[tap, channels]
        y = epilogue(acc)

Neighbouring threads read neighbouring bytes, 16 at a time; the pixels of a thread share weights and most reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.common import fixed, fused, outer_loops, width_of
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Load, free, terms, value, walk
from dnnc.ir.loops.stmt import For, If, Kernel, accesses, walk_stmts
from dnnc.ir.op import ContractionForm
from dnnc.passes.schedule.gpu import spread
from dnnc.passes.schedule.loops import annotate, hoist_guards, reorder, single, split
from dnnc.passes.schedule.memory import distribute, vectorize
from dnnc.passes.schedule.problem import Knobs, Problem
from dnnc.passes.schedule.state import Schedule, loops

MOST_TAPS = 225
UNROLLED = 49  # taps that are all unrolled, so that the pixels of a thread share loads; of more a row of them
PRODUCTS = 800  # of a thread's code: what unrolling may grow to
ORDER: tuple[str, ...] = ()  # taps are added up one after the other
FEW = 4  # threads a core below which a thread has one pixel


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    found = _parts(problem)
    filters = problem.anchor is not None and problem.anchor.op.contraction is ContractionForm.FILTERS
    if found is None or filters:  # the sums of filters' gradients go over all pixels of all images
        return []
    s, outer, row, lanes = found
    taps, work = _taps(s, problem), lanes
    for n in outer:
        work *= _count(s, n)
    threads = work // lanes // lanes
    if taps > 16 and threads < 32 * target.sms and not any(isinstance(x, If) for x in walk_stmts(s.body)):
        return []  # few outputs of many terms: teams of threads are better
    rows = [
        n
        for n in (4, 2, 1)
        if n <= _count(s, row) and n * taps * lanes <= PRODUCTS and (n == 1 or threads // n >= FEW * 128 * target.sms)
    ]
    return [(("row", n), ("lanes", lanes), ("threads", 128)) for n in (rows or [1])]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Pixels and channels of a thread, threads of a block."""
    found = _parts(problem)
    if found is None:
        return []
    s, _, row, lanes = found
    taps, wide = _taps(s, problem), [n for n in (lanes, lanes // 2, lanes // 4) if n > 1]
    rows = [n for n in (1, 2, 3, 4, 6, 8) if n <= _count(s, row)]
    return [
        (("row", n), ("lanes", w), ("threads", t))
        for t in (128, 256, 64, 512)
        for n in rows
        for w in wide
        if n == 1 or n * min(taps, UNROLLED) * w <= PRODUCTS
    ]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    found = _parts(problem)
    if found is None:
        raise ScheduleError("the nest is no window over channels that lie last")
    s, outer, row, _ = found
    pixels, lanes, channel = int(knobs["row"]), int(knobs["lanes"]), outer[-1]
    s.apply(split, channel, lanes, ("co", "cv"))
    s.apply(split, row, pixels, ("xo", "xi"), tail="guard")
    names = [*("xo" if n == row else n for n in outer[:-1]), "co"]
    s.apply(reorder, *names, "xi", "cv").apply(distribute, "xi", 2)
    red = [n for n in problem.lowered.reductions[0] if s.has(n)]
    s.apply(reorder, *red, "xi_1", "cv_1").apply(vectorize, "cv", "cv_1", "cv_2").apply(hoist_guards)
    unrolled = red if _taps(s, problem) <= UNROLLED else red[-1:]
    s.apply(annotate, "unroll", *(n for n in ("xi", "xi_1", "xi_2", *unrolled) if s.has(n)))
    return s.apply(spread, fused(s, names, "e"), int(knobs["threads"])).done()


def _parts(problem: Problem) -> tuple[Schedule, list[str], str, int] | None:
    """Return the nest without unit loops, its output loops, the one along window rows, and a vector's lanes."""
    if (
        not fixed(problem)
        or problem.kind not in ("contraction", "reduce")
        or len(problem.lowered.reductions) != 1
        or problem.inplace
    ):
        return None
    s = Schedule(problem.kernel)
    s.apply(single, *(x.var.name for x in loops(s.body) if value(x.extent) == 1))
    outer = outer_loops(s, problem.lowered.out_loops)
    taps = _taps(s, problem)
    if len(outer) < 2 or not 1 < taps <= MOST_TAPS or len(s.loop(outer[-1]).body) != 4:
        return None
    channel = s.loop(outer[-1])
    lanes = width_of(s, outer[-1:])
    steps = [x for x in accesses(channel.body) if x.buf.space == "global" and channel.var in free(x.buf.offset(x.idx))]
    if lanes < 2 or not steps or any(dict(terms(x.buf.offset(x.idx))[0]).get(channel.var) != 1 for x in steps):
        return None
    row = next((n for n in reversed(outer[:-1]) if _slides(s, n, problem)), None)
    return None if row is None else (s, outer, row, lanes)


def _taps(s: Schedule, problem: Problem) -> int:
    n = 1
    for name in problem.lowered.reductions[0]:
        n *= _count(s, name) if s.has(name) else 1
    return n


def _count(s: Schedule, name: str) -> int:
    return value(s.loop(name).extent) or 0


def _slides(s: Schedule, name: str, problem: Problem) -> bool:
    """Does a window move along a loop: is there an index of which it and a loop of the sum are terms?"""
    v = s.loop(name).var
    red = {x.var for x in walk_stmts(s.body) if isinstance(x, For) and x.var.name in problem.lowered.reductions[0]}
    indices = [i for x in accesses(s.loop(name).body) if isinstance(x, Load) for i in x.idx]
    return any(v in free(i) and any(e in red for e in walk(i)) for i in indices)
