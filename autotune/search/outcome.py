"""What a search tells: its progress and events while it runs, its outcomes and result at the end. Data only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dnnc.autotune.search.fusion_variants import Fused
from dnnc.autotune.search.task import Task
from dnnc.autotune.search.trial import Trial
from dnnc.passes.schedule.problem import Choice


@dataclass(frozen=True)
class Progress:
    """How a search stands. Times of the model are sums over the tasks that have been measured, calls times seconds.

    Args:
        seconds: since it began.
        budget: it may take.
        trials: made, without those of earlier sessions.
        failures: of these.
        tasks: to tune.
        done: of these, for which nothing more is measured.
        untuned: seconds of a call with the templates' own choices.
        current: with the best choices so far.
        predicted: with those that are expected to be found.
        eta: seconds until the end, at the latest.
    """

    seconds: float
    budget: float
    trials: int
    failures: int
    tasks: int
    done: int
    untuned: float
    current: float
    predicted: float
    eta: float

    @property
    def speedup(self) -> float:
        return self.untuned / self.current if self.current > 0 else 1.0

    @property
    def predicted_speedup(self) -> float:
        return self.untuned / self.predicted if self.predicted > 0 else 1.0


@dataclass(frozen=True)
class Event:
    """What a callback is told: `kind` is "begin", "trial", "winner" or "end"; a trial comes with its task, the best and
    the default's seconds.
    """

    kind: str
    progress: Progress
    task: Task | None = None
    trial: Trial | None = None
    best: float = math.inf
    default: float = math.inf


@dataclass(frozen=True)
class Point:
    """One trial of a search, for reports. `at`: seconds since it began; `predicted`: seconds expected before the
    choice's first trial.
    """

    at: float
    choice: Choice
    why: str
    predicted: float | None
    status: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What became of a task.

    Args:
        task: the task.
        calls: per call of the model.
        choices: of its space.
        default: seconds of the templates' own choice, in the final where there was one.
        seconds: of the winner in the same measurement; equal to `default` where that won.
        choice: the winner; None where no final has been made.
        base: the templates' own choice.
        reason: why the search of the task ended.
        verdict: why this choice won.
        points: its trials in order.
    """

    task: Task
    calls: int
    choices: int
    default: float
    seconds: float
    choice: Choice | None
    base: Choice
    reason: str
    verdict: str
    points: tuple[Point, ...]

    @property
    def failures(self) -> int:
        return sum(p.status != "ok" for p in self.points)


@dataclass(frozen=True)
class Result:
    """What a search found; `untuned` and `tuned` are seconds of a call of the model, summed over its tuned kernels.
    `fusions`: of fused groups that were measured in another way too; `parts` are the outcomes of the tasks that these
    consist of.
    """

    outcomes: tuple[Outcome, ...]
    seconds: float
    trials: int
    failures: int
    reason: str
    fusions: tuple[Fused, ...] = ()
    parts: tuple[Outcome, ...] = ()

    @property
    def untuned(self) -> float:
        return sum(o.calls * o.default for o in self.outcomes if math.isfinite(o.default))

    @property
    def tuned(self) -> float:
        gained = sum(f.calls * (f.together - f.apart) for f in self.fusions if f.taken)
        return sum(o.calls * o.seconds for o in self.outcomes if math.isfinite(o.default)) - gained

    @property
    def speedup(self) -> float:
        return self.untuned / self.tuned if self.tuned > 0 else 1.0


Callback = Callable[[Event], None]
