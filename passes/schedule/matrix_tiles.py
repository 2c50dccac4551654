"""Schedule primitive `matrix_tiles`: a register tile's sums in tiles of two dimensions (`dnnc.ir.loops.tiles`).

    acc: i32[2, 3, 16, 16] @ register                       t: i32[6, 16, 16] @ tile; ta: u8[2, 16, 64] @ tile; ..
    acc[..] = 0                                             tile_zero(t[..])
    for k in range(12):                                     for k in range(12):
        for i in range(2):                                      for i in unroll(2):
            for j in range(3):                                      tile_load(ta[i], x[32*p + 16*i, 64*k], 1)
                for r in range(16):                         ->  for j in unroll(3):
                    for q in range(16):                             tile_load(tb[j], w[j, 16*k, 0], 1)
                        for l in range(16):                     for i in unroll(2):
                            for d in range(4):                      for j in unroll(3):
                                acc[i, j, r, l] += ..                   tile_dot(t[3*i + j], ta[i], tb[j])
    .. = f(acc[..])                                         tile_store(sums[i, j], t[3*i + j], 1); .. = f(sums[..])

Sums of integers have no order, those of bf16 products any.
"""

from __future__ import annotations

from collections.abc import Callable

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Var, const, ref, substitute, value
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, Builder, Eval, For, Stmt, Store, map_stmt, walk_stmts
from dnnc.ir.loops.tiles import FACTORS, TILES, fits
from dnnc.passes.schedule.buffers import swap_buffers
from dnnc.passes.schedule.loops import is_reduction
from dnnc.passes.schedule.quads import factors_of
from dnnc.passes.schedule.state import edit, find, only


def matrix_tiles(b: Block, *names: str) -> Block:
    """Compute the sums of the loops i, j, r, q, l and d of the text above, each right inside of the one before it."""
    nest = [find(b, names[0])]
    while len(nest) < len(names):
        nest.append(only(nest[-1]))
    if len(names) != 6 or [x.var.name for x in nest] != list(names) or any(value(x.extent) is None for x in nest):
        raise ScheduleError(f"{', '.join(names)} are no six loops of constant length, each right inside of another")
    (st, *more) = nest[-1].body
    if more or not isinstance(st, Store) or not isinstance(st.value, Op) or not is_reduction(st):
        raise ScheduleError(f"{names[-1]} is no loop of a sum")
    own = next((a for a in st.value.args if isinstance(a, Load) and a.buf is st.buf), None)
    if own is None or len(st.buf.shape) != 4:
        raise ScheduleError(f"{st.buf.name} is no register tile of four axes")
    tiles = _Tiles(nest, own, *factors_of([a for a in st.value.args if a is not own], st.buf.dtype, nest[4].var))
    return tiles.replaced(edit(b, names[0], lambda s: tiles.products()))


