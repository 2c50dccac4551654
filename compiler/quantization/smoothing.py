"""SmoothQuant: scale moved from the activations behind a layer normalization to the weights that read them.

    x @ w   ->   (x / s) @ (s * w),   s = max|x|^alpha / max|w|^(1 - alpha) for each channel

1 / s goes into the weight and the bias of the layer normalization, so that nothing is added to the graph. A few
channels of a transformer's activations are much larger than the others; their scale then is no longer everybody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from dnnc.quantization.layers import Layer
from dnnc.quantization.onnx_graph import Model, attribute

Array = np.ndarray[Any, Any]
NORMS = ("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")
LEAST = 1e-5


def smoothable(m: Model, layers: Sequence[Layer]) -> dict[str, list[Layer]]:
    """Layers by the normalization whose result they alone read."""
    products: dict[str, list[Layer]] = {}
    for layer in layers:
        n = m.makers.get(layer.x)
        if n is not None and n.op_type in NORMS and layer.kind != "Conv":
            products.setdefault(n.name, []).append(layer)
    nodes = {n.name: n for n in m.graph.node}
    return {name: some for name, some in products.items() if _closed(m, nodes[name], some)}


def _closed(m: Model, n: onnx.NodeProto, layers: Sequence[Layer]) -> bool:
    """Is a normalization of constants along the last axis read by these layers alone?"""
    y = n.output[0]
    if y in m.pinned or any(i not in m.constants for i in n.input[1:] if i) or any(n.output[1:]):
        return False
    if {r.name for r in m.readers[y]} != {x.node for x in layers}:
        return False
    rank = m.rank(y)
    last = attribute(n, "axis", -1) in (-1, None if rank is None else rank - 1)
    return last and m.constants[n.input[1]].ndim == 1


def smooth(m: Model, groups: Mapping[str, Sequence[Layer]], peaks: Mapping[str, Array], alpha: float) -> list[str]:
    """Move scales in the model. Returns the normalizations that were changed."""
    nodes = {n.name: n for n in m.graph.node}
    for name, layers in groups.items():
        n = nodes[name]
        of_x = peaks[layers[0].x]
        rows = [_inputs_first(m.constants[x.weight], x) for x in layers]
        of_w = np.max([np.abs(r).max(1) for r in rows], axis=0)
        usable = (of_x > LEAST) & (of_w > LEAST)
        s = np.where(usable, np.maximum(of_x, LEAST) ** alpha / np.maximum(of_w, LEAST) ** (1 - alpha), 1.0)
        s = np.clip(s, LEAST, 1 / LEAST).astype(np.float32)
        for k in range(1, len(n.input)):
            if n.input[k]:
                n.input[k] = m.add(f"{n.input[k]}.smooth", m.constants[n.input[k]] / s)
        for layer, r in zip(layers, rows):
            w = np.ascontiguousarray(np.moveaxis(r * s[:, None], 0, 1 - layer.axis)).reshape(
                m.constants[layer.weight].shape
            )
            node = nodes[layer.node]
            node.input[1] = m.add(f"{layer.weight}.smooth", w.astype(np.float32))
    m.drop_unread()
    return list(groups)


def _inputs_first(w: Array, layer: Layer) -> Array:
    """The weights of a product as [input channels, output channels]."""
    return np.moveaxis(w, 1 - layer.axis, 0)
