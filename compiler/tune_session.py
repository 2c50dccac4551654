"""`dnnc.tune`: the schedules of a model's kernels, searched for on this machine or a cluster, and kept in a log.

In: a model and the options of its compilation. Out: a Tuned, whose log `dnnc.compile(model, tune=...)` replays. Tasks
are the kernels that the same compilation would make; space, cost model and runner default to `dnnc.autotune`'s.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import dnnc
from dnnc.autotune.log.file import Log
from dnnc.autotune.log.record import Session
from dnnc.autotune.log.replay import Winners
from dnnc.autotune.model.cost_model import XGBModel
from dnnc.autotune.model.features import features
from dnnc.autotune.runners.machine import Machine, machine_of
from dnnc.autotune.runners.measure import ProcessRunner
from dnnc.autotune.search.choose import cost_model
from dnnc.autotune.search.outcome import Callback, Event, Result
from dnnc.autotune.search.search import BATCH, Plan, search
from dnnc.autotune.search.space import as_known, with_libraries
from dnnc.autotune.search.space import space as whole_space
from dnnc.autotune.search.task import Setting, Task, extract
from dnnc.autotune.search.task_search import Model
from dnnc.autotune.search.trial import Runner
from dnnc.autotune.search.variants import variations
from dnnc.backends.registry import backend_class, open_backend
from dnnc.compile_graph import expose
from dnnc.compile_program import schedule
from dnnc.frontends.onnx import NeedsValues, read_model
from dnnc.frontends.onnx.signature import declared
from dnnc.frontends.trace.onnx_operators import load_with
from dnnc.ir import checks
from dnnc.ir.errors import InputError, TuneError, a_type, count
from dnnc.ir.graph import Graph
from dnnc.ir.shapes import bound_dims, specialise
from dnnc.ir.target import parse_target
from dnnc.options import CompileOptions, available_cpus, cache_folder, make_options
from dnnc.passes.analysis.segments import Segment, needs_host, prepare, split
from dnnc.passes.base import pass_context
from dnnc.passes.planning.program import ScheduledGraph
from dnnc.passes.schedule.problem import Choice, Problem
from dnnc.report.layout import Table
from dnnc.report.notebook import html_of
from dnnc.report.tables import plain_text
from dnnc.report.tuning import write_html
from dnnc.report.tuning_tables import result_tables
from dnnc.tune_option import choose_of, setting_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dnnc.executable import Executable
    from dnnc.ir.target import Target
    from dnnc.options import Options, SearchOptions

Space = Callable[
    [Problem, Sequence[Choice]], Sequence[Choice]
]  # a problem and what dnnc would search -> what to search instead
logger = logging.getLogger("dnnc")
RUNNERS = ("process", "ray")
KEY = 4  # characters that a key is told by, at least


@dataclass(frozen=True, repr=False)
class Tuned:
    """What `dnnc.tune` found.

    Attributes:
        result: each task with its trials, its winner, and why; times and the speed-up of the model's kernels together.
        log: tasks, trials and winners, those of earlier runs too.
        model: what was tuned.
        options: of its compilation.
    """

    result: Result
    log: Log
    model: Any
    options: CompileOptions

    @property
    def speedup(self) -> float:
        """Time of the model's kernels with the schedules that dnnc picks unmeasured, over that with the winners."""
        return self.result.speedup

    def tables(self) -> list[Table]:
        """The result as tables."""
        return result_tables(self.result, self.name)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.log.sessions[-1].model if self.log.sessions else ""

    def __str__(self) -> str:
        return plain_text(self.tables())

    def _repr_html_(self) -> str:
        return html_of(self.tables())

    def __repr__(self) -> str:
        r = self.result
        return (
            f"<Tuned: {count(len(r.outcomes), 'task')}, {count(r.trials, 'trial')}, speedup {r.speedup:.2f}x; "
            ".compile() uses the winners; print it>"
        )

    def compile(
        self, progress: Callable[[str, int, int], None] | bool | None = None, **options: Unpack[Options]
    ) -> Executable:
        """Compile the model with the winners. Options that differ from the tuning run may give untuned kernels."""
        winners = Winners(self.log.winners(), "" if self.log.path is None else str(self.log.path))
        return dnnc.compile(self.model, progress, **{**_given(self.options), "tune": winners, **options})

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write a report of the search, one file that needs no network. TuneError where plotly or jinja2 is missing."""

        sessions = self.log.sessions
        write_html(self.result, path, self.name, sessions[-1] if sessions else None)


def tune(
    model: Any,
    target: str | Target = "llvm",
    budget: float = 60.0,
    log: str | os.PathLike[str] | Log | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    trials: int | None = None,
    resume: bool = False,
    only: str | Sequence[str] | None = None,
    runner: str | Runner = "process",
    devices: Sequence[int] | None = None,
    libraries: bool = False,
    space: Space | None = None,
    cost_model: Model | None = None,
    stopped: Callable[[], bool] = lambda: False,
    **options: Unpack[SearchOptions],
) -> Tuned:
    """Search for the fastest schedules of a model's kernels.

    Args:
        model: as for `dnnc.compile`; symbolic dims must be fixed by `dims`.
        target: what to tune for; its device must be here, or in the cluster.
        budget: seconds. The search may end sooner, when little more is to be gained.
        log: the path of a tuning log to append to, or an open Log. Its last winners compete again. None: a log for
            this model in the folder `tuning` of the cache; with `cache=False` or `space` trials stay in memory.
        callbacks: called with each event, in this thread.
        trials: measurements to make at most, but for the finals.
        resume: take the trials in the log as made now: nothing is measured twice.
        only: names of tasks to tune, with * and ?, or how their keys begin; several are given as a sequence.
        runner: "process", "ray", or a Runner, which stays open.
        devices: numbers of the GPUs of this host to measure on at once.
        libraries: on a GPU, measure cuBLASLt and cuDNN as well, where they are installed and can do a kernel whole.
        space: a function that restricts or replaces the search space.
        cost_model: an object that ranks schedules, in the place of the default model.
        stopped: asked now and then whether to end the search; finals follow.
        **options: those of `dnnc.compile`, such as `dims` and `threads`.

    Raises:
        TuneError: there is nothing to tune, the log cannot be used, or the machine lacks the device.
        DnncError: as from `dnnc.compile`.
    """
    if (
        isinstance(budget, bool)
        or not isinstance(budget, (int, float, np.integer, np.floating))
        or not 0 < budget < float("inf")
    ):
        raise TuneError(f"budget={budget!r}: expected seconds")
    if trials is not None:
        trials = checks.integer(trials, "trials", 1, TuneError)
    check_parts(log, callbacks, only, runner, devices, space, cost_model, stopped)
    if "tune" in options:
        raise TuneError("tune= is an option of dnnc.compile; dnnc.tune takes budget= and log=")
    opts = make_options({**options, "target": target})
    setting = setting_of(opts)
    machine = machine_of(setting.target)
    calls = with_libraries(machine) if libraries else None
    name, made = programs_of(model, opts)
    tasks = selected(tasks_in(made, setting), only)
    plan = Plan(
        space_of(machine, opts, space, calls),
        features_of(machine, libraries),
        cost_model or own_model(machine),
        trials,
        resume,
        max(
            BATCH * max(len(devices or ()), 1), 0 if machine.exclusive else 2 * available_cpus()
        ),  # what is built while others are measured
        callbacks,
        stopped,
        variations=lambda keys: variations(made, setting, keys),
    )
    with (
        opened(kept(opts, name, tasks, libraries) if log is None and space is None else log) as book,
        running(runner, opts, setting, devices) as runs,
    ):
        began = Session(
            name, setting.target, {t.key: n for t, n in tasks}, machine.name, version(), time.time(), budget
        )
        book.append(began)
        result = search(
            tasks, runs, book, budget, replace(plan, version=version(), batch=max(plan.batch, _capacity(runs)))
        )
        book.append(replace(began, seconds=result.seconds))
    faster = result.speedup
    logger.info("%s for %s: %d trials in %.1f s, speedup %.2fx", name, target, result.trials, result.seconds, faster)
    return Tuned(result, book, model, opts)


def check_parts(
    log: Any, callbacks: Any, only: Any, runner: Any, devices: Any, space: Any, cost_model: Any, stopped: Any
) -> None:
    """TuneError for an argument of `tune` of another type than its documentation says."""
    if log is not None and not isinstance(log, Log):
        checks.path(log, "log", TuneError)
    for f in checks.sequence(callbacks, "callbacks", TuneError):
        if not callable(f):
            raise TuneError(f"callbacks: expected functions, got {a_type(f)}")
    if only is not None:
        checks.names(only, "only", TuneError)
    if not isinstance(runner, str) and not all(callable(getattr(runner, name, None)) for name in ("measure", "close")):
        raise TuneError(
            f"runner: expected {' or '.join(RUNNERS)}, or an object with `measure` and `close`, got {a_type(runner)}"
        )
    for n in () if devices is None else checks.sequence(devices, "devices", TuneError):
        checks.integer(n, "devices", 0, TuneError)
    checks.optional_function(space, "space", TuneError)
    if cost_model is not None and not callable(getattr(cost_model, "predict", None)):
        raise TuneError(f"cost_model: expected an object with `predict`, got {a_type(cost_model)}")
    checks.optional_function(stopped, "stopped", TuneError)


def version() -> str:
    """Of dnnc."""

    return str(dnnc.__version__)


# --- tasks ------------------------------------------------------------------------------------------------------------


def tasks_of(model: Any, opts: CompileOptions) -> tuple[str, list[tuple[Task, int]]]:
    """The name of a model, and its tasks, those with most work first, each with its calls."""
    name, made = programs_of(model, opts)
    return name, tasks_in(made, setting_of(opts))


def programs_of(model: Any, opts: CompileOptions) -> tuple[str, list[ScheduledGraph]]:
    """The name of a model, and its programs."""
    graph = graph_of(model, opts)
    return graph.name, list(programs(graph, opts))


def tasks_in(made: Sequence[ScheduledGraph], setting: Setting) -> list[tuple[Task, int]]:
    """The tasks of programs, those with most work first, each with its calls."""
    found: dict[str, Task] = {}
    calls: dict[str, int] = {}
    for program in made:
        for t, n in extract(program, setting):
            found.setdefault(t.key, t)
            calls[t.key] = calls.get(t.key, 0) + n
    return [(t, calls[t.key]) for t in sorted(found.values(), key=lambda t: -t.flops * calls[t.key])]


def graph_of(model: Any, opts: CompileOptions) -> Graph:
    """The graph that is compiled, with its dims fixed. InputError names those that are open."""
    graph = model if isinstance(model, Graph) else _read(model, opts)
    used = {n: d for n, d in opts.dims.items() if isinstance(model, Graph) or n in graph.dims}
    graph = specialise(graph, {n: d for n, d in used.items() if isinstance(d, int)})
    graph = bound_dims(graph, {n: d for n, d in used.items() if not isinstance(d, int)})
    if graph.dims:
        sizes = ", ".join(f'"{n}": 1' for n in graph.dims)
        options = ",".join(f"{n}=1" for n in graph.dims)
        raise InputError(
            f"the size of {', '.join(graph.dims)} is open, and kernels are tuned for fixed sizes: give "
            f"dims={{{sizes}}}, or --dims {options} to dnnc tune"
        )
    expose(graph, ([], []), opts.outputs)
    return graph


def _read(model: Any, opts: CompileOptions) -> Graph:
    opened = load_with(model, opts.custom_ops)
    there = declared(opened).dims
    unknown = sorted(set(opts.dims) - set(there))
    if unknown:
        raise InputError(
            f"dims: the model has no symbolic size {', '.join(unknown)}; it has {', '.join(there) or 'none'}"
        )
    try:
        return read_model(opened, dims=dict(opts.dims)).graph
    except NeedsValues as e:
        raise TuneError(
            f"shapes of this model depend on the contents of its inputs, so its kernels are known at a call only: {e}"
        ) from e


def programs(graph: Graph, opts: CompileOptions) -> Iterator[ScheduledGraph]:
    """The programs of a model: one, or those of its segments between host steps."""
    if not needs_host(graph):
        yield program_of(graph, opts)
        return
    prepare(graph, pass_context(numerics=opts.numerics, precision=opts.precision))
    for step in split(graph):
        if isinstance(step, Segment):
            yield program_of(step.graph, replace(opts, dims={}, outputs=()))


def program_of(graph: Graph, opts: CompileOptions) -> ScheduledGraph:
    """A graph as the compiler schedules it."""
    return schedule(specialise(graph, {}), open_backend(opts.target, opts.threads), opts)


def selected(tasks: Sequence[tuple[Task, int]], only: str | Sequence[str] | None) -> list[tuple[Task, int]]:
    """The tasks whose names match. TuneError where none does, or there are no tasks at all."""
    if not tasks:
        raise TuneError("the model has no kernel of fixed sizes: there is nothing to tune")
    patterns = [only] if isinstance(only, str) else list(only or ["*"])
    found = [
        (t, n)
        for t, n in tasks
        if any(fnmatchcase(t.name, p) or (len(p) >= KEY and t.key.startswith(p)) for p in patterns)
    ]
    if not found:
        raise TuneError(
            f"no task is called {' or '.join(patterns)}; there are {', '.join(dict.fromkeys(t.name for t, _ in tasks))}"
        )
    return found


# --- how to search ----------------------------------------------------------------------------------------------------


def space_of(
    machine: Machine, opts: CompileOptions, own: Space | None, calls: Callable[[Task], list[Choice]] | None = None
) -> Callable[[Task], list[Choice]]:
    """The choices of a task: the untuned default, `calls` of libraries, then dnnc's space or a custom one."""
    usual = choose_of(replace(opts, tune=None, dims=dict(opts.dims)), machine.backend)

    def choices(task: Task) -> list[Choice]:
        problem = task.rebuilt[2]
        found = whole_space(problem, machine.templates(task.setting))
        if not found:
            return []
        default = usual(problem, found)
        return list(
            dict.fromkeys(
                [default, *(calls(task) if calls is not None else []), *(found if own is None else own(problem, found))]
            )
        )

    return choices


