"""Expansions of float32 trigonometric and hyperbolic functions into common arithmetic; see `elementary.py`."""

from __future__ import annotations

import math

from dnnc.ir.dtype import f32, f64, i32, i64
from dnnc.ir.expr import Expr, cast, const, fma, minimum, op, select
from dnnc.ir.loops.stmt import call
from dnnc.passes.lower.elementary import EXPM1, LN2_HIGH, LN2_LOW, LOG2E, expand_log1p, horner, power_of_two, signed

# (sin(r) / r - 1) / r^2, and (cos(r) - 1 + r^2 / 2) / r^4, of r^2, |r| <= pi / 4
SIN = (-1.9587890710681677e-04, 8.332747966051102e-03, -1.66666641831398e-01)
COS = (2.454794230288826e-05, -1.388830249197781e-03, 4.16666641831398e-02)
ATAN = (
    8.520492166280746e-02,
    -1.4024142920970917e-01,
    1.9991238415241241e-01,
    -3.333328664302826e-01,
)  # (atan(y) / y - 1) / y^2, |y| <= tan(pi / 8)
ASIN = (
    3.808502480387688e-02,
    2.6554541662335396e-02,
    4.5001380145549774e-02,
    7.498855143785477e-02,
    1.6666673123836517e-01,
)  # likewise, |s| <= 1/2
HALF_PI, HALF_PI_LOW = 1.5707963705062866, -4.371139000186241e-08  # float32 numbers whose sum is pi / 2
LN2 = 0.6931471824645996

# (limit, three parts): below the limit, and where it is not below the one before, |x| * 2 / pi is |x| times the sum of
# the parts, up to multiples of 4. From the second row on |x| is a multiple of a power of two, 2^27, 2^54, 2^81, and the
# parts are those of (2 / pi times that power) mod 4, over it. The first two have 29 bits, so that their products with a
# float32 number are exact in float64.
QUARTER_TURNS = (
    (2.0**50, "0x1.45f306ep-1", "-0x1.b1bbeadp-32", "-0x1.80f62a0b82b2dp-62"),
    (2.0**77, "-0x1.1b1bbebp-28", "0x1.4fe13acp-59", "-0x1.70565911f924fp-91"),
    (2.0**104, "0x1.4a7f09dp-54", "0x1.7d1f535p-84", "-0x1.11f924eb53362p-115"),
    (float("inf"), "-0x1.505c159p-81", "-0x1.911f925p-111", "0x1.4acc9e21c8210p-143"),
)
LOW_BITS_MAGIC = 1.5 * 2.0**52  # what is added to it has its integer in the low bits of the sum
QUARTER_MAGIC = 12583037.0  # 1.5 * 2^23 + 125


def expand_sin(x: Expr) -> Expr:
    """Of any finite number; at most 1.5 ulp."""
    quadrant, r = _reduced(call("abs", x))
    value = select(_odd(quadrant), _cos(r), _sin(r))
    return _flipped(value, _second_bit(quadrant) ^ _sign(x))


def expand_cos(x: Expr) -> Expr:
    """Of any finite number; at most 1.5 ulp."""
    quadrant, r = _reduced(call("abs", x))
    value = select(_odd(quadrant), _sin(r), _cos(r))
    return _flipped(value, _second_bit(quadrant + const(1, i32)))


def expand_tan(x: Expr) -> Expr:
    """Of any finite number; at most 3 ulp. tan(r + pi / 2) = -cos(r) / sin(r)."""
    quadrant, r = _reduced(call("abs", x))
    s, c, odd = _sin(r), _cos(r), _odd(quadrant)
    value = select(odd, c, s) / select(odd, s, c)
    return _flipped(value, call("shl", quadrant, const(31, i32)) ^ _sign(x))


def _reduced(a: Expr) -> tuple[Expr, Expr]:
    """a = n * pi / 2 + r, |r| <= pi / 4, for finite float32 a >= 0: n as an i32 (low bits), and r; NaN of infinity.

    In float64 the integers of the two exact products are taken off before the rests are added, so that no digit is
    lost: no float32 comes closer to a multiple of pi / 2 than 2^-29 of a quarter turn or so (Payne and Hanek 1983).
    """
    wide = cast(a, f64)
    products = []
    for k in (1, 2, 3):
        part = const(float.fromhex(QUARTER_TURNS[-1][k]), f64)  # type: ignore[arg-type]
        for limit, *parts in reversed(QUARTER_TURNS[:-1]):
            part = select(a < limit, const(float.fromhex(parts[k - 1]), f64), part)
        products.append(wide * part)
    whole = [call("rint", p) for p in products[:2]]
    turns = (products[0] - whole[0]) + (products[1] - whole[1]) + products[2]
    last = call("rint", turns)
    n = op("bits_i64", whole[0] + whole[1] + last + LOW_BITS_MAGIC, dtype=i64)
    return cast(n, i32), cast((turns - last) * 1.5707963267948966, f32)


def _sin(r: Expr) -> Expr:
    z = r * r
    return fma(r * z, horner(z, SIN), r)


def _cos(r: Expr) -> Expr:
    z = r * r
    return fma(z * z, horner(z, COS), fma(z, -0.5, 1.0))


