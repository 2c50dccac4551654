"""x[key] and x[key] = value: keys as the array API standard has them, and integer arrays beside them as NumPy has them.

A key becomes, in order, a basic part (integers, slices, new axes: one `slice` op and a reshape) and a part by arrays
(one gather or scatter over the axes that arrays index). Truth values are looked at: where they are set decides shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.array import places
from dnnc.array.core import Array, array_of, as_operand, cast, from_buffer, placed, scalar
from dnnc.array.devices import HOST, common
from dnnc.array.elementwise import where
from dnnc.array.errors import IndexInputError
from dnnc.array.host import contents
from dnnc.array.lazy import Lazy, apply, materialise
from dnnc.array.manipulation import (
    broadcast_shapes,
    broadcast_to,
    expand_dims,
    from_start,
    moved,
    permute_dims,
    reshape,
    wide,
)
from dnnc.array.operators import NUMBERS
from dnnc.array.sizes import plain, same, same_shape, seen, symbolic
from dnnc.array.sizes import size as whole
from dnnc.ir.dtype import i64
from dnnc.ir.errors import InputError
from dnnc.ir.ops.slices import normalize_slice

SMALL = 1 << 10  # elements that are moved at once


@dataclass(frozen=True)
class Basic:
    """The part of a key without arrays: start, step, size along each operand axis; `shape` is the user's view."""

    starts: tuple[int, ...]
    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    def slices(self) -> tuple[slice, ...]:
        """For NumPy, with all axes of the operand left."""
        ends = [a + s * n for a, s, n in zip(self.starts, self.steps, self.sizes)]
        return tuple(slice(a, e if e >= 0 else None, s) for a, e, s in zip(self.starts, ends, self.steps))

    def whole(self, shape: tuple[int, ...]) -> bool:
        return same_shape(self.sizes, shape) and all(s == 1 for s in self.steps)


@dataclass(frozen=True)
class Key:
    """A key: its basic part, then arrays for axes of what that gives."""

    basic: Basic
    arrays: tuple[tuple[int, Array], ...]


def _items(key: Any, ndim: int) -> list[Any]:
    """The items of a key, one for each axis and new axis; arrays of truth values are indices already."""
    items: list[Any] = []
    for k in key if isinstance(key, tuple) else (key,):
        k = as_operand(k)
        if isinstance(k, list):
            k = from_buffer(np.asarray(k) if k else np.zeros(0, np.int64), None)
        if isinstance(k, bool) or (isinstance(k, Array) and k.dtype.kind == "b" and not k.ndim):
            raise IndexInputError("a truth value without axes is a key by itself, not beside others")
        if isinstance(k, Array) and k.dtype.kind == "b":
            items += [from_buffer(i, None) for i in np.nonzero(contents(k))]
        else:
            items.append(k)
    axes = sum(k is not None and k is not Ellipsis for k in items)
    gaps = [j for j, k in enumerate(items) if k is Ellipsis]
    if len(gaps) > 1:
        raise IndexInputError("a key has at most one ellipsis")
    if axes > ndim:
        raise IndexInputError(f"{axes} indices for an array with {ndim} axes")
    at = gaps[0] if gaps else len(items)
    return [*items[:at], *[slice(None)] * (ndim - axes), *items[at + 1 :]]


def parse(key: Any, shape: tuple[int, ...]) -> Key:
    """A key for an array of a shape. IndexInputError where it does not fit."""
    ranges: list[tuple[int, int, int]] = []
    seen: list[int] = []
    arrays: list[tuple[int, Array]] = []
    axis = 0
    for k in _items(key, len(shape)):
        if k is None:
            seen.append(1)
            continue
        n = shape[axis]
        axis += 1
        if isinstance(k, Array) and (k.ndim or any(p.traced for p in k._parts)):  # a traced integer has no value yet
            arrays.append((len(seen), k))
            start, step, size = 0, 1, n
        elif isinstance(k, slice):
            start, step, size = _range(k, n)
        else:
            ranges.append((_integer(k, n, axis - 1), 1, 1))
            continue
        ranges.append((start, step, size))
        seen.append(size)
    starts, steps, sizes = zip(*ranges) if ranges else ((), (), ())
    return Key(Basic(starts, steps, sizes, tuple(seen)), tuple(arrays))


def _range(k: slice, n: Any) -> tuple[Any, int, Any]:
    """Start, step and size of a slice of an axis of n elements."""
    first, last, by = (None if v is None else whole(v) for v in (k.start, k.stop, k.step))
    if symbolic(n, first, last, by):
        return _open_range(first, last, by, n)
    start, stop, step = slice(first, last, by).indices(n)
    size = len(range(start, stop, step))
    return start if size else 0, step, size


