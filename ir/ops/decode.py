"""Stored numbers as floats: codes of few bits or small types, what they mean, scales and zero points.

What codes mean is a table, or an expression of the code as text: `value="cast_f32(q[0]) * 0.5"`, q in i32. Without
either codes are numbers.

The result is never memory by itself: kernels that read it read the codes and decode them in registers. So a weight in
4 bits is a constant of codes, a constant of scales, and this node.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from dnnc.ir import te
from dnnc.ir.dtype import DType, f32, i32, u32
from dnnc.ir.expr import Expr, Load, cast, const, rebuild
from dnnc.ir.loops.stmt import Store, call
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.op import OpDef, Trait, require
from dnnc.ir.ops.common import Array, rows_flops, sample
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.te import Tensor
from dnnc.ir.te.interp import whole
from dnnc.ir.types import TensorType


def _type(
    q: TensorType,
    scale: TensorType | None = None,
    zero: TensorType | None = None,
    *,
    dtype: DType = f32,
    axis: int = 0,
    block: int = 1,
    table: tuple[float, ...] = (),
    value: str = "",
) -> TensorType:
    require(dtype.is_float and q.rank > 0, "the result is floats with axes; got {} of {}", dtype, q)
    require(scale is None or scale.dtype.is_float, "the scale is a float; got {}", scale)
    if table:
        known = q.dtype.kind == "u" and len(table) == 1 << q.dtype.bits
        require(known, "a table of {} numbers is for unsigned codes of as many values; got {}", len(table), q)
    for p in (scale, zero):
        ok = p is None or p.rank == q.rank
        require(ok, "scales and zero points have an axis for each of {}; got {}", q, p)
        if p is None:
            continue
        a = normalize_axis(axis, q.rank)
        for k, (n, m) in enumerate(zip(q.shape, p.shape)):
            blocks = -(-n // block) if k == a and isinstance(n, int) else n
            require(m in (1, blocks), "blocks of {} along axis {} of {}: got {}", block, a, q, p)
    return TensorType(dtype, q.shape)


def _compute(
    q: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    *,
    dtype: DType,
    axis: int,
    block: int,
    table: tuple[float, ...],
    value: str,
) -> Tensor:
    wide = f32 if dtype.computed.bits <= 32 else dtype
    a = normalize_axis(axis, len(q.dims))

    def at(t: Tensor, index: tuple[Expr, ...]) -> Expr:
        blocks = [i // block if k == a else i for k, i in enumerate(index)]
        return cast(t[tuple(const(0) if d == 1 else i for d, i in zip(t.dims, blocks))], wide)

    def element(*index: Expr) -> Expr:
        x = q[index]
        if value:
            x = cast(meaning(value, cast(x, i32)), wide)
        elif table:
            x = call("lookup", cast(x, u32), *(const(float(v), wide) for v in table))
        else:
            x = cast(x, wide)
        x = x if zero is None else x - at(zero, index)
        return x if scale is None else x * at(scale, index)

    return te.compute(q.dims, dtype, element)


@cache
def _parsed(text: str) -> Expr:
    """The expression of a code, which is an element of q."""
    (store,) = parse_kernel(f"def k(q: i32[1], y: f32[1]):\n    y[0] = {text}\n").entry.body
    assert isinstance(store, Store)
    return store.value


def meaning(text: str, code: Expr) -> Expr:
    """What a code means, by the text of an expression."""

    def go(e: Expr) -> Expr:
        return code if isinstance(e, Load) else rebuild(e, go)

    return go(_parsed(text))


@cache
def meanings(text: str, low: int, high: int) -> tuple[float, ...]:
    """What the codes from `low` to `high` mean, in float32."""
    every = te.compute((high - low + 1,), f32, lambda i: cast(meaning(text, cast(i + low, i32)), f32))
    return tuple(whole(every, {}).astype(np.float32).tolist())


def spread(p: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """Scales or zero points of blocks in the shape of the codes."""
    if p.shape[axis] != 1:
        p = np.repeat(p, block, axis).take(range(shape[axis]), axis)
    return np.broadcast_to(p, shape)


def _reference(
    q: Array,
    scale: Array | None = None,
    zero: Array | None = None,
    *,
    dtype: DType = f32,
    axis: int = 0,
    block: int = 1,
    table: tuple[float, ...] = (),
    value: str = "",
) -> Array:
    wide = np.float64 if scale is not None and scale.dtype == np.float64 else dtype.computed.numpy
    codes = np.asarray(q)
    if value:
        low, high = (int(f(codes)) for f in (np.min, np.max)) if codes.size else (0, 0)
        table, codes = meanings(value, low, high), codes.astype(np.int64) - low
    x = np.asarray(table, np.float32).astype(wide)[codes.astype(np.int64)] if table else codes.astype(wide)
    for p, f in ((zero, np.subtract), (scale, np.multiply)):
        if p is not None:
            x = f(x, spread(np.asarray(p).astype(wide), x.shape, axis % x.ndim, block))
    return x


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

DECODE_OPS: tuple[OpDef, ...] = (
    OpDef(
        "decode",
        _type,
        _compute,
        reference=_reference,
        flops=rows_flops(2),
        traits=frozenset((Trait.PURE, Trait.STORED)),
        samples=(
            sample("u8[6, 5]", "f32[2, 5]", "u8[2, 5]", dtype=f32, axis=0, block=3, table=(), domain=(0, 9)),
            sample("i8[6, 5]", "f32[1, 5]", dtype=f32, axis=0, block=6, table=(), domain=(-9, 9)),
            sample("u4[6, 5]", "f32[6, 2]", dtype=f32, axis=1, block=4, table=NF4, domain=(0, 15)),
            sample("u4[9]", dtype=f32, axis=0, block=9, table=NF4, domain=(0, 15)),
        ),
    ),
)
