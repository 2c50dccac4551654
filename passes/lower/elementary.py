"""Expansions of float32 exp, log, erf, tanh, log1p, expm1 and pow into arithmetic that every target has.

The polynomials are Chebyshev interpolants, rounded to float32 (fitted with 40 digits); stated errors are maxima over
all float32 arguments tested, in ulp. Results below the smallest normal number are 0. NaN and infinities follow IEEE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dnnc.ir.dtype import f32, i32
from dnnc.ir.expr import Const, E, Expr, Op, cast, const, fma, logical_not, maximum, minimum, op, select
from dnnc.ir.loops import pieces
from dnnc.ir.loops.stmt import call
from dnnc.passes.lower.approximate import PIECE, SCALE

LOG2E = 1.4426950408889634
ROUNDING_MAGIC = 12582912.0  # 1.5 * 2^23
ROUNDING_BITS = 0x4B400000  # its bits
POWER_MAGIC = 12583038.0  # 1.5 * 2^23 + 126
INTEGER_MAGIC = 12583039.0  # 1.5 * 2^23 + 127
LN2_HIGH, LN2_LOW = (
    0.693359375,
    -2.12194440e-4,
)  # their sum is ln 2; the high part has 9 significant bits, so n * LN2_HIGH is exact

LEAST_EXP = -87.33654  # above -126 * ln 2
# 2 * exp(r), |r| <= ln 2 / 2
EXP = (
    1.657872088253498e-02,
    8.379635214805603e-02,
    3.3335304260253906e-01,
    9.999829530715942e-01,
    1.9999994039535522e00,
    2.0,
)
EXP_NEAR = (0.5, 1.0000146627426147)  # (exp(r) - 1) / r, |r| <= ln 2 / 64
# (exp(r) - 1 - r) / r^2, |r| <= ln 2 / 2
EXPM1 = (
    1.98910798644647e-04,
    1.3933731243014336e-03,
    8.33331048488617e-03,
    4.1666463017463684e-02,
    1.666666716337204e-01,
    0.5,
)
TWO_OVER_LN2, TWO_OVER_LN2_LOW = 2.885390043258667, 3.851926067000022e-08
ATANH = (
    3.3659467101097107e-01,
    4.119010269641876e-01,
    5.770797729492188e-01,
    9.617967009544373e-01,
)  # 2 / ln 2 * (atanh(q) - q) / q^3, of q^2
EXP2 = (
    1.5453163359779865e-04,
    1.3390863314270973e-03,
    9.618083015084267e-03,
    5.5503569543361664e-02,
    2.4022650718688965e-01,
    6.931471824645996e-01,
)
ROOTS_MAGIC = 393216.0  # 1.5 * 2^18: what is added to it is rounded to 32nds


def horner(x: Expr, coefficients: Sequence[float]) -> Expr:
    """c0*x^n + c1*x^(n-1) + ... in fused steps."""
    r: E = coefficients[0]
    for c in coefficients[1:]:
        r = fma(x, r, c)
    assert isinstance(r, Expr)
    return r


def exp_parts(x: Expr, clamp: bool = True) -> tuple[Expr, Expr]:
    """exp(x) as p * s, s a power of two: p = 2 * exp(r), s = 2^(n - 1), n = rint(x / ln 2), |r| <= ln 2 / 2.

    Adding 1.5 * 2^23 + 126 rounds to an integer and leaves n + 126 in the low bits, where it is shifted into the
    exponent of s. That is 0 at n = -126 and 2^127 at n = 128; `clamp` keeps x between these and hands on NaN.
    """
    x = minimum(maximum(x, -87.5), 89.0) if clamp else x
    t = fma(x, LOG2E, POWER_MAGIC)
    n = t - POWER_MAGIC
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    return horner(r, EXP), power_of_two(t)


def scaled_exp(x: Expr) -> Expr:
    """exp(x) = 2^(i / 32) * exp(r) * 2^floor(n), n = rint(32 x / ln 2) / 32, i its low five bits; at most 1.8 ulp.

    For targets that look up tables, and multiply by any power of two with no need of limits to x: where x is so large
    that r may be anything, exp(r), a parabola without zeros, is above 0 or infinite, and where it is NaN for an
    infinite n, `scale` gives what n says. Denormal results are made 0, for CPUs take a hundred cycles for one.
    """
    t = fma(x, LOG2E, ROOTS_MAGIC)
    n = t - ROOTS_MAGIC
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    root = call(PIECE, t, const(pieces.ROOTS, i32))
    return select(_below(x, LEAST_EXP), 0.0, call(SCALE, fma(root, r * horner(r, EXP_NEAR), root), n))


def _below(x: Expr, limit: float) -> Expr:
    """x < limit, for negated x without the negation, which products take for free: 0 - y < c -> -c < y."""
    if isinstance(x, Op) and x.name == "-" and isinstance(x.args[0], Const) and x.args[0].value == 0:
        return const(-limit, f32) < x.args[1]
    return x < limit


def exp2_parts(x: Expr, by: float = 1.0) -> tuple[Expr, Expr]:
    """`by` * 2^x as p * s in the same way, -126 <= x < 128, `by` a power of two; at most 2 ulp."""
    t = x + POWER_MAGIC
    r = x - (t - POWER_MAGIC)
    c = (
        2.6539396494627e-03,
        1.9342783838510513e-02,
        1.110142171382904e-01,
        4.804449081420898e-01,
        1.3862940073013306e00,
        2.0,
    )
    p = horner(r, [by * k for k in c])
    return p, power_of_two(t)


def power_of_two(t: Expr) -> Expr:
    return op("bits_f32", call("shl", op("bits_i32", t, dtype=i32), const(23, i32)), dtype=f32)


def expand_exp(x: Expr) -> Expr:
    """At most 2 ulp; 0 where the result is below 2^-125.5."""
    return product(exp_parts(x))


def product(parts: tuple[Expr, Expr]) -> Expr:
    return parts[0] * parts[1]


def expand_log(x: Expr) -> Expr:
    """log(x) = e * ln 2 + log1p(f), 1 + f in [sqrt(1/2), sqrt(2)); at most 1 ulp."""
    e, m = exponent_and_mantissa(x)
    return _logarithm(x, x, cast(e, f32), m - 1.0)


def expand_log1p(x: Expr) -> Expr:
    """log(1 + x) = e * ln 2 + log1p(f), 1 + f = (1 + x) / 2^e with the sum's rounding error; at most 1.5 ulp."""
    u = x + 1.0
    lost = select(call("abs", x) < 1.0, x - (u - 1.0), 1.0 - (u - x))
    e, m = exponent_and_mantissa(u)
    unit = _two_to(0 - minimum(e, 126))  # above 2^25 what is lost is as nothing
    return select(
        call("abs", x) < 1e-8, x, _logarithm(x, u, cast(e, f32), fma(lost, unit, m - 1.0))
    )  # -0.0, too, is its own


