"""Products that share an operand: merged where their chains are alike, left alone elsewhere, with the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.ir.interp import run
from dnnc.ir.tolerances import bound
from dnnc.ir.verify import verify
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.graph.siblings import siblings
from dnnc.passes.pipelines import LEVELS
from dnnc.testing.graphs import graph_of

HEAD = "def g(x: f32[2, 5, 8], *, a: f32[8, 48], b: f32[8, 48], c: f32[8, 48], d: f32[48], e: f32[48], f: f32[48]):\n    "
QKV = HEAD + "\n    ".join(
    [
        "q = transpose(reshape(add(matmul(x, a), d), shape=(2, 5, 3, 16)), perm=(0, 2, 1, 3))",
        "k = transpose(reshape(add(matmul(x, b), e), shape=(2, 5, 3, 16)), perm=(0, 2, 1, 3))",
        "v = transpose(reshape(add(matmul(x, c), f), shape=(2, 5, 3, 16)), perm=(0, 2, 1, 3))",
        "return relu(q), exp(k), tanh(v)",
    ]
)


def test_queries_keys_and_values() -> None:
    g = graph_of(QKV)
    x = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    want = run(g, [x], "float64")
    assert siblings(g, PassContext())
    verify(g)
    assert [n.op.name for n in g.nodes()] == ["matmul", "add", "reshape", "transpose", *("slice", "reshape") * 3, "relu", "exp", "tanh"]
    stacked = next(n for n in g.nodes() if n.op.name == "transpose").output
    assert stacked.type.shape == (3, 2, 3, 5, 16)
    for a, b in zip(run(g, [x], "float64"), want):
        np.testing.assert_array_equal(a, b)
    assert not siblings(g, PassContext())


def test_nothing_is_copied() -> None:
    g = graph_of(QKV)
    f = dnnc.compile(g, cache=False)
    x = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    for got, want, v in zip(f(x), run(g, [x], "float64"), g.outputs):
        assert np.abs(got - want).max() <= bound(v.type.dtype, 100, want)
    assert f.report.programs[-1].kernels[0].name.startswith("matmul_add_reshape_transpose")
    assert f.report.programs[-1].calls == 4  # the product, and what follows each part


@pytest.mark.parametrize(
    ("why", "body"),
    [
        ("one product alone", "return relu(reshape(matmul(x, a), shape=(2, 5, 3, 16)))"),
        ("different ends", "return relu(reshape(matmul(x, a), shape=(2, 5, 3, 16))), relu(reshape(matmul(x, b), shape=(2, 5, 16, 3)))"),
        ("a bias and none", "return relu(reshape(add(matmul(x, a), d), shape=(2, 5, 3, 16))), relu(reshape(matmul(x, b), shape=(2, 5, 3, 16)))"),
        ("no reshape: parts would be columns", "return relu(matmul(x, a)), relu(matmul(x, b))"),
        ("results of the graph", "return reshape(matmul(x, a), shape=(2, 5, 3, 16)), reshape(matmul(x, b), shape=(2, 5, 3, 16))"),
        (
            "another reader",
            "m = matmul(x, a)\n    return relu(reshape(m, shape=(2, 5, 3, 16))), relu(reshape(matmul(x, b), shape=(2, 5, 3, 16))), exp(m)",
        ),
    ],
)
def test_left_alone(why: str, body: str) -> None:
    assert not siblings(graph_of(HEAD + body), PassContext()), why


def test_strict_numerics_keep_each_product_as_it_is() -> None:
    assert not siblings(graph_of(QKV), PassContext(numerics="strict"))


def test_the_pipeline_merges_what_attention_reads() -> None:
    text = HEAD + "\n    ".join(
        [
            "q = transpose(reshape(matmul(x, a), shape=(2, 5, 3, 16)), perm=(0, 2, 1, 3))",
            "k = transpose(reshape(matmul(x, b), shape=(2, 5, 3, 16)), perm=(0, 2, 3, 1))",
            "v = transpose(reshape(matmul(x, c), shape=(2, 5, 3, 16)), perm=(0, 2, 1, 3))",
            "return matmul(softmax(matmul(q, k)), v)",
        ]
    )
    g = graph_of(text)
    PassManager().run(g, LEVELS[3], PassContext(attention=True, channels_last=True))
    ops = [n.op.name for n in g.nodes()]
    assert ops.count("matmul") == 1 and ops.count("attention") == 1
