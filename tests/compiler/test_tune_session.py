"""`dnnc.tune` on real models: with a runner that computes times, and once with the real one."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.autotune.log.file import Log, read
from dnnc.autotune.search.outcome import Event, Outcome, Point, Result
from dnnc.autotune.search.search import search
from dnnc.autotune.search.trial import Request
from dnnc.driver import compile
from dnnc.ir.errors import DnncError, InputError, TuneError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.options import CompileOptions
from dnnc.passes.schedule.problem import Choice, Problem
from dnnc.report.tuning_tables import further, result_tables
from dnnc.tune_session import Tuned, tasks_of, tune
from support import landscape
from support.landscape import FakeRunner

TEXT = """\
def net(x: f32[64, 96], *, w: f32[96, 128], v: f32[128, 32]):
    h = relu(matmul(x, w))
    y = softmax(matmul(h, v), axis=-1)
    return y
"""
OPTIONS: dict[str, Any] = {"threads": 1, "cache": False}


def graph(text: str = TEXT) -> Graph:
    rng = np.random.default_rng(0)
    return parse(
        text, {"w": rng.standard_normal((96, 128), np.float32), "v": rng.standard_normal((128, 32), np.float32)}
    )


def by_text(r: Request) -> float:
    """Seconds that depend on the schedule, and the untuned one not the best."""
    return 1e-4 * (1 + sum(map(ord, str(r.choice))) % 97 / 97)


def tuned(**more: Any) -> Tuned:
    return tune(graph(), **{"budget": 600, "runner": FakeRunner(by_text, noise=0.001), "trials": 40, **OPTIONS, **more})


@pytest.fixture(scope="module")
def made() -> Tuned:
    """A search that others look at."""
    return tuned()


# --- what it does -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiling_takes_the_winners(made: Tuned) -> None:
    winners = {o.task.name: o.choice for o in made.result.outcomes}
    assert made.speedup > 1.1 and any(o.choice != o.base for o in made.result.outcomes)
    f = made.compile()
    (program,) = f.report.programs
    assert {k.name: k.choice for k in program.kernels} == {name: str(c) for name, c in winners.items()}
    x = np.random.default_rng(1).standard_normal((64, 96), np.float32)
    assert np.allclose(f(x), compile(graph(), **OPTIONS)(x), atol=1e-5)


@pytest.mark.slow
def test_the_log_holds_the_run(tmp_path: Path) -> None:
    made = tuned(log=tmp_path / "l.jsonl", trials=12)
    log = read(tmp_path / "l.jsonl")
    (session,) = log.sessions
    assert session.model == "net" and session.budget == 600 and session.seconds == made.result.seconds
    parts = {o.task.key for o in made.result.parts}
    assert (
        set(session.calls)
        == set(log.tasks) - parts
        == set(log.winners()) - parts
        == {o.task.key for o in made.result.outcomes}
    )
    f = compile(graph(), tune=tmp_path / "l.jsonl", **OPTIONS)
    assert {k.choice for k in f.report.programs[0].kernels} == {str(c) for c in log.winners().values()}


@pytest.mark.slow
def test_a_log_is_gone_on_with(tmp_path: Path) -> None:
    first = tuned(log=tmp_path / "l.jsonl", trials=12)
    known = {(o.task.key, p.choice) for o in first.result.outcomes for p in o.points}
    second = tuned(log=tmp_path / "l.jsonl", resume=True, trials=12)
    fresh = {
        (o.task.key, p.choice)
        for o in second.result.outcomes
        for p in o.points
        if p.why in ("predicted", "unsure", "neighbour of the best")
    }
    assert len(read(tmp_path / "l.jsonl").sessions) == 2
    assert fresh and not fresh & known


@pytest.mark.slow
def test_tasks_are_those_of_a_compilation_and_each_has_its_calls() -> None:
    text = TEXT.replace("relu(matmul(x, w))", "relu(matmul(relu(matmul(x, u)), w))").replace(
        "*, w", "*, u: f32[96, 96], w"
    )
    rng = np.random.default_rng(0)
    shapes = {"u": (96, 96), "w": (96, 128), "v": (128, 32)}
    g = parse(text, {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()})
    name, tasks = tasks_of(g, CompileOptions(**OPTIONS))
    (program,) = compile(g, **OPTIONS).report.programs
    assert name == "net" and sum(n for _, n in tasks) == program.calls == sum(k.count for k in program.kernels)
    assert sorted(t.name for t, _ in tasks) == sorted(k.name for k in program.kernels)


@pytest.mark.slow
def test_only_some_tasks() -> None:
    _, tasks = tasks_of(graph(), CompileOptions(**OPTIONS))
    name = tasks[0][0].name
    assert {o.task.name for o in tuned(only=name, trials=2).result.outcomes} == {name}
    assert {o.task.key for o in tuned(only=[tasks[0][0].key[:8]], trials=2).result.outcomes} == {tasks[0][0].key}
    with pytest.raises(TuneError, match=f"no task is called conv.*; there are .*{name}"):
        tuned(only="conv*")


@pytest.mark.slow
def test_an_own_space_and_an_own_model() -> None:
    asked: list[int] = []

    class Shortest:
        def predict(self, x: Any) -> Any:
            asked.append(len(x))
            return -x.sum(1)

    def few(problem: Problem, choices: Sequence[Choice]) -> Sequence[Choice]:
        return [c for c in choices if c.template == choices[0].template][:5]

    made = tuned(space=few, cost_model=Shortest())
    assert asked and all(o.choices <= 6 for o in made.result.outcomes)
    assert all(o.base == compile_choice(o.task.name) for o in made.result.outcomes)


def compile_choice(name: str) -> Choice:
    """The schedule that an untuned compilation takes."""
    from dnnc.tune_session import program_of

    return next(s.choice for s in program_of(graph(), CompileOptions(**OPTIONS)).kernels if s.kernel.name == name)


@pytest.mark.slow
def test_callbacks_hear_what_happens() -> None:
    events: list[Event] = []
    made = tuned(callbacks=[events.append], trials=12)
    trials = [e for e in events if e.kind == "trial"]
    assert len(trials) == made.result.trials and all(e.task is not None and e.trial is not None for e in trials)
    assert [e.progress.trials for e in trials] == list(range(1, len(trials) + 1))
    assert events[-1].progress.current <= events[-1].progress.untuned


@pytest.mark.slow
def test_a_budget_as_an_option_of_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, now = FakeRunner(by_text, noise=0.001), itertools.count()
    monkeypatch.setattr("dnnc.tune_session.make_runner", lambda *_: runner)
    # a clock of its own, so that a busy machine makes as many trials as an idle one
    monkeypatch.setattr(
        "dnnc.tune_session.search", lambda *a: search(*a[:-1], replace(a[-1], clock=lambda: next(now) / 200))
    )
    told: list[tuple[str, int, int]] = []
    f = compile(graph(), lambda *news: told.append(news), tune=2.5, **OPTIONS)
    notes = [n for p in f.report.programs[0].passes for n in p.notes]
    kernels = len(f.report.programs[0].kernels)
    assert any(f"tuned: {kernels} of {kernels} kernels" in n for n in notes)
    assert runner.closed and any(stage == "tune" for stage, _, _ in told)


# --- what it refuses --------------------------------------------------------------------------------------------------

OPEN = TEXT.replace("f32[64, 96]", "f32[N, 96]").replace("def net(", "def net(")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 0}, TuneError, "budget=0"),
        ({"budget": float("nan")}, TuneError, "budget=nan"),
        ({"trials": 0}, TuneError, "at least 1"),
        ({"tune": 3}, TuneError, "dnnc.tune takes budget= and log="),
        ({"runner": "slurm"}, TuneError, "process or ray"),
        ({"thread": 3}, InputError, "did you mean threads"),
        ({"target": "reference"}, DnncError, "reference"),
    ],
)
def test_mistakes(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tune(graph(), **{"runner": FakeRunner(by_text), **OPTIONS, **options})


def test_open_sizes_are_named() -> None:
    g = parse("def net(x: f32[N, 96]):\n    y = relu(x)\n    return y\n")
    with pytest.raises(InputError, match=r'the size of N is open.*dims=\{"N": 1\}'):
        tune(g, runner=FakeRunner(by_text), **OPTIONS)
    assert tune(g, runner=FakeRunner(by_text), dims={"N": 8}, trials=4, budget=600, **OPTIONS).result.outcomes


# --- for real ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_process_runner_tunes_a_model(tmp_path: Path) -> None:
    # Trials end it, not time: a fifth of 40 is enough for the parts of the fused group however slow the machine is.
    made = tune(graph(), budget=600, trials=40, log=tmp_path / "l.jsonl", threads=1)
    assert all(o.choice is not None for o in made.result.outcomes)
    (fused,) = (f for f in made.result.fusions if f.name == "matmul | relu")
    assert 0 < fused.apart < 100 * fused.together and fused.taken == (
        "relu" in {k.name for k in made.compile().report.programs[0].kernels}
    )
    assert all(t.ok for ts in Log.open(tmp_path / "l.jsonl").trials.values() for t in ts)
    x = np.random.default_rng(1).standard_normal((64, 96), np.float32)
    assert np.allclose(made.compile()(x), compile(graph(), threads=1)(x), atol=1e-5)


# --- the report -------------------------------------------------------------------------------------------------------

EMPTY = ("meta", "br", "img", "link", "hr", "input")


class Page(HTMLParser):
    """Reads a page and says where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.rows = 0
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [str(given["id"])] if "id" in given else []
        self.links += [str(given["href"])] if tag == "a" else []
        self.fetched += [str(given[k]) for k in ("src", "href") if k in given and tag != "a"]
        self.rows += tag == "tr"
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> within {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        (self.scripts if inside == "script" else self.words).append(data)


@pytest.mark.slow
def test_the_report_is_a_page_of_its_own(made: Tuned, tmp_path: Path) -> None:
    made.html(tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    page = Page(text)
    tasks, parts = made.result.outcomes, made.result.parts
    assert parts and made.result.fusions and "fusions" in page.ids
    assert not page.fetched, "the page must hold all that it shows"
    assert len(set(page.ids)) == len(page.ids)
    assert {
        f"plot-{n}" for n in ("course", "predictions", *(f"curve-{k}" for k in range(len(tasks) + len(parts))))
    } <= set(page.ids)
    assert {x.removeprefix("#") for x in page.links if x.startswith("#")} <= set(page.ids) and len(page.links) == len(
        tasks
    )
    words = " ".join(page.words)
    assert all(f.name in words and f.verdict in words for f in made.result.fusions)
    for o in (*tasks, *parts):
        assert o.task.name in words and o.verdict.capitalize() in words
    assert f"{made.speedup:.2f}" in words and str(made.result.trials) in words
    drawn = [s for s in page.scripts if "Plotly.newPlot" in s and len(s) < 200_000]
    assert len(drawn) == 2 + len(tasks) + len(parts)
    points = sum(len(o.points) for o in (*tasks, *parts))
    marks = sum(len(re.findall(r"\(\w+=", s)) for s in drawn)
    assert marks >= points  # every trial is drawn with its schedule
    assert not any("tozero" in s for s in drawn)  # a gain of 1 % is seen: axes begin where the times do


@pytest.mark.slow
def test_names_in_the_report_are_text(made: Tuned) -> None:
    from dnnc.report.tuning import html

    page = Page(html(made.result, "<script>alert(1)</script>"))
    assert any("alert(1)" in w for w in page.words) and not any("alert(1)" in s for s in page.scripts)


# --- telling ----------------------------------------------------------------------------------------------------------


def result(gains: Sequence[float], predicted: float = math.nan) -> Result:
    """Tasks with these gains over a default of 1 ms, the first ones called most often."""
    base, other = Choice("a", ()), Choice("b", ())
    points = (Point(0.0, base, "default", None, "ok", 1e-3),)
    outcomes = tuple(
        Outcome(landscape.task(f"t{k}"), len(gains) - k, 2, 1e-3, 1e-3 / g, other, base, "", "", points)
        for k, g in enumerate(gains)
    )
    return Result(outcomes, 9.0, len(gains), 0, "all trials are done", predicted=predicted)


@pytest.mark.parametrize("count", [1, 10, 11, 66])
def test_tasks_without_a_gain_are_folded(count: int) -> None:
    gains = [1.5 if k % 3 == 0 else 1.0 for k in range(count)]
    table, *rest = result_tables(result(gains), "net")
    shown = [r[0] for r in table.rows]
    if count <= 10:
        assert len(shown) == count and "and " not in rest[0].title
        return
    assert shown == [f"t{k}" for k in range(0, count, 3)][:20]
    assert rest[0].title.startswith(f"and {count - len(shown)} tasks")
    assert ("less than 1 % gain" in rest[0].title) == (count // 3 < 20)


def test_no_task_with_a_gain_leaves_the_heaviest_row() -> None:
    table, rest, *_ = result_tables(result([1.0] * 30), "net")
    assert [r[0] for r in table.rows] == ["t0"] and "29 tasks with less than 1 % gain" in rest.title


@pytest.mark.parametrize(
    ("predicted", "says"), [(math.nan, "no prediction"), (1e-3, "below 1 %"), (0.5e-3, "2.00x in all")]
)
def test_what_more_time_would_bring(predicted: float, says: str) -> None:
    assert says in further(result([1.0], predicted))
    unmeasured = replace(result([1.0]).outcomes[0], points=())
    assert "1 of 2 tasks not measured" in further(
        replace(result([1.0]), outcomes=(unmeasured, *result([1.0]).outcomes))
    )


@pytest.mark.slow
def test_tasks_know_their_nodes_and_shapes(made: Tuned) -> None:
    for o in made.result.outcomes:
        assert len(o.task.nodes) == o.calls and o.task.shape.startswith("f32[")
        assert o.task == replace(o.task, nodes=())  # one workload, whatever it is called
    assert not math.isnan(made.result.predicted) and made.result.further >= 1


@pytest.mark.slow
def test_without_a_path_the_log_is_in_the_cache(tmp_path: Path) -> None:
    def again(**more: Any) -> Tuned:
        return tuned(trials=8, **{"cache": tmp_path, **more})

    first, second = again(), again()
    (path,) = (tmp_path / "tuning").iterdir()
    assert first.log.path == second.log.path == path and len(second.log.sessions) == 2
    assert path.name.startswith("net-") and path.suffix == ".jsonl"
    assert again(cache=False).log.path is None
    os.chmod(path, 0o400)
    assert os.geteuid() == 0 or again().log.path is None  # where it cannot be written, trials stay in memory


def test_public() -> None:
    assert dnnc.tune is tune
