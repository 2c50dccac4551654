"""Every invariant of the graph IR: a graph that breaks it is refused, with the node in the message."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dnnc.ir.dtype import f32
from dnnc.ir.errors import Loc, VerifyError
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.op import OpDef
from dnnc.ir.types import Dense, parse_layout, tensor

Ops = dict[str, OpDef]

TEXT = """\
N: dim[1, 64, 8]
def f(x: f32[N, 2], *, c: f32[2] = [1.0, 2.0]):
    def body(h: f32[N, 2]):
        e: f32[N, 2] = exp(h)
        return e
    s: f32[N, 2] = add(x, c)
    y: f32[N, 2] = repeat(s, body=body, times=2)
    z: f32[N, 2] = softmax(y)
    return z
"""


def _at(g: Graph, k: int) -> Node:
    return list(g.nodes())[k]


def _body(g: Graph) -> Graph:
    return next(s for n in g.nodes() for s in n.subgraphs())


def _set(target: object, name: str, value: object) -> None:
    setattr(target, name, value)


BREAK: list[tuple[str, Callable[[Graph], object], str]] = [
    ("type", lambda g: _set(_at(g, 0).output, "type", tensor(f32, 3, 2)),
    r"node s: the type rule gives f32\[N, 2\] for s: f32\[3, 2\]\n    s: f32\[3, 2\] = add"),
    ("rule refuses", lambda g: _at(g, 2).attrs.update(axis=5),
    r"node z: the type rule refuses it: softmax\(.*axis 5 is outside"),
    ("foreign attribute", lambda g: _at(g, 1).attrs.update(times=[1]), r"attribute times=\[1\] has no text form"),
    ("attribute name", lambda g: _at(g, 1).attrs.update({"a-b": 1}), "attribute a-b=1 has no text form"),
    ("outputs", lambda g: _at(g, 0).outputs.append(Value("q", tensor(f32), _at(g, 0), 1)),
    "gives 1 output, the node has 2"),
    ("later value", lambda g: _at(g, 0).set_input(0, _at(g, 2).output),
    r"operand 0 \(z: .*\) is defined by a later node"),
    ("other graph", lambda g: _at(g, 0).set_input(0, _body(g).inputs[0]), "is defined outside this graph"),
    ("use missing", lambda g: g.inputs[0].uses.clear(), "does not list this use"),
    ("use too many", lambda g: _set(g.inputs[0], "uses", {(_at(g, 0), 0): None, (_at(g, 1), 0): None}),
    "lists a use as operand 0 that does not exist"),
    ("back pointer", lambda g: _set(_at(g, 1).output, "node", _at(g, 0)), "does not point back"),
    ("output undefined", lambda g: g.outputs.append(Value("q", tensor(f32))), "the output q: f32 is not defined in it"),
    ("duplicate name", lambda g: _set(_at(g, 1).output, "name", "x"), "two values are called x"),
    ("bad name", lambda g: _set(g.inputs[0], "name", "a.b"), r"the value name 'a\.b' is not an identifier"),
    ("keyword", lambda g: _set(g.inputs[0], "name", "for"), "the value name 'for' is not an identifier"),
    ("constant shape", lambda g: g.constants.update({next(iter(g.constants)): np.zeros(3, np.float32)}),
    r"constant c: f32\[2\] holds float32 \[3\]"),
    ("constant dtype", lambda g: g.constants.update({next(iter(g.constants)): np.zeros(2)}),
    r"constant c: f32\[2\] holds float64 \[2\]"),
    ("undeclared dim", lambda g: g.dims.clear(), "the dim N of x is not declared"),
    ("other dim", lambda g: _body(g).dims.update(Q=dim("Q", 2)) or g.dims.update(Q=dim("Q", 3)),
    "the dim Q has other bounds in the subgraph body"),
    ("dim name", lambda g: g.dims.update(M=dim("Q")), "declared as 'M'"),
    ("subgraph", lambda g: _set(_body(g).outputs[0], "type", tensor(f32)), "graph body, node e"),
    ("itself", lambda g: _at(g, 1).attrs.update(body=g), "is the graph itself"),
    ("links", lambda g: _set(_at(g, 2), "prev", None), "links to the neighbours are wrong"),
    ("count", lambda g: _set(g, "_count", 7), "counts 7 nodes and holds 3"),
    ("input made by a node", lambda g: g.inputs.append(_at(g, 1).output), "two values are called y"),
    ("constant made by a node", lambda g: _set(next(iter(g.constants)), "node", _at(g, 0)), "is made by s:"),
]  # fmt: skip


@pytest.mark.parametrize("damage, message", [b[1:] for b in BREAK], ids=[b[0] for b in BREAK])
def test_broken_invariants_are_found(damage: Callable[[Graph], object], message: str, ops: Ops) -> None:
    g = parse(TEXT, ops=ops)
    verify(g)
    damage(g)
    with pytest.raises(VerifyError, match=message):
        verify(g)


def test_the_source_is_named(ops: Ops) -> None:
    g = parse(TEXT, ops=ops)
    n = _at(g, 2)
    n.locs = (Loc("soft", "Softmax", 13),)
    n.attrs["axis"] = 7
    with pytest.raises(VerifyError, match=r"node z at soft \(Softmax, opset 13\)"):
        verify(g)


def test_layouts_are_left_to_the_layout_pass(ops: Ops) -> None:
    """A layout on an operand or result changes no logical type."""
    g = parse(TEXT, ops=ops)
    for n in g.nodes():
        n.output.type = tensor(f32, *n.output.type.shape, encoding=Dense(parse_layout("1 0")))
    _at(g, 1).output.type = tensor(f32, *g.inputs[0].type.shape)
    verify(g)
