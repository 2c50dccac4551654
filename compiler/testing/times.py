"""Tests of times, made so that busy neighbours do not decide the answer: noise only ever adds time, so one quiet round proves a bound."""

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
    """A test that is run again, up to `ROUNDS` times in all, where what it says by `quiet` does not hold. Other failures count at once."""

    @functools.wraps(test)
    def rounds(*args: Any, **kwargs: Any) -> None:
        for _ in range(ROUNDS - 1):
            try:
                return test(*args, **kwargs)
            except Disturbed:
                time.sleep(0.05)
        return test(*args, **kwargs)

    return rounds


def growth(make: Callable[[int], Any], work: Callable[[Any], object], small: int, large: int, ratio: float) -> tuple[float, float]:
    """Seconds of process time that `work(make(size))` takes for two sizes, each the least of several runs.

    The runs alternate, and end as soon as the larger takes less than `ratio` times the smaller. Garbage collection is off, for its cost
    follows what else the process holds.
    """
    least = {small: float("inf"), large: float("inf")}
    enabled = gc.isenabled()
    for _ in range(ROUNDS):
        for size in least:
            item = make(size)
            gc.collect()
            gc.disable()
            start = time.process_time()
            work(item)
            least[size] = min(least[size], time.process_time() - start)
            if enabled:
                gc.enable()
        if least[large] < ratio * least[small]:
            break
    return least[small], least[large]
