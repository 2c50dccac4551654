"""The end of a contraction: what the nest does with a finished sum, for a tile piece in registers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from dnnc.backends.cuda.templates.contraction.staging import readable
from dnnc.ir.dtype import boolean
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Var, const, load, rebuild, substitute, terms, value, walk
from dnnc.ir.loops.stmt import Buffer, Builder, Store, loop_var
from dnnc.passes.lower.form import Contraction
from dnnc.passes.schedule.memory import Vectorizer

AHEAD = 16  # rows of a column whose operands are read at once


def store_lanes(c: Contraction, most: int) -> int:
    """How many neighbouring columns can be stored (and the epilogue's operands be read) as one aligned vector."""
    lanes = most
    while lanes > 1 and not _fits(c, lanes):
        lanes //= 2
    return lanes


def _fits(c: Contraction, lanes: int) -> bool:
    return all(_fits_store(c, s, lanes) for s in _stores(c))


def _stores(c: Contraction) -> tuple[Store, ...]:
    return (*c.more, c.store)


def _fits_store(c: Contraction, s: Store, lanes: int) -> bool:
    place = load(s.buf, s.idx)
    if not readable(place, c.cols, c.rows, lanes) or any(
        isinstance(x, Load) and not _aligned(c, x, lanes) for x in walk(s.value)
    ):
        return False
    tile = Buffer("tile.", c.dtype, (const(1), const(lanes)), "register")
    q = loop_var("q.", const(0), const(c.cols.size // lanes))
    try:
        _vector(c, s, dict(c.cols.at(q, lanes, _lane(lanes))), load(tile, (0, _lane(lanes))), lanes)
    except ScheduleError:
        return False
    return True


def _aligned(c: Contraction, x: Load, lanes: int) -> bool:
    if x.buf.space == "register":
        return True
    q = loop_var("q.", const(0), const(c.cols.size // lanes))
    at = x.buf.offset(x.idx)
    start = substitute(at, c.cols.at(q, lanes))
    if start is at:
        return True  # one element for all lanes
    ts, k = terms(start)
    return k % lanes == 0 and all(coef % lanes == 0 for _, coef in ts)


def _lane(lanes: int) -> Expr:
    return loop_var("j.", const(0), const(lanes))


def _vector(c: Contraction, s: Store, env: dict[Expr, Expr], total: Expr, lanes: int) -> Store:
    """The store of one element, or of `lanes` of them where env and total are given at lane `j.`."""
    env = {**env, load(c.acc, (0,)): total}
    s = Store(s.buf, tuple(substitute(i, env) for i in s.idx), substitute(s.value, env))
    if lanes == 1:
        return s
    j = loop_var("j.", const(0), const(lanes))
    made = Vectorizer(j, const(0), lanes).store(s)
    if any(isinstance(x, Load) and any(i.lanes > 1 for i in x.idx) for x in walk(made.value)):
        raise ScheduleError("the epilogue would gather")
    return made


def store_row(
    b: Builder,
    c: Contraction,
    batch: dict[Expr, Expr],
    row: Expr,
    start: Expr,
    tile: Buffer,
    at: tuple[Expr, ...],
    width: int,
) -> None:
    """Finish and store existing columns of `tile[at:+width]` in a row from `start` on, by vectors off padding."""
    lanes, filled = store_lanes(c, width), _without_padding(c)
    wide = store_lanes(filled[0], width) if filled is not None else lanes
    if filled is None or wide <= lanes or filled[1] < wide:
        _store_run(b, c, batch, row, start, tile, at, width, lanes)
        return
    whole, end = filled
    with b.loop("u", width // wide, "unroll") as u:
        first, place = start + u * wide, (*at[:-1], at[-1] + u * wide)
        b.branch(
            first // wide < end // wide,
            lambda: _store_run(b, whole, batch, row, first, tile, place, wide, wide),
            lambda: _store_run(b, c, batch, row, first, tile, place, wide, lanes),
        )


def store_column(b: Builder, c: Contraction, first: Expr, column: Expr, sums: Buffer, rows: int) -> None:
    """Finish and store the sums of so many rows from `first` on, in one existing column. Operands of neighbouring rows
    are read before any of these is written: they may lie where results go, so no load could pass a store.
    """
    used = tuple(e for s in _stores(c) for e in (*s.idx, s.value))
    col = dict(c.cols.at(c.cols.inside(column, 1, *used)))
    whole = c.rows.size % rows == 0

    def row_of(k: Expr) -> tuple[Expr, dict[Expr, Expr]]:
        row = first + k
        at = {**col, **c.rows.at(c.rows.inside(row, 1, *used)), load(c.acc, (0,)): sums.at(k)}
        return row, at

    for start in range(0, rows, AHEAD):
        count = min(AHEAD, rows - start)
        values = [b.alloc("made", s.value.dtype, count) for s in _stores(c)]
        with b.loop("k", count, "unroll") as k:
            row, at = row_of(start + k)
            with nullcontext() if whole else b.when(row < c.rows.size):
                for to, s in zip(values, _stores(c)):
                    b.store(to, (k,), substitute(s.value, at))
        with b.loop("k", count, "unroll") as k:
            row, at = row_of(start + k)
            with nullcontext() if whole else b.when(row < c.rows.size):
                for to, s in zip(values, _stores(c)):
                    b.store(s.buf, tuple(substitute(i, at) for i in s.idx), to.at(k))


def _store_run(
    b: Builder,
    c: Contraction,
    batch: dict[Expr, Expr],
    row: Expr,
    start: Expr,
    tile: Buffer,
    at: tuple[Expr, ...],
    width: int,
    lanes: int,
) -> None:
    with b.loop("v", width // lanes, "unroll") as v:
        first = start + v * lanes
        with b.when(first // lanes < c.cols.size // lanes):
            j: Expr = _lane(lanes) if lanes > 1 else const(0)
            used = tuple(e for s in _stores(c) for e in (*s.idx, s.value))
            env = {
                **batch,
                **c.rows.at(c.rows.inside(row, 1, *used)),
                **c.cols.at(c.cols.inside(first // lanes, lanes, *used), lanes, j),
            }
            total = load(tile, (*at[:-1], at[-1] + v * lanes + j))
            made = [_vector(c, s, env, total, lanes) for s in _stores(c)]
            if len(made) > 1:  # all are read before any is written: operands may lie where results go
                values = [b.alloc("made", s.value.dtype, lanes) for s in made]
                for to, s in zip(values, made):
                    b.store(to, (0,), s.value, lanes)
                made = [replace(s, value=to.at(0, lanes=lanes)) for to, s in zip(values, made)]
            for s in made:
                b.emit(s)


def _without_padding(c: Contraction) -> tuple[Contraction, int] | None:
    """Return the contraction up to the first padding column, where select(i < 12, f(min(11, i)), 0) is f(i), and it."""
    if c.more:
        return None
    bounds = [
        (x, e, k)
        for x in walk(c.store.value)
        if isinstance(x, Op) and x.name == "min"
        for e, k in (x.args, x.args[::-1])
        if value(k) is not None
    ]
    ends = {int(value(k) or 0) + 1 for _, e, k in bounds if isinstance(e, Var) and e in c.cols.vars}
    if len(ends) != 1 or len(c.cols.loops) != 1:
        return None
    (end,), (col,) = ends, c.cols.loops
    known: dict[Expr, Expr] = {x: e for x, e, _ in bounds if e is col}

    def go(e: Expr) -> Expr:
        if e in known:
            return known[e]
        return const(True, boolean) if e is (col < end) else rebuild(e, go)

    return replace(c, store=replace(c.store, value=go(c.store.value))), end
