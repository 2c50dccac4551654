"""Recipe for convolutions by windows of several taps with sparse weights: taps are vectors at other places.

    parallel over images, strips of tiles, shares of the rows of weights:
        x[channel, phases, places] = the padded image where the strip reads it      turned, in a core's L2 cache
        for each chunk of vectors of results, for each block of rows of the share:
            for each group g of rows, each span c of columns, each vector v of the chunk:
                sums[v, rows of g] (+)= sparse_rows(x[:, v + taps], values, g, c)
            for each vector v: y[..] = epilogue(sums[v])

An element of x is read in as many places as the window has; a matrix of columns would hold it as often. Code of a span
fits the instruction cache, and walks all vectors of a chunk. Which pixels are the lanes of a vector says
`dnnc.passes.rewrites.sparse_windows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates.sparse import (
    block_of_rows,
    clamped,
    groups_of_block,
    is_first,
    limited,
    store_rows,
)
from dnnc.backends.llvm.templates.sparse_product import Product, end_of_share, product_of
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, const, maximum, minimum, op, select, substitute
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel
from dnnc.passes.lower.form import Axis
from dnnc.passes.rewrites.sparse import PREFETCHES
from dnnc.passes.rewrites.sparse_windows import Tiling, Window, span_of, strip_cycles, tilings, window_of
from dnnc.passes.schedule.memory import Vectorizer
from dnnc.passes.schedule.problem import Knobs, Problem
from dnnc.passes.schedule.transposition import zipped

CHUNK = 28  # vectors that a run of code walks one after the other, at most
ROOM = 0.75  # of the L2 cache, for a strip of an image

ORDER = ()


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    found = _convolution(problem, target.lanes)
    if found is None:
        return []
    p, w = found
    count, size, block = p.encoding.room, p.rows.size, block_of_rows(p, target.lanes)
    blocks = -(-size // block)

    def cycles(setting: tuple[Tiling, int]) -> float:
        t, shares = setting
        rows = min(-(-blocks // shares) * block, size)  # of the largest share
        each = strip_cycles(t, count * rows / size, rows, target.rates)
        return -(-w.images * t.strips * shares // target.threads) * each

    every = tilings(w, target.lanes, ROOM * target.l2)
    best = sorted(((t, n) for t in every for n in sorted({1, min(target.threads, blocks)})), key=cycles)[:6]
    return [(("across", t.across), ("high", t.high), ("shares", n)) for t, n in best]


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    return []


def _convolution(problem: Problem, lanes: int) -> tuple[Product, Window] | None:
    """The product and its window, where images lie in blocks of channels; else None."""
    p = product_of(problem, lanes)
    if p is None or p.encoding.group == 1 or p.grid is not None or not p.transposed or problem.anchor is None:
        return None
    w = window_of(problem.anchor)
    if w is None or not isinstance(p.other.value, Load) or len(p.pixels.loops) != 2 + (w.images > 1):
        return None
    if p.taps.extents != tuple(k for k in w.kernel if k > 1) or p.pixels.extents[-2:] != w.results:
        return None
    in_order = p.other.in_order(Axis(p.form.red.loops[:1]), [p.pixels, p.rows, p.taps], lanes)
    return (p, w) if in_order and p.whole_rows(lanes) else None


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    found = _convolution(problem, target.lanes)
    if found is None:
        raise ScheduleError("the weights are not sparse, or memory has another order")
    (p, w), lanes = found, target.lanes
    across, high, shares = (int(knobs[name]) for name in ("across", "high", "shares"))
    t = Tiling(w, lanes // across, across, high, -(-w.results[1] // across))
    block, items = block_of_rows(p, lanes), w.images * t.strips * shares
    chunks = -(-t.vectors // CHUNK)
    chunk = -(-t.vectors // chunks)
    b = Builder()
    with b.loop("s", items, "parallel") as item:
        share, strip = item % shares, item // shares
        image = b.let("image", strip // t.strips)
        top = b.let("top", strip % t.strips * (t.down * t.high))
        x = b.alloc("strip", f32, -(-w.channels // lanes) * lanes, t.row * lanes, space="local")
        _fill(b, p, t, x, (image, top))
        begin, end = (b.let(name, end_of_share(p, block, share + j, shares)) for j, name in enumerate(("begin", "end")))
        cold = is_first(item, items, target.threads)
        with b.loop("h", chunks) as h, b.loop("rb", end, lo=begin) as rb:
            sums = b.alloc("sums", f32, chunk, block, lanes, space="local")
            _products(b, p, t, (x, sums), (rb, maximum(rb - begin, h), h * chunk), cold)
            with b.loop("v", chunk) as v, b.when(_exists(t, chunk, h * chunk + v)):
                _results(b, p, t, sums, (rb * block, image, top, b.let("vector", h * chunk + v), v))
    return p.form.kernel.with_body(b.block())


def _exists(t: Tiling, chunk: int, vector: Expr) -> Expr:
    return const(True) if t.vectors % chunk == 0 else op("<", vector, const(t.vectors))


def _fill(b: Builder, p: Product, t: Tiling, x: Buffer, at: tuple[Expr, Expr]) -> None:
    """Turn squares of neighbouring channels of the pixels at one place of all tiles; `at`: the image, and the strip's
    first row.
    """
    channel, w, lanes = p.form.red.loops[0], t.window, t.lanes
    image, top = at
    for number, phase in enumerate(w.phases):
        with b.loop("q", t.held) as q, b.loop("k", -(-w.channels // lanes)) as k:

            def row(j: Expr) -> Expr:
                env = {**_pixel(p, t, (image, top), (q // t.pitch, q % t.pitch), j), **_tap(p, w, phase)}
                e = Vectorizer(channel, k * lanes, lanes).expr(clamped(substitute(p.other.value, env)))
                if w.channels % lanes:
                    e = limited(e, lanes, minimum(const(w.channels) - k * lanes, lanes))
                for c in p.other.conds:
                    e = select(substitute(c, env), e, const(0.0, f32))
                return e

            square = zipped(b, row, const(lanes), lanes, lanes, "t")
            with b.loop("j", lanes, "unroll") as j:
                b.store(x, (k * lanes + j, (q + number * t.held) * lanes), square.at(j, 0, lanes=lanes), lanes)


def _pixel(p: Product, t: Tiling, at: tuple[Expr, Expr], place: tuple[Expr, Expr], lane: Expr) -> dict[Expr, Expr]:
    """The loops of pixels at a place of the tile that is a lane."""
    *images, row, column = p.pixels.loops
    image, top = at
    down, along = lane // t.across, lane % t.across
    return {**dict.fromkeys(images, image), row: top + down * t.high + place[0], column: along * t.wide + place[1]}


def _tap(p: Product, w: Window, phase: tuple[int, int]) -> dict[Expr, Expr]:
    """The loops of taps at the first one of a phase."""
    several = [k for k, n in zip(phase, w.kernel) if n > 1]
    return {v: const(k) for v, k in zip(p.taps.loops, several)}


def _products(
    b: Builder, p: Product, t: Tiling, of: tuple[Buffer, Buffer], at: tuple[Expr, Expr, Expr], cold: Expr
) -> None:
    """The sums of a block of rows for a chunk. `at`: the block, 0 for the share's first one alone, the first vector.

    The last vectors prefetch the code of the next run. A chunk of few vectors does it where it is cold.
    """
    (x, sums), (rb, place, first), group, pattern = of, at, p.encoding.group, p.encoding.pattern
    chunk, block, lanes = (int(str(n)) for n in sums.shape)
    each, span = block // group, span_of(t.window, p.encoding.room, pattern.rows)
    spans, (values, _) = -(-pattern.columns // span), p.encoding.sections["values"]
    last = -(-pattern.rows // group) * spans - 1
    with b.loop("g", groups_of_block(p, rb, block)) as g, b.loop("c", spans) as c, b.loop("v", chunk) as v:
        with b.when(_exists(t, chunk, first + v)):
            number = b.let("run", (rb * each + g) * spans + c)
            few = chunk < PREFETCHES
            late = const(-1) if few else v - (chunk - PREFETCHES)
            new = maximum(maximum(place, g), c)  # 0: the share's first run, which nothing prefetched
            whole = cold if few else op("<", maximum(new, v), const(1))
            leads, behind = op("<", new, const(1)), minimum(number + 1, last)
            ahead = select(whole, select(leads, number, behind), select(op("<", late, const(0)), number, behind))
            part = select(whole, const(PREFETCHES), maximum(late, 0))
            vector = first + v
            at_first = vector // t.wide * t.pitch + vector % t.wide
            refs = (
                sums.ref(v, g * group, 0, lanes=lanes),
                x.ref(0, at_first * lanes, lanes=lanes),
                p.weights.ref(values),
            )
            ends = (group, 1)
            b.sparse_rows(refs, number, (ahead, part), pattern, ends, taps=t.offsets, span=span if spans > 1 else 0)


def _results(b: Builder, p: Product, t: Tiling, sums: Buffer, at: tuple[Expr, Expr, Expr, Expr, Expr]) -> None:
    """Turn the squares of a block's sums for one vector, finish them, and store each pixel's that exists."""
    start, image, top, vector, v = at
    _, block, lanes = (int(str(n)) for n in sums.shape)
    high, wide = t.window.results
    *_, down, along = p.pixels.loops
    with b.loop("q", minimum(block // lanes, -(-p.rows.size // lanes) - start // lanes)) as q:
        square = zipped(b, partial(_row_of, sums, v, q * lanes), const(lanes), lanes, lanes, "u")
        with b.loop("j", lanes, "unroll") as j:
            env = _pixel(p, t, (image, top), (vector // t.wide, vector % t.wide), j)
            there = const(True)
            if t.wide * t.across != wide or t.high * t.down * t.strips != high:
                there = op("<", maximum(env[down] - (high - 1), env[along] - (wide - 1)), const(1))
                env.update({down: minimum(env[down], high - 1), along: minimum(env[along], wide - 1)})
            with b.when(there):
                store_rows(b, p, start + q * lanes, env, lanes, square.at(j, 0, lanes=lanes))


def _row_of(sums: Buffer, v: Expr, first: Expr, j: Expr) -> Expr:
    return sums.at(v, first + j, 0, lanes=int(str(sums.shape[-1])))
