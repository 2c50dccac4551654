"""Compute a cheap value once for each kernel that reads it, where these kernels can read its operand just as well.

    d = sub(x, m); v = reduce_mean(mul(d, d)); y = mul(d, s(v))
    ->
    d1 = sub(x, m); v = reduce_mean(mul(d1, d1)); d2 = sub(x, m); y = mul(d2, s(v))

A value with readers in several kernels is one of its own: it is written, and read by each of them. If it is made of one
array of its size that lies in memory anyway, and of numbers, its readers may read that array: no kernel reads more, and
one is gone. The plan of fusion says which values that concerns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dnnc.ir.autodiff.residuals import is_cheap, nominal_bytes
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import Trait
from dnnc.passes.base import PassContext, is_pure
from dnnc.passes.planning.fuse import Group, plan_fusion

LEAST = 1 << 16  # bytes of a value that is worth it
CHAIN = 6  # nodes that are repeated at most
SMALL = 8  # operands with so many times fewer bytes than the value are numbers beside it


def repeat_shared(graph: Graph, ctx: PassContext) -> bool:
    """Give readers in other kernels than a value's copies of what is cheap. Returns whether there was such a value."""
    facts = ctx.facts
    plan = plan_fusion(graph, True, facts.align, facts.fuses_norm, (), facts.serial_rows, facts.stores_several)
    kernel = {n: k for k, g in enumerate(plan.groups) for n in g.nodes}
    order = {n: k for k, n in enumerate(graph.nodes())}
    overwritten = {graph.inputs[j] for j in graph.donated.values()}
    stored = {v for v in graph.inputs if v not in overwritten} | {v for g in plan.groups for v in g.outputs}
    stored |= graph.constants.keys() | graph.parameters.keys()
    changed = False
    for k, g in enumerate(plan.groups):
        for v in g.outputs:
            chain = _chain(v, g) if v not in graph.outputs and nominal_bytes(v.type) >= LEAST else []
            outside = [(u, i) for u, i in v.uses if kernel.get(u) != k]
            if len(v.uses) < 2 or not chain or not all(_takes(u, v) for u, _ in outside):
                continue
            if not _reads_one(v, chain, stored):
                continue
            copies: dict[int, Value] = {}
            for u, i in sorted(outside, key=lambda use: order[use[0]]):
                if kernel[u] not in copies:
                    copies[kernel[u]] = _copied(graph, chain, u)
                u.set_input(i, copies[kernel[u]])
            stored.discard(v)
            changed = True
            for n in reversed(chain):
                if not n.output.uses:
                    graph.erase(n)
    return changed


def _chain(v: Value, g: Group) -> list[Node]:
    """The nodes of a group that compute a value, in order; none where they are not cheap."""
    inside, found, todo = set(g.nodes), set[Node](), [v.node]
    while todo:
        n = todo.pop()
        if n not in inside or n in found:
            continue
        if len(n.outputs) != 1 or Trait.ELEMENTWISE not in n.op.traits or not is_cheap(n) or not is_pure(n):
            return []
        found.add(n)
        todo += [x.node for x in n.inputs if x is not None]
    return [n for n in g.nodes if n in found] if len(found) <= CHAIN else []


def _reads_one(v: Value, chain: Sequence[Node], stored: Collection[Value]) -> bool:
    """Is a value made of one array of its size that lies in memory, and of small ones?"""
    inside = {n.output for n in chain}
    operands = {x for n in chain for x in n.inputs if x is not None and x not in inside}
    most = nominal_bytes(v.type)
    large = [x for x in operands if nominal_bytes(x.type) * SMALL > most]
    in_memory = all(x in stored for x in operands)
    return in_memory and len(large) <= 1 and all(nominal_bytes(x.type) <= most for x in large)


def _takes(u: Node, v: Value) -> bool:
    """Does a reader's kernel compute the value where it reads it?"""
    if Trait.ELEMENTWISE in u.op.traits:
        return len(u.outputs) == 1 and u.output.type.shape == v.type.shape
    return Trait.ACCUMULATES in u.op.traits and u.op.reduced is not None and Trait.ROWWISE not in u.op.traits


def _copied(graph: Graph, chain: Sequence[Node], before: Node) -> Value:
    env: dict[Value, Value] = {}
    for n in chain:
        inputs = [None if x is None else env.get(x, x) for x in n.inputs]
        made = graph.insert_before(Node(n.op, inputs, n.attrs, [n.output.type], n.locs), before)
        env[n.output] = made.output
    return env[chain[-1].output]
