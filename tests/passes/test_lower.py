"""Lowering: groups of nodes to naive kernels that verify, print, and mean what the graph means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dnnc.ir.builder import Builder
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph, Value
from dnnc.ir.interp import run
from dnnc.ir.operator.interp import run_kernel
from dnnc.ir.operator.stmt import Alloc, For, walk_stmts
from dnnc.ir.operator.text import parse_kernel, show_kernel
from dnnc.ir.operator.verify import verify_kernel
from dnnc.ir.types import TensorType, parse_layout
from dnnc.passes.lower import Lowered, lower

N = dim("N", 1, 64)


def graph(build: Callable[..., Value], *shapes: tuple[Any, ...], dtype: str = "f32") -> Graph:
    g = Graph("g")
    values = [g.add_input(f"x{k}", TensorType(BY_NAME[dtype], s)) for k, s in enumerate(shapes)]
    g.outputs = [build(Builder(g), *values)]
    return g


def lowered(g: Graph, inplace: Value | None = None) -> Lowered:
    low = lower(g, list(g.nodes()), g.outputs[0], inplace)
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
    block = parse_layout("0 1/4 2 3 1%4")
    for v in (g.inputs[0], g.outputs[0]):
        v.type = TensorType(v.type.dtype, v.type.shape, block)
    low = lowered(g)
    x, y = np.full((1, 2, 2, 2, 4), np.inf, np.float32), np.full((1, 2, 2, 2, 4), 7, np.float32)
    x[:, 0], x[:, 1, ..., 0] = 0, 0
    run_kernel(low.kernel, {"x0": x, "y": y})
    assert (y[:, 0] == 1).all() and (y[:, 1, ..., 0] == 1).all() and (y[:, 1, ..., 1:] == 0).all()
