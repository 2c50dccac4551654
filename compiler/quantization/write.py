"""A quantized model as ONNX: QuantizeLinear and DequantizeLinear around what is computed in integers.

    x  ->  QuantizeLinear  ->  DequantizeLinear  ->  Conv, with DequantizeLinear of i8 weights and of an i32 bias
    x                                           ->  MatMul with DequantizeLinear of i8 or i4 weights, or MatMulNBits

The names of values stay, so that what reads the float value still does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from dnnc.quantization.layers import Layer
from dnnc.quantization.onnx_graph import Model
from dnnc.quantization.plan import Plan, Weight, is_weight_only
from dnnc.quantization.ranges import Grid, grid
from dnnc.quantization.sixteen import in_sixteen_bits

Array = np.ndarray[Any, Any]
KINDS = {"uint8": np.uint8, "int8": np.int8}


def written(plan: Plan, layers: Sequence[Layer], schemes: Mapping[str, str]) -> onnx.ModelProto:
    """The model with these layers in these schemes."""
    proto = onnx.ModelProto()
    proto.CopyFrom(plan.model.proto)
    out = Model(proto)
    w = _Writer(plan, out)
    placement = plan.placement(schemes, layers)
    scheme = "fp8" if "fp8" in schemes.values() else "int8"
    w.grids = plan.grids(placement, scheme)
    for value in w.grids:
        w.pair(value, placement.readers[value])
    for layer in layers:
        if layer.node in schemes:
            w.layer(layer, schemes[layer.node])
    w.finish()
    return out.proto


class _Writer:
    def __init__(self, plan: Plan, out: Model) -> None:
        self.plan, self.out = plan, out
        self.grids: dict[str, Grid] = {}
        self.scales: dict[str, str] = {}  # names of the scales of values
        self.behind: dict[str, list[onnx.NodeProto]] = {}  # new nodes, by the value behind whose maker they stand
        self.before: dict[str, list[onnx.NodeProto]] = {}  # new nodes, by the node that they stand before
        self.replaced: dict[str, onnx.NodeProto] = {}
        self.nodes = {n.name: n for n in out.graph.node}

    def pair(self, value: str, readers: frozenset[str]) -> None:
        """Quantize a value for these readers."""
        g = self.grids[value]
        scale = self.out.add(f"{value}_scale", np.asarray(g.scale, np.float32))
        if g.kind == "fp8":
            zero = self.out.add(f"{value}_zero", np.asarray(0, np.uint8), TensorProto.FLOAT8E4M3FN)
        else:
            zero = self.out.add(f"{value}_zero", np.asarray(g.zero, KINDS[g.kind]))
        self.scales[value] = scale
        q, x = self.out.fresh(f"{value}_q"), self.out.fresh(f"{value}_dq")
        self.behind[value] = [
            helper.make_node("QuantizeLinear", [value, scale, zero], [q], self.out.fresh(f"{value}_QuantizeLinear")),
            helper.make_node("DequantizeLinear", [q, scale, zero], [x], self.out.fresh(f"{value}_DequantizeLinear")),
        ]
        for name in readers:
            n = self.nodes[name]
            for k, i in enumerate(n.input):
                if i == value:
                    n.input[k] = x

    def layer(self, layer: Layer, scheme: str) -> None:
        """Quantize the weights and the bias of a layer."""
        x = self.grids.get(layer.x)
        n = self.nodes[layer.node]
        if scheme == "int16":
            self._sixteen(layer, n)
            return
        w = self.plan.weight(layer, scheme, x)
        if is_weight_only(scheme) and self.plan.options.form == "nbits":
            self._bits(layer, n, w, self.plan.options.bits(scheme))
        else:
            n.input[1] = self._dequantized(layer, w, scheme)
            if scheme == "int8" and x is not None and not layer.adder and layer.bias:
                bias = w.bias if w.bias is not None else self.plan.model.constants[layer.bias].reshape(-1)
                n.input[2] = self._integer_bias(layer, bias, w.rounded.scales.reshape(-1), x)
                return
        if w.bias is not None:
            self._set_bias(layer, n, w.bias)

    def _dequantized(self, layer: Layer, w: Weight, scheme: str) -> str:
        """Weights as DequantizeLinear of constants; the name of the result."""
        like, r = self.plan.model.constants[layer.weight], w.rounded
        array, kind = layer.weights(r.q, like), None
        if scheme == "fp8":
            kind = TensorProto.FLOAT8E4M3FN
        elif scheme == "w4a16":
            kind = TensorProto.INT4
        q = self.out.add(f"{layer.weight}_q", array, kind)
        if r.block:
            scales, attributes = (
                r.scales if layer.axis == 0 else r.scales.T,
                {"axis": 1 - layer.axis, "block_size": r.block},
            )
        else:
            scales, attributes = r.scales.reshape(-1), {"axis": layer.axis}
        operands = [q, self.out.add(f"{layer.weight}_scale", np.ascontiguousarray(scales))]
        if scheme == "int8":
            operands.append(self.out.add(f"{layer.weight}_zero", np.zeros(r.scales.size, np.int8)))
        return self._before(layer, "DequantizeLinear", operands, f"{layer.weight}_dq", **attributes)

    def _before(self, layer: Layer, op: str, operands: list[str], name: str, **attributes: Any) -> str:
        y = self.out.fresh(name)
        node = helper.make_node(op, operands, [y], self.out.fresh(f"{name}_{op}"), **attributes)
        self.before.setdefault(layer.node, []).append(node)
        return y

    def _sixteen(self, layer: Layer, n: onnx.NodeProto) -> None:
        """Replace a layer by products of bytes that are exact to 16 bits."""
        h, weights = self.plan.observed.histograms[layer.x], self.plan.model.constants[layer.weight]
        x = grid(h.low, h.high, self.plan.options.activations)
        bias = self.plan.model.constants.get(layer.bias, np.zeros(0, np.float32)).reshape(-1)
        nodes, made = in_sixteen_bits(
            self.out, layer, n, weights, x, lambda scales: self._integer_bias(layer, bias, scales, x)
        )
        self.before.setdefault(layer.node, []).extend(nodes)
        self.replaced[n.name] = self.nodes[n.name] = made

    def _integer_bias(self, layer: Layer, bias: Array, of_weights: Array, x: Grid) -> str:
        """The bias as DequantizeLinear of i32; its scale is that of the sums."""
        scales = (of_weights * x.scale).astype(np.float32)
        q = np.clip(np.rint(bias.astype(np.float64) / scales), -(1 << 31), (1 << 31) - 1).astype(np.int32)
        names = [self.out.add(f"{layer.bias}_q", q), self.out.add(f"{layer.bias}_scale", scales)]
        return self._before(layer, "DequantizeLinear", names, f"{layer.bias}_dq", axis=0)

    def _set_bias(self, layer: Layer, n: onnx.NodeProto, bias: Array) -> None:
        """Another float bias in the place of the constant."""
        name = self.out.add(f"{layer.bias}_corrected", bias.reshape(self.plan.model.constants[layer.bias].shape))
        holder = self.nodes[layer.adder] if layer.adder else n
        holder.input[list(holder.input).index(layer.bias)] = name

    def _bits(self, layer: Layer, n: onnx.NodeProto, w: Weight, bits: int) -> None:
        """Replace a product by MatMulNBits, and a bias that it had by Add."""
        r = w.rounded
        (rows, terms), half = r.q.shape, 1 << (bits - 1)
        q: Array = np.pad(r.q.astype(np.int16) + half, [(0, 0), (0, -terms % r.block)], constant_values=half).astype(
            np.uint8
        )
        q = q if bits == 8 else q[:, 0::2] | (q[:, 1::2] << 4)
        blocks = r.scales.shape[1]
        names = [
            self.out.add(f"{layer.weight}_q", q.reshape(rows, blocks, -1)),
            self.out.add(f"{layer.weight}_scale", r.scales.reshape(-1)),
        ]
        with_bias = layer.kind == "Gemm" and layer.bias
        y = self.out.fresh(f"{layer.y}_product") if with_bias else layer.y
        attributes = {"K": terms, "N": rows, "bits": bits, "block_size": r.block}
        made = helper.make_node("MatMulNBits", [layer.x, *names], [y], n.name, domain="com.microsoft", **attributes)
        if with_bias:
            self.before.setdefault(layer.node, []).append(made)
            made.name = self.out.fresh(f"{n.name}_MatMulNBits")
            made, bias = helper.make_node("Add", [y, layer.bias], [layer.y], n.name), layer.bias
            assert bias
        self.replaced[n.name] = made
        self.nodes[n.name] = made
        if not any(o.domain == "com.microsoft" for o in self.out.proto.opset_import):
            self.out.proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))

    def finish(self) -> None:
        """Put the new nodes where they belong, and remove what nothing reads any more."""
        inputs = [v.name for v in self.out.graph.input]
        order = [n for v in inputs for n in self.behind.get(v, ())]
        for n in self.out.graph.node:
            order += self.before.get(n.name, ())
            order.append(self.replaced.get(n.name, n))
            for o in n.output:
                order += self.behind.get(o, ())
        copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in order]
        del self.out.graph.node[:]
        self.out.graph.node.extend(copies)
        del self.out.graph.value_info[:]
        self.out.drop_unread()
