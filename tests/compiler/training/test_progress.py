"""The progress of a loop."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import dnnc
import dnnc.array as xp


def test_a_loop_and_its_log(tmp_path: Path) -> None:
    path, out = tmp_path / "log.jsonl", io.StringIO()
    console = Console(file=out, width=160, force_terminal=True)
    batches = [(np.zeros((4, 2)), np.zeros(4))] * 5
    seen = []
    for k, (x, _) in enumerate(bar := dnnc.progress(batches, log=path, console=console, title="digits")):
        seen.append(x.shape)
        bar.tell(loss=xp.asarray(1.0 / (1 + k)), rate=0.5)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert seen == [(4, 2)] * 5 and len(bar) == 5
    assert [(n["step"], n["loss"], n["rate"]) for n in lines] == [(k, 1 / k, 0.5) for k in range(1, 6)]
    shown = out.getvalue()
    assert "digits" in shown and "loss 0.2" in shown and "samples/s" in shown and "5/5" in shown


def test_what_was_told_is_in_the_log_of_a_loop_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with pytest.raises(ZeroDivisionError):
        for k in (bar := dnnc.progress(iter(range(3)), log=path, console=Console(file=io.StringIO()))):
            bar.tell(k=k)
            1 // (1 - k)
    assert [json.loads(line)["k"] for line in path.read_text().splitlines()] == [0, 1]


def test_bad_arguments() -> None:
    with pytest.raises(dnnc.InputError, match="expected batches"):
        dnnc.progress(3)  # type: ignore[arg-type]
    with pytest.raises(dnnc.InputError, match="total=-1"):
        dnnc.progress([], total=-1)
