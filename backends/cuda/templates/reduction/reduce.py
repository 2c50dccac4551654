"""Schedules of reductions: a team of threads for each row.

Rows that lie in one piece (softmax, layer norm, sums over the last axis) are shared among neighbouring threads, which
read neighbouring elements: a few lanes of a warp, a warp, or a block for each row. Where the rows' elements lie far
apart (sums over outer axes) and those of neighbouring rows side by side, neighbouring threads take neighbouring rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates.common import collapsed, fixed, flattened, fused, jumps, outer_loops, walks, width_of
from dnnc.backends.cuda.templates.contraction.mma import LEAST
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import free, value
from dnnc.ir.loops.stmt import For, Kernel, exprs, walk_stmts
from dnnc.passes.schedule.block_reduce import Team, teams
from dnnc.passes.schedule.gpu import sink, wrap
from dnnc.passes.schedule.hoist_invariants import numbers_and_results
from dnnc.passes.schedule.loops import hoist_guards, single
from dnnc.passes.schedule.problem import Knobs, Problem, varied
from dnnc.passes.schedule.state import Schedule

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

ORDER = ("layout", "team", "near", "bytes")
TEAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
WARP = 32
BLOCK = 256  # threads of a block of several teams
SECTOR = 32  # bytes that memory is read by


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Knobs: how neighbouring threads lie (rows: along a row, columns: across rows), threads for a row, rows a block,
    bytes of vectors; of these threads, those in one warp where the rows of a block do not fill one (near).
    """
    if problem.kind not in ("reduce", "contraction") or not fixed(problem):
        return []
    if (c := problem.contraction) is not None and min(c.sizes[1:3]) >= LEAST:
        return []  # both operands are read for each product here: tiles read them some ten times less often
    found: list[Knobs] = []
    for layout, team, rows in sizes(Schedule(problem.kernel), problem, target):
        near = WARP // rows if layout == "columns" and rows < WARP and team % (WARP // rows) == 0 and team > WARP else 1
        found.append(
            (
                ("layout", layout),
                ("team", team),
                ("rows", rows),
                ("bytes", vector_bytes(problem, team) if layout == "rows" else 16),
                *((("near", near),) if near > 1 else ()),
            )
        )
    while found:
        if (
            problem.kind == "contraction"
        ):  # others are meant for these: there is no need to know now whether the first of these would do
            break
        try:
            apply(problem, dict(found[0]), target)
            break
        except ScheduleError:
            found.pop(0)
    return found


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Return teams of all sizes, several a block, best guess first; narrower loads; register shares of rows."""
    found = sizes(Schedule(problem.kernel), problem, target)
    if not found or problem.contraction is not None:  # others read the operands of a contraction less often
        return []
    layout, best, _ = found[0]
    s = Schedule(problem.kernel)
    longest = max(product(s, nest) for nest in arranged(s, problem)[1])
    teams_ = [t for t in TEAMS if t <= (min(longest // 2, WARP) if layout == "columns" else longest)]
    teams_.sort(key=lambda t: abs(t.bit_length() - best.bit_length()))
    out: list[Knobs] = []
    for team in teams_:
        if layout == "columns":
            rows = [r for r in (32, 64, 128, 16, 256) if 32 <= team * r <= target.max_threads] if team > 1 else []
        else:
            rows = (
                [1]
                if team > WARP
                else [r for r in dict.fromkeys(max(b // team, 1) for b in (256, 128, 64, 512)) if team * r % WARP == 0]
            )
        out += [(("layout", layout), ("team", team), ("rows", r), ("bytes", 16)) for r in rows]
    near = out[:4]
    out += [
        varied(k, **more)
        for k in near
        for more in ({"ahead": 16}, {"ahead": 32}, {"ahead": 128}, {"ahead": 256}, {"keep": 0}, {"keep": 384})
    ]
    return out + [varied(k, bytes=n) for k in near for n in (8, 4) if layout == "rows"]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    s = Schedule(problem.kernel)
    rows, nests = arranged(s, problem)
    across = knobs["layout"] == "columns"
    width = 1 if across else width_of(s, [nest[-1] for nest in nests], int(knobs["bytes"]))
    for nest in nests:
        flattened(s, nest, width)
    if not rows:
        s.apply(wrap, "p")
        rows = ["p"]
    row = fused(s, rows, "p")
    return collapsed(s).apply(teams, row, _team(knobs)).done()


def _team(knobs: Mapping[str, int | str]) -> Team:
    more = {k: int(knobs[k]) for k in ("keep", "ahead", "near") if k in knobs}
    return Team(int(knobs["team"]), int(knobs["rows"]), knobs["layout"] == "columns", **more)


def arranged(s: Schedule, problem: Problem) -> tuple[list[str], list[list[str]]]:
    """Return a kernel as `for rows: {for nest: .., for nest: .., ..}`; the row loops and each nest's loops."""
    collapsed(s.apply(hoist_guards).apply(single, *(n for n in problem.lowered.out_loops if s.extent(n) == 1)))
    rows = outer_loops(s, problem.lowered.out_loops)
    body = s.loop(rows[-1]).body if rows else s.body
    numbers, _ = numbers_and_results(body)
    if numbers:
        needed = frozenset().union(*(free(e) for x in walk_stmts(numbers) for e in exprs(x)))
        inner = [n for n in rows if s.loop(n).var not in needed]
        if inner and len(inner) < len(rows):
            s.apply(sink, *inner)
            rows = [n for n in rows if n not in inner]
            body = s.loop(rows[-1]).body
    return rows, [nest_of(x) for x in body if isinstance(x, For)]


