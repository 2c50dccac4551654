"""Expand intrinsics that a target cannot spell well into arithmetic that every target has: float32 exp, log, erf, tanh.

Targets that look up tables, `piece`, take coefficients from `pieces.py`. Targets that spell `recip`, and `exp2`, get the cheaper forms of
`approximate.py` as well. Where such a target leaves exp and erf to be
expanded, they are joined with what stands around them: GELU is one power of two, and `exp(x) + a` needs no product.

The polynomials are Chebyshev interpolants, rounded to float32 (fitted with 40 digits); stated errors are maxima over all float32
arguments tested, in units in the last place. Results below the smallest normal number are 0. NaN and infinities follow IEEE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from dnnc.ir.dtype import f32, i32
from dnnc.ir.expr import Const, E, Expr, Op, cast, const, fma, logical_not, maximum, minimum, op, rebuild, select
from dnnc.ir.operator import pieces
from dnnc.ir.operator.sharing import with_names
from dnnc.ir.operator.stmt import Block, Func, Kernel, call, map_stmt
from dnnc.passes.operator.approximate import ESTIMATE, PIECE, RECIPROCAL, SCALE, Rule, gelu_of, rules, sigmoid_gelu

LOG2E = 1.4426950408889634
ROUNDING_MAGIC = 12582912.0  # 1.5 * 2^23
POWER_MAGIC = 12583038.0  # 1.5 * 2^23 + 126
INTEGER_MAGIC = 12583039.0  # 1.5 * 2^23 + 127
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; the high part has 9 significant bits, so n * LN2_HIGH is exact

LEAST_EXP = -87.33654  # above -126 * ln 2
# 2 * exp(r), |r| <= ln 2 / 2
EXP = (1.657872088253498e-02, 8.379635214805603e-02, 3.3335304260253906e-01, 9.999829530715942e-01, 1.9999994039535522e00, 2.0)
EXP_NEAR = (0.5, 1.0000146627426147)  # (exp(r) - 1) / r, |r| <= ln 2 / 64
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

    Adding 1.5 * 2^23 + 126 rounds to an integer and leaves n + 126 in the low bits, where it is shifted into the exponent of s. That is 0 at
    n = -126 and 2^127 at n = 128; `clamp` keeps x between these. NaN stays: min and max with a number as the second operand hand it on.
    """
    x = minimum(maximum(x, -87.5), 89.0) if clamp else x
    t = fma(x, LOG2E, POWER_MAGIC)
    n = t - POWER_MAGIC
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    return horner(r, EXP), _shifted(t)


def scaled_exp(x: Expr) -> Expr:
    """exp(x) = 2^(i / 32) * exp(r) * 2^floor(n), n = rint(32 x / ln 2) / 32, i its low five bits; at most 1.8 ulp.

    For targets that look up tables, and multiply by any power of two with no need of limits to x: where x is so large that r may be anything,
    exp(r), a parabola without zeros, is above 0 or infinite, and where it is NaN for an infinite n, `scale` gives what n says. Results below the
    normal numbers are made 0, for CPUs take a hundred cycles for one.
    """
    t = fma(x, LOG2E, ROOTS_MAGIC)
    n = t - ROOTS_MAGIC
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    root = call(PIECE, t, const(pieces.ROOTS, i32))
    return select(_below(x, LEAST_EXP), 0.0, call(SCALE, fma(root, r * horner(r, EXP_NEAR), root), n))


def _below(x: Expr, limit: float) -> Expr:
    """x < limit, and of a negated number without the negation, which multiplications take for free: 0 - y < c -> -c < y."""
    if isinstance(x, Op) and x.name == "-" and isinstance(x.args[0], Const) and x.args[0].value == 0:
        return const(-limit, f32) < x.args[1]
    return x < limit


def exp2_parts(x: Expr, by: float = 1.0) -> tuple[Expr, Expr]:
    """`by` * 2^x as p * s in the same way, -126 <= x < 128, `by` a power of two; at most 2 ulp."""
    t = x + POWER_MAGIC
    r = x - (t - POWER_MAGIC)
    c = (2.6539396494627e-03, 1.9342783838510513e-02, 1.110142171382904e-01, 4.804449081420898e-01, 1.3862940073013306e00, 2.0)
    p = horner(r, [by * k for k in c])
    return p, _shifted(t)


def _shifted(t: Expr) -> Expr:
    return op("bits_f32", call("shl", op("bits_i32", t, dtype=i32), const(23, i32)), dtype=f32)


def expand_exp(x: Expr) -> Expr:
    """At most 2 ulp; 0 where the result is below 2^-125.5."""
    return product(exp_parts(x))