def exponent_and_mantissa(x: Expr) -> tuple[Expr, Expr]:
    """x = m * 2^e, m in [sqrt(1/2), sqrt(2)), e an i32, for positive finite x; meaningless otherwise."""
    tiny = x < 1.17549435e-38
    scaled = select(tiny, x * 8388608.0, x)  # denormals: 2^23 more
    bits = op("bits_i32", scaled, dtype=i32)
    # the exponent is counted from sqrt(1/2), so that m - 1 is small on both sides of 1
    e = call("shr", bits - 0x3F3504F3, const(23, i32))
    m = op("bits_f32", bits - call("shl", e, const(23, i32)), dtype=f32)
    return e - select(tiny, const(23, i32), 0), m


def _logarithm(x: Expr, u: Expr, e: Expr, f: Expr) -> Expr:
    """log(u), u = (1 + f) * 2^e, and what it is at the ends of u's range; x is infinite and NaN where u is."""
    p = horner(f, (6.971611827611923e-02, -1.1479733884334564e-01, 1.1685419827699661e-01, -1.2425687164068222e-01,
    1.4249058067798615e-01,
                   -1.666780263185501e-01, 2.0000715553760529e-01, -2.499999701976776e-01,
                   3.333333134651184e-01))  # fmt: skip
    f2 = f * f
    tail = fma(e, LN2_LOW, fma(f2, -0.5, f * f2 * p))
    r = fma(e, LN2_HIGH, f + tail)
    r = select(op("==", x, float("inf")), float("inf"), r)
    r = select(op("==", u, 0.0), float("-inf"), r)
    return select(logical_not(op("<=", const(0.0, f32), u)), float("nan"), r)  # negative or NaN


