"""Converters of ai.onnx.preview.training optimizers: learning rate, step, then tensors, gradients, states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.onnx.call import Call
from dnnc.ir.errors import ModelError
from dnnc.ir.graph import Value

Converter = Callable[[Call], Any]
Update = Callable[[Call, Value, Value, list[Value]], list[Value]]


def optimizer(update: Update, states: int) -> Converter:
    """`update(call, rate, step, [x, gradient, states...])` for each tensor; outputs are grouped by kind."""

    def convert(c: Call) -> Any:
        values = c.all()
        count, rest = divmod(len(values) - 2, 2 + states)
        if rest or count < 1:
            raise ModelError(f"expected rate, step and {2 + states} inputs per tensor, got {len(values)} in all")
        made = [update(c, values[0], values[1], values[2 + k :: count]) for k in range(count)]
        return tuple(v for column in zip(*made) for v in column)

    return convert


def _regularized(c: Call, x: Value, gradient: Value) -> Any:
    return c.b.add(c.b.mul(x, c.number("norm_coefficient", 0.0)), gradient)


def _adagrad(c: Call, rate: Value, step: Value, values: list[Value]) -> list[Value]:
    b, (x, gradient, h) = c.b, values
    rate = b.div(rate, b.add(b.mul(c.cast(step, rate.type.dtype), c.number("decay_factor", 0.0)), 1.0))
    g = _regularized(c, x, gradient)
    h = b.add(h, b.mul(g, g))
    return [b.sub(x, b.div(b.mul(rate, g), b.add(b.sqrt(h), c.number("epsilon", 1e-6)))), h]


def _adam(c: Call, rate: Value, step: Value, values: list[Value]) -> list[Value]:
    b, (x, gradient, v, h) = c.b, values
    alpha, beta = c.number("alpha", 0.9), c.number("beta", 0.999)
    g = _regularized(c, x, gradient)
    v = b.add(b.mul(v, alpha), b.mul(g, 1 - alpha))
    h = b.add(b.mul(h, beta), b.mul(b.mul(g, g), 1 - beta))
    t, one = c.cast(step, rate.type.dtype), c.const(1.0, rate.type.dtype)
    left = [b.sub(one, b.pow(c.const(k, rate.type.dtype), t)) for k in (alpha, beta)]
    corrected = b.where(b.greater(step, 0), b.div(b.mul(rate, b.sqrt(left[1])), left[0]), rate)
    x = b.sub(x, b.mul(corrected, b.div(v, b.add(b.sqrt(h), c.number("epsilon", 1e-6)))))
    return [b.mul(x, 1 - c.number("norm_coefficient_post", 0.0)), v, h]


def _momentum(c: Call, rate: Value, step: Value, values: list[Value]) -> list[Value]:
    """The gradient counts fully at step 0, by beta later."""
    b, (x, gradient, v) = c.b, values
    alpha = c.number("alpha")
    g = _regularized(c, x, gradient)
    dtype = g.type.dtype
    beta = b.where(b.greater(step, 0), c.const(c.number("beta"), dtype), c.const(1.0, dtype))
    v = b.add(b.mul(v, alpha), b.mul(beta, g))
    return [b.sub(x, b.mul(rate, b.add(g, b.mul(v, alpha)) if c.text("mode") == "nesterov" else v)), v]


TRAINING: dict[str, Converter] = {
    "Adagrad": optimizer(_adagrad, 1),
    "Adam": optimizer(_adam, 2),
    "Momentum": optimizer(_momentum, 1),
}
