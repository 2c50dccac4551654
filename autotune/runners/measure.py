"""Runner of one host: parallel builder processes, a measuring process per device, safe from schedules.

In: requests. Out: a trial for each, as they come. Where compiling disturbs what is measured, on a CPU, batches are
built and measured in turn; for GPUs building goes on meanwhile, and devices go on with their tasks (`ready`).

`python -m dnnc.autotune.search.inspect graph.txt --target cuda` prints times of a graph's schedules.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from typing import Any, Union

from dnnc.autotune.log.record import plain_choice
from dnnc.autotune.runners.device_runner import Job, Station
from dnnc.autotune.runners.job_queue import Ready
from dnnc.autotune.runners.subprocess_runner import Child, Closed, Ended, Late
from dnnc.autotune.runners.worker import FACTORY, machine_by
from dnnc.autotune.search.task import Task
from dnnc.autotune.search.trial import OK, Request, Trial
from dnnc.backends.base import Built
from dnnc.backends.registry import backend_class
from dnnc.backends.runtime.frames import cpu_count
from dnnc.ir.errors import TuneError
from dnnc.ir.target import parse_target as parse_words

BUILD_TIMEOUT = 6  # times the time-out of a repeat
ATTEMPTS = 2  # a builder may have been ended for its memory; what ends two of them is at fault
MOST_BUILDERS = 32
FEWEST = 8  # requests that are built, then measured
Made = Union[tuple[Built, str], str]  # code and the text of its kernel, or what is wrong


class ProcessRunner:
    """Measures in processes of this host; see `dnnc.autotune.search.trial.Runner`. It can be used again after `close`.

    Args:
        target: what to measure on, such as "llvm -threads=2" or "cuda".
        devices: numbers of the GPUs to use; default: the target's own. A CPU is one device.
        builders: processes that compile; default: one for each CPU, less one for each GPU, whose processes need theirs.
        timeout: seconds of one repeat after which a kernel counts as hanging.
        factory: "module:function" that makes the Machine of a target.

    Raises:
        TargetError: the target is none. Whether its device is here shows when `measure` starts: TuneError.
    """

    def __init__(
        self,
        target: str,
        devices: Sequence[int] | None = None,
        builders: int | None = None,
        timeout: float = 10.0,
        factory: str = FACTORY,
    ) -> None:
        self.machine = machine_by(factory, target)
        self.timeout = timeout
        targets = (
            [target]
            if devices is None or self.machine.limits.kind == "cpu"
            else [at_device(target, d) for d in devices]
        )
        spare = min(cpu_count() - (0 if self.machine.exclusive else len(targets)), MOST_BUILDERS)
        self._measuring = [["measure", t, factory] for t in targets]
        self._building = [["build", self.machine.text, factory]] * max(builders or spare, 1)
        self._stations: list[Station] = []
        self._ready = Ready(len(self._measuring))
        self._builders: list[Child] = []
        self._known: dict[tuple[str, str], Trial] = {}

    def __enter__(self) -> ProcessRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, also from another thread while `measure` runs, which then ends."""
        stations, self._stations = self._stations, []
        self._ready.end()
        self._ready = Ready(len(self._measuring))
        builders, self._builders = self._builders, []
        for child in [*(s.child for s in stations), *builders]:
            child.close()

    def measure(self, requests: Sequence[Request]) -> Iterator[Trial]:
        """One Trial for each request, as they come.

        Code that was measured before gets the same figures, if they are enough and checked where asked. TuneError: a
        task is for another target, or the device is not here.
        """
        for r in requests:
            if r.task.setting.target != self.machine.text:
                raise TuneError(
                    f"task {r.task.name} is for {r.task.setting.target!r}, and this runner measures on "
                    f"{self.machine.text!r}"
                )
        self._open()
        try:
            yield from self._alternating(requests) if self.machine.exclusive else self._streaming(requests)
        except Closed:
            self.close()
        except (
            BaseException
        ):  # Control-C, or a caller that wants no more: processes would answer to what nobody asks any more
            self.close()
            raise

    def _open(self) -> None:
        if not self._stations:
            self._stations = [Station(Child(a), self.timeout, dnnc_version()) for a in self._measuring]
            self._builders = [Child(a) for a in self._building]

    def _alternating(self, requests: Sequence[Request]) -> Iterator[Trial]:
        """Build some, then measure these, and so on."""
        (station,) = self._stations
        station.start()
        size = max(FEWEST, 4 * len(self._builders))
        for k in range(0, len(requests), size):
            some = requests[k : k + size]
            book = _Book(self._known, self._trial, some)
            for request, made in self._built(some):
                yield from book.built(request, made)
            while bundles := book.bundles():
                for job, trial in station.measure([j for bundle in bundles for j in bundle]):
                    yield from book.measured(job, trial)

    def _built(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Made]]:
        """Every request with what the builders made of it."""
        todo, events = _filled(requests), queue.SimpleQueue[Any]()
        crew = self._builders[: len(requests)]
        threads = [_thread(_build_all, child, todo, events, self.timeout) for child in crew]
        for _ in requests:
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            yield event
        for t in threads:
            t.join()

    def _streaming(self, requests: Sequence[Request]) -> Iterator[Trial]:
        """Build all, and measure what is built on the devices, which go on with tasks that they have begun."""
        todo, events, ready = _filled(requests), queue.SimpleQueue[Any](), self._ready
        ready.begin()
        threads = [_thread(_build_all, child, todo, events, self.timeout) for child in self._builders[: len(requests)]]
        threads += [_thread(_measure_all, station, k, ready, events) for k, station in enumerate(self._stations)]
        book, left, alive = _Book(self._known, self._trial, requests), len(requests), len(self._stations)
        try:
            while left:
                event = events.get()
                trials: list[Trial] = []
                if isinstance(event, BaseException):
                    raise event
                if isinstance(event, _Gone):
                    alive -= 1
                    if not alive:
                        raise event.error
                    ready.gone(event.device)
                    book.fresh += [j.anew() for j in event.jobs]
                elif isinstance(event[0], Job):
                    trials = book.measured(*event)
                else:
                    trials = book.built(*event)
                for bundle in book.bundles():
                    ready.put(bundle)
                left -= len(trials)
                yield from trials
        finally:
            ready.end()
        for t in threads:
            t.join()

    def _trial(self, request: Request, error: str, built: Built | None = None) -> Trial:
        """Of what was not built as it should be."""
        code, seconds = (built.digest, built.seconds) if built else ("", 0.0)
        where = self.machine.name, dnnc_version(), time.time()
        return Trial(request.task.key, request.choice, "build", (), error, code, False, seconds, *where)


