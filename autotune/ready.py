"""Jobs that wait for devices: each device goes on with the tasks whose operands it holds.

In: bundles of jobs, as they are built. Out: batches for devices. Making a task's operands ready takes a device as long as measuring some
twenty schedules, so that a task is begun by a second device only where enough of it waits.
"""

from __future__ import annotations

import threading
from collections import deque

from dnnc.autotune.station import Job

BATCH = 8  # kernels that a device's process has at a time
HELD = 3  # tasks whose operands a device's process keeps in memory
MANY = 16  # jobs of a task from which another device is to help


class Ready:
    """The jobs that wait, for a number of devices. `put`, `take` and `end` may come from any thread."""

    def __init__(self, devices: int) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[list[Job]]] = {}  # by task, in the order in which tasks came
        self._held: list[deque[str]] = [deque(maxlen=HELD) for _ in range(devices)]
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
        self._ended = False

    def gone(self, device: int) -> None:
        """A device will not come back: its tasks are anybody's."""
        with self._changed:
            self._held[device].clear()
            self._changed.notify_all()

    def take(self, device: int) -> list[Job] | None:
        """Jobs of one task, or None at the end. Waits where only tasks of other devices are there, and few jobs of these."""
        with self._changed:
            while True:
                if self._ended:
                    return None
                key = self._for(device)
                if key is not None:
                    return self._taken(device, key)
                self._changed.wait()

    def _count(self, key: str) -> int:
        return sum(map(len, self._waiting[key]))

    def _for(self, device: int) -> str | None:
        """The task that a device is to go on with: one that it holds, one that nobody does, or another's of which much waits."""
        mine = next((k for k in reversed(self._held[device]) if k in self._waiting), None)
        if mine is not None:
            return mine
        held = {k for keys in self._held for k in keys}
        free = next((k for k in self._waiting if k not in held), None)
        if free is not None or not self._waiting:
            return free
        most = max(self._waiting, key=self._count)
        return most if self._count(most) >= MANY else None

    def _taken(self, device: int, key: str) -> list[Job]:
        bundles, held = self._waiting[key], self._held[device]
        sharing = sum(key in keys for keys in self._held) + (key not in held)
        most = min(BATCH, -(-self._count(key) // sharing))
        batch = bundles.popleft()
        while bundles and len(batch) + len(bundles[0]) <= most:
            batch = batch + bundles.popleft()
        if not bundles:
            del self._waiting[key]
        if key in held:
            held.remove(key)
        held.append(key)
        return batch
