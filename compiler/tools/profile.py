"""Where the time of a call goes: `f.profile(x)`.

The program runs as it always does, its threads, barriers and caches included, but through a timed entry function, in
which each thread notes the time before and after every kernel call. Out comes a `Profile`: for each kernel its time,
its rates, and how near they are to what the machine can do at most; for the rest, what is lost waiting at barriers and
outside of the native call.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.llvm.ceilings import Ceilings, ceilings
from dnnc.backends.llvm.compile import Loaded, compile_text, load_objects
from dnnc.backends.llvm.entry import barriers, stamp_places, timed_entry_text
from dnnc.backends.runtime.frames import FRAME_NTHREADS, aligned_empty
from dnnc.backends.runtime.program import CONTROL, Call
from dnnc.ir.checks import integer
from dnnc.ir.errors import InputError, UnsupportedError
from dnnc.ir.expr import Var
from dnnc.report import KernelReport, ProgramReport

if TYPE_CHECKING:
    from dnnc.backends.llvm.features import CpuTarget
    from dnnc.backends.llvm.instance import CpuInstance
    from dnnc.backends.llvm.native import Native
    from dnnc.executable import Executable

Array = np.ndarray[Any, Any]
SECONDS = 1.0  # of measuring, where the number of calls is not given
WARM, LEAST, MOST = 3, 10, 1000  # calls before measuring; measured ones at least, and at most
LINE = 16  # int64 of two cache lines: the prefetcher fetches them in pairs
CALIBRATION = 0.02  # seconds between two readings of both clocks


@dataclass(frozen=True)
class CallTime:
    """One call of a kernel: medians, in seconds. `waiting`: what all threads then lose at the barrier behind it, or at
    the end.

    `balance`: time of the average thread over that of the slowest; 1 where the work is evenly divided, and for a kernel
        of one thread.
    """

    kernel: str
    nodes: str
    seconds: float
    waiting: float
    balance: float


@dataclass(frozen=True)
class KernelTime:
    """A unique kernel, all of its calls in one run added up.

    Attributes:
        seconds: median time.
        share: of the time of a whole call.
        flops, bytes: of all calls; None where they are not known for these sizes.
        bound: what limits it first: "compute", or the level of the memory that holds its data.
        reached: the least time that this limit allows over the time it took.
    """

    name: str
    symbol: str
    calls: int
    seconds: float
    share: float
    balance: float
    parallel: bool
    flops: int | None
    bytes: int | None
    bound: str
    reached: float | None
    choice: str
    nodes: tuple[str, ...]

    @property
    def flops_per_second(self) -> float | None:
        return None if self.flops is None else self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.bytes is None else self.bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, repr=False)
class Profile:
    """Times of a model's calls on given inputs, medians over `repeats` of them, in seconds.

    `total` is a call as its user waits for it. Of it, `waiting` is lost at barriers, and `overhead` passes outside of
    the native program: in Python, and until the threads have begun and ended. Medians do not add up exactly.
    """

    name: str
    target: str
    threads: int
    dims: Mapping[str, int]
    repeats: int
    total: float
    waiting: float
    overhead: float
    kernels: tuple[KernelTime, ...]
    calls: tuple[CallTime, ...]
    ceilings: Ceilings

    def as_dict(self) -> dict[str, Any]:
        """The profile as dicts, lists, strings and numbers."""
        rates = ("flops_per_second", "bytes_per_second")
        kernels = [{**dataclasses.asdict(k), **{r: getattr(k, r) for r in rates}} for k in self.kernels]
        return {**dataclasses.asdict(self), "dims": dict(self.dims), "kernels": kernels}

    def to_json(self) -> str:
        """The profile as a JSON object."""
        return json.dumps(self.as_dict(), indent=2)

    def text(self, detail: bool = False) -> str:
        """As tables; with `detail` also every call in the order of the program."""
        from dnnc.report.profile_tables import profile_tables
        from dnnc.report.tables import plain_text

        return plain_text(profile_tables(self, detail))

    def __repr__(self) -> str:
        return f"<Profile of {self.name[:60]} for {self.target[:60]}: {self.total * 1e6:.4g} us a call; print it>"

    def __str__(self) -> str:
        return self.text()


def profile(
    f: Executable, target: CpuTarget, collect: Callable[[], list[Array]], repeats: int | None = None
) -> Profile:
    """Call a compiled model on these inputs again and again and say where the time goes.

    Args:
        f: the model.
        target: the CPU that it is compiled for.
        collect: gives the arrays of a call.
        repeats: measured calls; None: as many as fit into a second, 10 to 1000.

    Raises:
        InputError: as a call; or there is nothing to measure.
        UnsupportedError: this machine has no clock that native code can read.
    """
    if repeats is not None:
        repeats = integer(repeats, "repeats", 1)
    bound: Any = f.cache.instance(tuple([a.shape for a in collect()]))
    if bound.empty or not bound.program.calls:
        raise InputError("there is nothing to profile: for these inputs no kernel is called")
    known = find_report(f.report.programs, bound.program.calls)
    timed = Timed(bound, target.cpu, target.features, len(f.inputs) + len(f.outputs))

    def call() -> None:
        timed.bound.into(collect(), [np.empty(s, d) for s, d in bound.outputs])

    samples = timed.measure(call, repeats)
    limits = ceilings(target, samples.threads)
    sizes = dict(zip(bound.program.dims, bound.dims.tolist()))
    dims = {v.name: n for v, n in sizes.items()} or dict(known.dims)
    if dims != dict(known.dims):
        known = resized(known, bound.program, sizes)
    return summarize(f.report.name, f.report.target, dims, bound.program.calls, known, samples, limits)


def find_report(programs: Sequence[ProgramReport], calls: Sequence[Call]) -> ProgramReport:
    """What was noted of the program that makes these calls. InputError where nothing was."""
    wanted = {c.symbol for c in calls}
    for p in reversed(programs):
        if wanted <= {k.symbol for k in p.kernels} and (
            p.calls == len(calls) or any(k.choice == CONTROL for k in p.kernels)
        ):
            return p
    raise InputError(
        "nothing is noted of the program that runs for these inputs; sizes of 0 get one of their own, which cannot be "
        "profiled"
    )


def resized(known: ProgramReport, native: Native, sizes: Mapping[Var, int]) -> ProgramReport:
    """The report of a program for all sizes, with the work of its kernels at these. A loaded program does not know it:
    that is left empty.
    """
    if native.program is None:
        return dataclasses.replace(
            known, kernels=tuple(dataclasses.replace(k, flops="", bytes="") for k in known.kernels)
        )
    from dnnc.report.collect import kernel_reports

    return dataclasses.replace(known, kernels=kernel_reports(native.program, native.symbols, sizes))


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Seconds of `repeats` runs: [repeat] of whole calls and of what is outside of the entry function; [repeat, call]
    of kernels and waiting.
    """

    threads: int
    total: Array
    overhead: Array
    kernels: Array
    waiting: Array
    balance: Array


