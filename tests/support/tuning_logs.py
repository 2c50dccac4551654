"""Tasks, trials and logs for tests: of a small graph, without anything being measured.

In: nothing. Out: the tasks of the graph, what the templates offer for them, and a log as a search leaves it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from dnnc.autotune.log.file import Log
from dnnc.autotune.log.record import Fusion, Session, Winner
from dnnc.autotune.runners.machine import machine_of
from dnnc.autotune.search.task import Setting, Task, extract
from dnnc.autotune.search.trial import Trial
from dnnc.backends.registry import open_backend
from dnnc.compile_program import schedule
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.options import CompileOptions
from dnnc.passes.planning.program import ScheduledGraph
from dnnc.passes.schedule.problem import Choice
from dnnc.passes.schedule.step import candidates
from dnnc.tune_option import setting_of

TEXT = "def g(x: f32[64, 96], y: f32[96, 128]):\n    return softmax(relu(matmul(x, y))), exp(x), relu(matmul(x, y))"
TARGET = "llvm -mcpu=x86-64-v3 -threads=2"
OPTIONS = CompileOptions(target=TARGET)


def graph() -> Graph:
    return parse(TEXT)


def program(options: CompileOptions = OPTIONS) -> ScheduledGraph:
    return schedule(graph(), open_backend(options.target, options.threads), options)


@cache
def setting() -> Setting:
    return setting_of(OPTIONS)


@cache
def tasks() -> tuple[tuple[Task, int], ...]:
    return tuple(extract(program(), setting()))


@cache
def choices(task: Task) -> tuple[Choice, ...]:
    """What the templates offer for a task, their own choice first."""
    return tuple(candidates(task.rebuilt[2], machine_of(task.setting.target).templates(task.setting)))


def other(task: Task) -> Choice:
    """A schedule that applies and is not the templates' own choice."""
    offered = choices(task)
    return (
        offered[-1]
        if len(offered) > 1
        else Choice(offered[0].template, tuple((k, 8 if k == "lanes" else 1) for k, _ in offered[0].knobs))
    )


def write_log(path: Path, winners: bool = True) -> Log:
    """A log as a search leaves it: of each task all candidates, the second a failure, and a winner."""
    with Log.open(path) as log:
        log.append(Session("g", setting().target, {t.key: n for t, n in tasks()}, "znver5", "0.1.0", 1.0, 60.0))
        for t, _ in tasks():
            log.append(t)
            for k, c in enumerate(choices(t)):
                if k == 1:
                    log.append(
                        Trial(
                            t.key,
                            c,
                            "build",
                            error="too many registers\nreally",
                            machine="znver5",
                            version="0.1.0",
                            at=2.0,
                        )
                    )
                else:
                    log.append(
                        Trial(
                            t.key,
                            c,
                            "ok",
                            (1e-5 - k * 1e-7, 1.1e-5),
                            code="ab" * 32,
                            checked=k == 0,
                            machine="znver5",
                            version="0.1.0",
                            at=2.0,
                        )
                    )
            if winners:
                log.append(Winner(t.key, other(t), 0.9e-5, 1.8e-5, "znver5", "0.1.0", 3.0))
        (first, _), (second, _), *_ = tasks()
        log.append(Fusion(first.key, (second.key,), (0,), None, False, 1.2e-5, 0.9e-5, "znver5", "0.1.0", 3.5))
        log.append(Session("g", setting().target, {t.key: n for t, n in tasks()}, "znver5", "0.1.0", 1.0, 60.0, 12.5))
    return log
