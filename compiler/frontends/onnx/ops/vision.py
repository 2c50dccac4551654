"""Converters of image operators with computed places: regions of interest, deformable convolution, determinants."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call, number
from dnnc.frontends.onnx.ops.nn import conv_attributes
from dnnc.ir.dtype import f32, i64
from dnnc.ir.errors import ModelError, UnsupportedError
from dnnc.ir.expr import const, unwrap
from dnnc.ir.graph import Value
from dnnc.ir.ops.common import same_shape
from dnnc.ir.ops.window import window
from dnnc.ir.types import Dim, product

Converter = Callable[[Call], Any]


def roi_align(c: Call) -> Any:
    """Pool bins of regions (x1, y1, x2, y2), each sampled between pixels. Opset 16 added the half-pixel shift."""
    x, rois, batch = c.x(0), c.x(1), c.x(2)
    mode, moved = (
        c.text("mode", "avg"),
        c.text("coordinate_transformation_mode", "half_pixel" if c.opset >= 16 else "output_half_pixel"),
    )
    if mode not in ("avg", "max") or moved not in ("half_pixel", "output_half_pixel"):
        raise UnsupportedError(f"RoiAlign with mode {mode!r} and coordinate_transformation_mode {moved!r}")
    if c.rank(0) != 4:
        raise ModelError(f"RoiAlign takes images [N, C, H, W], got {x.type}")
    bins = (c.integer("output_height", 1), c.integer("output_width", 1))
    attrs = {
        "ratio": max(c.integer("sampling_ratio", 0), 0),
        "scale": c.number("spatial_scale", 1.0),
        "half_pixel": moved == "half_pixel",
    }
    wide = x.type.dtype.computed
    images, regions = c.cast(x, wide), c.cast(rois, wide)
    if mode == "max":
        return c.cast(c.b.roi_align_max(images, regions, batch, bins=bins, **attrs), x.type.dtype)
    height, width = x.type.shape[2:]
    rows = c.b.roi_weights(regions, size=height, bins=bins[0], column=1, **attrs)
    columns = c.b.roi_weights(regions, size=width, bins=bins[1], column=0, **attrs)
    return c.cast(c.b.roi_columns(c.b.roi_rows(images, batch, rows), columns), x.type.dtype)


def max_roi_pool(c: Call) -> Any:
    """Regions (image, x1, y1, x2, y2), whose bins are whole pixels."""
    x, rois = c.x(0), c.x(1)
    shape, scale = c.integers("pooled_shape"), c.number("spatial_scale", 1.0)
    if shape is None or len(shape) != 2 or c.rank(0) != 4:
        raise ModelError(
            f"MaxRoiPool takes images [N, C, H, W] and a pooled_shape of 2 numbers, got {x.type} and {shape}"
        )
    regions = c.cast(rois, f32) if rois.type.dtype.bits < 32 else rois
    rows = c.b.roi_bins(regions, size=x.type.shape[2], bins=shape[0], column=1, scale=scale)
    columns = c.b.roi_bins(regions, size=x.type.shape[3], bins=shape[1], column=0, scale=scale)
    count = rois.type.shape[0]
    first = c.b.slice(regions, starts=(0, 0), steps=(1, 1), shape=(count, 1))
    batch = c.cast(c.b.reshape(first, shape=(count,)), i64)
    every = c.b.iota(shape=(count,), axis=0, dtype=i64)
    return c.b.roi_max(c.b.roi_max(x, rows, batch, along=2), columns, every, along=3)


def deform_conv(c: Call) -> Any:
    """Inputs are x [N, C, D...], weights, offsets, bias, mask: channels read at moved places, times the weights.

    The channels of an offset group move together: their places and weights are computed once, [N, 1, P, taps, G] for P
    places of a result and G offset groups, and each row of C / G channels is read as one. Outside of x is a row of 0.
    """
    x, w, offset, group, groups = c.x(0), c.x(1), c.x(2), c.integer("group", 1), c.integer("offset_group", 1)
    attrs, b, real = conv_attributes(c, x, w), c.b, x.type.dtype.computed
    n, channels, *spatial = x.type.shape
    kernel = tuple(number(d, "the kernel of DeformConv") for d in w.type.shape[2:])
    places = window(len(spatial), kernel, attrs["strides"], attrs["pads"], attrs["dilations"])
    sizes, rank, taps = places.sizes(spatial), len(kernel), math.prod(kernel)
    count, outputs = product(sizes), number(w.type.shape[0], "the output channels of DeformConv")
    depth = number(channels, "the channels of DeformConv")
    if groups < 1 or depth % groups:
        raise ModelError(f"{depth} channels do not divide into {groups} offset groups")
    if group < 1 or outputs % group or unwrap(const(w.type.shape[1]) * group - depth) != 0:
        raise ModelError(f"weights {w.type} in {group} groups do not fit to {x.type}")
    for what, v, per_tap in (("offset", offset, rank), ("mask", c.opt(4), 1)):
        want = (n, groups * taps * per_tap, *sizes)
        if v is not None and not same_shape(v.type.shape, want):
            raise ModelError(f"{what} must be {list(want)}, got {v.type}")

    def moved(v: Value, per_tap: int) -> Value:  # [N, G * taps * per_tap, sizes...] -> [N, per_tap, P, taps, G]
        split = b.reshape(c.cast(v, real), shape=(n, groups, taps, per_tap, count))
        return b.transpose(split, perm=(0, 3, 4, 2, 1))  # type: ignore[no-any-return]

    offsets, ends = moved(offset, rank), []
    for d, size in enumerate(spatial):
        along = b.iota(shape=(1, *sizes), axis=d + 1, dtype=real)
        first = b.full(shape=(), value=places.begin[d], dtype=real)
        base = b.reshape(b.sub(b.mul(along, float(places.strides[d])), first), shape=(1, 1, count, 1, 1))
        steps = np.indices(kernel)[d].reshape(1, 1, 1, taps, 1) * places.dilations[d]
        shift = b.slice(offsets, starts=(0, d, 0, 0, 0), steps=(1,) * 5, shape=(n, 1, count, taps, groups))
        ends.append(_ends(c, b.add(b.add(base, c.const(steps, real)), shift), size))
    rows = b.transpose(b.reshape(x, shape=(n, groups, depth // groups, product(spatial))), perm=(0, 3, 1, 2))
    pixels = b.reshape(rows, shape=(n, product((*spatial, groups)), depth // groups))
    rows = b.concat(pixels, b.full(shape=(n, 1, depth // groups), dtype=x.type.dtype), axis=1)
    number_of_group = b.iota(shape=(1, 1, 1, 1, groups), axis=4, dtype=i64)
    zeros = b.full(shape=(), value=product((*spatial, groups)), dtype=i64)
    mask = moved(c.x(4), 1) if c.has(4) else None
    total: Any = None
    for corner in itertools.product(*ends):
        index, weight, inside = corner[0]
        for (j, t, within), size in zip(corner[1:], spatial[1:]):
            index, weight = b.add(b.mul(index, b.full(shape=(), value=size, dtype=i64)), j), b.mul(weight, t)
            inside = b.logical_and(inside, within)
        index = b.where(inside, b.add(b.mul(index, groups), number_of_group), zeros)
        weight = weight if mask is None else b.mul(weight, mask)
        flat = (n, product((count, taps, groups)), 1)
        found = b.gather_nd(rows, b.reshape(index, shape=flat), batch_dims=1)
        term = b.mul(c.cast(found, real), b.reshape(weight, shape=flat))
        total = term if total is None else b.add(total, term)
    inner = depth // group
    columns = b.reshape(c.cast(total, x.type.dtype), shape=(n, count, taps, group, inner))
    columns = b.reshape(b.transpose(columns, perm=(0, 3, 1, 2, 4)), shape=(n, group, count, taps * inner))
    filters = b.transpose(b.reshape(w, shape=(1, group, outputs // group, inner, taps)), perm=(0, 1, 4, 3, 2))
    y = b.matmul(columns, b.reshape(filters, shape=(1, group, taps * inner, outputs // group)))
    y = b.reshape(b.transpose(y, perm=(0, 1, 3, 2)), shape=(n, outputs, *sizes))
    return b.add(y, b.reshape(c.x(3), shape=(outputs, *(1,) * rank))) if c.has(3) else y


def _ends(c: Call, at: Value, size: Dim) -> list[tuple[Value, Value, Value]]:
    """Both neighbours of places along a dim, as (index, weight, is it inside of the dim)."""
    b, real = c.b, at.type.dtype
    end, outside = b.full(shape=(), value=size, dtype=real), c.const(-2.0, real)
    y = b.where(b.greater(at, outside), b.min(at, b.add(end, 1.0)), outside)  # NaN is outside
    low = b.floor(y)
    fraction = b.sub(y, low)
    out = []
    for place, weight in ((low, b.sub(c.const(1.0, real), fraction)), (b.add(low, 1.0), fraction)):
        inside = b.logical_and(b.greater_equal(place, 0.0), b.less(place, end))
        out.append((b.cast(place, to=i64), weight, inside))
    return out


def det(c: Call) -> Any:
    x = c.x()
    if x.type.rank < 2:
        raise ModelError(f"Det takes matrices, got {x.type}")
    for d in x.type.shape[-2:]:
        number(d, "the size of Det's matrices")
    return c.b.det(x)


VISION: dict[str, Converter] = {
    "RoiAlign": roi_align,
    "MaxRoiPool": max_roi_pool,
    "DeformConv": deform_conv,
    "Det": det,
}
