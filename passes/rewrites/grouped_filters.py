"""Filters' gradients of narrow groups as those of wider ones, whose channels fill vectors.

    conv_backward_filter(x, g, group=32)  ->  y = conv_backward_filter(x, g, group=8)       32 groups of 4 channels
                                              y[o, c of the group of o]

A block of outputs then meets all inputs of the groups that it has outputs of. What is computed of pairs of different
groups is dropped: each element is a sum of its own, so all others are what they were. 4 times the operations at the
speed of whole vectors are fewer than those of a sum for each element.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import replace_each
from dnnc.passes.rewrites.layout import WIDE

MOST = 32  # times the operations


def grouped_filters(graph: Graph, ctx: PassContext) -> bool:
    """Rewrite gradients whose groups do not fill vectors. Returns whether any was."""
    if ctx.facts.lanes == 1 or ctx.facts.channels_last:
        return False
    return replace_each(graph, {"conv_backward_filter": lambda n: _joined(graph, n, ctx.facts.lanes)})


def together(inputs: int, outputs: int, group: int, lanes: int) -> int:
    """How many groups are one, so that its channels fill blocks: 1 if each does; all, if their number has no such
    divisor.
    """
    wide = (m for m in range(1, group) if group % m == 0 and all(m * c % lanes == 0 for c in (inputs, outputs)))
    return next(wide, group)


def _joined(graph: Graph, n: Node, lanes: int) -> Value | None:
    x, g = n.inputs
    assert x is not None and g is not None
    group, out = int(n.attrs["group"]), n.output.type
    channels = (x.type.shape[1], g.type.shape[1])
    if group == 1 or not out.static or out.dtype.computed not in WIDE or not all(isinstance(c, int) for c in channels):
        return None
    inputs, outputs = (int(str(c)) // group for c in channels)
    m = together(inputs, outputs, group, lanes)
    if m == 1 or m > MOST or inputs == outputs == 1:
        return None
    b: Any = Builder(graph, n, n.locs)
    kernel = out.shape[2:]
    every = b.conv_backward_filter(x, g, **{**n.attrs, "group": group // m})
    taps = math.prod(int(str(k)) for k in kernel)
    apart = b.reshape(every, shape=(group // m, m, outputs, m, inputs * taps))
    own = np.eye(m, dtype=bool).reshape(1, m, 1, m, 1)
    kept = b.reduce_sum(b.where(own, apart, np.zeros((), out.dtype.numpy)), axes=(3,), keepdims=False)
    made: Value = b.reshape(kept, shape=out.shape)
    return made
