"""Transformers with random weights as graphs, in float32 or quantized: an encoder (BERT) and one decode step (Llama).

Weights of QDQ form are i8 or e4m3, one scale for each column; activations are quantized to the same by constant
scales. Weight-only forms have 4 or 8 bits, a scale for each block of a column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.ir.dtype import BY_NAME, DType, f16, f32, i8, i64
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.types import tensor

Array = np.ndarray[Any, Any]
CACHES = ("keys", "values")


@dataclass
class Net:
    """A graph that grows; `form` of its products: "float", "int8" or "fp8" (QDQ), "w4" or "w8" (weights alone)."""

    form: str
    dtype: DType = f32  # of floats
    block: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        self.graph = Graph("net")
        self.b = Builder(self.graph)
        self.rng = np.random.default_rng(self.seed)

    def constant(self, a: Any) -> Value:
        return self.b.constant(np.asarray(a).astype(self.dtype.numpy))

    def linear(self, x: Value, n: int, bias: bool = True) -> Any:
        """x [..., k] times weights [k, n]."""
        b, k = self.b, int(x.type.shape[-1])  # type: ignore[call-overload]
        codes = (self.rng.integers(0, 256, (k, n), dtype=np.uint8) & 15).view(np.int8) - np.int8(8)
        step = np.float32(1 / (4.3 * k**0.5))
        if self.form == "float":
            w = self.constant(codes * step)
        elif self.form == "int8":
            codes = codes * np.int8(15)  # the range of 8 bits
            w = b.dequantize_linear(b.constant(codes), b.constant(np.full(n, step / 15)), axis=1)
            scale = b.constant(np.float32(6 / 127))
            x = b.dequantize_linear(b.quantize_linear(x, scale, b.constant(np.int8(0)), dtype=i8), scale,
                                    b.constant(np.int8(0)))  # fmt: skip
        elif self.form == "fp8":
            float8 = BY_NAME["f8e4m3fn"]
            w = b.constant((codes * np.float32(15)).astype(float8.numpy))
            w = b.dequantize_linear(w, b.constant(np.full(n, step / 15)), axis=1)
            scale = b.constant(np.float32(6 / 448))
            x = b.dequantize_linear(b.quantize_linear(x, scale, None, dtype=float8), scale)
        else:
            kind = BY_NAME["i" + self.form[1:]].numpy
            scales = self.constant(np.full((-(-k // self.block), n), step))
            w = b.dequantize_linear(b.constant(codes.astype(kind)), scales, axis=0, block=self.block)
        y = b.matmul(x, w)
        return b.add(y, self.constant(self.rng.standard_normal(n) * 0.1)) if bias else y

    def norm(self, x: Value) -> Any:
        n = x.type.shape[-1]
        scale, bias = (self.b.constant(np.full(n, v, np.float32)) for v in (1, 0))
        return self.b.layer_norm(x, scale, bias, axis=-1)

    def heads(self, x: Value, heads: int) -> Any:
        """[batch, tokens, heads * size] as [batch, heads, tokens, size]."""
        batch, tokens, width = x.type.shape
        y = self.b.reshape(x, shape=(batch, tokens, heads, int(width) // heads))  # type: ignore[call-overload]
        return self.b.transpose(y, perm=(0, 2, 1, 3))


def encoder(form: str, batch: int, tokens: int, layers: int = 12, width: int = 768, heads: int = 12) -> Graph:
    """Hidden states [batch, tokens, width] of BERT's layers, of embedded tokens."""
    net = Net(form)
    b, size = net.b, width // heads
    x = net.graph.add_input("x", tensor(f32, batch, tokens, width))
    for _ in range(layers):
        q, k, v = (net.heads(net.linear(x, width), heads) for _ in range(3))
        scores = b.mul(b.matmul(q, b.transpose(k, perm=(0, 1, 3, 2))), size**-0.5)
        y = b.transpose(b.matmul(b.softmax(scores, axis=-1), v), perm=(0, 2, 1, 3))
        y = net.linear(b.reshape(y, shape=(batch, tokens, width)), width)
        x = net.norm(b.add(y, x))
        y = net.linear(b.gelu(net.linear(x, 4 * width)), width)
        x = net.norm(b.add(y, x))
    net.graph.outputs = [x]
    return net.graph


def decoder(
    form: str, layers: int = 22, width: int = 2048, heads: int = 32, shared: int = 4, inner: int = 5632,
    vocabulary: int = 32000, context: int = 512,
) -> Graph:  # fmt: skip
    """One step of a Llama-shaped decoder of 1.1 B parameters in float16: a token's hidden state [1, width] -> logits.

    Inputs beside it: `at` [shared, 2], where each head's key goes in a cache; `mask` [context]; `cos` and `sin` of the
    place; caches `keys0`, `values0`, .. [shared, context, size], which the outputs after the logits replace.
    """
    net = Net(form, f16)
    b, g, size = net.b, net.graph, width // heads
    x = g.add_input("x", tensor(f16, 1, width))
    at = g.add_input("at", tensor(i64, shared, 2))
    mask = g.add_input("mask", tensor(f16, context))
    cos, sin = (g.add_input(name, tensor(f16, size)) for name in ("cos", "sin"))
    made: list[Any] = []

    def columns(v: Any, start: int, count: int) -> Any:
        return b.slice(v, starts=(0, start), steps=(1, 1), shape=(v.type.shape[0], count))

    def turned(v: Any) -> Any:
        half = size // 2
        other = b.concat(b.neg(columns(v, half, half)), columns(v, 0, half), axis=1)
        return b.add(b.mul(v, cos), b.mul(other, sin))

    def norm(v: Any) -> Any:
        return b.rms_norm(v, net.constant(np.ones(width)), axis=-1)

    for k in range(layers):
        caches = [g.add_input(f"{name}{k}", tensor(f16, shared, context, size)) for name in CACHES]
        y = net.linear(norm(x), width + 2 * shared * size, bias=False)
        q = turned(b.reshape(columns(y, 0, width), shape=(heads, size)))
        key = turned(b.reshape(columns(y, width, shared * size), shape=(shared, size)))
        new = b.reshape(columns(y, width + shared * size, shared * size), shape=(shared, size))
        keys, values = (b.scatter_nd(c, at, v) for c, v in zip(caches, (key, new)))
        made += [keys, values]
        q = b.reshape(q, shape=(shared, heads // shared, size))
        scores = b.add(b.mul(b.matmul(q, b.transpose(keys, perm=(0, 2, 1))), size**-0.5), mask)
        y = b.reshape(b.matmul(b.softmax(scores, axis=-1), values), shape=(1, width))
        x = b.add(x, net.linear(y, width, bias=False))
        y = net.linear(norm(x), 2 * inner, bias=False)
        gate = columns(y, 0, inner)
        y = b.mul(b.mul(gate, b.sigmoid(gate)), columns(y, inner, inner))
        x = b.add(x, net.linear(y, width, bias=False))
    g.outputs = [net.linear(norm(x), vocabulary, bias=False), *made]
    return g