def features_of(machine: Machine, libraries: bool = False) -> Callable[[Task, Sequence[Choice]], Any]:
    """The features of a task's choices on a machine. `libraries`: calls of libraries are among them."""

    def features_of_task(task: Task, choices: Sequence[Choice]) -> Any:
        return features(task.rebuilt[2], as_known(choices, machine) if libraries else choices, machine.limits)

    return features_of_task


def own_model(machine: Machine) -> Model:
    """The model that ships for such machines; with XGBoost (the extra `tune`) it learns from the trials."""
    shipped = cost_model(machine)
    return XGBModel(base=shipped) if find_spec("xgboost") is not None else shipped


# --- what is open while it searches -----------------------------------------------------------------------------------


def kept(opts: CompileOptions, name: str, tasks: Sequence[tuple[Task, int]], libraries: bool) -> Path | None:
    """The log of a model in the cache folder; None where there is no such folder, or none that can be written.

    A search without libraries must not find the trials of one with them: a kernel's winner would be a library's.
    """
    folder = cache_folder(opts.cache)
    if folder is None:
        return None
    try:
        (folder / "tuning").mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    told = [*sorted(t.key for t, _ in tasks), f"{libraries=}"]
    digest = hashlib.sha256("".join(told).encode()).hexdigest()
    path = folder / "tuning" / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:60]}-{digest[:10]}.jsonl"
    return path if os.access(path if path.exists() else path.parent, os.W_OK) else None


