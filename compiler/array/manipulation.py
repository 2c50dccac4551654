"""Functions that move elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from dnnc.array.core import Array, array_of, as_operand, cast, from_buffer, scalar
from dnnc.array.creation import shape_of
from dnnc.array.devices import DeviceData, in_trace
from dnnc.array.errors import IndexInputError, ValueInputError
from dnnc.array.lazy import Lazy, apply, leaf
from dnnc.array.operators import NUMBERS
from dnnc.array.promotion import DEFAULTS, kind_of, promoted
from dnnc.array.sizes import common, same, same_shape, size, symbolic

Axes = Any  # an integer, a sequence of them, or None


def axis_of(axis: int, ndim: int) -> int:
    """An axis counted from 0. InputError where there is none."""
    k = axis.__index__()
    if not -ndim <= k < ndim:
        raise ValueInputError(f"axis {axis} of an array with {ndim} axes")
    return k % ndim


def axes_of(axes: Axes, ndim: int) -> tuple[int, ...]:
    """Axes counted from 0, in order; all where None are given."""
    if axes is None:
        return tuple(range(ndim))
    if type(axes) is int:
        return (axis_of(axes, ndim),)
    given = [axis_of(a, ndim) for a in (axes if isinstance(axes, (tuple, list)) else (axes,))]
    if len(set(given)) < len(given):
        raise ValueInputError(f"axis={axes!r}: an axis is given twice")
    return tuple(sorted(given))


def moved(x: Array, op: str, **attrs: Any) -> Array:
    """An op on each part."""
    return array_of(*(apply(op, p, **attrs) for p in x._parts))


def reshape(x: Array, /, shape: Any, *, copy: bool | None = None) -> Array:
    """At most one size is -1 and follows from the others."""
    given = [d if type(d) is int else size(d) for d in (shape if isinstance(shape, (tuple, list)) else (shape,))]
    if symbolic(*given, *x.shape):
        return moved(x, "reshape", shape=tuple(given))
    if given.count(-1) == 1:
        known = math.prod(d for d in given if d != -1)
        if not known or x.size % known:
            raise ValueInputError(f"reshape: {x.shape} has {x.size} elements, which do not fit into {tuple(given)}")
        given[given.index(-1)] = x.size // known
    if math.prod(given) != x.size or any(d < 0 for d in given):
        raise ValueInputError(f"reshape: {x.shape} has {x.size} elements, which do not fit into {tuple(given)}")
    return array_of(*(_reshaped(p, tuple(given)) for p in x._parts))


def _reshaped(p: Lazy, shape: tuple[int, ...]) -> Lazy:
    """What is computed already is shared, and no op of a program."""
    if p.data is None or p.tracked or in_trace():
        return apply("reshape", p, shape=shape)
    return leaf(
        p.data.viewed(shape, p.data.dtype) if isinstance(p.data, DeviceData) else p.data.reshape(shape), p.device
    )


def permute_dims(x: Array, /, axes: Sequence[int]) -> Array:
    """The array with its axes in another order."""
    n = x.ndim
    perm = tuple([axis_of(a, n) for a in axes])
    if sorted(perm) != list(range(n)):
        raise ValueInputError(f"permute_dims: axes={tuple(axes)} are no order of the {x.ndim} axes")
    return moved(x, "transpose", perm=perm)


def matrix_transpose(x: Array, /) -> Array:
    """The last two axes exchanged."""
    if x.ndim < 2:
        raise ValueInputError(f"matrix_transpose: expected at least two axes, got shape {x.shape}")
    n = x.ndim
    return moved(x, "transpose", perm=(*range(n - 2), n - 1, n - 2))


def moveaxis(x: Array, source: Axes, destination: Axes, /) -> Array:
    """Axes moved to other positions; the others keep their order."""
    src, dst = (
        [axis_of(a, x.ndim) for a in (v if isinstance(v, (tuple, list)) else (v,))] for v in (source, destination)
    )
    if len(src) != len(dst) or len(set(src)) < len(src) or len(set(dst)) < len(dst):
        raise ValueInputError(f"moveaxis: {source} to {destination} is no move")
    order = [a for a in range(x.ndim) if a not in src]
    for d, s in sorted(zip(dst, src)):
        order.insert(d, s)
    return permute_dims(x, order)


def squeeze(x: Array, /, axis: Axes = None) -> Array:
    """Without axes of one element; without `axis` all that are known to be so."""
    axes = axes_of([k for k, d in enumerate(x.shape) if same(d, 1)] if axis is None else axis, x.ndim)
    if not all(same(x.shape[a], 1) for a in axes):
        raise ValueInputError(f"squeeze: an axis of {axis} has more than one element in {x.shape}")
    return reshape(x, tuple(d for k, d in enumerate(x.shape) if k not in axes))


def expand_dims(x: Array, /, axis: Axes = 0) -> Array:
    """A new axis, or several, counted in the result."""
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    ndim = x.ndim + len(given)
    if any(not -ndim <= a < ndim for a in given):
        raise IndexInputError(f"expand_dims: axis {axis} of an array that will have {ndim} axes")
    new = {a % ndim for a in given}
    if len(new) < len(given):
        raise ValueInputError(f"expand_dims: axis={axis!r}: an axis is given twice")
    sizes = iter(x.shape)
    return reshape(x, tuple(1 if k in new else next(sizes) for k in range(ndim)))


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape of shapes by the rules of broadcasting."""
    if any(symbolic(*s) for s in shapes):
        found = common(shapes)
        if found is None:
            raise ValueInputError(
                f"shapes {', '.join(map(str, shapes))} are not known to broadcast; give sizes that are equal one name "
                "in the Spec"
            )
        return found
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        raise ValueInputError(f"shapes {', '.join(map(str, shapes))} do not broadcast") from None


