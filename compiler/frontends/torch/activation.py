"""Activations, those that torch's core set or we keep as one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.torch.call import Call

Converter = Callable[[Call], Any]


def hardtanh(c: Call) -> Any:
    return c.b.clip(c.x(), low=float(c.number("min_val", -1)), high=float(c.number("max_val", 1)))


def gelu(c: Call) -> Any:
    return c.b.gelu(c.x(), approximate=c.get("approximate", "none"))


def elu(c: Call) -> Any:
    if (c.number("scale", 1), c.number("input_scale", 1)) == (1, 1):
        return c.b.elu(c.x(), alpha=float(c.number("alpha", 1)))
    x, dtype = c.x(), c.dtype
    low = c.b.mul(
        c.b.expm1(c.b.mul(x, c.scalar(c.number("input_scale"), dtype))),
        c.scalar(c.number("alpha") * c.number("scale"), dtype),
    )
    return c.b.where(c.b.greater(x, c.scalar(0.0, dtype)), c.b.mul(x, c.scalar(c.number("scale"), dtype)), low)


def softplus(c: Call) -> Any:
    """log(1 + exp(beta x)) / beta, and x itself beyond the threshold."""
    x, dtype = c.x(), c.dtype
    beta, threshold = c.number("beta", 1), c.number("threshold", 20)
    t = x if beta == 1 else c.b.mul(x, c.scalar(beta, dtype))
    y = c.b.softplus(t)
    y = y if beta == 1 else c.b.div(y, c.scalar(beta, dtype))
    return c.b.where(c.b.greater(t, c.scalar(threshold, dtype)), x, y)


def hardsigmoid(c: Call) -> Any:
    return c.b.hard_sigmoid(c.x(), alpha=1 / 6, beta=0.5)


def leaky_relu(c: Call) -> Any:
    return c.b.leaky_relu(c.x(), alpha=float(c.number("negative_slope", 0.01)))


def prelu(c: Call) -> Any:
    x, w = c.x(), c.x("weight")
    if w.type.rank == 1 and w.type.size != 1 and x.type.rank > 1:
        w = c.b.reshape(w, shape=(1, w.type.shape[0], *(1,) * (x.type.rank - 2)))
    elif w.type.rank == 1 and w.type.size == 1:
        w = c.b.reshape(w, shape=())
    return c.b.prelu(x, w)


def relu(c: Call) -> Any:
    return c.b.relu(c.x())


def log_sigmoid(c: Call) -> Any:
    """-softplus(-x); the second result, exp(-|x|), is for gradients: on a GPU it is empty."""
    x, more = c.x(), None
    if c.wants(1):
        small = c.b.exp(c.b.neg(c.b.abs(x)))
        more = small if c.type(1).shape == x.type.shape else c.b.full(shape=c.type(1).shape, value=0.0, dtype=c.dtype)
    return c.b.neg(c.b.softplus(c.b.neg(x))), more


ACTIVATION: dict[str, Converter] = {
    "hardtanh": hardtanh,
    "relu": relu,
    "relu6": lambda c: c.b.clip(c.x(), low=0.0, high=6.0),
    "gelu": gelu,
    "elu": elu,
    "softplus": softplus,
    "silu": lambda c: c.b.swish(c.x()),
    "mish": lambda c: c.b.mish(c.x()),
    "hardswish": lambda c: c.b.hard_swish(c.x()),
    "hardsigmoid": hardsigmoid,
    "leaky_relu": leaky_relu,
    "prelu": prelu,
    "_prelu_kernel": prelu,
    "log_sigmoid_forward": log_sigmoid,
}
