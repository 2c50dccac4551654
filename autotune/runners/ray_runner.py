"""Measures schedules on the machines of a Ray cluster: the extra `dnnc[ray]`.

In: requests. Out: one trial for each, whichever workers come and go. Here because Ray knows about machines, devices and
lost processes, and nothing about tuning: each device gets one actor, which holds a runner of its own (`ProcessRunner`),
so that what a schedule can do to a process stays in a child of the actor. Who may reach Ray can run code on it.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from types import TracebackType
from typing import Any

from dnnc.autotune.runners.dispatcher import Deal, Parcel
from dnnc.autotune.runners.measure import ProcessRunner
from dnnc.autotune.search.task import Task
from dnnc.autotune.search.trial import Request, Runner, Trial
from dnnc.backends.registry import backend_class, open_backend
from dnnc.ir.errors import TuneError, install
from dnnc.ir.target import Target, parse_target
from dnnc.passes.schedule.problem import Choice

START_SECONDS = 60.0  # until an actor has loaded dnnc; longer, and its resources are in use by others
GRACE_SECONDS = 5.0  # that the first worker waits for the others
REACH_SECONDS = 5.0
CLOSE_SECONDS = 3.0  # for runners to end their processes
PATIENCE_SECONDS = 180.0  # for one request, and as much again for every eight more; runners end what hangs long before
LARGEST_PARCEL = (
    32  # requests: enough to keep builders and a GPU busy together; half a minute of work at most goes with its worker
)


@dataclass(frozen=True)
class Outpost:
    """What a worker measures with."""

    target: str  # canonical text; requests of tasks with this target come here
    machine: str  # what it is: "znver5", "NVIDIA H200". Times of one target come from machines of one name alone.
    runner: Runner  # measures on the one device that the worker has


OpenOutpost = Callable[
    [str, int], Outpost
]  # (target as RayRunner got it, cores for building), in the worker; TargetError where it lacks the target


def open_outpost(target: str, cores: int) -> Outpost:
    """A ProcessRunner on the machine this runs on. TargetError: it does not run code for the target."""
    backend = open_backend(target)
    return Outpost(backend.text, backend.here(), ProcessRunner(backend.text, devices=(0,), builders=cores))


@dataclass(frozen=True)
class Place:
    """A device of the cluster: what Ray calls the machine, and the number of the device among those of the machine."""

    node: str
    host: str
    device: int


@dataclass
class Worker:
    """An actor that answered: where it is, what it measures, its process there, and what it does now."""

    place: Place
    target: str
    machine: str
    pid: int
    actor: Any

    def __str__(self) -> str:
        return f"{self.place.host}, device {self.place.device}, process {self.pid}"


@dataclass
class _Start:
    """An actor that has not answered yet, and until when that is no news."""

    place: Place
    actor: Any
    until: float
    late: bool = False


@dataclass(frozen=True)
class _Job:
    """A parcel that a worker has, of which deal, and until when it may take."""

    worker: Worker
    deal: Deal
    parcel: Parcel
    until: float


_NOBODY = "it has none with free cores (or GPUs, for cuda); start workers with `ray start --address=HOST:PORT`"


def places(node: dict[str, Any], targets: Sequence[Target]) -> Iterator[tuple[Place, Target, int, dict[str, float]]]:
    """(device, target to measure for, cores for building, what to reserve) of a machine as Ray describes it.

    One target a machine: building for a second one would disturb what is measured for the first. A worker reserves its
        share of the cores,
    so that nothing else that Ray runs disturbs it either.
    """
    if not node["Alive"]:
        return
    cores, gpus = int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))
    for target in targets:
        on_gpu = backend_class(target.kind).numbered
        count = gpus if on_gpu else min(cores, 1)
        for k in range(count):
            share = cores // count
            yield (
                Place(node["NodeID"], node["NodeManagerHostname"], k),
                target,
                max(share, 1),
                {"num_cpus": share, "num_gpus": int(on_gpu)},
            )
        if count:
            return


class RayRunner:
    """A Runner over a Ray cluster: one worker a GPU for "cuda", one a machine for "llvm", which gets all of its cores.

    The requests of a worker that goes, with its machine or alone, go to others of the same target, and another one
    takes its place where the machine is still there. Requests fail with "lost" where no worker of their target is left,
    or where they are what ends the workers. Machines that join the cluster are used from the next `measure` on.

    Args:
        target: of the workers, "llvm -threads=2" or "cuda", or several of these, the one to prefer on a machine that
            has both first. Machines
            may differ: a request goes to workers whose canonical target is that of its task.
        address: of the cluster: "host:6379"; "local": a new one of this machine alone, which ends with the runner;
            None: that of RAY_ADDRESS, or one that runs on this machine, or a new one. Ray that this process has started
            already is used, and left as it is.
        parcel: the most requests that a worker gets at once.
        start: seconds that workers may take to start; those that need longer are used once they are there.
        patience: seconds that a worker may take for one request, and again for every eight more, before it counts as
            lost.
        outpost: makes the outpost of a worker, there.

    Attributes:
        workers: those that there are.
        notes: why devices are not used, and which workers went.

    TuneError: Ray is not installed, the cluster is not reached, or no machine of it has the target.
    """

    def __init__(
        self,
        target: str | Sequence[str],
        address: str | None = None,
        *,
        parcel: int = LARGEST_PARCEL,
        start: float = START_SECONDS,
        patience: float = PATIENCE_SECONDS,
        outpost: OpenOutpost = open_outpost,
    ) -> None:
        texts = (target,) if isinstance(target, str) else tuple(target)
        self._targets = tuple(replace(parse_target(t), device=0) for t in texts)  # which device is Ray's to say
        self._parcel, self._start, self._patience, self._outpost = parcel, start, patience, outpost
        self.workers: list[Worker] = []
        self.notes: list[str] = []
        self._starting: dict[Any, _Start] = {}  # by what their hello comes as
        self._jobs: dict[Any, _Job] = {}  # by what their trials come as
        self._refused: set[Place] = set()  # devices that said why they cannot: asked once
        self._closed = False
        self._ray = _load()
        self._undo = _join(self._ray, address)
        try:
            self._muster()
            self._await_workers()
        except BaseException:  # Control-C
            self.close()
            raise

    def __enter__(self) -> RayRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def measure(self, requests: Sequence[Request]) -> Iterator[Trial]:
        """One Trial for each request, as they come, until `close`. TuneError where that was before."""
        if self._closed:
            raise TuneError("this RayRunner is closed; make another one")
        self._muster()
        deal = Deal(requests, self._parcel)
        while deal.open and not self._closed:
            self._hand_out(deal)
            yield from self._unserved(deal)
            if deal.open and not self._closed:
                yield from self._collect(deal)

    def close(self) -> None:
        """Ends the workers, and Ray, where this runner started it."""
        if self._closed:
            return
        self._closed = True
        ray = self._ray
        if ray.is_initialized():
            busy = {job.worker.place for job in self._jobs.values()}
            goodbyes = [w.actor.close.remote() for w in self.workers if w.place not in busy]
            if goodbyes:
                ray.wait(goodbyes, num_returns=len(goodbyes), timeout=CLOSE_SECONDS)
            for actor in [w.actor for w in self.workers] + [s.actor for s in self._starting.values()]:
                ray.kill(actor)
        self.workers.clear()
        self._starting.clear()
        self._jobs.clear()
        self._undo()

    # --- workers ------------------------------------------------------------------------------------------------------

    def _muster(self) -> None:
        """Start a worker on every device that has none and can have one; they are admitted as they answer."""
        taken = {w.place for w in self.workers} | {s.place for s in self._starting.values()} | self._refused
        for node in self._ray.nodes():
            for place, target, cores, resources in places(node, self._targets):
                if place not in taken:
                    actor = self._actor(place, resources).remote(self._outpost, str(target), cores)
                    self._starting[actor.hello.remote()] = _Start(place, actor, time.monotonic() + self._start)

    def _actor(self, place: Place, resources: dict[str, float]) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        pinned = NodeAffinitySchedulingStrategy(place.node, soft=False)
        return self._ray.remote(_Server).options(**resources, max_restarts=0, scheduling_strategy=pinned)

    def _await_workers(self) -> None:
        """Until all have answered; one that is there waits a little for the others, which else come later."""
        end = time.monotonic() + self._start
        while self._starting and time.monotonic() < end:
            ready, _ = self._ray.wait(list(self._starting), num_returns=1, timeout=max(end - time.monotonic(), 0.0))
            for ref in ready:
                self._admit(ref)
            if ready and self.workers:
                end = min(end, time.monotonic() + GRACE_SECONDS)
        self._note_late()
        if not self.workers:
            raise TuneError(
                f"no machine of the Ray cluster measures for {' or '.join(map(str, self._targets))}: "
                f"{'; '.join(self.notes) or _NOBODY}"
            )

    def _admit(self, ref: Any) -> None:
        """Take an actor that has answered among the workers, or note why not."""
        start = self._starting.pop(ref)
        try:
            hello = self._ray.get(ref)
        except self._ray.exceptions.RayError as e:
            return self._refuse(start, _words(e))
        if "refused" in hello:
            return self._refuse(start, hello["refused"])
        if hello["version"] != version("dnnc"):
            return self._refuse(
                start, f"it has dnnc {hello['version']}, this is {version('dnnc')}; install the same there"
            )
        other = next((w for w in self.workers if w.target == hello["target"] and w.machine != hello["machine"]), None)
        if other is not None:
            return self._refuse(
                start,
                f"it is {hello['machine']}, others measure for {other.target} on {other.machine}, and times must "
                "compare",
            )
        self.workers.append(Worker(start.place, hello["target"], hello["machine"], hello["pid"], start.actor))
        return None

    def _refuse(self, start: _Start, why: str) -> None:
        self.notes.append(f"{start.place.host}, device {start.place.device}: {why}")
        self._refused.add(start.place)
        self._ray.kill(start.actor)

    def _note_late(self) -> None:
        """Actors without resources stay in Ray's queue until it has them; who waits learns why."""
        for s in self._starting.values():
            if not s.late and time.monotonic() >= s.until:
                s.late = True
                self.notes.append(
                    f"{s.place.host}, device {s.place.device}: no worker within {self._start:g} s; do others hold its "
                    "cores or GPU?"
                )

    # --- requests -----------------------------------------------------------------------------------------------------

    def _hand_out(self, deal: Deal) -> None:
        """Send every idle worker a parcel. Those still at an abandoned `measure` get theirs after it."""
        busy = {job.worker.place for job in self._jobs.values()}
        for w in self.workers:
            if w.place in busy:
                continue
            parcel = deal.take(w.target, sum(other.target == w.target for other in self.workers))
            if parcel is not None:
                ref = w.actor.measure.remote(_packed(deal.requests(parcel)))
                self._jobs[ref] = _Job(
                    w, deal, parcel, time.monotonic() + self._patience * (1 + len(parcel.numbers) / 8)
                )

    def _unserved(self, deal: Deal) -> list[Trial]:
        """The trials of requests that no worker can measure: none has their target, and none is on its way."""
        self._note_late()
        if any(not s.late for s in self._starting.values()):
            return []
        return deal.unserved({w.target for w in self.workers}, "; ".join(self.notes[-4:]))

    def _collect(self, deal: Deal) -> list[Trial]:
        """Wait until a worker has answered, has gone, is late, or has started; the trials of `deal` that come of it."""
        events = [job.until for job in self._jobs.values()] + [s.until for s in self._starting.values() if not s.late]
        wait = max(min(events) - time.monotonic(), 0.0)
        ready, _ = self._ray.wait([*self._jobs, *self._starting], num_returns=1, timeout=wait)
        for ref in ready:
            if ref in self._starting:
                self._admit(ref)
        late = [ref for ref, job in self._jobs.items() if ref not in ready and time.monotonic() >= job.until]
        done = [(self._jobs[ref].deal, self._outcome(ref)) for ref in ready if ref in self._jobs]
        done += [(self._jobs[ref].deal, self._dismiss(ref, "it gave no answer in time")) for ref in late]
        return [t for owner, trials in done if owner is deal for t in trials]

    def _outcome(self, ref: Any) -> list[Trial]:
        """What a finished job gives."""
        try:
            answer = self._ray.get(ref)
        except self._ray.exceptions.RayError as e:
            return self._dismiss(ref, _words(e))
        job = self._jobs.pop(ref)
        return job.deal.answered(job.parcel, map(Trial.from_json, answer))

    def _dismiss(self, ref: Any, why: str) -> list[Trial]:
        """A worker that went, or has to: others get its requests."""
        job = self._jobs.pop(ref)
        said = f"{job.worker}: {why}"
        self.notes.append(said)
        self.workers.remove(job.worker)
        self._ray.kill(job.worker.actor)
        self._muster()
        return job.deal.lost(job.parcel, said)


