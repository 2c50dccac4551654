"""Which device measures what: tasks stay where their operands are, and others help where much waits."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dnnc.autotune.runners import job_queue as module
from dnnc.autotune.runners.job_queue import BATCH, HELD, MUCH, PACE, Ready

MANY = math.ceil(MUCH / PACE)  # jobs of a task that nobody has measured, from which others help


def jobs(task: str, count: int) -> list[Any]:
    """Stand-ins, of which only the task is looked at."""
    return [SimpleNamespace(request=SimpleNamespace(task=SimpleNamespace(key=task)), number=k) for k in range(count)]


def fill(ready: Ready, **counts: int) -> None:
    for task, n in counts.items():
        for j in jobs(task, n):
            ready.put([j])


def taken(ready: Ready, device: int) -> tuple[str, int]:
    batch = ready.take(device)
    assert batch is not None and len({j.request.task.key for j in batch}) == 1
    return batch[0].request.task.key, len(batch)


def test_a_device_goes_on_with_its_task() -> None:
    ready = Ready(2)
    fill(ready, a=BATCH + 2, b=BATCH + 2)
    assert taken(ready, 0) == ("a", BATCH)
    assert taken(ready, 1) == ("b", BATCH)
    assert taken(ready, 1) == ("b", 2)
    assert taken(ready, 0) == ("a", 2)


def test_jobs_come_in_order_and_bundles_stay_whole() -> None:
    ready = Ready(1)
    first, second = jobs("a", 3), jobs("a", BATCH)
    ready.put(first)
    ready.put(second)
    assert ready.take(0) == first  # both are more than a batch
    assert ready.take(0) == second


def test_others_help_where_much_waits() -> None:
    ready = Ready(2)
    fill(ready, a=BATCH + MANY)
    assert taken(ready, 0) == ("a", BATCH)
    assert taken(ready, 1) == ("a", BATCH)
    left = MANY - BATCH
    assert taken(ready, 1) == ("a", -(-left // 2)), "a task that two devices hold is shared"


def test_slow_kernels_go_out_one_by_one_and_others_help(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    ready = Ready(2)
    fill(ready, a=BATCH + 3)
    assert taken(ready, 0) == ("a", BATCH)
    now[0] += BATCH * MUCH  # each of them took that long
    assert taken(ready, 0) == ("a", 1)
    assert taken(ready, 1) == ("a", 1), "two jobs that take long are enough"


def test_others_wait_where_little_does() -> None:
    ready = Ready(2)
    fill(ready, a=BATCH + 3)
    assert taken(ready, 0) == ("a", BATCH)
    found: list[Any] = []
    helper = threading.Thread(target=lambda: found.append(ready.take(1)))
    helper.start()
    helper.join(0.05)
    assert helper.is_alive() and taken(ready, 0) == ("a", 3)
    ready.put(jobs("b", 1))
    helper.join(120)
    assert found[0][0].request.task.key == "b"


def test_a_device_forgets_what_it_held_long_ago() -> None:
    ready = Ready(2)
    for k in range(HELD + 1):
        fill(ready, **{f"t{k}": 1})
        assert taken(ready, 0) == (f"t{k}", 1)
    fill(ready, t0=1)
    assert taken(ready, 1) == ("t0", 1)


def test_the_tasks_of_a_device_that_is_gone_are_anybodys() -> None:
    ready = Ready(2)
    fill(ready, a=BATCH + 1)
    assert taken(ready, 0) == ("a", BATCH)
    ready.gone(0)
    assert taken(ready, 1) == ("a", 1)


def test_the_end_reaches_who_waits_and_is_over_when_another_begins() -> None:
    ready = Ready(1)
    found: list[Any] = []
    waits = threading.Thread(target=lambda: found.append(ready.take(0)))
    waits.start()
    ready.end()
    waits.join(120)
    assert found == [None] and ready.take(0) is None
    ready.begin()
    fill(ready, a=1)
    assert taken(ready, 0) == ("a", 1)
