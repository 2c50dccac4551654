"""Products of sparse constant weights: rows of the weights times pixels, one multiply-add for each stored element.

    for block in block.x(tiles of pixels x bundles of rows):
        for t in thread.x(..):                      a team of threads has a few rows, each thread 4 neighbouring pixels;
                                                    `slices` teams share a row, each has every so many packs
            for each piece of the sum:
                x[piece, pixels] = the other factor, transposed on its way into shared memory
                for each row of the team: for each pack of 4 elements:
                    sums[row] += values * x[columns, pixels]
            sums -> shared memory -> y = epilogue(sums), neighbouring threads along the rows

A pixel is a place of an image, or a row of the other matrix; neighbours in memory are channels, as the layouts of GPUs
have it. The other factor is read from device memory once for each bundle. Teams of a warp have rows of about the same
length, which the encoding sorts (`dnnc.ir.bundles`). The row design is Sputnik's (Gale et al., 2020): one-dimensional
tiles, vector loads, rows in the order of their lengths; columns are shared through shared memory here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import product as pairs
from typing import Any

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction.staging import L2_RATE, LATENCY, plan_tile, resident, vector_of
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.ir.bundles import PACK, Bundles
from dnnc.ir.dtype import f32, i64
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, cast, const, fma, load, maximum, minimum, op, substitute, value, walk
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, call
from dnnc.passes.lower.form import Contraction
from dnnc.passes.schedule.problem import Knobs, Problem

ORDER = ("slices",)
VECTOR = 4  # pixels of a thread
SWIZZLE = 8  # rows of shared memory whose vectors lie in different banks
SIDE = 16  # pixels of half a warp, which it moves together
PIXELS = (32, 64, 128)
MOST_ROWS = 8  # of a team: its sums are in registers
AHEAD = 4  # vectors that a thread asks for before it waits
SLICES = (1, 2, 4, 8)
READ = 32  # elements that an SM reads from shared memory in a cycle
EFFICIENCY = 0.6  # of that rate, beside reading indices: loops whose ends are not foreseen
ROW_START = 12  # cycles of a warp's scheduler to begin a row
CHAIN = 90  # cycles of a warp for a pack, in which it waits for indices, elements and products
ROW_WAIT = 150  # the same for a row
MOVED = 30  # elements in a cycle that go through registers into shared memory
START = 2000  # cycles of a launch, and of what a block begins and ends with
CLOCK = 1.755e9


@dataclass(frozen=True)
class Work:
    """Sizes of a product: pixels, rows of the weights, terms of a sum; of the encoding: rows of a bundle, columns of a
    piece, packs of all bundles, of the largest one and of the longest row.
    """

    pixels: int
    rows: int
    terms: int
    height: int
    depth: int
    packs: int
    most: int
    longest: int

    @property
    def pieces(self) -> int:
        return -(-self.terms // self.depth)

    @property
    def bundles(self) -> int:
        return -(-self.rows // self.height)

    @property
    def count(self) -> int:
        """Rows of all bundles."""
        return self.bundles * self.height


@dataclass(frozen=True)
class Shape:
    """`pixels` of a block, and its `warps`; `slices` teams share a row."""

    pixels: int
    warps: int
    slices: int = 1

    @property
    def lanes(self) -> int:
        """Threads of a team."""
        return self.pixels // VECTOR

    @property
    def teams(self) -> int:
        """Of a slice."""
        return self.warps * 32 // self.lanes // self.slices


@dataclass(frozen=True)
class Product:
    """A product whose weights are bundles: `c.b` in all cases, for rows of the weights are neighbours in memory."""

    c: Contraction
    encoding: Bundles
    weights: Buffer

    @property
    def work(self) -> Work:
        e = self.encoding
        return work_of(e, self.c.rows.size)


def work_of(e: Bundles, pixels: int) -> Work:
    """The work of a product of weights and so many pixels."""
    ends = e.starts[:: e.height * e.pieces]
    most, longest = (int((at[1:] - at[:-1]).max()) for at in (ends, e.starts[:: e.pieces]))
    return Work(pixels, e.pattern.rows, e.pattern.columns, e.height, e.depth, e.packs, most, longest)


def product_of(problem: Problem) -> Product | None:
    """The product of a group whose weights are bundles of rows; None for all others."""
    anchor, c = problem.anchor, problem.product
    weights = anchor.inputs[1] if anchor is not None and len(anchor.inputs) > 1 else None
    encoding = weights.type.encoding if weights is not None else None
    if not isinstance(encoding, Bundles) or weights is None or c is None or c.dtype is not f32:
        return None
    name = dict(zip(problem.lowered.params, problem.kernel.entry.buffers))[weights].name
    found = [[x for x in o.loads if x.buf.name == name] for o in (c.a, c.b)]
    sizes = encoding.pattern.rows, encoding.pattern.columns
    e = c.b.value  # the element and nothing else: what is stored, or 0
    if not (isinstance(e, Op) and e.name == "select" and isinstance(e.args[1], Op) and e.args[1].name == "bits_f32"):
        return None
    if found[0] or not found[1] or c.b.conds or c.batch.loops or (c.cols.size, c.red.size) != sizes:
        return None
    if not _in_order(c, encoding, found[1]):
        return None
    return Product(c, encoding, found[1][0].buf)


def _in_order(c: Contraction, e: Bundles, reads: list[Load]) -> bool:
    """Is step k of the sum column k of the matrix? Asked of the bitmap's words of some elements."""
    begin = e.sections["bits"][0]
    words = [x for x in reads if not any(isinstance(y, Load) for y in walk(x.idx[0]))]
    for row, k in pairs((0, c.cols.size - 1), (0, 1, 31, 33, c.red.size // 2, c.red.size - 1)):
        if k < c.red.size:
            at = {**c.cols.at(const(row)), **c.red.at(const(k))}
            word = begin + (row * e.pattern.columns + k) // 32
            if not any(value(substitute(x.idx[0], at)) == word for x in words):
                return False
    return True


# --- choice -----------------------------------------------------------------------------------------------------------


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    p = product_of(problem)
    if p is None:
        return []
    work = p.work
    found = sorted(shapes(work, target), key=lambda s: cycles(work, s, target))
    return [knobs_of(s) for s in found[:8]]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    p = product_of(problem)
    return [] if p is None else [knobs_of(s) for s in shapes(p.work, target)]


def knobs_of(s: Shape) -> Knobs:
    return (("pixels", s.pixels), ("warps", s.warps), ("slices", s.slices))


def shapes(w: Work, target: GpuTarget) -> Iterator[Shape]:
    """All blocks that registers and shared memory hold, no more pixels than there are but for the least."""
    for pixels, each, slices in pairs(PIXELS, (1, 2, 4, 8), SLICES):
        lanes = pixels // VECTOR
        threads = w.height * lanes // each * slices
        if threads % 32 or not 64 <= threads <= 1024 or w.height % each:
            continue
        s = Shape(pixels, threads // 32, slices)
        crowded = threads * registers(w, s) > target.registers
        if (pixels == PIXELS[0] or pixels < 2 * w.pixels) and not crowded and shared(w, s) <= target.shared_bytes:
            yield s


def registers(w: Work, s: Shape) -> int:
    """Of a thread, about."""
    return 44 + (VECTOR + 2) * (w.height // s.teams)


def shared(w: Work, s: Shape) -> int:
    """Bytes of a block."""
    return max(w.depth + 1, w.height * s.slices) * s.pixels * 4


def cycles(w: Work, s: Shape, target: GpuTarget) -> float:
    """Estimated cycles of the busiest multiprocessor: what its blocks ask of shared memory, of copies and of the
    schedulers, or as long as a block takes alone, as often as blocks follow one another.
    """
    tiles, threads = -(-w.pixels // s.pixels), s.warps * 32
    blocks = tiles * w.bundles
    share = max(w.packs / w.bundles * -(-blocks // target.sms), w.most)  # packs of the busiest
    most = -(-blocks // target.sms)
    together = min(most, resident(target, s.warps, registers(w, s), shared(w, s)))
    products = share * PACK * s.pixels / READ / EFFICIENCY
    each = w.height // s.teams
    starts = w.height * s.slices * w.pieces * s.lanes / 32 * ROW_START / 4
    copied, results = s.pixels * w.terms, s.pixels * w.height
    copies = copied * max(4 / L2_RATE, 1 / MOVED) + results * (4 / L2_RATE + (1 + s.slices) / READ)
    rounds = w.pieces * -(-s.pixels * min(w.depth, w.terms) // (VECTOR * threads * AHEAD)) + 1
    chain = max(w.longest, w.packs / w.count * each) / s.slices * CHAIN + each * w.pieces * ROW_WAIT
    alone = rounds * LATENCY + chain
    memory = 4 * (w.pixels * (w.terms + w.rows) + 2 * w.packs * PACK) / (target.bandwidth * 1e9 / CLOCK)
    return START + max(products + most * (starts + copies), -(-most // together) * alone, memory)


# --- the kernel -------------------------------------------------------------------------------------------------------


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    p = product_of(problem)
    if p is None:
        raise ScheduleError("the weights are no bundles of sparse rows, or memory has another order")
    return _Writer(p, Shape(int(knobs["pixels"]), int(knobs["warps"]), int(knobs.get("slices", 1)))).build()


class _Writer:
    """The kernel of one product and one shape."""

    def __init__(self, p: Product, s: Shape) -> None:
        self.p, self.c, self.e, self.s, self.b = p, p.c, p.encoding, s, Builder()
        self.threads, self.each = s.warps * 32, p.encoding.height // s.teams
        if self.each * s.teams != p.encoding.height:
            raise ScheduleError(f"{p.encoding.height} rows of a bundle are no multiple of {s.teams} teams")

    def build(self) -> Kernel:
        b, e, s = self.b, self.e, self.s
        tiles = -(-self.c.rows.size // s.pixels)
        with b.loop("block", tiles * e.bundles, "block.x") as block:
            self.bundle = b.let("bundle", block % e.bundles)  # neighbouring blocks read the same pixels
            self.first = b.let("first", block // e.bundles) * s.pixels
            high = max(e.depth + 1, e.height * s.slices)
            self.x = b.alloc("x", f32, high, s.pixels, space="shared", swizzle=SWIZZLE)
            with b.loop("t", self.threads, "thread.x") as t:
                self.body(t)
        return self.c.kernel.with_body(b.block())

    def body(self, t: Expr) -> None:
        b, e, s = self.b, self.e, self.s
        self.lane, team = b.let("lane", t % s.lanes), b.let("team", t // s.lanes)
        self.slice = b.let("slice", team // s.teams)
        team = b.let("place", team % s.teams)
        sums = b.alloc("sums", f32, self.each, VECTOR)
        with b.loop("r", self.each, "unroll") as r:
            b.store(sums, (r, 0), const(0, f32), VECTOR)
        with b.loop("z", -(-s.pixels // self.threads)) as z, b.when(t + z * self.threads < s.pixels):
            b.store(self.x, (e.depth, t + z * self.threads), const(0, f32))
        with b.loop("piece", e.pieces) as piece:
            ends = b.alloc("ends", self.p.weights.dtype, self.each, 2)  # all are asked for at once, with the pixels
            with b.loop("r", self.each, "unroll") as r, b.loop("k", 2, "unroll") as k:
                at = self.slot(team, r) * e.pieces + piece + k
                b.store(ends, (r, k), self.p.weights[e.sections["starts"][0] + at])
            if e.pieces > 1:
                b.do("barrier")
            self.fill(t, piece)
            b.do("barrier")
            with b.loop("r", self.each, "unroll") as r:
                self.row(sums, r, ends)
        b.do("barrier")
        with b.loop("r", self.each, "unroll") as r:
            begin, _ = e.sections["rows"]
            row = self.trusted(self.p.weights[begin + self.slot(team, r)], e.height)
            b.store(self.x, (self.slice * e.height + row, self.lane * VECTOR), sums.at(r, 0, lanes=VECTOR), VECTOR)
        b.do("barrier")
        self.finish(t)

    def slot(self, team: Expr, r: Expr) -> Expr:
        """Rows are dealt out in the order of their lengths, in turns there and back."""
        turned = op("select", op("==", r % 2, const(0)), team, const(self.s.teams - 1) - team)
        return self.bundle * self.e.height + r * self.s.teams + turned

    @staticmethod
    def trusted(number: Expr, most: int) -> Expr:
        """An index out of the encoding, below `most`."""
        return call("trusted", cast(number, i64), 0, most)

    def row(self, sums: Buffer, r: Expr, ends: Buffer) -> None:
        """Add a slice of a piece of a row's products to its sums; the next pack is on its way meanwhile."""
        b, e, w, slices = self.b, self.e, self.p.weights, self.s.slices
        begins = {name: e.sections[name][0] for name in ("values", "columns")}
        low, high = (b.let(name, self.trusted(ends[r, k], e.packs + 1)) for k, name in enumerate(("low", "high")))
        next_values, next_columns = (b.alloc(f"next_{n}", w.dtype, PACK) for n in begins)

        def ask(pack: Expr) -> None:
            at = b.let("pack", minimum(pack, e.packs))
            for name, to in (("values", next_values), ("columns", next_columns)):
                b.store(to, (0,), load(w, (begins[name] + at * PACK,), PACK), PACK)

        ask(low + self.slice)
        whole = slices == 1
        count = high if whole else maximum(high - low - self.slice + (slices - 1), 0) // slices
        with b.loop("p", count, lo=low if whole else 0) as p:
            values, columns = (b.alloc(n, w.dtype, PACK) for n in begins)
            b.store(values, (0,), next_values.at(0, lanes=PACK), PACK)
            b.store(columns, (0,), next_columns.at(0, lanes=PACK), PACK)
            ask(p + 1 if whole else low + self.slice + (p + 1) * slices)
            with b.loop("j", PACK, "unroll") as j:
                column = self.trusted(columns[j], e.depth + 1)
                x = self.x.at(column, self.lane * VECTOR, lanes=VECTOR)
                weight = op("bits_f32", values[j], dtype=f32)
                b.store(sums, (r, 0), fma(weight, x, sums.at(r, 0, lanes=VECTOR)), VECTOR)

    # --- the other factor ---------------------------------------------------------------------------------------------

    def fill(self, t: Expr, piece: Expr) -> None:
        """Copy a piece of the other factor: vectors along the sum are transposed, others go one by one."""
        b, s, c, other = self.b, self.s, self.c, self.c.a
        tile = plan_tile(c, other, 64, 32, 128, 1, "sum")
        wide = VECTOR if tile.along == "sum" and tile.lanes == VECTOR else 1
        count, group = s.pixels * self.e.depth // wide, self.threads * AHEAD
        with b.loop("f", -(-count // group)) as f:
            held = b.alloc("held", f32, AHEAD, wide)
            with b.loop("u", AHEAD, "unroll") as u:
                pixel, k = self.place(t + (f * AHEAD + u) * self.threads, wide)
                where = c.rows.at(minimum(self.first + pixel, c.rows.size - 1))
                step = b.let("step", piece * (self.e.depth // wide) + k)
                inside = c.red.inside(step, wide, other.value, *other.conds)

                def at(j: Expr, where: Any = where, inside: Expr = inside) -> dict[Expr, Expr]:
                    return {**where, **(c.red.at(inside, wide, j) if wide > 1 else c.red.at(inside))}

                cond = (k < self.e.depth // wide) & (step < c.red.size // wide)
                for guard in other.conds:
                    cond = cond & substitute(guard, at(const(0)))
                b.store(held, (u, 0), const(0, f32), wide)
                with b.when(cond):
                    b.store(held, (u, 0), vector_of(other.value, at, wide), wide)
            with b.loop("u", AHEAD, "unroll") as u:
                pixel, k = self.place(t + (f * AHEAD + u) * self.threads, wide)
                with b.when(k < self.e.depth // wide), b.loop("j", wide, "unroll") as j:
                    b.store(self.x, (k * wide + j, pixel), held[u, j])

    def place(self, n: Expr, wide: int) -> tuple[Expr, Expr]:
        """The pixel and the vector of its terms that are number n: a warp has 16 pixels and 2 vectors, whose elements
        lie in 32 banks.
        """
        if wide == 1:
            return n % self.s.pixels, n // self.s.pixels
        halves = self.s.pixels // SIDE
        return n % SIDE + n // (2 * SIDE) % halves * SIDE, n // SIDE % 2 + n // (2 * self.s.pixels) * 2

    # --- the results --------------------------------------------------------------------------------------------------

    def finish(self, t: Expr) -> None:
        """Finish and store vectors of neighbouring rows of the weights for each pixel."""
        b, s = self.b, self.s
        count = s.pixels * self.e.height // VECTOR
        with b.loop("f", -(-count // self.threads)) as f:
            pixel, q = self.place(t + f * self.threads, VECTOR)
            row = b.let("row", q * VECTOR)
            with b.when((q < self.e.height // VECTOR) & (self.first + pixel < self.c.rows.size)):
                made = b.alloc("made", f32, VECTOR)
                with b.loop("j", VECTOR, "unroll") as j:
                    first = minimum(row, self.e.height - VECTOR) + j
                    parts = [self.x[first + n * self.e.height, pixel] for n in range(s.slices)]
                    b.store(made, (j,), reduce(operator.add, parts))
                start = self.bundle * self.e.height + row
                store_row(b, self.c, {}, self.first + pixel, start, made, (const(0),), VECTOR)
