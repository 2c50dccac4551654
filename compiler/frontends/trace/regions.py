"""Graphs of traced values: of a function, and of the body of a loop or branch, which sees outer values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dnnc.array.devices import on_host
from dnnc.array.lazy import Call, Lazy
from dnnc.ir.errors import InputError
from dnnc.ir.graph import Graph, Node, Value

SMALL = 64  # elements up to which a body has its own copy of a constant


def is_outside(x: Lazy, before: int) -> bool:
    """True if a body's operand comes from outside: traced before call number `before`, large, or to have a gradient."""
    if x.call is None:
        return x.data is None or bool(x.tracked) or x.data.size > SMALL
    return x.call.number <= before if x.traced else x.call.heavy


class Region:
    """A graph under construction. `before`: number of the last call before a body; None for a function."""

    def __init__(self, name: str, inputs: Sequence[Lazy], names: Sequence[str], before: int | None = None) -> None:
        self.graph, self.before = Graph(name), before
        self.captured: list[Lazy] = []
        self.tracked = False  # does it read, as a constant, an array that depends on one that requires a gradient?
        self.known: dict[Any, Value] = {}
        for x, n in zip(inputs, names):
            self.known[key_of(x)] = self.graph.add_input(n, x.type)

    def finish(self, outputs: Sequence[Lazy]) -> Graph:
        """The graph that gives these values. Its nodes stand in the order in which they were traced: a gradient's parts
        that free memory come where the function's derivative makes them, and not where results are listed.
        """
        calls: dict[Call, None] = {}
        seen = set(self.known)
        stack = list(reversed(outputs))
        while stack:
            x = stack[-1]
            todo = [] if key_of(x) in seen else self._missing(x, seen)
            if todo:
                stack.extend(reversed(todo))
                continue
            stack.pop()
            if key_of(x) not in seen:
                seen.add(key_of(x))
                if x.call is not None and key_of(x) not in self.known:
                    calls.setdefault(x.call)
        for call in sorted(calls, key=lambda c: c.number):  # stable: what is not traced comes first, in order
            self._add(call)
        self.graph.outputs = [self.known[key_of(x)] for x in outputs]
        return self.graph

    def _missing(self, x: Lazy, seen: set[Any]) -> list[Lazy]:
        """The operands of a value that are to be entered first. Captures and constants are entered at once."""
        if self.before is not None and is_outside(x, self.before):
            self.capture(x)
            return []
        if x.call is None:
            if x.data is None:
                raise InputError(
                    "an array of a function whose trace has ended is used; give results back by return, not through "
                    "variables around it"
                )
            self.known[key_of(x)] = self.graph.constant(on_host(x.data))
            self.tracked = self.tracked or bool(x.tracked)
            return []
        return [i for i in x.call.inputs if i is not None and key_of(i) not in seen]

    def _add(self, call: Call) -> None:
        inputs = [None if i is None else self.known[key_of(i)] for i in call.inputs]
        node = self.graph.append(Node(call.op, inputs, dict(call.attrs), call.types, call.locs))
        for k, v in enumerate(node.outputs):
            self.known[id(call), k] = v

    def capture(self, x: Lazy) -> None:
        """Read a value from around as a further input."""
        if key_of(x) not in self.known:
            self.captured.append(x)
            self.known[key_of(x)] = self.graph.add_input(f"outer{len(self.captured)}", x.type)

    def share(self, wanted: Sequence[Lazy]) -> None:
        """Let the captured values be these, in this order: all that any branch captures."""
        own = len(self.graph.inputs) - len(self.captured)
        for x in wanted:
            self.capture(x)
        self.graph.inputs[own:] = [self.known[key_of(x)] for x in wanted]
        self.captured = list(wanted)


def key_of(x: Lazy) -> Any:
    """What tells a value from others: of a call, it is the same for all objects that stand for one result."""
    return id(x) if x.call is None else (id(x.call), x.index)
