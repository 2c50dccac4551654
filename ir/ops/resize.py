"""Resampling: nearest, linear or cubic. Source coordinates are exact integers, (mul * i + add) / div per dim."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from dnnc.ir import te
from dnnc.ir.expr import Expr, cast, const, select
from dnnc.ir.op import PURE, OpDef, Trait, require
from dnnc.ir.ops.common import Array, both, clamp, rows_flops, sample, within
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType

Dims = tuple[Dim, ...]
Coordinate = tuple[int, int, int]  # mul, add, div
IDENTITY = (1, 0, 1)
MODES = ("nearest", "linear", "cubic")
ROUNDINGS = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")


# --- coordinates ------------------------------------------------------------------------------------------------------


def rational(scale: float) -> Fraction:
    """The fraction that a float32 scale stands for: 0.6 means 3/5, not the nearest binary fraction."""
    near = Fraction(scale).limit_denominator(1 << 12)
    return near if np.float32(float(near)) == np.float32(scale) else Fraction(scale)


def coordinates(mode: str, old: Dim, new: Dim, scale: Fraction, roi: tuple[float, float] = (0.0, 1.0)) -> Coordinate:
    """ONNX's `coordinate_transformation_mode` for one dim as (mul, add, div).

    Args:
        old, new: sizes before and after; only `align_corners`, `half_pixel_symmetric` and the crop need them as
            numbers.
        scale: new size / old size, as the model states it.
        roi: the crop's start and end, relative to the dim.

    Raises:
        ShapeError: an unknown mode, or one that needs sizes which are not known.
    """
    half = Fraction(1, 2)
    if new == 1 and mode in ("pytorch_half_pixel", "align_corners"):
        return (0, 0, 1)
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return _integers(1 / scale, half / scale - half)
    if mode == "asymmetric":
        return _integers(1 / scale, Fraction(0))
    ok = mode in ("align_corners", "half_pixel_symmetric", "tf_crop_and_resize")
    require(ok, "resize knows no coordinate mode {}", mode)
    ok = isinstance(old, int) and isinstance(new, int)
    require(ok, "resize with {} needs sizes that are numbers; got {} to {}", mode, old, new)
    assert isinstance(old, int) and isinstance(new, int)
    if mode == "align_corners":
        return _integers(Fraction(old - 1, new - 1), Fraction(0))
    if mode == "half_pixel_symmetric":
        shift = Fraction(old, 2) * (1 - new / (scale * old))
        return _integers(1 / scale, shift + half / scale - half)
    start, end = (rational(r) for r in roi)
    if new == 1:
        return _integers(Fraction(0), half * (start + end) * (old - 1))
    return _integers((end - start) * (old - 1) / (new - 1), start * (old - 1))


def _integers(slope: Fraction, offset: Fraction) -> Coordinate:
    d = lcm(slope.denominator, offset.denominator)
    return int(slope * d), int(offset * d), d


# --- the op -----------------------------------------------------------------------------------------------------------


def _type(
    x: TensorType,
    *,
    shape: Dims,
    coords: tuple[Coordinate, ...],
    mode: str = "linear",
    rounding: str = "round_prefer_floor",
    cubic: float = -0.75,
    exclude_outside: bool = False,
    extrapolation: float | None = None,
) -> TensorType:
    ok = mode in MODES and rounding in ROUNDINGS
    require(ok, "resize knows {} and {}; got {} and {}", MODES, ROUNDINGS, mode, rounding)
    require(len(shape) == len(coords) == x.rank, "resize needs {} sizes and coordinates for {}", x.rank, x)
    require(mode == "nearest" or x.dtype.is_float, "resize by {} needs floats; got {}", mode, x)
    for n, m, (mul, add, div) in zip(x.shape, shape, coords):
        require(div > 0 and (n != 0 or m == 0), "resize of a dim of {} to {} by ({}*i + {})/{}", n, m, mul, add, div)
    return TensorType(x.dtype, tuple(shape))


def _low(c: Coordinate, size: Dim) -> int:
    """The least value of `mul*i + add`."""
    mul, add, _ = c
    return add if mul >= 0 or not isinstance(size, int) else add + mul * (size - 1)


def _floor(i: Expr, c: Coordinate, size: Dim) -> Expr:
    """`(mul*i + add) // div` by a dividend that is not negative."""
    g = gcd(c[0], c[2])
    mul, add, div = c[0] // g, c[1] // g, c[2] // g  # (g*x + r) // (g*d) -> (x + r//g) // d
    k = max(0, -(_low((mul, add, div), size) // div))
    return (i * mul + (add + k * div)) // div - k


def _nearest(i: Expr, c: Coordinate, size: Dim, rounding: str) -> Expr:
    mul, add, div = c
    more = {"floor": (mul, add, div), "ceil": (mul, add + div - 1, div)}
    half = 2 * add + (div - 1 if rounding == "round_prefer_floor" else div)
    return _floor(i, more.get(rounding, (2 * mul, half, 2 * div)), size)


def _weights(t: Expr, mode: str, a: float) -> list[Expr]:
    """The weights of the taps floor, floor + 1 (linear) or floor - 1 .. floor + 2 (cubic) at fraction t."""
    if mode == "linear":
        return [1.0 - t, t]
    s = 1.0 - t
    far = [((u * a - 5 * a) * u + 8 * a) * u - 4 * a for u in (t + 1.0, s + 1.0)]
    near = [(u * (a + 2) - (a + 3)) * u * u + 1.0 for u in (t, s)]
    return [far[0], *near, far[1]]


def _taps(
    i: Expr, c: Coordinate, old: Dim, new: Dim, like: Expr, mode: str, cubic: float, exclude: bool
) -> list[tuple[Expr, Expr]]:
    """(index, weight) of what one output element reads along one dim."""
    mul, add, div = c
    first = _floor(i, c, new) - (1 if mode == "cubic" else 0)
    up = max(0, -(_low(c, new) // div)) * div
    ws = _weights(cast((i * mul + (add + up)) % div, like.dtype) / float(div), mode, cubic)
    at = [first + j for j in range(len(ws))]
    if exclude:
        ws = [select(within(j, old), w, const(0.0, w.dtype)) for j, w in zip(at, ws)]
        total = ws[0]
        for w in ws[1:]:
            total = total + w
        ws = [w / total for w in ws]
    return [(clamp(j, old), w) for j, w in zip(at, ws)]


def _compute(
    x: Tensor,
    *,
    shape: Dims,
    coords: tuple[Coordinate, ...],
    mode: str,
    rounding: str,
    cubic: float,
    exclude_outside: bool,
    extrapolation: float | None,
) -> Tensor:
    moved = [k for k, c in enumerate(coords) if tuple(c) != IDENTITY]
    like = const(0, x.dtype.computed)

    def interpolated(i: tuple[Expr, ...], at: tuple[Expr, ...], left: Sequence[int]) -> Expr:
        if not left:
            return x[at]
        k = left[0]
        r: Expr | None = None
        for j, w in _taps(i[k], coords[k], x.dims[k], shape[k], like, mode, cubic, exclude_outside):
            v = interpolated(i, (*at[:k], j, *at[k + 1 :]), left[1:]) * w
            r = v if r is None else r + v
        assert r is not None
        return r

    def element(*i: Expr) -> Expr:
        if mode == "nearest":
            v = x[
                tuple(
                    clamp(_nearest(i[k], coords[k], shape[k], rounding), n) if k in moved else i[k]
                    for k, n in enumerate(x.dims)
                )
            ]
        else:
            v = interpolated(i, i, moved)
        if extrapolation is None or not moved:
            return v
        pairs = [(i[k] * coords[k][0] + coords[k][1], (const(x.dims[k]) - 1) * coords[k][2]) for k in moved]
        return select(
            both(*(both(const(0) <= p, p <= last) for p, last in pairs)), v, const(extrapolation, x.dtype.computed)
        )

    return te.compute(shape, x.dtype, element)


def _reference(
    x: Array,
    *,
    shape: Sequence[int],
    coords: Sequence[Coordinate],
    mode: str = "linear",
    rounding: str = "round_prefer_floor",
    cubic: float = -0.75,
    exclude_outside: bool = False,
    extrapolation: float | None = None,
) -> Array:
    y, outside = x, np.zeros(tuple(shape), np.bool_)
    for k, (m, (mul, add, div)) in enumerate(zip(shape, coords)):
        if (mul, add, div) == IDENTITY:
            continue
        along = [-1 if j == k else 1 for j in range(x.ndim)]
        n, t = x.shape[k], np.arange(m) * mul + add
        outside |= ((t < 0) | (t > (n - 1) * div)).reshape(along)
        if mode == "nearest":
            y = np.take(y, np.clip(_nearest_numpy(t, div, rounding), 0, n - 1), k)
            continue
        weights = _weights_numpy(t % div / div, mode, cubic)
        at = t // div + np.arange(len(weights))[:, None] - (1 if mode == "cubic" else 0)
        if exclude_outside:
            weights = np.where((at >= 0) & (at < n), weights, 0)
            weights = weights / weights.sum(0)
        parts = [np.take(y, np.clip(j, 0, n - 1), k) * w.reshape(along).astype(x.dtype) for j, w in zip(at, weights)]
        y = sum(parts[1:], parts[0])
    return y if extrapolation is None else np.where(outside, np.asarray(extrapolation).astype(x.dtype), y)


def _nearest_numpy(t: Array, div: int, rounding: str) -> Array:
    if rounding == "floor":
        return t // div
    if rounding == "ceil":
        return -(-t // div)
    return -((div - 2 * t) // (2 * div)) if rounding == "round_prefer_floor" else (2 * t + div) // (2 * div)


def _weights_numpy(t: Array, mode: str, a: float) -> Array:
    if mode == "linear":
        return np.stack([1 - t, t])
    u, v = t + 1, 2 - t
    outer = [((a * z - 5 * a) * z + 8 * a) * z - 4 * a for z in (u, v)]
    inner = [((a + 2) * z - (a + 3)) * z * z + 1 for z in (t, 1 - t)]
    return np.stack([outer[0], *inner, outer[1]])


_UP2 = ((1, 0, 1), (1, 0, 1), (2, -1, 4), (2, -1, 4))  # half_pixel, scale 2

RESIZE_OPS: tuple[OpDef, ...] = (
    OpDef(
        "resize",
        _type,
        _compute,
        reference=_reference,
        flops=rows_flops(8),
        traits=PURE | {Trait.RESAMPLES},
        samples=(
            sample("f32[1, 2, 3, 4]", shape=(1, 2, 6, 8), coords=_UP2),
            sample("f32[1, 2, 3, 4]", shape=(1, 2, 6, 8), coords=_UP2, mode="nearest"),
            sample(
                "i64[3, 5]",
                shape=(3, 8),
                coords=(IDENTITY, (5, 0, 8)),
                mode="nearest",
                rounding="floor",
                domain=(-9, 9),
            ),
            sample("f16[7]", shape=(4,), coords=((12, 5, 7),), mode="nearest", rounding="ceil"),
            sample(
                "f32[6, 5]", shape=(4, 7), coords=((5, 0, 3), (4, 0, 6)), mode="nearest", rounding="round_prefer_ceil"
            ),
            sample(
                "f32[1, 1, 5, 4]",
                shape=(1, 1, 8, 8),
                coords=(IDENTITY, IDENTITY, (10, -3, 16), (2, -1, 4)),
                mode="cubic",
            ),
            sample("f64[6]", shape=(9,), coords=((12, -3, 18),), mode="cubic", exclude_outside=True, cubic=-0.5),
            sample("f32[4, 4]", shape=(3, 3), coords=((9, -3, 5), (3, 0, 2)), extrapolation=10.0),
            sample(
                "f16[1, 2, 3, 3, 2]",
                shape=(1, 2, 5, 2, 3),
                coords=(IDENTITY, IDENTITY, (2, 0, 4), (2, 0, 1), (1, 0, 2)),
            ),
        ),
    ),
)
