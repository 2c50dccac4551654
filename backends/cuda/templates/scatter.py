"""Schedules of scatters: a thread owns elements of the result and walks the updates of its place in their order, so sums have the same bits every time.

Threads have a place each along the axes that the updates have too; where these are few, the elements along the others are cut into ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates.common import fixed
from dnnc.ir.operator.stmt import Kernel
from dnnc.ir.types import product
from dnnc.passes.schedule.owners import by_threads
from dnnc.passes.schedule.problem import Knobs, Problem
from dnnc.passes.schedule.state import Schedule

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

ORDER: tuple[str, ...] = ()  # updates of an element keep their order
BUSY = 512  # threads of a multiprocessor that hide the latency of its loads


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Knobs: ranges of the elements that data names, threads of a block."""
    s = problem.lowered.scattered
    if s is None or not fixed(problem) or problem.lowered.elements == 0:
        return []
    sizes = [int(str(d)) for d in s.out.shape[: len(s.axes)]]
    places = product([n for k, n in enumerate(sizes) if k in s.whole])
    rows = product([n for k, n in enumerate(sizes) if k not in s.whole])
    assert isinstance(places, int) and isinstance(rows, int)
    if not places * rows:
        return []
    shares = max(min(target.sms * BUSY // places, rows), 1)
    return [(("shares", shares), ("threads", 128))]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Fewer and more ranges, blocks of all sizes."""
    found = [dict(k) for k in candidates(problem, target)]
    return [(("shares", max(int(k["shares"]) * m // 4, 1)), ("threads", n)) for k in found for m in (4, 1, 2, 8) for n in (128, 64, 256)]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    s, sched = problem.lowered.scattered, Schedule(problem.kernel)
    assert s is not None
    sched.body = by_threads(s, int(knobs["shares"]), int(knobs["threads"]))
    return sched.done()
