"""The schedule that every kernel has: a thread per output element, or per row of dependent elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates.common import fixed, fused, outer_loops
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import value
from dnnc.ir.loops.stmt import Alloc, Kernel, walk_stmts
from dnnc.passes.schedule.gpu import share_rows, solo, spread
from dnnc.passes.schedule.problem import Knobs, Problem
from dnnc.passes.schedule.state import Schedule

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

ORDER: tuple[str, ...] = ()  # every sum is one thread's
PRIVATE_LIMIT = (
    64  # elements of a row that every thread may keep for itself: more would be megabytes for all threads of a device
)


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    return [(("threads", 256),), (("threads", 128),)] if fixed(problem) else []


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    return [(("threads", n),) for n in (64, 512, 32, 1024) if n <= target.max_threads]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    s = Schedule(problem.kernel)
    threads, kept = int(knobs["threads"]), private_bytes(s)
    if kept > PRIVATE_LIMIT * 4:
        threads = 1
        if kept <= target.shared_bytes:
            s.apply(share_rows)
    names = outer_loops(s, problem.lowered.out_loops)
    if not names:
        return s.apply(solo).done()
    while len(names) > 1:
        mark = s.mark()
        try:
            return s.apply(spread, fused(s, names, "e"), threads).done()
        except ScheduleError:  # quotients and remainders of the fused loop hide that its iterations are apart
            s.restore(mark)
            names = names[:-1]
    return s.apply(spread, names[0], threads).done()


def private_bytes(s: Schedule) -> int:
    """Memory that the kernel keeps beside registers, for one iteration of its outer loops."""
    sizes = [
        (value(x.buf.size()) or 0) * x.buf.dtype.bytes
        for x in walk_stmts(s.body)
        if isinstance(x, Alloc) and x.buf.space == "local"
    ]
    return sum(sizes)
