"""Products with sparse matrices whose nonzeros are run-time data: compressed sparse rows (CSR).

A matrix [M, K] with Z stored elements is

    starts [M + 1]   which rise from 0 to Z: row i has the elements starts[i] to starts[i + 1]
    columns [Z]      of the stored elements, row by row
    values [Z]

and for its derivatives `rows` [Z], and its columns as rows of the transpose: `t_starts` [K + 1], `t_rows` [Z], and
`order` [Z], the numbers of the stored elements column by column. `dnnc.array.sparse` checks a structure once, when it
is made: it is `trusted` then, else indices are checked at run time. Kernels read no memory outside of their operands
where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.autodiff.rules import csr as rules
from dnnc.ir.dtype import i64
from dnnc.ir.expr import Expr, cast, const
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import LOOPS, Index, OpDef, require
from dnnc.ir.ops.common import Array, both, dim, require_kind, same_dim, same_dtype, sample
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType

PRODUCTS = 1 << 22  # that a reference holds at once


def place(indices: Tensor, n: Expr, size: Dim, trusted: bool) -> Expr:
    """An index that a structure holds, checked at run time if the structure was not when it was made."""
    return call("trusted" if trusted else "guard", cast(indices[n], i64), 0, size)


def _indices(*types: TensorType) -> None:
    for t in types:
        require_kind("indices of a sparse matrix", t, "iu")
        require(t.rank == 1, "indices of a sparse matrix are vectors; got {}", t)


def _addressed(x: TensorType, indices: TensorType) -> None:
    empty = same_dim(x.shape[0], 0) and not same_dim(indices.shape[0], 0)
    require(not empty, "indices {} into the empty rows of {}", indices, x)


# --- sparse @ dense ---------------------------------------------------------------------------------------------------


def _matmul_type(
    values: TensorType,
    x: TensorType,
    starts: TensorType,
    columns: TensorType,
    *structure: TensorType | None,
    trusted: bool = False,
) -> TensorType:
    _indices(starts, columns)
    same_dtype(values, x)
    require_kind("values of a sparse matrix", values, "fiu")
    require(values.rank == 1 and x.rank == 2, "values [Z] and a matrix [K, N] are needed; got {} and {}", values, x)
    fits = same_dim(columns.shape[0], values.shape[0])
    require(fits, "each value has a column; got {} and {}", values, columns)
    require(not same_dim(starts.shape[0], 0), "a matrix of M rows has M + 1 starts; got {}", starts)
    _addressed(x, columns)
    return TensorType(values.dtype, (dim(const(starts.shape[0]) - 1), x.shape[1]))


def _matmul(
    values: Tensor, x: Tensor, starts: Tensor, columns: Tensor, *structure: Tensor | None, trusted: bool
) -> Tensor:
    (stored,), (terms, width) = values.dims, x.dims

    def within(i: Expr, j: Expr, n: Expr) -> Expr:
        return both(cast(starts[i], i64) <= n, n < cast(starts[i + 1], i64))

    def product(i: Expr, j: Expr, n: Expr) -> Expr:
        return values[n] * x[place(columns, n, terms, trusted), j]

    rows = dim(const(starts.dims[0]) - 1)
    return te.reduce((rows, width), (stored,), values.dtype, "sum", product, within)


def _matmul_numpy(values: Array, x: Array, starts: Array, columns: Array, *_: Array | None, **__: Any) -> Array:
    made = [_rows(values, x, starts, columns, at) for at in _parts(np.diff(starts.astype(np.int64)), x.shape[1])]
    return np.concatenate([np.zeros((0, x.shape[1]), values.dtype), *made])


def _matmul_at(inputs: Sequence[Array], points: Array, **_: Any) -> Array:
    values, x, starts, columns = (np.asarray(a) for a in inputs[:4])
    asked, back = np.unique(points[:, 0], return_inverse=True)
    out = np.zeros(len(points), values.dtype)
    for part in _parts(np.diff(starts.astype(np.int64))[asked], x.shape[1]):
        here = np.flatnonzero(np.isin(back, part))
        out[here] = _rows(values, x, starts, columns, asked[part])[back[here] - part[0], points[here, 1]]
    return out


def _parts(sizes: Array, width: int) -> list[Array]:
    """Split numbers of rows with so many elements, so that the products of a part fit into memory."""
    each = np.maximum(sizes, 1) * max(width, 1)
    return np.split(np.arange(len(each)), np.flatnonzero(np.diff(np.cumsum(each) // PRODUCTS)) + 1) if len(each) else []


def _rows(values: Array, x: Array, starts: Array, columns: Array, rows: Array) -> Array:
    """Some rows of a product."""
    lo, hi = (np.clip(starts[rows + k].astype(np.int64), 0, len(values)) for k in (0, 1))
    count = np.maximum(hi - lo, 0)
    ends = np.cumsum(count)
    at = np.arange(ends[-1]) + np.repeat(lo - (ends - count), count)
    with np.errstate(all="ignore"):
        terms = values[at, None] * x[columns[at].astype(np.int64)]
        out = np.zeros((len(rows), x.shape[1]), terms.dtype)
        full = np.flatnonzero(count)
        if len(full):
            out[full] = np.add.reduceat(terms, (ends - count)[full], axis=0)
    return out


# --- dense @ dense at the places of a sparse matrix -------------------------------------------------------------------


def _sampled_type(
    a: TensorType,
    b: TensorType,
    rows: TensorType,
    columns: TensorType,
    *structure: TensorType | None,
    trusted: bool = False,
) -> TensorType:
    _indices(rows, columns)
    same_dtype(a, b)
    require_kind("factors", a, "fiu")
    ok = a.rank == 2 and b.rank == 2 and same_dim(a.shape[1], b.shape[1])
    require(ok, "factors are matrices [M, D] and [K, D]; got {} and {}", a, b)
    fits = same_dim(rows.shape[0], columns.shape[0])
    require(fits, "each stored element has a row and a column; got {} and {}", rows, columns)
    for x, indices in ((a, rows), (b, columns)):
        _addressed(x, indices)
    return TensorType(a.dtype, rows.shape)


def _sampled(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, *structure: Tensor | None, trusted: bool) -> Tensor:
    def product(n: Expr, d: Expr) -> Expr:
        return a[place(rows, n, a.dims[0], trusted), d] * b[place(columns, n, b.dims[0], trusted), d]

    return te.reduce(rows.dims, (a.dims[1],), a.dtype, "sum", product)


def _sampled_numpy(a: Array, b: Array, rows: Array, columns: Array, *_: Array | None, **__: Any) -> Array:
    step = max(PRODUCTS // max(a.shape[1], 1), 1)
    out = [np.zeros(0, a.dtype)]
    with np.errstate(all="ignore"):
        for s in range(0, len(rows), step):
            i, j = (t[s : s + step].astype(np.int64) for t in (rows, columns))
            out.append((a[i] * b[j]).sum(1, dtype=a.dtype))
    return np.concatenate(out)


def _sampled_at(inputs: Sequence[Array], points: Array, **_: Any) -> Array:
    a, b, rows, columns = (np.asarray(x) for x in inputs[:4])
    return _sampled_numpy(a, b, rows[points[:, 0]], columns[points[:, 0]])


CSR_OPS: tuple[OpDef, ...] = (
    OpDef(
        "csr_matmul",
        _matmul_type,
        _matmul,
        reference=_matmul_numpy,
        reference_at=_matmul_at,
        flops=lambda values, x, *_, **__: dim(const(values.shape[0]) * x.shape[1] * 2),
        traits=LOOPS,
        terms=lambda values, *_, **__: values.shape[0],
        index=Index(3, lambda values, x, *_, **__: (x.shape[0],), wraps=False, starts=2),
        open_sizes=(("stored",), ("terms", None), ("starts",), ("stored",)),
        vjp_operands=(4, 5, 6, 7),
        samples=(
            sample("f32[7]", "f32[7, 9]", "i32[5]", "i32[7]", domain=(0, 6)),
            sample("f64[5]", "f64[6, 1]", "i64[4]", "i32[5]", domain=(0, 5)),
            sample("f16[9]", "f16[4, 17]", "i32[3]", "i64[9]", domain=(0, 3)),
            sample("i32[6]", "i32[8, 5]", "i32[5]", "i32[6]", domain=(0, 7), trusted=True),
        ),
        vjp=rules.matmul,
    ),
    OpDef(
        "csr_sampled",
        _sampled_type,
        _sampled,
        reference=_sampled_numpy,
        reference_at=_sampled_at,
        flops=lambda a, b, rows, *_, **__: dim(const(rows.shape[0]) * a.shape[1] * 2),
        traits=LOOPS,
        terms=lambda a, *_, **__: a.shape[1],
        index=Index(3, lambda a, b, *_, **__: (a.shape[0], b.shape[0]), wraps=False, rows=2),
        open_sizes=(("rows", None), ("terms", None), ("stored",), ("stored",)),
        vjp_operands=(4, 5, 6, 7),
        samples=(
            sample("f32[7, 9]", "f32[8, 9]", "i32[11]", "i32[11]", domain=(0, 6)),
            sample("f64[3, 17]", "f64[4, 17]", "i64[5]", "i32[5]", domain=(0, 2), trusted=True),
            sample("f16[4, 33]", "f16[4, 33]", "i32[6]", "i32[6]", domain=(0, 3)),
        ),
        vjp=rules.sampled,
    ),
)
