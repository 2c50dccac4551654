"""Expand intrinsics that a target cannot spell well into arithmetic that every target has: float32 exp, log, erf, tanh.

Targets that spell `recip` and `exp2` get the cheaper forms of `approximate.py` as well.

The polynomials are Chebyshev interpolants, rounded to float32 (fitted with 40 digits); stated errors are maxima over all float32
arguments tested, in units in the last place. Results below the smallest normal number are 0. NaN and infinities follow IEEE.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from dnnc.ir.dtype import f32, i32
from dnnc.ir.expr import Const, E, Expr, Op, cast, const, fma, logical_not, op, rebuild, select
from dnnc.ir.operator.stmt import Block, Func, Kernel, call, map_stmt
from dnnc.passes.operator.approximate import rules

LOG2E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; the high part has 9 significant bits, so n * LN2_HIGH is exact


def horner(x: Expr, coefficients: Sequence[float]) -> Expr:
    """c0*x^n + c1*x^(n-1) + ... in fused steps."""
    r: E = coefficients[0]
    for c in coefficients[1:]:
        r = fma(x, r, c)
    assert isinstance(r, Expr)
    return r


def expand_exp(x: Expr) -> Expr:
    """exp(x) = 2^n * exp(r), n = rint(x / ln 2), |r| <= ln 2 / 2; at most 1 ulp.

    Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits, which are then added to the exponent of exp(r).
    """
    magic = 12582912.0
    clamped = call("fmin", call("fmax", x, -87.33654), 88.72284)
    t = fma(clamped, LOG2E, magic)
    n = t - magic
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, clamped))
    p = horner(r, (1.3941118959337473e-03, 8.375134319067001e-03, 4.166635125875473e-02, 1.6666415333747864e-01, 0.5, 1.0, 1.0))
    bits = op("bits_i32", p, dtype=i32) + call("shl", op("bits_i32", t, dtype=i32), const(23, i32))
    y = op("bits_f32", bits, dtype=f32)
    y = select(x < -87.33654, 0.0, y)
    return select(x < 88.72284, y, x + float("inf"))  # inf from there on, NaN stays


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
    big = 1.0 - expand_exp(q)
    big = select(x < 0.0, 0.0 - big, big)
    r = select(t < 0.92, small, big)
    return select(call("isnan", x), x, r)


def expand_tanh(x: Expr) -> Expr:
    """x + x^3*P(x^2) below 0.63, else 1 - 2/(exp(2|x|) + 1) with the sign of x; at most 2 ulp."""
    t = call("fmin", call("abs", x), 10.0)  # tanh(10) rounds to 1
    s = x * x
    p = (-6.045165006071329e-03, 2.0961329340934753e-02, -5.3843263536691666e-02, 1.333271861076355e-01, -3.33333283662796e-01)
    small = fma(x * s, horner(s, p), x)
    big = 1.0 - 2.0 / (expand_exp(t + t) + 1.0)
    big = select(x < 0.0, 0.0 - big, big)
    r = select(t < 0.63, small, big)
    return select(op("<", const(0.0, f32), s), r, x)  # 0, whose sign the polynomial loses, numbers whose square underflows, NaN


EXPANSIONS: dict[str, Callable[[Expr], Expr]] = {"exp": expand_exp, "log": expand_log, "erf": expand_erf, "tanh": expand_tanh}


def decompose(kernel: Kernel, spelled: Collection[str] = ()) -> Kernel:
    """Replace the float32 intrinsics that have an expansion here and are not in `spelled`, what the target spells being used for others."""
    memo: dict[Expr, Expr] = {}
    cheaper = rules(kernel, spelled)

    def go(e: Expr) -> Expr:
        r = memo.get(e)
        if r is None:
            r = rebuild(e, go)
            for rule in cheaper:
                r = rule(r) if isinstance(r, Op) and r.dtype is f32 else r
            if isinstance(r, Op) and r.name in EXPANSIONS and r.name not in spelled and r.dtype is f32 and not isinstance(r.args[0], Const):
                r = EXPANSIONS[r.name](r.args[0])
            memo[e] = r
        return r

    def block(b: Block) -> Block:
        return tuple(map_stmt(s, go, block) for s in b)

    return Kernel(tuple(Func(f.name, f.params, block(f.body)) for f in kernel.funcs), kernel.locs)
