"""Derivatives of scalar expressions: the table of the intrinsics, and reverse mode through one expression.

`pull` walks an expression from its root to its loads and gives each load its share of the root's cotangent. Branches of
a `select` that are not taken give 0, whatever their derivative is: `select(c, w, 0)` moves out of products.

Conventions at kinks are PyTorch's; docs/gradients.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log, pi, sqrt
from typing import Any

from dnnc.ir.dtype import boolean
from dnnc.ir.errors import GradientError
from dnnc.ir.expr import Const, E, Expr, Load, Op, cast, const, logical_not, op, select, walk
from dnnc.ir.loops.intrinsics import cast_target
from dnnc.ir.loops.stmt import call
from dnnc.ir.te import Tensor

Factors = tuple["E | None", ...]  # for each operand the derivative of the result by it; None: flat almost everywhere


def _where(condition: Expr, yes: E, no: E, like: Expr) -> Expr:
    return select(condition, const(yes, like.dtype), const(no, like.dtype))


def _tie(a: Expr, b: Expr) -> Expr:
    """1 where a < b, a half where they are equal, else 0."""
    return _where(a < b, 1.0, _where(a.eq(b), 0.5, 0.0, a), a)


def _pow(a: Expr, b: Expr, y: Expr) -> Factors:
    if isinstance(b, Const):
        base = const(0.0, a.dtype) if b.value == 0.0 else a * 2.0 if b.value == 2.0 else b * call("pow", a, b - 1.0)
        return base, None
    # d/da is 0 where b is 0, also at a = 0; d/db is 0 where a is 0 and b is not negative
    base = _where(b.eq(0.0), 0.0, b * call("pow", a, b - 1.0), a)
    return base, _where(a.eq(0.0) & (b >= 0.0), 0.0, y * call("log", a), a)


def _hypotenuse(x: Expr, sign: float) -> Expr:
    """1 / sqrt(sign * x^2 + 1)"""
    return 1.0 / call("sqrt", x * x * sign + 1.0)


# Name of an operation on scalars -> a function of its operands and its result that gives a factor for each operand.
DERIVATIVES: dict[str, Callable[..., Factors]] = {
    "+": lambda a, b, y: (1.0, 1.0),
    "-": lambda a, b, y: (1.0, -1.0),
    "*": lambda a, b, y: (b, a),
    "/": lambda a, b, y: (1.0 / b, -(y / b)),
    "fma": lambda a, b, c, y: (b, a, 1.0),
    "min": lambda a, b, y: (_tie(a, b), _tie(b, a)),
    "max": lambda a, b, y: (_tie(b, a), _tie(a, b)),
    # fmin and fmax give their second operand unless the first one wins
    "fmin": lambda a, b, y: (_where(a < b, 1.0, 0.0, a), _where(a < b, 0.0, 1.0, a)),
    "fmax": lambda a, b, y: (_where(b < a, 1.0, 0.0, a), _where(b < a, 0.0, 1.0, a)),
    "pow": _pow,
    "truncmod": lambda a, b, y: (1.0, -call("trunc", a / b)),
    "neg": lambda x, y: (-1.0,),
    "abs": lambda x, y: (_where(x < 0.0, -1.0, _where(x.eq(0.0), 0.0, 1.0, x), x),),
    "sqrt": lambda x, y: (0.5 / y,),
    "recip": lambda x, y: (-(y * y),),
    "exp": lambda x, y: (y,),
    "exp2": lambda x, y: (y * log(2.0),),
    "expm1": lambda x, y: (y + 1.0,),
    "log": lambda x, y: (1.0 / x,),
    "log1p": lambda x, y: (1.0 / (x + 1.0),),
    "erf": lambda x, y: (call("exp", -(x * x)) * (2 / sqrt(pi)),),
    "tanh": lambda x, y: (1.0 - y * y,),
    "sin": lambda x, y: (call("cos", x),),
    "cos": lambda x, y: (-call("sin", x),),
    "tan": lambda x, y: (y * y + 1.0,),
    "asin": lambda x, y: (_hypotenuse(x, -1.0),),
    "acos": lambda x, y: (-_hypotenuse(x, -1.0),),
    "atan": lambda x, y: (1.0 / (x * x + 1.0),),
    "sinh": lambda x, y: (call("cosh", x),),
    "cosh": lambda x, y: (call("sinh", x),),
    "asinh": lambda x, y: (_hypotenuse(x, 1.0),),
    "acosh": lambda x, y: (1.0 / call("sqrt", (x - 1.0) * (x + 1.0)),),
    "atanh": lambda x, y: (1.0 / ((1.0 - x) * (1.0 + x)),),
    "ldexp": lambda x, n, y: (call("ldexp", const(1.0, x.dtype), n), None),
    "scale": lambda x, n, y: (call("scale", const(1.0, x.dtype), n), None),
    **{name: lambda *_: (None, None) for name in ("floor", "ceil", "trunc", "rint", "piece")},
}


# --- sums of conditional numbers --------------------------------------------------------------------------------------


def split(e: Expr) -> tuple[Expr, Expr]:
    """(condition, number) of `select(condition, number, 0)`."""
    if isinstance(e, Op) and e.name == "select" and isinstance(e.args[2], Const) and e.args[2].value == 0:
        return e.args[0], e.args[1]
    if isinstance(e, Op) and e.name == "select" and isinstance(e.args[1], Const) and e.args[1].value == 0:
        return negated(e.args[0]), e.args[2]
    return const(True, boolean), e


def masked(condition: Expr, e: Expr) -> Expr:
    """The number where the condition holds, else 0; one select for nested ones."""
    inner, e = split(e)
    return select(condition & inner, e, const(0.0, e.dtype))


def times(a: Expr, b: E) -> Expr:
    """a * b; 0 where the condition of either does not hold, even if the other is infinite or NaN."""
    outer, a = split(a)
    inner, b = split(const(b, a.dtype))
    r = b if _is(a, 1.0) else a if _is(b, 1.0) else -a if _is(b, -1.0) else a * b
    return masked(outer & inner, r)


def _is(e: Expr, number: float) -> bool:
    return isinstance(e, Const) and e.value == number


def plus(a: Expr, b: Expr) -> Expr:
    (c, x), (d, y) = split(a), split(b)
    return masked(c, x + y) if c is d else a + b


def negated(c: Expr) -> Expr:
    """The opposite of a condition; that of a comparison of indices is a comparison, which proofs can use."""
    if isinstance(c, Op) and c.name in ("<", "<=") and c.args[0].dtype.is_int:
        a, b = c.args
        return op("<=" if c.name == "<" else "<", b, a)
    return logical_not(c)


# --- reverse mode -----------------------------------------------------------------------------------------------------


def pull(root: Expr, seed: Expr) -> list[tuple[Load, Expr]]:
    """The loads of float tensors in an expression, each with its share of the root's cotangent `seed`.

    GradientError: an operation on the way has no derivative.
    """
    order: list[Expr] = []
    active: dict[Expr, bool] = {}

    def visit(e: Expr) -> bool:
        if e in active:
            return active[e]
        if not e.dtype.is_float:
            return False
        active[e] = isinstance(e, Load) and isinstance(e.buf, Tensor) and e.buf.dtype.is_float
        if isinstance(e, Op):
            active[e] = any([visit(c) for c in e.args])
            _check_bits(e)
        if active[e]:
            order.append(e)
        return active[e]

    visit(root)
    cotangents: dict[Expr, Expr] = {root: seed}
    found: list[tuple[Load, Expr]] = []
    for e in reversed(order):
        g = cotangents.get(e)
        if g is None:
            continue
        if isinstance(e, Load):
            found.append((e, g))
            continue
        assert isinstance(e, Op)
        for child, part in zip(e.args, _shares(e, g)):
            if part is not None and active.get(child):
                cotangents[child] = plus(cotangents[child], part) if child in cotangents else part
    return found


def _check_bits(e: Op) -> None:
    target = cast_target(e.name)
    if target is not None and target[1] and any(isinstance(x, Load) and x.dtype.is_float for x in walk(e)):
        raise GradientError(f"{e.name} makes a number of the bits of others, which has no derivative")


def _shares(e: Op, g: Expr) -> Sequence[Expr | None]:
    """The cotangent of each operand of an operation, for the cotangent of its result."""
    if e.name == "select":
        return None, masked(e.args[0], g), masked(negated(e.args[0]), g)
    target = cast_target(e.name)
    if target is not None:
        if target[1]:
            raise GradientError(f"{e.name} reads the bits of a number, which has no derivative")
        return (cast(g, e.args[0].dtype.computed),)
    rule: Any = DERIVATIVES.get(e.name)
    if rule is None:
        raise GradientError(f"the operation {e.name} has no derivative")
    return [None if f is None else times(g, f) for f in rule(*e.args, e)]