def _open_range(first: Any, last: Any, step: Any, n: Any) -> tuple[Any, int, Any]:
    """The same where a size is not known."""
    step = 1 if step is None else step
    if type(step) is not int or not step:
        raise IndexInputError(f"the step of a slice must be an integer that is not 0, got {step}")
    end = (1 << 31) if step > 0 else -(1 << 31)
    start, stop = (e if v is None else plain(v) for v, e in ((first, 0 if step > 0 else plain(n) - 1), (last, end)))
    cut = normalize_slice((plain(n),), (start,), (stop,), steps=(step,))
    return seen(cut["starts"][0]), step, seen(cut["shape"][0])


def _integer(k: Any, n: int, axis: int) -> int:
    try:
        i: int = whole(k)
    except (AttributeError, TypeError):
        raise IndexInputError(
            f"an index is an integer, a slice, an ellipsis, None or an array of integers or truth values; got {k!r}"
        ) from None
    if not -n <= i < n:
        raise IndexInputError(f"index {i} of axis {axis}, which has {n} elements")
    return i + n if i < 0 else i


def read(x: Array, key: Any) -> Array:
    """x[key]"""
    key = as_operand(key)
    if isinstance(key, bool) or (isinstance(key, Array) and key.dtype.kind == "b"):
        mask = key if isinstance(key, Array) else from_buffer(np.asarray(key), None)
        if mask.ndim == 0:
            return expand_dims(x, axis=0)[: int(bool(mask))]
        _fits(mask, x)
    k = parse(key, x.shape)
    if (
        not k.arrays
        and not symbolic(*k.basic.starts, *k.basic.sizes)
        and (found := places.shared(x, k.basic)) is not None
    ):
        return found
    if _at_once(x, key, k):
        if x.device != HOST:
            return places.read(x, k.basic)
        return from_buffer(x._contents()[k.basic.slices()].reshape(k.basic.shape), x._parts[0].device)
    y = (
        x
        if k.basic.whole(x.shape)
        else moved(x, "slice", starts=k.basic.starts, steps=k.basic.steps, shape=k.basic.sizes)
    )
    y = reshape(y, k.basic.shape)
    return _gathered(y, k.arrays) if k.arrays else y


def _at_once(x: Array, key: Any, k: Key) -> bool:
    """True if the place is likely to change from call to call, as an integer of a loop does."""
    if k.arrays or any(p.traced or p.tracked for p in x._parts):
        return False
    items = key if isinstance(key, tuple) else (key,)
    return math.prod(k.basic.sizes) <= SMALL or any(
        i is not None and i is not Ellipsis and not isinstance(i, slice) for i in items
    )


def _fits(mask: Array, x: Array) -> None:
    """IndexInputError unless truth values say something of every element, or row."""
    if mask.ndim > x.ndim or not all(same(m, 0) or same(m, n) for m, n in zip(mask.shape, x.shape)):
        raise IndexInputError(f"truth values of shape {mask.shape} for an array of shape {x.shape}")


def _gathered(x: Array, arrays: tuple[tuple[int, Array], ...]) -> Array:
    _checked(x.shape, arrays)
    if len(arrays) == 1:
        axis, k = arrays[0]
        at = from_start(wide(k), x.shape[axis])
        return array_of(*(apply("gather", p, at, axis=axis) for p in x._parts))
    axes, flat, shape = _together(x.shape, arrays)
    rest = [a for a in range(x.ndim) if a not in axes]
    first = permute_dims(x, [*axes, *rest])
    rows = reshape(first, (math.prod(first.shape[: len(axes)]), *first.shape[len(axes) :]))
    y = array_of(*(apply("gather", p, flat, axis=0) for p in rows._parts))
    return permute_dims(y, _back(axes, len(shape), len(rest)))


def _checked(shape: tuple[int, ...], arrays: tuple[tuple[int, Array], ...]) -> None:
    """Raise IndexInputError for known indices that are too large; lazy indices are checked when computed."""
    for axis, k in arrays:
        data = k._parts[0].data
        if k.dtype.kind not in "iu":
            raise IndexInputError(f"arrays of {k.dtype} are no indices: expected integers or truth values")
        if (
            isinstance(data, np.ndarray)
            and data.size
            and not symbolic(shape[axis])
            and not (-shape[axis] <= data.min() and data.max() < shape[axis])
        ):
            raise IndexInputError(
                f"indices from {data.min()} to {data.max()} of axis {axis}, which has {shape[axis]} elements"
            )


