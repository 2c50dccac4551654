"""Products of sparse constant weights whose elements are a part of the code: no load, no index for each of them.

    for block in block.x(tiles of pixels x groups of rows):
        for t in thread.x(..):                                   a thread has one pixel
            sums = the group's rows times the column of x        straight-line code, one multiply-add an element
            y[rows, pixel] = epilogue(sums)

An element of x is read once for all rows of a group, and multiply-adds read no memory at all, so they may come as fast
as instructions do: these come from memory, and each warp wants all of a group. Assembling takes time for each element,
which bounds how many there may be. After SparseRT (Wang, 2020). Pixels are neighbours in memory, as for
`sparse_gather`, which takes what this one does not.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from dnnc.backends.cuda.immediate_rows import CHUNK
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction.staging import resident
from dnnc.backends.cuda.templates.epilogue import store_column
from dnnc.ir.dtype import boolean, f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, const, maximum, minimum, ref, substitute, value, walk
from dnnc.ir.loops.stmt import Builder, ImmediateRows, Kernel
from dnnc.ir.sparse import WORD, Sparse
from dnnc.ir.types import Array
from dnnc.passes.lower.form import Axis, Contraction
from dnnc.passes.schedule.problem import Knobs, Problem

ORDER = ("warps",)
KNOBS = ("warps", "tiles")
MOST = 1 << 16  # instructions: 0.1 to 0.14 ms of one core for each, most of it in the assembler
MOST_OFFSET = 1 << 31  # bytes from column 0 to the last one
INSTRUCTION, CACHE = 16, 128 << 10  # bytes of an instruction, and of an SM's cache of them
STORE, HEAD, TAP = 4, 40, 20  # instructions for the store of a row, ahead of all, for the address of a tap
# Cycles, fitted to 573 kernels on an H200 each of which read its code from the second-level cache, whose times they
# tell to 16 %:
ISSUE, LOAD = 0.1, 0.27  # of an SM for an instruction of a warp, and more for one that loads
WARM, COLD, AGAIN = 0.43, 4.1, 2.3  # of a warp for an instruction; more when it is read first; where caches are full
EMPTY = 0.15  # of the cache, while which is filled nothing is read again
WAIT, WINDOW_WAIT = 180, 116  # of a warp for the columns of a chunk
NEAR = 91  # bytes of the second-level cache a cycle and SM
READ, WRITE = 1.85, 1.0  # times the rate of memory, where x does not stay in the cache
KEPT = 1.43  # sizes of that cache, of which half stays
START = 1200  # of a launch
CLOCK = 1.755e9


@dataclass(frozen=True)
class Shape:
    """`rows` of a group, `warps` of a block; do blocks with neighbouring `tiles` of pixels, or groups, run together?"""

    rows: int
    warps: int
    tiles: int

    @property
    def registers(self) -> int:
        """Of a thread, about: two chunks of columns, and addresses."""
        return self.rows + 40

    def resident(self, target: GpuTarget) -> int:
        return resident(target, self.warps, -(-self.registers // 8) * 8, 0)


# The best of these is within a few percent of the best of all on most of 115 products. Groups of few rows read columns
# often: only those of windows lie in the first-level cache.
SHAPES = (
    *(Shape(16, warps, tiles) for warps, tiles in ((4, 1), (8, 0), (16, 0))),
    *(Shape(32, warps, tiles) for warps, tiles in ((8, 1), (16, 0))),
    *(Shape(rows, warps, 0) for rows, warps in ((64, 4), (64, 8), (128, 4))),
)
WINDOW_SHAPES = (*(Shape(rows, 8, 1) for rows in (4, 8)), *SHAPES)


@dataclass(frozen=True)
class Product:
    """A product whose weights `c.a` are in code; index `axis` of `x` is the channel, of which a window has `taps`."""

    c: Contraction
    encoding: Sparse
    x: Load
    axis: int
    taps: int


def product_of(problem: Problem) -> Product | None:
    """The product of a group whose weights are so, and whose pixels are neighbours; None for all others."""
    anchor, c = problem.anchor, problem.product
    if anchor is None or c is None or c.dtype is not f32 or c.batch.loops or c.a.conds or not c.is_guarded_apart:
        return None
    encoded = [v for v in anchor.inputs[:2] if v is not None and isinstance(v.type.encoding, Sparse)]
    if len(encoded) != 1:
        return None
    encoding = encoded[0].type.encoding
    assert isinstance(encoding, Sparse)
    if not encoding.values or (c.rows.size, c.red.size) != (encoding.pattern.rows, encoding.pattern.columns):
        return None
    name = dict(zip(problem.lowered.params, problem.kernel.entry.buffers))[encoded[0]].name
    e, x = c.a.value, c.b.value
    reads = [y for y in c.a.loads if y.buf.name == name]
    if not (isinstance(e, Op) and e.name == "select" and isinstance(e.args[1], Op) and e.args[1].name == "bits_f32"):
        return None
    if not reads or not _in_order(c.rows, c.red, encoding, reads):
        return None
    if not isinstance(x, Load) or x.buf.dtype is not f32 or x.buf.space != "global":
        return None
    taps = math.prod(encoding.shape[2:])
    axis = next((n for n in range(len(x.idx)) if _is_channel(c, x, n, taps)), None)
    if axis is None or not c.b.in_order(c.cols, (c.batch, c.rows, c.red)):
        return None
    step = value(x.buf.full_strides()[axis])
    if step is None or step * 4 * c.red.size // taps > MOST_OFFSET or not all(value(n) for n in x.buf.shape):
        return None
    return Product(c, encoding, x, axis, taps)


def _is_channel(c: Contraction, x: Load, axis: int, taps: int) -> bool:
    """Does an index count the channels, so that all else is the same for all of them? Asked of some channels."""
    count = c.red.size // taps
    for channel in {min(1, count - 1), count // 2, count - 1}:
        for t in {0, taps // 2, taps - 1}:
            first, other = c.red.at(t), c.red.at(channel * taps + t)
            moved = [value(substitute(i, other) - substitute(i, first)) for i in x.idx]
            if moved != [channel if n == axis else 0 for n in range(len(x.idx))]:
                return False
            if any(substitute(e, other) is not substitute(e, first) for e in c.b.conds):
                return False
    return True


def _in_order(rows: Axis, red: Axis, e: Sparse, reads: list[Load]) -> bool:
    """Is step k of the sum column k of the matrix? Asked of the bitmap's words of some elements."""
    begin = e.sections["bits"][0]
    words = [x for x in reads if not any(isinstance(y, Load) for y in walk(x.idx[0]))]
    for row in {0, rows.size - 1}:
        for k in {0, min(1, red.size - 1), red.size // 2, red.size - 1}:
            at = {**rows.at(const(row)), **red.at(const(k))}
            place = (row // e.group * e.pattern.columns + k) * e.group + row % e.group
            if not any(value(substitute(x.idx[0], at)) == begin + place // WORD for x in words):
                return False
    return True


# --- choice -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Work:
    """Pixels of a product, places of a window, and the stored elements of its matrix: bool[rows, columns]."""

    pixels: int
    taps: int
    stored: Array

    def groups(self, rows: int) -> tuple[Array, Array]:
        """Elements of each group of so many rows, and columns that it uses."""
        if rows not in self._groups:
            starts = np.arange(0, len(self.stored), rows)
            elements = np.add.reduceat(self.stored.sum(1), starts)
            self._groups[rows] = elements, np.logical_or.reduceat(self.stored, starts, axis=0).sum(1)
        return self._groups[rows]

    def code(self, rows: int) -> Array:
        """Instructions of each group of so many rows."""
        elements, used = self.groups(rows)
        window = self.taps > 1
        made: Array = elements + used * (1 + window) + STORE * rows + HEAD + TAP * self.taps * window
        return made

    @cached_property
    def _groups(self) -> dict[int, tuple[Array, Array]]:
        return {}


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    p = product_of(problem)
    if p is None:
        return []
    work = Work(p.c.cols.size, p.taps, p.encoding.pattern.blocks)
    found = [s for s in WINDOW_SHAPES if s.rows == p.encoding.group]
    return [knobs_of(s) for s in sorted(found, key=lambda s: cycles(work, s, target))]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    p = product_of(problem)
    return [] if p is None else [(("warps", w), ("tiles", t)) for w in (4, 8, 16) for t in (0, 1)]


def knobs_of(s: Shape) -> Knobs:
    return tuple((k, getattr(s, k)) for k in KNOBS)


def best(work: Work, target: GpuTarget) -> tuple[float, int]:
    """Estimated cycles of the best block, and its rows; infinity where all have too many instructions."""
    if int(work.stored.sum()) > MOST:
        return math.inf, 0
    shapes = SHAPES if work.taps == 1 else WINDOW_SHAPES
    found = ((cycles(work, s, target), s.rows) for s in shapes if int(work.code(s.rows).sum()) <= MOST)
    return min(found, default=(math.inf, 0))


def cycles(w: Work, s: Shape, target: GpuTarget) -> float:
    """Estimated cycles: instructions of all warps, and of one warp after the other where their code is read first, or
    again where the cache is full of others'; how long loads take, what the second-level cache gives, and memory.
    """
    (_, used), code = w.groups(s.rows), w.code(s.rows)
    tiles, together = -(-w.pixels // (s.warps * 32)), s.resident(target)
    each = max(tiles * len(code) / target.sms, 1.0)  # blocks of an SM
    turns = each / together
    turns = max((turns + math.ceil(turns)) / 2, 1.0)
    mean, most, here = float(code.mean()), float(code.max()), min(each, together)
    different = min(len(code), each)  # groups of an SM, some of them together
    once = min(different, here)
    full = min(max(INSTRUCTION * mean * once / CACHE - EMPTY, 0.0), 1.0)
    issued = tiles * s.warps * float(code.sum() * ISSUE + used.sum() * LOAD) / target.sms
    warm = (most + (turns - 1) * mean) * WARM + turns * mean * full * AGAIN
    cold = COLD * (most + mean * (different / once - 1))
    waits = float(used.mean()) / CHUNK * (WAIT if w.taps == 1 else WINDOW_WAIT) * turns
    near = 4 * w.pixels * float(used.sum()) / w.taps / target.sms / NEAR
    read, write = (4 * w.pixels * n for n in (w.stored.shape[1] / w.taps, len(w.stored)))
    missed = 1 - 1 / (1 + ((read + write) / (KEPT * target.l2_bytes)) ** 4)
    memory = (read * missed / READ + write / WRITE) / (target.bandwidth * 1e9 / CLOCK)
    return START + issued + warm + cold + waits + near + memory


def encoding_of(array: Array, axis: int, rows: int) -> Sparse:
    """The encoding of weights that the template takes, by groups of so many rows."""
    return Sparse.of(array, axis, group=rows, immediate=True)


# --- the kernel -------------------------------------------------------------------------------------------------------


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    p = product_of(problem)
    if p is None:
        raise ScheduleError("the weights are not in code, or pixels are not neighbours in memory")
    c, b, s = p.c, Builder(), Shape(p.encoding.group, *(int(knobs[k]) for k in KNOBS))
    threads, groups = s.warps * 32, -(-c.rows.size // s.rows)
    tiles = -(-c.cols.size // threads)
    with b.loop("block", tiles * groups, "block.x") as block:
        group = b.let("group", block // tiles if s.tiles else block % groups)
        tile = b.let("tile", block % tiles if s.tiles else block // groups)
        with b.loop("t", threads, "thread.x") as t:
            b.do("resident", s.resident(target))
            b.do("first_level_cache")
            pixel = b.let("pixel", tile * threads + t)
            there = b.let("there", minimum(pixel, c.cols.size - 1))
            sums = b.alloc("sums", f32, s.rows)
            args = (ref(sums, (0,)), group, *_taps(p, c.cols.named(b, there)))
            b.emit(ImmediateRows("immediate_rows", args, p.encoding.pattern, s.rows, p.axis, p.encoding.values))
            with b.when(pixel < c.cols.size):
                store_column(b, c, group * s.rows, pixel, sums, s.rows)
    return c.kernel.with_body(b.block())


def _taps(p: Product, pixel: dict[Expr, Expr]) -> list[Expr]:
    """For each place of a window the address of x at channel 0, and whether it is inside; if not, another address."""
    c, out = p.c, list[Expr]()
    for t in range(p.taps):
        at = {**pixel, **c.red.at(t)}
        index = (substitute(i, at) for i in p.x.idx)
        conds = [substitute(e, at) for e in c.b.conds]
        if p.taps > 1 or conds:
            index = (maximum(minimum(i, n - 1), 0) for i, n in zip(index, p.x.buf.shape))
            out += [ref(p.x.buf, tuple(index)), reduce(operator.and_, conds, const(True, boolean))]
        else:
            out.append(ref(p.x.buf, tuple(index)))
    return out
