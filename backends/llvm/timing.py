"""Times the kernels of a program on the CPU, by another entry function, which reads the cycle counter."""

from __future__ import annotations

import copy
import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dnnc.backends.base import LEAST, MOST, SECONDS, WARM, Samples, numbered
from dnnc.backends.llvm.compile import Loaded, compile_text, load_objects
from dnnc.backends.llvm.entry import barriers, stamp_places, timed_entry_text
from dnnc.backends.llvm.instance import HEAD, CpuInstance
from dnnc.backends.runtime.frames import FRAME_NTHREADS, aligned_empty
from dnnc.backends.runtime.program import Call
from dnnc.ir.errors import UnsupportedError

Array = np.ndarray[Any, Any]
LINE = 16  # int64 of two cache lines: the prefetcher fetches them in pairs
CALIBRATION = 0.02  # seconds between two readings of both clocks


class Timed:
    """A bound program with a timed entry function in place of its own."""

    def __init__(self, bound: CpuInstance, cpu: str, features: str, buffers: int) -> None:
        program = bound.program
        calls = list(program.calls)
        self.calls, self.layout = calls, Layout(calls)
        stride = -(-self.layout.places // LINE) * LINE
        self.stamps = (
            aligned_empty(8 * stride * bound.nthreads, 8 * LINE).view(np.int64).reshape(bound.nthreads, stride)
        )
        addresses = {c.symbol: bound.code.address(c.symbol) for c in calls}
        text = timed_entry_text(calls, addresses, buffers, stride, program.flush)
        self.loaded = load_objects([compile_text(text, cpu, features)])
        self.clock = Clock(self.loaded)
        self.bound = copy.copy(bound)
        self.bound.code = replace(bound.code, entry=self.loaded.address("entry"), owner=self.loaded)
        self.bound.free, self.bound.words = [], buffers + 1
        held = self.bound.take()
        held.pointers[HEAD + buffers] = self.stamps.ctypes.data  # behind the buffers of a call
        self.bound.free.append(held)
        self.frame = held.frame

    def measure(self, call: Callable[[], None], repeats: int | None) -> Samples:
        """Time `call`, which runs the timed program once. UnsupportedError: there is no clock that code can read."""
        start = time.perf_counter()
        for _ in range(WARM):
            call()
        each = (time.perf_counter() - start) / WARM
        count = repeats or max(LEAST, min(MOST, int(SECONDS / each)))
        totals, rows = [], []
        spans, least = np.empty((0, 0, 2)), float("inf")
        for _ in range(count):
            start = time.perf_counter()
            call()
            totals.append(time.perf_counter() - start)
            stamps = self.stamps[: self.frame.slots[FRAME_NTHREADS]]
            rows.append(self.layout.times(stamps))
            if rows[-1].inside < least:
                spans, least = self.layout.spans(stamps), rows[-1].inside
        tick = self.clock.seconds_per_tick()
        inside, kernels, waiting = (
            np.array([getattr(r, name) for r in rows]) * tick for name in ("inside", "kernels", "waiting")
        )
        total, balance = np.array(totals), np.array([r.balance for r in rows])
        threads = max(r.threads for r in rows)
        overhead = np.maximum(total - inside, 0)
        return Samples(numbered(self.calls), threads, total, overhead, kernels, waiting, balance, spans * tick)


@dataclass(frozen=True)
class Ticks:
    """One run: ticks of the entry; per call the kernel's, the wait's, and how evenly its threads were busy."""

    threads: int
    inside: int
    kernels: Array
    waiting: Array
    balance: Array


class Layout:
    """Where the stamps of a program lie, and what they mean.

    Barriers divide a program into segments. A kernel takes as long as its slowest thread; what remains of a segment is
    waiting. Where threads run through several kernels without a barrier the slowest overlap, and are scaled.
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

    def spans(self, stamps: Array) -> Array:
        """Ticks [call, thread, 2] since the entry; NaN for other threads than the first in calls of one thread."""
        both = np.stack([stamps[:, self.before], stamps[:, self.after]], -1).transpose(1, 0, 2)
        out: Array = (both - stamps[:, self.starts[0]].min()).astype(float)
        out[~self.parallel, 1:] = np.nan
        return out


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
