"""TopK, BitCast, casts to powers of two: compiled, at every opset, against ONNX Runtime and NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from dnnc.driver import compile
from dnnc.ir.errors import DnncError

Array = np.ndarray[Any, Any]
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def built(
    node: onnx.NodeProto, x: Array, dims: list[Any], outputs: dict[str, int], opset: int, initial: list[Any]
) -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), dims)]
    outs = [helper.make_tensor_value_info(name, number, None) for name, number in outputs.items()]
    graph = helper.make_graph([node], "g", infos, outs, initial)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)


def top_k(x: Array, dims: list[Any], k: int, opset: int = 11, **attrs: Any) -> onnx.ModelProto:
    initial = [numpy_helper.from_array(np.array([k], np.int64), "k")] if opset >= 10 else []
    node = helper.make_node(
        "TopK", ["x", "k"] if opset >= 10 else ["x"], ["v", "i"], **({} if opset >= 10 else {"k": k}), **attrs
    )
    return built(node, x, dims, {"v": helper.np_dtype_to_tensor_dtype(x.dtype), "i": TensorProto.INT64}, opset, initial)


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "shape,dims,k,attrs",
    [
        ((3, 50), ["B", "N"], 5, {}),
        ((2, 1500), ["B", "N"], 5, {"largest": 0}),
        ((30, 4), ["N", 4], 7, {"axis": 0}),
        ((2, 3, 900), ["B", 3, 900], 4, {"sorted": 0, "axis": -1}),
        ((3, 50), [3, 50], 50, {"largest": 0}),
    ],
)
def test_top_k(shape: tuple[int, ...], dims: list[Any], k: int, attrs: dict[str, Any]) -> None:
    x = np.round(np.random.default_rng(k).standard_normal(shape) * 20).astype(np.float32)  # ties
    model = top_k(x, dims, k, **attrs)
    values, index = compile(model, target="llvm", threads=1, cache=False)(x)
    if attrs.get("sorted", 1):
        want = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
        np.testing.assert_array_equal(index, want[1])
        np.testing.assert_array_equal(values, want[0])
    else:
        np.testing.assert_array_equal(values, -np.sort(-x, -1)[..., :k])


@pytest.mark.family("cases")
@pytest.mark.parametrize("opset", [1, 10, 11, 24])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_top_k_at_every_opset(opset: int, dtype: Any) -> None:
    x = (np.random.default_rng(opset).standard_normal((2, 33)) * 9).astype(dtype)
    values, index = compile(top_k(x, [2, 33], 6, opset), target="llvm", threads=1, cache=False)(x)
    order = np.argsort(-x, 1, kind="stable")[:, :6]
    np.testing.assert_array_equal(index, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, 1))


def test_top_k_of_too_many_is_refused() -> None:
    with pytest.raises(DnncError, match="k is 9"):
        compile(top_k(np.zeros((2, 4), np.float32), [2, 4], 9), target="llvm", cache=False)


@pytest.mark.parametrize(
    "source,to",
    [("float16", "int16"), ("uint16", "float16"), ("float32", "uint32"), ("bfloat16", "float16"), ("uint8", "int8")],
)
def test_bit_cast_keeps_every_bit(source: str, to: str) -> None:
    """Signalling NaN and denormals too."""
    a, b = (np.dtype(getattr(ml_dtypes, t, t)) for t in (source, to))
    x = np.random.default_rng(0).integers(0, 256, 4096 * a.itemsize, np.uint8).view(a)
    number = helper.np_dtype_to_tensor_dtype(b)
    model = built(helper.make_node("BitCast", ["x"], ["y"], to=number), x, ["N"], {"y": number}, 26, [])
    got = compile(model, target="llvm", threads=1, cache=False)(x)
    assert got.dtype == b and got.tobytes() == x.tobytes()


def test_bit_cast_to_another_width_is_refused() -> None:
    x = np.zeros(3, np.float32)
    with pytest.raises(DnncError, match="keeps the number of bits"):
        compile(
            built(helper.make_node("BitCast", ["x"], ["y"], to=TensorProto.INT64), x, [3], {"y": 7}, 26, []),
            target="llvm",
            cache=False,
        )


POWERS = [  # number, rounding, saturate, code
    (0.0, "up", 1, 0), (0.0, "nearest", 0, 255), (1.0, "up", 1, 127), (1.1, "up", 1, 128), (1.1, "down", 1, 127),
    (1.5, "nearest", 1, 128),
    (1.49, "nearest", 1, 127), (2.0**-127, "up", 0, 0), (1.1 * 2.0**-127, "up", 1, 1), (2.0**-130, "up", 1, 0),
    (2.0**-130, "up", 0, 255),
    (3e38, "up", 1, 254), (3e38, "up", 0, 255), (3e38, "down", 0, 254), (np.inf, "up", 1, 254),
    (np.inf, "nearest", 0, 255), (np.nan, "up", 1, 255),
]  # fmt: skip


@pytest.mark.parametrize("rounding", ["up", "down", "nearest"])
@pytest.mark.parametrize("saturate", [0, 1])
def test_cast_to_a_power_of_two(rounding: str, saturate: int) -> None:
    cases = [(v, code) for v, r, s, code in POWERS if (r, s) == (rounding, saturate)]
    x = np.array([v for v, _ in cases] + [0.75, 3.0], np.float32)
    want = [code for _, code in cases] + ([126, 128] if rounding == "down" else [127, 129])
    number = helper.np_dtype_to_tensor_dtype(E8M0)
    node = helper.make_node("Cast", ["x"], ["y"], to=number, round_mode=rounding, saturate=saturate)
    got = compile(built(node, x, [len(x)], {"y": number}, 24, []), target="llvm", threads=1, cache=False)(x)
    assert got.view(np.uint8).tolist() == want
