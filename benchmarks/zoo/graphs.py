"""Graphs written with onnx.helper, for what no exporter makes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

node, value = helper.make_node, helper.make_tensor_value_info


def decode_loop(vocabulary: int = 2000, width: int = 256, steps: int = 16) -> ModelProto:
    """A recurrent decoder: a Loop whose body embeds a token, updates the state, takes the likeliest token."""
    constants = _decoder_weights(vocabulary, width) + [
        numpy_helper.from_array(np.asarray(v), name) for name, v in (("steps", np.int64(steps)), ("go", np.bool_(True)))
    ]
    state, token = ["batch", width], ["batch"]
    inputs = [value("hinit", TensorProto.FLOAT, state), value("bos", TensorProto.INT64, token)]
    outputs = [value("logp", TensorProto.FLOAT, [steps, "batch", vocabulary]), value("tlast", TensorProto.INT64, token)]
    loop = node(
        "Loop", ["steps", "go", "hinit", "bos"], ["hlast", "tlast", "logp"], body=_decoder_step(vocabulary, width)
    )
    graph = helper.make_graph([loop], "decode_loop", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8, producer_name="dnnc")
    onnx.checker.check_model(model)
    return model


def _decoder_weights(vocabulary: int, width: int) -> list[TensorProto]:
    rng = np.random.RandomState(5)

    def normal(name: str, shape: tuple[int, ...], std: float) -> TensorProto:
        return numpy_helper.from_array((rng.standard_normal(shape) * std).astype(np.float32), name)

    std = 1 / math.sqrt(width)
    square = width, width
    return [
        normal("embedding", (vocabulary, width), 1.0),
        normal("out", (width, vocabulary), 3 * std),
        normal("out_bias", (vocabulary,), 0.1),
        normal("input", square, std),
        normal("input_bias", (width,), 0.1),
        normal("recurrent", square, std),
    ]


def _decoder_step(vocabulary: int, width: int) -> Any:
    nodes = [
        node("Gather", ["embedding", "token"], ["x"], axis=0),
        node("Gemm", ["x", "input", "input_bias"], ["from_x"]),
        node("MatMul", ["h", "recurrent"], ["from_h"]),
        node("Add", ["from_x", "from_h"], ["sum"]),
        node("Tanh", ["sum"], ["h_next"]),
        node("Gemm", ["h_next", "out", "out_bias"], ["logits"]),
        node("LogSoftmax", ["logits"], ["logp_step"], axis=-1),
        node("ArgMax", ["logp_step"], ["token_next"], axis=1, keepdims=0),
        node("Identity", ["going"], ["going_next"]),
    ]
    state, token = ["batch", width], ["batch"]
    given = [value("step", TensorProto.INT64, []), value("going", TensorProto.BOOL, [])]
    given += [value("h", TensorProto.FLOAT, state), value("token", TensorProto.INT64, token)]
    made = [
        value("going_next", TensorProto.BOOL, []),
        value("h_next", TensorProto.FLOAT, state),
        value("token_next", TensorProto.INT64, token),
    ]
    return helper.make_graph(
        nodes, "step", given, [*made, value("logp_step", TensorProto.FLOAT, ["batch", vocabulary])]
    )
