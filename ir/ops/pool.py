"""Pooling over 1 to 3 spatial dims. Rounding sizes up is resolved before: the importer makes the end pads larger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.ir import batching, te
from dnnc.ir.autodiff.rules import pool as rules
from dnnc.ir.dtype import i64
from dnnc.ir.expr import Expr, cast, const, maximum, minimum, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import REDUCTION, OpDef, Trait, require
from dnnc.ir.ops.common import Array, dim, quiet, require_kind, sample
from dnnc.ir.ops.reduce import lowest
from dnnc.ir.ops.window import Ints, Window, offsets, pad_numpy, shifted, sizes_numpy, window
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

Pads = tuple[Dim, ...]


def _checked(x: TensorType, kinds: str) -> None:
    require(3 <= x.rank <= 5, "pooling needs [N, C] and 1 to 3 spatial dims; got {}", x)
    require_kind("the operand of a pooling", x, kinds)


def _window_type(
    x: TensorType, *, kernel: Ints, strides: Ints | None = None, pads: Pads | None = None, dilations: Ints | None = None
) -> TensorType:
    _checked(x, "fiu")
    win = window(x.rank - 2, kernel, strides, pads, dilations)
    return TensorType(x.dtype, (*x.shape[:2], *win.sizes(x.shape[2:])))


def _index_type(
    x: TensorType, *, kernel: Ints, strides: Ints | None = None, pads: Pads | None = None, dilations: Ints | None = None
) -> TensorType:
    t = _window_type(x, kernel=kernel, strides=strides, pads=pads, dilations=dilations)
    return TensorType(i64, t.shape)


def _windows(x: Tensor, win: Window, combine: str, value: Callable[..., Expr], dtype: Any, name: str = "t") -> Tensor:
    """`combine` of `value(index of x, outer index)` over the window's positions inside x."""
    spatial = x.dims[2:]
    q = len(x.dims)

    def position(v: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return (*v[:2], *win.positions(v[2:q], v[q:]))

    where = (lambda *v: win.inside(position(v)[2:], spatial)) if win.padded else None
    return te.reduce(
        (*x.dims[:2], *win.sizes(spatial)),
        win.kernel,
        dtype,
        combine,
        lambda *v: value(position(v), v[:q]),
        where,
        name,
    )


def _max(x: Tensor, *, kernel: Ints, **sides: Any) -> Tensor:
    win = window(len(kernel), kernel, **sides)
    return _windows(x, win, "max", lambda at, i: x[at], x.dtype)


def _max_numpy(x: Array, *, kernel: Ints, **sides: Any) -> Array:
    win = window(len(kernel), kernel, **sides)
    sizes = sizes_numpy(win, x.shape[2:])
    padded = pad_numpy(x, win, lowest(x))
    out = np.full((*x.shape[:2], *sizes), lowest(x), x.dtype)
    for at in offsets(win):
        out = np.maximum(out, shifted(padded, win, sizes, at))
    return out


def _gathered(x: Array, points: Array, win: Window) -> tuple[Array, Array]:
    """What the asked windows read, [points, *taps], and where that is inside the operand. Taps that are outside of it
    in every window are left out: a window may be much larger than the operand.
    """
    kernel: Any = win.kernel
    places = []
    for k, n in enumerate(x.shape[2:]):
        p = points[:, 2 + k, None] * win.strides[k] + np.arange(kernel[k]) * win.dilations[k] - win.begin[k]
        some = ((p >= 0) & (p < n)).any(0)
        places.append(p[:, some if some.any() else slice(1)])
    rank, lead = len(places), (slice(None), *(None,) * len(places))
    index = [points[:, 0][lead], points[:, 1][lead]]
    valid: Array = np.ones((len(points), *(p.shape[1] for p in places)), np.bool_)
    for k, (p, n) in enumerate(zip(places, x.shape[2:])):
        p = p[(slice(None), *(slice(None) if j == k else None for j in range(rank)))]
        valid &= (p >= 0) & (p < n)
        index.append(np.clip(p, 0, n - 1))
    return x[tuple(index)], valid


def _max_at(inputs: Sequence[Array], points: Array, *, kernel: Ints, **sides: Any) -> Array:
    (x,) = inputs
    read, valid = _gathered(x, points, window(len(kernel), kernel, **sides))
    return np.max(np.where(valid, read, lowest(x)), tuple(range(1, read.ndim)))


# --- where the maximum stands -----------------------------------------------------------------------------------------


def _max_index(x: Tensor, *, kernel: Ints, **sides: Any) -> Tensor:
    """The row-major position in the whole of x of each window's first maximum."""
    win = window(len(kernel), kernel, **sides)
    m = _windows(x, win, "max", lambda at, i: x[at], x.dtype.computed, "window_max")
    spatial, q = x.dims[2:], len(x.dims)

    def inside(*v: Expr) -> Expr:
        return win.inside(win.positions(v[2:q], v[q:]), spatial)

    def position(*v: Expr) -> Expr:
        at = (*v[:2], *win.positions(v[2:q], v[q:]))
        hit = x[at].eq(m[v[:q]])
        hit = hit | call("isnan", x[at]) if x.dtype.is_float else hit
        flat: Expr = const(0)
        for i, n in zip(at, x.dims):
            flat = flat * n + i
        return select(hit, flat, const(i64.range[1], i64))

    return te.reduce((*x.dims[:2], *win.sizes(spatial)), kernel, i64, "min", position, inside)


def _max_index_numpy(x: Array, *, kernel: Ints, **sides: Any) -> Array:
    win = window(len(kernel), kernel, **sides)
    sizes = sizes_numpy(win, x.shape[2:])
    points = np.stack(np.meshgrid(*map(np.arange, (*x.shape[:2], *sizes)), indexing="ij"), -1).reshape(-1, x.ndim)
    flat = np.arange(x.size).reshape(x.shape)
    read, valid = _gathered(x, points, win)
    at, _ = _gathered(flat, points, win)
    best = np.argmax(np.where(valid, read, lowest(x)).reshape(len(points), -1), 1)
    return (
        np.take_along_axis(at.reshape(len(points), -1), best[:, None], 1).reshape(*x.shape[:2], *sizes).astype(np.int64)
    )


# --- averages ---------------------------------------------------------------------------------------------------------


def _avg_type(
    x: TensorType,
    *,
    kernel: Ints,
    strides: Ints | None = None,
    pads: Pads | None = None,
    dilations: Ints | None = None,
    count_include_pad: bool = False,
    uncounted: Ints | None = None,
) -> TensorType:
    """`uncounted`: how much of each end pad is never counted (what rounding the size up has added)."""
    _checked(x, "f")
    win = window(x.rank - 2, kernel, strides, pads, dilations)
    return TensorType(x.dtype, (*x.shape[:2], *win.sizes(x.shape[2:])))


def _counted(
    win: Window, spatial: Sequence[Dim], index: Sequence[Expr], include: bool, uncounted: Sequence[int]
) -> Expr:
    """How many positions of a window count."""
    total: Expr = const(1)
    for i, n, k, s, b, e, d, u in zip(
        index, spatial, win.kernel, win.strides, win.begin, win.end, win.dilations, uncounted
    ):
        start = i * s - b
        high = const(n) + (const(e) - u if include else 0)
        # the offsets k with 0 <= start + k*d < high, rounded up on non-negative numbers
        last = minimum((maximum(high - start, 0) + (d - 1)) // d, k)
        first = const(0) if include else (maximum(0 - start, 0) + (d - 1)) // d
        total = total * (last - first)
    return total


def _avg(x: Tensor, *, kernel: Ints, count_include_pad: bool, uncounted: Ints | None, **sides: Any) -> Tensor:
    win = window(len(kernel), kernel, **sides)
    wide = x.dtype.computed
    s = _windows(x, win, "sum", lambda at, i: x[at], wide, "window_sum")
    shape = x.dims[2:]
    return te.compute(s.dims, x.dtype, lambda *i: averaged(s[i], win, shape, i[2:], count_include_pad, uncounted))


def averaged(
    e: Expr, win: Window, spatial: Sequence[Dim], index: Sequence[Expr], include: bool, uncounted: Ints | None
) -> Expr:
    """A number divided by how many positions of a window count."""
    none = uncounted or (0,) * len(win.kernel)
    if not win.padded or (include and not any(none)):
        return e / float(np.prod(win.kernel))  # type: ignore[arg-type, no-any-return]
    return e / cast(_counted(win, spatial, index, include, none), e.dtype)


def _avg_numpy(
    x: Array, *, kernel: Ints, count_include_pad: bool = False, uncounted: Ints | None = None, **sides: Any
) -> Array:
    win = window(len(kernel), kernel, **sides)
    sizes = sizes_numpy(win, x.shape[2:])
    padded = pad_numpy(x, win, 0)
    total = np.zeros((*x.shape[:2], *sizes), x.dtype)
    for at in offsets(win):
        total += shifted(padded, win, sizes, at)
    return total / covered(win, x.shape[2:], sizes, x.dtype, count_include_pad, uncounted)


def covered(
    win: Window, spatial: Sequence[int], sizes: Sequence[int], dtype: Any, include: bool, uncounted: Ints | None
) -> Array:
    """How many positions of each window count."""
    ones = pad_numpy(np.ones(tuple(spatial), dtype), win, 1 if include else 0)
    for axis, u in enumerate(uncounted or ()):
        if u:
            ones[(slice(None),) * axis + (slice(-u, None),)] = 0
    n = np.zeros(tuple(sizes), dtype)
    for at in offsets(win):
        n += shifted(ones, win, sizes, at)
    return n


def _avg_at(
    inputs: Sequence[Array],
    points: Array,
    *,
    kernel: Ints,
    count_include_pad: bool = False,
    uncounted: Ints | None = None,
    **sides: Any,
) -> Array:
    (x,) = inputs
    win = window(len(kernel), kernel, **sides)
    read, valid = _gathered(x, points, win)
    over = tuple(range(1, read.ndim))
    n = valid.sum(over)
    if count_include_pad:
        n = np.ones(len(points), np.int64)
        none = uncounted or (0,) * len(kernel)
        for k, size in enumerate(x.shape[2:]):
            p = points[:, 2 + k, None] * win.strides[k] + np.arange(kernel[k]) * win.dilations[k] - win.begin[k]
            n = n * (p < size + win.end[k] - none[k]).sum(1)
    return np.where(valid, read, 0).sum(over) / n


# --- p-norms ----------------------------------------------------------------------------------------------------------


def _lp_type(
    x: TensorType,
    *,
    kernel: Ints,
    strides: Ints | None = None,
    pads: Pads | None = None,
    dilations: Ints | None = None,
    p: int = 2,
) -> TensorType:
    _checked(x, "f")
    require(p >= 1, "lp_pool needs p >= 1; got {}", p)
    return _window_type(x, kernel=kernel, strides=strides, pads=pads, dilations=dilations)


def _lp(x: Tensor, *, kernel: Ints, p: int, **sides: Any) -> Tensor:
    win = window(len(kernel), kernel, **sides)
    wide = x.dtype.computed

    def power(at: tuple[Expr, ...], i: tuple[Expr, ...]) -> Expr:
        a = call("abs", x[at])
        return a if p == 1 else a * a if p == 2 else call("pow", a, const(float(p), wide))

    s = _windows(x, win, "sum", power, wide, "window_sum")
    if p == 1:
        return te.compute(s.dims, x.dtype, lambda *i: s[i])
    return te.compute(
        s.dims, x.dtype, lambda *i: call("sqrt", s[i]) if p == 2 else call("pow", s[i], const(1 / p, wide))
    )


def _lp_numpy(x: Array, *, kernel: Ints, p: int = 2, **sides: Any) -> Array:
    win = window(len(kernel), kernel, **sides)
    sizes = sizes_numpy(win, x.shape[2:])
    padded = np.abs(pad_numpy(x, win, 0)) ** p
    out = np.zeros((*x.shape[:2], *sizes), x.dtype)
    for at in offsets(win):
        out += shifted(padded, win, sizes, at)
    return out ** (1 / p)


def _lp_at(inputs: Sequence[Array], points: Array, *, kernel: Ints, p: int = 2, **sides: Any) -> Array:
    (x,) = inputs
    read, valid = _gathered(x, points, window(len(kernel), kernel, **sides))
    return np.where(valid, np.abs(read) ** p, 0).sum(tuple(range(1, read.ndim))) ** (1 / p)


def _flops(x: TensorType, *, kernel: Ints, **attrs: Any) -> Dim:
    attrs = {k: v for k, v in attrs.items() if k in ("strides", "pads", "dilations")}
    return dim(const(product(_window_type(x, kernel=kernel, **attrs).shape)) * int(np.prod(kernel)))


# --- global -----------------------------------------------------------------------------------------------------------


def _global_type(x: TensorType) -> TensorType:
    require(x.rank >= 3, "global pooling needs [N, C] and spatial dims; got {}", x)
    return TensorType(x.dtype, (*x.shape[:2], *(1,) * (x.rank - 2)))


def _global(name: str) -> Callable[..., Any]:
    return lambda b, x: b.op(name, x, axes=tuple(range(2, x.type.rank)), keepdims=True)


def _global_lp_type(x: TensorType, *, p: int = 2) -> TensorType:
    require(p >= 1, "global_lp_pool needs p >= 1; got {}", p)
    return _global_type(x)


def _global_lp(b: Any, x: Any, *, p: int) -> Any:
    axes = tuple(range(2, x.type.rank))
    if p == 1 or p == 2:
        return b.op(f"reduce_l{p}", x, axes=axes, keepdims=True)
    return b.pow(b.reduce_sum(b.pow(b.abs(x), float(p)), axes=axes, keepdims=True), 1 / p)


_GLOBAL_SAMPLES = (sample("f32[2, 3, 5, 7]"), sample("f16[1, 4, 9]"))
_SAMPLES = (
    sample("f32[1, 3, 9, 11]", kernel=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    sample("f32[2, 2, 6, 6]", kernel=(2, 2), strides=(2, 2)),
    sample("f16[1, 2, 13]", kernel=(4,), strides=(3,), pads=(1, 2)),
    sample("f64[1, 2, 5, 6, 7]", kernel=(2, 3, 3), dilations=(1, 2, 1), pads=(0, 1, 0, 1, 1, 2)),
)
_INT_SAMPLES = (sample("u8[1, 2, 7, 5]", kernel=(3, 2), pads=(1, 0, 1, 1), domain=(0, 255)),)

WINDOWS = REDUCTION | {Trait.WINDOW}
BLOCKS = WINDOWS | {Trait.CHANNELWISE}

POOL_OPS: tuple[OpDef, ...] = (
    OpDef(
        "max_pool",
        _window_type,
        _max,
        reference=_max_numpy,
        reference_at=_max_at,
        flops=_flops,
        traits=BLOCKS | {Trait.SELECTS},
        batching=batching.images,
        vjp=rules.max_pool,
        samples=(*_SAMPLES, *_INT_SAMPLES),
    ),
    OpDef(
        "max_pool_index",
        _index_type,
        _max_index,
        reference=_max_index_numpy,
        flops=_flops,
        traits=BLOCKS | {Trait.SELECTS},
        samples=(*_SAMPLES, *_INT_SAMPLES),
    ),
    OpDef(
        "avg_pool",
        _avg_type,
        _avg,
        reference=_avg_numpy,
        reference_at=_avg_at,
        flops=_flops,
        traits=BLOCKS | {Trait.SELECTS},
        batching=batching.images,
        vjp=rules.avg_pool,
        samples=(
            *_SAMPLES,
            sample("f32[1, 2, 9, 8]", kernel=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1), count_include_pad=True),
            sample(
                "f32[1, 2, 6, 6]",
                kernel=(3, 3),
                strides=(2, 2),
                pads=(1, 1, 2, 2),
                count_include_pad=True,
                uncounted=(1, 1),
            ),
            sample("f32[1, 2, 6, 6]", kernel=(3, 2), strides=(2, 2), pads=(1, 1, 2, 1), dilations=(2, 3)),
        ),
    ),
    OpDef(
        "lp_pool",
        _lp_type,
        _lp,
        reference=quiet(_lp_numpy),
        reference_at=_lp_at,
        flops=_flops,
        traits=BLOCKS,
        batching=batching.images,
        samples=(
            *_SAMPLES,
            *(sample("f32[1, 2, 5, 6]", kernel=(2, 3), strides=(1, 2), pads=(0, 1, 1, 0), p=p) for p in (1, 3)),
        ),
    ),
    OpDef("global_avg_pool", _global_type, decompose=_global("reduce_mean"), traits=REDUCTION, samples=_GLOBAL_SAMPLES),
    OpDef("global_max_pool", _global_type, decompose=_global("reduce_max"), traits=REDUCTION, samples=_GLOBAL_SAMPLES),
    OpDef(
        "global_lp_pool",
        _global_lp_type,
        decompose=_global_lp,
        traits=REDUCTION,
        samples=(*_GLOBAL_SAMPLES, sample("f32[2, 3, 5]", p=1), sample("f32[2, 3, 5]", p=3)),
    ),
)
