"""Logs as a data set: features, seconds and tasks, and predictions for tasks that a model has not seen.

In: tuning logs, packed or not. Out: a Data, of one kind of machine. Features are computed here, not stored: they change
with the code.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dnnc.autotune.log.file import read
from dnnc.autotune.model.cost_model import CostModel, speeds, unit_of
from dnnc.autotune.model.features import TEMPLATES, features
from dnnc.autotune.runners.machine import Machine, machine_of
from dnnc.autotune.search.task import Task
from dnnc.autotune.search.trial import Trial
from dnnc.ir.errors import DnncError
from dnnc.passes.schedule.problem import Choice
from dnnc.passes.schedule.step import candidates

Array = np.ndarray[Any, Any]
LOGS = Path(__file__).parent / "logs"
FOLDS = 5
LEAST = 4  # trials of a task that is worth learning from
# seconds: one single number of a GPU below this may be the gap between two graphs of few calls, and says nothing
DOUBTFUL = 20e-6


@dataclass(frozen=True, eq=False)
class Data:
    """Trials of many tasks: features `x`, `seconds` (infinite where one failed), `groups` (numbers of `tasks`, in
    order), `defaults` (of each task the row of the templates' own choice, -1 where it was not measured), and `choices`
    for people. Choices that are the same code are one row; `measured` are all of each task.
    """

    x: Array
    seconds: Array
    pick: Array
    judge: Array
    groups: Array
    tasks: tuple[Task, ...]
    defaults: Array
    choices: tuple[Choice, ...]
    measured: tuple[frozenset[Choice], ...]

    def rows(self, group: int) -> Array:
        return np.flatnonzero(self.groups == group)

    def of(self, groups: Array) -> Array:
        """The rows of some tasks."""
        return np.flatnonzero(np.isin(self.groups, groups))

    def wide(self, least: int) -> tuple[Data, Array]:
        """The tasks with at least so many trials, and their rows here."""
        return self.only(np.flatnonzero(np.bincount(self.groups) >= least))

    def only(self, kept: Array) -> tuple[Data, Array]:
        """Some tasks, numbers in ascending order, and their rows here."""
        rows = self.of(kept)
        at = {int(r): k for k, r in enumerate(rows)}
        defaults = np.array([at.get(int(d), -1) for d in self.defaults[kept]], int)
        tasks, choices = tuple(self.tasks[g] for g in kept), tuple(self.choices[r] for r in rows)
        seconds = self.seconds[rows], self.pick[rows], self.judge[rows]
        groups, measured = np.searchsorted(kept, self.groups[rows]), tuple(self.measured[g] for g in kept)
        return Data(self.x[rows], *seconds, groups, tasks, defaults, choices, measured), rows


def load(kind: str, paths: Sequence[Path] = ()) -> Data:
    """The data of machines of a kind, "cpu" or "gpu", but for library calls, of which features know nothing. `paths`:
    default: all logs beside this script.
    """
    tasks: dict[str, Task] = {}
    trials: dict[str, dict[Choice, list[Trial]]] = {}
    for path in paths or sorted(LOGS.glob("*.jsonl*")):
        log = read(path)
        for key, task in log.tasks.items():
            if task.setting.target.startswith("cuda") == (kind == "gpu"):
                tasks.setdefault(key, task)
                for t in log.trials.get(key, ()):
                    if t.choice.template in TEMPLATES and (
                        kind == "cpu" or not t.ok or len(t.seconds) > 1 or t.median > DOUBTFUL
                    ):
                        trials.setdefault(key, {}).setdefault(t.choice, []).append(t)
    return _data(tasks, trials)


def _data(tasks: dict[str, Task], trials: dict[str, dict[Choice, list[Trial]]]) -> Data:
    machines: dict[str, Machine] = {}
    kept: list[Task] = []
    xs, repeats, groups, defaults, choices, measured = [], [], [], [], [], []
    for key in sorted(tasks, key=lambda k: hashlib.sha256(k.encode()).hexdigest()):
        task, found = tasks[key], trials.get(key, {})
        if len(found) < LEAST or not any(t.ok for ts in found.values() for t in ts):
            continue
        machine = machines.setdefault(task.setting.target, machine_of(task.setting.target))
        try:
            problem = task.rebuilt[2]
        except DnncError as e:
            print(f"{task.name} is left out: {str(e).splitlines()[0]}")
            continue
        offered = candidates(problem, machine.templates(task.setting))
        default = offered[0] if offered and offered[0] in found else None
        tried = distinct(found if default is None else {default: found[default], **found})
        at = sum(map(len, xs))
        defaults.append(-1 if default is None else at)
        xs.append(features(problem, tried, machine.limits))
        repeats += [seconds_of(found[c]) for c in tried]
        groups += [len(kept)] * len(tried)
        choices += tried
        measured.append(frozenset(found))
        kept.append(task)
    if not kept:
        raise SystemExit(f"no trials of at least {LEAST} schedules a task in these logs; gather.py measures some")
    return Data(
        np.concatenate(xs),
        *np.array(repeats).T,
        np.array(groups),
        tuple(kept),
        np.array(defaults),
        tuple(choices),
        tuple(measured),
    )


def distinct(found: Mapping[Choice, Sequence[Trial]]) -> list[Choice]:
    """Of choices that are the same code, which a search measures once, the first."""
    first: dict[str, Choice] = {}
    for c, trials in found.items():
        first.setdefault(trials[0].code or str(c), c)
    return list(first.values())


def seconds_of(trials: Sequence[Trial]) -> tuple[float, float, float]:
    """Of a schedule's repeats the median, the least but for the last, and the last; infinite after failures."""
    numbers = max((t.seconds for t in trials if t.ok and t.seconds), key=len, default=(float("inf"),))
    return statistics.median(numbers), min(numbers[:-1] or numbers), numbers[-1]


def out_of_fold(data: Data, make: Callable[[], CostModel], folds: int = FOLDS) -> tuple[Array, Array]:
    """Scores, and their spread, of each row by a model that has not seen its task; tasks are shuffled."""
    scores, spread = np.zeros(len(data.x)), np.zeros(len(data.x))
    names = np.arange(len(data.tasks))
    for k in range(folds):
        model, test, rest = make(), data.of(names[names % folds == k]), data.of(names[names % folds != k])
        if hasattr(model, "fit"):
            model.fit(data.x[rest], data.seconds[rest], data.groups[rest])
        scores[test] = model.predict(data.x[test])
        if hasattr(model, "spread"):
            spread[test] = model.spread(data.x[test])
    return scores, spread


def calibrated(data: Data, scores: Array) -> float:
    """By what scores for what is new have to be multiplied to be logarithms of speed: they lie too far apart."""
    return unit_of(scores, np.zeros_like(scores), speeds(data.seconds, data.groups), data.groups)


# --- how good scores are ----------------------------------------------------------------------------------------------


def shares(data: Data, rows: Array) -> Array:
    """Rows of a task as measured: after each, the best so far as a share of the best of all, at most 1."""
    first = np.minimum.accumulate(data.pick[rows])
    at = np.maximum.accumulate(np.where(data.pick[rows] == first, np.arange(len(rows)), 0))
    judged = data.judge[rows][at]
    return np.minimum(judged[-1] / judged, 1.0)


def reached(data: Data, scores: Array, counts: Iterable[int]) -> dict[int, Array]:
    """Of each task the best of the `count` schedules with the highest scores, as a share of the best speed measured."""
    found = [
        shares(data, rows[np.argsort(-scores[rows], kind="stable")]) for rows in map(data.rows, range(len(data.tasks)))
    ]
    return {n: np.array([s[min(n, len(s)) - 1] for s in found]) for n in counts}


def trials_to(data: Data, scores: Array, share: float = 0.95) -> Array:
    """Of each task the trials until one reaches a share of the best speed."""
    found = [
        shares(data, rows[np.argsort(-scores[rows], kind="stable")]) for rows in map(data.rows, range(len(data.tasks)))
    ]
    return np.array([1.0 + np.argmax(s >= share) for s in found])


@dataclass(frozen=True)
class Gain:
    """What taking a model's choice gives where it is surely faster than the default by a margin.

    Args:
        margin: difference of scores, less what the model's members disagree about them.
        tasks: how many.
        changed: share of tasks that get another choice.
        mean: geometric mean of the default's time over the choice's, all tasks.
        slower: share of tasks that get slower by more than 2 %.
        worst: the smallest of these ratios.
    """

    margin: float
    tasks: int
    changed: float
    mean: float
    slower: float
    worst: float


def gains(data: Data, scores: Array, spread: Array, margins: Iterable[float], template: str = "") -> list[Gain]:
    """`template`: only tasks whose default is of it. Without a build a choice counts FAILED times the default."""
    picks = []
    for g in range(len(data.tasks)):
        d = data.defaults[g]
        if d < 0 or not np.isfinite(data.seconds[d]) or (template and data.choices[d].template != template):
            continue
        rows = data.rows(g)
        best = rows[np.argmax(scores[rows] - spread[rows])]
        seconds = data.seconds[best] if np.isfinite(data.seconds[best]) else FAILED * data.seconds[d]
        picks.append(
            (
                scores[best] - scores[d] - np.hypot(spread[best], spread[d]) if best != d else -np.inf,
                data.seconds[d] / seconds,
            )
        )
    sure, ratio = np.array(picks).reshape(-1, 2).T
    out = []
    for margin in margins:
        r = np.where(sure > margin, ratio, 1.0)
        mean = float(np.exp(np.log(r).mean())) if len(r) else 1.0
        out.append(
            Gain(
                margin, len(r), float((sure > margin).mean()), mean, float((r < 0.98).mean()), float(r.min(initial=1.0))
            )
        )
    return out


MARGINS = tuple(
    float(np.log1p(m)) for m in (0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3)
)  # less is within the noise of what was measured
FAILED = 4.0
LOSS = 2.0  # how much a task that gets slower counts against those that get faster
ENOUGH = 20  # tasks that say what a model is worth


def best_margin(found: Sequence[Gain]) -> float:
    """The margin of the largest mean, the tasks that get slower counted against it, more where one gets much slower;
    infinite where none is worth it. Who compiles without tuning never asked for a risk, so that losses weigh more than
    what is won.
    """
    worth, margin = max((g.mean - LOSS * g.slower * (1 - np.log(g.worst)), g.margin) for g in found)
    return margin if worth > 1.0 and found[0].tasks >= ENOUGH else float("inf")


def best_margins(data: Data, scores: Array, spread: Array) -> dict[str, float]:
    """By the template of the default; templates for which the model is of no use are left out."""
    templates = sorted({data.choices[d].template for d in data.defaults if d >= 0})
    found = {t: best_margin(gains(data, scores, spread, MARGINS, t)) for t in templates}
    return {t: m for t, m in found.items() if np.isfinite(m)}
