"""Transforms against NumPy's in double precision: each radix, their products, large prime factors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.ir.dtype import f32, f64
from dnnc.ir.errors import ShapeError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.ops.fft import radices
from dnnc.ir.types import TensorType

Array = np.ndarray[Any, Any]
LENGTHS = [1, 2, 3, 4, 5, 8, 10, 30, 31, 37, 64, 97, 360, 509]


def dft(x: Array, **attrs: Any) -> Array:
    g = Graph("g")
    v = g.add_input("x", TensorType(f64 if x.dtype == np.float64 else f32, x.shape))
    g.outputs = [Builder(g).dft(v, **attrs)]
    return run(g, [x])[0]


def joined(x: Array) -> Array:
    return x[..., 0] + 1j * x[..., 1]


@pytest.mark.parametrize("n", LENGTHS)
def test_complex(n: int) -> None:
    x = np.random.default_rng(n).standard_normal((2, n, 3, 2))
    want = np.fft.fft(joined(x), axis=1)
    np.testing.assert_allclose(joined(dft(x, axis=1)), want, rtol=0, atol=1e-13 * n)
    np.testing.assert_allclose(joined(dft(x, axis=1, inverse=True)), np.fft.ifft(joined(x), axis=1), rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", LENGTHS)
def test_real_and_back(n: int) -> None:
    x = np.random.default_rng(n).standard_normal((2, n, 1))
    half = dft(x, axis=1, onesided=True)
    np.testing.assert_allclose(joined(half), np.fft.rfft(x[..., 0], axis=1), rtol=0, atol=1e-13 * n)
    back = dft(half, axis=1, inverse=True, onesided=True, length=n)
    np.testing.assert_allclose(back, x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("length", [4, 7, 20])
def test_cut_and_filled(length: int) -> None:
    x = np.random.default_rng(length).standard_normal((9, 2, 2))
    np.testing.assert_allclose(
        joined(dft(x, axis=0, length=length)), np.fft.fft(joined(x), length, axis=0), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("n", [16, 96, 1000, 1021, 4096])
def test_errors_grow_with_the_logarithm(n: int) -> None:
    x = np.random.default_rng(n).standard_normal((1, n, 2)).astype(np.float32)
    want = np.fft.fft(joined(x.astype(np.float64)), axis=1)
    error = np.sqrt(np.mean(np.abs(joined(dft(x, axis=1)) - want) ** 2) / np.mean(np.abs(want) ** 2))
    assert error < 2.0**-24 * np.log2(n) * (4 if radices(n) is None else 1.5)


def test_the_middle_of_a_real_spectrum_is_real() -> None:
    x = np.random.default_rng(0).standard_normal((1, 120, 1)).astype(np.float32)
    y = dft(x, axis=1)
    assert y[0, 60, 1] == 0 and y[0, 0, 1] == 0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="1 \\(real\\) or 2"):
        dft(np.zeros((4, 3)), axis=0)
    with pytest.raises(ShapeError, match="holds the parts"):
        dft(np.zeros((4, 2)), axis=1)
