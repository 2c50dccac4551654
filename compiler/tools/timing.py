"""How engines are compared: blocks of calls in turns, percentiles, ratios of medians."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

QUICK = (
    1e-3  # seconds: a model below is called at least QUICK_CALLS times per engine and repeat, others SLOW_CALLS times
)
QUICK_CALLS, SLOW_CALLS, MOST_CALLS = 200, 10, 2000
BLOCK_SECONDS, BLOCK_CALLS = 0.02, 5  # a block of one engine's calls: so long at least, and so many
PAUSE, LONGEST_PAUSE = 0.005, 0.25  # seconds between engines, see `settle`
PERCENTILES = (50, 90, 99)

Call = Callable[[], Any]
Times = list[list[list[float]]]  # [repeat][engine][call] in seconds


def alternate(calls: Sequence[Call], repeats: int, budget: float, tell: Callable[[str], None]) -> Times:
    """Time engines in turns within `budget` seconds. The order within a round changes from round to round."""
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
                settle()
                _block(calls[i], blocks[i], times[i])
        first += 1
    return times


def settle() -> None:
    """Wait at least PAUSE, and until no thread of this process runs any more. Pools spin while they wait for work, ONNX
    Runtime's for 33 ms after a call: the engine that comes next would have one CPU less.
    """
    end = time.perf_counter() + LONGEST_PAUSE
    while True:
        used = time.process_time()
        time.sleep(PAUSE)
        if time.process_time() - used < PAUSE / 10 or time.perf_counter() > end:
            return


def _block(call: Call, count: int, times: list[float]) -> None:
    clock = time.perf_counter
    for _ in range(count):
        start = clock()
        call()
        times.append(clock() - start)


def percentiles(times: Times, engine: int) -> dict[str, float]:
    """{"p50": ms, ..., "min": ms} over all calls of an engine."""
    every = np.concatenate([repeat[engine] for repeat in times])
    return {f"p{q}": float(np.percentile(every, q)) * 1e3 for q in PERCENTILES} | {"min": float(every.min()) * 1e3}


def ratios(times: Times, ours: int, peer: int) -> list[float]:
    """For each repeat the median time of a peer over ours: above 1 we are ahead."""
    return [float(np.median(repeat[peer])) / float(np.median(repeat[ours])) for repeat in times]