def expand_expm1(x: Expr) -> Expr:
    """exp(x) - 1 = 2^n * (q + 1) - 1, q = exp(r) - 1, n = rint(x / ln 2), |r| <= ln 2 / 2; at most 1.5 ulp."""
    near = minimum(maximum(x, -87.0), 89.0)
    t = fma(near, LOG2E, POWER_MAGIC)
    n = t - POWER_MAGIC
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, near))
    q = fma(r * r, horner(r, EXPM1), r)
    s = power_of_two(t)  # 2^(n - 1)
    return select(call("abs", x) < 1e-8, x, fma(s, q, s - 0.5) * 2.0)  # -0.0, too, is its own


def expand_pow(x: Expr, y: Expr) -> Expr:
    """x^y = 2^(y * log2 |x|), the logarithm in two float32 numbers; at most 1 ulp for |y| <= 13, and 3.5 ulp.

    log2 |x| = e + 2 / ln 2 * (q + q^3/3 + ...), q = (m - 1) / (m + 1), |q| <= 0.1716: the cubic term is a hundredth of
    the first, so that only e, q and their products need a second number. Results below 2^-126 are 0. Signs and the ends
    of the ranges are those of C's pow.
    """
    a = call("abs", x)
    e, m = exponent_and_mantissa(a)
    # q + q_low = (m - 1) / (m + 1), of which the difference is exact and the sum loses `lost`
    over, under = m - 1.0, m + 1.0
    lost = m - (under - 1.0)
    inverse = 1.0 / under
    q = over * inverse
    q_low = fma(q, 0.0 - lost, fma(q, 0.0 - under, over)) * inverse
    z = q * q
    first, slope = q * TWO_OVER_LN2, fma(z, TWO_OVER_LN2, TWO_OVER_LN2)
    rest = fma(q, TWO_OVER_LN2, 0.0 - first) + fma(q, TWO_OVER_LN2_LOW, fma(q_low, slope, q * z * horner(z, ATANH)))
    high, low = _two_sum(cast(e, f32), first)
    high, low = _two_sum(high, low + rest)
    power = y * high
    more = fma(y, high, 0.0 - power) + y * low
    power = minimum(maximum(power, -160.0), 160.0)
    t = power + ROUNDING_MAGIC
    r = power - (t - ROUNDING_MAGIC) + minimum(maximum(more, -1.0), 1.0)
    p = fma(r, horner(r, EXP2), 1.0)
    # 2^n in two steps, for n may leave the range of exponents where p brings the product back
    n = op("bits_i32", t, dtype=i32) - ROUNDING_BITS
    half = call("shr", n, const(1, i32))
    r = p * _two_to(half) * _two_to(n - half)
    r = select(r < 1.17549435e-38, 0.0, r)
    infinite = const(float("inf"), f32)
    r = select(op("==", a, 0.0) | op("==", a, infinite), select((y < 0.0).eq(op("==", a, 0.0)), infinite, 0.0), r)
    r = select(op("==", call("abs", y), infinite), select((y < 0.0).eq(a < 1.0), infinite, 0.0), r)
    whole, half_y = op("==", call("floor", y), y), y * 0.5
    odd = whole & call("floor", half_y).ne(half_y)
    negative = op("bits_i32", x, dtype=i32) < 0
    r = select(
        negative, select(odd, -0.0 - r, select(whole | op("==", a, 0.0) | op("==", a, infinite), r, float("nan"))), r
    )
    r = select(call("isnan", x) | call("isnan", y), float("nan"), r)
    return select(op("==", y, 0.0) | op("==", x, 1.0) | (op("==", a, 1.0) & op("==", call("abs", y), infinite)), 1.0, r)


