"""Conversion between dtypes: numbers keep their value as far as the target type can hold it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from dnnc.ir import te
from dnnc.ir.autodiff.rules import elementwise as rules
from dnnc.ir.dtype import DType, bf16, boolean, dtype, f16, f32, i8, i32, i64, u8
from dnnc.ir.expr import Expr, cast, const, select
from dnnc.ir.loops.intrinsics import cast_numpy
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import ELEMENTWISE, OpDef, Trait, require
from dnnc.ir.ops.common import Array, elementwise, sample, size_flops
from dnnc.ir.types import TensorType


def _type(x: TensorType, *, to: DType, saturate: bool = True) -> TensorType:
    ok = x.dtype.kind in "fiub" and to.kind in "fiub"
    require(ok, "cast is between numbers and bools; got {} to {}", x.dtype, to)
    return TensorType(to, x.shape)


def largest(t: DType) -> float:
    """The largest finite number of a float type."""
    if t.name in ("f64", "f32", "f16"):
        return float(np.finfo(t.numpy).max)
    limits: Any = ml_dtypes.finfo
    return float(limits(t.numpy).max)


def _saturates(to: DType, saturate: bool) -> bool:
    return to.is_float and to.bits <= 8 and saturate and to.name != "f8e8m0"


def _value(x: Expr, to: DType, saturate: bool) -> Expr:
    if to.kind == "b":
        return x if x.dtype.kind == "b" else x.ne(0)
    if _saturates(to, saturate):
        x, top = cast(x, to.computed), largest(to)
        x = call("fmin", const(top, x.dtype), call("fmax", const(-top, x.dtype), x))
    if to.is_int and to.bits < 8 and x.dtype.is_float:  # the byte that holds it saturates later than it does
        low, high = to.range
        nan = call("isnan", x)
        number = call("fmax", const(float(low), x.dtype), select(nan, const(0.0, x.dtype), x))
        x = call("fmin", const(float(high), x.dtype), number)
    if to.is_float:
        x = cast(x, to)  # rounds, even where the value stays in a register
    return cast(x, to.computed)


def _compute(x: te.Tensor, *, to: DType, saturate: bool) -> te.Tensor:
    return elementwise(lambda e: _value(e, to, saturate), x, dtype=to)


def _reference(x: Array, *, to: DType, saturate: bool = True) -> Array:
    if _saturates(to, saturate):
        top = largest(to)
        return cast_numpy(np.clip(np.asarray(x, np.float64), -top, top), to)
    return cast_numpy(x, to)


def _rounded_type(x: TensorType, *, dtype: DType) -> TensorType:
    require(x.dtype is dtype and dtype.is_float, "rounded keeps the float type of its operand; got {} and {}", x, dtype)
    return x


def _rounded(x: te.Tensor, *, dtype: DType) -> te.Tensor:
    """The operand as if it had been stored: within a kernel a value of a half type is float32 until then."""
    return elementwise(lambda e: round_to(e, dtype), x)


def round_to(e: Expr, dtype: DType) -> Expr:
    """A value of the type in which registers hold `dtype`, rounded to `dtype`."""
    return cast(cast(e, dtype), dtype.computed)


def round_numpy(x: Array, dtype: DType) -> Array:
    """`round_to` for arrays of that type or of float64."""
    return x if dtype.computed is dtype else x.astype(dtype.numpy).astype(x.dtype)


CAST_OPS: tuple[OpDef, ...] = (
    OpDef(
        "rounded",
        _rounded_type,
        _rounded,
        reference=round_numpy,
        flops=size_flops(1),
        traits=ELEMENTWISE,
        samples=(sample("bf16[3, 7]", dtype=bf16), sample("f16[5]", dtype=f16), sample("f32[4]", dtype=f32)),
        vjp=rules.rounded,
    ),
    OpDef(
        "cast",
        _type,
        _compute,
        reference=_reference,
        flops=size_flops(0),
        traits=ELEMENTWISE | {Trait.CONVERSION, Trait.KEEPS_SIGN},
        vjp=rules.cast,
        samples=(
            sample("f32[3, 7]", to=i32, domain=(-9.0, 9.0)),
            sample("f32[3, 7]", to=u8, domain=(-300.0, 300.0)),
            sample("i64[5]", to=i8, domain=(-300, 300)),
            sample("i32[5]", to=f32, domain=(-300, 300)),
            sample("u8[5]", to=i64, domain=(0, 255)),
            sample("f16[5]", to=f32),
            sample("f32[5]", to=f16),
            sample("f64[7]", to=bf16),
            sample("bool[4]", to=f16),
            sample("f32[4]", to=boolean, domain=(-0.0, 0.0)),
            sample("i32[9]", to=boolean, domain=(-1, 1)),
            sample("f32[9]", to=dtype("f8e4m3fn"), domain=(-900.0, 900.0)),
            sample("f32[9]", to=dtype("i4"), domain=(-12.0, 12.0)),
        ),
    ),
)
