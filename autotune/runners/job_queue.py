"""Jobs that wait for devices: each device goes on with the tasks whose operands it holds.

In: bundles of jobs, as they are built. Out: batches for devices. Making a task's operands ready takes a device as long
as measuring some schedules, so that a task is begun by a second device only where enough of it waits. Jobs of slow
kernels take a hundred times as long as others: a task's jobs so far say how many are enough, and few go out at a time.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from dnnc.autotune.runners.device_runner import Job
from dnnc.backends.runtime.operands import HELD

BATCH = 8  # kernels that a device's process has at a time
PACE = 0.03  # seconds of a job of a task that nobody has measured yet
MUCH, BRIEF = (
    0.5,
    0.25,
)  # seconds of waiting jobs from which another device is to help; seconds of a batch at most, where it is several jobs


class Ready:
    """The jobs that wait, for a number of devices. `put`, `take` and `end` may come from any thread."""

    def __init__(self, devices: int) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[list[Job]]] = {}  # by task, in the order in which tasks came
        self._held: list[deque[str]] = [deque(maxlen=HELD) for _ in range(devices)]
        self._paces: dict[str, float] = {}  # seconds of a job, by task
        self._under_way: dict[int, tuple[str, int, float]] = {}  # of each device: task, jobs, and when they were taken
        self._ended = False

    def put(self, bundle: list[Job]) -> None:
        """Jobs of one task that stay together."""
        with self._changed:
            self._waiting.setdefault(bundle[0].request.task.key, deque()).append(bundle)
            self._changed.notify_all()

    def end(self) -> None:
        """Nobody is to take any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def begin(self) -> None:
        """Forget what waits: another measurement begins. Devices still hold what they held."""
        self._waiting.clear()
        self._under_way.clear()
        self._ended = False

    def gone(self, device: int) -> None:
        """A device will not come back: its tasks are anybody's."""
        with self._changed:
            self._held[device].clear()
            self._changed.notify_all()

    def take(self, device: int) -> list[Job] | None:
        """Return a task's jobs for a device that is done, None at the end. Wait where others' tasks have few jobs."""
        with self._changed:
            if device in self._under_way:
                task, jobs, since = self._under_way.pop(device)
                self._paces[task] = max(time.perf_counter() - since, 1e-6) / jobs
                self._changed.notify_all()  # there may be enough to help with now
            while True:
                if self._ended:
                    return None
                key = self._for(device)
                if key is not None:
                    return self._taken(device, key)
                self._changed.wait()

    def _count(self, key: str) -> int:
        return sum(map(len, self._waiting[key]))

    def _seconds(self, key: str) -> float:
        """Of all jobs of a task that wait."""
        return self._count(key) * self._paces.get(key, PACE)

    def _for(self, device: int) -> str | None:
        """The device's next task: one it holds, an unheld one, or another's with much waiting."""
        mine = next((k for k in reversed(self._held[device]) if k in self._waiting), None)
        if mine is not None:
            return mine
        held = {k for keys in self._held for k in keys}
        free = next((k for k in self._waiting if k not in held), None)
        if free is not None or not self._waiting:
            return free
        most = max(self._waiting, key=self._seconds)
        return most if self._seconds(most) >= MUCH else None

    def _taken(self, device: int, key: str) -> list[Job]:
        bundles, held = self._waiting[key], self._held[device]
        sharing = sum(key in keys for keys in self._held) + (key not in held)
        most = min(BATCH, -(-self._count(key) // sharing), int(BRIEF / self._paces.get(key, PACE)))
        batch = bundles.popleft()
        while bundles and len(batch) + len(bundles[0]) <= most:
            batch = batch + bundles.popleft()
        if not bundles:
            del self._waiting[key]
        if key in held:
            held.remove(key)
        held.append(key)
        self._under_way[device] = key, len(batch), time.perf_counter()
        return batch
