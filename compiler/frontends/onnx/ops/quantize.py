"""Converters of quantized operators: exact integer sums in i32, scales in floats, one final rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call
from dnnc.frontends.onnx.ops.nn import conv_attributes
from dnnc.frontends.onnx.schemas import check_types
from dnnc.ir.dtype import DType, f32, i32, u8
from dnnc.ir.errors import ModelError
from dnnc.ir.graph import Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.shapes import normalize_axis

Converter = Callable[[Call], Any]
LONG_ROW = 64  # numbers of a row of which the extremes are found by itself


def aligned(c: Call, v: Value, x: Value, axis: int) -> Any:
    """A scale or zero point, one number or one per index of `axis`, in a shape that broadcasts to x."""
    if v.type.size == 1:
        return v if v.type.rank == 0 else c.b.reshape(v, shape=())
    return c.b.reshape(v, shape=(*v.type.shape, *(1,) * (x.type.rank - normalize_axis(axis, x.type.rank) - 1)))


def quantized(c: Call, y: Value, zero: Value, to: DType) -> Any:
    """Scaled floats as integers: rounded half to even, moved by the zero point and saturated."""
    y = c.b.add(c.b.round(y), c.cast(zero, y.type.dtype))
    low, high = to.range
    return c.b.cast(c.b.clip(y, low=float(low), high=float(high)), to=to)


def scale_at(c: Call, i: int, divides: bool = False) -> Value:
    """Input i, a scale. ModelError where it is constant and not finite, or 0 where it divides."""
    a = c.items[i].array if i < len(c.items) and c.items[i] is not None else None  # type: ignore[union-attr]
    if a is not None:
        numbers = a.astype(np.float64)
        bad = numbers[~np.isfinite(numbers) | (divides & (numbers == 0))]
        if bad.size:
            raise ModelError(f"the scale is {bad[0]}" if a.size == 1 else f"{bad.size} of {a.size} scales are {bad[0]}")
    return c.x(i)


def quantize_linear(c: Call) -> Any:
    """The result has the zero point's dtype, else `output_dtype`, else u8; `precision` says what to divide in."""
    x, scale = c.x(0), scale_at(c, 1, divides=True)
    to = c.type_of(2).dtype if c.has(2) else c.dtype("output_dtype", u8) if c.integer("output_dtype", 0) else u8
    if to.bits > (8 if to.is_float else 16) or to.kind == "b":
        raise ModelError(f"the result would be {to}, by output_dtype; it has to be integers or floats of few bits")
    wide = c.dtype("precision") if c.integer("precision", 0) else scale.type.dtype
    if wide.bits == 8:  # a power of two is a scale, and nothing to divide in
        wide = f32
    attrs = {"axis": c.integer("axis", 1), "block": c.integer("block_size", 0), "saturate": c.flag("saturate", True)}
    return c.b.quantize_linear(
        c.cast(x, wide) if x.type.dtype.is_float else x, c.cast(scale, wide), _zero(c, scale), dtype=to, **attrs
    )


def _zero(c: Call, scale: Value) -> Any:
    """The zero point in the shape of the scale: one number may be written as [] or [1]."""
    zero = c.opt(2)
    if zero is None or zero.type.shape == scale.type.shape or zero.type.size != 1 or scale.type.size != 1:
        return zero
    return c.b.reshape(zero, shape=scale.type.shape)


def dequantize_linear(c: Call) -> Any:
    """The result has `output_dtype`, else the scale's dtype. Scales of 8 bits (of MX formats) are powers of two."""
    x, scale = c.x(0), scale_at(c, 1)
    to = c.dtype("output_dtype") if c.integer("output_dtype", 0) else scale.type.dtype
    if scale.type.dtype.bits == 8:
        scale = c.cast(scale, f32)
    y = c.b.dequantize_linear(x, scale, _zero(c, scale), axis=c.integer("axis", 1), block=c.integer("block_size", 0))
    return c.cast(y, to)


def _centred(c: Call, x: Value, zero: Value) -> Any:
    """x - zero, exactly."""
    wide = i32 if x.type.dtype.is_int else f32
    return c.b.sub(c.cast(x, wide), c.cast(zero, wide))


def _integers(c: Call, i: int, zero: int, per_row: bool = False) -> Any:
    """Input i as i32 less its zero point, which may be one number, one per row or one per column of a matrix."""
    x = c.x(i)
    if not c.has(zero):
        return c.cast(x, i32)
    z = c.x(zero)
    if per_row and z.type.rank == 1 and z.type.size != 1:
        z = c.b.unsqueeze(z, axes=(1,))
    elif z.type.rank == 1 and z.type.size == 1:
        z = c.b.reshape(z, shape=())
    return _centred(c, x, z)


