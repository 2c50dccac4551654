"""Converters of Resize and Upsample: each version's sizes and coordinates become exact fractions of `resize`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call, number
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ModelError, UnsupportedError, count
from dnnc.ir.expr import const, unwrap
from dnnc.ir.graph import Value
from dnnc.ir.ops.resize import IDENTITY, coordinates, rational
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import Dim

Converter = Callable[[Call], Any]
MODES = {"nearest": "nearest", "linear": "linear", "bilinear": "linear", "cubic": "cubic"}


@dataclass
class _Axis:
    """What becomes of one axis."""

    axis: int
    size: Dim
    scale: Fraction
    roi: tuple[float, float] = (0.0, 1.0)


def upsample(c: Call) -> Any:
    """Scales are attributes in opset 1 and 7, input 1 in opset 9."""
    x = c.x()
    if c.has(1):
        scales: Sequence[float] = [float(s) for s in c.array(1, "scales").reshape(-1)]
    elif "scales" in c.attrs:
        scales = c.numbers("scales") or ()
    else:
        scales = (1.0, 1.0, c.number("height_scale", 1.0), c.number("width_scale", 1.0))
    return _resized(c, x, _by_scales(x, range(x.type.rank), scales), "asymmetric", "floor")


def resize(c: Call) -> Any:
    x = c.x()
    if c.opset < 11:
        scales = [float(s) for s in c.array(1, "scales").reshape(-1)]
        return _resized(c, x, _by_scales(x, range(x.type.rank), scales), "asymmetric", "floor")
    axes = [normalize_axis(a, x.type.rank) for a in c.integers("axes") or range(x.type.rank)]
    if c.has(2) and c.type_of(2).size != 0:
        plan = _by_scales(x, axes, [float(s) for s in c.array(2, "scales").reshape(-1)])
    elif c.has(3):
        plan = _by_sizes(c, x, axes, c.dims(3, "sizes"))
    else:
        raise ModelError("neither scales nor sizes are given")
    mode = c.text("coordinate_transformation_mode", "half_pixel")
    if mode == "tf_crop_and_resize":
        roi = [float(r) for r in c.array(1, "roi").reshape(-1)]
        for k, p in enumerate(plan):
            p.roi = (roi[k], roi[len(plan) + k])
    return _resized(c, x, plan, mode, c.text("nearest_mode", "round_prefer_floor"))


def _by_scales(x: Value, axes: Sequence[int], scales: Sequence[float]) -> list[_Axis]:
    if len(scales) != len(axes) or any(s <= 0 for s in scales):
        raise ModelError(f"scales {list(scales)} must be {len(axes)} positive numbers")
    out = []
    for a, s in zip(axes, scales):
        f = rational(s)
        out.append(_Axis(a, unwrap((const(x.type.shape[a]) * f.numerator) // f.denominator), f))
    return out


def _by_sizes(c: Call, x: Value, axes: Sequence[int], sizes: Sequence[Dim]) -> list[_Axis]:
    if len(sizes) != len(axes):
        raise ModelError(f"sizes {list(sizes)} must be {count(len(axes), 'number')}")
    policy = c.text("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return [_Axis(a, n, _ratio(n, x.type.shape[a])) for a, n in zip(axes, sizes)]
    choose = {"not_larger": min, "not_smaller": max}.get(policy)
    if choose is None:
        raise ModelError(f"attribute keep_aspect_ratio_policy cannot be {policy!r}")
    old = [number(x.type.shape[a], "a dim that is resized") for a in axes]
    scale = choose(Fraction(number(n, "a size"), o) for n, o in zip(sizes, old))
    return [_Axis(a, math.floor(scale * o + Fraction(1, 2)), scale) for a, o in zip(axes, old)]


def _ratio(new: Dim, old: Dim) -> Fraction:
    if new is old:
        return Fraction(1)
    whole = unwrap(const(new) // old) if not isinstance(new, int) else None
    if isinstance(whole, int) and unwrap(const(old) * whole) is new:  # 2*H from H
        return Fraction(whole)
    return Fraction(number(new, "a size"), number(old, "a dim that is resized"))


def _resized(c: Call, x: Value, plan: Sequence[_Axis], mode: str, rounding: str) -> Any:
    how = c.text("mode", "nearest")
    if how not in MODES:
        raise UnsupportedError(f"attribute mode is {how!r}; known are {', '.join(MODES)}")
    if MODES[how] != "nearest" and not x.type.dtype.is_float:  # bytes of a quantized model; floats are truncated
        return c.b.cast(_resized(c, c.b.cast(x, to=f32), plan, mode, rounding), to=x.type.dtype)
    if c.flag("antialias") and how != "nearest":
        return _antialiased(c, x, plan, mode, MODES[how])
    shape, coords = list(x.type.shape), [IDENTITY] * x.type.rank
    for p in plan:
        same = p.scale == 1 and p.size == shape[p.axis] and mode != "tf_crop_and_resize"
        coords[p.axis] = IDENTITY if same else _coordinate(mode, shape[p.axis], p)
        shape[p.axis] = p.size
    if all(k == IDENTITY for k in coords):
        return x
    cubic, exclude = c.number("cubic_coeff_a", -0.75), c.flag("exclude_outside")
    outside = c.number("extrapolation_value", 0.0) if mode == "tf_crop_and_resize" else None
    return c.b.resize(
        x,
        shape=tuple(shape),
        coords=tuple(coords),
        mode=MODES[how],
        rounding=rounding,
        cubic=cubic,
        exclude_outside=exclude,
        extrapolation=outside,
    )


def _coordinate(mode: str, old: Dim, p: _Axis) -> tuple[int, int, int]:
    if mode == "tf_half_pixel_for_nn":  # (i + 1/2) / scale
        return p.scale.denominator * 2, p.scale.denominator, p.scale.numerator * 2
    if mode == "align_corners" and p.size != 1:  # the resized length is taken before it is rounded
        n = number(old, "a dim that is resized with align_corners")
        slope = (n - 1) / (p.scale * n - 1)
        return slope.numerator, 0, slope.denominator
    return coordinates(mode, old, p.size, p.scale, p.roi)


# --- antialiasing: a matrix product per axis --------------------------------------------------------------------------


def _antialiased(c: Call, x: Value, plan: Sequence[_Axis], mode: str, how: str) -> Value:
    for p in plan:
        old, new = number(x.type.shape[p.axis], "a dim that is resized"), number(p.size, "a size")
        if p.scale == 1 and old == new:
            continue
        mul, add, div = _coordinate(mode, old, p)
        at = (np.arange(new) * mul + add) / div
        m = _matrix(at, old, min(float(p.scale), 1.0), how, c.number("cubic_coeff_a", -0.75), c.flag("exclude_outside"))
        last = [k for k in range(x.type.rank) if k != p.axis] + [p.axis]
        y = c.b.matmul(c.b.transpose(x, perm=tuple(last)), c.const(m.T, x.type.dtype))
        x = c.b.transpose(y, perm=tuple(last.index(k) for k in range(x.type.rank)))
    return x


def _matrix(
    at: np.ndarray[Any, Any], old: int, scale: float, how: str, a: float, exclude: bool
) -> np.ndarray[Any, Any]:
    """Return weights [new, old] of a kernel stretched by 1/scale around `at`; taps outside count for the border."""
    reach = 1 if how == "linear" else 2
    start = math.floor(-reach / scale) + 1
    out = np.zeros((len(at), old))
    for row, x in zip(out, at):
        base = math.ceil(x) - 1
        taps = np.arange(start, start + 2 * reach - 2 * start)
        w = _kernel(np.abs((taps - (x - base)) * scale), how, a)
        if exclude:
            w = np.where((base + taps >= 0) & (base + taps < old), w, 0)
        np.add.at(row, np.clip(base + taps, 0, old - 1), w / w.sum())
    return out


def _kernel(t: np.ndarray[Any, Any], how: str, a: float) -> np.ndarray[Any, Any]:
    near, far = ((a + 2) * t - (a + 3)) * t * t + 1, ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    w: np.ndarray[Any, Any] = (
        np.maximum(1 - t, 0) if how == "linear" else np.where(t <= 1, near, np.where(t < 2, far, 0))
    )
    return w


RESIZE: dict[str, Converter] = {"Resize": resize, "Upsample": upsample}
