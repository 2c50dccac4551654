"""Cost models: from features of schedules to scores, of which the highest is expected to be the fastest.

In: features and measured seconds, grouped by task. Out: scores within a task, in logarithms of speed: two that differ
by 0.1 are expected to differ by a tenth in time. Three models: `Analytic`, the roofline, knows nothing but the
machine's figures; `XGBModel` learns from trials; `dnnc.autotune.model.forest.Forest` has learned, and needs no library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from dnnc.autotune.model.features import NAMES
from dnnc.autotune.model.forest import Forest, from_boosters
from dnnc.ir.errors import TuneError, install

Array = np.ndarray[Any, Any]
SLOWEST = 16.0  # times the best of a task: what is slower, or fails, counts as this
STEP, VOTES = 40, 2  # trees and members of an update, which is made many times
GROWTH = 1.15  # by which trials have to grow for an update to be worth its time
OBJECTIVES = {"rank": "rank:pairwise", "gain": "reg:squarederror"}


class CostModel(Protocol):
    """Scores schedules."""

    def predict(self, x: Array) -> Array:
        """Features float32 [n, F] of one task -> scores float [n]; higher is faster."""
        ...


class Analytic:
    """The roofline's estimate as a model: where nothing has been learned."""

    def predict(self, x: Array) -> Array:
        scores: Array = x[:, NAMES.index("plan seconds")].astype(np.float64) * -np.log(2.0)
        return scores


