"""Activations and weights in 16 bits as products of bytes: a layer whose 8 bits lose too much stays in integers.

    x ~ a + r    a: bytes of a grid, r: what they leave, in steps of 1/254 of the grid's
    W ~ V + U    in the same way, for each output channel
    conv(x, W) + b  ->  (conv(a, V) + b) + (conv(r, V) + conv(a, U))

r and U together are below a step in 2^16 and are left out. All are QuantizeLinear and DequantizeLinear with the layer's
operator, so that every runtime reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from dnnc.quantization.layers import Layer
from dnnc.quantization.onnx_graph import Model
from dnnc.quantization.ranges import LEAST_SCALE, Grid
from dnnc.quantization.rounding import nearest, scales_of

Array = np.ndarray[Any, Any]
PRODUCTS = 3  # of bytes for one of 16 bits
FINER = 254  # steps of the second byte in one of the first
MARK = "/int16."  # ahead of what names the parts of a layer


def owner(name: str) -> str:
    """The layer that a node belongs to."""
    return name.partition(MARK)[0]


def in_sixteen_bits(
    out: Model, layer: Layer, n: NodeProto, weights: Array, x: Grid, bias: Callable[[Array], str]
) -> tuple[list[NodeProto], NodeProto]:
    """The nodes ahead, and the sum that takes the layer's place.

    Args:
        out: the model; it gets the constants.
        layer, n: what is replaced.
        weights: of the layer.
        x: the grid of the first byte of the activation, whose range holds all that was seen.
        bias: from the scales of the sums, the name of a quantized bias; unused where `n` has none.
    """
    nodes: list[NodeProto] = []

    def put(op: str, operands: list[str], part: str, **attributes: Any) -> str:
        y = out.fresh(f"{layer.node}{MARK}{part}")
        nodes.append(helper.make_node(op, operands, [y], y, **attributes))
        return y

    def rounded(value: str, g: Grid, part: str) -> str:
        scale = out.add(f"{layer.x}_{part}_scale", np.asarray(g.scale, np.float32))
        zero = out.add(f"{layer.x}_{part}_zero", np.asarray(g.zero, np.uint8 if g.kind == "uint8" else np.int8))
        q = put("QuantizeLinear", [value, scale, zero], f"{part}_q")
        return put("DequantizeLinear", [q, scale, zero], part)

    def product(value: str, weight: str, c: list[str], part: str) -> str:
        y = put(n.op_type, [value, weight, *c], part)
        nodes[-1].attribute.extend(n.attribute)
        return y

    a = rounded(layer.x, x, "a")
    rest = Grid(np.float32(max(float(x.scale) / FINER, LEAST_SCALE)), 0, "int8")
    r = rounded(put("Sub", [layer.x, a], "rest"), rest, "r")
    w = layer.matrix(weights)
    scales = scales_of(w, 8, 0)
    first = nearest(w, scales, 8, 0)
    second = nearest(w - first.values, np.maximum(scales / FINER, LEAST_SCALE).astype(np.float32), 8, 0)
    names = []
    for part, rows in (("v", first), ("u", second)):
        q = out.add(f"{layer.weight}_{part}", layer.weights(rows.q, weights))
        scale = out.add(f"{layer.weight}_{part}_scale", rows.scales.reshape(-1))
        zero = out.add(f"{layer.weight}_{part}_zero", np.zeros(rows.scales.size, np.int8))
        names.append(put("DequantizeLinear", [q, scale, zero], part, axis=layer.axis))
    c = list(n.input[2:3])
    if c and layer.bias and not layer.adder:
        c = [bias(first.scales.reshape(-1))]
    whole = product(a, names[0], c, "av")
    finer = put("Add", [product(r, names[0], [], "rv"), product(a, names[1], [], "au")], "finer")
    return nodes, helper.make_node("Add", [whole, finer], [layer.y], n.name)
