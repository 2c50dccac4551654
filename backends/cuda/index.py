"""i64 integers (indices, dims, data) as C++: in 32 bits where bounds prove that nothing overflows.

A GPU has no 64-bit integer unit, so an index is an `int` unless its bounds, or those of a partial sum, exceed it. What
has no bounds is data: it wraps around, as unsigned arithmetic does. `narrow` expressions are C++ int, others i64.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from dnnc.ir.bounds import bounds, nonneg
from dnnc.ir.dtype import i64
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import COMPARE, Const, Expr, Linear, Op, Product, Var, value

if TYPE_CHECKING:
    from dnnc.backends.cuda.emit import FuncEmitter

LIMIT = 1 << 31
UNARY, TIMES, PLUS, LESS, EQUAL, AND, XOR, OR, CHOICE = 15, 13, 12, 10, 9, 8, 7, 6, 2  # precedences of C++
INFIX = {"&": AND, "^": XOR, "|": OR, "<": LESS, "<=": LESS, "==": EQUAL, "!=": EQUAL}
LOW = 1  # of what always takes parentheses in another operation: few know how C++ binds shifts and bits
Text = tuple[str, int]  # an expression and the precedence of its outermost operator


def reach(e: Expr) -> int | None:
    """The largest magnitude that the expression or any partial sum or product of it has; None is unknown."""
    if isinstance(e, Linear):
        total = abs(e.const)
        for t, c in e.terms:
            r = reach(t)
            if r is None:
                return None
            total += abs(c) * r
        return total
    if isinstance(e, Product):
        total = 1
        for f in e.factors:
            r = reach(f)
            if r is None:
                return None
            total *= max(r, 1)
        return total
    lo, hi = bounds(e)
    return None if lo is None or hi is None else max(abs(lo), abs(hi))


def narrow(e: Expr) -> bool:
    """Is the C++ type of this i64 expression int?"""
    if e.dtype is not i64 or e.lanes > 1:
        return False
    r = reach(e)
    if r is None or r >= LIMIT:
        return False
    if isinstance(e, (Const, Var)):
        return True
    if isinstance(e, Linear):
        return all(abs(c) < LIMIT and narrow(t) for t, c in e.terms)
    if isinstance(e, Product):
        return all(map(narrow, e.factors))
    if not isinstance(e, Op):
        return False
    if e.name in ("guard", "trusted"):
        return all(map(narrow, e.args[1:]))
    args = e.args[1:] if e.name == "select" else e.args
    return e.name in ("//", "%", "min", "max", "&", "|", "^", "select") and all(map(narrow, args))


def wide(em: FuncEmitter, e: Expr, outer: int = 0) -> str:
    """An expression with the C++ type i64."""
    if isinstance(e, Const):
        return f"{e.value}LL" if e.value > -(1 << 63) else "(-9223372036854775807LL - 1)"
    return f"(i64){em.text(e, UNARY)}" if narrow(e) else em.text(e, outer)


def linear(em: FuncEmitter, e: Linear) -> Text:
    """A sum, what is known first ahead: the compiler hoists the part of it that a loop does not change."""
    ordered = sorted(e.terms, key=lambda tc: em.rank(tc[0]))
    if narrow(e):
        terms = [(_scaled(em.text(t, TIMES), str(abs(c))), c < 0) for t, c in ordered]
        return _sum(terms, str(abs(e.const)) if e.const else "", e.const < 0)
    r = reach(e)
    if r is not None and r < 1 << 63:
        terms = [
            (wide(em, t, PLUS) if abs(c) == 1 else f"{abs(c)}LL*{em.text(t, TIMES + 1)}", c < 0) for t, c in ordered
        ]
        return _sum(terms, str(abs(e.const)) if e.const else "", e.const < 0)
    terms = [(_scaled(f"(u64){em.text(t, UNARY)}", f"{abs(c)}ull"), c < 0) for t, c in ordered]
    text, _ = _sum(terms, f"{abs(e.const)}ull" if e.const else "", e.const < 0)
    return f"(i64)({text})", UNARY


def _scaled(text: str, by: str) -> str:
    return text if by in ("1", "1ull") else f"{by}*{text}"


def _sum(terms: list[tuple[str, bool]], constant: str, minus: bool) -> Text:
    if terms[0][1] and constant and not minus:  # `-a + 7` as `7 - a`
        out, constant = constant, ""
    else:
        out = ("-" if terms[0][1] else "") + terms[0][0]
        terms = terms[1:]
    for t, m in terms:
        out += f" {'-' if m else '+'} {t}"
    if constant:
        out += f" {'-' if minus else '+'} {constant}"
    return out, PLUS


def product(em: FuncEmitter, e: Product) -> Text:
    r = reach(e)
    if r is None or r >= 1 << 63:
        return "(i64)(" + "*".join(f"(u64){em.text(f, UNARY)}" for f in e.factors) + ")", UNARY
    first = em.text(e.factors[0], TIMES) if narrow(e) else wide(em, e.factors[0], TIMES)
    return "*".join([first, *(em.text(f, TIMES + 1) for f in e.factors[1:])]), TIMES


def operation(em: FuncEmitter, e: Op) -> Text | None:
    """An operation on scalar indices; None where it is one on data like any other."""
    if e.lanes > 1 or e.args[-1].dtype is not i64 or any(a.lanes > 1 for a in e.args):
        return None
    if e.name in ("//", "%"):
        return _divide(em, e)
    if e.name in ("min", "max"):
        a, b = (em.text(a) if narrow(e) else wide(em, a) for a in e.args)
        return f"{e.name}({a}, {b})", UNARY
    if e.name in INFIX:
        return infix(em, e)
    if e.name == "select":
        c, a, b = em.text(e.args[0], CHOICE + 1), *(em.text(a, CHOICE + 1) for a in e.args[1:])
        return f"{c} ? {a} : {b}", CHOICE
    if e.name == "guard":
        lo, hi = (em.text(a) if narrow(e) else wide(em, a) for a in e.args[1:])
        return f"guard({em.text(e.args[0])}, {lo}, {hi}, status, {em.unit.number})", UNARY
    if e.name == "trusted":
        return (f"(int){em.text(e.args[0], UNARY)}", UNARY) if narrow(e) else em.spelled(e.args[0])
    return None


def infix(em: FuncEmitter, e: Op) -> Text:
    """A comparison, or bits or truths joined."""
    p = INFIX[e.name]
    if e.name in COMPARE:
        return f"{em.text(e.args[0], p + 1)} {e.name} {em.text(e.args[1], p + 1)}", p
    first = e.args[0]
    chain = isinstance(first, Op) and first.name == e.name and first not in em.temps
    return f"{em.text(first, 0 if chain else TIMES)} {e.name} {em.text(e.args[1], TIMES)}", LOW


def _divide(em: FuncEmitter, e: Op) -> Text:
    """Floor division by a positive number: a shift, unsigned for a non-negative dividend, else corrected."""
    a, b = e.args
    d = value(b)
    if d is not None and d & (d - 1) == 0:
        if e.name == "//":
            return f"{em.text(a, TIMES)} >> {d.bit_length() - 1}", LOW
        return f"{em.text(a, TIMES)} & {d - 1}", LOW
    small = narrow(a) and narrow(b)
    left = em.text(a) if small else wide(em, a)
    if nonneg(a):
        return f"{'udiv' if e.name == '//' else 'umod'}({left}, {em.text(b)})", UNARY
    return f"{'floordiv' if e.name == '//' else 'floorrem'}({left}, {em.text(b) if small else wide(em, b)})", UNARY


def divisor(e: Expr, known: dict[Var, int]) -> int:
    """A number of which the integer expression is a multiple; 0 for the constant 0. `known`: of variables."""
    if isinstance(e, Const):
        return abs(int(e.value))
    if isinstance(e, Var):
        return known.get(e, e.div)
    if isinstance(e, Linear):
        return gcd(e.const, *(c * divisor(t, known) for t, c in e.terms))
    if isinstance(e, Product):
        r = 1
        for f in e.factors:
            r *= divisor(f, known)
        return r
    if isinstance(e, Op) and e.name in ("min", "max", "select", "%"):
        return gcd(*(divisor(a, known) for a in (e.args[1:] if e.name == "select" else e.args)))
    return 1


def constant(e: Expr, what: str) -> int:
    """The value of what must be one. InternalError if it is none."""
    n = value(e)
    if n is None:
        raise InternalError(f"{what} must be constant for CUDA, got {e!r}")
    return n
