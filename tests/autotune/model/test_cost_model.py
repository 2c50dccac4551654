"""Models that learn from trials: on kernels whose times follow a law that the roofline does not know."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dnnc.autotune.model.cost_model import SLOWEST, Analytic, CostModel, XGBModel, speeds, unit_of
from dnnc.autotune.model.features import ABSENT, KNOBS, NAMES
from dnnc.autotune.model.forest import Forest, load
from dnnc.ir.errors import TuneError

Array = np.ndarray[Any, Any]
EACH = 24  # schedules of a task
SECONDS, BOUND, MR, KU, SIZE = (
    NAMES.index(n) for n in ("plan seconds", "plan bound", "knob mr", "knob ku", "work rows")
)


def world(tasks: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Features, seconds and tasks. Seconds are the roofline's, twice as long for `ku` 1 and for large tiles."""
    rng = np.random.default_rng(seed)
    n = tasks * EACH
    x = np.zeros((n, len(NAMES)), np.float32)
    x[:, [NAMES.index(f"knob {k}") for k in KNOBS]] = ABSENT
    groups = np.repeat(np.arange(tasks), EACH)
    x[:, SIZE] = rng.uniform(3, 12, tasks)[groups]
    x[:, MR], x[:, KU] = rng.integers(1, 5, n), rng.integers(1, 4, n)
    x[:, BOUND] = rng.uniform(-0.7, 0, n)
    x[:, SECONDS] = x[:, SIZE] - 20 - x[:, BOUND]
    log2 = x[:, SECONDS] + (x[:, KU] == 1) + (x[:, MR] >= 3) * (x[:, SIZE] < 7)
    return x, 2.0**log2 * np.exp(rng.normal(0, 0.01, n)), groups


def top(model: CostModel, x: Array, seconds: Array, groups: Array) -> float:
    """Share of the best speed that the first of a model's list has, mean of tasks."""
    shares = []
    for g in np.unique(groups):
        of = groups == g
        shares.append(seconds[of].min() / seconds[of][np.argmax(model.predict(x[of]))])
    return float(np.mean(shares))


@pytest.fixture(scope="module")
def learned() -> XGBModel:
    return XGBModel(members=2, trees=60, depth=4).fit(*world(60))


def test_analytic_is_the_roofline() -> None:
    x, _, _ = world(2)
    scores = Analytic().predict(x)
    assert np.array_equal(np.argsort(-scores, kind="stable"), np.argsort(x[:, SECONDS], kind="stable"))
    assert scores[0] - scores[1] == pytest.approx((x[1, SECONDS] - x[0, SECONDS]) * np.log(2))


@pytest.mark.slow
def test_it_learns_what_the_roofline_does_not_know(learned: XGBModel) -> None:
    new = world(30, seed=1)
    assert top(Analytic(), *new) < 0.9 and top(learned, *new) > 0.95


@pytest.mark.slow
def test_the_other_objective() -> None:
    model = XGBModel(objective="gain", members=2, trees=60, depth=4).fit(*world(60))
    assert top(model, *world(30, seed=1)) > 0.95


@pytest.mark.slow
def test_scores_are_logarithms_of_speed(learned: XGBModel) -> None:
    x, seconds, groups = world(30, seed=2)
    y, scores = speeds(seconds, groups), learned.predict(x)
    assert 0.7 < unit_of(scores, np.zeros(len(x)), y, groups) < 1.4


@pytest.mark.slow
def test_the_order_of_rows_does_not_matter(learned: XGBModel) -> None:
    x, seconds, groups = world(60)
    order = np.random.default_rng(5).permutation(len(x))
    again = XGBModel(members=2, trees=60, depth=4).fit(x[order], seconds[order], groups[order])
    new = world(30, seed=1)
    assert top(again, *new) == pytest.approx(top(learned, *new), abs=0.03)


@pytest.mark.slow
def test_failures_are_avoided() -> None:
    """Every schedule with ku = 3 fails."""
    x, seconds, groups = world(40)
    seconds[x[:, KU] == 3] = np.inf
    model = XGBModel(members=2, trees=60, depth=4).fit(x, seconds, groups)
    new = world(10, seed=3)[0]
    scores = model.predict(new)
    assert scores[new[:, KU] == 3].max() < np.median(scores)


def test_speeds() -> None:
    seconds, groups = np.array([2.0, 1.0, np.inf, 1e9, 5.0, np.inf, np.inf]), np.array([0, 0, 0, 0, 1, 2, 2])
    floor = -np.log(SLOWEST)
    assert np.allclose(speeds(seconds, groups), [-np.log(2), 0, floor, floor, 0, floor, floor])


def test_tasks_without_a_comparison_are_left_out() -> None:
    x, seconds, groups = world(3)
    seconds[groups == 0] = np.inf
    model = XGBModel(members=1, trees=5).fit(x, seconds, groups)
    assert np.isfinite(model.predict(x)).all()
    nothing = XGBModel(base=Analytic(), members=1).fit(x[:EACH], seconds[:EACH], groups[:EACH])
    assert np.array_equal(nothing.predict(x), Analytic().predict(x))


def test_update_keeps_what_the_base_knew() -> None:
    model = XGBModel(base=Analytic(), members=2, depth=4)
    x, seconds, groups = world(4, seed=7)
    assert np.array_equal(model.predict(x), Analytic().predict(x))
    few = np.flatnonzero(np.arange(len(x)) % EACH < 12)
    model.update(x[few], seconds[few], groups[few])
    rest = np.flatnonzero(np.arange(len(x)) % EACH >= 12)
    assert (
        top(model, x[rest], seconds[rest], groups[rest]) > top(Analytic(), x[rest], seconds[rest], groups[rest]) + 0.05
    )


def test_an_update_waits_for_news() -> None:
    model = XGBModel(base=Analytic())
    x, seconds, groups = world(5)
    model.update(x[:100], seconds[:100], groups[:100])
    first = model.boosters
    model.update(x[:104], seconds[:104], groups[:104])
    assert model.boosters is first
    model.update(x, seconds, groups)
    assert model.boosters is not first


@pytest.mark.slow
def test_members_agree_where_they_have_seen_much(learned: XGBModel) -> None:
    x, _, _ = world(1, seed=9)
    assert (learned.spread(x) > 0).any() and learned.spread(x).max() < 0.5
    assert not XGBModel(members=1, trees=5).fit(*world(5)).spread(x).any()


@pytest.mark.slow
def test_a_saved_model_says_the_same(learned: XGBModel, tmp_path: Path) -> None:
    learned.forest(features="x").save(tmp_path / "m.npz")
    forest: Forest = load(tmp_path / "m.npz")
    x, _, _ = world(5, seed=11)
    assert np.allclose(forest.predict(x), learned.predict(x), atol=1e-4)
    assert np.allclose(forest.spread(x), learned.spread(x), atol=1e-4)
    with pytest.raises(TuneError, match="base"):
        XGBModel(base=forest).fit(*world(3)).forest()


def test_without_xgboost_the_way_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with pytest.raises(TuneError, match=r"pip install -e '\.\[tune\]'"):
        XGBModel().fit(*world(3))
