"""Converters of operators that sample images at computed places or put patches back together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call, number
from dnnc.ir.dtype import i64
from dnnc.ir.errors import ModelError, UnsupportedError
from dnnc.ir.graph import Value
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import product

Converter = Callable[[Call], Any]
MODES = {"nearest": "nearest", "linear": "linear", "bilinear": "linear", "cubic": "cubic", "bicubic": "cubic"}
CUBIC = -0.75


def grid_sample(c: Call) -> Any:
    """Sample x [N, C, D...] at grid [N, E..., len(D)] in [-1, 1], last dim first; each tap is one weighted gather."""
    x, grid = c.x(0), c.x(1)
    sizes = [number(n, "a spatial dim of GridSample") for n in x.type.shape[2:]]
    how, padding = MODES.get(c.text("mode", "linear")), c.text("padding_mode", "zeros")
    if how is None or padding not in ("zeros", "border", "reflection"):
        raise UnsupportedError(f"GridSample with mode {c.text('mode')!r} and padding_mode {padding!r}")
    batch, channels, places = x.type.shape[0], x.type.shape[1], grid.type.shape[1:-1]
    points = c.b.cast(c.b.reshape(grid, shape=(batch, product(places), len(sizes))), to=x.type.dtype)
    rows = c.b.transpose(c.b.reshape(x, shape=(batch, channels, product(sizes))), perm=(0, 2, 1))
    corners, d = c.flag("align_corners"), len(sizes)
    taps = []
    for k, n in enumerate(sizes):
        column = c.b.slice(points, starts=(0, 0, d - 1 - k), steps=(1, 1, 1), shape=(batch, product(places), 1))
        taps.append(_taps(c, column, n, how, padding, corners))
    total = None
    for combination in itertools.product(*taps):
        index, weight, inside = combination[0]
        for (j, w, within), n in zip(combination[1:], sizes[1:]):
            index, weight = c.b.add(c.b.mul(index, n), j), c.b.mul(weight, w)
            inside = None if inside is None else c.b.logical_and(inside, within)
        found = c.b.gather_nd(rows, index, batch_dims=1)
        if inside is not None:  # an infinite pixel at the border times 0 would be NaN
            found = c.b.where(inside, found, c.const(0.0, found.type.dtype))
        term = c.b.mul(found, weight)
        total = term if total is None else c.b.add(total, term)
    return c.b.reshape(c.b.transpose(total, perm=(0, 2, 1)), shape=(batch, channels, *places))


def _taps(c: Call, t: Value, n: int, how: str, padding: str, corners: bool) -> list[tuple[Value, Value, Any]]:
    """(index, weight, is it inside) along a dim of size n at coordinates t; None where no pixels are zeros."""
    b = c.b
    x = b.mul(b.add(t, 1.0), (n - 1) / 2) if corners else b.sub(b.mul(b.add(t, 1.0), n / 2), 0.5)
    low, high = (0.0, n - 1.0) if corners else (-0.5, n - 0.5)
    x = b.round(x) if how == "nearest" else x
    if padding == "border":
        x = b.clip(x, low=0.0, high=n - 1.0)
    elif padding == "reflection":
        x = _reflected(c, x, low, high)
    base = b.floor(x) if how != "nearest" else x
    weights = _weights(c, b.sub(x, base), how)
    first = -1 if how == "cubic" else 0
    out = []
    for k, w in enumerate(weights):
        place, inside = b.add(base, float(first + k)), None
        if padding == "zeros":
            inside = b.logical_and(b.greater_equal(place, 0.0), b.less_equal(place, n - 1.0))
            w = b.where(inside, w, c.const(0.0, w.type.dtype))
        elif padding == "reflection":
            place = b.trunc(_reflected(c, place, low, high))
        out.append((b.cast(b.clip(place, low=0.0, high=n - 1.0), to=i64), w, inside))
    return out


def _reflected(c: Call, x: Value, low: float, high: float) -> Any:
    """x folded back into [low, high] at both ends."""
    span = high - low
    if span == 0:
        return c.b.mul(x, 0.0)
    t = c.b.fmod(c.b.abs(c.b.sub(x, low)), 2 * span)
    return c.b.add(c.b.min(t, c.b.sub(c.const(2 * span, t.type.dtype), t)), low)


def _weights(c: Call, t: Value, how: str) -> list[Value]:
    """Weights of the taps floor (nearest), floor..floor + 1 (linear) or floor - 1..floor + 2 (cubic) at fraction t."""
    b = c.b
    one = c.const(1.0, t.type.dtype)
    if how == "nearest":
        return [b.expand(one, shape=t.type.shape)]
    s = b.sub(one, t)
    if how == "linear":
        return [s, t]

    def far(u: Value) -> Any:  # ((a*u - 5a)*u + 8a)*u - 4a
        return b.sub(b.mul(b.add(b.mul(b.sub(b.mul(u, CUBIC), 5 * CUBIC), u), 8 * CUBIC), u), 4 * CUBIC)

    def near(u: Value) -> Any:  # ((a + 2)*u - (a + 3))*u*u + 1
        return b.add(b.mul(b.mul(b.sub(b.mul(u, CUBIC + 2), CUBIC + 3), u), u), 1.0)

    return [far(b.add(t, 1.0)), near(t), near(s), far(b.add(s, 1.0))]


def col2im(c: Call) -> Any:
    """Add patches [N, C * patch, places] up into images: a transposed convolution with one-hot weights."""
    x = c.x()
    image, block = c.ints_in(1, "image_shape"), c.ints_in(2, "block_shape")
    rank = len(image)
    strides, dilations = c.integers("strides") or (1,) * rank, c.integers("dilations") or (1,) * rank
    pads = c.integers("pads") or (0,) * 2 * rank
    room = [n + b + e - (k - 1) * d - 1 for n, b, e, k, d in zip(image, pads[:rank], pads[rank:], block, dilations)]
    if any(r < 0 for r in room) or len(block) != rank:
        raise ModelError(f"blocks of {list(block)} do not fit into an image of {list(image)}")
    patch = int(np.prod(block))
    channels = number(x.type.shape[1], "the channels of Col2Im") // patch
    y = c.b.reshape(x, shape=(x.type.shape[0], channels * patch, *(r // s + 1 for r, s in zip(room, strides))))
    w = np.tile(np.eye(patch).reshape(patch, 1, *block), (channels, *(1,) * (rank + 1)))
    extra = tuple(r % s for r, s in zip(room, strides))
    return c.b.conv_transpose(
        y,
        c.const(w, x.type.dtype),
        strides=strides,
        pads=pads,
        dilations=dilations,
        output_padding=extra,
        group=channels,
    )


def tensor_scatter(c: Call) -> Any:
    """Updates written along an axis from a start per batch on (a key-value cache); circular: around the end."""
    cache, update = c.x(0), c.x(1)
    axis, rank = normalize_axis(c.integer("axis", -2), c.rank()), c.rank()
    n, m = cache.type.shape[axis], update.type.shape[axis]
    at = c.b.iota(shape=tuple(m if k == axis else 1 for k in range(rank)), axis=axis, dtype=i64)
    if c.has(2):
        starts = c.cast(c.x(2), i64)
        at = c.b.add(at, c.b.reshape(starts, shape=(starts.type.shape[0], *(1,) * (rank - 1))))
    if c.text("mode", "linear") == "circular":
        at = c.b.mod(at, number(n, "the cache's length"))
    return c.b.scatter_elements(cache, c.b.expand(at, shape=update.type.shape), update, axis=axis)


IMAGE: dict[str, Converter] = {"GridSample": grid_sample, "Col2Im": col2im, "TensorScatter": tensor_scatter}
