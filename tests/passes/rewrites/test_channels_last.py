"""Channels last: which values take the layout, where `pack` nodes stand, and the same numbers as without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.verify import verify
from dnnc.ir.tolerances import bound
from dnnc.passes import pipelines
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.channels_last import assign_channels_last
from dnnc.passes.rewrites.decompose import decompose
from dnnc.tools.sample_graphs import graph_of
from support.passes import compare
from support.random_graphs import random_graph


def statements(text: str) -> list[str]:
    """The nodes of a graph after the pass, with types."""
    g = graph_of(text)
    assert assign_channels_last(g)
    verify(g)
    assert not assign_channels_last(g)
    return [repr(n) for n in g.nodes()]


def test_a_chain_of_convolutions() -> None:
    text = """def g(x: f32[1, 3, 16, 16], *, w: f32[20, 3, 3, 3], v: f32[20, 1, 3, 3], u: f32[16, 20, 1, 1]):
    a = relu(conv(x, w, pads=(1, 1, 1, 1)))
    b = conv(a, v, group=20)
    return max_pool(conv(b, u), kernel=(2, 2), strides=(2, 2))"""
    assert statements(text) == [
        'v0: f32[1, 20, 16, 16] @ "0 2 3 1" = conv(x, w, pads=(1, 1, 1, 1))',  # three channels are read as they come
        'a: f32[1, 20, 16, 16] @ "0 2 3 1" = relu(v0)',
        'b: f32[1, 20, 14, 14] @ "0 2 3 1" = conv(a, v_0, group=20)',
        'v1: f32[1, 16, 14, 14] @ "0 2 3 1" = conv(b, u_0)',
        'v2: f32[1, 16, 7, 7] @ "0 2 3 1" = max_pool(v1, kernel=(2, 2), strides=(2, 2))',
        "v3: f32[1, 16, 7, 7] = pack(v2, layout=None)",
    ]


def test_rows_of_channels_fill_sixteen_bytes() -> None:
    made = statements("def g(x: f16[1, 12, 4, 4], *, w: f16[10, 12, 1, 1]):\n    return conv(x, w)")
    assert made[0].endswith('pack(x, layout=layout("0 2 3 1/8 1%8"))')
    assert made[1].startswith('v0: f16[1, 10, 4, 4] @ "0 2 3 1/8 1%8" = conv(')


def test_constant_matrices_of_halves_stand_with_the_reduced_axis_innermost() -> None:
    g = graph_of("def g(x: f16[4, 16], *, w: f16[16, 24], v: f16[24, 8]):\n    return matmul(matmul(x, w), v)")
    assert assign_channels_last(g)
    assert [str(n.inputs[1].type.encoding) for n in g.nodes()] == ["1 0", "1 0"]  # type: ignore[union-attr]
    single = graph_of("def g(x: f32[4, 16], *, w: f32[16, 24]):\n    return matmul(x, w)")
    assert not assign_channels_last(single)


def test_rows_of_groups_end_with_the_last_group() -> None:
    """Groups of 10 channels of 16 bits: padding to whole vectors would not stand at the end of each group."""
    g = graph_of(
        "def g(x: f16[1, 20, 5, 6], *, w: f16[30, 20, 1, 1], v: f16[33, 10, 3, 3]):\n    return conv(conv(x, w), v, "
        "pads=(1, 1, 1, 1), group=3)"
    )
    assert assign_channels_last(g)
    padded, grouped = (n for n in g.nodes() if n.op.name == "conv")
    assert str(padded.output.type.encoding) == "0 2 3 1/8 1%8"
    assert {str(v.type.encoding) for v in (*grouped.inputs[:2], grouped.output)} == {"0 2 3 1"}  # type: ignore[union-attr]


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "text",
    [
        # 4 channels a group: rows stay whole
        "def g(x: f32[1, 12, 6, 6], *, w: f32[8, 6, 3, 3]):\n    return conv(x, w, group=2)",
        "def g(x: f32[1, 10, 6, 6], *, w: f32[8, 5, 3, 3]):\n    return conv(x, w, group=2)",
        "def g(x: f32[2, 5, 7, 7], *, w: f32[6, 5, 3, 3], v: f32[6, 1, 3, 3]):\n    return conv(relu(conv(x, w, "
        "pads=(1, 1, 1, 1))), v, group=6)",
        "def g(x: f32[1, 4, 5, 5], *, w: f32[8, 4, 1, 1], v: f32[6, 4, 1, 1]):\n    return concat(conv(x, w), "
        "relu(conv(x, v)), x, axis=1)",
        "def g(x: f32[1, 4, 5, 5], *, w: f32[8, 4, 1, 1], s: f32[8, 1, 1]):\n    return "
        "softmax(mul(sigmoid(add(conv(x, w), s)), 2.0), axis=1)",
        "def g(x: f32[2, 4, 9], *, w: f32[8, 4, 3]):\n    return reduce_mean(conv(x, w, strides=(2,)), axes=(2,))",
        "def g(x: f32[1, 4, 3, 5, 5], *, w: f32[8, 4, 2, 2, 2]):\n    return max_pool(conv(x, w), kernel=(2, 2, 2))",
        "def g(x: f16[9, 16], *, w: f16[16, 24]):\n    return matmul(x, w)",
        # rows of groups between padded ones
        "def g(x: f16[1, 20, 5, 6], *, w: f16[30, 20, 1, 1], v: f16[33, 10, 3, 3], u: f16[12, 33, 1, 1]):\n"
        "    return conv(relu(conv(conv(x, w), v, pads=(1, 1, 1, 1), group=3)), u)",
    ],
)
def test_numbers(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = graph_of(text)
    rng = np.random.default_rng(5)
    t = g.inputs[0].type
    x = rng.standard_normal([int(d) for d in t.shape]).astype(t.dtype.numpy)  # type: ignore[arg-type]
    want = run(g, [x], "float64")[0]
    got = compiled(g, monkeypatch)(x)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= bound(g.outputs[0].type.dtype, 1000, want)


@pytest.mark.slow
def test_random_graphs_keep_their_meaning() -> None:
    laid = 0
    for seed in range(40):
        g, inputs = random_graph(seed, 14)
        want = run(g, inputs)
        decompose(g, PassContext())
        assign_channels_last(g)
        verify(g)
        compare(want, run(g, inputs))
        assert not assign_channels_last(g), f"seed {seed}"
        assert all(v.type.row_major for v in (*g.inputs, *g.outputs))
        laid += sum(not v.type.row_major for n in g.nodes() for v in n.outputs)
    assert laid > 40


def compiled(g: Graph, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The graph compiled for the CPU with channels last: layouts are nobody's in particular."""
    passes = tuple(
        replace(p, run=lambda graph, ctx: assign_channels_last(graph)) if p.name == "layout" else p
        for p in pipelines.LEVELS[3]
    )
    monkeypatch.setitem(pipelines.LEVELS, 3, passes)
    return dnnc.compile(g, cache=False)


