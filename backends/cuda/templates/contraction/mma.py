"""Contractions of half-precision or 8-bit operands on tensor cores by warp instructions (mma.sync), from sm_80 on.

    for block in block.x(batches * row tiles * column tiles), part in cluster(split):
        for w in warp(..): for l in lane(32):
            tiles 0 .. stages - 2 are on their way
            for step: wait for its tile; start tile step + stages - 1; sums += ldmatrix fragments of the tile
            y = epilogue(sums)                       through shared memory, so that a warp stores whole rows of its tile

Tiles lie in shared memory as in global memory, copied 16 bytes at a time by cp.async where the operand allows it;
ldmatrix turns those that lie along the side round, of halves alone: tiles of bytes are put along the sum. Products and
sums of halves are in f32, those of integers in i32 and exact. `slices` and `split` divide the sum
among groups of warps and the blocks of a cluster, as in `simt`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction.staging import L2_RATE, LATENCY, Mover, Ring, Tile, plan_tile, resident
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.backends.cuda.templates.reduction.partial import LANES, SHARE, Parts, busiest, cluster, meeting, splits
from dnnc.backends.cuda.templates.reduction.partial import PAD as SUM_PAD
from dnnc.ir.dtype import DType, bf16, f16, f32, i8, i32, u8
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, const, walk
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, call
from dnnc.passes.lower.form import Contraction, Operand
from dnnc.passes.schedule.problem import Knobs, Problem

PAD = 8  # elements of 16 bits after a row of a tile: 8 rows of a matrix then begin in 8 different groups of banks
ROW = 16  # bytes of a row of a matrix that ldmatrix loads
TENSOR = 1024  # products a cycle of an SM
LEAST = 5  # rows and columns of which at least a third of a fragment is used
BARRIER = 60  # cycles of a wait and a barrier in each step
DIVIDE, FETCH = 4, 10  # instructions of a quotient by a constant; to load an element, convert and put it
ISSUED = 128  # instructions of threads a cycle of an SM
CHUNK = 8  # columns that a lane stores: 16 bytes of halves


@dataclass(frozen=True)
class Shape:
    """A block's tile and its division among warps."""

    bm: int
    bn: int
    down: int  # warps over the rows
    across: int  # warps over the columns
    bk: int = 32
    stages: int = 3
    slices: int = 1
    split: int = 1
    element: int = 2  # bytes

    @property
    def warps(self) -> int:
        return self.down * self.across

    @property
    def registers(self) -> int:
        """Of a thread: sums, fragments, addresses."""
        wm, wn = self.bm // self.down, self.bn // self.across
        return wm * wn // 32 + (wm + wn) // 4 + 48

    def shared_bytes(self) -> int:
        pad = max(PAD, ROW // self.element)
        rows = ((self.bm + self.bn) * (self.bk + pad) + 2 * pad * self.bk) * self.element  # whichever way they lie
        alone = self.slices * self.split == 1
        out = self.warps * 16 * (self.bn // self.across + 4) if alone else self.slices * self.bm * (self.bn + SUM_PAD)
        return rows * self.stages * self.slices + out * 4

    @property
    def rate(self) -> float:
        """Return the share of tensor core rate that a warp tile can reach: its products per shared memory read."""
        wm, wn = self.bm // self.down, self.bn // self.across
        return min(1.0, wm * wn / (wm + wn) / 32)


SHAPES = (
    Shape(128, 256, 2, 4), Shape(256, 128, 4, 2), Shape(128, 128, 2, 2), Shape(128, 128, 2, 4), Shape(128, 64, 2, 2),
    Shape(64, 128, 2, 2),
    Shape(64, 64, 2, 2), Shape(64, 32, 2, 2), Shape(32, 64, 2, 2), Shape(32, 32, 2, 2), Shape(16, 64, 1, 4),
    Shape(16, 128, 1, 4),
    Shape(128, 48, 4, 1), Shape(64, 48, 4, 1), Shape(128, 96, 2, 2), Shape(64, 96, 2, 2),
)  # fmt: skip


# divisions of a block's tile among warps of 16 to 64 rows and columns, under 4 warps only for small tiles
TILES = tuple(
    (bm, bn, bm // wm, bn // wn)
    for bm, bn, wm, wn in itertools.product(
        (16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (16, 32, 64), (16, 32, 64, 128)
    )
    if wm <= bm
    and wn <= bn
    and wm * wn <= 4096
    and 1 <= (bm // wm) * (bn // wn) <= 8
    and bm * bn <= 32768
    and (bm // wm * (bn // wn) >= 4 or bm * bn <= 4096)
)
DEPTHS = ((16, 4), (32, 2), (32, 3), (32, 4), (32, 5), (64, 2), (64, 3), (64, 4))  # elements of a step, stages
SEARCHED, DEEPENED = 100, 16  # shapes of a search, and those that are tried with other depths
ORDER = ("slices", "split", "bk")


READ = {f32: (f16, bf16), i32: (u8, i8)}  # type of the sums -> types of the operands
Cost = Callable[[Contraction, GpuTarget, Shape, tuple[float, float]], float]  # see `estimated`


def raw_operand(o: Operand, sums: DType) -> Operand | None:
    """The operand before its conversion to the type of the sums, if tensor cores read its elements; else None."""
    e = o.value
    if isinstance(e, Op) and e.name == f"cast_{sums}" and isinstance(x := e.args[0], Load) and x.dtype in READ[sums]:
        return replace(o, value=x)
    return None


def matrix_contraction(problem: Problem) -> Contraction | None:
    """A contraction of two operands of one half type that is summed in f32, or of bytes that is summed in i32."""
    c = problem.product
    if c is None or c.dtype not in READ:
        return None
    a, b = raw_operand(c.a, c.dtype), raw_operand(c.b, c.dtype)
    if a is None or b is None or (c.dtype is f32 and a.value.dtype is not b.value.dtype):
        return None
    return replace(c, a=a, b=b)


def half_contraction(problem: Problem) -> Contraction | None:
    """The same of operands of half precision alone."""
    c = matrix_contraction(problem)
    return c if c is not None and c.dtype is f32 else None


def shape_of(c: Contraction, knobs: Mapping[str, int | str]) -> Shape:
    """The tile of these knobs, for operands of the contraction's types."""
    return Shape(**{k: int(v) for k, v in knobs.items()}, element=c.a.value.dtype.bytes)


def estimate(problem: Problem, target: GpuTarget) -> float:
    """Cycles of the best guess; infinite where the kernel does not apply."""
    c, found = matrix_contraction(problem), candidates(problem, target)
    return math.inf if c is None or not found else estimated(c, target, shape_of(c, dict(found[0])), gathering(c))


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    c = matrix_contraction(problem)
    if c is None or target.major < 8:
        return []
    _, m, n, k = c.sizes
    if min(m, n) < LEAST or k < 8:
        return []
    size = c.a.value.dtype.bytes
    depths = [(bk * 2 // size, stages) for bk, stages in _depths(k * size // 2)]
    return ranked(c, target, [replace(s, bk=bk, stages=n, element=size) for s in SHAPES for bk, n in depths])


def ranked(c: Contraction, target: GpuTarget, shapes: Sequence[Shape], cost: Cost | None = None) -> list[Knobs]:
    """The knobs of the shapes that fit, however their sum is divided, by their estimated time: `cost`, or this one."""
    gathers, cost = gathering(c), cost or estimated
    shapes = divided(c, target, shapes)
    found = sorted((cost(c, target, s, gathers), k) for k, s in enumerate(shapes) if _fits(c, target, s))
    return [_knobs(shapes[k]) for _, k in found[:10]]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    c = matrix_contraction(problem)
    if c is None or target.major < 8:
        return []
    size = c.a.value.dtype.bytes
    least = 32 // size
    bk = 2 * least if c.red.size >= 2 * least else least
    depths = [(k * 2 // size, n) for k, n in DEPTHS]
    return varied_shapes(c, target, [Shape(*tile, bk, 3, element=size) for tile in TILES], depths)


def varied_shapes(
    c: Contraction,
    target: GpuTarget,
    shapes: Sequence[Shape],
    depths: Sequence[tuple[int, int]],
    cost: Cost | None = None,
) -> list[Knobs]:
    """Return all tiles and sum divisions by estimated time; the best also with other steps and rings."""
    gathers, cost = gathering(c), cost or estimated
    fits = [s for s in divided(c, target, shapes) if _fits(c, target, s)]
    best = sorted(fits, key=lambda s: cost(c, target, s, gathers))
    out = best[:SEARCHED]
    for s in best[:DEEPENED]:
        deeper = [replace(s, bk=bk, stages=n) for bk, n in depths if bk <= max(c.red.size, 16)]
        out += sorted((d for d in deeper if _fits(c, target, d)), key=lambda d: cost(c, target, d, gathers))
    return [_knobs(s) for s in dict.fromkeys(out)]


def divided(c: Contraction, target: GpuTarget, shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes with every way to divide the sum among groups of warps and blocks."""
    return [
        replace(s, slices=z, split=n)
        for s in shapes
        for z in (1, 2, 4)
        for n in splits(target, c.dtype, block_tiles(c, s), s.bm)
    ]


def gathering(c: Contraction) -> tuple[float, float]:
    """Cycles of an SM for each unvectorised element of a tile, by operand: index and guards; 0 for vectors."""
    return _gather(c, c.a), _gather(c, c.b)


def _gather(c: Contraction, o: Operand) -> float:
    tile = plan_tile(c, o, 64, max(16, 32 // o.value.dtype.bytes), 128, 1, tile_rows(o))
    if tile.direct:
        return 0.0
    asked = {x for e in (*(x.buf.offset(x.idx) for x in o.loads), *o.conds) for x in walk(e) if isinstance(x, Op)}
    return (sum(DIVIDE if x.name in ("//", "%") else 1 for x in asked) + FETCH) / tile.lanes / ISSUED


def tile_rows(o: Operand) -> str:
    """What rows of a tile must be, "" where ldmatrix reads either: it turns elements of 16 bits alone."""
    return "side" if o.value.dtype.bytes == 1 else ""


def block_tiles(c: Contraction, s: Shape) -> int:
    batch, m, n, _ = c.sizes
    return batch * -(-m // s.bm) * -(-n // s.bn)


def _depths(k: int) -> tuple[tuple[int, int], ...]:
    return ((32, 4), (64, 3)) if k >= 64 else ((32, 2),) if k >= 32 else ((16, 2),)


def _knobs(s: Shape) -> Knobs:
    return tuple((name, getattr(s, name)) for name in ("bm", "bn", "down", "across", "bk", "stages", "slices", "split"))


def _fits(c: Contraction, target: GpuTarget, s: Shape) -> bool:
    if s.slices * s.split > 1 and c.red.size < 4 * s.slices * s.split * s.bk:
        return False
    return (
        s.shared_bytes() <= target.shared_bytes
        and s.warps * s.slices <= 16
        and s.registers * s.warps * s.slices * 32 <= target.registers
    )


def estimated(c: Contraction, target: GpuTarget, s: Shape, gathers: tuple[float, float]) -> float:
    """Estimated cycles of the busiest SM, as of `simt.cost`. The tensor cores of an SM do 1024 products of halves a
    cycle for mma.sync (half of Hopper's); with fewer than 8 warps they wait for fragments. `gathers`: see `gathering`.
    """
    warps, depth = s.warps * s.slices, s.bk * s.slices
    most = busiest(target, block_tiles(c, s), s.split)
    together = min(most, resident(target, warps, s.registers, s.shared_bytes()))
    rate = TENSOR * 2 / s.element * s.rate * min(1.0, together * warps / 8)
    scattered = (s.bm * gathers[0] + s.bn * gathers[1]) * depth
    traffic = (s.bm + s.bn) * depth * s.element / L2_RATE
    step = (
        max(s.bm * s.bn * depth / rate, traffic, LATENCY / (together * (s.stages - 1))) + BARRIER / together + scattered
    )
    rounds = -(-c.red.size // (depth * s.split))
    end = meeting(s.bm * s.bn, s.slices, s.split)
    return most * (rounds * step + end) + -(-most // together) * (2 * LATENCY + SHARE * (s.split > 1))


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    c = matrix_contraction(problem)
    if c is None:
        raise ScheduleError("the nest is no contraction of half-precision operands or bytes")
    return (Mma if c.dtype is f32 else BytesMma)(c, shape_of(c, knobs)).build()


class Mma:
    """The kernel of one contraction and one shape."""

    def __init__(self, c: Contraction, shape: Shape) -> None:
        self.c, self.s = c, shape
        self.wm, self.wn = shape.bm // shape.down, shape.bn // shape.across
        depth = max(16, 32 // shape.element)
        if self.wm % 16 or self.wn % 16 or shape.bk % depth:
            raise ScheduleError(f"{self.wm} x {self.wn} x {shape.bk} is no multiple of fragments of 16 x 16 x {depth}")
        groups = shape.slices * shape.split
        self.steps = -(-c.red.size // (shape.bk * groups))
        self.tiles = [
            plan_tile(c, o, size, shape.bk, shape.warps * 32, groups, tile_rows(o))
            for o, size in ((c.a, shape.bm), (c.b, shape.bn))
        ]
        self.parts = (
            Parts(shape.bm, shape.bn, shape.slices, shape.split, shape.warps * shape.slices * 32)
            if groups > 1
            else None
        )

    def pad(self, tile: Tile) -> int:
        """Elements after each row of a tile in shared memory."""
        return ROW // tile.operand.value.dtype.bytes

    def build(self) -> Kernel:
        c, s, b = self.c, self.s, Builder()
        down, across = -(-c.rows.size // s.bm), -(-c.cols.size // s.bn)
        with b.loop("block", c.batch.size * down * across, "block.x") as block, cluster(b, s.split) as self.part:
            self.batch = c.batch.named(b, block // (down * across))
            self.block = block
            self.origin = b.let("row0", block // across % down) * s.bm, b.let("col0", block % across) * s.bn
            sa, sb = (
                tile.shared(b, name, s.stages * s.slices, self.pad(tile))
                for tile, name in zip(self.tiles, ("sa", "sb"))
            )
            self.out = (
                self.parts.memory(b, c.dtype)
                if self.parts
                else b.alloc("out", c.dtype, s.warps, 16, self.wn + 4, space="shared")
            )
            with b.loop("w", s.warps * s.slices, "warp") as w, b.loop("l", 32, "lane") as lane:
                self.body(b, w, lane, (sa, sb))
        return c.kernel.with_body(b.block())

    def body(self, b: Builder, w: Expr, lane: Expr, shared: tuple[Buffer, Buffer]) -> None:
        s = self.s
        self.lane, self.slice, self.warp = lane, w // s.warps, w % s.warps
        self.row = self.warp // s.across * self.wm  # of the warp's tile in the block's
        self.col = self.warp % s.across * self.wn
        t = self.warp * 32 + lane
        movers = [
            Mover(
                tile,
                buf,
                self.batch,
                at,
                t,
                None if tile.direct else b.alloc("r" + buf.name, buf.dtype, tile.turns, tile.lanes),
            )
            for tile, buf, at in zip(self.tiles, shared, self.origin)
        ]
        acc = b.alloc("sum", self.c.dtype, self.wm // 16, self.wn // 8, 4)
        with b.loop("i", self.wm // 16, "unroll") as i, b.loop("j", self.wn // 8, "unroll") as j:
            b.store(acc, (i, j, 0), const(0, acc.dtype), 4)
        Ring(movers, s.stages, self.steps, self.part, self.slice, s.slices, self.first()).run(
            b, lambda slot: self.products(b, slot, acc, shared)
        )
        if self.parts is None:
            self.store(b, acc)
            return
        with (
            b.loop("i", self.wm // 16, "unroll") as i,
            b.loop("j", self.wn // 8, "unroll") as j,
            b.loop("h", 2, "unroll") as h,
        ):
            at = (self.slice, self.row + i * 16 + lane // 4 + h * 8, self.col + j * 8 + lane % 4 * 2)
            b.store(self.out, at, acc.at(i, j, h * 2, lanes=2), 2)
        self.parts.finish(
            b,
            self.out,
            self.part,
            w * 32 + lane,
            lambda row, col, tile: self.finish(b, row, col, tile, (const(0),), LANES),
        )

    def first(self) -> Expr:
        """The round of the sum with which this block begins."""
        return const(0)

    def products(self, b: Builder, slot: Expr, acc: Buffer, shared: tuple[Buffer, Buffer]) -> None:
        fa, fb = (b.alloc(x, buf.dtype, n // 16, 8) for x, n, buf in zip(("fa", "fb"), (self.wm, self.wn), shared))
        with b.loop("k", self.s.bk // 16, "unroll") as k:
            with b.loop("i", self.wm // 16, "unroll") as i:
                b.store(fa, (i, 0), self.fragment(self.tiles[0], shared[0], slot, self.row + i * 16, k * 16, 0), 8)
            with b.loop("j", self.wn // 16, "unroll") as j:
                b.store(fb, (j, 0), self.fragment(self.tiles[1], shared[1], slot, self.col + j * 16, k * 16, 1), 8)
            with b.loop("i", self.wm // 16, "unroll") as i, b.loop("j", self.wn // 8, "unroll") as j:
                made = call(
                    "mma_m16n8k16", acc.at(i, j, 0, lanes=4), fa.at(i, 0, lanes=8), fb.at(j // 2, j % 2 * 4, lanes=4)
                )
                b.store(acc, (i, j, 0), made, 4)

    def fragment(self, tile: Tile, buf: Buffer, slot: Expr, side: Expr, k: Expr, which: int) -> Expr:
        """16 x 16 elements. Lane 8*m + r gives the address of row r of matrix m; of the first operand matrices 1 and 3
        are those of the lower rows, of the second one those of the upper half of the sum.
        """
        low, high, r = self.lane // 8 % 2 * 8, self.lane // 16 * 8, self.lane % 8
        if tile.rows == "side":
            at = (side + low + r, k + high) if which == 0 else (side + high + r, k + low)
            return call("ldmatrix_x4", buf.ref(slot, *at, lanes=8))
        at = (k + high + r, side + low) if which == 0 else (k + low + r, side + high)
        return call("ldmatrix_x4_trans", buf.ref(slot, *at, lanes=8))

    def finish(self, b: Builder, row: Expr, col: Expr, tile: Buffer, at: tuple[Expr, ...], width: int) -> None:
        """Neighbouring sums of the block's tile, from tile[at] on, to the output."""
        with b.when(self.origin[0] + row < self.c.rows.size):
            store_row(b, self.c, self.batch, self.origin[0] + row, self.origin[1] + col, tile, at, width)

    def store(self, b: Builder, acc: Buffer) -> None:
        """16 rows of the warp's tile at a time: fragments to shared memory, whole rows of them to the output."""
        width = min(CHUNK, self.wn)
        columns = self.wn // width
        out, lane = self.out, self.lane
        with b.loop("i", self.wm // 16, "unroll") as i:
            with b.loop("j", self.wn // 8, "unroll") as j, b.loop("h", 2, "unroll") as h:
                b.store(out, (self.warp, lane // 4 + h * 8, j * 8 + lane % 4 * 2), acc.at(i, j, h * 2, lanes=2), 2)
            b.do("syncwarp")
            with b.loop("p", -(-16 * columns // 32), "unroll") as p:
                r, q = (p * 32 + lane) // columns, (p * 32 + lane) % columns
                with b.when(r < 16):
                    self.finish(b, self.row + i * 16 + r, self.col + q * width, out, (self.warp, r, q * width), width)
            b.do("syncwarp")


class BytesMma(Mma):
    """Of bytes in i32. A step of the sum is as many bytes as one of halves, and so are a lane's registers."""

    def products(self, b: Builder, slot: Expr, acc: Buffer, shared: tuple[Buffer, Buffer]) -> None:
        fa, fb = (b.alloc(x, buf.dtype, n // 16, 16) for x, n, buf in zip(("fa", "fb"), (self.wm, self.wn), shared))
        low, high, r = self.lane // 8 % 2, self.lane // 16, self.lane % 8
        with b.loop("k", self.s.bk // 32, "unroll") as k:
            with b.loop("i", self.wm // 16, "unroll") as i:
                at = (slot, self.row + i * 16 + low * 8 + r, k * 32 + high * ROW)
                b.store(fa, (i, 0), call("ldmatrix_x4", shared[0].ref(*at, lanes=ROW)), ROW)
            with b.loop("j", self.wn // 16, "unroll") as j:
                at = (slot, self.col + j * 16 + high * 8 + r, k * 32 + low * ROW)
                b.store(fb, (j, 0), call("ldmatrix_x4", shared[1].ref(*at, lanes=ROW)), ROW)
            with b.loop("i", self.wm // 16, "unroll") as i, b.loop("j", self.wn // 8, "unroll") as j:
                right = fb.at(j // 2, j % 2 * 8, lanes=8)
                b.store(acc, (i, j, 0), call("mma_m16n8k32", acc.at(i, j, 0, lanes=4), fa.at(i, 0, lanes=16), right), 4)
