"""Move constants and parameters that control flow captures into its bodies, for folding and packing.

y = loop(trips, None, h, w, body=b, carried=1)      ->      y = loop(trips, None, h, body=b', carried=1), w a constant
                                                            of b'
"""

from __future__ import annotations

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import Trait
from dnnc.passes.base import PassContext, graphs


def sink_constants(graph: Graph, ctx: PassContext) -> bool:
    """Move captured constants and parameters into bodies, outer bodies first, so that they go all the way in."""
    changed = False
    for g in reversed(list(graphs(graph))):
        for n in g.nodes():
            if Trait.CONTROL in n.op.traits:
                changed |= _sink(g, n)
    return changed


def _sink(g: Graph, n: Node) -> bool:
    first = n.op.deciding + n.attrs.get("carried", 0) + n.attrs.get("scanned", 0)
    found = [k for k in range(first, len(n.inputs)) if g.variance(n.inputs[k]).call_invariant]
    if not found:
        return False
    for body in n.subgraphs():
        for k in reversed(found):
            _replace(g, n.inputs[k], body, k - 1)
    m = Node(n.op, [v for k, v in enumerate(n.inputs) if k not in found], n.attrs, [o.type for o in n.outputs], n.locs)
    g.insert_before(m, n)
    names = [o.name for o in n.outputs]
    moved = {n.inputs[k] for k in found}
    for old, new in zip(n.outputs, m.outputs):
        g.replace_all_uses(old, new)
        new.locs = old.locs
    g.erase(n)
    for new, name in zip(m.outputs, names):
        g.rename(new, name)
    for v in moved:
        if v is not None and not v.uses and not g.is_output(v):
            if v in g.constants:
                g.erase_constant(v)
            else:
                g.erase_parameter(v)
    return True


def _replace(g: Graph, v: Value | None, body: Graph, k: int) -> None:
    """Input k of a body becomes a constant, or a parameter that holds what the outer one does."""
    assert v is not None
    old = body.inputs.pop(k)
    if v in g.constants:
        c = body.constant(g.constants[v], old.name, old.locs, v.type)
        g.share_digest(v, body, c)
    else:
        body.prologue = g.prologue
        c = body.parameter(g.parameters[v], v.type, old.name)
    body.replace_all_uses(old, c)
    body.release([old.name])
    body.rename(c, old.name)
