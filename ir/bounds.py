"""What is known of integer expressions: constant bounds, and proofs of `e >= 0` from bounds of variables and facts."""

from __future__ import annotations

from dnnc.ir.dtype import i64
from dnnc.ir.expr import (
    Const,
    E,
    Expr,
    Linear,
    Load,
    Op,
    Product,
    Var,
    const,
    factors,
    free,
    product,
    sort_key,
    substitute,
    terms,
    value,
    walk,
)

Bounds = tuple[int | None, int | None]


def bounds(e: E) -> Bounds:
    """Constant lower and upper bound of an integer expression; None is unknown."""
    if not isinstance(e, Expr):
        return int(e), int(e)
    if e._range is None:
        e._range = _bounds(e)
    return e._range


def _bounds(e: Expr) -> Bounds:
    if e.dtype.is_float or e.lanes > 1:
        return None, None
    if isinstance(e, Const):
        return int(e.value), int(e.value)
    if isinstance(e, Var):
        return (None if e.lo is None else bounds(e.lo)[0], None if e.hi is None else bounds(e.hi)[1])
    if isinstance(e, Linear):
        lo: int | None = e.const
        hi: int | None = e.const
        for t, c in e.terms:
            a, b = bounds(t)
            if c < 0:
                a, b = b, a
            lo = None if lo is None or a is None else lo + c * a
            hi = None if hi is None or b is None else hi + c * b
        return lo, hi
    if isinstance(e, Product):
        r: Bounds = (1, 1)
        for f in e.factors:
            r = _times(r, bounds(f))
        return r
    return _op_bounds(e) if isinstance(e, Op) else (None, None)


def _times(a: Bounds, b: Bounds) -> Bounds:
    (al, ah), (bl, bh) = a, b
    if al is not None and bl is not None and al >= 0 and bl >= 0:
        return al * bl, None if ah is None or bh is None else ah * bh
    if al is None or ah is None or bl is None or bh is None:
        return None, None
    corners = [al * bl, al * bh, ah * bl, ah * bh]
    return min(corners), max(corners)


