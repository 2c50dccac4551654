"""Linear quantization, ties to even, with scale and zero point of all, along `axis`, or per `block` of it; and
functions of bytes as tables. NaN has the lowest integer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir.dtype import DType, f32, i8, i32, u8
from dnnc.ir.expr import Expr, const
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import ELEMENTWISE, OpDef, require
from dnnc.ir.ops.common import Array, elementwise, require_kind, rows_flops, sample
from dnnc.ir.ops.common import same_dim as same
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.te import Tensor
from dnnc.ir.types import TensorType


def _check(x: TensorType, scale: TensorType, zero: TensorType | None, axis: int, block: int) -> None:
    require_kind("the scale", scale, "f")
    require(zero is None or zero.shape == scale.shape, "zero point {} must have the shape of the scale {}", zero, scale)
    if scale.rank == 0 or scale.shape == (1,):
        return
    a = normalize_axis(axis, x.rank)
    if block == 0:
        ok = scale.rank == 1 and same(scale.shape[0], x.shape[a])
        require(ok, "the scale must be one number or [{}]; got {}", x.shape[a], scale)
        return
    n, m = x.shape[a], scale.shape[a]
    fits = scale.rank == x.rank and isinstance(n, int) and m == -(-n // block)
    ok = fits and all(k == a or same(p, q) for k, (p, q) in enumerate(zip(x.shape, scale.shape)))
    require(ok, "blocks of {} along axis {} of {}: scale {}", block, a, x, scale)


def _quantize_type(
    x: TensorType,
    scale: TensorType,
    zero: TensorType | None = None,
    *,
    dtype: DType = u8,
    axis: int = 1,
    block: int = 0,
    saturate: bool = True,
) -> TensorType:
    require_kind("the operand of quantize_linear", x, "fi")
    require(zero is None or zero.dtype is dtype, "the zero point must be {}; got {}", dtype, zero)
    _check(x, scale, zero, axis, block)
    return TensorType(dtype, x.shape)


def _dequantize_type(
    x: TensorType, scale: TensorType, zero: TensorType | None = None, *, axis: int = 1, block: int = 0
) -> TensorType:
    require(zero is None or zero.dtype is x.dtype, "the zero point must be {}; got {}", x.dtype, zero)
    _check(x, scale, zero, axis, block)
    return TensorType(scale.dtype, x.shape)


def _along(b: Any, p: Any, x: Any, axis: int, block: int) -> Any:
    """A parameter in a shape that broadcasts to x."""
    rank = x.type.rank
    if p.type.shape in ((), (1,)):
        return b.reshape(p, shape=())
    a = normalize_axis(axis, rank)
    if block == 0:
        return b.reshape(p, shape=(p.type.shape[0], *(1,) * (rank - 1 - a)))
    return b.gather(p, b.constant([k // block for k in range(x.type.shape[a])]), axis=a)


def _wide(b: Any, x: Any, to: DType = f32) -> Any:
    return x if x.type.dtype is to else b.cast(x, to=to)


def _quantize(
    b: Any, x: Any, scale: Any, zero: Any = None, *, dtype: DType, axis: int, block: int, saturate: bool
) -> Any:
    wide = scale.type.dtype.computed
    q = b.div(_wide(b, x, wide), _wide(b, _along(b, scale, x, axis, block), wide))
    if dtype.is_float:
        return b.cast(q, to=dtype, saturate=saturate)
    q = b.round(q)
    if zero is not None:
        q = b.add(q, _wide(b, _along(b, zero, x, axis, block), wide))
    low, high = dtype.range
    return b.cast(b.clip(q, low=float(low), high=float(high), keeps_nan=False), to=dtype)


def _dequantize(b: Any, x: Any, scale: Any, zero: Any = None, *, axis: int, block: int) -> Any:
    out, wide = scale.type.dtype, scale.type.dtype.computed
    if zero is not None:
        middle = x.type.dtype if x.type.dtype is i32 else i32 if x.type.dtype.is_int else wide
        x_ = b.sub(_wide(b, x, middle), _wide(b, _along(b, zero, x, axis, block), middle))
    else:
        x_ = x
    y = b.mul(_wide(b, x_, wide), _wide(b, _along(b, scale, x, axis, block), wide))
    return _wide(b, y, out)


def _recode_type(q: TensorType, *, table: tuple[int, ...]) -> TensorType:
    require(q.dtype is u8, "recode takes u8; got {}", q)
    ok = len(table) == 256 and all(0 <= v <= 255 for v in table)
    require(ok, "recode's table is 256 numbers of a byte each; got {}", len(table))
    return TensorType(u8, q.shape)


def _recode(q: Tensor, *, table: tuple[int, ...]) -> Tensor:
    words = np.array(table, np.uint8).view("<i8").tolist()

    def element(x: Expr) -> Expr:
        return call("recode", x, *map(const, words))

    return elementwise(element, q)


def _recode_numpy(q: Array, *, table: tuple[int, ...]) -> Array:
    return np.array(table, np.uint8)[q]


QUANTIZE_OPS: tuple[OpDef, ...] = (
    OpDef(
        "quantize_linear",
        _quantize_type,
        decompose=_quantize,
        flops=rows_flops(5),
        traits=ELEMENTWISE,
        samples=(
            sample("f32[2, 3, 5]", "f32[]", "u8[]", dtype=u8, domain=(0.1, 9.0)),
            sample("f32[2, 3, 5]", "f32[3]", "i8[3]", dtype=i8, axis=1, domain=(0.1, 9.0)),
            sample("f16[4, 6]", "f16[4, 2]", dtype=i8, axis=1, block=3, domain=(0.1, 9.0)),
        ),
    ),
    OpDef(
        "dequantize_linear",
        _dequantize_type,
        decompose=_dequantize,
        flops=rows_flops(2),
        traits=ELEMENTWISE,
        samples=(
            sample("u8[2, 3, 5]", "f32[]", "u8[]", domain=(0.1, 90.0)),
            sample("i8[3, 5]", "f32[3]", "i8[3]", axis=0, domain=(0.1, 90.0)),
            sample("i4[4, 5]", "f16[4, 2]", "i4[4, 2]", axis=-1, block=3, domain=(-8.0, 7.0)),
            sample("i32[4]", "f32[1]", domain=(-99.0, 99.0)),
        ),
    ),
    # table[q], element by element: any function of bytes
    OpDef(
        "recode",
        _recode_type,
        _recode,
        reference=_recode_numpy,
        flops=rows_flops(1),
        traits=ELEMENTWISE,
        samples=tuple(
            sample(of, table=tuple((7 * k * k + 31) % 256 for k in range(256)), domain=(0, 255))
            for of in ("u8[3, 5]", "u8[70]", "u8[]")
        ),
    ),
)
