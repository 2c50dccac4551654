"""In a shell every public object shows itself in one short line that says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph.text import parse

MODEL = Path(__file__).parents[2] / "examples" / "digits.onnx"
WIDE = (
    "def wide("
    + ", ".join(f"a_name_that_is_long_{k}: f32[3]" for k in range(40))
    + "):\n    y = exp(a_name_that_is_long_0)\n    return y\n"
)


@dnnc.jit
def doubled(x: Any) -> Any:
    return x * 2


def objects() -> dict[str, tuple[Any, str]]:
    f = dnnc.compile(MODEL)
    x = np.zeros((1, 1, 8, 8), np.float32)
    f(x)
    doubled(x)
    return {
        "Executable": (f, "image float32[N, 1, 8, 8] -> logits float32[N, 10]"),
        "for all sizes": (dnnc.compile(MODEL, dims={"N": (1, 9)}), "llvm"),
        "Reference": (dnnc.compile(MODEL, target="reference"), "Executable for reference"),
        "wide": (dnnc.compile(parse(WIDE), target="reference"), "a_name"),
        "Report": (f.report, "digits"),
        "Profile": (f.profile(x, repeats=10), "us a call"),
        "Graph": (f.graph, "9 nodes, (image: f32[N, 1, 8, 8]) -> logits: f32[N, 10]"),
        "wide graph": (parse(WIDE), "<Graph wide: 1 nodes"),
        "Jitted": (doubled, "doubled(x"),
        "Spec": (dnnc.Spec(("n", 3)), "Spec("),
        "inputs": (f.inputs, "image"),
    }


@pytest.mark.slow
def test_reprs_are_one_short_line() -> None:
    for name, (x, part) in objects().items():
        text = repr(x)
        assert part in text and "\n" not in text and len(text) < 200 and " object at 0x" not in text, (name, text)


@pytest.mark.slow
def test_a_search_and_a_benchmark() -> None:
    tuned = dnnc.tune(MODEL, budget=2, trials=1, dims={"N": 1})
    assert "6 tasks" in repr(tuned) and "\n" not in repr(tuned) and len(repr(tuned)) < 200
