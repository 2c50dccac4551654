"""Times on a GPU by events: calls are enqueued back to back, so Python's work is not measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

Call = Callable[[], object]
SECONDS = 0.05  # of calls in one block
WARM = 3  # calls before any is timed


def gpu_times(calls: Sequence[Call], repeats: int = 5) -> list[float]:
    """The median over blocks of the device's milliseconds per call, for each of `calls`, whose blocks take turns."""
    import cupy

    for call in calls:
        for _ in range(WARM):
            call()
    cupy.cuda.Device().synchronize()
    counts = [max(3, min(2000, int(SECONDS * 1e3 / max(_block(c, 3), 1e-3)))) for c in calls]
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for k, call in enumerate(calls):
            time.sleep(0.005)
            found[k].append(_block(call, counts[k]))
    return [statistics.median(f) for f in found]


def _block(call: Call, count: int) -> float:
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / count


def host_microseconds(call: Call, count: int = 200) -> float:
    """What a call costs the caller's thread when the device has nothing else to do: the median, in microseconds."""
    import cupy

    times = []
    for _ in range(count):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6
