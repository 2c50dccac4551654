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
    """How a search stands. Times of the model are sums over the tasks that have been measured, calls times seconds."""

    seconds: float  # since it began
    budget: float  # it may take
    trials: int  # made, without those of earlier sessions
    failures: int  # of the trials
    tasks: int  # to tune
    done: int  # tasks for which nothing more is measured
    untuned: float  # seconds of a call with the templates' own choices
    current: float  # with the best choices so far
    predicted: float  # with those that are expected to be found
    eta: float  # seconds until the end, at the latest

    @property
    def speedup(self) -> float:
        return self.untuned / self.current if self.current > 0 else 1.0

    @property
    def predicted_speedup(self) -> float:
        return self.untuned / self.predicted if self.predicted > 0 else 1.0


@dataclass(frozen=True)
class Event:
    """A callback's event: `kind` "begin", "trial", "winner" or "end"; trials add task, best, default seconds."""

    kind: str
    progress: Progress
    task: Task | None = None
    trial: Trial | None = None
    best: float = math.inf
    default: float = math.inf


@dataclass(frozen=True)
class Point:
    """A search's trial, for reports. `at`: seconds since its begin; `predicted`: seconds expected before."""

    at: float
    choice: Choice
    why: str
    predicted: float | None
    status: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What became of a task."""

    task: Task
    calls: int  # in a call of the model
    choices: int  # of its space
    default: float  # seconds of the templates' own choice, in the final where there was one
    seconds: float  # of the winner in the same measurement; equal to `default` where that won
    choice: Choice | None  # the winner; None where no final has been made
    base: Choice  # the templates' own choice
    reason: str  # why the search of the task ended
    verdict: str  # why this choice won
    points: tuple[Point, ...]  # its trials in order

    @property
    def failures(self) -> int:
        return sum(p.status != "ok" for p in self.points)


@dataclass(frozen=True)
class Result:
    """What a search found; `untuned` and `tuned` are seconds of a call of the model, summed over its tuned kernels.
    `fusions`: of fused groups that were measured in another way too; `parts`: outcomes of their tasks.
    """

    outcomes: tuple[Outcome, ...]
    seconds: float
    trials: int
    failures: int
    reason: str
    fusions: tuple[Fused, ...] = ()
    parts: tuple[Outcome, ...] = ()
    predicted: float = math.nan  # seconds of a call that a longer search is expected to reach; not a number: unknown

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

    @property
    def further(self) -> float:
        """How many times as fast as now the kernels are expected to be after a longer search; 1 where unknown."""
        return max(self.tuned / self.predicted, 1.0) if self.predicted > 0 else 1.0


Callback = Callable[[Event], None]
