"""Element-wise functions and operators against NumPy, for every type that they take."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from array_samples import ALL, COMPLEX, FLOATS, INTS, check, sample

import dnnc.array as xp

FUNCTIONS = {
    "exp": (), "expm1": (), "sin": (), "cos": (), "tan": (-1.2, 1.2), "asin": (-0.9, 0.9), "acos": (-0.9, 0.9),
    "atan": (), "sinh": (), "cosh": (),
    "tanh": (), "asinh": (), "acosh": (1.1, 5.0), "atanh": (-0.8, 0.8), "log": (0.1, 9.0), "log2": (0.1, 9.0),
    "log10": (0.1, 9.0),
    "log1p": (-0.8, 9.0), "sqrt": (0.0, 9.0), "reciprocal": (0.2, 3.0), "exp2": (),
}  # fmt: skip
IN_NUMPY = {
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "asinh": "arcsinh",
    "acosh": "arccosh",
    "atanh": "arctanh",
}
REAL_ONLY = ("exp2",)


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("dtype", FLOATS + COMPLEX)
def test_functions_of_one_number(dtype: str) -> None:
    for name, bounds in FUNCTIONS.items():
        if np.dtype(dtype).kind == "c" and name in REAL_ONLY:
            continue
        a = sample(dtype, low=(bounds or (-3.0, 3.0))[0], high=(bounds or (-3.0, 3.0))[1])
        with np.errstate(all="ignore"):
            check(getattr(xp, name)(xp.asarray(a)), getattr(np, IN_NUMPY.get(name, name))(a), ulps=64)


@pytest.mark.family("cases")
@pytest.mark.parametrize("dtype", (*INTS, *FLOATS))
def test_arithmetic_of_real_numbers(dtype: str) -> None:
    a, b = sample(dtype, seed=1), sample(dtype, (5,), seed=2)
    b = np.where(b == 0, np.asarray(1, dtype), b)
    x, y = xp.asarray(a), xp.asarray(b)
    for name in ("add", "subtract", "multiply", "floor_divide", "remainder", "maximum", "minimum", "divide"):
        expected = getattr(np, name)(a, b)
        check(
            getattr(xp, name)(x, y),
            expected.astype("float64") if name == "divide" and a.dtype.kind in "iu" else expected,
        )
    for name in ("sign", "square", "abs", "positive", "negative", "floor", "ceil", "trunc", "round"):
        check(getattr(xp, name)(x), np.rint(a).astype(dtype) if name == "round" else getattr(np, name)(a).astype(dtype))
    check(
        xp.clip(x, -1 if a.dtype.kind != "u" else 1, 4),
        np.clip(a, np.asarray(-1 if a.dtype.kind != "u" else 1, dtype), np.asarray(4, dtype)),
    )
    if a.dtype.kind != "f":
        small = np.abs(b) % 4
        check(x ** xp.asarray(small), a**small)
    check(x**2, a**2)
    check(xp.pow(xp.abs(x), 3), np.abs(a) ** 3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", COMPLEX)
def test_arithmetic_of_complex_numbers(dtype: str) -> None:
    a, b = sample(dtype, seed=1), sample(dtype, (5,), seed=2)
    x, y = xp.asarray(a), xp.asarray(b)
    for name in ("add", "subtract", "multiply", "divide"):
        check(getattr(xp, name)(x, y), getattr(np, name)(a, b))
    check(x**y, a**b, ulps=400)
    for name in ("abs", "conj", "real", "imag", "sign", "square", "negative", "angle", "isfinite", "isnan", "isinf"):
        check(getattr(xp, name)(x), getattr(np, name)(a), ulps=32)
    check(xp.equal(x, x + 0), np.ones(a.shape, bool))
    check(x * 2j + 1, a * 2j + np.asarray(1, dtype))


@pytest.mark.family("cases")
@pytest.mark.parametrize("dtype", ALL)
def test_comparisons(dtype: str) -> None:
    a, b = sample(dtype, seed=1), sample(dtype, (5,), seed=2)
    b[0] = a[0, 0]
    names = (
        ("equal", "not_equal")
        if a.dtype.kind == "c"
        else ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
    )
    for name in names:
        check(getattr(xp, name)(xp.asarray(a), xp.asarray(b)), getattr(np, name)(a, b))
    for name in ("logical_and", "logical_or", "logical_xor"):
        check(getattr(xp, name)(xp.asarray(a), xp.asarray(b)), getattr(np, name)(a, b))
    check(xp.logical_not(xp.asarray(a)), np.logical_not(a))


@pytest.mark.family("cases")
@pytest.mark.parametrize("dtype", ("bool", *INTS))
def test_bits(dtype: str) -> None:
    a, b = sample(dtype, seed=1), sample(dtype, (5,), seed=2)
    for f in (operator.and_, operator.or_, operator.xor):
        check(f(xp.asarray(a), xp.asarray(b)), f(a, b))
    check(~xp.asarray(a), ~a)
    if dtype != "bool":
        far = np.array([0, 1, 3, 7, 100], dtype)
        check(xp.asarray(a) << xp.asarray(far), np.left_shift(a, far))
        check(xp.asarray(a) >> xp.asarray(far), np.right_shift(a, far))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_numbers(dtype: str) -> None:
    special = np.array([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, np.inf, -np.inf, np.nan], dtype)
    a, b = (v.reshape(-1) for v in np.meshgrid(special, special))
    x, y = xp.asarray(a), xp.asarray(b)
    with np.errstate(all="ignore"):
        for name in ("hypot", "logaddexp", "copysign", "nextafter", "maximum", "minimum"):
            check(getattr(xp, name)(x, y), getattr(np, name)(a, b))
        check(xp.atan2(x, y), np.arctan2(a, b))
        assert np.array_equal(np.signbit(np.asarray(xp.atan2(x, y))), np.signbit(np.arctan2(a, b)))
        plain = np.isinf(a) | np.isinf(b) | (b == 0)  # where the standard has the quotient itself
        check(x // y, np.where(plain, a / b, np.floor_divide(a, b)))
        check(x % y, np.remainder(a, b))
        for name in ("isfinite", "isinf", "isnan", "signbit", "floor", "ceil", "trunc", "sign"):
            check(getattr(xp, name)(xp.asarray(special)), getattr(np, name)(special))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", COMPLEX)
def test_special_complex_numbers(dtype: str) -> None:
    special = np.array([0.0, 1.5, -2.0, np.inf, -np.inf, np.nan], np.float32)
    a = np.array([complex(p, q) for p in special for q in special], dtype)
    with np.errstate(all="ignore"):
        for name in ("sinh", "cosh", "tanh", "exp", "sqrt", "log", "asinh", "atanh"):
            got, expected = np.asarray(getattr(xp, name)(xp.asarray(a))), getattr(np, IN_NUMPY.get(name, name))(a)
            for p, q in ((got.real, expected.real), (got.imag, expected.imag)):
                np.testing.assert_allclose(
                    np.abs(p), np.abs(q), rtol=1e-5, atol=1e-6, err_msg=name
                )  # some signs are left open


def test_promotion_with_numbers_and_other_types() -> None:
    f, i, b = (
        xp.asarray(np.ones(3, np.float32)),
        xp.asarray(np.ones(3, np.int16)),
        xp.asarray(np.array([True, False, True])),
    )
    assert (f * 0.1).dtype == xp.float32 and (2 + f).dtype == xp.float32 and (i + 1).dtype == xp.int16
    assert (f * 1j).dtype == xp.complex64 and (i * 0.5).dtype == xp.float64 and (i / 2).dtype == xp.float64
    assert (i + xp.asarray(np.ones(3, np.uint16))).dtype == xp.int32
    assert (xp.asarray(np.ones(3, np.uint8)) + xp.asarray(np.ones(3, np.uint16))).dtype == xp.uint16
    check(xp.where(b, f, 0.0), np.array([1, 0, 1], np.float32))
    check(b + b, np.array([True, False, True]))
    with pytest.raises(xp_error(), match="no int16"):
        i + 70000
    with pytest.raises(xp_error(), match="subtract: expected"):
        b - b


def xp_error() -> type[Exception]:
    from dnnc.ir.errors import InputError

    return InputError


@pytest.mark.family("cases")
@pytest.mark.parametrize("source", ALL)
def test_casts(source: str) -> None:
    a = sample(source, low=0.0, high=3.0)
    a = np.abs(a) if a.dtype.kind == "i" else a
    for target in ALL:
        if a.dtype.kind == "c" and np.dtype(target).kind not in "cb":
            continue
        check(xp.astype(xp.asarray(a), np.dtype(target)), a.astype(target))


def test_numpy_arrays_and_scalars_are_operands() -> None:
    a = np.arange(6.0).reshape(2, 3)
    x = xp.asarray(a)
    check(a + x, a + a)
    check(x * np.float64(2), a * 2)
    check(np.float64(2) - x, 2 - a)


def test_in_place_operators_keep_the_type_and_other_handles() -> None:
    a = np.arange(5, dtype=np.int32)
    x = xp.asarray(a)
    before = x + 0
    y = x
    x += 3
    x *= 2
    assert y is x
    check(x, (a + 3) * 2)
    check(before, a)
