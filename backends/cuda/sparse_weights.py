"""Which constant weights are worth being stored sparse on a GPU: node in, verdict out, by estimated cycles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from dnnc.backends.cuda.block_weights import weigh_blocks
from dnnc.backends.cuda.pair_weights import weigh_pairs
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import immediates, patch, simt, sparse, sparse_gather, tf32x3
from dnnc.backends.cuda.templates.contraction.mma import Shape as TileShape
from dnnc.backends.cuda.templates.contraction.patch_image import image_of
from dnnc.ir.bundles import PACK, Bundles, matrix_of
from dnnc.ir.dtype import f32
from dnnc.ir.graph import Graph, Node
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import ContractionForm, Trait
from dnnc.ir.types import ROW_MAJOR, Array, Encoding, TensorType, tensor
from dnnc.passes.lower.nests import lower
from dnnc.passes.rewrites.channels_last import last as channels_last
from dnnc.passes.rewrites.channels_last import pixel_order
from dnnc.passes.rewrites.sparse import Verdict, Zeros, unfit, zeros_of
from dnnc.passes.schedule.problem import Problem, classify

GAIN = 1.4  # over the dense kernel that is asked for: on an H100 every product that promised it was faster
GATHER_GAIN = 1.15  # the same where pixels are gathered: from 1.05 on every one of 243 products was faster
CODE_GAIN = 1.2  # the same where elements are in code
CODE_OVER_GATHER = 1.1  # of such code over gathered pixels
LARGE = 1e15  # from which on weights are in no code: a check of it, which has these weights alone, would overflow
COPY = 2666  # cycles of a short kernel between others
FEW_PIXELS = 16  # of which a block would compute mostly others
HEIGHTS = (16, 32, 64, 128, 256)  # rows of a bundle
DEPTHS = (1, 2, 3, 4, 6, 8)  # pieces of a row
LEAST_DEPTH, MOST_DEPTH = 64, 1792  # columns of a piece: of 32 pixels in shared memory
STEP = 8  # columns that a warp moves together


def weigh_sparse(graph: Graph, n: Node, target: GpuTarget) -> Verdict | None:
    """Weigh sparse against dense weights for a product or convolution; None where no zeros are known.

    Args:
        graph: which the node belongs to.
        n: a product or a convolution.
        target: the GPU.
    """
    pairs = weigh_pairs(graph, n, target)
    if pairs is not None and pairs.encoding is not None:
        return pairs
    if (verdict := weigh_blocks(graph, n, target) or pairs) is not None:
        return verdict
    found = zeros_of(graph, n)
    if found is None:
        return _weigh_first(graph, n, target)
    reason = _unfit(n)
    gathers = not unfit(n) and _has_neighbours(n)
    if reason and not gathers:
        return Verdict(None, f"{found.head} dense, {reason}")
    pixels = math.prod(int(str(d)) for d in n.output.type.shape) // found.rows
    taken: Callable[[Bundles], bool] | None = None
    if n.op.contraction is ContractionForm.CONVOLUTION and math.prod(found.array.shape[2:]) > 1:
        taken = partial(_is_taken, _image(n), tuple(n.attrs.items()))
    dense = _dense(n, found, target)
    cost, encoding = (math.inf, None) if reason else best_bundles(found.array, found.axis, pixels, target, taken)
    if gathers:
        form = best_form(found, _neighbours(n), target, dense, _copies(graph, n, target))
        if form.cycles < cost and (dense / form.cycles >= form.gain or dense / cost < GAIN):
            verdict = form.verdict(found, dense)
            if taken is None or verdict.encoding is None or _is_gathered(n, verdict.encoding):
                return verdict
    return _verdict(found, dense / cost, encoding)


@dataclass(frozen=True)
class Form:
    """How products with neighbouring pixels are computed: estimated cycles; how many times as fast as the dense kernel
    it must be by them; rows of a group whose elements are in code, or 0 where pixels are gathered.
    """

    cycles: float
    gain: float
    rows: int = 0

    def verdict(self, found: Zeros, dense: float) -> Verdict:
        gain = dense / self.cycles
        if gain < self.gain:
            return Verdict(None, f"{found.head} dense, {gain:.1f} times the speed is expected of a sparse kernel")
        encoding = (
            immediates.encoding_of(found.array, found.axis, self.rows)
            if self.rows
            else sparse_gather.encoding_of(found.array, found.axis)
        )
        name = f"rows, {self.rows} in a piece of code" if self.rows else "rows"
        return Verdict(
            encoding, f"{found.head} sparse, {name}, {gain:.1f} times as fast as dense by estimate", pixels=True
        )


def best_form(
    found: Zeros, sizes: tuple[int, int], target: GpuTarget, dense: float = math.inf, more: float = 0.0
) -> Form:
    """The faster of the two forms for so many pixels in all, and next to each other.

    Args:
        found: the weights.
        sizes: the pixels.
        target: the GPU.
        dense: cycles of the dense kernel.
        more: cycles of both forms that come with them.
    """
    gathered = gathered_cycles(found, sizes, target) + more
    taps = math.prod(found.array.shape[2:])
    code, rows = math.inf, 0
    if np.abs(found.array).max() < LARGE:  # false of NaN
        code, rows = immediates.best(immediates.Work(sizes[0], taps, matrix_rows(found) != 0), target)
    if (code + more) * CODE_OVER_GATHER < gathered and (code + more) * CODE_GAIN <= dense:
        return Form(code + more, CODE_GAIN, rows)
    return Form(gathered, GATHER_GAIN)


def matrix_rows(found: Zeros) -> Array:
    """Weights as [rows, columns], channels outermost."""
    matrix: Array = np.moveaxis(found.array, found.axis, 0).reshape(found.rows, -1)
    return matrix


def _dense(n: Node, found: Zeros, target: GpuTarget) -> float:
    """Estimated cycles of the best dense kernel of a node."""
    if n.op.contraction is ContractionForm.CONVOLUTION:
        return convolution_cycles(_image(n), found.array.shape, tuple(n.attrs.items()), target)
    pixels = math.prod(int(str(d)) for d in n.output.type.shape) // found.rows
    return dense_cycles(pixels, found.array.size // found.rows, found.rows, target)


def _image(n: Node) -> tuple[int, ...]:
    x = n.inputs[0]
    assert x is not None
    return tuple(int(str(d)) for d in x.type.shape)


def _verdict(found: Zeros, gain: float, encoding: Bundles | None) -> Verdict:
    if encoding is None or gain < GAIN:
        return Verdict(None, f"{found.head} dense, {gain:.1f} times the speed is expected of a sparse kernel")
    return Verdict(encoding, f"{found.head} sparse, rows in bundles, {gain:.1f} times as fast as dense by estimate")


def _weigh_first(graph: Graph, n: Node, target: GpuTarget) -> Verdict | None:
    """The same for weights that are the first factor of a product: columns of the other one are pixels."""
    if n.op.contraction is not ContractionForm.PRODUCT or (found := zeros_of(graph, n, first=True)) is None:
        return None
    types = [v.type for v in (*n.inputs[:2], n.output) if v is not None]
    if any(t.dtype is not f32 or t.rank != 2 or not t.static for t in types):
        return Verdict(None, f"{found.head} dense, sparse kernels are of matrices of float32")
    pixels, terms = int(str(n.output.type.shape[-1])), found.array.size // found.rows
    if pixels < FEW_PIXELS:
        return Verdict(None, f"{found.head} dense, there are too few pixels")
    dense = dense_cycles(pixels, terms, found.rows, target)
    return best_form(found, (pixels, pixels), target, dense).verdict(found, dense)


def gathered_cycles(found: Zeros, sizes: tuple[int, int], target: GpuTarget) -> float:
    """Estimated cycles of the kernel that gathers neighbouring pixels: so many in all, and next to each other."""
    pixels, row = sizes
    lengths = np.count_nonzero(matrix_of(found.array, found.axis), axis=1)
    packs = np.sort((lengths + PACK - 1) // PACK)[::-1]
    taps = math.prod(found.array.shape[2:])
    wide = next(k for k in (4, 2, 1) if row % k == 0 and (taps == 1 or k == 1))
    work = sparse_gather.Work(pixels, found.array.size // found.rows, packs, wide, taps)
    return sparse_gather.best_cycles(work, target)


def _neighbours(n: Node) -> tuple[int, int]:
    """Pixels of a product or convolution by one element; those of an image, or all of a matrix."""
    shape = [int(str(d)) for d in n.output.type.shape]
    if n.op.contraction is ContractionForm.CONVOLUTION:
        return shape[0] * math.prod(shape[2:]), math.prod(shape[2:])
    return math.prod(shape[:-1]), math.prod(shape[:-1])


def _copies(graph: Graph, n: Node, target: GpuTarget) -> float:
    """Cycles to bring the other factor into the order of pixels, and the result out of it: 0 where the node ahead
    leaves its result in this order, and where all readers of the result want it so.
    """
    x = n.inputs[0]
    assert x is not None
    moved = [] if x.type.encoding == pixel_order(n) else [x]
    if not _is_read_so(graph, n, target):
        moved.append(n.output)
    return sum(_copy(v.type, target) for v in moved)


def _copy(t: TensorType, target: GpuTarget) -> float:
    """Cycles of a kernel that reads and writes an array of float32."""
    size = math.prod(int(str(d)) for d in t.shape)
    return COPY + 8 * size / (target.bandwidth * 1e9 / sparse_gather.CLOCK)


def _is_read_so(graph: Graph, n: Node, target: GpuTarget) -> bool:
    """Do all readers take the result in the order of pixels? Sparse products do that are worth it with a copy of
    their own results; element-wise ops pass on what they get.
    """
    order, left = pixel_order(n), [n.output]
    while left:
        v = left.pop()
        if v in graph.outputs and order != ROW_MAJOR:
            return False
        for reader, k in v.uses:
            if Trait.ELEMENTWISE in reader.op.traits and len(reader.outputs) == 1:
                left.append(reader.output)
            elif k or reader.op.contraction is not n.op.contraction or not _gathers_next(graph, reader, target):
                return False
    return True


def _gathers_next(graph: Graph, n: Node, target: GpuTarget) -> bool:
    """Is a product faster with gathered pixels where its other factor lies in their order already?"""
    found = zeros_of(graph, n)
    if found is None or unfit(n) or not _has_neighbours(n):
        return False
    dense = _dense(n, found, target)
    form = best_form(found, _neighbours(n), target, dense, _copy(n.output.type, target))
    return dense >= form.gain * form.cycles


def _has_neighbours(n: Node) -> bool:
    """Do neighbouring pixels of the result read neighbours? There must be some pixels to gather."""
    pixels, row = _neighbours(n)
    if n.op.contraction is ContractionForm.CONVOLUTION:
        x, w = n.inputs[:2]
        assert x is not None and w is not None
        strided = any(k != 1 for k in n.attrs["strides"] or ())
        if strided or x.type.shape[2:] != n.output.type.shape[2:]:
            return False
    return pixels >= FEW_PIXELS and row > 1


def best_bundles(
    array: Array, axis: int, pixels: int, target: GpuTarget, taken: Callable[[Bundles], bool] | None = None
) -> tuple[float, Bundles | None]:
    """The encoding of the fastest kernel by its estimated cycles, of those that are `taken` (default: all); infinity
    and None where none fits.
    """
    refused: set[int] = set()  # a kernel takes pieces of one length, or none of that length
    for cost, _, height, depth in sorted(costs(matrix_of(array, axis) != 0, pixels, target), key=lambda row: row[0]):
        if depth in refused:
            continue
        encoding = Bundles.of(array, axis, height, depth)
        if taken is None or taken(encoding):
            return cost, encoding
        refused.add(depth)
    return math.inf, None


def _is_taken(image: tuple[int, ...], attrs: tuple[tuple[str, object], ...], e: Bundles) -> bool:
    """Does the kernel of a convolution see that steps of its sum are columns? The loops over a window are joined in
    another order where each row of a window is a piece.
    """
    g = _convolution(image, e.shape, attrs, e)
    nodes = list(g.nodes())
    return sparse.product_of(classify(nodes, lower(g, nodes, g.outputs))) is not None


def _is_gathered(n: Node, e: Encoding) -> bool:
    """Does the kernel of neighbouring pixels see them in order? The loops over small images and windows are joined in
    another one.
    """
    w = n.inputs[1]
    assert w is not None
    shape = tuple(int(str(d)) for d in w.type.shape)
    g = _convolution(_image(n), shape, tuple(n.attrs.items()), e, pixel_order(n))
    nodes = list(g.nodes())
    problem = classify(nodes, lower(g, nodes, g.outputs))
    return (sparse_gather if isinstance(e, Bundles) else immediates).product_of(problem) is not None


def costs(stored: Array, pixels: int, target: GpuTarget) -> list[tuple[float, sparse.Shape, int, int]]:
    """Estimated cycles of all blocks and encodings of a matrix [rows, columns] that fit: rows of a bundle, columns of
    a piece.
    """
    rows, terms = stored.shape
    out = []
    for depth in sorted({-(-terms // (STEP * n)) * STEP for n in DEPTHS}):
        if depth > MOST_DEPTH or (depth < LEAST_DEPTH and depth < terms):
            continue
        lengths = np.add.reduceat(stored, np.arange(0, terms, depth), axis=1, dtype=np.int64)
        packs = (-(-lengths // PACK)).sum(1)
        for height in HEIGHTS:
            if height > max(rows, HEIGHTS[0]) * 2:
                continue
            whole = np.zeros(-(-rows // height) * height, packs.dtype)
            whole[:rows] = packs
            ordered = -np.sort(-whole.reshape(-1, height))
            w = sparse.Work(pixels, rows, terms, height, depth, int(packs.sum()), *sparse.loads(ordered))
            out += [(sparse.cycles(w, s, target), s, height, depth) for s in sparse.shapes(w, target)]
    return out


@lru_cache(256)
def dense_cycles(pixels: int, terms: int, rows: int, target: GpuTarget) -> float:
    """Estimated cycles of the best dense kernel in float32 for a product of matrices of these sizes."""
    g = Graph("dense")
    x, w = g.add_input("x", tensor(f32, pixels, terms)), g.add_input("w", tensor(f32, terms, rows))
    g.outputs = [Builder(g).matmul(x, w)]
    return _cycles(g, target)


@lru_cache(256)
def convolution_cycles(
    image: tuple[int, ...], filters: tuple[int, ...], attrs: tuple[tuple[str, object], ...], target: GpuTarget
) -> float:
    """The same for a convolution of images, with channels last, by filters of these sizes."""
    return _cycles(_convolution(image, filters, attrs), target)


def _convolution(
    image: tuple[int, ...],
    filters: tuple[int, ...],
    attrs: tuple[tuple[str, object], ...],
    encoding: Encoding | None = None,
    order: Encoding | None = None,
) -> Graph:
    g, last = Graph("convolution"), channels_last(len(image), 0)
    x = g.add_input("x", TensorType(f32, image, order or last))
    w = g.add_input("w", TensorType(f32, filters, encoding or last))
    y = Builder(g).conv(x, w, **dict(attrs))
    y.type = TensorType(f32, y.type.shape, order or last)
    g.outputs = [y]
    return g


def _cycles(g: Graph, target: GpuTarget) -> float:
    nodes = list(g.nodes())
    problem = classify(nodes, lower(g, nodes, g.outputs))
    image = image_of(problem, target)
    patches = [] if image is None else patch.ranked(image, target)[:1]
    return min([simt.estimate(problem, target), _tensor_cores(problem, target), *(cost for cost, _ in patches)])


def _tensor_cores(problem: Problem, target: GpuTarget) -> float:
    found, c = tf32x3.candidates(problem, target), problem.product
    if not found or c is None:
        return math.inf
    return tf32x3.cost(c, target, TileShape(**{k: int(v) for k, v in found[0]}, element=4))


def _unfit(n: Node) -> str:
    """Why there is no sparse kernel for a node; empty where there is one."""
    if reason := unfit(n):
        return reason
    w = n.inputs[1]
    assert w is not None
    convolves = n.op.contraction is ContractionForm.CONVOLUTION
    rows, channels = w.type.shape[0 if convolves else -1], w.type.shape[1 if convolves else 0]
    if convolves and (int(str(rows)) % sparse.VECTOR or int(str(channels)) % sparse.VECTOR):
        return f"the channels are no multiples of {sparse.VECTOR}"
    pixels = math.prod(int(str(d)) for d in n.output.type.shape) // int(str(rows))
    if pixels < FEW_PIXELS or int(str(rows)) < STEP:
        return "there are too few pixels"
    return ""