def product(parts: tuple[Expr, Expr]) -> Expr:
    return parts[0] * parts[1]


def expand_log(x: Expr) -> Expr:
    """log(x) = e * ln 2 + log1p(f), 1 + f in [sqrt(1/2), sqrt(2)); at most 1 ulp."""
    tiny = x < 1.17549435e-38
    scaled = select(tiny, x * 8388608.0, x)  # denormals: 2^23 more
    bits = op("bits_i32", scaled, dtype=i32)
    # the exponent is counted from sqrt(1/2), so that f is small on both sides of 1
    shifted = bits - 0x3F3504F3
    e = call("shr", shifted, const(23, i32))
    m = op("bits_f32", bits - call("shl", e, const(23, i32)), dtype=f32)
    ef = cast(e, f32) - select(tiny, const(23.0, f32), 0.0)
    f = m - 1.0
    p = horner(f, (6.971611827611923e-02, -1.1479733884334564e-01, 1.1685419827699661e-01, -1.2425687164068222e-01, 1.4249058067798615e-01,
                   -1.666780263185501e-01, 2.0000715553760529e-01, -2.499999701976776e-01, 3.333333134651184e-01))  # fmt: skip
    f2 = f * f
    tail = fma(ef, LN2_LOW, fma(f2, -0.5, f * f2 * p))
    r = fma(ef, LN2_HIGH, f + tail)
    r = select(op("==", x, float("inf")), float("inf"), r)
    r = select(op("==", x, 0.0), float("-inf"), r)
    return select(logical_not(op("<=", const(0.0, f32), x)), float("nan"), r)  # negative or NaN


def expand_erf(x: Expr) -> Expr:
    """x + x*P(x^2) below 0.92, else 1 - exp(Q(|x|)) with the sign of x; at most 2 ulp."""
    t = call("fmin", call("abs", x), 4.0)  # erf(4) rounds to 1; NaN is handled below
    s = x * x
    small = fma(x, horner(s, (-5.967310862615705e-04, 4.9889059737324715e-03, -2.6763994246721268e-02, 1.1281754076480865e-01,
                              -3.7612488865852356e-01, 1.2837915122509003e-01)), x)  # fmt: skip
    q = horner(t, (1.6435697034467012e-06, -4.6177912736311555e-05, 5.977434921078384e-04, -4.76357527077198e-03, 2.6431018486618996e-02,
                   -1.1009448021650314e-01, -6.318145394325256e-01, -1.1302375793457031e00, 3.2044152612797916e-04))  # fmt: skip
    big = 1.0 - product(exp_parts(q, clamp=False))
    big = select(x < 0.0, 0.0 - big, big)
    r = select(t < 0.92, small, big)
    return select(call("isnan", x), x, r)


def expand_tanh(x: Expr, estimate: Callable[[Expr], Expr] = lambda d: 1.0 / d) -> Expr:
    """h / (h + 1) with the sign of x, h = (exp(2|x|) - 1) / 2; at most 2 ulp. `estimate`: of 1 / d, to 2^-14.

    With n = rint(2|x| / ln 2) and r = |x| - n * ln 2 / 2, h = 2^n * (exp(2r) - 1) / 2 + (2^n - 1) / 2. From n = 1 on, h >= 0.2, so that few
    digits cancel, and below n = 0 none. One step makes r: what ln 2 lacks as a float32 is nothing for n = 1, and h / (h + 1) near 1 for others.
    """
    t = minimum(call("abs", x), 10.0)  # tanh(10) rounds to 1; NaN stays
    shifted = fma(t, 2 * LOG2E, INTEGER_MAGIC)
    n = shifted - INTEGER_MAGIC
    r = fma(n, -(LN2_HIGH + LN2_LOW) / 2, t)
    q = horner(r, (4.442405700683594e-02, 1.338646113872528e-01, 3.333376049995422e-01, 6.666617393493652e-01, 9.99999940395355e-01))
    s = _shifted(shifted)
    h = fma(s, fma(r, r * q, r), fma(s, 0.5, -0.5))
    c = estimate(h + 1.0)
    y = h * c
    return _signed(fma(fma(call("neg", y), h, h - y), c, y), x)  # less what is wrong with h = y * (h + 1)


def tanh_by_pieces(x: Expr) -> Expr:
    """A polynomial of degree 5 about the nearest of 32 points, of which 0 is one, with the sign of x; at most 1.8 ulp."""
    a = minimum(call("abs", x), pieces.LIMIT)
    t = fma(a, 1 / pieces.WIDTH, ROUNDING_MAGIC)
    r = fma(t - ROUNDING_MAGIC, -pieces.WIDTH, a)
    y, *rest = (call(PIECE, t, const(k, i32)) for k in reversed(pieces.TANH))
    for c in rest:
        y = fma(r, y, c)
    return _signed(y, x)


