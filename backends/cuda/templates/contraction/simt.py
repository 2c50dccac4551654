"""Contractions on ordinary cores: f32, f64 and integers, tiled in shared memory and registers.

    for block in block.x(batches * row tiles * column tiles), part in cluster(split):
        for t in thread.x(threads):
            acc[tm, tn] = 0
            for step of bk elements of the sum:          the next stages - 1 steps' tiles are on their way meanwhile
                for k in unroll(bk): acc += a[tm] (outer) b[tn]      from shared memory, 16 bytes at a time
            y = epilogue(acc)

Tiles lie in shared memory as in global memory. A warp covers 4 x 8 thread tiles, so that shared reads take one pass per
operand. Few tiles divide the sum: among `slices` groups of threads and `split` blocks of a cluster.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import mma
from dnnc.backends.cuda.templates.contraction.staging import L2_RATE, LATENCY, Mover, Ring, Tile, plan_tile, resident
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.backends.cuda.templates.reduction.partial import LANES, PAD, SHARE, Parts, busiest, cluster, meeting, splits
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, const
from dnnc.ir.graph import Node
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel
from dnnc.ir.op import ContractionForm
from dnnc.passes.lower.form import Contraction
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

    @property
    def registers(self) -> int:
        """Of a thread, for elements of 4 bytes: sums, 4 elements of the sum for each column, addresses."""
        return min(self.tm * self.tn + 4 * self.tn + 60, 255)


class Shape(NamedTuple):
    """Division of the sum: steps of bk elements, `stages` in shared memory, thread groups, cluster blocks."""

    bk: int
    stages: int
    slices: int = 1
    split: int = 1


TILES = (
    Blocking(128, 128, 16, 8), Blocking(128, 128, 8, 8), Blocking(128, 64, 8, 8), Blocking(64, 128, 8, 8),
    Blocking(64, 64, 8, 8),
    Blocking(64, 64, 8, 4), Blocking(64, 64, 4, 4), Blocking(32, 64, 8, 8), Blocking(32, 64, 4, 4),
    Blocking(64, 32, 4, 4), Blocking(32, 32, 4, 4),
    Blocking(16, 256, 4, 8), Blocking(16, 128, 4, 8), Blocking(16, 64, 4, 8), Blocking(16, 64, 2, 4),
)  # fmt: skip
SEARCHED = tuple(
    Blocking(bm, bn, tm, tn)
    for bm, bn, tm, tn in itertools.product((16, 32, 64, 128, 256), (32, 64, 128, 256), (2, 4, 8, 16), (4, 8))
    if bm // tm % WARP_ROWS == 0
    and bn // tn % WARP_COLS == 0
    and bm >= tm
    and bn >= tn
    and bm // tm * (bn // tn) <= 512
)
LEAST_SIDE = 9  # rows, columns and terms of a product that is none of a matrix and few vectors
MOST, DEEPENED = 100, 16  # tiles of a search, and those that are tried with other steps and rings
ORDER = ("slices", "split", "bk")
# by the root of a thread's sums: how many warps of an SM wait as long as they work; more hide it from each other
WAITING = 12.0
CONVERT = 0.25  # cycles of an SM for a vector that is brought into a tile: two dozen instructions for its place


def stores_several(n: Node) -> bool:
    """Is a contraction a product of float32 matrices that are no vectors, the kernels of which store any number of
    arrays?
    """
    sizes = (*n.output.type.shape[-2:], *n.inputs[0].type.shape[-1:]) if n.inputs[0] is not None else ()
    matrices = len(sizes) == 3 and all(isinstance(d, int) and d >= LEAST_SIDE for d in sizes)
    floats = all(v is None or v.type.dtype is f32 for v in n.inputs)
    return n.op.contraction is ContractionForm.PRODUCT and matrices and floats


def estimate(problem: Problem, target: GpuTarget) -> float:
    """Cycles of the best guess; infinite where the kernel does not apply."""
    c, found = problem.product, candidates(problem, target)
    if c is None or not found:
        return inf
    knobs = {k: int(v) for k, v in found[0]}
    tile, shape = Blocking(**{k: knobs[k] for k in Blocking._fields}), Shape(**{k: knobs[k] for k in Shape._fields})
    return cost(c, target, tile, shape, [plan_tile(c, o, 64, 16, 128, 1) for o in (c.a, c.b)])


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    c = problem.product
    if (
        c is None
        or min(c.sizes[1:3]) < mma.LEAST
        or (target.major >= 8 and mma.matrix_contraction(problem) is not None)
    ):
        return []
    plans = [plan_tile(c, o, 64, 16, 128, 1) for o in (c.a, c.b)]
    found = [
        (cost(c, target, tile, s, plans), tile, s)
        for tile in TILES
        for s in _shapes(c, target, tile)
        if _fits(c, target, tile, s, plans)
    ]
    found.sort()
    best = [(tile, s._replace(stages=n)) for _, tile, s in found[:1] for n in (s.stages, 2, 4)] + [
        (tile, s) for _, tile, s in found[1:8]
    ]
    return [
        tuple({**tile._asdict(), **s._asdict()}.items())
        for tile, s in dict.fromkeys(best)
        if _fits(c, target, tile, s, plans)
    ]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Return all block and thread tiles and sum divisions by estimated time; the best with other steps, rings."""
    c = problem.product
    if c is None:
        return []
    plans = [plan_tile(c, o, 64, 16, 128, 1) for o in (c.a, c.b)]
    fits = [(tile, s) for tile in SEARCHED for s in _shapes(c, target, tile) if _fits(c, target, tile, s, plans)]
    best = sorted(fits, key=lambda x: cost(c, target, x[0], x[1], plans))
    out = best[:MOST]
    for tile, s in best[:DEEPENED]:
        deeper = [
            s._replace(bk=bk, stages=n)
            for bk, n in itertools.product((8, 16, 32), (2, 3, 4))
            if bk * s.slices * s.split <= c.red.size
        ]
        out += [(tile, d) for d in deeper if _fits(c, target, tile, d, plans)]
    return [tuple({**tile._asdict(), **s._asdict()}.items()) for tile, s in dict.fromkeys(out)]


