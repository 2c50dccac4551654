"""Rewrite rules on arithmetic: neutral elements, constants in their place, cheaper ops for the same number.

Part of `canonicalize`. A rule is exact unless its entry in the table at the end says otherwise; exact means that no
rounding is added, dropped or moved, for infinities, NaN, signed zeros and denormals too (the payload of a NaN apart).
"""

from __future__ import annotations

import math

import numpy as np

from dnnc.ir.dtype import DType
from dnnc.ir.graph import Value
from dnnc.ir.op import Trait
from dnnc.ir.ops import OPS
from dnnc.ir.types import TensorType
from dnnc.passes.rewrite import Match, NoMatch, Rule, producer, uniform
from dnnc.passes.rewrites.movement import BROADCASTING


def _ops(trait: Trait) -> tuple[str, ...]:
    return tuple(sorted(name for name, op in OPS.items() if trait in op.traits))


# --- neutral elements -------------------------------------------------------------------------------------------------


def drop_neutral(m: Match) -> Value:
    """add(x, -0.0) -> x; sub(x, 0.0) -> x; mul(x, 1) -> x; logical_and(x, True) -> x; of integers any 0"""
    x, c, neutral = m.operand(m.root, 0), m.number(m.operand(m.root, 1)), m.root.op.neutral
    assert neutral is not None
    same = c == neutral and (isinstance(c, int) or math.copysign(1.0, c) == math.copysign(1.0, neutral))
    m.require(same, "{} is not {}, the neutral element", c, neutral)
    return m.keeps_type(x)


def drop_zero(m: Match) -> Value:
    """add(x, 0.0) -> x; sub(x, -0.0) -> x: differs for x = -0.0, which becomes 0.0"""
    x, c = m.operand(m.root, 0), m.number(m.operand(m.root, 1))
    m.require(c == 0, "{} is not 0", c)
    return m.keeps_type(x)


def drop_inverse(m: Match) -> Value:
    """neg(neg(x)) -> x; logical_not(logical_not(x)) -> x; bitwise_not(bitwise_not(x)) -> x"""
    return m.operand(m.again(), 0)


def drop_repetition(m: Match) -> Value:
    """relu(relu(x)) -> relu(x); likewise abs, floor, ceil, round, trunc, sign"""
    return m.again().output


# --- constants in their place -----------------------------------------------------------------------------------------


def constant_second(m: Match) -> Value:
    """add(c, x) -> add(x, c) for a constant c; likewise all commutative ops"""
    a, b = m.operand(m.root, 0), m.operand(m.root, 1)
    ok = a in m.graph.constants and b not in m.graph.constants
    m.require(ok, "the constant does not stand first, or there is none")
    return m.like((b, a))


def constant_to_scalar(m: Match) -> Value:
    """add(x, [[2, 2], [2, 2]]) -> add(x, 2): equal elements, expanded where the result needs the shape"""
    for k, v in enumerate(m.root.inputs):
        array = m.graph.constants.get(v) if v is not None else None
        if v is None or array is None or v.type.rank == 0 or uniform(array) is None:
            continue
        scalar = Value(v.name, TensorType(v.type.dtype, ()))
        inputs = [scalar if i == k else u for i, u in enumerate(m.root.inputs)]
        if m.fits(inputs) or m.shrinks(inputs):
            c = m.renew(v, array.reshape(-1)[0])
            return m.expanded(m.like([c if i == k else u for i, u in enumerate(m.root.inputs)]))
    raise NoMatch("no constant operand has equal elements")


def subtract_to_add(m: Match) -> Value:
    """sub(x, c) -> add(x, -c) for a constant c"""
    v = m.operand(m.root, 1)
    c = m.constant(v)
    m.require(v.type.dtype.is_float, "integers keep their subtraction: the smallest has no negative")
    return m.b.add(m.operand(m.root, 0), m.renew(v, np.negative(c)))  # type: ignore[no-any-return]


