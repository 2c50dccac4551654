"""Sorting against NumPy: stable order in both directions, ties, signed zeros, NaN, every dtype, and lengths on both
sides of each limit.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dnnc.ir.dtype import from_numpy
from dnnc.ir.errors import ShapeError
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.ops.sort_keys import BLOCK, GROUP
from dnnc.ir.types import TensorType

Array = np.ndarray[Any, Any]


def sort(x: Array, axis: int, descending: bool, keep: int | None = None) -> tuple[Array, Array]:
    g = Graph("g")
    v = g.add_input("x", TensorType(from_numpy(x.dtype), x.shape))
    g.outputs = list(Builder(g).sort(v, axis=axis, descending=descending, keep=keep))
    values, index = run(g, [x])
    return values, index


def expected(x: Array, axis: int, descending: bool, keep: int | None) -> Array:
    n = x.shape[axis]
    index = np.argsort(np.flip(x, axis) if descending else x, axis=axis, kind="stable")
    index = n - 1 - np.flip(index, axis) if descending else index
    return np.take(index, range(n if keep is None else keep), axis)


def check(x: Array, axis: int, descending: bool, keep: int | None = None) -> None:
    values, index = sort(x, axis, descending, keep)
    want = expected(x.astype(np.float64) if x.dtype.kind not in "iub" else x, axis, descending, keep)
    np.testing.assert_array_equal(index, want)
    np.testing.assert_array_equal(values, np.take_along_axis(x, want, axis))


@pytest.mark.parametrize("n", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 4 * BLOCK + 1, 777])
@pytest.mark.parametrize("descending", [False, True])
def test_lengths(n: int, descending: bool) -> None:
    rng = np.random.default_rng(n)
    check(rng.standard_normal((2, n)).astype(np.float32), 1, descending)
    check(rng.integers(-3, 4, (n, 2)).astype(np.float32), 0, descending)  # many ties


@pytest.mark.parametrize("keep", [1, 2, 7, 50])
@pytest.mark.parametrize("n", [2 * GROUP * 7, 2 * GROUP * 7 + 1, 5003])
def test_few_of_many(n: int, keep: int) -> None:
    """Groups first; they come recursively where the row is long."""
    rng = np.random.default_rng(n * keep)
    check(rng.standard_normal((3, n)).astype(np.float32), 1, True, keep)
    check(rng.integers(0, 9, (1, n)).astype(np.int32), 1, False, keep)


@pytest.mark.parametrize(
    "dtype", ["f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "bool", "bfloat16"]
)
def test_dtypes(dtype: str) -> None:
    rng = np.random.default_rng(1)
    name = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if dtype[0] == "u":
        x = rng.integers(0, 2**63, 150, np.uint64).astype(name)
    elif name.kind in "ib":
        x = (rng.standard_normal(150) * 2.0**40).astype(np.int64).astype(name)
    else:
        x = rng.standard_normal(150).astype(name)
    for descending in (False, True):
        check(x, 0, descending)
        check(x, 0, descending, 5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_numbers(dtype: Any) -> None:
    """-0 and 0 are equal, infinities are ends, NaN is beyond them."""
    x = np.array([0.0, -0.0, np.inf, np.nan, -np.inf, 1e-45, -np.nan, -1e-45, 0.0, -1.0], dtype)
    assert list(sort(x, 0, False)[1])[-3:] == [2, 3, 6]
    assert list(sort(x, 0, True)[1])[:3] == [3, 6, 2]
    order = list(sort(x, 0, False)[1])
    assert [k for k in order if k in (0, 1, 8)] == [0, 1, 8] and order[0] == 4


def test_rows_of_symbolic_length() -> None:
    g = Graph("g")
    v = g.add_input("x", TensorType(from_numpy(np.dtype(np.float32)), (2, dim("N", 1, 64))))
    g.outputs = list(Builder(g).sort(v, axis=1, descending=True, keep=3))
    for size in (3, 20):
        x = np.random.default_rng(size).standard_normal((2, size)).astype(np.float32)
        np.testing.assert_array_equal(run(g, [x])[1], expected(x, 1, True, 3))


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ShapeError, match="5 cannot be kept"):
        sort(np.zeros((2, 4), np.float32), 1, False, 5)
