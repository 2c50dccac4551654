"""Creation, movement and indexing against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from array_samples import ALL, check, sample

import dnnc.array as xp
from dnnc.ir.errors import InputError


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float32", "complex64"])
def test_creation(dtype: str) -> None:
    d = np.dtype(dtype)
    check(xp.zeros((2, 3), dtype=d), np.zeros((2, 3), d))
    check(xp.ones(4, dtype=d), np.ones(4, d))
    check(xp.full((2, 0), 1, dtype=d), np.ones((2, 0), d))
    check(xp.eye(3, 4, k=1, dtype=d), np.eye(3, 4, 1, d))
    check(xp.full_like(xp.zeros((2, 2), dtype=d), 1), np.ones((2, 2), d))
    if d.kind != "b":
        check(xp.arange(1, 9, 3, dtype=d), np.arange(1, 9, 3, dtype=d))
        check(xp.tril(xp.asarray(sample(dtype)), k=-1), np.tril(sample(dtype), -1))
        check(xp.triu(xp.asarray(sample(dtype)), k=1), np.triu(sample(dtype), 1))


@pytest.mark.slow
def test_ranges() -> None:
    for args in ((5,), (2, 9), (9, 2, -2), (0, 1, 0.25), (3, 3), (0.5, 4), (10, 0)):
        check(xp.arange(*args), np.arange(*args))
    check(xp.linspace(0, 1, 7), np.linspace(0, 1, 7))
    check(
        xp.linspace(-2, 3, 5, endpoint=False, dtype=xp.float32), np.linspace(-2, 3, 5, endpoint=False, dtype=np.float32)
    )
    assert np.asarray(xp.linspace(0, 0.1, 11))[-1] == 0.1
    check(xp.linspace(0, 1 + 1j, 4), np.linspace(0, 1 + 1j, 4))
    for indexing in ("xy", "ij"):
        for a, b in zip(xp.meshgrid(xp.arange(3), xp.arange(2), xp.arange(4), indexing=indexing),
                        np.meshgrid(np.arange(3), np.arange(2), np.arange(4), indexing=indexing)):  # fmt: skip
            check(a, b)


@pytest.mark.family("cases")
@pytest.mark.parametrize("dtype", ["int16", "float32", "complex128", "bool"])
def test_movement(dtype: str) -> None:
    a = sample(dtype, (2, 3, 4))
    x = xp.asarray(a)
    check(xp.reshape(x, (4, -1)), a.reshape(4, -1))
    check(xp.permute_dims(x, (2, 0, 1)), a.transpose(2, 0, 1))
    check(xp.moveaxis(x, (0, 2), (1, 0)), np.moveaxis(a, (0, 2), (1, 0)))
    check(x.mT, a.swapaxes(1, 2))
    check(xp.squeeze(xp.expand_dims(x, axis=1), axis=1), a)
    check(xp.expand_dims(x, axis=(0, -1)), np.expand_dims(a, (0, -1)))
    check(xp.broadcast_to(x, (3, 2, 3, 4)), np.broadcast_to(a, (3, 2, 3, 4)))
    check(xp.concat([x, x[:, :1]], axis=1), np.concatenate([a, a[:, :1]], 1))
    check(xp.concat([x, x], axis=None), np.concatenate([a, a], None))
    check(xp.stack([x, x], axis=-1), np.stack([a, a], -1))
    check(xp.unstack(x, axis=1)[2], a[:, 2])
    check(xp.flip(x), np.flip(a))
    check(xp.flip(x, axis=(0, 2)), np.flip(a, (0, 2)))
    check(xp.roll(x, (1, -5), axis=(0, 2)), np.roll(a, (1, -5), (0, 2)))
    check(xp.roll(x, 3), np.roll(a, 3))
    check(xp.tile(x, (2, 1, 1, 3)), np.tile(a, (2, 1, 1, 3)))
    check(xp.repeat(x, 2, axis=1), np.repeat(a, 2, 1))
    check(xp.repeat(x, xp.asarray([0, 2, 1]), axis=1), np.repeat(a, [0, 2, 1], 1))
    check(xp.take(x, xp.asarray([2, -1, 0]), axis=2), a.take([2, -1, 0], 2))
    order = np.array([[[0, 1]], [[2, -1]]])
    check(xp.take_along_axis(x, xp.asarray(order), axis=2), np.take_along_axis(a, np.broadcast_to(order, (2, 3, 2)), 2))


KEYS: list[Any] = [
    1, -1, (0, 2), slice(None), slice(1, None), (slice(None), slice(None, None, -1)), (..., 0), (None, 1),
    (slice(3, 1), ...), (1, None, ..., slice(0, 4, 3)),
    ([0, 1, 1],), (slice(None), [2, 0]), ([0, 1], [2, 0]), (slice(None), [2, 0], [1, 3]), ([1, 0], slice(None), [1, 3]),
    (slice(None), [[1], [2]], [0, 3]),
    (0, [2, 1]), (slice(None, None, -1), [0, -1], None), (1, slice(2, 0, -1), 3),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_reading_by_keys(dtype: str) -> None:
    a = sample(dtype, (2, 3, 4))
    for key in KEYS:
        check(xp.asarray(a)[_arrays(key)], np.asarray(a[key]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_writing_by_keys(dtype: str) -> None:
    for key in KEYS:
        a = sample(dtype, (2, 3, 4))
        x = xp.asarray(a)
        before = x[...]
        value = (
            sample(dtype, a[key].shape, seed=5) if "1, 1" not in str(key) else np.asarray(7, dtype)
        )  # of equal places any may win
        x[_arrays(key)] = xp.asarray(value)
        check(before, a)
        a[key] = value
        check(x, a)


def _arrays(key: Any) -> Any:
    return tuple(xp.asarray(k) if isinstance(k, list) else k for k in key) if isinstance(key, tuple) else key


@pytest.mark.slow
def test_truth_values_as_keys() -> None:
    a = sample("float64", (4, 3))
    x = xp.asarray(a)
    check(x[x > 0], a[a > 0])
    rows = np.array([True, False, True, True])
    check(x[xp.asarray(rows)], a[rows])
    check(x[xp.asarray(rows), 1], a[rows, 1])
    check(x[xp.asarray(np.array(True))], a[True])
    x[x < 0] = 0.0
    check(x, np.where(a < 0, 0, a))
    x[xp.asarray(rows)] = xp.asarray(np.ones((3, 3)))
    assert float(xp.sum(x[xp.asarray(rows)])) == 9.0


def test_keys_that_do_not_fit() -> None:
    x = xp.zeros((2, 3))
    for key in (2, (0, 3), (0, 0, 0), (..., ...), xp.asarray([0, 2]), 1.0, xp.asarray([True])):
        with pytest.raises(IndexError):
            x[key]
    with pytest.raises(InputError, match="does not fit"):
        x[0] = xp.zeros(4)
    with pytest.raises(InputError, match="do not fit"):
        xp.reshape(x, (4, -1))
    lazy = xp.arange(3) + 1
    with pytest.raises(InputError, match="outside of its axis"):
        np.asarray(xp.arange(3)[lazy])


@pytest.mark.parametrize("dtype", ALL)
def test_empty_and_scalar_arrays(dtype: str) -> None:
    e, s = np.zeros((0, 3), dtype), np.ones((), dtype)
    check(xp.asarray(e) == xp.asarray(e), e == e)
    check(xp.concat([xp.asarray(e), xp.asarray(np.ones((1, 3), dtype))]), np.ones((1, 3), dtype))
    check(xp.reshape(xp.asarray(s), (1, 1)), s.reshape(1, 1))
    check(xp.flip(xp.asarray(e)), np.flip(e))
    check(xp.roll(xp.asarray(e), 1, axis=1), e)
    check(xp.asarray(s)[()], s)
    check(xp.sum(xp.asarray(e), axis=0), np.sum(e, axis=0))
