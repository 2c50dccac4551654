"""What every iteration of a loop computes alike is computed once, in front of the loop.

loop(None, None, h, w, body=(h, w) -> matmul(h, pack(w)))  ->  loop(None, None, h, pack(w), body=(h, p) -> matmul(h, p))

Weights of a training step are operands of its loops, no constants: without this each iteration packs them again.
"""

from __future__ import annotations

from dnnc.ir.autodiff.invariants import invariants
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import Trait
from dnnc.passes.base import PassContext, graphs


def hoist_invariants(graph: Graph, ctx: PassContext) -> bool:
    """Move nodes that depend on captured values alone out of bodies, inner ones first, so that they go all the way."""
    return any([_hoist(g, n) for g in list(graphs(graph)) for n in list(g.nodes()) if Trait.ITERATES in n.op.traits])


def captured(n: Node) -> list[Value]:
    """The inputs of a loop's body that are the same in all iterations."""
    body: Graph = n.attrs["body"]
    return body.inputs[1 + n.attrs["carried"] + n.attrs["scanned"] :]


def _hoist(g: Graph, n: Node) -> bool:
    body: Graph = n.attrs["body"]
    given = captured(n)
    fixed = invariants(body, given)
    moved = [m for m in body.nodes() if not fixed.isdisjoint(m.outputs)]
    if not moved:
        return False
    outside: dict[Value | None, Value | None] = {None: None, **dict(zip(body.inputs[1:], n.inputs[2:]))}
    for c in body.constants:
        if any(m in moved for m in body.users(c)):
            made = outside[c] = g.constant(body.constants[c], c.name, c.locs, c.type)
            body.share_digest(c, g, made)
    operands, names = list(n.inputs), {}
    for m in moved:
        copy = Node(m.op, [outside[v] for v in m.inputs], m.attrs, [o.type for o in m.outputs], m.locs)
        g.insert_before(copy, n)
        for o, p in zip(m.outputs, copy.outputs):
            p.locs = o.locs
            outside[o] = p
            if body.is_output(o) or any(u not in moved for u in body.users(o)):
                taken = body.add_input(o.name, o.type, o.locs)
                body.replace_all_uses(o, taken, keep=moved)
                operands.append(p)
                names[taken] = o.name
    for m in reversed(moved):
        body.erase(m)
    for v, name in names.items():
        body.rename(v, name)
    unused = [v for v in given if not v.uses and not body.is_output(v)]
    operands = [v for k, v in enumerate(operands) if k < 2 or body.inputs[k - 1] not in unused]
    body.inputs = [v for v in body.inputs if v not in unused]
    body.release([v.name for v in unused])
    for c in [c for c in body.constants if not c.uses and not body.is_output(c)]:
        body.erase_constant(c)
    g.redefine(n, operands, n.attrs, n.outputs)
    return True
