"""A number that several kernels read is computed in each of them: GPUs take longer to start a kernel than to do that.

r = cast(rate, to=f32); a = mul(x, r); b = mul(y, r)     ->     a = mul(x, cast(rate, to=f32)), and b likewise
"""

from __future__ import annotations

from dnnc.ir.graph import Graph, Node
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import Cost
from dnnc.passes.analysis.kinds import is_pointwise
from dnnc.passes.base import PassContext

MOST_READERS = 64


def scalars(graph: Graph, ctx: PassContext) -> bool:
    """Give each reader a node of its own; not where kernels are calls (`serial_rows`)."""
    if ctx.facts.serial_rows:
        return False
    changed = False
    for n in list(graph.nodes())[::-1]:
        readers = list(dict.fromkeys(u for u, _ in n.outputs[0].uses)) if is_number(n, graph) else []
        if not 1 < len(readers) <= MOST_READERS:
            continue
        for u in readers[1:]:
            again = Builder(graph, u, n.locs).op(n.op.name, *n.inputs, **n.attrs)
            for k, v in enumerate(u.inputs):
                if v is n.output:
                    u.set_input(k, again)
        changed = True
    return changed


def is_number(n: Node, graph: Graph) -> bool:
    """Does a node compute one element of others of one element, cheaply?"""
    values = (*n.outputs, *(v for v in n.inputs if v is not None))
    cheap = len(n.outputs) == 1 and is_pointwise(n) and n.op.cost < Cost.COSTLY
    return cheap and n.outputs[0] not in graph.outputs and all(v.type.size == 1 for v in values)
