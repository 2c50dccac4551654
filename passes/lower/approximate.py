"""Cheaper quotients and exponentials by fast 1/x and 2^x instructions (GPUs); never strict.

Quotients, of which an exact one takes ten instructions: at most 2 ulp.

    a / c               ->  a * (1/c)            c a power of two: the same number. Others stay exact, for quantized
                                                 models divide by 255, and round; but where all that is stored is of 16
                                                 bits
    a / b               ->  a * recip(b)         b >= 1 for certain: 1 + exp(x), and so on
    exp(x - m) / s      ->  exp(x - m) * recip(s)     m, s numbers of a row: a softmax, whose s is at least 1. The
                                                      compiler computes recip(s) once

Where all that a kernel stores is of 16 bits, or bytes that floats were rounded to, the rounding of the store hides
errors of 2^-18:

    exp(x)                              ->  exp2(x * log2(e))              relative error below 2^-17 for |x| <= 88
    x * 0.5 * (erf(x / sqrt(2)) + 1)    ->  max(x, 0) - |x| * 2^P(|x|)     absolute error below 2e-6; relative to its
                                                                           left tail 6e-4 at x = -3.5
    x * 0.5 * (tanh(u) + 1)             ->  x * recip(1 + exp2(-2 u log2(e)))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container

from dnnc.ir.dtype import DType, f32, i8, u8
from dnnc.ir.expr import Const, Expr, Load, Op, Var, const, fma, maximum, minimum
from dnnc.ir.loops.intrinsics import TABLE
from dnnc.ir.loops.stmt import Buffer, Eval, Kernel, Store, call, walk_stmts

LOG2E = 1.4426950408889634
RECIPROCAL, POWER = "recip", "exp2"  # what a target must spell
ESTIMATE = "estimate"  # of a reciprocal, which such a target supports too
SCALE = "scale"  # by powers of two, in one instruction
PIECE = "piece"  # of a table; a target that supports `scale` supports this
# log2(erfc(t)) = t * (c0 t^4 + ...), weighted with t * erfc(t) above 1e-4: it falls for all t > 0, so 2^P fades out
ERFC = (-0.002685956424102187, 0.02863696776330471, -0.14752762019634247, -0.9190064668655396, -1.6278269290924072)
FAR = 16.0  # gelu(-16) rounds to 0, and 2^P to 0 too
SQRT_HALF = 0.7071067811865476

Rule = Callable[[Op], Expr]


def rules(kernel: Kernel, supported: Collection[str]) -> tuple[Rule, ...]:
    """Rules, in order, for each float32 operation before its operands; a rule may return it unchanged."""
    found: list[Rule] = (
        [exponential, gelu] if POWER in supported and RECIPROCAL in supported and stores_halves(kernel) else []
    )
    terms = softmax_terms(kernel)
    hidden = stores_halves(kernel, integers=False)
    return (*found, lambda e: quotient(e, terms, hidden)) if RECIPROCAL in supported else ()


def stores_halves(kernel: Kernel, integers: bool = True) -> bool:
    """True if the kernel leaves only 16-bit floats in memory (with `integers`: or bytes, and other integers beside)."""
    types: set[DType] = set()
    for s in (s for f in kernel.funcs for s in walk_stmts(f.body)):
        if isinstance(s, Store) and s.buf.space == "global":
            types.add(s.buf.dtype)
        elif isinstance(s, Eval) and s.name == "tma_store":
            types.add(s.args[0].dtype)
        elif isinstance(s, Eval) and not (s.name in TABLE and TABLE[s.name].effect):
            return False  # a function of the kernel, which may store what it is given the address of
    floats = {t for t in types if t.is_float}
    if any(t.bits > 16 for t in floats):
        return False
    return bool(floats or types & {u8, i8}) if integers else bool(floats) and floats == types


def softmax_terms(kernel: Kernel) -> frozenset[Buffer]:
    """Memory of a thread that holds nothing but exp(x - m), m a number of the row."""
    held: dict[Buffer, bool] = {}
    for s in (s for f in kernel.funcs for s in walk_stmts(f.body)):
        if isinstance(s, Store) and s.buf.space in ("register", "local"):
            held[s.buf] = held.get(s.buf, True) and _softmax_term(s.value, frozenset())
    return frozenset(b for b, only in held.items() if only)


def exponential(e: Op) -> Expr:
    """exp(x) -> 2^(x * log2(e))"""
    return call(POWER, e.args[0] * LOG2E) if e.name == "exp" else e


def gelu(e: Op) -> Expr:
    """(x * 0.5) * (f(u) + 1) for f = erf, u = x / sqrt(2), and f = tanh"""
    x = gelu_of(e)
    if x is None:
        return sigmoid_gelu(e, lambda u: call(POWER, u * (-2.0 * LOG2E)))
    t = minimum(call("abs", x), FAR)  # 0 * inf would be NaN
    p: Expr = const(ERFC[0] * SQRT_HALF**5, f32)
    for k, c in enumerate(ERFC[1:]):
        p = fma(t, p, c * SQRT_HALF ** (4 - k))
    return fma(t * -0.5, call(POWER, t * p), maximum(x, 0.0))


def gelu_of(e: Op) -> Expr | None:
    """x of (x * 0.5) * (erf(x / sqrt(2)) + 1)"""
    x, f = _halves(e)
    if x is None or f is None or f.name != "erf":
        return None
    u = f.args[0]
    return x if x in (_constant_of(u, "*", SQRT_HALF), _divided(u, 2**0.5)) else None


def sigmoid_gelu(e: Op, inverse_square: Callable[[Expr], Expr] = lambda u: call("exp", u * -2.0)) -> Expr:
    """(x * 0.5) * (tanh(u) + 1) -> x * recip(1 + exp(-2 u))"""
    x, f = _halves(e)
    return (
        x * call(RECIPROCAL, inverse_square(f.args[0]) + 1.0)
        if x is not None and f is not None and f.name == "tanh"
        else e
    )


def _halves(e: Op) -> tuple[Expr | None, Op | None]:
    """x and f of (x * 0.5) * (f + 1)"""
    if e.name != "*":
        return None, None
    half, one = e.args
    x, f = _constant_of(half, "*", 0.5), _constant_of(one, "+", 1.0)
    return x, f if isinstance(f, Op) else None


def _divided(e: Expr, c: float) -> Expr | None:
    return e.args[0] if isinstance(e, Op) and e.name == "/" and e.args[1] is const(c, f32) else None


def quotient(e: Op, terms: Container[Buffer] = (), hidden: bool = False) -> Expr:
    """a / b -> a * (1 / b). `terms`: memory of softmax terms; `hidden`: a 16-bit store hides an ulp."""
    if e.name != "/":
        return e
    a, b = e.args
    if isinstance(b, Const):
        c = float(b.value)
        return a * (1.0 / c) if 2.0**-126 <= abs(c) <= 2.0**126 and (hidden or abs(math.frexp(c)[0]) == 0.5) else e
    if not (_at_least_one(b) or (_softmax_term(a, terms) and _of_row(b))):
        return e
    r = call(RECIPROCAL, b)
    return r if isinstance(a, Const) and a.value == 1.0 else a * r


def _constant_of(e: Expr, name: str, c: float) -> Expr | None:
    """x of `x * c` (or whatever operation), in either order."""
    if isinstance(e, Op) and e.name == name:
        for x, y in (e.args, e.args[::-1]):
            if isinstance(y, Const) and y is const(c, f32):
                return x
    return None


def _softmax_term(e: Expr, terms: Container[Buffer]) -> bool:
    if isinstance(e, Load):
        return e.buf in terms
    if not isinstance(e, Op):
        return False
    if e.name == POWER:
        scaled = _constant_of(e.args[0], "*", LOG2E)
        e = e if scaled is None else scaled
    elif e.name == "exp":
        e = e.args[0]
    return isinstance(e, Op) and e.name == "-" and _of_row(e.args[1])


def _of_row(e: Expr) -> bool:
    """A number that a thread has in a register, one for each of its rows."""
    return (
        isinstance(e, Load)
        and e.buf.space == "register"
        and e.lanes == 1
        and all(isinstance(i, (Const, Var)) for i in e.idx)
    )


def _at_least_one(e: Expr) -> bool:
    """Is it certain that e >= 1, or NaN?"""
    if isinstance(e, Const):
        return math.isfinite(e.value) and e.value >= 1.0
    if not isinstance(e, Op):
        return False
    if e.name == "+":
        return any(_at_least_one(x) and _not_negative(y) for x, y in (e.args, e.args[::-1]))
    if e.name == "fma":
        return _not_negative(e.args[0] * e.args[1]) and _at_least_one(e.args[2])
    return e.name == "max" and any(map(_at_least_one, e.args))


def _not_negative(e: Expr) -> bool:
    if isinstance(e, Const):
        return e.value >= 0.0
    if not isinstance(e, Op):
        return False
    if e.name == "*":
        return e.args[0] is e.args[1] or all(map(_not_negative, e.args))
    if e.name == "+":
        return all(map(_not_negative, e.args))
    return e.name in ("exp", "exp2", "abs", "sqrt") or (e.name == "max" and any(map(_not_negative, e.args)))
