"""`dnnc tune`: what it prints, what it leaves behind, how it is stopped, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dnnc.autotune.log.file import read
from dnnc.autotune.search.outcome import Event, Progress
from dnnc.autotune.search.trial import Request, Trial
from dnnc.cli.tune import Display, Interrupt, parse_budget, parse_devices
from support.cli import invoke
from support.landscape import FakeRunner, space, task

GRAPH = """\
def net(x: f32[N, 16]):
    y = softmax(x, axis=-1)
    return y
"""


def by_text(r: Request) -> float:
    return 1e-4 * (1 + sum(map(ord, str(r.choice))) % 97 / 97)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a model, made the current one, and a runner that computes times."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DNNC_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "g.py").write_text(GRAPH)
    monkeypatch.setattr("dnnc.tune_session.make_runner", lambda *_: FakeRunner(by_text, noise=0.001))
    yield tmp_path


def dnnc(*args: str, code: int = 0) -> str:
    result = invoke(["tune", *args])
    assert result.exit_code == code, result.output
    return result.output


QUICK = ("g.py", "--dims", "N=8", "--budget", "600s", "--trials", "20", "--threads", "1")


def test_libraries_are_for_gpus() -> None:
    assert "are for GPUs, target='cuda'" in " ".join(dnnc(*QUICK, "--libraries", code=1).split())


@pytest.mark.slow
def test_a_table_a_log_and_how_to_use_it(here: Path) -> None:
    text = dnnc(*QUICK)
    (row,) = [line for line in text.splitlines() if line.strip().startswith("softmax")]
    log = read("g.tune.jsonl")
    assert "times as fast as the default" in row or "default" in row
    assert "all trials are done" in text
    assert "dnnc compile g.py --dims N=8 --tune g.tune.jsonl" in text
    assert sum(map(len, log.trials.values())) >= 20 and len(log.winners()) == 1
    used = invoke(["compile", "g.py", "--dims", "N=8", "--threads", "1", "--tune", "g.tune.jsonl"])
    assert used.exit_code == 0 and "tuned: 1 of 1 kernels" in used.output


@pytest.mark.slow
def test_json_report_and_resume(here: Path) -> None:
    first = json.loads(dnnc(*QUICK, "--log", "l.jsonl", "--json", "--report", "r.html"))
    (t,) = first["tasks"]
    assert first["speedup"] == pytest.approx(first["untuned"] / first["tuned"]) and t["trials"] == first["trials"]
    assert t["choice"][0] and t["seconds"] <= t["default"] and t["space"] > 1
    assert (here / "r.html").read_text().rstrip().endswith("</html>")
    before = sum(map(len, read("l.jsonl").trials.values()))
    second = json.loads(dnnc(*QUICK, "--log", "l.jsonl", "--json", "--resume"))
    assert sum(map(len, read("l.jsonl").trials.values())) == before + second["trials"]


@pytest.mark.slow
def test_fusion_in_the_table_as_data_and_in_the_log(here: Path) -> None:
    (here / "g.py").write_text("def net(x: f32[32, 48], w: f32[48, 64]):\n    return relu(matmul(x, w))\n")
    text = dnnc(*QUICK[:1], *QUICK[3:])
    rows = [line.split() for line in text.splitlines() if "matmul | relu" in line]
    assert len(rows) == 1 and rows[0][:2] == ["matmul_relu", "1"] and "alternative" in text
    data = json.loads(dnnc(*QUICK[:1], *QUICK[3:], "--log", "l.jsonl", "--json"))
    (f,) = data["fusions"]
    assert (
        f["name"] == "matmul_relu"
        and f["way"] == "matmul | relu"
        and f["taken"] == (f["verdict"] == "measured in turns" and f["apart"] < f["together"])
    )
    assert {t["key"] for t in data["parts"]} >= set(f["parts"]) - {t["key"] for t in data["tasks"]}
    shown = invoke(["log", "show", "l.jsonl"]).output
    assert "fusion: 1" in shown and "matmul | relu" in shown
    tasks = json.loads(invoke(["log", "best", "l.jsonl", "--json"]).output)
    assert [t["fusion"]["parts"] for t in tasks if t["fusion"]] == [f["parts"]]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("g.py",), 1, "the size of N is open"),
        (("g.py", "--dims", "N=8", "--only", "conv*"), 1, "no task is called conv*"),
        (("g.py", "--dims", "N=8", "--budget", "soon"), 2, "expected a time"),
        (("g.py", "--dims", "N=8", "--budget", "0s"), 2, "expected a time"),
        (("g.py", "--dims", "N=8", "--devices", "a"), 2, "numbers of GPUs"),
        (("none.onnx",), 1, "none.onnx"),
        (("g.py", "--dims", "N=8", "--log", "no/such/folder/l.jsonl"), 1, "cannot write no/such/folder/l.jsonl"),
        (("g.py", "--dims", "N=8", "--target", "reference"), 1, "reference"),
    ],
)
def test_mistakes(args: tuple[str, ...], code: int, message: str) -> None:
    assert message in " ".join(dnnc(*args, code=code).replace("│", " ").split())


def test_a_compiled_model_is_refused(here: Path) -> None:
    made = invoke(["compile", "g.py", "--dims", "N=8", "-o", "g.dnnc"])
    assert made.exit_code == 0
    assert "compiled already" in dnnc("g.dnnc", code=1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("120s", 120), ("2m", 120), ("1h", 3600), ("90", 90), ("0.5", 0.5), ("500ms", 0.5), ("2 min", 120)],
)
def test_budgets(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


def test_devices() -> None:
    assert parse_devices("0, 1") == (0, 1) and parse_devices("") is None


def test_help_teaches() -> None:
    text = " ".join(dnnc("--help").split())
    assert "Example: dnnc tune model.onnx" in text and "Control-C ends the search early" in text


# --- the terminal -----------------------------------------------------------------------------------------------------


def event(kind: str, trial: Trial | None = None) -> Event:
    p = Progress(12.0, 60.0, 34, 5, 3, 1, 2e-3, 1.6e-3, 1.25e-3, 48.0)
    return Event(kind, p, task("conv_relu") if trial else None, trial, 1e-3, 2e-3)


def test_the_display_shows_state_and_forecast() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=True, width=140))
    trial = Trial("conv_relu-key", space(0)[0], "ok", (1e-3,))
    with display:
        display(event("trial", trial))
    console = Console(file=out, width=140)
    console.print(display.view(event("trial", trial)))
    text = out.getvalue()
    assert "12 of 60 s, at most 48 s left" in text and "34 trials, 5 failed" in text and "1 of 3 tasks decided" in text
    assert "speedup 1.25x so far, 1.60x predicted" in text
    assert "conv_relu" in text and "2.00x" in text and str(space(0)[0])[:20] in text


def test_off_a_terminal_nothing_is_drawn() -> None:
    out = io.StringIO()
    with Display(Console(file=out)) as display:
        display(event("begin"))
    assert out.getvalue() == ""


def test_the_second_interrupt_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as stop:
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGINT)
        until = time.monotonic() + 60
        while not stop.asked and time.monotonic() < until:
            time.sleep(0.01)
        assert stop.asked and "Control-C again" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
    assert signal.getsignal(signal.SIGINT) is before


CHILD = """
import sys
import dnnc.tune_session
from support.landscape import FakeRunner
from test_cli_tune import by_text
dnnc.tune_session.make_runner = lambda *_: FakeRunner(by_text, wait=0.01)
from dnnc.cli import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_an_interrupted_run_ends_with_its_table(here: Path) -> None:
    command = [
        sys.executable,
        "-c",
        CHILD,
        "tune",
        "g.py",
        "--dims",
        "N=8",
        "--budget",
        "600s",
        "--log",
        "l.jsonl",
        "--threads",
        "1",
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), os.environ["PYTHONPATH"]))}
    child: Any = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 300
    while time.monotonic() < until and (
        not (here / "l.jsonl").exists() or (here / "l.jsonl").read_bytes().count(b'"trial"') < 3
    ):
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    assert "stopping" in err and "stopped because you interrupted it" in out
    assert len(read("l.jsonl").winners()) == 1
