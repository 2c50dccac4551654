"""Recipe for groups without reductions: element-wise chains and data movement, one pass over memory.

Adjacent loops that walk memory in order become one loop; the innermost becomes vectors (loads that are not unit stride gather), its
tail a limit on the accesses; the outermost is shared among the threads. Where loads run along one loop and the stores along another,
square tiles are transposed in registers: 2 to 3 times the speed of gathers.
"""

from __future__ import annotations

from collections.abc import Mapping

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates.common import offsets, parallel_outer, stride, try_fuse
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import const, free
from dnnc.ir.operator.stmt import Kernel
from dnnc.passes.schedule.loops import annotate, reorder, split
from dnnc.passes.schedule.memory import vectorize
from dnnc.passes.schedule.problem import Knobs, Problem
from dnnc.passes.schedule.state import Schedule
from dnnc.passes.schedule.transposition import transpose_tile


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    return [(("lanes", lanes_for(problem, target)), ("unroll", 4))] if problem.kind == "map" else []


def lanes_for(problem: Problem, target: CpuTarget) -> int:
    """Lanes of the widest type in the kernel: all values of a statement have the same number of lanes."""
    sizes = [b.dtype.computed.bytes for b in problem.kernel.entry.buffers]
    return max(target.vector_bits // 8 // max(max(sizes, default=4), 4), 2)


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    s = Schedule(problem.kernel)
    names = list(problem.lowered.out_loops)
    if not names or any(s.extent(n) == 0 for n in names):
        return s.done()
    names = fuse_rows(s, names)
    tiled = transposed(s, names, int(knobs["lanes"]))
    if tiled:
        parallel_outer(s, tiled, problem.lowered.elements)
        return s.done()
    vectorized(s, names[-1], int(knobs["lanes"]), int(knobs["unroll"]))
    work = problem.lowered.elements
    outer = names[:-1] if len(names) > 1 else [n for n in (names[-1] + "o", names[-1] + "q") if s.has(n)][:1]
    parallel_outer(s, outer, work)
    return s.done()


def fuse_rows(s: Schedule, names: list[str]) -> list[str]:
    """Fuse from the innermost pair outwards while that keeps the accesses simple; returns the loops that are left."""
    k = 0
    while len(names) > 1 and try_fuse(s, names[-2], names[-1], f"e{k}"):
        names = [*names[:-2], f"e{k}"]
        k += 1
    for at in range(len(names) - 2, 0, -1):
        if try_fuse(s, names[at - 1], names[at], f"e{k}"):
            names = [*names[: at - 1], f"e{k}", *names[at + 1 :]]
            k += 1
    return names


def transposed(s: Schedule, names: list[str], lanes: int) -> list[str]:
    """Square tiles where some load runs along an outer loop and the store along the innermost; the loops around them, or nothing."""
    column = s.loop(names[-1])
    across = [e for e in offsets(column.body) if column.var in free(e) and stride(e, column.var) is not const(1)]
    for row in reversed(names[:-1]):
        v = s.loop(row).var
        if not any(v in free(e) and stride(e, v) is const(1) for e in across):
            continue
        mark = s.mark()
        try:
            rest = [n for n in names[:-1] if n != row]
            for name, parts in ((row, ("ro", "rv")), (names[-1], ("co", "cv"))):
                n = s.extent(name)
                if not isinstance(n, int) or n < lanes:
                    raise ScheduleError(f"{name} does not fill a tile")
                s.apply(split, name, lanes, parts, tail="overlap")
            s.apply(reorder, *rest, "ro", "co", "rv", "cv").apply(transpose_tile, "rv", "cv")
        except ScheduleError:
            s.restore(mark)
            continue
        return [*rest, "ro", "co"]
    return []


def vectorized(s: Schedule, name: str, lanes: int, unroll: int) -> None:
    """Turn a loop into vectors; where its statements cannot be vectors it stays scalar."""
    n = s.extent(name)
    if n == 1:
        return
    mark = s.mark()
    try:
        s.apply(split, name, lanes, (name + "o", name + "v"), tail="guard")
        s.apply(vectorize, name + "v")
    except ScheduleError:
        s.restore(mark)
        return
    if isinstance(n, int) and n % (lanes * unroll) == 0 and n > lanes * unroll:
        s.apply(split, name + "o", unroll, (name + "q", name + "u")).apply(annotate, "unroll", name + "u")
