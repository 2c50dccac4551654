"""Ops whose output elements are input elements at other places: reshape, transpose, concat, tile and their kin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.ir import batching, te
from dnnc.ir.autodiff.rules import movement as rules
from dnnc.ir.expr import Expr, const, select, value
from dnnc.ir.op import MOVEMENT, VIEW, OpDef, Trait, require
from dnnc.ir.ops.blocks import BLOCK_OPS
from dnnc.ir.ops.common import Array, broadcast_dims, broadcast_index, clamp, dim, same_dim, same_dtype, sample
from dnnc.ir.ops.slices import SLICE_OPS
from dnnc.ir.shapes import broadcast_shapes, normalize_axes, normalize_axis
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

Dims = tuple[Dim, ...]
PAD_MODES = ("constant", "reflect", "edge", "wrap")
MAX_FOLDS = 4  # reflections of an index that cost less than a remainder

# --- reshape ----------------------------------------------------------------------------------------------------------


def reshaped(old: Sequence[Dim], shape: Sequence[Dim]) -> Dims:
    """Return a reshape's target shape with its -1 resolved. ShapeError where sizes are not known to be equal."""
    unknown = [k for k, d in enumerate(shape) if isinstance(d, int) and d == -1]
    require(len(unknown) <= 1, "reshape to {} leaves {} dims open; one is possible", shape, len(unknown))
    total = const(product(tuple(old)))
    out = list(shape)
    if unknown:
        known = const(product(tuple(d for k, d in enumerate(shape) if k != unknown[0])))
        ok = value(known) != 0
        require(ok, "reshape of {} to {}: the open dim could be anything, as the others hold no element", old, shape)
        out[unknown[0]] = dim(total // known)
    ok = same_dim(dim(total), product(tuple(out)))
    require(ok, "reshape of {} to {}: {} elements against {}", old, shape, total, product(tuple(out)))
    return tuple(out)


def groups(old: Dims, new: Dims) -> list[tuple[range, range]]:
    """Both shapes cut into the smallest runs of dims that hold equally many elements, outermost first."""
    out = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while not same_dim(product(old[a:i]), product(new[b:j])):
            left, right = product(old[a:i]), product(new[b:j])
            grow_old = isinstance(left, int) and isinstance(right, int) and left < right
            if (grow_old or j == len(new) or (not isinstance(right, int) and isinstance(left, int))) and i < len(old):
                i += 1
            elif j < len(new):
                j += 1
            else:
                i = len(old)
        out.append((range(a, i), range(b, j)))
    return out


def reshape_index(old: Dims, new: Dims, index: Sequence[Expr]) -> tuple[Expr, ...]:
    """The row-major index in shape `old` of the element at `index` of shape `new`."""
    out: list[Expr] = []
    for mine, theirs in groups(old, new):
        wide = [k for k in mine if not same_dim(old[k], 1)]
        flat: Expr = const(0)
        for j in theirs:
            flat = flat * new[j] + index[j]
        inner: Expr = const(1)
        found: dict[int, Expr] = {}
        for k in reversed(wide):
            part = flat // inner
            found[k] = part if k == wide[0] else part % const(old[k])
            inner = inner * old[k]
        out += [found.get(k, const(0)) for k in mine]
    return tuple(out)


def _reshape_type(x: TensorType, *, shape: Dims) -> TensorType:
    return TensorType(x.dtype, reshaped(x.shape, shape))


def _reshape(x: Tensor, *, shape: Dims) -> Tensor:
    new = reshaped(x.dims, shape)
    if product(new) == 0:
        return te.compute(new, x.dtype, lambda *i: const(0, x.dtype.computed))
    return te.compute(new, x.dtype, lambda *i: x[reshape_index(x.dims, new, i)])


def _squeeze_type(x: TensorType, *, axes: tuple[int, ...] | None = None) -> TensorType:
    return TensorType(x.dtype, _squeezed(x.shape, axes))


def _squeezed(shape: Dims, axes: tuple[int, ...] | None) -> Dims:
    gone = [k for k, d in enumerate(shape) if same_dim(d, 1)] if axes is None else normalize_axes(axes, len(shape))
    ok = all(same_dim(shape[k], 1) for k in gone)
    require(ok, "squeeze of axes {} of shape {}: only dims of size 1 can go", axes, shape)
    return tuple(d for k, d in enumerate(shape) if k not in gone)


def _unsqueeze_type(x: TensorType, *, axes: tuple[int, ...]) -> TensorType:
    new = normalize_axes(axes, x.rank + len(axes))
    dims = iter(x.shape)
    return TensorType(x.dtype, tuple(1 if k in new else next(dims) for k in range(x.rank + len(axes))))


def _flatten_type(x: TensorType, *, axis: int = 1) -> TensorType:
    require(-x.rank <= axis <= x.rank, "flatten: axis {} is outside [{}, {}]", axis, -x.rank, x.rank)
    axis = axis + x.rank if axis < 0 else axis
    return TensorType(x.dtype, (product(x.shape[:axis]), product(x.shape[axis:])))


def _as_reshape(type_: Callable[..., TensorType]) -> Callable[..., Any]:
    return lambda b, x, **attrs: b.reshape(x, shape=type_(x.type, **attrs).shape)


# --- transpose, expand, tile ------------------------------------------------------------------------------------------


def _transpose_type(x: TensorType, *, perm: tuple[int, ...]) -> TensorType:
    ok = sorted(perm) == list(range(x.rank))
    require(ok, "transpose: {} is no permutation of the {} axes of {}", perm, x.rank, x)
    return TensorType(x.dtype, tuple(x.shape[p] for p in perm))


def _transpose(x: Tensor, *, perm: tuple[int, ...]) -> Tensor:
    back = [perm.index(k) for k in range(len(perm))]
    return te.compute([x.dims[p] for p in perm], x.dtype, lambda *i: x[tuple(i[k] for k in back)])


def _expand_type(x: TensorType, *, shape: Dims) -> TensorType:
    return TensorType(x.dtype, broadcast_shapes(x.shape, shape))


def _expand(x: Tensor, *, shape: Dims) -> Tensor:
    return te.compute(broadcast_shapes(x.dims, shape), x.dtype, lambda *i: x[broadcast_index(x, i)])


def _expand_numpy(x: Array, *, shape: Sequence[int]) -> Array:
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape)))


