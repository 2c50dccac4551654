"""Elements by conditions, choices and places, as NumPy has them; views of an array as a line, and as other dtypes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dnnc.array.core import Array, array_of, cast, evaluate, indexing
from dnnc.array.creation import asarray
from dnnc.array.elementwise import clip, equal, floor_divide, less, one, remainder, where
from dnnc.array.errors import TypeInputError, ValueInputError
from dnnc.array.host import contents
from dnnc.array.lazy import apply
from dnnc.array.manipulation import axis_of, broadcast_arrays, expand_dims, reshape, stack, take, take_along_axis
from dnnc.array.promotion import dtype_of, kind_of
from dnnc.array.searching import argsort, sort
from dnnc.array.statistical import any as any_
from dnnc.ir.dtype import from_numpy

MODES = ("raise", "wrap", "clip")
LINE = np.dtype(np.int64)


def _places(name: str, at: Any, n: int, mode: str) -> Array:
    """Indices into n elements, by what a mode says of others. "raise": the program that reads there raises."""
    if mode not in MODES:
        raise ValueInputError(f"{name}: mode={mode!r}, expected {', '.join(map(repr, MODES))}")
    made = asarray(at)
    if made.size == 0 and not isinstance(at, Array):
        made = cast(made, LINE)
    if kind_of(made.dtype) not in "biu":
        raise TypeInputError(f"{name}: expected integers as indices, got {made.dtype}")
    made = cast(made, LINE)
    return clip(made, 0, n - 1) if mode == "clip" else remainder(made, n) if mode == "wrap" else made


def choose(x: Any, choices: Any, /, mode: str = "raise") -> Array:
    """At each place the element of the array whose number `x` has there; all arrays are broadcast.

    Args:
        x: integers.
        choices: a sequence of arrays, or an array along whose first axis they lie.
        mode: of numbers that no array has: "raise" an error where the result is computed, "wrap" around, or "clip".
    """
    arrays = [asarray(c) for c in choices]
    if not arrays:
        raise ValueInputError("choose: there are no arrays to choose from")
    at = _places("choose", x, len(arrays), mode)
    at = where(less(at, 0), len(arrays), at)  # a negative number is none from the end
    at, *arrays = broadcast_arrays(at, *arrays)
    return reshape(take_along_axis(stack(arrays), expand_dims(at, axis=0), axis=0), at.shape)


def compress(condition: Any, x: Any, /, axis: int | None = None) -> Array:
    """The slices along an axis, or the elements, where a condition of one axis is true. Looks at the condition."""
    x = asarray(x)
    if axis is None:
        x, axis = reshape(x, (x.size,)), 0
    k = axis_of(axis, x.ndim)
    where_ = contents(asarray(condition))
    if where_.ndim != 1:
        raise ValueInputError(f"compress: expected a condition of one axis, got shape {where_.shape}")
    (at,) = np.nonzero(where_)
    if at.size and at[-1] >= x.shape[k]:
        raise ValueInputError(f"compress: condition {int(at[-1])} is true, axis {k} of {x.shape} ends before")
    return take(x, asarray(at.astype(np.int64), device=x.device), axis=k)


def extract(condition: Any, x: Any, /) -> Array:
    """The elements where a condition of the same size is true, in order. Looks at the condition."""
    c = asarray(condition)
    return compress(reshape(c, (c.size,)), x)


def put(x: Array, indices: Any, values: Any, /, mode: str = "raise") -> None:
    """Write values at places of all elements in order, in place; too few of them begin again, as NumPy's do."""
    if not isinstance(x, Array):
        raise TypeInputError(f"put: expected a dnnc array to write into, got {type(x).__name__}")
    at = _places("put", indices, x.size, mode)
    at, v = reshape(at, (at.size,)), cast(asarray(values), x.dtype)
    if not at.size or not v.size:
        return
    v = reshape(v, (v.size,))
    if v.size != at.size:
        v = take(v, asarray(np.arange(at.size) % v.size, device=x.device), axis=0)
    line = indexing().written(reshape(x, (x.size,)), at, v)
    x[...] = reshape(line, x.shape)


# --- partitions -------------------------------------------------------------------------------------------------------


def partition(x: Array, kth: Any, /, axis: int | None = -1) -> Array:
    """The elements along an axis with the k-th smallest at place k, no larger ones ahead of it: they are sorted."""
    return sort(*_partition("partition", x, kth, axis))


def argpartition(x: Array, kth: Any, /, axis: int | None = -1) -> Array:
    """Indices that partition the array along an axis: they sort it."""
    return argsort(*_partition("argpartition", x, kth, axis))


def _partition(name: str, x: Array, kth: Any, axis: int | None) -> tuple[Array, int]:
    x, axis = (reshape(x, (x.size,)), 0) if axis is None else (x, axis)
    k = axis_of(axis, x.ndim)
    for place in np.atleast_1d(np.asarray(kth)).tolist():
        if not -x.shape[k] <= operator.index(place) < x.shape[k]:
            raise ValueInputError(f"{name}: kth={place} of {x.shape[k]} elements along axis {axis}")
    return x, k


# --- views ------------------------------------------------------------------------------------------------------------


class Flat:
    """All elements of an array in order: `x.flat`. What is written to it is written to the array."""

    def __init__(self, base: Array) -> None:
        self.base = base

    def _line(self) -> Array:
        return reshape(self.base, (self.base.size,))

    def __len__(self) -> int:
        return self.base.size

    def __iter__(self) -> Iterator[Array]:
        evaluate(self.base)
        return iter(self._line())

    def __getitem__(self, key: Any) -> Array:
        return self._line()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        put(self.base, np.arange(self.base.size)[np.asarray(key) if isinstance(key, Array) else key], value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self._line().__array__(dtype, copy)

    def copy(self) -> Array:
        """The elements as an array of their own."""
        return self._line()


def view(x: Array, dtype: Any) -> Array:
    """The bytes of an array as elements of another dtype: a new array. Elements of another size change the last axis.

    TypeInputError: the dtype is none of numbers, or it is of another size and there is no axis, or it does not fit.
    """
    if isinstance(dtype, int) or (isinstance(dtype, Sequence) and not isinstance(dtype, str)):
        raise TypeInputError(f"view: expected a dtype, got {dtype!r}; x.reshape gives another shape")
    have, want = x.dtype, dtype_of(dtype)
    if have == want:
        return x.copy()
    if "c" in (have.kind, want.kind) or "b" in (have.kind, want.kind):
        raise TypeInputError(f"view: an array of {have} cannot be seen as {want}; x.numpy().view(...) can")
    if have.itemsize != want.itemsize:
        raise TypeInputError(
            f"view: elements of {have} have {have.itemsize} bytes, of {want} {want.itemsize}; x.astype converts the "
            "numbers, x.numpy().view sees the bytes"
        )
    return array_of(apply("bit_cast", one(x), to=from_numpy(want)))


# --- operators --------------------------------------------------------------------------------------------------------


def divmod(x1: Any, x2: Any, /) -> tuple[Array, Array]:
    """`floor_divide` and `remainder`."""
    return floor_divide(x1, x2), remainder(x1, x2)


def contains(x: Array, value: Any) -> bool:
    """Is some element equal to a value, which is broadcast? Looks at the array."""
    return bool(any_(equal(x, value)))
