"""Bring a graph into one spelling for later passes: rules of `movement` and `algebra` to a fixpoint.

    add(0.0, reshape(reshape(x)))   ->   reshape(x)

Runs on a decomposed graph after folding, and again after passes that leave such things behind.
"""

from __future__ import annotations

from dnnc.ir.graph import Graph
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import rewrite
from dnnc.passes.rewrites.algebra import ALGEBRA_RULES
from dnnc.passes.rewrites.movement import MOVEMENT_RULES

RULES = (*MOVEMENT_RULES, *ALGEBRA_RULES)


def canonicalize(graph: Graph, ctx: PassContext) -> bool:
    """Apply all rules. With strict numerics, only those that are exact."""
    return rewrite(graph, RULES, ctx)
