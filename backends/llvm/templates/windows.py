"""Pooling over a blocked image: a register tile of pixels, each a channel vector; taps load once.

for po in range(pixels/mr):                    first and last tile peeled where padding guards their taps
    acc[mr, V] = start
    for taps: acc[im, :] = max(acc[im, :], x[stride*im + tap, :])
    y = epilogue(acc)
"""

from __future__ import annotations

from dnnc.backends.llvm.templates.common import offsets
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import free
from dnnc.ir.loops.stmt import For, If, walk_stmts
from dnnc.passes.schedule.loops import annotate, hoist_guards, narrow, peel, reorder, split
from dnnc.passes.schedule.memory import distribute, vectorize
from dnnc.passes.schedule.problem import Problem
from dnnc.passes.schedule.state import Schedule

MOST_PIXELS = 8  # sums under way at once, which hide each other's latency
MOST_TAPS = 9  # of a row of a window, unrolled


def tile_windows(s: Schedule, problem: Problem, lanes: int, pixels: int = 0) -> bool:
    """Schedule a nest of one window per pixel of a known row; `pixels` of a tile, 0: as many as suit the row."""
    outer = [v for v in problem.form.outer if s.has(v.name)]
    names = [v.name for v in outer]
    if len(problem.form.reductions) != 1 or len(names) < 2 or outer[-1] not in problem.form.panels or problem.inplace:
        return False
    taps = [n for n in problem.lowered.reductions[0] if s.has(n)]
    pixel, lane = names[-2:]
    n = s.extent(pixel)
    if not taps or not isinstance(n, int) or n < 2 or not _meet(s, pixel, taps[-1]):
        return False
    mark = s.mark()
    try:
        _tile(s, pixel, lane, taps, min(pixels, n) or _pixels(n), lanes)
    except ScheduleError:
        s.restore(mark)
        return False
    return True


def _meet(s: Schedule, pixel: str, tap: str) -> bool:
    """Does a load depend on both, and are the taps few?"""
    p, t, count = s.loop(pixel).var, s.loop(tap).var, s.extent(tap)
    return (
        isinstance(count, int)
        and count <= MOST_TAPS
        and any(p in free(e) and t in free(e) for e in offsets(s.loop(pixel).body))
    )


def _pixels(n: int) -> int:
    """Pixels of a tile: of those that compute the fewest twice, the most."""
    return min(range(1, min(n, MOST_PIXELS) + 1), key=lambda m: (-(-n // m) * m if m >= 4 or m == n else 2 * n, -m))


def _guarded(tile: For) -> bool:
    """Do guards or bounds of loops depend on which tile it is?"""
    inside = list(walk_stmts(tile.body))
    bounds = [e for x in inside if isinstance(x, For) for e in (x.lo, x.hi)] + [
        x.cond for x in inside if isinstance(x, If)
    ]
    return any(tile.var in free(e) for e in bounds)


def _tile(s: Schedule, pixel: str, lane: str, taps: list[str], mr: int, lanes: int) -> None:
    s.apply(split, lane, lanes, ("vo", "vi"), tail="guard").apply(split, pixel, mr, ("po", "im"), tail="overlap")
    s.apply(reorder, "po", "vo", "im", "vi").apply(distribute, "im", 2)
    if not s.has("im_2") or s.has("im_3"):
        raise ScheduleError("more than a sum and what is made of it")
    s.apply(reorder, *taps, "im_1", "vi_1").apply(vectorize, "vi", "vi_1", "vi_2").apply(
        annotate, "unroll", "im", "im_1", "im_2"
    )
    s.apply(hoist_guards).apply(narrow).collapse()
    tap = taps[-1]
    copies = [tap]
    if s.has("po") and _guarded(s.loop("po")):
        s.apply(peel, "po", first=1, last=1).apply(narrow)
        copies += [f"{tap}_f0", f"{tap}_l0"]
    s.apply(annotate, "unroll", *(c for c in copies if s.has(c) and isinstance(s.extent(c), int)))
