"""Replace ops that are defined by other ops until only those with a tensor expression, or host ops, are left.

    y = squeeze(x, axes=(0,))   ->   y = reshape(x, shape=(5,))

Where cores walk rows (CPUs), some ops have another definition of the same meaning (`decompose_serial`).

Runs ahead of the algebraic passes, so that these know one spelling of each computation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from dnnc.ir.graph import Graph, Node, union
from dnnc.ir.graph.builder import Builder
from dnnc.passes.base import PassContext, graphs
from dnnc.passes.rewrite import between


def decompose(graph: Graph, ctx: PassContext, keep: Collection[str] = ()) -> bool:
    """Expand every node with a decomposition, unless its op is in `keep`. New nodes get the old locations."""
    changed = False
    for g in graphs(graph):
        for n in g.nodes():
            stack = [n]
            while stack:
                m = stack.pop()
                if m.op.decompose is not None and m.op.name not in keep:
                    stack += reversed(expand(g, m, m.op.decompose_serial if ctx.facts.serial_rows else None))
                    changed = True
    return changed


def expand(g: Graph, n: Node, definition: Callable[..., Any] | None = None) -> list[Node]:
    """Replace one node by its op's decomposition, or by another definition; returns the new nodes, in order."""
    definition = definition or n.op.decompose
    assert definition is not None
    before = n.prev
    made = definition(Builder(g, n, n.locs), *n.inputs, **n.attrs)
    new = between(before, n)
    for o, v in zip(n.outputs, made if isinstance(made, (tuple, list)) else (made,)):
        name = o.name
        g.replace_all_uses(o, v)
        if v.node in new:
            g.rename(o, "")
            g.rename(v, name)
            v.locs = union(v.locs, n.locs)
    g.erase(n)
    return new