class _Server:
    """The actor: one device. Arguments and results are plain data, as JSON would hold it."""

    def __init__(self, outpost: OpenOutpost, target: str, cores: int) -> None:
        self._refused = ""
        try:
            self._outpost: Outpost | None = outpost(target, cores)
        except Exception as e:  # its process must live on to say why
            self._outpost, self._refused = None, f"{type(e).__name__}: {e}"

    def hello(self) -> dict[str, Any]:
        if self._outpost is None:
            return {"refused": self._refused}
        return {
            "target": self._outpost.target,
            "machine": self._outpost.machine,
            "pid": os.getpid(),
            "version": version("dnnc"),
        }

    def measure(self, packed: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._outpost is not None
        return [t.as_json() for t in self._outpost.runner.measure(_unpacked(packed))]

    def close(self) -> None:
        if self._outpost is not None:
            self._outpost.runner.close()


def _packed(requests: Sequence[Request]) -> dict[str, Any]:
    """Requests as plain data, each of their tasks once."""
    tasks = {r.task.key: r.task.as_json() for r in requests}
    return {
        "tasks": tasks,
        "requests": [(r.task.key, r.choice.template, r.choice.knobs, r.limit, r.repeats, r.check) for r in requests],
    }


def _unpacked(packed: dict[str, Any]) -> list[Request]:
    tasks = {key: Task.from_json(record) for key, record in packed["tasks"].items()}
    return [Request(tasks[key], Choice(template, knobs), *rest) for key, template, knobs, *rest in packed["requests"]]


# --- Ray --------------------------------------------------------------------------------------------------------------


def _load() -> Any:
    try:
        import ray
    except ImportError as e:
        raise TuneError(f"measuring on a cluster needs Ray: {install('ray')}") from e
    return ray


def _join(ray: Any, address: str | None) -> Callable[[], None]:
    """Connect to Ray; return the undo. Quiet terminal, no dashboard; `ray.init` sends no usage statistics."""
    if ray.is_initialized():
        return lambda: None
    _reach(address)
    import ray._private.worker as driver

    printed = getattr(driver, "_worker_logs_enabled", True)
    driver._worker_logs_enabled = False  # "a worker died ..." of the raylet, which no argument of `init` keeps back
    try:
        with _silent():
            ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as e:
        driver._worker_logs_enabled = printed
        secret = "token" in f"{e} {e.__cause__}"
        hint = (
            "set RAY_AUTH_MODE=token, and have its ~/.ray/auth_token here"
            if secret
            else "`ray status` says whether it runs"
        )
        raise TuneError(f"cannot use the Ray cluster at {address or 'this machine'}: {_words(e)}; {hint}") from e

    def undo() -> None:
        ray.shutdown()
        driver._worker_logs_enabled = printed

    return undo


@contextmanager
def _silent() -> Iterator[None]:
    """Silence stderr of the process, C++ included: Ray repeats a wrong token for 20 s."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _reach(address: str | None) -> None:
    """TuneError where nobody listens at "host:port": Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except OSError as e:
        raise TuneError(
            f"no Ray cluster answers at {address}: {e}; `ray start --head --port={port}` starts one there"
        ) from e


def _words(error: Exception) -> str:
    """What happened, in one line: Ray's texts are pages with colours."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {' '.join(str(cause).split())}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].split(". ")[0][:300] if lines else type(error).__name__
