"""Remove nodes and constants that nobody reads. Graph inputs stay: they are the model's interface."""

from __future__ import annotations

from dnnc.ir.graph import Graph
from dnnc.passes.base import PassContext, graphs
from dnnc.passes.rewrite import sweep


def dce(graph: Graph, ctx: PassContext) -> bool:
    """`a = exp(x); b = neg(x); return b  ->  b = neg(x); return b`. Nodes with an effect stay."""
    changed = False
    for g in graphs(graph):
        before = len(g), len(g.constants)
        outputs = set(g.outputs)
        for n in g.nodes(reverse=True):
            sweep(g, (n,), outputs)
        for v in [v for v in g.constants if not v.uses and v not in outputs]:
            g.erase_constant(v)
        for v in [v for v in g.parameters if not v.uses and v not in outputs]:
            g.erase_parameter(v)
        changed |= before != (len(g), len(g.constants))
    return changed
