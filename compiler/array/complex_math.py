"""Functions of complex numbers, as pairs of real values. A program sees real numbers only, which fuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dnnc.array.lazy import Lazy, apply
from dnnc.ir.dtype import i16, i32, i64

Pair = Sequence[Lazy]


def _c(like: Lazy, value: float) -> Lazy:
    return apply("full", shape=(), value=value, dtype=like.type.dtype)


def add(a: Pair, b: Pair) -> Pair:
    return apply("add", a[0], b[0]), apply("add", a[1], b[1])


def sub(a: Pair, b: Pair) -> Pair:
    return apply("sub", a[0], b[0]), apply("sub", a[1], b[1])


def mul(a: Pair, b: Pair) -> Pair:
    re = apply("sub", apply("mul", a[0], b[0]), apply("mul", a[1], b[1]))
    return re, apply("add", apply("mul", a[0], b[1]), apply("mul", a[1], b[0]))


def scaled(a: Pair, s: Lazy) -> Pair:
    return apply("mul", a[0], s), apply("mul", a[1], s)


def times_i(a: Pair) -> Pair:
    return apply("neg", a[1]), a[0]


def over_i(a: Pair) -> Pair:
    return a[1], apply("neg", a[0])


def shifted(a: Pair, by: float) -> Pair:
    return apply("add", a[0], _c(a[0], by)), a[1]


def div(a: Pair, b: Pair) -> Pair:
    """Smith's way: by the ratio of the parts of b, which cannot overflow."""
    flat = apply("greater_equal", apply("abs", b[0]), apply("abs", b[1]))
    big, small = apply("where", flat, b[0], b[1]), apply("where", flat, b[1], b[0])
    r = apply("where", apply("equal", big, _c(big, 0)), _c(big, 0), apply("div", small, big))
    d = apply("add", big, apply("mul", small, r))
    p, q = apply("where", flat, a[0], a[1]), apply("where", flat, a[1], a[0])
    re = apply("div", apply("add", p, apply("mul", q, r)), d)
    im = apply("div", apply("sub", q, apply("mul", p, r)), d)
    return re, apply("where", flat, im, apply("neg", im))


def reciprocal(a: Pair) -> Pair:
    return div((_c(a[0], 1), _c(a[0], 0)), a)


def modulus(a: Pair) -> Lazy:
    """|a| without overflow on the way."""
    p, q = apply("abs", a[0]), apply("abs", a[1])
    big, small = apply("max", p, q), apply("min", p, q)
    r = apply("div", small, big)
    long = apply("mul", big, apply("sqrt", apply("add", apply("mul", r, r), _c(r, 1))))
    long = apply("where", apply("equal", big, _c(big, 0)), big, long)
    infinite = apply("logical_or", apply("isinf", p), apply("isinf", q))
    return apply("where", infinite, _c(p, math.inf), long)


def _negative(p: Lazy) -> Lazy:
    bits = apply("bit_cast", p, to={2: i16, 4: i32, 8: i64}[p.type.dtype.bytes])
    return apply("less", bits, apply("full", shape=(), value=0, dtype=bits.type.dtype))


def _signed(p: Lazy, q: Lazy) -> Lazy:
    """|p| with the sign of q."""
    return apply("where", _negative(q), apply("neg", apply("abs", p)), apply("abs", p))


def angle(y: Lazy, x: Lazy) -> Lazy:
    """atan2: the arc of the smaller over the larger, put into its octant."""
    p, q = apply("abs", y), apply("abs", x)
    big, small = apply("max", p, q), apply("min", p, q)
    r = apply("where", apply("equal", big, small), _c(big, 1), apply("div", small, big))  # infinite ones too
    r = apply("where", apply("equal", big, _c(big, 0)), _c(big, 0), r)
    t = apply("atan", r)
    t = apply("where", apply("greater", p, q), apply("sub", _c(t, math.pi / 2), t), t)
    t = apply("where", _negative(x), apply("sub", _c(t, math.pi), t), t)
    nan = apply("logical_or", apply("isnan", x), apply("isnan", y))
    return apply("where", nan, apply("add", x, y), _signed(t, y))


def sign(a: Pair) -> Pair:
    m = modulus(a)
    zero = apply("equal", m, _c(m, 0))
    one = apply("where", zero, _c(m, 1), m)
    return tuple(apply("where", zero, _c(m, 0), apply("div", p, one)) for p in a)


