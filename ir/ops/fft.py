"""Discrete Fourier transforms by mixed radices: n * log(n) operations, and rounding errors that grow with log(n).

A transform of length n = r*m takes n numbers as [r, m, s], where s counts transforms that go on side by side, and makes
[m, r, s] of them: r-point transforms along the first axis, times roots of unity. Then come transforms of length m of
r*s columns, and so on; the result comes in order, and the innermost loop is contiguous. Complex numbers are two planes,
[2, ...]. Prime factors above LARGEST are left to Bluestein's method: a convolution of a length that is a power of two.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir import batching, te
from dnnc.ir.autodiff.rules import fft as rules
from dnnc.ir.expr import Expr, const, select
from dnnc.ir.op import PURE, Cost, OpDef, require
from dnnc.ir.ops.common import Array, dim, require_kind, same_dtype, sample
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

LARGEST = 31  # prime factor that has passes of its own


def radices(n: int, real: bool = False) -> list[int] | None:
    """The radices of the passes of length n, in order; None if a prime factor is too large.

    Even ones come last for real data: then the middle of the spectrum is a sum of real numbers, and exactly real. Else
        a lone 2 comes
    first, as in NumPy's transform, so that results agree to the last places.
    """
    even: list[int] = []
    odd: list[int] = []
    for r in (4, 2, *range(3, LARGEST + 1, 2)):
        while n % r == 0:
            (odd if r % 2 else even).append(r)
            n //= r
    if n > 1:
        return None
    return odd + even if real else sorted(even) + odd


# --- passes -----------------------------------------------------------------------------------------------------------


def _pass_type(x: TensorType, waves: TensorType, roots: TensorType) -> TensorType:
    require_kind("the operand of a transform", x, "f")
    require(x.rank == 4 and x.shape[0] == 2 and waves.rank == roots.rank == 3, "fft_pass needs [2, r, m, s]; got {}", x)
    _, r, m, s = x.shape
    require(isinstance(r, int) and waves.shape == (r, r // 2, 2), "waves must be [{}, {} // 2, 2]; got {}", r, r, waves)
    require(roots.shape == (m, r, 2), "roots must be [{}, {}, 2]; got {}", m, r, roots)
    same_dtype(x, waves, roots)
    return TensorType(x.dtype, (2, m, r, s))


def _pass(x: Tensor, waves: Tensor, roots: Tensor) -> Tensor:
    """`waves[k, j - 1]`: cosine and sine of 2 pi j k / r; `roots[p, k]`: factor of result k of column p."""
    _, r, m, s = x.dims
    assert isinstance(r, int)

    def part(i: tuple[Expr, ...], plane: int) -> Expr:
        """One plane of the r-point transform: elements j and r - j share their waves."""
        _, p, k, q = i
        total = x[plane, 0, p, q]
        turned: Expr | None = None
        for j in range(1, (r + 1) // 2):
            total = total + waves[k, j - 1, 0] * (x[plane, j, p, q] + x[plane, r - j, p, q])
            term = waves[k, j - 1, 1] * (x[1 - plane, j, p, q] - x[1 - plane, r - j, p, q])
            turned = term if turned is None else turned + term
        if r % 2 == 0:
            total = total + waves[k, r // 2 - 1, 0] * x[plane, r // 2, p, q]
        if turned is None:
            return total
        return total - turned if plane == 0 else total + turned

    def element(*i: Expr) -> Expr:
        if m == 1:
            return select(i[0].eq(0), part(i, 0), part(i, 1))
        re, im = part(i, 0), part(i, 1)
        c, d = roots[i[1], i[2], 0], roots[i[1], i[2], 1]
        return select(i[0].eq(0), re * c - im * d, re * d + im * c)

    return te.compute((2, m, r, s), x.dtype, element)


def _pass_numpy(x: Array, waves: Array, roots: Array) -> Array:
    r = x.shape[1]
    y = np.zeros((2, *waves.shape[:1], *x.shape[2:]), np.result_type(x, waves))
    for k in range(r):
        y[:, k] = x[:, 0]
        for j in range(1, (r + 1) // 2):  # pairs, as above: with an infinity among the numbers it matters
            cos, sin = waves[k, j - 1]
            even, odd = x[:, j] + x[:, r - j], x[:, j] - x[:, r - j]
            y[:, k] += cos * even + np.stack([-sin * odd[1], sin * odd[0]])
        if r % 2 == 0:
            y[:, k] += waves[k, r // 2 - 1, 0] * x[:, r // 2]
    y = np.swapaxes(y, 1, 2)
    if x.shape[2] == 1:
        return y.astype(x.dtype)
    c, d = roots[..., :1], roots[..., 1:]
    return np.stack([y[0] * c - y[1] * d, y[0] * d + y[1] * c]).astype(x.dtype)


def _multiply_type(x: TensorType, w: TensorType) -> TensorType:
    require_kind("the operand of a transform", x, "f")
    ok = x.rank == 3 and w.rank == 2 and x.shape[:2] == w.shape and x.shape[0] == 2
    require(ok, "numbers [2, n, s] and factors [2, n]; got {} and {}", x, w)
    same_dtype(x, w)
    return x


def _multiply(x: Tensor, w: Tensor) -> Tensor:
    def element(*i: Expr) -> Expr:
        _, k, q = i
        re, im, c, d = x[0, k, q], x[1, k, q], w[0, k], w[1, k]
        return select(i[0].eq(0), re * c - im * d, re * d + im * c)

    return te.compute(x.dims, x.dtype, element)


def _multiply_numpy(x: Array, w: Array) -> Array:
    c, d = w[..., None]
    return np.stack([x[0] * c - x[1] * d, x[0] * d + x[1] * c]).astype(x.dtype)


# --- transforms of planes [2, n, s] -----------------------------------------------------------------------------------


def _turns(numbers: Array, n: int, sign: int) -> Array:
    """Cosine and sine of so many n-ths of a turn, [..., 2]; exact where they are 0 or 1."""
    k = np.asarray(numbers, np.int64) % n
    eighths = np.round(8 * k / n).astype(np.int64) % 8
    angle = (
        2 * np.pi / (8 * n) * (8 * k - np.where((eighths == 0) & (8 * k > 4 * n), 8 * n, eighths * n))
    )  # from the nearest eighth
    c, s = np.cos(angle), np.sin(angle)
    half = np.sqrt(0.5)
    base = np.array([(1, 0), (half, half), (0, 1), (-half, half), (-1, 0), (-half, -half), (0, -1), (half, -half)])[
        eighths
    ]
    return np.stack([base[..., 0] * c - base[..., 1] * s, sign * (base[..., 0] * s + base[..., 1] * c)], -1)


def _planes(b: Any, a: Array, like: Any) -> Any:
    return b.constant(a, dtype=like.type.dtype)


def transform(b: Any, x: Any, sign: int, real: bool = False) -> Any:
    """The transform of x [2, n, s] along n, with exponents of that sign, not scaled. `real`: the second plane is 0."""
    _, n, columns = x.type.shape
    steps = radices(n, real)
    if steps is None:
        return _bluestein(b, x, sign)
    left, side = n, 1
    for r in steps:
        left //= r
        waves = _turns(np.outer(np.arange(r), np.arange(1, r // 2 + 1)), r, sign)
        roots = _turns(np.outer(np.arange(left), np.arange(r)), left * r, sign)
        y = b.reshape(x, shape=(2, r, left, dim(const(columns) * side)))
        side *= r
        x = b.reshape(
            b.fft_pass(y, _planes(b, waves, x), _planes(b, roots, x)), shape=(2, left, dim(const(columns) * side))
        )
    return b.reshape(x, shape=(2, n, columns))


def _bluestein(b: Any, x: Any, sign: int) -> Any:
    """j*k = (j^2 + k^2 - (k - j)^2) / 2 makes the transform a convolution with a chirp."""
    _, n, columns = x.type.shape
    m = 1 << (2 * n - 2).bit_length()
    chirp = _turns(np.arange(n) ** 2, 2 * n, sign).T
    kernel = np.zeros(m, np.complex128)
    kernel[:n] = chirp[0] - 1j * chirp[1]
    kernel[m - n + 1 :] = kernel[1:n][::-1]
    spectrum = np.fft.fft(kernel) / m
    y = b.pad(b.fft_multiply(x, _planes(b, chirp, x)), pads=(0, 0, 0, 0, m - n, 0))
    y = b.fft_multiply(transform(b, y, -1), _planes(b, np.stack([spectrum.real, spectrum.imag]), x))
    y = b.slice(transform(b, y, 1), starts=(0, 0, 0), steps=(1, 1, 1), shape=(2, n, columns))
    return b.fft_multiply(y, _planes(b, chirp, x))


# --- dft --------------------------------------------------------------------------------------------------------------


def _dft_type(
    x: TensorType, *, axis: int, length: int | None = None, inverse: bool = False, onesided: bool = False
) -> TensorType:
    require_kind("the operand of dft", x, "f")
    ok = x.rank >= 2 and x.shape[-1] in (1, 2)
    require(ok, "the last dim must be 1 (real) or 2 (real and imaginary part); got {}", x)
    a = normalize_axis(axis, x.rank)
    require(a != x.rank - 1, "dft along axis {} of {}, which holds the parts of a number", axis, x)
    n = _length(x, a, length, inverse and onesided)
    require(n > 0 and isinstance(x.shape[a], int), "dft needs a known length of at least 1; got {} of {}", n, x)
    kept, parts = (n, 1) if inverse and onesided else (n // 2 + 1 if onesided else n, 2)
    return TensorType(x.dtype, (*x.shape[:a], kept, *x.shape[a + 1 : -1], parts))


def _length(x: TensorType, axis: int, length: int | None, half: bool) -> int:
    size = x.shape[axis]
    require(isinstance(size, int), "axis {} of {} must be a number", axis, x)
    assert isinstance(size, int)
    return length if length is not None else 2 * (size - 1) if half else size


def _dft(b: Any, x: Any, *, axis: int, length: int | None, inverse: bool, onesided: bool) -> Any:
    rank, real = x.type.rank, x.type.dtype
    a = normalize_axis(axis, rank)
    n = _length(x.type, a, length, inverse and onesided)
    others = [k for k in range(rank - 1) if k != a]
    lead = tuple(x.type.shape[k] for k in others)
    y = x if real.computed is real else b.cast(x, to=real.computed)
    y = b.reshape(b.transpose(y, perm=(rank - 1, a, *others)), shape=(x.type.shape[-1], x.type.shape[a], product(lead)))
    y = _fitted(b, y, n // 2 + 1 if inverse and onesided else n)
    alone = y.type.shape[0] == 1
    if alone:
        y = b.pad(y, pads=(0, 0, 0, 1, 0, 0))
    if inverse and onesided:
        y = _mirrored(b, y, n)
    y = transform(b, y, 1 if inverse else -1, alone)
    y = b.mul(y, 1.0 / n) if inverse else y
    kept, parts = (n, 1) if inverse and onesided else (n // 2 + 1 if onesided else n, 2)
    if (kept, parts) != (n, 2):
        y = b.slice(y, starts=(0, 0, 0), steps=(1, 1, 1), shape=(parts, kept, product(lead)))
    y = b.reshape(y, shape=(parts, kept, *lead))
    order = [rank - 1, a, *others]
    y = b.transpose(y, perm=tuple(order.index(k) for k in range(rank)))
    return y if real.computed is real else b.cast(y, to=real)


def _fitted(b: Any, y: Any, n: int) -> Any:
    """Cut, or filled with zeros, to n numbers."""
    parts, size, columns = y.type.shape
    if size > n:
        return b.slice(y, starts=(0, 0, 0), steps=(1, 1, 1), shape=(parts, n, columns))
    return b.pad(y, pads=(0, 0, 0, 0, n - size, 0)) if size < n else y


def _mirrored(b: Any, y: Any, n: int) -> Any:
    """The whole spectrum of a real signal of length n from its first half; what must be real is."""
    k = np.arange(n)
    sign = np.where((k == 0) | (2 * k == n), 0.0, np.where(2 * k < n, 1.0, -1.0))
    whole = b.gather(y, b.constant(np.minimum(k, n - k)), axis=1)
    return b.mul(whole, _planes(b, np.stack([np.ones(n), sign])[..., None], y))


def _dft_flops(
    x: TensorType, *, axis: int, length: int | None = None, inverse: bool = False, onesided: bool = False
) -> Dim:
    n = _length(x, normalize_axis(axis, x.rank), length, inverse and onesided)
    columns = dim(const(product([d for k, d in enumerate(x.shape[:-1]) if k != normalize_axis(axis, x.rank)])))
    return dim(const(columns) * (5 * n * max(n - 1, 1).bit_length()))


FFT_OPS: tuple[OpDef, ...] = (
    OpDef(
        "dft",
        _dft_type,
        decompose=_dft,
        flops=_dft_flops,
        traits=PURE,
        batching=batching.along_axis,
        cost=Cost.HEAVY,
        samples=(
            sample("f32[2, 12, 2]", axis=1),
            sample("f32[3, 40, 1]", axis=1, onesided=True),
            sample("f64[30, 2, 2]", axis=0, inverse=True),
            sample("f32[1, 9, 2]", axis=-2, inverse=True, onesided=True),
            sample("f32[37, 2]", axis=0),
            sample("f16[2, 8, 1]", axis=1, length=10),
            sample("f32[2, 1, 2]", axis=1),
            sample("f32[256, 3, 1]", axis=0),
        ),
        vjp=rules.dft,
    ),
    OpDef(
        "fft_pass",
        _pass_type,
        _pass,
        reference=_pass_numpy,
        flops=lambda x, waves, roots: dim(const(x.size) * 2 * (x.shape[1] + 2)),
        traits=PURE,
        samples=(
            sample("f32[2, 5, 3, 4]", "f32[5, 2, 2]", "f32[3, 5, 2]"),
            sample("f64[2, 4, 1, 3]", "f64[4, 2, 2]", "f64[1, 4, 2]"),
        ),
    ),
    OpDef(
        "fft_multiply",
        _multiply_type,
        _multiply,
        reference=_multiply_numpy,
        flops=lambda x, w: dim(const(x.size) * 3),
        traits=PURE,
        samples=(sample("f32[2, 5, 3]", "f32[2, 5]"), sample("f64[2, 4, 1]", "f64[2, 4]")),
    ),
)
