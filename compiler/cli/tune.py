"""`dnnc tune`: a search with its progress on the terminal, a table of the winners, and an HTML report."""

from __future__ import annotations

import math
import re
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.live import Live

from dnnc.autotune.log.record import plain_choice
from dnnc.autotune.search.fusion_variants import Fused
from dnnc.autotune.search.outcome import Event, Outcome, Result
from dnnc.cli.arguments import load_model, parse_cache, parse_dims
from dnnc.cli.console import rendered, show_json, show_tables
from dnnc.cli.errors import say
from dnnc.cli.models import Job, custom_ops, need_source
from dnnc.cli.outputs import LOGS, check_output, read_by
from dnnc.report.layout import Table
from dnnc.report.tables import show_seconds
from dnnc.report.tuning import needed
from dnnc.report.tuning_tables import gain, result_tables, time_of
from dnnc.tune_session import Tuned, tune

UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
SHOWN = 6  # tasks in the display while it searches


@dataclass(frozen=True)
class Effort:
    """What `dnnc tune` is told beyond the model: see its options."""

    budget: str
    trials: int | None
    log: str
    resume: bool
    only: tuple[str, ...]
    runner: str
    devices: str
    report: str
    libraries: bool = False


def parse_budget(text: str) -> float:
    """`120s`, `2m`, `1h` or a number of seconds."""
    m = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", text.strip().lower())
    seconds = float(m[1]) * UNITS[m[2]] if m and m[2] in UNITS else 0.0
    if seconds <= 0:
        raise typer.BadParameter(f"{text!r}: expected a time such as 120s, 2m or 1h", param_hint="--budget")
    return seconds


def parse_devices(text: str) -> tuple[int, ...] | None:
    """`0,1` -> numbers of GPUs; nothing: the target's own."""
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not all(p.isdigit() for p in parts):
        raise typer.BadParameter(f"{text!r}: expected numbers of GPUs, such as 0,1", param_hint="--devices")
    return tuple(map(int, parts)) or None


def tune_command(job: Job, effort: Effort, as_json: bool) -> None:
    """Search, and print what won."""
    need_source(job.model)
    log = effort.log or f"{Path(job.model).stem}.tune.jsonl"
    budget, devices = parse_budget(effort.budget), parse_devices(effort.devices)
    check_output(log, LOGS, read_by(job.model), option="--log")
    if effort.report:
        check_output(effort.report, (".html", ".htm"), (log, *read_by(job.model)), option="--report")

        needed()  # before the time is spent
    options: dict[str, Any] = {
        "dims": parse_dims(job.dims),
        "threads": job.threads,
        "opt_level": job.opt_level,
        "numerics": job.numerics,
        "precision": job.precision,
        "cache": parse_cache(job.cache),
        "custom_ops": custom_ops(job.custom_ops),
    }
    with Interrupt() as stop, Display() as display:
        tuned = tune(
            load_model(job.model), job.target, budget, log, [display],
            trials=effort.trials, resume=effort.resume, only=effort.only or None, runner=effort.runner, devices=devices,
            libraries=effort.libraries, stopped=lambda: stop.asked, **options,
        )  # fmt: skip
    if effort.report:
        tuned.html(effort.report)
    if as_json:
        show_json({"model": job.model, "log": log, **result_data(tuned.result)})
    else:
        show_tables(shown(job, log, tuned, effort.report))


class Interrupt:
    """The first Control-C asks for the end, the second ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        say(
            "stopping: what is fastest is compared with the default once more; Control-C again ends at once, the log "
            "is kept"
        )


class Display:
    """The state of a search on a terminal; elsewhere nothing. A callback of `dnnc.tune`."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._live: Live | None = None
        self._tasks: dict[str, tuple[str, int, float, float, str]] = {}  # name, trials, default, best, schedule
        self._order: list[str] = []

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(console=self._console, transient=True, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, e: Event) -> None:
        if e.task is not None and e.trial is not None:
            key = e.task.key
            _, trials, _, best, text = self._tasks.get(key, ("", 0, math.inf, math.inf, ""))
            text = str(e.trial.choice) if e.best < best else text
            name = f"{e.task.name} {e.task.node}"
            self._tasks[key] = (name, trials + (e.kind == "trial"), e.default, e.best, text)
            self._order = [key, *(k for k in self._order if k != key)]
        if self._live is not None:
            self._live.update(rendered(self.view(e), self._console.width))

    def view(self, e: Event) -> Table:
        """What is shown: the search as a whole, then the tasks that it was last at."""
        p = e.progress
        title = (
            f"{p.seconds:.0f} of {p.budget:.0f} s, at most {p.eta:.0f} s left · {p.trials} trials, "
            f"{p.failures} failed · "
            f"{p.done} of {p.tasks} tasks decided\n"
        ) + (
            f"kernels {show_seconds(p.untuned)} -> {show_seconds(p.current)}: speedup {p.speedup:.2f}x so far, "
            f"{p.predicted_speedup:.2f}x predicted; finals measure the best again"
            if p.untuned
            else "measuring the default schedules"
        )
        rows = []
        for key in self._order[:SHOWN]:
            name, trials, default, best, text = self._tasks[key]
            rows.append((name, str(trials), time_of(default), time_of(best), gain(default, best), text))
        columns = ("task", "trials", "default", "best", "gain", "schedule")
        return Table(title, columns, tuple(rows), frozenset(columns[1:5]), ("schedule",))


# --- results ----------------------------------------------------------------------------------------------------------


def shown(job: Job, log: str, tuned: Tuned, report: str) -> list[Table]:
    """What won, and how to use it."""
    dims = "".join(f" --dims {d}" for d in job.dims)
    use = f"dnnc compile {job.model}{dims} --tune {log} uses these schedules"
    none = "no gain: the default schedules are as fast"
    changed = tuned.result.speedup > 1 or any(f.taken for f in tuned.result.fusions)
    lines = [Table(use if changed else none, (), ()), *([Table(f"report: {report}", (), ())] if report else [])]
    return [*result_tables(tuned.result, job.model), *lines]


def result_data(r: Result) -> dict[str, Any]:
    """A result as JSON data; times that there are not are null."""
    return {
        "seconds": r.seconds,
        "trials": r.trials,
        "failures": r.failures,
        "reason": r.reason,
        "untuned": r.untuned,
        "tuned": r.tuned,
        "speedup": r.speedup,
        "predicted": None if math.isnan(r.predicted) else r.predicted,
        "tasks": [outcome_data(o) for o in r.outcomes],
        "parts": [outcome_data(o) for o in r.parts],
        "fusions": [fused_data(f) for f in r.fusions],
    }


def fused_data(f: Fused) -> dict[str, Any]:
    """What became of another way to make a group, as JSON data."""
    keys = {"task": f.task.key, "name": f.task.name, "calls": f.calls, "way": f.name, "parts": [t.key for t in f.parts]}
    return {**keys, "together": f.together, "apart": f.apart, "taken": f.taken, "verdict": f.verdict}


def outcome_data(o: Outcome) -> dict[str, Any]:
    """What became of a task as JSON data."""

    def number(x: float) -> float | None:
        return x if math.isfinite(x) else None

    return {
        "key": o.task.key,
        "name": o.task.name,
        "nodes": list(o.task.nodes),
        "shape": o.task.shape,
        "calls": o.calls,
        "space": o.choices,
        "trials": len(o.points),
        "failures": o.failures,
        "default": number(o.default),
        "seconds": number(o.seconds),
        "choice": None if o.choice is None else plain_choice(o.choice),
        "is_default": o.choice == o.base,
        "reason": o.reason,
        "verdict": o.verdict,
    }
