"""x[key] and x[key] = value for keys of integers and slices whose places are operands of programs, not parts of them.

On a CUDA device the host would have to wait for the elements, and a program for each place would not pay. What lies in
one piece of a computed array is shared and needs no program at all. Writing asks each element if it is in the place.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dnnc.array.core import Array, array_of, placed
from dnnc.array.devices import ALIGN, DeviceData, in_trace
from dnnc.array.lazy import Lazy, apply, buffer, leaf, materialise
from dnnc.ir.dtype import i64

if TYPE_CHECKING:
    from dnnc.array.indexing import Basic


def _number(n: int) -> Lazy:
    """An operand without axes."""
    return leaf(np.array(n, np.int64), None)


def _partial(shape: tuple[int, ...], b: Basic) -> list[int]:
    """The axes of which a key does not take all in order."""
    return [k for k, n in enumerate(shape) if (b.starts[k], b.sizes[k]) != (0, n) or (b.steps[k] != 1 and n > 1)]


def shared(x: Array, b: Basic) -> Array | None:
    """Return x[key] as a view of computed memory where its elements are contiguous; else None."""
    if in_trace() or any(p.tracked for p in x._parts):
        return None
    parts = [_piece(p, b) for p in x._parts if p.data is not None]
    found = [p for p in parts if p is not None]
    return array_of(*found) if len(found) == len(x._parts) else None


def read(x: Array, b: Basic) -> Array:
    """x[key] of an array on a CUDA device, which is computed if it is not yet."""
    materialise(x._parts)
    return array_of(*(_piece(p, b) or _gathered(p, b) for p in x._parts))


def _piece(p: Lazy, b: Basic) -> Lazy | None:
    """Return contiguous elements that share memory; None where they are not, or not aligned for kernels."""
    axes = _partial(p.shape, b)
    last = axes[-1] if axes else 0
    if any(b.sizes[k] != 1 for k in range(last)) or (axes and b.steps[last] != 1 and b.sizes[last] != 1):
        return None
    data = buffer(p)
    if not isinstance(data, DeviceData):
        view = data[b.slices()]
        return leaf(view.reshape(b.shape), p.device) if view.flags.c_contiguous else None
    place = sum(start * math.prod(p.shape[k + 1 :]) for k, start in enumerate(b.starts)) * data.dtype.itemsize
    if place % ALIGN or 0 in b.sizes:
        return None
    return leaf(DeviceData(data.place, data.address + place, b.shape, data.dtype, data.keep, data.stream))


def _gathered(p: Lazy, b: Basic) -> Lazy:
    shape = p.shape
    for k in _partial(shape, b):
        p = apply("gather", p, _line(b.starts[k], b.steps[k], b.sizes[k]), axis=k)
    return apply("reshape", p, shape=b.shape)


def _line(start: int, step: int, size: int) -> Lazy:
    """start, start + step, ...; `size` of them"""
    if size == 1:
        return apply("reshape", _number(start), shape=(1,))
    steps = apply("mul", apply("iota", shape=(size,), axis=0, dtype=i64), _number(step))
    return apply("add", steps, _number(start))


def written(x: Array, b: Basic, v: Array) -> Array:
    """`x` after x[key] = v. The place has elements, and `v` fits to it."""
    inside: Lazy | None = None
    at: dict[int, Lazy] = {}
    for k in _partial(x.shape, b):
        n, step = x.shape[k], b.steps[k]
        line, start = apply("iota", shape=(n,), axis=0, dtype=i64), _number(b.starts[k])
        away = apply("sub", line, start) if step > 0 else apply("sub", start, line)
        number = away if abs(step) == 1 else apply("div", away, _number(abs(step)))
        ok = apply("logical_and", apply("less_equal", _number(0), away), apply("less", number, _number(b.sizes[k])))
        if abs(step) != 1:
            ok = apply("logical_and", ok, apply("equal", apply("mul", number, _number(abs(step))), away))
        ok = apply("reshape", ok, shape=tuple(n if j == k else 1 for j in range(x.ndim)))
        inside = ok if inside is None else apply("logical_and", inside, ok)
        at[k] = apply("min", apply("max", number, _number(0)), _number(b.sizes[k] - 1))
    parts = [_spread(q, x.shape, b, at) for q in v._parts]
    placed(array_of(*parts), x._parts[0].device)
    if inside is not None:
        parts = [apply("where", inside, q, p) for p, q in zip(x._parts, parts)]
    return array_of(*parts)


def _spread(q: Lazy, shape: tuple[int, ...], b: Basic, at: dict[int, Lazy]) -> Lazy:
    """Values for a place as one for each element of the whole array, whatever it is outside of the place."""
    if math.prod(q.shape) == 1:
        return apply("expand", apply("reshape", q, shape=()), shape=shape)
    q = apply(
        "reshape", apply("expand", q, shape=b.shape), shape=b.sizes
    )  # a value of its own, whatever the shapes are
    for k, line in at.items():
        q = apply("gather", q, line, axis=k)
    return q