def _shapes(c: Contraction, target: GpuTarget, tile: Blocking) -> Iterator[Shape]:
    batch, m, n, k = c.sizes
    tiles = batch * -(-m // tile.bm) * -(-n // tile.bn)
    bk = 8 if c.dtype.bytes > 4 else 16
    for slices in (1, 2, 4):
        for split in splits(target, c.dtype, tiles, tile.bm):
            if slices * split == 1 or k >= 4 * bk * slices * split:
                yield Shape(bk, 3 if k >= 4 * bk * slices * split else 2, slices, split)


def shared_bytes(c: Contraction, tile: Blocking, s: Shape) -> int:
    bm, bn = tile[:2]
    sums = s.slices * bm * (bn + PAD) if s.slices * s.split > 1 else 0
    pads = 16 // c.dtype.bytes * (bm + bn)
    return (s.stages * s.slices * (s.bk * (bm + bn) + pads) + sums) * c.dtype.bytes


def _fits(c: Contraction, target: GpuTarget, tile: Blocking, s: Shape, plans: Sequence[Tile]) -> bool:
    wide = c.dtype.bytes > 4 and tile.tm * tile.tn > 32  # accumulators of 64 bits take two registers
    crowded = (
        tile.tm * tile.tn > 64 and plans[0].rows == plans[1].rows == "side"
    )  # places of both sides' rows, beside so many sums
    threads = tile.threads * s.slices
    return (
        not wide
        and not crowded
        and threads <= 512
        and threads * tile.registers <= target.registers
        and shared_bytes(c, tile, s) <= target.shared_bytes
    )


def cost(c: Contraction, target: GpuTarget, tile: Blocking, s: Shape, plans: Sequence[Tile]) -> float:
    """Estimated cycles of the busiest SM. A step of its blocks takes as long as products and reads of shared memory,
    the traffic with the second-level cache, or the wait for tiles.

    An SM does 128 products and reads 32 elements of 4 bytes a cycle: a warp's element of the sum takes tm * tn / 4
    cycles of products and tm + tn of reading, which overlap for the most part where there are warps enough.
    """
    batch, m, n, k = c.sizes
    bm, bn, tm, tn = tile
    tiles = batch * -(-m // bm) * -(-n // bn)
    most = busiest(target, tiles, s.split)
    warps, words = tile.threads * s.slices // 32, c.dtype.bytes / 4
    together = min(most, resident(target, warps, int(tile.registers * words), shared_bytes(c, tile, s)))
    products, reads = tm * tn / 4, tm + tn
    own = warps * s.bk * words * (1.05 * max(products, reads) + 0.25 * min(products, reads))
    moved = s.slices * s.bk * (bm / plans[0].lanes + bn / plans[1].lanes) * CONVERT
    traffic = (bm + bn) * s.bk * s.slices * c.dtype.bytes / L2_RATE
    late = LATENCY / (together * (s.stages - 1))
    step = max((own + moved) * (1 + WAITING / sqrt(tm * tn) / (together * warps)), traffic, late) + late / 10
    rounds = -(-k // (s.bk * s.slices * s.split))
    return most * (rounds * step + meeting(bm * bn, s.slices, s.split)) + -(-most // together) * (
        2 * LATENCY + SHARE * (s.split > 1)
    )


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    c = problem.product
    if c is None:
        raise ScheduleError("the nest is no contraction of constant sizes")
    numbers = {"stages": 2, "split": 1, **{k: int(v) for k, v in knobs.items()}}
    tile, shape = (tuple(numbers[k] for k in kind._fields) for kind in (Blocking, Shape))
    return _Simt(c, Blocking(*tile), Shape(*shape)).build()


class _Simt:
    """The kernel of one contraction and one setting of the knobs."""

    def __init__(self, c: Contraction, tile: Blocking, shape: Shape) -> None:
        self.c, self.s = c, shape
        self.bm, self.bn, self.tm, self.tn = tile
        self.across, self.down = self.bn // self.tn, self.bm // self.tm  # thread tiles of a block's tile
        if self.across % WARP_COLS or self.down % WARP_ROWS:
            raise ScheduleError(
                f"{self.down} x {self.across} thread tiles are no whole number of warps of {WARP_ROWS} x {WARP_COLS}"
            )
        self.group = self.across * self.down
        groups = shape.slices * shape.split
        self.steps = -(-c.red.size // (shape.bk * groups))
        self.ta, self.tb = (
            plan_tile(c, o, size, shape.bk, self.group, groups) for o, size in ((c.a, self.bm), (c.b, self.bn))
        )
        wide = 16 // c.dtype.bytes
        self.deep = min(wide, 4, shape.bk)  # elements of the sum in a read of a tile that lies along it
        # neighbours in a thread's tile: one read of a tile that lies along its side
        self.wm, self.wn = (
            1 if t.rows == "side" else min(wide, n) for t, n in ((self.ta, self.tm), (self.tb, self.tn))
        )
        self.parts = (
            Parts(self.bm, self.bn, shape.slices, shape.split, self.group * shape.slices) if groups > 1 else None
        )

    def build(self) -> Kernel:
        c, b, s = self.c, Builder(), self.s
        tiles = -(-c.rows.size // self.bm), -(-c.cols.size // self.bn)
        with b.loop("block", c.batch.size * tiles[0] * tiles[1], "block.x") as block, cluster(b, s.split) as part:
            self.part = part
            self.batch = c.batch.named(b, block // (tiles[0] * tiles[1]))
            self.row0 = b.let("row0", block // tiles[1] % tiles[0]) * self.bm
            self.col0 = b.let("col0", block % tiles[1]) * self.bn
            sa, sb = (
                tile.shared(b, name, s.stages * s.slices, self.pad(tile))
                for name, tile in (("sa", self.ta), ("sb", self.tb))
            )
            sums = self.parts.memory(b, c.dtype) if self.parts else None
            with b.loop("t", self.group * s.slices, "thread.x") as t:
                self.body(b, t, sa, sb, sums)
        return c.kernel.with_body(b.block())

    @staticmethod
    def pad(tile: Tile) -> int:
        """Pad rows along the sum to an odd number of 16 bytes: 8 rows then meet 8 groups of banks."""
        return 16 // tile.operand.value.dtype.bytes if tile.rows == "side" else 0

    def body(self, b: Builder, t: Expr, sa: Buffer, sb: Buffer, sums: Buffer | None) -> None:
        c, thread = self.c, t
        self.slice = t // self.group
        t = t % self.group
        warp, lane = t // 32, t % 32
        warps_across = self.across // WARP_COLS
        self.x = b.let("tx", warp % warps_across * WARP_COLS + lane % WARP_COLS)
        self.y = b.let("ty", warp // warps_across * WARP_ROWS + lane // WARP_COLS)
        acc = b.alloc("sum", c.dtype, self.tm, self.tn)
        with b.loop("i", self.tm, "unroll") as i, b.loop("j", self.tn, "unroll") as j:
            b.store(acc, (i, j), const(0, c.dtype))
        movers = [
            Mover(
                tile,
                buf,
                self.batch,
                origin,
                t,
                None if tile.direct else b.alloc("r" + buf.name, c.dtype, tile.turns, tile.lanes),
            )
            for tile, buf, origin in ((self.ta, sa, self.row0), (self.tb, sb, self.col0))
        ]
        Ring(movers, self.s.stages, self.steps, self.part, self.slice, self.s.slices).run(
            b, lambda slot: self.products(b, slot, acc, sa, sb)
        )
        if self.parts is None or sums is None:
            self.pieces(b, lambda i, j, row, col: self.store(b, row, col, acc, (i, j), self.wn))
            return
        part, total = sums, self.parts
        self.pieces(
            b, lambda i, j, row, col: b.store(part, (self.slice, row, col), acc.at(i, j, lanes=self.wn), self.wn)
        )
        total.finish(
            b, part, self.part, thread, lambda row, col, tile: self.store(b, row, col, tile, (const(0),), LANES)
        )

    def products(self, b: Builder, slot: Expr, acc: Buffer, sa: Buffer, sb: Buffer) -> None:
        """Run `deep` elements of the sum from shared memory: one side's first, then the other's in turn."""
        a = _Fragments(self.ta, sa, self.tm, self.wm, self.down, self.y, self.deep)
        c = _Fragments(self.tb, sb, self.tn, self.wn, self.across, self.x, self.deep)
        turned = self.ta.rows == "sum" and self.tb.rows == "side"
        passing, held = (c, a) if turned else (a, c)
        whole, part = held.alloc(b, held.n), passing.alloc(b, 1 if passing.rows else passing.n)
        with b.loop("k", self.s.bk // self.deep, "unroll") as k:
            held.read(b, whole, slot, k)
            if not passing.rows:
                passing.read(b, part, slot, k)
            with b.loop("i", passing.n, "unroll") as i:
                if passing.rows:
                    passing.read_row(b, part, const(0), slot, k, i)
                with b.loop("q", self.deep, "unroll") as q, b.loop("j", held.n, "unroll") as j:
                    mine, other = passing.element(part, const(0) if passing.rows else i, q), held.element(whole, j, q)
                    at, x, y = ((j, i), other, mine) if turned else ((i, j), mine, other)
                    b.store(acc, at, self.c.update(acc[at], x, y))

    def pieces(self, b: Builder, f: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
        """Call f(i, j, row, col) for each run of neighbours in the thread's tile: places there and in the block's."""
        with (
            b.loop("g", self.tm // self.wm, "unroll") as g,
            b.loop("i", self.wm, "unroll") as i,
            b.loop("h", self.tn // self.wn, "unroll") as h,
        ):
            f(
                g * self.wm + i,
                h * self.wn,
                (g * self.down + self.y) * self.wm + i,
                (h * self.across + self.x) * self.wn,
            )

    def store(self, b: Builder, row: Expr, col: Expr, tile: Buffer, at: tuple[Expr, ...], width: int) -> None:
        with b.when(self.row0 + row < self.c.rows.size):
            store_row(b, self.c, self.batch, self.row0 + row, self.col0 + col, tile, at, width)


@dataclass(frozen=True)
class _Fragments:
    """Load a thread's n rows or columns of a side, `wide` neighbours, for `deep` elements; see `_Simt.pieces`."""

    tile: Tile
    buf: Buffer
    n: int
    wide: int
    count: int
    at: Expr
    deep: int

    @property
    def rows(self) -> bool:
        """Do rows of the tile lie along the sum?"""
        return self.tile.rows == "side"

    def alloc(self, b: Builder, n: int) -> Buffer:
        return b.alloc("f" + self.buf.name, self.buf.dtype, *((n, self.deep) if self.rows else (self.deep, n)))

    def element(self, held: Buffer, i: Expr, q: Expr) -> Expr:
        return held[i, q] if self.rows else held[q, i]

    def read_row(self, b: Builder, into: Buffer, to: Expr, slot: Expr, k: Expr, i: Expr) -> None:
        b.store(into, (to, 0), self.buf.at(slot, i * self.count + self.at, k * self.deep, lanes=self.deep), self.deep)

    def read(self, b: Builder, into: Buffer, slot: Expr, k: Expr) -> None:
        if self.rows:
            with b.loop("i", self.n, "unroll") as i:
                self.read_row(b, into, i, slot, k, i)
            return
        with b.loop("q", self.deep, "unroll") as q, b.loop("g", self.n // self.wide, "unroll") as g:
            value = self.buf.at(slot, k * self.deep + q, (g * self.count + self.at) * self.wide, lanes=self.wide)
            b.store(into, (q, g * self.wide), value, self.wide)
