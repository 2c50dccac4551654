"""Compute while compiling what depends on constants alone: index arithmetic, masks, reshaped and transposed weights.

    c = [1, 2]; d = add(c, c)   ->   d = [2, 4]

Runs first, because all that follows is cheaper on a graph without shape arithmetic. Values are computed by the
reference interpreter in the model's own dtypes, so a folded value is the interpreter's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir.expr import Expr
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.interp import run
from dnnc.ir.op import Trait
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext, graphs, is_pure
from dnnc.passes.planning.prologue import hoist
from dnnc.passes.rewrite import sweep

Array = np.ndarray[Any, Any]


def fold(graph: Graph, ctx: PassContext) -> bool:
    """Fold pure nodes of constants and static shapes, in subgraphs too; parameters' dependents go to the prologue."""
    changed = False
    for g in graphs(graph):
        for n in g.nodes():
            reason = obstacle(g, n, ctx)
            if not reason:
                _fold(g, n)
                changed = True
            elif ctx.explain is not None:
                ctx.explain("fold", n, reason)
    return hoist(graph, ctx) or changed


def obstacle(g: Graph, n: Node, ctx: PassContext) -> str:
    """Why a node cannot be computed now; empty if it can."""
    for v in n.inputs:
        if v is not None and v not in g.constants:
            return f"{v.name} is not a constant"
    if Trait.STORED in n.op.traits and ctx.facts.decodes_weights:
        return f"{n.op.name} is how its operands are stored"
    if not is_pure(n):
        return f"{n.op.name} is random or has an effect"
    if not all(o.type.static for o in n.outputs) or not all(map(_static, n.attrs.values())):
        return "a size is not known"
    size = sum(_bytes(o.type) for o in n.outputs)
    if size > ctx.fold_limit and size > sum(_bytes(v.type) for v in n.inputs if v is not None):
        return f"the value has {size} bytes, the limit is {ctx.fold_limit}"
    return "" if all(o.type.row_major for o in n.outputs) else "the value has a layout"


def _static(a: Any) -> bool:
    if isinstance(a, tuple):
        return all(map(_static, a))
    return not isinstance(a, (Expr, Graph)) and (not isinstance(a, TensorType) or a.static)


def _bytes(t: TensorType) -> int:
    n = t.nbytes
    return n if isinstance(n, int) else 0


def evaluate(g: Graph, n: Node) -> list[Array]:
    """The outputs of a node whose operands are constants of g."""
    one = Graph(n.op.name)
    given: dict[Value | None, Value] = {}
    for v in n.inputs:
        if v is not None and v not in given:
            given[v] = one.constant(g.constants[v], type=v.type)
    m = one.append(Node(n.op, [given.get(v) for v in n.inputs], n.attrs, [o.type for o in n.outputs], n.locs))
    one.outputs = list(m.outputs)
    return [a if a.flags.c_contiguous else a.copy(order="C") for a in run(one, ())]


def _fold(g: Graph, n: Node) -> None:
    names = [o.name for o in n.outputs]
    made = [g.constant(a, type=o.type) for a, o in zip(evaluate(g, n), n.outputs)]
    for old, new in zip(n.outputs, made):
        g.replace_all_uses(old, new)
        new.locs = old.locs or n.locs
    outputs = set(g.outputs)
    sweep(g, (n,), outputs)
    for c, name in zip(made, names):
        if c.uses or c in outputs:
            g.rename(c, name)
        else:
            g.erase_constant(c)
