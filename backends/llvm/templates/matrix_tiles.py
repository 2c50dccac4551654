"""Recipe for products and convolutions of bytes and bf16 on registers of two dimensions (`dnnc.ir.loops.tiles`).

    for p in parallel(panels/nv * rows/mr):                      as in `contraction`, with `matrix` rows of a tile
        t[mr / matrix, nv] = 0
        for k in range(K / 64 bytes):
            t[i, j] += x[i, k] @ w[j, k]                         16 x 16 sums of 16 x 64 bytes: 16 cycles
        y = epilogue(t)                                          by way of the L1 cache

Two tiles by two are loaded in the time of their products, 64 cycles, if one factor stays in the L1 cache and the other
one comes out of the L2 cache. What is left of rows goes as in `contraction`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates import contraction, dots
from dnnc.backends.llvm.templates.register_tiles import Nest, step_cycles
from dnnc.backends.llvm.templates.stored import weights_of
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.tiles import ROW, ROWS, TILES
from dnnc.passes.rewrites.pad_images import LEAST_ROWS
from dnnc.passes.schedule.problem import Knobs, Problem, varied

ORDER = contraction.ORDER
COUNTS = (1, 2, 3)  # tiles of sums on top of each other, and side by side
UNKNOWN = 256, 16  # rows and panels where sizes are not known
HELD = 0.75  # of the L2 cache: panels that stay there while rows pass
WORD = 4  # bytes of the neighbours in a sum that one lane has
# Measured on an Emerald Rapids, cycles:
LATENCY = 52  # from one product of a tile of sums to the next
LOADED = 1.05  # a row of a tile, out of the L2 cache as well; hints to fetch it only cost time
SPLIT = 3  # times as long, if it lies in two lines
SUMS = 5  # a row of a tile of sums: to store it, to read it again, and to wait for that
GAIN = 2  # over vectors, by count, from which tiles are faster beside other work on the core's caches


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """Tiles that are estimated to be faster than the best ones of vectors, the fastest first."""
    if not target.rates.tile_rows or dots.applies(problem):
        return []
    found = contraction.nest_of(problem)
    if found is None or not _applies(found[1]):
        return []
    (s, nest), vectors = found, contraction.settings(problem, target)
    if not vectors or dict(vectors[0]).get("images"):
        return []
    steps, known = s.extent(nest.reduction[0]), contraction.extents(s, nest, target.lanes)
    rows, panels = (given if given is not None else guess for given, guess in zip(known, UNKNOWN))
    if not isinstance(steps, int) or (not nest.panel and rows < LEAST_ROWS):
        return []
    per = nest.block or steps
    ku = max(u for u in range(1, ROW // WORD + 1) if per % u == 0)
    products = -(-steps // per) * (per // ku) * nest.window
    first = dict(vectors[0])
    mr, nv = int(first["mr"]), int(first["nv"])
    rates, whole = target.rates, problem.anchor is not None and problem.anchor.output.type.dtype.is_int
    slower = 1.0 if whole or not rates.pairs else max(rates.fma / rates.pairs, 1.0)  # than products of float32
    limit = -(-rows // mr) * -(-panels // nv) * nest.window * steps * step_cycles(mr, nv, target) * slower
    split = (steps if not nest.block else per) * WORD % ROW and ku * WORD > ROW // 2
    made: list[tuple[float, Knobs]] = []
    for high, count, wide in ((h, c, w) for h in range(1, ROWS + 1) for c in COUNTS for w in COUNTS):
        if count * wide + count + wide > TILES or high * count > rows or wide > panels:
            continue
        if nest.together and nest.together % wide:
            continue
        loaded = count * high * (SPLIT if split else 1) + wide * ku
        step = max(count * wide * high / rates.tile_rows, LOADED * loaded, LATENCY)
        tile = products * step + count * wide * high * SUMS
        time = -(-rows // (high * count)) * -(-panels // wide) * tile
        if time * GAIN < limit:
            made.append((time, _knobs(problem, known, vectors[0], (high, count, wide, ku), target)))
    return [knobs for _, knobs in sorted(made)[:6]]


def _applies(nest: Nest) -> bool:
    """Does a row of tiles see the same taps, and do its pixels have neighbours of the sum in memory?"""
    special = nest.padding or nest.depthwise or nest.shuffled or nest.codes or nest.images
    return bool(nest.quad) and not special and (not nest.panel or nest.block > 0)


def _knobs(
    problem: Problem,
    known: tuple[int | None, int | None],
    vectors: Knobs,
    tile: tuple[int, int, int, int],
    target: CpuTarget,
) -> Knobs:
    """Panels that the L2 cache holds pass a tile of rows; larger ones are read once, with all rows passing."""
    (high, count, wide, ku), weights = tile, weights_of(problem)
    size = weights.type.nbytes if weights is not None else 0
    held = isinstance(size, int) and size <= HELD * target.l2
    whole = held and known[0] is not None and not problem.inplace
    order = "tiles" if whole else dict(vectors)["order"]
    return (("mr", high * count), ("nv", wide), ("ku", ku), ("order", order), ("pf", 0), ("matrix", high))


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """The same in other orders, and asking for panels ahead."""
    found = candidates(problem, target)
    orders = ("rows", "panels", "tiles")
    return [*found, *(varied(k, order=o) for k in found for o in orders), *(varied(k, pf=1) for k in found)]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    return contraction.apply(problem, knobs, target)
