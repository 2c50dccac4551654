"""Integer arithmetic in normal form: `c0 + c1*t1 + ...` over sorted terms; `//`, `%`, min, max, comparisons fold.

The rule table of the one simplifier: rules stand as comments where applied. All rules hold for floor semantics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import gcd
from typing import Any

from dnnc.ir.bounds import bounds, nonneg
from dnnc.ir.dtype import boolean, i64
from dnnc.ir.expr import (
    COMPARE,
    Arithmetic,
    Expr,
    Linear,
    Op,
    Product,
    Terms,
    Var,
    const,
    factors,
    intern,
    op,
    product,
    sort_key,
    terms,
    value,
)

_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "//": lambda a, b: a // b, "%": lambda a, b: a % b, "min": min, "max": max, "<": lambda a, b: a < b, "<=": lambda a,
    b: a <= b,
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "&": lambda a, b: a & b, "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
}  # fmt: skip


@lru_cache(1 << 13)  # nine of ten operations have been done before, most of them not long ago
def integer(name: str, a: Expr, b: Expr) -> Expr:
    """An operation on two integers of type i64. ValueError: a divisor that is not positive."""
    if name == "+":
        return combine(a, b, 1)
    if name == "-":
        return combine(a, b, -1)
    if name == "*":
        return multiply(a, b)
    x, y, dtype = value(a), value(b), boolean if name in COMPARE else i64
    if x is not None and y is not None and name in _FOLD and (y > 0 or name not in ("//", "%")):
        return const(_FOLD[name](x, y), dtype)
    if name in ("//", "%"):
        return _divmod(name, a, b)
    if name in ("min", "max"):
        return _minmax(name, a, b)
    if name in COMPARE:
        return _compare(name, a, b)
    return intern(Op, dtype, 1, name, (a, b))  # type: ignore[no-any-return]


def combine(a: Expr, b: Expr, sign: int) -> Expr:
    (ta, ca), (tb, cb) = terms(a), terms(b)
    if not tb:
        return _linear(dict(ta), ca + sign * cb, sorted_=True) if cb else a
    if not ta and not ca and sign == 1:
        return b
    acc = dict(ta)
    for t, c in tb:
        acc[t] = acc.get(t, 0) + sign * c
    return _linear(acc, ca + sign * cb)


def _linear(acc: Terms, c0: int, sorted_: bool = False) -> Expr:
    items = [(t, c) for t, c in acc.items() if c]
    if not items:
        return const(c0, i64)
    if len(items) == 1 and items[0][1] == 1 and c0 == 0:
        return items[0][0]
    if not sorted_:
        if len(items) > 1 and any(type(t) is Op and t.name == "%" for t, _ in items):
            joined = _rejoin(acc, c0)
            if joined is not None:
                return joined
        items.sort(key=lambda tc: sort_key(tc[0]))
    return intern(Linear, i64, 1, tuple(items), c0)  # type: ignore[no-any-return]


def _rejoin(acc: Terms, c0: int) -> Expr | None:
    # k*d*(a//d) + k*(a%d) -> k*a ;  k*d*((a//d)%m) + k*(a%d) -> k*(a % (d*m))
    for t, k in acc.items():
        if not (k and type(t) is Op and t.name == "%"):
            continue
        a, d = t.args
        quotient = op("//", a, d)
        dv = value(d)
        if dv is None:
            for q, kq in acc.items():
                if (
                    kq == k
                    and type(q) is Product
                    and quotient in q.factors
                    and product([f for f in q.factors if f is not quotient]) is d
                ):
                    return _linear({x: c for x, c in acc.items() if x is not t and x is not q}, c0) + a * k
            continue
        if acc.get(quotient) == k * dv:
            rest = {x: c for x, c in acc.items() if x is not t and x is not quotient}
            return _linear(rest, c0) + a * k
        for q, kq in acc.items():
            if (
                kq == k * dv
                and type(q) is Op
                and q.name == "%"
                and q.args[0] is quotient
                and value(q.args[1]) is not None
            ):
                rest = {x: c for x, c in acc.items() if x is not t and x is not q}
                return _linear(rest, c0) + op("%", a, dv * value(q.args[1])) * k  # type: ignore[operator]
    return None


def multiply(a: Expr, b: Expr) -> Expr:
    (ta, ca), (tb, cb) = terms(a), terms(b)
    if not tb and cb == 1:
        return a
    if not ta and ca == 1:
        return b
    if not tb:
        return _linear({t: c * cb for t, c in ta}, ca * cb, sorted_=cb != 0)
    if not ta:
        return _linear({t: c * ca for t, c in tb}, ca * cb, sorted_=ca != 0)
    acc: Terms = {}
    for x, c in ta:
        for y, d in tb:
            p = product([*factors(x), *factors(y)])
            acc[p] = acc.get(p, 0) + c * d
        acc[x] = acc.get(x, 0) + c * cb
    for y, d in tb:
        acc[y] = acc.get(y, 0) + ca * d
    return _linear(acc, ca * cb)


def _divides(d: int, t: Expr, c: int) -> bool:
    """Is c*t a multiple of d, by its coefficient and the known divisors of its factors?"""
    for f in factors(t):
        if isinstance(f, Var):
            c *= f.div
    return c % d == 0


def _divmod(name: str, a: Expr, by: Expr) -> Expr:
    d = value(by)
    if d is None:
        return _divmod_symbolic(name, a, by)
    if d <= 0:
        raise ValueError(f"{a!r} {name} {d}: only positive divisors have a meaning here")
    if d == 1:
        return a if name == "//" else const(0)
    ts, c0 = terms(a)
    whole = {t: c for t, c in ts if c % d == 0}  # (8*x + r) // 4 -> 2*x + r // 4 ;  % 4 -> r % 4
    known = {t: c for t, c in ts if c % d and _divides(d, t, c)} if name == "%" else {}
    whole_const = c0 - c0 % d
    rest = _linear({t: c for t, c in ts if t not in whole and t not in known}, c0 - whole_const)
    lo, hi = bounds(rest)
    if lo is not None and lo < 0 <= lo + whole_const:  # (i - r + 4) // 2 keeps what makes its dividend not negative
        up = -(lo // d) * d
        rest, whole_const, lo, hi = rest + up, whole_const - up, lo + up, None if hi is None else hi + up
    quotient = _linear({t: c // d for t, c in whole.items()}, whole_const // d) if name == "//" else None
    if lo is not None and hi is not None and lo // d == hi // d:  # the rest stays within one period
        return quotient + lo // d if quotient is not None else rest - lo // d * d
    if isinstance(rest, Op) and rest.name in ("//", "%") and (inner := value(rest.args[1])) is not None:
        if name == "//" and rest.name == "//":  # (x // a) // b -> x // (a*b)
            return quotient + op("//", rest.args[0], inner * d)  # type: ignore[operator]
        if name == "%" and rest.name == "%" and inner % d == 0:  # (x % (a*b)) % b -> x % b
            return op("%", rest.args[0], d)
    if quotient is not None:
        return quotient + _raw("//", rest, by)
    return _raw("%", rest, by)


def _raw(name: str, a: Expr, b: Expr) -> Expr:
    return intern(Op, i64, 1, name, (a, b))  # type: ignore[no-any-return]


def _without(have: tuple[Expr, ...], need: tuple[Expr, ...]) -> list[Expr] | None:
    """The factors that remain after division by those in need, or None if it does not come out even."""
    left = list(have)
    for f in need:
        if f not in left:
            return None
        left.remove(f)
    return left


def _divmod_symbolic(name: str, a: Expr, by: Expr) -> Expr:
    if a is by:
        return const(1) if name == "//" else const(0)
    (ts, c0), (tb, cb) = terms(a), terms(by)
    g = gcd(c0, cb, *(c for _, c in (*ts, *tb)))
    if g > 1:  # (g*x) // (g*y) -> x // y ;  (g*x) % (g*y) -> g * (x % y)
        x, y = (_linear({t: c // g for t, c in own}, c1 // g, sorted_=True) for own, c1 in ((ts, c0), (tb, cb)))
        return op(name, x, y) * (1 if name == "//" else g)
    single = len(tb) == 1 and cb == 0 and (tb[0][1] == 1 or nonneg(by - 1))
    need, d = (factors(tb[0][0]), tb[0][1]) if single else ((), 1)
    whole: Expr = const(0)
    rest: Expr = const(c0)
    for t, c in ts:  # (25*x*y + r) // (16*y) -> x + (9*x*y + r) // (16*y), where 16*y > 0
        left = _without(factors(t), need) if single and d > 0 else None
        quotient = 0 if left is None else c // d
        rest = rest + t * (c - quotient * d)
        if left is not None:
            whole = whole + (product(left) if left else const(1)) * quotient
    if tb and not single and (first := dict(ts).get(tb[0][0])):  # (3*x + 3*y + r) // (x + y) -> 3
        quotient = first // tb[0][1]
        whole, rest = whole + quotient, rest - by * quotient
        if not (nonneg(rest) and nonneg(by - 1 - rest)):
            whole, rest = const(0), a
    if nonneg(rest) and nonneg(by - 1 - rest):
        return whole if name == "//" else rest
    if name == "//":
        return whole + _raw("//", rest, by)
    return _raw("%", rest, by)


def _minmax(name: str, a: Expr, b: Expr) -> Expr:
    if nonneg(a - b, depth=2):
        return b if name == "min" else a
    if nonneg(b - a, depth=2):
        return a if name == "min" else b
    if sort_key(b) < sort_key(a):
        a, b = b, a
    return intern(Op, i64, 1, name, (a, b))  # type: ignore[no-any-return]


def _compare(name: str, a: Expr, b: Expr) -> Expr:
    if name in ("<", "<="):
        strict = int(name == "<")
        if nonneg(b - a - strict, depth=2):
            return const(True, boolean)
        if nonneg(a - b - 1 + strict, depth=2):
            return const(False, boolean)
    else:
        lo, hi = bounds(a - b)
        if lo == 0 and hi == 0:
            return const(name == "==", boolean)
        if (lo is not None and lo > 0) or (hi is not None and hi < 0):
            return const(name == "!=", boolean)
    return intern(Op, boolean, 1, name, (a, b))  # type: ignore[no-any-return]


def strided(i: Expr) -> tuple[int, Expr] | None:
    """(c, start) of an index `start + c * lanes`."""
    if i.lanes == 1:
        return 0, i
    if not isinstance(i, Op):
        return None
    if i.name == "lanes":
        return 1, const(0)
    parts = [strided(a) for a in i.args]
    if i.name == "+" and all(parts):
        (c, a), (d, b) = parts  # type: ignore[misc]
        return c + d, a + b
    if i.name == "*" and parts[0] is not None and (by := value(i.args[1])) is not None:
        return parts[0][0] * by, parts[0][1] * by
    return None


def lane_offsets(i: Expr, lanes: int) -> tuple[tuple[int, ...], Expr] | None:
    """(c, start) of an index `start + c[lane]` whose offsets are numbers: `4 * (lanes // 4) + r`."""
    if i.lanes == 1:
        return (0,) * lanes, i
    if not isinstance(i, Op):
        return None
    if i.name == "lanes":
        return tuple(range(lanes)), const(0)
    left, right = (lane_offsets(a, lanes) for a in i.args) if len(i.args) == 2 else (None, None)
    if left is None or right is None:
        return None
    (a, start), (b, other) = left, right
    if i.name == "+":
        return tuple(x + y for x, y in zip(a, b)), start + other
    by, k = value(i.args[1]), value(start)
    if by is not None and i.name == "*":
        return tuple(x * by for x in a), start * by
    if by is not None and by > 0 and k is not None and i.name in ("//", "%"):
        return tuple(_FOLD[i.name](x + k, by) for x in a), const(0)
    return None


Arithmetic.integer = integer