def _two_sum(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """a + b rounded, and the rounding error; exact if a is 0 or |a| >= |b| (Dekker 1971)."""
    s = a + b
    return s, b - (s - a)


def _two_to(n: Expr) -> Expr:
    """2^n of an integer from -126 to 127."""
    return op("bits_f32", call("shl", n + 127, const(23, i32)), dtype=f32)


def expand_erf(x: Expr) -> Expr:
    """x + x*P(x^2) below 0.92, else 1 - exp(Q(|x|)) with the sign of x; at most 2 ulp."""
    t = call("fmin", call("abs", x), 4.0)  # erf(4) rounds to 1; NaN is handled below
    s = x * x
    small = fma(x, horner(s, (-5.967310862615705e-04, 4.9889059737324715e-03, -2.6763994246721268e-02,
    1.1281754076480865e-01,
                              -3.7612488865852356e-01, 1.2837915122509003e-01)), x)  # fmt: skip
    q = horner(t, (1.6435697034467012e-06, -4.6177912736311555e-05, 5.977434921078384e-04, -4.76357527077198e-03,
    2.6431018486618996e-02,
                   -1.1009448021650314e-01, -6.318145394325256e-01, -1.1302375793457031e00,
                   3.2044152612797916e-04))  # fmt: skip
    big = 1.0 - product(exp_parts(q, clamp=False))
    big = select(x < 0.0, 0.0 - big, big)
    r = select(t < 0.92, small, big)
    return select(call("isnan", x), x, r)


def expand_tanh(x: Expr, estimate: Callable[[Expr], Expr] = lambda d: 1.0 / d) -> Expr:
    """h / (h + 1) with the sign of x, h = (exp(2|x|) - 1) / 2; at most 2 ulp. `estimate`: of 1 / d, to 2^-14.

    With n = rint(2|x| / ln 2) and r = |x| - n * ln 2 / 2, h = 2^n * (exp(2r) - 1) / 2 + (2^n - 1) / 2. From n = 1 on, h
    >= 0.2, so that few digits cancel, and below n = 0 none. One step makes r: what ln 2 lacks as a float32 is nothing
    for n = 1, and h / (h + 1) near 1 for others.
    """
    t = minimum(call("abs", x), 10.0)  # tanh(10) rounds to 1; NaN stays
    shifted = fma(t, 2 * LOG2E, INTEGER_MAGIC)
    n = shifted - INTEGER_MAGIC
    r = fma(n, -(LN2_HIGH + LN2_LOW) / 2, t)
    q = horner(
        r,
        (
            4.442405700683594e-02,
            1.338646113872528e-01,
            3.333376049995422e-01,
            6.666617393493652e-01,
            9.99999940395355e-01,
        ),
    )
    s = power_of_two(shifted)
    h = fma(s, fma(r, r * q, r), fma(s, 0.5, -0.5))
    c = estimate(h + 1.0)
    y = h * c
    return signed(fma(fma(call("neg", y), h, h - y), c, y), x)  # less what is wrong with h = y * (h + 1)


def tanh_by_pieces(x: Expr) -> Expr:
    """Polynomial of degree 5 about the nearest of 32 points, one of them 0, with the sign of x; at most 1.8 ulp."""
    a = minimum(call("abs", x), pieces.LIMIT)
    t = fma(a, 1 / pieces.WIDTH, ROUNDING_MAGIC)
    r = fma(t - ROUNDING_MAGIC, -pieces.WIDTH, a)
    y, *rest = (call(PIECE, t, const(k, i32)) for k in reversed(pieces.TANH))
    for c in rest:
        y = fma(r, y, c)
    return signed(y, x)


def signed(a: Expr, x: Expr) -> Expr:
    """a >= 0 or NaN with the sign of x."""
    sign = op("&", op("bits_i32", x, dtype=i32), const(-(2**31), i32))
    return op("bits_f32", op("|", op("bits_i32", a, dtype=i32), sign), dtype=f32)
