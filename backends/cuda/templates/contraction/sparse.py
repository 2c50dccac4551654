"""Products of sparse constant weights: rows of the weights times pixels, one multiply-add for each stored element.

    for block in block.x(tiles of pixels x bundles of rows):
        for t in thread.x(..):                      8 threads are a team that has a few rows, each thread 4 neighbours
                                                    of every 32 pixels; `slices` teams share a row, each has every so
                                                    many packs
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
from dnnc.backends.cuda.templates.contraction.staging import plan_tile, resident, vector_of
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.ir.bundles import PACK, Bundles
from dnnc.ir.dtype import f32, i64
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import E, Expr, Load, Op, cast, const, fma, load, maximum, minimum, op, substitute, value, walk
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, call
from dnnc.ir.types import Array
from dnnc.passes.lower.form import Axis, Contraction
from dnnc.passes.schedule.problem import Knobs, Problem

ORDER = ("slices",)
VECTOR = 4  # neighbouring pixels of a thread
LANES = 8  # threads of a team: their vectors lie in all 32 banks
PAD = 4  # elements of shared memory behind a row, so that vectors of neighbouring rows lie in different banks
HELD = 8  # vectors of pixels that a thread reads before it multiplies them
SIDE = 16  # pixels of half a warp, which it moves together
PIXELS = (32, 64, 128)
ROWS = (1, 2, 4, 8, 16)  # of a team: its sums are in registers
AHEAD = 4  # vectors that a thread asks for before it waits
SLICES = (1, 2, 4, 8)
# Cycles, fitted to 1,188 kernels on an H100, whose times they tell to 12 %:
READ = 1.27  # of an SM for a vector of a team
ASKED = 4  # packs beside their vectors, in the same unit
ROW_START = 14.4  # of an SM for a warp's row and piece
CHAIN, CHAIN_VECTOR = 218, 61  # of a warp for a pack, in which it waits for indices, elements and products
ROW_WAIT = 186  # the same for a row and piece
COPY = 0.29  # of an SM for an element of the other factor
RESULT = 0.23  # and of the results, and RESULT_SLICE more for each slice
RESULT_SLICE = 0.07
ROUND = 276  # until a round of copies is there
BLOCK = 230  # that a block begins and ends with
START = 3000  # of a launch
CLOCK = 1.755e9


@dataclass(frozen=True)
class Work:
    """Sizes of a product: pixels, rows of the weights, terms of a sum; of the encoding: rows of a bundle, columns of a
    piece, packs of all bundles, of the largest one, and of the busiest team of a bundle by the rows of a team.
    """

    pixels: int
    rows: int
    terms: int
    height: int
    depth: int
    packs: int
    most: int
    busiest: tuple[float, ...]

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
    def vectors(self) -> int:
        """Of a thread, for a row."""
        return self.pixels // (LANES * VECTOR)

    @property
    def teams(self) -> int:
        """Of a slice."""
        return self.warps * 32 // LANES // self.slices


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
    ends = e.starts[:: e.pieces]
    packs = ends[1:] - ends[:-1]
    rows, columns = e.pattern.rows, e.pattern.columns
    return Work(pixels, rows, columns, e.height, e.depth, e.packs, *loads(packs.reshape(-1, e.height)))


def loads(packs: Array) -> tuple[int, tuple[float, ...]]:
    """Packs of the largest bundle, and of the busiest team (mean of all bundles) by ROWS, of packs [bundles, height]
    of rows whose longest are first.
    """
    found = []
    for each in ROWS:
        teams = max(packs.shape[1] // each, 1)
        turns = packs[:, : each * teams].reshape(len(packs), -1, teams).copy()
        turns[:, 1::2] = turns[:, 1::2, ::-1]
        found.append(float(turns.sum(1).max(1).mean()))
    return int(packs.sum(1).max()), tuple(found)


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
    if not in_order(c.cols, c.red, encoding, found[1]):
        return None
    return Product(c, encoding, found[1][0].buf)


def in_order(rows: Axis, red: Axis, e: Bundles, reads: list[Load]) -> bool:
    """Is step k of the sum column k of the matrix? Asked of the bitmap's words of some elements."""
    begin = e.sections["bits"][0]
    words = [x for x in reads if not any(isinstance(y, Load) for y in walk(x.idx[0]))]
    for row, k in pairs((0, rows.size - 1), (0, 1, 31, 33, red.size // 2, red.size - 1)):
        if k < red.size:
            at = {**rows.at(const(row)), **red.at(const(k))}
            word = begin + (row * e.pattern.columns + k) // 32
            if not any(value(substitute(x.idx[0], at)) == word for x in words):
                return False
    return True


def trusted(number: Expr, most: int) -> Expr:
    """An index out of the encoding, below `most`."""
    return call("trusted", cast(number, i64), 0, most)


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
    for pixels, each, slices in pairs(PIXELS, ROWS, SLICES):
        threads = w.height * LANES // each * slices
        if threads % 32 or not 64 <= threads <= 1024 or w.height % each:
            continue
        s = Shape(pixels, threads // 32, slices)
        crowded = threads * registers(w, s) > target.registers
        if (pixels == PIXELS[0] or pixels < 2 * w.pixels) and not crowded and shared(w, s) <= target.shared_bytes:
            yield s


def registers(w: Work, s: Shape) -> int:
    """Of a thread, about."""
    return 20 + 2 * PACK + min(PACK * s.vectors, HELD) * VECTOR + (VECTOR * s.vectors + 2) * (w.height // s.teams)


def shared(w: Work, s: Shape) -> int:
    """Bytes of a block."""
    return max(w.depth + 1, w.height * s.slices) * (s.pixels + PAD) * 4


def cycles(w: Work, s: Shape, target: GpuTarget) -> float:
    """Estimated cycles of the busiest multiprocessor: what its blocks ask of shared memory, or as long as a block takes
    alone, as often as blocks follow one another, or what memory takes.
    """
    threads, each = s.warps * 32, w.height // s.teams
    blocks = -(-w.pixels // s.pixels) * w.bundles
    most, packs = -(-blocks // target.sms), w.packs / w.bundles
    together = min(most, resident(target, s.warps, registers(w, s), shared(w, s)))
    pack = READ * (PACK * s.vectors + ASKED)
    copies = s.pixels * (w.terms * COPY + w.height * (RESULT + RESULT_SLICE * s.slices))
    starts = w.height * s.slices * w.pieces * LANES / 32 * ROW_START
    busy = max(packs * most, w.most) * pack + most * (starts + copies)
    team = w.busiest[ROWS.index(each)] / s.slices * (CHAIN + CHAIN_VECTOR * s.vectors) + each * w.pieces * ROW_WAIT
    rounds = w.pieces * -(-s.pixels * min(w.depth, w.terms) // (VECTOR * threads * AHEAD)) + 1
    alone = max(team, packs * pack) + copies + rounds * ROUND + BLOCK
    memory = 4 * (w.pixels * (w.terms + w.rows) + 2 * w.packs * PACK) / (target.bandwidth * 1e9 / CLOCK)
    return START + max(busy, -(-most // together) * alone, memory)


# --- the kernel -------------------------------------------------------------------------------------------------------


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    p = product_of(problem)
    if p is None:
        raise ScheduleError("the weights are no bundles of sparse rows, or memory has another order")
    shape = Shape(int(knobs["pixels"]), int(knobs["warps"]), int(knobs.get("slices", 1)))
    return _Writer(p, shape, target).build()


class _Writer:
    """The kernel of one product and one shape."""

    def __init__(self, p: Product, s: Shape, target: GpuTarget) -> None:
        self.together = resident(target, s.warps, registers(p.work, s), shared(p.work, s))
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
            self.x = b.alloc("x", f32, high, s.pixels + PAD, space="shared")
            with b.loop("t", self.threads, "thread.x") as t:
                b.do("resident", self.together)
                self.body(t)
        return self.c.kernel.with_body(b.block())

    def body(self, t: Expr) -> None:
        b, e, s = self.b, self.e, self.s
        self.lane, team = b.let("lane", t % LANES), b.let("team", t // LANES)
        self.slice = b.let("slice", team // s.teams)
        team = b.let("place", team % s.teams)
        sums = b.alloc("sums", f32, self.each, s.vectors, VECTOR)
        with b.loop("r", self.each, "unroll") as r, b.loop("v", s.vectors, "unroll") as v:
            b.store(sums, (r, v, 0), const(0, f32), VECTOR)
        with b.loop("z", -(-s.pixels // self.threads)) as z, b.when(t + z * self.threads < s.pixels):
            b.store(self.x, (e.depth, t + z * self.threads), const(0, f32))
        with b.loop("piece", e.pieces) as piece:
            ends = b.alloc("ends", self.p.weights.dtype, self.each, 2)  # all are asked for at once, with the pixels
            with b.loop("r", self.each, "unroll") as r, b.loop("k", 2, "unroll") as k:
                at = self.slot(team, r) * e.pieces + piece + k
                b.store(ends, (r, k), self.p.weights[e.sections["starts"][0] + at])
            first = b.alloc("first", self.p.weights.dtype, self.each, 2, PACK)
            self.ask(first, 0, self.begin(ends, const(0)))
            if e.pieces > 1:
                b.do("barrier")
            self.fill(t, piece)
            b.do("barrier")
            with b.loop("r", self.each, "unroll") as r:
                with b.when(r + 1 < self.each):
                    after = minimum(r + 1, self.each - 1)
                    self.ask(first, after, self.begin(ends, after))
                self.row(sums, r, ends, first)
        b.do("barrier")
        with b.loop("r", self.each, "unroll") as r:
            begin, _ = e.sections["rows"]
            row = trusted(self.p.weights[begin + self.slot(team, r)], e.height)
            with b.loop("v", s.vectors, "unroll") as v:
                place = (self.slice * e.height + row, self.column(v))
                b.store(self.x, place, sums.at(r, v, 0, lanes=VECTOR), VECTOR)
        b.do("barrier")
        self.finish(t)

    def slot(self, team: Expr, r: Expr) -> Expr:
        """Rows are dealt out in the order of their lengths, in turns there and back."""
        turned = op("select", op("==", r % 2, const(0)), team, const(self.s.teams - 1) - team)
        return self.bundle * self.e.height + r * self.s.teams + turned

    def column(self, v: Expr) -> Expr:
        """Of shared memory, where a vector of a thread's pixels begins."""
        return v * (LANES * VECTOR) + self.lane * VECTOR

    def begin(self, ends: Buffer, r: Expr) -> Expr:
        """The first pack of a row's piece for this slice."""
        return trusted(ends[r, 0], self.e.packs + 1) + self.slice

    def ask(self, to: Buffer, place: E, pack: Expr) -> None:
        """Load a pack; behind the last one, that of zeros."""
        b, at = self.b, self.b.let("pack", minimum(pack, self.e.packs))
        for k, name in enumerate(("values", "columns")):
            begin, _ = self.e.sections[name]
            b.store(to, (place, k, 0), load(self.p.weights, (begin + at * PACK,), PACK), PACK)

    def row(self, sums: Buffer, r: Expr, ends: Buffer, first: Buffer) -> None:
        """Add a slice of a piece of a row's products to its sums; the next pack is on its way meanwhile."""
        b, s, slices = self.b, self.s, self.s.slices
        low, high = (b.let(n, trusted(ends[r, k], self.e.packs + 1)) for k, n in enumerate(("low", "high")))
        ahead, pack = (b.alloc(n, self.p.weights.dtype, 1, 2, PACK) for n in ("ahead", "pack"))

        def move(to: Buffer, source: Buffer, place: E) -> None:
            with b.loop("k", 2, "unroll") as k:
                b.store(to, (0, k, 0), source.at(place, k, 0, lanes=PACK), PACK)

        move(ahead, first, r)
        whole = slices == 1
        count = high if whole else maximum(high - low - self.slice + (slices - 1), 0) // slices
        with b.loop("p", count, lo=low if whole else 0) as p:
            move(pack, ahead, 0)
            self.ask(ahead, 0, p + 1 if whole else low + self.slice + (p + 1) * slices)
            step = min(PACK, HELD // s.vectors)  # elements whose pixels are asked for together
            for j0 in range(0, PACK, step):
                held = b.alloc("held", f32, step, s.vectors, VECTOR)
                with b.loop("j", step, "unroll") as j, b.loop("v", s.vectors, "unroll") as v:
                    column = trusted(pack[0, 1, j0 + j], self.e.depth + 1)
                    b.store(held, (j, v, 0), self.x.at(column, self.column(v), lanes=VECTOR), VECTOR)
                with b.loop("j", step, "unroll") as j, b.loop("v", s.vectors, "unroll") as v:
                    weight, x = op("bits_f32", pack[0, 0, j0 + j], dtype=f32), held.at(j, v, 0, lanes=VECTOR)
                    b.store(sums, (r, v, 0), fma(weight, x, sums.at(r, v, 0, lanes=VECTOR)), VECTOR)

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
