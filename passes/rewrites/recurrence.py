"""Loops that a target runs as one kernel become the op `recurrence`, results parts of its one result.

    (h, c, y) = loop(None, None, h0, c0, x, body=f, length=5)    ->    r = recurrence(h0, c0, x, w, body=f', length=5);
                                                                       y = r[0:5]; h = r[5]; c = r[6]

Recurrent matrices and other constants of the body become operands. Targets without vectors get matrices with the axis
that is summed over last; where units are lanes, theirs stays last. For targets that have a kernel for it
(`ctx.facts.supports_scan_kernel`); runs on bodies in their last form, after all that changes what they compute.
"""

from __future__ import annotations

import numpy as np

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import ContractionForm
from dnnc.passes.base import PassContext, graphs
from dnnc.passes.lower.recurrent_form import NoForm, form_of
from dnnc.passes.rewrite import nodes_of


def recurrence(graph: Graph, ctx: PassContext) -> bool:
    """Replace every loop that has a form which the target takes."""
    if ctx.facts.supports_scan_kernel is None:
        return False
    changed = False
    for g in list(graphs(graph)):
        for n in nodes_of(g, "loop"):
            if _taken(n, ctx):
                _replace(g, n, sum_last=ctx.facts.lanes == 1)
                changed = True
    return changed


def _taken(n: Node, ctx: PassContext) -> bool:
    assert ctx.facts.supports_scan_kernel is not None
    try:
        form = form_of(n)
    except NoForm as e:
        if ctx.explain is not None:
            ctx.explain("recurrence", n, str(e))
        return False
    taken = ctx.facts.supports_scan_kernel(form)
    if not taken and ctx.explain is not None:
        ctx.explain("recurrence", n, "the target has no kernel of that size")
    return taken


def _replace(g: Graph, n: Node, sum_last: bool) -> None:
    own: Graph = n.attrs["body"]
    body = own.copy()
    body.prologue, body.parameters = own.prologue, dict(zip(body.parameters, own.parameters.values()))
    b = Builder(g, n, n.locs)
    fixed = [*(v for v in body.constants if body.constants[v].size != 1), *body.parameters]
    operands = [v for v in n.inputs[2:] if v is not None] + [_hoisted(body, v, g, sum_last) for v in fixed]
    attrs = {k: n.attrs[k] for k in ("carried", "scanned", "length", "backward")}
    made: Value = b.op("recurrence", *operands, body=body, **attrs)
    carried, steps = n.attrs["carried"], n.attrs["length"]
    stacked = len(n.outputs) - carried
    for k, old in enumerate(n.outputs):
        if not old.uses and not g.is_output(old):
            continue
        count, start = (1, stacked * steps + k) if k < carried else (steps, (k - carried) * steps)
        new = b.slice(made, starts=(start, 0, 0), steps=(1, 1, 1), shape=(count, *made.type.shape[1:]))
        g.replace_all_uses(old, b.reshape(new, shape=old.type.shape) if k < carried else new)
    g.erase(n)


def _hoisted(body: Graph, v: Value, g: Graph, sum_last: bool) -> Value:
    """A body's constant as an operand of its node. `sum_last`: transpose a sole matrix outside and inside."""
    matrix = (
        sum_last
        and v.type.rank == 2
        and all(u.op.contraction is ContractionForm.PRODUCT and k == 1 for u, k in v.uses)
        and v.type.row_major
    )
    if v in body.parameters:
        held = body.parameters[v]
        assert g.prologue is not None
        held = Builder(g.prologue).transpose(held, perm=(1, 0)) if matrix else held
        outside = g.parameter(held, held.type, v.name)
    else:
        array = body.constants[v]
        outside = g.constant(np.ascontiguousarray(array.T) if matrix else array, v.name, v.locs)
    inside = body.add_input(v.name, outside.type, v.locs)
    first = body.first_node()
    body.replace_all_uses(v, Builder(body, first, v.locs).transpose(inside, perm=(1, 0)) if matrix else inside)
    if v in body.parameters:
        body.erase_parameter(v)
    else:
        body.erase_constant(v)
    return outside
