"""What depends on parameters alone leaves the graph; bound later, it gives the numbers of constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.backends.runtime.prologue import Prologue
from dnnc.ir.encodings import parse_encoding
from dnnc.ir.graph import Graph, Variance
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.types import ROW_MAJOR, TensorType
from dnnc.parameters import frozen
from dnnc.passes.base import PassContext
from dnnc.passes.planning.prologue import derive, hoist
from dnnc.passes.rewrites.capture_loop_constants import sink_constants

CTX = PassContext()


def bound(text: str, *names: str) -> Graph:
    g = parse(text)
    g.bind_inputs(set(names))
    return g


def prologue(g: Graph) -> list[str]:
    assert g.prologue is not None
    return [n.op.name for n in g.prologue.nodes()]


TRANSPOSED = """
def g(x: f32[2, 4], w: f32[3, 4]):
    t: f32[4, 3] = transpose(w, perm=(1, 0))
    u: f32[4, 3] = mul(t, 2.0)
    return matmul(x, u)
"""


def test_what_depends_on_parameters_alone() -> None:
    g = bound(TRANSPOSED, "w")
    assert hoist(g, CTX) and not hoist(g, CTX)
    verify(g)
    assert [n.op.name for n in g.nodes()] == ["matmul"] and prologue(g) == ["transpose", "mul"]
    assert (
        g.text()
        == "def g(x: f32[2, 4], *, w: f32[3, 4], t: f32[4, 3], u: f32[4, 3], c: f32 = 2.0):\n    v0: f32[2, 3] = "
        "matmul(x, u)\n    return v0\n"
    )


VARIED = """
def g(x: f32[4], state: f32[4], w: f32[4], *, c: f32[4] = [1.0, 2.0, 3.0, 4.0]):
    return add(x, state), mul(w, c)
"""


def test_variance_of_leaves() -> None:
    g = bound(VARIED, "w")
    g.donated = {0: 1}
    (x, state), (w,), (c,) = g.inputs, g.parameters, g.constants
    order = [Variance.NEVER, Variance.REFIT, Variance.STEP, Variance.CALL]
    assert [g.variance(v) for v in (c, w, state, x)] == order == sorted(order)
    assert [v.call_invariant for v in order] == [True, True, False, False]
    assert {g.variance(n.output) for n in g.nodes()} == {Variance.CALL} == {g.variance(None)}


@pytest.mark.parametrize(
    ("operands", "variance", "nodes"), [("cc", Variance.NEVER, 0), ("wc", Variance.REFIT, 0), ("xw", Variance.CALL, 1)]
)
def test_a_value_is_derived_as_seldom_as_its_operands_change(operands: str, variance: Variance, nodes: int) -> None:
    g = bound(VARIED, "w")
    (n, *_), before = g.nodes(), len(g)
    named = {v.name: v for v in (*g.inputs, *g.parameters, *g.constants)}
    made = derive(g, [named[k] for k in operands], lambda b, *v: b.concat(*v, axis=0), "both", n)
    g.outputs = [*g.outputs, made]
    verify(g)
    assert g.variance(made) is variance and len(g) == before + nodes
    assert prologue(g) == (["concat"] if variance is Variance.REFIT else [])
    w, x = np.full(4, 5, np.float32), np.full(4, 6, np.float32)
    got = run(frozen(g, lambda name: w), [x, x])[-1] if variance is not Variance.REFIT else None
    assert got is None or got.tolist() == {"cc": [1, 2, 3, 4] * 2, "xw": [6] * 4 + [5] * 4}[operands]


def test_an_input_keeps_a_node_where_it_is() -> None:
    g = bound("def g(x: f32[4], w: f32[4]):\n    return mul(exp(x), add(w, x))\n", "w")
    assert not hoist(g, CTX) and len(g) == 3


def test_large_results_are_left_to_kernels() -> None:
    g = bound(
        "def g(x: f32[64, 64], w: f32[64]):\n    e: f32[64, 64] = expand(w, shape=(64, 64))\n    return mul(x, e)\n",
        "w",
    )
    assert not hoist(g, PassContext(fold_limit=1000)) and hoist(g, CTX)


def test_copies_have_prologues_of_their_own() -> None:
    g = bound(TRANSPOSED, "w")
    hoist(g, CTX)
    h = g.copy()
    verify(h)
    assert h.text() == g.text() and h.structural_hash() == g.structural_hash()
    assert h.prologue is not g.prologue and prologue(h) == prologue(g)


def test_a_loop_sees_a_parameter_as_its_own() -> None:
    g = bound(
        """
def g(x: f32[2, 4], w: f32[4, 4]):
    def body(k: i64, s: f32[2, 4], m: f32[4, 4]):
        t: f32[4, 4] = transpose(m, perm=(1, 0))
        return matmul(s, t)
    return loop(None, None, x, w, body=body, carried=1, length=3)
""",
        "w",
    )
    assert sink_constants(g, CTX) and hoist(g, CTX)
    verify(g)
    (loop,) = g.nodes()
    (body,) = loop.subgraphs()
    assert len(loop.inputs) == 3 and [n.op.name for n in body.nodes()] == ["matmul"] and body.prologue is g.prologue
    assert prologue(g) == ["transpose"]


def test_frozen_is_the_graph_with_constants() -> None:
    g = bound(TRANSPOSED, "w")
    w, x = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones((2, 4), np.float32)
    h = frozen(g, {"w": w}.__getitem__)
    verify(h)
    assert np.array_equal(run(h, [x])[0], x @ w.T * 2)


@pytest.mark.parametrize("layout", ["", "1/16 0 1%16"])
def test_arrays_of_the_table(layout: str) -> None:
    """Contiguous as they lie in memory; what is given and read as it is, is not copied."""
    p = parse("def p(w: f32[3, 4], b: f32[3]):\n    return transpose(w, perm=(1, 0)), b\n")
    types = (
        TensorType(p.outputs[0].type.dtype, (4, 3), parse_encoding(layout) if layout else ROW_MAJOR),
        p.outputs[1].type,
    )
    w, b = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones(3, np.float32)
    made: list[Any] = Prologue(p, types).run({"w": w, "b": b})
    assert made[1] is b and made[0].flags.c_contiguous and made[0].ctypes.data % 64 == 0
    rows = made[0][0, :, :3] if layout else made[0]
    assert np.array_equal(rows, w.T) and (not layout or not made[0][0, :, 3:].any())
