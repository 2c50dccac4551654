"""Parts of bodies that need not be there: what every iteration computes alike, and results that nobody reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dnnc.ir.autodiff.residuals import NEVER_AGAIN, nominal_bytes
from dnnc.ir.graph.core import Graph, Node, Value
from dnnc.ir.graph.expand import extract, prune, reached
from dnnc.ir.op import Trait


@dataclass(frozen=True)
class Hoisted:
    """A graph from captured values of a body, `given`, to values that the body takes as further inputs, `inputs`."""

    graph: Graph
    given: tuple[Value, ...]
    inputs: tuple[Value, ...]


def hoist(body: Graph, captured: Sequence[Value]) -> Hoisted:
    """Take what depends on captured values and constants alone out of a body, which changes in place."""
    invariant = invariants(body, captured)
    made = [o for n in body.nodes() for o in n.outputs if o in invariant]
    border = [v for v in made if body.is_output(v) or any(invariant.isdisjoint(u.outputs) for u in body.users(v))]
    source = reached(border, set(captured))
    given = tuple(v for v in captured if v in source)
    graph = extract(body, "invariant", given, border)
    inputs = []
    for v in border:
        x = body.add_input(v.name, v.type, v.locs)
        body.replace_all_uses(v, x)
        inputs.append(x)
    prune(body)
    return Hoisted(graph, given, tuple(inputs))


def invariants(body: Graph, captured: Sequence[Value]) -> set[Value]:
    """The results of a body's nodes that depend on captured values and constants alone.

    What would become larger is none of them, nor is what may fail or never end.
    """
    given, constants = set(captured), set(body.constants)
    made: set[Value] = set()
    for n in body.nodes():
        operands = [v for v in n.inputs if v is not None]
        fixed = all(v in given or v in made or v in constants for v in operands)
        moving = given.isdisjoint(operands) and made.isdisjoint(operands)
        if fixed and not moving and n.op.traits.isdisjoint(NEVER_AGAIN) and _size(n.outputs) <= 2 * _size(operands):
            made.update(n.outputs)
    return made


def _size(values: Sequence[Value]) -> int:
    return sum(nominal_bytes(v.type) for v in values)


def trim(g: Graph) -> None:
    """Take results that nobody reads from the loops and branches of a graph, and operands that they do not need."""
    for n in g.nodes(reverse=True):
        if Trait.CONTROL not in n.op.traits:
            continue
        if Trait.ITERATES in n.op.traits:
            _trim_loop(g, n)
        else:
            _trim_branch(g, n)
        for body in n.subgraphs():
            trim(body)


def _trim_loop(g: Graph, n: Node) -> None:
    a, body = n.attrs, n.attrs["body"]
    ends = n.inputs[1] is not None
    carried, scanned = a["carried"], a["scanned"]
    first = carried + ends
    live = [k for k, o in enumerate(n.outputs) if k < carried or o.uses or g.is_output(o)]
    results = [*body.outputs[:first], *(body.outputs[k + ends] for k in live[carried:])]
    source = reached(results, set(body.inputs))
    inputs = [v for k, v in enumerate(body.inputs) if k <= carried or v in source]
    if len(inputs) == len(body.inputs) and len(live) == len(n.outputs):
        return
    rows = [k for k in range(scanned) if body.inputs[1 + carried + k] in source]
    back = a["backward"] or (False,) * (scanned + len(n.outputs) - carried)
    flags = (*(back[k] for k in rows), *(back[scanned + k - carried] for k in live[carried:]))
    attrs = {**a, "body": extract(body, body.name, inputs, results), "scanned": len(rows), "backward": flags}
    operands = [*n.inputs[:2], *(x for x, v in zip(n.inputs[2:], body.inputs[1:]) if v in inputs)]
    g.redefine(n, operands, attrs, [n.outputs[k] for k in live])


def _trim_branch(g: Graph, n: Node) -> None:
    live = [k for k, o in enumerate(n.outputs) if o.uses or g.is_output(o)]
    bodies = {k: a for k, a in n.attrs.items() if isinstance(a, Graph)}
    results = {k: [body.outputs[j] for j in live] for k, body in bodies.items()}
    source = {k: reached(results[k], set(body.inputs)) for k, body in bodies.items()}
    used = [j for j in range(len(n.inputs) - 1) if any(body.inputs[j] in source[k] for k, body in bodies.items())]
    if len(live) == len(n.outputs) and len(used) == len(n.inputs) - 1:
        return
    attrs = {k: extract(body, body.name, [body.inputs[j] for j in used], results[k]) for k, body in bodies.items()}
    g.redefine(n, [n.inputs[0], *(n.inputs[1 + j] for j in used)], attrs, [n.outputs[k] for k in live])
