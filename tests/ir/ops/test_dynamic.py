"""Ops whose result's size depends on the data, by the interpreter, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from te_eval import evaluate

from dnnc.ir import te
from dnnc.ir.dtype import from_numpy, i64
from dnnc.ir.errors import InputError
from dnnc.ir.expr import Expr, const, dim, maximum, select
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.op import Trait
from dnnc.ir.ops import OPS
from dnnc.ir.ops.dynamic import BLOCK, DIRECT, running_count
from dnnc.ir.ops.suppress import SUPPRESS_OPS
from dnnc.ir.types import TensorType

RNG = np.random.default_rng(2)


def apply(name: str, *arrays: Any, **attrs: Any) -> Any:
    g = Graph("g")
    values = [
        None if a is None else g.add_input(f"x{k}", TensorType(from_numpy(a.dtype), a.shape))
        for k, a in enumerate(arrays)
    ]
    made = Builder(g).op(name, *values, **attrs)
    g.outputs = list(made) if isinstance(made, tuple) else [made]
    out = run(g, [a for a in arrays if a is not None])
    return out if len(out) > 1 else out[0]


@pytest.mark.parametrize("n", [0, 1, BLOCK, BLOCK + 1, 1000, BLOCK * DIRECT + 5])
def test_a_running_count(n: int) -> None:
    flags = RNG.random(n) < 0.3
    g = Graph("g")
    g.outputs = [running_count(Builder(g), g.add_input("x", TensorType(from_numpy(flags.dtype), (n,))))]
    np.testing.assert_array_equal(run(g, [flags])[0], np.cumsum(flags))


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 255, 256, 257, 5000])
def test_positions_invert_a_running_count(n: int) -> None:
    for share in (0, 0.1, 0.9, 1):
        flags = RNG.random(n) < share
        found, want = apply("positions", np.cumsum(flags)), np.flatnonzero(flags)
        np.testing.assert_array_equal(found[: len(want)], want)
        assert found.shape == (n,) and ((found >= 0) & (found < n)).all()


@pytest.mark.parametrize("shape", [(), (1,), (130,), (3, 4, 5), (0, 4), (2, 0)])
def test_nonzero(shape: tuple[int, ...]) -> None:
    for dtype in (np.float32, np.int8, np.bool_, np.float64):
        x = np.asarray(RNG.integers(-1, 2, shape), dtype)
        want = np.array(np.nonzero(x)) if shape else np.zeros((0, np.count_nonzero(x)))
        np.testing.assert_array_equal(apply("nonzero", x, size=dim("n", 0, x.size)), want)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_compress(axis: int | None) -> None:
    x, keep = RNG.normal(size=(3, 4)).astype(np.float32), RNG.random(3) < 0.5
    np.testing.assert_array_equal(
        apply("compress", x, keep, size=dim("n", 0, 3), axis=axis), np.compress(keep, x, axis)
    )


@pytest.mark.parametrize("axis", [None, 0, 1, 2])
@pytest.mark.parametrize("most", [0, 1, 50])
def test_unique(axis: int | None, most: int) -> None:
    x = RNG.integers(0, most, (4, 5, 3), endpoint=True)
    x[1], x[:, 2] = x[0], x[:, 0]
    n = x.size if axis is None else x.shape[axis]
    want = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    for got, w in zip(apply("unique", x, size=dim("n", 0, n), axis=axis), want, strict=True):
        np.testing.assert_array_equal(got, np.asarray(w).reshape(got.shape))
    y, first, inverse, counts = apply("unique", x, size=dim("n", 0, n), axis=axis, sorted=False)
    assert (np.diff(first) > 0).all() and counts.sum() == n
    np.testing.assert_array_equal(np.take(y, inverse, axis or 0), x.reshape(-1) if axis is None else x)


def test_non_max_suppression() -> None:
    # two boxes that overlap by a half, one far away; the second class prefers another box; the third scores nothing
    # above 0.1
    boxes = np.array([[[0, 0, 1, 1], [1, 1.5, 0, 0.5], [5, 5, 6, 6]]], np.float32)
    scores = np.array([[[0.9, 0.8, 0.7], [0.3, 0.6, 0.2], [0.1, 0.1, 0.1]]], np.float32)
    sizes = {"size": dim("n", 0, 9), "candidates": dim("k", 0, 3)}

    def nms(most: int, overlap: float, least: float | None) -> list[list[int]]:
        score = None if least is None else np.float32(least)
        return apply(
            "non_max_suppression", boxes, scores, np.array(most), np.asarray(np.float32(overlap)), score, **sizes
        ).tolist()

    assert nms(9, 0.2, 0.1) == [[0, 0, 0], [0, 0, 2], [0, 1, 1], [0, 1, 2]]
    assert nms(1, 0.2, 0.1) == [[0, 0, 0], [0, 1, 1]]
    assert nms(9, 0.5, 0.25) == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 1], [0, 1, 0]]
    assert nms(9, 0.5, 1) == [] and nms(0, 0.5, 0.1) == []


def test_suppression_stops_at_the_limit_and_at_the_counts() -> None:
    apart = np.arange(6, dtype=np.float32)[None].repeat(2, 0)
    boxes = np.stack([apart, apart, apart + 0.5, apart + 0.5])
    got = apply("suppress", boxes, np.array([6, 2]), np.array(4), np.asarray(np.float32(0)))
    assert got.tolist() == [[1, 2, 3, 4, -4, -4], [1, 2, -2, -2, -2, -2]]
    assert [o.name for o in SUPPRESS_OPS if Trait.SEQUENTIAL in o.traits] == ["suppress"]


def test_a_view_and_its_errors() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    sizes = (dim("a", 0), dim("b", 0))
    for asked, want in (([-1, 2], (3, 2)), ([0, -1], (2, 3)), ([6, 1], (6, 1))):
        np.testing.assert_array_equal(apply("view", x, np.array(asked), shape=sizes), x.reshape(want))
    with pytest.raises(InputError, match=r"the shape \[4, 2\] is computed, to which \[2, 3\] cannot be reshaped"):
        apply("view", x, np.array([4, 2]), shape=sizes)
    with pytest.raises(InputError, match="0 copies a dim"):
        apply("view", x, np.array([2, 1, 0]), shape=(*sizes, dim("c", 0)))
    assert OPS["view"].host is not None


def test_a_recurrence_reads_what_it_made() -> None:
    x = te.placeholder("x", i64, (2, 5))

    def element(own: te.Tensor, r: Expr, i: Expr) -> Expr:
        return select(i < 1, const(0), own[r, maximum(i - 1, const(0))]) + x[r, i]

    a = RNG.integers(0, 9, (2, 5))
    np.testing.assert_array_equal(evaluate([te.recur((2, 5), i64, element)], {x: a})[0], np.cumsum(a, 1))