@pytest.mark.parametrize(
    ("x", "g", "sides", "layouts"),
    [
        ("2, 8, 5, 6", "2, 12, 5, 6", "kernel=(3, 3), pads=(1, 1, 1, 1)", ["0 2 3 1", "0 2 3 1", "0 2 3 1"]),
        ("2, 3, 5, 6", "2, 8, 5, 6", "kernel=(1, 1)", ["0 1 2 3", "0 2 3 1", "0 1 2 3"]),  # images as they come
        ("2, 8, 5, 6", "2, 8, 5, 6", "kernel=(1, 1), group=8", ["0 2 3 1", "0 2 3 1", "1 2 3 0"]),
    ],
)
def test_the_gradient_of_filters(x: str, g: str, sides: str, layouts: list[str]) -> None:
    graph = graph_of(f"def f(x: f32[{x}], g: f32[{g}]):\n    return conv_backward_filter(x, g, {sides})")
    want = graph.copy()
    assign_channels_last(graph)
    verify(graph)
    (n,) = (n for n in graph.nodes() if n.op.name == "conv_backward_filter")
    assert [str(v.type.layout or "0 1 2 3") for v in (*n.inputs, n.output) if v is not None] == layouts
    assert graph.outputs[0].type.row_major
    arrays = [np.random.default_rng(0).standard_normal([int(str(d)) for d in v.type.shape]) for v in graph.inputs]
    (a,), (b,) = run(want, arrays, "float64"), run(graph, arrays, "float64")
    np.testing.assert_allclose(a, b)
