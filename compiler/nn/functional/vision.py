"""Images: padding, resampling, and elements moved between channels and places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from dnnc.array.core import Array, scalar
from dnnc.array.errors import ValueInputError
from dnnc.array.manipulation import permute_dims, reshape
from dnnc.array.replay import replayed
from dnnc.array.sizes import plain, same, symbolic
from dnnc.ir.dtype import from_numpy
from dnnc.ir.errors import UnsupportedError, count
from dnnc.ir.ops.resize import IDENTITY, Coordinate, coordinates, rational
from dnnc.nn.functional.operands import array, choice, ints, op, rank_of
from dnnc.nn.functional.pool import adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d

MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Array:
    """Elements in front of and behind axes.

    Args:
        pad: pairs (front, behind) of the last axis, the one before it, and so on; below 0 elements are cut off.
        mode: "constant" (`value`, by default 0), "reflect", "replicate" or "circular".
    """
    x = array("pad", "input", input, "fiub")
    given = [p.__index__() for p in pad]
    if len(given) % 2 or len(given) > 2 * x.ndim:
        raise ValueInputError(f"pad: expected pairs for at most {x.ndim} axes, got {count(len(given), 'number')}")
    choice("pad", "mode", mode, *MODES)
    if mode != "constant" and value:
        raise ValueInputError(f"pad: value={value} is for mode 'constant', got {mode!r}")
    front, behind = [0] * x.ndim, [0] * x.ndim
    for k in range(len(given) // 2):
        front[x.ndim - 1 - k], behind[x.ndim - 1 - k] = given[2 * k], given[2 * k + 1]
    for n, b, e in zip(x.shape, front, behind):
        limit = {"reflect": n - 1 if mode == "reflect" else n, "circular": n}.get(mode)
        if limit is not None and not symbolic(limit) and max(b, e) > limit:
            raise ValueInputError(f"pad: {mode} pads of {max(b, e)} are more than an axis of {n} elements gives")
    fill = [] if not value else [scalar(value, x.dtype)]
    return op("pad", x, *fill, pads=(*front, *behind), mode=MODES[mode])


# --- resampling -------------------------------------------------------------------------------------------------------

RANKS = {"linear": (1,), "bilinear": (2,), "bicubic": (2,), "trilinear": (3,)}


def interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Array:
    """Resample the spatial axes of [N, C, ...].

    Args:
        size: the new sizes, a number or one for each spatial axis; else `scale_factor`.
        mode: "nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear" or "area".
        align_corners: of the linear and cubic modes: the outer elements keep their places.
        recompute_scale_factor: take the factor from the sizes, not as it is given.

    Raises:
        UnsupportedError: `antialias`, or sizes that a trace does not know.
    """
    what = "interpolate"
    x = array(what, "input", input)
    rank = rank_of(what, x, 3, 4, 5) - 2
    choice(what, "mode", mode, "nearest", "nearest-exact", "area", *RANKS)
    if rank not in RANKS.get(mode, (1, 2, 3)):
        raise ValueInputError(f"{what}: mode {mode!r} needs {RANKS[mode][0]} spatial axes, got shape {x.shape}")
    if antialias:
        raise UnsupportedError(f"{what}: antialias=True")
    if align_corners is not None and mode not in RANKS:
        raise ValueInputError(f"{what}: align_corners is for {', '.join(RANKS)}, got mode {mode!r}")
    if (size is None) == (scale_factor is None):
        raise ValueInputError(f"{what}: give either size or scale_factor")
    old = x.shape[2:]
    if symbolic(*old):
        raise UnsupportedError(f"{what}: sizes {old} that are not known; give them as numbers in the Spec")
    factors: list[float | None] = [None] * rank
    if size is not None:
        new = ints(what, "size", size, rank, 1)
    else:
        listed = tuple(scale_factor) if isinstance(scale_factor, (tuple, list)) else (scale_factor,) * rank
        if len(listed) != rank or any(not s > 0 for s in listed):
            raise ValueInputError(f"{what}: scale_factor={scale_factor!r}: expected {rank} positive numbers")
        new = tuple(math.floor(n * s) for n, s in zip(old, listed))
        factors = factors if recompute_scale_factor else list(map(float, listed))
    if mode == "area":
        return (adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d)[rank - 1](x, new)
    kind = mode.partition("-")[0]
    kind = "nearest" if kind == "nearest" else "cubic" if kind == "bicubic" else "linear"
    coords = [IDENTITY] * 2 + [
        IDENTITY if n == m else _coordinate(mode, kind, n, m, f, bool(align_corners))
        for n, m, f in zip(old, new, factors)
    ]
    shape = (*map(plain, x.shape[:2]), *new)
    return op("resize", x, shape=shape, coords=tuple(coords), mode=kind, rounding="floor")


def _coordinate(mode: str, kind: str, old: int, new: int, factor: float | None, corners: bool) -> Coordinate:
    if corners:
        return coordinates("align_corners", old, new, Fraction(1))
    scale = Fraction(new, old) if factor is None else rational(factor)
    if mode == "nearest":
        return coordinates("asymmetric", old, new, scale)
    if kind == "nearest":
        return scale.denominator * 2, scale.denominator, scale.numerator * 2
    return coordinates("half_pixel", old, new, scale)


# --- between channels and places --------------------------------------------------------------------------------------


@replayed
def pixel_shuffle(input: Any, upscale_factor: int) -> Array:
    """[..., C r^2, H, W] to [..., C, H r, W r] (Shi et al., 2016)."""
    x = array("pixel_shuffle", "input", input, "fiu")
    (r,) = ints("pixel_shuffle", "upscale_factor", upscale_factor, 1, 1)
    if x.ndim < 3 or (not symbolic(x.shape[-3]) and x.shape[-3] % (r * r)):
        raise ValueInputError(f"pixel_shuffle: the channels of {x.shape} do not divide by {r}^2")
    *front, c, h, w = x.shape
    k = len(front)
    y = reshape(x, (*front, c // (r * r), r, r, h, w))
    y = permute_dims(y, (*range(k), k, k + 3, k + 1, k + 4, k + 2))
    return reshape(y, (*front, c // (r * r), h * r, w * r))


@replayed
def pixel_unshuffle(input: Any, downscale_factor: int) -> Array:
    """[..., C, H r, W r] to [..., C r^2, H, W]."""
    x = array("pixel_unshuffle", "input", input, "fiu")
    (r,) = ints("pixel_unshuffle", "downscale_factor", downscale_factor, 1, 1)
    if x.ndim < 3 or any(not symbolic(n) and n % r for n in x.shape[-2:]):
        raise ValueInputError(f"pixel_unshuffle: the sizes of {x.shape} do not divide by {r}")
    *front, c, h, w = x.shape
    k = len(front)
    y = reshape(x, (*front, c, h // r, r, w // r, r))
    y = permute_dims(y, (*range(k), k, k + 2, k + 4, k + 1, k + 3))
    return reshape(y, (*front, c * r * r, h // r, w // r))


@replayed
def channel_shuffle(input: Any, groups: int) -> Array:
    """Channels [N, g * n, ...] in the order [N, n * g, ...]."""
    x = array("channel_shuffle", "input", input, "fiu")
    if x.ndim < 3 or groups < 1 or (not symbolic(x.shape[1]) and x.shape[1] % groups):
        raise ValueInputError(f"channel_shuffle: the channels of {x.shape} do not divide into {groups} groups")
    n, c, *rest = x.shape
    y = reshape(x, (n, groups, c // groups, *rest))
    return reshape(permute_dims(y, (0, 2, 1, *range(3, x.ndim + 1))), x.shape)


def _kernel(like: Array, sizes: tuple[int, ...]) -> Array:
    """[KH * KW, 1, KH, KW]: filter k picks element k of a window."""
    n = math.prod(sizes)
    return reshape(op("eye", rows=n, columns=n, dtype=from_numpy(like.dtype)), (n, 1, *sizes))


@replayed
def unfold(input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Array:
    """The windows of [N, C, H, W] as columns: [N, C * KH * KW, windows]."""
    x = array("unfold", "input", input)
    rank_of("unfold", x, 3, 4)
    single = x.ndim == 3
    n, c, h, w = (1, *x.shape) if single else x.shape
    kernel, strides = ints("unfold", "kernel_size", kernel_size, 2, 1), ints("unfold", "stride", stride, 2, 1)
    pads, dilations = ints("unfold", "padding", padding, 2, 0), ints("unfold", "dilation", dilation, 2, 1)
    planes = reshape(x, (n * c, 1, h, w))
    y = op("conv", planes, _kernel(x, kernel), strides=strides, pads=pads * 2, dilations=dilations)
    columns = y.shape[2] * y.shape[3]
    made = (c * math.prod(kernel), columns)
    return reshape(y, made if single else (n, *made))


@replayed
def fold(input: Any, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Array:
    """Windows [N, C * KH * KW, windows] added up at their places: [N, C, H, W] of `output_size`."""
    what = "fold"
    x = array(what, "input", input)
    rank_of(what, x, 2, 3)
    single = x.ndim == 2
    sizes, kernel = ints(what, "output_size", output_size, 2, 1), ints(what, "kernel_size", kernel_size, 2, 1)
    strides, pads = ints(what, "stride", stride, 2, 1), ints(what, "padding", padding, 2, 0)
    dilations = ints(what, "dilation", dilation, 2, 1)
    n, rows, columns = (1, *x.shape) if single else x.shape
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations)]
    grid = [(m + 2 * p - r) // s + 1 for m, p, r, s in zip(sizes, pads, reach, strides)]
    area = math.prod(kernel)
    if (not symbolic(rows) and rows % area) or not same(columns, math.prod(grid)):
        raise ValueInputError(
            f"{what}: {x.shape} does not hold windows {kernel} at {grid[0]} x {grid[1]} places of {sizes}"
        )
    c = rows // area
    more = tuple((m + 2 * p - r) % s for m, p, r, s in zip(sizes, pads, reach, strides))
    planes = reshape(x, (n * c, area, *grid))
    attrs = {"strides": strides, "pads": pads * 2, "dilations": dilations, "output_padding": more}
    y = op("conv_transpose", planes, _kernel(x, kernel), **attrs)
    return reshape(y, (c, *sizes) if single else (n, c, *sizes))
