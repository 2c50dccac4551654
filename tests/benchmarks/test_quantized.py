"""The benchmarks of quantized models: ratios of a table, and models that are cut into layers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dnnc.frontends.onnx import read
from dnnc.ir.graph.interp import run
from support.random_quantized import random_quantized

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def row(name: str, **ms: float) -> dict[str, Any]:
    return {"name": name, "ms": ms, "errors": {"dnnc": {"share": 1.0, "agreement": 1.0, "largest": 0.0}}}


def test_ratios_are_those_to_the_faster_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    table = importlib.import_module("quantized").table
    some = [
        row("bert_base_qdq", dnnc=2.0, onnxruntime=3.0, openvino=8.0, float32=5.0),
        row("other", dnnc=4.0, openvino=2.0),
    ]
    text = table(some).splitlines()
    assert "| 1.50 | 2.50 | 100.00% |" in text[2] and "| 0.50 | - |" in text[3]
    assert "QDQ models: geometric mean 1.50, lowest 1.50" in text
    assert "models of the zoo: geometric mean 0.50, lowest 0.50" in text


def test_cut_models_have_layers_on_given_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tool = importlib.import_module("quantized_layers")
    for seed in (2, 3, 5):
        model, arrays, _ = random_quantized(seed)
        whole, names = tool.exposed(model)
        codes = dict(zip(names, run(read(whole), arrays, "as-is")))
        layers = tool.cut(model, codes)
        given = [*arrays, *codes.values()]
        graph = read(layers)
        assert all(map(np.array_equal, run(graph, given, "as-is"), codes.values()))
        moved = [*arrays, *(np.zeros_like(a) for a in codes.values())]
        assert len(codes) < 3 or not all(map(np.array_equal, run(graph, moved, "as-is"), codes.values()))
