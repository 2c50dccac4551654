"""Shrinks a failing graph: drops outputs, replaces nodes by inputs, while it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.interp import run

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Failure:
    """A graph that goes wrong, how it was compiled, and what happened."""

    graph: Graph
    inputs: list[Array]
    options: dict[str, Any]
    message: str

    def __str__(self) -> str:
        given = ", ".join(f"{k}={v!r}" for k, v in self.options.items())
        return f"{self.message}\ncompiled with {given}\n{self.graph}"


def shrink(failure: Failure, check_graph: Callable[[Graph, Sequence[Array]], str | None]) -> Failure:
    """Drop outputs, then replace nodes by inputs that hold what they made, as long as it fails in the same way."""
    kind = _kind(failure.message)
    again = True
    while again:
        again = False
        for g, inputs in _smaller(failure):
            message = check_graph(g, inputs)
            if message is not None and _kind(message) == kind:
                failure = Failure(g, inputs, failure.options, message)
                again = True
                break
    return failure


def _kind(message: str) -> str:
    return message.split(":")[0]


def _smaller(failure: Failure) -> Iterator[tuple[Graph, list[Array]]]:
    """Graphs with one output, or with one node less."""
    g, inputs = failure.graph, failure.inputs
    if len(g.outputs) > 1:
        for k in range(len(g.outputs)):
            yield _rebuilt(g, inputs, [g.outputs[k]], {})
        for k in range(len(g.outputs)):
            yield _rebuilt(g, inputs, [v for j, v in enumerate(g.outputs) if j != k], {})
    nodes = list(g.nodes())
    held = dict(zip([v for n in nodes for v in n.outputs], _all_values(g, inputs)))
    for n in nodes:  # an input in its place
        if len(nodes) > 1:
            yield _rebuilt(g, inputs, g.outputs, {v: held[v] for v in n.outputs})
    for n in reversed(nodes):  # an output that ends one node earlier
        if n.outputs[0] in g.outputs:
            for v in n.inputs:
                if v is not None and v.node is not None:
                    yield _rebuilt(g, inputs, [v if o is n.outputs[0] else o for o in g.outputs], {})


def _all_values(g: Graph, inputs: Sequence[Array]) -> list[Array]:
    whole = g.copy()
    whole.outputs = [v for n in whole.nodes() for v in n.outputs]
    return run(whole, list(inputs))


def _rebuilt(
    g: Graph, inputs: Sequence[Array], outputs: Sequence[Value], given: dict[Value, Array]
) -> tuple[Graph, list[Array]]:
    """The part of a graph that these outputs need, with some values as inputs."""
    needed: set[Value] = set()
    stack = list(outputs)
    while stack:
        v = stack.pop()
        if v not in needed:
            needed.add(v)
            if v.node is not None and v not in given:
                stack += [x for x in v.node.inputs if x is not None]
    new = Graph(g.name)
    env: dict[Value, Value] = {}
    arrays: list[Array] = []
    for v, a in [*zip(g.inputs, inputs), *given.items()]:
        if v in needed:
            env[v] = new.add_input(v.name, v.type)
            arrays.append(a)
    for v, a in g.constants.items():
        if v in needed:
            env[v] = new.constant(a, v.name, v.locs, v.type)
    for n in g.nodes():
        if any(v in needed and v not in env for v in n.outputs):
            operands = [None if v is None else env[v] for v in n.inputs]
            made = new.append(Node(n.op, operands, n.attrs, [o.type for o in n.outputs], n.locs))
            env.update((v, m) for v, m in zip(n.outputs, made.outputs) if v not in env)
    new.outputs = [env[v] for v in outputs]
    return new, arrays
