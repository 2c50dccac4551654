"""Runs a program on a device: kernels in order on one stream, recorded into a graph where its course is known.

`LoadedProgram` is what all runs share: functions and constants. A `Frame` is what one run at a time needs: the arena,
the workspace of libraries, a slot for every input and output, the status, and the graphs that were recorded with these
addresses. A loop whose trip count is known is recorded iteration by iteration, each with the addresses of its rows; any
other is run from the host, which reads the condition after each iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.backends.cuda.library import CallFunction, workspace_bytes
from dnnc.backends.cuda.loading import Constants, Reference, check_loaded, load_kernel, stepwise
from dnnc.backends.runtime.device import ALIGN, DEFAULT_STREAM, PARAMETER_ALIGN, STATUS_BYTES, Device, Memory, Recorded
from dnnc.backends.runtime.frames import ALIGN as CONDITION_STRIDE
from dnnc.backends.runtime.program import Branch, Call, Control, Loop, MemoryRef, Program, Row, written_in_place
from dnnc.ir.errors import InternalError

Array = np.ndarray[Any, Any]
NUMBERS = 1024  # iterations whose numbers lie on the device at first
MOST_NODES = 50_000  # of a graph: longer programs run step by step
START, COPY = 5e-6, 2e-6  # seconds of the host to start a kernel or a graph, and to ask for a copy
COPIED = 4e12  # bytes read or written per second by a copy within the device


def aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


class LoadedProgram:
    """A program whose kernels and constants are on a device, its new kernels checked. `arena_bytes`: of each frame.

    Programs of one model for several shapes have the same weights: `others` may have them on the device already.
    """

    def __init__(self, native: Program, device: Device, others: Sequence[LoadedProgram] = ()) -> None:
        self.native, self.device = native, device
        self.functions = {symbol: load_kernel(native, symbol, device) for symbol in native.code}
        for symbol in list(native.checks):
            check_loaded(native, symbol, device, self.functions[symbol])
        held = native.loaded or Constants(native.constants, ())  # as it is now
        self.references, self.own = held.references, held.own
        self.constants = self._constants(others)
        self._at: dict[int, int] = {}
        self.arena_bytes = native.sizes({})[1]
        self.workspace_bytes = max(
            map(workspace_bytes, self.functions.values()), default=0
        )  # calls of a frame follow each other
        self.inputs = [_nbytes(t) for t in native.inputs]
        self.outputs = [_nbytes(t) for t in native.outputs]
        self.in_place = written_in_place(native.donated, native.calls, len(native.inputs))
        self.kernels = self.nodes(native.calls)
        self.recordable = not stepwise(native) and self.kernels <= MOST_NODES

    def _constants(self, others: Sequence[LoadedProgram]) -> Memory:
        for p in others:
            if _where(p.references) == _where(self.references) and np.array_equal(p.own, self.own):
                self.native.constants, self.own = p.native.constants, p.own
                return p.constants
        memory = self.device.alloc(max(self.own.nbytes, 1))
        self.device.upload(memory.address, self.own, DEFAULT_STREAM)
        self.device.synchronize(DEFAULT_STREAM)
        return memory

    def constant(self, at: int) -> int:
        """The address of a byte of the constants, which may lie in a parameter's own array."""
        found = self._at.get(at)
        if found is None:
            before = [r for r in self.references if r.start <= at]
            last = before[-1] if before and at < before[-1].end else None
            own = self.constants.address + at - sum(r.end - r.start for r in before)
            found = self._at[at] = own if last is None else last.array.address + at - last.start
        return found

    def nodes(self, calls: Sequence[Call]) -> int:
        """Kernels of one run, every iteration of loops of known length counted."""
        total = 0
        for c in calls:
            control = self.native.controls.get(c.symbol)
            if isinstance(control, Loop):
                total += (control.length or 1) * self.nodes(control.body)
            elif isinstance(control, Branch):
                total += max(self.nodes(control.then), self.nodes(control.other))
            else:
                total += 1
        return total

    def iterations(self) -> int:
        """The most iterations of any loop of known length."""
        return max((c.length or 0 for c in self.native.controls.values() if isinstance(c, Loop)), default=0)


