"""Loss curves of the examples' nets are PyTorch's: the same weights, batches and optimizers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "loss_curves.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loss_curves", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if importlib.util.find_spec("torch"):
    CURVES = script()
    LONG = {"alexnet", "gpt", "seq2seq", "stochastic_depth", "train_digits"}  # to compile; `make thorough` has them

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    @pytest.mark.parametrize(
        "case",
        [pytest.param(c, marks=pytest.mark.thorough) if c.name in LONG else c for c in CURVES.CASES],
        ids=lambda c: c.name,
    )
    def test_losses_are_those_of_torch(case: object, dtype: str) -> None:
        found, wanted = CURVES.curves(case, 4, dtype)
        assert np.isfinite(wanted).all() and len(set(wanted)) == 4
        assert CURVES.apart(found, wanted) < CURVES.BOUNDS[dtype]
