"""Rules of element-wise ops: kinks as PyTorch has them, and shorter forms than the derived ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import pi, sqrt
from typing import Any

from dnnc.ir.autodiff.rules.common import constant_number, unbroadcast
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node

Cotangents = Mapping[int, Any]


def cast(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x,), (g,) = n.inputs, cotangents
    assert x is not None
    return {0: b.cast(g, to=x.type.dtype)}


def rounded(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """The identity, as for casts."""
    return {0: cotangents[0]}


def flat(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """Zero almost everywhere, and zero at steps."""
    return {}


def _zero(b: Builder, g: Any) -> Any:
    return b.constant(0.0, dtype=g.type.dtype)


# --- one operand ------------------------------------------------------------------------------------------------------


def unary(
    cotangent: Callable[..., Any],
) -> Callable[[Builder, Node, Sequence[Any], Sequence[int]], Cotangents]:
    """The rule `cotangent(b, x, y, g, **attrs)` of an op of one operand."""

    def rule(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
        return {0: cotangent(b, n.inputs[0], n.output, cotangents[0], **n.attrs)}

    return rule


def _relu(b: Builder, x: Any, y: Any, g: Any) -> Any:
    """1 above 0, 0 at 0 and below."""
    return b.where(b.less_equal(y, 0.0), _zero(b, g), g)


def _sigmoid(b: Builder, x: Any, y: Any, g: Any) -> Any:
    return b.mul(g, b.mul(y, b.sub(b.constant(1.0, dtype=y.type.dtype), y)))


def _softplus(b: Builder, x: Any, y: Any, g: Any) -> Any:
    return b.mul(g, b.sigmoid(x))


def _mish(b: Builder, x: Any, y: Any, g: Any) -> Any:
    t = b.tanh(b.softplus(x))
    rest = b.sub(b.constant(1.0, dtype=x.type.dtype), b.mul(t, t))
    return b.mul(g, b.add(t, b.mul(b.mul(x, rest), b.sigmoid(x))))


def _gelu(b: Builder, x: Any, y: Any, g: Any, *, approximate: str) -> Any:
    if approximate == "tanh":
        square = b.mul(x, x)
        k = sqrt(2 / pi)
        t = b.tanh(b.mul(x, b.add(b.mul(square, 0.044715 * k), k)))
        slope = b.mul(x, b.add(b.mul(square, 3 * 0.044715 * k), k))  # of the argument of tanh, times x
        rest = b.sub(b.constant(1.0, dtype=x.type.dtype), b.mul(t, t))
        return b.mul(g, b.mul(b.add(b.add(t, 1.0), b.mul(rest, slope)), 0.5))
    below = b.add(b.mul(b.erf(b.mul(x, sqrt(0.5))), 0.5), 0.5)
    density = b.mul(b.exp(b.mul(b.mul(x, x), -0.5)), 1 / sqrt(2 * pi))
    return b.mul(g, b.add(below, b.mul(x, density)))


def _leaky_relu(b: Builder, x: Any, y: Any, g: Any, *, alpha: float) -> Any:
    return b.where(b.less_equal(x, 0.0), b.mul(g, alpha), g)


def _elu(b: Builder, x: Any, y: Any, g: Any, *, alpha: float) -> Any:
    return b.where(b.less_equal(x, 0.0), b.mul(g, b.mul(b.exp(x), alpha)), g)


def _selu(b: Builder, x: Any, y: Any, g: Any, *, alpha: float, gamma: float) -> Any:
    return b.mul(_elu(b, x, y, g, alpha=alpha), gamma)


def _celu(b: Builder, x: Any, y: Any, g: Any, *, alpha: float) -> Any:
    return b.where(b.less_equal(x, 0.0), b.mul(g, b.exp(b.div(x, alpha))), g)


def _hard_sigmoid(b: Builder, x: Any, y: Any, g: Any, *, alpha: float, beta: float) -> Any:
    """0 at both ends of the ramp."""
    inside = b.logical_and(b.greater(y, 0.0), b.less(y, 1.0))
    return b.where(inside, b.mul(g, alpha), _zero(b, g))


def _hard_swish(b: Builder, x: Any, y: Any, g: Any) -> Any:
    """0 at -3, 1 at 3."""
    ramp = b.where(b.less(x, 3.0), b.mul(g, b.add(b.mul(x, 1 / 3), 0.5)), g)
    return b.where(b.less_equal(x, -3.0), _zero(b, g), ramp)


def _softsign(b: Builder, x: Any, y: Any, g: Any) -> Any:
    d = b.add(b.abs(x), 1.0)
    return b.div(g, b.mul(d, d))


def _clip(b: Builder, x: Any, y: Any, g: Any, *, low: float | None, high: float | None, keeps_nan: bool) -> Any:
    """1 at the bounds, 0 at NaN where there is a bound."""
    inside = None if low is None else b.greater_equal(x, low)
    if high is not None:
        below = b.less_equal(x, high)
        inside = below if inside is None else b.logical_and(inside, below)
    return g if inside is None else b.where(inside, g, _zero(b, g))


relu = unary(_relu)
sigmoid = unary(_sigmoid)
softplus = unary(_softplus)
mish = unary(_mish)
gelu = unary(_gelu)
leaky_relu = unary(_leaky_relu)
elu = unary(_elu)
selu = unary(_selu)
celu = unary(_celu)
hard_sigmoid = unary(_hard_sigmoid)
hard_swish = unary(_hard_swish)
softsign = unary(_softsign)
clip = unary(_clip)
neg = unary(lambda b, x, y, g: b.neg(g))
absolute = unary(lambda b, x, y, g: b.mul(g, b.sign(x)))
square_root = unary(lambda b, x, y, g: b.div(b.mul(g, 0.5), y))
reciprocal = unary(lambda b, x, y, g: b.neg(b.mul(g, b.mul(y, y))))
tanh = unary(lambda b, x, y, g: b.mul(g, b.sub(b.constant(1.0, dtype=y.type.dtype), b.mul(y, y))))


# --- several operands -------------------------------------------------------------------------------------------------


def broadcasting(
    *cotangents: Callable[..., Any],
) -> Callable[[Builder, Node, Sequence[Any], Sequence[int]], Cotangents]:
    """A rule of an op of operands that broadcast: for each position `cotangent(b, operands, y, g)`."""

    def rule(b: Builder, n: Node, given: Sequence[Any], needed: Sequence[int]) -> Cotangents:
        (g,) = given
        return {k: unbroadcast(b, cotangents[k](b, n.inputs, n.output, g), n.inputs[k]) for k in needed}  # type: ignore[arg-type]

    return rule


def _quotient(b: Builder, xs: Sequence[Any], y: Any, g: Any) -> Any:
    """How often the divisor goes into the dividend, with the op's own rounding."""
    return b.neg(b.mul(g, b.round(b.div(b.sub(xs[0], y), xs[1]))))


