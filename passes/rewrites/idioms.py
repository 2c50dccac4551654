"""Recognise computations that exporters spell out in small ops, and replace them by one good op.

    div(d, sqrt(add(reduce_mean(mul(d, d)), 1e-5))), d = sub(x, reduce_mean(x))
        -> mean_variance_norm(x, epsilon=1e-5)
    mul(mean_variance_norm(x), scale), add(.., bias)                               ->   layer_norm(x, scale, bias)
    div(x, sqrt(add(reduce_mean(mul(x, x)), 1e-5)))
        -> rms_norm(x, 1.0), with mul(.., scale) rms_norm(x, scale)
    div(e, reduce_sum(e)), e = exp(sub(x, reduce_max(x)))                          ->   softmax(x)
    mul(mul(x, 0.5), add(erf(mul(x, 0.7071)), 1.0))                                ->   gelu(x), and the form with tanh

Runs on a canonical graph whose equal nodes are merged. Strict numerics keep the chains, which round otherwise.
"""

from __future__ import annotations

import math

import numpy as np

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.ops.common import same_dim
from dnnc.ir.ops.reduce import all_axes
from dnnc.ir.shapes import broadcast_shapes
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import Match, NoMatch, Rule, rewrite

Axes = tuple[int, ...]


def idioms(graph: Graph, ctx: PassContext) -> bool:
    """Replace the idioms above, for any order of commutative operands, unless numerics are strict."""
    return rewrite(graph, IDIOM_RULES, ctx)


# --- normalization ----------------------------------------------------------------------------------------------------


def _rows(m: Match, v: Value, op: str) -> tuple[Value, Axes]:
    """`op(x, axes, keepdims=True)` as (x, axes)."""
    n = m.sole(m.node(v, op))
    m.require(n.attrs["keepdims"], "{} does not keep the reduced dims", op)
    x = m.operand(n, 0)
    return x, all_axes(n.attrs["axes"], x.type.rank)


def _inverse_root(m: Match) -> tuple[Value, Value]:
    """Match y / sqrt(v) as `div(y, sqrt(v))`, or `mul(y, r)`, r = reciprocal(sqrt(v)), 1 / sqrt(v), v ** -0.5."""
    n = m.root
    if n.op.name == "div":
        return m.operand(n, 0), m.operand(m.sole(m.node(m.operand(n, 1), "sqrt")), 0)
    for k in (0, 1):
        v = m.operand(n, k).node
        if v is None or v.op.name not in ("reciprocal", "div", "pow"):
            continue
        y, inner = m.operand(n, 1 - k), m.sole(m.node(v.output, "reciprocal", "div", "pow"))
        if inner.op.name == "pow":
            m.require(m.number(m.operand(inner, 1)) == -0.5, "the power is not -0.5")
            return y, m.operand(inner, 0)
        if inner.op.name == "div":
            m.require(m.number(m.operand(inner, 0)) == 1, "the dividend is not 1")
        return y, m.operand(m.sole(m.node(m.operand(inner, inner.op.name == "div"), "sqrt")), 0)
    raise NoMatch("neither factor is an inverse square root")


def _mean_square(m: Match, v: Value, y: Value) -> tuple[float, Axes]:
    """`add(reduce_mean(mul(y, y)), epsilon)` as (epsilon, axes)."""
    total = m.sole(m.node(v, "add"))
    mean, c = m.either(total)
    epsilon = m.number(c)
    m.require(c.type.size == 1 and epsilon >= 0 and math.isfinite(epsilon), "{} is no epsilon", c.name)
    square, axes = _rows(m, mean, "reduce_mean")
    n = m.sole(m.node(square, "mul"))
    m.require(n.inputs[0] is y and n.inputs[1] is y, "{} is not the square of {}", square.name, y.name)
    return float(epsilon), axes


def standardize(m: Match) -> Value:
    """div(d, sqrt(add(reduce_mean(mul(d, d)), e))) -> mean_variance_norm(x, epsilon=e), d = sub(x, reduce_mean(x))"""
    d, v = _inverse_root(m)
    n = m.node(d, "sub")
    x = m.operand(n, 0)
    epsilon, axes = _mean_square(m, v, d)
    readers = {u for u, _ in d.uses}
    ok = len(readers) == 2 and d not in m.outputs
    m.require(ok, "the deviation {} has {} readers; 2 are part of the idiom", d.name, len(readers))
    y, others = _rows(m, m.operand(n, 1), "reduce_mean")
    m.require(y is x and others == axes, "the mean is not that of {} over axes {}", x.name, axes)
    m.keeps_type(x)
    return m.b.mean_variance_norm(x, axes=axes, epsilon=epsilon)  # type: ignore[no-any-return]


