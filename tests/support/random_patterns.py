"""Whole patterns for random graphs: the chains of ops that passes look for, which chance alone never puts together.

Each adds one to the graph of a Generator: norms, softmax and GELU in small ops (idioms), several products of one value
(siblings), attention, scales and batch norms beside contractions, convolutions wide enough for Winograd's algorithm,
concatenations that grow, gated channels. What they consist of varies as far as the passes allow, and sometimes a bit
further.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.ir.dtype import f32
from dnnc.ir.types import TensorType
from support.random_graphs import ANY_SIZE, Generator, Made


def _op(g: Generator, name: str, *operands: Made | None, **attrs: Any) -> Made | None:
    """A node; None where an operand is missing or it does not fit."""
    return None if any(m is None for m in operands) else g.add(name, *operands, **attrs)


def _input(g: Generator, shape: tuple[int, ...]) -> Made:
    """A new input: what begins with a constant would be folded, and reach no pass."""
    a = g.draw(f32, shape)
    m = Made(g.graph.add_input(f"x{len(g.arrays)}", TensorType(f32, g.dims(shape))), a.astype(np.float64), a, 0.0)
    g.arrays.append(a)
    g.pool.append(m)
    return m


def _constant(g: Generator, m: Made, shape: tuple[int, ...], low: float = -0.5, high: float = 0.5) -> Made:
    a = g.draw(m.dtype, shape, low, high)
    return Made(g.graph.constant(a, "w"), a.astype(np.float64), a, 0.0)


def _either(g: Generator, name: str, a: Made | None, b: Made | None) -> Made | None:
    """A commutative op, its operands in one of the two orders."""
    return _op(g, name, *((a, b) if g.chance(0.5) else (b, a)))


def _floats(g: Generator, rank: int = 1) -> Made:
    """A value that is no narrower than float32, mostly, with elements."""
    m = g.pick("f", rank)
    fits = m.exact.size and (m.dtype.bits >= 32 or g.chance(0.3)) and m.value not in g.graph.constants
    return m if fits else _input(g, tuple(max(d, 1) for d in m.shape))


# --- norms and activations in small ops -------------------------------------------------------------------------------


def _gelu(g: Generator) -> None:
    x = _floats(g)
    if g.chance(0.5):
        gate = _op(
            g,
            "erf",
            _op(g, "mul", x, g.number(x.dtype, 0.5**0.5))
            if g.chance(0.5)
            else _op(g, "div", x, g.number(x.dtype, 2**0.5)),
        )
    else:
        cube = _op(g, "mul", x, _op(g, "mul", x, x)) if g.chance(0.5) else _op(g, "pow", x, g.number(x.dtype, 3.0))
        inner = _either(g, "add", x, _either(g, "mul", cube, g.number(x.dtype, 0.044715)))
        gate = _op(g, "tanh", _either(g, "mul", inner, g.number(x.dtype, 0.7978846)))
    half = _either(g, "add", gate, g.number(x.dtype, 1.0))
    if g.chance(0.5):
        _either(g, "mul", _either(g, "mul", x, half), g.number(x.dtype, 0.5))
    else:
        _either(g, "mul", _either(g, "mul", x, g.number(x.dtype, 0.5)), half)


def _norm(g: Generator) -> None:
    """Rows by their mean and deviation, or by their mean square; then a scale and a shift, maybe."""
    x = _floats(g)
    axes = (-1,) if g.chance(0.6) or len(x.shape) < 2 else (len(x.shape) - 2, len(x.shape) - 1)
    d: Made | None = x
    if g.chance(0.7):
        d = _op(g, "sub", x, g.add("reduce_mean", x, axes=axes, keepdims=True))
    square = _op(g, "mul", d, d) if g.chance(0.6) else _op(g, "pow", d, g.number(x.dtype, 2.0))
    mean = None if square is None else g.add("reduce_mean", square, axes=axes, keepdims=True)
    root = _op(g, "sqrt", _either(g, "add", mean, g.number(x.dtype, g.one_of((1e-3, 0.5)))))
    y = _op(g, "div", d, root) if g.chance(0.6) else _either(g, "mul", d, _op(g, "reciprocal", root))
    shape = x.shape[len(x.shape) - len(axes) :]
    if g.chance(0.7):
        y = _either(g, "mul", y, _constant(g, x, shape, 0.2, 2.0))
    if g.chance(0.5):
        _either(g, "add", y, _constant(g, x, shape))


def _softmax(g: Generator) -> None:
    x = _floats(g)
    axes = (g.below(len(x.shape)),)
    d = _op(g, "sub", x, g.add("reduce_max", x, axes=axes, keepdims=True))
    e = _op(g, "exp", d)
    total = None if e is None else g.add("reduce_sum", e, axes=axes, keepdims=True)
    if g.chance(0.7):
        _op(g, "div", e, total)
    else:
        _op(g, "sub", d, _op(g, "log", total))


# --- contractions -----------------------------------------------------------------------------------------------------


def _siblings(g: Generator) -> None:
    """Two or three products of one value with constants, or equal parts of one product's columns."""
    x = _floats(g, 2)
    heads, size = g.one_of((1, 2, 3)), int(g.one_of((1, 4, 8, 16)))
    biased, turned, count = g.chance(0.6), g.chance(0.6), 2 + g.below(2)
    lead = len(x.shape) - 1
    perm = (*range(lead - 1), lead, lead - 1, lead + 1)
    made = []
    for y in (
        _columns(g, x, count, heads * size, biased)
        if g.chance(0.4)
        else [_product(g, x, heads * size, biased) for _ in range(count)]
    ):
        y = y and g.add("reshape", y, shape=g.dims((*x.shape[:-1], heads, size)))
        made.append(y and g.add("transpose", y, perm=perm) if turned else y)
    if g.chance(0.5):  # else what moves them may go behind what reads them both
        made[0] = _op(g, "softmax", made[0], axis=-1)
    _either(g, g.one_of(("add", "mul", "max")), made[0], made[1])


