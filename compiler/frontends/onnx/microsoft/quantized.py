"""Converters of com.microsoft's quantized operators: exact sums in i32, functions on the real numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call, number
from dnnc.frontends.onnx.ops.nn import average_pool
from dnnc.frontends.onnx.ops.quantize import (
    dequantize_linear,
    dynamic_scale,
    qlinear_conv,
    qlinear_matmul,
    quantize_linear,
    scale_at,
)
from dnnc.frontends.onnx.ops.rnn import RNN
from dnnc.frontends.onnx.standard import last_to_second, second_to_last, standard
from dnnc.ir.dtype import DType, dtype, f32, i32, u8
from dnnc.ir.errors import ModelError, UnsupportedError
from dnnc.ir.graph import Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.ops.decode import NF4
from dnnc.ir.shapes import normalize_axis

Converter = Callable[[Call], Any]


# --- scales and zero points -------------------------------------------------------------------------------------------


def _plain(c: Call, v: Value) -> Any:
    """One number written as [1] as []."""
    return c.b.reshape(v, shape=()) if v.type.rank == 1 and v.type.size == 1 else v


def _one(c: Call, v: Value) -> Any:
    """The scale or zero point of all elements."""
    if v.type.size != 1:
        raise UnsupportedError(f"the scale or zero point is {v.type}; known is one number for all elements")
    return c.b.reshape(v, shape=())


def real(c: Call, x: Value, scale: int, zero: int) -> Any:
    """What x stands for, with the scale and the zero point (0 where it is absent) at these inputs."""
    return c.b.dequantize_linear(x, _one(c, scale_at(c, scale)), _one(c, c.x(zero)) if c.has(zero) else None)


def back(c: Call, y: Value, scale: int, zero: int, to: DType) -> Any:
    """Numbers as integers with the scale and the zero point at these inputs."""
    factor = _one(c, scale_at(c, scale, divides=True))
    return c.b.quantize_linear(y, factor, _one(c, c.x(zero)) if c.has(zero) else None, dtype=to)


def _unary(f: Callable[[Call, Value], Any]) -> Converter:
    """Inputs: x, scale, zero, scale and zero of the result."""
    return lambda c: back(c, f(c, real(c, c.x(0), 1, 2)), 3, 4, c.type_of(0).dtype)


def _binary(name: str) -> Converter:
    """Inputs: a, scale, zero, b, scale, zero, scale and zero of the result."""
    return lambda c: back(c, c.b.op(name, real(c, c.x(0), 1, 2), real(c, c.x(3), 4, 5)), 6, 7, c.type_of(0).dtype)


def _softmax(c: Call, x: Value) -> Any:
    """Before opset 13 over all axes from `axis` on."""
    axis = c.integer("axis", -1)
    if c.integer("opset", 13) >= 13:
        return c.b.softmax(x, axis=axis)
    return c.b.reshape(c.b.softmax(c.b.flatten(x, axis=normalize_axis(axis, x.type.rank)), axis=-1), shape=x.type.shape)


def _global_average(c: Call, x: Value) -> Any:
    rank = x.type.rank
    axes = range(1, rank - 1) if c.flag("channels_last") else range(2, rank)
    return c.b.reduce_mean(x, axes=tuple(axes), keepdims=True)


def _average_pool(c: Call, x: Value) -> Any:
    if not c.flag("channels_last"):
        return average_pool(standard(c, "AveragePool", [x]))
    return second_to_last(c, average_pool(standard(c, "AveragePool", [last_to_second(c, x)])))


def _mean(c: Call, x: Value) -> Any:
    axes = c.integers("axes") or tuple(range(x.type.rank))
    return c.b.reduce_mean(
        x, axes=tuple(normalize_axis(a, x.type.rank) for a in axes), keepdims=c.flag("keepdims", True)
    )


def qlinear_concat(c: Call) -> Any:
    """Inputs: scale and zero of the result, then for each operand itself, its scale and its zero point."""
    parts = range(2, len(c.items), 3)
    to = c.type_of(1).dtype
    return c.b.concat(*(back(c, real(c, c.x(i), i + 1, i + 2), 0, 1, to) for i in parts), axis=c.integer("axis"))


def qlinear_where(c: Call) -> Any:
    y = c.b.where(c.x(0), real(c, c.x(1), 2, 3), real(c, c.x(4), 5, 6))
    return back(c, y, 7, 8, c.type_of(1).dtype)


# --- products ---------------------------------------------------------------------------------------------------------


def qlinear_conv_any(c: Call) -> Any:
    """QLinearConv, or with `channels_last` on N, D..., C."""
    attrs = {k: v for k, v in c.attrs.items() if k != "channels_last"}
    if not c.flag("channels_last"):
        return qlinear_conv(standard(c, "QLinearConv", None, attrs))
    return second_to_last(c, qlinear_conv(standard(c, "QLinearConv", [last_to_second(c, c.x(0)), *c.items[1:]], attrs)))


def _whole(c: Call, x: Value, zero: Value | None) -> Any:
    """x less its zero point, in i32."""
    x = c.cast(x, i32)
    return x if zero is None else c.b.sub(x, c.cast(_plain(c, zero), i32))


def qgemm(c: Call) -> Any:
    """Inputs: a, scale, zero, b, scale, zero, bias in i32, scale and zero of the result, which is f32 without them."""
    b = c.b
    x, w = _whole(c, c.x(0), c.opt(2)), c.x(3)
    if c.flag("transA"):
        x = b.transpose(x, perm=(1, 0))
    w = b.transpose(w, perm=(1, 0)) if c.flag("transB") else w
    y = b.matmul(x, _whole(c, w, c.opt(5)))
    y = b.add(y, c.x(6)) if c.has(6) else y
    scale = b.mul(b.mul(_plain(c, c.x(1)), _plain(c, c.x(4))), c.number("alpha", 1.0))
    y = b.mul(c.cast(y, f32), scale)
    return back(c, y, 7, 8, c.type_of(8).dtype if c.has(8) else u8) if c.has(7) else y


def _per_row(c: Call, v: Value) -> Any:
    """A parameter of the left operand: one number, or one per row."""
    v = _plain(c, v)
    return c.b.unsqueeze(v, axes=(1,)) if v.type.rank == 1 else v


def matmul_integer_to_float(c: Call) -> Any:
    """Inputs: a, b, their scales, their zero points, a bias."""
    b = c.b
    x = c.cast(c.x(0), i32)
    x = b.sub(x, c.cast(_per_row(c, c.x(4)), i32)) if c.has(4) else x
    y = c.cast(b.matmul(x, _whole(c, c.x(1), c.opt(5))), f32)
    y = b.mul(y, b.mul(c.cast(_per_row(c, c.x(2)), f32), c.cast(_plain(c, c.x(3)), f32)))
    y = c.cast(y, c.type_of(2).dtype)
    return b.add(y, c.x(6)) if c.has(6) else y


def _levels(b: Builder, x: Value, scale: Value, zero: Value) -> Any:
    """x in units of its scale: whole floats from -zero to 255 - zero."""
    return b.sub(b.clip(b.add(b.round(b.div(x, scale)), zero), low=0.0, high=255.0), zero)


def dynamic_quantize_matmul(c: Call) -> Any:
    """Inputs: a, which is quantized here, b, its scale, its zero point, a bias."""
    b, x = c.b, c.x(0)
    scale, zero = dynamic_scale(b, x)
    y = b.matmul(c.cast(_levels(b, x, scale, zero), i32), _whole(c, c.x(1), c.opt(3)))
    y = b.mul(c.cast(y, f32), b.mul(scale, _plain(c, c.x(2))))
    return b.add(y, c.x(4)) if c.has(4) else y


# --- weights of few bits ----------------------------------------------------------------------------------------------


def _unpacked(c: Call, v: Value, bits: int) -> Any:
    """The numbers of `bits` bits in bytes [..., n], the lowest bits first, as [..., n * 8 / bits]."""
    if bits == 8:
        return v
    shifts = c.b.constant(np.arange(0, 8, bits, dtype=np.uint8))
    parts = c.b.bitwise_and(
        c.b.shift_right(c.b.unsqueeze(v, axes=(v.type.rank,)), shifts), c.const((1 << bits) - 1, u8)
    )
    return c.b.reshape(parts, shape=(*v.type.shape[:-1], number(v.type.shape[-1], "a packed dim") * (8 // bits)))


def _columns(c: Call, v: Value, size: int) -> Any:
    """The first columns of a matrix."""
    return c.b.slice(v, starts=(0, 0), steps=(1, 1), shape=(v.type.shape[0], size)) if v.type.shape[1] != size else v


DTYPES = {2: dtype("u2"), 4: dtype("u4"), 8: u8}


def matmul_n_bits(c: Call) -> Any:
    """x times weights [N, K] in blocks along K; inputs: x, packed weights, scales, zero points, groups, bias."""
    b, bits, block, n, k = c.b, c.integer("bits", 4), c.integer("block_size"), c.integer("N"), c.integer("K")
    if bits not in (2, 4, 8) or block < 1 or block * bits % 8:
        raise UnsupportedError(f"MatMulNBits with {bits} bits in blocks of {block}; known are 2, 4 and 8 bits")
    if c.integer("weight_prepacked"):
        raise UnsupportedError("MatMulNBits with weights in a layout of another engine (weight_prepacked)")
    dtype, groups = c.type_of(0).dtype, -(-k // block)
    packed = c.x(1)
    if packed.type.size != n * groups * block * bits // 8:
        raise ModelError(
            f"the weights of N={n}, K={k}, {bits} bits in blocks of {block} are {n * groups * block * bits // 8} "
            f"bytes, got {packed.type}"
        )
    stored = _stored(c, n, k, bits, block)
    if stored is not None:
        y = b.matmul(c.x(0), b.transpose(c.cast(stored, dtype), perm=(1, 0)))
        return b.add(y, c.x(5)) if c.has(5) else y
    q = c.cast(
        b.reshape(
            _unpacked(c, b.reshape(packed, shape=(n, groups * block * bits // 8)), bits), shape=(n, groups, block)
        ),
        f32,
    )
    scales = c.cast(b.reshape(c.x(2), shape=(n, groups)), f32)
    zeros = _zeros(c, n, groups, bits)
    if c.has(4):
        group = _first(c, c.x(4), k)
        q = _columns(c, b.reshape(q, shape=(n, groups * block)), k)
        w = b.mul(b.sub(q, b.gather(zeros, group, axis=1)), b.gather(scales, group, axis=1))
    else:
        w = b.mul(b.sub(q, b.unsqueeze(zeros, axes=(2,))), b.unsqueeze(scales, axes=(2,)))
        w = _columns(c, b.reshape(w, shape=(n, groups * block)), k)
    y = b.matmul(c.x(0), b.transpose(c.cast(w, dtype), perm=(1, 0)))
    return b.add(y, c.x(5)) if c.has(5) else y


def _stored(c: Call, n: int, k: int, bits: int, block: int) -> Any:
    """Constant weights [n, k], dequantized from codes of `bits` bits; None for other zero points and for groups."""
    constants, to = c.b.graph.constants, DTYPES[bits]
    operands = [c.x(1), c.x(2), *([c.x(3)] if c.has(3) else [])]
    if (
        c.has(4)
        or any(v not in constants or v.type.dtype is not u8 for v in operands[::2])
        or operands[1] not in constants
    ):
        return None
    groups = -(-k // block)
    codes = codes_of(constants[operands[0]].reshape(n, -1), bits)[:, :k]
    zero = np.full((n, groups), 1 << (bits - 1), np.uint8)
    if c.has(3):
        zero = codes_of(constants[operands[2]].reshape(n, -1), bits)[:, :groups]
    given = c.b.constant(codes.astype(to.numpy)), c.b.constant(zero.astype(to.numpy))
    scales = c.b.constant(constants[operands[1]].reshape(n, groups))
    return c.b.dequantize_linear(given[0], scales, given[1], axis=1, block=block)


FP4 = (0.0, 0.0052083333, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)  # without the sign, the fourth bit: bitsandbytes' order
FOUR_BITS = ((*FP4, *(-v for v in FP4)), NF4)  # by quant_type


def matmul_bnb4(c: Call) -> Any:
    """x times weights [N, K] in FP4 or NF4; a scale for each block of the flat weights, whose first code is high."""
    b, block, n, k = c.b, c.integer("block_size"), c.integer("N"), c.integer("K")
    kind, packed, scales = c.integer("quant_type"), c.x(1), c.x(2)
    if kind not in (0, 1):
        raise UnsupportedError(f"MatMulBnb4 with quant_type {kind}; known are 0 (FP4) and 1 (NF4)")
    if not c.integer("transB", 1):
        raise UnsupportedError("MatMulBnb4 with weights [K, N] (transB=0); known are [N, K]")
    sizes = -(-n * k // 2), -(-n * k // max(block, 1))
    if block < 1 or packed.type.dtype is not u8 or (packed.type.size, scales.type.size) != sizes:
        raise ModelError(
            f"the weights of N={n}, K={k} in blocks of {block} are {sizes[0]} bytes with {sizes[1]} scales, got "
            f"{packed.type} and {scales.type}"
        )
    constants, to = b.graph.constants, DTYPES[4]
    if packed in constants:
        data = constants[packed].reshape(-1)
        codes = np.stack([data >> 4, data & 15], -1).reshape(-1)[: n * k].reshape(n, k)
        q = b.constant(codes.astype(to.numpy))
    else:
        halves = [b.shift_right(packed, c.const(4, u8)), b.bitwise_and(packed, c.const(15, u8))]
        flat = b.reshape(b.concat(*(b.reshape(h, shape=(sizes[0], 1)) for h in halves), axis=1), shape=(2 * sizes[0],))
        q = c.cast(b.reshape(_first(c, flat, n * k), shape=(n, k)), to)
    table = FOUR_BITS[kind]
    if k % block:  # blocks go from row to row
        flat = b.reshape(q, shape=(n * k,))
        w = b.decode(flat, b.reshape(scales, shape=(sizes[1],)), dtype=f32, axis=0, block=block, table=table)
        w = b.reshape(w, shape=(n, k))
    else:
        w = b.decode(q, b.reshape(scales, shape=(n, k // block)), dtype=f32, axis=1, block=block, table=table)
    return b.matmul(c.x(0), b.transpose(c.cast(w, c.type_of(0).dtype), perm=(1, 0)))


def codes_of(data: Any, bits: int) -> Any:
    """The numbers of `bits` bits in bytes [n, m], the lowest bits first, as bytes [n, m * 8 / bits]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (data[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(len(data), -1)


def _first(c: Call, v: Value, size: int) -> Any:
    return c.b.slice(v, starts=(0,), steps=(1,), shape=(size,)) if v.type.shape[0] != size else v


def _zeros(c: Call, n: int, groups: int, bits: int) -> Any:
    """Zero points [n, groups] as floats: packed like the weights, as floats, or in the middle."""
    if not c.has(3):
        return c.b.full(shape=(n, groups), value=float(1 << (bits - 1)), dtype=f32)
    z = c.x(3)
    if z.type.dtype is not u8:
        return c.cast(c.b.reshape(z, shape=(n, groups)), f32)
    width = -(-groups * bits // 8)
    return c.cast(_columns(c, _unpacked(c, c.b.reshape(z, shape=(n, width)), bits), groups), f32)


# --- recurrent layers -------------------------------------------------------------------------------------------------


class _Quantizing(Builder):
    """A builder whose products quantize their left operand to u8, scaled each time; f32 sums stay below 2^24."""

    def op(self, op: Any, /, *operands: Any, **attrs: Any) -> Any:
        if op != "matmul":
            return super().op(op, *operands, **attrs)
        x, w = operands
        scale, zero = dynamic_scale(self, x)
        return super().op("matmul", self.mul(_levels(self, x, scale, zero), scale), w)


def dynamic_quantize_lstm(c: Call) -> Any:
    """An LSTM with 8-bit weights [directions, inputs, 4 * hidden]; inputs from 8 on: scale and zero of W, then of R."""
    weights = [_weights(c, c.x(1), 8), _weights(c, c.x(2), 10)]
    inner = standard(c, "LSTM", [c.items[0], *weights, *c.items[3:8]])
    inner.b = _Quantizing(c.b.graph, c.b.before, c.b.locs)
    return RNN["LSTM"](inner)


def _weights(c: Call, w: Value, scale: int) -> Any:
    """Weights as numbers in ONNX's order, [directions, 4 * hidden, inputs]."""
    s, z = (c.cast(c.x(scale + k), f32) for k in (0, 1))
    s, z = ((c.b.reshape(v, shape=(v.type.shape[0], 1, v.type.shape[1] if v.type.rank == 2 else 1))) for v in (s, z))
    return c.b.transpose(c.b.mul(c.b.sub(c.cast(w, f32), z), s), perm=(0, 2, 1))


# operator -> (its converter, the attributes that it knows)
QUANTIZED: dict[str, tuple[Converter, str]] = {
    "DequantizeLinear": (lambda c: dequantize_linear(standard(c, "DequantizeLinear")), "axis block_size"),
    "DynamicQuantizeLSTM": (
        dynamic_quantize_lstm,
        "activation_alpha activation_beta activations clip direction hidden_size input_forget",
    ),
    "DynamicQuantizeMatMul": (dynamic_quantize_matmul, ""),
    "MatMulIntegerToFloat": (matmul_integer_to_float, ""),
    "MatMulBnb4": (matmul_bnb4, "K N block_size quant_type training_mode transB"),
    "MatMulNBits": (matmul_n_bits, "K N accuracy_level bits block_size weight_prepacked"),
    "QGemm": (qgemm, "alpha transA transB"),
    "QLinearAdd": (_binary("add"), ""),
    "QLinearAveragePool": (
        _unary(_average_pool),
        "auto_pad ceil_mode channels_last count_include_pad kernel_shape pads strides",
    ),
    "QLinearConcat": (qlinear_concat, "axis"),
    "QLinearConv": (qlinear_conv_any, "auto_pad channels_last dilations group kernel_shape pads strides"),
    "QLinearGlobalAveragePool": (_unary(_global_average), "channels_last"),
    "QLinearLeakyRelu": (_unary(lambda c, x: c.b.leaky_relu(x, alpha=c.number("alpha", 0.01))), "alpha"),
    "QLinearMatMul": (lambda c: qlinear_matmul(standard(c, "QLinearMatMul")), ""),
    "QLinearMul": (_binary("mul"), ""),
    "QLinearReduceMean": (_unary(_mean), "axes keepdims"),
    "QLinearSigmoid": (_unary(lambda c, x: c.b.sigmoid(x)), ""),
    "QLinearSoftmax": (_unary(_softmax), "axis opset"),
    "QLinearWhere": (qlinear_where, ""),
    "QuantizeLinear": (lambda c: quantize_linear(standard(c, "QuantizeLinear")), "axis block_size saturate"),
}
