"""Operators of training whose results are those of one kernel, from ONNX models, on both targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import dnnc
from support.devices import install

pytestmark = pytest.mark.slow

TRAINING = "ai.onnx.preview.training"
F = TensorProto.FLOAT
CASES: dict[str, tuple[str, str, dict[str, Any], list[tuple[int, ...]], int, int]] = {
    "layer norm with mean and deviation": (
        "LayerNormalization", "", {"axis": -1}, [(20, 48), (48,), (48,)], 3, 1,
    ),
    "batch norm with running statistics": (
        "BatchNormalization", "", {"training_mode": 1}, [(8, 16, 5, 5), (16,), (16,), (16,), (16,)], 3, 1,
    ),
    "max-pool with indices": (
        "MaxPool", "", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, [(1, 16, 17, 17)], 2, 1,
    ),
    "momentum": (
        "Momentum", TRAINING, {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.001, "mode": "nesterov"},
        [(), (), (64, 33), (64, 33), (64, 33)], 2, 1,
    ),
    "adagrad": ("Adagrad", TRAINING, {"norm_coefficient": 0.001}, [(), (), *[(64, 33)] * 3], 2, 1),
    "adam": ("Adam", TRAINING, {"norm_coefficient": 0.001}, [(), (), *[(64, 33)] * 4], 3, 1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`target="cuda"` is the interpreter here."""
    install(monkeypatch)
    yield


def model_of(
    op: str, domain: str, attrs: dict[str, Any], shapes: list[tuple[int, ...]], outputs: int
) -> onnx.ModelProto:
    names = [f"x{k}" for k in range(len(shapes))]
    kinds = [TensorProto.INT64 if domain and k == 1 else F for k in range(len(shapes))]
    made = [f"y{k}" for k in range(outputs)]
    node = helper.make_node(op, names, made, domain=domain, **attrs)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, t, s) for n, t, s in zip(names, kinds, shapes)],
        [
            helper.make_tensor_value_info(n, TensorProto.INT64 if op == "MaxPool" and k else F, None)
            for k, n in enumerate(made)
        ],
    )
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("target", ["llvm", "cuda"])
@pytest.mark.parametrize("name", CASES)
def test_one_kernel(name: str, target: str) -> None:
    op, domain, attrs, shapes, outputs, kernels = CASES[name]
    model = model_of(op, domain, attrs, shapes, outputs)
    rng = np.random.default_rng(0)
    xs = [np.abs(rng.standard_normal(s)).astype(np.float32) for s in shapes]
    if domain:
        xs[1] = np.array(3, np.int64)
    wanted = ReferenceEvaluator(model).run(None, {f"x{k}": x for k, x in enumerate(xs)})
    f = dnnc.compile(model, target=target, cache=False)
    for got, want in zip(f(*xs), wanted, strict=True):
        assert got.shape == np.shape(want) and np.abs(got - want).max() < 1e-4
    large = [s for s in f.programs[0].scheduled.kernels if s.nest.name != "pack" and s.group.outputs[0].type.size != 1]
    assert len(large) == kernels