class Timed:
    """A bound program with a timed entry function in place of its own."""

    def __init__(self, bound: CpuInstance, cpu: str, features: str, buffers: int) -> None:
        native = bound.program
        calls = list(native.calls)
        self.layout = Layout(calls)
        stride = -(-self.layout.places // LINE) * LINE
        self.stamps = (
            aligned_empty(8 * stride * bound.nthreads, 8 * LINE).view(np.int64).reshape(bound.nthreads, stride)
        )
        addresses = {c.symbol: native.loaded.address(c.symbol) for c in calls}
        self.loaded = load_objects(
            [compile_text(timed_entry_text(calls, addresses, buffers, stride, native.flush), cpu, features)]
        )
        self.clock = Clock(self.loaded)
        self.bound = copy.copy(bound)
        self.bound.entry = self.loaded.address("entry")
        self.bound.free = []
        held = self.bound.take(buffers + 1)
        held.pointers[buffers] = self.stamps.ctypes.data  # behind the buffers of a call, which leaves it alone
        self.bound.free.append(held)
        self.frame = held.frame

    def measure(self, call: Callable[[], None], repeats: int | None) -> Samples:
        """Time `call`, which runs the timed program once."""
        start = time.perf_counter()
        for _ in range(WARM):
            call()
        each = (time.perf_counter() - start) / WARM
        count = repeats or max(LEAST, min(MOST, int(SECONDS / each)))
        totals, rows = [], []
        for _ in range(count):
            start = time.perf_counter()
            call()
            totals.append(time.perf_counter() - start)
            rows.append(self.layout.times(self.stamps[: self.frame.slots[FRAME_NTHREADS]]))
        tick = self.clock.seconds_per_tick()
        inside, kernels, waiting = (
            np.array([getattr(r, name) for r in rows]) * tick for name in ("inside", "kernels", "waiting")
        )
        total, balance = np.array(totals), np.array([r.balance for r in rows])
        return Samples(max(r.threads for r in rows), total, np.maximum(total - inside, 0), kernels, waiting, balance)


@dataclass(frozen=True)
class Ticks:
    """One run: ticks of the entry function; by call, of the kernel, of waiting behind it, and how evenly its threads
    were busy.
    """

    threads: int
    inside: int
    kernels: Array
    waiting: Array
    balance: Array


class Layout:
    """Where the stamps of a program lie, and what they mean.

    Barriers divide a program into segments. A kernel takes as long as its slowest thread; what remains of a segment is
    waiting. Where threads run through several kernels without a barrier the slowest ones overlap, and are shortened so
    that they fill their segment.
    """

    def __init__(self, calls: list[Call]) -> None:
        places = stamp_places(calls)
        need = [False, *barriers(calls)[1:]]  # the first call begins the first segment
        self.before, self.after = (np.array([p[k] for p in places]) for k in (0, 1))
        self.places = places[-1][1] + 1
        self.segment = np.cumsum(need)
        self.starts = np.array([0, *(p[0] for p, n in zip(places, need) if n)])
        self.last = np.array([k for k in range(len(calls)) if k + 1 == len(calls) or need[k + 1]])
        self.parallel = np.array([c.parallel for c in calls])

    def times(self, stamps: Array) -> Ticks:
        """What int64[threads, places] say of one run."""
        begins = stamps[:, self.starts].min(0)
        end = stamps[:, self.places - 1].max()
        length = np.maximum(np.diff(np.append(begins, end)), 0)
        busy = np.maximum(stamps[:, self.after] - stamps[:, self.before], 0)
        slowest = np.where(self.parallel, busy.max(0), busy[0])
        together = np.bincount(self.segment, slowest)
        kernels = slowest * np.minimum(length / np.maximum(together, 1), 1)[self.segment]
        waiting = np.zeros(len(slowest))
        waiting[self.last] = length - np.bincount(self.segment, kernels)
        balance = np.where(self.parallel, busy.mean(0) / np.maximum(slowest, 1), 1.0)
        return Ticks(len(stamps), int(end - begins[0]), kernels, waiting, balance)


class Clock:
    """The counter that stamps are taken from, held against the system's clock from now on."""

    def __init__(self, loaded: Loaded) -> None:
        self._ticks: Any = ctypes.CFUNCTYPE(ctypes.c_int64)(loaded.address("ticks"))
        self._start = self._read()

    def _read(self) -> tuple[float, float]:
        """(seconds, ticks) at one time: the reading of several that took least."""
        readings = []
        for _ in range(5):
            before = time.perf_counter()
            ticks = self._ticks()
            after = time.perf_counter()
            readings.append((after - before, (before + after) / 2, ticks))
        _, seconds, ticks = min(readings)
        return seconds, ticks

    def seconds_per_tick(self) -> float:
        """UnsupportedError for a counter that stands still."""
        time.sleep(max(0.0, self._start[0] + CALIBRATION - time.perf_counter()))
        seconds, ticks = self._read()
        if ticks <= self._start[1]:
            raise UnsupportedError("this CPU has no cycle counter that programs may read; profiles need one")
        return (seconds - self._start[0]) / (ticks - self._start[1])


# --- figures ----------------------------------------------------------------------------------------------------------


def summarize(
    name: str,
    target: str,
    dims: Mapping[str, int],
    calls: Sequence[Call],
    known: ProgramReport,
    samples: Samples,
    limits: Ceilings,
) -> Profile:
    """Medians, by call and by kernel; kernels by their time, the longest first."""
    times, waits, balance = (np.median(a, 0) for a in (samples.kernels, samples.waiting, samples.balance))
    total = float(np.median(samples.total))
    by_symbol: dict[str, list[int]] = {}
    for k, c in enumerate(calls):
        by_symbol.setdefault(c.symbol, []).append(k)
    reports = {k.symbol: k for k in known.kernels}
    rows = []
    nodes = [""] * len(calls)
    for symbol, where in by_symbol.items():
        for k, text in zip(where, reports[symbol].nodes):
            nodes[k] = text
        seconds = float(times[where].sum())
        even = float(np.average(balance[where], weights=times[where] + 1e-12))
        rows.append(kernel_time(reports[symbol], seconds, seconds / total, even, limits))
    each = [
        CallTime(reports[c.symbol].name, nodes[k], float(times[k]), float(waits[k]), float(balance[k]))
        for k, c in enumerate(calls)
    ]
    waiting, overhead = float(np.median(samples.waiting.sum(1))), float(np.median(samples.overhead))
    rows.sort(key=lambda r: -r.seconds)
    return Profile(
        name,
        target,
        samples.threads,
        dims,
        len(samples.total),
        total,
        waiting,
        overhead,
        tuple(rows),
        tuple(each),
        limits,
    )


def kernel_time(k: KernelReport, seconds: float, share: float, balance: float, limits: Ceilings) -> KernelTime:
    """A kernel's time against the limit that is nearer."""
    flops, moved = (n * k.count if isinstance(n, int) else None for n in (k.flops, k.bytes))
    bound, reached = "", None
    if flops is not None and moved is not None and seconds:
        level = limits.level(moved / k.count)
        needed = {"compute": flops / limits.flops, level.name: moved / level.rate}
        bound = max(needed, key=lambda b: needed[b])
        reached = needed[bound] / seconds
    return KernelTime(
        k.name, k.symbol, k.count, seconds, share, balance, k.parallel, flops, moved, bound, reached, k.choice, k.nodes
    )
