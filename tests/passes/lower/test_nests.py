"""Lowering: groups of nodes to naive kernels that verify, print, and mean what the graph means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dnnc.backends.runtime.link import pack
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.expr import dim, value
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Alloc, For, walk_stmts
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.types import Dense, TensorType, parse_layout
from dnnc.passes.base import PassContext
from dnnc.passes.lower.nests import Lowered, lower
from dnnc.passes.rewrites.decompose import decompose

N = dim("N", 1, 64)


def graph(build: Callable[..., Value], *shapes: tuple[Any, ...], dtype: str = "f32") -> Graph:
    g = Graph("g")
    values = [g.add_input(f"x{k}", TensorType(BY_NAME[dtype], s)) for k, s in enumerate(shapes)]
    g.outputs = [build(Builder(g), *values)]
    return g


def lowered(g: Graph, inplace: Value | None = None) -> Lowered:
    low = lower(g, list(g.nodes()), g.outputs, {} if inplace is None else {g.outputs[0]: inplace})
    verify_kernel(low.kernel)
    assert show_kernel(parse_kernel(show_kernel(low.kernel))) == show_kernel(low.kernel)
    return low


def softmax(b: Builder, x: Value) -> Value:
    return b.op("softmax", x, axis=1)


def bias_relu(b: Builder, x: Value, w: Value, c: Value) -> Value:
    return b.op("relu", b.op("add", b.op("matmul", x, w), c))


CASES: dict[str, tuple[Callable[..., Value], list[tuple[Any, ...]]]] = {
    "map": (lambda b, x, y: b.op("mul", b.op("exp", x), y), [(4, 5), (5,)]),
    "transpose": (lambda b, x: b.op("relu", b.op("transpose", x, perm=(1, 0))), [(4, 5)]),
    "matmul": (bias_relu, [(4, 7), (7, 5), (5,)]),
    "softmax": (softmax, [(4, 9)]),
    "layer_norm": (lambda b, x, s: b.op("layer_norm", x, s), [(4, 9), (9,)]),
    "argmax": (lambda b, x: b.op("argmax", x, axis=1), [(4, 9)]),
    "pool": (lambda b, x: b.op("max_pool", x, kernel=(2, 2), pads=(1, 1, 1, 1)), [(1, 2, 4, 5)]),
    "all": (lambda b, x: b.op("reduce_sum", x), [(3, 4)]),
    "prologue": (lambda b, x: b.op("reduce_mean", b.op("mul", x, x), axes=(1,)), [(3, 8)]),
    "symbolic": (lambda b, x, y: b.op("add", x, y), [(N, 3), (1, 3)]),
}


@pytest.mark.parametrize("name", CASES)
def test_text(name: str, golden: Callable[..., None]) -> None:
    build, shapes = CASES[name]
    golden(show_kernel(lowered(graph(build, *shapes)).kernel))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", [1, 6])
def test_meaning(name: str, n: int) -> None:
    build, shapes = CASES[name]
    g = graph(build, *shapes)
    low = lowered(g)
    rng = np.random.default_rng(n)
    arrays = [rng.random([n if d is N else d for d in s], np.float32) * 2 - 1 for s in shapes]
    (want,) = run(g, arrays, "float64")
    out = np.zeros(want.shape, g.outputs[0].type.dtype.numpy)
    by_value: dict[Value, Any] = {**dict(zip(g.inputs, arrays)), g.outputs[0]: out}
    args = {buf.name: by_value[v] for buf, v in zip(low.kernel.entry.buffers, low.params)}
    run_kernel(low.kernel, {**args, **{d.name: n for d in low.dims}})
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=1e-6)


def test_costly_rows_are_kept_once() -> None:
    kernel = lowered(graph(softmax, (4, 9))).kernel
    assert [s.buf.space for s in walk_stmts(kernel.entry.body) if isinstance(s, Alloc)].count("local") == 1
    assert show_kernel(kernel).count("exp(") == 1


def test_reductions_stand_at_the_depth_of_their_indices() -> None:
    """mean and variance of a row are computed once for the row."""
    low = lowered(graph(lambda b, x: b.op("mean_variance_norm", x, axes=(1,)), (4, 9)))
    (rows,) = [s for s in low.kernel.entry.body if isinstance(s, For)]
    assert sum(isinstance(s, Alloc) for s in rows.body) == len(low.reductions) == 2


def vote(b: Builder, x: Value, combine: str, reduce: str) -> Value:
    weights, classes = (
        np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2),
        np.array([[0, 1], [2, -1], [1, 1], [0, 2]], np.int32),
    )
    leaves = b.op("argmax", x, axis=2, keepdims=False)  # a reduction for each step of the votes'
    votes = b.op("tree_vote", leaves, b.constant(weights), b.constant(classes), count=3, combine=combine)
    return (
        votes
        if not reduce
        else b.op(reduce, votes, axis=1)
        if reduce.startswith("arg")
        else b.op(reduce, votes, axes=(1,))
    )


@pytest.mark.family("kernels")
@pytest.mark.parametrize("combine", ["sum", "max"])
@pytest.mark.parametrize("reduce", ["", "reduce_sum", "argmax", "reduce_log_sum_exp"])
def test_reductions_within_reductions(combine: str, reduce: str) -> None:
    """Two reductions over one operand, which is a reduction itself, and reductions over both."""
    g = graph(lambda b, x: vote(b, x, combine, reduce), (3, 5, 4))
    if any(n.op.decompose for n in g.nodes()):
        decompose(g, PassContext())
    low = lowered(g)
    x = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)
    (want,) = run(g, [x])
    got = np.empty_like(want)
    given = {g.inputs[0]: x, **g.constants, g.outputs[0]: got}
    run_kernel(low.kernel, {p.name: given[v] for p, v in zip(low.kernel.entry.params, low.params)})
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("reduce,factor", [("reduce_sum", 10**6), ("reduce_max", 1), ("reduce_mean", 1)])
def test_equal_terms_are_counted_and_not_added(reduce: str, factor: int) -> None:
    """A million additions of one number would be off by a percent."""
    g = graph(lambda b, x: b.op(reduce, b.op("expand", x, shape=(1000, 5, 1000)), axes=(0, 2)), (1, 5, 1))
    low = lowered(g)
    assert all(value(s.extent) in (1, 5) for s in walk_stmts(low.kernel.entry.body) if isinstance(s, For))
    x, y = np.array([[[0.7012484], [-3.0], [np.inf], [np.nan], [0.0]]], np.float32), np.empty(5, np.float32)
    run_kernel(low.kernel, {"x0": x, "y": y})
    np.testing.assert_allclose(y, x.reshape(5) * np.float64(factor), rtol=1e-6)


def test_a_reduction_within_another_stands_at_the_depth_of_its_indices() -> None:
    g = graph(lambda b, x: b.op("reduce_sum", b.op("relu", b.op("reduce_max", x, axes=(2,))), axes=(1,)), (3, 5, 4))
    text = show_kernel(lowered(g).kernel)
    assert text.index("for r0 in range(5)") < text.index("for r0_1 in range(4)") < text.index("acc[0] = acc[0] + ")


def test_constants_of_one_element_are_numbers_in_the_text() -> None:
    g = Graph("g")
    x, half = g.add_input("x", TensorType(BY_NAME["f32"], (4,))), g.constant(np.array([0.5], np.float32), "half")
    g.outputs = [Builder(g).op("mul", x, half)]
    low = lowered(g)
    assert low.params == (x, g.outputs[0]) and "* 0.5" in show_kernel(low.kernel)


def test_equal_groups_have_one_text() -> None:
    one, other = graph(bias_relu, (4, 7), (7, 5), (5,)), graph(bias_relu, (4, 7), (7, 5), (5,))
    for v in other.inputs:
        other.rename(v, f"other_{v.name}")
    assert show_kernel(lowered(one).kernel) == show_kernel(lowered(other).kernel)


def test_in_place_has_one_parameter_for_both() -> None:
    g = graph(lambda b, x, y: b.op("add", x, y), (4, 5), (4, 5))
    low = lowered(g, inplace=g.inputs[0])
    assert low.inplace and low.params == tuple(g.inputs)
    x, y = np.ones((4, 5), np.float32), np.full((4, 5), 2, np.float32)
    run_kernel(low.kernel, {"x0": x, "x1": y})
    assert (x == 3).all()


def test_padding_lanes_hold_zero() -> None:
    g = graph(lambda b, x: b.op("exp", x), (1, 5, 2, 2))
    block = Dense(parse_layout("0 1/4 2 3 1%4"))
    for v in (g.inputs[0], g.outputs[0]):
        v.type = TensorType(v.type.dtype, v.type.shape, block)
    low = lowered(g)
    x, y = np.full((1, 2, 2, 2, 4), np.inf, np.float32), np.full((1, 2, 2, 2, 4), 7, np.float32)
    x[:, 0], x[:, 1, ..., 0] = 0, 0
    run_kernel(low.kernel, {"x0": x, "y": y})
    assert (y[:, 0] == 1).all() and (y[:, 1, ..., 0] == 1).all() and (y[:, 1, ..., 1:] == 0).all()


ROWS = """
def f(x: {t}[1, {c}, 3, 3] @ "{x}", w: {t}[4, 5, 2, 2] @ "{w}"):
    {first}y: {t}[1, 4, 2, 2] = conv({source}, w)
    return y
