"""Schedules of scans, in which each element combines those before it in its row: cumsum, cumprod, in either direction.

A warp for each row where there are many, else a block. Other recurrences have only a thread for each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates.common import collapsed, fixed, fused, outer_loops
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import free
from dnnc.ir.loops.stmt import For, If, Kernel
from dnnc.passes.schedule.gpu import wrap
from dnnc.passes.schedule.loops import reorder, single
from dnnc.passes.schedule.problem import Knobs, Problem
from dnnc.passes.schedule.scan import scan
from dnnc.passes.schedule.state import Schedule, loops

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

ORDER = ("team", "width")
WARP = 32


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Knobs: threads for a row, rows a block, neighbours that a thread takes at a time."""
    if problem.kind not in ("reduce", "sequence") or not fixed(problem) or len(problem.lowered.reductions) != 1:
        return []
    s = Schedule(problem.kernel)
    try:
        row, n, count = arranged(s, problem)
        s.apply(scan, row, WARP, 1, 4)
    except ScheduleError:
        return []
    threads = WARP
    while threads < 512 and threads * 8 <= n and count * threads < target.sms * 1024:
        threads *= 2
    sizes = dict.fromkeys((threads, min(threads * 2, 512), WARP))
    return [(("team", t), ("rows", 4 if t == WARP else 1), ("width", 4)) for t in sizes]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Teams of all sizes, warps of several rows a block, neighbours of a thread."""
    teams = [(WARP, rows) for rows in (4, 1, 2, 8, 16)] + [
        (t, 1) for t in (64, 128, 256, 512, 1024) if t <= target.max_threads
    ]
    return [(("team", t), ("rows", rows), ("width", width)) for width in (4, 2, 8, 1) for t, rows in teams]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    s = Schedule(problem.kernel)
    row, _, _ = arranged(s, problem)
    return s.apply(scan, row, int(knobs["team"]), int(knobs["rows"]), int(knobs["width"])).done()


def arranged(s: Schedule, problem: Problem) -> tuple[str, int, int]:
    """Return a kernel as `for rows: for s: {..}`: the row loop, a row's length, and the number of rows."""
    collapsed(s.apply(single, *(n for n in problem.lowered.out_loops if s.extent(n) == 1)))
    names = outer_loops(s, problem.lowered.out_loops)
    guards = [x for loop in loops(s.body) for x in loop.body if isinstance(x, If)]
    along = [n for n in names if guards and s.loop(n).var in free(guards[0].cond)]
    if len(along) != 1 or len(guards) != 1:
        raise ScheduleError("no loop decides how far a sum goes")
    others = [n for n in names if n != along[0]]
    if others and names[-1] != along[0]:
        s.apply(reorder, *others, along[0])
    if not others:
        s.apply(wrap, "p")
        others = ["p"]
    row = fused(s, others, "p")
    if not isinstance(s.loop(row).body[0], For):
        raise ScheduleError("the rows are no single loop")
    return row, int(s.extent(along[0])), int(s.extent(row))  # type: ignore[arg-type]
