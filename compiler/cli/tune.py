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
from dnnc.report.tables import Table, show_seconds
from dnnc.report.tuning import needed
from dnnc.tune_session import Tuned, tune

UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
LOGGED = "dnnc log best LOG"  # where schedules are listed
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
        show_tables(result_tables(job, log, tuned, effort.report))


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
            _, trials, _, best, text = self._tasks.get(key, (e.task.name, 0, math.inf, math.inf, ""))
            text = str(e.trial.choice) if e.best < best else text
            self._tasks[key] = (e.task.name, trials + (e.kind == "trial"), e.default, e.best, text)
            self._order = [key, *(k for k in self._order if k != key)]
        if self._live is not None:
            self._live.update(rendered(self.view(e), self._console.width))

    def view(self, e: Event) -> Table:
        """What is shown: the search as a whole, then the tasks that it was last at."""
        p = e.progress
        title = (
            f"{p.seconds:.0f} of {p.budget:.0f} s, ends in {p.eta:.0f} s at the latest · {p.trials} trials, "
            f"{p.failures} failed · "
            f"{p.done} of {p.tasks} tasks decided\n"
            f"kernels {show_seconds(p.untuned)} -> {show_seconds(p.current)}: {p.speedup:.2f} times as fast, "
            f"{p.predicted_speedup:.2f} predicted"
        )
        rows = []
        for key in self._order[:SHOWN]:
            name, trials, default, best, text = self._tasks[key]
            rows.append((name, str(trials), _time(default), _time(best), _gain(default, best), text))
        columns = ("task", "trials", "default", "best", "gain", "schedule")
        return Table(title, columns, tuple(rows), frozenset(columns[1:5]), ("schedule",))


# --- results ----------------------------------------------------------------------------------------------------------


def result_tables(job: Job, log: str, tuned: Tuned, report: str) -> list[Table]:
    """What won, task by task, and how to use it."""
    r = tuned.result
    rows = tuple(_row(o, r) for o in sorted(r.outcomes, key=_weight, reverse=True))
    title = (
        f"{job.model}: {len(r.outcomes)} tasks, {r.trials} trials, {r.failures} of them failed, "
        f"{show_seconds(r.seconds)}; ended as {_ended(r.reason)}"
    )
    columns = ("task", "calls", "share", "trials", "default", "tuned", "gain", "schedule", "why")
    right = frozenset(("calls", "share", "trials", "default", "tuned", "gain"))
    faster = f"kernels of a call: {show_seconds(r.untuned)} -> {show_seconds(r.tuned)}, {r.speedup:.2f} times as fast"
    dims = "".join(f" --dims {d}" for d in job.dims)
    use = f"dnnc compile {job.model}{dims} --tune {log} takes these schedules"
    lines = [Table(faster, (), ()), Table(use, (), ()), *([Table(f"report: {report}", (), ())] if report else [])]
    return [
        Table(title, columns, rows, right, ("schedule", "why", "calls", "share", "trials"), f"see {LOGGED}"),
        *fusion_tables(r),
        *lines,
    ]


def fusion_tables(r: Result) -> list[Table]:
    """Groups that were measured in another way too; nothing where there are none."""
    if not r.fusions:
        return []
    columns = ("group", "calls", "as it was", "in another way", "time", "compiled", "why")
    rows = tuple(
        (f.task.name, str(f.calls), _time(f.together), f.name, _time(f.apart), _way(f), f.verdict) for f in r.fusions
    )
    return [
        Table(
            "fusion: groups and what else they can be made of",
            columns,
            rows,
            frozenset(("calls", "as it was", "time")),
            ("why", "calls"),
            f"see {LOGGED}",
        )
    ]


def _way(f: Fused) -> str:
    return f.name if f.taken else "as it was"


def _row(o: Outcome, r: Result) -> tuple[str, ...]:
    share = o.calls * o.default / r.untuned if r.untuned and math.isfinite(o.default) else 0.0
    choice = "" if o.choice is None else "default" if o.choice == o.base else str(o.choice)
    times = (_time(o.default), _time(o.seconds), _gain(o.default, o.seconds))
    return (o.task.name, str(o.calls), f"{share:.0%}", str(len(o.points)), *times, choice, o.verdict)


def _weight(o: Outcome) -> float:
    return o.calls * o.default if math.isfinite(o.default) else 0.0


def _ended(reason: str) -> str:
    return "you asked" if reason == "stopped" else reason


def _time(seconds: float) -> str:
    return show_seconds(seconds) if math.isfinite(seconds) else "-"


def _gain(default: float, seconds: float) -> str:
    return f"{default / seconds:.2f}x" if math.isfinite(default) and math.isfinite(seconds) and seconds > 0 else "-"


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