def _op_bounds(e: Op) -> Bounds:
    if e.name == "select":
        (al, ah), (bl, bh) = bounds(e.args[1]), bounds(e.args[2])
        return None if al is None or bl is None else min(al, bl), None if ah is None or bh is None else max(ah, bh)
    if e.name in ("guard", "trusted") and len(e.args) == 3:
        hi = bounds(e.args[2])[1]
        return bounds(e.args[1])[0], None if hi is None else hi - 1
    if len(e.args) != 2:
        return None, None
    (al, ah), (bl, bh) = bounds(e.args[0]), bounds(e.args[1])
    if e.name == "//" and bl is not None and bl > 0:
        lo = None if al is None else (al // bl if al < 0 else al // bh if bh is not None else 0)
        return lo, None if ah is None else (ah // bl if ah >= 0 else -1 if bh is None else ah // bh)
    if e.name == "%":
        top = None if bh is None else bh - 1
        if al is not None and al >= 0 and ah is not None:
            top = ah if top is None else min(top, ah)
        return 0, top
    if e.name == "min":
        return None if al is None or bl is None else min(al, bl), min(
            [x for x in (ah, bh) if x is not None], default=None
        )
    if e.name == "max":
        return max([x for x in (al, bl) if x is not None], default=None), None if ah is None or bh is None else max(
            ah, bh
        )
    if e.name == "&" and any(
        lo is not None and lo >= 0 for lo in (al, bl)
    ):  # of two's complements: no larger than what is not negative
        return 0, min(
            [hi for lo, hi in ((al, ah), (bl, bh)) if lo is not None and lo >= 0 and hi is not None], default=None
        )
    if (
        e.name == "^"
        and al is not None
        and bl is not None
        and ah is not None
        and bh is not None
        and al >= 0
        and bl >= 0
    ):
        return 0, (1 << max(ah, bh).bit_length()) - 1
    return None, None


def nonneg(e: Expr, facts: tuple[Expr, ...] = (), depth: int = 5) -> bool:
    """Is e >= 0 for all values of its variables? Proof by linear facts: True is certain, False means not shown.

    e is linear in each variable, so its minimum lies at a variable's bound: substitute it (innermost first, i.e.
    variables whose bounds are symbolic). A fact `a < b` gives `b - a - 1 >= 0`, and any multiple may be taken off.
    """
    lo, _ = bounds(e)
    if lo is not None:
        if lo >= 0:
            return True
        if not facts and all(_box(x) for x in free(e)):
            ts, _ = terms(e)
            if all(isinstance(t, Var) for t, _ in ts):
                return False  # the bound is exact over a box
    if depth == 0:
        return False
    for f in facts:
        if isinstance(f, Op) and f.name in ("<", "<=") and f.args[0].dtype is i64:
            g = f.args[1] - f.args[0] - int(f.name == "<")
            rest = tuple(x for x in facts if x is not f)
            for k in _multiples(e, g):
                if nonneg(e - g * k, rest, depth - 1):
                    return True
    return any(_by_cases(e, t, c, facts, depth) for t, c in terms(e)[0]) or _at_corner(e, facts, depth)


def _box(x: Var) -> bool:
    return not isinstance(x.lo, Expr) and not isinstance(x.hi, Expr)


def _multiples(e: Expr, g: Expr) -> set[int]:
    """Positive k for which e - k*g cancels a term."""
    mine = dict(terms(e)[0])
    return {mine[t] // c for t, c in terms(g)[0] if t in mine and mine[t] % c == 0 and mine[t] // c > 0}


def _by_cases(e: Expr, t: Expr, c: int, facts: tuple[Expr, ...], depth: int) -> bool:
    """Replace a term that is no variable by what bounds it."""
    if not isinstance(t, Op):
        return False
    rest = e - t * c
    if t.name in ("min", "max"):
        cases = [nonneg(rest + a * c, facts, depth - 1) for a in t.args]
        # c*min(a, b) is one of c*a, c*b; for c < 0 it is at least either
        return any(cases) if (t.name == "min") == (c < 0) else all(cases)
    if t.name == "select":
        return all(nonneg(rest + a * c, facts, depth - 1) for a in t.args[1:])
    if t.name == "//" and (d := value(t.args[1])) is not None and c % d == 0:  # c*(a//d) -> c/d*(a - a%d)
        if nonneg(rest + (t.args[0] - t.args[0] % d) * (c // d), facts, depth - 1):
            return True
    if t.name == "//" and c < 0 and _positive(t.args[1], facts, depth):  # k*(a // b) <= q  <=  a <= (q//k)*b + b - 1
        return nonneg((rest // -c + 1) * t.args[1] - 1 - t.args[0], facts, depth - 1)
    if (
        t.name == "//" and c > 0 and (r := value(rest)) is not None and _positive(t.args[1], facts, depth)
    ):  # c*(a // b) >= -r  <=  a >= -(r//c)*b
        return nonneg(t.args[0] + t.args[1] * (r // c), facts, depth - 1)
    if (
        t.name == "//" and c > 0 and _positive(t.args[1], facts, depth) and nonneg(t.args[0], facts, depth - 1)
    ):  # a // b >= 0
        return nonneg(rest, facts, depth - 1)
    if t.name in ("guard", "trusted") and c < 0:
        return nonneg(rest + (t.args[2] - 1) * c, facts, depth - 1)
    if t.name == "%" and c > 0:  # a % b >= 0
        return nonneg(rest, facts, depth - 1)
    if t.name == "%" and c < 0 and value(t.args[1]) is None:
        return nonneg(rest + (t.args[1] - 1) * c, facts, depth - 1)
    return False


def _positive(e: Expr, facts: tuple[Expr, ...], depth: int) -> bool:
    return (bounds(e)[0] or 0) >= 1 or (bool(facts) and nonneg(e - 1, facts, depth - 1))


def _at_corner(e: Expr, facts: tuple[Expr, ...], depth: int) -> bool:
    """Replace a variable by one of its bounds, where `bounds` of e did not: they are symbolic, or its factor is."""
    of_products = {f for t, _ in terms(e)[0] if isinstance(t, Product) for f in t.factors}
    for v in sorted((x for x in free(e) if not _box(x) or x in of_products), key=sort_key):
        slope = _slope(e, v)
        if slope is None:
            continue
        at = v.lo if nonneg(slope, facts, 1) else v.hi if nonneg(-slope, facts, 1) else None
        if at is not None and nonneg(substitute(e, {v: const(at)}), facts, depth - 1):
            return True
    return False


def _slope(e: Expr, v: Var) -> Expr | None:
    """d e / d v where e is linear in v, else None."""
    r: Expr = const(0)
    for t, c in terms(e)[0]:
        left = [f for f in factors(t) if f is not v]
        n = len(factors(t)) - len(left)
        if n > 1 or any(v in free(f) for f in left):
            return None
        if n:
            r = r + (product(left) if left else const(1)) * c
    return r


IndexForm = tuple[tuple[tuple[Expr, int], ...], frozenset[tuple[Expr, int]], int, int]


def index_form(e: Expr, v: Var, inner: set[Var], lanes: int) -> IndexForm | None:
    """Split an index into terms in v (and perhaps inner variables), invariant terms, and the rest's range."""
    if e.lanes > 1:
        return None
    ts, lo = terms(e)
    hi = lo + lanes - 1
    mine, shared = [], []
    for t, c in ts:
        if any(isinstance(x, Load) for x in walk(t)):
            return None
        if v in free(t):
            mine.append((t, c))
        elif free(t).isdisjoint(inner):
            shared.append((t, c))
        else:
            a, b = bounds(t * c)
            if a is None or b is None:
                return None
            lo, hi = lo + a, hi + b
    return tuple(mine), frozenset(shared), lo, hi
