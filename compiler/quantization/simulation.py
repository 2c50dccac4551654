"""The float model with roundings that can be switched on and off: errors of layers without a compilation for each.

    x   ->   x + flag * (dequantize(quantize(x)) - x)

Flags of all values are one more input; weights are parameters, which are replaced by their rounded values. Sums are in
float, which differs from integers by rounding alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from dnnc.quantization.calibration import Running, Tell
from dnnc.quantization.data import Feed, Samples
from dnnc.quantization.layers import Layer
from dnnc.quantization.measure import Difference
from dnnc.quantization.onnx_graph import Model
from dnnc.quantization.plan import Plan

Array = np.ndarray[Any, Any]


class Simulation:
    """Errors of any choice of layers and schemes.

    Args:
        plan: grids and weights.
        layers: all that may be quantized.
        scheme: of activations: int8 or fp8.
        samples, feeds: of the model; the feeds that errors are measured with.
        want: the float model's outputs for these feeds.
    """

    def __init__(
        self, plan: Plan, layers: Sequence[Layer], scheme: str, samples: Samples, feeds: Sequence[Feed],
        want: Sequence[Sequence[Array]], tell: Tell,
    ) -> None:  # fmt: skip
        self.plan, self.layers, self.feeds, self.want = plan, {x.node: x for x in layers}, feeds, want
        placement = plan.placement(dict.fromkeys(self.layers, scheme), layers)
        self.grids = plan.grids(placement, scheme)
        self.order = {v: k for k, v in enumerate(self.grids)}
        proto, names = _switchable(plan, self.layers, placement.readers, self.grids)
        self.names = names
        options = {**plan.options.compile, "verify": False}
        self.flags = np.zeros(max(len(self.order), 1), np.float32)
        weights = sorted({n for pair in names.values() for n in pair if n})
        self.run = Running(proto, samples, options, parameters=weights, extra={FLAGS: self.flags}, tell=tell)
        self.original = {n: plan.model.constants[n] for pair in names.values() for n in pair if n}

    def outputs(self, feed: Feed) -> list[Array]:
        """Of the choice that was made last."""
        return self.run.outputs(feed)

    def choose(self, schemes: Mapping[str, str]) -> None:
        """Switch the roundings of these layers on, all others off."""
        placement = self.plan.placement(schemes, self.layers.values())
        self.flags[:] = 0.0
        for v in placement.readers:
            if v in self.order:
                self.flags[self.order[v]] = 1.0
        arrays = dict(self.original)
        for node, scheme in schemes.items():
            layer = self.layers[node]
            w = self.plan.weight(layer, scheme, self.grids.get(layer.x))
            weight, bias = self.names[node]
            arrays[weight] = layer.weights(w.rounded.values, self.plan.model.constants[layer.weight])
            if bias and w.bias is not None:
                arrays[bias] = w.bias.reshape(self.plan.model.constants[layer.bias].shape)
        self.run.refit(arrays)

    def difference(self, schemes: Mapping[str, str]) -> Difference:
        """Of the outputs with these layers quantized from the float model's."""
        self.choose(schemes)
        out = Difference()
        for feed, want in zip(self.feeds, self.want):
            out.add(self.outputs(feed), want)
        return out


FLAGS = "dnnc_quantized"


def _switchable(
    plan: Plan, layers: Mapping[str, Layer], readers: Mapping[str, frozenset[str]], grids: Mapping[str, Any]
) -> tuple[onnx.ModelProto, dict[str, tuple[str, str]]]:
    """The model with flags, and the names of each layer's weights and bias that may change."""
    proto = onnx.ModelProto()
    proto.CopyFrom(plan.model.proto)
    out = Model(proto)
    nodes = {n.name: n for n in out.graph.node}
    behind: dict[str, list[onnx.NodeProto]] = {}
    for k, (value, g) in enumerate(grids.items()):
        behind[value], y = _switch(out, value, g, k)
        for name in readers[value]:
            n = nodes[name]
            for at, i in enumerate(n.input):
                if i == value:
                    n.input[at] = y
    out.graph.input.append(helper.make_tensor_value_info(FLAGS, TensorProto.FLOAT, [max(len(grids), 1)]))
    order = [n for v in out.graph.input for n in behind.get(v.name, ())]
    for n in out.graph.node:
        order.append(n)
        for o in n.output:
            order += behind.get(o, ())
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in order]
    del out.graph.node[:]
    out.graph.node.extend(copies)
    out.changed()
    corrected = plan.options.bias_correction
    return out.proto, {n: (x.weight, x.bias if corrected else "") for n, x in layers.items()}


def _switch(out: Model, value: str, g: Any, k: int) -> tuple[list[onnx.NodeProto], str]:
    scale = out.add(f"{value}_scale", np.asarray(g.scale, np.float32))
    if g.kind == "fp8":
        zero = out.add(f"{value}_zero", np.asarray(0, np.uint8), TensorProto.FLOAT8E4M3FN)
    else:
        zero = out.add(f"{value}_zero", np.asarray(g.zero, np.uint8 if g.kind == "uint8" else np.int8))
    at = out.add(f"{value}_at", np.asarray(k, np.int64))
    names = [out.fresh(f"{value}_{part}") for part in ("q", "dq", "error", "flag", "some", "sim")]
    q, x, error, flag, some, y = names
    steps = (
        ("QuantizeLinear", [value, scale, zero], q),
        ("DequantizeLinear", [q, scale, zero], x),
        ("Sub", [x, value], error),
        ("Gather", [FLAGS, at], flag),
        ("Mul", [error, flag], some),
        ("Add", [value, some], y),
    )
    return [helper.make_node(op, i, [o], out.fresh(f"{o}_{op}")) for op, i, o in steps], y
