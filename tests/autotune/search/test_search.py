"""A task's search finds the best in few trials; a model's search keeps budget, log and promises."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dnnc.autotune.log.file import Log, read
from dnnc.autotune.log.record import Winner
from dnnc.autotune.search.outcome import Event, Result
from dnnc.autotune.search.search import FINAL_REPEATS, OVERTIME, TIE, Plan, ahead, search
from dnnc.autotune.search.task import Task
from dnnc.autotune.search.task_search import DEFAULT, HOPELESS, TaskSearch
from dnnc.autotune.search.trial import Request, Trial
from dnnc.passes.schedule.problem import Choice
from support.landscape import FakeRunner, Landscape, space, task

Array = np.ndarray[Any, Any]
BATCH = 8
SEEDS = range(6)


def measured(choice: Choice, seconds: float, code: str = "", status: str = "ok", repeats: int = 1) -> Trial:
    return Trial(
        "a-key",
        choice,
        status,
        (seconds,) * repeats if status == "ok" else (),
        code=code or str(hash(choice)),
        checked=repeats > 1,
    )


def trials_until(seed: int, near: float, model: Any = None, features: Array | None = None) -> tuple[int, float]:
    """How many trials a search needs until one is within `near` of the best; how many random ones on average."""
    choices, truth, rng = space(seed), Landscape(seed), np.random.default_rng(seed)
    seconds = {c: truth(c) for c in choices}
    goal = min(seconds.values()) / near
    s = TaskSearch(task("a"), choices, features, model, seed=seed)
    expected = (len(choices) + 1) / (sum(t <= goal for t in seconds.values()) + 1)
    for count in range(len(choices)):
        if count % BATCH == 0:
            batch = s.propose(BATCH)
        c = batch[count % BATCH]
        s.add([measured(c, seconds[c] * math.exp(rng.normal(0, 0.02)))])
        if seconds[c] <= goal:
            return count + 1, expected
    raise AssertionError("the best was never proposed")


class Known:
    """A model that gives these scores whatever the features are."""

    def __init__(self, scores: Array) -> None:
        self.scores = scores

    def predict(self, x: Array) -> Array:
        return self.scores


# --- one task ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_far_fewer_trials_than_random() -> None:
    found, random = zip(*(trials_until(seed, 0.95) for seed in SEEDS))
    assert np.mean(found) < np.mean(random) / 3


def test_a_model_that_is_roughly_right_needs_fewer_still() -> None:
    found, random = [], []
    for seed in SEEDS:
        choices, truth = space(seed), Landscape(seed)
        scores = np.array([-math.log(truth(c)) for c in choices]) + np.random.default_rng(seed).normal(
            0, 0.25, len(choices)
        )
        a, b = trials_until(seed, 0.95, Known(scores), np.zeros((len(choices), 1), np.float32))
        found.append(a)
        random.append(b)
    assert np.median(found) < np.mean(random) / 8


@pytest.mark.slow
def test_a_model_that_is_wrong_is_overruled() -> None:
    found, random = [], []
    for seed in SEEDS:
        n = len(space(seed))
        a, b = trials_until(
            seed, 0.95, Known(np.random.default_rng(seed).normal(0, 1, n)), np.zeros((n, 1), np.float32)
        )
        found.append(a)
        random.append(b)
    assert np.mean(found) < np.mean(random) / 2


def test_the_default_and_the_last_winner_come_first() -> None:
    choices = space(0)
    s = TaskSearch(task("a"), choices, seeds=[choices[77]])
    first = s.requests(4)
    assert [r.choice for r in first[:2]] == [choices[0], choices[77]]
    assert all(r.repeats > 1 and r.check and r.limit is None for r in first[:2])
    assert s.asked[0][0] == DEFAULT


def test_no_choice_is_proposed_twice_and_none_is_left_out() -> None:
    choices = space(0)[:40]
    s = TaskSearch(task("a"), choices)
    seen: list[Choice] = []
    while batch := s.propose(BATCH):
        seen += batch
        s.add([measured(c, 1.0 + k % 7) for k, c in enumerate(batch)])
    assert sorted(map(str, seen)) == sorted(map(str, choices))
    assert s.done() == "every schedule is measured"


def test_knobs_in_another_order_are_the_same_choice() -> None:
    choices = space(0)[:8]
    s = TaskSearch(task("a"), choices)
    s.add([measured(Choice(c.template, c.knobs[::-1]), 1.0) for c in choices])
    assert s.done() and not s.propose(3)


def test_equal_code_counts_once_and_the_default_stands_for_it() -> None:
    choices = space(0)[:8]
    s = TaskSearch(task("a"), choices)
    s.add([measured(choices[0], 1.01, "x"), measured(choices[1], 1.0, "x"), measured(choices[2], 2.0, "y")])
    assert [t.number for t in s.ranked] == [0, 2]


def test_what_is_near_the_best_is_measured_again_with_more_repeats() -> None:
    choices = space(0)
    s = TaskSearch(task("a"), choices)
    s.add(
        [
            measured(choices[0], 2.0, repeats=3),
            measured(choices[1], 1.0),
            measured(choices[2], 1.05),
            measured(choices[3], 1.5),
        ]
    )
    again = [r for r in s.requests(BATCH) if r.choice in choices[:4]]
    assert [r.choice for r in again] == [choices[1], choices[2]]
    assert all(r.repeats == 3 and r.limit == 3.0 for r in again)


@pytest.mark.family("cases")
@pytest.mark.parametrize("status", ["crash", "hang", "wrong", "build"])
def test_a_failure_is_never_best_and_its_neighbours_are_less_wanted(status: str) -> None:
    choices = [Choice("t", (("a", 1 << k),)) for k in range(9)]
    s = TaskSearch(task("a"), choices)
    s.add([measured(choices[0], 1.0), measured(choices[4], 0.9), measured(choices[8], 0.0, status=status)])
    assert s.best is not None and s.best.choice == choices[4]
    assert s.failures == 1
    s._fit()
    assert s.surrogate.mean[7] > s.surrogate.mean[3]
    s.add([measured(choices[4], 0.0, status="wrong")])  # once is enough
    assert s.best is not None and s.best.choice == choices[0]


def test_a_task_of_which_nothing_works_is_given_up() -> None:
    choices = space(0)
    s = TaskSearch(task("a"), choices)
    s.add([measured(c, 0.0, status="crash") for c in choices[: HOPELESS - 1]])
    assert s.done() == ""
    s.add([measured(choices[HOPELESS], 0.0, status="build")])
    assert s.done() == "no schedule works"


def test_it_ends_when_nothing_is_to_be_gained() -> None:
    choices = space(1)
    truth = Landscape(1)
    s = TaskSearch(task("a"), choices)
    while not s.done():
        s.add([measured(c, truth(c)) for c in s.propose(BATCH)])
    assert s.done() == "predicted gain below 1 %"
    assert s.trials < len(choices) / 3
    assert s.best is not None and s.best.seconds <= min(map(truth, choices)) / 0.95


# --- a model ----------------------------------------------------------------------------------------------------------

CALLS = {"big": 3, "small": 1}
SCALES = {"big": 1e-3, "small": 1e-5}
TASKS = [(task(n), CALLS[n]) for n in CALLS]
LANDSCAPES = {f"{n}-key": Landscape(k, SCALES[n]) for k, n in enumerate(CALLS)}


def seconds_of(r: Request) -> float:
    return LANDSCAPES[r.task.key](r.choice)


def choices_of(t: Task) -> Sequence[Choice]:
    return space(5)


def least(t: Task) -> float:
    return min(map(LANDSCAPES[t.key], choices_of(t)))


PLAN = Plan(choices_of)


@pytest.mark.slow
def test_a_model_is_tuned_and_its_log_says_so(tmp_path: Path) -> None:
    events: list[Event] = []
    with Log.open(tmp_path / "l.jsonl") as log:
        result = search(TASKS, FakeRunner(seconds_of), log, 20, replace(PLAN, callbacks=[events.append]))
    again = read(tmp_path / "l.jsonl")
    assert set(again.tasks) == {t.key for t, _ in TASKS}
    assert sum(map(len, again.trials.values())) == result.trials == sum(len(o.points) for o in result.outcomes)
    for o in result.outcomes:
        assert o.choice is not None and again.winners()[o.task.key] == o.choice
        assert LANDSCAPES[o.task.key](o.choice) <= (
            least(o.task) / 0.93 if o.task.name == "big" else LANDSCAPES[o.task.key](o.base)
        )
        assert any(t.choice == o.choice and t.checked for t in again.trials[o.task.key])
    assert result.speedup > 1.1
    kinds = [e.kind for e in events]
    assert (
        kinds[0] == "begin"
        and kinds[-1] == "end"
        and kinds.count("trial") == result.trials
        and kinds.count("winner") == 2
    )
    assert events[-1].progress.speedup > 1 and events[-1].progress.done == 2


@pytest.mark.slow
def test_the_trials_go_where_the_time_is() -> None:
    result = search(TASKS, FakeRunner(seconds_of), Log(), 20, replace(PLAN, trials=48))
    counts = {o.task.name: len(o.points) for o in result.outcomes}
    assert counts["big"] > 2 * counts["small"]
    assert result.reason == "all trials are done"


class Timed(FakeRunner):
    """Takes `step` seconds of a clock of its own for each trial, and gives them in any order. What it says after
    `quiet` trials of one final takes for ever.
    """

    def __init__(self, step: float, seed: int | None = None, quiet: int | None = None, **more: Any) -> None:
        super().__init__(seconds_of, **more)
        self.now, self.step, self.quiet = 0.0, step, quiet
        self.order = None if seed is None else np.random.default_rng(seed)

    def measure(self, requests: Sequence[Request]) -> Iterator[Trial]:
        if self.order is not None:
            requests = [requests[k] for k in self.order.permutation(len(requests))]
        final = all(r.check and r.limit is None for r in requests) and requests[0].repeats == FINAL_REPEATS
        for k, t in enumerate(super().measure(requests)):
            self.now += 1e9 if final and k == self.quiet else self.step
            yield t


def test_the_budget_is_kept() -> None:
    runner = Timed(0.01)
    result = search(TASKS, runner, Log(), 0.6, replace(PLAN, clock=lambda: runner.now))
    assert 0.4 < runner.now <= 0.6 * (1 + OVERTIME) + 0.01
    assert result.reason == "the budget ran out"
    assert all(o.choice is not None for o in result.outcomes)  # time for finals was kept


@pytest.mark.family("cases")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("quiet", range(6))
@pytest.mark.parametrize("lost", [False, True])
def test_nothing_wins_without_the_default_beside_it(seed: int, quiet: int, lost: bool) -> None:
    """Wherever a final is broken off, and whatever a worker takes with it."""
    default = choices_of(TASKS[0][0])[0]
    fates = np.random.default_rng(seed)

    def fate(r: Request) -> str:
        return "lost" if lost and r.repeats == FINAL_REPEATS and fates.random() < 0.5 else "ok"

    log, runner = Log(), Timed(0.01, seed, quiet, fate=fate)
    result = search(TASKS, runner, log, 2.0, replace(PLAN, clock=lambda: runner.now))
    for o in result.outcomes:
        assert o.seconds <= o.default * 1.05, o.verdict
        held = log.decided().get(o.task.key)
        assert held is None or held.choice == default or (held.baseline is not None and held.seconds < held.baseline), (
            o.verdict
        )


def planted(status: str) -> Result:
    """The fastest third of all schedules fails."""
    by_time = {t.key: sorted(choices_of(t), key=LANDSCAPES[t.key]) for t, _ in TASKS}
    bad = {key: set(order[: len(order) // 3]) - {choices_of(TASKS[0][0])[0]} for key, order in by_time.items()}

    def fate(r: Request) -> str:
        fails = r.choice in bad[r.task.key] and (r.check or status != "wrong")
        return status if fails else "ok"

    log = Log()
    result = search(TASKS, FakeRunner(seconds_of, fate=fate), log, 20, replace(PLAN, trials=100))
    for o in result.outcomes:
        assert o.choice not in bad[o.task.key]
        assert log.winners().get(o.task.key) not in bad[o.task.key]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("status", ["crash", "hang", "build"])
def test_what_fails_never_wins(status: str) -> None:
    result = planted(status)
    assert result.failures > 0
    assert all(o.choice is not None for o in result.outcomes)


@pytest.mark.slow
def test_what_computes_wrongly_never_wins_however_fast_it_is() -> None:
    planted("wrong")


def test_the_default_wins_ties() -> None:
    log = Log()
    result = search(TASKS, FakeRunner(lambda r: 1e-3, noise=0.01), log, 5, replace(PLAN, trials=60))
    default = choices_of(TASKS[0][0])[0]
    assert [o.choice for o in result.outcomes] == [default, default]
    assert set(log.winners().values()) == {default}
    assert result.speedup == 1.0


def test_a_default_that_is_best_is_kept() -> None:
    choices = choices_of(TASKS[0][0])
    log = Log()
    search(TASKS, FakeRunner(lambda r: 1e-3 if r.choice == choices[0] else 2e-3), log, 5, replace(PLAN, trials=60))
    assert set(log.winners().values()) == {choices[0]}


def test_ahead_means_beyond_a_tie_and_most_of_the_time() -> None:
    assert ahead([0.9, 0.9, 0.9], [1.0, 1.0, 1.0])
    assert not ahead([1 - TIE / 2] * 3, [1.0, 1.0, 1.0])
    assert not ahead([0.5, 0.9, 1.2, 1.2, 0.9], [1.0, 0.8, 1.0, 1.0, 1.0])


def test_the_last_winner_competes_again(tmp_path: Path) -> None:
    t = TASKS[0][0]
    fastest = min(choices_of(t), key=LANDSCAPES[t.key])
    log = Log()
    log.append(t)
    log.append(Winner(t.key, fastest, 1e-3, at=1.0))
    result = search(TASKS[:1], FakeRunner(seconds_of), log, 5, replace(PLAN, trials=10))
    assert result.outcomes[0].choice == fastest
    assert "last winner" in {p.why for p in result.outcomes[0].points}


@pytest.mark.slow
def test_stopping_ends_with_finals() -> None:
    seen: list[Event] = []
    log = Log()
    result = search(
        TASKS, FakeRunner(seconds_of), log, 60, replace(PLAN, callbacks=[seen.append], stopped=lambda: len(seen) > 20)
    )
    assert result.reason == "stopped"
    assert set(log.winners()) == {t.key for t, _ in TASKS}


def test_an_interrupt_leaves_the_log_whole(tmp_path: Path) -> None:
    def stop(e: Event) -> None:
        if e.progress.trials == 13:
            raise KeyboardInterrupt

    with Log.open(tmp_path / "l.jsonl") as log, pytest.raises(KeyboardInterrupt):
        search(TASKS, FakeRunner(seconds_of), log, 60, replace(PLAN, callbacks=[stop]))
    assert sum(map(len, read(tmp_path / "l.jsonl").trials.values())) == 13


@pytest.mark.slow
def test_a_model_learns_from_the_trials() -> None:
    class Learner:
        def __init__(self) -> None:
            self.rows: list[int] = []

        def predict(self, x: Array) -> Array:
            return -x[:, 0]

        def update(self, x: Array, seconds: Array, groups: Array) -> None:
            assert len(x) == len(seconds) == len(groups)
            self.rows.append(len(x))

    def features(t: Task, choices: Sequence[Choice]) -> Array:
        return np.array([[float(len(str(c)))] for c in choices], np.float32)

    model = Learner()
    search(TASKS, FakeRunner(seconds_of), Log(), 20, replace(PLAN, model=model, features=features, trials=64))
    assert model.rows == sorted(model.rows) and model.rows[-1] > 20


@pytest.mark.slow
def test_resuming_measures_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    with Log.open(path) as log:
        search(TASKS, FakeRunner(seconds_of), log, 20, replace(PLAN, trials=24))
    before = {(t.task, t.choice) for trials in read(path).trials.values() for t in trials if len(t.seconds) > 1}
    runner = FakeRunner(seconds_of)
    with Log.open(path) as log:
        search(TASKS, runner, log, 20, replace(PLAN, trials=24, resume=True))
    again = {(r.task.key, r.choice) for r in runner.asked if not r.check}
    assert again and not again & before


@pytest.mark.slow
def test_lost_trials_are_tried_again_but_not_for_ever() -> None:
    result = search(TASKS, FakeRunner(seconds_of, fate=lambda r: "lost"), Log(), 0.3, PLAN)
    assert all(o.choice is None for o in result.outcomes)


# --- sudden death -----------------------------------------------------------------------------------------------------

CHILD = """
import sys
sys.path.append(sys.argv[2])
from support.landscape import FakeRunner
from test_search import TASKS, PLAN, seconds_of
from dataclasses import replace
from dnnc.autotune.log.file import Log
from dnnc.autotune.search.search import search

