"""Schedule primitive: a square tile whose loads run along one loop and whose stores along another becomes vectors and shuffles.

Without it the loads of such a nest gather, one cache access for each lane.
"""

from __future__ import annotations

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, free, load, substitute, value, var, walk
from dnnc.ir.operator.stmt import Block, Buffer, Builder, For, Store, call
from dnnc.passes.schedule.memory import Vectorizer
from dnnc.passes.schedule.state import edit, only


def transpose_tile(b: Block, rows: str, columns: str) -> Block:
    """`for r in range(4): for c in range(4): y[r, c] = f(x[c, r])`  ->

    `t0[c, 0:+4] = x[c, 0:+4]` for 4 c; `t1[2*h, :] = zip_low(t0[h, :], t0[h + 2, :])`, `t1[2*h + 1, :] = zip_high(..)` for 2 h;
    the same from t1 to t2; `y[r, 0:+4] = f(t2[r, 0:+4])` for 4 r.

    log2(n) rounds of zipping row h with row h + n/2 transpose an n x n tile. Loads that run along the columns stay as they are."""

    def go(s: For) -> Block:
        inner = only(s)
        n = value(s.extent)
        if inner.var.name != columns or n is None or value(inner.extent) != n or n & (n - 1) or n < 2:
            raise ScheduleError(f"{rows} and {columns} are not the two loops of a square tile of 2^k")
        if len(inner.body) != 1 or not isinstance(st := inner.body[0], Store):
            raise ScheduleError(f"{columns} does not hold one store alone")
        return _tile(s, inner, st, n)

    return edit(b, rows, go)


def _tile(r: For, c: For, st: Store, n: int) -> Block:
    down, along = Vectorizer(r.var, r.lo, n), Vectorizer(c.var, c.lo, n)
    crossing = [x for x in walk(st.value) if isinstance(x, Load) and c.var in free(x) and along.contiguous(x.buf, x.idx) is None]
    if not crossing:
        raise ScheduleError(f"no load runs along {r.var.name}")
    b = Builder()
    names: dict[Expr, Expr] = {}
    tiles: dict[Expr, Buffer] = {}
    for k, x in enumerate(crossing):
        assert isinstance(x, Load)
        at = down.contiguous(x.buf, x.idx)
        if at is None or x.limit is not None or x.buf is st.buf:
            raise ScheduleError(f"{x!r} is unit stride along neither {r.var.name} nor {c.var.name}")
        stand_in = var(f"tile{k}.", x.dtype, lanes=n)
        names[x], tiles[stand_in] = stand_in, _transposed(b, x.buf, at, c, n, f"t{k}_")
    at = along.contiguous(st.buf, st.idx)
    if at is None:
        raise ScheduleError(f"the store is not unit stride along {c.var.name}")
    e = along.expr(substitute(st.value, names))
    with b.loop(r.var.name, r.hi, "unroll", r.lo) as i:
        found: dict[Expr, Expr] = {v: load(t, (i - r.lo, 0), n) for v, t in tiles.items()}
        here: dict[Expr, Expr] = {r.var: i}
        b.emit(Store(st.buf, tuple(substitute(x, here) for x in at), substitute(substitute(e, here), found), n))
    return b.block()


def _transposed(b: Builder, buf: Buffer, at: tuple[Expr, ...], c: For, n: int, name: str) -> Buffer:
    """The tile of a load, rows and columns exchanged."""
    tile = b.alloc(name + "0", buf.dtype, n, n)
    with b.loop(f"{name}c", n, "unroll") as j:
        b.store(tile, (j, 0), load(buf, [substitute(x, {c.var: c.lo + j}) for x in at], n), n)
    for k in range(1, n.bit_length()):
        to = b.alloc(f"{name}{k}", buf.dtype, n, n)
        with b.loop(f"{name}h", n // 2, "unroll") as h:
            pair = load(tile, (h, 0), n), load(tile, (h + n // 2, 0), n)
            b.store(to, (2 * h, 0), call("zip_low", *pair), n)
            b.store(to, (2 * h + 1, 0), call("zip_high", *pair), n)
        tile = to
    return tile
