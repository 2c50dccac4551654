"""Move what depends on parameters alone into the prologue, which runs when parameters change and not in each call.

    y = matmul(x, transpose(w))   ->   y = matmul(x, w_0),   prologue: w_0 = transpose(w)

For parameters this is what folding is for constants, but nothing is known of their contents: no rule may ask for them,
so a program is right for whatever they are later. The passes see a further parameter in the place of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dnnc.ir.graph import Graph, Node, Value, Variance
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.passes.base import PassContext, graphs, is_pure


def hoist(graph: Graph, ctx: PassContext) -> bool:
    """Move every pure node of parameters and constants whose sizes are known, out of the bodies of control flow too."""
    changed = False
    for g in graphs(graph):
        made = g.prologue
        if made is None or not g.parameters:
            continue
        known: dict[Value, Value] = {}
        for n in g.nodes():
            if movable(g, n, ctx):
                _move(g, made, n, known)
                changed = True
    return changed


def movable(g: Graph, n: Node, ctx: PassContext) -> bool:
    """May a node run in the prologue?"""
    operands = [v for v in n.inputs if v is not None]
    if max(map(g.variance, operands), default=Variance.NEVER) is not Variance.REFIT:
        return False
    values = [*operands, *n.outputs]
    if (
        not is_pure(n)
        or any(True for _ in n.subgraphs())
        or not all(v.type.static and v.type.row_major for v in values)
    ):
        return False
    size = sum(_bytes(o) for o in n.outputs)
    return size <= ctx.fold_limit or size <= sum(map(_bytes, operands))


def derive(g: Graph, operands: Sequence[Value], build: Callable[..., Value], name: str, before: Node) -> Value:
    """The value `build(builder, *operands)`, computed as seldom as the operands change: of constants a constant, of
    parameters a parameter that the prologue computes, else nodes ahead of `before`. `name`: of a constant or parameter.
    """
    variance = max(map(g.variance, operands))
    if not variance.call_invariant:
        return build(Builder(g, before, before.locs), *operands)
    known: dict[Value, Value] = {}
    if variance is Variance.REFIT:
        assert g.prologue is not None
        held = build(Builder(g.prologue), *(held_in(g, v, known) for v in operands))
        return g.parameter(held, held.type, name)
    now = Graph(name)
    now.outputs = [build(Builder(now), *(now.constant(g.constants[v], type=v.type) for v in operands))]
    (array,) = run(now, ())
    return g.constant(np.ascontiguousarray(array), name, operands[0].locs)


def held_in(g: Graph, v: Value, known: dict[Value, Value] | None = None) -> Value:
    """Return the prologue value of a parameter or constant. `known`: constants that it has already."""
    known = {} if known is None else known
    if v in g.parameters:
        return g.parameters[v]
    if v not in known:
        assert g.prologue is not None
        known[v] = g.prologue.constant(g.constants[v], v.name, v.locs, v.type)
    return known[v]


def _bytes(v: Value) -> int:
    n = v.type.nbytes
    return n if isinstance(n, int) else 0


def _move(g: Graph, made: Graph, n: Node, known: dict[Value, Value]) -> None:
    inputs = [None if v is None else held_in(g, v, known) for v in n.inputs]
    m = made.append(Node(n.op, inputs, n.attrs, [o.type for o in n.outputs], n.locs, [o.name for o in n.outputs]))
    renamed = []
    for old, new in zip(n.outputs, m.outputs):
        p = g.parameter(new, old.type, old.name)
        g.replace_all_uses(old, p)
        renamed.append((p, old.name))
    g.erase(n)
    for p, name in renamed:
        g.rename(p, name)
