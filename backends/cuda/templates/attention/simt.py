"""Attention in f32 on the ordinary cores: the scores of a warp are tiles of its lanes' registers, and go through shared
memory to the second product.

A warp's lanes are 4 x 8: row i of a lane is i*4 + lane // 8, its keys are j*8 + lane % 8, its columns four in each 32.
"""

from __future__ import annotations

from dnnc.backends.cuda.templates.attention.kernel import Flash, Grid, Shape
from dnnc.backends.cuda.templates.attention.nest import Attention
from dnnc.backends.cuda.templates.contraction.staging import Tile, plan_tile
from dnnc.ir.dtype import f32
from dnnc.ir.expr import Expr, const, fma
from dnnc.ir.loops.stmt import Buffer, Builder

DOWN, ACROSS, WIDE = 4, 8, 4  # lanes over rows and over keys; elements that a lane reads at once


class Simt(Flash):
    pad = 4

    def __init__(self, a: Attention, shape: Shape) -> None:
        super().__init__(
            a, shape, f32, -(-a.depth.size // WIDE) * WIDE, -(-a.cols.size // (ACROSS * WIDE)) * ACROSS * WIDE
        )

    def plan(self) -> tuple[Tile, Tile, Tile]:
        s, group = self.s, 32 * self.s.warps
        return (
            plan_tile(self.a.products, self.a.q, s.rows, self.depth, s.threads, 1, rows="side"),
            plan_tile(self.a.products, self.a.k, s.keys, self.depth, group, 1, rows="side"),
            plan_tile(self.a.mean, self.a.v, self.cols, s.keys, group, s.shares, rows="sum"),
        )

    def grid(self) -> Grid:
        lane = self.lane
        return Grid(
            self.wm // DOWN,
            self.s.keys // ACROSS,
            1,
            lambda r, j: (r, j),
            lambda r: r * DOWN + lane // ACROSS,
            lambda j: j * ACROSS + lane % ACROSS,
            (1, 2, 4),
            WIDE,
            self.cols // (ACROSS * WIDE),
            lambda j: (j * ACROSS + lane % ACROSS) * WIDE,
            lambda r, j: (r, j * WIDE),
        )

    def allocate(self, b: Builder) -> None:
        super().allocate(b)
        self.weights = b.alloc(
            "weights", f32, self.s.warps * self.s.slices, self.wm, self.s.keys + self.pad, space="shared"
        )

    def start(self, b: Builder) -> tuple[Buffer, Buffer]:
        self.high = self.wm // DOWN
        mixed = b.alloc("mixed", f32, self.high, self.cols // ACROSS)
        with b.loop("i", self.high, "unroll") as i, b.loop("j", self.cols // ACROSS, "unroll") as j:
            b.store(mixed, (i, j), const(0.0, f32))
        return mixed, b.alloc("scores", f32, self.high, self.s.keys // ACROSS)

    def multiply(self, b: Builder, slot: Expr, scores: Buffer) -> None:
        m, n = self.high, self.s.keys // ACROSS
        with b.loop("i", m, "unroll") as i, b.loop("j", n, "unroll") as j:
            b.store(scores, (i, j), const(0.0, f32))
        left, right = b.alloc("left", f32, m, WIDE), b.alloc("right", f32, WIDE)
        (q, k), lane = self.shared[:2], self.lane
        with b.loop("d", self.depth // WIDE) as d:
            with b.loop("i", m, "unroll") as i:
                b.store(left, (i, 0), q.at(0, self.row + i * DOWN + lane // ACROSS, d * WIDE, lanes=WIDE), WIDE)
            with b.loop("j", n, "unroll") as j:
                b.store(right, (0,), k.at(slot, j * ACROSS + lane % ACROSS, d * WIDE, lanes=WIDE), WIDE)
                with b.loop("i", m, "unroll") as i, b.loop("c", WIDE, "unroll") as c:
                    b.store(scores, (i, j), fma(left[i, c], right[c], scores[i, j]))

    def mix(self, b: Builder, slot: Expr, scores: Buffer, mixed: Buffer) -> None:
        m, lane, v = self.high, self.lane, self.shared[2]
        with b.loop("i", m, "unroll") as i, b.loop("j", self.s.keys // ACROSS, "unroll") as j:
            b.store(self.weights, (self.w, i * DOWN + lane // ACROSS, j * ACROSS + lane % ACROSS), scores[i, j])
        b.do("syncwarp")
        left, right = b.alloc("weight", f32, m, WIDE), b.alloc("value", f32, WIDE)
        with b.loop("k", self.s.keys // WIDE) as k:
            with b.loop("i", m, "unroll") as i:
                b.store(left, (i, 0), self.weights.at(self.w, i * DOWN + lane // ACROSS, k * WIDE, lanes=WIDE), WIDE)
            with b.loop("n", WIDE, "unroll") as n, b.loop("j", self.cols // (ACROSS * WIDE), "unroll") as j:
                b.store(right, (0,), v.at(slot, k * WIDE + n, (j * ACROSS + lane % ACROSS) * WIDE, lanes=WIDE), WIDE)
                with b.loop("i", m, "unroll") as i, b.loop("c", WIDE, "unroll") as c:
                    b.store(mixed, (i, j * WIDE + c), fma(left[i, n], right[c], mixed[i, j * WIDE + c]))
        b.do("syncwarp")
