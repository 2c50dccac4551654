"""What every command prints on terminals of 80, 100 and 160 columns. The text at 80 columns is compared with golden
files; `make golden` writes them anew.

Times come from made-up clocks where a command only shows them; elsewhere they are replaced before a table is laid out.
The target has a name, so that schedules and sizes are those of every machine.
"""

from __future__ import annotations

import functools
import io
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console, Group
from typer import rich_utils
from typer.main import get_command

from dnnc.backends.base import Ceilings, Level, Samples, numbered
from dnnc.cli import console, info, measure, options, prune_options, quantize_options
from dnnc.cli.app import app
from dnnc.report.layout import Table
from dnnc.tools.bench import Bench, EngineTimes
from support.cli import invoke
from support.landscape import FakeRunner
from support.tuning_logs import write_log

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGET = "llvm -mcpu=x86-64-v3 -threads=2"
WIDTHS = (100, 160)
MODEL = ("digits.onnx", "--dims", "N=8", "--target", TARGET)
GRAPH = """\
def net(x: f32[N, 16], w: f32[16, 64]):
    h: f32[N, 64] = matmul(x, w)
    y: f32[N, 64] = relu(h)
    return y
"""
CURVE = '{"step": %d, "seconds": %d, "samples": %d, "loss": %f}\n'

COMMANDS: dict[str, tuple[str, ...]] = {
    "compile": ("compile", *MODEL),
    "compile detail": ("compile", *MODEL, "--detail", "--passes"),
    "compile output": ("compile", *MODEL, "-o", "digits.dnnc"),
    "run": ("run", *MODEL),
    "verify": ("verify", *MODEL),
    "verify grad": ("verify", *MODEL, "--grad"),
    "bench": ("bench", *MODEL),
    "profile": ("profile", *MODEL),
    "profile detail": ("profile", *MODEL, "--detail"),
    "tune": ("tune", "g.py", "--dims", "N=8", "--target", TARGET, "--budget", "600s", "--trials", "8"),
    "quantize": ("quantize", *MODEL, "--random", "-o", "q.onnx"),
    "prune": ("prune", *MODEL, "-o", "p.onnx"),
    "view": ("view", *MODEL, "-o", "v.html", "--onnx", "v.onnx"),
    "inspect": ("inspect", "g.py", "--dims", "N=8", "--target", TARGET),
    "inspect operator": ("inspect", "g.py", "--dims", "N=8", "--target", TARGET, "--stage", "operator"),
    "opt": ("opt", "g.py", "-p", "fold,fuse,memory-plan", "--dims", "N=8"),
    "export": ("export", "digits.onnx", "-o", "e.onnx"),
    "curves": ("curves", "run.jsonl", "-o", "run.html"),
    "passes": ("passes",),
    "targets": ("targets",),
    "ops": ("ops",),
    "cache info": ("cache", "info"),
    "cache clear": ("cache", "clear"),
    "log show": ("log", "show", "m.jsonl"),
    "log show task": ("log", "show", "m.jsonl", "--task", "softmax*"),
    "log best": ("log", "best", "m.jsonl"),
    "log merge": ("log", "merge", "m.jsonl", "m.jsonl", "-o", "both.jsonl"),
    "log prune": ("log", "prune", "m.jsonl", "-o", "less.jsonl"),
}
CODE = {"inspect", "inspect operator", "opt"}  # print programs, whose lines a terminal breaks

STEADY = (
    (r"\b\d[\d.]*(?:e-?\d+)? (us|ms|s)\b", "1.23 ms"),
    (r"\b\d[\d.]*e-\d+\b", "1.23e-06"),
    (r"\b\d+\.\d\d( times|x)", r"1.23\1"),
    (r"(v\.html|run\.html).*", r"\1: 123 KB"),
    (r"(  size +|winners, )\d\.\d\d KB", r"\g<1>1.23 KB"),  # of a log, whose schedules depend on the host's caches
)


def steady(t: Table) -> Table:
    """The table with other numbers in the place of measured ones."""
    return replace(t, title=steady_text(t.title), rows=tuple(tuple(map(steady_text, r)) for r in t.rows))


def steady_text(text: str) -> str:
    for pattern, with_ in STEADY:
        text = re.sub(pattern, with_, text)
    return text


class MadeUp:
    """Measurements of kernels and limits that are the same each time."""

    def measure(self, instance: Any, arrays: Callable[[], Any], repeats: int | None) -> Samples:
        calls = numbered(instance.program.calls)
        one = 1e-6 * (1 + np.arange(len(calls))[::-1] ** 2)
        kernels = np.tile(one, (3, 1))
        total = kernels.sum(axis=1) + 5e-6
        even = np.full_like(kernels, 0.9)
        spans = np.zeros((len(calls), 2, 2))
        return Samples(calls, 2, total, np.full(3, 3e-6), kernels, kernels * 0.01, even, spans)

    def ceilings(self, threads: int) -> Ceilings:
        levels = (
            Level("L2", 2 << 20, 4e11, 4e11),
            Level("L3", 32 << 20, 2e11, 2e11),
            Level("memory", 1 << 62, 1e11, 1e11),
        )
        return Ceilings(threads, 5e11, levels)


