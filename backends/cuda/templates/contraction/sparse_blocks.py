"""Products of block-sparse constant weights in 16-bit floats on tensor cores, by warp instructions (mma.sync).

    for block in block.x(tiles of pixels x rows of blocks):      neighbouring blocks read the same pixels
        the columns of the stored blocks of the row -> shared memory
        for each stored block: wait for its tiles; start those some steps ahead
            sums[pixels, rows] += x[pixels, columns of the block] * block
        y = epilogue(sums)

A pixel is a row of the other matrix. A step of the sum is a stored block, whatever its columns. Tiles come by cp.async,
fragments by ldmatrix, as in `mma`. This is block-sparse GEMM as of Gray, Radford, Kingma (2017): blocks of zeros are
neither read nor multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product as pairs

import numpy as np

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction.mma import PAD, Mma, Shape, raw_operand
from dnnc.backends.cuda.templates.contraction.sparse import trusted
from dnnc.backends.cuda.templates.contraction.staging import Mover, plan_tile, resident
from dnnc.ir.blocks import DIGITS, Blocks
from dnnc.ir.dtype import bf16, f16, f32, i32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, cast, const, maximum, minimum, ref, substitute, value, walk
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel
from dnnc.ir.types import Array
from dnnc.passes.lower.form import Axis, Contraction
from dnnc.passes.schedule.problem import Knobs, Problem

ORDER = ("stages",)
KNOBS = ("bm", "down", "across", "stages")
VECTOR = 8  # elements of 16 bits of a copy
SIZES = (64, 32)  # of a block
# Rows of a tile, and its warps down and across. A warp has 16 or 32 rows of each block that its neighbours share.
TILES = tuple((bm, d, a) for a in (1, 2) for bm in (64, 128, 256) for d in (2, 4) if bm // (d * a) in (16, 32))
STAGES = (3, 4)
# Cycles, fitted to 504 kernels on an H200, whose times they tell to 8 %:
RATE = 1114  # products of tensor cores of a multiprocessor
STEP = 105  # of a multiprocessor for a step of a block: the wait, the barrier, the addresses
LATENCY = 246  # of a block that waits for a step, over the steps that are on their way
PRODUCTS = 1.86  # of a block alone for 1,024 products of a warp
RESULTS = 113  # of a multiprocessor, and of a block, for 1,024 results
NORM = 0.906  # exponent by which these add up
START = 3968  # of a launch


@dataclass(frozen=True)
class Work:
    """Sizes of a product; `lengths`: int[rows of blocks], stored blocks, most first; of `size` rows and columns."""

    pixels: int
    columns: int
    size: int
    lengths: Array

    @property
    def count(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True)
class Product:
    """A product whose weights `c.b` are blocks, and `c.a` as it is stored."""

    c: Contraction
    encoding: Blocks
    weights: Buffer

    @property
    def work(self) -> Work:
        p = self.encoding.pattern
        return Work(self.c.rows.size, p.columns, p.height, np.diff(self.encoding.starts))


def product_of(problem: Problem) -> Product | None:
    """The product of a group whose weights are blocks; None for all others."""
    anchor, c = problem.anchor, problem.product
    weights = anchor.inputs[1] if anchor is not None and len(anchor.inputs) > 1 else None
    encoding = weights.type.encoding if weights is not None else None
    if not isinstance(encoding, Blocks) or weights is None or c is None or c.dtype is not f32 or c.batch.loops:
        return None
    a, p = raw_operand(c.a, c.dtype), encoding.pattern
    name = dict(zip(problem.lowered.params, problem.kernel.entry.buffers))[weights].name
    reads = [x for x in c.b.loads if x.buf.name == name]
    if a is None or a.conds or c.b.conds or not reads or any(x.buf.name == name for x in c.a.loads):
        return None
    e = c.b.value  # the element and nothing else, in the type of sums
    e = e.args[0] if isinstance(e, Op) and e.name == "cast_f32" else e
    if not (isinstance(e, Op) and e.name == "select" and isinstance(e.args[1], Load)):
        return None
    if (c.cols.size, c.red.size) != (p.rows, p.columns) or p.rows % p.height or p.columns % p.width:
        return None
    if a.value.dtype not in (f16, bf16) or a.value.dtype is not reads[0].buf.dtype:
        return None
    return Product(replace(c, a=a), encoding, reads[0].buf) if in_order(c.cols, c.red, encoding, reads) else None


def in_order(rows: Axis, red: Axis, e: Blocks, reads: list[Load]) -> bool:
    """Is step k of the sum column k of the matrix? Asked of the slots of some elements."""
    begin, wide = e.sections["slots"][0], e.pattern.blocks.shape[1]
    slots = [x for x in reads if not any(isinstance(y, Load) for y in walk(x.idx[0]))]
    for row, k in pairs((0, rows.size - 1), (0, 1, e.size, red.size // 2, red.size - 1)):
        at = {**rows.at(const(row)), **red.at(const(k))}
        slot = begin + (row // e.size * wide + k // e.size) * DIGITS
        if not any(value(substitute(x.idx[0], at)) == slot for x in slots):
            return False
    return True


# --- choice -----------------------------------------------------------------------------------------------------------


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    p = product_of(problem) if target.major >= 8 else None
    if p is None:
        return []
    work = p.work
    return [knobs_of(s) for s in sorted(shapes(work, target), key=lambda s: cycles(work, s, target))[:8]]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    p = product_of(problem)
    return [] if p is None else [knobs_of(s) for s in shapes(p.work, target)]


def knobs_of(s: Shape) -> Knobs:
    return tuple((k, getattr(s, k)) for k in KNOBS)


def shapes(w: Work, target: GpuTarget) -> Iterator[Shape]:
    """All blocks of threads that shared memory holds."""
    for (bm, down, across), stages in pairs(TILES, STAGES):
        s = Shape(bm, w.size, down, across, w.size, stages)
        fits = w.size % (16 * across) == 0 and shared(w, s) <= target.shared_bytes
        if fits and s.registers * s.warps * 32 <= target.registers and (bm == TILES[0][0] or bm < 2 * w.pixels):
            yield s


def shared(w: Work, s: Shape) -> int:
    """Bytes of a block."""
    tiles = (s.bm + w.size) * (w.size + PAD) * 2 * s.stages
    return tiles + s.warps * 16 * (s.bn // s.across + 4) * 4 + w.columns // w.size * 4


def best_cycles(w: Work, target: GpuTarget) -> float:
    """Estimated cycles of the best block of threads."""
    return min((cycles(w, s, target) for s in shapes(w, target)), default=math.inf)


def cycles(w: Work, s: Shape, target: GpuTarget) -> float:
    """Estimated cycles: what tensor cores and barriers take of all steps, what blocks wait for one step after the
    other, what results take, and the longest row of blocks.
    """
    tiles = -(-w.pixels // s.bm)
    together = resident(target, s.warps, s.registers, shared(w, s))
    products, blocks = s.bm * w.size * w.size, tiles * len(w.lengths)
    busy = tiles * w.count * (products / (RATE * s.rate) + STEP) / target.sms
    wait = LATENCY / (s.stages - 1) + PRODUCTS * products / s.warps / 1024
    end = RESULTS * s.bm * w.size / 1024
    waits = (tiles * w.count * wait + blocks * end) / min(together * target.sms, blocks)
    parts = busy, waits, int(w.lengths[0]) * wait + end, blocks * end / target.sms
    return float(START + sum(x**NORM for x in parts) ** (1 / NORM))


# --- the kernel -------------------------------------------------------------------------------------------------------


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    p = product_of(problem)
    if p is None:
        raise ScheduleError("the weights are no square blocks of 16-bit floats, or memory has another order")
    size = p.encoding.size
    bm, down, across, stages = (int(knobs[k]) for k in KNOBS)
    return _Writer(p, Shape(bm, size, down, across, size, stages)).build()


@dataclass(frozen=True)
class _Rows:
    """What fragments ask of a tile: its rows are those of the side."""

    rows: str = "side"


class _Writer(Mma):
    """The kernel of one product and one shape."""

    def __init__(self, p: Product, s: Shape) -> None:
        self.p, self.c, self.s, self.e, self.parts = p, p.c, s, p.encoding, None
        self.wm, self.wn = s.bm // s.down, s.bn // s.across
        if self.wm % 16 or self.wn % 16:
            raise ScheduleError(f"{self.wm} x {self.wn} is no multiple of fragments of 16 x 16")
        self.threads = s.warps * 32
        self.x = plan_tile(p.c, p.c.a, s.bm, s.bk, self.threads, 1, "side")
        self.tiles = [self.x, _Rows()]  # type: ignore[list-item]

    def build(self) -> Kernel:
        c, s, e, b = self.c, self.s, self.e, Builder()
        kind, groups = self.p.weights.dtype, len(e.order)
        with b.loop("block", -(-c.rows.size // s.bm) * groups, "block.x") as block:
            self.batch: dict[Expr, Expr] = {}
            self.place = b.let("place", block % groups)
            self.row0 = b.let("row0", block // groups) * s.bm
            self.sa = b.alloc("sa", kind, s.stages, s.bm, s.bk + PAD, space="shared")
            self.sb = b.alloc("sb", kind, s.stages, s.bn, s.bk + PAD, space="shared")
            self.out = b.alloc("out", c.dtype, s.warps, 16, self.wn + 4, space="shared")
            self.columns = b.alloc("columns", i32, e.pattern.blocks.shape[1], space="shared")
            with b.loop("w", s.warps, "warp") as w, b.loop("l", 32, "lane") as lane:
                self.steps_of(b, w, lane)
        return c.kernel.with_body(b.block())

    def steps_of(self, b: Builder, w: Expr, lane: Expr) -> None:
        s, e, wide = self.s, self.e, self.e.pattern.blocks.shape[1]
        self.lane, self.warp, self.t = lane, w, b.let("t", w * 32 + lane)
        self.row, self.col = w // s.across * self.wm, w % s.across * self.wn
        row = b.let("row", self.number("rows", self.place, len(e.order)))
        self.origin = self.row0, row * s.bn
        self.low = b.let("low", self.number("starts", self.place, e.pattern.count + 1))
        high = self.number("starts", self.place + 1, e.pattern.count + 1)
        count = b.let("count", minimum(maximum(high - self.low, 0), wide))
        with b.loop("z", -(-wide // self.threads)) as z:
            i = b.let("i", z * self.threads + self.t)
            with b.when(i < count):
                column = self.number("columns", minimum(self.low + i, e.pattern.count - 1), wide)
                b.store(self.columns, (minimum(i, wide - 1),), cast(column, i32))
        b.do("barrier")
        regs = None if self.x.direct else b.alloc("regs", self.sa.dtype, self.x.turns, self.x.lanes)
        self.mover = Mover(self.x, self.sa, self.batch, self.row0, self.t, regs)
        acc = b.alloc("sum", self.c.dtype, self.wm // 16, self.wn // 8, 4)
        with b.loop("i", self.wm // 16, "unroll") as i, b.loop("j", self.wn // 8, "unroll") as j:
            b.store(acc, (i, j, 0), const(0, acc.dtype), 4)
        ahead = s.stages - 1
        with b.loop("p", ahead) as p:
            with b.when(p < count):
                self.fetch(b, p, p)
            b.do("cp_async_commit")
        with b.loop("step", count) as step:
            b.do("cp_async_wait", ahead - 1)
            b.do("barrier")
            with b.when(step + ahead < count):
                self.fetch(b, step + ahead, b.let("slot", (step + ahead) % s.stages))
            b.do("cp_async_commit")
            self.products(b, b.let("here", step % s.stages), acc, (self.sa, self.sb))
        self.store(b, acc)

    def number(self, section: str, i: Expr, most: int) -> Expr:
        """A number of the encoding, below `most`."""
        return trusted(self.e.number(lambda at: self.p.weights[at], section, i), most)

    def fetch(self, b: Builder, step: Expr, slot: Expr) -> None:
        """Start moving the tiles of a stored block."""
        wide, s = self.e.pattern.blocks.shape[1], self.s
        column = b.let("column", trusted(self.columns[minimum(step, wide - 1)], wide))
        self.mover.fetch(b, column, slot)
        self.mover.put(b, slot)
        across = s.bk // VECTOR
        vectors = s.bn * across
        block = b.let("stored", minimum(self.low + step, self.e.pattern.count - 1))
        with b.loop("r", -(-vectors // self.threads), "unroll") as r, ExitStack() as guards:
            at = r * self.threads + self.t
            if vectors % self.threads:
                guards.enter_context(b.when(at < vectors))
            to = self.sb.ref(slot, at // across, at % across * VECTOR, lanes=VECTOR)
            b.do("cp_async", to, ref(self.p.weights, (block * (vectors * VECTOR) + at * VECTOR,), VECTOR))
