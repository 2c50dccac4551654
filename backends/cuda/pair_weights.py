"""Which constant weights of 16-bit floats are worth being stored as two of each four: node in, verdict out."""

from __future__ import annotations

import math

import numpy as np

from dnnc.backends.cuda.block_weights import dense_cycles, product_weights
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import two_of_four, two_of_four_rows
from dnnc.ir.dtype import DType
from dnnc.ir.graph import Graph, Node
from dnnc.ir.pairs import GROUP, KEPT, Pairs, is_two_of_four
from dnnc.passes.rewrites.sparse import Verdict

GAIN = 1.15  # over the dense kernel that is asked for: of 39 products that promised less, 10 were slower by up to 8 %
FEW, START, MEMORY = 64, 4040, 0.78  # rows whose dense kernels wait for weights of memory; the share of copies' rate
VECTOR = 8  # elements of 16 bytes: rows of the other factor begin at multiples of it


def weigh_pairs(graph: Graph, n: Node, target: GpuTarget) -> Verdict | None:
    """Weigh two of each four against dense weights of 16-bit floats; None where another pattern is stored.

    Args:
        graph: which the node belongs to.
        n: a product.
        target: the GPU.
    """
    found = product_weights(graph, n)
    if found is None:
        return None
    array, pixels = found
    if not 0 < np.count_nonzero(array) <= (array.size / GROUP + array.shape[1]) * KEPT:
        return None
    w, (terms, rows) = n.inputs[1], array.shape
    if w is None or not is_two_of_four(array):
        return None
    head = f"{w.name}, two of each four not 0:"
    tiles = two_of_four.best_cycles(pixels, rows, terms, target) if terms % VECTOR == 0 else math.inf
    few = two_of_four_rows.best_cycles(pixels, rows, terms, target)
    if min(tiles, few) == math.inf:
        return Verdict(None, f"{head} dense, there is no kernel of these sizes")
    gain = dense(pixels, terms, rows, n.output.type.dtype, target) / min(tiles, few)
    if gain < GAIN:
        return Verdict(None, f"{head} dense, {gain:.2f} times the speed is expected of a sparse kernel")
    order = "lanes" if few < tiles else "tiles"
    return Verdict(Pairs.of(array, 1, order), f"{head} sparse, 2:4, {gain:.2f} times as fast as dense by estimate")


def dense(pixels: int, terms: int, rows: int, dtype: DType, target: GpuTarget) -> float:
    """Estimated cycles of the best dense kernel; of few pixels those in which memory gives the weights."""
    streamed = START + 2 * terms * rows * two_of_four.CLOCK / (MEMORY * target.bandwidth)
    cycles = dense_cycles(pixels, terms, rows, dtype, target)
    if pixels > FEW:
        return cycles
    return streamed if cycles == math.inf else max(cycles, streamed)
