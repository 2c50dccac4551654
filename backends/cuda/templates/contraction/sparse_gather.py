"""Products of sparse constant weights by an array whose pixels are neighbours in memory: no copy of it is needed.

    for block in block.x(groups of rows x tiles of pixels):       neighbouring blocks read the same pixels
        for t in thread.x(..):                   `lanes` threads are a team that has a row, each thread 4 or 8 pixels;
                                                 `slices` teams share a row, each has every so many packs
            for each pack of 4 elements of the row:
                sums += values * x[columns, pixels]               out of the first-level cache
            the team's sums are added up in shared memory
            y[row, pixels] = epilogue(sums)

A pixel is a column of a matrix, or a place of an image with channels first. Windows of stride 1 read pixels one by one,
each within the image. Rows are dealt out in the order of their lengths, so that the teams of a block go through the
columns together and find them in the cache. A row's first pack is asked for while the kernel before still runs. This is
the row design of Sputnik (Gale et al., 2020) without its tiles. Where memory has the pixels of x apart, see `sparse`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import gemv
from dnnc.backends.cuda.templates.contraction.sparse import in_order, trusted
from dnnc.backends.cuda.templates.contraction.staging import readable, resident, vector_of
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.ir.bundles import PACK, Bundles
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Op, const, fma, load, maximum, minimum, op, substitute
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel
from dnnc.ir.types import Array
from dnnc.passes.lower.form import Contraction
from dnnc.passes.schedule.problem import Knobs, Problem

ORDER = ("slices",)
KNOBS = ("lanes", "warps", "slices", "ahead", "vectors")
VECTOR = 4  # neighbouring pixels that a thread reads at once
# Cycles, fitted to kernels on an H200 that begin while others end, whose times they tell to 13 %:
PACK_READ, VECTOR_READ = 6.3, 0.61  # of an SM for a pack of a warp, and for 128 bytes of the pixels of its elements
APART = 1.8  # times as long where pixels are read one by one
GUARDED = 8.5  # and where they may lie beyond an edge of the image
ROW_START = 19.4  # of an SM for a warp that begins with a row
CHAIN = (452, 324)  # of a warp for a pack, for which it waits; with the next one asked for ahead
MORE = 0.43  # of it, for another vector
BLOCK, SLICE = 384, 18.6  # that a block begins and ends with, and for each slice
MISSED = 99  # bytes of pixels a cycle and SM that the first-level cache misses
CACHED = 0.73e6  # bytes of the columns of a tile of which half would be missed
MEMORY = 1.9  # times the rate of memory: much is in the second-level cache
NORM = 1.24  # exponent by which these add up
START = 965  # of a launch
CLOCK = 1.755e9


@dataclass(frozen=True)
class Work:
    """Sizes of a product, and packs of its rows, most first; `wide` pixels are read at once."""

    pixels: int
    terms: int
    packs: Array
    wide: int = VECTOR
    taps: int = 1  # of a window, which read the same pixels; with guards

    @cached_property
    def total(self) -> int:
        return int(self.packs.sum())


@dataclass(frozen=True)
class Shape:
    """`lanes` threads of a team; `slices` teams share a row; `warps` of a block; packs that are asked for `ahead`;
    vectors of pixels of a thread.
    """

    lanes: int
    warps: int
    slices: int
    ahead: int = 1
    vectors: int = 1

    @property
    def pixels(self) -> int:
        return self.lanes * VECTOR * self.vectors

    @property
    def teams(self) -> int:
        return self.warps * 32 // self.lanes

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.teams // self.slices

    @property
    def registers(self) -> int:
        """Of a thread, about."""
        return (56 if self.ahead else 40) + 24 * (self.vectors - 1)


# No other block was the fastest of any product by more than a few percent.
SHAPES = (
    *(Shape(32, warps, slices) for warps, slices in ((4, 1), (16, 1), (8, 2), (16, 2), (4, 4), (8, 4), (16, 4))),
    *(Shape(32, warps, slices) for warps, slices in ((8, 8), (16, 8), (16, 16))),
    *(Shape(16, 16, slices) for slices in (16, 32)),
    *(Shape(32, warps, slices, vectors=2) for warps, slices in ((4, 1), (16, 1), (8, 2), (16, 2))),
    Shape(32, 4, 1, ahead=0),
)


@dataclass(frozen=True)
class Product:
    """A product whose weights `c.a` are a bundle of all rows in one piece; `wide` pixels are read at once."""

    c: Contraction
    encoding: Bundles
    weights: Buffer
    wide: int


def product_of(problem: Problem) -> Product | None:
    """The product of a group whose weights are such a bundle and whose pixels are neighbours; None for all others."""
    anchor, c = problem.anchor, problem.product
    if anchor is None or c is None or c.dtype is not f32 or c.batch.loops:
        return None
    encoded = [v for v in anchor.inputs[:2] if v is not None and isinstance(v.type.encoding, Bundles)]
    if len(encoded) != 1:
        return None
    encoding = encoded[0].type.encoding
    assert isinstance(encoding, Bundles)
    if not is_gathered(encoding):
        return None
    name = dict(zip(problem.lowered.params, problem.kernel.entry.buffers))[encoded[0]].name
    reads = [x for x in c.a.loads if x.buf.name == name]
    e = c.a.value  # the element and nothing else: what is stored, or 0
    if not (isinstance(e, Op) and e.name == "select" and isinstance(e.args[1], Op) and e.args[1].name == "bits_f32"):
        return None
    if not reads or any(x.buf.name == name for x in c.b.loads) or c.a.conds or not c.is_guarded_apart:
        return None
    if (c.rows.size, c.red.size) != (encoding.pattern.rows, encoding.pattern.columns):
        return None
    if not in_order(c.rows, c.red, encoding, reads) or not c.b.in_order(c.cols, (c.batch, c.rows, c.red)):
        return None
    wide = next(n for n in (4, 2, 1) if n == 1 or (not c.b.conds and readable(c.b.value, c.cols, c.red, n)))
    return Product(c, encoding, reads[0].buf, wide)


def is_gathered(e: Bundles) -> bool:
    """Is this how the template here has weights: all rows sorted together, none of them cut?"""
    return e.height >= e.pattern.rows and e.pieces == 1


def encoding_of(array: Array, axis: int) -> Bundles:
    """The encoding of weights that the template takes: taps of a channel are neighbours: they read the same pixels."""
    rows = array.shape[axis]
    return Bundles.of(array, axis, rows, array.size // rows, last=math.prod(array.shape[2:]) == 1)


# --- choice -----------------------------------------------------------------------------------------------------------


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    p = product_of(problem)
    if p is None:
        return []
    work = work_of(problem)
    return [knobs_of(s) for s in sorted(SHAPES, key=lambda s: cycles(work, s, target))]


def work_of(problem: Problem) -> Work:
    """The work of a product that the template takes."""
    p = product_of(problem)
    assert p is not None
    taps = math.prod(p.encoding.shape[2:])
    return Work(p.c.cols.size, p.c.red.size, np.diff(p.encoding.starts), p.wide, taps)


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    return candidates(problem, target)


def knobs_of(s: Shape) -> Knobs:
    return tuple((k, getattr(s, k)) for k in KNOBS)


def best_cycles(work: Work, target: GpuTarget) -> float:
    """Estimated cycles of the best block."""
    return min(cycles(work, s, target) for s in SHAPES)


def cycles(w: Work, s: Shape, target: GpuTarget) -> float:
    """Estimated cycles: what the first-level caches are asked for, what they miss, what memory takes, and how long
    blocks wait for one pack after the other; also of the longest row, which may end last.
    """
    tiles, rows = -(-w.pixels // s.pixels), len(w.packs)
    blocks, part = tiles * -(-rows // s.rows), s.lanes / 32
    together = resident(target, s.warps, s.registers, 0)
    apart = GUARDED if w.taps > 1 else APART if w.wide == 1 else 1.0
    vectors = PACK * VECTOR * s.vectors * part * apart
    reads = tiles * w.total * (PACK_READ + VECTOR_READ * vectors) / target.sms
    starts = tiles * rows * s.slices * part * ROW_START / target.sms
    chains = -(-w.packs[:: s.rows] // s.slices)  # of the longest row of each block
    wait, edges = CHAIN[s.ahead] * (1 + MORE * (s.vectors - 1)), BLOCK + s.slices * SLICE
    waits = (tiles * int(chains.sum()) * wait + blocks * edges) / min(together * target.sms, blocks)
    channels = w.terms // w.taps
    density = min(w.total * PACK / (rows * channels), 1.0)
    columns = channels * 4 * s.pixels  # bytes
    touched = blocks * columns * (1 - (1 - density) ** s.rows)
    missed = touched * (columns / (columns + CACHED)) ** 2 / (target.sms * MISSED)
    moved = 4 * w.pixels * (rows + channels) + 8 * PACK * w.total
    memory = moved / (MEMORY * target.bandwidth * 1e9 / CLOCK)
    longest = int(chains[0]) * wait + edges
    return float(START + sum(x**NORM for x in (reads + starts, waits, missed, memory, longest)) ** (1 / NORM))


# --- the kernel -------------------------------------------------------------------------------------------------------


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    p = product_of(problem)
    if p is None:
        raise ScheduleError("the weights are no bundle of sparse rows, or pixels are not neighbours in memory")
    early = p.weights.name in gemv.early(problem, target)
    return _Writer(p, Shape(*(int(knobs[k]) for k in KNOBS)), target, early).build()


class _Writer:
    """The kernel of one product and one shape. `early`: it reads weights while the kernel before still runs."""

    def __init__(self, p: Product, s: Shape, target: GpuTarget, early: bool) -> None:
        self.together = resident(target, s.warps, s.registers, 0)
        self.p, self.c, self.e, self.s, self.b = p, p.c, p.encoding, s, Builder()
        self.vectors, self.early = s.vectors * VECTOR // p.wide, early

    def build(self) -> Kernel:
        b, s, c = self.b, self.s, self.c
        tiles, groups = -(-c.cols.size // s.pixels), -(-c.rows.size // s.rows)
        with b.loop("block", tiles * groups, "block.x") as block:
            self.group = b.let("group", block % groups)
            self.first = b.let("first", block // groups) * s.pixels
            if s.slices > 1:
                self.parts = b.alloc("parts", f32, s.teams, self.vectors, s.lanes * self.p.wide, space="shared")
            with b.loop("t", s.warps * 32, "thread.x") as t:
                b.do("resident", self.together)
                b.do("first_level_cache")
                self.body(t)
        return c.kernel.with_body(b.block())

    def body(self, t: Expr) -> None:
        b, e, s = self.b, self.e, self.s
        if self.early:
            b.do("pdl_launch")
        self.lane, team = b.let("lane", t % s.lanes), b.let("team", t // s.lanes)
        place = b.let("place", self.group * s.rows + team // s.slices)
        slot, part = b.let("slot", minimum(place, self.c.rows.size - 1)), team % s.slices
        low, high = (b.let(n, self.number("starts", slot + k, e.packs + 1)) for k, n in enumerate(("low", "high")))
        begin = b.let("begin", low + part)
        row = b.let("row", minimum(self.number("rows", slot, e.height), self.c.rows.size - 1))
        if s.ahead:
            ahead = b.alloc("ahead", self.p.weights.dtype, 2, PACK)
            self.ask(ahead, begin)
        if self.early:
            b.do("pdl_wait")
        self.places = [self.place_of(v) for v in range(self.vectors)] if self.c.b.conds else []
        sums = b.alloc("sums", f32, self.vectors, self.p.wide)
        with b.loop("v", self.vectors, "unroll") as v:
            b.store(sums, (v, 0), const(0, f32), self.p.wide)
        pack = b.alloc("pack", self.p.weights.dtype, 2, PACK)
        # all but the last pack of a row are full
        count = b.let("count", maximum(high - 1 - begin + (s.slices - 1), 0) // s.slices)
        if s.ahead:
            with b.loop("p", count) as p:
                with b.loop("k", 2, "unroll") as k:
                    b.store(pack, (k, 0), ahead.at(k, 0, lanes=PACK), PACK)
                self.ask(ahead, begin + (p + 1) * s.slices)
                self.add(sums, pack, last=False)
            pack = ahead
        else:
            with b.loop("p", count) as p:
                self.ask(pack, begin + p * s.slices)
                self.add(sums, pack, last=False)
            self.ask(pack, begin + count * s.slices)
        with b.when(begin + count * s.slices < high):
            self.add(sums, pack, last=True)
        if s.slices > 1:
            self.join(sums, team, part)
        with b.when((place < self.c.rows.size) & op("==", part, const(0))), b.loop("v", self.vectors, "unroll") as v:
            store_row(b, self.c, {}, row, self.pixel(v), sums, (v, const(0)), self.p.wide)

    def number(self, section: str, at: Expr, most: int) -> Expr:
        """An entry of the encoding, below `most`."""
        return trusted(self.p.weights[self.e.sections[section][0] + at], most)

    def pixel(self, v: Expr) -> Expr:
        """Where a vector of this thread's pixels begins."""
        return self.first + (v * self.s.lanes + self.lane) * self.p.wide

    def place_of(self, vector: int) -> dict[Expr, Expr]:
        """The variables of a pixel, which its guards ask for."""
        return self.c.cols.named(self.b, minimum(self.pixel(const(vector)), self.c.cols.size - 1))

    def ask(self, to: Buffer, pack: Expr) -> None:
        """Load a pack; behind the last one, that of zeros."""
        at = self.b.let("at", minimum(pack, self.e.packs))
        for k, name in enumerate(("values", "columns")):
            begin, _ = self.e.sections[name]
            self.b.store(to, (k, 0), load(self.p.weights, (begin + at * PACK,), PACK), PACK)

    def add(self, sums: Buffer, pack: Buffer, last: bool) -> None:
        """Add the products of a pack. `last`: elements behind the row's end are there, whose pixels are not read."""
        b, c, n = self.b, self.c, self.p.wide
        held = b.alloc("held", f32, PACK, self.vectors, n)
        if last or c.b.conds:
            with b.loop("j", PACK, "unroll") as j, b.loop("v", self.vectors, "unroll") as v:
                b.store(held, (j, v, 0), const(0, f32), n)
        for element in range(PACK):
            column = trusted(pack[1, element], self.e.depth + (1 if last else 0))
            column = b.let("column", minimum(column, c.red.size - 1) if last else column)
            with b.when(pack[1, element] < const(self.e.depth, pack.dtype)) if last else nullcontext():
                if c.b.conds:
                    self.guarded(held, element, column)
                    continue
                for vector in range(self.vectors):
                    start = minimum(self.pixel(const(vector)) // n, c.cols.size // n - 1)

                    def at(j: Expr, start: Expr = start, column: Expr = column) -> dict[Expr, Expr]:
                        return {**c.red.at(column), **c.cols.at(start, n, j)}

                    b.store(held, (element, vector, 0), vector_of(c.b.value, at, n), n)
        with b.loop("j", PACK, "unroll") as j, b.loop("v", self.vectors, "unroll") as v:
            weight, x = op("bits_f32", pack[0, j], dtype=f32), held.at(j, v, 0, lanes=n)
            b.store(sums, (v, 0), fma(weight, x, sums.at(v, 0, lanes=n)), n)

    def guarded(self, held: Buffer, element: int, column: Expr) -> None:
        """Read a column of the pixels of this thread where these lie within the image."""
        b, c = self.b, self.c
        step = c.red.named(b, column)
        for vector, place in enumerate(self.places):
            at = {**step, **place}
            inside = [substitute(e, at) for e in c.b.conds]
            with b.when(reduce(operator.and_, inside)):
                b.store(held, (element, vector, 0), substitute(c.b.value, at))

    def join(self, sums: Buffer, team: Expr, part: Expr) -> None:
        """Add up the sums of the teams of a row; the first of them has the result."""
        b, s, n = self.b, self.s, self.p.wide
        with b.loop("v", self.vectors, "unroll") as v:
            b.store(self.parts, (team, v, self.lane * n), sums.at(v, 0, lanes=n), n)
        b.do("barrier")
        with b.when(op("==", part, const(0))), b.loop("k", s.slices - 1, "unroll") as k:
            with b.loop("v", self.vectors, "unroll") as v:
                other = minimum(team + k + 1, s.teams - 1)
                more = self.parts.at(other, v, self.lane * n, lanes=n)
                b.store(sums, (v, 0), sums.at(v, 0, lanes=n) + more, n)
