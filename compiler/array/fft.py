"""The `fft` extension of the array API on the graph op `dft`: mixed radices, complex numbers as pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dnnc.array.core import Array, array_of, cast, joined, taken_apart
from dnnc.array.creation import arange
from dnnc.array.elementwise import conj, divide, multiply
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import apply
from dnnc.array.manipulation import Axes, axes_of, axis_of, concat, roll, sliced
from dnnc.array.promotion import DEFAULTS, complex_of, dtype_of, float_of

__all__ = [
    "fft", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifftn", "ifftshift", "ihfft", "irfft", "irfftn", "rfft",
    "rfftfreq", "rfftn",
]  # fmt: skip

NORMS = ("backward", "ortho", "forward")


def _scaled(x: Array, n: int, inverse: bool, norm: str) -> Array:
    """The op divides an inverse transform by n; `norm` says what is to be divided."""
    if norm not in NORMS:
        raise ValueInputError(f"norm={norm!r}: expected one of {', '.join(NORMS)}")
    power = {"backward": 0.0, "ortho": 0.5, "forward": 1.0}[norm]
    return x if not power else multiply(x, float(n) ** (power if inverse else -power))


def _transform(x: Array, n: int | None, axis: int, norm: str, inverse: bool) -> Array:
    x = cast(x, complex_of(float_of(x.dtype)))
    k = axis_of(axis, x.ndim)
    size = x.shape[k] if n is None else n
    if size < 1:
        raise ValueInputError(f"a transform of {size} elements: expected at least one")
    made = apply("dft", joined(_fitted(x, k, size)._parts), axis=k, inverse=inverse)
    return _scaled(array_of(*taken_apart(made)), size, inverse, norm)


def _fitted(x: Array, axis: int, n: int) -> Array:
    """n elements along an axis: cut off, or filled with zeros."""
    have = x.shape[axis]
    if have >= n:
        return x if have == n else sliced(x, axis, 0, n)
    pads = tuple(0 for _ in range(x.ndim)) + tuple(n - have if k == axis else 0 for k in range(x.ndim))
    return array_of(*(apply("pad", p, None, pads=pads) for p in x._parts))


def fft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """Discrete Fourier transform along one axis."""
    return _transform(x, n, axis, norm, False)


def ifft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """Inverse of `fft`."""
    return _transform(x, n, axis, norm, True)


def _sizes(x: Array, s: Sequence[int] | None, axes: Axes) -> list[tuple[int, int]]:
    """Pairs of axis and size."""
    given = (
        list(axes_of(axes, x.ndim))
        if axes is None and s is None
        else list(range(x.ndim - len(s), x.ndim))
        if axes is None and s
        else axes
    )
    chosen = [axis_of(a, x.ndim) for a in (given or ())]
    return list(
        zip(
            chosen,
            [x.shape[a] for a in chosen] if s is None else [x.shape[a] if v == -1 else v for a, v in zip(chosen, s)],
        )
    )


def fftn(x: Array, /, *, s: Sequence[int] | None = None, axes: Axes = None, norm: str = "backward") -> Array:
    """Discrete Fourier transform along several axes."""
    for axis, n in _sizes(x, s, axes):
        x = fft(x, n=n, axis=axis, norm=norm)
    return x


def ifftn(x: Array, /, *, s: Sequence[int] | None = None, axes: Axes = None, norm: str = "backward") -> Array:
    """Inverse of `fftn`."""
    for axis, n in _sizes(x, s, axes):
        x = ifft(x, n=n, axis=axis, norm=norm)
    return x


def rfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """Discrete Fourier transform of real numbers along one axis: the nonnegative frequencies."""
    if x.dtype.kind == "c":
        raise ValueInputError(f"rfft: expected real numbers, got {x.dtype}")
    k = axis_of(axis, x.ndim)
    x = cast(x, float_of(x.dtype))
    size = x.shape[k] if n is None else n
    if size < 1:
        raise ValueInputError(f"a transform of {size} elements: expected at least one")
    y = _fitted(x, k, size)
    made = apply("dft", joined(y._parts), axis=k, onesided=True)
    return _scaled(array_of(*taken_apart(made)), size, False, norm)


def irfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """The other half of the spectrum is the conjugate of the given one."""
    x = cast(x, complex_of(float_of(x.dtype)))
    k = axis_of(axis, x.ndim)
    size = 2 * (x.shape[k] - 1) if n is None else n
    if size < 1:
        raise ValueInputError(f"a transform of {size} elements: expected at least one")
    half = _fitted(x, k, size // 2 + 1)
    zero = apply("full", shape=(), value=0.0, dtype=half._parts[1].type.dtype)
    ends = sliced(half, k, 0, 1)  # the first number is real, of an even size the middle one too
    parts = [array_of(ends._parts[0], apply("mul", ends._parts[1], zero))]
    inner = (size - 1) // 2
    if inner:
        parts.append(sliced(half, k, 1, inner))
    if size % 2 == 0:
        middle = sliced(half, k, size // 2, 1)
        parts.append(array_of(middle._parts[0], apply("mul", middle._parts[1], zero)))
    if inner:
        parts.append(conj(sliced(half, k, inner, inner, -1)))
    return array_of(ifft(concat(parts, axis=k), axis=k, norm=norm)._parts[0])


def rfftn(x: Array, /, *, s: Sequence[int] | None = None, axes: Axes = None, norm: str = "backward") -> Array:
    """Discrete Fourier transform of real numbers along several axes."""
    *rest, (axis, n) = _sizes(x, s, axes)
    x = rfft(x, n=n, axis=axis, norm=norm)
    for a, size in rest:
        x = fft(x, n=size, axis=a, norm=norm)
    return x


def irfftn(x: Array, /, *, s: Sequence[int] | None = None, axes: Axes = None, norm: str = "backward") -> Array:
    """Inverse of `rfftn`."""
    *rest, (axis, n) = _sizes(x, s, axes)
    for a, size in rest:
        x = ifft(x, n=size, axis=a, norm=norm)
    return irfft(x, n=2 * (x.shape[axis] - 1) if s is None else n, axis=axis, norm=norm)


def hfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """A transform of numbers of which the other half is the conjugate: the result is real."""
    size = 2 * (x.shape[axis] - 1) if n is None else n
    swapped = {"backward": "forward", "forward": "backward", "ortho": "ortho"}
    if norm not in NORMS:
        raise ValueInputError(f"norm={norm!r}: expected one of {', '.join(NORMS)}")
    return irfft(conj(x), n=size, axis=axis, norm=swapped[norm])


def ihfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """Inverse of `hfft`."""
    swapped = {"backward": "forward", "forward": "backward", "ortho": "ortho"}
    if norm not in NORMS:
        raise ValueInputError(f"norm={norm!r}: expected one of {', '.join(NORMS)}")
    return conj(rfft(x, n=n, axis=axis, norm=swapped[norm]))


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
    """Frequencies of `fft` for n samples at distance d."""
    halves = [(0, (n - 1) // 2 + 1), (-(n // 2), 0)] if n > 1 else [(0, n)]
    line = concat([arange(a, b, dtype=DEFAULTS["f"], device=device) for a, b in halves])
    return cast(divide(line, n * d), DEFAULTS["f"] if dtype is None else dtype_of(dtype))


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
    """Frequencies of `rfft` for n samples at distance d."""
    return cast(
        divide(arange(n // 2 + 1, dtype=DEFAULTS["f"], device=device), n * d),
        DEFAULTS["f"] if dtype is None else dtype_of(dtype),
    )


def fftshift(x: Array, /, *, axes: Axes = None) -> Array:
    """Frequencies reordered so that zero stands in the middle."""
    chosen = axes_of(axes, x.ndim)
    return roll(x, tuple(x.shape[a] // 2 for a in chosen), axis=chosen) if chosen else x


def ifftshift(x: Array, /, *, axes: Axes = None) -> Array:
    """Inverse of `fftshift`."""
    chosen = axes_of(axes, x.ndim)
    return roll(x, tuple(-(x.shape[a] // 2) for a in chosen), axis=chosen) if chosen else x
