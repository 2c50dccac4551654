"""Quantised operators whose schemes are no schemes: errors name the node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

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
        ("DequantizeLinear", [F("nan"), U8(3)], ModelError, "the scale is nan"),
        ("DequantizeLinear", [F(1), np.int8(3)], ShapeError, "zero point must be u8; got i8"),
        ("DequantizeLinear", [np.ones(3, F), U8([1, 2])], ShapeError, "must have the shape of the scale"),
    ],
)
def test_bad_schemes(op: str, constants: list[Any], error: type[DnncError], why: str) -> None:
    quantizes = op == "QuantizeLinear"
    bad = model(op, "FLOAT" if quantizes else "UINT8", constants, TensorProto.UINT8 if quantizes else TensorProto.FLOAT)
    with pytest.raises(error, match=why) as e:
        read(bad)
    assert "here" in str(e.value)


def test_channels_without_weights_have_scales_of_zero() -> None:
    read(model("DequantizeLinear", "UINT8", [np.array([1, 0, 2], F), U8([1, 2, 3])], TensorProto.FLOAT))
