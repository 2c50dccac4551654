"""Recipe for scatters: shares of the result that walk all updates in their order, vectors along the columns.

A share is a range of a batch, of columns, or of the rows that data names; the same bits whatever their number. Where
columns are cut, no update is looked at in vain, but rows are written in pieces: for few rows, or updates by element.
"""

from __future__ import annotations

from collections.abc import Mapping

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.pool import SERIAL_BELOW
from dnnc.backends.llvm.templates.common import worth
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Load, free, value, walk
from dnnc.ir.loops.stmt import For, Kernel
from dnnc.passes.lower.scatter import Scattered
from dnnc.passes.schedule.loops import annotate, split
from dnnc.passes.schedule.memory import vectorize
from dnnc.passes.schedule.owners import LINE, Places, by_axis, by_rows
from dnnc.passes.schedule.problem import Knobs, Problem, varied
from dnnc.passes.schedule.state import Schedule, loops

ORDER: tuple[str, ...] = ()  # updates of an element keep their order
SLAB = 4 * LINE  # bytes of a row below which a share of columns is no stream
FEW_ROWS = 8  # of a thread, from which on threads have about as many updates each
UNROLLED = 8  # vectors of a row that are no loop
LISTED = 16  # bytes for each update that a share lists


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    s = problem.form
    if not isinstance(s, Scattered):
        return []
    return [(("lanes", _lanes(s, target)), ("cut", _cut(s, target)))]


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """Every axis that can be cut, the rows, and one thread for all."""
    s = problem.form
    if not isinstance(s, Scattered):
        return []
    cuts = [-2, -1, *(k for k in s.whole if value(s.out.shape[k]) is not None)]
    return [varied(first, cut=cut) for first in candidates(problem, target) for cut in cuts]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    """Knobs: lanes; cut: the axis that is cut into shares, -1 for rows, -2 for none."""
    s, sched = problem.form, Schedule(problem.kernel)
    assert isinstance(s, Scattered)
    cut, lanes, work = int(knobs["cut"]), int(knobs["lanes"]), worth(knobs, s.elements)
    empty = any(value(d) == 0 for d in (*s.extents, *s.out.shape))
    if cut == -2 or empty or (isinstance(work, int) and work < SERIAL_BELOW):
        _vectors(sched, s, lanes)
        return sched.done()
    if cut >= 0:
        sched.body = by_axis(s, cut, _parts(s, cut, target))
    else:
        places = Places.of(s)
        rows = value(places.count)
        parts = target.threads if rows is None else max(min(target.threads, rows), 1)
        width = value(places.width)
        wide = width is not None and width * s.out.dtype.bytes >= LINE
        sched.body = by_rows(s, parts, _power(target.l1 // 4 // LISTED), wide)
    _vectors(sched.collapse(*([s.out.name] if cut >= 0 else [])), s, lanes)
    (outer,) = sched.body
    assert isinstance(outer, For)
    sched.body = (For(outer.var, outer.lo, outer.hi, "parallel", outer.body),)
    return sched.done()


def _lanes(s: Scattered, target: CpuTarget) -> int:
    """Lanes of the widest type on a row; fewer if rows are whole vectors then, so that updates pass on."""
    widest = target.vector_bits // 8
    along = {v for v in (*s.axes[-1:], *s.over[-1:])}
    read = [
        x.buf.dtype
        for e in (s.value, s.initial)
        if e is not None
        for x in walk(e)
        if isinstance(x, Load) and not along.isdisjoint(free(x))
    ]
    lanes = max(widest // max(max(t.computed.bytes, 4) for t in (s.out.dtype, *read)), 2)
    width = value(s.out.shape[len(s.axes) - 1]) if s.axes else None
    whole = [n for n in (lanes, lanes // 2, lanes // 4) if width is not None and n > 1 and width % n == 0]
    return whole[0] if whole else lanes


def _cut(s: Scattered, target: CpuTarget) -> int:
    """What to cut: the outermost axis that all threads have a good part of, else the rows."""
    if target.threads == 1:
        return -2
    size, places = s.out.dtype.bytes, Places.of(s)
    sizes = [value(d) for d in s.out.shape]
    rows = value(places.count)
    columns = [k for k, _ in places.columns]
    for k in sorted(s.whole):
        n, inner = sizes[k], sizes[k + 1 :]
        if n is None or None in inner or n < target.threads:
            continue
        if k in columns and not _together(s, k) and (rows is None or rows >= FEW_ROWS * target.threads):
            continue
        slab = n // target.threads * size
        for d in inner:
            slab *= d or 0
        if slab >= SLAB or k == 0 or k not in columns:
            return k
    return -1


def _together(s: Scattered, axis: int) -> bool:
    """Do the updates of one place along an axis lie together?"""
    return s.whole[axis] == axis and all(k > axis for k in s.named)


def _power(n: int) -> int:
    """The largest power of two that is not more."""
    return 1 << (n.bit_length() - 1)


def _parts(s: Scattered, axis: int, target: CpuTarget) -> int:
    """Share an axis: by places where a share's updates are contiguous, else one per thread, which walks all."""
    n = value(s.out.shape[axis])
    if n is None:
        raise ScheduleError("the size of the axis that is cut is known at run time only")
    return n if _together(s, axis) and axis < len(s.axes) - 1 else max(min(n, target.threads), 1)


def _vectors(sched: Schedule, s: Scattered, lanes: int) -> None:
    """Make vectors of the innermost loops that walk along a row, or list rows whose numbers need no division."""
    places = Places.of(s)
    prefixes = "iu" + "k" * (len(places.walked) <= 1) + "w" * (len(places.rows) <= 1)
    for loop in [x for x in loops(sched.body) if not any(isinstance(y, For) for y in loops(x.body))]:
        name = loop.var.name
        n = value(loop.extent)
        if n == 1 or name[0] not in prefixes or not sched.has(name):
            continue
        mark = sched.mark()
        try:
            sched.apply(split, name, lanes, (name + "o", name + "v"), tail="guard")
            sched.apply(vectorize, name + "v")
            if isinstance(n, int) and n <= UNROLLED * lanes:
                sched.apply(annotate, "unroll", name + "o")
        except ScheduleError:
            sched.restore(mark)
