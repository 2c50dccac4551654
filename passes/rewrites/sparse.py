"""Which constants are worth to be stored sparse: node in, encoding out; decided with the layouts."""

from __future__ import annotations

import numpy as np

from dnnc.ir.dtype import f32
from dnnc.ir.graph import Graph, Node
from dnnc.ir.sparse import Sparse
from dnnc.ir.target import CoreRates

GAIN = 1.25
MOST_DENSITY = 0.6


def sparse_weights(graph: Graph, n: Node, lanes: int, rates: CoreRates) -> Sparse | None:
    """The encoding for the weights of a product or convolution; None where they are better dense."""
    x, w = n.inputs[:2]
    array = graph.constants.get(w) if w is not None else None
    if array is None or x is None or w is None or {x.type.dtype, w.type.dtype, n.output.type.dtype} != {f32}:
        return None
    if not n.output.type.static or not x.type.static or not w.type.row_major or array.size == 0:
        return None
    if np.count_nonzero(array) > MOST_DENSITY * array.size:
        return None
    return Sparse.of(array, 0)
