"""Definitions of ops in the text of a graph: every op, taken for a custom one, is written and read."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dnnc.ir import te
from dnnc.ir.dtype import f16, f32
from dnnc.ir.errors import ParseError, ShapeError
from dnnc.ir.expr import dim, maximum
from dnnc.ir.graph import Graph
from dnnc.ir.graph.attributes import complete
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import OpDef, Trait
from dnnc.ir.ops import FAMILIES
from dnnc.ir.ops.common import draw
from dnnc.ir.shapes import specialise
from dnnc.ir.types import tensor

OWN = frozenset((Trait.PURE, Trait.CUSTOM))
LEAKY = """def leaky(x0: f32[n, 4]):
    def t0(i0) -> f32[n]:
        return sum(x0[i0, r0], r0=4, where=r0 < i0)
    def t1(i0, i1) -> f32[n, 4]:
        return max(x0[i0, i1], t0[i0] * 0.5)
    return t1

def g(x: f32[n, 4]):
    y: f32[n, 4] = leaky(x)
    return y
"""


@pytest.mark.family("samples")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_op_written_and_read(family: str) -> None:
    for op in FAMILIES[family]:
        for seed, s in enumerate(op.samples[:2] if op.compute is not None and op.reference is not None else ()):
            g = Graph("g")
            inputs = [g.add_input(f"x{k}", t) for k, t in enumerate(s.inputs)]
            node = Builder(g).node(
                dataclasses.replace(op, name=f"own_{op.name}", traits=op.traits | OWN),
                inputs,
                complete(op, dict(s.attrs)),
            )
            g.outputs = list(node.outputs)
            again = parse(str(g))
            assert str(again) == str(g)
            arrays = draw(s, seed)
            for a, b in zip(run(g, arrays, precision="float64"), run(again, arrays, precision="float64")):
                tol = 1e-3 if a.dtype.itemsize < 4 else 1e-6
                np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=tol, atol=tol)


def test_symbolic_sizes_and_what_reads_what() -> None:
    g = parse(LEAKY)
    assert str(g) == LEAKY
    x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    t = np.where(np.arange(4) < np.arange(6)[:, None], x, 0).sum(1, keepdims=True)
    for made in (g, specialise(g, {"n": 6})):
        np.testing.assert_allclose(run(made, [x])[0], np.maximum(x, t * 0.5), rtol=1e-6)
    assert "x0: f32[6, 4]" in str(specialise(g, {"n": 6}))


def test_names_of_sizes_do_not_meet_those_of_axes() -> None:
    n = dim("i0")
    op = OpDef(
        "op",
        lambda x: x,
        lambda x: te.compute(x.dims, x.dtype, lambda i: x[n - 1 - i]),
        reference=lambda x: x[::-1],
        traits=OWN,
    )
    g = Graph("g")
    g.outputs = [Builder(g).op(op, g.add_input("x", tensor(f32, n)))]
    assert "def t_0(i_0) -> f32[i0]:\n        return x_0[i0 - i_0 - 1]" in str(g)
    assert run(parse(str(g)), [np.arange(3, dtype=np.float32)])[0].tolist() == [2, 1, 0]


def test_long_expressions_name_what_occurs_twice() -> None:
    def compute(x: te.Tensor) -> te.Tensor:
        def element(i: te.Expr) -> te.Expr:
            e = x[i]
            for _ in range(40):
                e = call("exp", e) * e
            return e

        return te.compute(x.dims, x.dtype, element)

    g = Graph("g")
    op = OpDef("op", lambda x: x, compute, reference=lambda x: x, traits=OWN)
    g.outputs = [Builder(g).op(op, g.add_input("x", tensor(f32, 3)))]
    assert len(str(g)) < 4000 and str(parse(str(g))) == str(g)


def test_one_op_at_two_types() -> None:
    op = OpDef(
        "op",
        lambda x: x,
        lambda x: te.compute(x.dims, x.dtype, lambda i: maximum(x[i], 0.0)),
        reference=lambda x: np.maximum(x, 0),
        traits=OWN,
    )
    g = Graph("g")
    b = Builder(g)
    g.outputs = [
        b.op(op, g.add_input("x", tensor(f32, 3))),
        b.op(op, g.add_input("y", tensor(f16, 3))),
        b.op(op, g.add_input("z", tensor(f32, 3))),
    ]
    text = str(g)
    assert text.count("def op(") == 1 and text.count("def op_1(") == 1 and text.count("= op(") == 2
    assert [v.type.dtype for v in parse(text).outputs] == [f32, f16, f32]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("leaky(x0", "relu(x0", "relu is an op of dnnc's own"),
        (
            "def g(",
            "def leaky(x: f32[3]):\n    def y(i) -> f32[3]:\n        return x[i]\n    return y\n\ndef g(",
            "leaky is defined twice",
        ),
        ("t0[i0]", "t2[i0]", "t2 is not a buffer here"),
        ("(i0, i1)", "(i0)", "t1 has 2 axes, 1 are named"),
        (" -> f32[n]", "", "expected a stage"),
        ("    return t1\n", "    return t9\n", "a definition returns stages"),
        ("x0: f32[n, 4]", "x0", "operand x0 needs a type"),
        ("leaky(x)", "leaky(x, x)", r"is defined for f32\[n, 4\]; got"),
    ],
)
def test_what_is_no_definition(old: str, new: str, message: str) -> None:
    assert old in LEAKY
    with pytest.raises(ParseError, match=message):
        parse(LEAKY.replace(old, new))


def test_operands_of_other_types() -> None:
    (node,) = parse(LEAKY).nodes()
    with pytest.raises(ShapeError, match=r"leaky is defined for f32\[n, 4\]; got f32\[3, 5\]"):
        node.op.type(tensor(f32, 3, 5))


def test_hashes_tell_definitions_apart() -> None:
    assert (
        parse(LEAKY).structural_hash()
        == parse(LEAKY).structural_hash()
        != parse(LEAKY.replace("0.5", "0.25")).structural_hash()
    )