@cache
def dnnc_version() -> str:

    return version("dnnc")


def at_device(target: str, number: int) -> str:
    """The target's text with another device's number; of a CPU as it is."""
    words = parse_words(target)
    return str(replace(words, device=number)) if backend_class(words.kind).numbered else target


def answers(trial: Trial, request: Request) -> bool:
    """Does a trial of the same code say what the request wants to know?"""
    if trial.status != OK:
        return trial.status != "lost"
    if request.check and not trial.checked:
        return False
    return len(trial.seconds) >= request.repeats or (request.limit is not None and trial.median > request.limit)


class _Book:
    """Requests that wait for code. `fresh`: unassigned jobs. Finalists of a task are compared on one device."""

    def __init__(
        self, known: dict[tuple[str, str], Trial], failed: Callable[..., Trial], requests: Sequence[Request]
    ) -> None:
        self.known, self.failed = known, failed
        self.fresh: list[Job] = []
        self._under_way: dict[tuple[str, str], list[tuple[Request, Built, str]]] = {}  # and who waits for the same code
        self._finalists = Counter(r.task.key for r in requests if r.check)  # that are not built yet

    def built(self, request: Request, made: Made) -> list[Trial]:
        """Take in a request's code; trials where that is all there is to it."""
        self._finalists[request.task.key] -= request.check
        return self._sorted(request, made)

    def _sorted(self, request: Request, made: Made) -> list[Trial]:
        if isinstance(made, str):
            return [self.failed(request, made)]
        code, text = made
        if code.spills:
            return [self.failed(request, f"{code.spills} bytes per thread do not fit into registers", code)]
        key = (request.task.key, code.digest)
        found = self.known.get(key)
        if found is not None and answers(found, request):
            return [replace(found, choice=request.choice, compile_seconds=code.seconds)]
        if key in self._under_way:
            self._under_way[key].append((request, code, text))
            return []
        self._under_way[key] = []
        self.fresh.append(Job(request, code, text))
        return []

    def measured(self, job: Job, trial: Trial) -> list[Trial]:
        """The trials of a job's request and of those that waited for it; who wants more than it says becomes a job."""
        key = (trial.task, trial.code)
        waiting = self._under_way.pop(key)
        self.known[key] = trial
        return [trial, *(t for w in waiting for t in self._sorted(w[0], w[1:]))]

    def bundles(self) -> list[list[Job]]:
        """The fresh jobs that may go out, which are under way from now on."""
        out = [j for j in self.fresh if not j.request.check or not self._finalists[j.request.task.key]]
        self.fresh = [j for j in self.fresh if j not in out]
        bundles: dict[Any, list[Job]] = defaultdict(list)
        for j in out:
            bundles[j.request.task.key if j.request.check else j].append(j)
        return list(bundles.values())