def _tile_type(x: TensorType, *, repeats: Dims) -> TensorType:
    require(len(repeats) == x.rank, "tile needs {} repeats for {}; got {}", x.rank, x, repeats)
    return TensorType(x.dtype, tuple(dim(const(d) * r) for d, r in zip(x.shape, repeats)))


def _tile(x: Tensor, *, repeats: Dims) -> Tensor:
    shape = [dim(const(d) * r) for d, r in zip(x.dims, repeats)]
    if product(shape) == 0:
        return te.compute(shape, x.dtype, lambda *i: const(0, x.dtype.computed))
    return te.compute(shape, x.dtype, lambda *i: x[tuple(j % const(d) for j, d in zip(i, x.dims))])


# --- concat -----------------------------------------------------------------------------------------------------------


def _concat_type(*xs: TensorType, axis: int) -> TensorType:
    require(len(xs) > 0, "concat needs an operand")
    same_dtype(*xs)
    first = xs[0]
    axis = normalize_axis(axis, first.rank)
    total: Expr = const(0)
    for x in xs:
        fits = x.rank == first.rank and all(
            k == axis or same_dim(a, b) for k, (a, b) in enumerate(zip(x.shape, first.shape))
        )
        require(fits, "concat along axis {}: {} does not fit to {}", axis, x, first)
        total = total + x.shape[axis]
    return TensorType(first.dtype, (*first.shape[:axis], dim(total), *first.shape[axis + 1 :]))


def _concat(*xs: Tensor, axis: int) -> Tensor:
    axis = normalize_axis(axis, len(xs[0].dims))
    total: Expr = const(0)
    parts = []  # (operand, where it starts)
    for x in xs:
        if not same_dim(x.dims[axis], 0):
            parts.append((x, total))
        total = total + x.dims[axis]

    def element(*i: Expr) -> Expr:
        def part(k: int) -> Expr:
            x, start = parts[k]
            # both arms of a select are evaluated, so the index stays inside each operand
            at = (*i[:axis], i[axis] if len(parts) == 1 else clamp(i[axis] - start, x.dims[axis]), *i[axis + 1 :])
            return x[at]

        r = part(len(parts) - 1)
        for k in reversed(range(len(parts) - 1)):
            r = select(i[axis] < parts[k + 1][1], part(k), r)
        return r

    shape = (*xs[0].dims[:axis], dim(total), *xs[0].dims[axis + 1 :])
    dtype = xs[0].dtype
    return te.compute(shape, dtype, element if parts else lambda *i: const(0, dtype.computed))


def _identity(x: Tensor, **attrs: Any) -> Tensor:
    return te.compute(x.dims, x.dtype, lambda *i: x[i])


def _array(x: Array, **attrs: Any) -> Array:
    return x


def _concat_dims(*ts: TensorType, axis: Any = None) -> list[tuple[Dim, Dim]]:
    rank = ts[0].rank
    if not isinstance(axis, int) or any(t.rank != rank for t in ts) or not -rank <= axis < rank:
        return []
    return [(d, e) for t in ts[1:] for k, (d, e) in enumerate(zip(t.shape, ts[0].shape)) if k != axis % rank]


