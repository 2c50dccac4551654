"""Tensors from nothing: fill, index, identity matrix. Folding makes constants where the shape is known."""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.dtype import DType, boolean, f16, f32, i32, i64
from dnnc.ir.expr import Expr, cast, const, select
from dnnc.ir.op import PURE, OpDef, require
from dnnc.ir.ops.common import Array, sample
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType

Dims = tuple[Dim, ...]


def _full_type(*, shape: Dims, value: float | bool | Dim = 0.0, dtype: DType = f32) -> TensorType:
    require(dtype.kind in "fiub", "full makes numbers and bools; got {}", dtype)
    return TensorType(dtype, shape)


def _full(*, shape: Dims, value: float | bool | Dim, dtype: DType) -> Tensor:
    if isinstance(value, Expr):  # a symbolic size as a number
        return te.compute(shape, dtype, lambda *i: cast(value, dtype.computed))
    v = float(value) if dtype.is_float else bool(value) if dtype.kind == "b" else int(value)
    return te.compute(shape, dtype, lambda *i: const(v, dtype.computed))


def _full_numpy(*, shape: Any, value: float | bool = 0.0, dtype: DType = f32) -> Array:
    return np.full(shape, value, dtype.numpy)


def _iota_type(*, shape: Dims, axis: int = 0, dtype: DType = i64) -> TensorType:
    require(dtype.kind in "fiu", "iota makes numbers; got {}", dtype)
    normalize_axis(axis, len(shape))
    return TensorType(dtype, shape)


def _iota(*, shape: Dims, axis: int, dtype: DType) -> Tensor:
    a = normalize_axis(axis, len(shape))
    return te.compute(shape, dtype, lambda *i: cast(i[a], dtype.computed))


def _iota_numpy(*, shape: Any, axis: int = 0, dtype: DType = i64) -> Array:
    line = np.arange(shape[axis]).astype(dtype.numpy)
    return np.broadcast_to(line.reshape([-1 if k == axis % len(shape) else 1 for k in range(len(shape))]), shape)


def _eye_type(*, rows: Dim, columns: Dim, k: int = 0, dtype: DType = f32) -> TensorType:
    require(dtype.kind in "fiub", "eye makes numbers and bools; got {}", dtype)
    return TensorType(dtype, (rows, columns))


def _eye(*, rows: Dim, columns: Dim, k: int, dtype: DType) -> Tensor:
    def element(i: Expr, j: Expr) -> Expr:
        hit = (i + k).eq(j)
        return hit if dtype.kind == "b" else select(hit, const(1, dtype.computed), const(0, dtype.computed))

    return te.compute((rows, columns), dtype, element)


def _eye_numpy(*, rows: int, columns: int, k: int = 0, dtype: DType = f32) -> Array:
    return np.eye(rows, columns, k).astype(dtype.numpy)


CREATE_OPS: tuple[OpDef, ...] = (
    OpDef(
        "full",
        _full_type,
        _full,
        reference=_full_numpy,
        traits=PURE,
        samples=(
            sample(shape=(2, 3), value=1.5),
            sample(shape=(), value=3, dtype=i32),
            sample(shape=(5,), value=True, dtype=boolean),
        ),
    ),
    # each element's index along an axis
    OpDef(
        "iota",
        _iota_type,
        _iota,
        reference=_iota_numpy,
        traits=PURE,
        samples=(sample(shape=(7,)), sample(shape=(2, 5), axis=1, dtype=f16), sample(shape=(3, 2), axis=0, dtype=f32)),
    ),
    OpDef(
        "eye",
        _eye_type,
        _eye,
        reference=_eye_numpy,
        traits=PURE,
        samples=(
            sample(rows=3, columns=5, k=1),
            sample(rows=4, columns=3, k=-2, dtype=f16),
            sample(rows=2, columns=2, dtype=i64),
        ),
    ),
)