@dataclass
class XGBModel:
    """Boosted trees that rank the schedules of each task."""

    base: CostModel | None = None  # what is known before; trees learn what it gets wrong
    objective: str = "rank"  # "rank" orders the schedules of a task; "gain" predicts the logarithm of their speed
    members: int = 4  # that are trained on samples of the tasks and vote
    trees: int = 120  # of each member
    depth: int = 6  # levels of a tree
    rate: float = 0.1
    seed: int = 0  # of the samples
    parameters: dict[str, Any] = field(default_factory=dict)  # of XGBoost, instead of the usual ones
    # what has been learned: by what the trees' sums are multiplied, the members, and from how many trials of a search
    unit: float = 1.0
    boosters: list[Any] = field(default_factory=list)
    told: int = 0

    def fit(self, x: Array, seconds: Array, groups: Array) -> XGBModel:
        """Learn from the beginning.

        Args:
            x: features float32 [n, F].
            seconds: [n]; infinite where a schedule failed.
            groups: int [n], the task of each; in any order.
        """
        order = np.argsort(groups, kind="stable")
        x, seconds, groups = x[order], np.asarray(seconds, float)[order], np.asarray(groups)[order]
        kept = _told(seconds, groups)
        x, groups, y = x[kept], groups[kept], speeds(seconds[kept], groups[kept])
        self.boosters = [] if not len(x) else [self._member(x, y, groups, m) for m in range(self.members)]
        if self.boosters:
            self.unit = unit_of(self._raw(x), self._known(x), y, groups) if self.objective == "rank" else 1.0
        return self

    def update(self, x: Array, seconds: Array, groups: Array) -> None:
        """Learn from all trials so far on top of `base`. Few new trials since the last time change nothing."""
        if len(x) < self.told * GROWTH:
            return
        self.trees, self.members, self.told = STEP, VOTES, len(x)
        self.fit(x, seconds, groups)

    def predict(self, x: Array) -> Array:
        known = self._known(x)
        return known + self.unit * self._raw(x) if self.boosters else known

    def spread(self, x: Array) -> Array:
        """Standard deviation of the members' scores, [n]."""
        if len(self.boosters) < 2:
            return np.zeros(len(x))
        votes = np.stack([self._margin(b, x) for b in self.boosters], 1)
        return self.unit * (votes - votes.mean(0)).std(1)  # type: ignore[no-any-return]

    def forest(self, **facts: Any) -> Forest:
        """What has been learned, to be saved. TuneError where it rests on a base, which the file would lack."""
        if self.base is not None:
            raise TuneError("a model with a base is not saved alone; train one without")
        return from_boosters(self.boosters, {"unit": self.unit, "objective": self.objective, **facts})

    # --- inside -------------------------------------------------------------------------------------------------------

    def _known(self, x: Array) -> Array:
        return np.zeros(len(x)) if self.base is None else np.asarray(self.base.predict(x), float)

    def _raw(self, x: Array) -> Array:
        return np.mean([self._margin(b, x) for b in self.boosters], axis=0)  # type: ignore[no-any-return]

    def _margin(self, booster: Any, x: Array) -> Array:
        xgb = _xgboost()
        return booster.predict(xgb.DMatrix(x), output_margin=True).astype(np.float64)  # type: ignore[no-any-return]

    def _member(self, x: Array, y: Array, groups: Array, number: int) -> Any:
        """One booster, on a sample of the tasks unless it is alone or there are few."""
        xgb = _xgboost()
        names = np.unique(groups)
        rng = np.random.default_rng((self.seed, number))
        if self.members > 1 and len(names) >= 20:
            chosen = np.isin(groups, rng.permutation(names)[: len(names) * 4 // 5])
            x, y, groups = x[chosen], y[chosen], groups[chosen]
        ranks = self.objective == "rank"
        data = xgb.DMatrix(x, np.exp(y) if ranks else y - _means(y, groups))
        if self.base is not None:
            data.set_base_margin(self._known(x) - _means(self._known(x), groups))
        if ranks:
            data.set_group(np.unique(groups, return_counts=True)[1])
        return xgb.train(self._settings(number), data, self.trees)

    def _settings(self, number: int) -> dict[str, Any]:
        ranking = {
            "lambdarank_pair_method": "mean",
            "lambdarank_num_pair_per_sample": 8,
            "lambdarank_normalization": False,
        }
        common = {
            "max_depth": self.depth, "eta": self.rate, "min_child_weight": 0.01 if self.objective == "rank" else 4,
            "subsample": 0.8,
            "colsample_bytree": 0.6, "base_score": 0.0, "tree_method": "hist", "seed": self.seed * 101 + number,
            "nthread": 1, "verbosity": 0,
        }  # fmt: skip
        return {
            "objective": OBJECTIVES[self.objective],
            **(ranking if self.objective == "rank" else {}),
            **common,
            **self.parameters,
        }


def speeds(seconds: Array, groups: Array) -> Array:
    """Logarithms of best / seconds within each group, from 0 down to that of 1 / SLOWEST."""
    best = {g: float(np.min(seconds[groups == g])) for g in np.unique(groups)}
    with np.errstate(divide="ignore", invalid="ignore"):
        y = np.log(np.array([best[g] for g in groups]) / seconds)
    floor = -np.log(SLOWEST)
    clipped: Array = np.clip(np.nan_to_num(y, nan=floor, neginf=floor), floor, 0.0)
    return clipped


def unit_of(raw: Array, known: Array, y: Array, groups: Array) -> float:
    """Return the factor from scores to log speed: least squares within the groups, near the best."""
    near = y > -np.log(4.0)
    raw, rest, groups = raw[near], (y - known)[near], groups[near]
    a, b = raw - _means(raw, groups), rest - _means(rest, groups)
    return float(max(a @ b / max(float(a @ a), 1e-12), 1e-3)) if len(a) else 1.0


def _told(seconds: Array, groups: Array) -> Array:
    """Rows of tasks of which at least one schedule works and one other is known."""
    good = {g for g in np.unique(groups) if np.isfinite(seconds[groups == g]).any() and (groups == g).sum() > 1}
    return np.isin(groups, list(good))


def _means(y: Array, groups: Array) -> Array:
    _, at, counts = np.unique(groups, return_inverse=True, return_counts=True)
    means: Array = (np.bincount(at, y) / counts)[at]
    return means


def _xgboost() -> Any:
    try:
        import xgboost
    except ImportError as e:
        raise TuneError(
            f"learning a cost model takes XGBoost: {install('tune')}; without it the shipped model predicts, unchanged"
        ) from e
    return xgboost
