"""Sums over segments: a team of threads for each row of a sparse matrix whose rows begin where memory says.

    many columns:   for row and column tile in teams: for n in starts[row] .. starts[row + 1]:
                        acc[vector] += values[n] * x[columns[n], vector]           `flight` elements at once
    one column:     lane l of the team has elements l, l + team, ..; shuffles add up its sums

A row is one team's: rows of very different lengths keep threads of a block waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates.common import applies, fixed
from dnnc.ir.dtype import f32, f64, i32, i64, u32, u64
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, const, extent, maximum, minimum, op, substitute, value
from dnnc.ir.loops.stmt import Builder, Kernel, Store, call
from dnnc.ir.te import identity
from dnnc.passes.lower.scatter import combine
from dnnc.passes.schedule.memory import Vectorizer
from dnnc.passes.schedule.problem import Knobs, Problem, varied
from dnnc.passes.schedule.segments import Segments, finish, segments_of

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

ORDER = ("team", "flight")  # lanes of a team have sums of their own
THREADS = 128
WARP = 32
BYTES = 16  # of a thread's vector
FLIGHT = 4  # elements whose factors a thread asks for at once
SHUFFLED = (f32, f64, i32, u32, i64, u64)


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    p = segments_of(problem) if fixed(problem) else None
    if p is None:
        return []
    rows, stored = value(extent(p.row)), value(p.stored)
    if not rows or not stored:
        return []
    if p.column is None:
        team = min(WARP, _power(-(-stored // rows)))
        found: Knobs = (("team", team), ("threads", THREADS))
        return [found] if p.sum.acc.dtype in SHUFFLED and applies(apply, problem, found, target) else []
    size = value(extent(p.column))
    if not size:
        return []
    width = BYTES // max(p.sum.acc.dtype.bytes, 4)
    while width > 1 and size % width:
        width //= 2
    flight = min(FLIGHT, _power(-(-stored // rows)))
    for w in (width, 1):
        found = (("lanes", min(WARP, _power(-(-size // w)))), ("width", w), ("flight", flight), ("threads", THREADS))
        if applies(apply, problem, found, target):
            return [found]
    return []


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Other teams and blocks."""
    out: list[Knobs] = []
    for first in candidates(problem, target):
        knobs = dict(first)
        out += [varied(first, threads=n) for n in (64, 256)]
        if "team" in knobs:
            out += [varied(first, team=n) for n in (1, 2, 4, 8, 16, 32) if n != knobs["team"]]
        else:
            out += [varied(first, flight=n) for n in (1, 2, 4, 8) if n != knobs["flight"]]
            out += [varied(first, lanes=int(knobs["lanes"]) // 2)] if int(knobs["lanes"]) > 1 else []
    return out


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    p = segments_of(problem)
    if p is None:
        raise ScheduleError("no reduction over segments of rows")
    numbers = {k: int(v) for k, v in knobs.items()}
    if p.column is None:
        return _one_column(problem, p, numbers["team"], numbers["threads"])
    return _columns(problem, p, numbers)


def _columns(problem: Problem, p: Segments, knobs: Mapping[str, int]) -> Kernel:
    lanes, width, flight, threads = (knobs[k] for k in ("lanes", "width", "flight", "threads"))
    assert p.column is not None
    rows, vectors, teams = _size(extent(p.row)), _size(extent(p.column)) // width, threads // lanes
    tiles, dtype, b = -(-vectors // lanes), p.sum.acc.dtype, Builder()
    blocks = -(-rows // teams)
    with b.loop("block", blocks * tiles, "block.x") as block, b.loop("t", threads, "thread.x") as t:
        b.do("first_level_cache")
        row = b.let("row", block % blocks * teams + t // lanes)
        column = b.let("column", block // blocks * lanes + t % lanes)
        with b.when((row < rows) & (column < vectors)):
            first = column * width
            low, count = _ends(b, p, row)
            acc = b.alloc("acc", dtype, 1, width)
            b.store(acc, (0, 0), const(identity(p.sum.combine, dtype), dtype), width)

            def add(n: Expr) -> None:
                assert p.column is not None
                term = substitute(p.sum.term, {p.row: row, p.sum.loops[0]: minimum(n, p.stored - 1)})
                total = combine(p.sum.combine, acc.at(0, 0, lanes=width), term)
                if width == 1:
                    b.store(acc, (0, 0), substitute(combine(p.sum.combine, acc[0, 0], term), {p.column: first}))
                else:
                    b.store(acc, (0, 0), Vectorizer(p.column, first, width).expr(total), width)

            with b.loop("u", count // flight) as u, b.loop("k", flight, "unroll") as k:
                add(low + u * flight + k)
            if flight > 1:
                with b.loop("n", count % flight) as n:
                    add(low + count // flight * flight + n)
            if width > 1:
                finish(b, p, row, first, None, acc.at(0, 0, lanes=width))
            else:
                _store(b, p, {p.row: row, p.column: first, p.sum.acc[0]: acc[0, 0]})
    return problem.kernel.with_body(b.block())


def _one_column(problem: Problem, p: Segments, team: int, threads: int) -> Kernel:
    rows, teams, dtype, b = _size(extent(p.row)), threads // team, p.sum.acc.dtype, Builder()
    with b.loop("block", -(-rows // teams), "block.x") as block, b.loop("t", threads, "thread.x") as t:
        b.do("first_level_cache")
        at, lane = b.let("at", block * teams + t // team), b.let("lane", t % team)
        row = b.let("row", minimum(at, rows - 1))  # whole warps shuffle
        low, count = _ends(b, p, row)
        acc = b.alloc("acc", dtype, 1)
        b.store(acc, (0,), const(identity(p.sum.combine, dtype), dtype))
        with b.loop("u", maximum(count - lane + (team - 1), 0) // team) as u:
            n = minimum(low + lane + u * team, p.stored - 1)
            b.store(acc, (0,), combine(p.sum.combine, acc[0], substitute(p.sum.term, {p.row: row, p.sum.loops[0]: n})))
        with b.loop("o", team.bit_length() - 1, "unroll") as o:
            other = call("shfl_xor", acc[0], op("shl", const(1), o))
            b.store(acc, (0,), combine(p.sum.combine, acc[0], other))
        with b.when((lane < 1) & (at < rows)):
            _store(b, p, {p.row: row, p.sum.acc[0]: acc[0]})
    return problem.kernel.with_body(b.block())


def _ends(b: Builder, p: Segments, row: Expr) -> tuple[Expr, Expr]:
    """The first element of a row, and how many there are."""
    low, high = (b.let(name, maximum(substitute(e, {p.row: row}), 0)) for name, e in zip(("low", "high"), p.bounds))
    return low, b.let("count", maximum(high - low, 0))


def _store(b: Builder, p: Segments, env: Mapping[Expr, Expr]) -> None:
    here, s = dict(env), p.store
    b.emit(Store(s.buf, tuple(substitute(i, here) for i in s.idx), substitute(s.value, here)))


def _power(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def _size(e: Expr) -> int:
    n = value(e)
    if not n:
        raise ScheduleError("a size is not known, or 0")
    return int(n)