def root_mean_square(m: Match) -> Value:
    """div(x, sqrt(add(reduce_mean(mul(x, x)), e))) -> rms_norm(x, 1.0, epsilon=e) for a mean over the last axes"""
    x, v = _inverse_root(m)
    epsilon, axes = _mean_square(m, v, x)
    m.require(axes == tuple(range(axes[0], x.type.rank)) if axes else False, "the axes {} are not the last ones", axes)
    m.keeps_type(x)
    b = m.b
    return b.rms_norm(x, b.constant(1.0, dtype=x.type.dtype), axis=axes[0], epsilon=epsilon)  # type: ignore[no-any-return]


def scale_of_norm(m: Match) -> Value:
    """mul(mean_variance_norm(x), scale) -> layer_norm(x, scale); mul(rms_norm(x, 1.0), scale) -> rms_norm(x, scale)"""
    n, scale = _norm_and_other(m, "mean_variance_norm", "rms_norm")
    x = m.operand(n, 0)
    if n.op.name == "rms_norm":
        m.require(m.number(m.operand(n, 1)) == 1, "it is scaled already")
        return m.b.rms_norm(x, scale, **n.attrs)  # type: ignore[no-any-return]
    axes = all_axes(n.attrs["axes"], x.type.rank)
    m.require(axes == tuple(range(axes[0], x.type.rank)) if axes else False, "the axes {} are not the last ones", axes)
    return m.b.layer_norm(x, scale, axis=axes[0], epsilon=n.attrs["epsilon"])  # type: ignore[no-any-return]


def bias_of_norm(m: Match) -> Value:
    """add(layer_norm(x, scale), bias) -> layer_norm(x, scale, bias)"""
    n, bias = _norm_and_other(m, "layer_norm")
    m.require(len(n.inputs) < 3 or n.inputs[2] is None, "it has a bias already")
    return m.b.layer_norm(m.operand(n, 0), m.operand(n, 1), bias, **n.attrs)  # type: ignore[no-any-return]


def _norm_and_other(m: Match, *ops: str) -> tuple[Node, Value]:
    """Match a normalization with one reader, and its parameter: a constant or input that broadcasts to it."""
    for k in (0, 1):
        v, other = m.operand(m.root, k), m.operand(m.root, 1 - k)
        if v.node is None or v.node.op.name not in ops:
            continue
        n = m.sole(m.node(v, *ops))
        m.keeps_type(v)
        ok = other.node is None and broadcast_shapes(v.type.shape, other.type.shape) == v.type.shape
        m.require(ok, "{} is no parameter", other.name)
        # a parameter is smaller than the rows: a residual of the full shape is added afterwards
        ok = other.type.rank < v.type.rank or any(same_dim(d, 1) for d in other.type.shape)
        m.require(ok, "{} is as large as the rows", other.name)
        return n, other
    raise NoMatch("neither operand is made by {}", " or ".join(ops))


# --- softmax ----------------------------------------------------------------------------------------------------------


def _shifted(m: Match, v: Value) -> tuple[Value, Axes]:
    """`sub(x, reduce_max(x))` as (x, axes)."""
    n = m.node(v, "sub")
    x, axes = _rows(m, m.operand(n, 1), "reduce_max")
    m.require(x is m.operand(n, 0) and len(axes) == 1, "{} is not {} less the maximum of one axis", v.name, x.name)
    return x, axes


def softmax_chain(m: Match) -> Value:
    """div(e, reduce_sum(e)) -> softmax(x), where e = exp(sub(x, reduce_max(x))) over the same axis"""
    e = m.operand(m.root, 0)
    n = m.node(e, "exp")
    summed, axes = _rows(m, m.operand(m.root, 1), "reduce_sum")
    m.require(summed is e, "the sum is not that of {}", e.name)
    x, others = _shifted(m, m.sole(m.node(m.operand(n, 0), "sub")).output)
    m.require(axes == others, "the maximum is over axes {}, the sum over {}", others, axes)
    m.require(len({u for u, _ in e.uses}) == 2 and e not in m.outputs, "{} has other readers", e.name)
    return m.b.softmax(x, axis=axes[0])  # type: ignore[no-any-return]


def log_softmax_chain(m: Match) -> Value:
    """sub(d, log(reduce_sum(exp(d)))) -> log_softmax(x), where d = sub(x, reduce_max(x)) over the same axis"""
    d = m.operand(m.root, 0)
    x, axes = _shifted(m, d)
    summed, others = _rows(m, m.operand(m.sole(m.node(m.operand(m.root, 1), "log")), 0), "reduce_sum")
    ok = m.operand(m.sole(m.node(summed, "exp")), 0) is d and axes == others
    m.require(ok, "the sum is not that of exp({}) over axes {}", d.name, axes)
    m.require(len({u for u, _ in d.uses}) == 2 and d not in m.outputs, "{} has other readers", d.name)
    return m.b.log_softmax(x, axis=axes[0])  # type: ignore[no-any-return]


