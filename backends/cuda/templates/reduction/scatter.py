"""Schedules of scatters without atomic additions, so sums have the same bits every time.

Either a thread owns elements of the result and walks all updates of its place: threads have a place each along the axes
that the updates have too; where these are few, the elements along the others are cut into ranges. Or, with the knob
`per`, a block owns rows, whose updates its threads sort and reduce together: work hardly grows with threads, and the
updates of one row are shared by many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates.common import fixed
from dnnc.ir.expr import value
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.types import product
from dnnc.passes.lower.scatter import Scattered
from dnnc.passes.schedule.owners import MOST_FOUND, Places, by_threads
from dnnc.passes.schedule.problem import Knobs, Problem
from dnnc.passes.schedule.row_segments import by_blocks
from dnnc.passes.schedule.state import Schedule

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

ORDER: tuple[str, ...] = ()  # updates of an element keep their order
BUSY = 512  # threads of a multiprocessor that hide the latency of its loads
BLOCKS = 2  # blocks of a multiprocessor, which hide each other's barriers
MOST_PER = 16  # updates of a thread in a round: all keys of a block stay in 32 KB
SLAB = 128  # bytes of a row that a block has: a warp reads a line of memory, and a long segment has many groups
# cycles on an H100: a thread looks at an update, a block at one among others, a group applies one
STEP, LOOK, APPLY = 300, 2.3, 1500
SORT = 2000  # cycles of a round that it takes however few updates there are: a scan, and barriers between its steps


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Knobs: ranges of indexed elements, threads of a block; updates per thread and round if blocks own rows."""
    s = problem.form
    if not isinstance(s, Scattered) or not fixed(problem) or s.elements == 0:
        return []
    sizes = [int(str(d)) for d in s.out.shape[: len(s.axes)]]
    places = product([n for k, n in enumerate(sizes) if k in s.whole])
    rows = product([n for k, n in enumerate(sizes) if k not in s.whole])
    assert isinstance(places, int) and isinstance(rows, int)
    if not places * rows:
        return []
    walked = math.prod(int(str(d)) for u, d in enumerate(s.extents) if u not in s.whole.values())
    busy = BUSY if walked > MOST_FOUND else BUSY // 4  # few updates are asked for at once
    shares = max(min(target.sms * busy // places, rows), 1)
    alone: Knobs = (("shares", shares), ("threads", 128))
    cycles = walked * STEP * max(places * shares / (target.sms * 2048), 1)
    together = _by_blocks(Places.of(s), target)
    return [k for _, k in sorted([(cycles, alone), *together], key=lambda c: c[0])]


def _by_blocks(places: Places, target: GpuTarget) -> list[tuple[float, Knobs]]:
    """Return knobs of row-owning blocks with estimated cycles: rounds, and the groups' serial updates."""
    rows, updates, width = (value(x) or 0 for x in (places.count, places.updates, places.width))
    if not rows * updates * width or places.scattered.beside:
        return []
    threads = 512
    slabs = min(-(-width * places.scattered.out.dtype.bytes // SLAB), BLOCKS * target.sms)
    shares = min(max(BLOCKS * target.sms // slabs, 1), rows)
    per = min(1 << (-(-updates // threads) - 1).bit_length(), MOST_PER)
    applied = updates * width / (shares * threads * slabs)
    knobs: Knobs = (("shares", shares), ("threads", threads), ("per", per))
    return [(SORT + LOOK * updates + APPLY * applied, (*knobs, *((("slabs", slabs),) if slabs > 1 else ())))]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Fewer and more ranges, blocks of all sizes; where blocks own rows, ranges grow with the block."""
    found = [dict(k) for k in candidates(problem, target)]
    alone = [(m, n) for m in (4, 1, 2, 8) for n in (128, 64, 256)]
    sizes = {False: alone, True: [(4, 512), (8, 256), (2, 1024)]}
    every = [
        {**k, "shares": max(int(k["shares"]) * m // 4, 1), "threads": n} for k in found for m, n in sizes["per" in k]
    ]
    return [tuple(k.items()) for k in every]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    s, sched = problem.form, Schedule(problem.kernel)
    assert isinstance(s, Scattered)
    shares, threads = int(knobs["shares"]), int(knobs["threads"])
    sched.body = (
        by_blocks(s, shares, threads, int(knobs["per"]), int(knobs.get("slabs", 1)))
        if knobs.get("per")
        else by_threads(s, shares, threads)
    )
    return sched.done()
