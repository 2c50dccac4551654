"""NumPy's functions beside those of the array API: products, comparisons of arrays, averages, parts of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from dnnc.array import linalg
from dnnc.array.core import Array, array_of, cast
from dnnc.array.creation import asarray, eye, zeros_like
from dnnc.array.elementwise import abs as abs_
from dnnc.array.elementwise import (
    add,
    divide,
    equal,
    isfinite,
    isinf,
    isnan,
    less_equal,
    logical_and,
    logical_or,
    multiply,
    negative,
    one,
    operands,
    subtract,
    where,
)
from dnnc.array.errors import TypeInputError, ValueInputError
from dnnc.array.lazy import apply
from dnnc.array.manipulation import (
    Axes,
    axes_of,
    axis_of,
    broadcast_to,
    concat,
    moveaxis,
    permute_dims,
    reshape,
    result_type,
    sliced,
)
from dnnc.array.promotion import float_of, kind_of
from dnnc.array.sizes import same, same_shape
from dnnc.array.statistical import all as all_
from dnnc.array.statistical import cumulative_prod, cumulative_sum
from dnnc.array.statistical import max as max_
from dnnc.array.statistical import mean as mean_
from dnnc.array.statistical import min as min_
from dnnc.array.statistical import sum as sum_
from dnnc.ir.errors import count

# --- products ---------------------------------------------------------------------------------------------------------


def dot(x1: Any, x2: Any, /) -> Array:
    """The sum of products over the last axis of `x1` and the last but one of `x2`, or its only one; numbers scale."""
    a, b = operands("dot", x1, x2)
    if not a.ndim or not b.ndim:
        return multiply(a, b)
    if b.ndim <= 2:
        return linalg.matmul(a, b)
    return linalg.tensordot(a, b, axes=((a.ndim - 1,), (b.ndim - 2,)))


def vdot(x1: Any, x2: Any, /) -> Array:
    """The sum of products of all elements, the first ones conjugated."""
    a, b = operands("vdot", x1, x2)
    return linalg.vecdot(ravel(a), ravel(b))


def inner(x1: Any, x2: Any, /) -> Array:
    """The sum of products over the last axes."""
    a, b = operands("inner", x1, x2)
    if not a.ndim or not b.ndim:
        return multiply(a, b)
    return linalg.tensordot(a, b, axes=((a.ndim - 1,), (b.ndim - 1,)))


def outer(x1: Any, x2: Any, /) -> Array:
    """The product of each element of `x1` and each of `x2`, as a matrix."""
    a, b = operands("outer", x1, x2)
    return multiply(reshape(a, (a.size, 1)), reshape(b, (1, b.size)))


def cross(x1: Any, x2: Any, /, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Array:
    """Cross products of vectors of three elements. `axis`: where they lie in both arrays and in the result."""
    a, b = operands("cross", x1, x2)
    if axis is not None:
        axisa = axisb = axisc = axis
    if not a.ndim or not b.ndim:
        raise ValueInputError(f"cross: expected vectors, got shapes {a.shape} and {b.shape}")
    made = linalg.cross(moveaxis(a, axisa, -1), moveaxis(b, axisb, -1))
    return moveaxis(made, -1, axisc)


def kron(x1: Any, x2: Any, /) -> Array:
    """The Kronecker product: each element of `x1` times all of `x2`, side by side."""
    a, b = operands("kron", x1, x2)
    n = max(a.ndim, b.ndim)
    left, right = ((1,) * (n - x.ndim) + x.shape for x in (a, b))
    wide = multiply(
        reshape(a, tuple(d for k in left for d in (k, 1))), reshape(b, tuple(d for k in right for d in (1, k)))
    )
    return reshape(wide, tuple(p * q for p, q in zip(left, right)))


# --- axes -------------------------------------------------------------------------------------------------------------


def ravel(x: Array, /) -> Array:
    """All elements along one axis."""
    return reshape(x, (x.size,))


def transpose(x: Array, /, axes: Sequence[int] | None = None) -> Array:
    """The axes in another order, by default the reverse one."""
    return permute_dims(x, range(x.ndim)[::-1] if axes is None else axes)


def swapaxes(x: Array, axis1: int, axis2: int, /) -> Array:
    """Two axes exchanged."""
    order = list(range(x.ndim))
    a, b = axis_of(axis1, x.ndim), axis_of(axis2, x.ndim)
    order[a], order[b] = b, a
    return permute_dims(x, order)


# --- parts of matrices ------------------------------------------------------------------------------------------------


def diagonal(x: Array, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    """The diagonals of the matrices that two axes make, along a new last axis."""
    a, b = axis_of(axis1, x.ndim), axis_of(axis2, x.ndim)
    if a == b:
        raise ValueInputError(f"diagonal: axis1={axis1} and axis2={axis2} are one axis of {x.shape}")
    order = [k for k in range(x.ndim) if k not in (a, b)]
    return linalg.diagonal(permute_dims(x, [*order, a, b]), offset=offset)


def trace(x: Array, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    """The sums of these diagonals."""
    return sum_(diagonal(x, offset, axis1, axis2), axis=-1)


def diag(x: Array, /, k: int = 0) -> Array:
    """A matrix with a vector on its k-th diagonal; of a matrix its k-th diagonal."""
    if x.ndim == 2:
        return linalg.diagonal(x, offset=k)
    if x.ndim != 1:
        raise ValueInputError(f"diag: expected a vector or a matrix, got shape {x.shape}")
    n = x.shape[0] + abs(k)
    line = array_of(*(apply("pad", p, None, pads=(max(k, 0), max(-k, 0))) for p in x._parts))  # by columns
    return where(eye(n, k=k, dtype=np.dtype(np.bool_), device=x.device), line, zeros_like(line))


# --- comparisons ------------------------------------------------------------------------------------------------------


def isclose(x1: Any, x2: Any, /, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Array:
    """Is |x1 - x2| <= atol + rtol |x2|? Infinities are close to themselves."""
    a, b = operands("isclose", x1, x2)
    a, b = (cast(x, float_of(x.dtype)) for x in (a, b))
    near = less_equal(abs_(subtract(a, b)), add(multiply(abs_(b), rtol), atol))
    near = logical_or(logical_and(near, isfinite(b)), equal(a, b))
    return logical_or(near, logical_and(isnan(a), isnan(b))) if equal_nan else near


def allclose(x1: Any, x2: Any, /, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Are all pairs of elements close? Looks at the arrays."""
    return bool(all_(isclose(x1, x2, rtol, atol, equal_nan)))