# --- tests ------------------------------------------------------------------------------------------------------------


def _is(p: Lazy, value: float) -> Lazy:
    return apply("equal", p, _c(p, value))


def _finite(p: Lazy) -> Lazy:
    return apply("less", apply("abs", p), _c(p, math.inf))


def _both(a: Lazy, b: Lazy) -> Lazy:
    return apply("logical_and", a, b)


def _either(a: Lazy, b: Lazy) -> Lazy:
    return apply("logical_or", a, b)


def _not(a: Lazy) -> Lazy:
    return apply("logical_not", a)


def _where(c: Lazy, a: Lazy | float, b: Lazy) -> Lazy:
    return apply("where", c, a if isinstance(a, Lazy) else _c(b, a), b)


# --- exponentials and logarithms --------------------------------------------------------------------------------------
#
# What C99 (annex G) asks of infinities and NaN beside a zero part, or without a direction, stands in the `_where`s.


def exp(a: Pair) -> Pair:
    x, y = a
    e = apply("exp", x)
    lost = _not(_finite(y))
    vanishes, grows = _both(_is(x, -math.inf), lost), _both(_is(x, math.inf), lost)
    re = _where(_is(y, 0), e, apply("mul", e, apply("cos", y)))
    im = _where(_is(y, 0), y, apply("mul", e, apply("sin", y)))
    return _where(vanishes, 0, _where(grows, math.inf, re)), _where(vanishes, 0, _where(grows, math.nan, im))


def expm1(a: Pair) -> Pair:
    """expm1(x) cos y - 2 sin(y/2)^2 keeps what a subtraction of 1 would lose."""
    x, y = a
    h = apply("sin", apply("mul", y, _c(y, 0.5)))
    re = apply("sub", apply("mul", apply("expm1", x), apply("cos", y)), apply("mul", _c(h, 2), apply("mul", h, h)))
    lost = _not(_finite(y))
    re = _where(_both(_is(x, -math.inf), lost), -1, _where(_both(_is(x, math.inf), lost), math.inf, re))
    real = _where(_is(x, 0), 0, apply("expm1", x))  # of -0 + 0i it is 0
    return _where(_is(y, 0), real, re), exp(a)[1]


def log(a: Pair) -> Pair:
    return apply("log", modulus(a)), angle(a[1], a[0])


def log1p(a: Pair) -> Pair:
    """Half of log1p(2x + x^2 + y^2) where a is small."""
    x, y = a
    inner = apply("add", apply("mul", x, apply("add", x, _c(x, 2))), apply("mul", y, y))
    small = apply("less", apply("max", apply("abs", x), apply("abs", y)), _c(x, 0.5))
    near = apply("mul", _c(x, 0.5), apply("log1p", inner))
    far = log(shifted(a, 1))
    return apply("where", small, near, far[0]), far[1]


def sqrt(a: Pair) -> Pair:
    """The part that does not cancel from the modulus, the other one from it."""
    m = modulus(a)
    h = apply("sqrt", apply("add", apply("mul", m, _c(m, 0.5)), apply("mul", apply("abs", a[0]), _c(m, 0.5))))
    other = apply(
        "where", apply("equal", h, _c(h, 0)), _c(h, 0), apply("div", apply("mul", apply("abs", a[1]), _c(h, 0.5)), h)
    )
    tall = apply("isinf", a[1])
    h, other = _where(tall, math.inf, h), _where(tall, math.inf, other)
    right = apply("logical_not", _negative(a[0]))
    return apply("where", right, h, other), _signed(apply("where", right, other, h), a[1])


def pow(a: Pair, b: Pair) -> Pair:
    made = exp(mul(b, log(a)))
    zero = apply("logical_and", apply("equal", a[0], _c(a[0], 0)), apply("equal", a[1], _c(a[1], 0)))
    none = apply("logical_and", apply("equal", b[0], _c(b[0], 0)), apply("equal", b[1], _c(b[1], 0)))
    re = apply("where", zero, _c(a[0], 0), made[0])
    im = apply("where", apply("logical_or", zero, none), _c(a[0], 0), made[1])
    return apply("where", none, _c(a[0], 1), re), im


