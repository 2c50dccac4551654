"""Fusion plans of small graphs, as text, and the same results with and without fusion."""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph import Graph
from dnnc.ir.interp import run
from dnnc.ir.tolerances import bound
from dnnc.passes.graph.fuse import plan_fusion
from dnnc.passes.graph.layout import assign_layouts
from dnnc.testing.graphs import graph_of


def groups(g: Graph) -> list[str]:
    return [" + ".join(n.op.name for n in grp.nodes) for grp in plan_fusion(g).groups]


PLANS = [
    (
        "conv, bias, residual, relu are one kernel; the other branch is another",
        """def g(x: f32[1, 16, 6, 6], *, w: f32[16, 16, 3, 3], v: f32[16, 16, 1, 1], b: f32[16]):
    s = conv(x, v)
    h = conv(x, w, b, pads=(1, 1, 1, 1))
    y = relu(add(h, s))
    return y""",
        ["conv", "conv + add + relu"],
    ),
    (
        "a diamond stays together: x * sigmoid(x)",
        """def g(x: f32[8, 32], *, w: f32[32, 16]):
    h = matmul(x, w)
    return mul(h, sigmoid(h))""",
        ["matmul + sigmoid + mul"],
    ),
    (
        "a value that two groups read ends its group",
        """def g(x: f32[8, 32], *, w: f32[32, 16], v: f32[16, 16]):
    h = relu(matmul(x, w))
    y = add(matmul(h, v), h)
    return y""",
        ["matmul + relu", "matmul + add"],
    ),
    (
        "the residual of a norm goes to the contraction before it, not to the norm",
        """def g(x: f32[8, 32], *, w: f32[32, 32], s: f32[32], b: f32[32]):
    h = add(matmul(x, w), x)
    return layer_norm(h, s, b)""",
        ["matmul + add", "layer_norm"],
    ),
    (
        "scale and mask in front of softmax go to the contraction, too",
        """def g(q: f32[2, 8, 16], k: f32[2, 16, 8], m: f32[1, 1, 8]):
    return softmax(add(mul(matmul(q, k), 0.25), m))""",
        ["matmul + mul + add", "softmax"],
    ),
    (
        "without a contraction they are the softmax's own",
        """def g(q: f32[8, 16], m: f32[1, 16]):
    return softmax(add(mul(q, 0.25), m))""",
        ["mul + add + softmax"],
    ),
    (
        "heads: the result is stored at its transposed place",
        """def g(x: f32[8, 32], *, w: f32[32, 64]):
    h = reshape(matmul(x, w), shape=(8, 2, 32))
    return transpose(h, perm=(1, 0, 2))""",
        ["matmul + reshape + transpose"],
    ),
    (
        "not when the last axis moves: vectors would be torn",
        """def g(x: f32[8, 32], *, w: f32[32, 64]):
    h = reshape(matmul(x, w), shape=(8, 2, 32))
    return transpose(h, perm=(1, 2, 0))""",
        ["matmul", "transpose"],
    ),
    (
        "a transposed left operand is read in place",
        """def g(x: f32[32, 8], *, w: f32[32, 64]):
    return matmul(transpose(x, perm=(1, 0)), w)""",
        ["transpose + matmul"],
    ),
    (
        "a window does not recompute what it reads",
        """def g(x: f32[1, 4, 8, 8]):
    return max_pool(sqrt(abs(x)), kernel=(2, 2), strides=(2, 2))""",
        ["abs + sqrt", "max_pool"],
    ),
    (
        "an output in the middle is stored, and read again",
        """def g(x: f32[8, 32], *, w: f32[32, 16]):
    h = matmul(x, w)
    return h, relu(h)""",
        ["matmul", "relu"],
    ),
]


@pytest.mark.parametrize(("text", "expected"), [p[1:] for p in PLANS], ids=[p[0] for p in PLANS])
def test_plan_and_numbers(text: str, expected: list[str]) -> None:
    g = graph_of(text)
    assert groups(g) == expected
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal([int(d) for d in v.type.shape]).astype(np.float32) for v in g.inputs]  # type: ignore[arg-type]
    want = run(g, inputs, "float64")
    for level in (1, 3):
        got = dnnc.compile(g, cache=False, opt_level=level)(*inputs)
        for a, b in zip(got if isinstance(got, tuple) else (got,), want):
            assert np.abs(a - b).max() <= bound(g.outputs[0].type.dtype, 600, b)


def test_views_are_no_kernels() -> None:
    g = graph_of("def g(x: f32[4, 6]):\n    a = relu(x)\n    b = reshape(a, shape=(24,))\n    return softmax(b)")
    plan = plan_fusion(g)
    assert [(a.name, b.name) for a, b in plan.views] == [("b", "a")]
    assert str(plan).splitlines()[-1] == "view: b = a"


def test_every_node_is_in_one_group_and_no_group_has_two_anchors() -> None:
    g = graph_of(PLANS[0][1])
    assign_layouts(g, 16)
    plan = plan_fusion(g)
    nodes = [n for grp in plan.groups for n in grp.nodes] + [v.node for v, _ in plan.views]
    assert len(nodes) == len(set(nodes)) == len(g)
    assert all(sum("contraction" in n.op.traits for n in grp.nodes) <= 1 for grp in plan.groups)


def test_fusion_off() -> None:
    g = graph_of(PLANS[1][1])
    assert [len(grp.nodes) for grp in plan_fusion(g, fuse=False).groups] == [1, 1, 1]
