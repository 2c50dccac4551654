"""Ops on the bits of a number: its stored form as another type of the same width, and its exponent."""

from __future__ import annotations

import numpy as np

from dnnc.ir import te
from dnnc.ir.dtype import DType, bf16, boolean, f16, f32, f64, i8, i32, i64, u8, u16, u32
from dnnc.ir.dtype import dtype as named
from dnnc.ir.expr import Expr, cast, const, load, op, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import ELEMENTWISE, OpDef, Trait, require
from dnnc.ir.ops.common import Array, sample, size_flops
from dnnc.ir.types import TensorType

E8M0 = named("f8e8m0")
WORDS = {8: u8, 16: u16, 32: u32, 64: named("u64")}


def _type(x: TensorType, *, to: DType) -> TensorType:
    ok = x.dtype.kind in "fiub" and to.kind in "fiub"
    require(ok, "bit_cast is between numbers and bools; got {} to {}", x.dtype, to)
    message = "bit_cast keeps the number of bits; got {} ({} bits) to {} ({} bits)"
    require(x.dtype.bits == to.bits, message, x.dtype, x.dtype.bits, to, to.bits)
    return TensorType(to, x.shape)


def _compute(x: te.Tensor, *, to: DType) -> te.Tensor:
    def element(*i: Expr) -> Expr:
        if x.dtype is to:
            return x[i]
        return _from_word(_word(x, i), to)

    return te.compute(x.dims, to, element)


def _word(x: te.Tensor, i: tuple[Expr, ...]) -> Expr:
    """The bits as an unsigned number; narrow ones in the low bits of a byte."""
    d = x.dtype
    word = WORDS[max(d.bits, 8)]
    if d.is_float:
        return op(f"bits_{word}", load(x, i), dtype=word)
    v = cast(x[i], word)
    return v & const((1 << d.bits) - 1, word) if d.bits < 8 else v


def _from_word(v: Expr, to: DType) -> Expr:
    if to.kind == "b":
        return v.ne(0)
    if to.is_float:  # the stored form itself, for a conversion would make a signalling NaN a quiet one
        return op(f"bits_{to}", v, dtype=to)
    if to.kind == "i" and to.bits < 8:
        sign = 1 << (to.bits - 1)
        return cast(v ^ const(sign, v.dtype), i8) - const(sign, i8)
    return cast(v, to.computed)


def _reference(x: Array, *, to: DType) -> Array:
    if to.bits >= 8:
        return x != 0 if to.kind == "b" else np.ascontiguousarray(x).view(to.numpy).reshape(x.shape)
    byte = x.astype(np.int8) if "int" in x.dtype.name else np.ascontiguousarray(x).view(np.int8).reshape(x.shape)
    word = byte.astype(np.uint8) & np.uint8((1 << to.bits) - 1)
    if to.is_float:
        return word.view(to.numpy)
    sign = np.int8(1 << (to.bits - 1))
    return (((word.astype(np.int8)) ^ sign) - sign if to.kind == "i" else word).astype(to.numpy)


# --- powers of two ----------------------------------------------------------------------------------------------------

ROUNDINGS = ("up", "down", "nearest")
_HALF, _ONE, _MOST = 0x400000, 0x800000, 254  # the bits of 2^-127 and 2^-126; the code of 2^127


def _power_type(x: TensorType, *, rounding: str = "up", saturate: bool = True) -> TensorType:
    require(x.dtype is f32, "to_power takes f32; got {}: cast it", x)
    require(rounding in ROUNDINGS, "rounding is one of {}; got {}", ", ".join(ROUNDINGS), rounding)
    return TensorType(E8M0, x.shape)


def _power_of(x: te.Tensor, *, rounding: str, saturate: bool) -> te.Tensor:
    def u(n: int) -> Expr:
        return const(n, u32)

    def element(*i: Expr) -> Expr:
        v = x[i]
        b = op("bits_u32", v, dtype=u32) & u(0x7FFFFFFF)
        above = {"up": _ONE - 1, "down": 0, "nearest": _HALF}[rounding]
        code = call("shr", b + u(above), u(23))
        first = {"up": _HALF + 1, "down": _ONE, "nearest": _HALF + _HALF // 2}[
            rounding
        ]  # from here on a denormal is 2^-126
        code = select(b < u(_ONE), select(b < u(first), u(0), u(1)), code)
        large = u(_MOST) if saturate else u(255)
        code = select(u(_MOST) < code, large, code)
        code = code if saturate else select(b < u(_HALF), u(255), code)
        lost = call("isnan", v) | (v < 0.0)
        return op("bits_f8e8m0", cast(select(lost, u(255), code), u8), dtype=E8M0)

    return te.compute(x.dims, E8M0, element)


def _power_numpy(x: Array, *, rounding: str = "up", saturate: bool = True) -> Array:
    with np.errstate(all="ignore"):
        exponent = np.frexp(np.asarray(x, np.float32))[1]  # x = mantissa * 2^exponent, 0.5 <= mantissa < 1
        exponent = exponent.astype(np.int64) - 1
        down = np.where(x == 0, -127, np.maximum(exponent, -127))  # frexp says that 0 has the exponent of 1/2
        rest = np.ldexp(np.abs(np.asarray(x, np.float64)), -down)  # 1 <= rest < 2 from 2^-127 on
        limit = {"up": 1.0, "down": np.inf, "nearest": np.nextafter(1.5, 0)}[rounding]
        code = down + 127 + (rest > limit)
        code = np.where(np.isinf(x), 255, code)
        code = np.where(code > _MOST, _MOST if saturate else 255, code)
        code = code if saturate else np.where(rest < 1, 255, code)
        code = np.where(np.isnan(x) | (x < 0), 255, code)
    return np.asarray(code, np.uint8).view(E8M0.numpy)


BITS_OPS: tuple[OpDef, ...] = (
    OpDef(
        "to_power",  # a number as a power of two, in 8 bits of exponent; NaN for what is negative
        _power_type,
        _power_of,
        reference=_power_numpy,
        flops=size_flops(4),
        traits=ELEMENTWISE | {Trait.BITS},
        samples=tuple(
            sample("f32[40]", rounding=r, saturate=s, domain=d)
            for r, s, d in (
                ("up", True, (-1.0, 9.0)),
                ("down", False, (0.0, 9.0)),
                ("nearest", False, (0.0, 3e-38)),
                ("nearest", True, (0.0, 3e38)),
            )
        ),
    ),
    OpDef(
        "bit_cast",
        _type,
        _compute,
        reference=_reference,
        flops=size_flops(1),
        traits=ELEMENTWISE | {Trait.BITS},
        samples=(
            sample("f32[3, 7]", to=i32),
            sample("i32[5]", to=f32, domain=(0x3F800000, 0x40000000)),
            sample("f64[4]", to=i64),
            sample("i64[4]", to=f64, domain=(1 << 62, (1 << 62) + 999)),
            sample("f16[9]", to=named("i16")),
            sample("u16[9]", to=f16, domain=(0, 65535)),
            sample("u16[9]", to=bf16, domain=(0, 32000)),
            sample("bf16[3]", to=f16),
            sample("bool[6]", to=u8),
            sample("u8[6]", to=boolean, domain=(0, 1)),
            sample("i8[6]", to=u8, domain=(-128, 127)),
            sample("i4[16]", to=named("u4"), domain=(-8, 7)),
            sample("u4[16]", to=named("i4"), domain=(0, 15)),
        ),
    ),
)
