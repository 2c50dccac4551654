"""Recipe for convolutions by windows of several taps with sparse weights: taps are shifts of an image that lies flat.

    parallel over images, strips of `tiles` vectors of results, shares of the rows of weights:
        x[channel, phases, positions] = the padded image where the strip reads it     turned, in a core's L2 cache
        for each block of rows of the share:
            for each group g of rows, each span c of columns, each vector t:
                sums[t, rows of g] (+)= sparse_rows(x[:, t + taps], values, g, c)
            for each vector t: y[..] = epilogue(sums[t])

An element of x is read in as many places as the window has, from any address on; in a matrix of columns it would be
stored in all of these. Code of a span fits the instruction cache, and walks all vectors of a strip. What a position is
says `dnnc.passes.rewrites.sparse_windows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates.sparse import (
    Product,
    block_of_rows,
    clamped,
    end_of_share,
    groups_of_block,
    is_first,
    limited,
    product_of,
    stored,
)
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, const, maximum, minimum, op, select, substitute
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel
from dnnc.passes.lower.form import Axis
from dnnc.passes.rewrites.sparse import PREFETCHES
from dnnc.passes.rewrites.sparse_windows import Window, span_of, strip_cycles, window_of
from dnnc.passes.schedule.memory import Vectorizer
from dnnc.passes.schedule.problem import Knobs, Problem
from dnnc.passes.schedule.transposition import zipped

ORDER = ()


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    found = _convolution(problem, target.lanes)
    if found is None:
        return []
    p, w = found
    every, lanes = w.vectors(target.lanes), target.lanes
    block = block_of_rows(p, lanes)
    rows = min(target.threads, -(-p.rows.size // block))
    settings = []
    for tiles in sorted({-(-every // n) for n in range(1, every + 1)}):
        held = len(w.phases) * w.held(tiles, lanes) * w.channels + tiles * block
        if held * 4 * lanes <= target.l2 // 2 or tiles == 1:
            settings += [(tiles, n) for n in sorted({1, rows})]
    pattern = p.encoding.pattern

    def cycles(setting: tuple[int, int]) -> float:
        tiles, shares = setting
        items = w.images * -(-every // tiles) * shares
        each = strip_cycles(w, pattern.count / shares, p.rows.size / shares, tiles, lanes, target.rates)
        return -(-items // target.threads) * each

    return [(("tiles", t), ("shares", n)) for t, n in sorted(settings, key=cycles)[:6]]


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    return []


def _convolution(problem: Problem, lanes: int) -> tuple[Product, Window] | None:
    """The product and its window, where images lie in blocks of channels; else None."""
    p = product_of(problem, lanes)
    if p is None or p.encoding.group == 1 or p.grid is not None or not p.transposed or problem.anchor is None:
        return None
    w = window_of(problem.anchor, lanes)
    if w is None or not isinstance(p.other.value, Load) or len(p.pixels.loops) != 2 + (w.images > 1):
        return None
    if p.taps.extents != tuple(k for k in w.kernel if k > 1) or p.pixels.extents[-2:] != w.results:
        return None
    return (p, w) if p.other.in_order(Axis(p.form.red.loops[:1]), [p.pixels, p.rows, p.taps]) else None


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    found = _convolution(problem, target.lanes)
    if found is None:
        raise ScheduleError("the weights are not sparse, or memory has another order")
    p, w = found
    tiles, shares, lanes = int(knobs["tiles"]), int(knobs["shares"]), target.lanes
    every, block, held = w.vectors(lanes), block_of_rows(p, lanes), w.held(tiles, lanes)
    strips = -(-every // tiles)
    items = w.images * strips * shares
    b = Builder()
    with b.loop("s", items, "parallel") as item:
        share, strip = item % shares, item // shares
        image, first = b.let("image", strip // strips), b.let("first", strip % strips * tiles)
        padded = -(-w.channels // lanes) * lanes
        x = b.alloc("strip", f32, padded, len(w.phases) * held * lanes, space="local")
        _fill(b, p, w, x, (image, first), held, lanes)
        begin, end = (b.let(name, end_of_share(p, block, share + j, shares)) for j, name in enumerate(("begin", "end")))
        cold = is_first(item, items, target.threads)
        with b.loop("rb", end, lo=begin) as rb:
            sums = b.alloc("sums", f32, tiles, block, lanes, space="local")
            _products(b, p, w, (x, sums), (rb, rb - begin), cold)
            with b.loop("v", tiles) as v, b.when(op("<", first + v, const(every))):
                _results(b, p, w, sums, (rb * block, image, b.let("vector", first + v), v))
    return p.form.kernel.with_body(b.block())


def _fill(b: Builder, p: Product, w: Window, x: Buffer, at: tuple[Expr, Expr], held: int, lanes: int) -> None:
    """Turn squares of neighbouring channels of as many positions; `at`: the image, and the strip's first vector."""
    channel = p.form.red.loops[0]
    image, first = at
    for number, phase in enumerate(w.phases):
        with b.loop("q", held) as q:
            start = b.let("position", (first + q) * lanes)
            with b.loop("k", -(-w.channels // lanes)) as k:

                def row(j: Expr) -> Expr:
                    env = {**_place(p, image, start + j, w), **_tap(p, w, phase)}
                    e = Vectorizer(channel, k * lanes, lanes).expr(clamped(substitute(p.other.value, env)))
                    if w.channels % lanes:
                        e = limited(e, lanes, minimum(const(w.channels) - k * lanes, lanes))
                    for c in p.other.conds:
                        e = select(substitute(c, env), e, const(0.0, f32))
                    return e

                square = zipped(b, row, const(lanes), lanes, lanes, "t")
                with b.loop("j", lanes, "unroll") as j:
                    place = (k * lanes + j, (q + number * held) * lanes)
                    b.store(x, place, square.at(j, 0, lanes=lanes), lanes)


def _place(p: Product, image: Expr, at: Expr, w: Window) -> dict[Expr, Expr]:
    """The loops of pixels at a position of the flat image."""
    *images, row, column = p.pixels.loops
    return {**dict.fromkeys(images, image), row: at // w.pitch, column: at % w.pitch}


def _tap(p: Product, w: Window, phase: tuple[int, int]) -> dict[Expr, Expr]:
    """The loops of taps at the first one of a phase."""
    several = [k for k, n in zip(phase, w.kernel) if n > 1]
    return {v: const(k) for v, k in zip(p.taps.loops, several)}


def _products(
    b: Builder, p: Product, w: Window, of: tuple[Buffer, Buffer], at: tuple[Expr, Expr], cold: Expr
) -> None:
    """The sums of a block of rows. `at`: its number, and the same within the share.

    The last vectors prefetch the code of the next run. A strip with few vectors does it where it is cold.
    """
    (x, sums), (rb, place), group, pattern = of, at, p.encoding.group, p.encoding.pattern
    tiles, block, lanes = (int(str(n)) for n in sums.shape)
    each, span = block // group, span_of(w, pattern.count, pattern.rows)
    spans, (values, _) = -(-pattern.columns // span), p.encoding.sections["values"]
    taps = tuple(phase * w.held(tiles, lanes) * lanes + tap for phase, tap in w.taps)
    last = -(-pattern.rows // group) * spans - 1
    with b.loop("g", groups_of_block(p, rb, block)) as g, b.loop("c", spans) as c, b.loop("v", tiles) as v:
        number = b.let("run", (rb * each + g) * spans + c)
        few = tiles < PREFETCHES
        late = const(-1) if few else v - (tiles - PREFETCHES)
        new = maximum(maximum(place, g), c)  # 0: the share's first run, which nothing prefetched
        whole = cold if few else op("<", maximum(new, v), const(1))
        leads, behind = op("<", new, const(1)), minimum(number + 1, last)
        ahead = select(whole, select(leads, number, behind), select(op("<", late, const(0)), number, behind))
        part = select(whole, const(PREFETCHES), maximum(late, 0))
        refs = (
            sums.ref(v, g * group, 0, lanes=lanes),
            x.ref(0, v * lanes, lanes=lanes),
            p.weights.ref(values),
        )
        b.sparse_rows(refs, number, (ahead, part), pattern, (group, 1), taps=taps, span=span if spans > 1 else 0)


def _results(b: Builder, p: Product, w: Window, sums: Buffer, at: tuple[Expr, Expr, Expr, Expr]) -> None:
    """Turn the squares of a block's sums for one vector, finish them, and store each pixel's that exists."""
    start, image, vector, v = at
    _, block, lanes = (int(str(n)) for n in sums.shape)
    (high, wide), size = w.results, p.rows.size
    lane, inner = p.rows.loops[-1], len(p.rows.loops) > 1  # panels of as many rows as there are lanes
    with b.loop("q", minimum(block // lanes, -(-size // lanes) - start // lanes)) as q:
        row = start + q * lanes
        total = partial(_row_of, sums, v, q * lanes)
        square = zipped(b, total, const(lanes), lanes, lanes, "u")
        begin = const(0) if inner else row
        limit = None if inner or size % lanes == 0 else const(size) - begin
        with b.loop("j", lanes, "unroll") as j:
            place = vector * lanes + j
            env = _place(p, image, place, w)
            *_, down, across = p.pixels.loops
            there = op("<", maximum(place - (high * w.pitch - 1), place % w.pitch - (wide - 1)), const(1))
            env.update({down: minimum(env[down], high - 1), across: minimum(env[across], wide - 1)})
            if inner:
                env[p.rows.loops[0]] = row // lanes
            with b.when(there):
                b.emit(stored(p, lane, begin, limit, lanes, env, square.at(j, 0, lanes=lanes)))


def _row_of(sums: Buffer, v: Expr, first: Expr, j: Expr) -> Expr:
    return sums.at(v, first + j, 0, lanes=int(str(sums.shape[-1])))