"""
PADDED = "0 2 3 1/4 1%4"


def rows(x: str = PADDED, w: str = PADDED, c: int = 5, first: str = "", source: str = "x", t: str = "f16") -> Graph:
    return parse(ROWS.format(x=x, w=w, c=c, first=first, source=source, t=t))


def test_sums_go_over_rows_padded_with_zeros() -> None:
    """Whole vectors are read then. The lanes hold 0, whatever the image holds beside them."""
    g = rows()
    low = lowered(g)
    ends = {s.var.name: value(s.extent) for s in walk_stmts(low.kernel.entry.body) if isinstance(s, For)}
    assert sorted(ends[r] or 0 for r in low.reductions[0]) == [2, 2, 8]
    rng = np.random.default_rng(0)
    arrays = [rng.random([int(d) for d in v.type.shape]).astype(np.float16) for v in g.inputs]  # type: ignore[call-overload]
    arrays[0][0, :, 2, 2] = np.inf
    (want,) = run(g, arrays, "float64")
    y = np.zeros((1, 4, 2, 2), np.float16)
    by_value: dict[Value, Any] = {**{v: pack(a, v.type) for v, a in zip(g.inputs, arrays)}, g.outputs[0]: y}
    run_kernel(low.kernel, {b.name: by_value[v] for b, v in zip(low.kernel.entry.buffers, low.params)})
    np.testing.assert_allclose(y, want, rtol=2e-3)
    assert np.isinf(y[0, :, 1, 1]).all() and np.isfinite(y[0, :, 0]).all()


@pytest.mark.parametrize(
    "g",
    [
        rows(w="0 2 3 1"),  # one factor ends where the channels do
        rows(x="0 1/4 2 3 1%4", w="0 1/4 2 3 1%4"),  # blocks of channels, no rows
        rows(
            c=8,
            first='s: f16[1, 5, 3, 3] @ "0 2 3 1/4 1%4" = slice(x, starts=(0, 0, 0, 0), steps=(1, 1, 1, 1), shape=(1, '
            "5, 3, 3))\n    ",
            source="s",
        ),  # elements follow
        rows(first='s: f16[1, 5, 3, 3] @ "0 2 3 1/4 1%4" = exp(x)\n    ', source="s"),  # exp(0) is not 0
        rows(t="f32"),  # copied one by one all the same
    ],
    ids=["one", "blocks", "slice", "exp", "words"],
)
def test_sums_that_end_with_the_channels(g: Graph) -> None:
    low = lowered(g)
    ends = {s.var.name: value(s.extent) for s in walk_stmts(low.kernel.entry.body) if isinstance(s, For)}
    assert sorted(ends[r] or 0 for r in low.reductions[-1]) == [2, 2, 5]
