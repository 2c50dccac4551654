"""Linear algebra of the array API: main namespace and `linalg`; decompositions stand in `decompositions.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.array.core import Array, array_of, cast, fresh
from dnnc.array.creation import eye, ones
from dnnc.array.decompositions import (
    cholesky,
    complex_det,
    eig,
    eigh,
    eigvals,
    eigvalsh,
    matrix_rank,
    pinv,
    qr,
    singular_norm,
    slogdet,
    svd,
    svdvals,
)
from dnnc.array.elementwise import abs as abs_
from dnnc.array.elementwise import add, conj, multiply, negative, one, operands, pow, sqrt, subtract
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import apply, apply_binary
from dnnc.array.manipulation import (
    Axes,
    axes_of,
    axis_of,
    broadcast_to,
    concat,
    expand_dims,
    matrix_transpose,
    moveaxis,
    permute_dims,
    reshape,
    sliced,
    stack,
)
from dnnc.array.promotion import float_of, kind_of
from dnnc.array.sizes import same, same_shape
from dnnc.array.statistical import max as max_
from dnnc.array.statistical import min as min_
from dnnc.array.statistical import sum as sum_

__all__ = [
    "cholesky", "cross", "det", "diagonal", "eig", "eigh", "eigvals", "eigvalsh", "inv", "matmul", "matrix_norm",
    "matrix_power", "matrix_rank",
    "matrix_transpose", "norm", "outer", "pinv", "qr", "slogdet", "solve", "svd", "svdvals", "tensordot", "trace",
    "vecdot", "vector_norm",
]  # fmt: skip


def _numbers(name: str, *xs: Any) -> list[Array]:
    return operands(name, *xs, kinds="iufc")


def _square(name: str, x: Array) -> int:
    if x.ndim < 2 or not same(x.shape[-1], x.shape[-2]):
        raise ValueInputError(f"{name}: expected square matrices, got shape {x.shape}")
    if kind_of(x.dtype) not in "fc":
        raise ValueInputError(f"{name}: expected floating-point or complex numbers, got {x.dtype}")
    return x.shape[-1]


# --- products ---------------------------------------------------------------------------------------------------------


def matmul(x1: Any, x2: Any, /) -> Array:
    """Products of matrices, stacks of them, and vectors."""
    if isinstance(x1, Array) and isinstance(x2, Array) and x1._dtype is x2._dtype and kind_of(x1._dtype) == "f":
        p, q = x1._parts[0], x2._parts[0]
        left, right = p.type.shape, q.type.shape
        if len(left) > 1 and len(right) > 1 and left[-1] == right[-2]:
            return fresh(apply_binary("matmul", p, q))
    a, b = _numbers("matmul", x1, x2)
    if not a.ndim or not b.ndim:
        raise ValueInputError(f"matmul: expected at least one axis each, got shapes {a.shape} and {b.shape}")
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if not same(a.shape[-1], inner):
        raise ValueInputError(f"matmul: {a.shape} and {b.shape} do not fit: {a.shape[-1]} and {inner} differ")
    row, column = a.ndim == 1, b.ndim == 1
    if row and column:  # a reduction, of which more than one block of threads takes part
        products = multiply(a, b)
        return array_of(*(apply("reduce_sum", p, axes=(0,), keepdims=False) for p in products._parts))
    a = reshape(a, (1, *a.shape)) if row else a
    b = reshape(b, (*b.shape, 1)) if column else b
    y = _product(a, b)
    shape = y.shape[:-2] + (() if row else y.shape[-2:-1]) + (() if column else y.shape[-1:])
    return reshape(y, shape) if row or column else y


def _product(a: Array, b: Array) -> Array:
    if kind_of(a.dtype) == "f":
        return array_of(apply("matmul", one(a), one(b)))
    if a.dtype.kind == "c":
        (p, q), (r, s) = a._parts, b._parts
        re = apply("sub", apply("matmul", p, r), apply("matmul", q, s))
        return array_of(re, apply("add", apply("matmul", p, s), apply("matmul", q, r)))
    wide = array_of(
        apply("mul", one(expand_dims(a, axis=-1)), one(expand_dims(b, axis=-3)))
    )  # integers wrap as their type does
    return cast(sum_(wide, axis=-2), a.dtype)


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Array:
    """Sum of conj(x1) * x2 along an axis."""
    a, b = _numbers("vecdot", x1, x2)
    k = axis_of(axis, min(a.ndim, b.ndim)) - min(a.ndim, b.ndim)
    if not same(a.shape[k], b.shape[k]):
        raise ValueInputError(f"vecdot: sizes {a.shape[k]} and {b.shape[k]} along axis {axis} differ")
    return sum_(multiply(conj(a), b), axis=k, dtype=a.dtype)


def tensordot(x1: Any, x2: Any, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Array:
    """Sum of products over given axes of two arrays."""
    a, b = _numbers("tensordot", x1, x2)
    given = (range(a.ndim - axes, a.ndim), range(axes)) if isinstance(axes, int) else axes
    left, right = ([axis_of(k, x.ndim) for k in ks] for ks, x in zip(given, (a, b)))
    sizes = [a.shape[k] for k in left]
    if not same_shape(sizes, [b.shape[k] for k in right]):
        raise ValueInputError(f"tensordot: axes {given} of {a.shape} and {b.shape} differ in size")
    kept_a, kept_b = ([k for k in range(x.ndim) if k not in ks] for x, ks in ((a, left), (b, right)))
    shape = (*(a.shape[k] for k in kept_a), *(b.shape[k] for k in kept_b))
    n = math.prod(sizes)
    rows = reshape(permute_dims(a, [*kept_a, *left]), (math.prod(a.shape[k] for k in kept_a), n))
    columns = reshape(permute_dims(b, [*right, *kept_b]), (n, math.prod(b.shape[k] for k in kept_b)))
    return reshape(_product(rows, columns), shape)


def outer(x1: Any, x2: Any, /) -> Array:
    """Matrix of the products of the elements of two vectors."""
    a, b = _numbers("outer", x1, x2)
    if a.ndim != 1 or b.ndim != 1:
        raise ValueInputError(f"outer: expected vectors, got shapes {a.shape} and {b.shape}")
    return multiply(reshape(a, (a.size, 1)), b)


def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Array:
    """Cross product of vectors of three elements along an axis."""
    a, b = _numbers("cross", x1, x2)
    k = axis_of(axis, min(a.ndim, b.ndim)) - min(a.ndim, b.ndim)
    if a.shape[k] != 3 or b.shape[k] != 3:
        raise ValueInputError(f"cross: expected 3 elements along axis {axis}, got shapes {a.shape} and {b.shape}")
    p, q = ([reshape(sliced(x, x.ndim + k, j, 1), _without(x.shape, x.ndim + k)) for j in range(3)] for x in (a, b))
    parts = [subtract(multiply(p[i], q[j]), multiply(p[j], q[i])) for i, j in ((1, 2), (2, 0), (0, 1))]
    return stack(parts, axis=k)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def matrix_power(x: Array, n: int, /) -> Array:
    """Square matrices to the power of the integer n."""
    size = _square("matrix_power", x)
    if n < 0:
        return matrix_power(inv(x), -n)
    result = broadcast_to(eye(size, dtype=x.dtype, device=x.device), x.shape)
    power, first = x, True
    while n:
        if n & 1:
            result, first = (power, False) if first else (matmul(result, power), False)
        n >>= 1
        power = matmul(power, power) if n else power
    return result


# --- parts, norms -----------------------------------------------------------------------------------------------------


def diagonal(x: Array, /, *, offset: int = 0) -> Array:
    """The diagonals of a stack of matrices, along the last axis."""
    if x.ndim < 2:
        raise ValueInputError(f"diagonal: expected matrices, got shape {x.shape}")
    *rest, m, n = x.shape
    count = max(min(m, n - offset) if offset >= 0 else min(m + offset, n), 0)
    start = offset if offset >= 0 else -offset * n
    flat = reshape(x, (*rest, m * n))
    return sliced(flat, len(rest), start if count else 0, count, n + 1)


def trace(x: Array, /, *, offset: int = 0, dtype: Any = None) -> Array:
    """Sums of the diagonals of matrices."""
    return sum_(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def vector_norm(x: Array, /, *, axis: Axes = None, keepdims: bool = False, ord: float = 2) -> Array:
    """Norms of vectors along axes, of order ord."""
    if kind_of(x.dtype) not in "fc":
        raise ValueInputError(f"vector_norm: expected floating-point numbers, got {x.dtype}")
    size, axes = abs_(x), axes_of(axis, x.ndim)
    if ord in (math.inf, -math.inf):
        return (max_ if ord > 0 else min_)(size, axis=axes, keepdims=keepdims)
    if ord == 0:
        return sum_(cast(cast(size, np.dtype(np.bool_)), size.dtype), axis=axes, keepdims=keepdims)
    if ord == 1:
        return sum_(size, axis=axes, keepdims=keepdims)
    if ord == 2:
        return sqrt(sum_(multiply(size, size), axis=axes, keepdims=keepdims))
    return pow(sum_(pow(size, float(ord)), axis=axes, keepdims=keepdims), 1.0 / ord)


def matrix_norm(x: Array, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    """`ord`: "fro", "nuc", 1, -1, 2, -2, inf or -inf."""
    if x.ndim < 2 or kind_of(x.dtype) not in "fc":
        raise ValueInputError(
            f"matrix_norm: expected matrices of floating-point numbers, got {x.dtype} of shape {x.shape}"
        )
    if ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in ("nuc", 2, -2):
        return singular_norm(x, ord, keepdims)
    if ord not in (1, -1, math.inf, -math.inf):
        raise ValueInputError(f"matrix_norm: ord={ord!r}: expected 'fro', 'nuc', 1, -1, 2, -2, inf or -inf")
    summed = -2 if ord in (1, -1) else -1
    sums = sum_(abs_(x), axis=summed, keepdims=True)
    norm = (max_ if ord > 0 else min_)(sums, axis=(-2, -1), keepdims=True)
    return norm if keepdims else reshape(norm, x.shape[:-2])


def norm(x: Array, /, ord: Any = None, axis: Axes = None, keepdims: bool = False) -> Array:
    """NumPy's: of vectors along one axis, of matrices along two; of all elements without `ord` and `axis`."""
    y = cast(x, float_of(x.dtype))
    if axis is None and (ord is None or y.ndim == 1):
        return vector_norm(y, keepdims=keepdims, ord=2 if ord is None else ord)
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else tuple(range(y.ndim)) if axis is None else (axis,)
    if len(axes) == 1:
        return vector_norm(y, axis=axes, keepdims=keepdims, ord=2 if ord is None else ord)
    if len(axes) != 2:
        raise ValueInputError(f"norm: axis={axis!r} of {x.shape}: expected one axis or two")
    found = matrix_norm(moveaxis(y, axes, (-2, -1)), ord="fro" if ord is None else ord)
    return expand_dims(found, axis=tuple(sorted(axis_of(a, y.ndim) for a in axes))) if keepdims else found


