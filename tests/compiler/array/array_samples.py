"""What the tests of arrays share: samples of every type, and a comparison with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

import dnnc.array as xp

INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float32", "float64")
COMPLEX = ("complex64", "complex128")
ALL = ("bool", *INTS, *FLOATS, *COMPLEX)


def sample(
    dtype: str, shape: tuple[int, ...] = (3, 5), seed: int = 0, low: float = -3.0, high: float = 3.0
) -> np.ndarray[Any, Any]:
    """Random numbers of a type; floats between bounds, integers of both signs where there are any."""
    rng = np.random.default_rng(seed)
    d = np.dtype(dtype)
    if d.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if d.kind in "iu":
        return rng.integers(-9 if d.kind == "i" else 0, 10, shape).astype(d)
    x = rng.uniform(low, high, shape)
    return (x + 1j * rng.uniform(low, high, shape) if d.kind == "c" else x).astype(d)


def check(got: Any, expected: Any, ulps: float = 16.0) -> None:
    """Same type, same shape, and equal but for some units in the last place of the largest number."""
    a, b = np.asarray(got), np.asarray(expected)
    assert isinstance(got, xp.Array)
    assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{a.dtype} {a.shape} instead of {b.dtype} {b.shape}"
    if b.dtype.kind in "biu":
        np.testing.assert_array_equal(a, b)
    else:
        eps = float(np.finfo(b.dtype).eps)
        np.testing.assert_allclose(a, b, rtol=ulps * eps, atol=ulps * eps)
