"""Attention of half-precision operands on the tensor cores, by warp instructions (mma.sync).

Scores and the mean are fragments in f32; a warp's scores, rounded to halves, are the left operand of the second product
as they lie. Weights are powers of two: with f16 or bf16 operands the approximation's 2^-22 is nothing.
"""

from __future__ import annotations

from math import e, log2

from dnnc.backends.cuda.templates.attention.kernel import Flash, Grid, Shape, scale_of
from dnnc.backends.cuda.templates.attention.nest import Attention
from dnnc.backends.cuda.templates.contraction.staging import Tile, plan_tile
from dnnc.ir.dtype import DType, f32
from dnnc.ir.expr import Expr, cast, const, fma, load
from dnnc.ir.loops.stmt import Buffer, Builder, call

LOG2_E = log2(e)
KEPT = 128  # elements of a query up to which the fragments of 16 rows stay in registers; half as many for 32 rows


def rounded(n: int, to: int = 16) -> int:
    return -(-n // to) * to


def is_kept(a: Attention, s: Shape) -> bool:
    """Do the queries stay in registers?"""
    return a.depth.size * (s.rows // s.warps) <= KEPT * 16


class Mma(Flash):
    pad = 8

    def __init__(self, a: Attention, shape: Shape, dtype: DType) -> None:
        self.kept = (a.depth.size <= KEPT and shape.rows // shape.warps == 16) or a.depth.size <= 64
        self.scale = scale_of(a.score, load(a.dots, (0,)))
        super().__init__(a, shape, dtype, rounded(a.depth.size), rounded(a.cols.size))

    @property
    def factor(self) -> float | None:
        return self.scale

    def plan(self) -> tuple[Tile, Tile, Tile]:
        s, group = self.s, 32 * self.s.warps
        return (
            plan_tile(self.a.products, self.a.q, s.rows, self.depth, s.threads, 1),
            plan_tile(self.a.products, self.a.k, s.keys, self.depth, group, 1),
            plan_tile(self.a.mean, self.a.v, self.cols, s.keys, group, s.shares),
        )

    def grid(self) -> Grid:
        """Fragments of 16 x 8: a lane has two neighbouring keys of row lane // 4 and of the one 8 below."""
        lane = self.lane
        return Grid(
            self.wm // 8,
            self.s.keys // 8,
            2,
            lambda r, j: (r // 2, j, r % 2 * 2),
            lambda r: r // 2 * 16 + r % 2 * 8 + lane // 4,
            lambda j: j * 8 + lane % 4 * 2,
            (1, 2),
            2,
            self.cols // 8,
            lambda j: j * 8 + lane % 4 * 2,
            lambda r, j: (r // 2, j, r % 2 * 2),
        )

    def start(self, b: Builder) -> tuple[Buffer, Buffer]:
        self.high = self.wm // 16
        if self.kept:
            self.queries = b.alloc("queries", self.dtype, self.high, self.depth // 16, 8)
            with b.loop("i", self.high, "unroll") as i, b.loop("k", self.depth // 16, "unroll") as k:
                b.store(self.queries, (i, k, 0), self.query(i, k), 8)
        mixed = b.alloc("mixed", f32, self.high, self.cols // 8, 4)
        with b.loop("i", self.high, "unroll") as i, b.loop("j", self.cols // 8, "unroll") as j:
            b.store(mixed, (i, j, 0), const(0.0, f32), 4)
        return mixed, b.alloc("scores", f32, self.high, self.s.keys // 8, 4)

    def query(self, i: Expr, k: Expr) -> Expr:
        return fragment(self.tiles[0], self.shared[0], const(0), self.row + i * 16, k * 16, 0, self.lane)

    def multiply(self, b: Builder, slot: Expr, scores: Buffer) -> None:
        n = self.s.keys
        with b.loop("i", self.high, "unroll") as i, b.loop("j", n // 8, "unroll") as j:
            b.store(scores, (i, j, 0), const(0.0, f32), 4)
        fq, fk = b.alloc("fq", self.dtype, self.high, 8), b.alloc("fk", self.dtype, 8)
        with b.loop("k", self.depth // 16, "unroll") as k:
            with b.loop("i", self.high, "unroll") as i:
                b.store(fq, (i, 0), self.queries.at(i, k, 0, lanes=8) if self.kept else self.query(i, k), 8)
            with b.loop("j", n // 16, "unroll") as j:
                b.store(fk, (0,), fragment(self.tiles[1], self.shared[1], slot, j * 16, k * 16, 1, self.lane), 8)
                with b.loop("i", self.high, "unroll") as i, b.loop("h", 2, "unroll") as h:
                    total = mma(scores, (i, j * 2 + h), fq.at(i, 0, lanes=8), fk.at(h * 4, lanes=4))
                    b.store(scores, (i, j * 2 + h, 0), total, 4)

    def mix(self, b: Builder, slot: Expr, scores: Buffer, mixed: Buffer) -> None:
        weights, fv = b.alloc("weights", self.dtype, self.high, 8), b.alloc("fv", self.dtype, 8)
        with b.loop("k", self.s.keys // 16, "unroll") as k:
            with b.loop("i", self.high, "unroll") as i, b.loop("h", 2, "unroll") as h:
                b.store(weights, (i, h * 4), cast(scores.at(i, k * 2 + h, 0, lanes=4), self.dtype), 4)
            with b.loop("j", self.cols // 16, "unroll") as j:
                b.store(fv, (0,), fragment(self.tiles[2], self.shared[2], slot, j * 16, k * 16, 1, self.lane), 8)
                with b.loop("i", self.high, "unroll") as i, b.loop("h", 2, "unroll") as h:
                    total = mma(mixed, (i, j * 2 + h), weights.at(i, 0, lanes=8), fv.at(h * 4, lanes=4))
                    b.store(mixed, (i, j * 2 + h, 0), total, 4)

    def weight(self, x: Expr, top: Expr) -> Expr:
        """e^(x - top) of scores, or of products that are yet to be scaled: one rounding and one power."""
        if self.scale is None:
            return call("exp2", (x - top) * LOG2_E)
        by = const(self.scale * LOG2_E, f32)
        return call("exp2", fma(x, by, top * const(-self.scale * LOG2_E, f32)))


def mma(acc: Buffer, at: tuple[Expr, ...], left: Expr, right: Expr) -> Expr:
    return call("mma_m16n8k16", acc.at(*at, 0, lanes=4), left, right)


def fragment(tile: Tile, buf: Buffer, slot: Expr, side: Expr, k: Expr, which: int, lane: Expr) -> Expr:
    """16 x 16 elements. Lane 8*m + r gives the address of row r of matrix m; of the first operand matrices 1 and 3 are
    those of the lower rows, of the second one those of the upper half of the sum.
    """
    low, high, r = lane // 8 % 2 * 8, lane // 16 * 8, lane % 8
    if tile.rows == "side":
        at = (side + low + r, k + high) if which == 0 else (side + high + r, k + low)
        return call("ldmatrix_x4", buf.ref(slot, *at, lanes=8))
    at = (k + high + r, side + low) if which == 0 else (k + low + r, side + high)
    return call("ldmatrix_x4_trans", buf.ref(slot, *at, lanes=8))
