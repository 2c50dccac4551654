"""Tests of times, made so that busy neighbours do not decide the answer: noise only ever adds time, so one quiet round
proves a bound.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

ROUNDS = 12


class Disturbed(AssertionError):
    """A round whose times are not those of an idle machine."""


def quiet(holds: bool, what: str = "") -> None:
    """Assert of times, in a test that is `in_a_quiet_round`, what an idle machine shows."""
    if not holds:
        raise Disturbed(what)


def in_a_quiet_round(test: Callable[..., None]) -> Callable[..., None]:
    """A test that is run again, up to `ROUNDS` times in all, where what it says by `quiet` does not hold. Other
    failures count at once.
    """

    @functools.wraps(test)
    def rounds(*args: Any, **kwargs: Any) -> None:
        for _ in range(ROUNDS - 1):
            try:
                return test(*args, **kwargs)
            except Disturbed:
                time.sleep(0.05)
        return test(*args, **kwargs)

    return rounds


def growth(
    make: Callable[[int], Any], work: Callable[[Any], object], small: int, large: int, ratio: float
) -> tuple[float, float]:
    """Seconds of process time that `work(make(size))` takes for two sizes, of the round in which the larger takes the
    least in units of the smaller.

    A round is the larger between two runs of the smaller, whose mean counts: neighbours and clocks change the speed of
    a core twofold from one second to the next, and the least times of many runs may be of different speeds. Rounds end
    as soon as the larger takes less than `ratio` times the smaller. Garbage collection is off, for its cost follows
    what else the process holds.
    """
    rounds: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        before, between, after = (_seconds(work, make(size)) for size in (small, large, small))
        rounds.append(((before + after) / 2, between))
        if between < ratio * rounds[-1][0]:
            break
    return min(rounds, key=lambda r: r[1] / r[0])


def _seconds(work: Callable[[Any], object], item: Any) -> float:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        work(item)
        return time.process_time() - start
    finally:
        if enabled:
            gc.enable()
