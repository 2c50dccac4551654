"""NumPy's functions that join, split and pad arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from dnnc.array.core import Array, array_of, from_buffer
from dnnc.array.creation import asarray
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import apply
from dnnc.array.manipulation import axis_of, concat, expand_dims, reshape, sliced, take
from dnnc.array.sizes import same


def concatenate(arrays: Sequence[Any], axis: int | None = 0) -> Array:
    """NumPy's name of `concat`."""
    return concat([asarray(a) for a in arrays], axis=axis)


def at_least(x: Any, ndim: int) -> Array:
    """An array with so many axes at least: (n,) becomes (1, n), and (1, n, 1) of three."""
    a = asarray(x)
    if a.ndim >= ndim:
        return a
    if ndim == 3 and a.ndim == 2:
        return expand_dims(a, axis=2)
    shape = {1: (1,), 2: (1, *(a.shape or (1,))), 3: (1, *(a.shape or (1,)), 1)}[ndim]
    return reshape(a, shape)


def vstack(arrays: Sequence[Any]) -> Array:
    """Rows below each other: vectors become rows, anything else is joined along its first axis."""
    return concat([at_least(a, 2) for a in arrays], axis=0)


def hstack(arrays: Sequence[Any]) -> Array:
    """Columns beside each other: along the second axis, of vectors along the only one."""
    xs = [at_least(a, 1) for a in arrays]
    return concat(xs, axis=0 if xs[0].ndim == 1 else 1)


def dstack(arrays: Sequence[Any]) -> Array:
    """Along the third axis."""
    return concat([at_least(a, 3) for a in arrays], axis=2)


def column_stack(arrays: Sequence[Any]) -> Array:
    """Vectors as columns, matrices as they are."""
    xs = [asarray(a) for a in arrays]
    return concat([reshape(a, (-1, 1)) if a.ndim < 2 else a for a in xs], axis=1)


# --- splitting --------------------------------------------------------------------------------------------------------


def array_split(x: Array, indices_or_sections: Any, axis: int = 0) -> list[Array]:
    """Parts along an axis: so many, whose sizes differ by one at most, or cut at these indices."""
    k = axis_of(axis, x.ndim)
    n = x.shape[k]
    if isinstance(indices_or_sections, (int, np.integer)):
        count = int(indices_or_sections)
        if count < 1:
            raise ValueInputError(f"array_split: {count} parts: expected at least one")
        sizes = [n // count + (j < n % count) for j in range(count)]
        ends = list(accumulate(sizes))
        return [sliced(x, k, end - size, size) for end, size in zip(ends, sizes)]
    cuts = [0, *(_cut(int(i), n) for i in indices_or_sections), n]
    return [sliced(x, k, a if b > a else 0, max(b - a, 0)) for a, b in pairwise(cuts)]


def _cut(i: int, n: int) -> int:
    return min(max(i + n if i < 0 else i, 0), n)


def split(x: Array, indices_or_sections: Any, axis: int = 0) -> list[Array]:
    """The same; a number of parts must divide the size."""
    n = x.shape[axis_of(axis, x.ndim)]
    if isinstance(indices_or_sections, (int, np.integer)) and (indices_or_sections < 1 or n % indices_or_sections):
        raise ValueInputError(
            f"split: {n} elements along axis {axis} do not make {indices_or_sections} equal parts; array_split gives "
            "parts of unequal sizes"
        )
    return array_split(x, indices_or_sections, axis)


def vsplit(x: Array, indices_or_sections: Any) -> list[Array]:
    """`split` along the first axis of at least two."""
    return split(_with_axes("vsplit", x, 2), indices_or_sections, 0)


def hsplit(x: Array, indices_or_sections: Any) -> list[Array]:
    """`split` along the second axis; of vectors along the only one."""
    return split(_with_axes("hsplit", x, 1), indices_or_sections, 0 if x.ndim == 1 else 1)


def dsplit(x: Array, indices_or_sections: Any) -> list[Array]:
    """`split` along the third axis."""
    return split(_with_axes("dsplit", x, 3), indices_or_sections, 2)


def _with_axes(name: str, x: Array, least: int) -> Array:
    if x.ndim < least:
        raise ValueInputError(f"{name}: expected at least {least} axes, got shape {x.shape}")
    return x


# --- padding ----------------------------------------------------------------------------------------------------------

_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")


def pad(x: Array, pad_width: Any, mode: str = "constant", constant_values: Any = 0) -> Array:
    """More elements at both ends of axes.

    Args:
        x: an array.
        pad_width: how many: a number, a pair (before, after), or a pair for each axis.
        mode: "constant", "edge" (the last element), "reflect" (mirrored, the last element once), "symmetric" (twice) or
            "wrap" (from the other end).
        constant_values: a number, or an array without axes.

    Raises:
        ValueInputError: another mode, negative widths, or an axis without elements where the mode needs one.
    """
    if mode not in _MODES:
        raise ValueInputError(f"pad: mode={mode!r}: expected one of {', '.join(_MODES)}")
    widths = _widths(pad_width, x.ndim)
    pads = (*(a for a, _ in widths), *(b for _, b in widths))
    if mode == "constant":
        fill = asarray(constant_values).astype(x.dtype)
        if fill.ndim:
            raise ValueInputError(f"pad: constant_values is one number, got shape {fill.shape}")
        return array_of(*(apply("pad", p, q, pads=pads) for p, q in zip(x._parts, fill._parts)))
    for k, width in enumerate(widths):
        if any(width) and same(x.shape[k], 0):
            raise ValueInputError(f"pad: axis {k} of {x.shape} has no elements for mode {mode!r}")
        if mode == "symmetric" and any(width):
            x = take(x, from_buffer(np.pad(np.arange(x.shape[k]), width, "symmetric"), None), axis=k)
    return x if mode == "symmetric" else array_of(*(apply("pad", p, None, pads=pads, mode=mode) for p in x._parts))


def _widths(given: Any, ndim: int) -> list[tuple[int, int]]:
    a = np.asarray(given)
    if a.dtype.kind not in "iu" or a.ndim > 2:
        raise ValueInputError(f"pad: pad_width={given!r}: expected integers, pairs of them for each axis")
    try:
        pairs = np.broadcast_to(a, (ndim, 2))
    except ValueError:
        raise ValueInputError(f"pad: pad_width={given!r} does not fit to {ndim} axes") from None
    if (pairs < 0).any():
        raise ValueInputError(f"pad: pad_width={given!r}: widths are not negative")
    return [(int(p), int(q)) for p, q in pairs]