class _Tiles:
    """The tiles of a nest of six loops."""

    def __init__(self, nest: list[For], own: Load, x: Load, w: Load) -> None:
        self.nest, self.acc, self.x, self.w = nest, own.buf, x, w
        i, j, r, q, l, d = nest  # noqa: E741
        self.first: dict[Expr, Expr] = {s.var: s.lo for s in nest}
        (i_, j_, r_, q_, l_, d_) = self.counts = [value(s.extent) or 0 for s in nest]
        self.acc_tiles = Buffer(f"{self.acc.name}_t", self.acc.dtype, (const(i_ * j_), const(r_), const(l_)), "tile")
        self.x_tiles = Buffer(f"{x.buf.name}_t", x.dtype, (const(i_), const(r_), const(q_ * d_)), "tile")
        self.w_tiles = Buffer(f"{w.buf.name}_t", w.dtype, (const(j_), const(q_), const(l_ * d_)), "tile")
        self.sums = Buffer(f"{self.acc.name}_s", self.acc.dtype, self.acc.shape, "local")
        held = (self.acc_tiles, self.x_tiles, self.w_tiles)
        if i_ * j_ + i_ + j_ > TILES or not all(map(fits, held)) or tuple(b.dtype for b in held) not in FACTORS:
            raise ScheduleError(f"tiles of {self.counts} elements of {x.dtype} and {w.dtype} do not fit into registers")
        # along the last two axes, one of which is that of a tile's rows
        self.step = _moved(x, r.var)[-2]
        wanted = [(x, r, (self.step, 0)), (x, q, (0, d_)), (x, d, (0, 1)), (x, j, (0, 0)), (x, l, (0, 0))]
        wanted += [(w, q, (1, 0)), (w, l, (0, d_)), (w, d, (0, 1)), (w, i, (0, 0)), (w, r, (0, 0))]
        for load, loop, by in wanted:
            if value(loop.extent) != 1 and _moved(load, loop.var) != (*[0] * (len(load.idx) - 2), *by):
                raise ScheduleError(f"{load!r} does not move by {by} with {loop.var.name}")
        axes = [v - v.lo for v in (i.var, j.var, r.var, l.var) if v.lo is not None]
        if list(map(value, (a - b for a, b in zip(own.idx, axes)))) != [0] * 4:
            raise ScheduleError(f"{own!r} is not the place of {i.var.name}, {j.var.name}, {r.var.name}, {l.var.name}")

    def products(self) -> Block:
        """Loads of the tiles, and their products."""
        i, j = self.nest[:2]
        b = Builder()
        for loop, tiles, x, step in ((i, self.x_tiles, self.x, self.step), (j, self.w_tiles, self.w, 1)):
            with b.loop(f"{loop.var.name}_a", loop.extent, "unroll") as v:
                at = [substitute(e, {**self.first, loop.var: v + loop.lo}) for e in x.idx]
                b.do("tile_load", ref(tiles, (v, 0, 0)), ref(x.buf, at), step)
        self._each(
            b,
            "_d",
            lambda k, v, u: b.do(
                "tile_dot",
                ref(self.acc_tiles, (k, 0, 0)),
                ref(self.x_tiles, (v, 0, 0)),
                ref(self.w_tiles, (u, 0, 0)),
            ),
        )
        return b.block()

    def _each(self, b: Builder, end: str, do: Callable[[Expr, Expr, Expr], None]) -> None:
        """A statement for each tile of sums."""
        i, j = self.nest[:2]
        with b.loop(i.var.name + end, i.extent, "unroll") as v, b.loop(j.var.name + end, j.extent, "unroll") as u:
            do(v * self.counts[1] + u, v, u)

    def replaced(self, b: Block) -> Block:
        """The block with its sums, zeros ahead of the products, and what is made of the sums behind them."""
        at = next((k for k, s in enumerate(b) if isinstance(s, Alloc) and s.buf is self.acc), None)
        if at is None:
            return tuple(map_stmt(s, lambda e: e, self.replaced) for s in b)
        start = next((k for k in range(at, len(b)) if self._zeros(b[k])), None)
        end = next((k for k in range(at, len(b)) if any(map(self._multiplies, walk_stmts((b[k],))))), None)
        if start is None or end is None or end <= start:
            raise ScheduleError(f"{self.acc.name} is not set to 0 in one loop, and added up in another one")
        out = Builder()
        for buf in (self.acc_tiles, self.x_tiles, self.w_tiles, self.sums):
            out.emit(Alloc(buf))
        self._each(out, "_z", lambda k, v, u: out.do("tile_zero", ref(self.acc_tiles, (k, 0, 0))))
        for s in (*b[at + 1 : start], *b[start + 1 : end + 1]):
            out.emit(s)
        self._each(
            out,
            "_s",
            lambda k, v, u: out.do("tile_store", ref(self.sums, (v, u, 0, 0)), ref(self.acc_tiles, (k, 0, 0)), 1),
        )
        return (*b[:at], *out.block(), *swap_buffers(b[end + 1 :], {self.acc: self.sums}))

    def _zeros(self, s: Stmt) -> bool:
        """Is this the loop that sets all sums to 0?"""
        inner = [x for x in walk_stmts((s,)) if not isinstance(x, For)]
        zero = const(0, self.acc.dtype)
        return [isinstance(x, Store) and x.buf is self.acc and x.value is zero for x in inner] == [True]

    def _multiplies(self, s: Stmt) -> bool:
        return isinstance(s, Eval) and s.name == "tile_dot"


def _moved(x: Load, v: Var) -> tuple[int, ...]:
    """How far a load moves with v along each axis; ScheduleError where that is no constant."""
    by = [value(substitute(e, {v: v + 1}) - e) for e in x.idx]
    if None in by:
        raise ScheduleError(f"{x!r} does not move by a constant with {v.name}")
    return tuple(int(d or 0) for d in by)
