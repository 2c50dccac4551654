"""Times a program's kernels on a device, by events around each, in the recorded graph if there is one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.backends.base import LEAST, MOST, SECONDS, WARM, Ceilings, Level, Samples, numbered
from dnnc.backends.cuda.graph import Frame
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.runtime.program import Call

Array = np.ndarray[Any, Any]
LANES = 128  # float32 units of an SM
CLOCK = 1.755e9  # of an H200 under load, hertz
L2_RATE = 2.0  # of the memory's rate


def ceilings(target: GpuTarget) -> Ceilings:
    """What the facts of a GPU say it can do at most. The rate of its L2 is a guess: twice that of its memory."""
    rate = target.bandwidth * 1e9
    levels = (Level("L2", target.l2_bytes, L2_RATE * rate, L2_RATE * rate), Level("memory", 0, rate, rate))
    return Ceilings(target.sms, 2.0 * LANES * target.sms * CLOCK, levels)


class Timed:
    """Runs of a program with events around its kernels."""

    def __init__(self, frame: Frame, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        self.frame, self.device, self.arrays, self.results = frame, frame.device, arrays, results
        self.events: list[Any] = []
        self.calls: list[Call] = []

    def measure(self, repeats: int | None, units: int) -> Samples:
        """Whole runs from NumPy to NumPy, and every kernel in each of as many runs. `units`: SMs of the device."""
        frame, stream = self.frame, self.frame.stream
        start = time.perf_counter()
        for _ in range(WARM):
            frame.run_host(self.arrays, self.results)
        count = repeats or max(LEAST, min(MOST, int(SECONDS / max((time.perf_counter() - start) / WARM, 1e-6))))
        totals = []
        for _ in range(count):
            start = time.perf_counter()
            frame.run_host(self.arrays, self.results)
            totals.append(time.perf_counter() - start)
        run = self.with_events
        if frame.loaded.recordable:
            self.with_events(stream)  # makes the events, which cannot be had while work is recorded
            graph = self.device.capture(stream, lambda: self.with_events(stream))
            run = graph.launch
        spans = []
        for _ in range(count):
            run(stream)
            self.device.synchronize(stream)
            spans.append([self.device.elapsed(a, b) for a, b in zip(self.events, self.events[1:])])
        kernels, total = np.array(spans), np.array(totals)
        none, even = np.zeros(kernels.shape), np.ones(kernels.shape)
        overhead = np.full(count, max(float(np.median(total) - np.median(kernels, 0).sum()), 0.0))
        ends = np.cumsum(kernels[kernels.sum(1).argmin()])
        fastest = np.stack([np.append(0, ends[:-1]), ends], -1)[:, None]  # of one stream
        return Samples(numbered(self.calls), units, total, overhead, kernels, none, even, fastest)

    def with_events(self, stream: int) -> None:
        """One run on what lies in the slots, an event before each kernel and one behind the last."""
        self.calls = []
        self.frame.walk.on_call = lambda c: self.tell(c, stream)
        try:
            self.frame.compute(stream)
        finally:
            self.frame.walk.on_call = None
        self.device.record(self.event(len(self.calls)), stream)
        del self.events[len(self.calls) + 1 :]

    def tell(self, call: Call, stream: int) -> None:
        self.device.record(self.event(len(self.calls)), stream)
        self.calls.append(call)

    def event(self, k: int) -> Any:
        while k >= len(self.events):
            self.events.append(self.device.new_event(timing=True))
        return self.events[k]
