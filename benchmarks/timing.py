"""How engines are compared: blocks of calls in turns, ratios of medians, and what else the machine did meanwhile."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

QUICK = 1e-3  # seconds: a model below is called at least QUICK_CALLS times per engine and repeat, others SLOW_CALLS times
QUICK_CALLS, SLOW_CALLS, MOST_CALLS = 200, 10, 2000
BLOCK_SECONDS, BLOCK_CALLS = 0.02, 5  # a block of one engine's calls: so long at least, and so many
PAUSE = 0.005  # between engines: threads that spin while they wait for work would take the next engine's CPU
PERCENTILES = (50, 90, 99)

Call = Callable[[], Any]
Times = list[list[list[float]]]  # [repeat][engine][call] in seconds


def alternate(calls: Sequence[Call], repeats: int, budget: float, tell: Callable[[str], None]) -> Times:
    """Time engines in turns; `budget` is seconds for all of it. The order within a round changes from round to round."""
    guesses = [_guess(c) for c in calls]
    counts = [_count(g, budget / repeats / len(calls)) for g in guesses]
    blocks = [min(n, max(BLOCK_CALLS, round(BLOCK_SECONDS / g))) for g, n in zip(guesses, counts)]
    times: Times = []
    gc.collect()
    gc.disable()
    try:
        for k in range(repeats):
            tell(f"timing {k + 1} of {repeats}")
            times.append(_repeat(calls, counts, blocks))
    finally:
        gc.enable()
    return times


def _guess(call: Call) -> float:
    """Seconds of a warm call."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _count(guess: float, seconds: float) -> int:
    least = QUICK_CALLS if guess < QUICK else SLOW_CALLS
    return max(least, min(int(seconds / guess), MOST_CALLS))


def _repeat(calls: Sequence[Call], counts: Sequence[int], blocks: Sequence[int]) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in calls]
    first = 0
    while any(len(t) < n for t, n in zip(times, counts)):
        for k in range(len(calls)):
            i = (first + k) % len(calls)
            if len(times[i]) < counts[i]:
                time.sleep(PAUSE)
                _block(calls[i], blocks[i], times[i])
        first += 1
    return times


def _block(call: Call, count: int, times: list[float]) -> None:
    clock = time.perf_counter
    for _ in range(count):
        start = clock()
        call()
        times.append(clock() - start)


# --- figures ------------------------------------------------------------------------------------------------------------------


def percentiles(times: Times, engine: int) -> dict[str, float]:
    """{"p50": ms, ..., "min": ms} over all calls of an engine."""
    every = np.concatenate([repeat[engine] for repeat in times])
    return {f"p{q}": float(np.percentile(every, q)) * 1e3 for q in PERCENTILES} | {"min": float(every.min()) * 1e3}


def ratios(times: Times, ours: int, peer: int) -> list[float]:
    """For each repeat the median time of a peer over ours: above 1 we are ahead."""
    return [float(np.median(repeat[peer])) / float(np.median(repeat[ours])) for repeat in times]


def geometric_mean(numbers: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(numbers))))


# --- neighbours ---------------------------------------------------------------------------------------------------------------


@dataclass
class Neighbours:
    """How much CPU other processes used: `cores()` since the object was made. None where the system does not tell."""

    start: float = 0.0
    own: float = 0.0
    busy: float | None = None

    def __post_init__(self) -> None:
        self.start, self.own, self.busy = time.perf_counter(), _own_seconds(), _busy_seconds()

    def cores(self) -> float | None:
        busy = _busy_seconds()
        if busy is None or self.busy is None:
            return None
        others = (busy - self.busy) - (_own_seconds() - self.own)
        return max(others / (time.perf_counter() - self.start), 0.0)


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _busy_seconds() -> float | None:
    """CPU seconds that all processes have used on all CPUs since the system started."""
    try:
        user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
