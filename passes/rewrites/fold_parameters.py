"""Fold batch normalization and per-channel scales and shifts into parameters, in the prologue.

    y = batch_norm(conv(x, w, b), g, h, mu, var)   ->   y = conv(x, w_0, b_0), prologue: s = g / sqrt(var + epsilon);
                                                        w_0 = w * s; b_0 = (b - mu) * s + h

The rules of `fold_batch_norm.py` for values that are not known yet. They are rounded once, from float64. Half floats
that overflow could not be seen here, so float16 is left alone. Rounding is moved, so strict numerics keep the graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir.dtype import bf16, f32, f64
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.types import TensorType
from dnnc.passes.planning.prologue import held_in
from dnnc.passes.rewrite import Match, Rule

FLOATS = (f32, f64, bf16)


def _invariant(m: Match, *values: Value) -> None:
    """All values are call-invariant, and not all are constants, which other rules fold."""
    m.require(all(m.graph.variance(v).call_invariant for v in values), "an operand changes from call to call")
    m.require(any(v in m.graph.parameters for v in values), "there is no parameter")
    m.require(all(v.type.row_major for v in values), "an operand has a layout")


class _Wide:
    """Arithmetic of parameters and constants in float64, in the prologue."""

    def __init__(self, graph: Graph) -> None:
        assert graph.prologue is not None
        self.graph, self.b = graph, Builder(graph.prologue)

    def of(self, v: Value) -> Value:
        x = held_in(self.graph, v)
        return x if x.type.dtype is f64 else self.b.op("cast", x, to=f64)

    def op(self, name: str, *operands: Any, **attrs: Any) -> Value:
        return self.b.op(name, *operands, **attrs)  # type: ignore[no-any-return]

    def done(self, x: Value, like: Value) -> Value:
        """A parameter that holds a value, in the dtype of another whose name it takes."""
        t = like.type.dtype
        x = x if x.type.dtype is t else self.op("cast", x, to=t)
        return self.graph.parameter(x, TensorType(t, x.type.shape), like.name)


def _channels(m: Match, c: Value, z: Value, axis: int) -> tuple[int, int]:
    """The elements of a value that differs along one axis of z alone, and the size of that axis."""
    shape, size = (1,) * (z.type.rank - c.type.rank) + c.type.shape, z.type.shape[axis]
    m.require(len(shape) == z.type.rank and isinstance(size, int), "{} does not fit the channels of {}", c.name, z.name)
    ok = all(d == 1 for k, d in enumerate(shape) if k != axis)
    m.require(ok, "{} does not vary along axis {} alone", c.name, axis)
    assert isinstance(size, int) and isinstance(shape[axis], int)
    return shape[axis], size  # type: ignore[return-value]


def _per_channel(w: _Wide, c: Value, have: int, size: int) -> Value:
    flat = w.op("reshape", w.of(c), shape=(have,))
    return flat if have == size else w.op("expand", flat, shape=(size,))


def norm_to_scale(m: Match) -> Value:
    """batch_norm(z, g, h, mu, var) -> add(mul(z, s), t), s = g / sqrt(var + epsilon), t = h - mu * s"""
    z = m.operand(m.root, 0)
    rest = [m.operand(m.root, k) for k in range(1, 5)]
    _invariant(m, *rest)
    m.require(z.type.dtype in FLOATS, "{} is {}", z.name, z.type.dtype)
    w = _Wide(m.graph)
    g, h, mu, var = map(w.of, rest)
    s = w.op("div", g, w.op("sqrt", w.op("add", var, np.float64(m.root.attrs["epsilon"]))))
    t = w.op("sub", h, w.op("mul", mu, s))
    shape = (-1,) + (1,) * (z.type.rank - 2)
    scale, shift = (
        w.done(w.op("reshape", x, shape=(x.type.size, *shape[1:])), like) for x, like in ((s, rest[0]), (t, rest[1]))
    )
    b = m.b
    return b.add(b.mul(z, scale), shift)  # type: ignore[no-any-return]


def _conv(m: Match, z: Value) -> Node:
    n = m.sole(m.node(z, "conv"))
    m.require(n.output.type.dtype in FLOATS and n.attrs.get("out_dtype") is None, "conv is not computed in floats")
    m.keeps_type(z)
    return n


def _invariant_operand(m: Match) -> tuple[Value, Value]:
    """The operands of the root, the call-invariant one behind the other."""
    a, b = m.operand(m.root, 0), m.operand(m.root, 1)
    return (a, b) if m.graph.variance(b).call_invariant else (b, a)


def scale_into_filters(m: Match) -> Value:
    """mul(conv(x, w, b), c) -> conv(x, w * c, b * c) for one c per output channel"""
    z, c = _invariant_operand(m)
    n = _conv(m, z)
    x, filters, bias = n.inputs[0], m.operand(n, 1), n.inputs[2] if len(n.inputs) > 2 else None
    _invariant(m, filters, c, *([bias] if bias is not None else []))
    have, size = _channels(m, c, z, 1)
    w = _Wide(m.graph)
    factor = _per_channel(w, c, have, size)
    column = w.op("reshape", factor, shape=(size,) + (1,) * (filters.type.rank - 1))
    made = [x, w.done(w.op("mul", w.of(filters), column), filters)]
    if bias is not None:
        made.append(w.done(w.op("mul", w.of(bias), factor), bias))
    return m.b.node(n.op, made, n.attrs).output


def shift_into_bias(m: Match) -> Value:
    """add(conv(x, w, b), c) -> conv(x, w, b + c) for one c per output channel"""
    z, c = _invariant_operand(m)
    n = _conv(m, z)
    bias = n.inputs[2] if len(n.inputs) > 2 else None
    _invariant(m, c, *([bias] if bias is not None else []))
    have, size = _channels(m, c, z, 1)
    w = _Wide(m.graph)
    total = _per_channel(w, c, have, size)
    total = total if bias is None else w.op("add", w.of(bias), total)
    return m.b.node(n.op, [n.inputs[0], n.inputs[1], w.done(total, c if bias is None else bias)], n.attrs).output


PARAMETER_RULES: tuple[Rule, ...] = (
    Rule(norm_to_scale, ("batch_norm",), exact=False),
    Rule(scale_into_filters, ("mul",), exact=False),
    Rule(shift_into_bias, ("add",), exact=False),
)
