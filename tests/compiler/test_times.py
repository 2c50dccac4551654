"""Tests of times: noise is forgiven where a quiet round comes, a wrong answer never."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support import times
from support.times import ROUNDS, Disturbed, growth, in_a_quiet_round, quiet


@pytest.mark.slow
def test_one_quiet_round_is_enough() -> None:
    rounds: list[int] = []

    @in_a_quiet_round
    def measures() -> None:
        rounds.append(1)
        quiet(len(rounds) == 3)

    measures()
    assert len(rounds) == 3


@pytest.mark.slow
def test_what_never_holds_fails() -> None:
    rounds: list[int] = []

    @in_a_quiet_round
    def measures() -> None:
        rounds.append(1)
        quiet(False, "7 us")

    with pytest.raises(Disturbed, match="7 us"):
        measures()
    assert len(rounds) == ROUNDS


def test_a_wrong_answer_counts_at_once() -> None:
    rounds: list[int] = []

    @in_a_quiet_round
    def measures() -> None:
        rounds.append(1)
        assert len(rounds) == 2, "wrong"

    with pytest.raises(AssertionError, match="wrong"):
        measures()
    assert len(rounds) == 1


@pytest.mark.parametrize(("power", "rounds"), [(1, 2), (2, ROUNDS)])
def test_growth_is_told_on_a_core_whose_speed_changes(power: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first small run is at full speed: the least of all would be half of the others' time."""
    runs: list[int] = []

    def seconds(work: Callable[[int], object], size: int) -> float:
        runs.append(size)
        return 1e-3 * size**power * (1 if len(runs) == 1 else 2)

    monkeypatch.setattr(times, "_seconds", seconds)
    small, large = growth(lambda size: size, abs, 100, 200, 2.3)
    assert large == pytest.approx(small * 2**power) and len(runs) == 3 * rounds
