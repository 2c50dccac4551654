"""Who measures what: each request has one trial in the end, whatever becomes of the workers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dnnc.autotune.runners.dispatcher import LOSSES, Deal
from dnnc.autotune.search.task import Setting, Task
from dnnc.autotune.search.trial import OK, Request, Trial
from dnnc.passes.schedule.problem import Choice


def request(x: int, target: str = "a", task: str = "t", check: bool = False) -> Request:
    return Request(
        Task(f"{task}@{target}", task, "map", "", None, (), Setting(target), 0),
        Choice("fake", (("x", x),)),
        check=check,
    )


def trial(r: Request) -> Trial:
    return Trial(r.task.key, r.choice, OK, (1.0,))


def sizes(deal: Deal, workers: int = 1) -> list[int]:
    out = []
    while (parcel := deal.take("a", workers)) is not None:
        out.append(len(parcel.numbers))
    return out


# --- parcels ----------------------------------------------------------------------------------------------------------


def test_parcels_are_half_of_an_even_share() -> None:
    assert sizes(Deal([request(x) for x in range(20)]), workers=2) == [5, 4, 3, 2, 2, 1, 1, 1, 1]


def test_parcels_are_bounded() -> None:
    assert sizes(Deal([request(x) for x in range(40)], largest=8))[:3] == [8, 8, 8]


def test_a_worker_gets_requests_of_its_target_alone() -> None:
    deal = Deal([request(0, "a"), request(1, "b"), request(2, "a")])
    parcel = deal.take("b", 1)
    assert parcel is not None and deal.requests(parcel) == [request(1, "b")]
    assert deal.take("b", 1) is None and deal.take("c", 1) is None
    assert deal.waiting() == {"a"}


def test_finalists_of_a_task_stay_together() -> None:
    finalists = [request(x, task="final", check=True) for x in range(5)]
    others = [request(x) for x in range(6)]
    deal = Deal([r for pair in zip(finalists, others) for r in pair] + others[5:])
    parcels = []
    while (parcel := deal.take("a", 4)) is not None:
        parcels.append(deal.requests(parcel))
    assert [p for p in parcels if any(r.check for r in p)] == [finalists]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_trial_of_another_request_is_no_answer() -> None:
    deal = Deal([request(0)])
    parcel = deal.take("a", 1)
    assert parcel is not None
    assert deal.answered(parcel, [trial(request(7))]) == []
    assert deal.open == 1 and deal.waiting() == {"a"}, "the request waits for another worker"


def test_equal_requests_have_a_trial_each() -> None:
    deal = Deal([request(0), request(0)])
    parcel = deal.take("a", 1)
    second = deal.take("a", 1)
    assert parcel is not None and second is not None
    got = deal.answered(parcel, [trial(request(0)), trial(request(0))]) + deal.answered(second, [trial(request(0))])
    assert len(got) == 2 and deal.open == 0


# --- losses -----------------------------------------------------------------------------------------------------------


def test_what_a_lost_worker_held_comes_back_one_by_one_and_first() -> None:
    deal = Deal([request(x) for x in range(12)])
    parcel = deal.take("a", 1)
    assert parcel is not None and parcel.numbers == (0, 1, 2, 3, 4, 5)
    assert deal.lost(parcel, "power") == []
    again = [deal.take("a", 1) for _ in range(7)]
    assert [p.numbers for p in again if p] == [(0,), (1,), (2,), (3,), (4,), (5,), (6, 7, 8)]


def test_a_request_that_ends_its_workers_is_given_up() -> None:
    deal = Deal([request(0), request(1)])
    given_up: list[Trial] = []
    for k in range(LOSSES):
        parcel = deal.take("a", 1)
        assert parcel is not None and parcel.numbers == (0,)
        given_up += deal.lost(parcel, f"worker {k} died")
    (t,) = given_up
    assert t.status == "lost" and t.choice == request(0).choice and not t.ok
    assert t.error == "3 workers went while they measured it: worker 0 died; worker 1 died; worker 2 died"
    assert deal.open == 1


def test_requests_without_a_worker_say_which_there_are() -> None:
    deal = Deal([request(0, "a"), request(1, "b")])
    (t,) = deal.unserved(["a", "c"], "")
    assert t.task == request(1, "b").task.key and t.status == "lost"
    assert t.error == "no worker of the target 'b'; workers there are: a, c"
    (t,) = deal.unserved([], "host, process 7: killed")
    assert t.error == "no worker of the target 'a'; no worker is left at all; host, process 7: killed"
    assert deal.open == 0


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab"), st.booleans()), max_size=30),
    largest=st.integers(1, 8),
    fates=st.lists(st.sampled_from(["answer", "part", "die", "nothing"]), max_size=60),
)
@pytest.mark.parametrize("served", ["a", "ab"])
def test_each_request_has_one_trial(
    asked: list[tuple[int, str, bool]], largest: int, fates: list[str], served: str
) -> None:
    requests = [request(x, target, check=check) for x, target, check in asked]
    deal = Deal(requests, largest)
    trials = deal.unserved(served, "")
    steps = iter(fates)
    while deal.open:
        for target in served:
            parcel = deal.take(target, 2)
            if parcel is None:
                continue
            fate = next(steps, "answer")
            mine = [trial(r) for r in deal.requests(parcel)]
            trials += (
                deal.lost(parcel, "gone")
                if fate == "die"
                else deal.answered(parcel, {"answer": mine, "part": mine[1:], "nothing": []}[fate])
            )
    assert Counter((t.task, t.choice) for t in trials) == Counter((r.task.key, r.choice) for r in requests)
    assert all(t.ok == (t.status == OK) and bool(t.error) != t.ok for t in trials)