def tell(e):
    if e.kind == "trial":
        print(e.task.key, len(log.trials[e.task.key]), flush=True)

log = Log.open(sys.argv[1])
print("ready", flush=True)
search(TASKS, FakeRunner(seconds_of, wait=0.002), log, 600, replace(PLAN, resume=True, callbacks=[tell], trials=100000))
"""


def killed(path: Path, trials: int, wait: float) -> dict[str, int]:
    """Kill a search after it told of so many trials: how many of each task it had told of."""
    here = str(Path(__file__).parent)
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path), here], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    lines = [child.stdout.readline() for _ in range(trials)]
    time.sleep(wait)
    os.kill(child.pid, signal.SIGKILL)
    lines += child.stdout.read().splitlines(keepends=True)
    child.wait()
    return {key: int(n) for key, n in (line.split() for line in lines if line.endswith("\n"))}


def check_kills(path: Path, times: int) -> None:
    rng = np.random.default_rng(0)
    known: dict[str, int] = {}
    for _ in range(times):
        told = killed(path, int(rng.integers(1, 20)), rng.uniform(0, 0.03))
        counts = {key: len(trials) for key, trials in read(path).trials.items()}
        assert all(counts[key] >= n for key, n in {**known, **told}.items())
        known = counts
    assert sum(known.values()) > 2 * times
    with Log.open(path) as log:  # what is left is a log to go on with
        result = search(TASKS, FakeRunner(seconds_of), log, 5, replace(PLAN, resume=True, trials=16))
    assert all(o.choice is not None for o in result.outcomes)
    assert all(len(read(path).trials[key]) >= n for key, n in known.items())


@pytest.mark.slow
def test_kill_loses_no_finished_trial(tmp_path: Path) -> None:
    check_kills(tmp_path / "l.jsonl", 2)


@pytest.mark.slow
def test_ten_kills_at_random_moments_lose_no_finished_trial(tmp_path: Path) -> None:
    check_kills(tmp_path / "l.jsonl", 10)
