"""Decoder language models as ONNX files, one token at a time: structure and a seed, random weights in several storages.

    token [1, 1], past keys and values [1, heads, past, size] of each layer  ->  logits, keys and values of the token

Weights are floats, or `MatMulNBits` (8, 4 or 2 bits in blocks), or `DequantizeLinear` (8 bits, a scale for each
column).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. `kv_heads`: heads of keys and values; `gated`: RMS norm, rotary places and SwiGLU (Llama),
    else layer norm, learned places and GELU (GPT-2).
    """

    name: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    gated: bool


GPT2 = Shape("GPT-2", 768, 12, 12, 12, 3072, 50257, False)
LLAMA = Shape("Llama-shaped, 350 M", 1024, 24, 16, 16, 2816, 32000, True)
TINY = Shape("tiny", 64, 2, 4, 2, 128, 160, True)


@dataclass
class _Writer:
    """Nodes and constants of a model; `storage`: "float", "column8", or bits of `MatMulNBits` as text."""

    storage: str
    block: int
    level: int
    rng: np.random.Generator
    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    weight_bytes: int = 0  # of products, as they are stored

    def op(self, name: str, *inputs: str, domain: str = "", **attrs: Any) -> str:
        out = f"{name.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(name, list(inputs), [out], domain=domain, **attrs))
        return out

    def constant(self, a: Array, name: str = "") -> str:
        name = name or f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(a), name))
        return name

    def linear(self, x: str, rows: int, columns: int, bias: bool) -> str:
        """x @ w, w [rows, columns] random, in the storage."""
        w = self.rng.standard_normal((columns, rows), np.float32) * np.float32(0.5 / np.sqrt(rows))
        if self.storage == "float":
            y = self.op("MatMul", x, self.constant(w.T))
        elif self.storage == "column8":
            scale = np.abs(w).max(1) / 127
            q = np.rint(w / scale[:, None]).astype(np.int8)
            self.weight_bytes += q.nbytes + scale.nbytes
            held = self.op("DequantizeLinear", self.constant(q.T), self.constant(scale), axis=1)
            y = self.op("MatMul", x, held)
        else:
            y = self._few_bits(x, w, int(self.storage))
        return self.op("Add", y, self.constant(self.rng.standard_normal(columns, np.float32) * 0.01)) if bias else y

    def _few_bits(self, x: str, w: Array, bits: int) -> str:
        (columns, rows), half = w.shape, 1 << (bits - 1)
        groups = w.reshape(columns, rows // self.block, self.block)
        scale = np.abs(groups).max(2) / (half - 1)
        q = (np.rint(groups / scale[..., None]) + half).astype(np.uint8)
        each = 8 // bits
        parts = q.reshape(columns, rows // self.block, -1, each)
        packed = np.bitwise_or.reduce([parts[..., k] << (bits * k) for k in range(each)]).astype(np.uint8)
        self.weight_bytes += packed.nbytes + scale.nbytes
        attrs = {"K": rows, "N": columns, "bits": bits, "block_size": self.block, "accuracy_level": self.level}
        operands = x, self.constant(packed), self.constant(scale.astype(np.float32))
        return self.op("MatMulNBits", *operands, domain="com.microsoft", **attrs)

    def norm(self, x: str, width: int, gated: bool) -> str:
        scale = self.constant(np.ones(width, np.float32))
        if not gated:
            return self.op("LayerNormalization", x, scale, self.constant(np.zeros(width, np.float32)), epsilon=1e-5)
        return self.op("RMSNormalization", x, scale, epsilon=1e-5)


def decoder(
    shape: Shape, storage: str = "float", block: int = 32, level: int = 0, past: int = 128, seed: int = 0
) -> tuple[onnx.ModelProto, dict[str, Array], int]:
    """A model of one step, its inputs, and the bytes of the products' weights (0 for floats)."""
    w = _Writer(storage, block, level, np.random.default_rng(seed))
    size = shape.width // shape.heads
    table = w.rng.standard_normal((shape.vocabulary, shape.width), np.float32) * np.float32(0.05)
    x = w.op("Gather", w.constant(table, "embedding"), "token")
    places = None
    if shape.gated:
        angle = past / 10000 ** (np.arange(size // 2) * 2 / size)
        both = np.concatenate([angle, angle])
        places = w.constant(np.cos(both).astype(np.float32)), w.constant(np.sin(both).astype(np.float32))
    else:
        x = w.op("Add", x, w.constant(w.rng.standard_normal((1, 1, shape.width), np.float32) * np.float32(0.02)))
    inputs: dict[str, Array] = {"token": np.array([[7]], np.int64)}
    outputs = ["logits"]
    for k in range(shape.layers):
        for part in ("key", "value"):
            held = w.rng.standard_normal((1, shape.kv_heads, past, size), np.float32)
            inputs[f"past_{part}{k}"] = held
        x = w.op("Add", x, _attention(w, shape, w.norm(x, shape.width, shape.gated), k, places, outputs))
        x = w.op("Add", x, _feed_forward(w, shape, w.norm(x, shape.width, shape.gated)))
    logits = w.linear(w.norm(x, shape.width, shape.gated), shape.width, shape.vocabulary, False)
    w.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
    graph = helper.make_graph(
        w.nodes,
        shape.name,
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in inputs.items()
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        w.constants,
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11), inputs, w.weight_bytes


def _attention(w: _Writer, shape: Shape, x: str, k: int, places: tuple[str, str] | None, outputs: list[str]) -> str:
    size, bias = shape.width // shape.heads, not shape.gated
    widths = shape.width, shape.kv_heads * size, shape.kv_heads * size
    parts = []
    for n in widths:
        y = w.linear(x, shape.width, n, bias)
        y = w.op("Reshape", y, w.constant(np.array([1, 1, n // size, size], np.int64)))
        parts.append(w.op("Transpose", y, perm=[0, 2, 1, 3]))
    q, key, value = parts
    if places is not None:
        q, key = (_rotated(w, v, size, places) for v in (q, key))
    made = []
    for part, v in (("key", key), ("value", value)):
        w.nodes.append(helper.make_node("Identity", [v], [f"{part}{k}"]))
        outputs.append(f"{part}{k}")
        made.append(w.op("Concat", f"past_{part}{k}", v, axis=2))
    if shape.kv_heads != shape.heads:
        again = shape.heads // shape.kv_heads
        made = [_repeated(w, v, shape, again, size) for v in made]
    keys, values = made
    scores = w.op("MatMul", q, w.op("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = w.op("Mul", scores, w.constant(np.float32(size**-0.5)))
    y = w.op("MatMul", w.op("Softmax", scores, axis=-1), values)
    y = w.op("Reshape", w.op("Transpose", y, perm=[0, 2, 1, 3]), w.constant(np.array([1, 1, shape.width], np.int64)))
    return w.linear(y, shape.width, shape.width, bias)


def _repeated(w: _Writer, v: str, shape: Shape, again: int, size: int) -> str:
    """Each head of keys or values for several heads of queries."""
    v = w.op("Unsqueeze", v, w.constant(np.array([2], np.int64)))
    v = w.op("Expand", v, w.constant(np.array([1, shape.kv_heads, again, 1, 1], np.int64)))
    return w.op("Reshape", v, w.constant(np.array([1, shape.heads, -1, size], np.int64)))


def _rotated(w: _Writer, v: str, size: int, places: tuple[str, str]) -> str:
    low, high = (
        w.op("Slice", v, *(w.constant(np.array([n], np.int64)) for n in (at, at + size // 2, 3)))
        for at in (0, size // 2)
    )
    turned = w.op("Concat", w.op("Neg", high), low, axis=-1)
    return w.op("Add", w.op("Mul", v, places[0]), w.op("Mul", turned, places[1]))


def _feed_forward(w: _Writer, shape: Shape, x: str) -> str:
    if not shape.gated:
        y = w.op("Gelu", w.linear(x, shape.width, shape.inner, True), approximate="tanh")
        return w.linear(y, shape.inner, shape.width, True)
    gate, up = (w.linear(x, shape.width, shape.inner, False) for _ in range(2))
    y = w.op("Mul", w.op("Mul", gate, w.op("Sigmoid", gate)), up)
    return w.linear(y, shape.inner, shape.width, False)
