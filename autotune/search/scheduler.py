"""Which task to measure next: the one whose next trials save most time of the model per second of tuning.

In: how often the model calls each task, its search, and what its trials have cost so far. As in Ansor (Zheng et al.,
OSDI 2020, section 6) the rate of a task looks back, at what its last trials have saved, and ahead, at what its search
predicts; the weight is calls times seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dnnc.autotune.search.task_search import TaskSearch

BACK = 0.2  # of the rate that is what the last trials saved
REMEMBERED = 3  # batches over which it looks back
FORGET = 0.5  # of the old cost at each batch


@dataclass
class Entry:
    """A task under way."""

    search: TaskSearch
    calls: int  # in a call of the model
    cost: float = 0.0  # seconds that a trial takes, about; 0 before the first
    spent: float = 0.0
    reason: str = ""  # why it is not searched any more; empty while it is
    # (seconds of tuning, seconds of the kernel) at the ends of its last batches
    past: list[tuple[float, float]] = field(default_factory=list)

    def note(self, trials: int, wall: float) -> None:
        """A batch in which `trials` of this task took `wall` seconds."""
        per = wall / max(trials, 1)
        self.cost = per if not self.cost else FORGET * self.cost + (1 - FORGET) * per
        self.spent += wall
        best = self.search.best
        if best is not None:
            self.past = [*self.past[-REMEMBERED:], (self.spent, best.seconds)]

    @property
    def rate(self) -> float:
        """Seconds of a call of the model saved per second of tuning; infinite where nothing is known yet."""
        gain = self.search.gain
        if not math.isfinite(gain) or not self.cost:
            return math.inf
        ahead = gain / (self.cost * max(len(self.search.tried), 1))
        back = 0.0
        if len(self.past) > 1 and self.past[-1][0] > self.past[0][0]:
            back = (self.past[0][1] - self.past[-1][1]) / (self.past[-1][0] - self.past[0][0])
        return self.calls * (BACK * back + (1 - BACK) * ahead)


def order(entries: Sequence[Entry]) -> list[Entry]:
    """The tasks that are not done, the most rewarding first; those of which nothing is known come before all others."""
    return sorted((e for e in entries if not e.reason), key=lambda e: -e.rate)


def share(entries: Sequence[Entry], batch: int, least: int) -> list[tuple[Entry, int]]:
    """Allot a batch's requests: `least` each to tasks by reward, one to each task not measured yet."""
    out: list[tuple[Entry, int]] = []
    left = batch
    for e in order(entries):
        if left <= 0:
            break
        n = min(left, least if e.search.tried else 1)
        out.append((e, n))
        left -= n
    return out
