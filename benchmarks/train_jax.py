"""The part of `torch.nn` that `train_nets.py` uses, in JAX: the same names, arguments, weights and layouts.

Weights come from a state dict by `load`; nothing has first values. Batch norm puts its new statistics into its
attributes, from where `state` takes them while a step is traced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


class Module:
    def __init__(self) -> None:
        pass

    def __call__(self, x: Any) -> Any:
        return self.forward(x)  # type: ignore[attr-defined]


class Sequential(Module):
    def __init__(self, *layers: Any) -> None:
        self.layers = {str(k): layer for k, layer in enumerate(layers)}

    def forward(self, x: Any) -> Any:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Checkpointed(Module):
    """A block whose activations are computed again for the gradient; names are those of the block alone."""

    def __init__(self, block: Module) -> None:
        self.block = block

    def forward(self, x: Any) -> Any:
        def run(values: dict[str, Any], x: Any) -> Any:
            load(self.block, values)
            y = self.block(x)
            return y, state(self.block)

        y, new = jax.checkpoint(run)(state(self.block), x)
        load(self.block, new)
        return y


def unwrapped(module: Any) -> Any:
    return module.block if isinstance(module, Checkpointed) else module


def load(module: Module, values: Mapping[str, Any]) -> None:
    for path, value in values.items():
        *parts, last = path.split(".")
        owner: Any = module
        for part in parts:
            owner = unwrapped(owner)
            owner = owner.layers[part] if isinstance(owner, Sequential) else getattr(owner, part)
        setattr(unwrapped(owner), last, value)


def state(module: Module, prefix: str = "") -> dict[str, Any]:
    """All arrays by name."""
    module = unwrapped(module)
    children: Mapping[str, Any] = module.layers if isinstance(module, Sequential) else vars(module)
    found: dict[str, Any] = {}
    for name, x in children.items():
        if isinstance(x, Module):
            found |= state(x, f"{prefix}{name}.")
        elif isinstance(x, jax.Array):
            found[prefix + name] = x
    return found


# --- layers -----------------------------------------------------------------------------------------------------------


def pair(n: int | tuple[int, int]) -> tuple[int, int]:
    return (n, n) if isinstance(n, int) else n


class Linear(Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        pass

    def forward(self, x: Any) -> Any:
        return x @ self.weight.T + self.bias  # type: ignore[attr-defined]


class Embedding(Module):
    def __init__(self, rows: int, width: int) -> None:
        pass

    def forward(self, x: Any) -> Any:
        return self.weight[x]  # type: ignore[attr-defined]


class Conv2d(Module):
    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        self.stride, self.padding, self.groups, self.has_bias = pair(stride), pair(padding), groups, bias

    def forward(self, x: Any) -> Any:
        edges = [(p, p) for p in self.padding]
        w = self.weight  # type: ignore[attr-defined]
        y = lax.conv_general_dilated(x, w, self.stride, edges, feature_group_count=self.groups)
        return y + self.bias[:, None, None] if self.has_bias else y  # type: ignore[attr-defined]


class BatchNorm2d(Module):
    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        self.eps, self.momentum = eps, momentum

    def forward(self, x: Any) -> Any:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
        n = x.size // x.shape[1]
        m = self.momentum
        self.running_mean = (1 - m) * self.running_mean + m * lax.stop_gradient(mean)
        self.running_var = (1 - m) * self.running_var + m * n / (n - 1) * lax.stop_gradient(var)
        scale = self.weight * lax.rsqrt(var + self.eps)  # type: ignore[attr-defined]
        shift = self.bias - mean * scale  # type: ignore[attr-defined]
        return x * scale[:, None, None] + shift[:, None, None]


class LayerNorm(Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        self.eps = eps

    def forward(self, x: Any) -> Any:
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(var + self.eps) * self.weight + self.bias  # type: ignore[attr-defined]


class MaxPool2d(Module):
    def __init__(self, size: int, stride: int | None = None, padding: int = 0) -> None:
        self.size, self.stride, self.padding = size, stride or size, padding

    def forward(self, x: Any) -> Any:
        edges = ((0, 0), (0, 0), *((self.padding, self.padding),) * 2)
        window, strides = (1, 1, self.size, self.size), (1, 1, self.stride, self.stride)
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, edges)


class AdaptiveAvgPool2d(Module):
    def __init__(self, size: int) -> None:
        assert size == 1

    def forward(self, x: Any) -> Any:
        return x.mean((2, 3), keepdims=True)


class Flatten(Module):
    def forward(self, x: Any) -> Any:
        return x.reshape(x.shape[0], -1)


class Identity(Module):
    def forward(self, x: Any) -> Any:
        return x


class ReLU(Module):
    def forward(self, x: Any) -> Any:
        return relu(x)


class Hardswish(Module):
    def forward(self, x: Any) -> Any:
        return x * jnp.clip(x + 3, 0, 6) / 6


class Hardsigmoid(Module):
    def forward(self, x: Any) -> Any:
        return jnp.clip(x + 3, 0, 6) / 6


class GELU(Module):
    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate

    def forward(self, x: Any) -> Any:
        return jax.nn.gelu(x, approximate=self.approximate == "tanh")


class LSTM(Module):
    def __init__(self, inputs: int, width: int, layers: int, batch_first: bool) -> None:
        assert batch_first
        self.width, self.depth = width, layers

    def forward(self, x: Any) -> Any:
        y = x.swapaxes(0, 1)
        for k in range(self.depth):
            w, u, b, c = (getattr(self, f"{n}_l{k}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))

            def cell(old: Any, row: Any, u: Any = u) -> Any:
                h, state = old
                i, f, g, o = jnp.split(row + h @ u.T, 4, axis=-1)
                state = jax.nn.sigmoid(f) * state + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(state)
                return (h, state), h

            zero = jnp.zeros((y.shape[1], self.width), y.dtype)
            _, y = lax.scan(cell, (zero, zero), y @ w.T + b + c)
        return y.swapaxes(0, 1), None


# --- functions --------------------------------------------------------------------------------------------------------

relu, tanh = jax.nn.relu, jnp.tanh
functional: Any = sys.modules[__name__]


def linear(x: Any, weight: Any) -> Any:
    return x @ weight.T


def cross_entropy(logits: Any, labels: Any) -> Any:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -chosen.mean()


def scaled_dot_product_attention(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    y = jax.nn.dot_product_attention(*(t.swapaxes(1, 2) for t in (q, k, v)), is_causal=is_causal)
    return y.swapaxes(1, 2)


# --- a step -----------------------------------------------------------------------------------------------------------


def train_step(module: Module, loss: Any, values: Mapping[str, Any], optimizer: str, rate: float) -> Any:
    """A function of a batch that gives the loss; it holds parameters, optimizer state and buffers."""
    values = {n: jnp.asarray(v) for n, v in values.items() if not n.endswith("num_batches_tracked")}
    buffers = {n: v for n, v in values.items() if n.endswith(("running_mean", "running_var"))}
    params = {n: v for n, v in values.items() if n not in buffers}

    def loss_of(params: Any, buffers: Any, x: Any, labels: Any) -> Any:
        load(module, {**params, **buffers})
        found = loss(functional, module, x, labels)
        made = state(module)
        return found, {n: made[n] for n in buffers}

    def sgd(p: Any, g: Any, t: Any, v: Any) -> Any:
        v = 0.9 * v + g
        return p - rate * v, v

    def adam(p: Any, g: Any, t: Any, s: Any) -> Any:
        m, v = 0.9 * s[0] + 0.1 * g, 0.999 * s[1] + 0.001 * g * g
        return p - rate / (1 - 0.9**t) * m / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8), (m, v)

    update = adam if optimizer == "Adam" else sgd

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3))
    def step(params: Any, moments: Any, t: Any, buffers: Any, x: Any, labels: Any) -> Any:
        (found, buffers), g = jax.value_and_grad(loss_of, has_aux=True)(params, buffers, x, labels)
        t = t + 1
        new = {n: update(p, g[n], t, moments[n]) for n, p in params.items()}
        return found, {n: a for n, (a, _) in new.items()}, {n: b for n, (_, b) in new.items()}, t, buffers

    def zeros(p: Any) -> Any:
        return (jnp.zeros_like(p), jnp.zeros_like(p)) if optimizer == "Adam" else jnp.zeros_like(p)

    held = [params, {n: zeros(p) for n, p in params.items()}, jnp.float32(0), buffers]
    del params, buffers, values

    def call(x: Any, labels: Any) -> float:
        found, *held[:] = step(*held, x, labels)
        return float(found)

    return call
