"""Schedule primitives: a square tile, transposed by vectors and shuffles in place of gathers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dnnc.ir.bounds import nonneg
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, const, free, load, substitute, value, var, walk
from dnnc.ir.loops.stmt import Block, Buffer, Builder, For, Store, call, loop_var
from dnnc.passes.schedule.memory import Vectorizer
from dnnc.passes.schedule.state import edit, only

SHUFFLED = 16  # bytes of a group of lanes, within which shuffles are fast


def transpose_tile(b: Block, rows: str, columns: str, lanes: int = 0) -> Block:
    """`for r in range(4): for c in range(4): y[r, c] = f(x[c, r])`  ->

    `t0[c, 0:+4] = x[c, 0:+4]` for 4 c; `t1[2*h, :] = zip_low(t0[h, :], t0[h + 2, :])`, `t1[2*h + 1, :] = zip_high(..)`
    for 2 h; the same from t1 to t2; `y[r, 0:+4] = f(t2[r, 0:+4])` for 4 r.

    log2(n) rounds of zipping row h with row h + n/2 transpose an n x n tile. Loads that run along the columns stay as
    they are. Where several loads run along the rows and none along the columns, f is computed in rows, and its result
    is transposed instead of each load. `lanes`: n, where a loop has fewer iterations; default: the extent of both.
    """

    def go(s: For) -> Block:
        r, c, st, n = _tile_loops(s, columns, lanes)
        down, along = Vectorizer(r.var, r.lo, n), Vectorizer(c.var, c.lo, n)
        along.limit = c.extent if value(c.extent) != n else None
        crossing = [
            x
            for x in walk(st.value)
            if isinstance(x, Load) and c.var in free(x) and along.contiguous(x.buf, x.idx) is None
        ]
        if not crossing:
            raise ScheduleError(f"no load runs along {r.var.name}")
        at = along.contiguous(st.buf, st.idx)
        if at is None:
            raise ScheduleError(f"the store is not unit stride along {c.var.name}")
        b = Builder()
        if len(crossing) > 1 and _runs_along(down, st):
            down.limit = r.extent if value(r.extent) != n else None
            e = down.expr(st.value)
            tile = zipped(b, lambda j: substitute(e, {c.var: c.lo + j}), c.extent, n, n, "t")
            with b.loop(r.var.name, r.hi, "unroll", r.lo) as i:
                b.emit(
                    Store(
                        st.buf,
                        tuple(substitute(x, {r.var: i}) for x in at),
                        load(tile, (i - r.lo, 0), n),
                        n,
                        along.limit,
                    )
                )
            return b.block()
        tiles = _tiles(b, crossing, st, down, (r, c), n, n)
        e = along.expr(substitute(st.value, {x: v for x, (v, _) in tiles.items()}))
        with b.loop(r.var.name, r.hi, "unroll", r.lo) as i:
            found: dict[Expr, Expr] = {v: load(t, (i - r.lo, 0), n) for v, t in tiles.values()}
            here: dict[Expr, Expr] = {r.var: i}
            b.emit(
                Store(
                    st.buf,
                    tuple(substitute(x, here) for x in at),
                    substitute(substitute(e, here), found),
                    n,
                    along.limit,
                )
            )
        return b.block()

    return edit(b, rows, go)


def zip_tile(b: Block, rows: str, columns: str) -> Block:
    """`for r in range(4): for c in range(2): y[2*r + c] = f(x[c, r])`  ->

    `t0[c, 0:+4] = x[c, 0:+4]` for 2 c; `t1[0, :] = zip_low(t0[0, :], t0[1, :])`, `t1[1, :] = zip_high(..)`;
    `y[4*k:+4] = f(t1[k, 0:+4])` for 2 k.

    A few long rows become one, their elements taking turns: log2(columns) rounds of zipping."""

    def go(s: For) -> Block:
        r, c, st, n = _tile_loops(s, columns, 0)
        m = value(c.extent)
        if m is None or m & (m - 1) or value(r.extent) != n or value(r.lo) != 0 or value(c.lo) != 0:
            raise ScheduleError(f"{columns} does not have 2^k iterations, or {rows} too few")
        v = loop_var("zip.", const(0), const(n * m))
        flat: dict[Expr, Expr] = {c.var: v - r.var * m}  # of both loops as one
        down, along = Vectorizer(r.var, r.lo, n), Vectorizer(v, const(0), n)
        at = tuple(substitute(i, flat) for i in st.idx)
        inner = {
            x: tuple(substitute(i, flat) for i in x.idx)
            for x in walk(st.value)
            if isinstance(x, Load) and {r.var, c.var} & free(x)
        }
        crossing = [
            x for x, idx in inner.items() if any(r.var in free(i) for i in idx) or along.contiguous(x.buf, idx) is None
        ]
        start = along.contiguous(st.buf, at)
        if start is None or any(r.var in free(i) for i in at):
            raise ScheduleError(f"the store is not unit stride along {r.var.name} and {c.var.name} as one loop")
        b = Builder()
        tiles = _tiles(b, crossing, st, down, (r, c), n, m)
        loads = {x: tiles[x][0] if x in tiles else load(x.buf, idx) for x, idx in inner.items()}
        e = substitute(substitute(st.value, loads), {c.var: v % m})
        if r.var in free(e):
            raise ScheduleError(f"{r.var.name} is used outside of addresses")
        with b.loop(c.var.name, m, "unroll") as k:
            along.lo = k * n
            found: dict[Expr, Expr] = {t: load(tile, (k, 0), n) for t, tile in tiles.values()}
            place = along.contiguous(st.buf, at)
            assert place is not None
            b.emit(Store(st.buf, place, substitute(along.expr(e), found), n))
        return b.block()

    return edit(b, rows, go)


def _tile_loops(s: For, columns: str, lanes: int) -> tuple[For, For, Store, int]:
    """The two loops of a tile, its store, and its lanes."""
    inner = only(s)
    rows, cols = value(s.extent), value(inner.extent)
    n = lanes or rows
    if (
        inner.var.name != columns
        or rows is None
        or cols is None
        or n is None
        or not (max(rows, cols) == n and n & (n - 1) == 0 and n >= 2)
    ):
        raise ScheduleError(f"{s.var.name} and {columns} are not the two loops of a square tile of 2^k")
    if len(inner.body) != 1 or not isinstance(st := inner.body[0], Store):
        raise ScheduleError(f"{columns} does not hold one store alone")
    return s, inner, st, n


def _tiles(
    b: Builder, crossing: Sequence[Expr], st: Store, down: Vectorizer, loops: tuple[For, For], n: int, m: int
) -> dict[Expr, tuple[Expr, Buffer]]:
    """For each load that crosses the columns a stand-in and the tile where its rows lie; m vectors of n lanes."""
    r, c = loops
    tiles: dict[Expr, tuple[Expr, Buffer]] = {}
    for k, x in enumerate(crossing):
        assert isinstance(x, Load)
        at = down.contiguous(x.buf, x.idx)
        if at is None or x.limit is not None or x.buf is st.buf:
            raise ScheduleError(f"{x!r} is unit stride along neither {r.var.name} nor {c.var.name}")
        whole = value(r.extent) == n or nonneg(
            x.buf.shape[-1] - at[-1] - n
        )  # lanes past the last row may be read, they are not used
        row = load(x.buf, at, n, None if whole else r.extent)
        tiles[x] = (
            var(f"tile{k}.", x.dtype, lanes=n),
            zipped(b, partial(_in_column, row, c), c.extent, m, n, f"t{k}_"),
        )
    return tiles


def _in_column(row: Expr, c: For, j: Expr) -> Expr:
    return substitute(row, {c.var: c.lo + j})


def _runs_along(down: Vectorizer, st: Store) -> bool:
    """Does each load of what is stored lie along the rows, or have one value for all of them?"""
    loads = [x for x in walk(st.value) if isinstance(x, Load)]
    return st.value.dtype.kind != "b" and all(
        x.buf is not st.buf and (down.v not in free(x) or down.contiguous(x.buf, x.idx) is not None) for x in loads
    )


def zipped(b: Builder, row: Callable[[Expr], Expr], count: Expr, m: int, n: int, name: str) -> Buffer:
    """m vectors of n lanes, zipped log2(m) times: a transposition if m = n. `row`: vector j < `count`; others 0."""
    first, made = row(const(0)), value(count)
    assert made is not None
    if made == m == n and n * first.dtype.bytes > SHUFFLED:
        return _transposed(b, row, n, SHUFFLED // first.dtype.bytes, name)
    tile = b.alloc(name + "0", first.dtype, m, n)
    with b.loop(f"{name}c", made, "unroll") as j:
        b.store(tile, (j, 0), row(j), n)
    if made < m:
        with b.loop(f"{name}z", m - made, "unroll") as j:
            b.store(tile, (j + made, 0), const(0, first.dtype), n)
    for k in range(1, m.bit_length()):
        to = b.alloc(f"{name}{k}", first.dtype, m, n)
        with b.loop(f"{name}h", m // 2, "unroll") as h:
            pair = load(tile, (h, 0), n), load(tile, (h + m // 2, 0), n)
            b.store(to, (2 * h, 0), call("zip_low", *pair), n)
            b.store(to, (2 * h + 1, 0), call("zip_high", *pair), n)
        tile = to
    return tile


def _transposed(b: Builder, row: Callable[[Expr], Expr], n: int, c: int, name: str) -> Buffer:
    """n vectors of n lanes, transposed by shuffles within groups of c lanes, then of whole groups.

    CPUs with vectors of several groups do the former twice as fast as shuffles of any lanes, or in half the
    instructions. Rounds zip vector h with vector h + n/2. Seen as bits of a number, that moves the highest bit of the
    row's number into the lanes, and the lanes' highest into the row's. So rows begin, and end, with the number's two
    halves in turned order.
    """
    groups, dtype = n // c, row(const(0)).dtype
    tile = b.alloc(name + "0", dtype, n, n)
    with b.loop(f"{name}c", c, "unroll") as i, b.loop(f"{name}g", groups, "unroll") as g:
        b.store(tile, (i * groups + g, 0), row(g * c + i), n)
    for k in range(1, n.bit_length()):
        to = b.alloc(f"{name}{k}", dtype, n, n)
        shuffle = (1, c) if k < c.bit_length() else (c, n)
        last = k == n.bit_length() - 1
        with b.loop(f"{name}c", c, "unroll") as i, b.loop(f"{name}g", groups // 2, "unroll") as g:
            h = i * (groups // 2) + g
            pair = load(tile, (h, 0), n), load(tile, (h + n // 2, 0), n)
            for half, which in enumerate(("low", "high")):
                to_row = (2 * g + half) * c + i if last else 2 * h + half
                b.store(to, (to_row, 0), call(f"interleave_{which}", *pair, *shuffle), n)
        tile = to
    return tile
