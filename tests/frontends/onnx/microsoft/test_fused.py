"""Operators of com.microsoft, compiled, against ONNX Runtime; those it has on GPUs only against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from against import feeds, node_model, run_dnnc, run_ort
from onnx import TensorProto

from dnnc.ir.errors import ModelError, UnsupportedError

RNG = np.random.default_rng(7)
U8, I8 = TensorProto.UINT8, TensorProto.INT8
I32, I64 = TensorProto.INT32, TensorProto.INT64


def f(*shape: int) -> Any:
    return np.asarray(RNG.standard_normal(shape), np.float32)


def q(*shape: int, dtype: Any = np.uint8) -> Any:
    info = np.iinfo(dtype)
    return np.asarray(RNG.integers(info.min, info.max, shape, endpoint=True)).astype(dtype)


def s(v: float) -> Any:
    return np.array(v, np.float32)


def z(v: int, dtype: Any = np.uint8) -> Any:
    return np.array(v, dtype)


def whole(*values: int) -> Any:
    return np.array(values, np.int32)


# op, inputs, keywords of node_model and attributes; "step": how far integer results may differ
CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "qadd": (
        "QLinearAdd",
        [q(3, 5), s(0.1), z(120), q(5), s(0.05), z(9), s(0.2), z(100)],
        {"kinds": {0: U8}, "step": 1},
    ),
    "qmul-i8": (
        "QLinearMul",
        [
            q(3, 5, dtype=np.int8),
            s(0.1),
            z(-3, np.int8),
            q(3, 1, dtype=np.int8),
            s(0.05),
            z(9, np.int8),
            s(0.3),
            z(5, np.int8),
        ],
        {"kinds": {0: I8}, "step": 1},
    ),
    "qsigmoid": (
        "QLinearSigmoid",
        [q(3, 5), s(0.05), z(120), s(1 / 256), z(0)],
        {"kinds": {0: U8}, "constants": (1, 2, 3, 4), "step": 1},
    ),
    "qleaky": (
        "QLinearLeakyRelu",
        [q(3, 5), s(0.05), z(120), s(0.04), z(30)],
        {"alpha": 0.2, "kinds": {0: U8}, "constants": (1, 2, 3, 4), "step": 1},
    ),
    "qsoftmax": (
        "QLinearSoftmax",
        [q(3, 5), s(0.05), z(120), s(1 / 256), z(0)],
        {"opset_": 13, "axis": -1, "kinds": {0: U8}, "constants": (1, 2, 3, 4), "step": 1},
    ),
    "qsoftmax-old": (
        "QLinearSoftmax",
        [q(3, 2, 4), s(0.05), z(120), s(1 / 256), z(0)],
        {"opset_": 11, "axis": 1, "kinds": {0: U8}, "constants": (1, 2, 3, 4), "step": 1},
    ),
    "qgap": (
        "QLinearGlobalAveragePool",
        [q(2, 3, 5, 4), s(0.05), z(120), s(0.04), z(30)],
        {"kinds": {0: U8}, "step": 1},
    ),
    "qgap-last": (
        "QLinearGlobalAveragePool",
        [q(2, 5, 4, 3), s(0.05), z(120), s(0.04), z(30)],
        {"channels_last": 1, "kinds": {0: U8}, "step": 1},
    ),
    "qavgpool": (
        "QLinearAveragePool",
        [q(1, 3, 7, 8), s(0.05), z(120), s(0.04), z(30)],
        {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "kinds": {0: U8}, "step": 1},
    ),
    "qavgpool-last": (
        "QLinearAveragePool",
        [q(1, 7, 8, 3), s(0.05), z(120), s(0.04), z(30)],
        {"kernel_shape": [3, 2], "channels_last": 1, "kinds": {0: U8}, "step": 1},
    ),
    "qconcat": (
        "QLinearConcat",
        [s(0.1), z(100), q(2, 3), s(0.05), z(3), q(2, 4), s(0.2), z(90)],
        {"axis": 1, "kinds": {0: U8}, "constants": (0, 1, 3, 4, 6, 7), "step": 1},
    ),
    "qwhere": (
        "QLinearWhere",
        [f(3, 4) > 0, q(3, 4), s(0.1), z(7), q(4), s(0.05), z(90), s(0.12), z(60)],
        {"kinds": {0: U8}, "constants": (2, 3, 5, 6, 7, 8), "step": 1},
    ),
    "qconv": (
        "QLinearConv",
        [
            q(1, 4, 7, 6),
            s(0.05),
            z(120),
            q(3, 4, 3, 3, dtype=np.int8),
            f(3) ** 2 + 0.01,
            np.zeros(3, np.int8),
            s(4.0),
            z(90),
            q(3).astype(np.int32),
        ],
        {"kinds": {0: U8}, "pads": [1, 1, 1, 1], "constants": (1, 2, 3, 4, 5, 6, 7, 8), "step": 1},
    ),
    "qconv-last": (
        "QLinearConv",
        [q(1, 7, 6, 4), s(0.05), z(120), q(3, 4, 3, 3, dtype=np.int8), s(0.02), z(0, np.int8), s(2.0), z(90)],
        {"kinds": {0: U8}, "channels_last": 1, "strides": [2, 1], "constants": (1, 2, 3, 4, 5, 6, 7), "step": 1},
    ),
    "qgemm": (
        "QGemm",
        [q(3, 5), s(0.05), z(7), q(5, 4, dtype=np.int8), s(0.02), z(3, np.int8), q(4).astype(np.int32), s(1.5), z(99)],
        {"kinds": {0: U8}, "step": 1},
    ),
    "qgemm-float": (
        "QGemm",
        [q(5, 3), s(0.05), z(7), q(4, 5, dtype=np.int8), f(4) ** 2 + 0.01, q(4, dtype=np.int8) // 9],
        {"transA": 1, "transB": 1, "alpha": 0.5},
    ),
    "dqmatmul": (
        "DynamicQuantizeMatMul",
        [f(3, 17), q(17, 5, dtype=np.int8), s(0.02), z(3, np.int8), f(5)],
        {"tol": 1e-4},
    ),
    "dqmatmul-column": ("DynamicQuantizeMatMul", [f(2, 3, 17), q(17, 5), f(5) ** 2, q(5)], {"tol": 1e-4}),
    "mi2f": ("MatMulIntegerToFloat", [q(3, 17), q(17, 5), s(0.05), s(0.02), z(9), z(120), f(5)], {}),
    "mi2f-column": (
        "MatMulIntegerToFloat",
        [q(2, 3, 17), q(17, 5, dtype=np.int8), s(0.05), f(5) ** 2, z(7), q(5, dtype=np.int8)],
        {},
    ),
    "nbits4": (
        "MatMulNBits",
        [f(3, 40), q(6, 3, 8), f(6, 3)],
        {"K": 40, "N": 6, "bits": 4, "block_size": 16, "constants": (1, 2), "tol": 1e-5},
    ),
    "nbits4-zero": (
        "MatMulNBits",
        [f(2, 3, 48), q(6, 3, 8), f(6, 3), q(6, 2), None, f(6)],
        {"K": 48, "N": 6, "bits": 4, "block_size": 16, "constants": (1, 2, 3, 5), "tol": 1e-5},
    ),
    "nbits4-floats": (
        "MatMulNBits",
        [f(3, 48), q(6, 3, 8), f(6, 3), f(6, 3)],
        {"K": 48, "N": 6, "bits": 4, "block_size": 16, "constants": (1, 2, 3), "tol": 1e-5},
    ),
    "nbits8": (
        "MatMulNBits",
        [f(3, 40), q(6, 3, 16), f(6, 3), q(6, 3)],
        {"K": 40, "N": 6, "bits": 8, "block_size": 16, "constants": (1, 2, 3), "tol": 1e-5},
    ),
    "fused-conv": (
        "FusedConv",
        [f(1, 3, 6, 5), f(4, 3, 3, 3), f(4), f(1, 4, 6, 5)],
        {"pads": [1, 1, 1, 1], "activation": "Relu", "constants": (1, 2)},
    ),
    "fused-conv-leaky": (
        "FusedConv",
        [f(1, 3, 6, 5), f(4, 3, 3, 3)],
        {"activation": "LeakyRelu", "activation_params": [0.3], "constants": (1,)},
    ),
    "fused-conv-clip": (
        "FusedConv",
        [f(1, 3, 6, 5), f(4, 3, 3, 3)],
        {"activation": "Clip", "activation_params": [-0.5, 0.7], "constants": (1,)},
    ),
    "fused-conv-hard": (
        "FusedConv",
        [f(1, 3, 6, 5), f(4, 3, 3, 3)],
        {"activation": "HardSigmoid", "activation_params": [0.3, 0.4], "constants": (1,)},
    ),
    "fused-matmul": ("FusedMatMul", [f(2, 5, 3), f(2, 4, 5)], {"transA": 1, "transB": 1, "alpha": 0.5}),
    "fused-matmul-batch": ("FusedMatMul", [f(3, 2, 5), f(5, 2, 4)], {"transBatchA": 1, "transBatchB": 1}),
    "transpose-matmul": ("TransposeMatMul", [f(5, 3), f(5, 4)], {"transA": 1}),
    "fused-gemm": (
        "FusedGemm",
        [f(3, 5), f(4, 5), f(4)],
        {"transB": 1, "alpha": 0.5, "beta": 2.0, "activation": "LeakyRelu", "activation_alpha": 0.1},
    ),
    "skip-ln": (
        "SkipLayerNormalization",
        [f(2, 3, 8), f(2, 3, 8), f(8), f(8), f(8)],
        {"outputs": 4, "epsilon": 1e-5, "only": (0, 3)},
    ),
    "skip-ln-broadcast": ("SkipLayerNormalization", [f(2, 3, 8), f(3, 8), f(8)], {}),
    "skip-rms": (
        "SkipSimplifiedLayerNormalization",
        [f(2, 3, 8), f(2, 3, 8), f(8), f(8)],
        {"outputs": 4, "epsilon": 1e-5, "only": (0, 3)},
    ),
    "rms": ("SimplifiedLayerNormalization", [f(2, 3, 8), f(8)], {"domain": "", "epsilon": 1e-5, "axis": -1}),
    "embed": (
        "EmbedLayerNormalization",
        [
            q(2, 4).astype(np.int32) % 9,
            q(2, 4).astype(np.int32) % 2,
            f(9, 8),
            f(5, 8),
            f(2, 8),
            f(8),
            f(8),
            np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32),
        ],
        {"outputs": 3, "kinds": {1: I32}, "epsilon": 1e-5},
    ),
    "embed-plain": (
        "EmbedLayerNormalization",
        [q(2, 4).astype(np.int32) % 9, None, f(9, 8), f(5, 8), None, f(8), f(8)],
        {"outputs": 2, "kinds": {1: I32}},
    ),
    "gelu": ("Gelu", [f(3, 9)], {}),
    "fast-gelu": ("FastGelu", [f(3, 9), f(9)], {"tol": 1e-5}),
    "bias-gelu": ("BiasGelu", [f(3, 9), f(9)], {}),
    "quick-gelu": ("QuickGelu", [f(3, 9)], {"alpha": 1.5}),
    "nhwc-maxpool": ("NhwcMaxPool", [q(1, 6, 5, 3)], {"kernel_shape": [3, 2], "strides": [2, 1], "kinds": {0: U8}}),
    "gather-nd": ("GatherND", [f(3, 4, 5), np.array([[0, 1], [2, 3]], np.int64)], {}),
    "inverse": ("Inverse", [f(3, 4, 4)], {"tol": 1e-4}),
    "pad": ("Pad", [f(2, 3), np.array([0, 1, 2, 1], np.int64), s(0.5)], {"mode": "constant", "constants": (1,)}),
    "pad-reflect": ("Pad", [f(2, 3), np.array([0, 1, 1, 1], np.int64)], {"mode": "reflect", "constants": (1,)}),
    "trilu": ("Trilu", [f(3, 4), np.array(1, np.int64)], {"upper": 0, "constants": (1,)}),
    "unique": ("Unique", [np.array([2, 1, 1, 3, 4, 3], np.float32)], {"outputs": 3, "kinds": {1: I64, 2: I64}}),
    "expand-dims": ("ExpandDims", [f(3, 4), np.array(-1, np.int32)], {"constants": (1,)}),
    "range": ("Range", [s(1.0), s(9.0), s(1.5)], {"constants": (0, 1, 2)}),
    "range-two": ("Range", [s(1.0), s(5.0)], {"constants": (0, 1)}),
    "cdist": ("CDist", [f(3, 5), f(4, 5)], {"metric": "euclidean", "tol": 1e-4}),
    "cdist-square": ("CDist", [f(3, 5), f(4, 5)], {"metric": "sqeuclidean", "tol": 1e-4}),
    "conv-transpose-pads": (
        "ConvTransposeWithDynamicPads",
        [f(1, 3, 4, 5), f(3, 2, 3, 3), np.array([1, 0, 1, 2], np.int64), f(2)],
        {"strides": [2, 2], "constants": (1, 2)},
    ),
    "grid-sample": (
        "GridSample",
        [f(1, 2, 4, 5), np.tanh(f(1, 3, 3, 2))],
        {"mode": "bilinear", "padding_mode": "border", "align_corners": 1},
    ),
    "grid-bicubic": ("GridSample", [f(1, 2, 4, 5), np.tanh(f(1, 3, 3, 2))], {"mode": "bicubic", "tol": 1e-5}),
    "attention": ("Attention", [f(2, 5, 8), f(8, 24), f(24)], {"num_heads": 2}),
    "attention-causal": ("Attention", [f(2, 5, 8), f(8, 24), f(24)], {"num_heads": 2, "unidirectional": 1}),
    "attention-mask": (
        "Attention",
        [f(2, 5, 8), f(8, 24), f(24), np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)],
        {"num_heads": 2},
    ),
    "attention-mask3": (
        "Attention",
        [f(2, 3, 8), f(8, 24), f(24), (f(2, 3, 3) > 0).astype(np.int32)],
        {"num_heads": 2},
    ),
    "attention-ends": ("Attention", [f(2, 5, 8), f(8, 24), f(24), np.array([3, 5], np.int32)], {"num_heads": 2}),
    "attention-starts": (
        "Attention",
        [f(2, 5, 8), f(8, 24), f(24), np.array([4, 5, 1, 0], np.int32)],
        {"num_heads": 2},
    ),
    "attention-past": (
        "Attention",
        [f(2, 3, 8), f(8, 24), f(24), None, f(2, 2, 2, 4, 4)],
        {"num_heads": 2, "outputs": 2, "unidirectional": 1},
    ),
    "attention-sizes": (
        "Attention",
        [f(2, 3, 8), f(8, 8 + 8 + 6), f(22), None, None, f(2, 2, 3, 3)],
        {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 6], "scale": 0.3},
    ),
    "mha": ("MultiHeadAttention", [f(2, 3, 8), f(2, 5, 8), f(2, 5, 8), f(24)], {"num_heads": 2}),
    "mha-mask": (
        "MultiHeadAttention",
        [f(2, 3, 8), f(2, 5, 8), f(2, 5, 6), None, np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)],
        {"num_heads": 2},
    ),
    "mha-past": (
        "MultiHeadAttention",
        [f(2, 3, 8), f(2, 3, 8), f(2, 3, 8), None, None, f(1, 2, 3, 7), f(2, 2, 4, 4), f(2, 2, 4, 4)],
        {"num_heads": 2, "outputs": 3},
    ),
    "mha-causal": ("MultiHeadAttention", [f(2, 4, 8), f(2, 4, 8), f(2, 4, 8)], {"num_heads": 2, "unidirectional": 1}),
    "mha-cross": ("MultiHeadAttention", [f(2, 3, 8), f(2, 2, 5, 4), f(2, 2, 5, 4)], {"num_heads": 2}),
    "rotary": ("RotaryEmbedding", [f(2, 3, 16), np.array([2], np.int64), f(9, 4), f(9, 4)], {}),
    "rotary-places": (
        "RotaryEmbedding",
        [f(2, 2, 3, 8), np.array([[0, 1, 2], [4, 3, 8]], np.int64), f(9, 4), f(9, 4)],
        {"interleaved": 1},
    ),
    "rotary-part": (
        "RotaryEmbedding",
        [f(2, 3, 16), np.array([[0, 1, 2], [4, 3, 8]], np.int64), f(9, 2), f(9, 2)],
        {"num_heads": 2, "rotary_embedding_dim": 4},
    ),
    "gqa-prompt": (
        "GroupQueryAttention",
        [f(2, 3, 32), f(2, 3, 16), f(2, 3, 16), None, None, np.array([2, 2], np.int32), np.array(3, np.int32)],
        {"num_heads": 4, "kv_num_heads": 2, "outputs": 3, "constants": (6,)},
    ),
    "gqa-next": (
        "GroupQueryAttention",
        [
            f(2, 1, 64),
            f(2, 1, 32),
            f(2, 1, 32),
            f(2, 2, 5, 16),
            f(2, 2, 5, 16),
            whole(5, 5),
            np.array(6, np.int32),
            f(16, 8),
            f(16, 8),
        ],
        {"num_heads": 4, "kv_num_heads": 2, "outputs": 3, "do_rotary": 1, "constants": (6,)},
    ),
    "gqa-ragged": (
        "GroupQueryAttention",
        [
            f(2, 1, 128),
            None,
            None,
            f(2, 2, 8, 16),
            f(2, 2, 8, 16),
            whole(5, 3),
            np.array(6, np.int32),
            f(16, 8),
            f(16, 8),
        ],
        {
            "num_heads": 4,
            "kv_num_heads": 2,
            "outputs": 3,
            "do_rotary": 1,
            "rotary_interleaved": 1,
            "constants": (6,),
            "only": (0,),
        },
    ),
    "gqa-window": (
        "GroupQueryAttention",
        [
            f(1, 3, 32),
            f(1, 3, 16),
            f(1, 3, 16),
            f(1, 2, 5, 8),
            f(1, 2, 5, 8),
            np.array([7], np.int32),
            np.array(8, np.int32),
        ],
        {"num_heads": 4, "kv_num_heads": 2, "outputs": 3, "local_window_size": 3, "softcap": 2.0, "constants": (6,)},
    ),
    "gqa-sink": (
        "GroupQueryAttention",
        [
            f(1, 3, 32),
            f(1, 3, 16),
            f(1, 3, 16),
            None,
            None,
            np.array([2], np.int32),
            np.array(3, np.int32),
            None,
            None,
            None,
            None,
            f(4),
        ],
        {"num_heads": 4, "kv_num_heads": 2, "outputs": 3, "constants": (6,)},
    ),
    "gqa-bias": (
        "GroupQueryAttention",
        [
            f(1, 3, 32),
            f(1, 3, 16),
            f(1, 3, 16),
            None,
            None,
            np.array([2], np.int32),
            np.array(3, np.int32),
            None,
            None,
            None,
            f(1, 4, 3, 3),
        ],
        {"num_heads": 4, "kv_num_heads": 2, "outputs": 3, "constants": (6,), "smooth_softmax": 1},
    ),
}


def built(name: str) -> tuple[onnx.ModelProto, dict[str, Any], dict[str, Any]]:
    op, inputs, keys = CASES[name]
    keys = dict(keys)
    rules = {k: keys.pop(k) for k in ("step", "tol", "only") if k in keys}
    if "opset_" in keys:  # an attribute that is called like a parameter of node_model
        attribute = onnx.helper.make_attribute("opset", keys.pop("opset_"))
        model = node_model(op, inputs, **keys)
        model.graph.node[0].attribute.append(attribute)
    else:
        model = node_model(op, inputs, **keys)
    return model, feeds(inputs, keys.get("constants", ())), rules


def close(got: Any, want: Any, rules: dict[str, Any], name: str) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, (name, got.dtype, want.dtype, got.shape, want.shape)
    if "step" in rules:
        assert np.abs(got.astype(np.int64) - want.astype(np.int64)).max() <= rules["step"], name
    elif got.dtype.kind == "f":
        np.testing.assert_allclose(
            got, want, rtol=rules.get("tol", 1e-5), atol=rules.get("tol", 2e-6) * max(np.abs(want).max(), 1)
        )
    else:
        np.testing.assert_array_equal(got, want)


@pytest.mark.family("samples")
@pytest.mark.parametrize("name", CASES)
def test_against_onnx_runtime(name: str) -> None:
    model, feed, rules = built(name)
    want = run_ort(model, feed)
    got = run_dnnc(model, feed)
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        if k in rules.get("only", range(len(want))):
            close(g, w, rules, f"{name} output {k}")


# --- what ONNX Runtime has no CPU kernel of, against NumPy ------------------------------------------------------------


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def gelu(x: Any) -> Any:
    from math import erf

    return 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def check(op: str, inputs: list[Any], want: Any, **keys: Any) -> None:
    got = run_dnnc(node_model(op, inputs, **keys), feeds(inputs, keys.get("constants", ())))[0]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_sums_of_diffusion_models() -> None:
    x, bias, skip = f(2, 5, 8), f(8), f(2, 5, 8)
    check("BiasAdd", [x, bias, skip], x + bias + skip)
    left, right = np.split(x + bias, 2, -1)
    check("BiasSplitGelu", [x, bias], left * gelu(right))


@pytest.mark.slow
def test_bias_softmax() -> None:
    x = f(2, 3, 4, 5)
    check("BiasSoftmax", [x, bias := f(2, 1, 1, 5)], softmax(x + bias), axis=3, is_inner_broadcast=1)
    check("BiasSoftmax", [x, bias := f(4, 5)], softmax(x + bias), axis=3, is_inner_broadcast=0)
    flat = softmax((x + (bias := f(2, 1, 4, 5))).reshape(2, 3, 20)).reshape(x.shape)
    check("BiasSoftmax", [x, bias], flat, axis=2, is_inner_broadcast=1)


@pytest.mark.slow
def test_group_norm() -> None:
    x, scale, bias = f(2, 3, 4, 6), f(6), f(6)
    g = x.reshape(2, 3, 4, 2, 3)
    y = ((g - g.mean((1, 2, 4), keepdims=True)) / np.sqrt(g.var((1, 2, 4), keepdims=True) + 1e-5)).reshape(
        x.shape
    ) * scale + bias
    check("GroupNorm", [x, scale, bias], y, groups=2, activation=0, channels_last=1)
    check("GroupNorm", [x, scale, bias], y * sigmoid(y), groups=2, activation=1, channels_last=1)


def test_channels_last_convolutions() -> None:
    x, w, bias = f(1, 6, 5, 3), f(4, 3, 3, 3), f(4)
    z = f(1, 4, 3, 4)
    plain = run_ort(
        node_model("Conv", [x.transpose(0, 3, 1, 2).copy(), w, bias], domain=""),
        feeds([x.transpose(0, 3, 1, 2).copy(), w, bias]),
    )[0]
    want = plain.transpose(0, 2, 3, 1)
    check("NhwcConv", [x, w, bias], want, constants=(1, 2))
    check("NhwcFusedConv", [x, w, bias, z], np.maximum(want + z, 0), constants=(1, 2), activation="Relu")


def test_complex_products() -> None:
    a, b = f(3, 4, 2), f(3, 4, 2)
    x, y = a[..., 0] + 1j * a[..., 1], b[..., 0] + 1j * b[..., 1]
    check("ComplexMul", [a, b], np.stack([(x * y).real, (x * y).imag], -1))
    check("ComplexMulConj", [a, b], np.stack([(x * y.conj()).real, (x * y.conj()).imag], -1))


def test_is_all_finite() -> None:
    for bad, expected in ((1.0, True), (np.inf, False), (np.nan, False)):
        x = f(3, 2)
        x[1, 1] = bad
        got = run_dnnc(node_model("IsAllFinite", [f(4), x], kinds={0: TensorProto.BOOL}), feeds([f(4), x]))[0]
        assert bool(got) == expected


def test_fused_activation_of_a_product() -> None:
    a, b = f(3, 5), f(5, 4)
    check("FusedMatMulActivation", [a, b], np.tanh(0.5 * a @ b), activation="Tanh", alpha=0.5)
    check("FusedMatMulActivation", [a, b], softmax(a @ b), activation="Softmax", activation_axis=-1)


def test_bias_dropout_outside_of_training() -> None:
    x, bias, residual = f(3, 8), f(8), f(3, 8)
    check("BiasDropout", [x, bias, residual], x + bias + residual)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_weights_of_few_bits_in_groups(bits: int) -> None:
    n, k, block = 5, 40, 16
    levels = RNG.integers(0, 1 << bits, (n, 48)).astype(np.uint8)
    packed = levels.reshape(n, -1, 8 // bits)
    packed = (packed << np.arange(0, 8, bits, dtype=np.uint8)).sum(-1).astype(np.uint8).reshape(n, 3, block * bits // 8)
    x, scales, group = f(2, k), f(n, 3), RNG.integers(0, 3, k).astype(np.int32)
    w = (levels[:, :k].astype(np.float32) - (1 << (bits - 1))) * scales[:, group]
    check(
        "MatMulNBits",
        [x, packed, scales, None, group],
        x @ w.T,
        constants=(1, 2, 4),
        K=k,
        N=n,
        bits=bits,
        block_size=block,
    )
    plain = (levels.astype(np.float32).reshape(n, 3, block) - (1 << (bits - 1))) * scales[..., None]
    check("MatMulNBits", [x, packed, scales], x @ plain.reshape(n, 48)[:, :k].T, K=k, N=n, bits=bits, block_size=block)


def test_mean_of_levels() -> None:
    x = q(2, 3, 4)
    y = ((x.astype(np.float32) - 100) * np.float32(0.1)).mean((1, 2), keepdims=True)
    want = np.clip(np.rint(y / 0.05) + 90, 0, 255)
    inputs = [x, s(0.1), z(100), s(0.05), z(90)]
    got = run_dnnc(node_model("QLinearReduceMean", inputs, axes=[1, 2], keepdims=1, kinds={0: U8}), feeds(inputs))[0]
    assert np.abs(got.astype(int) - want).max() <= 1


# --- what is refused --------------------------------------------------------------------------------------------------


def test_unknown_attributes_are_named() -> None:
    with pytest.raises(ModelError, match=r"Gelu.*attribute 'exact'.*has none"):
        run_dnnc(node_model("Gelu", [f(3)], exact=1), {})


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(UnsupportedError, match="CDist with metric 'cosine'"):
        run_dnnc(node_model("CDist", [f(3, 2), f(4, 2)], metric="cosine"), {})
    with pytest.raises(UnsupportedError, match=r"the operator Sampling of domain 'com\.microsoft'"):
        run_dnnc(node_model("Sampling", [f(3, 2)]), {})
