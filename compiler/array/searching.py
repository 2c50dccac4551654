"""Searching, sorting and sets. Where the shape of a result depends on the contents, these are looked at first."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dnnc.array.core import Array, array_of, placed
from dnnc.array.creation import asarray
from dnnc.array.elementwise import one, operands
from dnnc.array.errors import ValueInputError
from dnnc.array.host import computed, contents
from dnnc.array.lazy import apply, apply_all
from dnnc.array.manipulation import axis_of, reshape, take
from dnnc.array.promotion import kind_of
from dnnc.array.sizes import symbolic
from dnnc.array.statistical import any as any_of
from dnnc.array.statistical import sum as sum_of
from dnnc.ir.dtype import i64


def _real(name: str, x: Array) -> Array:
    if kind_of(x.dtype) not in "iuf":
        raise ValueInputError(f"{name}: expected real numbers, got {x.dtype}")
    return x


def _argument(op: str, name: str, x: Array, axis: int | None, keepdims: bool) -> Array:
    _real(name, x)
    if axis is None:
        found = _argument(op, name, reshape(x, (x.size,)), 0, False)
        return reshape(found, (1,) * x.ndim) if keepdims else found
    k = axis_of(axis, x.ndim)
    if not x.shape[k]:
        raise ValueInputError(f"{name}: no elements along axis {axis} of {x.shape}")
    return array_of(apply(op, one(x), axis=k, keepdims=keepdims))


def argmax(x: Array, /, axis: int | None = None, *, keepdims: bool = False) -> Array:
    """Index of the first largest element along an axis, or of the flattened array."""
    return _argument("argmax", "argmax", x, axis, keepdims)


def argmin(x: Array, /, axis: int | None = None, *, keepdims: bool = False) -> Array:
    """Index of the first smallest element along an axis, or of the flattened array."""
    return _argument("argmin", "argmin", x, axis, keepdims)


def nonzero(x: Array, /) -> tuple[Array, ...]:
    """Indices of the nonzero elements, one array for each axis. Runs on the host."""
    if not x.ndim:
        raise ValueInputError("nonzero: expected at least one axis")
    return tuple(computed("nonzero", i, x) for i in np.nonzero(contents(x)))


def searchsorted(x1: Array, x2: Any, /, *, side: str = "left", sorter: Array | None = None) -> Array:
    """By counting the elements of `x1` before each of `x2`."""
    if side not in ("left", "right"):
        raise ValueInputError(f"searchsorted: side={side!r}: expected 'left' or 'right'")
    a, b = operands("searchsorted", x1 if sorter is None else take(x1, sorter), x2, kinds="iuf")
    column = apply("reshape", one(b), shape=(*b.shape, 1))
    before = apply("less" if side == "left" else "less_equal", one(a), column)
    return sum_of(array_of(before), axis=-1)


# --- sorting ----------------------------------------------------------------------------------------------------------


def sort(x: Array, /, axis: int = -1, *, descending: bool = False, stable: bool = True) -> Array:
    """The elements sorted along an axis. The sort is stable."""
    return _sorted(_real("sort", x), axis, descending)[0]


def argsort(x: Array, /, axis: int = -1, *, descending: bool = False, stable: bool = True) -> Array:
    """Indices that sort the array along an axis. The sort is stable."""
    return _sorted(_real("argsort", x), axis, descending)[1]


def _sorted(x: Array, axis: int, descending: bool) -> tuple[Array, Array]:
    """Always stable."""
    k = axis_of(axis, x.ndim)
    if not symbolic(x.shape[k]) and x.shape[k] < 2:
        return array_of(*x._parts), placed(array_of(apply("full", shape=x.shape, value=0, dtype=i64)), one(x).device)
    values, at = apply_all("sort", one(x), axis=k, descending=descending)
    return array_of(values), array_of(at)


def top_k(x: Array, k: int, /, *, axis: int = -1, largest: bool = True) -> tuple[Array, Array]:
    """The k largest or smallest elements along an axis in order, and where they are."""
    a = axis_of(axis, x.ndim)
    if not 0 < k <= x.shape[a]:
        raise ValueInputError(f"top_k: k={k} of {x.shape[a]} elements")
    values, at = apply_all("sort", one(_real("top_k", x)), axis=a, descending=largest, keep=k)
    return array_of(values), array_of(at)


# --- sets -------------------------------------------------------------------------------------------------------------


class UniqueAll(NamedTuple):
    values: Array
    indices: Array
    inverse_indices: Array
    counts: Array


class UniqueCounts(NamedTuple):
    values: Array
    counts: Array


class UniqueInverse(NamedTuple):
    values: Array
    inverse_indices: Array


def unique_all(x: Array, /) -> UniqueAll:
    """Unique elements, their first indices, inverse indices and counts. Runs on the host."""
    values, first, inverse, counts = np.unique(
        contents(x), return_index=True, return_inverse=True, return_counts=True, equal_nan=False
    )
    numbers = (a.astype(np.int64) for a in (first, inverse.reshape(x.shape), counts))
    return UniqueAll(*(computed("unique_all", a, x) for a in (values, *numbers)))


def unique_counts(x: Array, /) -> UniqueCounts:
    """Unique elements and their counts. Runs on the host."""
    values, counts = np.unique(contents(x), return_counts=True, equal_nan=False)
    return UniqueCounts(*(computed("unique_counts", a, x) for a in (values, counts.astype(np.int64))))


def unique_inverse(x: Array, /) -> UniqueInverse:
    """Unique elements and the indices that rebuild x from them. Runs on the host."""
    values, inverse = np.unique(contents(x), return_inverse=True, equal_nan=False)
    numbers = inverse.reshape(x.shape).astype(np.int64)
    return UniqueInverse(*(computed("unique_inverse", a, x) for a in (values, numbers)))


def unique_values(x: Array, /) -> Array:
    """Unique elements. Runs on the host."""
    return computed("unique_values", np.unique(contents(x), equal_nan=False), x)


def unique(
    x: Any,
    /,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
) -> Array | tuple[Array, ...]:
    """Unique elements, or slices along an axis, sorted, as NumPy's `unique` gives them. Runs on the host.

    Returns:
        The array, or a tuple of it and those asked for: first indices, inverse indices and counts.
    """
    x = asarray(x)
    k = None if axis is None else axis_of(axis, x.ndim)
    asked = {"return_index": return_index, "return_inverse": return_inverse, "return_counts": return_counts}
    found: Any = np.unique(contents(x), axis=k, equal_nan=equal_nan, **asked)  # type: ignore[call-overload]
    values, *numbers = found if isinstance(found, tuple) else (found,)
    made = [computed("unique", values, x), *(computed("unique", a.astype(np.int64), x) for a in numbers)]
    return tuple(made) if len(made) > 1 else made[0]


def isin(x1: Any, x2: Any, /, *, invert: bool = False) -> Array:
    """Is each element of `x1` among those of `x2`?"""
    a, b = operands("isin", x1, x2)
    line = [apply("reshape", p, shape=(b.size,)) for p in b._parts]
    column = [apply("reshape", p, shape=(*a.shape, 1)) for p in a._parts]
    hits = [apply("equal", p, q) for p, q in zip(column, line)]
    found = any_of(array_of(hits[0] if len(hits) == 1 else apply("logical_and", *hits)), axis=-1)
    return array_of(apply("logical_not", one(found))) if invert else found