def _odd(quadrant: Expr) -> Expr:
    return (quadrant & const(1, i32)).ne(const(0, i32))


def _second_bit(quadrant: Expr) -> Expr:
    """Where the sign of a float32 is."""
    return call("shl", quadrant & const(2, i32), const(30, i32))


def _sign(x: Expr) -> Expr:
    return op("bits_i32", x, dtype=i32) & const(-(2**31), i32)


def _flipped(value: Expr, sign: Expr) -> Expr:
    return op("bits_f32", op("bits_i32", value, dtype=i32) ^ sign, dtype=f32)


def expand_atan(x: Expr) -> Expr:
    """atan(a) = k * pi / 4 + atan(y), y = a, (a - 1) / (a + 1) or -1 / a, |y| <= tan(pi / 8), x's sign; 3 ulp."""
    a = call("abs", x)
    middle, large = a > 0.4142135679721832, a > 2.4142136573791504
    y = select(large, -1.0, select(middle, a - 1.0, a)) / select(large, a, select(middle, a + 1.0, 1.0))
    z = y * y
    p = fma(y * z, horner(z, ATAN), y)
    high = select(large, HALF_PI, select(middle, const(HALF_PI / 2, f32), 0.0))
    low = select(large, HALF_PI_LOW, select(middle, const(HALF_PI_LOW / 2, f32), 0.0))
    return signed(high + (p + low), x)


def expand_asin(x: Expr) -> Expr:
    """pi / 2 - 2 * asin(sqrt((1 - |x|) / 2)) from 1/2 on, with the sign of x; at most 2.5 ulp."""
    large, p = _small_asin(x)
    return signed(select(large, fma(p, -2.0, HALF_PI) + HALF_PI_LOW, p), x)


def expand_acos(x: Expr) -> Expr:
    """2 * asin(sqrt((1 - |x|) / 2)), or pi less that, from 1/2 on, else pi / 2 - asin(x); at most 2.5 ulp."""
    large, p = _small_asin(x)
    far = select(x < 0.0, fma(p, -2.0, 2 * HALF_PI) + 2 * HALF_PI_LOW, p * 2.0)
    return select(large, far, HALF_PI - (signed(p, x) - HALF_PI_LOW))


def _small_asin(x: Expr) -> tuple[Expr, Expr]:
    """Is |x| above 1/2, and asin of sqrt((1 - |x|) / 2) there, else of |x|; NaN above 1."""
    a = call("abs", x)
    large = a > 0.5
    z = select(large, fma(a, -0.5, 0.5), a * a)
    s = select(large, call("sqrt", z), a)
    return large, fma(s * z, horner(z, ASIN), s)


def expand_sinh(x: Expr) -> Expr:
    """2 * (u + u / (4 * u + 1)), u = (exp(|x|) - 1) / 4, with the sign of x; at most 2.5 ulp."""
    a = call("abs", x)
    s, q = _quarter_exp(a)
    u = fma(s, q, s - 0.25)
    return select(a < 1e-4, x, signed((u + u / fma(u, 4.0, 1.0)) * 2.0, x))


def expand_cosh(x: Expr) -> Expr:
    """2 * (u + 1 / (16 * u)), u = exp(|x|) / 4; at most 2 ulp."""
    s, q = _quarter_exp(call("abs", x))
    u = fma(s, q, s)
    return (u + 0.0625 / u) * 2.0


def _quarter_exp(a: Expr) -> tuple[Expr, Expr]:
    """Return s, q: exp(a) / 4 = s * (q + 1), a >= 0, as in `expand_expm1`; a quarter avoids overflow."""
    near = minimum(a, 89.5)
    t = fma(near, LOG2E, QUARTER_MAGIC)
    n = t - QUARTER_MAGIC
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, near))
    return power_of_two(t), fma(r * r, horner(r, EXPM1), r)


def expand_asinh(x: Expr) -> Expr:
    """log1p(a + a^2 / (1 + sqrt(a^2 + 1))), a = |x|, with x's sign; log(2 a) for large a; at most 3 ulp."""
    a = call("abs", x)
    square = a * a
    return signed(_log1p_or_double(a, a + square / (call("sqrt", square + 1.0) + 1.0)), x)


def expand_acosh(x: Expr) -> Expr:
    """log1p(t + sqrt(t^2 + 2 t)), t = x - 1, and NaN below 1; at most 3 ulp."""
    t = x - 1.0  # below -2 the product is positive again, and its root rounds to -t
    return _log1p_or_double(x, select(t < 0.0, const(math.nan, f32), t + call("sqrt", fma(t, t, t * 2.0))))


def _log1p_or_double(x: Expr, y: Expr) -> Expr:
    """log1p(y), and log(2 x) = log1p(x) + log(2) from 2^33 on."""
    large = x > 2.0**33
    return expand_log1p(select(large, x, y)) + select(large, const(LN2, f32), 0.0)


def expand_atanh(x: Expr) -> Expr:
    """log1p(2 a / (1 - a)) / 2, a = |x|, with the sign of x; at most 3 ulp."""
    a = call("abs", x)
    return select(a < 1e-4, x, signed(expand_log1p((a * 2.0) / (1.0 - a)) * 0.5, x))
