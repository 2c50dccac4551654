"""Products, norms, elimination and Fourier transforms against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from array_samples import COMPLEX, FLOATS, check, sample

import dnnc.array as xp
from dnnc.ir.errors import InputError

pytestmark = pytest.mark.family("cases")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "uint32", *FLOATS, *COMPLEX])
def test_products(dtype: str) -> None:
    a, b = sample(dtype, (2, 3, 4), 1), sample(dtype, (4, 5), 2)
    v = sample(dtype, (4,), 3)
    x, y, w = map(xp.asarray, (a, b, v))
    check(x @ y, a @ b)
    check(x @ w, a @ v)
    check(w @ y, v @ b)
    check(xp.matmul(w, w), np.asarray(v @ v))
    check(xp.tensordot(x, y, axes=1), np.tensordot(a, b, 1))
    check(xp.tensordot(x, x, axes=((0, 2), (0, 2))), np.tensordot(a, a, ((0, 2), (0, 2))))
    check(xp.vecdot(x, x), np.sum(a.conj() * a, -1, dtype=a.dtype))
    check(xp.linalg.outer(w, w), np.outer(v, v))
    check(xp.linalg.cross(x[..., :3], x[..., 1:]), np.cross(a[..., :3], a[..., 1:]))
    check(xp.linalg.trace(x, offset=1), np.trace(a, 1, 1, 2))
    for offset in (-2, 0, 3, 9):
        check(xp.linalg.diagonal(x, offset=offset), np.diagonal(a, offset, 1, 2))
    with pytest.raises(InputError, match="do not fit"):
        x @ x


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_norms(dtype: str) -> None:
    a = sample(dtype, (2, 3, 4))
    x = xp.asarray(a)
    for order in (0, 1, 2, 3, np.inf, -np.inf):
        check(xp.linalg.vector_norm(x, ord=order, axis=-1), np.linalg.norm(a, ord=order, axis=-1), ulps=64)
    check(xp.linalg.vector_norm(x), np.asarray(np.linalg.norm(a)))
    for order in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf):
        check(xp.linalg.matrix_norm(x, ord=order), np.linalg.norm(a, ord=order, axis=(-2, -1)))
    check(xp.linalg.matrix_norm(x, ord=2, keepdims=True), np.linalg.norm(a, ord=2, axis=(-2, -1), keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_elimination(dtype: str) -> None:
    a = sample(dtype, (2, 5, 5)) + 4 * np.eye(5, dtype=dtype)
    b = sample(dtype, (2, 5, 3), 7)
    x = xp.asarray(a)
    check(xp.linalg.det(x), np.linalg.det(a), ulps=512)
    check(xp.linalg.inv(x), np.linalg.inv(a), ulps=64)
    check(xp.linalg.solve(x, xp.asarray(b)), np.linalg.solve(a, b), ulps=64)
    check(xp.linalg.solve(x[0], xp.asarray(b[0, :, 0])), np.linalg.solve(a[0], b[0, :, 0]), ulps=64)
    for n in (0, 1, 2, 5, -2):
        check(xp.linalg.matrix_power(x / 8, n), np.linalg.matrix_power(a / np.asarray(8, dtype), n), ulps=2048)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_transforms(dtype: str) -> None:
    a = sample(dtype, (3, 8, 6))
    x = xp.asarray(a)
    for norm in ("backward", "ortho", "forward"):
        check(xp.fft.fft(x, norm=norm), np.fft.fft(a, norm=norm), ulps=128)
        check(xp.fft.ifft(x, axis=1, norm=norm), np.fft.ifft(a, axis=1, norm=norm), ulps=128)
        check(xp.fft.irfft(x, norm=norm), np.fft.irfft(a, norm=norm), ulps=128)
        check(xp.fft.hfft(x, norm=norm), np.fft.hfft(a, norm=norm), ulps=256)
    for n in (4, 5, 7, 10):
        check(xp.fft.fft(x, n=n), np.fft.fft(a, n=n), ulps=128)
        check(xp.fft.irfft(x, n=n), np.fft.irfft(a, n=n), ulps=128)
    check(xp.fft.fftn(x), np.fft.fftn(a), ulps=512)
    check(xp.fft.ifftn(x, axes=(0, 2)), np.fft.ifftn(a, axes=(0, 2)), ulps=128)
    check(xp.fft.irfftn(x), np.fft.irfftn(a), ulps=512)
    check(xp.fft.fftshift(x), np.fft.fftshift(a))
    check(xp.fft.ifftshift(x, axes=1), np.fft.ifftshift(a, axes=1))
    if np.dtype(dtype).kind == "f":
        check(xp.fft.rfft(x, axis=1), np.fft.rfft(a, axis=1), ulps=128)
        check(xp.fft.rfftn(x), np.fft.rfftn(a), ulps=512)
        check(xp.fft.ihfft(x, n=7), np.fft.ihfft(a, n=7), ulps=128)


def test_frequencies() -> None:
    for n in (1, 2, 7, 8):
        check(xp.fft.fftfreq(n, d=0.5), np.fft.fftfreq(n, d=0.5))
        check(xp.fft.rfftfreq(n), np.fft.rfftfreq(n))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_decompositions(dtype: str) -> None:
    a = sample(dtype, (2, 4, 3))
    square = sample(dtype, (3, 3), 5)
    positive = square @ square.conj().T + 3 * np.eye(3, dtype=dtype)
    x, p = xp.asarray(a), xp.asarray(positive)
    u, s, vh = xp.linalg.svd(x, full_matrices=False)
    check((u * s[:, None, :]) @ vh, a, ulps=64)
    check(xp.linalg.svdvals(x), np.linalg.svd(a, compute_uv=False))
    q, r = xp.linalg.qr(x)
    check(q @ r, a, ulps=64)
    assert xp.linalg.qr(x, mode="complete").Q.shape == (2, 4, 4)
    values, vectors = xp.linalg.eigh(p)
    check(p @ vectors, np.asarray(vectors * values), ulps=512)
    check(xp.linalg.eigvalsh(p), np.linalg.eigvalsh(positive))
    values, vectors = xp.linalg.eig(xp.asarray(square))
    check(xp.astype(xp.asarray(square), values.dtype) @ vectors, np.asarray(vectors * values), ulps=512)
    low = xp.linalg.cholesky(p)
    check(low @ xp.conj(low.mT), positive, ulps=512)
    check(xp.linalg.cholesky(p, upper=True), np.asarray(xp.conj(low.mT)))
    sign, log = xp.linalg.slogdet(p)
    check(sign * xp.exp(log), np.linalg.det(positive), ulps=512)
    check(xp.linalg.pinv(x), np.linalg.pinv(a), ulps=512)
    check(xp.linalg.matrix_rank(x[:, :, :1] @ x[:, :1, :]), np.array([1, 1]))
    with pytest.raises(InputError, match="positive eigenvalues"):
        xp.linalg.cholesky(-p)
    with pytest.raises(InputError, match="square"):
        xp.linalg.eigh(x)
