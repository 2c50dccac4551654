"""Where the time of a call on a device goes: events before and after every kernel, in the recorded graph itself where
there is one.

Figures are held against what the target's facts say: its bandwidth, and multiply-adds of its float32 units at a nominal
clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.cuda.graph import Frame
from dnnc.backends.llvm.ceilings import Ceilings, Level
from dnnc.ir.checks import integer
from dnnc.ir.errors import InputError
from dnnc.report import KernelReport, Report
from dnnc.tools.profile import LEAST, MOST, SECONDS, WARM, CallTime, KernelTime, Profile, kernel_time

if TYPE_CHECKING:
    from dnnc.backends.cuda.instance import CudaInstance
    from dnnc.backends.cuda.target import GpuTarget
    from dnnc.backends.runtime.program import Call

Array = np.ndarray[Any, Any]
LANES = 128  # float32 units of an SM
CLOCK = 1.755e9  # of an H200 under load, hertz
L2_RATE = 2.0  # of the memory's rate


def profile(
    report: Report, bound: CudaInstance, arrays: Sequence[Array], target: GpuTarget, repeats: int | None = None
) -> Profile:
    """Run a program on these inputs again and again.

    Args:
        report: of the model; its last program with these kernels says what they are.
        bound: the program.
        arrays: NumPy arrays, as a call has them.
        target: the GPU.
        repeats: measured runs; None: as many as fit into a second, 10 to 1000.

    Raises:
        InputError: there is nothing to measure.
    """
    if repeats is not None:
        repeats = integer(repeats, "repeats", 1)
    if bound.empty or not bound.program.calls:
        raise InputError("there is nothing to profile: for these inputs no kernel is called")
    wanted = {s for s in bound.program.cubins}
    known = next((p for p in reversed(report.programs) if wanted <= {k.symbol for k in p.kernels}), None)
    if known is None:
        raise InputError(
            "nothing is noted of the program that runs for these inputs; sizes of 0 get one of their own, which cannot "
            "be profiled"
        )
    run = Timed(Frame(bound.loaded()), arrays, [np.empty(s, d) for s, d in bound.outputs])
    totals, spans, calls = run.measure(repeats)
    each = np.median(np.array(spans), 0)
    total = median(totals)
    limits = ceilings_of(target)
    reports = {k.symbol: k for k in known.kernels}
    rows = _rows(reports, calls, each, total, limits)
    shown = tuple(
        CallTime(reports[c.symbol].name, _nodes(reports[c.symbol], calls, k), float(each[k]), 0.0, 1.0)
        for k, c in enumerate(calls)
    )
    overhead = max(total - float(each.sum()), 0.0)
    dims = dict(known.dims)
    return Profile(
        report.name, report.target, target.sms, dims, len(totals), total, 0.0, overhead, tuple(rows), shown, limits
    )


def _rows(
    reports: dict[str, KernelReport], calls: Sequence[Call], each: Array, total: float, limits: Ceilings
) -> list[KernelTime]:
    """Kernels by their time, the longest first. A kernel in a loop counts each time it runs."""
    by_symbol: dict[str, list[int]] = {}
    for k, c in enumerate(calls):
        by_symbol.setdefault(c.symbol, []).append(k)
    rows = []
    for symbol, where in by_symbol.items():
        seconds = float(each[where].sum())
        r = reports[symbol]
        counted = KernelReport(r.name, r.symbol, len(where), r.choice, True, r.flops, r.bytes, r.nodes)
        rows.append(kernel_time(counted, seconds, seconds / total, 1.0, limits))
    return sorted(rows, key=lambda r: -r.seconds)


def _nodes(r: KernelReport, calls: Sequence[Call], k: int) -> str:
    nth = sum(c.symbol == r.symbol for c in calls[:k])
    return r.nodes[nth % len(r.nodes)] if r.nodes else ""


def ceilings_of(target: GpuTarget) -> Ceilings:
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

    def measure(self, repeats: int | None) -> tuple[list[float], list[list[float]], list[Call]]:
        """Seconds of whole runs from NumPy to NumPy; seconds of every kernel in each of as many runs; the kernels."""
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
        return totals, spans, self.calls

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
