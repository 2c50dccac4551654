"""The page of a conformance run: totals by category, operators whose cases all pass, reasons of failures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import onnx

from support.scoreboard import operators, page


def case(name: str, kind: str, *nodes: str) -> Any:
    made = [onnx.helper.make_node(op, ["x"], ["y"]) for op in nodes]
    return SimpleNamespace(
        name=name, kind=kind, model=onnx.helper.make_model(onnx.helper.make_graph(made, "g", [], [])), model_dir=None
    )


CASES = [
    case("test_abs", "node", "Abs"),
    case("test_neg", "node", "Neg"),
    case("test_neg_2", "node", "Neg"),
    case("test_two", "simple", "Abs", "Neg"),
]


def test_totals_and_reasons() -> None:
    text = page("llvm", CASES, {0: None, 1: None, 2: "off by one"})
    assert "| OnnxBackendNodeModelTest | 2 | 1 | 3 | 66.67 % |" in text
    assert "| OnnxBackendSimpleModelTest | 0 | 1 | 1 | 0.00 % |" in text  # a case that was not run has not passed
    assert "| **all** | 2 | 2 | 4 | 50.00 % |" in text
    assert "- `test_neg_2`: off by one\n- `test_two`: was not run\n" in text


def test_operators_need_all_of_their_cases() -> None:
    assert operators(CASES, {}) == (2, 2)
    assert operators(CASES, {2: "off by one", 3: "was not run"}) == (2, 1)
    assert "## Failures" not in page("llvm", CASES, dict.fromkeys(range(4)))