# --- elimination ------------------------------------------------------------------------------------------------------


def det(x: Array, /) -> Array:
    """Determinants of square matrices."""
    if not _square("det", x):
        return ones(x.shape[:-2], dtype=x.dtype, device=x.device)
    if x.dtype.kind == "c":
        return complex_det(x)
    return array_of(apply("det", one(x)))


def inv(x: Array, /) -> Array:
    """Solve with pivoting; singular matrices give non-finite results. Complex ones become real of twice the size."""
    n = _square("inv", x)
    if not x.size:
        return x
    if kind_of(x.dtype) == "f":
        return array_of(apply("inverse", one(x)))
    re, im = (array_of(p) for p in x._parts)
    blocks = concat([concat([re, negative(im)], axis=-1), concat([im, re], axis=-1)], axis=-2)
    left = sliced(array_of(apply("inverse", one(blocks))), x.ndim - 1, 0, n)
    return array_of(*(sliced(left, x.ndim - 2, at, n)._parts[0] for at in (0, n)))


def solve(x1: Any, x2: Any, /) -> Array:
    """By the inverse, and one step of refinement, which brings the residual to that of elimination."""
    a, b = _numbers("solve", x1, x2)
    n = _square("solve", a)
    vector = b.ndim == 1
    b = reshape(b, (n, 1)) if vector else b
    if b.shape[-2] != n:
        raise ValueInputError(f"solve: {a.shape} and {b.shape} do not fit")
    inverse = inv(a)
    y = matmul(inverse, b)
    y = add(y, matmul(inverse, subtract(b, matmul(a, y))))
    return reshape(y, y.shape[:-1]) if vector else y
