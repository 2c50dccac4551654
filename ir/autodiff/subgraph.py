"""A part of a graph as a graph of its own: the nodes between some values and those that depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dnnc.ir.graph.core import Graph, Node, Value

SMALL = 16  # elements of a constant that is copied; a larger one is captured


@dataclass(frozen=True)
class Part:
    """A graph whose first inputs stand for given values, the others for `captured` ones, which lie outside of it."""

    graph: Graph
    captured: tuple[Value, ...]


def part_between(graph: Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> Part:
    """Copy the nodes that outputs need and that depend on inputs; all else that these nodes read is captured.

    Args:
        graph: the innermost one; the values may also be those of graphs around it.
        inputs: different values, at which the walk ends: what they are made of does not matter.
        outputs: any values.
    """
    part = Graph(graph.name)
    known = {v: part.add_input(v.name, v.type, v.locs) for v in inputs}
    captured: list[Value] = []

    def inside(v: Value) -> Value:
        if v not in known:
            array = graph.constants.get(v)
            if array is not None and array.size <= SMALL:
                known[v] = part.constant(array, v.name, v.locs, v.type)
            else:
                known[v] = part.add_input(v.name, v.type, v.locs)
                captured.append(v)
        return known[v]

    for n in _dependent(inputs, outputs):
        attrs = {k: a.copy() if isinstance(a, Graph) else a for k, a in n.attrs.items()}
        types, names = [o.type for o in n.outputs], [o.name for o in n.outputs]
        operands = [None if v is None else inside(v) for v in n.inputs]
        made = part.append(Node(n.op, operands, attrs, types, n.locs, names))
        for o, p in zip(n.outputs, made.outputs):
            p.locs = o.locs
            known.setdefault(o, p)  # an input may be one of several results
    part.outputs = [inside(v) for v in outputs]
    return Part(part, tuple(captured))


def _dependent(inputs: Sequence[Value], outputs: Sequence[Value]) -> list[Node]:
    """The nodes on paths from inputs to outputs, producers first."""
    ends = set(inputs)
    depends: dict[Node, bool] = {}
    order: list[Node] = []
    stack = [v.node for v in outputs if v.node is not None and v not in ends]
    while stack:
        n = stack[-1]
        if n in depends:
            stack.pop()
            continue
        makers = [v.node for v in n.inputs if v is not None and v.node is not None and v not in ends]
        todo = [m for m in makers if m not in depends]
        if todo:
            stack += todo
            continue
        stack.pop()
        depends[n] = any(v in ends for v in n.inputs) or any(depends[m] for m in makers)
        if depends[n]:
            order.append(n)
    return order
