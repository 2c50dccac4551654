"""Columns of a deformable convolution: the operand at computed places, by linear interpolation."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.dtype import i64
from dnnc.ir.expr import Expr, cast, const, minimum, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import PURE, OpDef, require
from dnnc.ir.ops.common import Array, both, clamp, dim, same_dtype, same_shape, sample
from dnnc.ir.ops.window import Ints, Window, window
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType


def _window(
    x: TensorType | Tensor, kernel: Ints, strides: Ints | None, pads: tuple[Dim, ...] | None, dilations: Ints | None
) -> Window:
    return window(len(x.shape) - 2, kernel, strides, pads, dilations)


def _type(
    x: TensorType,
    offset: TensorType,
    mask: TensorType | None = None,
    *,
    kernel: Ints,
    strides: Ints | None = None,
    pads: tuple[Dim, ...] | None = None,
    dilations: Ints | None = None,
    groups: int = 1,
) -> TensorType:
    require(x.rank >= 3 and len(kernel) == x.rank - 2, "a kernel of {} does not fit to {}", kernel, x)
    sizes = _window(x, kernel, strides, pads, dilations).sizes(x.shape[2:])
    c, taps = x.shape[1], int(np.prod(kernel))
    ok = isinstance(c, int) and groups > 0 and c % groups == 0
    require(ok, "{} channels do not divide into {} offset groups", c, groups)
    for what, t, per_tap in (("offset", offset, len(kernel)), ("mask", mask, 1)):
        if t is not None:
            want = (x.shape[0], groups * taps * per_tap, *sizes)
            require(same_shape(t.shape, want), "{} must be {}; got {}", what, list(want), t)
            same_dtype(x, t)
    return TensorType(x.dtype, (x.shape[0], c, taps, *sizes))


def _compute(
    x: Tensor,
    offset: Tensor,
    mask: Tensor | None = None,
    *,
    kernel: Ints,
    strides: Ints | None,
    pads: tuple[Dim, ...] | None,
    dilations: Ints | None,
    groups: int,
) -> Tensor:
    w = _window(x, kernel, strides, pads, dilations)
    rank, taps, real = len(kernel), int(np.prod(kernel)), x.dtype.computed
    spatial = x.dims[2:]
    shape = (x.dims[0], x.dims[1], taps, *w.sizes(spatial))
    per_group = int(x.dims[1]) // groups  # type: ignore[arg-type]

    def element(*i: Expr) -> Expr:
        n, c, k, *out = i
        slot = c // per_group * taps + k
        ends = []  # along each dim: (index, weight, is it inside) of both neighbours
        for d, at in enumerate(w.positions(out, _unflatten(k, kernel))):
            size = spatial[d]
            y = cast(at, real) + offset[(n, slot * rank + d, *out)]
            y = select(
                const(-2.0, real) < y, minimum(y, cast(const(size) + 1, real)), const(-2.0, real)
            )  # further away, or NaN, is as far outside
            low = call("floor", y)
            j, t = cast(low, i64), y - low
            ends.append(
                [(j + e, t if e else const(1.0, real) - t, both(const(0) <= j + e, j + e < size)) for e in (0, 1)]
            )
        total: Expr = const(0.0, real)
        for corner in itertools.product(*ends):
            weight = corner[0][1]
            for _, t, _ in corner[1:]:
                weight = weight * t
            v = x[(n, c, *(clamp(j, size) for (j, _, _), size in zip(corner, spatial)))]
            total = total + select(both(*(inside for _, _, inside in corner)), v * weight, const(0.0, real))
        return total if mask is None else total * mask[(n, slot, *out)]

    return te.compute(shape, x.dtype, element)


def _unflatten(k: Expr, kernel: Ints) -> list[Expr]:
    out: list[Expr] = []
    for d in range(len(kernel)):
        inner = int(np.prod(kernel[d + 1 :]))
        out.append(k // inner % kernel[d])
    return out


def _reference(
    x: Array, offset: Array, mask: Array | None = None, *, kernel: Ints, groups: int = 1, **where: Any
) -> Array:
    given = {name: where.get(name) for name in ("strides", "pads", "dilations")}
    w = window(x.ndim - 2, kernel, **given)
    n, c, *spatial = x.shape
    rank, taps, sizes = len(kernel), int(np.prod(kernel)), offset.shape[2:]
    moved = offset.reshape(n, groups, taps, rank, *sizes).repeat(c // groups, 1)
    out = np.zeros((n, c, taps, *sizes), x.dtype)
    for k, at in enumerate(np.ndindex(*kernel)):
        base = np.ogrid[tuple(slice(m) for m in sizes)]
        begin: Any = w.begin
        y = [base[d] * w.strides[d] + at[d] * w.dilations[d] - begin[d] + moved[:, :, k, d] for d in range(rank)]
        low = [np.floor(p) for p in y]
        for ends in itertools.product((0, 1), repeat=rank):
            j = [a + e for a, e in zip(low, ends)]
            inside = np.logical_and.reduce([(p >= 0) & (p < s) for p, s in zip(j, spatial)])
            weight = np.prod([t - a if e else 1 - (t - a) for t, a, e in zip(y, low, ends)], 0)
            index = [np.clip(np.nan_to_num(p), 0, s - 1).astype(np.int64) for p, s in zip(j, spatial)]
            lead = np.ogrid[:n, :c]
            v = x[(*(g.reshape(*g.shape, *(1,) * rank) for g in lead), *index)]
            out[:, :, k] += np.where(inside, v * weight, 0)
    return out if mask is None else out * mask.reshape(n, groups, taps, *sizes).repeat(c // groups, 1)


def _flops(
    x: TensorType, offset: TensorType, mask: TensorType | None = None, *, kernel: Ints, groups: int = 1, **_: Any
) -> Dim:
    per_group = dim(const(x.shape[1]) // groups)
    return dim(const(offset.size) // len(kernel) * per_group * 4 * 2 ** len(kernel))


DEFORM_OPS: tuple[OpDef, ...] = (
    OpDef(
        "deform_columns",
        _type,
        _compute,
        reference=_reference,
        flops=_flops,
        traits=PURE,
        samples=(
            sample("f32[1, 2, 4, 5]", "f32[1, 8, 3, 4]", kernel=(2, 2)),
            sample(
                "f32[2, 4, 5, 5]", "f32[2, 36, 5, 5]", "f32[2, 18, 5, 5]", kernel=(3, 3), pads=(1, 1, 1, 1), groups=2
            ),
            sample("f16[1, 2, 7]", "f16[1, 2, 3]", kernel=(2,), strides=(2,), dilations=(2,)),
        ),
    ),
)
