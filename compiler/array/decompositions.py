"""Matrix decompositions by LAPACK on the host, as the graph IR has none; results go where operands live."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dnnc.array.core import Array, cast
from dnnc.array.errors import ValueInputError
from dnnc.array.host import computed, contents
from dnnc.array.promotion import kind_of, real_of


class EigResult(NamedTuple):
    eigenvalues: Array
    eigenvectors: Array


class EighResult(NamedTuple):
    eigenvalues: Array
    eigenvectors: Array


class QRResult(NamedTuple):
    Q: Array
    R: Array


class SlogdetResult(NamedTuple):
    sign: Array
    logabsdet: Array


class SVDResult(NamedTuple):
    U: Array
    S: Array
    Vh: Array


def _matrices(name: str, x: Array, square: bool = False) -> np.ndarray[Any, Any]:
    if kind_of(x.dtype) not in "fc":
        raise ValueInputError(f"{name}: expected floating-point or complex numbers, got {x.dtype}")
    if x.ndim < 2 or (square and x.shape[-1] != x.shape[-2]):
        raise ValueInputError(f"{name}: expected {'square ' if square else ''}matrices, got shape {x.shape}")
    wide = cast(x, np.dtype(np.float32)) if x.dtype.itemsize == 2 else x
    return contents(wide)


def _as(function: str, a: Any, dtype: Any, x: Array) -> Array:
    """A result, where the operand lives."""
    return computed(f"linalg.{function}", np.asarray(a, dtype), x)


def cholesky(x: Array, /, *, upper: bool = False) -> Array:
    """InputError where a matrix is not positive definite."""
    try:
        low = np.linalg.cholesky(_matrices("cholesky", x, True))
    except np.linalg.LinAlgError as e:
        raise ValueInputError(f"cholesky: {e}; expected Hermitian matrices with positive eigenvalues") from None
    return _as("cholesky", low.swapaxes(-1, -2).conj() if upper else low, x.dtype, x)


def _wide(x: Array) -> Any:
    return np.complex64 if real_of(x.dtype).itemsize <= 4 else np.complex128


def eig(x: Array, /) -> EigResult:
    """Eigenvalues and eigenvectors of square matrices. Runs on the host."""
    values, vectors = np.linalg.eig(_matrices("eig", x, True))
    wide = _wide(x)
    return EigResult(_as("eig", values, wide, x), _as("eig", vectors, wide, x))


def eigvals(x: Array, /) -> Array:
    """Eigenvalues of square matrices. Runs on the host."""
    return _as("eigvals", np.linalg.eigvals(_matrices("eigvals", x, True)), _wide(x), x)


def eigh(x: Array, /) -> EighResult:
    """Eigenvalues and eigenvectors of symmetric or Hermitian matrices. Runs on the host."""
    values, vectors = np.linalg.eigh(_matrices("eigh", x, True))
    return EighResult(_as("eigh", values, real_of(x.dtype), x), _as("eigh", vectors, x.dtype, x))


def eigvalsh(x: Array, /) -> Array:
    """Eigenvalues of symmetric or Hermitian matrices. Runs on the host."""
    return _as("eigvalsh", np.linalg.eigvalsh(_matrices("eigvalsh", x, True)), real_of(x.dtype), x)


def qr(x: Array, /, *, mode: str = "reduced") -> QRResult:
    """QR decompositions of matrices. Runs on the host."""
    if mode not in ("reduced", "complete"):
        raise ValueInputError(f"qr: mode={mode!r}: expected 'reduced' or 'complete'")
    q, r = np.linalg.qr(_matrices("qr", x), mode=mode)  # type: ignore[call-overload]
    return QRResult(_as("qr", q, x.dtype, x), _as("qr", r, x.dtype, x))


def complex_det(x: Array) -> Array:
    """The determinants of complex matrices."""
    return _as("det", np.linalg.det(_matrices("det", x, True)), x.dtype, x)


def slogdet(x: Array, /) -> SlogdetResult:
    """Signs and logarithms of the absolute values of determinants. Runs on the host."""
    sign, log = np.linalg.slogdet(_matrices("slogdet", x, True))
    return SlogdetResult(_as("slogdet", sign, x.dtype, x), _as("slogdet", log, real_of(x.dtype), x))


def svd(x: Array, /, *, full_matrices: bool = True) -> SVDResult:
    """Singular value decompositions of matrices. Runs on the host."""
    u, s, vh = np.linalg.svd(_matrices("svd", x), full_matrices=full_matrices)
    return SVDResult(_as("svd", u, x.dtype, x), _as("svd", s, real_of(x.dtype), x), _as("svd", vh, x.dtype, x))


def svdvals(x: Array, /) -> Array:
    """Singular values of matrices. Runs on the host."""
    return _as("svdvals", np.linalg.svd(_matrices("svdvals", x), compute_uv=False), real_of(x.dtype), x)


def _tolerance(x: Array, rtol: Any) -> Any:
    """Of the largest singular value, by default what rounding leaves of zeros."""
    if rtol is None:
        return max(x.shape[-2:]) * float(ml_dtypes.finfo(real_of(x.dtype)).eps)  # type: ignore[no-untyped-call]
    return rtol.numpy() if isinstance(rtol, Array) else np.asarray(rtol)


def matrix_rank(x: Array, /, *, rtol: Any = None) -> Array:
    """Ranks of matrices, by singular values above a tolerance. Runs on the host."""
    s = np.linalg.svd(_matrices("matrix_rank", x), compute_uv=False)
    least = s.max(axis=-1, keepdims=True, initial=0.0) * np.asarray(_tolerance(x, rtol))[..., None]
    return _as("matrix_rank", np.count_nonzero(s > least, axis=-1), np.int64, x)


def pinv(x: Array, /, *, rtol: Any = None) -> Array:
    """Moore-Penrose pseudo-inverses of matrices. Runs on the host."""
    return _as("pinv", np.linalg.pinv(_matrices("pinv", x), rcond=_tolerance(x, rtol)), x.dtype, x)


def singular_norm(x: Array, order: Any, keepdims: bool) -> Array:
    """The norms of matrices that their singular values give: 2 the largest, -2 the smallest, "nuc" the sum."""
    s = np.linalg.svd(_matrices("matrix_norm", x), compute_uv=False)
    norm = s.sum(-1) if order == "nuc" else s.max(-1, initial=0.0) if order == 2 else s.min(-1, initial=math.inf)
    return _as("matrix_norm", norm[..., None, None] if keepdims else norm, real_of(x.dtype), x)