def array_equal(x1: Any, x2: Any, /) -> bool:
    """Have two arrays one shape and equal elements? Looks at the arrays."""
    a, b = asarray(x1), asarray(x2)
    return same_shape(a.shape, b.shape) and bool(all_(equal(a, b)))


def nan_to_num(x: Any, /, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Array:
    """NaN as a number; infinities as numbers, by default the largest and the smallest of the dtype."""
    (a,) = operands("nan_to_num", x)
    if kind_of(a.dtype) not in "fc":
        return a
    parts = [array_of(p) for p in a._parts]
    info = ml_dtypes.finfo(parts[0].dtype)  # type: ignore[no-untyped-call]
    high, low = (float(d) if v is None else v for v, d in ((posinf, info.max), (neginf, info.min)))
    made = []
    for p in parts:
        p = where(isnan(p), nan, p)
        made.append(one(where(isinf(p), where(less_equal(p, 0.0), low, high), p)))
    return array_of(*made)


# --- differences ------------------------------------------------------------------------------------------------------


def gradient(x: Any, /, *varargs: Any, axis: Axes = None, edge_order: int = 1) -> Array | tuple[Array, ...]:
    """Differences of second order inside and of `edge_order` at the ends along axes, as NumPy's `gradient`.

    Args:
        x: values at the places of a grid.
        *varargs: nothing for steps of 1, one step for all axes, or for each axis a step or an array of places.
        axis: default all.
        edge_order: 1 or 2.

    Returns:
        An array for one axis, else a tuple of them.
    """
    y = asarray(x)
    y = cast(y, float_of(y.dtype))
    axes = axes_of(axis, y.ndim)
    if edge_order not in (1, 2):
        raise ValueInputError(f"gradient: edge_order={edge_order}, expected 1 or 2")
    if len(varargs) not in (0, 1, len(axes)) or (len(varargs) == 1 < len(axes) and asarray(varargs[0]).ndim):
        raise TypeInputError(f"gradient: got {count(len(varargs), 'spacing')} for axes {axes}")
    steps = varargs if len(varargs) == len(axes) else (varargs or (1.0,)) * len(axes)
    made = tuple(_gradient(y, k, h, edge_order) for k, h in zip(axes, steps))
    return made[0] if len(made) == 1 else made


def _gradient(y: Array, k: int, spacing: Any, order: int) -> Array:
    n = y.shape[k]
    if n < order + 1:
        raise ValueInputError(f"gradient: {n} elements along axis {k}, expected {order + 1} or more")
    h = asarray(spacing)
    h = cast(h, float_of(h.dtype))
    if h.ndim > 1 or (h.ndim and h.shape[0] != n):
        raise ValueInputError(f"gradient: places of shape {h.shape} along an axis of {n} elements")

    def at(a: int, count: int = 1) -> Array:
        return sliced(y, k, a % n, count)

    def steps(a: int, count: int = 1) -> Array:
        """Distances of neighbours, along the axis."""
        if not h.ndim:
            return h
        d = subtract(sliced(h, 0, a % n + 1, count), sliced(h, 0, a % n, count))
        return reshape(d, tuple(count if j == k else 1 for j in range(y.ndim)))

    def end(a: int, b: int, c: int, d1: Array, d2: Array) -> Array:
        """The slope at place a of the parabola through it and b and c, which are d1 and d1 + d2 away."""
        first, second = divide(subtract(at(b), at(a)), d1), divide(subtract(at(c), at(b)), d2)
        return subtract(first, divide(multiply(subtract(second, first), d1), add(d1, d2)))

    parts = []
    if order == 1:
        parts.append(divide(subtract(at(1), at(0)), steps(0)))
    else:
        parts.append(end(0, 1, 2, steps(0), steps(1)))
    if n > 2:
        d1, d2 = steps(0, n - 2), steps(1, n - 2)
        before, after = subtract(at(1, n - 2), at(0, n - 2)), subtract(at(2, n - 2), at(1, n - 2))
        if not h.ndim:
            parts.append(divide(subtract(at(2, n - 2), at(0, n - 2)), multiply(h, 2.0)))
        else:
            slopes = add(multiply(divide(before, d1), d2), multiply(divide(after, d2), d1))
            parts.append(divide(slopes, add(d1, d2)))
    if order == 1:
        parts.append(divide(subtract(at(-1), at(-2)), steps(-2)))
    else:
        parts.append(end(-1, -2, -3, negative(steps(-2)), negative(steps(-3))))
    return concat(parts, axis=k)


# --- averages ---------------------------------------------------------------------------------------------------------


def average(x: Array, /, axis: Axes = None, weights: Any = None, keepdims: bool = False) -> Array:
    """The mean with weights, of the shape of `x`, or of the size of one axis."""
    if weights is None:
        return mean_(x, axis=axis, keepdims=keepdims)
    w = asarray(weights)
    axes = axes_of(axis, x.ndim)
    if not same_shape(w.shape, x.shape):
        if w.ndim != 1 or len(axes) != 1 or not same(w.shape[0], x.shape[axes[0]]):
            raise ValueInputError(f"average: weights of shape {w.shape} for axis {axis} of {x.shape}")
        w = reshape(w, tuple(d if k == axes[0] else 1 for k, d in enumerate(x.shape)))
    dtype = float_of(result_type(x, w))
    x, w = cast(x, dtype), cast(w, dtype)
    total = sum_(broadcast_to(w, x.shape), axis=axes, keepdims=keepdims)
    return divide(sum_(multiply(x, w), axis=axes, keepdims=keepdims), total)


def ptp(x: Array, /, axis: Axes = None, keepdims: bool = False) -> Array:
    """The largest element minus the smallest."""
    return subtract(max_(x, axis=axis, keepdims=keepdims), min_(x, axis=axis, keepdims=keepdims))


def logsumexp(x: Array, /, axis: Axes = None, keepdims: bool = False) -> Array:
    """log(sum(exp(x))) without overflow."""
    y = cast(x, float_of(x.dtype))
    if y.dtype.kind == "c":
        raise ValueInputError(f"logsumexp: expected real numbers, got {x.dtype}")
    axes = axes_of(axis, x.ndim)
    return array_of(apply("reduce_log_sum_exp", one(y), axes=axes, keepdims=keepdims)) if axes else y


def cumsum(x: Array, /, axis: int | None = None, dtype: Any = None) -> Array:
    """Running sums along an axis; without one, of all elements in order."""
    return _along(cumulative_sum, x, axis, dtype)


def cumprod(x: Array, /, axis: int | None = None, dtype: Any = None) -> Array:
    """Running products, likewise."""
    return _along(cumulative_prod, x, axis, dtype)


def _along(fn: Any, x: Array, axis: int | None, dtype: Any) -> Array:
    made: Array = fn(ravel(x), axis=0, dtype=dtype) if axis is None else fn(x, axis=axis, dtype=dtype)
    return made


def array(obj: Any, dtype: Any = None, copy: bool | None = True) -> Array:
    """NumPy's name of `asarray` with a copy."""
    return asarray(obj, dtype=dtype, copy=copy)
