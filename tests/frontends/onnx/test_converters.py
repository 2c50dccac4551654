"""Converters against ONNX Runtime, or NumPy for old opsets: small models, every meaning of an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from dnnc.frontends.onnx import read_model
from dnnc.frontends.onnx.tables import CONVERTERS
from dnnc.ir.graph import interp

RNG = np.random.default_rng(0)
ORT_NEWEST = 22


def f32(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def i64(*values: Any) -> np.ndarray:
    return np.array(values if len(values) != 1 or not isinstance(values[0], list) else values[0], np.int64)


def build(
    op: str,
    inputs: Sequence[np.ndarray | None],
    attrs: dict[str, Any],
    opset: int,
    fixed: Sequence[int] = (),
    outputs: int = 1,
) -> onnx.ModelProto:
    """A model of one node; the inputs numbered in `fixed` are initializers."""
    names = ["" if a is None else f"x{k}" for k, a in enumerate(inputs)]
    outs = [f"y{k}" for k in range(outputs)]
    node = helper.make_node(op, names, outs, **attrs)
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for k, (n, a) in enumerate(zip(names, inputs))
        if a is not None and k not in fixed
    ]
    initial = [numpy_helper.from_array(inputs[k], names[k]) for k in fixed if inputs[k] is not None]
    graph = helper.make_graph([node], "g", infos, [onnx.ValueInfoProto(name=o) for o in outs], initial)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def ours(model: onnx.ModelProto, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    found = read_model(model)
    feeds = {f"x{k}": a for k, a in enumerate(inputs)}
    return interp.run(found.graph, [feeds[n] for n in found.inputs])


def runtime(model: onnx.ModelProto, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    typed = onnx.shape_inference.infer_shapes(model)
    session = onnxruntime.InferenceSession(typed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = {i.name for i in session.get_inputs()}
    return session.run(None, {f"x{k}": np.asarray(a) for k, a in enumerate(inputs) if f"x{k}" in names})


def check(
    op: str,
    inputs: Sequence[np.ndarray | None],
    attrs: dict[str, Any],
    opset: int,
    fixed: Sequence[int] = (),
    want: Any = None,
    outputs: int = 1,
) -> None:
    model = build(op, inputs, attrs, opset, fixed, outputs)
    expected = runtime(model, inputs) if want is None else [want]
    got = ours(model, inputs)
    assert len(got) == len(expected)
    for g, w in zip(got, expected):
        assert g.dtype == w.dtype and g.shape == w.shape
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


# --- one row per meaning: operator, opsets, inputs, attributes, which inputs are constant -----------------------------

X = f32(2, 3, 4)
IMAGE = f32(2, 4, 7, 9)
CASES: list[tuple[str, Sequence[int], list[Any], dict[str, Any], Sequence[int]]] = [
    # element-wise
    ("Add", (7, 13, 14), [X, f32(4)], {}, ()),
    ("Pow", (7, 12, 15), [np.abs(X), f32(1)], {}, ()),
    ("Pow", (15,), [X, i64(2)], {}, ()),
    ("Pow", (15,), [np.array([2, 3, 5], np.int32), f32(3)], {}, ()),
    ("Mod", (10, 13), [np.array([-7, 7, 5], np.int32), np.array([3, -3, 2], np.int32)], {}, ()),
    ("Mod", (10, 13), [np.array([-7.5, 7, 5], np.float32), np.array([3, -3, 2], np.float32)], {"fmod": 1}, ()),
    ("BitShift", (11,), [np.array([1, 2, 250], np.uint8), np.array([1, 3, 2], np.uint8)], {"direction": "LEFT"}, ()),
    ("Clip", (7,), [X], {"min": -0.5, "max": 0.5}, ()),
    ("Clip", (11, 12, 13), [X, np.float32(-0.5), np.float32(0.5)], {}, (1, 2)),
    ("Clip", (13,), [X, None, np.float32(0.5)], {}, (2,)),
    ("Clip", (13,), [X, np.float32(-0.5), np.float32(0.5)], {}, ()),
    ("Max", (8, 12, 13), [X, f32(4), f32(3, 1)], {}, ()),
    ("Mean", (8, 13), [X, f32(4), f32(3, 1)], {}, ()),
    ("Sum", (8, 13), [X, f32(4)], {}, ()),
    ("IsInf", (10,), [np.array([np.inf, -np.inf, np.nan, 1], np.float32)], {"detect_negative": 0}, ()),
    ("IsInf", (10,), [np.array([np.inf, -np.inf, np.nan, 1], np.float32)], {"detect_positive": 0}, ()),
    ("PRelu", (7, 9, 16), [X, f32(4)], {}, ()),
    ("HardSigmoid", (7,), [X], {}, ()),
    ("Selu", (7,), [X], {}, ()),
    ("Elu", (7,), [X], {"alpha": 0.5}, ()),
    ("Celu", (12,), [X], {"alpha": 0.5}, ()),
    ("ThresholdedRelu", (10,), [X], {"alpha": 0.2}, ()),
    ("Shrink", (9,), [X], {"bias": 0.1, "lambd": 0.3}, ()),
    ("Gelu", (20,), [X], {"approximate": "tanh"}, ()),
    ("Mish", (18,), [X], {}, ()),
    ("Cast", (9, 13, 19), [X * 9], {"to": onnx.TensorProto.INT32}, ()),
    ("Cast", (13,), [X], {"to": onnx.TensorProto.BOOL}, ()),
    ("Where", (9, 16), [X > 0, X, f32(4)], {}, ()),
    # reductions
    ("ReduceSum", (7, 11), [X], {"axes": [0, -1], "keepdims": 0}, ()),
    ("ReduceSum", (13,), [X, i64(0, -1)], {"keepdims": 0}, (1,)),
    ("ReduceSum", (13,), [X], {"noop_with_empty_axes": 1}, ()),
    ("ReduceMean", (7, 13), [X], {"axes": [1]}, ()),
    ("ReduceMean", (18,), [X, i64(1)], {}, (1,)),
    ("ReduceLogSumExp", (13, 18), [X], {"keepdims": 0}, ()),
    ("ReduceL2", (11,), [X], {"axes": [2]}, ()),
    ("ReduceMax", (18,), [X, i64(-2)], {"keepdims": 0}, (1,)),
    ("ArgMax", (7, 12, 13), [X], {"axis": 1, "keepdims": 0}, ()),
    ("ArgMin", (13,), [np.zeros((2, 3), np.float32)], {"axis": -1, "select_last_index": 1}, ()),
    ("CumSum", (11, 14), [X, np.int64(1)], {"exclusive": 1, "reverse": 1}, (1,)),
    ("Softmax", (7, 11), [X], {}, ()),
    ("Softmax", (7, 11), [X], {"axis": 2}, ()),
    ("Softmax", (13,), [X], {"axis": 1}, ()),
    ("LogSoftmax", (11, 13), [X], {"axis": 0}, ()),
    ("Hardmax", (11, 13), [X], {"axis": 1}, ()),
    # convolution and pooling
    ("Conv", (7, 11), [IMAGE, f32(6, 2, 3, 3), f32(6)],
    {"group": 2, "pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2]}, ()),
    ("Conv", (11,), [IMAGE, f32(6, 4, 3, 2)], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, ()),
    ("Conv", (11,), [IMAGE, f32(6, 4, 3, 2)], {"auto_pad": "SAME_LOWER", "strides": [2, 2]}, ()),
    ("Conv", (11,), [IMAGE, f32(6, 4, 3, 2)], {"auto_pad": "VALID"}, ()),
    ("Conv", (11,), [f32(1, 2, 9), f32(3, 2, 4)], {}, ()),
    ("ConvTranspose", (11,), [IMAGE, f32(4, 3, 3, 2), f32(3)],
    {"strides": [2, 3], "pads": [1, 0, 1, 0], "output_padding": [1, 0]}, ()),
    ("ConvTranspose", (11,), [IMAGE, f32(4, 3, 3, 3)], {"strides": [2, 2], "auto_pad": "SAME_UPPER"}, ()),
    ("ConvTranspose", (11,), [IMAGE, f32(4, 3, 3, 3)], {"strides": [2, 2], "output_shape": [14, 19]}, ()),
    ("MaxPool", (8, 10, 12), [IMAGE], {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}, ()),
    ("MaxPool", (10, 12), [IMAGE], {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1, "dilations": [1, 2]},
    ()),
    ("MaxPool", (12,), [IMAGE], {"kernel_shape": [2, 2], "auto_pad": "SAME_LOWER"}, ()),
    ("AveragePool", (7, 11), [IMAGE], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, ()),
    ("AveragePool", (7, 11), [IMAGE], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}, ()),
    ("AveragePool", (10, 19), [IMAGE], {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}, ()),
    ("AveragePool", (19,), [IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1, "pads": [1, 1, 1, 1],
    "count_include_pad": 1}, ()),
    ("LpPool", (11,), [IMAGE], {"kernel_shape": [2, 2], "p": 2}, ()),
    ("GlobalAveragePool", (7,), [IMAGE], {}, ()),
    # normalization
    ("BatchNormalization", (7, 9, 14, 15), [IMAGE, f32(4), f32(4), f32(4), np.abs(f32(4))], {"epsilon": 1e-3}, ()),
    ("InstanceNormalization", (7,), [IMAGE, f32(4), f32(4)], {}, ()),
    ("LayerNormalization", (17,), [X, f32(3, 4), f32(3, 4)], {"axis": 1}, ()),
    ("GroupNormalization", (21,), [IMAGE, f32(4), f32(4)], {"num_groups": 2}, ()),
    ("LRN", (7, 13), [IMAGE], {"size": 3, "alpha": 0.1}, ()),
    ("LpNormalization", (7,), [X], {"axis": 1, "p": 1}, ()),
    ("MeanVarianceNormalization", (9, 13), [IMAGE], {}, ()),
    # products
    ("MatMul", (7, 9, 13), [f32(2, 1, 3, 4), f32(5, 4, 2)], {}, ()),
    ("MatMul", (13,), [f32(4), f32(4, 2)], {}, ()),
    ("Gemm", (7, 9, 11, 13), [f32(4, 3), f32(2, 4), f32(2)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}, ()),
    *[("Einsum", (12,), xs, {"equation": e}, ()) for e, xs in {
        "bij,bjk->bik": [f32(2, 3, 4), f32(2, 4, 5)], "bhqd,bhkd->bhqk": [f32(2, 2, 3, 4), f32(2, 2, 5, 4)],
        "ij->ji": [f32(2, 3)],
        "ij": [f32(2, 3)], "ji": [f32(2, 3)], "...ij,...jk->...ik": [f32(2, 3, 4), f32(1, 4, 5)], "ij->": [f32(2, 3)],
        "i,j->ij": [f32(2), f32(3)],
        "ij,ij->i": [f32(2, 3), f32(2, 3)], "bi,bo,boi->b": [f32(2, 3), f32(2, 4), f32(2, 4, 3)],
    }.items()],
    # movement
    ("Reshape", (7, 13, 14), [X, i64(0, -1)], {}, (1,)),
    ("Reshape", (14,), [np.zeros((0, 4), np.float32), i64(0, 2)], {"allowzero": 1}, (1,)),
    ("Transpose", (7,), [X], {}, ()),
    ("Transpose", (7,), [X], {"perm": [1, 0, 2]}, ()),
    ("Concat", (7, 13), [X, f32(2, 1, 4)], {"axis": -2}, ()),
    ("Flatten", (9, 13), [IMAGE], {"axis": 2}, ()),
    ("Flatten", (13,), [IMAGE], {"axis": -1}, ()),
    ("Squeeze", (7, 11), [f32(1, 3, 1)], {"axes": [0]}, ()),
    ("Squeeze", (13,), [f32(1, 3, 1), i64(-1)], {}, (1,)),
    ("Squeeze", (13,), [f32(1, 3, 1)], {}, ()),
    ("Unsqueeze", (7, 11), [X], {"axes": [0, 4]}, ()),
    ("Unsqueeze", (13,), [X, i64(0, -1)], {}, (1,)),
    ("Expand", (8, 13), [f32(3, 1), i64(2, 1, 4)], {}, (1,)),
    ("Tile", (7, 13), [X, i64(1, 2, 3)], {}, (1,)),
    ("Slice", (7, 9), [X], {"starts": [0, -3], "ends": [9, -1], "axes": [1, 2]}, ()),
    ("Slice", (10, 11, 13), [X, i64(-1, 0), i64(-99, 9), i64(1, 2), i64(-2, 2)], {}, (1, 2, 3, 4)),
    ("Slice", (13,), [X, i64(1), i64(2**63 - 1)], {}, (1, 2)),
    ("Pad", (7,), [X], {"pads": [0, 1, 2, 0, 0, 1], "value": 1.5}, ()),
    ("Pad", (11, 13), [X, i64(0, 1, 2, 0, 0, 1), np.float32(1.5)], {}, (1, 2)),
    ("Pad", (13,), [X, i64(0, 1, 2, 0, 1, 1)], {"mode": "reflect"}, (1,)),
    ("Pad", (13,), [X, i64(0, 1, 2, 0, 1, 1)], {"mode": "edge"}, (1,)),
    ("Pad", (18,), [X, i64(1, 2), None, i64(-1)], {}, (1, 3)),
    ("Pad", (19,), [X, i64(0, 1, 2, 0, 1, 1)], {"mode": "wrap"}, (1,)),
    ("Pad", (13,), [X, i64(0, -1, 0, 0, 1, -1)], {}, (1,)),
    ("DepthToSpace", (7, 11, 13), [f32(1, 8, 2, 3)], {"blocksize": 2}, ()),
    ("DepthToSpace", (11, 13), [f32(1, 8, 2, 3)], {"blocksize": 2, "mode": "CRD"}, ()),
    ("SpaceToDepth", (7, 13), [f32(1, 2, 4, 6)], {"blocksize": 2}, ()),
    ("Dropout", (7, 10, 12, 13), [X], {}, ()),
    # indices
    ("Gather", (7, 11, 13), [X, i64([[0, -1], [2, 1]])], {"axis": 1}, ()),
    ("GatherElements", (11, 13), [X, RNG.integers(-3, 3, (2, 2, 4))], {"axis": 1}, ()),
    ("GatherND", (12, 13), [X, i64([[0], [2]])], {"batch_dims": 1}, ()),
    ("ScatterElements", (11, 13), [X, i64([[[0, 1, 2, 0]]]), f32(1, 1, 4)], {"axis": 1}, ()),
    ("ScatterElements", (16, 18), [X, i64([[[0, 1, 0, 0]]]), f32(1, 1, 4)], {"axis": 1, "reduction": "add"}, ()),
    ("ScatterND", (11, 13), [X, i64([[1], [0]]), f32(2, 3, 4)], {}, ()),
    ("OneHot", (9, 11), [i64(0, 2, -1, 7), np.int64(3), f32(2)], {"axis": 0}, (1,)),
    ("Trilu", (14,), [f32(3, 5), np.int64(1)], {"upper": 0}, (1,)),
    ("ReverseSequence", (10,), [f32(4, 3, 2), i64(1, 4, 2)], {}, ()),
    ("EyeLike", (9,), [f32(3, 4)], {"k": 1}, ()),
    # quantized
    ("QuantizeLinear", (10, 13), [X * 9, np.float32(0.1), np.uint8(7)], {}, ()),
    ("QuantizeLinear", (13, 19), [X * 9, np.abs(f32(3)) + 0.1, np.array([0, 3, -5], np.int8)], {"axis": 1}, ()),
    ("DequantizeLinear", (10, 13), [RNG.integers(0, 255, (2, 3)).astype(np.uint8), np.float32(0.1), np.uint8(7)], {},
    ()),
    ("DequantizeLinear", (13,), [RNG.integers(-128, 127, (2, 3)).astype(np.int8), f32(3), np.zeros(3, np.int8)],
    {"axis": 1}, ()),
    ("MatMulInteger", (10,), [RNG.integers(0, 255, (2, 5)).astype(np.uint8),
    RNG.integers(0, 255, (5, 3)).astype(np.uint8), np.uint8(12), np.uint8(7)], {}, ()),
    ("ConvInteger", (10,), [RNG.integers(0, 255, (1, 2, 5, 5)).astype(np.uint8),
    RNG.integers(0, 255, (3, 2, 3, 3)).astype(np.uint8), np.uint8(9)], {"pads": [1, 1, 1, 1]}, ()),
    ("DynamicQuantizeLinear", (11,), [X], {}, ()),
    # resampling
    ("Upsample", (7,), [IMAGE], {"scales": [1.0, 1.0, 2.0, 3.0]}, ()),
    ("Upsample", (9,), [IMAGE, np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"}, (1,)),
    ("Resize", (10,), [IMAGE, np.array([1, 1, 2, 0.5], np.float32)], {}, (1,)),
    ("Resize", (11, 13), [IMAGE, np.zeros(0, np.float32), np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"},
    (1, 2)),
    ("Resize", (13, 19), [RNG.integers(0, 255, (2, 4, 7, 9)).astype(np.uint8), None,
    np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"}, (2,)),
    ("Resize", (13, 18), [IMAGE, None, None, i64(2, 4, 10, 5)], {"mode": "cubic"}, (3,)),
    ("Resize", (13,), [IMAGE, None, None, i64(2, 4, 10, 5)],
    {"mode": "linear", "coordinate_transformation_mode": "align_corners"}, (3,)),
    ("Resize", (13,), [IMAGE, None, None, i64(2, 4, 10, 5)],
    {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}, (3,)),
    ("Resize", (18,), [IMAGE, None, None, i64(3, 4)], {"mode": "linear", "antialias": 1, "axes": [2, 3]}, (3,)),
    *[("GridSample", (16, 20), [IMAGE, RNG.uniform(-1.3, 1.3, (2, 3, 5, 2)).astype(np.float32)],
    {"padding_mode": p, "align_corners": k}, ())
      for p in ("zeros", "border", "reflection") for k in (0, 1)],
    ("Col2Im", (18,), [f32(2, 12, 6), i64(4, 5), i64(2, 3)], {"strides": [1, 2], "pads": [0, 1, 0, 0]}, (1, 2)),
    # signals
    ("DFT", (17,), [f32(2, 8, 1)], {"axis": 1, "onesided": 1}, ()),
    ("DFT", (17,), [f32(2, 7, 2)], {"axis": 1, "inverse": 1}, ()),
    ("DFT", (20,), [f32(2, 8, 3, 1), np.int64(6), np.int64(1)], {}, (1, 2)),
    ("STFT", (17,), [f32(2, 20, 1), np.int64(4), f32(8)], {}, (1,)),
    ("STFT", (17,), [f32(2, 20), np.int64(4), f32(8)], {}, (1,)),
    ("HannWindow", (17,), [np.int64(9)], {}, (0,)),
    ("BlackmanWindow", (17,), [np.int64(9)], {"periodic": 0}, (0,)),
    ("MelWeightMatrix", (17,), [np.int64(8), np.int64(32), np.int64(8192), np.float32(0), np.float32(4096)], {},
    (0, 1, 2, 3, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "opset", "k"), [(c[0], v, k) for k, c in enumerate(CASES) for v in c[1]])
def test_like_the_runtime(op: str, opset: int, k: int) -> None:
    _, _, inputs, attrs, fixed = CASES[k]
    outputs = 3 if op == "DynamicQuantizeLinear" else 1
    check(op, inputs, attrs, opset, fixed, outputs=outputs)


# --- opsets that no runtime knows any more ----------------------------------------------------------------------------

B = f32(3)
OLD: list[tuple[str, int, list[Any], dict[str, Any], np.ndarray]] = [
    ("Add", 1, [X, B], {"broadcast": 1, "axis": 1}, X + B[:, None]),
    ("Mul", 6, [X, X[0, 0]], {"broadcast": 1}, X * X[0, 0]),
    ("Greater", 1, [X, X * 0], {}, X > 0),
    ("Cast", 1, [X], {"to": "INT64"}, X.astype(np.int64)),
    ("Reshape", 1, [X], {"shape": [6, -1]}, X.reshape(6, 4)),
    ("Concat", 1, [X, X], {}, np.concatenate([X, X], 1)),
    ("Pad", 1, [X], {"paddings": [0, 0, 1, 0, 0, 0]}, np.pad(X, [(0, 0), (0, 0), (1, 0)])),
    ("Squeeze", 1, [X[:1]], {"axes": [0]}, X[0]),
    ("Clip", 6, [X], {"max": 0.5}, np.minimum(X, 0.5)),
    (
        "PRelu",
        6,
        [IMAGE, np.arange(4, dtype=np.float32)],
        {},
        np.where(IMAGE < 0, IMAGE * np.arange(4, dtype=np.float32)[:, None, None], IMAGE),
    ),
    ("Softmax", 1, [X], {}, (lambda e: e / e.sum((1, 2), keepdims=True))(np.exp(X))),
    ("Upsample", 1, [IMAGE], {"height_scale": 2.0, "width_scale": 1.0}, IMAGE.repeat(2, 2)),
    ("Gemm", 6, [X[0], X[1].T, X[0, :1, :3]], {"broadcast": 1}, X[0] @ X[1].T + X[0, :1, :3]),
]


@pytest.mark.parametrize(("op", "opset", "k"), [(c[0], c[1], k) for k, c in enumerate(OLD)])
def test_old_opsets(op: str, opset: int, k: int) -> None:
    _, _, inputs, attrs, want = OLD[k]
    check(op, inputs, attrs, opset, want=want)


# --- more than one output ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("opset", "attrs"), [(11, {"split": [1, 2]}), (11, {})])
def test_split_by_attribute(opset: int, attrs: dict[str, Any]) -> None:
    outputs = 2 if attrs else 3
    check("Split", [X], {"axis": 1, **attrs}, opset, outputs=outputs)


def test_split_by_input() -> None:
    check("Split", [X, i64(1, 2)], {"axis": 1}, 13, fixed=(1,), outputs=2)


def test_split_in_parts_that_do_not_divide() -> None:
    check("Split", [X], {"axis": 1, "num_outputs": 2}, 18, outputs=2)


@pytest.mark.parametrize("column_major", [0, 1])
def test_max_pool_index(column_major: int) -> None:
    check("MaxPool", [IMAGE], {"kernel_shape": [2, 3], "strides": [2, 2], "storage_order": column_major}, 12, outputs=2)


def test_unused_outputs() -> None:
    check("LayerNormalization", [X, f32(4)], {}, 17, outputs=3)
    check("LayerNormalization", [X, f32(4)], {}, 17, outputs=1)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("lengths", [False, True], ids=["full", "ragged"])
def test_recurrent(op: str, direction: str, lengths: bool) -> None:
    gates, ways, hidden = {"LSTM": 4, "GRU": 3, "RNN": 1}[op], 2 if direction == "bidirectional" else 1, 5
    inputs = [
        f32(4, 3, 2),
        f32(ways, gates * hidden, 2),
        f32(ways, gates * hidden, hidden),
        f32(ways, 2 * gates * hidden),
    ]
    inputs += [np.array([4, 2, 3], np.int32) if lengths else None, f32(ways, 3, hidden)]
    inputs += [f32(ways, 3, hidden), f32(ways, 3 * hidden)] if op == "LSTM" else []
    attrs = {"hidden_size": hidden, "direction": direction, **({"linear_before_reset": 1} if op == "GRU" else {})}
    check(op, inputs, attrs, 14, outputs=3 if op == "LSTM" else 2)


@pytest.mark.parametrize(
    "attr",
    [{"value_float": 1.5}, {"value_ints": [3, 4]}, {"value": numpy_helper.from_array(np.ones((2, 2), np.float16))}],
)
def test_constants(attr: dict[str, Any]) -> None:
    check("Constant", [], attr, 13)


# --- functions --------------------------------------------------------------------------------------------------------


def test_operators_without_a_converter_use_their_schema() -> None:
    assert ("", "NegativeLogLikelihoodLoss") not in CONVERTERS
    check("NegativeLogLikelihoodLoss", [f32(4, 5), i64(0, 2, 1, 4)], {"reduction": "sum"}, 13)


def test_attention_of_opset_23() -> None:
    assert ("", "Attention") not in CONVERTERS
    q, k, v = f32(2, 3, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8)
    model = build("Attention", [q, k, v], {}, 23)
    e = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(8))
    np.testing.assert_allclose(ours(model, [q, k, v])[0], e / e.sum(-1, keepdims=True) @ v, rtol=1e-4, atol=1e-5)


def test_symbolic_batch_of_every_kind_of_layer() -> None:
    """Conv, pooling, norm and flatten keep a symbolic batch, and SAME padding works over symbolic images."""
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    net (float[N, 3, H, W] x, float[4, 3, 3, 3] w, float[4] s) => (float[N, 4] y) {
        a = Conv<auto_pad = "SAME_UPPER", strides = [2, 2]>(x, w)
        b = InstanceNormalization(a, s, s)
        c = MaxPool<kernel_shape = [2, 2]>(b)
        d = GlobalAveragePool(c)
        y = Flatten(d)
    }"""
    model = onnx.parser.parse_model(text)
    found = read_model(model)
    assert str(found.graph.outputs[0].type) == "f32[N, 4]"
    x, w, s = f32(2, 3, 8, 11), f32(4, 3, 3, 3), f32(4)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (want,) = session.run(None, {"x": x, "w": w, "s": s})
    np.testing.assert_allclose(interp.run(found.graph, [x, w, s])[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_tensor_scatter(mode: str) -> None:
    cache, update, starts = f32(2, 3, 6, 2), f32(2, 3, 2, 2), i64(1, 5 if mode == "circular" else 4)
    want = cache.copy()
    for b in range(2):
        for t in range(2):
            want[b, :, (starts[b] + t) % 6] = update[b, :, t]
    check("TensorScatter", [cache, update, starts], {"mode": mode}, 24, want=want)


def test_training_dropout_with_a_seed() -> None:
    keep = np.random.RandomState(3).uniform(0, 1.0, X.shape) >= 0.25
    check(
        "Dropout",
        [X, np.float32(0.25), np.array(True)],
        {"seed": 3},
        13,
        fixed=(1, 2),
        want=(X * keep / 0.75).astype(np.float32),
    )


def test_newest_runtime_opset_is_known() -> None:
    check("Relu", [X], {}, ORT_NEWEST)
