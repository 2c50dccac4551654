"""Batching: a computation on one row becomes one on a stack of rows, in traces and in loop bodies.

In: lazy values that a function made of placeholders. Out: the same of stacks. What depends on no stack stays as it is;
what does is a stack, each result of an op whenever one of the op's operands is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.array.lazy import Lazy, leaf, placeholder
from dnnc.frontends.trace import batch_control
from dnnc.frontends.trace.batch import Batch, Operand
from dnnc.frontends.trace.control import values as control_values
from dnnc.frontends.trace.regions import Region, key_of
from dnnc.ir.batching import rule_of
from dnnc.ir.errors import DnncError, Loc, locations
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.attributes import complete
from dnnc.ir.graph.builder import Builder, infer
from dnnc.ir.op import OpDef, Trait
from dnnc.ir.types import TensorType


@dataclass(frozen=True)
class Batcher:
    """Runs ops on stacks of `rows` rows."""

    rows: Any

    # --- one op -------------------------------------------------------------------------------------------------------

    def node(self, op: OpDef, xs: Sequence[Operand], attrs: dict[str, Any], locs: tuple[Loc, ...]) -> list[Operand]:
        """The results of an op on operands of which some are stacks. Errors say which op it is, and where."""
        if not any(x.stack for x in xs):
            if Trait.CONTROL in op.traits:
                return [Operand(v, False) for v in control_values(op.name, [x.value for x in xs], **attrs)]
            return [Operand(v, False) for v in Batch(self.rows, locs).all(op, *(x.value for x in xs), **attrs)]
        try:
            return [Operand(v, True) for v in self.stacks(op, xs, complete(op, attrs), locs)]
        except DnncError as e:
            if not getattr(e, "batched", False) and e.args and isinstance(e.args[0], str):
                e.args = (f"{e.args[0]}{locations(locs)}, an op of a function under vmap", *e.args[1:])
                e.batched = True  # type: ignore[attr-defined]  # bodies of loops come through here again
            raise

    def stacks(self, op: OpDef, xs: Sequence[Operand], attrs: dict[str, Any], locs: tuple[Loc, ...]) -> Sequence[Lazy]:
        b = Batch(self.rows, locs)
        if self.rows == 0:
            types = infer(op, [None if x.value is None else Value("", x.row) for x in xs], attrs, locs)
            return [leaf(np.empty((0, *t.shape), t.dtype.numpy), None) for t in types]
        if op.name == "cond":
            return batch_control.cond(self, b, op, xs, attrs)
        if op.name == "loop":
            return batch_control.loop(self, b, op, xs, attrs)
        if any(isinstance(a, Graph) for a in attrs.values()):
            return batch_control.function(self, b, op, xs, attrs)
        rule = rule_of(op)
        if rule is not None:
            return rule(b, op, xs, attrs)
        return [
            b.stack(y)
            for y in self.graph(
                decomposition(op, [None if x.value is None else x.row for x in xs], attrs, locs),
                [x for x in xs if x.value],
            )
        ]

    # --- what a trace has made ----------------------------------------------------------------------------------------

    def values(self, wanted: Sequence[Lazy], known: dict[Any, Operand], before: int) -> list[Operand]:
        """Values of a trace, which began after call number `before`, with stacks for its placeholders; see `key_of`."""
        todo = list(reversed(wanted))
        while todo:
            x = todo[-1]
            if key_of(x) in known:
                todo.pop()
            elif x.call is None or not x.traced or x.call.number <= before:
                known[key_of(x)] = Operand(x, False)
            else:
                missing = [i for i in x.call.inputs if i is not None and key_of(i) not in known]
                todo += reversed(missing)
                if not missing:
                    self._again(x, known)
        return [known[key_of(x)] for x in wanted]

    def _again(self, x: Lazy, known: dict[Any, Operand]) -> None:
        call = x.call
        assert call is not None
        xs = [Operand(None, False) if i is None else known[key_of(i)] for i in call.inputs]
        changed = any(y.value is not i for y, i in zip(xs, call.inputs))
        if not changed and Trait.CONTROL not in call.op.traits:
            known[key_of(x)] = Operand(x, False)
            return
        for k, y in enumerate(self.node(call.op, xs, call.attrs, call.locs)):
            known[id(call), k] = y

    # --- graphs -------------------------------------------------------------------------------------------------------

    def graph(self, g: Graph, inputs: Sequence[Operand]) -> list[Operand]:
        """The outputs of a graph for these inputs, as values of their own."""
        env: dict[Value, Operand] = dict(zip(g.inputs, inputs))
        for v, a in g.constants.items():
            env[v] = Operand(leaf(a, None), False)
        for n in g.nodes():
            made = self.node(n.op, [Operand(None, False) if v is None else env[v] for v in n.inputs], n.attrs, n.locs)
            env.update(zip(n.outputs, made))
        return [env[v] for v in g.outputs]

    def body(self, g: Graph, which: Sequence[bool], want: Sequence[bool]) -> Graph:
        """A body whose inputs are stacks where `which` says so, and whose outputs where `want` does."""
        given = [placeholder(self.stacked(v.type) if w else v.type) for v, w in zip(g.inputs, which)]
        made = self.graph(g, [Operand(x, w) for x, w in zip(given, which)])
        b = Batch(self.rows)
        return Region(g.name, given, [v.name for v in g.inputs]).finish(
            [b.stack(y) if w else y.given for y, w in zip(made, want)]
        )

    def stacked(self, t: TensorType) -> TensorType:
        return TensorType(t.dtype, (self.rows, *t.shape))


def decomposition(op: OpDef, types: Sequence[TensorType | None], attrs: dict[str, Any], locs: tuple[Loc, ...]) -> Graph:
    """An op on one row in terms of others; absent operands are no inputs."""
    assert op.decompose is not None
    g = Graph(op.name)
    given = [None if t is None else g.add_input(f"x{k}", t) for k, t in enumerate(types)]
    made = op.decompose(Builder(g, locs=locs), *given, **attrs)
    g.outputs = list(made) if isinstance(made, (tuple, list)) else [made]
    return g
