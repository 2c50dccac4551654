"""Time goes to the tasks of which most of the model's time can be saved."""

from __future__ import annotations

import math

import pytest

from dnnc.autotune.search.scheduler import Entry, order, share
from dnnc.autotune.search.task_search import TaskSearch
from dnnc.autotune.search.trial import Trial
from support.landscape import space, task

CHOICES = space(0)


def entry(name: str, calls: int, seconds: float, cost: float = 0.1, measured: int = 4) -> Entry:
    """A task under way: so many of its schedules measured, each slower than the last by a little."""
    e = Entry(TaskSearch(task(name), CHOICES), calls)
    e.search.add(
        [
            Trial(f"{name}-key", c, "ok", (seconds * (1 + 0.1 * k),), code=str(c))
            for k, c in enumerate(CHOICES[:measured])
        ]
    )
    if measured:
        e.note(measured, cost * measured)
    return e


def names(entries: list[Entry]) -> list[str]:
    return [e.search.task.name for e in entries]


def test_unknown_tasks_come_first_one_request_each() -> None:
    known, new = entry("known", 100, 1e-2), [entry(f"new{k}", 1, 1.0, measured=0) for k in range(3)]
    assert names(order([known, *new])) == ["new0", "new1", "new2", "known"]
    assert [(e.search.task.name, n) for e, n in share([known, *new], 8, 8)] == [
        ("new0", 1),
        ("new1", 1),
        ("new2", 1),
        ("known", 5),
    ]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (entry("a", 1, 1e-3), entry("b", 1, 1e-4)),
        (entry("a", 9, 1e-3), entry("b", 1, 1e-3)),
        (entry("a", 1, 1e-3), entry("b", 1, 1e-3, cost=1.0)),
    ],
    ids=["longer", "more calls", "cheaper to measure"],
)
def test_what_saves_most_per_second_comes_first(a: Entry, b: Entry) -> None:
    assert names(order([b, a])) == ["a", "b"]
    assert a.rate > 0 and math.isfinite(a.rate)


def test_tasks_that_are_done_get_nothing() -> None:
    a, b = entry("a", 1, 1e-3), entry("b", 1, 1e-4)
    a.reason = "every schedule is measured"
    assert names([e for e, _ in share([a, b], 16, 8)]) == ["b"]


def test_progress_of_late_counts() -> None:
    a, b = entry("a", 1, 1e-3), entry("b", 1, 1e-3)
    a.past, b.past = [(0.0, 2e-3), (1.0, 1e-3)], [(0.0, 1e-3), (1.0, 1e-3)]
    assert a.rate > b.rate


def test_cost_is_that_of_late() -> None:
    e = entry("a", 1, 1e-3, cost=1.0)
    for _ in range(5):
        e.note(8, 0.8)
    assert 0.1 <= e.cost < 0.2
    assert e.spent == pytest.approx(4 + 5 * 0.8)
