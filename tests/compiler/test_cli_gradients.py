"""`dnnc verify --grad`: what it prints and how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_line import dnnc, dnnc_json
from onnx import numpy_helper, parser

from dnnc.gradients import check

HEAD = '<ir_version: 8, opset_import: ["" : 18]> '
NET = """net (float["n",4] x, int64["n"] k) => (float["n",3] y, int64["n"] place) {
    h = MatMul (x, w)  a = Relu (h)  b = Add (a, c)  y = Tanh (b)  place = ArgMax <axis = 1, keepdims = 0> (y) }"""
JUMP = """net (float[3] x) => (float[3] y) { f = Floor (x)  y = Mul (f, w) }"""


def saved(folder: Path, text: str, **weights: Any) -> str:
    m = parser.parse_model(HEAD + text)
    m.graph.initializer.extend(numpy_helper.from_array(np.asarray(a, np.float32), n) for n, a in weights.items())
    onnx.save(m, str(folder / "net.onnx"))
    return str(folder / "net.onnx")


@pytest.fixture
def net(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    return saved(tmp_path, NET, w=rng.standard_normal((4, 3)), c=[0.1, -0.2, 0.3])


@pytest.mark.slow
def test_a_row_for_each_group(net: str) -> None:
    found = dnnc_json("verify", net, "--grad", "--dims", "n=5", "--directions", "3")
    assert found["right"] and found["directions"] == 3
    assert [(g["name"], g["elements"], g["verdict"]) for g in found["groups"]] == [
        ("x", 20, "right"),
        ("w", 12, "right"),
        ("c", 3, "right"),
    ]
    assert all(g["error"] < 1e-6 and g["compiled_error"] < 1e-5 for g in found["groups"])
    assert found["forward_mode"]["right"] and found["forward_mode"]["error"] < 1e-12


@pytest.mark.slow
def test_as_a_table(net: str) -> None:
    text = dnnc("verify", net, "--grad", "--dims", "n=2")
    assert text.startswith("gradients of a weighted sum of the outputs: right")
    assert "Forward and reverse mode agree" in text and "uncertainty" in text


@pytest.mark.slow
def test_seeds_draw_other_numbers(net: str) -> None:
    a, b, c = (dnnc_json("verify", net, "--grad", "--dims", "n=2", "--seed", s)["groups"][0] for s in "112")
    assert a == b and a["error"] != c["error"]


@pytest.mark.slow
def test_zeros_are_kinks(net: str) -> None:
    """ReLU at 0 has two slopes; near by there is one."""
    found = dnnc_json("verify", net, "--grad", "--dims", "n=2", "-i", "x=zeros", "-i", "k=zeros")
    assert found["right"] and found["groups"][0]["verdict"] == "kink"


def test_a_wrong_gradient_ends_with_1(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = check.Loss.gradients
    monkeypatch.setattr(
        check.Loss, "gradients", lambda self, arrays: {k: 1.01 * g for k, g in right(self, arrays).items()}
    )
    text = dnnc("verify", net, "--grad", "--dims", "n=2", code=1)
    assert text.count("WRONG") == 4 and "DISAGREE" in text


def test_a_function_with_jumps(tmp_path: Path) -> None:
    """Floor is constant almost everywhere, and so are its differences."""
    found = dnnc_json("verify", saved(tmp_path, JUMP, w=[1, 2, 3]), "--grad")
    assert found["right"] and [g["verdict"] for g in found["groups"]] == ["right", "right"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("--bisect",), "--bisect finds what breaks outputs"), ((), "size of n is open; give it with --dims n=1")],
)
def test_mistakes(net: str, arguments: tuple[str, ...], says: str) -> None:
    assert says in dnnc("verify", net, "--grad", *arguments, code=1)


def test_a_model_without_a_derivative(tmp_path: Path) -> None:
    path = saved(tmp_path, "net (float[3] x) => (int64[] y) { y = ArgMax <axis = 0, keepdims = 0> (x) }")
    assert "no float" in dnnc("verify", path, "--grad", code=1)
