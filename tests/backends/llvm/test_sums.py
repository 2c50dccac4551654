"""Rounding errors of long float32 sums: they follow from the longest chain of additions, whatever is reduced how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from native_check import one_node, run_native

from dnnc import compile
from dnnc.backends.llvm.templates.common import CHAIN
from dnnc.ir.dtype import f32
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.types import TensorType
from dnnc.passes.schedule.cascade import LONGEST

Array = np.ndarray[Any, Any]
SMALL = 2.0**-25  # is lost when added to 1

CASES = {
    "channels": ((4, 6, 56, 56), (0, 2, 3)),
    "channels of one image": ((1, 3, 112, 113), (0, 2, 3)),
    "an axis of many rows": ((1, 9001, 40), (1,)),
    "narrow rows": ((9001, 10), (0,)),
    "rows in memory": ((3, 1 << 18), (1,)),
    "everything": ((7, 9001), (0, 1)),
    "outer and inner axis": ((200, 12, 33), (0, 2)),
    "axes apart": ((5, 20, 3, 77, 12), (0, 1, 3)),
}


def one_among_small(shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """1 ahead of the other terms of each sum, each of which is less than half a unit in its last place."""
    x = np.full(shape, SMALL, np.float32)
    x[tuple(0 if k in axes else slice(None) for k in range(len(shape)))] = 1
    return x


def checked(x: Array, axes: tuple[int, ...], image: bool = False) -> None:
    """Sums, means and sums of products (a scale's gradient); `image`: behind a convolution, so in its layout."""
    g = Graph("g")
    b = Builder(g)
    v = g.add_input("x", TensorType(f32, x.shape))
    arrays = [x]
    if image:
        v = b.op("conv", v, g.add_input("w", TensorType(f32, (x.shape[1], x.shape[1], 1, 1))))
        arrays.append(np.eye(x.shape[1], dtype=np.float32)[:, :, None, None])
    ones = g.add_input("ones", TensorType(f32, x.shape))
    arrays.append(np.ones(x.shape, np.float32))
    g.outputs = [
        b.op("reduce_sum", v, axes=axes),
        b.op("reduce_mean", v, axes=axes),
        b.op("reduce_sum", b.op("mul", v, ones), axes=axes),
    ]
    exact = x.sum(axes, dtype=np.float64)
    count = x.size // exact.size
    for made, want in zip(run_native(g, arrays), (exact, exact / count, exact), strict=True):
        # two levels of chains, half a unit in the last place each
        assert np.max(np.abs(made - want) / want) <= 2 * LONGEST * 2.0**-25


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_among_small(case: str) -> None:
    shape, axes = CASES[case]
    checked(one_among_small(shape, axes), axes)


@pytest.mark.slow
def test_images_in_blocks_of_channels() -> None:
    shape, axes = (4, 64, 56, 56), (0, 2, 3)
    checked(one_among_small(shape, axes), axes, image=True)


@pytest.mark.slow
@pytest.mark.parametrize("taps", [1, 3])
def test_gradient_of_filters(taps: int) -> None:
    x = one_among_small((4, 32, 55 + taps, 55 + taps), (0, 2, 3))
    ones = np.ones((4, 32, 56, 56), np.float32)
    g = one_node("conv_backward_filter", [f"f32 {' '.join(map(str, a.shape))}" for a in (x, ones)], kernel=(taps, taps))
    (made,) = run_native(g, [x, ones])
    exact = [
        [x[:, :, i : i + 56, j : j + 56].sum((0, 2, 3), dtype=np.float64) for j in range(taps)] for i in range(taps)
    ]
    want = np.moveaxis(np.array(exact), 2, 0)[None]
    assert np.max(np.abs(made - want) / want) <= 2 * LONGEST * 2.0**-25


def checked_product(g: Graph, x: Array, others: Array, want: Array) -> None:
    """A product of a graph's two inputs, one of which has 1 among small terms."""
    (made,) = run_native(g, [x, others])
    assert made.shape == want.shape
    assert np.max(np.abs(made - want) / want) <= 2 * CHAIN * 2.0**-25


PRODUCTS = {
    "square": (70, 9001, 70),
    "few rows": (3, 20011, 130),
    "one row": (1, 30000, 40),
    "one column": (50, 9001, 1),
    "panels past the cache": (64, 50000, 64),
    "as many tiles as sums wait in memory": (500, 12288, 64),
    "a vector's part": (33, 8192, 7),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCTS)
@pytest.mark.parametrize("right", [False, True])
def test_products(case: str, right: bool) -> None:
    m, k, n = PRODUCTS[case]
    if right:
        x, ones = one_among_small((k, n), (0,)), np.ones((m, k), np.float32)
        g = one_node("matmul", [f"f32 {m} {k}", f"f32 {k} {n}"])
        checked_product(g, ones, x, np.broadcast_to(x.sum(0, dtype=np.float64), (m, n)))
    else:
        x, ones = one_among_small((m, k), (1,)), np.ones((k, n), np.float32)
        g = one_node("matmul", [f"f32 {m} {k}", f"f32 {k} {n}"])
        checked_product(g, x, ones, np.broadcast_to(x.sum(1, dtype=np.float64)[:, None], (m, n)))


CONVOLUTIONS = {
    "channels": ((1, 3000, 9, 9), 40, (3, 3), 1),
    "one pixel": ((2, 8000, 1, 1), 48, (1, 1), 1),
    "groups": ((1, 2 * 2048, 6, 6), 32, (3, 3), 2),
    "few outputs": ((1, 2000, 12, 12), 3, (3, 3), 1),
    "large windows": ((1, 16, 40, 40), 16, (31, 31), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case: str) -> None:
    shape, made, kernel, groups = CONVOLUTIONS[case]
    w = one_among_small((made, shape[1] // groups, *kernel), (1, 2, 3))
    x = np.ones(shape, np.float32)
    g = one_node("conv", [f"f32 {' '.join(map(str, a.shape))}" for a in (x, w)], group=groups)
    pixels = [d - k + 1 for d, k in zip(shape[2:], kernel)]
    exact = w.sum((1, 2, 3), dtype=np.float64)[None, :, None, None]
    checked_product(g, x, w, np.broadcast_to(exact, (shape[0], made, *pixels)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_products(seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = int(np.exp(rng.uniform(np.log(3000), np.log(60000))))
    m, n = (int(np.exp(rng.uniform(0, np.log(1e7 / k)))) for _ in range(2))
    batch = int(rng.integers(1, 4))
    x, ones = one_among_small((batch, m, k), (2,)), np.ones((k, n), np.float32)
    g = one_node("matmul", [f"f32 {batch} {m} {k}", f"f32 {k} {n}"])
    checked_product(g, x, ones, np.broadcast_to(x.sum(2, dtype=np.float64)[:, :, None], (batch, m, n)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(2, 6))
    axes = tuple(k for k in range(rank) if rng.random() < 0.6) or (0,)
    reduced = np.exp(rng.dirichlet(np.ones(len(axes))) * np.log(rng.integers(1 << 12, 1 << 16)))
    shape = [int(rng.integers(1, 40)) if k not in axes else 1 for k in range(rank)]
    for k, n in zip(axes, reduced):
        shape[k] = max(round(float(n)), 1)
    while np.prod(shape) > 1 << 21:
        free = max((k for k in range(rank) if k not in axes), key=lambda k: shape[k])
        shape[free] = shape[free] // 2
    checked(one_among_small(tuple(shape), axes), axes)


@pytest.mark.family("kernels")
@pytest.mark.parametrize("length", [5, 17, 33, 47, 130])
@pytest.mark.parametrize(
    "term", ["mul(x, div(y, z))", "mul(div(y, z), x)", "mul(x, log(z))", "mul(div(x, z), div(y, z))", "div(y, z)"]
)
def test_lanes_beyond_the_end_have_no_part_in_a_sum(term: str, length: int) -> None:
    """They hold zeros, and 0 / 0 or 0 * log(0) is no term of a sum."""
    shape = f"f32[6, {length}]"
    g = parse(
        f"def g(x: {shape}, y: {shape}, z: {shape}):\n    t = {term}\n    s = reduce_sum(t, axes=(1,))\n    return s"
    )
    rng = np.random.default_rng(length)
    x, y = rng.standard_normal((2, 6, length)).astype(np.float32)
    z = rng.uniform(0.5, 2, (6, length)).astype(np.float32)
    f = compile(g, cache=False)
    assert f.report.fallbacks == [], "a kernel did not pass its check"
    np.testing.assert_allclose(f(x, y, z), run(g, [x, y, z], "float64")[0], rtol=1e-5, atol=1e-5)