def broadcast_to(x: Array, /, shape: Any) -> Array:
    """The array, repeated along axes of size 1 to a shape."""
    wanted = shape_of(shape)
    if not same_shape(broadcast_shapes(x.shape, wanted), wanted):
        raise ValueInputError(f"broadcast_to: {x.shape} does not broadcast to {wanted}")
    return array_of(*x._parts) if same_shape(wanted, x.shape) else moved(x, "expand", shape=wanted)


def broadcast_arrays(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, each broadcast to their common shape."""
    shape = broadcast_shapes(*(a.shape for a in arrays))
    return tuple(broadcast_to(a, shape) for a in arrays)


def same_type(arrays: Sequence[Any]) -> list[Array]:
    """Arrays as arrays of one type."""
    given = [as_operand(a) for a in arrays]
    dtype = promoted(*(a.dtype if isinstance(a, Array) else a for a in given))
    return [cast(a, dtype) if isinstance(a, Array) else scalar(a, dtype) for a in given]


def concat(arrays: Sequence[Array], /, axis: int | None = 0) -> Array:
    """Arrays joined along an existing axis; with axis None, flattened first."""
    xs = same_type(arrays)
    if axis is None:
        xs, axis = [reshape(x, (-1,)) if x.size else reshape(x, (0,)) for x in xs], 0
    k = axis_of(axis, xs[0].ndim)
    full = [x for x in xs if not same(x.shape[k], 0)] or xs[:1]
    if len(full) == 1:
        return array_of(*full[0]._parts)
    return array_of(*(apply("concat", *ps, axis=k) for ps in zip(*(x._parts for x in full))))


def stack(arrays: Sequence[Array], /, axis: int = 0) -> Array:
    """Arrays of one shape joined along a new axis."""
    return concat([expand_dims(x, axis=axis) for x in same_type(arrays)], axis=axis)


def unstack(x: Array, /, axis: int = 0) -> tuple[Array, ...]:
    """The slices of the array along an axis, as a tuple."""
    k = axis_of(axis, x.ndim)
    return tuple(squeeze(sliced(x, k, j, 1), k) for j in range(x.shape[k]))


def sliced(x: Array, axis: int, start: int, size: int, step: int = 1) -> Array:
    """Elements start, start + step, ... along one axis."""
    starts = tuple(start if k == axis else 0 for k in range(x.ndim))
    steps = tuple(step if k == axis else 1 for k in range(x.ndim))
    return moved(
        x, "slice", starts=starts, steps=steps, shape=tuple(size if k == axis else d for k, d in enumerate(x.shape))
    )


def flip(x: Array, /, axis: Axes = None) -> Array:
    """The array with the order of its elements reversed along axes."""
    axes = axes_of(axis, x.ndim)
    starts = tuple(max(d - 1, 0) if k in axes else 0 for k, d in enumerate(x.shape))
    return moved(x, "slice", starts=starts, steps=tuple(-1 if k in axes else 1 for k in range(x.ndim)), shape=x.shape)


def roll(x: Array, /, shift: Any, axis: Axes = None) -> Array:
    """Elements shifted along axes; those beyond the end return at the beginning."""
    if axis is None:
        return reshape(roll(reshape(x, (x.size,)), shift, axis=0), x.shape)
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    shifts = shift if isinstance(shift, (tuple, list)) else (shift,) * len(axes)
    for a, s in zip(axes, shifts):
        k = axis_of(a, x.ndim)
        n = x.shape[k]
        by = (s if s >= 0 else n + s) if symbolic(n) else s % n if n else 0
        if not same(by, 0):
            x = concat([sliced(x, k, n - by, by), sliced(x, k, 0, n - by)], axis=k)
    return array_of(*x._parts)


def tile(x: Array, repetitions: Sequence[int], /) -> Array:
    """The array repeated along each axis."""
    reps = tuple(index(n) for n in repetitions)
    ndim = max(len(reps), x.ndim)
    x = reshape(x, (1,) * (ndim - x.ndim) + x.shape)
    return moved(x, "tile", repeats=(1,) * (ndim - len(reps)) + reps)


def repeat(x: Array, repeats: Any, /, axis: int | None = None) -> Array:
    """Each element so many times. Different counts are evaluated: the size of the result depends on them."""
    if axis is None:
        x, axis = reshape(x, (x.size,)), 0
    k = axis_of(axis, x.ndim)
    counts = repeats.numpy() if isinstance(repeats, Array) else np.asarray(repeats)
    if counts.size == 1:
        n = int(counts.reshape(()))
        wide = broadcast_to(expand_dims(x, axis=k + 1), (*x.shape[: k + 1], n, *x.shape[k + 1 :]))
        return reshape(wide, (*x.shape[:k], x.shape[k] * n, *x.shape[k + 1 :]))
    return take(x, from_buffer(np.repeat(np.arange(x.shape[k]), counts), x.device), axis=k)


# --- indices ----------------------------------------------------------------------------------------------------------


def from_start(indices: Lazy, n: int) -> Lazy:
    """Indices counted from 0; those below count from the end."""
    if indices.type.dtype.kind == "u":
        return indices
    zero, size = (apply("full", shape=(), value=v, dtype=indices.type.dtype) for v in (0, n))
    return apply("where", apply("less", indices, zero), apply("add", indices, size), indices)


def wide(indices: Array) -> Lazy:
    """Indices as int64: sums of sizes fit. InputError where they are no integers."""
    if indices.dtype.kind not in "iu":
        raise ValueInputError(f"indices are integers; got {indices.dtype}")
    return cast(indices, DEFAULTS["i"])._parts[0]


def take(x: Array, indices: Any, /, axis: int | None = None) -> Array:
    """Elements at indices along an axis."""
    if axis is None:
        if x.ndim != 1:
            raise ValueInputError(f"take: an array of shape {x.shape} needs an axis")
        axis = 0
    k = axis_of(axis, x.ndim)
    given = indices if isinstance(indices, Array) else from_buffer(np.asarray(indices), None)
    at = from_start(wide(given), x.shape[k])
    return array_of(*(apply("gather", p, at, axis=k) for p in x._parts))


def take_along_axis(x: Array, indices: Array, /, axis: int = -1) -> Array:
    """Elements at indices along an axis, with separate indices for each row."""
    k = axis_of(axis, x.ndim)
    others = broadcast_shapes(*(tuple(1 if j == k else d for j, d in enumerate(a.shape)) for a in (x, indices)))
    x = broadcast_to(x, tuple(x.shape[k] if j == k else d for j, d in enumerate(others)))
    indices = broadcast_to(indices, tuple(indices.shape[k] if j == k else d for j, d in enumerate(others)))
    at = from_start(wide(indices), x.shape[k])
    return array_of(*(apply("gather_elements", p, at, axis=k) for p in x._parts))


def result_type(*given: Any) -> np.dtype[Any]:
    """The type that arrays, types and numbers promote to."""
    return promoted(
        *(
            g.dtype if isinstance(g, (Array, np.ndarray)) else g if isinstance(g, NUMBERS) else np.dtype(g)
            for g in given
        )
    )


def can_cast(from_: Any, to: Any, /) -> bool:
    """Does promotion keep `to`?"""
    a = from_.dtype if isinstance(from_, Array) else np.dtype(from_)
    kinds = {"b": "b", "i": "iu", "u": "iu", "f": "f", "c": "c"}
    b = np.dtype(to)
    return bool(promoted(a, b) == b) and (kind_of(b) in kinds.get(kind_of(a), "") or np.can_cast(a, b))
