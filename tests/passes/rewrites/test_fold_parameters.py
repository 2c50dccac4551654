"""Batch norms and scales go into weights that are parameters as into constants: the same graph and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.backends.runtime.prologue import Prologue
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.parameters import frozen
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.rewrites.fold import fold
from dnnc.passes.rewrites.fold_batch_norm import fold_batch_norm

Array = np.ndarray[Any, Any]

NORM = """
def g(x: f32[1, 3, 5, 5], w: f32[4, 3, 3, 3], b: f32[4], s: f32[4], h: f32[4], m: f32[4], v: f32[4]):
    y: f32[1, 4, 3, 3] = conv(x, w, {bias})
    z: f32[1, 4, 3, 3] = batch_norm(y, s, h, m, v, epsilon=0.001)
    return relu(z)
"""
SCALED = """
def g(x: f32[1, 3, 5, 5], w: f32[4, 3, 3, 3], b: f32[4], c: f32[4, 1, 1], d: f32[1, 1, 1, 1]):
    y: f32[1, 4, 3, 3] = conv(x, w, b)
    return add(d, mul(y, c))
"""


def arrays(g: Graph, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        v.name: rng.uniform(0.5, 1.5, [int(str(d)) for d in v.type.shape]).astype(v.type.dtype.numpy) for v in g.inputs
    }


def folded(text: str, numerics: str = "standard") -> tuple[Graph, Graph, dict[str, Array]]:
    """The graph as it was with constants, after the passes with parameters, and contents."""
    g = parse(text)
    given = arrays(g)
    g.bind_inputs({v.name for v in g.inputs[1:]})
    plain = frozen(g, given.__getitem__)
    ctx = PassContext(numerics=numerics)
    for p in (fold, fold_batch_norm, decompose, fold):
        p(g, ctx)
    verify(g)
    return plain, g, given


def with_contents(g: Graph, given: dict[str, Array]) -> Graph:
    """A graph after passes, with what its parameters hold as constants."""
    held = list(g.parameters)
    assert g.prologue is not None
    g.prologue.outputs = [g.parameters[v] for v in held]
    made = Prologue(g.prologue, tuple(v.type for v in held)).run(given)
    new = g.copy()
    for v, a in zip(list(new.parameters), made):
        new.replace_all_uses(v, new.constant(a))
    new.parameters.clear()
    return new


@pytest.mark.parametrize("text", [NORM.format(bias="None"), NORM.format(bias="b"), SCALED])
def test_one_convolution_is_left(text: str) -> None:
    plain, g, given = folded(text)
    assert [n.op.name for n in g.nodes() if n.op.name != "relu"] == ["conv"]
    x = np.random.default_rng(5).standard_normal((1, 3, 5, 5), np.float32)
    want, got = run(plain, [x])[0], run(with_contents(g, given), [x])[0]
    assert np.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (NORM.format(bias="b").replace("f32", "f16"), "conv"),  # what overflows could not be seen
        (SCALED.replace("c: f32[4, 1, 1]", "c: f32[1, 3, 1]"), "conv, mul"),  # not per channel
        (
            SCALED.replace("return add(d, mul(y, c))", "return add(d, mul(y, c)), y"),
            "conv, mul",
        ),  # the product is read elsewhere
    ],
)
def test_where_it_does_not_apply(text: str, left: str) -> None:
    _, g, _ = folded(text)
    assert ", ".join(n.op.name for n in g.nodes()).startswith(left) and len(g) > 1


def test_strict_numerics_keep_the_graph() -> None:
    _, g, _ = folded(SCALED, "strict")
    assert [n.op.name for n in g.nodes()] == ["conv", "mul", "add"]