def sinh(a: Pair) -> Pair:
    x, y = a
    lost = _both(apply("isinf", x), _not(_finite(y)))
    re = _where(_is(x, 0), x, _where(lost, x, apply("mul", apply("sinh", x), apply("cos", y))))
    return re, _where(_is(y, 0), y, _where(lost, math.nan, apply("mul", apply("cosh", x), apply("sin", y))))


def cosh(a: Pair) -> Pair:
    x, y = a
    lost = _both(apply("isinf", x), _not(_finite(y)))
    flat = apply("mul", _signed(_c(x, 0), x), _signed(_c(y, 1), y))
    re = _where(_is(y, 0), apply("cosh", x), _where(lost, math.inf, apply("mul", apply("cosh", x), apply("cos", y))))
    im = _where(lost, math.nan, apply("mul", apply("sinh", x), apply("sin", y)))
    return re, _where(_either(_is(x, 0), _is(y, 0)), flat, im)


def tanh(a: Pair) -> Pair:
    """(sinh 2x + i sin 2y) / (cosh 2x + cos 2y); from x = 20 on it is 1, where these would overflow later."""
    x, y = a
    z = apply("clip", x, low=-20.0, high=20.0)
    x2, y2 = apply("add", z, z), apply("add", y, y)
    d = apply("add", apply("cosh", x2), apply("cos", y2))
    wave = apply("sin", y2)
    re, im = apply("div", apply("sinh", x2), d), apply("div", wave, d)
    far = apply("isinf", x)
    zero = _where(_finite(y), _signed(_c(y, 0), y), _c(y, 0))
    return _where(_is(x, 0), x, _where(far, _signed(_c(x, 1), x), re)), _where(_is(y, 0), y, _where(far, zero, im))


def sin(a: Pair) -> Pair:
    return over_i(sinh(times_i(a)))


def cos(a: Pair) -> Pair:
    return cosh(times_i(a))


def tan(a: Pair) -> Pair:
    return over_i(tanh(times_i(a)))


LARGE = 1e6  # from which on a^2 + 1 is a^2 but for rounding, in float64 to 1e-12


def asinh(a: Pair) -> Pair:
    """log(a + sqrt(a^2 + 1)) for a > 0, log(2a) for large a, mirrored for a < 0, where the sum would cancel."""
    x, y = a
    r = (apply("abs", x), y)
    near = log(add(r, sqrt(shifted(mul(r, r), 1))))
    large = _either(apply("greater", r[0], _c(x, LARGE)), apply("greater", apply("abs", y), _c(y, LARGE)))
    far = apply("add", apply("log", modulus(r)), _c(x, math.log(2)))
    re = _signed(_where(large, far, near[0]), x)
    return re, _where(_is(y, 0), y, _where(large, angle(y, r[0]), near[1]))


def acosh(a: Pair) -> Pair:
    """i acos(a), turned to the right half."""
    re, im = acos(a)
    return apply("abs", im), _signed(re, a[1])


def atanh(a: Pair) -> Pair:
    x, y = a
    minus = (apply("neg", x), apply("neg", y))
    re, im = scaled(sub(log1p(a), log1p(minus)), _c(x, 0.5))
    far = _either(apply("isinf", x), apply("isinf", y))
    right = _where(apply("isnan", y), math.nan, _signed(_c(y, math.pi / 2), y))
    return _where(_is(x, 0), x, _where(far, _signed(_c(x, 0), x), re)), _where(far, right, im)


def asin(a: Pair) -> Pair:
    return over_i(asinh(times_i(a)))


def acos(a: Pair) -> Pair:
    s = asin(a)
    return apply("sub", _c(s[0], math.pi / 2), s[0]), apply("neg", s[1])


def atan(a: Pair) -> Pair:
    return over_i(atanh(times_i(a)))


FUNCTIONS: dict[str, Callable[[Pair], Pair]] = {
    "exp": exp, "expm1": expm1, "log": log, "log1p": log1p, "sqrt": sqrt, "sin": sin, "cos": cos, "tan": tan,
    "asin": asin, "acos": acos,
    "atan": atan, "sinh": sinh, "cosh": cosh, "tanh": tanh, "asinh": asinh, "acosh": acosh, "atanh": atanh,
}  # fmt: skip
