"""Checks of the gradient of one graph: differences, the dot-product test, second derivatives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dnnc.ir.graph import Graph
from support.random_gradients import Array, check_gradient, counts, gradient_graph


def check(graph: Graph, arrays: Sequence[Array], again: bool = False) -> Graph:
    """The graph of values and cotangents, whose numbers are right; `again`: those of its own gradient, too."""
    before = counts["directions"]
    assert (message := check_gradient(graph, arrays)) is None, message
    assert counts["directions"] > before, "no direction was checked"
    joint, *_ = gradient_graph(graph)
    if again:
        rng = np.random.default_rng(3)
        more = [rng.standard_normal(v.type.shape) for v in joint.inputs[len(arrays) :]]
        assert (message := check_gradient(joint, [*arrays, *more])) is None, message
    return joint