# --- gelu -------------------------------------------------------------------------------------------------------------

CUBIC = 0.044715
SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def _factors(m: Match, v: Value, depth: int = 5) -> tuple[list[Value], float]:
    """The factors of a product and its numeric factor; products that others read too are factors themselves."""
    n = v.node
    if v in m.graph.constants and v.type.size == 1:
        return [], float(m.number(v))
    if (
        n is None
        or depth == 0
        or n.op.name not in ("mul", "div")
        or (n is not m.root and (len(n.output.uses) != 1 or v in m.outputs))
    ):
        return [v], 1.0
    a, b = n.inputs
    assert a is not None and b is not None
    if n.op.name == "div" and not (b in m.graph.constants and b.type.size == 1):
        return [v], 1.0
    m.matched.append(n)
    (xs, c), (ys, d) = _factors(m, a, depth - 1), _factors(m, b, depth - 1)
    with np.errstate(all="ignore"):
        return xs + ys, c * d if n.op.name == "mul" else float(np.float64(c) / np.float64(d))


def _polynomial(m: Match, v: Value, x: Value, depth: int = 6) -> dict[int, float]:
    """v as coefficients of powers of x; NoMatch where it is no polynomial."""
    if v is x:
        return {1: 1.0}
    if v in m.graph.constants and v.type.size == 1:
        return {0: float(m.number(v))}
    n = m.node(v, "add", "mul", "div", "pow")
    m.require(depth > 0, "the chain at {} is too long", v.name)
    p = _polynomial(m, m.operand(n, 0), x, depth - 1)
    if n.op.name == "pow":
        m.require(p == {1: 1.0} and m.number(m.operand(n, 1)) == 3, "{} is no cube of {}", v.name, x.name)
        return {3: 1.0}
    q = _polynomial(m, m.operand(n, 1), x, depth - 1)
    if n.op.name == "add":
        return {k: p.get(k, 0.0) + q.get(k, 0.0) for k in {*p, *q}}
    if n.op.name == "div":
        m.require(set(q) == {0} and q[0] != 0, "{} divides by {}", v.name, x.name)
        return {k: c / q[0] for k, c in p.items()}
    out: dict[int, float] = {}
    for i, c in p.items():
        for j, d in q.items():
            out[i + j] = out.get(i + j, 0.0) + c * d
    return out


def gelu_chain(m: Match) -> Value:
    """mul(mul(x, 0.5), add(erf(mul(x, 0.7071)), 1)) -> gelu(x); tanh(0.7979 * (x + 0.0447 * x^3)) -> "tanh" form"""
    factors, c = _factors(m, m.root.output)
    m.require(len(factors) == 2, "the product has {} factors besides numbers; gelu has 2", len(factors))
    near = 4 * _epsilon(m.root.output)
    m.require(math.isclose(c, 0.5, rel_tol=near), "the numeric factor is {} instead of 0.5", c)
    for x, gate in (factors, factors[::-1]):
        if gate.node is None or gate.node.op.name != "add":
            continue
        inner, one = m.either(m.sole(m.node(gate, "add")))
        m.require(m.number(one) == 1, "{} is added to the gate instead of 1", one.name)
        n = m.sole(m.node(inner, "erf", "tanh"))
        m.keeps_type(x)
        p = _polynomial(m, m.operand(n, 0), x)
        want = {1: math.sqrt(0.5)} if n.op.name == "erf" else {1: SQRT_2_OVER_PI, 3: SQRT_2_OVER_PI * CUBIC}
        fits = set(p) == set(want) and all(math.isclose(p[k], want[k], rel_tol=near) for k in want)
        m.require(fits, "the argument of {} is the polynomial {}, not {}", n.op.name, p, want)
        return m.b.gelu(x, approximate="none" if n.op.name == "erf" else "tanh")  # type: ignore[no-any-return]
    raise NoMatch("no factor is 1 + erf or 1 + tanh")


def _epsilon(v: Value) -> float:
    """The relative distance of neighbouring numbers of a value's dtype; constants of a model are rounded to it."""
    name = v.type.dtype.name
    return (
        2.0**-7 if name == "bf16" else 2.0**-10 if name == "f16" else 2.0**-23
    )  # doubles are often written with float32 digits


IDIOM_RULES: tuple[Rule, ...] = (
    Rule(standardize, ("div", "mul"), exact=False),
    Rule(root_mean_square, ("div", "mul"), exact=False),
    Rule(scale_of_norm, ("mul",), exact=False),
    Rule(bias_of_norm, ("add",), exact=False),
    Rule(softmax_chain, ("div",), exact=False),
    Rule(log_softmax_chain, ("sub",), exact=False),
    Rule(gelu_chain, ("mul", "div"), exact=False),
)