def _product(g: Generator, x: Made, columns: int, biased: bool) -> Made | None:
    y = _op(g, "matmul", x, _constant(g, x, (x.shape[-1], columns)))
    return _either(g, "add", y, _constant(g, x, (columns,))) if biased else y


def _columns(g: Generator, x: Made, count: int, size: int, biased: bool) -> list[Made | None]:
    """The parts into which a product is cut, in any order."""
    y, front = _product(g, x, count * size, biased), (0,) * (len(x.shape) - 1)
    order = range(count) if g.chance(0.5) else reversed(range(count))
    steps, shape = (1,) * len(x.shape), g.dims((*x.shape[:-1], size))
    return [_op(g, "slice", y, starts=(*front, k * size), steps=steps, shape=shape) for k in order]


def _attention(g: Generator) -> None:
    batch = g.one_of(((1,), (2,), (2, 3), (1, 4)))
    rows, keys, depth, out = (int(g.one_of(s)) for s in ((1, 3, 8, 17), (1, 4, 9, 16), (4, 8, 16), (4, 8, 17)))
    q = _input(g, (*batch, rows, depth))
    turned = g.chance(0.5)
    k = _input(g, (*batch, depth, keys) if turned else (*batch, keys, depth))
    v = _input(g, (*batch, keys, out))
    kt: Made | None = k if turned else g.add("transpose", k, perm=(*range(len(batch)), len(batch) + 1, len(batch)))
    s = _op(g, "matmul", q, kt)
    if g.chance(0.7):
        s = (
            _op(g, "mul", s, g.number(f32, depth**-0.5))
            if g.chance(0.5)
            else _op(g, "div", s, g.number(f32, depth**0.5))
        )
    if g.chance(0.5):
        s = _either(g, "add", s, _input(g, g.one_of(((rows, keys), (*batch[:-1], 1, 1, keys), (keys,)))))
    p = None if s is None else g.add("softmax", s, axis=-1)
    _op(g, "matmul", p, v)


