"""Replace ops that are defined by other ops until only those with a tensor expression, or host ops, are left.

    y = squeeze(x, axes=(0,))   ->   y = reshape(x, shape=(5,))

Where cores walk rows (CPUs), some ops have another definition of the same meaning (`decompose_serial`).

Runs ahead of the algebraic passes, so that these know one spelling of each computation.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from dnnc.ir.graph import Graph
from dnnc.ir.graph.expand import expand
from dnnc.passes.base import PassContext, graphs


def decompose(graph: Graph, ctx: PassContext, keep: Collection[str] = ()) -> bool:
    """Expand every node with a decomposition, unless its op is in `keep`. New nodes get the old locations."""
    changed = False
    for g in graphs(graph):
        for n in g.nodes():
            stack = [n]
            while stack:
                m = stack.pop()
                if m.op.decompose is not None and m.op.name not in keep:
                    serial = m.op.decompose_serial if ctx.facts.serial_rows else None
                    stack += reversed(expand(g, m, serial and partial(serial, lanes=ctx.facts.lanes)))
                    changed = True
    return changed