def _together(shape: tuple[int, ...], arrays: tuple[tuple[int, Array], ...]) -> tuple[list[int], Lazy, tuple[int, ...]]:
    """Several arrays as one index into their axes taken as one: the axes, the index, and its shape."""
    common = broadcast_shapes(*(k.shape for _, k in arrays))
    flat: Lazy | None = None
    for axis, k in arrays:
        at = from_start(wide(broadcast_to(k, common)), shape[axis])
        n = apply("full", shape=(), value=shape[axis], dtype=i64)
        flat = at if flat is None else apply("add", apply("mul", flat, n), at)
    assert flat is not None
    return [a for a, _ in arrays], flat, common


def _back(axes: list[int], made: int, rest: int) -> list[int]:
    """The order that puts the axes of the indices where the arrays stood, or first where these stood apart."""
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    at = axes[0] if together else 0
    others = list(range(made, made + rest))
    return [*others[:at], *range(made), *others[at:]]


# --- writing ----------------------------------------------------------------------------------------------------------


def written(x: Array, key: Any, value: Any) -> Array:
    """x after x[key] = value"""
    key, v = as_operand(key), as_operand(value)
    if not isinstance(v, (Array, *NUMBERS)):
        v = from_buffer(np.asarray(v), None)
    v = cast(v, x.dtype) if isinstance(v, Array) else scalar(v, x.dtype)
    common("x[key] = value", [x._parts[0].device, v._parts[0].device])
    if isinstance(key, Array) and key.dtype.kind == "b" and (v.ndim == 0 or key.ndim == 0):  # no need to know where
        _fits(key, x)
        return where(reshape(key, key.shape + (1,) * (x.ndim - key.ndim)), v, x)
    k = parse(key, x.shape)
    if _at_once(x, key, k) and not any(p.traced or p.tracked for p in v._parts):
        return _written_at_once(x, k.basic, _fitted(v, k.basic.shape))
    if not k.arrays and k.basic.whole(x.shape):
        everything = moved(broadcast_to(_fitted(v, k.basic.shape), k.basic.shape), "reshape", shape=x.shape)
        return placed(everything, x._parts[0].device)  # a number lives nowhere in particular
    if not k.arrays and not symbolic(*x.shape, *k.basic.starts, *k.basic.sizes):
        v = _fitted(v, k.basic.shape)
        return array_of(*x._parts) if 0 in k.basic.sizes else places.written(x, k.basic, v)
    flat = _places(x, k)
    v = broadcast_to(_fitted(v, flat.shape), flat.shape)
    if not flat.size:
        return array_of(*x._parts)
    at = reshape(flat, (flat.size, 1))._parts[0]
    parts = [
        apply(
            "reshape",
            apply("scatter_nd", apply("reshape", p, shape=(x.size,)), at, apply("reshape", q, shape=(flat.size,))),
            shape=x.shape,
        )
        for p, q in zip(x._parts, v._parts)
    ]
    return array_of(*parts)


def _written_at_once(x: Array, b: Basic, v: Array) -> Array:
    """On the host by NumPy; elsewhere queued."""
    if x.device == HOST:
        made = x._contents().copy()
        made[b.slices()] = np.broadcast_to(v._contents(), b.shape).reshape(b.sizes)
        return from_buffer(made, x._parts[0].device)
    if 0 in b.sizes:
        return array_of(*x._parts)
    y = places.written(x, b, v)
    materialise(y._parts)
    return y


def _fitted(v: Array, shape: tuple[int, ...]) -> Array:
    """Without leading axes of size 1 that the place does not have. InputError where it does not fit."""
    while v.ndim > len(shape) and same(v.shape[0], 1):
        v = reshape(v, v.shape[1:])
    if v.ndim > len(shape) or not all(same(n, 1) or same(n, m) for n, m in zip(v.shape[::-1], shape[::-1])):
        raise InputError(f"a value of shape {v.shape} does not fit into a place of shape {shape}")
    return v


def _places(x: Array, key: Key) -> Array:
    """For each element of x[key] its place in memory, as a computed range."""
    line = array_of(apply("reshape", apply("iota", shape=(x.size,), axis=0, dtype=i64), shape=x.shape))
    b = key.basic
    y = reshape(moved(line, "slice", starts=b.starts, steps=b.steps, shape=b.sizes), b.shape)
    return _gathered(y, key.arrays) if key.arrays else y
