"""Which constants are worth being stored sparse: node in, verdict out; decided with the layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dnnc.ir.dtype import f32
from dnnc.ir.graph import Graph, Node
from dnnc.ir.op import ContractionForm
from dnnc.ir.sparse import Pattern, Sparse
from dnnc.ir.target import CoreRates
from dnnc.ir.types import Array, Encoding
from dnnc.passes.rewrites import sparse_windows
from dnnc.passes.rewrites.winograd import cycles as winograd_cycles
from dnnc.passes.rewrites.winograd import winograd_tile

GAIN = 1.3  # over the dense kernel that is asked for: estimates of both are rough
UNKNOWN_GAIN = 1.6  # the same of few pixels in code for any CPU, which multiplies at rates that nobody knows
UNKNOWN_WINDOW_GAIN = 2.0  # the same of windows, whose dense code runs up to twice as fast as such rates say
WINOGRAD_GAIN = 1.45  # the same of loops for windows that Winograd's algorithm computes, of which less is known
WINDOW_GAIN = 1.15  # the same of code for windows, whose estimates were mostly within a fifth of what was measured
MOST_DENSITY = 0.6  # of weights that are worth a look, and a line of the report
DENSE = 1.1  # of the multiply-adds' time that a dense kernel takes
TILES = 7  # vectors of pixels of a strip
ROW = 25  # cycles of a row of the matrix beside its products: a loop whose end is not foreseen, and what is stored
TURN = 4  # cycles to transpose a vector of a square
GROUP = 24  # rows of straight-line code: of 32 registers some hold vectors of the other factor
CODE = 14  # bytes of code and values for each nonzero
INSTRUCTION = 10  # bytes of code of a product
FETCH = 17  # bytes of code that come from the L2 cache in a cycle
CALL = 35  # cycles of a group beside its products: sums are cleared, stored and loaded again
HIDDEN = 0.5  # of the products' time, in which code comes from memory
WIDE = 16  # lanes of vectors of 512 bits
STREAMED = 1.0  # cycles to read or write a vector of an image that no L2 cache holds
NARROW_STREAMED = 4.0  # the same of shorter vectors: few neighbours in memory, which no hardware prefetches
LINE = 64  # bytes that one instruction prefetches
PREFETCHES = 4  # vectors of a strip during which the code of the next group is prefetched
NEAR_STRIP = 28 << 10  # bytes of a strip that stay in the first-level cache
NEAR_CODE = 24 << 10  # bytes that stay in the instruction cache
FAR_CODE = 1 << 20  # bytes that do not stay in the L2 cache
MOVE, FAR_MOVE = 3.0, 5.0  # cycles to turn a vector, and to write and read it, in the first-level cache and beyond
MOST_CODE = 40 << 20  # bytes of a program: a little more than what last-level caches of servers hold
FEW_PIXELS = 4  # whose products are sums over gathered elements
ELEMENT = 8  # bytes of a nonzero in a loop
HEIGHTS = 4, 8  # rows of blocks, which share each vector of pixels
LEAST_SHARED = 3  # vectors of pixels that share each weight of a block
ACROSS = 12  # cycles to add up the lanes of a vector
NARROW_ROW, NARROW_ACROSS = 15, 6  # `ROW` and `ACROSS` of a matrix with few pixels, for vectors of less than 512 bits
GATHERED = 1.75, 1.45  # cycles to gather an element, of one pixel and of each of several; one vector is loaded a cycle
NARROW_GATHERED = 1.7, 1.3  # the same for vectors of less than 512 bits
LOADED = 4.2, 3.8  # the same for vectors of so few elements that no instruction gathers them
FEWEST_GATHERED = 8  # elements of vectors that are gathered
CACHED = 4  # times memory's rate, at which weights come from the last-level cache
NEAR = 0.85  # of the L2 cache's rate


@dataclass(frozen=True)
class Verdict:
    """`encoding`: None where the weights stay dense; `why`: a line for the report. `pixels`: are these, and not the
    channels, to be neighbours in memory, in the other factor and in the result?
    """

    encoding: Encoding | None
    why: str
    pixels: bool = False


@dataclass
class SparseWeights:
    """Chooses the encodings of a graph's weights with zeros.

    Args:
        graph: it.
        lanes: float32 elements of a vector.
        rates: of a core.
        strict: nothing is sparse, for an infinity times a zero that is skipped is no NaN.
        room: bytes that straight-line code may take; 0: there is none.
        l2: bytes of a core's second-level cache.
        note: called with a line for the report on each of the weights that have many zeros.
    """

    graph: Graph
    lanes: int
    rates: CoreRates
    strict: bool
    room: int
    l2: int
    note: Callable[[str], None] | None

    def encoding(self, n: Node) -> Sparse | None:
        """The encoding of the weights of a product or convolution; None where they stay dense."""
        verdict = None if self.strict else weigh_sparse(self.graph, n, self.lanes, self.rates, self.room, self.l2)
        if verdict is None:
            return None
        if self.note is not None:
            self.note(verdict.why)
        found = verdict.encoding
        if not isinstance(found, Sparse):
            return None
        if found.group > 1:
            self.room -= found.pattern.count * CODE
        return found


@dataclass(frozen=True)
class Zeros:
    """Constant weights many of which are 0. `axis`: of the rows, the results of a pixel; `head`: of a report's line."""

    array: Array
    axis: int
    count: int  # not 0
    head: str

    @property
    def rows(self) -> int:
        return int(self.array.shape[self.axis])


