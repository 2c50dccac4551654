"""Products of few rows with 2:4 sparse constant weights in 16-bit floats: bandwidth is that of the stored elements.

    for block in block.x(rows of tiles), part in cluster(split):
        for w in warp(4 * slices): for l in lane(32):
            weights of the first steps are on their way, also while the kernel ahead of this one ends
            for step: v, places = 32 x 64 of the weights; x = a vector of each row
                sums += mma.sp(v, x)
            the warps' sums meet in shared memory, those of a cluster's blocks as well; y = epilogue(sums)

Weights are the first factor of `mma.sp`, so that 8 rows of x fill the second one. A lane reads vectors of 16 bytes,
four groups of a row: warp w of a tile has its rows 16 * w and so on of both halves, whole lines of 128 bytes. The sum
may be in any order, so the four groups are those of two products, and their places lie in that order (`Pairs`,
"lanes"). Of x a lane multiplies every other pair of 32 elements. Neighbouring lanes read half of them each, in vectors,
and exchange what the other one needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product as pairs

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction.staging import readable, vector_of
from dnnc.backends.cuda.templates.contraction.two_of_four import pairs_of
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.backends.cuda.templates.reduction.partial import LANES, SPLITS, Parts, cluster
from dnnc.ir.dtype import f32, u32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, const, minimum, select
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel, call
from dnnc.ir.pairs import HALF, LINE, LINES, ROWS, STEP
from dnnc.passes.lower.form import Contraction
from dnnc.passes.schedule.problem import Knobs, Problem

ORDER = ("slices", "split")
MOST_ROWS = 16  # of x: exchanges and sums of more take longer than what memory saves
PIXELS = 8  # rows of x that fill the second factor
VECTOR = 8  # elements of 16 bytes
WARPS = 4  # of a tile: 16 rows of each half each
SLICES = (1, 2, 4)
FLIGHT = (2, 1)  # steps of which a warp asks for the weights ahead
HELD = 2  # tiles of rows of x whose elements are asked for ahead of their use
STEP_BYTES = LINES * LINE * 2  # of a tile
# Cycles, fitted to 143 kernels on an H200, whose times they tell to 8 %:
START = 4130  # of a launch, its first weights and its first elements of x
RATE = 19.8  # bytes of memory for each multiprocessor in a cycle
FASTEST, LATENCY = 39, 440  # bytes that one of them gets where others ask for none; from asking to having
WAIT, WAVE = 372, 3600  # of a step of a warp; of blocks that wait for the end of others
BUSY = 179  # of a multiprocessor for a step of a tile with 8 rows of x
CLUSTER = {1: 0, 2: 2160, 4: 1870, 8: 1740}  # until blocks of a cluster have met
SUMS = 75  # bytes of sums that a block adds up in a cycle


@dataclass(frozen=True)
class Shape:
    """A row of tiles is shared by `split` blocks of a cluster, each of `slices` times four warps."""

    slices: int
    split: int
    flight: int


@dataclass(frozen=True)
class Product:
    """A contraction c whose first factor is read without packing; `weights`: tiles [high, wide, line, element]."""

    c: Contraction
    weights: Buffer
    early: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of tiles, and steps of a sum."""
        high, wide, *_ = (int(str(n)) for n in self.weights.shape)
        return high, wide


def takes(pixels: int, rows: int, terms: int) -> bool:
    """Is there a kernel for so many rows of x by weights [rows, terms]?"""
    return 0 < pixels <= MOST_ROWS and terms % STEP == 0 and rows % LANES == 0


def product_of(problem: Problem) -> Product | None:
    """The product of a group whose weights are pairs as lanes read them; None for all others."""
    found = pairs_of(problem, "lanes")
    if found is None:
        return None
    c, a, weights, e = found
    if not takes(c.rows.size, e.rows, e.columns) or not readable(a, c.red, c.rows, VECTOR):
        return None
    high, wide = e.tiles
    shape = tuple(map(const, (high, wide, LINES, LINE)))
    made = replace(c, a=replace(c.a, value=a))
    return Product(made, Buffer(weights.name, weights.dtype, shape), weights.name in problem.constants)


# --- choice -----------------------------------------------------------------------------------------------------------


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    return space(problem, target)[:8]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    p = product_of(problem) if target.major >= 8 else None
    if p is None:
        return []
    pixels, (high, wide) = p.c.rows.size, p.sizes
    every = sorted(_shapes(pixels, wide, target), key=lambda s: cycles(pixels, high, wide, s, target))
    return [(("slices", s.slices), ("split", s.split), ("flight", s.flight)) for s in every]


