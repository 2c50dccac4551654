"""Schedule primitive: rows shorter than a vector, computed side by side, a lane each.

    for v in range(16):                             m: f32[16] @ register
        m: f32[1] @ register                        for r in range(5):
        for r in range(5):                              m[0:+16] = max(m[0:+16], x[i + lanes(16), r])
            m[0] = max(m[0], x[i + v, r])      ->   t: f32[5, 16] @ local
        for c in range(5):                          for c in range(5):
            y[i + v, c] = x[i + v, c] - m[0]            t[c, 0:+16] = x[i + lanes(16), c] - m[0:+16]
                                                    for v in range(16):
                                                        for c in range(5):
                                                            y[i + v, c] = t[c, v]

What a row needs for itself gets an axis of lanes, the innermost; results are computed in lanes, and copied afterwards
in the order of memory. The copies are loops of their own, for other primitives to make vectors of.
"""

from __future__ import annotations

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, const, substitute, value
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, For, Stmt, Store, stored, walk_stmts
from dnnc.passes.schedule.buffers import swap_buffers
from dnnc.passes.schedule.memory import Vectorizer
from dnnc.passes.schedule.state import edit, make_loop


def side_by_side(b: Block, name: str, lanes: int) -> Block:
    """Make lanes of the loop over rows, whose extent they are. Copies of results are called NAME_copyK."""

    def go(s: For) -> Block:
        if value(s.extent) != lanes:
            raise ScheduleError(f"{name} has {s.extent} rows, not a vector of {lanes}")
        own = [x.buf for x in walk_stmts(s.body) if isinstance(x, Alloc)]
        wide = {p: Buffer(p.name, p.dtype, (*p.shape, const(lanes)), p.space) for p in own}
        first: list[Stmt] = [Alloc(p) for p in wide.values()]
        copies: list[Stmt] = []
        body: list[Stmt] = []
        for st in s.body:
            if isinstance(st, Alloc):
                continue
            if stored((st,)) <= set(own) or isinstance(st, Store):
                body.append(st)
                continue
            result, copy, tile = _in_tile(s, st, lanes, len(copies))
            first.append(Alloc(tile))
            body.append(result)
            copies.append(copy)
        moved = swap_buffers(tuple(body), wide, lambda buf, idx: (*idx, s.var - s.lo))
        return (*first, *Vectorizer(s.var, s.lo, lanes).block(moved), *copies)

    return edit(b, name, go)


def _in_tile(s: For, st: Stmt, lanes: int, k: int) -> tuple[Stmt, Stmt, Buffer]:
    """The nest of a result with a tile in place of its memory, the copy from there, and the tile."""
    inner = st.body[0] if isinstance(st, For) and len(st.body) == 1 else None
    if not isinstance(st, For) or not isinstance(inner, Store) or inner.lanes > 1 or inner.limit is not None:
        raise ScheduleError(f"the rows of {s.var.name} end in another way than in one row of results")
    tile = Buffer(f"tile{k or ''}", inner.buf.dtype, (st.extent, const(lanes)), "local")
    kept = For(st.var, st.lo, st.hi, st.kind, (Store(tile, (st.var - st.lo, s.var - s.lo), inner.value),))

    def element(v: Expr, c: Expr) -> Block:
        at = {s.var: v + s.lo, st.var: c + st.lo}
        return (Store(inner.buf, tuple(substitute(i, at) for i in inner.idx), tile[c, v]),)

    def row(v: Expr) -> Block:
        return (make_loop(f"{s.var.name}_copy{k}c", st.extent, "range", lambda c: element(v, c)),)

    return kept, make_loop(f"{s.var.name}_copy{k}", lanes, "range", row), tile
