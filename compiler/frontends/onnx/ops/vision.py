"""Converters of image operators with computed places: regions of interest, deformable convolution, determinants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.onnx.call import Call, number
from dnnc.frontends.onnx.ops.nn import conv_attributes
from dnnc.ir.dtype import f32, i64
from dnnc.ir.errors import ModelError, UnsupportedError
from dnnc.ir.expr import const, unwrap
from dnnc.ir.types import product

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
    """Inputs are x, weights, offsets, bias, mask: the columns read at moved places times the weights."""
    x, w, group = c.x(0), c.x(1), c.integer("group", 1)
    attrs = conv_attributes(c, x, w)
    del attrs["group"]
    kernel = tuple(number(d, "the kernel of DeformConv") for d in w.type.shape[2:])
    columns = c.b.deform_columns(x, c.x(2), c.opt(4), kernel=kernel, groups=c.integer("offset_group", 1), **attrs)
    n, channels, taps, *places = columns.type.shape
    outputs = number(w.type.shape[0], "the output channels of DeformConv")
    if group < 1 or outputs % group or unwrap(const(w.type.shape[1]) * group - channels) != 0:
        raise ModelError(f"weights {w.type} in {group} groups do not fit to {x.type}")
    inner = unwrap(const(w.type.shape[1]) * taps)
    columns = c.b.reshape(columns, shape=(n, group, inner, product(places)))
    y = c.b.matmul(c.b.reshape(w, shape=(1, group, outputs // group, inner)), columns)
    y = c.b.reshape(y, shape=(n, outputs, *places))
    return c.b.add(y, c.b.reshape(c.x(3), shape=(outputs, *(1,) * len(places)))) if c.has(3) else y


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
