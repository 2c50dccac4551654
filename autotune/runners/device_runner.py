"""A device and its measuring process: built kernels in, a trial for each out, whatever happens.

The kernels of a task take turns, one repeat each, so that a disturbance meets all alike; a reference kernel around each
repeat tells of it. Where the reference changed during a repeat, that is done again; where it drifted, times scale.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dnnc.autotune.log.record import plain_choice
from dnnc.autotune.runners.subprocess_runner import Child, Ended, Late
from dnnc.autotune.search.trial import OK, Request, Trial
from dnnc.backends.base import Built
from dnnc.ir.errors import TuneError

MOVED = 0.05  # change of the reference that counts
AGAIN = 2  # repeats that may be done again for it
CHECK_TIMEOUT = 120.0  # seconds: the gate computes a reference in NumPy


@dataclass(eq=False)
class Job:
    """A kernel to measure."""

    request: Request  # what is wanted of it
    built: Built  # the code
    text: str  # of the kernel
    seconds: list[float] = field(default_factory=list)
    gated: bool = False  # did the gate look at it?
    checked: bool = False  # and could it compare?
    failure: tuple[str, str] = ("", "")
    ready: bool = False  # is it loaded in the process that runs?
    crashes: int = 0

    @property
    def limit(self) -> float | None:
        return self.request.limit

    @property
    def over(self) -> bool:
        """Is it slower than the limit?"""
        return self.limit is not None and bool(self.seconds) and self.seconds[-1] > self.limit

    @property
    def done(self) -> bool:
        return bool(self.failure[0]) or len(self.seconds) >= self.request.repeats or self.over

    def fail(self, kind: str, message: str) -> None:
        self.failure = kind, message

    def anew(self) -> Job:
        """The same for another device."""
        return Job(self.request, self.built, self.text)


class Drift:
    """What the times of a reference kernel say of a measurement. `base`: seconds that it takes undisturbed."""

    def __init__(self, base: float) -> None:
        self.base = base

    @staticmethod
    def disturbed(before: float, after: float) -> bool:
        return max(before, after) > (1 + MOVED) * min(before, after)

    def scaled(self, seconds: float, before: float, after: float) -> float:
        """What it would have taken while the reference took `base`."""
        ratio = (before + after) / 2 / self.base
        return seconds / ratio if abs(ratio - 1) > MOVED else seconds


class Station:
    """Measures on one device, in a process that is started anew when a kernel has ended it.

    Args:
        child: of the role "measure".
        timeout: seconds of one repeat.
        version: of dnnc, for the trials.
    """

    def __init__(self, child: Child, timeout: float, version: str) -> None:
        self.child, self.timeout, self.version = child, timeout, version
        self.drift: Drift | None = None
        self._loaded: list[Job] = []

    def measure(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Trial]]:
        """A trial for each job. Jobs of one task take turns. TuneError where no process can be started."""
        for task in dict.fromkeys(j.request.task.key for j in jobs):
            group = [j for j in jobs if j.request.task.key == task]
            yield from self._together(group)

    def _together(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Trial]]:
        while any(not j.done and not j.crashes for j in jobs):
            for j in jobs:
                if not j.done and not j.crashes:
                    self._guarded(j, self._repeat)
        for j in jobs:
            if j.crashes and not j.done:  # another kernel may have damaged the process in which it ran
                self._restart()
                while not j.done:
                    self._guarded(j, self._repeat)
        for j in jobs:
            while j.request.check and not j.failure[0] and not j.gated:
                self._guarded(j, self._check)
        for j in jobs:
            self._drop(j)
            yield j, self.trial(j)

    def _guarded(self, job: Job, work: Callable[[Job], None]) -> None:
        """Do something with a job; what becomes of the process is put down to it."""
        try:
            self._load(job)
            if not job.failure[0]:
                work(job)
        except Late as e:
            self._lost()
            job.fail("hang", str(e))
        except Ended as e:
            self._crashed(job, str(e))

    def _crashed(self, job: Job, message: str) -> None:
        self._lost()
        job.crashes += 1
        if job.crashes > 1:
            job.fail("crash", message)

    def _lost(self) -> None:
        """The process is gone, and all that was loaded in it."""
        for j in self._loaded:
            j.ready = False
        self._loaded.clear()

    def _restart(self) -> None:
        self.child.kill()
        self._lost()

    def start(self) -> str:
        """The name of the machine; its process is started. TuneError where it cannot be."""
        self.child.start()
        if self.drift is None:
            self.drift = Drift(self.child.hello["reference"])
        return str(self.child.hello["ready"])

    def ask(self, job: Job, op: str, timeout: float, body: bytes = b"", **more: Any) -> dict[str, Any]:
        """An answer, or an empty one where the job has failed by it."""
        answer, _ = self.child.ask({"op": op, "id": id(job), **more}, body, timeout)
        if "error" not in answer:
            return answer
        if answer["kind"] == "crash":  # the device failed, and the process ends
            self.child.kill()
            raise Ended(answer["error"])
        job.fail(answer["kind"], answer["error"])
        return {}

    def _load(self, job: Job) -> None:
        self.start()
        if job.ready:
            return
        request, text = job.request, job.text.encode()
        more = {
            "task": request.task.as_json(),
            "choice": plain_choice(request.choice),
            "symbol": job.built.symbol,
            "facts": job.built.facts,
        }
        self.ask(job, "load", 6 * self.timeout, text + job.built.code, text=len(text), **more)  # operands are made, too
        job.ready = not job.failure[0]
        self._loaded.append(job)

    def _repeat(self, job: Job) -> None:
        """One repeat; again where the machine was disturbed meanwhile, and then the least disturbed one counts."""
        assert self.drift is not None
        found: list[tuple[float, float]] = []
        for _ in range(1 + AGAIN):
            answer = self.ask(job, "time", self.timeout, limit=job.limit)
            if not answer:
                return
            before, after = answer["before"], answer["after"]
            found.append((max(before, after) / min(before, after), self.drift.scaled(answer["seconds"], before, after)))
            if not self.drift.disturbed(before, after) or (job.limit is not None and found[-1][1] > job.limit):
                break
        job.seconds.append(min(found)[1])

    def _check(self, job: Job) -> None:
        answer = self.ask(job, "check", max(CHECK_TIMEOUT, self.timeout))
        job.gated, job.checked = True, bool(answer.get("checked"))

    def _drop(self, job: Job) -> None:
        if not job.ready:
            return
        job.ready = False
        self._loaded = [j for j in self._loaded if j is not job]
        try:
            self.child.ask({"op": "drop", "id": id(job)}, b"", self.timeout)
        except (Ended, Late, TuneError):  # nothing of it is left
            self._lost()

    def trial(self, job: Job) -> Trial:
        """What was found."""
        (kind, error), request = job.failure, job.request
        return Trial(
            request.task.key, request.choice, kind or OK, () if kind else tuple(job.seconds), error, job.built.digest,
            job.checked,
            job.built.seconds, str(self.child.hello.get("ready", "")), self.version, time.time(),
        )  # fmt: skip
