"""Gradients of discrete Fourier transforms against PyTorch: both directions, halves of spectra, other lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.pullbacks import TARGETS, compiled, cotangents, ops, pulled


def as_complex(t: Any) -> Any:
    return torch.complex(t[..., 0], t[..., 1] if t.shape[-1] == 2 else torch.zeros_like(t[..., 0]))


def transformed(t: Any, axis: int, length: int | None, inverse: bool, half: bool) -> Any:
    """By PyTorch, in parts of numbers."""
    z = as_complex(t)
    if inverse and half:
        return torch.fft.irfft(z, length, axis)[..., None]
    if half:
        full = torch.view_as_real(torch.fft.fft(z, length, axis))
        return full.narrow(axis, 0, full.shape[axis] // 2 + 1)
    return torch.view_as_real((torch.fft.ifft if inverse else torch.fft.fft)(z, length, axis))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("inverse,half", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("size,length", [(8, None), (7, None), (6, 9), (9, 6), (5, 4), (1, None), (12, 37)])
def test_dft(size: int, length: int | None, inverse: bool, half: bool, parts: int) -> None:
    if inverse and half and size == 1 and length is None:
        length = 1  # of one number there is no spectrum else
    rng = np.random.default_rng(size)
    for axis, shape in ((0, (size, 2, parts)), (1, (3, size, parts))):
        x = rng.standard_normal(shape)
        t = torch.tensor(x, requires_grad=True)
        y = transformed(t, axis, length, inverse, half)
        g = rng.standard_normal(tuple(y.shape))
        y.backward(torch.tensor(g))
        build = lambda b, x, axis=axis: b.dft(x, axis=axis, length=length, inverse=inverse, onesided=half)  # noqa: E731
        (found,) = cotangents(build, [x], g)
        np.testing.assert_allclose(found, t.grad.numpy(), rtol=1e-9, atol=1e-12)
        assert "dft" in ops(pulled(build, [x], [0]))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("inverse,half", [(False, False), (False, True), (True, True)])
def test_kernels(inverse: bool, half: bool, target: str) -> None:
    rng = np.random.default_rng(0)
    parts = 1 if half and not inverse else 2
    x = rng.standard_normal((2, 12, parts)).astype(np.float32)
    t = torch.tensor(x.astype(np.float64), requires_grad=True)
    y = transformed(t, 1, None, inverse, half)
    g = rng.standard_normal(tuple(y.shape)).astype(np.float32)
    y.backward(torch.tensor(g.astype(np.float64)))
    (found,) = compiled(lambda b, x: b.dft(x, axis=1, inverse=inverse, onesided=half), [x], g, target=target)
    np.testing.assert_allclose(found, t.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inverse,half", [(False, False), (True, False), (False, True), (True, True)])
def test_the_rule_of_the_rule_is_the_transform(inverse: bool, half: bool) -> None:
    """<g, F x> = <F' g, x>, and F'' = F."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((10, 2))
    build = lambda b, x: b.dft(x, axis=0, inverse=inverse, onesided=half)  # noqa: E731
    transform = transformed(torch.tensor(x), 0, None, inverse, half).numpy()
    g = rng.standard_normal(transform.shape)
    (back,) = cotangents(build, [x], g)
    assert (back * x).sum() == pytest.approx((g * transform).sum(), rel=1e-12)
