"""Tests of times: noise is forgiven where a quiet round comes, a wrong answer never."""

from __future__ import annotations

import pytest

from dnnc.testing.times import ROUNDS, Disturbed, in_a_quiet_round, quiet


def test_one_quiet_round_is_enough() -> None:
    rounds: list[int] = []

    @in_a_quiet_round
    def measures() -> None:
        rounds.append(1)
        quiet(len(rounds) == 3)

    measures()
    assert len(rounds) == 3


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
