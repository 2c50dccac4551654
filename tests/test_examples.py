"""The digits model: what is in the tree, and the script that made it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def samples(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(folder / "digits_samples.npz", allow_pickle=False) as z:
        return z["images"], z["labels"]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_model_in_the_tree_reads_its_samples() -> None:
    assert (EXAMPLES / "digits.onnx").stat().st_size < 1 << 20
    model = onnx.load(EXAMPLES / "digits.onnx")
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"
    images, labels = samples(EXAMPLES)
    (logits,) = ReferenceEvaluator(model).run(None, {"image": images})
    assert set(labels) == set(range(10)) and (logits.argmax(1) == labels).mean() >= 0.9


def test_gradients_are_differences() -> None:
    t = script("train_digits")
    rng = np.random.default_rng(1)
    p = {k: v.astype(np.float64) for k, v in t.first_weights(rng).items()}
    x, y = rng.random((3, 1, 8, 8)), np.array([1, 7, 3])

    def loss() -> float:
        z = t.forward(p, x)[0]
        return float((np.log(np.exp(z).sum(1)) - z[np.arange(3), y]).mean())

    for name, g in t.gradients(p, x, y).items():
        at = tuple(int(i) for i in np.unravel_index(np.abs(g).argmax(), g.shape))
        keep, step = p[name][at], 1e-6
        p[name][at] = keep + step
        above = loss()
        p[name][at] = keep - step
        assert (above - loss()) / (2 * step) == pytest.approx(g[at], rel=1e-4), name
        p[name][at] = keep


@pytest.mark.slow
def test_training_reaches_its_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    t = script("train_digits")
    monkeypatch.setattr(t, "HERE", tmp_path)
    t.main()
    found = re.search(r"test accuracy ([\d.]+)%", capsys.readouterr().out)
    assert found is not None and float(found[1]) >= 97
    images, labels = samples(tmp_path)
    (logits,) = ReferenceEvaluator(onnx.load(tmp_path / "digits.onnx")).run(None, {"image": images})
    assert (logits.argmax(1) == labels).mean() >= 0.9