def matmul_integer(c: Call) -> Any:
    return c.b.matmul(_integers(c, 0, 2, per_row=True), _integers(c, 1, 3))


def qlinear_matmul(c: Call) -> Any:
    """Inputs: a, scale, zero, b, scale, zero, scale and zero of the result."""
    a, b = _integers(c, 0, 2, per_row=True), _integers(c, 3, 5)
    left, right, out = (c.cast(scale_at(c, i, divides=i == 6), f32) for i in (1, 4, 6))
    if left.type.rank == 1 and left.type.size != 1:
        left = c.b.unsqueeze(left, axes=(1,))
    y = c.b.mul(c.cast(c.b.matmul(a, b), f32), c.b.div(c.b.mul(left, right), out))
    return quantized(c, y, c.x(7), c.type_of(7).dtype)


def conv_integer(c: Call) -> Any:
    x, w = _integers(c, 0, 2), _filter(c, 1, 3)
    return c.b.conv(x, w, **conv_attributes(c, x, w))


def _filter(c: Call, i: int, zero: int) -> Any:
    """Weights as i32 less their zero point, which may be one number per output channel."""
    w = c.x(i)
    return _centred(c, w, aligned(c, c.x(zero), w, 0)) if c.has(zero) else c.cast(w, i32)


def qlinear_conv(c: Call) -> Any:
    """Inputs: x, scale, zero, w, scale, zero, scale and zero of the result, bias in i32."""
    x, w = _integers(c, 0, 2), _filter(c, 3, 5)
    y = c.b.conv(x, w, c.opt(8), **conv_attributes(c, x, w))
    scales = aligned(c, c.cast(scale_at(c, 4), f32), y, 1)
    factor = c.b.div(
        c.b.mul(c.b.reshape(c.cast(scale_at(c, 1), f32), shape=()), scales),
        c.b.reshape(c.cast(scale_at(c, 6, divides=True), f32), shape=()),
    )
    return quantized(c, c.b.mul(c.cast(y, f32), factor), c.b.reshape(c.x(7), shape=()), c.type_of(7).dtype)


def _extreme(reduce: Callable[..., Value], x: Value) -> Value:
    """The least or largest number of x. Those of long rows come first: one pass finds both, and may be the pass that
    makes the rows, as a normalization does.
    """
    rank, last = x.type.rank, x.type.shape[-1] if x.type.rank else 1
    if rank in (2, 3) and isinstance(last, int) and last >= LONG_ROW:
        x, rank = reduce(x, axes=(rank - 1,), keepdims=False), rank - 1
    return reduce(x, axes=tuple(range(rank)), keepdims=False)


def dynamic_scale(b: Builder, x: Value) -> tuple[Value, Value]:
    """The scale and the zero point (a whole float in [0, 255]) by which x fits into u8 and 0 is exact.

    The function of ONNX's schema divides 0 by 0 where x is 0 throughout. As in ONNX Runtime the scale is 1 there.
    """
    zero, one = b.constant(np.float32(0)), b.constant(np.float32(1))
    low, high = b.min(_extreme(b.reduce_min, x), zero), b.max(_extreme(b.reduce_max, x), zero)
    scale = b.where(b.equal(low, high), one, b.div(b.sub(high, low), 255.0))
    return scale, b.round(b.clip(b.div(b.neg(low), scale), low=0.0, high=255.0))


def dynamic_quantize_linear(c: Call) -> Any:
    """x as u8, its scale and its zero point."""
    x = c.x(0)
    scale, zero = dynamic_scale(c.b, x)
    zero = c.cast(zero, u8)
    return c.b.quantize_linear(x, scale, zero, dtype=u8), scale, zero


def _of_its_types(converter: Converter) -> Converter:
    """A converter that refuses inputs of other types than the operator takes."""

    def checked(c: Call) -> Any:
        check_types(c)
        return converter(c)

    return checked


QUANTIZE: dict[str, Converter] = {
    name: _of_its_types(f)
    for name, f in (
        ("QuantizeLinear", quantize_linear),
        ("DequantizeLinear", dequantize_linear),
        ("DynamicQuantizeLinear", dynamic_quantize_linear),
        ("MatMulInteger", matmul_integer),
        ("QLinearMatMul", qlinear_matmul),
        ("ConvInteger", conv_integer),
        ("QLinearConv", qlinear_conv),
    )
}
