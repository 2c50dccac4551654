"""Tables on narrow terminals: no line is too long, no number is broken or lost, texts are cut with an ellipsis."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from command_line import dnnc
from rich.console import Console

from dnnc.autotune.search.outcome import Progress
from dnnc.cli import compile as compile_module
from dnnc.cli import console, log, measure, tune
from dnnc.report.layout import ELLIPSIS, LEAST, Table, fitted, wrapped

MODEL = Path(__file__).parents[2] / "examples" / "digits.onnx"
WIDTHS = (40, 60, 80, 100)
NUMBER = r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?"


def check(t: Table, width: int) -> None:
    """Each number stands in one line, behind the rest of its row's first cell; no line passes the terminal."""
    lines = fitted(t, width)
    titles = wrapped(t.title, width)
    assert all(len(line) <= width for line in lines), lines
    end = next((k for k, line in enumerate(lines) if line.startswith("  (no room for ")), len(lines))
    dropped = set(
        re.findall(
            r"[^ ,][^,]*",
            " ".join(" ".join(lines[end:]).split()).partition("(no room for ")[2].partition(":")[0].rstrip(")"),
        )
    )
    lines = lines[:end]
    shown = [name for name in t.columns if name in t.right and name not in {d.strip() for d in dropped}]
    assert set(t.right) - set(t.drop) <= set(shown), (t.columns, lines)
    for row in t.rows:
        for name, cell in zip(t.columns, row):
            if name in shown:
                assert any(re.search(rf"(^|\s){re.escape(cell)}($|\s)", line) for line in lines), (name, cell, lines)
    for n in re.findall(rf"{NUMBER} (?:us|ms|s|KB|MB|GB|GFLOP/s|GB/s|%)(?!\w)", t.title):
        assert any(n in line for line in titles), (n, titles)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Table]]:
    """The tables that commands show."""
    found: list[Table] = []

    def keep(tables: Iterable[Table]) -> None:
        found.extend(tables)

    monkeypatch.chdir(tmp_path)
    for module in (compile_module, log, measure, tune):
        monkeypatch.setattr(module, "show_tables", keep)
    yield found


COMMANDS = {
    "compile": "compile {m} --dims N=8",
    "compile --detail --passes": "compile {m} --dims N=8 --detail --passes",
    "run": "run {m} --dims N=8",
    "profile": "profile {m} --dims N=8 --repeat 20",
    "profile --detail": "profile {m} --dims N=8 --repeat 20 --detail",
    "bench": "bench {m} --dims N=8 --peers onnxruntime --duration 0.05 --warmup 0",
    "tune": "tune {m} --dims N=1 --trials 2 --budget 5s --log l.jsonl",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command(name: str, shown: list[Table]) -> None:
    dnnc(*COMMANDS[name].format(m=MODEL).split())
    if name == "tune":
        dnnc("log", "show", "l.jsonl")
        dnnc("log", "show", "l.jsonl", "--task", "*")
        dnnc("log", "best", "l.jsonl")
    assert any(t.right for t in shown)
    for t in shown:
        for width in WIDTHS:
            check(t, width)


@pytest.mark.slow
def test_random_tables() -> None:
    r = random.Random(1)
    for _ in range(300):
        n = r.randint(2, 10)
        columns = tuple(f"{'n' if r.random() < 0.6 else 't'}{k}" + "x" * r.randint(0, 8) for k in range(n))
        right = frozenset(c for c in columns[1:] if c[0] == "n")
        rows = tuple(
            tuple(
                f"{r.uniform(0, 10 ** r.randint(0, 6)):.4g} us" if c in right else "w" * r.randint(0, 60)
                for c in columns
            )
            for _ in range(r.randint(1, 4))
        )
        drop = tuple(c for c in columns[1:] if r.random() < 0.3)
        for width in (40, 60, 80):
            check(Table("a title", columns, rows, right, drop), width)


def test_names_are_cut_and_what_is_dropped_is_said() -> None:
    row = (
        "conv_relu_of_a_long_name_that_nobody_reads",
        "12.5 us",
        "contraction(mr=8, nv=2, ku=4, order=rows, pf=1)",
        "nodes " * 9,
    )
    t = Table(
        "kernels", ("kernel", "time", "schedule", "nodes"), (row,), frozenset(("time",)), ("schedule",), "see --detail"
    )
    text = "\n".join(fitted(t, 60))
    assert (
        "12.5 us" in text
        and ELLIPSIS in text
        and "contraction" not in text
        and "(no room for schedule: see --detail)" in text
    )
    assert "contraction(mr=8, nv=2, ku=4, order=rows, pf=1)" in "\n".join(fitted(t, 200))
    assert len(fitted(t, 60)[1].split("  ")[1]) >= LEAST


def test_lines_break_between_words_but_not_before_units() -> None:
    for width in range(12, 60):
        for line in wrapped("of a call of dnnc, 37.7 us are spent outside: 1.2 GB/s, 12 % of 3 calls", width):
            assert len(line) <= width and not re.search(r"\d$", line) and not line.startswith(("us", "GB/s", "%")), line


@pytest.mark.parametrize("width", [60, 80, 130])
def test_the_live_view_of_a_search(width: int) -> None:
    out = io.StringIO()
    display = tune.Display(Console(file=out, width=width, force_terminal=False))
    display._tasks = {
        f"k{k}": (
            f"conv_relu_{k}_with_a_name",
            12 + k,
            123.4e-6,
            45.6e-6,
            "contraction(mr=8, nv=2, ku=4, order=rows, pf=1)",
        )
        for k in range(3)
    }
    display._order = list(display._tasks)
    p = Progress(
        seconds=18.0,
        budget=60.0,
        eta=40.0,
        trials=120,
        failures=3,
        tasks=9,
        done=2,
        untuned=1.23e-3,
        current=1.1e-3,
        predicted=1e-3,
    )
    event = type("E", (), {"progress": p})()
    view = display.view(event)  # type: ignore[arg-type]
    check(view, width)
    Console(file=out, width=width).print(console.rendered(view, width))
    text = out.getvalue()
    assert "123 us" in text and "45.6 us" in text and "2.71x" in text and ("contraction(" in text) == (width >= 130)