class _Gone:
    """A station that cannot go on, and the jobs that it leaves."""

    def __init__(self, device: int, jobs: list[Job], error: BaseException) -> None:
        self.device, self.jobs, self.error = device, jobs, error


def _filled(requests: Sequence[Request]) -> queue.SimpleQueue[Request]:
    """A queue of requests; those of one task next to each other, so that builders read each task once."""
    by_task: dict[str, list[Request]] = defaultdict(list)
    for r in requests:
        by_task[r.task.key].append(r)
    todo: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for r in (r for same in by_task.values() for r in same):
        todo.put(r)
    return todo


def _thread(work: Any, *args: Any) -> threading.Thread:
    t = threading.Thread(target=work, args=args, daemon=True)
    t.start()
    return t


def _build_all(child: Child, todo: queue.SimpleQueue[Request], events: queue.SimpleQueue[Any], timeout: float) -> None:
    """Build requests until none is left."""
    while True:
        try:
            request = todo.get_nowait()
        except queue.Empty:
            return
        try:
            events.put((request, _build(child, request.task, request, timeout)))
        except BaseException as e:  # to the thread that waits for it
            events.put(e)
            return


def _build(child: Child, task: Task, request: Request, timeout: float) -> Made:
    said = ""
    for _ in range(ATTEMPTS):
        try:
            question = {"op": "build", "task": task.as_json(), "choice": plain_choice(request.choice)}
            header, body = child.ask(question, b"", BUILD_TIMEOUT * timeout)
        except Late as e:
            return f"compiling takes too long: {e}"
        except Ended as e:
            said = str(e)
            continue
        if "error" in header:
            return str(header["error"])
        size = header["text"]
        return Built(header["symbol"], body[size:], header["facts"], header["spills"], header["seconds"]), body[
            :size
        ].decode()
    return f"it ends the process that compiles it ({said})"


def _measure_all(station: Station, device: int, ready: Ready, events: queue.SimpleQueue[Any]) -> None:
    """Measure what is ready until the end."""
    left = list[Job]()
    try:
        station.start()
        while (batch := ready.take(device)) is not None:
            left = list(batch)
            for done, trial in station.measure(batch):
                left.remove(done)
                events.put((done, trial))
    except (TuneError, Closed) as e:
        events.put(_Gone(device, left, e))
    except BaseException as e:  # to the thread that waits for it
        events.put(e)
