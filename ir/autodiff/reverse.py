"""Reverse-mode differentiation of a graph: one walk from the last node to the first.

In: a graph, and cotangents of some of its values. Out: cotangents of others, which nodes at the end of the graph
compute. Each node goes by the rule in its op's record (`vjp`); without one, an element-wise op goes by the derivative
of its scalar expression, an op with a decomposition is expanded first, and any other by what its tensor expression
implies.

It runs on the graph as the model has it, ahead of all passes: these then see ordinary nodes, and nothing is donated,
laid out or fused yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dnnc.ir.autodiff import elementwise, stages
from dnnc.ir.errors import DnncError, GradientError, Loc, derivative, locations
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Graph, Node, Value
from dnnc.ir.graph.expand import expand
from dnnc.ir.op import Trait
from dnnc.ir.types import TensorType


def pullback(
    g: Graph, cotangents: Mapping[Value, Value], wanted: Sequence[Value], locs: tuple[Loc, ...] = ()
) -> list[Value | None]:
    """Add the nodes that compute cotangents of `wanted`, at the end of the graph.

    Args:
        g: changed in place. Nodes that are defined by other ops and have no rule become those ops.
        cotangents: for values of floats a value of the same type each.
        wanted: float values: inputs, constants, parameters, or results of nodes.
        locs: where the function comes from; what belongs to no node of it gets these locations.

    Returns:
        For each value its cotangent; None where no float path leads from it to a value with a cotangent.

    Raises:
        GradientError: an op on the way has no derivative; names the node.
    """
    b = Builder(g, locs=derivative(locs))
    outputs = g.outputs
    g.outputs = [*outputs, *cotangents]  # so that they follow where nodes are expanded
    active = _active(g, wanted)
    parts: dict[Value, list[Value]] = {}
    for v, c in zip(g.outputs[len(outputs) :], cotangents.values()):
        parts.setdefault(v, []).append(c)
    g.outputs = g.outputs[: len(outputs)]
    keep = set(wanted)
    total: dict[Value, Value | None] = {}

    def taken(v: Value) -> Value | None:
        """The cotangent of a value all of whose readers are behind."""
        if v in parts:
            total[v] = _sum(b, parts.pop(v))
        return total.get(v) if v in keep else total.pop(v, None)

    for n in reversed([n for n in g.nodes() if not active.isdisjoint(n.outputs)]):
        if active.isdisjoint(v for v in n.inputs if v is not None):
            continue  # a wanted value itself
        given = [taken(o) for o in n.outputs]
        if all(c is None for c in given):
            continue
        b.locs = derivative(n.locs)
        needed = [k for k, v in enumerate(n.inputs) if v is not None and v in active]
        operands = list(n.inputs)  # a rule may replace the node
        for k, c in node_vjp(b, n, given, needed).items():
            operand = operands[k]
            assert operand is not None
            if c.type != operand.type:
                raise GradientError(f"the rule of {n.op.name} gives the cotangent {c!r} of the operand {operand!r}")
            parts.setdefault(operand, []).append(c)
    b.locs = derivative(locs)
    return [taken(v) for v in wanted]


def node_vjp(b: Builder, n: Node, cotangents: Sequence[Value | None], needed: Sequence[int]) -> Mapping[int, Value]:
    """The cotangents of a node's operands `needed`, by position; an operand without one has the cotangent zero."""
    try:
        if n.op.vjp is not None:
            found = n.op.vjp(b, n, cotangents, needed)  # a rule may give more
            return {k: c for k, c in found.items() if k in needed}
        plain = Trait.ELEMENTWISE in n.op.traits and Trait.CUSTOM not in n.op.traits  # for operands of any shapes
        if plain and n.op.compute is not None:
            made = elementwise.vjp(b, n, cotangents, needed)
            if made is not None:
                return made
        return derived(b, n, cotangents, needed)
    except GradientError as e:
        if not getattr(e, "located", False):
            e.args = (f"{n.op.name}{locations(n.locs)}: {e.args[0]}", *e.args[1:])
            e.located = True  # type: ignore[attr-defined]
        raise
    except DnncError as e:
        raise type(e)(f"the gradient of {n.op.name}{locations(n.locs)}: {e}") from e


def derived(b: Builder, n: Node, cotangents: Sequence[Value | None], needed: Sequence[int]) -> Mapping[int, Value]:
    """The rule that an op's tensor expression implies; see `dnnc.ir.autodiff.stages`."""
    if n.op.compute is None:
        raise GradientError("the op has no derivative; compute it outside of the function, or give it a custom_vjp")
    types = tuple(None if v is None else v.type for v in n.inputs)
    live = tuple(c is not None for c in cotangents)
    plan = stages.plan(n.op, types, tuple(o.type for o in n.outputs), live, tuple(needed), tuple(n.attrs.items()))
    values: list[Value | None] = [*n.inputs, *n.outputs, *cotangents]
    for step in plan.steps:
        made = b.node(step.op, [values[k] for k in step.reads], dict(step.sizes))
        values.append(made.output)
    found = {k: values[number] for k, number in plan.cotangents.items()}
    return {k: v for k, v in found.items() if v is not None}


def _active(g: Graph, wanted: Sequence[Value]) -> set[Value]:
    """The float values that depend on some; nodes in between that only have a decomposition are expanded."""
    active = set(wanted)
    stack = list(g.nodes())[::-1]
    while stack:
        n = stack.pop()
        if active.isdisjoint(v for v in n.inputs if v is not None):
            continue
        if n.op.decompose is not None and n.op.vjp is None:
            stack += reversed(expand(g, n))
            continue
        active.update(o for o in n.outputs if o.type.dtype.is_float)
    return active


def _sum(b: Builder, parts: Sequence[Value]) -> Value:
    """The sum as a balanced tree, which rounds less than a chain."""
    while len(parts) > 1:
        parts = [b.add(*parts[k : k + 2]) if k + 1 < len(parts) else parts[k] for k in range(0, len(parts), 2)]
    return parts[0]


def zeros(b: Builder, t: TensorType) -> Value:
    """A value of zeros."""
    return b.expand(b.constant(0.0, dtype=t.dtype), shape=t.shape)  # type: ignore[no-any-return]