def zeros_of(graph: Graph, n: Node, first: bool = False) -> Zeros | None:
    """The weights of a product or convolution where they are known and many of them are 0; else None. `first`: they are
    the first factor of a product.
    """
    x, w = n.inputs[1::-1] if first else n.inputs[:2]
    array = graph.constants.get(w) if w is not None else None
    if x is None or w is None or array is None or array.ndim < 2 or array.size == 0 or array.dtype.kind != "f":
        return None
    count = int(np.count_nonzero(array))
    if not 0 < count <= MOST_DENSITY * array.size:  # of zeros alone: what stands for weights that are not there
        return None
    axis = 0 if first or n.op.contraction is ContractionForm.CONVOLUTION else array.ndim - 1
    return Zeros(array, axis, count, f"{w.name}, {count / array.size:.1%} of {array.size} not 0:")


def weigh_sparse(
    graph: Graph, n: Node, lanes: int, rates: CoreRates, room: int = 0, l2: int = 1 << 20
) -> Verdict | None:
    """Weigh sparse against dense weights for a product or convolution; None where no zeros are known.

    Args:
        graph: which the node belongs to.
        n: a product or a convolution.
        lanes: float32 elements of a vector.
        rates: of a core.
        room: bytes that straight-line code may still take; 0: there is none.
        l2: bytes of a core's second-level cache.
    """
    found = zeros_of(graph, n)
    if found is None:
        return None
    array, axis, rows, count, head = found.array, found.axis, found.rows, found.count, found.head
    reason = _unfit(n, lanes)
    if reason:
        return Verdict(None, f"{head} dense, {reason}")
    pixels = math.prod(_sizes(n.output.type.shape)) // rows
    terms = array.size // rows
    if pixels <= FEW_PIXELS:
        return _few_pixels(found, pixels, lanes, rates)
    vectors = -(-pixels // lanes)
    padded = -(-rows // lanes) * lanes
    dense = pixels / lanes * (padded * terms / rates.fma * DENSE + 2 * padded + terms)
    tile = winograd_tile(n, lanes, rates) if n.op.contraction is ContractionForm.CONVOLUTION else 0
    if tile:
        dense = min(dense, winograd_cycles(n, lanes, tile, rates))
    near = NEAR_STRIP if lanes < WIDE else 0  # wide vectors wait for more than their loads, as if for the L2 cache
    most = max(min(TILES, vectors, strip_tiles(terms, lanes, l2)), 1)
    sparse = vectors * min(
        loop_cycles(count, rows, terms, tiles, lanes, rates, 4 * lanes * terms * tiles <= near)
        for tiles in range(1, most + 1)
    )
    few = 1 if count * CODE <= FAR_CODE else most
    code = code_cycles(count, rows, terms, (-(-vectors // few), few), rates)
    moved = vectors * (rows + terms)
    streamed = moved * (STREAMED if lanes >= WIDE else NARROW_STREAMED) if 4 * lanes * moved > 2 * FAR_CODE else 0.0
    code, sparse = code + streamed, sparse + streamed
    window = sparse_windows.window_of(n)
    if window is not None:
        code = sparse_windows.code_cycles(window, count, rows, lanes, rates)
    group = GROUP if code < sparse and count * CODE <= room else 1
    best, height = code if group > 1 else sparse, 1
    for h in HEIGHTS:
        if sums_of_blocks(lanes) // h >= LEAST_SHARED:
            blocks = filled(found, h, 1)
            cost = streamed + vectors * block_cycles(h, blocks, rows, terms, most, lanes, rates)
            if cost < best:
                best, height, group = cost, h, 1
    gain = dense / best
    least = WINOGRAD_GAIN if tile and group == 1 else WINDOW_GAIN if window is not None and group > 1 else GAIN
    if lanes < FEWEST_GATHERED and n.op.contraction is ContractionForm.CONVOLUTION and math.prod(array.shape[2:]) > 1:
        least = UNKNOWN_WINDOW_GAIN
    if gain < least:
        return Verdict(None, f"{head} dense, {gain:.1f} times the speed is expected of a sparse kernel")
    form = "straight-line code" if group > 1 else f"blocks of {height} rows" if height > 1 else "CSR"
    why = f"{head} sparse, {form}, {gain:.1f} times as fast as dense by estimate"
    return Verdict(Sparse.of(array, axis, height, group=group), why)


def strip_tiles(terms: int, lanes: int, l2: int) -> int:
    """How many vectors of pixels a strip may have, so that half of the second-level cache holds it."""
    return l2 // 2 // (4 * lanes * terms)


def filled(w: Zeros, height: int, width: int) -> int:
    """Blocks of a matrix that hold a number other than 0."""
    return Pattern.of(np.moveaxis(w.array, w.axis, 0).reshape(w.rows, -1), height, width).count


def _few_pixels(w: Zeros, pixels: int, lanes: int, rates: CoreRates) -> Verdict:
    """Weigh sparse against dense weights for few pixels, which wait for memory: elements, or blocks as wide as a
    vector or a half.
    """
    size, terms = w.array.size, w.array.size // w.rows
    held = min(MOST_CODE / (4 * size), 1)  # the share that the last-level cache keeps
    rate = rates.memory / (held / CACHED + 1 - held)
    gathered = GATHERED if lanes >= WIDE else NARROW_GATHERED if lanes >= FEWEST_GATHERED else LOADED
    each = pixels * gathered[pixels > 1] / (rates.loads if lanes >= WIDE else 1)
    row, across = (ROW, ACROSS) if lanes >= WIDE else (NARROW_ROW, NARROW_ACROSS)
    best, block = w.count * max(ELEMENT / rate, each) + w.rows * (row + across * pixels), (1, 1)
    height = HEIGHTS[0]
    for width in (lanes, lanes // 2):
        if terms % width == 0:
            wide = pixels_at_once(height, lanes)
            some = [min(wide, pixels - first) for first in range(0, pixels, wide)]
            loaded = sum(max((height + n) / rates.loads, height * n / rates.fma, rates.latency) for n in some)
            each = max(4 * height * width / rate, loaded)
            cost = filled(w, height, width) * each + w.rows * (row / height + across * pixels)
            best, block = min((best, block), (cost, (height, width)))
    gain = max(4 / rate, pixels / (lanes * rates.fma)) * size / best
    if gain < (GAIN if lanes >= FEWEST_GATHERED else UNKNOWN_GAIN):
        return Verdict(None, f"{w.head} dense, {gain:.1f} times the speed is expected of a sparse kernel")
    form = "CSR" if block == (1, 1) else f"blocks of {block[0]} x {block[1]}"
    why = f"{w.head} sparse, {form}, {gain:.1f} times as fast as dense by estimate"
    return Verdict(Sparse.of(w.array, w.axis, *block), why)


def pixels_at_once(height: int, lanes: int) -> int:
    """Pixels whose sums, of a row of blocks, registers hold beside its weights, where pixels are few."""
    return max((sums_of_blocks(lanes) - (0 if lanes >= WIDE else height)) // height, 1)


def loop_cycles(
    count: float, rows: float, terms: float, tiles: int, lanes: int, rates: CoreRates, near: bool = False
) -> float:
    """Estimate cycles of the loop kernel for one vector of pixels: products, rows, transposed squares.

    Args:
        count: nonzeros of the matrix.
        rows: of the matrix.
        terms: of a sum, taps counted.
        tiles: vectors of a strip.
        lanes: of a vector.
        rates: of a core.
        near: does a strip lie in the first-level cache?
    """
    fetched = 0.0 if near else 4 * lanes / (NEAR * rates.l2)
    each = max(1 / rates.fma, rates.latency / tiles, (1 + 2 / tiles) / rates.loads, fetched)
    return count * each + rows * ROW / tiles + (rows + terms) * TURN


def sums_of_blocks(lanes: int) -> int:
    """Vectors of sums of a row of blocks, which registers hold beside the factors: of 32, or of 16."""
    return 24 if lanes >= WIDE else 12


def block_cycles(
    height: int, blocks: float, rows: float, terms: float, tiles: int, lanes: int, rates: CoreRates
) -> float:
    """Estimate cycles of the kernel of blocks for one vector of pixels. `height`: rows of a block; else as above."""
    wide = min(tiles, sums_of_blocks(lanes) // height)  # vectors of pixels that share a weight
    fetched = 4 * lanes / (NEAR * rates.l2)
    each = max(height / rates.fma, rates.latency / wide, (1 + height / wide) / rates.loads, fetched)
    ends = rows / height * (ROW / wide + 2 * height / rates.stores)
    return blocks * (each + 4 * height / (tiles * rates.l2)) + ends + (rows + terms) * TURN


def code_cycles(
    count: float,
    rows: float,
    terms: float,
    strips: tuple[int, int],
    rates: CoreRates,
    near: bool = True,
    cores: int = 1,
) -> float:
    """Estimate cycles of straight-line code for some strips on one core, one after the other.

    Args:
        count, rows, terms: as above, of the core's share of the rows.
        strips: how many, and vectors of each.
        rates: of the core.
        near: does a strip lie in the first-level cache?
        cores: how many run the same code, which comes from memory once.
    """
    used = 1 - (1 - count / (rows * terms)) ** GROUP if rows * terms else 0.0  # of the columns, by a group
    loads = (count + used * terms * rows / GROUP) / rates.loads
    fetched = count * INSTRUCTION / FETCH if count * INSTRUCTION * GROUP > NEAR_CODE * rows else 0.0
    products = strips[0] * strips[1] * (max(count / rates.fma, loads, fetched) + CALL * math.ceil(rows / GROUP))
    move = (rows + terms) * (MOVE if near else FAR_MOVE)
    size = count * CODE  # comes from memory once at least, then from the L2 cache
    again = 0.0 if size <= NEAR_CODE else 0.5 / rates.l2 if size <= FAR_CODE else 1 / rates.memory
    first, later = size / cores / rates.memory, size * again
    if strips[1] >= PREFETCHES:  # ahead of its use, while the vectors of the group before are multiplied
        hidden = HIDDEN * products / strips[0]
        first, later = max(first - hidden, 0.0) + size / LINE / rates.loads, max(later - hidden, 0.0)
    return products + strips[0] * strips[1] * move + first + (strips[0] - 1) * later


def foreign_cycles(terms: float, vectors: float, shares: int, lanes: int, rates: CoreRates) -> float:
    """Estimate cycles to read what other cores computed, where `shares` of them take the same pixels."""
    return terms * vectors * 4 * lanes * (1 - 1 / shares) / rates.memory


def unfit(n: Node) -> str:
    """Why sparse kernels of no target take a node; empty where some may."""
    x, w = n.inputs[:2]
    assert x is not None and w is not None
    if {x.type.dtype, w.type.dtype, n.output.type.dtype} != {f32}:
        return "sparse kernels are of float32"
    if not (n.output.type.static and x.type.static):
        return "sizes are not known"
    if n.op.contraction is ContractionForm.PRODUCT and (w.type.rank != 2 or x.type.rank < 2):
        return "the product is no matrix of weights by another one"
    if n.op.contraction is ContractionForm.CONVOLUTION and n.attrs["group"] != 1:
        return "the convolution has groups"
    return ""


def _unfit(n: Node, lanes: int) -> str:
    """Why there is no sparse kernel for a node; empty where there is one."""
    if reason := unfit(n):
        return reason
    w = n.inputs[1]
    assert w is not None
    rows = w.type.shape[0 if n.op.contraction is ContractionForm.CONVOLUTION else -1]
    pixels = math.prod(_sizes(n.output.type.shape)) // int(str(rows))
    convolves = n.op.contraction is ContractionForm.CONVOLUTION
    windows = convolves and (math.prod(_sizes(w.type.shape[2:])) > 1 or any(n.attrs["pads"] or ()))
    if rows == 1 or (windows if pixels <= FEW_PIXELS else pixels < lanes // 2):
        return "there are too few pixels"
    return "the image has too few channels" if convolves and w.type.shape[1] < lanes else ""


def _sizes(shape: tuple[object, ...]) -> list[int]:
    return [int(str(d)) for d in shape]


def is_pointwise(n: Node) -> bool:
    """Is this a convolution of one image whose results are at the places of its operand's elements?"""
    x, w = n.inputs[:2]
    assert x is not None and w is not None
    ones, zeros = (x.type.shape[0], *w.type.shape[2:], *(n.attrs["strides"] or ())), n.attrs["pads"] or ()
    return all(k == 1 for k in ones) and not any(zeros)
