"""Loops and branches: `Loop` and `If`, whose bodies see the names of the graph around them."""

from __future__ import annotations

from collections.abc import Callable

from onnx import helper

from dnnc.export.call import Call
from dnnc.export.writer import MIN, Writer, value_info
from dnnc.ir.dtype import DType, boolean, i64
from dnnc.ir.graph import Graph

Walk = Callable[
    [Graph, Writer, dict[int, str]], list[str]
]  # a body with the names of its inputs, by position -> the names of its results


def cond(c: Call, walk: Walk) -> list[str]:
    branches = {}
    captured = dict(enumerate(x for x in c.inputs[1:] if x is not None))
    for label, name in (("then_branch", "then"), ("else_branch", "other")):
        body = c.attrs[name]
        w = Writer(c.w.model, c.w)
        made = _own(w, walk(body, w, captured))
        outputs = [value_info(n, v.type.dtype, v.type.shape) for n, v in zip(made, body.outputs)]
        branches[label] = helper.make_graph(w.nodes, c.w.model.names.fresh(body.name), [], outputs)
    return _many(c.w.op("If", c.x(0), outputs=len(c.node.outputs), **branches))


def loop(c: Call, walk: Walk) -> list[str]:
    """Operand rows are gathered by iteration number; result rows made last to first are reversed."""
    a, w, body = c.attrs, c.w, c.attrs["body"]
    n, m, length = a["carried"], a["scanned"], a["length"]
    tested = c.maybe(1) is not None
    trips = c.maybe(0)
    if length is not None:
        most = w.scalar(length)
        trips = most if trips is None else w.op("Min", trips, most)
    inner = Writer(w.model, w)
    names = [inner.model.names.fresh(s) for s in ("iteration", "condition", *(v.name for v in body.inputs[1 : 1 + n]))]
    back = a["backward"] or (False,) * (m + len(c.node.outputs) - n)
    given = {0: names[0], **{1 + k: x for k, x in enumerate(names[2:])}}
    rest = [x for x in c.inputs[2:] if x is not None]
    for k in range(m):
        at = names[0]
        if back[k]:
            at = inner.op("Sub", w.op("Sub", w.scalar(length), w.number(1, i64)), at)
        t = body.inputs[1 + n + k].type.dtype
        run = inner.type_for("Gather", t)
        given[1 + n + k] = inner.cast(inner.op("Gather", inner.cast(rest[n + k], t, run), at, axis=0), run, t)
    given.update((1 + k, x) for k, x in enumerate(rest) if k >= n + m)
    results = walk(body, inner, given)
    results = results if tested else [inner.op("Identity", names[1]), *results]
    results = _own(inner, results)
    types = [(boolean, ()), *((v.type.dtype, v.type.shape) for v in body.outputs[int(tested) :])]
    inputs = [(i64, ()), (boolean, ()), *((v.type.dtype, v.type.shape) for v in body.inputs[1 : 1 + n])]
    graph = helper.make_graph(
        inner.nodes,
        w.model.names.fresh(body.name),
        [value_info(x, *t) for x, t in zip(names, inputs)],
        [value_info(x, *t) for x, t in zip(results, types)],
    )
    made = _many(w.op("Loop", trips, c.maybe(1), *rest[:n], outputs=len(c.node.outputs), body=graph))
    dtypes = [v.type.dtype for v in c.node.outputs]
    return [x if k < n or not back[m + k - n] else _turned(w, x, dtypes[k]) for k, x in enumerate(made)]


def _turned(w: Writer, x: str, t: DType) -> str:
    run = w.type_for("Slice", t)
    return w.cast(w.op("Slice", w.cast(x, t, run), w.ints([-1]), w.ints([MIN]), w.ints([0]), w.ints([-1])), run, t)


def _many(made: str | list[str]) -> list[str]:
    return [made] if isinstance(made, str) else made


def _own(w: Writer, results: list[str]) -> list[str]:
    """Results that are values of nodes of this graph, each once: copies of what comes from around it."""
    own = {o for n in w.nodes for o in n.output}
    out: list[str] = []
    for r in results:
        out.append(r if r in own and r not in out else w.op("Identity", r))
    return out
