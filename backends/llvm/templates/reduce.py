"""Recipe for reductions: rows (softmax, layer norm, sums over the last axis) and windows (pooling, sums over outer axes).

A reduction whose loop walks memory in order becomes vector accumulators over that loop. Otherwise the vectors go over the innermost output
loop that walks memory in order (channels of a blocked image): each lane reduces for itself. What fits neither stays scalar.
"""

from __future__ import annotations

from collections.abc import Mapping

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates.common import offsets, parallel_outer, stride, try_fuse, unit_stride
from dnnc.backends.llvm.templates.maps import lanes_for, vectorized
from dnnc.ir.bounds import bounds
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import const, free
from dnnc.ir.operator.stmt import For, Kernel
from dnnc.passes.schedule.loops import hoist_guards, narrow, single, split
from dnnc.passes.schedule.memory import distribute, vector_reduce, vectorize
from dnnc.passes.schedule.problem import Knobs, Problem
from dnnc.passes.schedule.state import Schedule, loops


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    if problem.kind in ("map", "sequence"):
        return []
    return [(("lanes", lanes_for(problem, target)), ("chains", 4))]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    s = Schedule(problem.kernel)
    lanes, chains = int(knobs["lanes"]), int(knobs["chains"])
    s.apply(single, *(n for n in problem.lowered.out_loops if s.extent(n) == 1)).collapse()
    s.apply(hoist_guards).apply(narrow)
    if not _over_outputs(s, problem, lanes):
        _over_rows(s, problem, lanes, chains, short=bool(knobs.get("short")))
    parallel_outer(s, _outer(s, problem), problem.lowered.elements)
    return s.done()


def _outer(s: Schedule, problem: Problem) -> list[str]:
    """Output loops that are still perfectly nested from the top."""
    out: list[str] = []
    body = s.body
    while len(body) == 1 and isinstance(body[0], For) and body[0].kind == "range":
        out.append(body[0].var.name)
        body = body[0].body
    return [n for n in out if n.startswith(("i", "vo"))]


def _over_outputs(s: Schedule, problem: Problem, lanes: int) -> bool:
    """Vectors over the innermost output loop: one reduction, every access unit stride or constant along it, stored in order."""
    loops = [n for n in problem.lowered.out_loops if s.has(n)]
    if not loops or len(problem.lowered.reductions) != 1:
        return False
    loop = s.loop(loops[-1])
    n = s.extent(loops[-1])
    if len(loop.body) < 3 or (isinstance(n, int) and n < lanes // 2):
        return False
    if any(unit_stride(s.loop(r)) for r in problem.lowered.reductions[0] if s.has(r)) and not loops[-1].endswith("b"):
        return False
    if any(stride(e, loop.var) not in (const(0), const(1)) for e in offsets(loop.body) if loop.var in free(e)):
        return False
    mark = s.mark()
    try:
        s.apply(split, loops[-1], lanes, ("vo", "vi"), tail="guard")
        s.apply(distribute, "vi", 1)
        s.apply(vectorize, "vi", "vi_1", "vi_2")
    except ScheduleError:
        s.restore(mark)
        return False
    return True


def _over_rows(s: Schedule, problem: Problem, lanes: int, chains: int, short: bool) -> None:
    """Vectors over rows in memory. `short`: over those shorter than a vector too, as a row of unknown length is summed."""
    for names in problem.lowered.reductions:
        names_left = [n for n in names if s.has(n)]
        k = 0
        while len(names_left) > 1 and try_fuse(s, names_left[-2], names_left[-1], f"{names_left[-1]}f{k}"):
            names_left = [*names_left[:-2], f"{names_left[-1]}f{k}"]
            k += 1
        if not names_left:
            continue
        inner = names_left[-1]
        if inner.startswith("k"):
            vectorized(s, inner, lanes, 4)
            continue
        n = s.extent(inner)
        least, most = bounds(n)
        if not unit_stride(s.loop(inner)) or (most is not None and most < lanes and not short):
            continue
        if least is None or least < 0:  # of a window beside an image nobody can show how many vectors it has
            continue
        mark = s.mark()
        try:
            s.apply(vector_reduce, inner, lanes, chains if not isinstance(n, int) or n >= lanes * chains else 1)
        except ScheduleError:
            s.restore(mark)
    last = next((n for n in reversed(problem.lowered.out_loops) if s.has(n)), "")
    if last and not _loops_in(s, last):
        vectorized(s, last, lanes, 4)


def _loops_in(s: Schedule, name: str) -> list[str]:
    return [x.var.name for x in loops(s.loop(name).body)]