def _where(references: Sequence[Reference]) -> list[tuple[int, int, int]]:
    return [(r.start, r.end, r.array.address) for r in references]


def _nbytes(t: Any) -> int:
    n = t.nbytes
    if not isinstance(n, int):
        raise InternalError(f"a device program has a value of type {t}, whose size is not fixed")
    return n


@dataclass(frozen=True)
class Addresses:
    """Where the memory of a run lies."""

    arena: int
    status: int
    workspace: int


class Walk:
    """Starts the calls of a program in order on one stream."""

    def __init__(self, loaded: LoadedProgram, at: Addresses) -> None:
        self.loaded, self.device, self.at = loaded, loaded.device, at
        self._numbers: list[Any] = []
        self._counted = 0
        self._rows: dict[tuple[str, int], Any] = {}
        self.on_call: Callable[[Call], None] | None = None  # told of every kernel before it is started

    def address(self, p: MemoryRef, buffers: Sequence[int]) -> int:
        if p.space == "buffer":
            return buffers[p.number] + p.inside
        return self.at.arena + p.offset if p.space == "arena" else self.loaded.constant(p.number)

    def run(self, calls: Sequence[Call], buffers: Sequence[int], stream: int) -> None:
        """`buffers`: addresses of the inputs, then of the outputs."""
        for c in calls:
            args = [self.address(p, buffers) for p in c.args]
            control = self.loaded.native.controls.get(c.symbol)
            if control is None:
                self.kernel(c, args, stream)
            else:
                self.control(control, args, stream)

    def kernel(self, c: Call, args: list[int], stream: int) -> None:
        launch = self.loaded.native.launches[c.symbol]
        if 0 in launch.grid or 0 in launch.block:  # nothing to compute
            return
        if self.on_call is not None:
            self.on_call(c)
        function = self.loaded.functions[c.symbol]
        last = self.at.workspace if isinstance(function, CallFunction) else self.at.status
        self.device.launch(function, launch, [*args, last], stream)

    # --- loops and branches -------------------------------------------------------------------------------------------

    def control(self, c: Control, args: Sequence[int], stream: int) -> None:
        if isinstance(c, Loop):
            self.loop(c, args, stream)
            return
        chosen = c.then if self.read(args[c.condition], np.uint8, stream) else c.other
        self.run(chosen, [args[k] for k in (*c.captured, *c.made)], stream)

    def loop(self, c: Loop, args: Sequence[int], stream: int) -> None:
        """Carried values lie in one of two memories in turn; the last ones are moved to where they belong."""
        for x in c.carried:
            self.device.copy(args[x.end], args[x.start], x.nbytes, stream)
        trips = self.trips(c, args, stream)
        k, going = 0, c.condition is None or self.read(args[c.condition], np.uint8, stream) != 0
        while going and (trips is None or k < trips):
            self.step(c, args, k, stream)
            if c.condition is not None:
                going = self.read(args[c.next_condition] + k % 2 * CONDITION_STRIDE, np.uint8, stream) != 0
            k += 1
        if k % 2:
            for x in c.carried:
                self.device.copy(args[x.end], args[x.other], x.nbytes, stream)

    def trips(self, c: Loop, args: Sequence[int], stream: int) -> int | None:
        """Iterations at most; None for no bound."""
        if c.trips is None:
            return c.length
        asked = self.read(args[c.trips], np.int64, stream)
        return asked if c.length is None else min(asked, c.length)

    def step(self, c: Loop, args: Sequence[int], k: int, stream: int) -> None:
        """Iteration k. A row that does not begin where kernels count on is worked on in a place of its own."""
        count = 1 + len(c.carried)
        buffers = self.iteration(c, args, k, stream)
        inputs = dict(zip(range(count, count + len(c.scanned)), c.scanned))
        outputs = dict(zip(range(len(buffers) - len(c.stacked), len(buffers)), c.stacked))
        moved = [(j, r, buffers[j]) for j, r in (*inputs.items(), *outputs.items()) if buffers[j] % PARAMETER_ALIGN]
        for j, r, row in moved:
            buffers[j] = self.place_for_row(c, j, r.nbytes)
            if j in inputs:
                self.device.copy(buffers[j], row, r.nbytes, stream)
        self.run(c.body, buffers, stream)
        for j, r, row in moved:
            if j in outputs:
                self.device.copy(row, buffers[j], r.nbytes, stream)

    def place_for_row(self, c: Loop, j: int, nbytes: int) -> int:
        key = c.symbol, j
        if key not in self._rows:
            self._rows[key] = self.device.alloc(nbytes)
        return int(self._rows[key].address)

    def make_rows(self) -> None:
        """Places for all rows that may need one: while work is recorded no memory can be had."""
        for c in self.loaded.native.controls.values():
            if isinstance(c, Loop):
                count = 1 + len(c.carried)
                last = count + len(c.scanned) + len(c.captured) + (c.condition is not None) + len(c.carried)
                rows = [*enumerate(c.scanned, count), *enumerate(c.stacked, last)]
                for j, r in rows:
                    if r.nbytes % PARAMETER_ALIGN:
                        self.place_for_row(c, j, r.nbytes)

    def iteration(self, c: Loop, args: Sequence[int], k: int, stream: int) -> list[int]:
        """The buffers of the body in iteration k, in the order of `dnnc.backends.llvm.control`."""
        old = [args[x.other if k % 2 else x.end] for x in c.carried]
        new = [args[x.end if k % 2 else x.other] for x in c.carried]
        condition = [] if c.condition is None else [args[c.next_condition] + k % 2 * CONDITION_STRIDE]

        def rows(of: Sequence[Row]) -> list[int]:
            return [args[r.arg] + ((c.length or 0) - 1 - k if r.backward else k) * r.nbytes for r in of]

        return [
            self.number(k, stream),
            *old,
            *rows(c.scanned),
            *(args[a] for a in c.captured),
            *condition,
            *new,
            *rows(c.stacked),
        ]

    def number(self, k: int, stream: int) -> int:
        """The address at which the number k (int64) lies."""
        if k >= self._counted:
            self.count(max(k + 1, 2 * self._counted, NUMBERS), stream)
        return int(self._numbers[-1].address) + PARAMETER_ALIGN * k

    def count(self, n: int, stream: int) -> None:
        """Put the numbers below n on the device. Tables of before stay, for kernels under way may read them."""
        numbers = np.zeros((n, PARAMETER_ALIGN // 8), np.int64)
        numbers[:, 0] = np.arange(n)
        table = self.device.alloc(numbers.nbytes)
        self.device.upload(table.address, numbers, stream)
        self.device.synchronize(stream)
        self._numbers.append(table)
        self._counted = n

    def read(self, address: int, dtype: Any, stream: int) -> int:
        """A number that kernels have written: waits for them."""
        got = np.zeros(1, dtype)
        self.device.download(got.view(np.uint8), address, stream)
        self.device.synchronize(stream)
        return int(got[0])


class Frame:
    """Memory and recording of one run at a time. Runs on another stream than the last wait for it on the device."""

    def __init__(self, loaded: LoadedProgram) -> None:
        self.loaded, self.device = loaded, loaded.device
        self._memory, (status, arena, workspace) = self._places(
            [STATUS_BYTES, loaded.arena_bytes, loaded.workspace_bytes]
        )
        self._slots: tuple[Memory, list[int]] | None = None
        self._elsewhere: dict[int, Memory] = {}  # where donated outputs are made that may not be made where they end
        self.status = status
        self._own = self.device.new_stream()
        self.stream = self._own.address
        self.walk = Walk(loaded, Addresses(arena, status, workspace))
        self.device.fill(status, 0, STATUS_BYTES, self.stream)
        if loaded.iterations():
            self.walk.count(loaded.iterations(), self.stream)
        self.walk.make_rows()
        self.device.synchronize(self.stream)
        self.done = self.device.new_event()
        self.last = self.stream
        self._recorded: dict[Hashable, Recorded] = {}
        self._places_before: list[int] = []  # addresses of the donated inputs of the run before
        self._staged: tuple[list[Array], list[Array]] | None = None
        self.status_host = self.device.pinned(STATUS_BYTES)

    def _places(self, sizes: Sequence[int]) -> tuple[Memory, list[int]]:
        """Memory for things of these sizes, and their addresses."""
        starts = np.cumsum([0, *(aligned(n) for n in sizes)]).tolist()
        memory = self.device.alloc(max(starts[-1], ALIGN))
        return memory, [memory.address + s for s in starts[:-1]]

    @property
    def slots(self) -> list[int]:
        """Return addresses of inputs and outputs, allocated on demand. In-place outputs have their input's."""
        if self._slots is None:
            inputs, in_place = self.loaded.inputs, self.loaded.in_place
            memory, at = self._places(
                [*inputs, *(0 if k in in_place else n for k, n in enumerate(self.loaded.outputs))]
            )
            for k in in_place:
                at[len(inputs) + k] = at[self.loaded.native.donated[k]]
            self._slots = memory, at
        return self._slots[1]

    # --- runs ---------------------------------------------------------------------------------------------------------

    def run_host(self, arrays: Sequence[Array], results: Sequence[Array]) -> tuple[int, int, int]:
        """Run on NumPy arrays, contiguous and of the right types; returns the status when all is done."""
        inputs, outputs = self.staging()
        for to, a in zip(inputs, arrays):
            to[...] = a.reshape(-1).view(np.uint8)
        self.follow(self.stream)
        self.go("host", self.through_host, self.stream)
        self.device.synchronize(self.stream)
        for r, made in zip(results, outputs):
            r.reshape(-1).view(np.uint8)[...] = made
        return self.outcome(self.stream) if self.loaded.native.guarded else (0, 0, 0)

    def staging(self) -> tuple[list[Array], list[Array]]:
        """Pinned host memory for the inputs and outputs."""
        if self._staged is None:
            inputs = [self.device.pinned(n) for n in self.loaded.inputs]
            self._staged = inputs, [self.device.pinned(n) for n in self.loaded.outputs]
        return self._staged

    def through_host(self, stream: int) -> None:
        inputs, outputs = self.staging()
        for slot, a in zip(self.slots, inputs):
            if a.nbytes:
                self.device.upload(slot, a, stream)
        self.compute(stream)
        for slot, a in zip(self.slots[len(inputs) :], outputs):
            if a.nbytes:
                self.device.download(a, slot, stream)

    def compute(self, stream: int) -> None:
        self.walk.run(self.loaded.native.calls, self.slots, stream)

    def run_device(self, inputs: Sequence[int], outputs: Sequence[int], stream: int) -> None:
        """Run on device addresses in a stream's order; returns early unless the host has conditions to read.

        An output that takes the memory of an input ends there, and at its own address too where that is another.
        """
        self.follow(stream)
        own = [inputs[j] for j in self.loaded.native.donated.values()]
        again, self._places_before = own == self._places_before and not any(a % PARAMETER_ALIGN for a in own), own
        if self.direct([*inputs, *outputs], again):
            self.on_memory(inputs, outputs)(stream)
        else:
            self._through_slots(inputs, outputs, stream, again)
        self.device.record(self.done, stream)
        self.last = stream

    def direct(self, buffers: Sequence[int], again: bool = False) -> bool:
        """True if launches on caller memory beat copies around a graph. `again`: donated inputs need no slots."""
        if any(a % PARAMETER_ALIGN for a in buffers):
            return False
        loaded, donated = self.loaded, self.loaded.native.donated
        moved = sum(loaded.inputs) + sum(loaded.outputs)
        if again:
            moved -= sum(
                loaded.inputs[j] + (loaded.outputs[k] if k in loaded.in_place else 0) for k, j in donated.items()
            )
        own = sum(COPY + 2 * loaded.outputs[k] / COPIED for k in donated if k not in loaded.in_place)
        return not loaded.recordable or START * loaded.kernels + own < START + COPY * len(buffers) + 2 * moved / COPIED

    def _through_slots(self, inputs: Sequence[int], outputs: Sequence[int], stream: int, again: bool) -> None:
        """`again`: donated inputs lie where they did in the last run, so a graph of it is worth recording."""
        n, donated, places = len(inputs), self.loaded.native.donated, list(self.slots)
        graph: Hashable = "device"
        if again and donated:
            graph = tuple(self._places_before)
            self._forget_but(graph, stream)
            for k, j in donated.items():
                places[j] = inputs[j]
                places[n + k] = inputs[j] if k in self.loaded.in_place else places[n + k]
        for place, source, size in zip(places, inputs, self.loaded.inputs):
            self.device.copy(place, source, size, stream)
        self.go(graph, lambda at: self.walk.run(self.loaded.native.calls, places, at), stream)
        for place, to, size in zip(places[n:], outputs, self.loaded.outputs):
            self.device.copy(to, place, size, stream)
        for k, j in donated.items():
            if outputs[k] != inputs[j]:
                self.device.copy(inputs[j], places[n + k], self.loaded.outputs[k], stream)

    def _forget_but(self, graph: Hashable, stream: int) -> None:
        """Let go of the graph on other donated memory; waits for it."""
        for old in [r for r in self._recorded if isinstance(r, tuple) and r != graph]:
            self.device.synchronize(stream)
            del self._recorded[old]

    def bind(self, inputs: Sequence[int], outputs: Sequence[int]) -> Callable[[int], None]:
        """Return a function that runs in a stream on memory at these addresses, without copies of results."""
        run = self.on_memory(inputs, outputs)
        return run if not self.loaded.recordable else self.device.capture(self.stream, lambda: run(self.stream)).launch

    def on_memory(self, inputs: Sequence[int], outputs: Sequence[int]) -> Callable[[int], None]:
        """Return a function that runs all kernels at these addresses and copies results to their final places."""
        buffers, copies = [*inputs, *outputs], []
        for k, j in self.loaded.native.donated.items():
            own, wanted = inputs[j], outputs[k]
            made = own if k in self.loaded.in_place else wanted if wanted != own else self.elsewhere(k)
            buffers[len(inputs) + k] = made
            copies += [(to, made, self.loaded.outputs[k]) for to in dict.fromkeys((own, wanted)) if to != made]

        def run(stream: int) -> None:
            self.walk.run(self.loaded.native.calls, buffers, stream)
            for to, made, size in copies:
                self.device.copy(to, made, size, stream)

        return run

    def elsewhere(self, k: int) -> int:
        """The address of a place for output k, which is read on where it will end."""
        if k not in self._elsewhere:
            self._elsewhere[k] = self.device.alloc(max(self.loaded.outputs[k], 1))
        return self._elsewhere[k].address

    # --- inside -------------------------------------------------------------------------------------------------------

    def go(self, name: Hashable, work: Callable[[int], None], stream: int) -> None:
        """Do the work: as a graph, recorded the first time, where the program can be recorded."""
        if not self.loaded.recordable:
            work(stream)
            return
        if name not in self._recorded:
            assert self.slots is not None  # taken now: while work is recorded no memory can be had
            self._recorded[name] = self.device.capture(self.stream, lambda: work(self.stream))
        self._recorded[name].launch(stream)

    def follow(self, stream: int) -> None:
        """What comes on this stream waits for the last run, which may be on another."""
        if stream != self.last:
            self.device.wait(self.done, stream)
        self.last = stream

    def outcome(self, stream: int) -> tuple[int, int, int]:
        """The status of the runs since the last time, which is then cleared; waits for the stream."""
        self.device.download(self.status_host, self.status, stream)
        self.device.synchronize(stream)
        code, kernel, value, _ = self.status_host.view(np.int32).tolist()
        if code:
            self.device.fill(self.status, 0, STATUS_BYTES, stream)
            self.device.synchronize(stream)
        return code, kernel, value

    def status_of_before(self) -> tuple[int, int, int]:
        """The same of runs that are done, while others may be under way."""
        status = np.zeros(STATUS_BYTES // 4, np.int32)
        self.device.download(status.view(np.uint8), self.status, DEFAULT_STREAM)
        self.device.synchronize(DEFAULT_STREAM)
        code, kernel, value, _ = status.tolist()
        if code:
            self.device.fill(self.status, 0, STATUS_BYTES, DEFAULT_STREAM)
        return code, kernel, value
