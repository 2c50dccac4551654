"""Products of sparse constant weights: rows of the weights times pixels, one multiply-add for each stored element.

    for block in block.x(tiles of pixels x bundles of rows):
        for t in thread.x(..):                      a team of threads has a few rows, each thread 4 neighbouring pixels
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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product as pairs
from typing import Any

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction.staging import L2_RATE, LATENCY, plan_tile, resident, vector_of
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.ir.bundles import PACK, Bundles
from dnnc.ir.dtype import f32, i64
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, cast, const, fma, load, minimum, op, substitute, value, walk
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, call
from dnnc.passes.lower.form import Contraction
from dnnc.passes.schedule.problem import Knobs, Problem

ORDER: tuple[str, ...] = ()  # a sum is one thread's, in the order of the columns
VECTOR = 4  # pixels of a thread
SWIZZLE = 8  # rows of shared memory whose vectors lie in different banks
SIDE = 16  # pixels of half a warp, which it moves together
PIXELS = (32, 64, 128)
MOST_ROWS = 8  # of a team: its sums are in registers
AHEAD = 4  # vectors that a thread asks for before it waits
READ = 32  # elements that an SM reads from shared memory in a cycle
EFFICIENCY = 0.6  # of that rate, beside reading indices: loops whose ends are not foreseen
ROW_START = 12  # cycles of a warp's scheduler to begin a row
MOVED = 30  # elements in a cycle that go through registers into shared memory
START = 650  # cycles of a launch


@dataclass(frozen=True)
class Work:
    """Sizes of a product: pixels, rows of the weights, terms of a sum; of the encoding: rows of a bundle, columns of a
    piece, packs of all bundles and of the largest one.
    """

    pixels: int
    rows: int
    terms: int
    height: int
    depth: int
    packs: int
    most: int

    @property
    def pieces(self) -> int:
        return -(-self.terms // self.depth)

    @property
    def bundles(self) -> int:
        return -(-self.rows // self.height)


@dataclass(frozen=True)
class Shape:
    """`pixels` of a block, and its `warps`."""

    pixels: int
    warps: int

    @property
    def lanes(self) -> int:
        """Threads of a team."""
        return self.pixels // VECTOR

    @property
    def teams(self) -> int:
        return self.warps * 32 // self.lanes


@dataclass(frozen=True)
class Product:
    """A product whose weights are bundles: `c.b` in all cases, for rows of the weights are neighbours in memory."""

    c: Contraction
    encoding: Bundles
    weights: Buffer
    early: bool  # are the weights a constant?

    @property
    def work(self) -> Work:
        e = self.encoding
        return work_of(e, self.c.rows.size)


def work_of(e: Bundles, pixels: int) -> Work:
    """The work of a product of weights and so many pixels."""
    ends = e.starts[:: e.height * e.pieces]
    most = int((ends[1:] - ends[:-1]).max())
    return Work(pixels, e.pattern.rows, e.pattern.columns, e.height, e.depth, e.packs, most)


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
    if found[0] or not found[1] or c.b.conds or c.batch.loops or (c.cols.size, c.red.size) != sizes:
        return None
    if not _in_order(c, encoding, found[1]):
        return None
    return Product(c, encoding, found[1][0].buf, name in problem.constants)


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
    return [(("pixels", s.pixels), ("warps", s.warps)) for s in found]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    return []  # the candidates are all


def shapes(w: Work, target: GpuTarget) -> Iterator[Shape]:
    """All blocks that registers and shared memory hold, no more pixels than there are but for the least."""
    for pixels, each in pairs(PIXELS, (1, 2, 4, 8)):
        lanes = pixels // VECTOR
        threads = w.height * lanes // each
        if threads % 32 or not 64 <= threads <= 1024 or w.height % each:
            continue
        s = Shape(pixels, threads // 32)
        crowded = threads * registers(w, s) > target.registers
        if (pixels == PIXELS[0] or pixels < 2 * w.pixels) and not crowded and shared(w, s) <= target.shared_bytes:
            yield s


def registers(w: Work, s: Shape) -> int:
    """Of a thread, about."""
    return 44 + VECTOR * (w.height // s.teams)


def shared(w: Work, s: Shape) -> int:
    """Bytes of a block."""
    return max(w.depth + 1, w.height) * s.pixels * 4


def cycles(w: Work, s: Shape, target: GpuTarget) -> float:
    """Estimated cycles of the busiest multiprocessor: its reads of shared memory, copies, and what waits for memory."""
    tiles = -(-w.pixels // s.pixels)
    blocks = tiles * w.bundles
    share = max(w.packs / w.bundles * -(-blocks // target.sms), w.most)  # packs of the busiest
    most = -(-blocks // target.sms)
    together = min(most, resident(target, s.warps, registers(w, s), shared(w, s)))
    products = share * PACK * s.pixels / READ / EFFICIENCY
    busy = min(1.0, together * s.warps / 12)  # fewer warps wait for indices, then for elements
    starts = w.height * w.pieces * s.lanes / 32 * ROW_START / 4
    copied = s.pixels * w.terms
    copies = copied * max(4 / L2_RATE, 1 / MOVED) + s.pixels * w.height * (4 / L2_RATE + 2 / READ)
    waits = (w.pieces + 1) * LATENCY / together
    memory = 4 * (w.pixels * (w.terms + w.rows) + 2 * w.packs * PACK) / (target.bandwidth * 1e9 / 1.755e9)
    return START + LATENCY + max(products / busy + most * (starts + copies + waits), memory)


# --- the kernel -------------------------------------------------------------------------------------------------------


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    p = product_of(problem)
    if p is None:
        raise ScheduleError("the weights are no bundles of sparse rows, or memory has another order")
    return _Writer(p, Shape(int(knobs["pixels"]), int(knobs["warps"]))).build()


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
            high = max(e.depth + 1, e.height)
            self.x = b.alloc("x", f32, high, s.pixels, space="shared", swizzle=SWIZZLE)
            with b.loop("t", self.threads, "thread.x") as t:
                self.body(t)
        return self.c.kernel.with_body(b.block())

    def body(self, t: Expr) -> None:
        b, e, s = self.b, self.e, self.s
        lane, team = b.let("lane", t % s.lanes), b.let("team", t // s.lanes)
        sums = b.alloc("sums", f32, self.each, VECTOR)
        with b.loop("r", self.each, "unroll") as r:
            b.store(sums, (r, 0), const(0, f32), VECTOR)
        with b.loop("z", -(-s.pixels // self.threads)) as z, b.when(t + z * self.threads < s.pixels):
            b.store(self.x, (e.depth, t + z * self.threads), const(0, f32))
        with b.loop("piece", e.pieces) as piece:
            if e.pieces > 1:
                b.do("barrier")
            self.fill(t, piece)
            b.do("barrier")
            with b.loop("r", self.each, "unroll") as r:
                self.row(sums, r, self.slot(team, r), piece, lane)
        b.do("barrier")
        with b.loop("r", self.each, "unroll") as r:
            row = self.number("rows", self.slot(team, r), e.height)
            b.store(self.x, (row, lane * VECTOR), sums.at(r, 0, lanes=VECTOR), VECTOR)
        b.do("barrier")
        self.finish(t)

    def slot(self, team: Expr, r: Expr) -> Expr:
        """Rows are dealt out in the order of their lengths, in turns there and back."""
        turned = op("select", op("==", r % 2, const(0)), team, const(self.s.teams - 1) - team)
        return self.bundle * self.e.height + r * self.s.teams + turned

    def number(self, section: str, i: Expr, most: int) -> Expr:
        """An index out of the encoding, below `most`."""
        begin, _ = self.e.sections[section]
        return call("trusted", cast(self.p.weights[begin + i], i64), 0, most)

    def row(self, sums: Buffer, r: Expr, slot: Expr, piece: Expr, lane: Expr) -> None:
        """Add a piece of a row's products to its sums; the next pack is on its way meanwhile."""
        b, e, w = self.b, self.e, self.p.weights
        begins = {name: e.sections[name][0] for name in ("values", "columns")}
        at = b.let("at", slot * e.pieces + piece)
        low, high = (b.let(n, self.number("starts", at + k, e.packs + 1)) for k, n in enumerate(("low", "high")))
        next_values, next_columns = (b.alloc(f"next_{n}", w.dtype, PACK) for n in begins)

        def ask(pack: Expr) -> None:
            for name, to in (("values", next_values), ("columns", next_columns)):
                b.store(to, (0,), load(w, (begins[name] + pack * PACK,), PACK), PACK)

        ask(minimum(low, e.packs))
        with b.loop("p", high, lo=low) as p:
            values, columns = (b.alloc(n, w.dtype, PACK) for n in begins)
            b.store(values, (0,), next_values.at(0, lanes=PACK), PACK)
            b.store(columns, (0,), next_columns.at(0, lanes=PACK), PACK)
            ask(p + 1)
            with b.loop("j", PACK, "unroll") as j:
                column = call("trusted", cast(columns[j], i64), 0, e.depth + 1)
                x = self.x.at(column, lane * VECTOR, lanes=VECTOR)
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
                    b.store(made, (j,), self.x[minimum(row, self.e.height - VECTOR) + j, pixel])
                start = self.bundle * self.e.height + row
                store_row(b, self.c, {}, self.first + pixel, start, made, (const(0),), VECTOR)
