"""When a quantized model counts as right: at inputs where right evaluations agree, and wrong kernels do not pass."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

import dnnc

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
Array = np.ndarray[Any, Any]


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("judge")


def layers(count: int = 4, width: int = 64, half: float = 0.0, zero: int = 0, missing: int = -1) -> ModelProto:
    """Matrix products between quantized activations. Wrong ones: the second layer rounds with `half` a code added, has
    `zero` added to its zero point, or the layer `missing` has no relu.
    """
    rng = np.random.default_rng(7)
    nodes, arrays, last = [], {"scale": np.float32(0.05)}, "x"
    for k in range(count):
        arrays[f"w{k}"] = (rng.standard_normal((width, width)) / np.sqrt(width / 2)).astype(np.float32)
        arrays[f"z{k}"] = np.uint8(128 + (zero if k == 1 else 0))
        arrays[f"h{k}"] = np.float32(half * 0.05 if k == 1 else 0)
        nodes += [
            helper.make_node("MatMul", [last, f"w{k}"], [f"m{k}"]),
            helper.make_node("Identity" if k == missing else "Relu", [f"m{k}"], [f"r{k}"]),
            helper.make_node("Add", [f"r{k}", f"h{k}"], [f"a{k}"]),
            helper.make_node("QuantizeLinear", [f"a{k}", "scale", f"z{k}"], [f"q{k}"]),
            helper.make_node("DequantizeLinear", [f"q{k}", "scale", "z0"], [f"d{k}"]),
        ]
        last = f"d{k}"
    x, y = (helper.make_tensor_value_info(n, 1, [8, width]) for n in ("x", last))
    weights = [numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items()]
    graph = helper.make_graph(nodes, "layers", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def draw(seed: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((8, 64)).astype(np.float32)}


def evaluate(model: ModelProto, inputs: Mapping[str, Array]) -> list[Array]:
    out = dnnc.compile(model, target="reference")(inputs["x"])
    return [out]


@pytest.mark.slow
def test_a_right_kernel_passes_and_wrong_ones_do_not(judge: Any) -> None:
    right = judge.steady(layers(), draw, evaluate)
    assert right.share >= judge.STEADY
    assert right.accept([dnnc.compile(layers(), cache=False)(right.inputs["x"])])
    for wrong in (layers(half=0.5), layers(zero=1), layers(missing=2)):
        assert not right.accept(evaluate(wrong, right.inputs))


def test_inputs_where_roundings_decide_are_passed_over(judge: Any) -> None:
    """The reference jumps on the first two inputs when anything moves, and does not on the third."""

    def jumps(model: ModelProto, inputs: Mapping[str, Array]) -> list[Array]:
        x = inputs["x"]
        return [x if x[0] in (0.25, 0.5) or x[0] > 1 else -x]

    def at(seed: int) -> dict[str, Array]:
        x = np.linspace(1, 2, 512, dtype=np.float32)
        x[0] = (0.25, 0.5, 3.0)[min(seed, 2)]
        return {"x": x}

    right = judge.steady(layers(1), at, jumps)
    assert right.inputs["x"][0] == 3.0 and right.accept([right.inputs["x"]])
    assert not right.accept([-right.inputs["x"]]) and not right.accept([right.inputs["x"][:-1]])


def test_without_steady_inputs_a_result_is_as_far_off_as_right_ones(judge: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(512)

    def loud(model: ModelProto, inputs: Mapping[str, Array]) -> list[Array]:
        return [x + 0.1 * rng.standard_normal(512)]

    right = judge.steady(layers(1), draw, loud)
    assert right.share < judge.STEADY
    assert right.accept([x + 0.1 * rng.standard_normal(512)]) and not right.accept([x + 0.3 * rng.standard_normal(512)])
    assert not right.accept([np.full(512, np.nan)])


def test_one_unit_moves_weights_and_leaves_codes(judge: Any) -> None:
    before, after = layers(2), judge.shaken(layers(2))
    a, b = ({t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in (before, after))
    assert (a["w0"] != b["w0"]).all() and np.allclose(a["w0"], b["w0"], rtol=3e-7, atol=0)
    assert a["z0"] == b["z0"] and a["h0"] == b["h0"] == 0
    assert judge.off_by_one_unit({"x": np.array([np.inf, 0.0, 1.0], np.float32)})["x"][:2].tolist() == [np.inf, 0.0]
