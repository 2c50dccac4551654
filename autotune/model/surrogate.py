"""What is expected of the schedules of one task that nobody has measured yet: a Gaussian process over their knobs.

In: the choices of a task, scores of a cost model for them, and the seconds of those measured. Out: for each choice the
mean and the spread of the logarithm of its seconds, and whole draws of the process. The cost model tells the trend;
measurements of near schedules correct it, and far from all of them the spread is wide, which is where exploring pays. A
task has some hundreds of choices: everything is dense NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.passes.schedule.problem import Choice

Array = np.ndarray[Any, Any]
NOISE = 0.03  # of the logarithm of one measurement: three percent
DOUBT = 0.25  # how many units of squared scores it takes to doubt that scores are logarithms of speed
WIDEST, FARTHEST = 1.0, 2.0  # spread of scores, and the largest; wider ones are in another unit
SCALES = (0.8, 1.6, 3.2)  # lengths over which schedules resemble each other, in units of a knob's whole range
IRRELEVANT = 8.0  # the length of a knob that changes nothing
TOLD = 64  # measurements out of which lengths are learned
SPREAD = 0.25  # of log seconds about the trend that is assumed before any are measured
BELIEF = 6  # how many measurements this assumption counts for


def encode(choices: Sequence[Choice]) -> Array:
    """Knobs as coordinates from 0 to 1, float64 [choices, columns].

    A knob is one column for all templates: the logarithm where its values are numbers. Words and templates are a column
        for each value.
    """
    rows: list[dict[str, float]] = []
    for c in choices:
        row = {f"template {c.template}": 1.0}
        for name, v in c.knobs:
            key, x = (f"{name} {v}", 1.0) if isinstance(v, str) else (name, float(np.sign(v) * np.log2(1 + abs(v))))
            row[key] = x
        rows.append(row)
    names = sorted({k for r in rows for k in r})
    table = np.array([[r.get(k, 0.0) for k in names] for r in rows]).reshape(len(rows), len(names))
    low, span = table.min(0, initial=np.inf), np.ptp(table, 0) if len(rows) else np.zeros(len(names))
    varied = span > 0
    coordinates: Array = (table[:, varied] - low[varied]) / span[varied]
    return coordinates


class Surrogate:
    """The process over the choices of a task.

    Args:
        coordinates: of `encode`.
        scores: of a cost model, logarithms of speed or at least higher where faster; None where there is none.
    """

    def __init__(self, coordinates: Array, scores: Array | None = None) -> None:
        self.x = coordinates
        self.lengths = np.full(coordinates.shape[1], 0.8)
        self.rescore(scores)
        self.fit([], [])

    def rescore(self, scores: Array | None) -> None:
        """Take the scores of a cost model that has learned; `fit` must follow."""
        z = np.zeros(len(self.x)) if scores is None else np.asarray(scores, float)
        z = z - z.mean() if len(z) else z
        self.z = np.clip(z / max(float(z.std()) / WIDEST, 1.0), -FARTHEST, FARTHEST) if len(z) else z

    def fit(self, measured: Sequence[int], logs: Sequence[float]) -> None:
        """Condition on measurements.

        Args:
            measured: numbers of choices.
            logs: the logarithm of the seconds of each.
        """
        self.at, y = np.array(measured, int), np.array(logs, float)
        basis = np.column_stack([np.ones(len(self.at)), -self.z[self.at]])
        # a ridge towards one unit of scores for one of log seconds: few measurements leave it so
        penalty, believed = np.diag([1e-6, DOUBT]), np.array([0.0, 1.0])
        self.trend = believed
        if len(y):
            self.trend = np.linalg.solve(basis.T @ basis + penalty, basis.T @ y + penalty @ believed)
            self.trend[1] = max(self.trend[1], 0.0)
            self.trend[0] = float(np.mean(y + self.trend[1] * self.z[self.at]))
        rest = y - basis @ self.trend
        self.variance = float((rest @ rest + BELIEF * SPREAD**2) / (len(y) + BELIEF))
        if len(y) >= 4:
            self._choose_lengths(rest, _told(y))
        self._condition(rest)

    def _kernel(self, a: Array, b: Array, lengths: Array) -> Array:
        """Matern 5/2: once differentiable, as times of tiles are at best."""
        d2 = (((a[:, None, :] - b[None, :, :]) / lengths) ** 2).sum(-1)
        d = np.sqrt(5 * d2)
        k: Array = self.variance * (1 + d + d * d / 3) * np.exp(-d)
        return k

    def _evidence(self, x: Array, rest: Array, lengths: Array) -> float:
        """The logarithm of how likely measurements are."""
        k = self._kernel(x, x, lengths) + np.eye(len(rest)) * NOISE**2
        try:
            root = np.linalg.cholesky(k)
        except np.linalg.LinAlgError:
            return -np.inf
        half = np.linalg.solve(root, rest)
        return float(-0.5 * half @ half - np.log(np.diag(root)).sum())

    def _choose_lengths(self, rest: Array, some: Array) -> None:
        """Fit the best common length for some measurements, then sweep the knobs: less weight, or none?"""
        x, rest, width = self.x[self.at[some]], rest[some], self.x.shape[1]
        best, scale = max((self._evidence(x, rest, np.full(width, s)), s) for s in SCALES)
        lengths = np.full(width, scale)
        if len(rest) >= 8:
            for k in range(width):
                for factor in (0.5, 2.0, IRRELEVANT):
                    tried = lengths.copy()
                    tried[k] = scale * factor
                    score = self._evidence(x, rest, tried)
                    if score > best + 0.5:
                        best, lengths = score, tried
        self.lengths = lengths

    def _condition(self, rest: Array) -> None:
        trend = self.trend[0] - self.trend[1] * self.z
        prior = np.full(len(self.x), self.variance)
        if not len(rest):
            self.mean, self.spread, self._half = trend, np.sqrt(prior), np.zeros((0, len(self.x)))
            return
        k = self._kernel(self.x[self.at], self.x[self.at], self.lengths) + np.eye(len(rest)) * NOISE**2
        root = np.linalg.cholesky(k)
        self._half = np.linalg.solve(root, self._kernel(self.x[self.at], self.x, self.lengths))
        self.mean = trend + self._half.T @ np.linalg.solve(root, rest)
        self.spread = np.sqrt(np.maximum(prior - (self._half**2).sum(0), 1e-10))

    def sampler(self, among: Array) -> Callable[[np.random.Generator, int], Array]:
        """Draw log seconds of choices, float64 [times, choices]: similar ones vary together."""
        x, mean = self.x[among], self.mean[among]
        cov = self._kernel(x, x, self.lengths) - self._half[:, among].T @ self._half[:, among]
        root = np.linalg.cholesky(cov + np.eye(len(among)) * 1e-6).T

        def draw(rng: np.random.Generator, times: int) -> Array:
            drawn: Array = mean + rng.standard_normal((times, len(among))) @ root
            return drawn

        return draw


def _told(y: Array) -> Array:
    """Numbers of at most TOLD measurements: the fastest, and as many spread over the others."""
    order = np.argsort(y, kind="stable")
    half = TOLD // 2
    others = order[half:]
    picked: Array = (
        order
        if len(y) <= TOLD
        else np.concatenate([order[:half], others[np.linspace(0, len(others) - 1, half).astype(int)]])
    )
    return picked
