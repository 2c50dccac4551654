"""Dealing requests to workers in parcels, again when a worker is lost, until each has one trial.

In: requests, and what becomes of workers. Out: parcels for workers, and one trial for each request. No process and no
network is known here, so that every order of losses can be tested in microseconds.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from dnnc.autotune.search.trial import Request, Trial

# workers that may go while they hold a request; the second and third hold it alone, so that a fatal one is found
LOSSES = 3


@dataclass(frozen=True)
class Parcel:
    """What one worker measures in one go: numbers of requests."""

    numbers: tuple[int, ...]


@dataclass
class _Held:
    """A request: how it stands, and the words of the workers that went with it."""

    request: Request
    losses: list[str] = field(default_factory=list)
    done: bool = False


class Deal:
    """The requests of one `measure`.

    Args:
        requests: what to measure. Those of one task that are to be checked stay in one parcel, as far as `largest`
            allows: finalists are compared with each other, and that is fair on one machine alone.
        largest: requests of one parcel.
    """

    def __init__(self, requests: Sequence[Request], largest: int = 16) -> None:
        self._held = [_Held(r) for r in requests]
        self._largest = largest
        self._queues: dict[str, deque[tuple[int, ...]]] = defaultdict(deque)  # of a target: requests that stay together
        for target, bundle in _bundles(requests, largest):
            self._queues[target].append(bundle)

    @property
    def open(self) -> int:
        """Requests without a trial."""
        return sum(not h.done for h in self._held)

    def waiting(self) -> set[str]:
        """Targets of the requests that no worker holds."""
        return {target for target, queue in self._queues.items() if queue}

    def requests(self, parcel: Parcel) -> list[Request]:
        return [self._held[k].request for k in parcel.numbers]

    def take(self, target: str, workers: int) -> Parcel | None:
        """What a worker of `target` is to measure next, None for nothing; `workers`: how many there are of it.

        Half of an even share of what is left, so that all end at about the same time; a lost request comes alone.
        """
        queue = self._queues[target]
        if not queue:
            return None
        left = sum(map(len, queue))
        size = min(self._largest, -(-left // (2 * workers)))
        numbers = queue.popleft()
        while (
            queue
            and not self._suspect(numbers)
            and len(numbers) + len(queue[0]) <= size
            and not self._suspect(queue[0])
        ):
            numbers += queue.popleft()
        return Parcel(numbers)

    def answered(self, parcel: Parcel, trials: Iterable[Trial]) -> list[Trial]:
        """Return a parcel's trials that match its requests. Missing ones are retried, as for a lost worker."""
        wanted: dict[object, list[int]] = defaultdict(list)
        for k in parcel.numbers:
            r = self._held[k].request
            wanted[r.task.key, r.choice].append(k)
        mine = []
        for t in trials:
            numbers = wanted[t.task, t.choice]
            if numbers:
                self._held[numbers.pop(0)].done = True
                mine.append(t)
        return mine + self.lost(parcel, "a worker gave no answer for it")

    def lost(self, parcel: Parcel, why: str) -> list[Trial]:
        """A worker is lost: retry its parcel's requests one by one. Return the trials given up."""
        given_up = []
        for k in reversed(parcel.numbers):  # back to where it was taken from, in the same order
            h = self._held[k]
            if h.done:
                continue
            h.losses.append(why)
            if len(h.losses) >= LOSSES:
                given_up.append(
                    self._give_up(
                        k, f"{LOSSES} workers went while they measured it: {'; '.join(dict.fromkeys(h.losses))}"
                    )
                )
            else:
                self._queues[h.request.task.setting.target].appendleft((k,))
        return given_up

    def unserved(self, served: Collection[str], why: str) -> list[Trial]:
        """Give up requests for targets without a worker; `why`: what is known of lost or missing workers."""
        given_up = []
        there = f"workers there are: {', '.join(sorted(set(served)))}" if served else "no worker is left at all"
        for target in sorted(self.waiting() - set(served)):
            error = f"no worker of the target {target!r}; {there}{'; ' if why else ''}{why}"
            given_up += [self._give_up(k, error) for bundle in self._queues.pop(target) for k in bundle]
        return given_up

    def _suspect(self, numbers: tuple[int, ...]) -> bool:
        return any(self._held[k].losses for k in numbers)

    def _give_up(self, number: int, error: str) -> Trial:
        held = self._held[number]
        held.done = True
        return Trial(held.request.task.key, held.request.choice, "lost", error=error, at=time.time())


def _bundles(requests: Sequence[Request], largest: int) -> Iterable[tuple[str, tuple[int, ...]]]:
    """(target, requests that stay together), in the order of their first ones."""
    together: dict[object, list[int]] = defaultdict(list)
    for k, r in enumerate(requests):
        together[r.task.key if r.check else k].append(k)
    for numbers in together.values():
        target = requests[numbers[0]].task.setting.target
        for at in range(0, len(numbers), largest):
            yield target, tuple(numbers[at : at + largest])
