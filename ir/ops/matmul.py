"""Matrix products: `matmul` with NumPy's semantics (batch broadcasting, 1-D operands) and `gemm` in terms of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir import batching, te
from dnnc.ir.autodiff.rules import matmul as rules
from dnnc.ir.dtype import DType, i32
from dnnc.ir.expr import E, Expr, cast, const
from dnnc.ir.op import CONTRACTION, ContractionForm, OpDef, require
from dnnc.ir.ops.common import CHUNK, Array, broadcast_dims, dim, require_kind, same_dim, same_dtype, sample
from dnnc.ir.shapes import broadcast_shapes
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

Shape = tuple[Dim, ...]


def _split(a: Shape, b: Shape) -> tuple[Shape, Shape, Shape, Dim]:
    """Batch dims, [M] or [], [N] or [], and K."""
    require(len(a) > 0 and len(b) > 0, "matmul takes no scalars; got ranks {} and {}", len(a), len(b))
    k, other = a[-1], b[0] if len(b) == 1 else b[-2]
    require(same_dim(k, other), "matmul: the last dim of a is {}, the row dim of b is {}; they must be equal", k, other)
    return broadcast_shapes(a[:-2], b[:-2]), a[-2:-1], b[-1:] if len(b) > 1 else (), k


def _type(a: TensorType, b: TensorType, *, out_dtype: DType | None = None) -> TensorType:
    if out_dtype is None:
        same_dtype(a, b)
    require_kind("matmul's operands", a, "fiu")
    batch, m, n, _ = _split(a.shape, b.shape)
    return TensorType(out_dtype or a.dtype, (*batch, *m, *n))


def _batch(t: Tensor, index: tuple[E, ...]) -> tuple[E, ...]:
    dims = t.dims[:-2]
    return tuple(0 if d == 1 else i for d, i in zip(dims, index[len(index) - len(dims) :]))


def _compute(a: Tensor, b: Tensor, *, out_dtype: DType | None) -> Tensor:
    batch, m, n, k = _split(a.dims, b.dims)
    dtype = out_dtype or a.dtype
    q = len(batch)

    def value(*v: Expr) -> Expr:
        at, row, col, r = v[:q], v[q : q + len(m)], v[q + len(m) : -1], v[-1]
        x = a[(*_batch(a, at), *row, r)]
        y = b[(*_batch(b, at), r, *col)]
        return cast(x, dtype.computed) * cast(y, dtype.computed)

    return te.reduce((*batch, *m, *n), [k], dtype, "sum", value)


def widened(x: Array, out_dtype: DType | None) -> Array:
    """A narrower operand in the dtype of the product."""
    narrow = out_dtype is not None and (x.dtype.kind in "iu" or x.dtype.itemsize < out_dtype.numpy.itemsize)
    return x.astype(out_dtype.numpy) if narrow and out_dtype is not None else x


def float64(x: Array) -> Array:
    """What a sampled reference computes with: floats as float64, integers as they are."""
    return x if x.dtype.kind in "iub" else x.astype(np.float64, copy=False)


def _reference(a: Array, b: Array, *, out_dtype: DType | None = None) -> Array:
    return np.matmul(widened(a, out_dtype), widened(b, out_dtype))


def _reference_at(inputs: list[Array], points: Array, *, out_dtype: DType | None = None) -> Array:
    """Compute rows times columns as one product where the points form a (near) grid, else a dot for each point."""
    a, b = (widened(x, out_dtype) for x in inputs)
    m, n = int(a.ndim > 1), int(b.ndim > 1)
    at, columns = points[:, : points.shape[1] - m - n], np.moveaxis(b, -2, -1) if n else b
    if b.ndim == 2:
        lines, row = np.unique(points[:, :-1], axis=0, return_inverse=True)
        cols, col = np.unique(points[:, -1], return_inverse=True)
        if len(lines) * len(cols) <= 8 * len(points):
            x = (
                a[(*_batch_points(a, lines[:, : at.shape[1]]), *lines[:, at.shape[1] :].T)]
                if a.ndim > 1
                else a[None].repeat(len(lines), 0)
            )
            y: Array = float64(x) @ float64(columns[cols]).T
            return y[row.reshape(-1), col.reshape(-1)]
    rows = (*_batch_points(a, at), *points[:, at.shape[1] : at.shape[1] + m].T)
    picked = (*_batch_points(b, at), *points[:, at.shape[1] + m :].T)
    step = max(1, CHUNK // max(a.shape[-1], 1))
    out = []
    for s in range(0, len(points), step):
        x = (
            a[tuple(i[s : s + step] for i in rows)]
            if rows
            else np.broadcast_to(a, (len(points[s : s + step]), *a.shape))
        )
        y = (
            columns[tuple(i[s : s + step] for i in picked)]
            if picked
            else np.broadcast_to(b, (len(points[s : s + step]), *b.shape))
        )
        x, y = float64(x), float64(y)
        out.append((x * y).sum(-1, dtype=np.result_type(x, y)))
    return np.concatenate(out) if out else np.zeros(0, np.result_type(float64(a[:0]), float64(b[:0])))


def _batch_points(x: Array, at: Array) -> list[Array]:
    dims = x.shape[:-2]
    return [c * (d != 1) for d, c in zip(dims, at.T[at.shape[1] - len(dims) :])]


def _flops(a: TensorType, b: TensorType, **_: Any) -> Dim:
    batch, m, n, k = _split(a.shape, b.shape)
    return dim(const(product((*batch, *m, *n))) * k * 2)


def _gemm_type(
    a: TensorType,
    b: TensorType,
    c: TensorType | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    trans_a: bool = False,
    trans_b: bool = False,
) -> TensorType:
    require(a.rank == 2 and b.rank == 2, "gemm takes matrices; got {} and {}", a, b)
    same_dtype(a, b, *(() if c is None else (c,)))
    (m, ka), (kb, n) = (a.shape[::-1] if trans_a else a.shape), (b.shape[::-1] if trans_b else b.shape)
    require(same_dim(ka, kb), "gemm: the inner dims are {} and {}; they must be equal", ka, kb)
    out = TensorType(a.dtype, (m, n))
    ok = c is None or broadcast_shapes(out.shape, c.shape) == out.shape
    require(ok, "gemm: c {} does not broadcast to {}", c, out)
    return out


def _gemm(b_: Any, a: Any, b: Any, c: Any = None, *, alpha: float, beta: float, trans_a: bool, trans_b: bool) -> Any:
    y = b_.matmul(b_.transpose(a, perm=(1, 0)) if trans_a else a, b_.transpose(b, perm=(1, 0)) if trans_b else b)
    y = y if alpha == 1.0 else b_.mul(y, alpha)
    if c is None or beta == 0.0:
        return y
    return b_.add(y, c if beta == 1.0 else b_.mul(c, beta))


def _gemm_flops(a: TensorType, b: TensorType, *_: Any, trans_b: bool = False, **__: Any) -> Dim:
    return dim(const(product(a.shape)) * b.shape[0 if trans_b else 1] * 2)


def _equal_dims(x: TensorType, y: TensorType, **_: Any) -> list[tuple[Dim, Dim]]:
    a, b = x.shape, y.shape
    if not a or not b:
        return []
    return [(a[-1], b[0] if len(b) == 1 else b[-2]), *broadcast_dims(a[:-2], b[:-2])]


def _gemm_dims(
    x: TensorType, y: TensorType, *_: TensorType, trans_a: bool = False, trans_b: bool = False, **__: Any
) -> list[tuple[Dim, Dim]]:
    return [(x.shape[0 if trans_a else 1], y.shape[1 if trans_b else 0])] if x.rank == y.rank == 2 else []


MATMUL_OPS: tuple[OpDef, ...] = (
    OpDef(
        "matmul",
        _type,
        _compute,
        reference=_reference,
        reference_at=_reference_at,
        flops=_flops,
        traits=CONTRACTION,
        batching=batching.matmul,
        contraction=ContractionForm.PRODUCT,
        terms=lambda x, *_, **__: x.shape[-1],
        equal_dims=_equal_dims,
        samples=(
            sample("f32[5, 17]", "f32[17, 3]"),
            sample("f32[2, 1, 4, 7]", "f32[3, 7, 5]"),
            sample("f16[3, 33]", "f16[33, 9]"),
            sample("f64[6]", "f64[6]"),
            sample("f32[6]", "f32[2, 6, 3]"),
            sample("f32[4, 2, 6]", "f32[6]"),
            sample("i32[3, 5]", "i32[5, 4]", domain=(-9, 9)),
            sample("u8[3, 5]", "i8[5, 4]", out_dtype=i32, domain=(-128, 255)),
            sample("bf16[2, 3, 8]", "bf16[2, 8, 4]"),
        ),
        vjp=rules.matmul,
    ),
    OpDef(
        "gemm",
        _gemm_type,
        decompose=_gemm,
        flops=_gemm_flops,
        traits=CONTRACTION,
        terms=lambda x, *_, trans_a=False, **__: x.shape[0 if trans_a else -1],
        equal_dims=_gemm_dims,
        samples=(
            sample("f32[4, 7]", "f32[7, 5]", "f32[5]", alpha=0.5, beta=2.0),
            sample("f32[7, 4]", "f32[5, 7]", "f32[4, 1]", trans_a=True, trans_b=True),
            sample("f16[3, 9]", "f16[9, 2]"),
        ),
    ),
)