def _expand_dims(x: TensorType, *, shape: Sequence[Dim] = ()) -> list[tuple[Dim, Dim]]:
    return broadcast_dims(x.shape, shape)


def _reshape_dims(x: TensorType, *, shape: Sequence[Dim] = ()) -> list[tuple[Dim, Dim]]:
    return [(x.size, TensorType(x.dtype, tuple(shape)).size)] if all(d != -1 for d in shape) else []


def _squeeze_dims(x: TensorType, *, axes: Sequence[int] | None = None) -> list[tuple[Dim, Dim]]:
    return [(x.shape[a], 1) for a in axes or () if -x.rank <= a < x.rank]


MOVEMENT_OPS: tuple[OpDef, ...] = (
    OpDef(
        "identity",
        lambda x: x,
        _identity,
        reference=_array,
        traits=VIEW,
        batching=batching.trailing,
        samples=(sample("f32[2, 3]"), sample("f16[5]"), sample("bool[]")),
        vjp=rules.identity,
    ),
    OpDef(
        "reshape",
        _reshape_type,
        _reshape,
        reference=lambda x, *, shape: x.reshape(shape),
        traits=VIEW | {Trait.KEEPS_SIGN},
        batching=batching.reshape,
        equal_dims=_reshape_dims,
        samples=(
            sample("f32[2, 3, 4]", shape=(4, 6)),
            sample("f32[6, 35]", shape=(2, 3, 5, 7)),
            sample("f16[2, 1, 3, 5]", shape=(2, -1, 1)),
            sample("i64[1]", shape=()),
            sample("f32[4, 9]", shape=(6, 6)),
            sample("f32[0, 4]", shape=(2, 0)),
            sample("bool[2, 6, 5]", shape=(3, 4, 5)),
        ),
        vjp=rules.reshape,
    ),
    OpDef(
        "squeeze",
        _squeeze_type,
        decompose=_as_reshape(_squeeze_type),
        traits=VIEW,
        equal_dims=_squeeze_dims,
        samples=(sample("f32[1, 3, 1]"), sample("f16[1, 3, 1]", axes=(-1,))),
    ),
    OpDef(
        "unsqueeze",
        _unsqueeze_type,
        decompose=_as_reshape(_unsqueeze_type),
        traits=VIEW,
        samples=(sample("f32[3, 5]", axes=(0, -1)), sample("f16[]", axes=(0,))),
    ),
    OpDef(
        "flatten",
        _flatten_type,
        decompose=_as_reshape(_flatten_type),
        traits=VIEW,
        samples=(sample("f32[2, 3, 5]"), sample("f16[2, 3]", axis=0), sample("f32[2, 3, 5]", axis=-1)),
    ),
    OpDef(
        "transpose",
        _transpose_type,
        _transpose,
        reference=lambda x, *, perm: np.transpose(x, perm),
        traits=MOVEMENT | {Trait.KEEPS_SIGN},
        batching=batching.transpose,
        samples=(
            sample("f32[3, 7]", perm=(1, 0)),
            sample("f16[2, 3, 4, 5]", perm=(0, 2, 3, 1)),
            sample("i64[2, 3, 4]", perm=(2, 0, 1)),
        ),
        vjp=rules.transpose,
    ),
    OpDef(
        "expand",
        _expand_type,
        _expand,
        reference=_expand_numpy,
        traits=MOVEMENT | {Trait.KEEPS_SIGN},
        batching=batching.expand,
        equal_dims=_expand_dims,
        samples=(sample("f32[3, 1]", shape=(2, 3, 5)), sample("f16[4]", shape=(1,)), sample("i64[]", shape=(7,))),
        vjp=rules.expand,
    ),
    OpDef(
        "tile",
        _tile_type,
        _tile,
        reference=lambda x, *, repeats: np.tile(x, repeats),
        traits=MOVEMENT,
        batching=batching.tile,
        samples=(
            sample("f32[3, 2]", repeats=(2, 3)),
            sample("f16[5]", repeats=(3,)),
            sample("u8[2, 3]", repeats=(1, 0)),
        ),
        vjp=rules.tile,
    ),
    OpDef(
        "concat",
        _concat_type,
        _concat,
        reference=lambda *xs, axis: np.concatenate(xs, axis),
        traits=MOVEMENT | {Trait.KEEPS_SIGN},
        batching=batching.along_axis,
        equal_dims=_concat_dims,
        samples=(
            sample("f32[2, 3]", "f32[2, 5]", axis=1),
            sample("f16[2, 1]", "f16[3, 1]", "f16[1, 1]", axis=-2),
            sample("i64[0, 2]", "i64[3, 2]", "i64[0, 2]", axis=0),
            sample("bool[4]", axis=0),
        ),
        vjp=rules.concat,
    ),
    *SLICE_OPS,
    *BLOCK_OPS,
)
