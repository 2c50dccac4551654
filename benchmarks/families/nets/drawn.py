"""Networks written with onnx.helper: old opsets, and operators that no exporter writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TensorShapeProto, helper, numpy_helper

from families.entry import Drawn, Row, floats, image, integers

Array = np.ndarray[Any, Any]
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


class Graph:
    """Nodes and weights in order; `g("Conv", x, w, b, strides=[2, 2])` gives the name of the first output."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self.rng = np.random.RandomState(seed)

    def __call__(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"{op.lower()}_{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def const(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def normal(self, *shape: int, fan_in: int = 0) -> str:
        return self.const(
            self.rng.standard_normal(shape) * (2 / fan_in) ** 0.5 if fan_in else self.rng.standard_normal(shape) * 0.1
        )

    def conv(self, x: str, i: int, o: int, kernel: int = 3, **attributes: Any) -> str:
        group = attributes.get("group", 1)
        w = self.normal(o, i // group, kernel, kernel, fan_in=i // group * kernel * kernel)
        attributes.setdefault("pads", [kernel // 2] * 4)
        return str(self("Conv", x, w, self.normal(o), kernel_shape=[kernel, kernel], **attributes))

    def dense(self, x: str, i: int, o: int) -> str:
        return str(self("Gemm", x, self.normal(o, i, fan_in=i), self.normal(o), transB=1))

    def norm(self, x: str, c: int, **attributes: Any) -> str:
        mean, variance = self.const(self.rng.randn(c) * 0.1), self.const(0.5 + self.rng.rand(c))
        return str(
            self(
                "BatchNormalization",
                x,
                self.const(0.7 + 0.6 * self.rng.rand(c)),
                self.normal(c),
                mean,
                variance,
                **attributes,
            )
        )

    def model(
        self, inputs: Sequence[Row], outputs: Sequence[str], opset: int, listed: bool = False, rank: int = 0
    ) -> Drawn:
        """`listed`: initializers are inputs, as before IR version 4. `rank`: of outputs of unknown shape."""
        kinds = {"float32": FLOAT, "int64": INT64}
        given = [helper.make_tensor_value_info(i["name"], kinds[i["dtype"]], i["shape"]) for i in inputs]
        if listed:
            given += [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in self.weights]
        results = [helper.ValueInfoProto(name=o) for o in outputs]
        graph = helper.make_graph(self.nodes, "drawn", given, results, self.weights)
        version = 3 if listed else {7: 3, 8: 3, 9: 4, 10: 5, 11: 6}.get(opset, 8)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", opset)],
            ir_version=max(version, 10 if opset > 20 else version),
        )
        return Drawn(_inferred(model, rank), list(inputs))


def _inferred(model: ModelProto, rank: int) -> ModelProto:
    """The types of the outputs are inferred, since a model states them; unknown shapes have `rank` sizes."""
    from onnx import shape_inference

    known = {v.name: v for v in shape_inference.infer_shapes(model, data_prop=True).graph.output}
    for o in model.graph.output:
        o.CopyFrom(known[o.name])
        if not o.type.tensor_type.HasField("shape"):
            o.type.tensor_type.shape.dim.extend([TensorShapeProto.Dimension()] * rank)
    return model


def body(
    nodes: Sequence[NodeProto],
    inputs: Sequence[tuple[str, int, list[int] | None]],
    outputs: Sequence[tuple[str, int, list[int] | None]],
) -> GraphProto:
    def infos(rows: Sequence[tuple[str, int, list[int] | None]]) -> list[Any]:
        return [helper.make_tensor_value_info(*r) for r in rows]

    return helper.make_graph(list(nodes), "body", infos(inputs), infos(outputs))


def alexnet() -> Drawn:
    """Caffe's AlexNet in opset 7: LRN, grouped convolutions, dropout with a mask, initializers as inputs."""
    g = Graph(1)
    x = g("Relu", g.conv("x", 3, 48, 11, strides=[4, 4], pads=[2, 2, 2, 2]))
    x = g("MaxPool", g("LRN", x, size=5, alpha=1e-4, beta=0.75, bias=1.0), kernel_shape=[3, 3], strides=[2, 2])
    x = g("Relu", g.conv(x, 48, 96, 5, group=2))
    x = g("MaxPool", g("LRN", x, size=5), kernel_shape=[3, 3], strides=[2, 2])
    x = g("Relu", g.conv(g("Relu", g.conv(x, 96, 128)), 128, 128, 3, group=2))
    x = g("Flatten", g("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2]), axis=1)
    x = g("Dropout", g("Relu", g.dense(x, 128 * 9, 256)), outputs=2, ratio=0.5)[0]
    return g.model([image(3, 131, 131)], [g("Softmax", g.dense(x, 256, 100), axis=1)], 7, listed=True)


def googlenet() -> Drawn:
    """Two inception blocks in opset 8, ceil-like pads, a Reshape from a constant."""
    g = Graph(2)
    x = g(
        "MaxPool",
        g("Relu", g.conv("x", 3, 32, 7, strides=[2, 2])),
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[0, 0, 1, 1],
    )
    width = 32
    for a, b, c, d in ((16, 32, 8, 8), (24, 48, 12, 12)):
        branches = [
            g("Relu", g.conv(x, width, a, 1)),
            g("Relu", g.conv(g("Relu", g.conv(x, width, b // 2, 1)), b // 2, b)),
        ]
        branches += [g("Relu", g.conv(g("Relu", g.conv(x, width, c // 2, 1)), c // 2, c, 5))]
        branches += [g("Relu", g.conv(g("MaxPool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1]), width, d, 1))]
        x, width = g("Concat", *branches, axis=1), a + b + c + d
    x = g("Reshape", g("AveragePool", x, kernel_shape=[16, 16], strides=[16, 16]), g.const([-1, width], np.int64))
    return g.model([image(3, 64, 64)], [g("Softmax", g.dense(x, width, 50))], 8, listed=True)


def shufflenet() -> Drawn:
    """ShuffleNet in opset 9: channels shuffled by Reshape and Transpose, batch norms apart."""
    g = Graph(3)
    x = g("Relu", g.norm(g.conv("x", 3, 24, 3, strides=[2, 2]), 24))
    for _ in range(3):
        h = g("Relu", g.norm(g.conv(x, 24, 24, 1, group=3), 24))
        h = g("Reshape", h, g.const([0, 3, 8, 32, 32], np.int64))
        h = g("Reshape", g("Transpose", h, perm=[0, 2, 1, 3, 4]), g.const([0, 24, 32, 32], np.int64))
        h = g.norm(g.conv(h, 24, 24, 3, group=24), 24)
        x = g("Relu", g("Add", x, g.norm(g.conv(h, 24, 24, 1, group=3), 24)))
    x = g("ReduceMean", x, axes=[2, 3], keepdims=0)
    return g.model([image(3, 64, 64)], [g.dense(x, 24, 10)], 9)


def upsampler() -> Drawn:
    """An hourglass in opset 9: Upsample, Slice, Pad, Clip, Squeeze and ReduceMax with attributes."""
    g = Graph(4)
    a = g("Clip", g.conv("x", 3, 16), min=0.0, max=6.0)
    b = g("LeakyRelu", g.conv(g("MaxPool", a, kernel_shape=[2, 2], strides=[2, 2]), 16, 32), alpha=0.1)
    up = g("Upsample", g.conv(b, 32, 16), g.const([1.0, 1, 2, 2]), mode="nearest")
    h = g("Elu", g("Add", a, up), alpha=0.7)
    h = g(
        "Slice",
        g("Pad", h, pads=[0, 0, 2, 2, 0, 0, 2, 2], mode="reflect"),
        axes=[2, 3],
        starts=[1, 1],
        ends=[-1, 9223372036854775807],
    )
    heat = g.conv(h, 16, 5, 1)
    return g.model(
        [image(3, 32, 32)],
        [g("Squeeze", g("ReduceMax", heat, axes=[2], keepdims=1), axes=[2]), g("ArgMax", heat, axis=1)],
        9,
    )


def shapes() -> Drawn:
    """Reshapes whose sizes are computed from Shape, Gather and Concat, in opset 11 with a symbolic batch."""
    g = Graph(5)
    x = g("Relu", g.conv("x", 3, 16))
    size = g("Shape", x)
    n = g("Unsqueeze", g("Gather", size, g.const(0, np.int64), axis=0), axes=[0])
    c = g("Unsqueeze", g("Gather", size, g.const(1, np.int64), axis=0), axes=[0])
    flat = g("Reshape", x, g("Concat", n, c, g.const([-1], np.int64), axis=0))
    scores = g("Softmax", g("MatMul", g("Transpose", flat, perm=[0, 2, 1]), flat), axis=2)
    mixed = g("MatMul", scores, g("Transpose", flat, perm=[0, 2, 1]))
    half = g(
        "Cast",
        g("Div", g("Cast", g("Slice", size, g.const([2], np.int64), g.const([4], np.int64)), to=FLOAT), g.const(2.0)),
        to=INT64,
    )
    sizes = g("Concat", g("Slice", size, g.const([0], np.int64), g.const([2], np.int64)), half, axis=0)
    image_again = g("Reshape", g("Transpose", mixed, perm=[0, 2, 1]), size)
    small = g(
        "Resize",
        image_again,
        g.const([], np.float32),
        g.const([], np.float32),
        sizes,
        mode="linear",
        coordinate_transformation_mode="half_pixel",
    )
    return g.model([image(3, 16, 16)], [g("GlobalAveragePool", small), g("ReduceMean", mixed, axes=[1])], 11, rank=4)


def deform() -> Drawn:
    """A deformable convolution with masks, opset 19."""
    g = Graph(6)
    x = g("Relu", g.conv("x", 3, 16, 3, strides=[2, 2]))
    offset, weight = g.conv(x, 16, 18), g("Sigmoid", g.conv(x, 16, 9))
    y = g(
        "DeformConv",
        x,
        g.normal(24, 16, 3, 3, fan_in=144),
        offset,
        g.normal(24),
        weight,
        kernel_shape=[3, 3],
        pads=[1, 1, 1, 1],
    )
    x = g("ReduceMean", g("Relu", y), g.const([2, 3], np.int64), keepdims=0)
    return g.model([image(3, 32, 32)], [g.dense(x, 24, 10)], 19)


def speech() -> Drawn:
    """An LSTM with peepholes and lengths, then a GRU in both directions, opset 14."""
    g = Graph(7)
    lengths = {"name": "lengths", "dtype": "int64", "shape": ["batch"], "lo": 5, "hi": 16}
    x, valid = g("Transpose", "x", perm=[1, 0, 2]), g("Cast", "lengths", to=TensorProto.INT32)
    w, r, b = g.normal(1, 128, 20, fan_in=20), g.normal(1, 128, 32, fan_in=64), g.normal(1, 256)
    h, last, _ = g("LSTM", x, w, r, b, valid, "", "", g.normal(1, 96), outputs=3, hidden_size=32)
    h = g("Squeeze", h, g.const([1], np.int64))
    w, r, b = g.normal(2, 72, 32, fan_in=32), g.normal(2, 72, 24, fan_in=48), g.normal(2, 144)
    y = g("GRU", h, w, r, b, hidden_size=24, direction="bidirectional", linear_before_reset=1)
    y = g("Reshape", g("Transpose", y, perm=[2, 0, 1, 3]), g.const([0, 0, 48], np.int64))
    scores = g("LogSoftmax", g("MatMul", y, g.normal(48, 30, fan_in=48)), axis=-1)
    return g.model([floats("x", "batch", 16, 20), lengths], [scores, last], 14)


def scan() -> Drawn:
    """A leaky integrator with a reset as a Scan, opset 11."""
    g = Graph(8)
    w = g.normal(12, 24, fan_in=12)
    leak, one = g.const(0.9), g.const(1.0)
    step = [
        helper.make_node("Mul", ["v", leak], ["kept"]),
        helper.make_node("Add", ["kept", "current"], ["raised"]),
        helper.make_node("Greater", ["raised", one], ["fires"]),
        helper.make_node("Cast", ["fires"], ["spike"], to=FLOAT),
        helper.make_node("Sub", ["raised", "spike"], ["v_next"]),
    ]
    inner = body(
        step, [("v", FLOAT, None), ("current", FLOAT, None)], [("v_next", FLOAT, None), ("spike", FLOAT, None)]
    )
    current = g("MatMul", "x", w)
    zero = g("Mul", g("ReduceSum", current, axes=[0], keepdims=0), g.const(0.0))
    last, spikes = g("Scan", zero, current, outputs=2, body=inner, num_scan_inputs=1)
    return g.model([floats("x", 20, "batch", 12)], [last, g("ReduceMean", spikes, axes=[0], keepdims=0)], 11)


def rotary() -> Drawn:
    """Attention with grouped heads, rotary embeddings and RMS norms by the operators of opset 23."""
    g = Graph(9)
    x = g("RMSNormalization", "x", g.const(0.7 + 0.6 * g.rng.rand(64)), axis=-1)
    q, k, v = (g("MatMul", x, g.normal(64, n, fan_in=64)) for n in (64, 32, 32))
    angle = np.arange(16)[:, None] / 100 ** (np.arange(8) / 8)
    cos, sin, at = g.const(np.cos(angle)), g.const(np.sin(angle)), g.const(np.arange(16)[None].repeat(2, 0), np.int64)
    q = g("RotaryEmbedding", q, cos, sin, at, num_heads=4)
    k = g("RotaryEmbedding", k, cos, sin, at, num_heads=2)
    y = g("Attention", q, k, v, is_causal=1, q_num_heads=4, kv_num_heads=2)
    h = g("Add", "x", g("MatMul", y, g.normal(64, 64, fan_in=128)))
    up = g("MatMul", h, g.normal(64, 128, fan_in=128))
    gate, value = g("Split", up, outputs=2, num_outputs=2, axis=-1)
    return g.model(
        [floats("x", 2, 16, 64)],
        [g("Add", h, g("MatMul", g("Mul", g("Mul", gate, g("Sigmoid", gate)), value), g.normal(64, 64, fan_in=64)))],
        23,
    )


def suppression() -> Drawn:
    """NonMaxSuppression of an SSD-like head, indices gathered, opset 11; the data tells the number of boxes."""
    g = Graph(10)
    x = g("Relu", g.conv(g("Relu", g.conv("x", 3, 24, 3, strides=[2, 2])), 24, 32, 3, strides=[2, 2]))
    cells = g.const(np.stack(np.meshgrid(np.arange(16), np.arange(16)), -1).reshape(1, 256, 2) * 4.0 + 2.0)
    maps = g("Reshape", g("Transpose", g.conv(x, 32, 4), perm=[0, 2, 3, 1]), g.const([1, 256, 4], np.int64))
    shift, size = g("Split", maps, outputs=2, axis=2)
    size = g("Exp", g("Clip", size, g.const(-2.0), g.const(2.0)))
    boxes = g("Concat", g("Add", cells, shift), g("Mul", size, g.const(12.0)), axis=2)
    scores = g(
        "Transpose",
        g("Sigmoid", g("Reshape", g("Transpose", g.conv(x, 32, 3), perm=[0, 2, 3, 1]), g.const([1, 256, 3], np.int64))),
        perm=[0, 2, 1],
    )
    chosen = g(
        "NonMaxSuppression", boxes, scores, g.const([8], np.int64), g.const([0.5]), g.const([0.5]), center_point_box=1
    )
    return g.model([{**image(3, 64, 64), "shape": [1, 3, 64, 64]}], [chosen, g("GatherND", scores, chosen)], 11)


def words() -> Drawn:
    """A text classifier in opset 13: one-hot positions, cumulative sums, Hardmax, Einsum, Where, masks."""
    g = Graph(11)
    e = g("Gather", g.normal(300, 32), "ids")
    at = g("CumSum", g("Cast", g("Greater", "ids", g.const(20, np.int64)), to=FLOAT), g.const(1, np.int64))
    hot = g("OneHot", g("Cast", at, to=INT64), g.const(21, np.int64), g.const([0.0, 1.0]), axis=-1)
    x = g("Add", e, g("MatMul", hot, g.normal(21, 32)))
    s = g("Einsum", x, x, equation="bid,bjd->bij")
    s = g(
        "Where",
        g("Less", g.const(np.arange(20)[:, None], np.int64), g.const(np.arange(20)[None], np.int64)),
        g.const(-1e9),
        s,
    )
    y = g("MatMul", g("Softmax", s, axis=-1), x)
    hard = g("Hardmax", g("ReduceSum", y, g.const([2], np.int64), keepdims=0), axis=-1)
    picked = g(
        "ReduceSum", g("Mul", y, g("Unsqueeze", hard, g.const([2], np.int64))), g.const([1], np.int64), keepdims=0
    )
    pooled = g(
        "Concat", picked, g("ReduceL2", y, axes=[1], keepdims=0), g("ReduceMax", y, axes=[1], keepdims=0), axis=1
    )
    return g.model([integers("ids", "batch", 20, hi=300)], [g.dense(g("Selu", pooled), 96, 6), hard], 13)


NETS: dict[str, Callable[[], Drawn]] = {
    "alexnet_opset7": alexnet,
    "googlenet_opset8": googlenet,
    "shufflenet_opset9": shufflenet,
    "hourglass_opset9": upsampler,
    "shape_chains_opset11": shapes,
    "deform_conv_opset19": deform,
    "lstm_peephole_opset14": speech,
    "spiking_scan_opset11": scan,
    "rotary_attention_opset23": rotary,
    "nms_opset11": suppression,
    "text_ops_opset13": words,
}
