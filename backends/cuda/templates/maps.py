"""Schedules of groups without reductions: element-wise chains and data movement, one pass over memory.

Loops that walk memory in order become one; each thread has a few chunks of 16 bytes, all of whose loads are under way
at once. Where loads run along one loop and the store along another, tiles go through shared memory, so that
neighbouring threads load and store neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates.common import (
    applies,
    collapsed,
    fixed,
    fused,
    joined,
    jumps,
    outer_loops,
    walks,
    width_of,
)
from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.stmt import Kernel
from dnnc.passes.schedule.gpu import stream, sweep
from dnnc.passes.schedule.loops import annotate, single, split
from dnnc.passes.schedule.problem import Knobs, Problem
from dnnc.passes.schedule.shared_tiles import transpose_tiles
from dnnc.passes.schedule.state import Schedule

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

ORDER: tuple[str, ...] = ()  # nothing is summed
SIDE = 16  # of a tile, below which most of its threads would have nothing to do
SWEEP_THREADS = 256  # of a block that goes over vectors of any size
RAGGED = 1024  # elements below which a last chunk of its own is not worth its code


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Knobs: tile (1: through shared memory), bytes of a chunk, chunks of a thread, threads of a block."""
    if problem.kind != "map":
        return []
    if not fixed(problem):
        return swept(problem, target)
    s = Schedule(problem.kernel)
    names = arranged(s, problem)
    if not names:
        return []
    total = product(s, names)
    width = width_of(s, names[-1:])
    found: list[Knobs] = []
    for chunks in (2, 1, 4):
        if chunks == 1 or total // width >= 256 * chunks * 2 * target.sms:
            found += [(("tile", 0), ("bytes", 16), ("chunks", chunks), ("threads", threads)) for threads in (128, 256)]
    row = row_of(s, names)
    if row and jumps(s.loop(names[-1]).body, s.loop(names[-1]).var):
        tiles: list[Knobs] = [
            (("tile", 1), ("bytes", 4), ("chunks", 1), ("threads", threads)) for threads in (256, 512)
        ]
        filled = all(int(s.extent(n)) >= SIDE for n in (row, names[-1]))  # type: ignore[arg-type]
        tiles = tiles if applies(apply, problem, tiles[0], target) else []
        found = [*tiles, *found] if filled else [*found, *tiles]
    while found and not applies(apply, problem, found[0], target):
        found.pop(0)
    return found


def swept(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Knobs of a chain over vectors of run-time size: a grid that fills the device walks them."""
    line = problem.lowered.out_loops
    if len(line) != 1 or not walks(
        Schedule(problem.kernel).loop(line[0]).body, Schedule(problem.kernel).loop(line[0]).var
    ):
        return []
    return [
        (
            ("tile", 0),
            ("bytes", 16),
            ("chunks", 1),
            ("threads", SWEEP_THREADS),
            ("blocks", target.sms * target.threads_per_sm // SWEEP_THREADS),
        )
    ]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Chunks of fewer bytes, more or fewer of them, other blocks; tiles of blocks of other sizes."""
    s = Schedule(problem.kernel)
    names = arranged(s, problem)
    if not names:
        return []
    total = product(s, names)
    width = width_of(s, names[-1:])
    out: list[Knobs] = []
    if row_of(s, names) and jumps(s.loop(names[-1]).body, s.loop(names[-1]).var):
        out += [(("tile", 1), ("bytes", 4), ("chunks", 1), ("threads", t)) for t in (128, 64, 256, 512, 1024)]
    for size in dict.fromkeys((16, *(16 // d for d in (2, 4, 8) if width // d >= 1))):
        for chunks in (1, 2, 4, 8):
            if chunks == 1 or total // width >= 32 * chunks * target.sms:
                out += [
                    (("tile", 0), ("bytes", size), ("chunks", chunks), ("threads", t))
                    for t in (128, 256, 64, 512, 32, 1024)
                ]
    return out


def product(s: Schedule, names: Sequence[str]) -> int:
    """Iterations of a nest."""
    total = 1
    for n in names:
        total *= int(s.extent(n))  # type: ignore[arg-type]
    return total


def arranged(s: Schedule, problem: Problem) -> list[str]:
    """The perfect nest of output loops, joined where memory is walked in order."""
    if any(s.extent(n) == 0 for n in problem.lowered.out_loops):
        return []
    collapsed(s.apply(single, *(n for n in problem.lowered.out_loops if s.extent(n) == 1)))
    return joined(s, outer_loops(s, problem.lowered.out_loops))


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    s = Schedule(problem.kernel)
    if "blocks" in knobs:
        name = problem.lowered.out_loops[0]
        width = width_of(s, [name], int(knobs["bytes"]), ragged=True)
        if width > 1:
            s.apply(split, name, width, (name + "c", name + "v"), tail="guard").apply(annotate, "unroll", name + "v")
            name += "c"
        return s.apply(sweep, name, int(knobs["blocks"]), int(knobs["threads"]), int(knobs["chunks"])).done()
    names = arranged(s, problem)
    if int(knobs["tile"]):
        return transposed(s, names, int(knobs["threads"]))
    width = chunk(s, names, int(knobs["bytes"]))
    if width > 1:
        inner = names[-1]
        s.apply(split, inner, width, (inner + "c", inner + "v"), tail="guard").apply(annotate, "unroll", inner + "v")
        names = [*names[:-1], inner + "c"]
    return s.apply(stream, fused(s, names, "e"), int(knobs["threads"]), int(knobs["chunks"])).done()


def chunk(s: Schedule, names: list[str], most: int) -> int:
    """Return a chunk's elements. One loop over memory may end within a chunk; rows must be whole, for alignment."""
    inner = s.loop(names[-1])
    exact = width_of(s, names[-1:], most)
    if len(names) > 1 or not walks(inner.body, inner.var) or int(s.extent(names[-1])) < RAGGED:  # type: ignore[arg-type]
        return exact
    return width_of(s, names[-1:], most, ragged=True)


def row_of(s: Schedule, names: list[str]) -> str:
    """The loop along which loads run that jump along the innermost one; empty if there is none."""
    column = s.loop(names[-1])
    return next((n for n in reversed(names[:-1]) if walks(column.body, s.loop(n).var)), "")


def transposed(s: Schedule, names: list[str], threads: int) -> Kernel:
    """Tiles of the innermost loop, along which the result is stored, and the one along which the loads run."""
    row = row_of(s, names)
    if not row:
        raise ScheduleError(f"no load runs along {', '.join(names[:-1])}")
    return s.apply(transpose_tiles, row, names[-1], threads).done()
