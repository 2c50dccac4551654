"""Ceilings only rise: a measurement on a busy machine does not lower what an earlier one has shown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dnnc.backends.base import Ceilings, Level
from dnnc.tools.ceilings import best_ceilings


def backend(flops: float, memory: float, target: str = "cpu", capacity: int = 0) -> Any:
    measured = Ceilings(2, flops, (Level("L2", 1 << 20, 9.0, 8.0), Level("memory", capacity, memory, memory)))
    return SimpleNamespace(target_key=target, ceilings=lambda threads: measured)


def test_each_rate_is_the_best_so_far(tmp_path: Path) -> None:
    assert best_ceilings(backend(100.0, 2.0), 2, tmp_path).flops == 100.0
    busy = best_ceilings(backend(50.0, 3.0), 2, tmp_path)
    assert busy.flops == 100.0 and busy.level(1 << 30).rate == 3.0
    assert best_ceilings(backend(50.0, 1.0), 2, tmp_path) == busy
    assert best_ceilings(backend(50.0, 1.0), 2, None).flops == 50.0


def test_other_machines_and_other_levels_do_not_count(tmp_path: Path) -> None:
    best_ceilings(backend(100.0, 2.0), 2, tmp_path)
    assert best_ceilings(backend(50.0, 1.0, target="other"), 2, tmp_path).flops == 50.0
    assert best_ceilings(backend(50.0, 1.0, capacity=5), 2, tmp_path).flops == 50.0


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"threads": 2, "flops": 1, "levels": [{"a": 1}]}'])
def test_a_damaged_file_counts_as_missing(text: str, tmp_path: Path) -> None:
    best_ceilings(backend(100.0, 2.0), 2, tmp_path)
    (path,) = (tmp_path / "ceilings").iterdir()
    path.write_text(text)
    assert best_ceilings(backend(50.0, 1.0), 2, tmp_path).flops == 50.0


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert best_ceilings(backend(50.0, 1.0), 2, tmp_path / "file").flops == 50.0
