"""Converters of operators with data-dependent shapes: constants of constants, else the size is a fresh dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call, Item, of_array
from dnnc.frontends.onnx.unbacked_dims import fresh_dim
from dnnc.ir.dtype import boolean, f32, i64, string
from dnnc.ir.errors import ModelError
from dnnc.ir.expr import const, value
from dnnc.ir.shapes import normalize_axis

Converter = Callable[[Call], Any]
FEW_SCORES = 1 << 15  # all of which are candidates of a suppression: that costs less than the end of a segment


def nonzero(c: Call) -> Any:
    """Return the indices of nonzeros, a row for each axis; a scalar has no axes, so the result is [0, 0] or [0, 1]."""
    if not c.item(0).constant:
        x = c.x()
        x = (
            x
            if x.type.dtype is not string
            else c.b.logical_not(c.b.string_equal(x, c.b.constant(np.array("", object))))
        )
        return c.b.nonzero(x, size=fresh_dim(c, x.type.size))
    a = c.array(0)
    found = np.array(np.nonzero(a), np.int64) if a.ndim else np.zeros((0, np.count_nonzero(a)), np.int64)
    return of_array(found.reshape(a.ndim, -1) if a.ndim else found)


def compress(c: Call) -> Any:
    """Slices along an axis (elements, without one) whose flag is set; flags may be fewer than slices."""
    keep = c.item(1)
    axis = c.integer("axis") if "axis" in c.attrs else None
    if c.rank(1) != 1 or keep.type.dtype is not boolean:
        raise ModelError(f"the condition must be a bool vector, got {keep.type}")
    if c.item(0).constant and keep.constant:
        a = c.array(0)
        return of_array(np.compress(c.array(1), a.reshape(-1) if axis is None else a, axis or 0))
    x = c.x()
    if keep.constant:
        at = np.flatnonzero(c.array(1))
        flat = c.b.reshape(x, shape=(x.type.size,)) if axis is None else x
        return c.b.gather(flat, c.b.constant(at), axis=axis or 0)
    flags, n = c.x(1), x.type.size if axis is None else x.type.shape[normalize_axis(axis, x.type.rank)]
    most = flags.type.shape[0]
    if isinstance(most, int) and isinstance(n, int) and most > n:
        flags, most = c.b.slice(flags, starts=(0,), steps=(1,), shape=(n,)), n
    return c.b.compress(x, flags, size=fresh_dim(c, most), axis=axis)


def unique(c: Call) -> Any:
    """Return unique values (or slices along an axis), their first indices, the inverse numbers and the counts."""
    axis, in_order = c.integer("axis") if "axis" in c.attrs else None, c.flag("sorted", True)
    if c.item(0).constant:
        return _unique_constant(c, axis, in_order)
    x = c.x()
    n = x.type.size if axis is None else x.type.shape[normalize_axis(axis, x.type.rank)]
    if x.type.dtype is not string:
        return c.b.unique(x, size=fresh_dim(c, n), axis=axis, sorted=in_order)
    _, first, inverse, counts = c.b.unique(c.b.string_rank(x), size=fresh_dim(c, n), axis=axis, sorted=in_order)
    flat = x if axis is not None else c.b.reshape(x, shape=(n,))
    return c.b.gather(flat, first, axis=axis or 0), first, inverse, counts


def _unique_constant(c: Call, axis: int | None, in_order: bool) -> tuple[Item, ...]:
    y, first, inverse, counts = np.unique(
        c.array(0), return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = np.asarray(inverse).reshape(-1)
    if not in_order:
        order = np.argsort(first, kind="stable")
        y, first, counts = np.take(y, order, axis or 0), first[order], counts[order]
        inverse = np.argsort(order, kind="stable")[inverse]
    return (of_array(y), *(of_array(v.astype(np.int64)) for v in (first, inverse, counts)))


def non_max_suppression(c: Call) -> Any:
    """Return rows [batch, class, box] by batch, class and falling score; none without a limit of boxes per class."""
    boxes, scores = c.x(0), c.x(1)
    if boxes.type.rank != 3 or scores.type.rank != 3:
        raise ModelError(
            f"boxes must be [batches, boxes, 4] and scores [batches, classes, boxes], got {boxes.type} and "
            f"{scores.type}"
        )
    most = c.b.reshape(c.x(2), shape=()) if c.has(2) else c.const(0, i64)
    overlap = c.b.reshape(c.x(3), shape=()) if c.has(3) else c.const(0.0, f32)
    score = c.b.reshape(c.x(4), shape=()) if c.has(4) else None
    n = scores.type.shape[2]
    scored = value(const(scores.type.size))
    cut = score is not None and (scored is None or scored > FEW_SCORES)
    candidates = fresh_dim(c, n, f"{c.outputs[0]}_candidates") if cut else n
    size = fresh_dim(c, scores.type.size)
    return c.b.non_max_suppression(
        boxes, scores, most, overlap, score, size=size, candidates=candidates, center=c.flag("center_point_box")
    )


DYNAMIC: dict[str, Converter] = {
    "NonZero": nonzero,
    "Compress": compress,
    "Unique": unique,
    "NonMaxSuppression": non_max_suppression,
}