def divide_to_multiply(m: Match) -> Value:
    """div(x, 8.0) -> mul(x, 0.125): powers of two, whose reciprocals are exact"""
    v = m.operand(m.root, 1)
    c, dtype = m.constant(v), v.type.dtype
    m.require(dtype.is_float and dtype.bits >= 16, "{} does not hold reciprocals", dtype)
    wide = c.astype(np.float64)
    with np.errstate(all="ignore"):
        mantissa, _ = np.frexp(wide)
        inverse = 1.0 / wide
    tiny, huge = _normal_range(dtype)
    exact = (np.abs(mantissa) == 0.5) & (np.abs(inverse) >= tiny) & (np.abs(inverse) <= huge)
    m.require(bool(exact.all()), "{} holds numbers that are no powers of two", v.name)
    return m.b.mul(m.operand(m.root, 0), m.renew(v, inverse.astype(dtype.numpy)))  # type: ignore[no-any-return]


def _normal_range(dtype: DType) -> tuple[float, float]:
    """The smallest and the largest power of two that are normal numbers of a type."""
    exponent = {"f64": 1022, "f16": 14}.get(
        dtype.name, 126
    )  # of the smallest normal number; those of f32 and bf16 agree
    return 2.0**-exponent, 2.0 ** (exponent + 1)


MERGED = {"add": np.add, "mul": np.multiply}
OPPOSITE = {"add": "sub", "sub": "add"}


def merge_integers(m: Match) -> Value:
    """add(add(x, 2), 3) -> add(x, 5); mul(mul(x, 2), 3) -> mul(x, 6): integers wrap, so the order is free"""
    inner = m.again()
    x, v = m.operand(inner, 0), m.operand(m.root, 1)
    c, d = m.constant(m.operand(inner, 1)), m.constant(v)
    ok = m.root.output.type.dtype.kind in "iu" and m.root.output.type.dtype.bits >= 8
    m.require(ok, "floats round after each step")
    with np.errstate(all="ignore"):
        both = MERGED[m.root.op.name](c, d)
    return m.b.op(m.root.op, x, m.renew(v, np.asarray(both, x.type.dtype.numpy)))  # type: ignore[no-any-return]


def add_of_negative(m: Match) -> Value:
    """add(x, neg(y)) -> sub(x, y); sub(x, neg(y)) -> add(x, y)"""
    x, y = m.operand(m.root, 0), m.operand(m.node(m.operand(m.root, 1), "neg"), 0)
    return m.b.op(OPPOSITE[m.root.op.name], x, y)  # type: ignore[no-any-return]


# --- powers -----------------------------------------------------------------------------------------------------------


def power_to_product(m: Match) -> Value:
    """pow(x, 2) -> mul(x, x); pow(x, 0.5) -> sqrt(x) of x that is not negative; pow(x, -1.0) -> reciprocal(x)

    The results are the correctly rounded powers."""
    x, e = m.operand(m.root, 0), m.number(m.operand(m.root, 1))
    m.keeps_type(x)
    if e == 2:
        return m.b.mul(x, x)  # type: ignore[no-any-return]
    m.require(x.type.dtype.is_float and e in (0.5, -1.0), "the exponent {} has no cheaper form", e)
    if e == -1.0:
        return m.b.reciprocal(x)  # type: ignore[no-any-return]
    # pow(-inf, 0.5) is inf and sqrt(-inf) is NaN; pow(-0.0, 0.5) is 0.0 and sqrt(-0.0) is -0.0
    m.require(not_negative(m, x), "{} may be negative", x.name)
    return m.b.sqrt(x)  # type: ignore[no-any-return]


def cube_to_product(m: Match) -> Value:
    """pow(x, 3) -> mul(mul(x, x), x): rounds twice"""
    x, e = m.operand(m.root, 0), m.number(m.operand(m.root, 1))
    m.keeps_type(x)
    m.require(e == 3, "the exponent is {}", e)
    b = m.b
    return b.mul(b.mul(x, x), x)  # type: ignore[no-any-return]


