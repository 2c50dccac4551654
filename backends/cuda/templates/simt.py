"""Contractions on the ordinary cores: matrix products and convolutions in f32, f64 and integers, tiled in shared memory and registers.

    for block in block.x(batches * row tiles * column tiles):
        for t in thread.x(threads):
            acc[tm, tn] = 0
            for k0 in steps of bk:                       the next step's tiles are on their way to registers meanwhile
                for k in unroll(bk): acc += a[tm] (outer) b[tn]      from shared memory, 16 bytes at a time
            y = epilogue(acc)

A warp covers 4 x 8 thread tiles, so that its reads of shared memory take one pass for each operand. `slices` > 1 divides the steps of
the sum among groups of threads of a block, for problems with few tiles; their sums meet in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import NamedTuple

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import mma
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.backends.cuda.templates.nest import Contraction, contraction_of
from dnnc.backends.cuda.templates.staging import L2_RATE, LATENCY, Mover, Tile, plan_tile, resident
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, const, minimum
from dnnc.ir.operator.stmt import Buffer, Builder, Kernel
from dnnc.passes.schedule.problem import Knobs, Problem

WARP_ROWS, WARP_COLS = 4, 8  # thread tiles of a warp


class Blocking(NamedTuple):
    """Results of a block and of a thread."""

    bm: int
    bn: int
    tm: int
    tn: int

    @property
    def threads(self) -> int:
        return self.bm // self.tm * (self.bn // self.tn)


TILES = (
    Blocking(128, 128, 8, 8), Blocking(128, 64, 8, 8), Blocking(64, 128, 8, 8), Blocking(64, 64, 8, 4), Blocking(64, 64, 4, 4),
    Blocking(32, 64, 4, 4), Blocking(64, 32, 4, 4), Blocking(32, 32, 4, 2), Blocking(16, 64, 2, 4),
)  # fmt: skip
# of the arithmetic peak that the inner loop of a thread tile reaches: 4 reads of shared memory serve tm * tn / 4 times as many products
RATE = {(8, 8): 0.80, (8, 4): 0.68, (4, 4): 0.55, (4, 2): 0.38, (2, 4): 0.38}
WARPS_TO_FILL = 8  # of an SM, below which it waits for shared memory and arithmetic latency
CORES = 128  # products a cycle of an SM


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    c = contraction_of(problem)
    if c is None or min(c.sizes[1:3]) < mma.LEAST or (target.major >= 8 and mma.half_contraction(problem) is not None):
        return []
    found = [(cost(c, target, tile, slices), tile, slices) for tile in TILES for slices in (1, 2, 4) if _fits(c, target, tile, slices)]
    found.sort()
    return [_knobs(c, tile, slices) for _, tile, slices in found[:8]]


def _knobs(c: Contraction, tile: Blocking, slices: int) -> Knobs:
    bm, bn, tm, tn = tile
    return (("bm", bm), ("bn", bn), ("tm", tm), ("tn", tn), ("bk", _depth(c, tile)), ("slices", slices))


def _depth(c: Contraction, tile: Blocking) -> int:
    """Elements of the sum in a step: 16, as many bytes of 64-bit types."""
    return 8 if c.dtype.bytes > 4 else 16


def shared_bytes(c: Contraction, tile: Blocking, depth: int, slices: int) -> int:
    bm, bn = tile[:2]
    return (2 * slices * depth * (bm + bn + 8) + (slices - 1) * bm * bn) * c.dtype.bytes


def _fits(c: Contraction, target: GpuTarget, tile: Blocking, slices: int) -> bool:
    depth = _depth(c, tile)
    if slices > 1 and c.red.size < 8 * slices * depth:
        return False
    wide = c.dtype.bytes > 4 and tile[2] * tile[3] > 32  # accumulators of 64 bits take two registers
    return not wide and tile.threads * slices <= 512 and shared_bytes(c, tile, depth, slices) <= target.shared_bytes


def cost(c: Contraction, target: GpuTarget, tile: Blocking, slices: int) -> float:
    """Estimated cycles of the busiest SM: its blocks' steps, each as long as its products, its traffic or the wait for the next tiles takes."""
    batch, m, n, k = c.sizes
    bm, bn, tm, tn = tile
    depth = _depth(c, tile) * slices
    warps = tile.threads * slices // 32
    registers = (tm * tn + tm + tn + 48) * c.dtype.bytes // 4
    most = -(-batch * -(-m // bm) * -(-n // bn) // target.sms)  # blocks of the busiest SM
    together = min(most, resident(target, warps, registers, shared_bytes(c, tile, _depth(c, tile), slices)))
    rate = CORES * RATE[tm, tn] * min(1.0, together * warps / WARPS_TO_FILL) * 4 / c.dtype.bytes
    traffic = (bm + bn) * depth * c.dtype.bytes / L2_RATE
    step = max(bm * bn * depth / rate, LATENCY / together) + 0.2 * traffic  # reading hides behind products for the most part
    return most * -(-k // depth) * step + -(-most // together) * (2 * LATENCY + (slices - 1) * 300)


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    c = contraction_of(problem)
    if c is None:
        raise ScheduleError("the nest is no contraction of constant sizes")
    return _Simt(c, {k: int(v) for k, v in knobs.items()}).build()


class _Simt:
    """The kernel of one contraction and one setting of the knobs."""

    def __init__(self, c: Contraction, knobs: Mapping[str, int]) -> None:
        self.c = c
        self.bm, self.bn, self.tm, self.tn, self.bk, self.slices = (knobs[k] for k in ("bm", "bn", "tm", "tn", "bk", "slices"))
        self.across, self.down = self.bn // self.tn, self.bm // self.tm  # thread tiles of a block's tile
        if self.across % WARP_COLS or self.down % WARP_ROWS:
            raise ScheduleError(f"{self.down} x {self.across} thread tiles are no whole number of warps of {WARP_ROWS} x {WARP_COLS}")
        self.group = self.across * self.down
        wide = 16 // c.dtype.bytes
        self.wm, self.wn = min(wide, self.tm), min(wide, self.tn)  # neighbours in a thread's tile: one read of shared memory
        self.steps = -(-c.red.size // (self.bk * self.slices))
        self.ta = plan_tile(c, c.a, self.bm, self.bk, self.group, self.slices, "sum")
        self.tb = plan_tile(c, c.b, self.bn, self.bk, self.group, self.slices, "sum")

    def build(self) -> Kernel:
        c, b = self.c, Builder()
        tiles = -(-c.rows.size // self.bm), -(-c.cols.size // self.bn)
        with b.loop("block", c.batch.size * tiles[0] * tiles[1], "block.x") as block:
            self.batch = c.batch.named(b, block // (tiles[0] * tiles[1]))
            self.row0 = b.let("row0", block // tiles[1] % tiles[0]) * self.bm
            self.col0 = b.let("col0", block % tiles[1]) * self.bn
            sa, sb = (tile.shared(b, name, 2 * self.slices, self.pad(tile)) for name, tile in (("sa", self.ta), ("sb", self.tb)))
            part = b.alloc("part", c.dtype, self.slices - 1, self.bm, self.bn, space="shared") if self.slices > 1 else None
            with b.loop("t", self.group * self.slices, "thread.x") as t:
                self.body(b, t, sa, sb, part)
        return c.kernel.with_body(b.block())

    @staticmethod
    def pad(tile: Tile) -> int:
        """Vectors that lie across the rows are stored element by element: 16 bytes keep them apart."""
        return 16 // tile.operand.value.dtype.bytes if tile.along == "sum" else 0

    def body(self, b: Builder, t: Expr, sa: Buffer, sb: Buffer, part: Buffer | None) -> None:
        c = self.c
        self.slice = t // self.group
        t = t % self.group
        warp, lane = t // 32, t % 32
        warps_across = self.across // WARP_COLS
        self.x = b.let("tx", warp % warps_across * WARP_COLS + lane % WARP_COLS)
        self.y = b.let("ty", warp // warps_across * WARP_ROWS + lane // WARP_COLS)
        acc = b.alloc("sum", c.dtype, self.tm, self.tn)
        with b.loop("i", self.tm, "unroll") as i, b.loop("j", self.tn, "unroll") as j:
            b.store(acc, (i, j), const(0, c.dtype))
        self.moves = [
            Mover(tile, buf, self.batch, origin, t, b.alloc("r" + buf.name, c.dtype, tile.turns, tile.lanes))
            for tile, buf, origin in ((self.ta, sa, self.row0), (self.tb, sb, self.col0))
        ]
        self.fetch(b, const(0))
        self.put(b, const(0))
        b.do("barrier")
        with b.loop("step", self.steps) as step:
            if self.steps > 1:
                self.fetch(b, b.let("ahead", minimum(step + 1, self.steps - 1)))
            self.products(b, step % 2, acc, sa, sb)
            if self.steps > 1:
                self.put(b, (step + 1) % 2)
                b.do("barrier")
        self.finish(b, acc, part)

    def fetch(self, b: Builder, step: Expr) -> None:
        for mover in self.moves:
            mover.fetch(b, step * self.slices + self.slice, const(0))

    def put(self, b: Builder, slot: Expr) -> None:
        for mover in self.moves:
            mover.put(b, slot + self.slice * 2)

    def products(self, b: Builder, slot: Expr, acc: Buffer, sa: Buffer, sb: Buffer) -> None:
        """A step of the sum out of shared memory."""
        slot = b.let("slot", slot + self.slice * 2)
        fa, fb = b.alloc("fa", self.c.dtype, self.tm), b.alloc("fb", self.c.dtype, self.tn)
        with b.loop("k", self.bk, "unroll") as k:
            with b.loop("g", self.tm // self.wm, "unroll") as g:
                b.store(fa, (g * self.wm,), sa.at(slot, k, (g * self.down + self.y) * self.wm, lanes=self.wm), self.wm)
            with b.loop("g", self.tn // self.wn, "unroll") as g:
                b.store(fb, (g * self.wn,), sb.at(slot, k, (g * self.across + self.x) * self.wn, lanes=self.wn), self.wn)
            with b.loop("i", self.tm, "unroll") as i, b.loop("j", self.tn, "unroll") as j:
                b.store(acc, (i, j), self.c.update(acc[i, j], fa[i], fb[j]))

    def finish(self, b: Builder, acc: Buffer, part: Buffer | None) -> None:
        """Bring the slices' sums together and store the block's tile."""
        with ExitStack() as alone:
            if part is not None:
                with b.when(1 <= self.slice):
                    self.pieces(b, lambda i, j, row, col: b.store(part, (self.slice - 1, row, col), acc.at(i, j, lanes=self.wn), self.wn))
                b.do("barrier")
                alone.enter_context(b.when(self.slice < 1))
                with b.loop("s", self.slices - 1) as s:
                    n = self.wn
                    self.pieces(b, lambda i, j, row, col: b.store(acc, (i, j), acc.at(i, j, lanes=n) + part.at(s, row, col, lanes=n), n))
            self.pieces(b, lambda i, j, row, col: self.store(b, acc, i, j, row, col))

    def pieces(self, b: Builder, f: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
        """f(i, j, row, col) for every run of neighbours in the thread's tile: where it is there, and in the block's tile."""
        with b.loop("g", self.tm // self.wm, "unroll") as g, b.loop("i", self.wm, "unroll") as i, b.loop("h", self.tn // self.wn, "unroll") as h:
            f(g * self.wm + i, h * self.wn, (g * self.down + self.y) * self.wm + i, (h * self.across + self.x) * self.wn)

    def store(self, b: Builder, acc: Buffer, i: Expr, j: Expr, row: Expr, col: Expr) -> None:
        with b.when(self.row0 + row < self.c.rows.size):
            store_row(b, self.c, self.batch, self.row0 + row, self.col0 + col, acc, (i, j), self.wn)
