"""Stochastic depth, define-by-run: how many kernels all structures of a net share."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from dnnc.array.lazy import PROGRAMS_MADE

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.thorough
def test_stochastic_depth_of_54_blocks_has_60_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(PROGRAMS_MADE, "get", PROGRAMS_MADE.get)  # the clock replaces it
    nets = importlib.import_module("define_by_run")
    clock = nets.Clock(nets.NETS["convolutions"](54), by_hand=False)
    kernels: set[str] = set()
    for runs in nets.structures(54, 12)[::5]:
        clock.step(runs)
        kernels |= {note.symbol for note in PROGRAMS_MADE.last.notes}
    assert len(kernels) <= 60
