"""Gather and scatter by run-time indices, checked (`guard`), negative from the end; scatters go in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.ir import batching, te
from dnnc.ir.autodiff.rules import index as rules
from dnnc.ir.dtype import i64
from dnnc.ir.expr import Expr, cast, const, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import MOVEMENT, PURE, Index, OpDef, Trait, require
from dnnc.ir.ops.common import Array, guarded, require_kind, same_dim, same_dtype, same_shape, sample, whole
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.te import Tensor
from dnnc.ir.te.interp import put_in_order
from dnnc.ir.types import Dim, TensorType, product

REDUCTIONS = ("none", "add", "mul", "max", "min")

# --- gather -----------------------------------------------------------------------------------------------------------


def _indices(t: TensorType) -> None:
    require_kind("indices", t, "iu")


def _not_empty(x: TensorType, axes: Sequence[int], indices: TensorType) -> None:
    empty = any(same_dim(x.shape[a], 0) for a in axes)
    require(not empty or product(indices.shape) == 0, "indices {} into the empty dims of {}", indices, x)


def _gather_type(x: TensorType, indices: TensorType, *, axis: int = 0) -> TensorType:
    _indices(indices)
    axis = normalize_axis(axis, x.rank)
    _not_empty(x, (axis,), indices)
    return TensorType(x.dtype, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def _gather(x: Tensor, indices: Tensor, *, axis: int) -> Tensor:
    axis = normalize_axis(axis, len(x.dims))
    q = len(indices.dims)
    shape = (*x.dims[:axis], *indices.dims, *x.dims[axis + 1 :])

    def element(*i: Expr) -> Expr:
        return x[(*i[:axis], guarded(indices[i[axis : axis + q]], x.dims[axis]), *i[axis + q :])]

    return te.compute(shape, x.dtype, element)


def _gather_numpy(x: Array, indices: Array, *, axis: int = 0) -> Array:
    return (
        np.take(x, indices, axis)
        if indices.size
        else np.zeros((*x.shape[: axis % x.ndim], *indices.shape, *x.shape[axis % x.ndim + 1 :]), x.dtype)
    )


def _elements_type(x: TensorType, indices: TensorType, *, axis: int = 0) -> TensorType:
    _indices(indices)
    axis = normalize_axis(axis, x.rank)
    _not_empty(x, (axis,), indices)
    require(indices.rank == x.rank, "indices {} must have the rank of {}", indices, x)
    for k, (n, m) in enumerate(zip(x.shape, indices.shape)):
        fits = k == axis or not isinstance(n, int) or not isinstance(m, int) or m <= n
        require(fits, "indices {} are larger than {} in dim {}", indices, x, k)
    return TensorType(x.dtype, indices.shape)


def _gather_elements(x: Tensor, indices: Tensor, *, axis: int) -> Tensor:
    axis = normalize_axis(axis, len(x.dims))
    n = x.dims[axis]
    return te.compute(indices.dims, x.dtype, lambda *i: x[(*i[:axis], guarded(indices[i], n), *i[axis + 1 :])])


def _gather_elements_numpy(x: Array, indices: Array, *, axis: int = 0) -> Array:
    cut = tuple(slice(None) if k == axis % x.ndim else slice(0, n) for k, n in enumerate(indices.shape))
    return np.take_along_axis(x[cut], indices.astype(np.int64), axis)


def _tuple_width(x: TensorType, indices: TensorType, batch_dims: int) -> int:
    """How many dims an index tuple addresses."""
    _indices(indices)
    ok = indices.rank >= 1 and isinstance(indices.shape[-1], int)
    require(ok, "the last dim of indices {} must be a number", indices)
    width = indices.shape[-1]
    assert isinstance(width, int)
    fits = 0 <= batch_dims < indices.rank and batch_dims + width <= x.rank
    require(fits, "indices {} with {} batch dims do not fit to {}", indices, batch_dims, x)
    return width


def _gather_nd_type(x: TensorType, indices: TensorType, *, batch_dims: int = 0) -> TensorType:
    width = _tuple_width(x, indices, batch_dims)
    equal = same_shape(x.shape[:batch_dims], indices.shape[:batch_dims])
    require(equal, "the first {} dims of {} and {} must be equal", batch_dims, x, indices)
    _not_empty(x, range(batch_dims, batch_dims + width), indices)
    return TensorType(x.dtype, (*indices.shape[:-1], *x.shape[batch_dims + width :]))


def _gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int) -> Tensor:
    width, q = int(indices.dims[-1]), len(indices.dims) - 1  # type: ignore[arg-type]
    shape = (*indices.dims[:-1], *x.dims[batch_dims + width :])

    def element(*i: Expr) -> Expr:
        at = [guarded(indices[(*i[:q], k)], x.dims[batch_dims + k]) for k in range(width)]
        return x[(*i[:batch_dims], *at, *i[q:])]

    return te.compute(shape, x.dtype, element)


def _gather_nd_numpy(x: Array, indices: Array, *, batch_dims: int = 0) -> Array:
    width, q = indices.shape[-1], indices.ndim - 1
    batch = np.ogrid[tuple(slice(n) for n in x.shape[:batch_dims])] if batch_dims else []
    lead = [b.reshape(b.shape + (1,) * (q - batch_dims)) for b in batch]
    out = x[(*lead, *(indices[..., k].astype(np.int64) for k in range(width)))]  # NumPy takes no index of 4 bits
    return np.broadcast_to(out, (*indices.shape[:-1], *x.shape[batch_dims + width :]))


# --- scatter ----------------------------------------------------------------------------------------------------------


def _scatter_type(
    x: TensorType, indices: TensorType, updates: TensorType, *, axis: int = 0, reduction: str = "none"
) -> TensorType:
    _elements_type(x, indices, axis=axis)
    same_dtype(x, updates)
    require(same_shape(indices.shape, updates.shape), "indices {} and updates {} must have one shape", indices, updates)
    _check_reduction(x, reduction)
    return x


def _check_reduction(x: TensorType, reduction: str) -> None:
    require(reduction in REDUCTIONS, "reduction is one of {}; got {}", ", ".join(REDUCTIONS), reduction)
    require(reduction == "none" or x.dtype.kind in "fiu", "reduction {} needs numbers; got {}", reduction, x)


_UPDATES = {"none": "last", "add": "sum", "mul": "prod", "max": "max", "min": "min"}


def _scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int, reduction: str) -> Tensor:
    a = normalize_axis(axis, len(x.dims))

    def at(*u: Expr) -> tuple[Expr, ...]:
        return (*u[:a], guarded(indices[u], x.dims[a]), *u[a + 1 :])

    return te.scatter(x.dims, indices.dims, x.dtype, _UPDATES[reduction], lambda *i: x[i], at, lambda *u: updates[u])


def _put(out: Array, at: tuple[Array, ...], updates: Array, reduction: str) -> None:
    """Update `out` in place, in the order of the updates: the last one counts. Negative indices count from the end."""
    if any(((i < -n) | (i >= n)).any() for i, n in zip(at, out.shape)):
        raise IndexError(f"an index of a scatter leaves the shape {out.shape}")
    places = tuple((np.where(i < 0, i + n, i).astype(np.int64)).reshape(-1) for i, n in zip(at, out.shape))
    put_in_order(out, places, updates.reshape(-1), _UPDATES[reduction])


def _scatter_elements_numpy(
    x: Array, indices: Array, updates: Array, *, axis: int = 0, reduction: str = "none"
) -> Array:
    out = x.copy()
    if indices.size:
        at = list(np.indices(indices.shape))
        at[axis] = indices
        _put(out, tuple(at), updates, reduction)
    return out


def _scatter_nd_type(x: TensorType, indices: TensorType, updates: TensorType, *, reduction: str = "none") -> TensorType:
    width = _tuple_width(x, indices, 0)
    _not_empty(x, range(width), indices)
    same_dtype(x, updates)
    want = (*indices.shape[:-1], *x.shape[width:])
    ok = same_shape(want, updates.shape)
    require(ok, "updates must be {} for {} and indices {}; got {}", list(want), x, indices, updates)
    _check_reduction(x, reduction)
    return x


def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str) -> Tensor:
    width, lead = int(indices.dims[-1]), len(indices.dims) - 1  # type: ignore[arg-type]

    def at(*u: Expr) -> tuple[Expr, ...]:
        return (*(guarded(indices[(*u[:lead], k)], x.dims[k]) for k in range(width)), *u[lead:])

    extents = (*indices.dims[:-1], *x.dims[width:])
    return te.scatter(x.dims, extents, x.dtype, _UPDATES[reduction], lambda *i: x[i], at, lambda *u: updates[u])


def _scatter_nd_numpy(x: Array, indices: Array, updates: Array, *, reduction: str = "none") -> Array:
    out, width, lead = x.copy(), indices.shape[-1], indices.ndim - 1
    if updates.size:
        rows = [
            np.broadcast_to(indices[..., k].reshape(indices.shape[:-1] + (1,) * (x.ndim - width)), updates.shape)
            for k in range(width)
        ]
        _put(out, (*rows, *np.indices(updates.shape, sparse=False)[lead:]), updates, reduction)
    return out


# --- one_hot, trilu, reverse_sequence ---------------------------------------------------------------------------------


def _one_hot_type(indices: TensorType, values: TensorType, *, depth: Dim, axis: int = -1) -> TensorType:
    require_kind("indices", indices, "iuf")
    require(values.shape == (2,), "one_hot needs the values [off, on]; got {}", values)
    axis = normalize_axis(axis, indices.rank + 1)
    return TensorType(values.dtype, (*indices.shape[:axis], depth, *indices.shape[axis:]))


def _one_hot(indices: Tensor, values: Tensor, *, depth: Dim, axis: int) -> Tensor:
    axis = normalize_axis(axis, len(indices.dims) + 1)
    shape = (*indices.dims[:axis], depth, *indices.dims[axis:])

    def element(*i: Expr) -> Expr:
        j = cast(indices[(*i[:axis], *i[axis + 1 :])], i64)
        return select(j.eq(i[axis]) | (j + depth).eq(i[axis]), values[1], values[0])

    return te.compute(shape, values.dtype, element)


def _one_hot_numpy(indices: Array, values: Array, *, depth: int, axis: int = -1) -> Array:
    j = np.expand_dims(indices.astype(np.int64), axis)
    k = np.arange(depth).reshape([depth if d == axis % j.ndim else 1 for d in range(j.ndim)])
    return np.where((j == k) | (j + depth == k), values[1], values[0])


def _trilu_type(x: TensorType, *, k: int = 0, upper: bool = True) -> TensorType:
    require(x.rank >= 2, "trilu needs a matrix; got {}", x)
    return x


def _trilu(x: Tensor, *, k: int, upper: bool) -> Tensor:
    def element(*i: Expr) -> Expr:
        keep = i[-2] + k <= i[-1] if upper else i[-1] <= i[-2] + k
        return select(keep, x[i], const(0, x.dtype.computed))

    return te.compute(x.dims, x.dtype, element)


def _trilu_numpy(x: Array, *, k: int = 0, upper: bool = True) -> Array:
    return np.triu(x, k) if upper else np.tril(x, k)


def _reverse_type(x: TensorType, lengths: TensorType, *, batch_axis: int = 1, time_axis: int = 0) -> TensorType:
    _indices(lengths)
    b, t = normalize_axis(batch_axis, x.rank), normalize_axis(time_axis, x.rank)
    ok = b != t and lengths.rank == 1 and same_dim(lengths.shape[0], x.shape[b])
    require(ok, "lengths must be [{}]; got {}", x.shape[b], lengths)
    return x


def _reverse(x: Tensor, lengths: Tensor, *, batch_axis: int, time_axis: int) -> Tensor:
    b, t = normalize_axis(batch_axis, len(x.dims)), normalize_axis(time_axis, len(x.dims))

    def element(*i: Expr) -> Expr:
        n = cast(lengths[i[b]], i64)
        at = call("guard", select(i[t] < n, n - 1 - i[t], i[t]), 0, x.dims[t])
        return x[(*i[:t], at, *i[t + 1 :])]

    return te.compute(x.dims, x.dtype, element)


def _reverse_numpy(x: Array, lengths: Array, *, batch_axis: int = 1, time_axis: int = 0) -> Array:
    n = lengths.astype(np.int64).reshape([-1 if k == batch_axis % x.ndim else 1 for k in range(x.ndim)])
    i = np.arange(x.shape[time_axis]).reshape([-1 if k == time_axis % x.ndim else 1 for k in range(x.ndim)])
    at = np.broadcast_to(np.where(i < n, n - 1 - i, i), x.shape)
    return np.take_along_axis(x, at, time_axis)


SCATTER = PURE | {Trait.SCATTER}
_SCATTER_SAMPLES = tuple(
    sample("f32[5, 4]", "i64[3, 4]", "f32[3, 4]", axis=0, reduction=r, domain=(-4, 4)) for r in REDUCTIONS
)
_SCATTER_ND_SAMPLES = tuple(
    sample("f32[4, 3, 5]", "i64[3, 2, 1]", "f32[3, 2, 3, 5]", reduction=r, domain=(-4, 3)) for r in REDUCTIONS
)


def _along_axis(x: TensorType, *_: TensorType, axis: int = 0, **__: Any) -> tuple[Dim, ...]:
    return (x.shape[axis],)


def _leading(x: TensorType, at: TensorType, *_: TensorType, batch_dims: int = 0, **__: Any) -> tuple[Dim, ...]:
    """The axes that a tuple of indices addresses."""
    width = at.shape[-1]
    assert isinstance(width, int)
    return x.shape[batch_dims : batch_dims + width]


INDEX_OPS: tuple[OpDef, ...] = (
    OpDef(
        "gather",
        _gather_type,
        _gather,
        reference=_gather_numpy,
        traits=MOVEMENT,
        batching=batching.gather,
        samples=(
            sample("f32[5, 3]", "i64[2, 4]", axis=0, domain=(-5, 4)),
            sample("f16[2, 5, 3]", "i32[7]", axis=1, domain=(-5, 4)),
            sample("i64[7]", "i64[]", axis=0, domain=(-7, 6)),
            sample("f32[2, 9]", "u8[3]", axis=-1, domain=(0, 8)),
            sample("f32[3, 2]", "i64[0]", axis=0, domain=(0, 2)),
        ),
        index=Index(1, _along_axis),
        vjp=rules.gather,
    ),
    OpDef(
        "gather_elements",
        _elements_type,
        _gather_elements,
        reference=_gather_elements_numpy,
        traits=MOVEMENT,
        batching=batching.along_axis,
        samples=(
            sample("f32[5, 3]", "i64[4, 2]", axis=0, domain=(-5, 4)),
            sample("f16[2, 5, 3]", "i32[2, 7, 3]", axis=1, domain=(-5, 4)),
        ),
        index=Index(1, _along_axis),
        vjp=rules.gather_elements,
    ),
    OpDef(
        "gather_nd",
        _gather_nd_type,
        _gather_nd,
        reference=_gather_nd_numpy,
        traits=MOVEMENT,
        batching=batching.gather_nd,
        samples=(
            sample("f32[3, 4, 5]", "i64[2, 7, 2]", domain=(-3, 2)),
            sample("f16[2, 3, 4]", "i64[2, 5, 1]", batch_dims=1, domain=(-3, 2)),
            sample("f32[3, 3]", "i64[2]", domain=(-3, 2)),
        ),
        index=Index(1, _leading),
        vjp=rules.gather_nd,
    ),
    OpDef(
        "scatter_elements",
        _scatter_type,
        _scatter_elements,
        reference=_scatter_elements_numpy,
        traits=SCATTER,
        batching=batching.along_axis,
        samples=(*_SCATTER_SAMPLES, sample("f16[2, 6, 3]", "i32[2, 4, 2]", "f16[2, 4, 2]", axis=1, domain=(-5, 5))),
        index=Index(1, _along_axis),
        vjp=rules.scatter_elements,
    ),
    OpDef(
        "scatter_nd",
        _scatter_nd_type,
        _scatter_nd,
        reference=_scatter_nd_numpy,
        traits=SCATTER,
        batching=batching.scatter_nd,
        samples=(*_SCATTER_ND_SAMPLES, sample("i64[4, 5]", "i32[6, 2]", "i64[6]", domain=(-4, 3))),
        index=Index(1, _leading),
        vjp=rules.scatter_nd,
    ),
    OpDef(
        "one_hot",
        _one_hot_type,
        _one_hot,
        reference=_one_hot_numpy,
        traits=PURE,
        samples=(
            sample("i64[2, 3]", "f32[2]", depth=5, domain=(-7, 7)),
            sample("i32[4]", "f16[2]", depth=3, axis=0, domain=(-3, 2)),
        ),
        index=Index(0, lambda *_, depth, **__: (depth,), loads=False),
    ),
    OpDef(
        "trilu",
        _trilu_type,
        _trilu,
        reference=_trilu_numpy,
        traits=MOVEMENT | {Trait.FILLS},
        batching=batching.trailing,
        samples=(sample("f32[4, 5]", k=1, upper=True), sample("f16[2, 5, 3]", k=-1, upper=False), sample("i64[3, 3]")),
        vjp=rules.trilu,
    ),
    OpDef(
        "reverse_sequence",
        _reverse_type,
        _reverse,
        reference=_reverse_numpy,
        traits=MOVEMENT,
        samples=(
            sample("f32[5, 3]", "i64[3]", domain=(0, 5)),
            sample("f16[2, 4, 3]", "i64[2]", batch_axis=0, time_axis=1, domain=(1, 4)),
        ),
        index=Index(1, whole, wraps=False),
        vjp=rules.reverse_sequence,
    ),
)
