"""Upsampling: torch's rules for coordinates as exact fractions."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from dnnc.frontends.torch.call import Call
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import Expr, const, unwrap
from dnnc.ir.ops.resize import IDENTITY, coordinates, rational
from dnnc.ir.types import Dim

Converter = Callable[[Call], Any]


def upsample(mode: str, rank: int, centred: bool = False) -> Converter:
    """`centred`: nearest by the middle of an element ("nearest-exact"), not by its left end."""

    def convert(c: Call) -> Any:
        x = c.x(next(n for n in ("input", "self", "x") if n in c.args))
        new = c.shape[-rank:]
        corners = c.flag("align_corners")
        coords = [IDENTITY] * (x.type.rank - rank)
        for k, (n, m) in enumerate(zip(x.type.shape[-rank:], new)):
            coords.append(
                IDENTITY if n is m or n == m else coordinate(mode, n, m, factor(c, k, rank), corners, centred)
            )
        if all(k == IDENTITY for k in coords):
            return c.b.identity(x)
        return c.b.resize(x, shape=c.shape, coords=tuple(coords), mode=mode, rounding="floor")

    return convert


def interpolate(c: Call) -> Any:
    """dnnc::interpolate"""
    rank, mode = c.x("x").type.rank - 2, c.get("mode")
    if mode.startswith("nearest"):
        return upsample("nearest", rank, centred=mode == "nearest-exact")(c)
    return upsample("cubic" if mode == "bicubic" else "linear", rank)(c)


def coordinate(
    mode: str, old: Dim, new: Dim, given: float | None, corners: bool, centred: bool
) -> tuple[int, int, int]:
    if corners:
        return coordinates("align_corners", old, new, Fraction(1))
    scale = ratio(old, new) if given is None else rational(given)
    if mode == "nearest" and not centred:
        return coordinates("asymmetric", old, new, scale)
    if mode == "nearest":
        return scale.denominator * 2, scale.denominator, scale.numerator * 2
    return coordinates("half_pixel", old, new, scale)


def ratio(old: Dim, new: Dim) -> Fraction:
    """new / old, which must be known: 2*H from H is 2."""
    if isinstance(old, int) and isinstance(new, int):
        return Fraction(new, old)
    whole = unwrap(const(new) // old) if isinstance(new, Expr) else None
    if isinstance(whole, int) and unwrap(const(old) * whole) is new:
        return Fraction(whole)
    raise UnsupportedError(f"resizing {old} to {new}: expected sizes that are known, or a whole factor between them")


def factor(c: Call, k: int, rank: int) -> float | None:
    """The scale factor of axis k, where the call has stated one."""
    listed = c.args.get("scale_factors")
    if listed is not None:
        return float(listed[k])
    name = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}[rank][k]
    value = c.args.get(name)
    return None if value is None else float(value)


RESIZE: dict[str, Converter] = {
    "dnnc::interpolate": interpolate,
    **{f"upsample_nearest{k}d": upsample("nearest", k) for k in (1, 2, 3)},
    **{f"_upsample_nearest_exact{k}d": upsample("nearest", k, centred=True) for k in (1, 2, 3)},
    "upsample_linear1d": upsample("linear", 1),
    "upsample_bilinear2d": upsample("linear", 2),
    "upsample_trilinear3d": upsample("linear", 3),
    "upsample_bicubic2d": upsample("cubic", 2),
}
