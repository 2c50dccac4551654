"""Which constant weights of 16-bit floats are worth being stored as square blocks: node in, verdict out."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import mma, sparse_blocks, wgmma
from dnnc.backends.cuda.templates.contraction.sparse_blocks import SIZES, Work
from dnnc.ir.blocks import Blocks
from dnnc.ir.bundles import matrix_of
from dnnc.ir.dtype import DType, bf16, f16
from dnnc.ir.graph import Graph, Node
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import ContractionForm
from dnnc.ir.sparse import Pattern
from dnnc.ir.types import Array, tensor
from dnnc.passes.lower.nests import lower
from dnnc.passes.rewrites.sparse import MOST_DENSITY, Verdict
from dnnc.passes.schedule.problem import classify

GAIN = 1.3  # over the dense kernel that is asked for: estimates of both are off by 8 and 11 %
START = 2200  # cycles of the launch of a dense kernel
FEW_PIXELS = 16  # of which tiles would compute mostly others


def weigh_blocks(graph: Graph, n: Node, target: GpuTarget) -> Verdict | None:
    """Weigh blocks against dense weights of 16-bit floats; None where few blocks are zero, or no kernel takes them.

    Args:
        graph: which the node belongs to.
        n: a product.
        target: the GPU.
    """
    found_weights = product_weights(graph, n)
    if found_weights is None or target.major < 8 or found_weights[1] < FEW_PIXELS:
        return None
    array, pixels = found_weights
    x, w = n.inputs[:2]
    assert x is not None and w is not None
    matrix, best, found = matrix_of(array, 1), math.inf, 0
    for size in SIZES:
        if matrix.shape[0] % size or matrix.shape[1] % size:
            continue
        blocks = Pattern.of(matrix, size, size).blocks
        if 0 < blocks.sum() <= MOST_DENSITY * blocks.size:
            lengths = np.sort(blocks.sum(1))[::-1]
            cost = sparse_blocks.best_cycles(Work(pixels, matrix.shape[1], size, lengths), target)
            best, found = min((best, found), (cost, size))
    if not found:
        return None
    gain = dense_cycles(pixels, *array.shape, x.type.dtype, target) / best
    stored = Blocks.of(array, 1, found)
    share = stored.pattern.count / stored.pattern.blocks.size
    head = f"{w.name}, {share:.1%} of its blocks of {found} x {found} not 0:"
    if gain < GAIN:
        return Verdict(None, f"{head} dense, {gain:.1f} times the speed is expected of a sparse kernel")
    return Verdict(stored, f"{head} sparse, blocks, {gain:.1f} times as fast as dense by estimate")


def product_weights(graph: Graph, n: Node) -> tuple[Array, int] | None:
    """The constant weights [terms, rows] of a product of 16-bit floats, and the rows of its other factor; None of all
    other nodes.
    """
    x, w = n.inputs[:2] if n.op.contraction is ContractionForm.PRODUCT else (None, None)
    array = graph.constants.get(w) if w is not None else None
    if x is None or w is None or array is None:
        return None
    same = x.type.dtype is w.type.dtype in (f16, bf16)
    if not same or array.ndim != 2 or x.type.rank < 2 or not (x.type.static and n.output.type.static):
        return None
    return array, math.prod(int(str(d)) for d in n.output.type.shape[:-1])


@lru_cache(256)
def dense_cycles(pixels: int, terms: int, rows: int, dtype: DType, target: GpuTarget) -> float:
    """Estimated cycles of the best dense kernel for a product of matrices of these sizes."""
    g = Graph("dense")
    x, w = g.add_input("x", tensor(dtype, pixels, terms)), g.add_input("w", tensor(dtype, terms, rows))
    g.outputs = [Builder(g).matmul(x, w)]
    nodes = list(g.nodes())
    problem = classify(nodes, lower(g, nodes, g.outputs))
    return min(wgmma.estimate(problem, target), mma.estimate(problem, target)) + START
