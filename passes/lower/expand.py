"""Expand intrinsics that a target cannot spell well into common arithmetic: float32 functions.

Targets that look up tables, `piece`, take coefficients from `dnnc.ir.loops.pieces`. Targets that spell `recip`, and
`exp2`, get the cheaper forms of `approximate.py` as well. Where such a target leaves exp and erf to be expanded, they
are joined with what stands around them: GELU is one power of two, and `exp(x) + a` needs no product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace

from dnnc.ir.dtype import f32, i64, u8, u32
from dnnc.ir.expr import Const, Expr, Op, cast, fma, op, rebuild, select
from dnnc.ir.loops.sharing import with_names
from dnnc.ir.loops.stmt import Block, Func, Kernel, call, map_stmt
from dnnc.passes.lower import elementary, trigonometry
from dnnc.passes.lower.approximate import ESTIMATE, PIECE, RECIPROCAL, SCALE, Rule, gelu_of, rules, sigmoid_gelu
from dnnc.passes.lower.elementary import exp2_parts, exp_parts, expand_tanh, horner, scaled_exp, tanh_by_pieces
from dnnc.passes.lower.requantization import steps

_NAMES = {
    elementary: "exp log erf tanh log1p expm1 pow",
    trigonometry: "sin cos tan asin acos atan sinh cosh asinh acosh atanh",
}
EXPANSIONS: dict[str, Callable[..., Expr]] = {
    n: getattr(module, f"expand_{n}") for module, names in _NAMES.items() for n in names.split()
}


def decompose(kernel: Kernel, supported: Collection[str] = ()) -> Kernel:
    """Expand float32 intrinsics that are not in `supported`; what the target supports serves the others.

    Expansions read their operand often: what long chains of them share gets names, so that a kernel's text grows with
        its operations alone.
    """
    memo: dict[Expr, Expr] = {}
    cheaper = (*rules(kernel, supported), *joined(supported))
    expansions = {name: f for name, f in EXPANSIONS.items() if name not in supported}
    if PIECE in supported and "tanh" in expansions:
        expansions["tanh"] = tanh_by_pieces
    elif ESTIMATE in supported and "tanh" in expansions:
        expansions["tanh"] = lambda x: expand_tanh(x, lambda d: call(ESTIMATE, d))
    if SCALE in supported and "exp" in expansions:
        expansions["exp"] = scaled_exp

    def go(e: Expr) -> Expr:
        r = memo.get(e)
        if r is None:
            r = e
            for rule in cheaper:
                r = rule(r) if isinstance(r, Op) and r.dtype is f32 else r
            r = rebuild(r, go) if r is e else go(r)
            if (
                isinstance(r, Op)
                and r.name in expansions
                and r.dtype is f32
                and not all(isinstance(a, Const) for a in r.args)
            ):
                r = expansions[r.name](*r.args)
            memo[e] = r
        return r

    def block(b: Block) -> Block:
        return tuple(map_stmt(s, go, block) for s in b)

    return replace(kernel, funcs=tuple(with_names(Func(f.name, f.params, block(f.body))) for f in kernel.funcs))


def expand_lookup(i: Expr, *table: Expr) -> Expr:
    """A number of a table by choices, each by a bit of the index, the lowest first."""
    k, left = 0, table
    while len(left) > 1:
        bit = op("shr", i, k) & 1
        left, k = tuple(select(bit.ne(0), b, a) for a, b in zip(left[::2], left[1::2], strict=True)), k + 1
    return left[0]


def expand_recode(i: Expr, *words: Expr) -> Expr:
    """A byte of a table: of the word that the upper bits of the index say, the byte that its lower three say."""
    word = expand_lookup(op("shr", cast(i, u32), 3), *words)
    return cast(op("shr", word, (cast(i, i64) & 7) * 8) & 255, u8)


def joined(supported: Collection[str]) -> tuple[Rule, ...]:
    """Rules for functions that are cheaper in context, where cheaper forms are allowed and expanded."""
    if RECIPROCAL not in supported or "exp" in supported or "erf" in supported:
        return ()
    own: tuple[Rule, ...] = () if SCALE in supported else (fused_exp,)
    return (
        steps,
        lambda e: gelu(x) if (x := gelu_of(e)) is not None else e,
        sigmoid_gelu,
        *own,
        exact_product,
        power_by_roots,
    )


def exact_product(e: Op) -> Expr:
    """x * 2^k + c -> fma(x, 2^k, c): the product has no rounding that could be lost."""
    if e.name == "+":
        for p, c in (e.args, e.args[::-1]):
            if isinstance(p, Op) and p.name == "*":
                x, y = p.args
                if any(isinstance(k, Const) and abs(math.frexp(k.value)[0]) == 0.5 for k in (x, y)):
                    return fma(x, y, c)
    return e


def gelu(x: Expr) -> Expr:
    """max(x, 0) - |x| * 2^P(|x|), 2^P the normal distribution's share beyond |x|: error up to 1.6e-7 of x.

    P falls and is -126 at 10.37, where 2^P is 0. Of h = x / 2, h + |h| is max(x, 0), and NaN for -inf.
    """
    h = x * 0.5
    a = call("abs", h)
    t = call("fmin", a, 10.37 / 2)
    power = horner(t, [c * 2.0**k for k, c in zip(range(8, -1, -1), BEYOND)])
    p, s = exp2_parts(power, by=-2.0)
    return fma(p, t * s, a + h)


# log2 of the share of the normal distribution beyond t, by powers of t; weighted with t and the share itself
BEYOND = (-1.9041262930841185e-06, 2.808472709148191e-05, -1.3162406685296446e-04, -2.7165148640051484e-04,
7.244759704917669e-03,
          -5.2627045661211014e-02, -4.591623842716217e-01, -1.1511110067367554e00, -1.0)  # fmt: skip


QUARTERS = frozenset((-3, -2, -1, *range(1, 11), 12, 16))  # others take more roundings than a logarithm


def power_by_roots(e: Op) -> Expr:
    """pow(x, k / 4) -> products of x, sqrt(x) and sqrt(sqrt(x)), for k in QUARTERS; at most 3 ulp.

    x^0.75 -> sqrt(x) * sqrt(sqrt(x));  x^-0.5 -> 1 / sqrt(x);  x^3 -> x * x * x

    No step leaves the range of numbers where the result does not, denormal results apart, which need not be 0. As C has
    it, roots of -0.0 are those of 0.0, and roots of -inf those of inf; of other negative numbers they are NaN.
    """
    if e.name != "pow" or not isinstance(e.args[1], Const) or isinstance(e.args[0], Const):
        return e
    x, quarters = e.args[0], 4 * float(e.args[1].value)
    if quarters not in QUARTERS:
        return e
    whole, part = divmod(int(abs(quarters)), 4)
    if part:
        x = select(op("==", x, float("-inf")), float("inf"), x) + 0.0  # -0.0 + 0.0 is 0.0
    root, square = call("sqrt", x), x * x
    factors = [[], [x], [square], [square, x], [square, square]][whole] + [
        [],
        [call("sqrt", root)],
        [root],
        [root, call("sqrt", root)],
    ][part]
    r = factors[0]
    for f in factors[1:]:
        r = r * f
    return r if quarters > 0 else 1.0 / r


def fused_exp(e: Op) -> Expr:
    """exp(x) + a -> fma(p, s, a)"""
    if e.name == "+":
        for x, a in (e.args, e.args[::-1]):
            if isinstance(x, Op) and x.name == "exp" and not isinstance(x.args[0], Const):
                return fma(*exp_parts(x.args[0]), a)
    return e