def _share(b: Builder, g: Any, mine: Any, other: Any, loses: str) -> Any:
    """All to the extreme operand, a half to each of equal ones."""
    half = b.where(b.equal(mine, other), b.mul(g, 0.5), g)
    return b.where(b.op(loses, mine, other), _zero(b, g), half)


add = broadcasting(lambda b, xs, y, g: g, lambda b, xs, y, g: g)
sub = broadcasting(lambda b, xs, y, g: g, lambda b, xs, y, g: b.neg(g))
mul = broadcasting(lambda b, xs, y, g: b.mul(g, xs[1]), lambda b, xs, y, g: b.mul(g, xs[0]))
div = broadcasting(lambda b, xs, y, g: b.div(g, xs[1]), lambda b, xs, y, g: b.neg(b.mul(b.div(g, xs[1]), y)))
mod = fmod = broadcasting(lambda b, xs, y, g: g, _quotient)
maximum = broadcasting(
    lambda b, xs, y, g: _share(b, g, xs[0], xs[1], "less"), lambda b, xs, y, g: _share(b, g, xs[1], xs[0], "less")
)
minimum = broadcasting(
    lambda b, xs, y, g: _share(b, g, xs[0], xs[1], "greater"), lambda b, xs, y, g: _share(b, g, xs[1], xs[0], "greater")
)
where = broadcasting(
    lambda b, xs, y, g: None,
    lambda b, xs, y, g: b.where(xs[0], g, _zero(b, g)),
    lambda b, xs, y, g: b.where(xs[0], _zero(b, g), g),
)
prelu = broadcasting(
    lambda b, xs, y, g: b.where(b.less_equal(xs[0], 0.0), b.mul(g, xs[1]), g),
    lambda b, xs, y, g: b.where(b.less_equal(xs[0], 0.0), b.mul(g, xs[0]), _zero(b, g)),
)


def power(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """By the base 0 where the exponent is 0; by the exponent 0 where the base is 0 and the exponent is not negative."""
    (g,), (x, e) = cotangents, n.inputs
    assert x is not None and e is not None
    y, out = n.output, {}
    if 0 in needed:
        p = constant_number(b.graph, e)
        c = _base(b, x, e, y, g) if p is None else _base_of_number(b, x, p, y, g)
        if c is not None:
            out[0] = unbroadcast(b, c, x)
    if 1 in needed:
        flat = b.logical_and(b.equal(x, 0.0), b.greater_equal(e, 0.0))
        out[1] = unbroadcast(b, b.mul(g, b.where(flat, _zero(b, g), b.mul(y, b.log(x)))), e)
    return out


def _base(b: Builder, x: Any, e: Any, y: Any, g: Any) -> Any:
    slope = b.mul(e, b.pow(x, b.sub(e, 1.0)))
    return b.mul(g, b.where(b.equal(e, 0.0), _zero(b, g), slope))


def _base_of_number(b: Builder, x: Any, p: float, y: Any, g: Any) -> Any:
    """The cotangent of x in x ** p for a number p."""
    if p == 0.0:
        return None
    if p == 1.0:
        return g
    if p == 0.5:
        return b.div(b.mul(g, 0.5), y)
    return b.mul(g, b.mul(x if p == 2.0 else b.mul(x, x) if p == 3.0 else b.pow(x, p - 1.0), p))