@contextmanager
def opened(log: str | os.PathLike[str] | Log | None) -> Iterator[Log]:
    """A log to append to; one that was opened here is closed."""
    if isinstance(log, Log):
        yield log
    elif log is None:
        yield Log()
    else:
        with Log.open(Path(log)) as made:
            yield made


@contextmanager
def running(
    runner: str | Runner, opts: CompileOptions, setting: Setting, devices: Sequence[int] | None
) -> Iterator[Runner]:
    """A runner; one that was made here is closed."""
    if not isinstance(runner, str):
        yield runner
        return
    made = make_runner(runner, opts, setting, devices)
    try:
        yield made
    finally:
        made.close()


def make_runner(name: str, opts: CompileOptions, setting: Setting, devices: Sequence[int] | None) -> Runner:
    """A runner by its name."""
    if name not in RUNNERS:
        raise TuneError(f"runner={name!r}: expected {' or '.join(RUNNERS)}, or an object with `measure` and `close`")
    target = str(opts.target) if backend_class(parse_target(opts.target).kind).numbered else setting.target
    if name == "ray":
        from dnnc.autotune.runners.ray_runner import RayRunner  # loads ray, an optional package

        return RayRunner(target)
    return ProcessRunner(target, devices)


def _capacity(runner: Runner) -> int:
    """Requests that keep all devices of a runner busy."""
    return BATCH * max(len(getattr(runner, "workers", ())), 1)


def _given(opts: CompileOptions) -> dict[str, Any]:
    """Options as keyword arguments."""
    return {f.name: dict(opts.dims) if f.name == "dims" else getattr(opts, f.name) for f in fields(opts)}


__all__ = ["Event", "Tuned", "tune"]