def nest_of(loop: For) -> list[str]:
    """The names of a perfect nest of loops from 0."""
    names = [loop.var.name]
    while (
        len(loop.body) == 1
        and isinstance(inner := loop.body[0], For)
        and value(inner.lo) == 0
        and value(inner.hi) is not None
    ):
        loop = inner
        names.append(loop.var.name)
    return names


def sizes(s: Schedule, problem: Problem, target: GpuTarget) -> list[tuple[str, int, int]]:
    """Layout, team and rows of a block that suit the shape, best guess first."""
    try:
        rows, nests = arranged(s, problem)
    except ScheduleError:
        return []
    count, longest = product(s, rows), max((product(s, nest) for nest in nests), default=0)
    if not nests or count < 1 or longest < 4 or any(product(s, nest) < 1 for nest in nests):
        return []
    inner = [s.loop(nest[-1]) for nest in nests]
    along = sum(len(walks(x.body, x.var)) for x in inner)
    if along > sum(jumps(x.body, x.var) for x in inner):
        width = width_of(s, [nest[-1] for nest in nests])
        smallest = min(buf.dtype.bytes for x in inner for buf, _ in walks(x.body, x.var))
        return rowwise(count, longest // width, width * smallest, target)
    if rows and walks(s.loop(rows[-1]).body, s.loop(rows[-1]).var):
        smallest = min(buf.dtype.bytes for buf, _ in walks(s.loop(rows[-1]).body, s.loop(rows[-1]).var))
        return [*narrow(count, longest, smallest, target), *columnwise(count, longest, target)]
    # rows read across memory, as a norm over whole images with channels last does: still many threads a row
    return rowwise(count, longest, 4, target) if problem.contraction is None else []


def vector_bytes(problem: Problem, team: int) -> int:
    """Bytes of the narrowest type's vectors: 8 where a team that moves 16 would idle at the end of a row, and another
    type is wider, so that most accesses still have 16.
    """
    s = Schedule(problem.kernel)
    _, nests = arranged(s, problem)
    inner = [s.loop(nest[-1]) for nest in nests]
    sizes = {buf.dtype.bytes for x in inner for buf, _ in walks(x.body, x.var)}
    width, longest = width_of(s, [nest[-1] for nest in nests]), max(product(s, nest) for nest in nests)
    idle = longest // width % team != 0 and 2 * longest // width % team == 0
    return 8 if idle and width * min(sizes, default=16) == 16 and len(sizes) > 1 else 16


def rowwise(count: int, chunks: int, bytes_: int, target: GpuTarget) -> list[tuple[str, int, int]]:
    """Return chunks a thread: four to eight for loads in flight; of few rows, a thread for each chunk."""
    many = count >= 4 * target.sms
    want = power(-(-chunks // (4 if bytes_ >= 8 else 8))) if many else power(-(-chunks // 2))
    while want < power(chunks) and (want < 8 or count * want < target.sms * 512):
        want *= 2
    want = max(1, min(want, 512 if many else 1024))
    if want > WARP and count >= 64 * target.sms and chunks <= 4 * WARP:
        want = WARP
    found = [want, *(t for t in (want * 2, want // 2, want * 4) if 1 <= t <= 1024)]
    return [("rows", t, 1 if t > WARP else max(min(BLOCK // t, power(count)), WARP // t)) for t in dict.fromkeys(found)]


def columnwise(count: int, longest: int, target: GpuTarget) -> list[tuple[str, int, int]]:
    """A warp of neighbouring rows; enough members for a busy device, with at least four elements each."""
    side = min(WARP, power(count))
    members = 1
    while members < 32 and members * 8 <= longest and count * members < 8 * target.sms * BLOCK:
        members *= 2
    if members == 1:
        return []
    return [
        ("columns", m, side * max(BLOCK // (side * m), 1))
        for m in dict.fromkeys((members, max(members // 2, 2), min(members * 2, 32)))
    ]


def narrow(count: int, longest: int, bytes_: int, target: GpuTarget) -> list[tuple[str, int, int]]:
    """Blocks of one sector's rows with more members each, where warp-wide blocks are too few."""
    side = max(SECTOR // bytes_, 1)
    members = target.max_threads // side
    if side >= WARP or count % WARP or longest < members * 8 or 2 * (count // WARP) > target.sms:
        return []
    return [("columns", members, side)]


def power(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def product(s: Schedule, names: list[str]) -> int:
    n = 1
    for name in names:
        extent = s.extent(name)
        n *= extent if isinstance(extent, int) else 0
    return n
