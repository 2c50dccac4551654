"""The operator Gradient: derivatives of a value of the model by others, all named by attributes.

    Gradient(a, b; xs = ["a", "b"], y = "c")   ->   the part of the graph from a and b to c, its pullback

`xs` and `zs` name the variables of a function, `y` its value; the node's inputs are where it is differentiated. What
`y` is made of besides is constant. So the part between them is copied with its pullback, and later passes merge what
the model computes already. The gradient of a tensor is that of the sum of its elements.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import onnx

from dnnc.frontends.onnx.call import Call, Item, materialize
from dnnc.frontends.onnx.reader import Model
from dnnc.ir.autodiff.paths import require_path
from dnnc.ir.autodiff.reverse import pullback, zeros
from dnnc.ir.autodiff.subgraph import part_between
from dnnc.ir.errors import GradientError, ModelError, ShapeError, count
from dnnc.ir.graph import Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.expand import inline

DOMAIN = "ai.onnx.preview.training"


def differentiated(model: Model) -> frozenset[str]:
    """The names by which Gradient nodes of a model differentiate: what they stand for must not be folded."""
    bodies: tuple[Any, ...] = (model.graph, *model.functions.values())
    return frozenset(
        name.decode("utf-8", "surrogateescape")
        for body in bodies
        for n in _nodes(body.node)
        if n.op_type == "Gradient" and n.domain == DOMAIN
        for a in n.attribute
        if a.name == "xs"
        for name in a.strings
    )


def _nodes(nodes: Any) -> Iterator[onnx.NodeProto]:
    for n in nodes:
        yield n
        for a in n.attribute:
            for g in (*([a.g] if a.HasField("g") else ()), *a.graphs):
                yield from _nodes(g.node)


def gradient(c: Call) -> Any:
    """The derivatives by `xs` at the inputs, which are the values of `xs` and `zs`."""
    xs, zs, name = c.texts("xs") or (), c.texts("zs") or (), c.text("y")
    names = (*xs, *zs)
    if not xs:
        raise ModelError("attribute xs names nothing to differentiate by")
    if len(names) != len(c.items):
        raise ModelError(
            f"{count(len(c.items), 'input')}; expected one for each of {', '.join(names)}, which xs and zs name"
        )
    if len(set(names)) != len(names):
        raise ModelError(f"xs and zs name a value twice: {', '.join(names)}")
    variables, y = [_variable(c, n, "xs" if n in xs else "zs") for n in names], _variable(c, name, "y")
    given = [c.x(k) for k in range(len(names))]
    for n, v, x in zip(names, variables, given):
        if v.type != x.type:
            raise ShapeError(f"{n!r} is {v.type}, the input given for it {x.type}")
    for n, v in zip((name, *xs), (y, *variables)):
        if not v.type.dtype.is_float:
            raise GradientError(f"{n!r} is {v.type}: only floats have derivatives")
    places = list(dict.fromkeys(variables))  # names may stand for one value
    part = part_between(c.b.graph, places, [y])
    g = part.graph
    inputs, wanted = dict(zip(places, g.inputs)), [k for k in range(len(xs)) if c.wants(k)]
    b = Builder(g, locs=c.b.locs)
    ones = b.expand(b.constant(1.0, dtype=y.type.dtype), shape=y.type.shape)
    found = pullback(g, {g.outputs[0]: ones}, [inputs[variables[k]] for k in wanted], c.b.locs)
    for k, cotangent in zip(wanted, found):
        if cotangent is None:
            require_path(g, inputs[variables[k]], g.outputs, xs[k])
    g.outputs = [zeros(b, variables[k].type) if v is None else v for k, v in zip(wanted, found)]
    fed = dict(zip(variables, given))
    results = dict(zip(wanted, inline(c.b, g, [*(fed[v] for v in places), *part.captured])))
    return tuple(results.get(k) for k in range(len(xs)))


def _variable(c: Call, name: str, attribute: str) -> Value:
    """The value that an attribute names."""
    _, scope = c.env
    try:
        item: Item | None = scope.find(name)
    except KeyError:
        near = difflib.get_close_matches(name, scope.names(), 3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ModelError(
            f"{attribute} names {name!r}, and nothing before this node makes a value of that name{hint}"
        ) from None
    if item is None or item.items is not None:
        raise ModelError(f"{attribute} names {name!r}, which is no tensor")
    return materialize(item, c.b)


GRADIENT = {"Gradient": gradient}
