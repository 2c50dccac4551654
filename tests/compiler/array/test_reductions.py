"""Reductions, sorting, searching and sets against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from array_samples import ALL, COMPLEX, FLOATS, INTS, check, sample

import dnnc.array as xp
from dnnc.ir.errors import InputError

AXES = (None, 0, -1, (0, 2), (), (0, 1, 2))


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("dtype", ALL)
def test_sums_and_products(dtype: str) -> None:
    a = sample(dtype, (2, 3, 4), low=0.5, high=1.5)
    x = xp.asarray(a)
    for axis in AXES:
        check(xp.sum(x, axis=axis), np.sum(a, axis=axis))
        check(xp.prod(x, axis=axis), np.prod(a, axis=axis), ulps=64)
    check(xp.sum(x, axis=1, keepdims=True), a.sum(1, keepdims=True))
    check(xp.prod(x, axis=(0, 1), keepdims=True), a.prod((0, 1), keepdims=True), ulps=64)
    check(xp.cumulative_sum(x, axis=1), np.cumsum(a, 1))
    check(xp.cumulative_prod(x, axis=2), np.cumprod(a, 2), ulps=64)
    check(
        xp.cumulative_sum(x[0, 0], include_initial=True),
        np.concatenate([[0], np.cumsum(a[0, 0])]).astype(np.cumsum(a).dtype),
    )
    check(xp.count_nonzero(x, axis=1), np.count_nonzero(a, axis=1))
    for name in ("all", "any"):
        for axis in AXES:
            check(getattr(xp, name)(x, axis=axis), getattr(np, name)(a, axis=axis))
    check(xp.all(x[:0], axis=0), np.all(a[:0], axis=0))
    check(xp.diff(x, n=2), np.diff(a, n=2))


@pytest.mark.family("cases")
@pytest.mark.parametrize("dtype", (*INTS, *FLOATS))
def test_extremes(dtype: str) -> None:
    a = sample(dtype, (2, 3, 4))
    x = xp.asarray(a)
    for axis in AXES:
        check(xp.max(x, axis=axis), np.max(a, axis=axis))
        check(xp.min(x, axis=axis, keepdims=True), np.min(a, axis=axis, keepdims=True))
    for axis in (None, 0, -1):
        check(xp.argmax(x, axis=axis), np.argmax(a, axis=axis))
        check(xp.argmin(x, axis=axis, keepdims=True), np.argmin(a, axis=axis, keepdims=True))
    with pytest.raises(ValueError, match="no elements"):
        xp.max(x[:, :0], axis=1)


@pytest.mark.family("cases")
@pytest.mark.parametrize("dtype", (*FLOATS, *COMPLEX))
def test_moments(dtype: str) -> None:
    a = sample(dtype, (2, 3, 4))
    x = xp.asarray(a)
    for axis in AXES:
        check(xp.mean(x, axis=axis), np.mean(a, axis=axis))
        check(xp.var(x, axis=axis), np.var(a, axis=axis))
    check(xp.std(x, axis=1, correction=1.0, keepdims=True), np.std(a, axis=1, ddof=1, keepdims=True))


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("dtype", (*INTS, *FLOATS))
def test_sorting(dtype: str) -> None:
    a = sample(dtype, (3, 40))
    x = xp.asarray(a)
    check(xp.sort(x), np.sort(a))
    check(xp.sort(x, axis=0, descending=True), np.flip(np.sort(a, 0), 0))
    check(xp.argsort(x), np.argsort(a, kind="stable"))
    reverse = np.lexsort((np.arange(40), -a[0].astype(np.float64)))
    check(xp.argsort(x[0], descending=True), reverse)
    values, at = xp.top_k(x, 5)
    check(values, np.flip(np.sort(a), -1)[:, :5])
    check(xp.take_along_axis(x, at), np.asarray(values))
    line = np.sort(a[0])
    for side in ("left", "right"):
        check(xp.searchsorted(xp.asarray(line), x, side=side), np.searchsorted(line, a, side=side))
    order = np.argsort(a[1])
    check(xp.searchsorted(x[1], x[2], sorter=xp.asarray(order)), np.searchsorted(a[1], a[2], sorter=order))


@pytest.mark.parametrize("dtype", ["bool", "int16", "float64", "complex64"])
def test_sets(dtype: str) -> None:
    a = sample(dtype, (3, 4)) if dtype in ("bool", "int16") else np.round(sample(dtype, (3, 4)))
    x = xp.asarray(a)
    values, first, inverse, counts = np.unique(a, return_index=True, return_inverse=True, return_counts=True)
    made = xp.unique_all(x)
    for got, expected in zip(made, (values, first, inverse.reshape(a.shape), counts)):
        check(got, expected)
    check(xp.unique_values(x), values)
    check(xp.unique_counts(x).counts, counts)
    check(xp.unique_inverse(x).inverse_indices, inverse.reshape(a.shape))
    for got, expected in zip(xp.nonzero(x), np.nonzero(a)):
        check(got, expected)
    check(xp.isin(x, x[0]), np.isin(a, a[0]))
    check(xp.isin(x, x[0], invert=True), ~np.isin(a, a[0]))


def test_types_that_have_no_order() -> None:
    with pytest.raises(InputError, match="sort: expected real numbers"):
        xp.sort(xp.asarray([1j, 2j]))
    with pytest.raises(InputError, match="max: expected real numbers"):
        xp.max(xp.asarray([1j, 2j]))