def _shapes(pixels: int, wide: int, target: GpuTarget) -> Iterator[Shape]:
    tiles = -(-pixels // PIXELS)
    for slices, split, flight in pairs(SLICES, SPLITS if target.has_tma else (1,), FLIGHT):
        memory = slices * tiles * PIXELS * (ROWS + 8) * 4
        s = Shape(slices, split, flight)
        fits = memory <= target.shared_bytes and _together(tiles, s, target)
        if fits and slices * split * flight <= max(wide, 1) and (split == 1 or tiles * PIXELS % split == 0):
            yield s


def _together(tiles: int, s: Shape, target: GpuTarget) -> int:
    """Blocks that the registers of a multiprocessor hold, about."""
    held = 8 * tiles * s.flight if tiles <= HELD else 0
    return target.registers // ((24 * s.flight + 12 * tiles + 16 + held) * s.slices * WARPS * 32)


def best_cycles(pixels: int, rows: int, terms: int, target: GpuTarget) -> float:
    """Estimated cycles of the fastest shape; infinite where there is no kernel."""
    if target.major < 8 or not takes(pixels, rows, terms):
        return math.inf
    high, wide = -(-rows // ROWS), terms // STEP
    return min(cycles(pixels, high, wide, s, target) for s in _shapes(pixels, wide, target))


def cycles(pixels: int, high: int, wide: int, s: Shape, target: GpuTarget) -> float:
    """Estimated cycles of the multiprocessor with the most blocks."""
    tiles, blocks = -(-pixels // PIXELS), high * s.split
    most = -(-blocks // max(int(target.sms * SPLITS[s.split]), 1))
    now = min(most, max(_together(tiles, s, target), 1))
    waves = -(-most // now)
    flying = s.slices * s.flight * STEP_BYTES * now
    own = waves * now * wide / s.split * STEP_BYTES / min(FASTEST, flying / LATENCY)
    busy = most * wide / s.split * BUSY * (1 + tiles) / 2
    each = -(-wide // (s.slices * s.split))
    end = s.slices * s.split * tiles * PIXELS * ROWS * 4 / SUMS + CLUSTER[s.split]
    memory = high * wide * STEP_BYTES / (RATE * target.sms)
    return float(START + (waves - 1) * WAVE + max(memory, own, busy) + waves * (WAIT * each + end))


# --- the kernel -------------------------------------------------------------------------------------------------------


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    p = product_of(problem)
    if p is None:
        raise ScheduleError("the nest is no product of few rows by 2:4 sparse weights in 16-bit floats")
    return _Writer(p, Shape(**{k: int(v) for k, v in knobs.items()})).build()


class _Writer:
    """The kernel of one product and one shape."""

    def __init__(self, p: Product, s: Shape) -> None:
        self.p, self.c, self.s, self.b = p, p.c, s, Builder()
        self.high, self.steps = p.sizes
        self.tiles = -(-p.c.rows.size // PIXELS)
        self.each = -(-self.steps // (s.slices * s.split))  # steps of a warp
        self.rounds = -(-self.each // s.flight)
        self.held = self.tiles <= HELD
        self.even = self.rounds * s.flight * s.slices * s.split == self.steps
        self.threads = s.slices * WARPS * 32
        x = p.c.a.value
        assert isinstance(x, Load)
        self.type = x.buf.dtype
        self.parts = Parts(self.tiles * PIXELS, ROWS, s.slices, s.split, self.threads)

    def build(self) -> Kernel:
        p, b, c = self.p, self.b, self.c
        entry = c.kernel.entry
        for param in entry.params:
            b.fresh(param.name)
        with b.loop("block", self.high, "block.x") as self.block, cluster(b, self.s.split) as part:
            sums = self.parts.memory(b, f32)
            with b.loop("w", self.s.slices * WARPS, "warp") as w, b.loop("l", 32, "lane") as self.lane:
                self.warp, slice_ = b.let("warp", w % WARPS), b.let("slice", w // WARPS)
                self.begin = b.let("begin", (part * self.s.slices + slice_) * self.each)
                self.end = b.let("end", minimum(self.begin + self.each, self.steps))
                self.sum()
                self.leave(sums, slice_)
                self.parts.finish(b, sums, part, w * 32 + self.lane, self.finish)
        params = tuple(p.weights if x.name == p.weights.name else x for x in entry.params)
        return Kernel((*c.kernel.funcs[:-1], Func(entry.name, params, b.block())), c.kernel.locs)

    def finish(self, row: Expr, col: Expr, tile: Buffer) -> None:
        with self.b.when(row < self.c.rows.size):
            store_row(self.b, self.c, {}, row, self.block * ROWS + col, tile, (const(0),), LANES)

    def sum(self) -> None:
        b, flight = self.b, self.s.flight
        self.acc = b.alloc("acc", f32, 2, self.tiles, 4)  # of each half of a tile
        self.v = b.alloc("v", u32, flight, 2, 2, 4)  # of row g and g + 8 of each half
        self.places = b.alloc("places", u32, flight, 2)
        self.x = b.alloc("x", u32, flight if self.held else 1, self.tiles if self.held else 1, 8)
        with b.loop("h", 2, "unroll") as h, b.loop("j", self.tiles, "unroll") as j:
            b.store(self.acc, (h, j, 0), const(0.0, f32), 4)
        b.do("pdl_launch" if self.p.early else "pdl_wait")
        for u in range(flight):
            self.read(self.begin + u, u)
        if self.p.early:
            b.do("pdl_wait")
        if self.held:
            for u in range(flight):
                self.read_x(self.begin + u, u)
        with b.loop("round", self.rounds) as turn:
            for u in range(flight):
                step = b.let("step", self.begin + turn * flight + u)
                with nullcontext() if self.even else b.when(step < self.end):
                    self.multiply(step, u)
                    if self.rounds > 1:
                        self.read(step + flight, u)
                        if self.held:
                            self.read_x(step + flight, u)

    def read(self, step: Expr, u: int) -> None:
        """A step's weights: what lies past the last step is read again."""
        b, w, at = self.b, self.p.weights, (self.block, minimum(step, self.steps - 1))
        with b.loop("h", 2, "unroll") as h:
            with b.loop("r", 2, "unroll") as r:
                line, col = self.warp * 16 + r * 8 + self.lane // 4, h * (LINE // 2) + self.lane % 4 * VECTOR
                b.store(self.v, (u, h, r, 0), call("words", w.at(*at, line, col, lanes=VECTOR)), 4)
            word = w.at(*at, HALF + h * WARPS + self.warp, self.lane * 2, lanes=2)
            b.store(self.places, (u, h), call("words", word))

    def multiply(self, step: Expr, u: int) -> None:
        b = self.b
        with b.loop("j", self.tiles, "unroll") as j:
            if not self.held:
                self.vectors(step, j, (const(0), const(0)))
            x = self.exchanged((const(u), j) if self.held else (const(0), const(0)))
            for part in range(2):
                right = call(f"{self.type}_words", x.at(part, 0, lanes=4))
                with b.loop("h", 2, "unroll") as h:
                    a = b.alloc("a", u32, 4)
                    with b.loop("i", 4, "unroll") as i:
                        b.store(a, (i,), self.v[u, h, i % 2, part * 2 + i // 2])
                    left = call(f"{self.type}_words", a.at(0, lanes=4))
                    acc = self.acc.at(h, j, 0, lanes=4)
                    made = call("mma_sp_m16n8k32", acc, left, right, self.places[u, h], const(part))
                    b.store(self.acc, (h, j, 0), made, 4)

    def read_x(self, step: Expr, u: int) -> None:
        with self.b.loop("j", self.tiles, "unroll") as j:
            self.vectors(minimum(step, self.steps - 1), j, (const(u), j))

    def vectors(self, step: Expr, j: Expr, to: tuple[Expr, Expr]) -> None:
        """16 elements of row 8 * j + g for lane 4 * g + t: of even t from 8 * t on, of odd ones from 8 * t + 24 on."""
        b, c, t = self.b, self.c, self.lane % 4
        row = minimum(j * PIXELS + self.lane // 4, c.rows.size - 1)
        here = c.rows.at(c.rows.inside(row, 1, c.a.value))
        first = step * (STEP // VECTOR) + t % 2 * 4 + t // 2 * 2
        with b.loop("i", 2, "unroll") as i:
            k = c.red.inside(first + i, VECTOR, c.a.value)
            made = vector_of(c.a.value, lambda e: {**here, **c.red.at(k, VECTOR, e)}, VECTOR)
            b.store(self.x, (*to, i * 4), call("words", made), 4)

    def exchanged(self, at: tuple[Expr, Expr]) -> Buffer:
        """Words [2, 4] of the second factor of both products: an even lane takes the first pair of each four elements
        of its own and of its neighbour, an odd one the second.
        """
        b, odd = self.b, (self.lane % 2).eq(1)
        x = b.alloc("words", u32, 2, 4)
        with b.loop("i", 4, "unroll") as i:
            pair = self.x.at(*at, i * 2), self.x.at(*at, i * 2 + 1)
            keep = b.let("keep", select(odd, pair[1], pair[0]))
            got = b.let("got", call("shfl_xor", select(odd, pair[0], pair[1]), const(1)))
            b.store(x, (i // 2, i % 2 * 2), select(odd, got, keep))
            b.store(x, (i // 2, i % 2 * 2 + 1), select(odd, keep, got))
        return x

    def leave(self, sums: Buffer, slice_: Expr) -> None:
        """A warp's sums in shared memory, rows of x by rows of the weights."""
        b, g, t = self.b, self.lane // 4, self.lane % 4
        with b.loop("h", 2, "unroll") as h, b.loop("j", self.tiles, "unroll") as j, b.loop("r", 4, "unroll") as r:
            col = h * HALF + self.warp * 16 + r // 2 * 8 + g
            b.store(sums, (slice_, j * PIXELS + t * 2 + r % 2, col), self.acc[h, j, r])
