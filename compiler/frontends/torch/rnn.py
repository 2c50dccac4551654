"""LSTM, GRU and RNN layers: one product for the inputs of all steps, then a loop over the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.torch.call import Call
from dnnc.frontends.torch.movement import part
from dnnc.ir.dtype import i64
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import const, unwrap
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.types import TensorType

Converter = Callable[[Call], Any]
Step = Callable[[Builder, Value, list[Value], Value, Value | None], list[Value]]


def layers(step: Step, states: int) -> Converter:
    """Operands as in torch's `lstm.input`, `gru.input`, `rnn_tanh.input`; results: all h, the last states."""

    def convert(c: Call) -> Any:
        x, initial = c.x("input"), c.args["hx"]
        initial = list(initial) if isinstance(initial, list) else [initial]
        if c.get("train") and c.get("dropout"):
            raise UnsupportedError("dropout between recurrent layers: call .eval() first")
        first = c.flag("batch_first")
        x = c.b.transpose(x, perm=(1, 0, 2)) if first else x
        directions = 2 if c.flag("bidirectional") else 1
        weights = list(c.args["params"])
        each = len(weights) // (c.integer("num_layers") * directions)
        last: list[list[Value]] = [[] for _ in range(states)]
        for k in range(c.integer("num_layers")):
            made = []
            for d in range(directions):
                at = k * directions + d
                own = weights[at * each : (at + 1) * each]
                start = [c.b.squeeze(part(c, s, 0, at, 1), axes=(0,)) for s in initial]
                y, ends = run(c, x, own, start, step, d == 1, c.flag("has_biases"))
                made.append(y)
                for kept, end in zip(last, ends):
                    kept.append(c.b.unsqueeze(end, axes=(0,)))
            x = made[0] if directions == 1 else c.b.concat(*made, axis=2)
        y = c.b.transpose(x, perm=(1, 0, 2)) if first else x
        return y, *(kept[0] if len(kept) == 1 else c.b.concat(*kept, axis=0) for kept in last)

    return convert


def run(
    c: Call, x: Value, own: list[Value], start: list[Value], step: Step, backward: bool, biased: bool
) -> tuple[Value, list[Value]]:
    """One direction of a layer over [steps, batch, features]: all h, and the last states."""
    if len(own) != (4 if biased else 2):
        raise UnsupportedError("LSTM with a projection (proj_size)")
    b = c.b
    rows = b.matmul(x, b.transpose(own[0], perm=(1, 0)))
    rows = b.add(rows, own[2]) if biased else rows
    recurrent = b.transpose(own[1], perm=(1, 0))
    given = [recurrent, *([own[3]] if biased else [])]
    body = Graph("body")
    body.add_input("number", TensorType(i64, ()))
    old = [body.add_input(f"state{k}", s.type) for k, s in enumerate(start)]
    row = body.add_input("row", TensorType(rows.type.dtype, rows.type.shape[1:]))
    inner = [body.add_input(n, v.type) for n, v in zip(("recurrent", "bias"), given)]
    new = step(Builder(body, locs=b.locs), row, old, inner[0], inner[1] if biased else None)
    body.outputs = [*new, new[0]]
    back = (backward, backward) if backward else ()
    attrs = {"body": body, "carried": len(start), "scanned": 1, "length": x.type.shape[0], "backward": back}
    *ends, y = b.op("loop", None, None, *start, rows, *given, **attrs)
    return y, ends


def gate(b: Builder, v: Value, k: int, of: int) -> Any:
    n = unwrap(const(v.type.shape[1]) // of)
    return b.slice(v, starts=(0, unwrap(const(n) * k)), steps=(1, 1), shape=(v.type.shape[0], n))


def inside(b: Builder, h: Value, recurrent: Value, bias: Value | None) -> Any:
    y = b.matmul(h, recurrent)
    return y if bias is None else b.add(y, bias)


def lstm_step(b: Builder, row: Value, old: list[Value], recurrent: Value, bias: Value | None) -> list[Value]:
    """Gates input, forget, cell, output: c' = f * c + i * g, h' = o * tanh(c')"""
    h, cell = old
    v = b.add(row, inside(b, h, recurrent, bias))
    i, f, o = (b.sigmoid(gate(b, v, k, 4)) for k in (0, 1, 3))
    new = b.add(b.mul(f, cell), b.mul(i, b.tanh(gate(b, v, 2, 4))))
    return [b.mul(o, b.tanh(new)), new]


def gru_step(b: Builder, row: Value, old: list[Value], recurrent: Value, bias: Value | None) -> list[Value]:
    """Gates reset, update, new: n = tanh(x + r * (W h + b)), h' = (1 - z) * n + z * h"""
    (h,) = old
    v = inside(b, h, recurrent, bias)
    r, z = (b.sigmoid(b.add(gate(b, row, k, 3), gate(b, v, k, 3))) for k in (0, 1))
    n = b.tanh(b.add(gate(b, row, 2, 3), b.mul(r, gate(b, v, 2, 3))))
    return [b.add(b.mul(b.sub(b.constant(1.0, dtype=z.type.dtype), z), n), b.mul(z, h))]


def rnn_step(activation: str) -> Step:
    def step(b: Builder, row: Value, old: list[Value], recurrent: Value, bias: Value | None) -> list[Value]:
        return [b.op(activation, b.add(row, inside(b, old[0], recurrent, bias)))]

    return step


def one_direction(c: Call) -> Any:
    """mkldnn_rnn_layer, torch's form of each LSTM direction on a CPU; the last result is its scratch memory."""
    if c.integer("mode") != 2 or c.ints("batch_sizes"):
        raise UnsupportedError("mkldnn_rnn_layer of another kind than LSTM, or over packed sequences")
    x, biased = c.x("input"), c.flag("has_biases")
    own = [c.x(f"weight{k}") for k in range(4 if biased else 2)]
    start = [c.b.reshape(c.x(n), shape=c.x(n).type.shape[-2:]) for n in ("hx_", "cx_")]
    y, ends = run(c, x, own, start, lstm_step, c.flag("reverse"), biased)
    return y, *(c.b.reshape(s, shape=c.type(k).shape) for k, s in enumerate(ends, 1)), None


RNN: dict[str, Converter] = {
    "lstm": layers(lstm_step, 2),
    "gru": layers(gru_step, 1),
    "mkldnn_rnn_layer": one_direction,
    "rnn_tanh": layers(rnn_step("tanh"), 1),
    "rnn_relu": layers(rnn_step("relu"), 1),
}
