"""Element-wise operators: arithmetic, functions, comparisons, choices; broadcast and promoted as in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion

from dnnc.frontends.torch.call import Call
from dnnc.ir.dtype import boolean, i8, i16, i32, i64
from dnnc.ir.expr import Expr
from dnnc.ir.graph import Value

Converter = Callable[[Call], Any]
BITS = {1: i8, 2: i16, 4: i32, 8: i64}

# --- what most converters are made by ---------------------------------------------------------------------------------


def function(op: str) -> Converter:
    """A function on real numbers."""
    return lambda c: c.b.op(op, c.floats())


def kept(op: str) -> Converter:
    """A function of floats that leaves integers as they are."""
    return lambda c: c.b.op(op, c.x()) if c.x().type.dtype.is_float else c.b.identity(c.x())


def both(op: str, bools: str = "") -> Converter:
    """An operation on two operands; `bools` is what it is on truth values."""

    def convert(c: Call) -> Any:
        x, y = c.promoted("self", "other")
        return c.b.op(bools if bools and x.type.dtype is boolean else op, x, y)

    return convert


def compared(op: str) -> Converter:
    def convert(c: Call) -> Any:
        x, y = c.promoted("self", "other", kind=Promotion.ALWAYS_BOOL)
        if x.type.dtype is boolean and op not in ("equal", "not_equal"):
            x, y = c.cast(x, i8), c.cast(y, i8)
        return c.b.op(op, x, y)

    return convert


def logical(op: str) -> Converter:
    return lambda c: c.b.op(op, truth(c, "self"), truth(c, "other"))


def truth(c: Call, name: str) -> Value:
    """An operand as truth values: what is not 0."""
    return c.operand(name, boolean)


def bitwise(op: str, bools: str) -> Converter:
    return both(op, bools)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def add(c: Call) -> Any:
    x, y = c.promoted("self", "other")
    return c.b.op("logical_or", x, y) if x.type.dtype is boolean else c.b.add(x, scaled(c, y))


def sub(c: Call) -> Any:
    x, y = c.promoted("self", "other")
    return c.b.sub(x, scaled(c, y))


def rsub(c: Call) -> Any:
    x, y = c.promoted("self", "other")
    return c.b.sub(y, scaled(c, x))


def scaled(c: Call, y: Value) -> Value:
    """alpha * y"""
    alpha = c.get("alpha", 1)
    return y if not isinstance(alpha, Expr) and alpha == 1 else c.b.mul(y, c.scalar(alpha, y.type.dtype))


def div(c: Call) -> Any:
    mode = c.get("rounding_mode")
    if mode is None:
        return c.b.div(*c.promoted("self", "other", kind=Promotion.INT_TO_FLOAT))
    x, y = c.promoted("self", "other")
    if mode == "floor":
        return floor_divided(c, x, y)
    q = c.b.div(x, y)
    return c.b.trunc(q) if x.type.dtype.is_float else q


def floor_divide(c: Call) -> Any:
    return floor_divided(c, *c.promoted("self", "other"))


def floor_divided(c: Call, x: Value, y: Value) -> Any:
    """Floor of x / y, decided by the remainder: the quotient may have been rounded up to a whole number."""
    b, dtype = c.b, x.type.dtype
    q = b.div(b.sub(x, b.mod(x, y)), y)
    if not dtype.is_float:
        return q
    return b.where(b.equal(y, c.scalar(0.0, dtype)), b.div(x, y), b.round(q))


def power(c: Call) -> Any:
    """Small whole exponents are products."""
    e, dtype = c.args["exponent"], c.dtype
    if isinstance(e, (int, float)) and not isinstance(e, bool):
        x = c.operand("self", dtype)
        if e in (1, 2, 3):
            square = x if e == 1 else c.b.mul(x, x)
            return c.b.identity(x) if e == 1 else square if e == 2 else c.b.mul(square, x)
        if dtype.is_float and e in (0.5, -0.5, -1):
            y = x if e == -1 else c.b.sqrt(x)
            return y if e == 0.5 else c.b.reciprocal(y)
    x, y = c.promoted("self", "exponent")
    return c.b.pow(x, y)


def reciprocal_root(c: Call) -> Any:
    return c.b.reciprocal(c.b.sqrt(c.floats()))


def logarithm(base: float) -> Converter:
    def convert(c: Call) -> Any:
        x = c.floats()
        return c.b.mul(c.b.log(x), c.scalar(1 / math.log(base), x.type.dtype))

    return convert


def exp2(c: Call) -> Any:
    x = c.floats()
    return c.b.exp(c.b.mul(x, c.scalar(math.log(2), x.type.dtype)))


def erfc(c: Call) -> Any:
    x = c.floats()
    return c.b.sub(c.scalar(1.0, x.type.dtype), c.b.erf(x))


def atan2(c: Call) -> Any:
    """The angle of (x, y) by that of a quotient of at most 1, moved into its eighth of the plane."""
    y, x = c.promoted("self", "other", kind=Promotion.INT_TO_FLOAT)
    b, dtype = c.b, x.type.dtype
    ax, ay, zero = b.abs(x), b.abs(y), c.scalar(0.0, dtype)
    steep, none = b.greater(ay, ax), b.equal(b.max(ax, ay), zero)
    low, high = b.where(steep, ax, ay), b.where(steep, ay, ax)
    infinite = b.logical_and(b.isinf(low), b.isinf(high))
    t = b.atan(b.where(none, zero, b.where(infinite, c.scalar(1.0, dtype), b.div(low, high))))
    t = b.where(steep, b.sub(c.scalar(math.pi / 2, dtype), t), t)
    t = b.where(signbit_of(c, x), b.sub(c.scalar(math.pi, dtype), t), t)
    t = b.where(b.logical_or(b.isnan(x), b.isnan(y)), c.scalar(math.nan, dtype), t)
    return b.where(signbit_of(c, y), b.neg(t), t)


def signbit_of(c: Call, x: Value) -> Any:
    if x.type.dtype.kind in "bu":
        return c.b.not_equal(x, x)
    if x.type.dtype.is_float:
        x = c.b.bit_cast(x, to=BITS[x.type.dtype.bytes])
    return c.b.less(x, c.scalar(0, x.type.dtype))


def copysign(c: Call) -> Any:
    x, y = c.promoted("self", "other", kind=Promotion.INT_TO_FLOAT)
    return c.b.where(c.b.equal(signbit_of(c, x), signbit_of(c, y)), x, c.b.neg(x))


def hypot(c: Call) -> Any:
    """Scaled by the larger one, so that squares neither overflow nor vanish."""
    x, y = (c.b.abs(v) for v in c.promoted("self", "other"))
    b, dtype = c.b, x.type.dtype
    top, low = b.max(x, y), b.min(x, y)
    plain = b.logical_or(b.equal(top, c.scalar(0.0, dtype)), b.isinf(top))
    t = b.div(low, b.where(plain, c.scalar(1.0, dtype), top))
    return b.where(plain, top, b.mul(top, b.sqrt(b.add(c.scalar(1.0, dtype), b.mul(t, t)))))


def absolute(c: Call) -> Any:
    return c.b.identity(c.x()) if c.dtype is boolean else c.b.abs(c.x())


def sign(c: Call) -> Any:
    """Of NaN it is 0."""
    x = c.x()
    if x.type.dtype is boolean:
        return c.b.identity(x)
    return c.b.where(c.b.isnan(x), c.scalar(0.0, c.dtype), c.b.sign(x)) if x.type.dtype.is_float else c.b.sign(x)


def tested(op: str) -> Converter:
    """isnan, isinf: never true of integers."""

    def convert(c: Call) -> Any:
        x = c.x()
        return c.b.op(op, x) if x.type.dtype.is_float else c.b.not_equal(x, x)

    return convert


def rounded(c: Call) -> Any:
    if c.get("decimals", 0):
        x, ten = c.x(), c.scalar(10.0 ** c.integer("decimals"), c.dtype)
        return c.b.div(c.b.round(c.b.mul(x, ten)), ten)
    return kept("round")(c)


# --- choosing ---------------------------------------------------------------------------------------------------------


def where(c: Call) -> Any:
    x, y = c.promoted("self", "other")
    return c.b.where(c.operand("condition", boolean), x, y)


def masked_fill(c: Call) -> Any:
    """The filled value broadcasts to the operand and takes its type."""
    return c.b.where(c.x("mask"), c.operand("value", c.dtype), c.x())


def clamp(c: Call) -> Any:
    """min(max(x, low), high); NaN bounds and operands give NaN."""
    names = [n for n in ("min", "max") if c.args.get(n) is not None]
    x, *limits = c.promoted("self", *names)
    numbers = all(isinstance(c.args[n], (int, float)) for n in names)
    if numbers and x.type.dtype.is_float:
        return c.b.clip(x, low=c.args.get("min"), high=c.args.get("max"))
    for n, v in zip(names, limits):
        x = c.b.op("max" if n == "min" else "min", x, v)
    return x


FUNCTIONS = (
    "sqrt exp expm1 log log1p erf sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh reciprocal sigmoid"
).split()
ELEMENTWISE: dict[str, Converter] = {
    **{n: function(n) for n in FUNCTIONS},
    **{n: kept(n) for n in ("floor", "ceil", "trunc")},
    "round": rounded,
    "rsqrt": reciprocal_root,
    "log2": logarithm(2),
    "log10": logarithm(10),
    "exp2": exp2,
    "erfc": erfc,
    "abs": absolute,
    "sign": sign,
    "sgn": sign,
    "neg": lambda c: c.b.neg(c.x()),
    "add": add,
    "sub": sub,
    "rsub": rsub,
    "mul": both("mul", "logical_and"),
    "div": div,
    "floor_divide": floor_divide,
    "remainder": both("mod"),
    "fmod": both("fmod"),
    "pow": power,
    "atan2": atan2,
    "copysign": copysign,
    "hypot": hypot,
    "signbit": lambda c: signbit_of(c, c.x()),
    "maximum": both("max", "logical_or"),
    "minimum": both("min", "logical_and"),
    "eq": compared("equal"),
    "ne": compared("not_equal"),
    "lt": compared("less"),
    "le": compared("less_equal"),
    "gt": compared("greater"),
    "ge": compared("greater_equal"),
    "logical_and": logical("logical_and"),
    "logical_or": logical("logical_or"),
    "logical_xor": logical("logical_xor"),
    "logical_not": lambda c: c.b.logical_not(truth(c, "self")),
    "bitwise_and": bitwise("bitwise_and", "logical_and"),
    "bitwise_or": bitwise("bitwise_or", "logical_or"),
    "bitwise_xor": bitwise("bitwise_xor", "logical_xor"),
    "bitwise_not": lambda c: c.b.op("logical_not" if c.dtype is boolean else "bitwise_not", c.x()),
    **{n: both("shift_left") for n in ("bitwise_left_shift", "__lshift__")},
    **{n: both("shift_right") for n in ("bitwise_right_shift", "__rshift__")},
    "isnan": tested("isnan"),
    "isinf": tested("isinf"),
    "where": where,
    "masked_fill": masked_fill,
    "clamp": clamp,
    "clamp_min": clamp,
    "clamp_max": clamp,
}
