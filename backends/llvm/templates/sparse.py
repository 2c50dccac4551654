"""Recipe for products of a sparse constant matrix: its rows times columns of pixels, one multiply-add for each nonzero.

    parallel over strips of `tiles` vectors of pixels, times shares of the rows:
        x[k, tiles] = the other factor at the strip's pixels             a thread's own memory, in its L2 cache
        for each block of rows of the share, for each row r:
            acc[tiles] = 0
            for p in starts[r] .. starts[r + 1]:
                acc[t] += values[p] * x[columns[p], t]
            y[r, pixels] = epilogue(acc)

Where the encoding has groups of rows, code holds their columns (`sparse_rows`), and a block of rows is walked for all
of the strip's vectors before the next one:

        for each block of groups, for each vector t, for each group g of the block:
            sums[rows of g, t] = sparse_rows(x[:, t], values, g)      a block that fits the instruction cache: one run
            y[..] = epilogue(sums)

Where the encoding has blocks of rows, a vector of pixels serves all rows of a block, as in a dense product:

        for each row of blocks, for each `t` vectors of the strip:
            acc[height, t] = 0
            for each block z of it:
                acc[h, t] += values[z, h] * x[columns[z], t]

Few pixels have a kernel of their own (`sparse_few_pixels`). Rows are shared among threads by their nonzeros.

A pixel is a place of an image, or a row of the other matrix. Where neighbours in memory are channels, and not pixels,
squares of lanes are transposed on the way in and out. The indices are those of the encoding (`dnnc.ir.sparse`), which
were checked when it was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates import sparse_few_pixels as few_pixels
from dnnc.backends.llvm.templates.sparse_pixels import Finish
from dnnc.backends.llvm.templates.sparse_product import Product, end_of_share, product_of, word
from dnnc.ir.bounds import nonneg
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import (
    E,
    Expr,
    Load,
    Var,
    const,
    fma,
    load,
    maximum,
    minimum,
    op,
    ref,
    select,
    substitute,
    unwrap,
    var,
)
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, Store
from dnnc.passes.lower.form import Axis
from dnnc.passes.rewrites.sparse import (
    INSTRUCTION,
    NEAR_CODE,
    PREFETCHES,
    block_cycles,
    code_cycles,
    foreign_cycles,
    loop_cycles,
    strip_tiles,
    sums_of_blocks,
)
from dnnc.passes.schedule.memory import Vectorizer
from dnnc.passes.schedule.problem import Knobs, Problem
from dnnc.passes.schedule.transposition import zipped

MOST_TILES = 7  # vectors of sums of a row: more of them share an index; 7 of 16 lanes are 112 pixels
MOST_VECTORS = 16  # the same of straight-line code, which walks them one after the other, and of blocks

ORDER = ()
Knob = Mapping[str, "int | str"]


# --- choice -----------------------------------------------------------------------------------------------------------


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    p = product_of(problem, target.lanes)
    if p is None or not _fits(p, target.lanes):
        return []
    if few_pixels.takes(p):
        return [(("vectors", 1), ("shares", min(target.threads, len(p.encoding.pattern.blocks))))]
    every = p.vectors(target.lanes)
    single = p.encoding.group == p.encoding.pattern.height == 1
    most = MOST_TILES if single else MOST_VECTORS
    even = sorted({-(-every // n) for n in range(1, every + 1)} | {t for t in range(1, MOST_TILES + 1) if t <= every})
    near = [t for t in even if t <= most and t <= strip_tiles(p.terms, target.lanes, target.l2)]
    # threads keep their pixels from one kernel to the next, so rows are shared only where there are too few strips
    rows = min(target.threads, -(-p.rows.size // block_of_rows(p, target.lanes)))
    settings = [(t, 1 if -(-every // t) >= target.threads else rows) for t in near or [1]]
    return [
        (("tiles", t), ("shares", n)) for t, n in sorted(settings, key=lambda k: _cycles(p, k[0], k[1], target))[:6]
    ]


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    return []


def block_of_rows(p: Product, lanes: int) -> int:
    """Rows that are walked together: whole squares, and whole groups, as many as the instruction cache takes."""
    group = p.encoding.group
    least = math.lcm(group, lanes, p.encoding.pattern.height) if p.transposed or group == 1 else group
    fits = int(NEAR_CODE // max(_code_bytes(p) * least // group, 1)) if group > 1 else 1
    return least * min(max(fits, 1), -(-p.rows.size // least))


def _code_bytes(p: Product) -> int:
    """Of a group of rows, on average."""
    groups = -(-p.encoding.pattern.rows // p.encoding.group)
    return INSTRUCTION * p.encoding.room // groups


def _cycles(p: Product, tiles: int, shares: int, target: CpuTarget) -> float:
    """Estimated cycles of the busiest core."""
    strips = -(-p.vectors(target.lanes) // tiles)
    rounds = -(-strips * shares // target.threads)
    pattern = p.encoding.pattern
    sizes = p.encoding.room / shares, p.rows.size / shares, p.terms
    code = p.encoding.group > 1
    held = (p.terms + block_of_rows(p, target.lanes) * code) * tiles * 4 * target.lanes
    foreign = foreign_cycles(p.terms, rounds * tiles, shares, target.lanes, target.rates)
    if code:
        cores = max(target.threads // shares, 1)
        return foreign + code_cycles(*sizes, (rounds, tiles), target.rates, held <= target.l1, cores)
    if pattern.height > 1:
        cycles = block_cycles(pattern.height, *sizes, tiles, target.lanes, target.rates)
    else:
        cycles = loop_cycles(*sizes, tiles, target.lanes, target.rates, held <= target.l1)
    return foreign + rounds * tiles * cycles


def _fits(p: Product, lanes: int) -> bool:
    """Can vectors be read and written along pixels, squares be transposed, or elements gathered?"""
    if few_pixels.takes(p):
        return few_pixels.fits(p)
    if not p.pixels.loops or not p.whole_rows(lanes):
        return False
    if p.grid is not None:
        return p.taps.size == 1 and not p.other.conds and (p.reads is not None or _runs_along_terms(p, lanes))
    return (_runs_along_pixels(p) or _runs_along_terms(p, lanes)) and (p.transposed or len(p.pixels.loops) == 1)


def _runs_along_pixels(p: Product) -> bool:
    one = len(p.pixels.loops) == 1 and len(p.form.red.loops) == 1 and not p.other.conds
    return one and not p.transposed and p.other.in_order(p.pixels, [p.form.red, p.rows])


def _runs_along_terms(p: Product, lanes: int) -> bool:
    first = Axis(p.form.red.loops[:1])
    return p.other.in_order(first, [p.pixels, p.rows, p.taps], lanes)


# --- the kernel -------------------------------------------------------------------------------------------------------


def apply(problem: Problem, knobs: Knob, target: CpuTarget) -> Kernel:
    p = product_of(problem, target.lanes)
    if p is None or not _fits(p, target.lanes):
        raise ScheduleError("the weights are not sparse, or memory has another order")
    if few_pixels.takes(p):
        return p.form.kernel.with_body(few_pixels.body(p, int(knobs["shares"]), target.lanes))
    tiles, shares, lanes = int(knobs["tiles"]), int(knobs["shares"]), target.lanes
    block = block_of_rows(p, lanes)
    strips = -(-p.vectors(lanes) // tiles)
    b = Builder()
    with b.loop("s", strips * shares, "parallel") as item:
        first = b.let("first", item // shares * tiles)
        share = item % shares
        x = None
        if p.reads is None:
            x = b.alloc("strip", f32, tiles, -(-p.terms // lanes) * lanes, lanes, space="local")
            (_gather if _runs_along_pixels(p) else _transpose)(b, p, x, first, tiles)
        begin, end = (b.let(name, end_of_share(p, block, share + j, shares)) for j, name in enumerate(("begin", "end")))
        strip = Strip(x, first, tiles, lanes, block, begin, is_first(item, strips * shares, target.threads))
        with b.loop("rb", end, lo=begin) as rb:
            _rows(b, p, strip, rb)
    return p.form.kernel.with_body(b.block())


def is_first(item: Expr, items: int, threads: int) -> Expr:
    """Is an item of a parallel loop the first one of a thread?"""
    return op("<", (items - item * threads % items) % items, const(threads))


@dataclass(frozen=True)
class Strip:
    """A strip of vectors of pixels: `x`: [tiles, columns, lanes], of the other factor; None where its memory is so."""

    x: Buffer | None
    first: Expr  # vector
    tiles: int
    lanes: int
    block: int  # rows that are walked together
    begin: Expr  # block of rows
    cold: Expr  # does it meet the code for the first time?

    def column(self, p: Product, v: Expr, k: E) -> tuple[Buffer, tuple[Expr, ...]]:
        """The place of a vector of the other factor: vector `v` of the strip, column `k`."""
        if self.x is not None:
            return self.x, (v, const(k), const(0))
        at = minimum(self.first + v, p.vectors(self.lanes) - 1)
        e = substitute(p.other.value, {**p.pixels.at(p.first(at, self.lanes)), p.form.red.loops[0]: const(k)})
        assert isinstance(e, Load)
        return e.buf, e.idx


def _rows(b: Builder, p: Product, strip: Strip, rb: Expr) -> None:
    """The results of a block of rows for a strip."""
    tiles, lanes, block, start = strip.tiles, strip.lanes, strip.block, rb * strip.block
    near = p.encoding.group > 1 and _code_bytes(p) * block // p.encoding.group <= NEAR_CODE
    if p.finish is not None:
        return _finished_rows(b, p, p.finish, strip, rb, near)
    y = b.alloc("sums", f32, 1 if near else tiles, block, lanes, space="local")
    if p.encoding.group > 1 and not near:
        each = block // p.encoding.group
        with b.loop("g", groups_of_block(p, rb, block)) as g, b.loop("v", tiles) as v:
            at = y.ref(v, g * p.encoding.group, 0, lanes=lanes)
            _run(b, p, strip, at, (rb * each + g, maximum(rb - strip.begin, g), v), 1)
    elif p.encoding.pattern.height > 1:
        _blocks(b, p, strip, rb, y)
    elif p.encoding.group == 1:
        with b.loop("r", minimum(start + block, p.encoding.pattern.rows), lo=start) as r:
            acc = _row(b, p, strip, r)
            with b.loop("v", tiles, "unroll") as v:
                b.store(y, (v, r - start, 0), acc.at(v, 0, lanes=lanes), lanes)
    with b.loop("v", tiles) as v, b.when(_exists(p, lanes, tiles, strip.first + v)):
        to = const(0) if near else v
        if near:
            at = y.ref(to, 0, 0, lanes=lanes)
            _run(b, p, strip, at, (rb, rb - strip.begin, v), block // p.encoding.group)
        _finish(b, p, block, start, b.let("vector", strip.first + v), partial(_row_of, y, to))


def _finished_rows(b: Builder, p: Product, finish: Finish, strip: Strip, rb: Expr, near: bool) -> None:
    """The same where code makes results of sums, and stores them."""
    lanes, group = strip.lanes, p.encoding.group
    length = strip.block // group if near else 1  # groups of a run
    s, (row,) = p.form.store, p.rows.loops
    with b.loop("g", const(1) if near else groups_of_block(p, rb, strip.block)) as g, b.loop("v", strip.tiles) as v:
        with b.when(_exists(p, lanes, strip.tiles, strip.first + v)):
            vector = b.let("vector", strip.first + v)
            number = rb if near else rb * (strip.block // group) + g
            start = number * (length * group)
            env: dict[Expr, Expr] = {**p.pixels.at(p.first(vector, lanes)), row: start}
            y = s.buf.ref(*(substitute(i, env) for i in s.idx), lanes=lanes)
            refs = [ref(buf, [substitute(i, env) for i in idx], n) for buf, idx, n in finish.reads]
            count = p.stored(vector, lanes)
            place = rb - strip.begin if near else maximum(rb - strip.begin, g)
            _run(b, p, strip, y, (number, place, v), length, (count, *refs))


def _exists(p: Product, lanes: int, tiles: int, vector: Expr) -> Expr:
    """Is a vector of a strip of some one of pixels?"""
    every = p.vectors(lanes)
    return const(True) if every % tiles == 0 else op("<", vector, const(every))


def _row_of(y: Buffer, *at: Expr) -> Expr:
    return y.at(*at, 0, lanes=_int(y.shape[-1]))


def groups_of_block(p: Product, rb: Expr, block: int) -> Expr:
    """How many groups a block of rows has."""
    each, every = block // p.encoding.group, -(-p.encoding.pattern.rows // p.encoding.group)
    return minimum(each, every - rb * each)


def _run(
    b: Builder,
    p: Product,
    strip: Strip,
    y: Expr,
    at: tuple[Expr, Expr, Expr],
    length: int,
    more: tuple[Expr, ...] = (),
) -> None:
    """The sums `y` of a run of `length` groups of rows for one vector of pixels: `at` the run's number, which of the
    share's runs it is, counted from 0 on, and the vector; `more`: what makes results of them reads.

    The last vectors prefetch the code of the next run. A strip with few vectors does it where it is cold.
    """
    group, (number, place, v) = p.encoding.group, at
    every, (values, _) = -(-p.encoding.pattern.rows // (group * length)), p.encoding.sections["values"]
    number = b.let("run", number)
    leads = op("<", place, const(1))  # the share's first one, which nothing prefetched
    few = strip.tiles < PREFETCHES
    late = const(-1) if few else v - (strip.tiles - PREFETCHES)
    whole = strip.cold if few else op("<", maximum(place, v), const(1))
    behind = minimum(number + 1, every - 1)
    ahead = select(whole, select(leads, number, behind), select(op("<", late, const(0)), number, behind))
    part = select(whole, const(PREFETCHES), maximum(late, 0))
    x, at_first = strip.column(p, v, 0)
    refs = y, x.ref(*at_first, lanes=strip.lanes), p.weights.ref(values)
    steps = p.finish.steps if more and p.finish is not None else None
    b.sparse_rows(refs, number, (ahead, part), p.encoding.pattern, (group, length), steps, more)


def _row(b: Builder, p: Product, strip: Strip, r: Expr) -> Buffer:
    """The sums of one row."""
    tiles, lanes = strip.tiles, strip.lanes
    acc = b.alloc("acc", f32, tiles, lanes)
    with b.loop("v", tiles, "unroll") as v:
        b.store(acc, (v, 0), const(0.0, f32), lanes)
    with b.loop("n", word(p, "starts", r + 1), lo=word(p, "starts", r)) as n:
        begin, _ = p.encoding.sections["values"]
        weight = op("bits_f32", p.weights[begin + n], dtype=f32)
        column = b.let("column", word(p, "columns", n))
        with b.loop("v", tiles, "unroll") as v:
            x, at = strip.column(p, v, column)
            b.store(acc, (v, 0), fma(weight, load(x, at, lanes), acc.at(v, 0, lanes=lanes)), lanes)
    return acc


def _blocks(b: Builder, p: Product, strip: Strip, rb: Expr, y: Buffer) -> None:
    """The sums `y` of a block of rows, as rows of the encoding's blocks and vectors that registers hold."""
    height, each = p.encoding.pattern.height, strip.block // p.encoding.pattern.height
    most = max(sums_of_blocks(strip.lanes) // height, 1)
    width = -(-strip.tiles // -(-strip.tiles // most))
    with b.loop("q", minimum(each, len(p.encoding.pattern.blocks) - rb * each)) as q:
        with b.loop("t", strip.tiles // width) as t:
            _block(b, p, strip, rb * each + q, (t * width, width), y, q * height)
        if rest := strip.tiles % width:
            first = const(strip.tiles - rest)
            _block(b, p, strip, rb * each + q, (first, rest), y, q * height)


def _block(b: Builder, p: Product, strip: Strip, row: Expr, vectors: tuple[Expr, int], y: Buffer, to: Expr) -> None:
    """The sums of a row of blocks for some vectors of a strip, the first and how many; `to`: their first row in y."""
    (first, count), height, lanes = vectors, p.encoding.pattern.height, strip.lanes
    acc = b.alloc("acc", f32, height, count, lanes)
    with b.loop("h", height, "unroll") as h, b.loop("v", count, "unroll") as v:
        b.store(acc, (h, v, 0), const(0.0, f32), lanes)
    begin, _ = p.encoding.sections["values"]
    with b.loop("z", word(p, "starts", row + 1), lo=word(p, "starts", row)) as z:
        column = b.let("column", word(p, "columns", z))
        with b.loop("h", height, "unroll") as h, b.loop("v", count, "unroll") as v:
            weight = op("bits_f32", p.weights[begin + z * height + h], dtype=f32)
            x, at = strip.column(p, first + v, column)
            b.store(acc, (h, v, 0), fma(weight, load(x, at, lanes), acc.at(h, v, 0, lanes=lanes)), lanes)
    with b.loop("h", height, "unroll") as h, b.loop("v", count, "unroll") as v:
        b.store(y, (first + v, to + h, 0), acc.at(h, v, 0, lanes=lanes), lanes)


# --- the other factor -------------------------------------------------------------------------------------------------


def _gather(b: Builder, p: Product, x: Buffer, first: Expr, tiles: int) -> None:
    """Copy rows of pixels."""
    lanes = _int(x.shape[-1])
    with b.loop("k", p.terms) as k, b.loop("v", tiles, "unroll") as v:
        at = (first + v) * lanes
        wide = Vectorizer(p.pixels.loops[0], at, lanes)
        wide.limit = None if p.pixels.size % (tiles * lanes) == 0 else const(p.pixels.size) - at
        b.store(x, (v, k, 0), wide.expr(substitute(p.other.value, p.form.red.at(k))), lanes)


def _transpose(b: Builder, p: Product, x: Buffer, first: Expr, tiles: int) -> None:
    """Turn squares of neighbouring channels of as many pixels, for each tap of a window."""
    lanes = _int(x.shape[-1])
    with b.loop("v", tiles) as v, b.when(_exists(p, lanes, tiles, first + v)):
        vector = b.let("vector", first + v)
        _by_fullness(b, p, vector, lanes, lambda whole: _squares(b, p, x, v, vector, whole))


def _by_fullness(b: Builder, p: Product, vector: Expr, lanes: int, body: Callable[[bool], None]) -> None:
    """The code for a vector: once for all lanes, once for those that are pixels."""
    count = p.count(vector, lanes)
    width = p.grid.width if p.grid is not None else p.pixels.size
    if count is None or width < lanes:
        body(count is None)
    else:
        b.branch(op("<", const(lanes - 1), count), lambda: body(True), lambda: body(False))


def _squares(b: Builder, p: Product, x: Buffer, v: Expr, vector: Expr, whole: bool) -> None:
    """Turn the squares of vector `v` of a strip. `whole`: each lane is a pixel."""
    lanes = _int(x.shape[-1])
    first, count = p.first(vector, lanes), p.count(vector, lanes)
    channel, channels = p.form.red.loops[0], Axis(p.form.red.loops[:1]).size
    with b.loop("tap", p.taps.size) as tap, b.loop("k", -(-channels // lanes)) as k:

        def row(j: Expr) -> Expr:
            at = first + (j if whole or count is None else minimum(j, maximum(count - 1, 0)))
            env = {**p.pixels.at(at), **p.taps.at(tap)}
            e = Vectorizer(channel, k * lanes, lanes).expr(clamped(substitute(p.other.value, env)))
            if channels % lanes:
                e = limited(e, lanes, minimum(const(channels) - k * lanes, lanes))
            for c in p.other.conds:
                e = select(substitute(c, env), e, const(0.0, f32))
            return e

        square = zipped(b, row, const(lanes), lanes, lanes, "t")
        with b.loop("j", lanes, "unroll") as j:
            place = (k * lanes + j) * p.taps.size + tap
            if channels % lanes == 0:
                b.store(x, (v, place, 0), square.at(j, 0, lanes=lanes), lanes)
            else:
                with b.when(k * lanes + j < channels):
                    b.store(x, (v, place, 0), square.at(j, 0, lanes=lanes), lanes)


def clamped(e: Expr) -> Expr:
    """An element whose indices stay inside, whatever conditions say."""
    if not isinstance(e, Load):
        raise ScheduleError(f"{e!r} is no element of an array")
    idx = [i if nonneg(i) and nonneg(d - 1 - i) else minimum(maximum(i, 0), d - 1) for i, d in zip(e.idx, e.buf.shape)]
    return load(e.buf, idx)


def limited(e: Expr, lanes: int, limit: Expr) -> Expr:
    """A vector that ends with a row of memory, where that may be within it."""
    assert isinstance(e, Load)
    return e if nonneg(e.buf.shape[-1] - e.idx[-1] - lanes) else load(e.buf, e.idx, lanes, limit)


# --- the results ------------------------------------------------------------------------------------------------------


def _along_pixels(p: Product, r: Expr, vector: Expr, total: Expr) -> Store:
    """Finish a vector of sums of one row and store it."""
    *outer, inner = p.pixels.loops
    at = p.pixels.at(p.first(vector, total.lanes))
    env: dict[Expr, Expr] = {**p.rows.at(r), **{v: at[v] for v in outer}}
    return stored(p, inner, at[inner], p.count(vector, total.lanes), total.lanes, env, total)


def _finish(b: Builder, p: Product, block: int, start: Expr, vector: Expr, total: Callable[[Expr], Expr]) -> None:
    """Store the results of a block of rows that begins with row `start`, for one vector of pixels."""
    lanes = total(const(0)).lanes
    if p.transposed:
        with b.loop("q", minimum(block // lanes, -(-p.rows.size // lanes) - start // lanes)) as q:
            _along_rows(b, p, q, start + q * lanes, vector, total, lanes)
    else:
        with b.loop("r", minimum(start + block, p.encoding.pattern.rows), lo=start) as r:
            b.emit(_along_pixels(p, r, vector, total(r - start)))


def _along_rows(
    b: Builder, p: Product, q: Expr, row: Expr, vector: Expr, total: Callable[[Expr], Expr], lanes: int
) -> None:
    """Turn square `q` of a block's sums, which begins with `row`, finish it, and store each pixel's."""
    square = zipped(b, lambda j: total(q * lanes + j), const(lanes), lanes, lanes, "u")
    first, count = p.first(vector, lanes), p.count(vector, lanes)

    def stores(whole: bool) -> None:
        with b.loop("j", lanes, "unroll") as j:
            pixel = b.let("pixel", first + j if count is None else minimum(first + j, p.pixels.size - 1))
            with b.when(const(True) if whole or count is None else j < count):
                store_rows(b, p, row, p.pixels.at(pixel), lanes, square.at(j, 0, lanes=lanes))

    _by_fullness(b, p, vector, lanes, stores)


def store_rows(b: Builder, p: Product, row: Expr, pixel: Mapping[Expr, Expr], lanes: int, sums: Expr) -> None:
    """Finish and store a vector of sums: results of a pixel in the rows from one on, a multiple of `lanes`.

    Args:
        pixel: loops' variables.
    """
    lane = p.rows.loops[-1]
    at: dict[Expr, Expr] = {lane: row}
    if len(p.rows.loops) > 1:  # panels of as many rows as there are lanes, or axes that a reshape has made of rows
        at = p.rows.at(p.rows.inside(row // lanes, lanes), lanes)
    start = at.pop(lane)
    limit = None if p.rows.inner % lanes == 0 else const(p.rows.size) - start
    b.emit(stored(p, lane, start, limit, lanes, {**pixel, **at}, sums))


def stored(
    p: Product, along: Var, first: Expr, limit: Expr | None, lanes: int, env: Mapping[Expr, Expr], total: Expr
) -> Store:
    """Finish a vector of sums, neighbours along one loop, and store it."""
    wide, s = Vectorizer(along, first, lanes), p.form.store
    wide.limit = limit
    one, whole = var("sum", f32), var("sum", f32, lanes=lanes)
    wide.lets[one] = whole
    here: dict[Expr, Expr] = {**env, p.form.acc[0]: one}
    made = wide.store(Store(s.buf, tuple(substitute(i, here) for i in s.idx), substitute(s.value, here)))
    return Store(made.buf, made.idx, substitute(made.value, {whole: total}), made.lanes, made.limit)


def _int(e: Expr) -> int:
    n: int = unwrap(e)
    return n
