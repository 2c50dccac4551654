"""Hopper matrix product with 2:4 sparse weights: C[m, n] = finish(sum over k of A[m, k] * B[n, k]) in 16-bit floats.

The ring, its producer and its consumers are those of `wgmma_kernel.py`. Sparse tensor cores (wgmma.sp) take the sparse
factor first, so a consumer has 64 rows of B, the weights, and all pixels (rows of A) of a tile: sums lie transposed in
registers, and are transposed on their way to shared memory. A stage holds a tile of `Pairs` in one piece, values and
places; each thread reads its word of places for two products. The second factor is read twice as fast as a dense
product reads it: shared memory is the bound, and with it the L2 cache.

A consumer waits for each stage's products, and meanwhile the other one's go on. With products of the next stage under
way, ptxas 13.5 reads sums behind the loop ahead of the last wait: it does not know that `wgmma.sp` still adds to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from dnnc.backends.cuda.templates.contraction.wgmma_kernel import (
    BARRIERS,
    ROW,
    STORE_BUFFERS,
    Product,
    Tiling,
    Writer,
    divisor,
)
from dnnc.ir.expr import Expr, const, load, minimum
from dnnc.ir.loops.hopper import WGMMA_ROWS
from dnnc.ir.loops.stmt import call
from dnnc.ir.pairs import HALF, LINE, LINES, ROWS, STEP

SPLIT_PAD = 4  # sums behind those of a pixel, which blocks share: neighbours begin in different banks
PART = 16  # stored elements of a row in one product: 32 columns


@dataclass(frozen=True)
class PairTiling(Tiling):
    """bm rows of the weights (128) and bn pixels at a time."""

    @property
    def stage_bytes(self) -> int:
        return LINES * ROW + self.bn * ROW

    @property
    def shared_bytes(self) -> int:
        if self.split > 1:
            return self.stages * self.stage_bytes + self.bn * (ROWS + SPLIT_PAD) * 4 + BARRIERS
        return self.stages * self.stage_bytes + self.consumers * STORE_BUFFERS * WGMMA_ROWS * ROW + BARRIERS


class PairWriter(Writer):
    """Here a tile's row is its first row of weights, its column the first pixel. `p.b`: lines of `Pairs`."""

    releases = 4

    def __init__(self, p: Product, t: PairTiling) -> None:
        super().__init__(p, t)
        self.mt, self.nt, self.kt = -(-p.n // ROWS), -(-p.m // t.bn), -(-p.k // STEP)
        self.steps = self.kt  # of a row of tiles
        self.tiles = self.mt * self.nt
        self.blocks = min(self.tiles, t.blocks)
        self.group = divisor(self.mt, t.group)

    def allocate(self) -> None:
        b, t, p = self.b, self.t, self.p
        self.sa = b.alloc("sa", p.b.dtype, t.stages, LINES, LINE, space="shared", swizzle=8)
        self.sb = b.alloc("sb", p.a.dtype, t.stages, t.bn, STEP, space="shared", swizzle=8)
        self.allocate_barriers()
        self.allocate_results()

    def allocate_results(self) -> None:
        if self.in_pieces:
            super().allocate_results()

    @property
    def in_pieces(self) -> bool:
        """Are results of 16 bits that can be stored 16 bytes of a row at a time? Others are stored one by one."""
        return self.p.c.dtype.bytes == 2 and (self.p.in_boxes or self.p.in_vectors)

    def fetch(self, row: Expr, col: Expr) -> None:
        for x in self.p.beside:
            width = ROW // x.dtype.bytes
            with self.b.loop("piece", ROWS // width, "unroll") as piece:
                at = row + piece * width
                with self.b.when(at < self.p.n):
                    self.b.do("tma_fetch", x.ref(col, at, lanes=width), self.t.bn)

    def load(self, which: str, z: tuple[Expr, ...], row: Expr, col: Expr, s: Expr, step: Expr) -> None:
        b, full, at = self.b, self.full.ref(s), step + self.origin
        if "b" in which:
            tile = (row // ROWS * self.steps + at) * LINES
            b.do("tma_load", self.sa.ref(s, 0, 0, lanes=LINE), self.p.b.ref(tile, 0, lanes=LINE), LINES, full)
        if "a" in which:
            source = self.p.a.ref(col, at * STEP, lanes=STEP)
            b.do("tma_load", self.sb.ref(s, 0, 0, lanes=STEP), source, self.t.bn, full)

    def release(self, step: Expr) -> None:
        """Every warp gives a stage back: its threads have read places there."""
        self.b.do("syncwarp")
        with self.b.when(self.lane < 1):
            self.b.do("mbar_arrive", self.empty.ref(step % self.t.stages))

    def compute(self, done: Expr, z: tuple[Expr, ...], row: Expr, col: Expr) -> None:
        b, acc = self.b, self.acc.ref(0, lanes=self.t.bn // 2)
        with b.loop("step", self.kt) as step:
            s, parity = self.stage(done * self.kt + step)
            b.do("mbar_wait", self.full.ref(s), parity)
            word = load(self.sa, (s, HALF + self.w * 4 + self.warp, self.lane * 2), 2)
            places = b.let("places", call("words", word))
            b.do("wgmma_fence")
            for part in range(STEP // (2 * PART)):
                left = self.sa.ref(s, 0, self.w * (LINE // 2) + part * PART, lanes=PART)
                right = self.sb.ref(s, 0, part * 2 * PART, lanes=2 * PART)
                b.do("wgmma_sp", acc, left, right, places, step + part, part)
            b.do("wgmma_commit")
            b.do("wgmma_wait", 0, acc)
            self.release(done * self.kt + step)
        self.finish_tile(done, z, row, col)

    def finish_tile(self, done: Expr, z: tuple[Expr, ...], row: Expr, col: Expr) -> None:
        """64 pixels of the consumer's 64 rows at a time: registers -> shared memory, transposed -> result."""
        b, p = self.b, self.p
        first, pieces = b.let("first", row + self.w * WGMMA_ROWS), self.t.bn // WGMMA_ROWS
        if not self.in_pieces:
            self.store_elements(z, first, col)
            return
        with b.loop("q", pieces, "unroll") as q:
            buffer = b.let("buffer", (done * pieces + q) % STORE_BUFFERS)
            v = b.alloc("v", p.c.dtype, WGMMA_ROWS // 16, 8)
            with b.loop("c", WGMMA_ROWS // 16, "unroll") as c, b.loop("r", 8, "unroll") as r:
                pixel, at = self.place(first, col + q * WGMMA_ROWS + c * 16, r)
                total = load(self.acc, (q * (WGMMA_ROWS // 2) + c * 8 + r,))
                made = p.finish(const(0), minimum(pixel, p.m - 1), minimum(at, p.n - 1), const(0), total)
                b.store(v, (c, r), made)
            self.begin_piece()
            with b.loop("c", WGMMA_ROWS // 16, "unroll") as c:
                place = (c * 16 + self.lane // 16 * 8 + self.lane % 8, self.warp * 16 + self.lane // 8 % 2 * 8)
                b.do("stmatrix_x4_trans", self.out.ref(self.w, buffer, *place, lanes=8), load(v, (c, 0), 8))
            self.store_piece(z, col + q * WGMMA_ROWS, first, buffer)

    def place(self, first: Expr, col: Expr, r: Expr) -> tuple[Expr, Expr]:
        """Pixel and row of the weights of register r of 8, of 16 pixels."""
        pixel = col + r // 4 * 8 + self.lane % 4 * 2 + r % 2
        return pixel, first + self.warp * 16 + r % 4 // 2 * 8 + self.lane // 4

    def store_elements(self, z: tuple[Expr, ...], row: Expr, col: Expr) -> None:
        """Registers -> result, one by one."""
        b, p = self.b, self.p
        with b.loop("c", self.t.bn // 16, "unroll") as c, b.loop("r", 8, "unroll") as r:
            pixel, at = self.place(row, col + c * 16, r)
            with b.when(pixel < p.m), b.when(at < p.n):
                total = load(self.acc, (c * 8 + r,))
                b.store(p.c, p.place(z, pixel, at), p.finish(const(0), pixel, at, const(0), total))
