"""Search over one task's schedules: what to measure next, the best so far, whether to go on.

In: the choices of the task's space, their features, a cost model, and trials as they come. Out: requests for the next
batch. A batch mixes what the model and the measurements predict to be fastest, neighbours of the best ones (one knob
changed, or the knobs of two of them mixed), and schedules of which it is unsure. Those near the best get more repeats.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dnnc.autotune.model.surrogate import Surrogate, encode
from dnnc.autotune.search.task import Task
from dnnc.autotune.search.trial import Request, Trial
from dnnc.passes.schedule.problem import Choice

Array = np.ndarray[Any, Any]
EARLY_STOP = 3.0  # a choice so many times slower than the best is not measured to the end
SURVIVES = 1.08  # times the best, measured once: measured more often
FIRST_REPEATS, MORE_REPEATS = 1, 3
WORTH = 0.01  # predicted gain of a task below which it is done
LEAST_TRIALS = 24  # before a prediction may end the search
PATIENCE = 8  # choices measured since the best was found, likewise
HOPELESS = 12  # failures in a row from the start, after which a task is given up
FAILED = math.log(2.0)  # a failure counts as a time so much above the slowest, so that its neighbours are avoided
DRAWN = 128  # choices of which joint draws are made: the most promising
DRAWS = 64
DEFAULT, WINNER, PREDICTED, NEIGHBOUR, UNSURE = "default", "last winner", "predicted", "neighbour of the best", "unsure"


class Model(Protocol):
    """A cost model, one's own or `dnnc.autotune.model.cost_model`'s. One that also has `update(x, seconds, groups)` is
    told of all trials as they come: features, seconds (infinite where a schedule failed), and the task of each.
    """

    def predict(self, x: Array) -> Array:
        """Features float32 [n, F] of a task -> scores float [n]: logarithms of speed, or higher if faster."""
        ...


@dataclass
class Tried:
    """What is known of one choice. `predicted`: seconds that were expected before its first trial."""

    number: int
    choice: Choice
    why: str
    predicted: float | None
    trials: list[Trial]

    @property
    def failed(self) -> bool:
        return any(not t.ok for t in self.trials)

    @property
    def seconds(self) -> float:
        """The median of all repeats; infinite where one trial failed."""
        numbers = [s for t in self.trials for s in t.seconds]
        return math.inf if self.failed or not numbers else statistics.median(numbers)

    @property
    def repeats(self) -> int:
        return max((len(t.seconds) for t in self.trials), default=0)

    @property
    def checked(self) -> bool:
        return not self.failed and any(t.checked for t in self.trials)

    @property
    def code(self) -> str:
        return next((t.code for t in self.trials if t.code), "")


class TaskSearch:
    """The search of one task.

    Args:
        task: what is tuned.
        choices: its space, the default first.
        features: float32 [choices, F] for the model; None without a model.
        model: ranks schedules; None: by measurements alone.
        seeds: choices that are measured in any case, as is the default: the last winner.
        seed: of random draws.
    """

    def __init__(
        self,
        task: Task,
        choices: Sequence[Choice],
        features: Array | None = None,
        model: Model | None = None,
        seeds: Sequence[Choice] = (),
        seed: int = 0,
    ) -> None:
        known = {_name(c): c for c in choices}
        self.task, self.model = task, model
        self.choices = list(known.values())
        self.numbers = {name: k for k, name in enumerate(known)}
        self.features = features if features is not None and len(features) == len(self.choices) else None
        self.tried: dict[int, Tried] = {}
        self.asked: dict[int, tuple[str, float | None]] = {}
        self._rng = np.random.default_rng(seed)
        self._seeds = [self.numbers[_name(c)] for c in seeds if _name(c) in self.numbers]
        self._stale, self._old_scores, self._gain = True, False, math.inf
        self._ranked: list[Tried] | None = None  # until a trial comes
        self.surrogate = Surrogate(encode(self.choices), self._scores())

    # --- what is known ------------------------------------------------------------------------------------------------

    def add(self, trials: Iterable[Trial]) -> None:
        """Take measurements, one's own or those of an earlier session. Choices outside of the space are passed over."""
        for t in trials:
            k = self.numbers.get(_name(t.choice))
            if k is None or t.status == "lost":
                continue
            why, predicted = self.asked.get(k, ("earlier trial", None))
            self.tried.setdefault(k, Tried(k, self.choices[k], why, predicted, [])).trials.append(t)
            self._stale, self._ranked = True, None

    @property
    def default(self) -> Tried | None:
        """The templates' own choice, once it has been measured."""
        return self.tried.get(0)

    @property
    def ranked(self) -> list[Tried]:
        """What works, fastest first; of equal code one, of equal times the one nearest to the default."""
        if self._ranked is None:
            works = [(t.seconds, k, t) for k, t in sorted(self.tried.items()) if math.isfinite(t.seconds)]
            first = {t.code or k: (seconds, k, t) for seconds, k, t in reversed(works)}
            self._ranked = [t for *_, t in sorted(first.values(), key=lambda item: item[:2])]
        return self._ranked

    @property
    def best(self) -> Tried | None:
        return next(iter(self.ranked), None)

    @property
    def trials(self) -> int:
        return sum(len(t.trials) for t in self.tried.values())

    @property
    def failures(self) -> int:
        return sum(t.failed for t in self.tried.values())

    @property
    def open(self) -> Array:
        """Numbers of the choices that nobody has measured."""
        return np.array([k for k in range(len(self.choices)) if k not in self.tried], int)

    # --- what to expect -----------------------------------------------------------------------------------------------

    def rescored(self) -> None:
        """The model has learned: ask it again, before the next batch."""
        self._old_scores = True

    def _scores(self) -> Array | None:
        if self.model is None or self.features is None or not len(self.choices):
            return None
        scores = np.asarray(self.model.predict(self.features), float)
        finite = np.isfinite(scores)
        return np.where(finite, scores, scores[finite].min(initial=0.0))

    def _fit(self) -> None:
        if not self._stale:
            return
        works = {k: math.log(max(t.seconds, 1e-12)) for k, t in self.tried.items() if math.isfinite(t.seconds)}
        slow = max(works.values(), default=0.0) + FAILED
        known = [(k, works.get(k, slow)) for k in self.tried if works]
        self.surrogate.fit([k for k, _ in known], [y for _, y in known])
        self._promising, self._draw = self._sampled()
        self._gain = self._expected_gain()
        self._stale = False

    def _sampled(self) -> tuple[Array, Any]:
        """The open choices that may be fastest, most promising first, DRAWN at most, and what draws their times."""
        left, s = self.open, self.surrogate
        among: Array = left[np.argsort(s.mean[left] - 2 * s.spread[left], kind="stable")[:DRAWN]]
        return among, s.sampler(among)

    def _expected_gain(self) -> float:
        best = self.best
        if best is None or not len(self._promising):
            return 0.0 if best is not None else math.inf
        least = np.exp(self._draw(np.random.default_rng(0), DRAWS).min(1))
        return float(np.maximum(best.seconds - least, 0).mean())

    @property
    def gain(self) -> float:
        """Seconds of a call that measuring the rest is expected to save; infinite while nothing is known."""
        self._fit()
        return self._gain

    @property
    def last_gain(self) -> float:
        """The same as of the last time that somebody asked: quick."""
        return self._gain

    def done(self) -> str:
        """Why measuring more is not worth it; empty where it is."""
        if len(self.tried) >= len(self.choices):
            return "every schedule is measured"
        best = self.best
        if best is None:
            return "no schedule works" if self.failures >= HOPELESS else ""
        if len(self.tried) < min(LEAST_TRIALS, len(self.choices)) or any(
            k not in self.tried for k in (0, *self._seeds)
        ):
            return ""
        since = len(self.tried) - 1 - list(self.tried).index(best.number)
        return "predicted gain below 1 %" if since >= PATIENCE and self.gain < WORTH * best.seconds else ""

    # --- what to measure ----------------------------------------------------------------------------------------------

    def propose(self, n: int) -> list[Choice]:
        """The next choices to measure, at most n, none of which has been measured."""
        return [self.choices[k] for k in self._picked(n)]

    def requests(self, n: int) -> list[Request]:
        """The next batch: repeats of what came near the best, then new choices."""
        best = self.best
        limit = None if best is None else EARLY_STOP * best.seconds
        near = [
            t
            for t in self.ranked
            if best is not None and t.repeats < MORE_REPEATS and t.seconds <= SURVIVES * best.seconds
        ]
        out = [Request(self.task, t.choice, limit, MORE_REPEATS, not t.checked) for t in near[: max(n // 2, 1)]]
        for k in self._picked(n - len(out)):
            first = k == 0 or k in self._seeds
            repeats = MORE_REPEATS if first else FIRST_REPEATS
            out.append(Request(self.task, self.choices[k], None if first else limit, repeats, first))
        return out

    def _picked(self, n: int) -> list[int]:
        must = [k for k in dict.fromkeys([0, *self._seeds]) if k not in self.tried and k < len(self.choices)]
        picked = {k: DEFAULT if k == 0 else WINNER for k in must[:n]}
        if len(picked) < n and len(self.tried) + len(picked) < len(self.choices):
            if self._old_scores:
                self.surrogate.rescore(self._scores())
                self._stale, self._old_scores = True, False
            self._fit()
            for rank, wanted in (
                (self._fastest, (n + 3) // 4),
                (self._neighbours, (n + 1) // 2),
                (self._unsure, n),
                (self._fastest, n),
            ):
                for k, why in rank():
                    if len(picked) >= wanted:
                        break
                    picked.setdefault(k, why)
        s = self.surrogate
        known = bool(self.tried)
        self.asked.update({k: (why, float(math.exp(s.mean[k])) if known else None) for k, why in picked.items()})
        return list(picked)

    def _fastest(self) -> list[tuple[int, str]]:
        """Open choices by the improvement to expect of each."""
        left, s, best = self.open, self.surrogate, self.best
        if best is None:
            order = np.argsort(s.mean[left], kind="stable")
            return [(int(k), PREDICTED) for k in left[order]]
        z = (math.log(best.seconds) - s.mean[left]) / s.spread[left]
        density, below = (
            np.exp(-z * z / 2) / math.sqrt(2 * math.pi),
            np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in z]),
        )
        order = np.argsort(-s.spread[left] * (z * below + density), kind="stable")
        return [(int(k), PREDICTED) for k in left[order]]

    def _neighbours(self) -> list[tuple[int, str]]:
        """Open mutations and crossovers of the best three, those predicted fastest first."""
        parents = [dict(t.choice.knobs) | {"": t.choice.template} for t in self.ranked[:3]]
        found = []
        for k in self.open:
            c = self.choices[k]
            knobs = dict(c.knobs) | {"": c.template}
            mutated = any(p.keys() == knobs.keys() and sum(p[x] != knobs[x] for x in p) == 1 for p in parents)
            mixed = sum(p.keys() == knobs.keys() for p in parents) > 1 and all(
                any(p.keys() == knobs.keys() and p[x] == v for p in parents) for x, v in knobs.items()
            )
            found += [int(k)] if mutated or mixed else []
        return [(k, NEIGHBOUR) for k in sorted(found, key=lambda k: float(self.surrogate.mean[k]))]

    def _unsure(self) -> list[tuple[int, str]]:
        """The fastest of each of some draws: what may be best, as far as is known."""
        if not len(self._promising):
            return []
        return [(int(self._promising[j]), UNSURE) for j in self._draw(self._rng, DRAWS).argmin(1)]


def _name(c: Choice) -> tuple[str, frozenset[tuple[str, int | str]]]:
    """A choice whatever the order of its knobs."""
    return c.template, frozenset(c.knobs)
