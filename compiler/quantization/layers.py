"""The layers of a model that may be quantized: convolutions and products with constant weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx

from dnnc.ir.errors import InputError, count
from dnnc.quantization.onnx_graph import Model, attribute, walk
from dnnc.quantization.options import WEIGHT_ONLY, QuantizeOptions

Array = np.ndarray[Any, Any]
KINDS = ("Conv", "MatMul", "Gemm")
LEAST_WEIGHT = 1e-27  # below that a scale or its inverse is no normal number
OTHERS = {  # what people look for in the table, and why it stays as it is
    "ConvTranspose": "transposed convolutions have no integer kernels",
    "LSTM": "recurrent layers have no integer kernels",
    "GRU": "recurrent layers have no integer kernels",
    "RNN": "recurrent layers have no integer kernels",
    "Einsum": "its operands are not those of a product of matrices",
}


@dataclass(frozen=True)
class Layer:
    """A convolution or product with constant weights.

    Attributes:
        node: its name, which is unique.
        kind: the operator.
        x, y, weight: names of the activation, the result and the constant.
        axis: the output channels' axis of the weights.
        bias: the name of a constant that is added for each output channel, "" where there is none.
        adder: the node that adds it, where that is another one.
        group: of a convolution.
        refused: why it stays float in every scheme; "" where it need not.
    """

    node: str
    kind: str
    x: str
    y: str
    weight: str
    axis: int
    bias: str = ""
    adder: str = ""
    group: int = 1
    refused: str = ""

    def adder_result(self, m: Model) -> str:
        """The name of the result with its bias."""
        adder = m.sole_reader(self.y) if self.adder else None
        return self.y if adder is None else str(adder.output[0])

    def matrix(self, w: Array) -> Array:
        """Weights as [output channels, terms of a sum]; of a convolution in groups the terms of one group."""
        rows = np.moveaxis(w, self.axis, 0)
        return np.ascontiguousarray(rows.reshape(rows.shape[0], -1))

    def weights(self, rows: Array, like: Array) -> Array:
        """The inverse of `matrix`."""
        shape = np.moveaxis(like, self.axis, 0).shape
        return np.ascontiguousarray(np.moveaxis(rows.reshape(shape), 0, self.axis))


@dataclass(frozen=True)
class Kept:
    """A layer that stays float, and why."""

    node: str
    kind: str
    reason: str


def found_layers(m: Model) -> tuple[list[Layer], list[Kept]]:
    """The layers in the order of the nodes, and what has none of these forms."""
    layers: list[Layer] = []
    kept: list[Kept] = []
    for n in m.graph.node:
        if n.domain not in ("", "ai.onnx"):
            continue
        if n.op_type in KINDS:
            found = _layer(m, n)
            if isinstance(found, Layer):
                layers.append(found)
            else:
                kept.append(found)
        elif n.op_type in OTHERS:
            kept.append(Kept(n.name, n.op_type, OTHERS[n.op_type]))
        inner = sum(i.op_type in (*KINDS, *OTHERS) for i in walk(onnx.GraphProto(node=[n])) if i.name != n.name)
        if inner:
            kept.append(Kept(n.name, n.op_type, f"{count(inner, 'layer')} of its body: loops and branches stay float"))
    return layers, kept


def _layer(m: Model, n: onnx.NodeProto) -> Layer | Kept:
    x, weight = n.input[0], n.input[1]
    if x in m.constants and n.op_type == "MatMul" and weight not in m.constants:
        return Kept(n.name, n.op_type, "the constant is the first operand")
    if weight not in m.constants:
        return Kept(n.name, n.op_type, "both operands are activations")
    w = m.constants[weight]
    if w.dtype != np.float32:
        return Kept(n.name, n.op_type, f"the weights are {w.dtype}, not float32")
    if w.ndim < 2 or w.size == 0:
        return Kept(n.name, n.op_type, f"the weights are {list(w.shape)}: no matrix")
    if not np.isfinite(w).all():
        return Kept(n.name, n.op_type, f"{int((~np.isfinite(w)).sum())} of its weights are not finite")
    largest = float(np.abs(w).max())
    if 0 < largest < LEAST_WEIGHT:
        return Kept(n.name, n.op_type, f"its weights are at most {largest:.3g}, too small for a scale")
    layer = Layer(n.name, n.op_type, x, n.output[0], weight, w.ndim - 1)
    if n.op_type == "Conv":
        bias = n.input[2] if len(n.input) > 2 and n.input[2] in m.constants else ""
        return replace(layer, axis=0, group=int(attribute(n, "group", 1)), bias=bias)
    if n.op_type == "Gemm":
        if attribute(n, "transA", 0):
            return Kept(n.name, n.op_type, "the first operand is transposed")
        plain = attribute(n, "alpha", 1.0) == attribute(n, "beta", 1.0) == 1.0
        axis = 0 if attribute(n, "transB", 0) else 1
        c = n.input[2] if len(n.input) > 2 else ""
        vector = plain and c in m.constants and m.constants[c].reshape(-1).size == w.shape[axis]
        return replace(layer, axis=axis, bias=c if vector else "")
    if w.ndim > 2:
        return Kept(n.name, n.op_type, f"the weights are {list(w.shape)}: several matrices")
    adder = m.sole_reader(n.output[0])
    if adder is not None and adder.op_type == "Add":
        c = next(i for i in adder.input if i != n.output[0]) if len(set(adder.input)) == 2 else ""
        if c in m.constants and m.constants[c].size == w.shape[1] == m.constants[c].shape[-1]:
            return replace(layer, bias=c, adder=adder.name)
    return layer


def check_patterns(what: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """InputError where a pattern fits none of the layers."""
    unfit = [p for p in patterns if not any(fnmatchcase(n, p) for n in names)]
    if unfit:
        shown = ", ".join(names[:8])
        raise InputError(f"{what}: no layer fits {unfit[0]!r}; layers are {shown or 'none'}{' ...' * (len(names) > 8)}")


def refusal(layer: Layer, scheme: str, options: QuantizeOptions) -> str:
    """Why a layer cannot take a scheme; "" where it can."""
    if scheme in WEIGHT_ONLY and layer.kind == "Conv":
        return "only weights of products are kept in 8 or 4 bits and multiplied in float"
    if scheme in WEIGHT_ONLY and options.form == "nbits" and layer.kind == "Gemm" and layer.bias == "":
        return "MatMulNBits takes no product with factors or a matrix that is added"
    return ""
