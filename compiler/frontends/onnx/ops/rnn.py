"""Converters of LSTM, GRU and RNN: one matrix product for the inputs of all steps, then a loop over the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dnnc.frontends.onnx.call import Call, number
from dnnc.frontends.onnx.region import loop_node
from dnnc.ir.dtype import i64
from dnnc.ir.errors import ModelError, UnsupportedError
from dnnc.ir.graph import Value
from dnnc.ir.types import Dim

Converter = Callable[[Call], Any]
Activation = Callable[[Value], Value]
UNROLLED = 3  # steps: more are a loop
DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
# operator -> (gates per direction, default activations)
KINDS = {"RNN": (1, ("Tanh",)), "GRU": (3, ("Sigmoid", "Tanh")), "LSTM": (4, ("Sigmoid", "Tanh", "Tanh"))}
PLAIN = {"tanh": "tanh", "sigmoid": "sigmoid", "relu": "relu", "softsign": "softsign", "softplus": "softplus"}
WITH_BOTH = {"hardsigmoid": (0.2, 0.5), "affine": (1.0, 0.0), "scaledtanh": (1.0, 1.0)}
WITH_ALPHA = {"leakyrelu": ("leaky_relu", 0.01), "thresholdedrelu": ("thresholded_relu", 1.0), "elu": ("elu", 1.0)}


@dataclass(frozen=True)
class _Direction:
    """One direction of a layer: x W^T + b of all steps, R^T in the order of the gates, and what a step needs."""

    inputs: Value  # [steps, batch, gates*hidden]
    recurrent: Value  # [hidden, gates*hidden]
    reset_bias: Value | None  # [hidden], GRU with linear_before_reset
    peephole: list[Value] | None  # [hidden] each, LSTM
    hidden: int
    activations: list[Activation]
    clip: float


def layer(kind: str) -> Converter:
    """Inputs: x, W, R, B, lengths, initial h; LSTM: initial c, peepholes. Outputs: all h, last h, last c."""

    def convert(c: Call) -> Any:
        x = c.x()
        if c.integer("layout", 0):
            x = c.b.transpose(x, perm=(1, 0, 2))
        backward = DIRECTIONS.get(c.text("direction", "forward"))
        if backward is None:
            raise ModelError(
                f"attribute direction must be forward, reverse or bidirectional, got {c.text('direction')!r}"
            )
        runs = [_run(c, kind, x, d, reverse) for d, reverse in enumerate(backward)]
        y = _joined(c, [r[0] for r in runs], 1)  # [steps, directions, batch, hidden]
        last = [_joined(c, [r[1][k] for r in runs], 0) for k in range(len(runs[0][1]))]
        if c.integer("layout", 0):
            y, last = c.b.transpose(y, perm=(2, 0, 1, 3)), [c.b.transpose(v, perm=(1, 0, 2)) for v in last]
        return (y, *last)

    return convert


def _joined(c: Call, parts: list[Value], axis: int) -> Any:
    parts = [c.b.unsqueeze(p, axes=(axis,)) for p in parts]
    return parts[0] if len(parts) == 1 else c.b.concat(*parts, axis=axis)


def _part(c: Call, v: Value, axis: int, start: int, size: int) -> Any:
    """`size` indices of an axis."""
    shape: list[Dim] = list(v.type.shape)
    starts = [0] * len(shape)
    starts[axis], shape[axis] = start, size
    if tuple(shape) == v.type.shape:
        return v
    return c.b.slice(v, starts=tuple(starts), steps=(1,) * len(shape), shape=tuple(shape))


def _row(c: Call, v: Value, k: int) -> Any:
    """v[k]"""
    return c.b.squeeze(_part(c, v, 0, k, 1), axes=(0,))


# --- one direction ----------------------------------------------------------------------------------------------------


def _direction(c: Call, kind: str, x: Value, d: int) -> _Direction:
    gates, defaults = KINDS[kind]
    w, r = _row(c, c.x(1), d), _row(c, c.x(2), d)
    hidden = number(r.type.shape[1], "the hidden size")
    inputs = c.b.matmul(x, c.b.transpose(w, perm=(1, 0)))
    reset_bias = None
    if c.has(3):
        b = _row(c, c.x(3), d)
        wb, rb = _part(c, b, 0, 0, gates * hidden), _part(c, b, 0, gates * hidden, gates * hidden)
        inputs = c.b.add(inputs, wb)
        if kind == "GRU" and c.flag("linear_before_reset"):  # the candidate's recurrent bias is inside of the reset
            reset_bias = _part(c, rb, 0, 2 * hidden, hidden)
            zero = c.b.full(shape=(hidden,), value=0.0, dtype=rb.type.dtype)
            rb = c.b.concat(_part(c, rb, 0, 0, 2 * hidden), zero, axis=0)
        inputs = c.b.add(inputs, rb)
    peephole = None
    if kind == "LSTM" and c.has(7):
        p = _row(c, c.x(7), d)
        peephole = [_part(c, p, 0, k * hidden, hidden) for k in range(3)]
    recurrent = c.b.transpose(r, perm=(1, 0))
    activations = _activations(c, len(defaults), d, defaults)
    return _Direction(inputs, recurrent, reset_bias, peephole, hidden, activations, c.number("clip", 0.0))


def _activations(c: Call, count: int, d: int, defaults: tuple[str, ...]) -> list[Activation]:
    names = c.texts("activations")
    names = defaults if names is None else names[d * count : (d + 1) * count]
    if len(names) != count:
        raise ModelError(f"attribute activations needs {count} names per direction, got {c.texts('activations')}")
    alphas, betas = list(c.numbers("activation_alpha") or ()), list(c.numbers("activation_beta") or ())
    return [_activation(c, n, alphas, betas) for n in names]


def _activation(c: Call, name: str, alphas: list[float], betas: list[float]) -> Activation:
    """Parameters are given in order to those activations that have some."""
    key = name.lower()
    if key in PLAIN:
        return lambda v: c.b.op(PLAIN[key], v)
    if key in WITH_ALPHA:
        op, default = WITH_ALPHA[key]
        alpha = alphas.pop(0) if alphas else default
        return lambda v: c.b.op(op, v, alpha=alpha)
    if key not in WITH_BOTH:
        raise UnsupportedError(f"activation {name!r} of a recurrent layer")
    a, b = WITH_BOTH[key]
    a, b = (alphas.pop(0) if alphas else a), (betas.pop(0) if betas else b)
    if key == "hardsigmoid":
        return lambda v: c.b.hard_sigmoid(v, alpha=a, beta=b)
    if key == "affine":
        return lambda v: c.b.add(c.b.mul(v, a), b)
    return lambda v: c.b.mul(c.b.tanh(c.b.mul(v, b)), a)


def _run(c: Call, kind: str, x: Value, d: int, reverse: bool) -> tuple[Value, list[Value]]:
    """All hidden states [steps, batch, hidden] in the order of time, and the last states."""
    steps = x.type.shape[0]
    lengths = c.cast(c.x(4), i64) if c.has(4) else None
    ragged = reverse and lengths is not None
    if ragged:
        x = c.b.reverse_sequence(x, lengths, batch_axis=1, time_axis=0)
    spec = _direction(c, kind, x, d)
    states = [_initial(c, x, 5 + k, d, spec.hidden) for k in range(2 if kind == "LSTM" else 1)]
    step = {"RNN": _rnn_step, "GRU": _gru_step, "LSTM": _lstm_step}[kind]

    def advance(k: Value | int, row: Value, *old: Value) -> list[Value]:
        """The new states, and the hidden state as it is shown: 0 after the end of a sequence."""
        new = step(c, spec, row, list(old))
        if lengths is None:
            return [*new, new[0]]
        alive = c.b.unsqueeze(c.b.greater(lengths, k), axes=(1,))
        return [
            *(c.b.where(alive, a, b) for a, b in zip(new, old)),
            c.b.where(alive, new[0], c.const(0.0, new[0].type.dtype)),
        ]

    backward = reverse and not ragged
    if isinstance(steps, int) and steps <= UNROLLED:
        outputs: list[Value] = []
        for k in range(steps):
            *states, shown = advance(k, _row(c, spec.inputs, steps - 1 - k if backward else k), *states)
            outputs.append(shown)
        y = _joined(c, outputs[::-1] if backward else outputs, 0)
    else:
        count = len(states)
        made = loop_node(
            c,
            states,
            [spec.inputs],
            lambda k, *v: advance(k, v[count], *v[:count]),
            length=steps,
            backward=(backward, backward),
        )
        states, y = made[:count], made[count]
    if ragged:
        y = c.b.reverse_sequence(y, lengths, batch_axis=1, time_axis=0)
    return y, states


def _initial(c: Call, x: Value, i: int, d: int, hidden: int) -> Any:
    if not c.has(i):
        return c.b.full(shape=(x.type.shape[1], hidden), value=0.0, dtype=x.type.dtype)
    v = c.x(i)
    if c.integer("layout", 0):
        v = c.b.transpose(v, perm=(1, 0, 2))
    return _row(c, v, d)


# --- one step ---------------------------------------------------------------------------------------------------------


def _clipped(c: Call, s: _Direction, v: Value) -> Any:
    return c.b.clip(v, low=-s.clip, high=s.clip) if s.clip > 0 else v


def _gate(c: Call, s: _Direction, v: Value, k: int) -> Any:
    return _part(c, v, 1, k * s.hidden, s.hidden)


def _rnn_step(c: Call, s: _Direction, x: Value, states: list[Value]) -> list[Value]:
    return [s.activations[0](_clipped(c, s, c.b.add(x, c.b.matmul(states[0], s.recurrent))))]


def _gru_step(c: Call, s: _Direction, x: Value, states: list[Value]) -> list[Value]:
    """Gates update, reset, candidate: h' = (1 - z) * candidate + z * h"""
    (h,) = states
    f, g = s.activations
    two = _part(c, s.recurrent, 1, 0, 2 * s.hidden)
    zr = f(_clipped(c, s, c.b.add(_part(c, x, 1, 0, 2 * s.hidden), c.b.matmul(h, two))))
    z, r = _gate(c, s, zr, 0), _gate(c, s, zr, 1)
    third = _gate(c, s, s.recurrent, 2)
    if c.flag("linear_before_reset"):
        inner = c.b.matmul(h, third)
        inner = c.b.mul(r, inner if s.reset_bias is None else c.b.add(inner, s.reset_bias))
    else:
        inner = c.b.matmul(c.b.mul(r, h), third)
    candidate = g(_clipped(c, s, c.b.add(_gate(c, s, x, 2), inner)))
    return [c.b.add(c.b.mul(c.b.sub(c.const(1.0, z.type.dtype), z), candidate), c.b.mul(z, h))]


def _lstm_step(c: Call, s: _Direction, x: Value, states: list[Value]) -> list[Value]:
    """Gates input, output, forget, cell: c' = f * c + i * cell, h' = o * act(c')"""
    h, cell = states
    f, g, out = s.activations
    v = c.b.add(x, c.b.matmul(h, s.recurrent))

    def gate(k: int, seen: Value, peep: int) -> Value:
        e = _gate(c, s, v, k)
        e = e if s.peephole is None else c.b.add(e, c.b.mul(s.peephole[peep], seen))
        return f(_clipped(c, s, e))

    i = gate(0, cell, 0)
    forget = c.b.sub(c.const(1.0, i.type.dtype), i) if c.flag("input_forget") else gate(2, cell, 2)
    new = c.b.add(c.b.mul(forget, cell), c.b.mul(i, g(_clipped(c, s, _gate(c, s, v, 3)))))
    o = gate(1, new, 1)
    return [c.b.mul(o, out(new)), new]


RNN: dict[str, Converter] = {kind: layer(kind) for kind in KINDS}
