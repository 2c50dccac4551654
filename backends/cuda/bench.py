"""Times kernels on a GPU, as a model runs them: out of a recorded graph of many calls, activations warm, weights cold.

In: tasks and their kernels' cubins. Out: seconds of a call, by events around replays of the graph. It runs in a process
of its own (`worker`): an error on a device ends the context of its process. Any `Device` will do, an interpreter too.

Weights rotate through more memory than the L2 cache holds, as far as a graph of MOST_CALLS reaches; activations and the
result stay where they are, as in a model. Kernels that wait by themselves for the last one begin early.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from dnnc.backends.base import Built
from dnnc.backends.check_cost import unchecked
from dnnc.backends.cuda.check import MAX_STEPS, check_kernel
from dnnc.backends.cuda.library import CallFunction, workspace_bytes
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.runtime import codec
from dnnc.backends.runtime.device import ALIGN, STATUS_BYTES, Device, Launch, Memory, Recorded
from dnnc.backends.runtime.operands import COLD, HELD, OUTPUT, WARM, Noise, Operands, Rotation, Workload
from dnnc.ir.dtype import DType
from dnnc.ir.errors import AccuracyError
from dnnc.ir.loops.text import parse_kernel
from dnnc.passes.schedule.problem import Choice

Array = np.ndarray[Any, Any]
GRAPH_SECONDS = 5e-4  # of the calls of one graph
MOST_CALLS, FEWEST_CALLS = 100, 2
REPLAY_SECONDS = 4e-3  # of all replays of one repeat
FEWEST_REPLAYS, MOST_REPLAYS = 2, 5
LONG = 20e-3  # seconds of a call that is not recorded
ONCE = 0.2  # seconds of a call that is made once: what loading its code adds is no hundredth of it
# seconds of a call from which a graph of FEWEST_CALLS tells: the gap between two graphs is some microseconds
SURE = 20e-6
COLD_CACHES = 2.5  # L2 caches that the weights of calls fill before a place is used again
FILL, ZONE = 0xCB, 256  # bytes between operands, which no kernel may touch


class GpuBench:
    """Operands, kernels and the clock of one device."""

    def __init__(self, target: GpuTarget, device: Device) -> None:
        self.device = device
        self.cold_bytes = int(COLD_CACHES * target.l2_bytes)
        self._noise = Noise(1)
        self._pools: dict[DType, tuple[Memory, int]] = {}
        self._data_of = lru_cache(HELD)(lambda task: _Data(task, self))
        self.queue = self.device.new_stream()
        self.stream = self.queue.address

    def load(self, task: Workload, built: Built) -> GpuKernel:
        """Make a kernel ready. TargetError where the device has no room or does not take the code."""
        return GpuKernel(self, self._data_of(task), built)

    def pool(self, dtype: DType, nbytes: int) -> Memory:
        """Random elements on the device, at least so many bytes of them. Those of a few types are kept."""
        found = self._pools.pop(dtype, None)
        if found is None or found[1] < nbytes:
            source = self._noise.of(dtype, nbytes)
            found = self.device.alloc(nbytes), nbytes
            self.device.upload(found[0].address, source[:nbytes], self.stream)
            self.device.synchronize(self.stream)
        while len(self._pools) >= 2:
            self._pools.pop(next(iter(self._pools)))
        self._pools[dtype] = found
        return found[0]


class _Data:
    """Operands on the device: status, then warm operands and the output in red zones; cold ones lie in pools."""

    def __init__(self, task: Workload, bench: GpuBench) -> None:
        self.operands, self.bench = Operands(task), bench
        each = self.operands.each
        self.rotation = Rotation.over(self.operands, bench.cold_bytes, MOST_CALLS, ALIGN)
        self.pools = {t: bench.pool(t, n) for t, n in self.rotation.pools.items()}
        sizes = [0 if o.role == COLD else -(-o.nbytes // ALIGN) * ALIGN + ZONE for o in each]
        self.starts = np.cumsum([ALIGN + ZONE, *sizes]).tolist()
        self.memory = bench.device.alloc(self.starts[-1])
        self.reset()

    def reset(self) -> None:
        """Operands as they were drawn, the status clear, zones whole."""
        device, stream, at = self.bench.device, self.bench.stream, self.memory.address
        device.fill(at, FILL, self.starts[-1], stream)
        device.fill(at, 0, STATUS_BYTES, stream)
        warm = self.operands.warm()
        for k, o in enumerate(self.operands.each):
            if o.role == WARM and o.nbytes:
                device.upload(at + self.starts[k], warm[o.value], stream)
            elif o.role == OUTPUT and o.nbytes:
                device.fill(at + self.starts[k], 0, o.nbytes, stream)
        device.synchronize(stream)

    def intact(self) -> bool:
        """Are the zones after each operand whole?"""
        device, stream = self.bench.device, self.bench.stream
        zones = np.zeros((len(self.starts), ZONE), np.uint8)
        for zone, end in zip(zones, self.starts):
            device.download(zone, self.memory.address + end - ZONE, stream)
        device.synchronize(stream)
        return bool((zones == FILL).all())

    def addresses(self, call: int) -> list[int]:
        """The arguments of a call, the status last."""
        r, at = self.rotation, self.memory.address
        each = enumerate(self.operands.each)
        args = [
            self.pools[o.dtype].address + r.offset(k, call) if k in r.strides else at + self.starts[k] for k, o in each
        ]
        return [*args, at]


class GpuKernel:
    """A kernel of a task on the device, bound to the operands."""

    def __init__(self, bench: GpuBench, data: _Data, built: Built) -> None:
        self.bench, self.data, self.symbol = bench, data, built.symbol
        self.launch = codec.decode(Launch, built.facts["launch"])
        self.function = bench.device.load(
            built.code, built.symbol, self.launch, built.facts["params"], built.facts["overlaps"]
        )
        self.workspace = (
            bench.device.alloc(max(workspace_bytes(self.function), 1))
            if isinstance(self.function, CallFunction)
            else None
        )
        self.idle = 0 in self.launch.grid or 0 in self.launch.block
        self.graph: Recorded | None = None
        self.calls = 0
        self.expected = 0.0  # seconds of a call

    def start(self, calls: int, first: int = 0) -> None:
        for k in range(first, first + calls):
            args = self.data.addresses(k)
            last = args[-1] if self.workspace is None else self.workspace.address
            self.bench.device.launch(self.function, self.launch, [*args[:-1], last], self.bench.stream)

    def series(self, work: Callable[[], None], count: int) -> list[float]:
        """Return seconds of each repeat, after a warm-up that keeps the device busy while the host queues work."""
        device, stream = self.bench.device, self.bench.stream
        events = [device.new_event(timing=True) for _ in range(count + 1)]
        work()
        for event in events[:-1]:
            device.record(event, stream)
            work()
        device.record(events[-1], stream)
        device.synchronize(stream)
        return [device.elapsed(a, b) for a, b in itertools.pairwise(events)]

    def measure(self, limit: float | None = None) -> float:
        """Seconds of a call: the median of some replays. Past `limit` the first calls are all.

        AccuracyError: the kernel writes outside of its operands. InternalError: the device failed, and with it the
        context of this process.
        """
        if self.idle:
            return 0.0
        if self.graph is None:
            once = self.prove()
            if once >= ONCE or (limit is not None and once >= max(LONG, 2 * limit)):
                return once
            (each,) = self.series(lambda: self.start(FEWEST_CALLS), 1)  # from the host, which is slower than a graph
            if each / FEWEST_CALLS >= LONG:
                return each / FEWEST_CALLS
            self.record(FEWEST_CALLS)
            first = self.fastest(FEWEST_CALLS)
            if limit is not None and first > max(2 * limit, SURE):
                self.graph = None
                return first
            self.record(int(np.clip(GRAPH_SECONDS / max(first, 1e-9), FEWEST_CALLS, MOST_CALLS)))
            self.expected = self.fastest(self.calls)
        if limit is not None and self.expected > limit:
            return self.expected
        self.expected = self.replays(
            int(np.clip(REPLAY_SECONDS / max(self.expected * self.calls, 1e-9), FEWEST_REPLAYS, MOST_REPLAYS))
        )
        return self.expected

    def prove(self) -> float:
        """Run once, and look at the zones. Seconds of this first call."""
        device, stream = self.bench.device, self.bench.stream
        begun, ended = device.new_event(timing=True), device.new_event(timing=True)
        device.record(begun, stream)
        self.start(1)
        device.record(ended, stream)
        device.synchronize(stream)
        if not self.data.intact():
            self.data.reset()
            raise AccuracyError(f"{self.symbol} writes outside of its operands")
        return device.elapsed(begun, ended)

    def record(self, calls: int) -> None:
        self.calls = calls
        self.graph = self.bench.device.capture(self.bench.stream, lambda: self.start(calls))

    def replays(self, count: int) -> float:
        """Seconds of a call, the median over so many replays of the graph."""
        graph, stream = self.graph, self.bench.stream
        assert graph is not None
        return statistics.median(self.series(lambda: graph.launch(stream), count)) / self.calls

    def fastest(self, calls: int) -> float:
        """Return seconds of a quick kernel's call: the best of several times that so many were made."""
        if self.graph is None:
            self.record(calls)
        graph, stream = self.graph, self.bench.stream
        assert graph is not None
        return min(self.series(lambda: graph.launch(stream), 3)) / self.calls

    def check(self, text: str, choice: Choice) -> bool:
        """Compare with float64 as the gate does. False if that takes too long; AccuracyError for a difference."""
        operands = self.data.operands
        step = operands.step(parse_kernel(text), choice)
        check_kernel(operands.task.rebuilt[0], step, self.bench.device, self.function, self.launch)
        return unchecked(step, {}, MAX_STEPS) is None
