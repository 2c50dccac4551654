"""Converters of quantised operators: exact integer arithmetic in i32, scales applied in floats, one rounding at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.onnx.call import Call
from dnnc.frontends.onnx.nn import conv_attributes
from dnnc.ir.dtype import DType, f32, i32, u8
from dnnc.ir.errors import ModelError
from dnnc.ir.expr import const, unwrap
from dnnc.ir.graph import Value
from dnnc.ir.shapes import normalize_axis

Converter = Callable[[Call], Any]


def aligned(c: Call, v: Value, x: Value, axis: int, block: int = 0) -> Value:
    """A scale or zero point in a shape that broadcasts to x: one number, one per index of `axis`, or one per block of it."""
    if v.type.rank == 0 or v.type.size == 1 and v.type.rank < 2:
        return v if v.type.rank == 0 else c.b.reshape(v, shape=())  # type: ignore[no-any-return]
    axis = normalize_axis(axis, x.type.rank)
    if v.type.rank == 1 and not block:
        return c.b.reshape(v, shape=(*v.type.shape, *(1,) * (x.type.rank - axis - 1)))  # type: ignore[no-any-return]
    if v.type.rank != x.type.rank:
        raise ModelError(f"a scale or zero point of {x.type} cannot be {v.type}")
    dims = v.type.shape
    wide = c.b.expand(c.b.unsqueeze(v, axes=(axis + 1,)), shape=(*dims[: axis + 1], block, *dims[axis + 1 :]))
    full = c.b.reshape(wide, shape=(*dims[:axis], unwrap(const(dims[axis]) * block), *dims[axis + 1 :]))
    if full.type.shape[axis] == x.type.shape[axis]:
        return full  # type: ignore[no-any-return]
    whole = (0,) * x.type.rank, (1,) * x.type.rank
    return c.b.slice(full, starts=whole[0], steps=whole[1], shape=x.type.shape)  # type: ignore[no-any-return]


def quantized(c: Call, y: Value, zero: Value | None, to: DType, saturate: bool = True) -> Value:
    """Scaled floats as `to`: integers are rounded half to even, moved by the zero point and saturated."""
    if to.is_float:
        y = y if zero is None else c.b.add(y, c.cast(zero, y.type.dtype))
        return c.b.cast(y, to=to, saturate=saturate)  # type: ignore[no-any-return]
    y = c.b.round(c.cast(y, f32))
    y = y if zero is None else c.b.add(y, c.cast(zero, f32))
    low, high = to.range
    return c.b.cast(c.b.clip(y, low=float(low), high=float(high)), to=to)  # type: ignore[no-any-return]


def quantize_linear(c: Call) -> Value:
    x, axis, block = c.x(0), c.integer("axis", 1), c.integer("block_size", 0)
    to = c.type_of(2).dtype if c.has(2) else c.dtype("output_dtype", u8) if c.integer("output_dtype", 0) else u8
    precision = c.dtype("precision", f32) if c.integer("precision", 0) else None
    wide = precision or (x.type.dtype if x.type.dtype.is_float else f32)
    scale = aligned(c, c.cast(c.x(1), wide), x, axis, block)
    zero = aligned(c, c.x(2), x, axis, block) if c.has(2) else None
    return quantized(c, c.b.div(c.cast(x, wide), scale), zero, to, c.flag("saturate", True))


def dequantize_linear(c: Call) -> Value:
    x, scale = c.x(0), c.x(1)
    axis, block = c.integer("axis", 1), c.integer("block_size", 0)
    to = c.dtype("output_dtype", scale.type.dtype) if c.integer("output_dtype", 0) else scale.type.dtype
    if c.has(2):
        x = _centred(c, x, aligned(c, c.x(2), x, axis, block))
    y = c.b.mul(c.cast(x, f32), aligned(c, c.cast(scale, f32), c.x(0), axis, block))
    return c.cast(y, to)


def _centred(c: Call, x: Value, zero: Value) -> Value:
    """x - zero, exactly."""
    wide = i32 if x.type.dtype.is_int else f32
    return c.b.sub(c.cast(x, wide), c.cast(zero, wide))  # type: ignore[no-any-return]


def _integers(c: Call, i: int, zero: int, per_row: bool = False) -> Value:
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


def matmul_integer(c: Call) -> Value:
    return c.b.matmul(_integers(c, 0, 2, per_row=True), _integers(c, 1, 3))  # type: ignore[no-any-return]


def qlinear_matmul(c: Call) -> Value:
    """Inputs: a, scale, zero, b, scale, zero, scale and zero of the result."""
    a, b = _integers(c, 0, 2, per_row=True), _integers(c, 3, 5)
    left, right, out = (c.cast(c.x(i), f32) for i in (1, 4, 6))
    if left.type.rank == 1 and left.type.size != 1:
        left = c.b.unsqueeze(left, axes=(1,))
    y = c.b.mul(c.cast(c.b.matmul(a, b), f32), c.b.div(c.b.mul(left, right), out))
    return quantized(c, y, c.x(7), c.type_of(7).dtype)


def conv_integer(c: Call) -> Value:
    x, w = _integers(c, 0, 2), _filter(c, 1, 3)
    return c.b.conv(x, w, **conv_attributes(c, x, w))  # type: ignore[no-any-return]


def _filter(c: Call, i: int, zero: int) -> Value:
    """Weights as i32 less their zero point, which may be one number per output channel."""
    w = c.x(i)
    return _centred(c, w, aligned(c, c.x(zero), w, 0)) if c.has(zero) else c.cast(w, i32)


def qlinear_conv(c: Call) -> Value:
    """Inputs: x, scale, zero, w, scale, zero, scale and zero of the result, bias in i32."""
    x, w = _integers(c, 0, 2), _filter(c, 3, 5)
    y = c.b.conv(x, w, c.opt(8), **conv_attributes(c, x, w))
    scales = aligned(c, c.cast(c.x(4), f32), y, 1)
    factor = c.b.div(c.b.mul(c.b.reshape(c.cast(c.x(1), f32), shape=()), scales), c.b.reshape(c.cast(c.x(6), f32), shape=()))
    return quantized(c, c.b.mul(c.cast(y, f32), factor), c.b.reshape(c.x(7), shape=()), c.type_of(7).dtype)


QUANTIZE: dict[str, Converter] = {
    "QuantizeLinear": quantize_linear,
    "DequantizeLinear": dequantize_linear,
    "MatMulInteger": matmul_integer,
    "QLinearMatMul": qlinear_matmul,
    "ConvInteger": conv_integer,
    "QLinearConv": qlinear_conv,
}
