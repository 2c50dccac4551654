"""Gradients of ops whose result's size the data tells, and of those with integers among their operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.driver import compile
from dnnc.ir.autodiff.reverse import pullback
from dnnc.ir.dtype import boolean as BOOL
from dnnc.ir.dtype import f64, i64
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.types import TensorType
from support.pullbacks import TARGETS, WAYS, Build, compiled


def of_squares(build: Build, arrays: list[Any]) -> Any:
    """The gradient of the sum of squares, whose cotangent has the result's size, by interpreter and kernels."""
    g = Graph("g")
    kinds = {"f": f64, "i": i64}
    values = [g.add_input(f"x{k}", TensorType(kinds[a.dtype.kind], a.shape)) for k, a in enumerate(arrays)]
    b = Builder(g)
    y = build(b, *values)
    (found,) = pullback(g, {y: b.mul(y, 2.0)}, values[:1])
    assert found is not None
    g.outputs = [found]
    want = run(g, arrays, "float64")[0]
    np.testing.assert_allclose(np.asarray(compile(g)(*arrays)), want, rtol=1e-12)
    return want


@pytest.mark.slow
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_compress(axis: int | None) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 6))
    for flags in (rng.integers(0, 2, x.size if axis is None else x.shape[axis]), np.zeros(3, int), np.ones(4, int)):
        build = lambda b, x, k: b.compress(x, b.cast(k, to=BOOL), size=dim("n", 0, k.type.size), axis=axis)  # noqa: E731
        keep = flags[: x.size if axis is None else x.shape[axis]].astype(bool)
        if axis is None:
            whole = np.zeros(x.size, bool)
            whole[: len(keep)] = keep
            want = np.where(whole.reshape(x.shape), 2 * x, 0)
        else:
            whole = np.zeros(x.shape[axis], bool)
            whole[: len(keep)] = keep
            want = 2 * x * (whole[:, None] if axis == 0 else whole)
        np.testing.assert_array_equal(of_squares(build, [x, flags]), want)


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
def test_unique(ordered: bool) -> None:
    """A value's cotangent goes to its first element."""
    x = np.random.default_rng(0).integers(0, 5, (4, 6)).astype(np.float64)
    found = of_squares(lambda b, x: b.unique(x, size=dim("n", 0, 24), sorted=ordered)[0], [x])
    values, first = np.unique(x, return_index=True)
    want = np.zeros(24)
    want[first] = 2 * values
    np.testing.assert_array_equal(found, want.reshape(4, 6))


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_truncate(axis: int, count: int) -> None:
    x = np.random.default_rng(0).standard_normal((4, 3))
    build = lambda b, x, n: b.truncate(x, n, size=dim("n", 0, x.type.shape[axis]), axis=axis)  # noqa: E731
    kept = np.arange(x.shape[axis]) < count
    want = 2 * x * (kept[:, None] if axis == 0 else kept)
    np.testing.assert_array_equal(of_squares(build, [x, np.array(count)]), want)


@pytest.mark.slow
def test_view() -> None:
    x = np.random.default_rng(0).standard_normal((4, 6))
    build = lambda b, x, s: b.view(x, s, shape=(dim("p", 0, 24), dim("q", 0, 24)))  # noqa: E731
    np.testing.assert_array_equal(of_squares(build, [x, np.array([8, -1])]), 2 * x)


@pytest.mark.slow
def test_view_of_a_size_that_the_data_tells() -> None:
    x = np.random.default_rng(0).standard_normal((6, 4))

    def build(b: Any, x: Any, n: Any) -> Any:
        part = b.truncate(x, n, size=dim("n", 0, 6))
        return b.view(part, b.constant(np.array([2, -1])), shape=(2, dim("m", 0, 12)))

    np.testing.assert_array_equal(of_squares(build, [x, np.array(3)]), 2 * x * (np.arange(6) < 3)[:, None])


@pytest.mark.parametrize("run", WAYS)
def test_scales_of_quantized_numbers(run: Any) -> None:
    """The gradient of a scale is the sum of what it multiplies: of all, of a channel, of a block."""
    rng = np.random.default_rng(0)
    q = rng.integers(-9, 9, (3, 10)).astype(np.int8)
    g = rng.standard_normal(q.shape).astype(np.float32)
    wide = g * q.astype(np.float64)
    blocks = np.add.reduceat(wide, range(0, 10, 4), axis=1)
    for scale, attrs, want in (
        (np.float32(0.5).reshape(()), {}, wide.sum()),
        (np.ones(3, np.float32), {"axis": 0}, wide.sum(1)),
        (np.ones((3, 3), np.float32), {"axis": 1, "block": 4}, blocks),
    ):
        build = lambda b, x, s, attrs=attrs: b.dequantize_linear(x, s, **attrs)  # noqa: E731
        found = run(build, [q, scale], g, (1,))
        np.testing.assert_allclose(found[0], want, rtol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_regions_of_interest(target: str) -> None:
    """Regions of one image add up in it."""
    rng = np.random.default_rng(0)
    x, batch = rng.standard_normal((3, 2, 5, 4)).astype(np.float32), np.array([2, 0, 2, 2])
    weights = (rng.random((4, 3, 5)) * (rng.random((4, 3, 5)) < 0.5)).astype(np.float32)
    g = rng.standard_normal((4, 2, 3, 4)).astype(np.float32)
    want = np.zeros(x.shape)
    np.add.at(want, batch, np.einsum("rph,rcpw->rchw", weights.astype(np.float64), g))
    of_weights = np.einsum("rcpw,rchw->rph", g, x[batch]) * (weights != 0)
    found = compiled(lambda b, x, at, w: b.roi_rows(x, at, w), [x, batch, weights], g, (0, 2), target)
    np.testing.assert_allclose(found[0], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[1], of_weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("combine", ["sum", "max"])
@pytest.mark.parametrize("run", WAYS)
def test_votes_of_leaves(combine: str, run: Any) -> None:
    """Weights of leaves have gradients: of the sum all that voted, of the maximum those that won."""
    leaf = np.array([[0, 2], [2, 3], [1, 1]])
    weights = np.array([[1.0, 5.0], [2.0, 7.0], [3.0, 4.0], [6.0, 0.5]])
    classes = np.array([[0, 1], [1, 0], [0, -1], [1, 0]])
    g = np.random.default_rng(0).standard_normal((3, 2))
    want = np.zeros_like(weights)
    for n, k in np.ndindex(3, 2):
        hits = [(t, v) for t in leaf[n] for v in range(2) if classes[t, v] == k]
        best = max((weights[at] for at in hits), default=None)
        winners = [at for at in hits if combine == "sum" or weights[at] == best]
        for at in winners:
            want[at] += g[n, k] / (1 if combine == "sum" else len(winners))
    build = lambda b, leaf, w, c: b.tree_vote(leaf, w, c, count=2, combine=combine)  # noqa: E731
    found = run(build, [leaf, weights, classes], g, (1,))
    np.testing.assert_allclose(found[0], want, rtol=1e-12)
