"""Recipe for sums over segments, the loops of a sparse matrix whose rows begin where memory says:

    parallel over shares of the rows, each with about as many nonzeros:
        for i in begin .. end:
            for tiles of columns j:
                acc[tile] = 0
                for n in starts[i] .. starts[i + 1]:
                    acc[tile] += values[n] * x[columns[n], tile]
                y[i, tile] = epilogue(acc)

One column has vectors of nonzeros, whose factors are gathered. The rows of a share are found by halving: it begins with
the first row behind its share of the nonzeros.
"""

from __future__ import annotations

from collections.abc import Mapping

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.pool import SERIAL_BELOW
from dnnc.ir.dtype import i64
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import (
    Expr,
    const,
    extent,
    maximum,
    minimum,
    op,
    select,
    substitute,
    unwrap,
    value,
)
from dnnc.ir.loops.stmt import Builder, Kernel, Store, call
from dnnc.ir.te import identity
from dnnc.passes.lower.scatter import combine
from dnnc.passes.schedule.memory import Vectorizer
from dnnc.passes.schedule.problem import Knobs, Problem, varied
from dnnc.passes.schedule.segments import Segments, finish, segments_of

ORDER = ("lanes",)
MOST_TILES = 8  # vectors of sums of a row
GATHERED = 4  # lanes whose factors are loaded one by one: no slower than a gather, and rows are short
BITS = 40  # of the largest number of rows
Knob = Mapping[str, "int | str"]


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    p = segments_of(problem)
    if p is None:
        return []
    lanes = target.vector_bits // 8 // max(p.sum.acc.dtype.bytes, 4)
    if p.column is None:
        return [(("lanes", min(GATHERED, lanes)), ("shares", target.threads))]
    size = value(extent(p.column))
    if size is None:
        return []
    while lanes > 4 and size <= lanes // 2:
        lanes //= 2
    vectors = -(-size // lanes)
    rounds = -(-vectors // MOST_TILES)
    return [(("lanes", lanes), ("tiles", -(-vectors // rounds)), ("shares", target.threads))]


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """Other vectors and tiles, and one thread for all rows."""
    out: list[Knobs] = []
    for first in candidates(problem, target):
        lanes = int(dict(first)["lanes"])
        out += [varied(first, lanes=n) for n in (lanes // 2, 2 * lanes) if 2 <= n <= target.lanes]
        out += [varied(first, shares=1)]
        if "tiles" in dict(first):
            out += [varied(first, tiles=n) for n in (1, 2, 4, 6, 8)]
    return out


def apply(problem: Problem, knobs: Knob, target: CpuTarget) -> Kernel:
    p = segments_of(problem)
    if p is None:
        raise ScheduleError("no reduction over segments of rows")
    lanes, shares = int(knobs["lanes"]), int(knobs["shares"])
    rows = extent(p.row)
    work = unwrap(const(problem.flops))
    b = Builder()
    if shares == 1 or (isinstance(work, int) and work < SERIAL_BELOW):
        with b.loop("i", rows) as i:
            _row(b, p, i, lanes, int(knobs.get("tiles", 0)))
        return problem.kernel.with_body(b.block())
    with b.loop("s", shares, "parallel") as s:
        begin, end = (_first_row(b, p, rows, s + k, shares) for k in (0, 1))
        with b.loop("i", end, lo=begin) as i:
            _row(b, p, i, lanes, int(knobs.get("tiles", 0)))
    return problem.kernel.with_body(b.block())


def _first_row(b: Builder, p: Segments, rows: Expr, share: Expr, shares: int) -> Expr:
    """The row with which a share begins: the first one that begins at its share of nonzeros and rows, or behind it.

    A row counts as a nonzero, so that empty rows are shared, too.
    """
    last = substitute(p.bounds[1], {p.row: rows - 1})
    goal = b.let("goal", (maximum(last, 0) + rows) * share // shares)
    at = b.alloc("at", i64, 2)
    b.store(at, (0,), const(0))
    b.store(at, (1,), rows)
    with b.loop("step", BITS):  # at[0] .. at[1] holds the row
        middle = b.let("middle", minimum(maximum((at[0] + at[1]) // 2, 0), rows - 1))
        ahead = b.let("ahead", substitute(p.bounds[0], {p.row: middle}) + middle < goal)
        live = b.let("live", at[0] < at[1])
        low, high = at[0], at[1]
        b.store(at, (0,), select(live & ahead, middle + 1, low))
        b.store(at, (1,), select(op("&", live, op("not", ahead)), middle, high))
    return minimum(maximum(select(share < shares, at[1], rows), 0), rows)


def _row(b: Builder, p: Segments, i: Expr, lanes: int, tiles: int) -> None:
    lo, hi = (substitute(e, {p.row: i}) for e in p.bounds)
    if p.column is None:
        _gathered(b, p, i, lo, hi, lanes)
        return
    size = int(str(unwrap(extent(p.column))))
    whole, rest = divmod(size, lanes * tiles)
    if whole > 1:
        with b.loop("t", whole) as t:
            _tile(b, p, i, lo, hi, t * (lanes * tiles), [None] * tiles, lanes)
    elif whole:
        _tile(b, p, i, lo, hi, const(0), [None] * tiles, lanes)
    if rest:
        limits = [None if rest >= (k + 1) * lanes else const(rest - k * lanes) for k in range(-(-rest // lanes))]
        _tile(b, p, i, lo, hi, const(whole * lanes * tiles), limits, lanes)


def _tile(
    b: Builder, p: Segments, i: Expr, lo: Expr, hi: Expr, first: Expr, limits: list[Expr | None], lanes: int
) -> None:
    """Vectors of sums side by side; a limit says how many lanes of one there are."""
    assert p.column is not None
    dtype = p.sum.acc.dtype
    acc = b.alloc("acc", dtype, len(limits), lanes)
    for k in range(len(limits)):
        b.store(acc, (k, 0), const(identity(p.sum.combine, dtype), dtype), lanes)
    with b.loop("n", hi, lo=lo) as n:
        term = substitute(p.sum.term, {p.row: i, p.sum.loops[0]: n})
        for k, limit in enumerate(limits):
            wide = Vectorizer(p.column, first + k * lanes, lanes)
            wide.limit = limit
            total = combine(p.sum.combine, acc.at(k, 0, lanes=lanes), term)
            b.store(acc, (k, 0), wide.expr(total), lanes)
    for k, limit in enumerate(limits):
        finish(b, p, i, first + k * lanes, limit, acc.at(k, 0, lanes=lanes))


def _gathered(b: Builder, p: Segments, i: Expr, lo: Expr, hi: Expr, lanes: int) -> None:
    """The sum of a row as vectors of nonzeros, then the others one by one."""
    dtype, (n,) = p.sum.acc.dtype, p.sum.loops
    acc, left = b.alloc("acc", dtype, 1, lanes), b.alloc("left", dtype, 1)
    start = const(identity(p.sum.combine, dtype), dtype)
    b.store(acc, (0, 0), start, lanes)
    b.store(left, (0,), start)
    term = substitute(p.sum.term, {p.row: i})
    with b.when(const(lanes) <= p.stored), b.loop("v", maximum(hi - lo, 0) // lanes) as v:
        at = b.let("at", minimum(lo + v * lanes, p.stored - lanes))  # as it is: the row ends with the nonzeros
        total = Vectorizer(n, at, lanes).expr(combine(p.sum.combine, acc.at(0, 0, lanes=lanes), term))
        b.store(acc, (0, 0), total, lanes)
    whole = select(const(lanes) <= p.stored, maximum(hi - lo, 0) // lanes * lanes, const(0))
    done = b.let("done", lo + maximum(whole, 0))
    with b.loop("n", hi, lo=done) as k:
        b.store(left, (0,), combine(p.sum.combine, left[0], substitute(term, {n: k})))
    across = call({"sum": "hsum", "prod": "hprod"}.get(p.sum.combine, f"h{p.sum.combine}"), acc.at(0, 0, lanes=lanes))
    total = b.let("sum", combine(p.sum.combine, left[0], across))
    env: dict[Expr, Expr] = {p.row: i, p.sum.acc[0]: total}
    s = p.store
    b.emit(Store(s.buf, tuple(substitute(k, env) for k in s.idx), substitute(s.value, env)))
