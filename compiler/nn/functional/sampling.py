"""Images at computed places: `grid_sample`, and `affine_grid`, which computes the places of an affine map."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from dnnc.array.core import Array, cast
from dnnc.array.elementwise import abs as absolute
from dnnc.array.elementwise import add, clip, divide, floor, logical_and, minimum, multiply, remainder, subtract, where
from dnnc.array.elementwise import round as rounded
from dnnc.array.errors import ValueInputError
from dnnc.array.linalg import matmul
from dnnc.array.manipulation import broadcast_to, expand_dims, matrix_transpose, moveaxis, reshape, sliced, stack, take
from dnnc.array.promotion import DEFAULTS
from dnnc.nn.functional.operands import array, arrays, choice, counted, detached, filled, rank_of

CUBIC = -0.75  # of Keys' kernel, as in PyTorch


def affine_grid(theta: Any, size: Sequence[int], align_corners: bool = False) -> Array:
    """Where `grid_sample` looks for an affine map of each image.

    Args:
        theta: [N, 2, 3] or [N, 3, 4], from places of the result to places of the input, both in [-1, 1].
        size: of the result, [N, C, H, W] or [N, C, D, H, W].
        align_corners: -1 and 1 are the middles of the first and last pixels, not their outer edges.

    Returns:
        [N, H, W, 2] or [N, D, H, W, 3].
    """
    t = array("affine_grid", "theta", theta)
    d = len(size) - 2
    if d not in (2, 3) or t.shape != (size[0], d, d + 1):
        raise ValueInputError(f"affine_grid: expected theta [N, 2, 3] or [N, 3, 4] for size {size}, got {t.shape}")
    places = tuple(size[2:])
    axes = []
    for k, n in reversed(list(enumerate(places))):
        x = multiply(cast(counted(n), t.dtype), 2.0)
        if align_corners:
            x = subtract(divide(x, float(n - 1)), 1.0) if n > 1 else filled((n,), 0.0, t.dtype)
        else:
            x = subtract(divide(add(x, 1.0), float(n)), 1.0)
        axes.append(broadcast_to(reshape(x, (n, *(1,) * (d - 1 - k))), places))
    base = reshape(stack([*axes, filled(places, 1.0, t.dtype)], axis=-1), (1, math.prod(places), d + 1))
    return reshape(matmul(base, matrix_transpose(t)), (size[0], *places, d))


def grid_sample(
    input: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Array:
    """The values of images at the places of a grid.

    Args:
        input: [N, C, H, W] or [N, C, D, H, W].
        grid: [N, ..., 2] or [N, ..., 3]: x, y and z in [-1, 1] for each element of the result.
        mode: "bilinear" (of volumes trilinear), "nearest", or of images "bicubic".
        padding_mode: values outside of the input: "zeros", "border" (the nearest pixel) or "reflection".
        align_corners: -1 and 1 are the middles of the first and last pixels, not their outer edges.

    Returns:
        [N, C, ...].
    """
    x, places = arrays("grid_sample", input=input, grid=grid)
    rank_of("grid_sample", x, 4, 5)
    choice("grid_sample", "mode", mode, "bilinear", "nearest", "bicubic")
    choice("grid_sample", "padding_mode", padding_mode, "zeros", "border", "reflection")
    batch, channels, *sizes = x.shape
    if places.ndim != x.ndim or places.shape[0] != batch or places.shape[-1] != len(sizes):
        raise ValueInputError(f"grid_sample: a grid {places.shape} does not fit to an input {x.shape}")
    if mode == "bicubic" and len(sizes) != 2:
        raise ValueInputError("grid_sample: bicubic is for images, use bilinear for volumes")
    made = places.shape[1:-1]
    rows = reshape(moveaxis(x, 1, -1), (batch * math.prod(sizes), channels))
    taps = []
    for k, n in enumerate(sizes):
        at = reshape(sliced(places, places.ndim - 1, len(sizes) - 1 - k, 1), (batch, math.prod(made)))
        taps.append(_taps(at, n, mode, padding_mode, bool(align_corners)))
    image = multiply(expand_dims(counted(batch), axis=1), math.prod(sizes))
    total: Array | None = None
    for combination in itertools.product(*taps):
        index, weight, inside = combination[0]
        for (j, w, within), n in zip(combination[1:], sizes[1:]):
            index, weight = add(multiply(index, n), j), multiply(weight, w)
            inside = logical_and(inside, within) if inside is not None and within is not None else None
        found = reshape(take(rows, reshape(add(index, image), (-1,)), axis=0), (batch, math.prod(made), channels))
        if inside is not None:  # an infinite pixel at the border times 0 would be NaN
            found = where(expand_dims(inside, axis=-1), found, 0.0)
        term = multiply(found, expand_dims(weight, axis=-1))
        total = term if total is None else add(total, term)
    assert total is not None
    return reshape(matrix_transpose(total), (batch, channels, *made))


def _taps(t: Array, n: int, mode: str, padding: str, corners: bool) -> list[tuple[Array, Array, Array | None]]:
    """(index, weight, is it inside) along an axis of n pixels at the coordinates t; None where no pixels are zeros."""
    x = multiply(add(t, 1.0), (n - 1) / 2) if corners else subtract(multiply(add(t, 1.0), n / 2), 0.5)
    low, high = (0.0, n - 1.0) if corners else (-0.5, n - 0.5)
    if padding == "reflection" and mode != "bicubic":
        x = _reflected(x, low, high)
    if padding != "zeros" and mode != "bicubic":
        x = clip(x, 0.0, n - 1.0)
    base = detached(rounded(x) if mode == "nearest" else floor(x))
    first = -1 if mode == "bicubic" else 0
    out = []
    for k, w in enumerate(_weights(subtract(x, base), mode)):
        place, inside = add(base, float(first + k)), None
        if padding == "zeros":
            inside = logical_and(place >= 0.0, place <= n - 1.0)
            w = where(inside, w, 0.0)
        elif padding == "reflection" and mode == "bicubic":
            place = _reflected(place, low, high)
        out.append((cast(clip(place, 0.0, n - 1.0), DEFAULTS["i"]), w, inside))
    return out


def _weights(f: Array, mode: str) -> list[Array]:
    """Of the taps at a distance f behind the first one that is not ahead of the place."""
    if mode == "nearest":
        return [filled(f.shape, 1.0, f.dtype)]
    if mode == "bilinear":
        return [subtract(1.0, f), f]

    def near(d: Array) -> Array:
        return add(multiply(multiply(subtract(multiply(d, CUBIC + 2), CUBIC + 3), d), d), 1.0)

    def far(d: Array) -> Array:
        inner = add(multiply(subtract(multiply(d, CUBIC), 5 * CUBIC), d), 8 * CUBIC)
        return subtract(multiply(inner, d), 4 * CUBIC)

    g = subtract(1.0, f)
    return [far(add(f, 1.0)), near(f), near(g), far(add(g, 1.0))]


def _reflected(x: Array, low: float, high: float) -> Array:
    """x folded back into [low, high] at both ends."""
    span = high - low
    if span <= 0:
        return multiply(x, 0.0)
    d = remainder(absolute(subtract(x, low)), 2 * span)
    return add(minimum(d, subtract(2 * span, d)), low)
