"""Reductions and running sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dnnc.array import complex_math as cm
from dnnc.array.core import Array, array_of, cast, placed
from dnnc.array.elementwise import divide, multiply, not_equal, one, sqrt, subtract
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import Lazy, apply
from dnnc.array.manipulation import Axes, axes_of, axis_of, broadcast_to, concat, moved, reshape, sliced
from dnnc.array.promotion import dtype_of, float_of, kind_of, real_of, summed
from dnnc.array.sizes import symbolic
from dnnc.ir.dtype import from_numpy

BOOL = np.dtype(np.bool_)


def reduced(p: Lazy, op: str, axes: tuple[int, ...], keepdims: bool) -> Lazy:
    """A reduction; over no axis at all it is the operand."""
    return apply(op, p, axes=axes, keepdims=keepdims) if axes else p


def _floating(name: str, x: Array) -> Array:
    if x.dtype.kind == "b":
        raise ValueInputError(f"{name}: expected numbers, got {x.dtype}")
    return cast(x, float_of(x.dtype))


def sum(x: Array, /, axis: Axes = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
    """Sum of the elements along an axis, or of all elements."""
    y = cast(x, summed(x.dtype) if dtype is None else dtype_of(dtype))
    axes = axes_of(axis, x.ndim)
    return array_of(*(reduced(p, "reduce_sum", axes, keepdims) for p in y._parts))


def prod(x: Array, /, axis: Axes = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
    """Product of the elements along an axis, or of all elements."""
    y = cast(x, summed(x.dtype) if dtype is None else dtype_of(dtype))
    axes = axes_of(axis, x.ndim)
    if y.dtype.kind != "c":
        return array_of(reduced(one(y), "reduce_prod", axes, keepdims))
    for a in reversed(axes):
        y = _complex_product(y, a)
    return y if not keepdims else reshape(y, tuple(1 if k in axes else d for k, d in enumerate(x.shape)))


def _complex_product(x: Array, axis: int) -> Array:
    """By halves: there is no reduction of pairs."""
    while x.shape[axis] > 1:
        n = x.shape[axis]
        half = multiply(sliced(x, axis, 0, n // 2), sliced(x, axis, n // 2, n // 2))
        x = concat([half, sliced(x, axis, n - 1, 1)], axis=axis) if n % 2 else half
    rest = tuple(d for k, d in enumerate(x.shape) if k != axis)
    if x.shape[axis]:
        return reshape(x, rest)
    return placed(
        array_of(*(apply("full", shape=rest, value=v, dtype=p.type.dtype) for v, p in zip((1, 0), x._parts))),
        x._parts[0].device,
    )


def _extreme(name: str, op: str, x: Array, axis: Axes, keepdims: bool) -> Array:
    if kind_of(x.dtype) not in "iuf":
        raise ValueInputError(f"{name}: expected real numbers, got {x.dtype}")
    axes = axes_of(axis, x.ndim)
    if 0 in [x.shape[a] for a in axes]:
        raise ValueInputError(f"{name}: no elements along axis {axis} of {x.shape}")
    return array_of(reduced(one(x), op, axes, keepdims))


def max(x: Array, /, axis: Axes = None, *, keepdims: bool = False) -> Array:
    """Largest element along an axis, or of all elements. NaN propagates."""
    return _extreme("max", "reduce_max", x, axis, keepdims)


def min(x: Array, /, axis: Axes = None, *, keepdims: bool = False) -> Array:
    """Smallest element along an axis, or of all elements. NaN propagates."""
    return _extreme("min", "reduce_min", x, axis, keepdims)


def mean(x: Array, /, axis: Axes = None, *, keepdims: bool = False) -> Array:
    """Arithmetic mean along an axis, or of all elements."""
    y = _floating("mean", x)
    axes = axes_of(axis, x.ndim)
    return array_of(*(reduced(p, "reduce_mean", axes, keepdims) for p in y._parts))


def var(x: Array, /, axis: Axes = None, *, correction: float = 0.0, keepdims: bool = False) -> Array:
    """Variance along an axis, or of all elements."""
    y = _floating("var", x)
    axes = axes_of(axis, x.ndim)
    n = math.prod(x.shape[a] for a in axes)
    d = subtract(y, mean(y, axis=axes, keepdims=True)) if axes else subtract(y, y)
    squares = (
        cm.mul(d._parts, (d._parts[0], apply("neg", d._parts[1])))[0]
        if y.dtype.kind == "c"
        else apply("mul", one(d), one(d))
    )
    if not correction:
        return array_of(reduced(squares, "reduce_mean", axes, keepdims))
    total = array_of(reduced(squares, "reduce_sum", axes, keepdims))
    left = n - (int(correction) if symbolic(n) else correction)
    if symbolic(left) and left >= 0:
        return divide(total, left)
    return (
        divide(total, left)
        if left > 0
        else multiply(total, math.nan if left == 0 and not n else math.inf if left == 0 else math.nan)
    )


def std(x: Array, /, axis: Axes = None, *, correction: float = 0.0, keepdims: bool = False) -> Array:
    """Standard deviation along an axis, or of all elements."""
    return sqrt(var(x, axis=axis, correction=correction, keepdims=keepdims))


def _cumulative(op: str, x: Array, axis: int | None, dtype: Any, include_initial: bool) -> Array:
    if axis is None:
        if x.ndim != 1:
            raise ValueInputError(f"an array of shape {x.shape} needs an axis to be summed along")
        axis = 0
    k = axis_of(axis, x.ndim)
    y = cast(x, summed(x.dtype) if dtype is None else dtype_of(dtype))
    if y.dtype.kind == "c" and op == "cumprod":
        made = _complex_scan(y, k)
    else:
        made = array_of(*(apply(op, p, axis=k) if x.shape[k] else p for p in y._parts))
    if not include_initial:
        return made
    first = broadcast_to(cast(array_of(apply("full", shape=(), value=int(op == "cumprod"),
    dtype=from_numpy(real_of(y.dtype)))), y.dtype),
                         tuple(1 if j == k else d for j, d in enumerate(x.shape)))  # fmt: skip
    return concat([first, made], axis=k)


def _complex_scan(x: Array, axis: int) -> Array:
    """Running products in log2(n) steps."""
    step, n = 1, x.shape[axis]
    while step < n:
        head = sliced(x, axis, 0, step)
        x = concat([head, multiply(sliced(x, axis, step, n - step), sliced(x, axis, 0, n - step))], axis=axis)
        step *= 2
    return x


def cumulative_sum(x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """Sums of the elements up to each position along an axis."""
    return _cumulative("cumsum", x, axis, dtype, include_initial)


def cumulative_prod(x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """Products of the elements up to each position along an axis."""
    return _cumulative("cumprod", x, axis, dtype, include_initial)


# --- truth ------------------------------------------------------------------------------------------------------------


def _truth(x: Array, op: str, axis: Axes, keepdims: bool) -> Array:
    byte = cast(cast(x, BOOL), np.dtype(np.uint8))
    axes = axes_of(axis, x.ndim)
    if 0 in [x.shape[a] for a in axes]:
        shape = tuple(1 if k in axes else d for k, d in enumerate(x.shape) if keepdims or k not in axes)
        return placed(
            array_of(apply("full", shape=shape, value=op == "reduce_min", dtype=from_numpy(BOOL))), one(x).device
        )
    return cast(array_of(reduced(one(byte), op, axes, keepdims)), BOOL)


def all(x: Array, /, axis: Axes = None, *, keepdims: bool = False) -> Array:
    """Logical "and" of the elements along an axis, or of all elements."""
    return _truth(x, "reduce_min", axis, keepdims)


def any(x: Array, /, axis: Axes = None, *, keepdims: bool = False) -> Array:
    """Logical "or" of the elements along an axis, or of all elements."""
    return _truth(x, "reduce_max", axis, keepdims)


def count_nonzero(x: Array, /, axis: Axes = None, *, keepdims: bool = False) -> Array:
    """Number of nonzero elements along an axis, or of all."""
    return sum(cast(x, BOOL), axis=axis, keepdims=keepdims)


def diff(
    x: Array, /, *, axis: int = -1, n: int = 1, prepend: Array | None = None, append: Array | None = None
) -> Array:
    """Differences of neighbouring elements along an axis, n times."""
    k = axis_of(axis, x.ndim)
    parts = [a for a in (prepend, x, append) if a is not None]
    y = concat(parts, axis=k) if len(parts) > 1 else x
    for _ in range(n):
        size = y.shape[k]
        if not (symbolic(size) and size >= 1) and size < 2:
            shape = tuple(0 if j == k else d for j, d in enumerate(y.shape))
            return moved(y, "slice", starts=(0,) * y.ndim, steps=(1,) * y.ndim, shape=shape)
        after, before = sliced(y, k, 1, size - 1), sliced(y, k, 0, size - 1)
        y = not_equal(after, before) if y.dtype.kind == "b" else subtract(after, before)
    return y
