"""Determinants: Gaussian elimination with partial pivoting, one row and column at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir import batching, te
from dnnc.ir.autodiff.rules import linalg as rules
from dnnc.ir.dtype import f32, i64
from dnnc.ir.expr import Expr, const, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import LOOPS, PURE, Cost, OpDef, require
from dnnc.ir.ops.common import Array, clamp, dim, quiet, require_kind, same_dim, sample
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product


def _square(x: TensorType) -> int:
    require_kind("the operand of det", x, "f")
    n = x.shape[-1] if x.rank >= 2 else None
    require(isinstance(n, int) and same_dim(x.shape[-2], n), "det needs square matrices of known size; got {}", x)
    assert isinstance(n, int)
    return n


def _det_type(x: TensorType) -> TensorType:
    _square(x)
    return TensorType(x.dtype, x.shape[:-2])


def _det(b: Any, x: Any) -> Any:
    n, lead = _square(x.type), x.type.shape[:-2]
    if n == 0:
        return b.full(shape=lead, value=1.0, dtype=x.type.dtype)
    wide = x if x.type.dtype.computed is x.type.dtype else b.cast(x, to=f32)
    a = b.reshape(wide, shape=(product(lead), n, n))
    total = None
    for _ in range(n - 1):
        p = b.eliminated_pivot(a)
        total = p if total is None else b.mul(total, p)
        a = b.eliminate(a)
    last = b.reshape(a, shape=(product(lead),))
    y = b.reshape(last if total is None else b.mul(total, last), shape=lead)
    return y if wide is x else b.cast(y, to=x.type.dtype)


def _matrices(x: TensorType) -> None:
    n = _square(x)
    require(x.rank == 3 and n >= 2, "elimination needs matrices [B, n, n] with n of at least 2; got {}", x)


def _pivot_row(x: Tensor, b: Expr) -> Expr:
    """The first row whose leading element is largest."""
    count, n, _ = x.dims
    large = te.reduce((count,), (n,), x.dtype, "max", lambda i, r: call("abs", x[i, r, 0]), name="largest")
    at = te.reduce(
        (count,), (n,), i64, "min", lambda i, r: r, lambda i, r: call("abs", x[i, r, 0]).eq(large[i]), "pivot_row"
    )
    return clamp(at[b], n)


def _pivot_type(x: TensorType) -> TensorType:
    _matrices(x)
    return TensorType(x.dtype, x.shape[:1])


def _pivot(x: Tensor) -> Tensor:
    def element(b: Expr) -> Expr:
        row = _pivot_row(x, b)
        p = x[b, row, 0]
        return select(row.eq(0), p, const(-0.0, p.dtype) - p)  # exchanging rows changes the sign

    return te.compute(x.dims[:1], x.dtype, element)


def _eliminate_type(x: TensorType) -> TensorType:
    _matrices(x)
    n = _square(x)
    return TensorType(x.dtype, (x.shape[0], n - 1, n - 1))


def _eliminate(x: Tensor) -> Tensor:
    n = int(x.dims[1])  # type: ignore[arg-type]

    def element(b: Expr, i: Expr, j: Expr) -> Expr:
        row = _pivot_row(x, b)
        own = select(row.eq(i + 1), const(0), i + 1)  # the first row stands where the pivot's row was
        own = clamp(own, n)
        p = x[b, row, 0]
        zero = const(0.0, p.dtype)
        factor = select(p.eq(zero), zero, x[b, own, 0] / p)
        return x[b, own, j + 1] - factor * x[b, row, j + 1]

    return te.compute((x.dims[0], n - 1, n - 1), x.dtype, element)


def _chosen(x: Array) -> Array:
    """The pivot's row of each matrix; the last one where a NaN stands in the column."""
    column = np.abs(x[:, :, 0])
    return np.where(np.isnan(column).any(1), x.shape[1] - 1, np.argmax(column, 1))


def _pivot_numpy(x: Array) -> Array:
    row = _chosen(x)
    p = x[np.arange(len(x)), row, 0]
    return np.where(row == 0, p, -p)


def _eliminate_numpy(x: Array) -> Array:
    row, each = _chosen(x), np.arange(len(x))
    y = x.copy()
    pivot = x[each, row]
    y[each, row] = x[:, 0]
    p = pivot[:, 0, None]
    factor = np.where(p == 0, np.zeros_like(p), y[:, 1:, 0] / p)
    return y[:, 1:, 1:] - factor[..., None] * pivot[:, None, 1:]


def _det_flops(x: TensorType) -> Dim:
    n = _square(x)
    return dim(const(product(x.shape[:-2])) * max(2 * n**3 // 3, 1))


LINALG_OPS: tuple[OpDef, ...] = (
    OpDef(
        "det",
        _det_type,
        decompose=_det,
        flops=_det_flops,
        traits=PURE,
        batching=batching.trailing,
        cost=Cost.HEAVY,
        samples=(
            sample("f32[3, 3]"),
            sample("f32[2, 5, 4, 4]"),
            sample("f64[7, 7]"),
            sample("f16[3, 2, 2]"),
            sample("f32[4, 1, 1]"),
        ),
        vjp=rules.det,
    ),
    OpDef(
        "eliminated_pivot",
        _pivot_type,
        _pivot,
        reference=quiet(_pivot_numpy),
        flops=lambda x: dim(const(x.shape[0]) * x.shape[1]),
        traits=LOOPS,
        samples=(sample("f32[3, 4, 4]"), sample("f64[1, 2, 2]")),
    ),
    OpDef(
        "eliminate",
        _eliminate_type,
        _eliminate,
        reference=quiet(_eliminate_numpy),
        flops=lambda x: dim(const(x.size) * 3),
        traits=LOOPS,
        samples=(sample("f32[3, 4, 4]"), sample("f64[2, 2, 2]")),
    ),
)