def _signed(a: Expr, x: Expr) -> Expr:
    """a >= 0 or NaN with the sign of x."""
    sign = op("&", op("bits_i32", x, dtype=i32), const(-(2**31), i32))
    return op("bits_f32", op("|", op("bits_i32", a, dtype=i32), sign), dtype=f32)


def gelu(x: Expr) -> Expr:
    """max(x, 0) - |x| * 2^P(|x|), 2^P the share of the normal distribution beyond |x|: off by at most 1.6e-7 of x, as what it replaces.

    P falls and is -126 at 10.37, where 2^P is 0. Of h = x / 2, h + |h| is max(x, 0), and as the definition has it NaN for -inf.
    """
    h = x * 0.5
    a = call("abs", h)
    t = call("fmin", a, 10.37 / 2)
    power = horner(t, [c * 2.0**k for k, c in zip(range(8, -1, -1), BEYOND)])
    p, s = exp2_parts(power, by=-2.0)
    return fma(p, t * s, a + h)


# log2 of the share of the normal distribution beyond t, by powers of t; weighted with t and the share itself
BEYOND = (-1.9041262930841185e-06, 2.808472709148191e-05, -1.3162406685296446e-04, -2.7165148640051484e-04, 7.244759704917669e-03,
          -5.2627045661211014e-02, -4.591623842716217e-01, -1.1511110067367554e00, -1.0)  # fmt: skip

EXPANSIONS: dict[str, Callable[[Expr], Expr]] = {"exp": expand_exp, "log": expand_log, "erf": expand_erf, "tanh": expand_tanh}


def decompose(kernel: Kernel, spelled: Collection[str] = ()) -> Kernel:
    """Replace the float32 intrinsics that have an expansion here and are not in `spelled`, what the target spells being used for others.

    Expansions read their operand often: what long chains of them share gets names, so that a kernel's text grows with its operations alone.
    """
    memo: dict[Expr, Expr] = {}
    cheaper = (*rules(kernel, spelled), *joined(spelled))
    expansions = {name: f for name, f in EXPANSIONS.items() if name not in spelled}
    if PIECE in spelled and "tanh" in expansions:
        expansions["tanh"] = tanh_by_pieces
    elif ESTIMATE in spelled and "tanh" in expansions:
        expansions["tanh"] = lambda x: expand_tanh(x, lambda d: call(ESTIMATE, d))
    if SCALE in spelled and "exp" in expansions:
        expansions["exp"] = scaled_exp

    def go(e: Expr) -> Expr:
        r = memo.get(e)
        if r is None:
            r = e
            for rule in cheaper:
                r = rule(r) if isinstance(r, Op) and r.dtype is f32 else r
            r = rebuild(r, go) if r is e else go(r)
            if isinstance(r, Op) and r.name in expansions and r.dtype is f32 and not isinstance(r.args[0], Const):
                r = expansions[r.name](r.args[0])
            memo[e] = r
        return r

    def block(b: Block) -> Block:
        return tuple(map_stmt(s, go, block) for s in b)

    return replace(kernel, funcs=tuple(with_names(Func(f.name, f.params, block(f.body))) for f in kernel.funcs))


def joined(spelled: Collection[str]) -> tuple[Rule, ...]:
    """Rules for functions that are cheaper with what stands around them, where cheaper forms are allowed and they are expanded at all."""
    if RECIPROCAL not in spelled or "exp" in spelled or "erf" in spelled:
        return ()
    own: tuple[Rule, ...] = () if SCALE in spelled else (fused_exp,)
    return (lambda e: gelu(x) if (x := gelu_of(e)) is not None else e, sigmoid_gelu, *own, exact_product)


def exact_product(e: Op) -> Expr:
    """x * 2^k + c -> fma(x, 2^k, c): the product has no rounding that could be lost."""
    if e.name == "+":
        for p, c in (e.args, e.args[::-1]):
            if isinstance(p, Op) and p.name == "*":
                x, y = p.args
                if any(isinstance(k, Const) and abs(math.frexp(k.value)[0]) == 0.5 for k in (x, y)):
                    return fma(x, y, c)
    return e


def fused_exp(e: Op) -> Expr:
    """exp(x) + a -> fma(p, s, a)"""
    if e.name == "+":
        for x, a in (e.args, e.args[::-1]):
            if isinstance(x, Op) and x.name == "exp" and not isinstance(x.args[0], Const):
                return fma(*exp_parts(x.args[0]), a)
    return e