def _scaled(g: Generator) -> None:
    """A contraction with constant weights; then a batch norm, or a scale and a shift, and an activation."""
    if g.chance(0.5):
        x = _input(g, (g.one_of((1, 2)), g.one_of((3, 16, 17)), 5, g.one_of((4, 7))))
        out = int(g.one_of((3, 8, 16, 33)))
        y = _op(
            g,
            "conv",
            x,
            _constant(g, x, (out, x.shape[1], 3, g.one_of((1, 3)))),
            pads=g.one_of(((1, 0, 1, 0), (0, 0, 0, 0))),
        )
        per_channel: tuple[int, ...] = (out, 1, 1)
    else:
        x = _floats(g, 2)
        out = int(g.one_of((3, 8, 16, 33)))
        y = _op(g, "matmul", x, _constant(g, x, (x.shape[-1], out)))
        per_channel = (out,)
    if len(per_channel) > 1 and g.chance(0.6):
        y = _op(g, "batch_norm", y, *(_constant(g, x, (out,), 0.2, 2.0) for _ in range(4)), epsilon=1e-3)
    else:
        y = _either(g, "mul", y, _constant(g, x, per_channel, 0.2, 2.0))
        y = _either(g, "add", y, _constant(g, x, per_channel))
    _op(g, g.one_of(("relu", "sigmoid", "swish")), y)


def _wide_conv(g: Generator) -> None:
    """A 3 x 3 convolution of many channels, and what follows one."""
    channels, size = g.one_of((32, 33, 40)), (g.one_of((8, 11, 12)), g.one_of((9, 12)))
    if g.large:
        channels, size = g.one_of((32, 48, 64)), (g.one_of((17, 24)), g.one_of((16, 23)))
    x = _input(g, (g.one_of((1, 1, 2)) if g.large else 1, channels, *size))
    out = int(g.one_of((32, 32, 40, 64) if g.large else (32, 32, 40, channels)))
    bias = [_constant(g, x, (out,))] if g.chance(0.6) else []
    y = _op(
        g,
        "conv",
        x,
        _constant(g, x, (out, x.shape[1], 3, 3), -0.1, 0.1),
        *bias,
        pads=g.one_of(((1, 1, 1, 1), (0, 0, 0, 0), (2, 0, 1, 1))),
    )
    if g.chance(0.5):
        y = _op(g, g.one_of(("relu", "sigmoid", "gelu")), y)
    if y is not None and y.shape == x.shape and g.chance(0.7):
        _either(g, "add", y, x)
    elif y is not None and g.chance(0.5) and min(y.shape[2:]) >= 2:
        g.add("max_pool", y, kernel=(2, 2), strides=(2, 2))


# --- wiring -----------------------------------------------------------------------------------------------------------


def _growing(g: Generator) -> None:
    """Concatenations that begin with the same values: dense nets."""
    x = _floats(g, 2)
    axis = 1 if len(x.shape) > 2 else g.below(2)
    parts: list[Made] = [x]
    for _ in range(2 + g.below(2)):
        whole = parts[0] if len(parts) == 1 else g.add("concat", *parts, axis=axis)
        y = _op(g, g.one_of(("relu", "tanh", "sigmoid", "neg")), whole)
        if y is not None and isinstance(y.type.shape[axis], int):
            cut = [min(1 + g.below(y.shape[k]), ANY_SIZE - 1) if k == axis else d for k, d in enumerate(y.type.shape)]
            y = g.add("slice", y, starts=(0,) * len(cut), steps=(1,) * len(cut), shape=tuple(cut))
        parts += [] if y is None else [y]
    if len(parts) > 1:
        g.add("concat", *parts, axis=axis)


def _gated(g: Generator) -> None:
    """Channels times what a small net makes of their means: squeeze and excitation."""
    x = _input(g, (g.one_of((1, 2)), g.one_of((4, 16, 17)), g.one_of((1, 5, 8)), g.one_of((4, 7))))
    c, hidden = x.shape[1], int(g.one_of((2, 8)))
    m = g.add("global_avg_pool", x)
    m = _op(g, "relu", _op(g, "conv", m, _constant(g, x, (hidden, c, 1, 1)), _constant(g, x, (hidden,))))
    gate = _op(g, g.one_of(("sigmoid", "hard_sigmoid")), _op(g, "conv", m, _constant(g, x, (c, hidden, 1, 1))))
    _either(g, "mul", x, gate)


PATTERNS: tuple[Callable[[Generator], None], ...] = (
    _wide_conv, _siblings, _norm, _growing, _gelu, _wide_conv, _attention, _siblings, _scaled, _softmax, _gated,
)  # fmt: skip
