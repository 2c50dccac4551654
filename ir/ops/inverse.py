"""Inverses of matrices: Gauss-Jordan elimination with partial pivoting, one column at a time."""

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


def _size(x: TensorType) -> int:
    require_kind("the operand of inverse", x, "f")
    n = x.shape[-1] if x.rank >= 2 else None
    require(isinstance(n, int) and same_dim(x.shape[-2], n), "inverse needs square matrices of known size; got {}", x)
    assert isinstance(n, int)
    return n


def _inverse_type(x: TensorType) -> TensorType:
    _size(x)
    return x


def _inverse(b: Any, x: Any) -> Any:
    """The identity beside the matrix becomes the inverse as the matrix becomes the identity."""
    n, lead = _size(x.type), product(x.type.shape[:-2])
    wide = x if x.type.dtype.computed is x.type.dtype else b.cast(x, to=f32)
    unit = b.expand(b.reshape(b.eye(rows=n, columns=n, dtype=wide.type.dtype), shape=(1, n, n)), shape=(lead, n, n))
    both = b.concat(b.reshape(wide, shape=(lead, n, n)), unit, axis=2)
    for column in range(n):
        both = b.clear_column(both, column=column)
    y = b.reshape(b.slice(both, starts=(0, 0, n), steps=(1, 1, 1), shape=(lead, n, n)), shape=x.type.shape)
    return y if wide is x else b.cast(y, to=x.type.dtype)


def _clear_type(x: TensorType, *, column: int) -> TensorType:
    require_kind("the operand of clear_column", x, "f")
    ok = x.rank == 3 and isinstance(x.shape[1], int) and 0 <= column < x.shape[1]
    require(ok, "column {} of matrices {}", column, x)
    return x


def _clear(x: Tensor, *, column: int) -> Tensor:
    """The column becomes that of the identity. The pivot's row, the first whose element is largest, and row `column`
    change places. NaN is larger than all others, so that nothing of its matrix looks like a number.
    """
    count, n, _ = x.dims
    rest = int(n) - column  # type: ignore[arg-type]
    large = te.reduce(
        (count,), (rest,), x.dtype, "max", lambda i, r: call("abs", x[i, r + column, column]), name="largest"
    )

    def chosen(i: Expr, r: Expr) -> Expr:
        size = call("abs", x[i, r + column, column])
        return size.eq(large[i]) | call("isnan", size)

    at = te.reduce((count,), (rest,), i64, "min", lambda i, r: r, chosen, "pivot_row")

    def element(b: Expr, i: Expr, j: Expr) -> Expr:
        pivot = clamp(at[b], rest) + column
        share = x[b, clamp(pivot, n), j] / x[b, clamp(pivot, n), column]
        own = clamp(select(i.eq(pivot), const(column), i), n)
        return select(i.eq(column), share, x[b, own, j] - x[b, own, column] * share)

    return te.compute(x.dims, x.dtype, element)


def _clear_numpy(x: Array, *, column: int) -> Array:
    each = np.arange(len(x))
    pivot = np.argmax(np.abs(x[:, column:, column]), 1) + column
    y = x.copy()
    y[each, pivot], y[:, column] = x[:, column], x[each, pivot]
    share = y[:, column] / y[:, column, column, None]
    y = y - y[:, :, column, None] * share[:, None, :]
    y[:, column] = share
    return y


def _inverse_flops(x: TensorType) -> Dim:
    return dim(const(product(x.shape[:-2])) * (2 * _size(x) ** 3))


INVERSE_OPS: tuple[OpDef, ...] = (
    OpDef(
        "inverse",
        _inverse_type,
        decompose=_inverse,
        flops=_inverse_flops,
        traits=PURE,
        batching=batching.trailing,
        cost=Cost.HEAVY,
        samples=(sample("f64[3, 3]"), sample("f64[2, 1, 4, 4]"), sample("f32[1, 1]", domain=(1, 2))),
        vjp=rules.inverse,
    ),
    OpDef(
        "clear_column",
        _clear_type,
        _clear,
        reference=quiet(_clear_numpy),
        flops=lambda x, **_: dim(const(x.size) * 3),
        traits=LOOPS,
        samples=(sample("f64[3, 2, 4]", column=0), sample("f64[2, 3, 6]", column=1)),
    ),
)
