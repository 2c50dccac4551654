"""Cotangents of pooling: where each window's first maximum stands, and what windows send back to their elements.

    o = max_pool_offset(x, max_pool(x))       the number of the first maximum within its window, row by row
    x = max_pool_backward(o, g)               what the windows send back whose maximum an element is
    g = max_pool_select(o, h)                 the transpose of that: the element of each window that o names
    x = avg_pool_backward(g)

Each element gathers from the few windows that hold it: nothing is scattered, and sums have one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.autodiff.rules import pool as rules
from dnnc.ir.dtype import i32
from dnnc.ir.expr import Expr, cast, const, maximum, minimum, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import REDUCTION, OpDef, Trait, require
from dnnc.ir.ops.common import Array, both, dim, require_kind, same_dim, sample, within
from dnnc.ir.ops.pool import averaged, covered
from dnnc.ir.ops.window import Ints, Window, offsets, pad_numpy, shifted, sizes_numpy, window
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

Pads = tuple[Dim, ...]
BLOCKS = REDUCTION | {Trait.WINDOW, Trait.CHANNELWISE}


def _number(k: Sequence[Any], kernel: Ints) -> Any:
    """A position within a window as one number, row by row."""
    flat: Any = 0
    for i, n in zip(k, kernel):
        flat = flat * n + i
    return flat


def _windows_of(x: Sequence[Dim], made: Sequence[Dim], kernel: Ints, sides: dict[str, Any], what: str) -> Window:
    """The windows over images of sizes `x`, of which there are `made`."""
    win = window(len(kernel), kernel, **sides)
    ok = len(x) == len(made) == len(kernel) + 2
    require(ok, "{} needs images of rank {}; got {} and {}", what, len(kernel) + 2, x, made)
    want = (*x[:2], *win.sizes(x[2:]))
    ok = all(map(same_dim, want, made))
    require(ok, "{}: images of {} have {} windows; got {}", what, x[2:], want, made)
    return win


def _flops(o: TensorType, *rest: Any, kernel: Ints, **_: Any) -> Dim:
    """A comparison or division, and a sum, of each element of each window."""
    return dim(const(product(o.shape)) * product(kernel) * 2)


def _offset_flops(x: TensorType, y: TensorType, **attrs: Any) -> Dim:
    return _flops(y, **attrs)


# --- where the maximum stands within its window -----------------------------------------------------------------------


def _offset_type(x: TensorType, y: TensorType, *, kernel: Ints, **sides: Any) -> TensorType:
    require_kind("the operand of a pooling", x, "fiu")
    _windows_of(x.shape, y.shape, kernel, sides, "max_pool_offset")
    return TensorType(i32, y.shape)


def _offset(x: Tensor, y: Tensor, *, kernel: Ints, **sides: Any) -> Tensor:
    win, q = window(len(kernel), kernel, **sides), len(x.dims)

    def element(*v: Expr) -> Expr:
        read = x[(*v[:2], *win.positions(v[2:q], v[q:]))]
        hit = read.eq(y[v[:q]])
        hit = hit | call("isnan", read) if x.dtype.is_float else hit
        return select(hit, cast(_number(v[q:], kernel), i32), const(i32.range[1], i32))

    where = (lambda *v: win.inside(win.positions(v[2:q], v[q:]), x.dims[2:])) if win.padded else None
    return te.reduce(y.dims, kernel, i32, "min", element, where)


def _offset_numpy(x: Array, y: Array, *, kernel: Ints, **sides: Any) -> Array:
    win = window(len(kernel), kernel, **sides)
    sizes, padded = sizes_numpy(win, x.shape[2:]), pad_numpy(x, win, 0)
    inside = pad_numpy(np.ones(x.shape[2:], bool), win, 0)
    out = np.full(y.shape, i32.range[1], np.int32)
    for k, at in enumerate(offsets(win)):
        read = shifted(padded, win, sizes, at)
        hit = ((read == y) | (read != read)) & shifted(inside, win, sizes, at)
        out = np.where(hit & (out > k), np.int32(k), out)
    return out


# --- from windows to their elements -----------------------------------------------------------------------------------


def _spread(win: Window, made: Sequence[Dim], shape: Sequence[Dim], dtype: Any, value: Any) -> Tensor:
    """For each element of `shape` the sum of value(window, position within it) over the windows that hold it.

    Along an axis element i is in the windows (i + pad) // stride - m, m = 0, 1, .., at the place of what is left.
    """
    rank, spans = len(win.kernel), []
    for k, s, d in zip(win.kernel, win.strides, win.dilations):
        assert isinstance(k, int)
        spans.append(((k - 1) * d + s) // s)
    ahead = [max(-b // s + 1, 0) if isinstance(b, int) else 0 for b, s in zip(win.begin, win.strides)]

    def places(v: Sequence[Expr]) -> tuple[list[Expr], list[Expr]]:
        windows, rests = [], []
        for i, m, b, s, a in zip(v[2 : 2 + rank], v[2 + rank :], win.begin, win.strides, ahead):
            at = i + b + a * s  # not negative, so that digits are those of a number
            windows.append(at // s - a - m)
            rests.append(at % s + m * s)
        return windows, rests

    def inside(*v: Expr) -> Expr:
        windows, rests = places(v)
        tests = [within(w, n) for w, n in zip(windows, made)]
        for r, k, s, d, n in zip(rests, win.kernel, win.strides, win.dilations, spans):
            assert isinstance(k, int)
            if d > 1:
                tests.append((r % d).eq(0))
            if n * s > (k - 1) * d + 1:
                tests.append(r < (k - 1) * d + 1)
        return both(*tests)

    def element(*v: Expr) -> Expr:
        windows, rests = places(v)
        return value((*v[:2], *windows), [r // d for r, d in zip(rests, win.dilations)])  # type: ignore[no-any-return]

    def pixel(*v: Expr) -> Expr:
        windows, rests = places((*v, *(const(0),) * rank))
        at = [minimum(maximum(w, 0), n - 1) for w, n in zip(windows, made)]
        return cast(select(inside(*v, *(const(0),) * rank), value((*v[:2], *at), rests), 0.0), dtype)

    if all(k == 1 for k in win.kernel):  # at most one window holds an element: nothing is summed
        return te.compute(shape, dtype, pixel)
    return te.reduce(shape, spans, dtype, "sum", element, inside)


def _backward_type(o: TensorType, g: TensorType, *, spatial: Sequence[Dim], kernel: Ints, **sides: Any) -> TensorType:
    ok = o.dtype is i32 and o.shape == g.shape
    require(ok, "max_pool_backward needs an i32 offset for each element of {}; got {}", g, o)
    require_kind("a cotangent", g, "f")
    _windows_of((*g.shape[:2], *spatial), g.shape, kernel, sides, "max_pool_backward")
    return TensorType(g.dtype, (*g.shape[:2], *spatial))


def _backward(o: Tensor, g: Tensor, *, spatial: Sequence[Dim], kernel: Ints, **sides: Any) -> Tensor:
    win, wide = window(len(kernel), kernel, **sides), g.dtype.computed

    def value(at: tuple[Expr, ...], k: Sequence[Expr]) -> Expr:
        hit = o[at].eq(cast(_number(k, kernel), i32))
        return select(hit, cast(g[at], wide), const(0.0, wide))

    return _spread(win, g.dims[2:], (*g.dims[:2], *spatial), g.dtype, value)


def _backward_numpy(o: Array, g: Array, *, spatial: Sequence[int], kernel: Ints, **sides: Any) -> Array:
    win = window(len(kernel), kernel, **sides)
    parts = (np.where(o == k, g, g.dtype.type(0)) for k, _ in enumerate(offsets(win)))
    return _spread_numpy(win, parts, g, spatial)


def _spread_numpy(win: Window, parts: Any, g: Array, spatial: Sequence[int]) -> Array:
    """Sum what windows send to each offset; the padding is cut off."""
    x = pad_numpy(np.zeros((*g.shape[:2], *spatial), g.dtype), win, 0)
    for at, part in zip(offsets(win), parts):
        view = shifted(x, win, g.shape[2:], at)
        view += part
    ahead = [(0, 0), (0, 0), *((max(-int(b), 0), max(-int(e), 0)) for b, e in zip(win.begin, win.end))]  # type: ignore[arg-type]
    cut = tuple(slice(max(int(b), 0), max(int(b), 0) + n) for b, n in zip(win.begin, spatial))  # type: ignore[arg-type]
    grown: Array = np.pad(x, ahead)
    return grown[(..., *cut)]


def _select_type(o: TensorType, h: TensorType, *, kernel: Ints, **sides: Any) -> TensorType:
    require(o.dtype is i32, "max_pool_select needs i32 offsets; got {}", o)
    require_kind("a cotangent", h, "f")
    _windows_of(h.shape, o.shape, kernel, sides, "max_pool_select")
    return TensorType(h.dtype, o.shape)


def _select(o: Tensor, h: Tensor, *, kernel: Ints, **sides: Any) -> Tensor:
    win, q, wide = window(len(kernel), kernel, **sides), len(h.dims), h.dtype.computed

    def element(*v: Expr) -> Expr:
        hit = o[v[:q]].eq(cast(_number(v[q:], kernel), i32))
        return select(hit, cast(h[(*v[:2], *win.positions(v[2:q], v[q:]))], wide), const(0.0, wide))

    where = (lambda *v: win.inside(win.positions(v[2:q], v[q:]), h.dims[2:])) if win.padded else None
    return te.reduce(o.dims, kernel, h.dtype, "sum", element, where)


def _select_numpy(o: Array, h: Array, *, kernel: Ints, **sides: Any) -> Array:
    win = window(len(kernel), kernel, **sides)
    padded, out = pad_numpy(h, win, 0), np.zeros(o.shape, h.dtype)
    for k, at in enumerate(offsets(win)):
        out = np.where(o == k, shifted(padded, win, o.shape[2:], at), out)
    return out


# --- averages ---------------------------------------------------------------------------------------------------------


def _avg_type(
    g: TensorType,
    *,
    spatial: Sequence[Dim],
    kernel: Ints,
    count_include_pad: bool = False,
    uncounted: Ints | None = None,
    **sides: Any,
) -> TensorType:
    require_kind("a cotangent", g, "f")
    _windows_of((*g.shape[:2], *spatial), g.shape, kernel, sides, "avg_pool_backward")
    return TensorType(g.dtype, (*g.shape[:2], *spatial))


def _avg(
    g: Tensor,
    *,
    spatial: Sequence[Dim],
    kernel: Ints,
    count_include_pad: bool,
    uncounted: Ints | None,
    **sides: Any,
) -> Tensor:
    win, wide = window(len(kernel), kernel, **sides), g.dtype.computed

    def value(at: tuple[Expr, ...], k: Sequence[Expr]) -> Expr:
        return averaged(cast(g[at], wide), win, spatial, at[2:], count_include_pad, uncounted)

    return _spread(win, g.dims[2:], (*g.dims[:2], *spatial), g.dtype, value)


def _avg_numpy(
    g: Array,
    *,
    spatial: Sequence[int],
    kernel: Ints,
    count_include_pad: bool = False,
    uncounted: Ints | None = None,
    **sides: Any,
) -> Array:
    win = window(len(kernel), kernel, **sides)
    each = g / covered(win, spatial, g.shape[2:], g.dtype, count_include_pad, uncounted)
    return _spread_numpy(win, (each for _ in offsets(win)), g, spatial)


_SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((1, 3, 9, 11), (1, 3, 5, 6), {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((2, 2, 6, 6), (2, 2, 3, 3), {"kernel": (2, 2), "strides": (2, 2)}),
    ((1, 2, 13), (1, 2, 5), {"kernel": (4,), "strides": (3,), "pads": (1, 2)}),
    ((1, 2, 5, 6, 7), (1, 2, 5, 4, 7), {"kernel": (2, 3, 3), "dilations": (1, 2, 1), "pads": (0, 1, 0, 1, 1, 2)}),
    ((1, 2, 9, 8), (1, 2, 2, 3), {"kernel": (2, 2), "strides": (4, 3), "pads": (0, -1, 0, 1)}),
    ((1, 2, 7, 8), (1, 2, 4, 3), {"kernel": (1, 1), "strides": (2, 3), "pads": (0, 0, 0, 1)}),
)


def _samples(*operands: str, spatial: bool) -> tuple[Any, ...]:
    """A sample of each shape; an operand is a dtype and where its sizes come from, images `x` or windows `y`."""
    out = []
    for x, y, attrs in _SHAPES:
        types = [f"{t}{list(x if which == 'x' else y)}" for t, which in (o.split() for o in operands)]
        more: dict[str, Any] = {"spatial": x[2:]} if spatial else {}
        out.append(sample(*types, **more, **attrs))
    return tuple(out)


POOL_BACKWARD_OPS: tuple[OpDef, ...] = (
    OpDef(
        "max_pool_offset",
        _offset_type,
        _offset,
        reference=_offset_numpy,
        flops=_offset_flops,
        traits=BLOCKS | {Trait.SELECTS},
        samples=_samples("f32 x", "f32 y", spatial=False),
    ),
    OpDef(
        "max_pool_backward",
        _backward_type,
        _backward,
        reference=_backward_numpy,
        flops=_flops,
        traits=BLOCKS,
        vjp=rules.max_pool_backward,
        samples=_samples("i32 y", "f32 y", spatial=True),
    ),
    OpDef(
        "max_pool_select",
        _select_type,
        _select,
        reference=_select_numpy,
        flops=_flops,
        traits=BLOCKS | {Trait.SELECTS},
        vjp=rules.max_pool_select,
        samples=_samples("i32 y", "f32 x", spatial=False),
    ),
    OpDef(
        "avg_pool_backward",
        _avg_type,
        _avg,
        reference=_avg_numpy,
        flops=_flops,
        traits=BLOCKS,
        vjp=rules.avg_pool_backward,
        samples=(
            *_samples("f32 y", spatial=True),
            sample(
                "f32[1, 2, 4, 4]",
                spatial=(6, 6),
                kernel=(3, 3),
                strides=(2, 2),
                pads=(1, 1, 2, 2),
                count_include_pad=True,
                uncounted=(1, 1),
            ),
        ),
    ),
)
