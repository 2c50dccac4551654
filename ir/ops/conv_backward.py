"""What cotangents of convolutions are made of: the sum over images and pixels that is the filters' one, and filters
turned for the images' one.

    conv_backward_filter   w[o, c, k] = sum over n, p of x[n, c, p*stride + k*dilation - pad] * g[n, o, p]
                           parts=P: of each P-th of the images, one below the other
    turn_filters           y[c, o, k] = w[o, c, K - 1 - k], of each group: a transposed convolution's as a convolution's

The first is linear in both operands, and its own gradient is a convolution and a transposed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.autodiff.rules import conv as rules
from dnnc.ir.expr import Expr, cast, const
from dnnc.ir.op import CONTRACTION, MOVEMENT, ContractionForm, OpDef, require
from dnnc.ir.ops.common import CHUNK, Array, dim, require_kind, same_dim, same_dtype, sample
from dnnc.ir.ops.matmul import float64
from dnnc.ir.ops.window import Ints, offsets, pad_numpy, shifted, window
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

Pads = tuple[Dim, ...]


def _type(
    x: TensorType,
    g: TensorType,
    *,
    kernel: tuple[Dim, ...],
    strides: Ints | None = None,
    pads: Pads | None = None,
    dilations: Ints | None = None,
    group: int = 1,
    parts: int = 1,
) -> TensorType:
    ok = 3 <= x.rank <= 5 and g.rank == x.rank
    require(ok, "conv_backward_filter needs 1 to 3 spatial dims and equal ranks; got {} and {}", x, g)
    dtype = same_dtype(x, g)
    require_kind("conv_backward_filter's operands", x, "f")
    ok = group > 0 and all(not isinstance(t.shape[1], int) or t.shape[1] % group == 0 for t in (x, g))
    require(ok, "the channels of {} and {} must be divisible by group {}", x, g, group)
    win = window(x.rank - 2, kernel, strides, pads, dilations)
    want = (x.shape[0], *win.sizes(x.shape[2:]))
    ok = all(map(same_dim, (g.shape[0], *g.shape[2:]), want))
    require(ok, "the convolution of {} gives {} images of {}; its cotangent is {}", x, want[0], want[1:], g)
    ok = parts == 1 or (parts > 0 and isinstance(x.shape[0], int) and x.shape[0] % parts == 0)
    require(ok, "the images of {} do not come in {} equal parts", x, parts)
    return TensorType(dtype, (dim(const(g.shape[1]) * parts), dim(const(x.shape[1]) // group), *kernel))


def _compute(
    x: Tensor,
    g: Tensor,
    *,
    kernel: tuple[Dim, ...],
    strides: Ints | None,
    pads: Pads | None,
    dilations: Ints | None,
    group: int,
    parts: int,
) -> Tensor:
    rank = len(kernel)
    win = window(rank, kernel, strides, pads, dilations)
    channels, per_group = dim(const(x.dims[1]) // group), const(g.dims[1]) // group
    made, images = g.dims[1], dim(const(g.dims[0]) // parts)

    def positions(v: Sequence[Expr]) -> tuple[Expr, ...]:
        return win.positions(v[3 + rank :], v[2 : 2 + rank])

    def value(*v: Expr) -> Expr:
        o, c, n = v[0], v[1], v[2 + rank]
        if parts > 1:
            o, n = v[0] % made, v[0] // made * images + n
        first = o // per_group * channels + c
        wide = x.dtype.computed
        return cast(x[(n, first, *positions(v))], wide) * cast(g[(n, o, *v[3 + rank :])], wide)

    where = (lambda *v: win.inside(positions(v), x.dims[2:])) if win.padded else None
    filters = dim(const(made) * parts), channels, *kernel
    return te.reduce(filters, (images, *g.dims[2:]), x.dtype, "sum", value, where)


def _reference(x: Array, g: Array, *, kernel: tuple[int, ...], group: int = 1, parts: int = 1, **sides: Any) -> Array:
    if parts > 1:
        each = zip(np.split(x, parts), np.split(g, parts))
        return np.concatenate([_reference(a, b, kernel=kernel, group=group, **sides) for a, b in each])
    win = window(len(kernel), kernel, **sides)
    padded, (n, o), sizes = pad_numpy(x, win, 0), g.shape[:2], g.shape[2:]
    c, flat = x.shape[1] // group, int(np.prod(sizes))
    apart = g.reshape(n, group, o // group, flat)
    w: Array = np.zeros((group, o // group, c, *kernel), np.result_type(x, g))
    for at in offsets(win):
        part = shifted(padded, win, sizes, at).reshape(n, group, c, flat)
        w[(..., *at)] = np.matmul(apart, part.swapaxes(2, 3)).sum(0)
    return w.reshape(o, c, *kernel)


def _reference_at(
    inputs: Sequence[Array], points: Array, *, kernel: tuple[int, ...], group: int = 1, parts: int = 1, **sides: Any
) -> Array:
    """For each offset within the window, the asked pairs of channels."""
    x, g = inputs
    if parts > 1:
        made, found = g.shape[1], np.zeros(len(points), float64(x[:0, :0]).dtype)
        for k, both in enumerate(zip(np.split(x, parts), np.split(g, parts))):
            mine = points[:, 0] // made == k
            own = points[mine] - np.array([k * made] + [0] * (points.shape[1] - 1))
            found[mine] = _reference_at(both, own, kernel=kernel, group=group, **sides)
        return found
    win = window(len(kernel), kernel, **sides)
    padded, c, o, sizes = pad_numpy(x, win, 0), x.shape[1] // group, g.shape[1] // group, g.shape[2:]
    out = np.zeros(len(points), float64(x[:0, :0]).dtype)
    step = max(1, CHUNK // max(int(np.prod(sizes)) * g.shape[0], 1))
    for at in offsets(win):
        (which,) = np.nonzero((points[:, 2:] == at).all(1))
        seen = shifted(padded, win, sizes, at)
        for k in range(0, len(which), step):
            some = which[k : k + step]
            read, made = seen[:, points[some, 0] // max(o, 1) * c + points[some, 1]], g[:, points[some, 0]]
            out[some] = (float64(read) * float64(made)).sum(tuple(i for i in range(x.ndim) if i != 1))
    return out


# --- filters the other way round --------------------------------------------------------------------------------------


def _turn_type(w: TensorType, *, group: int = 1) -> TensorType:
    ok = 3 <= w.rank <= 5 and group > 0 and (not isinstance(w.shape[0], int) or w.shape[0] % group == 0)
    require(ok, "filters [O, C, ...] of {} groups are needed; got {}", group, w)
    return TensorType(w.dtype, (dim(const(w.shape[1]) * group), dim(const(w.shape[0]) // group), *w.shape[2:]))


def _turn(w: Tensor, *, group: int) -> Tensor:
    each, made = dim(const(w.dims[0]) // group), w.dims[1]

    def element(*v: Expr) -> Expr:
        o = v[1] if group == 1 else v[0] // made * each + v[1]
        return w[(o, v[0] if group == 1 else v[0] % made, *(const(k) - 1 - i for k, i in zip(w.dims[2:], v[2:])))]

    return te.compute((dim(const(made) * group), each, *w.dims[2:]), w.dtype, element)


def _turn_numpy(w: Array, *, group: int = 1) -> Array:
    o, c, *kernel = w.shape
    apart = np.flip(w, tuple(range(2, w.ndim))).reshape(group, o // group, c, *kernel)
    return np.ascontiguousarray(apart.swapaxes(1, 2)).reshape(group * c, o // group, *kernel)


def _flops(x: TensorType, g: TensorType, *, kernel: tuple[Dim, ...], group: int = 1, **_: Any) -> Dim:
    return dim(const(product(g.shape)) * (const(x.shape[1]) // group) * product(kernel) * 2)


CONV_BACKWARD_OPS: tuple[OpDef, ...] = (
    OpDef(
        "conv_backward_filter",
        _type,
        _compute,
        reference=_reference,
        reference_at=_reference_at,
        flops=_flops,
        traits=CONTRACTION,
        contraction=ContractionForm.FILTERS,
        terms=lambda x, g, *, parts=1, **_: dim(const(product((g.shape[0], *g.shape[2:]))) // parts),
        equal_dims=lambda x, g, **_: [(x.shape[0], g.shape[0])],
        vjp=rules.conv_backward_filter,
        samples=(
            sample("f32[2, 16, 7, 9]", "f32[2, 24, 7, 9]", kernel=(3, 3), pads=(1, 1, 1, 1)),
            sample("f32[1, 3, 11, 11]", "f32[1, 8, 6, 6]", kernel=(7, 7), strides=(2, 2), pads=(3, 3, 3, 3)),
            sample("f32[2, 8, 6, 5]", "f32[2, 16, 3, 3]", kernel=(1, 1), strides=(2, 2)),
            sample("f32[2, 6, 5, 5]", "f32[2, 6, 5, 5]", kernel=(3, 3), pads=(1, 1, 1, 1), group=6),
            sample(
                "f32[1, 6, 9, 8]", "f32[1, 4, 4, 4]",
                kernel=(3, 3), strides=(2, 1), pads=(0, 0, 3, 0), dilations=(2, 2), group=2,
            ),
            sample("f16[2, 4, 13]", "f16[2, 5, 6]", kernel=(3,), strides=(2,), pads=(1, 0)),
            sample("f64[1, 2, 4, 5, 6]", "f64[1, 3, 3, 5, 6]", kernel=(2, 3, 3), pads=(0, 1, 1, 0, 1, 1)),
            sample("f32[1, 2, 6, 6]", "f32[1, 3, 4, 3]", kernel=(3, 3), pads=(-1, 0, 1, -1)),
        ),
    ),
    OpDef(
        "turn_filters",
        _turn_type,
        _turn,
        reference=_turn_numpy,
        traits=MOVEMENT,
        vjp=rules.turn_filters,
        samples=(
            sample("f32[16, 8, 3, 3]"),
            sample("f32[6, 2, 3, 2]", group=3),
            sample("f16[5, 3, 4]"),
            sample("f64[4, 2, 1, 2, 3]", group=2),
        ),
    ),
)  # fmt: skip
