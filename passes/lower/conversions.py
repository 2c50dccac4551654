"""Instructions that a target may lack, as common arithmetic: conversion of small floats, rounding to an integer.

In come a value and a type, out an expression with the same meaning for every argument: round to nearest even, denormals
kept, NaN and infinities as the format has them. Emitters call these where they have no spelling of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from dnnc.ir.dtype import DType, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64
from dnnc.ir.expr import Expr, cast, const, logical_not, op, select
from dnnc.ir.loops.stmt import call


@dataclass(frozen=True)
class Format:
    """A small float; overflow becomes `overflow`, `top` is finite. `unsigned_zero`: the code of -0 is the one NaN."""

    exponent: int
    mantissa: int
    bias: int
    top: int
    overflow: int
    nan: int
    unsigned_zero: bool = False

    @property
    def sign(self) -> int:
        """Position of the sign bit."""
        return self.exponent + self.mantissa

    @property
    def ieee(self) -> bool:
        """Is the highest exponent infinity and NaN?"""
        return self.overflow == self.top + 1 and self.nan > self.overflow


FORMATS = {
    "f16": Format(5, 10, 15, 0x7BFF, 0x7C00, 0x7E00),
    "f8e5m2": Format(5, 2, 15, 0x7B, 0x7C, 0x7E),
    "f8e4m3fn": Format(4, 3, 7, 0x7E, 0x7F, 0x7F),
    "f8e5m2fnuz": Format(5, 2, 16, 0x7F, 0x80, 0x80, unsigned_zero=True),
    "f8e4m3fnuz": Format(4, 3, 8, 0x7F, 0x80, 0x80, unsigned_zero=True),
    "f4e2m1": Format(2, 1, 1, 7, 7, 8),
}


def is_small(t: DType) -> bool:
    """A float that is stored only: registers compute with float32."""
    return t.is_float and t.computed is not t


def _bits(x: Expr, t: DType) -> Expr:
    return op(f"bits_{t.name}", x, dtype=t)


def _u(n: int) -> Expr:
    return const(n, u32)


def _left(x: Expr, n: int) -> Expr:
    return call("shl", x, const(n, x.dtype)) if n else x


def _right(x: Expr, n: int) -> Expr:
    return call("shr", x, const(n, x.dtype)) if n else x


def widen(x: Expr) -> Expr:
    """A small float as float32; exact."""
    t = x.dtype
    u = cast(_bits(x, u16 if t.bits == 16 else u8), u32)
    if t.name == "bf16":
        return _bits(_left(u, 16), f32)
    if t.name == "f8e8m0":  # 2^(u - 127); 255 is NaN
        power = select(u.eq(_u(0)), _u(1 << 22), _left(u, 23))
        return _bits(select(u.eq(_u(255)), _u(0x7FC00000), power), f32)
    f = FORMATS[t.name]
    low = u & _u((1 << f.sign) - 1)
    shifted = _left(low, 23 - f.mantissa)
    # a denormal is its mantissa behind the point of the smallest normal number, less that: nothing here is a denormal
    # float32, which a target may take for zero
    denormal = _bits(_bits(shifted + _u((128 - f.bias) << 23), f32) - 2.0 ** (1 - f.bias), u32)
    r = select(low < _u(1 << f.mantissa), denormal, shifted + _u((127 - f.bias) << 23))
    if f.ieee:
        r = select(low < _u(f.top + 1), r, shifted | _u(0x7F800000))
    elif f.nan == (1 << f.sign) - 1:
        r = select(low.eq(_u(f.nan)), _u(0x7FC00000), r)
    r = r | _left(_right(u, f.sign), 31)
    return _bits(select(u.eq(_u(f.nan)), _u(0x7FC00000), r) if f.unsigned_zero else r, f32)


def widen_by_half(x: Expr) -> Expr | None:
    """An 8-bit float as float32 by way of float16, whose bits contain its own: fewer steps than `widen` on a target
    that converts float16. None: its exponents go beyond float16's.
    """
    t = x.dtype
    f = FORMATS.get(t.name)
    if t.bits != 8 or f is None or (f.exponent == 5 and not f.ieee):
        return None
    moved = _left(cast(_bits(x, i8), i16), 10 - f.mantissa)
    if f.exponent < 5:
        moved = moved & const(-1 - (1 << 14), i16)  # a copy of the sign
    y = cast(_bits(moved, f16), f32)
    y = y if f.bias == 15 else y * 2.0 ** (15 - f.bias)
    if f.unsigned_zero:
        return select(_bits(x, u8).eq(const(f.nan, u8)), float("nan"), y)
    if not f.ieee:  # what float16 makes of the code of NaN: one step above the largest number
        largest = 2.0 ** ((1 << f.exponent) - 1 - f.bias)
        return select(call("abs", y).eq(largest * (2 - 2.0**-f.mantissa)), float("nan"), y)
    return y


def narrow(x: Expr, t: DType) -> Expr:
    """A float32 as a small float, rounded to nearest even."""
    b = _bits(x, u32)
    store = u16 if t.bits == 16 else u8
    if t.name == "bf16":
        up = b + (_right(b, 16) & _u(1)) + _u(0x7FFF)
        return _bits(cast(_right(select(call("isnan", x), b | _u(0x400000), up), 16), store), t)
    if t.name == "f8e8m0":  # the nearest power of two, the upper one of a tie
        code = select(b < _u(0x800000), select(b < _u(0x600000), _u(0), _u(1)), _right(b + _u(0x400000), 23))
        positive = b - _u(1) < _u(0x7F800000)  # and no NaN; as integers, since 2^-127 is a denormal float32
        return _bits(cast(select(positive, code, _u(255)), store), t)
    f = FORMATS[t.name]
    a = b & _u(0x7FFFFFFF)
    drop = 23 - f.mantissa
    normal = _right(a + (_right(a, drop) & _u(1)) + _u((1 << (drop - 1)) - 1), drop) - _u((127 - f.bias) << f.mantissa)
    magic = 2.0 ** (
        24 - f.bias - f.mantissa
    )  # its unit in the last place is the smallest denormal: the sum rounds to a multiple
    tiny = _bits(_bits(a, f32) + magic, u32) - _bits(const(magic, f32), u32)
    code = select(a < _u((128 - f.bias) << 23), tiny, normal)
    code = select(_u(f.top) < code, _u(f.overflow), code)
    sign = _left(_right(b, 31), f.sign)
    code = select(code.eq(_u(0)), _u(0), code | sign) if f.unsigned_zero else code | sign
    nan = select(call("isnan", x), _u(f.nan) if f.unsigned_zero or t.name == "f4e2m1" else _u(f.nan) | sign, code)
    return _bits(cast(nan, store), t)


def to_odd(x: Expr) -> Expr:
    """A float64 as float32, an inexact one with its last bit set: rounding that to a smaller format rounds once."""
    y = cast(x, f32)
    back, b = cast(y, f64), _bits(y, u32)
    toward_zero = select(call("abs", x) < call("abs", back), b - _u(1), b)
    return _bits(select(back.eq(x), b, toward_zero | _u(1)), f32)


def rounded(name: str, x: Expr) -> Expr:
    """floor, ceil, trunc or rint of a float, by way of an integer; -0, infinities and NaN stay."""
    t = x.dtype
    whole, bits = (i64, u64) if t is f64 else (i32, u32)
    limit = 2.0**52 if t is f64 else 2.0**23  # from here on every number is an integer
    a = call("abs", x)
    if name == "rint":
        r = (a + limit) - limit
    else:
        cut = cast(cast(x, whole), t)
        r = {
            "floor": lambda: select(x < cut, cut - 1.0, cut),
            "ceil": lambda: select(cut < x, cut + 1.0, cut),
            "trunc": lambda: cut,
        }[name]()
    top = const(1 << (t.bits - 1), bits)
    signed = _bits(_bits(call("abs", r), bits) | (_bits(x, bits) & top), t)
    keeps = signed if name != "floor" else select(r < 0.0, r, signed)
    return select(logical_not(a < limit), x, keeps)
