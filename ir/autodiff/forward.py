"""Forward-mode differentiation of a graph: one walk in the order of its nodes.

In: a graph, and tangents of some of its values. Out: tangents of others. Each node goes by the rule in its op's record
(`jvp`); without one, by the transpose of its vector-Jacobian product: that is linear in the cotangents, so its own
pullback maps tangents of operands to tangents of results.

    y = mul(x, w): cot x = mul(u, w)   ->   tangent y = mul(tangent x, w)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dnnc.ir.autodiff.reverse import node_vjp, pullback, zeros
from dnnc.ir.errors import Loc, derivative
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Graph, Node, Value
from dnnc.ir.graph.expand import expand, inline, prune


def pushforward(
    g: Graph, tangents: Mapping[Value, Value], wanted: Sequence[Value], locs: tuple[Loc, ...] = ()
) -> list[Value | None]:
    """Add the nodes that compute tangents of `wanted`, at the end of the graph.

    Args:
        g: changed in place. Nodes that are defined by other ops and have no rule become those ops.
        tangents: for values of floats a value of the same type each.
        wanted: float values that may depend on these.
        locs: where the function comes from; what belongs to no node of it gets these locations.

    Returns:
        For each value its tangent; None where no float path leads to it.

    Raises:
        GradientError: an op on the way has no derivative; names the node.
    """
    outputs = g.outputs
    g.outputs = [*outputs, *wanted]  # so that they follow where nodes are expanded
    b = Builder(g, locs=derivative(locs))
    have: dict[Value, Value] = dict(tangents)
    stack = list(g.nodes())[::-1]
    while stack:
        n = stack.pop()
        if not any(v in have for v in n.inputs if v is not None):
            continue
        if n.op.decompose is not None and n.op.vjp is None and n.op.jvp is None:
            stack += reversed(expand(g, n))
            continue
        b.locs = derivative(n.locs)
        given = [None if v is None else have.get(v) for v in n.inputs]
        results = list(n.outputs)  # a rule may replace the node
        made = n.op.jvp(b, n, given) if n.op.jvp is not None else _by_transpose(b, n, given)
        for o, t in zip(results, made):
            if t is not None:
                have[o] = t
    found = g.outputs[len(outputs) :]
    g.outputs = g.outputs[: len(outputs)]
    return [have.get(v) for v in found]


def _by_transpose(b: Builder, n: Node, tangents: Sequence[Value | None]) -> list[Value | None]:
    """The tangents of a node's float results, by the transpose of its pullback."""
    g = Graph(n.op.name)
    inner = Builder(g, locs=derivative(n.locs))
    operands = [None if v is None else g.add_input(f"x{k}", v.type) for k, v in enumerate(n.inputs)]
    again = inner.node(n.op, operands, dict(n.attrs))
    results = list(again.outputs)
    floats = [k for k, o in enumerate(results) if o.type.dtype.is_float]
    seeds = {k: g.add_input(f"u{k}", results[k].type) for k in floats}
    given = {k: g.add_input(f"t{k}", t.type) for k, t in enumerate(tangents) if t is not None}
    cotangents = node_vjp(inner, again, [seeds.get(k) for k in range(len(results))], list(given))
    if not cotangents:
        return [None] * len(n.outputs)
    meeting: dict[Value, Value] = {}
    for k, c in cotangents.items():  # operands may share a cotangent
        meeting[c] = inner.add(meeting[c], given[k]) if c in meeting else given[k]
    found = pullback(g, meeting, list(seeds.values()), n.locs)
    g.outputs = [v for v in found if v is not None]
    prune(g)
    read = {*g.outputs, *(v for m in g.nodes() for v in m.inputs)}
    bound: dict[Value, Value | None] = {x: v for x, v in zip(operands, n.inputs) if x is not None}
    bound |= {v: tangents[k] for k, v in given.items()}
    bound |= {v: zeros(b, v.type) if v in read else None for v in seeds.values()}  # what is linear reads them not
    values = iter(inline(b, g, [bound[v] for v in g.inputs]))
    tangent = {k: next(values) for k, v in zip(seeds, found) if v is not None}
    return [tangent.get(k) for k in range(len(n.outputs))]
