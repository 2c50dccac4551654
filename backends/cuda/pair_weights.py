"""Which constant weights of 16-bit floats are worth being stored as two of each four: node in, verdict out."""

from __future__ import annotations

import math

import numpy as np

from dnnc.backends.cuda.block_weights import dense_cycles, product_weights
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import two_of_four, two_of_four_rows
from dnnc.ir.bundles import matrix_of
from dnnc.ir.dtype import DType, bf16, f16
from dnnc.ir.graph import Graph, Node
from dnnc.ir.op import ContractionForm
from dnnc.ir.pairs import GROUP, KEPT, Pairs, is_two_of_four
from dnnc.ir.types import Array
from dnnc.passes.rewrites.pixel_blocks import is_pointwise
from dnnc.passes.rewrites.sparse import Verdict

GAIN = 1.15  # over the dense kernel that is asked for: of 39 products that promised less, 10 were slower by up to 8 %
FEW, START, MEMORY = 64, 4040, 0.78  # rows whose dense kernels wait for weights of memory; the share of copies' rate


def weigh_pairs(graph: Graph, n: Node, target: GpuTarget) -> Verdict | None:
    """Weigh two of each four against dense weights of 16-bit floats; None where another pattern is stored.

    Args:
        graph: which the node belongs to.
        n: a product, or a convolution.
        target: the GPU.
    """
    found, w = _weights(graph, n), n.inputs[1] if len(n.inputs) > 1 else None
    if found is None or w is None:
        return None
    array, axis, pixels = found
    matrix = matrix_of(array, axis)
    rows, terms = matrix.shape
    if not 0 < np.count_nonzero(array) <= (array.size / GROUP + rows) * KEPT or not is_two_of_four(matrix.T):
        return None
    head = f"{w.name}, two of each four not 0:"
    tiles = two_of_four.best_cycles(pixels, rows, terms, target)
    few = two_of_four_rows.best_cycles(pixels, rows, terms, target)
    if min(tiles, few) == math.inf:
        return Verdict(None, f"{head} dense, there is no kernel of these sizes")
    gain = dense(pixels, terms, rows, n.output.type.dtype, target) / min(tiles, few)
    if gain < GAIN:
        return Verdict(None, f"{head} dense, {gain:.2f} times the speed is expected of a sparse kernel")
    order = "lanes" if few < tiles else "tiles"
    return Verdict(Pairs.of(array, axis, order), f"{head} sparse, 2:4, {gain:.2f} times as fast as dense by estimate")


def _weights(graph: Graph, n: Node) -> tuple[Array, int, int] | None:
    """The constant weights of a product or of a convolution of single pixels, the axis of their rows, the pixels."""
    if n.op.contraction is not ContractionForm.CONVOLUTION:
        found = product_weights(graph, n)
        return None if found is None else (found[0], 1, found[1])
    x, w = n.inputs[:2]
    array = graph.constants.get(w) if w is not None else None
    if x is None or w is None or array is None or n.attrs["group"] != 1 or not is_pointwise(n):
        return None
    if not x.type.dtype is w.type.dtype in (f16, bf16) or not (x.type.static and n.output.type.static):
        return None
    return array, 0, math.prod(int(str(d)) for d in n.output.type.shape) // array.shape[0]


def dense(pixels: int, terms: int, rows: int, dtype: DType, target: GpuTarget) -> float:
    """Estimated cycles of the best dense kernel; of few pixels those in which memory gives the weights."""
    streamed = START + 2 * terms * rows * two_of_four.CLOCK / (MEMORY * target.bandwidth)
    cycles = dense_cycles(pixels, terms, rows, dtype, target)
    if pixels > FEW:
        return cycles
    return streamed if cycles == math.inf else max(cycles, streamed)