def not_negative(m: Match, v: Value, depth: int = 6) -> bool:
    """Is every element known to be 0.0 or more, or NaN? -0.0 counts as negative."""
    c = m.graph.constants.get(v)
    if c is not None:
        return c.dtype.kind == "f" and bool((~np.signbit(c)).all())
    n = v.node
    if n is None or depth == 0:
        return False
    square = producer(v, "mul")
    if Trait.NOT_NEGATIVE in n.op.traits or (square is not None and square.inputs[0] is square.inputs[1]):
        return True
    return Trait.KEEPS_SIGN in n.op.traits and all(u is not None and not_negative(m, u, depth - 1) for u in n.inputs)


# --- casts and choices ------------------------------------------------------------------------------------------------


def merge_casts(m: Match) -> Value:
    """cast(cast(x: f16, to=f32), to=i32) -> cast(x, to=i32) where the first cast is exact and keeps the kind"""
    inner = m.node(m.operand(m.root, 0), "cast")
    x = m.operand(inner, 0)
    a, b, c = x.type.dtype, inner.output.type.dtype, m.root.output.type.dtype
    m.require(holds(b, a), "{} does not hold every {}", b, a)
    # a float that is out of an integer's range saturates, an integer wraps
    ok = _class(a) == _class(b) or c.is_float or c.kind == "b" or holds(c, a)
    m.require(ok, "{} and {} convert to {} by different rules", a, b, c)
    return m.b.node(m.root.op, (x,), m.root.attrs).output


def _class(t: DType) -> str:
    return "f" if t.is_float else "i"


def holds(wide: DType, narrow: DType) -> bool:
    """Can a type represent every number of another one, NaN and infinities included?"""
    if narrow is wide:
        return True
    if narrow.kind == "b":
        return wide.kind in "fiu" and wide.bits >= 8
    if wide.is_float and narrow.is_float:
        return wide.bits > narrow.bits and wide.bits >= 32
    if wide.is_float:
        digits = {"f64": 53, "f32": 24, "bf16": 8, "f16": 11}.get(wide.name, 0)
        return narrow.is_int and narrow.bits - (narrow.kind == "i") <= digits and narrow.bits <= 32
    return narrow.is_int and wide.is_int and wide.range[0] <= narrow.range[0] and wide.range[1] >= narrow.range[1]


def decide_where(m: Match) -> Value:
    """where(True, a, b) -> a; where(c, a, a) -> a; expanded if the result is larger"""
    c, a, b = (m.operand(m.root, k) for k in range(3))
    chosen = a if a is b else a if m.number(c) else b
    return m.expanded(chosen)


def where_of_not(m: Match) -> Value:
    """where(logical_not(c), a, b) -> where(c, b, a)"""
    c = m.operand(m.node(m.operand(m.root, 0), "logical_not"), 0)
    return m.b.where(c, m.operand(m.root, 2), m.operand(m.root, 1))  # type: ignore[no-any-return]


ALGEBRA_RULES: tuple[Rule, ...] = (
    Rule(constant_second, _ops(Trait.COMMUTATIVE)),
    Rule(drop_neutral, tuple(sorted(name for name, op in OPS.items() if op.neutral is not None))),
    Rule(drop_zero, ("add", "sub"), exact=False),
    Rule(drop_inverse, _ops(Trait.INVOLUTION)),
    Rule(drop_repetition, _ops(Trait.IDEMPOTENT)),
    Rule(subtract_to_add, ("sub",)),
    Rule(divide_to_multiply, ("div",)),
    Rule(merge_integers, tuple(MERGED)),
    Rule(add_of_negative, tuple(OPPOSITE)),
    Rule(power_to_product, ("pow",)),
    Rule(cube_to_product, ("pow",), exact=False),
    Rule(merge_casts, ("cast",)),
    Rule(decide_where, ("where",)),
    Rule(where_of_not, ("where",)),
    Rule(constant_to_scalar, BROADCASTING),
)
