"""Choices, conditions, partitions, views, differences and reductions without NaN, against NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.array.errors import TypeInputError, ValueInputError
from dnnc.ir.errors import InputError

DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64", "complex128")
SHAPES = ((), (1,), (0,), (5,), (3, 4), (2, 0), (2, 3, 4))
rng = np.random.default_rng(11)


def sample(dtype: str, shape: tuple[int, ...], nans: bool = False) -> Any:
    a = np.asarray(rng.integers(0, 2 if dtype == "bool" else 7, shape)).astype(dtype)
    if np.dtype(dtype).kind in "fc":
        a = np.asarray(a + rng.random(shape).astype(dtype))
        if nans and a.size:
            a[rng.random(shape) < 0.3] = np.nan
    return a


def same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    if isinstance(want, tuple):
        assert isinstance(got, tuple) and len(got) == len(want)
        for g, w in zip(got, want):
            same(g, w, tolerance)
        return
    want = np.asarray(want)
    assert got.shape == want.shape and got.dtype == want.dtype, (got.dtype, want.dtype, got.shape, want.shape)
    loose = 5e-3 if want.dtype == np.float16 else tolerance
    np.testing.assert_allclose(np.asarray(got.numpy()), want, loose, loose)


ANY: dict[str, Callable[[Any, Any], Any]] = {
    "kron": lambda np, x: np.kron(x, x),
    "kron of other axes": lambda np, x: np.kron(x, x.ravel()[:2]),
    "compress": lambda np, x: np.compress(np.asarray([True, False, True][: x.size]), x),
    "extract": lambda np, x: np.extract(x != 0, x),
    "unique": lambda np, x: np.unique(x, return_index=True, return_inverse=True, return_counts=True),
    "nansum": lambda np, x: (np.nansum(x), np.nansum(x, axis=x.ndim - 1 if x.ndim else None)),
    "nanprod": lambda np, x: np.nanprod(x, axis=None, keepdims=True),
}
REAL: dict[str, Callable[[Any, Any], Any]] = {
    "divmod": lambda np, x: divmod(x, x + 3) + divmod(7, x + 3),
}
FILLED: dict[str, Callable[[Any, Any], Any]] = {  # of arrays that have elements
    "nanmean": lambda np, x: (np.nanmean(x), np.nanmean(x, axis=0 if x.ndim else None, keepdims=True)),
    "nanmax": lambda np, x: (np.nanmax(x), np.nanmin(x, axis=0 if x.ndim else None)),
    "nanvar": lambda np, x: (np.nanvar(x), np.nanvar(x, axis=-1, **{DDOF[np]: 1}) if x.ndim else np.nanvar(x)),
    "nanstd": lambda np, x: np.nanstd(x, axis=None),
    "nanargmax": lambda np, x: (np.nanargmax(x), np.nanargmin(x)),
}
DDOF = {np: "ddof", xp: "correction"}
EVERY = [*itertools.product(ANY, DTYPES, SHAPES)]


@pytest.mark.family("choices")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_all_dtypes_and_shapes(case: tuple[str, str, tuple[int, ...]]) -> None:
    name, dtype, shape = case
    a = sample(dtype, shape, nans=name.startswith("nan"))
    same(ANY[name](xp, xp.asarray(a)), ANY[name](np, a))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*REAL, *FILLED])
def test_real_numbers(name: str) -> None:
    for dtype, shape in (("int32", (3, 4)), ("float32", (2, 3, 4)), ("float64", ()), ("float64", (6,))):
        a = sample(dtype, shape, nans=name.startswith("nan") and name != "nanargmax")
        if name != "nanargmax" or a.size > 1:
            call = {**REAL, **FILLED}[name]
            same(call(xp, xp.asarray(a)), call(np, a))


@pytest.mark.filterwarnings("ignore")
def test_rows_of_nan() -> None:
    a = np.float32([[np.nan, np.nan], [1, np.nan]])
    x = xp.asarray(a)
    for name in ("nanmean", "nanmax", "nanmin", "nanvar", "nansum"):
        same(getattr(xp, name)(x, axis=1), getattr(np, name)(a, axis=1))
    same(xp.nanvar(x, axis=1, correction=1), np.float32([np.nan, np.nan]))


def test_gradients_leave_nan_out() -> None:
    x = xp.asarray(np.float64([[1, np.nan, 3], [2, 5, np.nan]]))
    x.requires_grad = True
    (xp.nanmean(x, axis=1).sum() + xp.nanvar(x) + xp.nanmax(x)).backward()
    assert x.grad is not None and np.isfinite(x.grad.numpy()).all()
    assert (x.grad.numpy()[np.isnan(x.numpy())] == 0).all()


@pytest.mark.parametrize("mode", ["raise", "wrap", "clip"])
def test_choose(mode: Any) -> None:
    at = np.array([[0, 2, 1], [1, 1, 0]]) + (0 if mode == "raise" else 3) * np.array([[1], [-1]])
    choices = [np.arange(3.0), np.float64(9), rng.random((2, 3))]
    want = np.choose(at, choices, mode=mode)
    same(xp.choose(xp.asarray(at), choices, mode=mode), want)
    same(xp.asarray(at).choose([xp.asarray(c) for c in choices], mode), want)
    for wrong in (-1, 3):
        if mode == "raise":
            with pytest.raises(InputError, match="outside"):
                xp.choose(xp.asarray(at + wrong), choices).numpy()


def test_choices_are_differentiated() -> None:
    a, b = (xp.asarray(rng.random(4)) for _ in range(2))
    da, db = dnnc.grad(lambda a, b: (xp.choose(xp.asarray([0, 1, 1, 0]), [a, b]) * 3).sum(), argnums=(0, 1))(a, b)
    assert da.tolist() == [3, 0, 0, 3] and db.tolist() == [0, 3, 3, 0]
    d = dnnc.grad(lambda x: xp.compress([True, False, True], x, axis=1).sum())(xp.asarray(np.ones((2, 3))))
    assert d.tolist() == [[1, 0, 1]] * 2


@pytest.mark.family("kernels")
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_partitions(shape: tuple[int, ...]) -> None:
    a = rng.permutation(np.arange(np.prod(shape)) * 1.0).reshape(shape)
    for axis, k in itertools.product((-1, 0, None), (0, 1, -1)):
        x = xp.asarray(a)
        got, line = xp.partition(x, k, axis=axis).numpy(), a.ravel() if axis is None else a
        along = -1 if axis is None else axis
        same(xp.asarray(np.take(got, k, along)), np.take(np.sort(line, along), k, along))
        found = np.take_along_axis(line, xp.argpartition(x, k, axis=axis).numpy(), along)
        assert (np.take(found, k, along) == np.take(got, k, along)).all()
    x = xp.asarray(a)
    x.partition(2)
    assert (np.take(x.numpy(), 2, -1) == np.take(np.partition(a, 2), 2, -1)).all()
    with pytest.raises(ValueInputError, match="kth=9 of"):
        xp.partition(xp.asarray(a), 9)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_put_and_flat(shape: tuple[int, ...]) -> None:
    a = rng.random(shape)
    x, n = xp.asarray(a), a.size
    for at, values, mode in (
        ([0, n - 1], [1.5, 2.5], "raise"), (-1, 7, "raise"), ([n + 1, -n - 1], [3, 4], "wrap"),
        (range(n), [8, 9], "raise"), ([-5, n + 9], 6.0, "clip"), ([], [], "raise"), ([0], [], "raise"),
    ):  # fmt: skip
        np.put(a, np.asarray(at, np.int64), values, mode=mode)
        x.put(at, values, mode)
        same(x, a)
    with pytest.raises(InputError, match=r"outside|indices from"):
        (x.put([n], 1), x.numpy())
    x = xp.asarray(a)
    assert len(x.flat) == n and [float(v) for v in x.flat] == list(a.flat)
    same(x.flat[0], a.flat[0])
    same(x.flat[:2], a.flat[:2])
    x.flat[0], a.flat[0] = 5, 5
    x.flat[-2:], a.flat[-2:] = [1, 2], [1, 2]
    same(x, a)
    x.flat = 4
    same(x, np.full(shape, 4.0))


def test_views_of_bytes() -> None:
    a = np.float32([1, -2, np.pi])
    same(xp.asarray(a).view("int32"), a.view("int32"))
    same(xp.asarray(a.view("int32")).view(np.float32), a)
    same(xp.asarray(a).view(), a)
    for wrong, message in (((3, 1), "reshape"), (np.int64, "astype"), (bool, "numpy"), (-1, "reshape")):
        with pytest.raises(TypeInputError, match=message):
            xp.asarray(a).view(wrong)


def test_contains() -> None:
    x = xp.asarray([[1.0, 2.0], [3.0, np.nan]])
    assert 2 in x and 7 not in x and np.nan not in x and xp.asarray([3.0, 9.0]) in x
    assert 5 in xp.asarray(5) and 1 not in xp.zeros((0,))


SPACINGS: dict[str, Any] = {
    "none": lambda a: (),
    "one": lambda a: (0.5,),
    "each": lambda a: tuple(0.5 + k for k in range(a.ndim)),
    "places": lambda a: tuple(np.cumsum(rng.random(n) + 0.1) for n in a.shape),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, order", [*itertools.product(SPACINGS, (1, 2))])
def test_gradient(name: str, order: Any) -> None:
    for a in (rng.random(6), rng.random((3, 4)), np.arange(5) ** 2, rng.random(order + 1), rng.random((3, 3, 3))):
        spacing = SPACINGS[name](a)
        same(xp.gradient(xp.asarray(a), *spacing, edge_order=order), np.gradient(a, *spacing, edge_order=order), 1e-9)
    a = rng.random((3, 4, 5))
    same(xp.gradient(xp.asarray(a), axis=(0, -1)), np.gradient(a, axis=(0, -1)))
    same(xp.gradient(xp.asarray(a), 2.0, axis=1), np.gradient(a, 2.0, axis=1))


def test_gradient_is_differentiated() -> None:
    d = dnnc.grad(lambda x: (xp.gradient(x, edge_order=2) * xp.asarray([1.0, 0, 0, 2])).sum())(xp.asarray(np.ones(4)))
    np.testing.assert_allclose(d.numpy(), [-1.5, 2 + 1, -0.5 - 4, 3], 1e-12)
    with pytest.raises(ValueInputError, match="1 elements along axis 0"):
        xp.gradient(xp.asarray([1.0]))


@pytest.mark.parametrize("case", [((3,), (3,), {}), ((2, 3), (3,), {}), ((3, 2), (3, 2), {"axis": 0}),
                                  ((4, 3), (3, 4), {"axisb": 0, "axisc": 0})], ids=str)  # fmt: skip
def test_cross(case: Any) -> None:
    left, right, named = case
    a, b = rng.random(left), rng.random(right)
    same(xp.cross(xp.asarray(a), b, **named), np.cross(a, b, **named))


def test_axes_of_unique() -> None:
    a = np.array([[1, 0], [2, 2], [1, 0]])
    same(xp.unique(xp.asarray(a), axis=0), np.unique(a, axis=0))
    same(np.unique(xp.asarray(a)), np.unique(a))


def test_conditions_that_do_not_fit() -> None:
    x = xp.asarray([1.0, 2.0])
    for call, message in (
        (lambda: xp.compress([[True]], x), "one axis"),
        (lambda: xp.compress([False, False, True], x), "ends before"),
        (lambda: xp.choose(x, [x]), "integers"),
        (lambda: xp.choose(xp.asarray([0]), []), "no arrays"),
        (lambda: x.put([0], 1, "never"), "mode='never'"),
        (lambda: xp.put([1.0], [0], 1), "to write into"),
    ):
        with pytest.raises(InputError, match=message):
            call()  # type: ignore[no-untyped-call]
