"""The progress of a loop."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import dnnc
import dnnc.array as xp
from dnnc import optim
from dnnc.report import run
from support.cli import invoke


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


def test_a_log_is_json_to_others_and_goes_on_after_a_cut(tmp_path: Path) -> None:
    """Numbers that JSON does not have; lines of a run that was killed while it wrote."""
    path = tmp_path / "log.jsonl"
    logged(path, 1, 4)
    whole = path.read_bytes()

    def refuse(name: str) -> float:
        raise ValueError(name)

    lines = [json.loads(line, parse_constant=refuse) for line in whole.decode().splitlines()]
    assert lines[3]["loss"] == "NaN" and math.isnan(run.read(path)[3]["loss"])
    for cut, kept in ((-20, 3), (-1, 4), (0, 4)):
        path.write_bytes(whole[: len(whole) + cut])
        logged(path, 1, 2)
        assert len(path.read_text().splitlines()) == len(run.read(path)) == kept + 2
    path.write_text("notes")  # of somebody else: nothing is removed
    logged(path, 1, 1)
    assert path.read_text().splitlines()[0] == "notes"
    for message, log, numbers in (
        ("name is a str", path, {"name": "x"}),
        ("loss is a ", path, {"loss": np.ones(3)}),
        ("cannot be written", tmp_path / "no" / "log.jsonl", {}),
    ):
        with pytest.raises(dnnc.InputError, match=message):
            for _ in (bar := dnnc.progress([1], log=log, console=Console(file=io.StringIO()))):
                bar.tell(**numbers)


def logged(path: Path, loops: int = 1, steps: int = 45) -> None:
    for _ in range(loops):
        for k, _ in enumerate(
            bar := dnnc.progress([np.zeros((4, 2))] * steps, log=path, console=Console(file=io.StringIO()))
        ):
            bar.tell(loss=float("nan") if k == 3 else 1 / (1 + k), lr=0.5, accuracy=0.25, load_seconds=1e-5)


def test_lines_of_several_loops_go_on(tmp_path: Path) -> None:
    logged(tmp_path / "log.jsonl", 2, 5)
    first = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[2])
    assert first["samples"] == 12 and 0 <= first["data_seconds"] < first["seconds"]
    lines = run.read(tmp_path / "log.jsonl")
    assert [n["step"] for n in lines] == list(range(1, 11)) and [n["samples"] for n in lines] == list(range(4, 44, 4))
    seconds = [n["seconds"] for n in lines]
    assert seconds == sorted(seconds)


FITS = [(120, "loss 0.003315  lr 0.1  "), (80, "loss 0.003315  "), (60, "loss")]


@pytest.mark.parametrize(("width", "numbers"), FITS)
def test_the_line_fits_into_a_terminal(width: int, numbers: str) -> None:
    """The count and the times are never cut, and the first numbers remain."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    for _ in (bar := dnnc.progress(range(900), console=console)):
        bar.tell(loss=0.003315, lr=0.1)
    line = out.getvalue().split("\r")[-1].split("\n")[0]
    assert "900/900" in line and line.count("0:00:0") == 2 and numbers in line and "…" not in line


@pytest.mark.slow
def test_a_page_of_a_run(tmp_path: Path) -> None:
    logged(tmp_path / "log.jsonl")
    with (tmp_path / "log.jsonl").open("a") as f:
        f.write('{"step": 46, "sec')  # killed while it wrote
    params = {"w": np.ones((8, 8), np.float32)}
    step = dnnc.train_step(lambda p, x: xp.mean(xp.tanh(xp.tanh(x @ p["w"]) @ p["w"]) ** 2), optim.SGD(lr=0.1), params)
    step(np.ones((4, 8), np.float32))
    report = step.programs[-1].report
    memory = report.programs[-1].memory
    assert len(memory.alive) > 1 and max(memory.alive) == memory.lower_bound > 0
    (tmp_path / "step.json").write_text(report.to_json())
    out = tmp_path / "run.html"
    given = ["curves", str(tmp_path / "log.jsonl"), "-o", str(out), "--report", str(tmp_path / "step.json"), "--json"]
    result = invoke(given)
    assert result.exit_code == 0 and json.loads(result.output)["steps"] == 45, result.output
    page = out.read_text()
    titles = re.findall("<h2>(.*)</h2>", page)
    assert "NaN" not in page.partition("<script")[0] and "with its compilation" in page
    assert titles == ["Loss", "Learning rate", "accuracy", "Samples a second", "Step time", "Memory over the step"]
    assert "waiting for data" in page and '"name":"load"' in page and "least loss" in page
    rest = re.sub("<script>.*?</script>", "", page, count=1, flags=re.DOTALL)  # Plotly's own
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", rest)


def test_a_log_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for text, message in (
        ("", "has no lines"),
        ("[1]\n{}\n", "line 1 is none of a log of dnnc.progress"),
        ('{"step": 1, "seconds": 1, "samples": 1}\n{"loss": 1}\n\n', "line 2 is none"),
    ):
        path.write_text(text)
        with pytest.raises(dnnc.InputError, match=message):
            run.read(path)
    with pytest.raises(dnnc.InputError, match="cannot be read"):
        run.read(tmp_path / "missing")
    path.unlink()
    logged(path, 1, 2)
    (tmp_path / "r.json").write_text('{"programs": []}')
    with pytest.raises(dnnc.InputError, match="is no report with the memory of a program"):
        run.write_html(path, tmp_path / "x.html", tmp_path / "r.json")
