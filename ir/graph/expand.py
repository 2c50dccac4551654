"""Put nodes in the place of others: decompositions, and graphs inside of graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Graph, Node, Value, union


def between(before: Node | None, n: Node) -> list[Node]:
    """The nodes that stand after `before` (the start of the graph if None) and in front of n, in order."""
    out = []
    at = n.prev
    while at is not None and at is not before:
        out.append(at)
        at = at.prev
    return out[::-1]


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


def inline(b: Builder, g: Graph, operands: Sequence[Value | None]) -> list[Value]:
    """Add the nodes of a closed graph for these operands; its outputs there."""
    env: dict[Value | None, Value | None] = {None: None, **dict(zip(g.inputs, operands))}
    for v, array in g.constants.items():
        env[v] = b.graph.constant(array, locs=v.locs)
    for n in g.nodes():
        b.locs = n.locs or b.locs
        attrs = {k: a.copy() if isinstance(a, Graph) else a for k, a in n.attrs.items()}
        made = b.node(n.op, [env[v] for v in n.inputs], attrs)
        for o, result in zip(n.outputs, made.outputs):
            env[o] = result
    return [found for o in g.outputs if (found := env[o]) is not None]


def prune(g: Graph) -> None:
    """Erase the nodes and constants that no output needs."""
    kept = set(g.outputs)
    for n in g.nodes(reverse=True):
        if not any(o.uses or o in kept for o in n.outputs):
            g.erase(n)
    for v in list(g.constants):
        if not v.uses and v not in kept:
            g.erase_constant(v)


def reached(wanted: Iterable[Value], stop: Collection[Value]) -> set[Value]:
    """The values from which some are computed, themselves included; those in `stop` count as given."""
    found: set[Value] = set()
    stack = list(wanted)
    while stack:
        v = stack.pop()
        if v not in found:
            found.add(v)
            if v.node is not None and v not in stop:
                stack += [x for x in v.node.inputs if x is not None]
    return found


def extract(g: Graph, name: str, given: Sequence[Value], wanted: Sequence[Value]) -> Graph:
    """The part of a graph that computes values from others, as a graph of its own: `given` are its inputs."""
    new = Graph(name)
    env: dict[Value | None, Value | None] = {None: None}
    for v in given:
        env[v] = new.add_input(v.name, v.type, v.locs)
    every = reached(wanted, set(given))
    for v in [v for v in g.constants if v in every and v not in env]:
        c = env[v] = new.constant(g.constants[v], v.name, v.locs, v.type)
        g.share_digest(v, new, c)
    for n in g.nodes():
        if all(o in env or o not in every for o in n.outputs):
            continue
        attrs = {k: a.copy() if isinstance(a, Graph) else a for k, a in n.attrs.items()}
        types, names = [o.type for o in n.outputs], [o.name for o in n.outputs]
        m = new.append(Node(n.op, [env.get(v) for v in n.inputs], attrs, types, n.locs, names))
        for o, p in zip(n.outputs, m.outputs):
            env.setdefault(o, p)
    new.outputs = [found for v in wanted if (found := env[v]) is not None]
    return new
