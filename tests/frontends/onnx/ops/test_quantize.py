"""Quantized operators whose schemes are no schemes: errors name the node."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import dnnc
from dnnc.frontends.onnx import read
from dnnc.ir.errors import DnncError, ModelError, ShapeError


def model(op: str, x: str, constants: list[Any], out: int) -> ModelProto:
    named = [numpy_helper.from_array(np.asarray(a), f"c{k}") for k, a in enumerate(constants)]
    node = helper.make_node(op, ["x", *(t.name for t in named)], ["y"], name="here", axis=1)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", getattr(TensorProto, x), [2, 3])],
        [helper.make_tensor_value_info("y", out, None)],
        named,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


F, U8 = np.float32, np.uint8


@pytest.mark.parametrize(
    ("op", "constants", "error", "why"),
    [
        ("QuantizeLinear", [F(0), U8(3)], ModelError, "the scale is 0.0"),
        ("QuantizeLinear", [F("nan"), U8(3)], ModelError, "the scale is nan"),
        ("QuantizeLinear", [np.array([1, np.inf, 2], F), U8([1, 2, 3])], ModelError, "1 of 3 scales are inf"),
        ("QuantizeLinear", [np.ones(4, F), np.zeros(4, U8)], ShapeError, "must be one number or"),
        ("QuantizeLinear", [F(1), F(3)], ModelError, "y_zero_point is f32; QuantizeLinear takes"),
        ("DequantizeLinear", [F("nan"), U8(3)], ModelError, "the scale is nan"),
        ("DequantizeLinear", [F(1), np.int8(3)], ModelError, "x_zero_point is i8; it has to be u8"),
        ("DequantizeLinear", [np.ones(3, F), U8([1, 2])], ShapeError, "must have the shape of the scale"),
    ],
)
def test_bad_schemes(op: str, constants: list[Any], error: type[DnncError], why: str) -> None:
    quantizes = op == "QuantizeLinear"
    bad = model(op, "FLOAT" if quantizes else "UINT8", constants, TensorProto.UINT8 if quantizes else TensorProto.FLOAT)
    with pytest.raises(error, match=why) as e:
        read(bad)
    assert "here" in str(e.value)


OPERANDS: dict[str, tuple[str, ...]] = {  # a letter: a matrix, an image, filters or a bias
    "QuantizeLinear": ("FLOAT m", "FLOAT", "UINT8"),
    "DequantizeLinear": ("UINT8 m", "FLOAT", "UINT8"),
    "DynamicQuantizeLinear": ("FLOAT m",),
    "MatMulInteger": ("UINT8 m", "INT8 m", "UINT8", "INT8"),
    "ConvInteger": ("UINT8 i", "INT8 f", "UINT8", "INT8"),
    "QLinearMatMul": ("UINT8 m", "FLOAT", "UINT8", "INT8 m", "FLOAT", "INT8", "FLOAT", "UINT8"),
    "QLinearConv": ("UINT8 i", "FLOAT", "UINT8", "INT8 f", "FLOAT", "INT8", "FLOAT", "UINT8", "INT32 b"),
}
SHAPES = {"": [], "m": [3, 3], "i": [1, 3, 4, 4], "f": [2, 3, 1, 1], "b": [2]}


@pytest.mark.parametrize("op", OPERANDS)
def test_types_that_no_operand_has(op: str) -> None:
    """Each operand in turn as i64, each zero point as the other type of bytes. Right ones are read."""
    operands = [o.partition(" ")[::2] for o in OPERANDS[op]]

    def made(changed: int = -1, to: str = "") -> ModelProto:
        kinds = [to if k == changed else kind for k, (kind, _) in enumerate(operands)]
        inputs = [
            helper.make_tensor_value_info(f"x{k}", getattr(TensorProto, kind), SHAPES[letter])
            for k, (kind, (_, letter)) in enumerate(zip(kinds, operands))
        ]
        outputs = [f"y{k}" for k in range(3 if op == "DynamicQuantizeLinear" else 1)]
        node = helper.make_node(op, [i.name for i in inputs], outputs, name="here")
        graph = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info(o) for o in outputs])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    read(made())
    for k, (kind, _) in enumerate(operands):
        name = onnx.defs.get_schema(op).inputs[k].name
        with pytest.raises(ModelError, match=rf"here.*: {name} is i64; {op} takes .* there"):
            read(made(k, "INT64"))
        if "zero_point" in name and name != "y_zero_point":
            with pytest.raises(ModelError, match=rf"here.*: {name} is u?i?8; it has to be {kind[0].lower()}"):
                read(made(k, "UINT8" if kind == "INT8" else "INT8"))


def test_zeros_are_quantized_dynamically_as_in_onnx_runtime() -> None:
    """The function of ONNX's schema divides 0 by 0; the scale is 1. Tiny and large numbers too."""
    m = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> agraph (float[M, N] x) => (uint8[M, N] y, float s, uint8 z) {
            y, s, z = DynamicQuantizeLinear(x)
        }"""
    )
    f, session = dnnc.compile(m, target="reference"), onnxruntime.InferenceSession(m.SerializeToString())
    rows = np.random.default_rng(0).standard_normal((3, 70)) + 1
    rows[1, 3], rows[2, 69] = -7, 9
    for numbers in (
        rows,
        -rows,
        np.abs(rows),
        [0, 0],
        [-0.0],
        [1e-38],
        [-1e-42, 1e-43],
        [3e38, 1],
        [-2, 5, 0.1],
        [7, 7],
        [-3],
    ):
        x = np.atleast_2d(np.array(numbers, F))
        for got, want in zip(f(x), session.run(None, {"x": x}), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=str(numbers))


def test_channels_without_weights_have_scales_of_zero() -> None:
    read(model("DequantizeLinear", "UINT8", [np.array([1, 0, 2], F), U8([1, 2, 3])], TensorProto.FLOAT))


NAN = """
<ir_version: 10, opset_import: ["" : 21]>
agraph (float[N, 3] x, float scale) => (uint8[N, 3] a, int8[N, 3] b, uint8[N, 3] c, int8[N, 3] d, uint8[N, 3] e) {
    a = QuantizeLinear(x, s, high)
    moved = Add(x, bias)
    b = QuantizeLinear(moved, s, low)
    c = QuantizeLinear<axis = 1>(x, of_channels, zeros)
    d = QuantizeLinear(x, scale, low)
    real = DequantizeLinear(a, s, high)
    ratio = Div(real, real)
    e = QuantizeLinear(ratio, s, high)
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["llvm", "llvm -mcpu=haswell", "llvm -mcpu=x86-64", "reference"])
@pytest.mark.parametrize("numerics", ["standard", "strict"])
def test_nan_has_the_lowest_code(target: str, numerics: str) -> None:
    """As in ONNX Runtime: in vectors and in the elements behind them, alone, behind a sum, and in a table (0 / 0)."""
    m = onnx.parser.parse_model(NAN)
    numbers = {"s": F(0.01), "high": U8(117), "low": np.int8(-5), "bias": np.array([1, 0.5, np.nan], F)}
    numbers |= {"of_channels": np.array([0.01, 0.02, 0.5], F), "zeros": U8([0, 117, 255])}
    m.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in numbers.items())
    x = np.resize(np.array([np.nan, np.inf, -np.inf, 0, 1, -1, -np.nan], F), (19, 3))
    feed = {"x": x, "scale": np.asarray(F(0.25))}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    want = onnxruntime.InferenceSession(m.SerializeToString(), options).run(None, feed)
    got = dnnc.compile(m, target=target, numerics=numerics)(feed)
    for name, a, b in zip("abcde", got, want, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert (want[0][np.isnan(x)] == 0).all() and (want[1][:, 2] == -128).all() and (want[4] == 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FLOAT4E2M1", "FLOAT8E4M3FN", "FLOAT8E5M2", "INT8"])
def test_microscaling_formats_stay_as_they_are_stored(kind: str) -> None:
    """MXFP4, MXFP8 and MXINT8: blocks of 32 numbers and a power of two in 8 bits for each."""
    rng, rows, columns, number = np.random.default_rng(0), 256, 128, getattr(TensorProto, kind)
    w = rng.standard_normal((rows, columns)).clip(-6, 6) if kind != "INT8" else rng.integers(-128, 128, (rows, columns))
    powers = 2.0 ** rng.integers(-9, 4, (rows // 32, columns))
    constants = [
        helper.make_tensor(name, t, a.shape, a.astype(np.float32).reshape(-1))
        for name, t, a in (("w", number, w), ("s", TensorProto.FLOAT8E8M0, powers))
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0, block_size=32, output_dtype=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    info = helper.make_tensor_value_info
    inputs, outputs = [info("x", 1, (3, rows))], [info("y", 1, (3, columns))]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    f = dnnc.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12))
    x = rng.standard_normal((3, rows)).astype(np.float32)
    stored = numpy_helper.to_array(constants[0]).astype(np.float32)
    want = x @ (stored * np.repeat(powers, 32, 0)).astype(np.float32)
    assert np.abs(f(x) - want).max() <= 1e-5 * np.abs(want).max()
    bits = 4 if kind == "FLOAT4E2M1" else 8
    assert f.report.programs[0].memory.constants <= rows * columns * bits // 8 + 4 * powers.size


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FLOAT8E4M3FN", "INT8"])
def test_microscaling_formats_of_activations(kind: str) -> None:
    """Codes and powers of two that no constant holds, both ways, against ONNX's reference."""
    rng, number = np.random.default_rng(1), getattr(TensorProto, kind)
    blocks = {"axis": 1, "block_size": 32}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=number, **blocks),
        helper.make_node("DequantizeLinear", ["q", "s"], ["y"], output_dtype=TensorProto.FLOAT, **blocks),
    ]
    info = helper.make_tensor_value_info
    inputs = [info("x", 1, (5, 64)), info("s", TensorProto.FLOAT8E8M0, (5, 2))]
    graph = helper.make_graph(nodes, "g", inputs, [info("q", number, (5, 64)), info("y", 1, (5, 64))])
    m = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)
    x = rng.standard_normal((5, 64)).astype(np.float32)
    s = np.ldexp(np.float32(1), rng.integers(-6, -3, (5, 2))).astype(ml_dtypes.float8_e8m0fnu)
    got, want = dnnc.compile(m)({"x": x, "s": s}), ReferenceEvaluator(m).run(None, {"x": x, "s": s})
    for a, b in zip(got, want):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