def bench(*_: Any) -> Bench:
    ours = EngineTimes("dnnc", "0.1.0", 0.343, 66 << 20, 67 << 20, 9999, 17.2e-6, 18.3e-6, 56e-6, 17e-6, 26650.0)
    peer = replace(
        ours, name="onnxruntime", version="1.32.0", p50=48e-6, p99=1.1e-4, error=1.2e-7, ratio=(2.8, 2.6, 2.9)
    )
    inputs = (("image", "float32", (8, 1, 8, 8)),)
    return Bench("digits.onnx", 2, inputs, 2.7e-6, 0, 6, (ours, peer), {"openvino": "openvino is not installed"})


def availability(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "available": name != "cuda", "reason": ""}
    if name == "cuda":
        found["reason"] = "there is no NVIDIA driver (libcuda.so.1); models can be compiled: 'cuda -arch=sm_90a'"
    return {**found, "l2": 1 << 20, "features": [f"avx512{k}" for k in "abcdefghijkl"]}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with all that the commands read, made the current one, and steady measurements."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DNNC_CACHE_DIR", "cache")
    shutil.copy(EXAMPLES / "digits.onnx", tmp_path)
    (tmp_path / "g.py").write_text(GRAPH)
    write_log(tmp_path / "m.jsonl")
    (tmp_path / "run.jsonl").write_text("".join(CURVE % (k, k, 8 * k, 1 / k) for k in range(1, 5)))
    backend = "dnnc.backends.llvm.backend.LlvmBackend"
    monkeypatch.setattr(f"{backend}.measure", MadeUp.measure)
    monkeypatch.setattr(f"{backend}.ceilings", MadeUp.ceilings)
    monkeypatch.setattr(rich_utils, "FORCE_TERMINAL", None)  # help without colours
    monkeypatch.setattr(measure, "bench", bench)
    monkeypatch.setattr(info, "availability", availability)
    monkeypatch.setattr("dnnc.tune_session.make_runner", lambda *_: FakeRunner(lambda r: 1e-4 / len(str(r.choice))))
    yield tmp_path


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int, args: tuple[str, ...]) -> tuple[str, list[Table]]:
    """What a command prints on a terminal of this width, without colours, and the tables in it."""
    for name, value in {"COLUMNS": str(width), "LINES": "50", "TERM": "dumb", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    rendered, tables = console.rendered, []

    def shown(t: Table, width: int) -> Group:
        tables.append(steady(t))
        return rendered(tables[-1], width)

    with monkeypatch.context() as m:
        m.setattr(console, "rendered", shown)
        result = invoke(args)
    assert result.exit_code == 0, result.output
    return "\n".join(steady_text(line.rstrip()) for line in result.stdout.splitlines()), tables


def lines(t: Table, width: int) -> list[str]:
    """The table on a terminal of this width, without its note on columns that have no room."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(console.rendered(t, width), soft_wrap=True)
    return re.sub(r"\n +\(no room for [^)]*\)", "", out.getvalue()).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_output(name: str, golden: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns as the golden file has it. At more, no line is too long, and no number or name is lost."""
    text, tables = on_terminal(monkeypatch, 80, COMMANDS[name])
    golden(text)
    assert name in CODE or all(len(line) <= 80 for line in text.splitlines())
    for t in tables:
        cells = {c for r in t.rows for n, c in zip(t.columns, r) if n in t.right or n == t.columns[0]}
        whole = {w for line in lines(t, 80) for w in line.split()} & {w for c in cells for w in c.split()}
        for width in WIDTHS:
            wide = lines(t, width)
            assert all(len(line) <= width for line in wide)
            lost = whole - {w for line in wide for w in line.split()}
            assert not lost, (width, lost)


def helps(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from helps(command, (*path, name))


@pytest.mark.slow
@pytest.mark.parametrize("path", list(helps(get_command(app))), ids=lambda p: " ".join(p) or "dnnc")
def test_help(path: tuple[str, ...], golden: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_terminal(monkeypatch, 80, (*path, "--help"))[0]
    golden(text)
    command = functools.reduce(lambda group, name: group.commands[name], path, get_command(app))
    for option in command.params:
        assert not option.metavar or option.metavar in text, f"the type of {option.name} is broken"
    for width in WIDTHS:
        for line in on_terminal(monkeypatch, width, (*path, "--help"))[0].splitlines():
            assert len(line) <= width


@pytest.mark.parametrize(
    ("command", "module"), [("compile", options), ("quantize", quantize_options), ("prune", prune_options)]
)
def test_help_names_every_choice(command: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    words = set(re.findall(r"[\w:]+", on_terminal(monkeypatch, 160, (command, "--help"))[0]))
    kinds = [k for k in vars(module).values() if isinstance(k, type) and issubclass(k, Enum) and k is not Enum]
    assert kinds and not {str(m.value) for k in kinds for m in k} - {w.rstrip(":") for w in words}


def test_every_command_is_here() -> None:
    commands = {" ".join(p) for p in helps(get_command(app)) if p} - {"cache", "log"}
    assert not {c for c in commands if not any(n == c or n.startswith(f"{c} ") for n in COMMANDS)}
