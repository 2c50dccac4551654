"""A program whose state stays where it is: inputs whose memory outputs take, held from one call to the next.

The state is nobody else's memory, so a call checks nothing of it. On the host, a result that the plan could not put
into the memory of its input goes to a second buffer, and the two change places. On a device a call is one launch of a
recorded graph, whose addresses are fixed: batches are copied to memory of the program, and results from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from dnnc.array.devices import HOST, DeviceData, Place, place
from dnnc.executable import Executable
from dnnc.ir.types import TensorType

Buffer = Any  # numpy.ndarray, or DeviceData


class Resident:
    """Runs `f` on a state and further arrays. The first inputs of `f` are the state, its donated inputs. Nobody writes
    into the first of the further arrays: where it is that of the last call, it is not copied to the device again.

    Args:
        f: compiled for fixed sizes, with donated inputs.
        where: the device of the state.
        donated: numbers of the arrays of the state that the first outputs replace, in order.

    Attributes:
        types: of the inputs of `f`, as they lie in memory.
    """

    def __init__(self, f: Executable, where: str, donated: Sequence[int]) -> None:
        self.f, self.donated = f, tuple(donated)
        self.place: Place | None = None if where == HOST else place(where)
        shapes = tuple(tuple(int(str(d)) for d in v.shape) for v in f.inputs)
        self.instance: Any = f.cache.instance(shapes)
        self._call: Any = None  # bound to memory of a device
        self._first: Any = None  # of the further arrays, that of the last call
        self._stream = 0
        self._replaced: Callable[[list[Buffer]], Sequence[Buffer]] = (
            itemgetter(*donated) if len(donated) > 1 else lambda held: [held[j] for j in self.donated]
        )
        self.types: Sequence[TensorType] = getattr(self.instance.program, "inputs", ())
        if self.place is None:
            outputs = self.instance.outputs
            assert outputs is not None, "sizes are fixed"
            self._moved = [(k, j) for k, j in enumerate(self.donated) if k not in self.instance.in_place]
            self._spare = {k: np.empty(*outputs[k]) for k, _ in self._moved}
            self._fresh = list(outputs[len(self.donated) :])

    def __call__(self, held: list[Buffer], others: Sequence[Buffer]) -> list[Buffer]:
        """The outputs that are no part of the state; `held`, the state, is brought up to date."""
        if self.place is not None:
            return self._queue(self.place, held, others)
        results = list(self._replaced(held))
        for k, _ in self._moved:
            results[k] = self._spare[k]
        results += [np.empty(s, d) for s, d in self._fresh]
        self.instance.into([*held, *others], results)
        for k, j in self._moved:
            self._spare[k], held[j] = held[j], results[k]
        return results[len(self.donated) :]

    # --- on a device --------------------------------------------------------------------------------------------------

    def _queue(self, where: Place, held: Sequence[DeviceData], others: Sequence[Buffer]) -> list[Buffer]:
        stream = where.device.current_stream()
        if self._call is None or stream != self._stream:
            self._bind(where, held, others, stream)
        first = others[0]
        kept = first is self._first
        self._first = first
        for there, a in zip(self._inputs[kept:], others[kept:]):
            if isinstance(a, DeviceData):
                where.order(a, stream)
                where.device.copy(there.address, a.address, a.nbytes, stream)
                where.done(a, stream)
            elif a.nbytes:
                where.device.upload(there.address, a, stream)
        self._call()
        if self.instance.program.guarded:
            where.defer(self, self._call.check, stream)
        return [where.copied(r) for r in self._results]

    def _bind(self, where: Place, held: Sequence[DeviceData], others: Sequence[Buffer], stream: int) -> None:
        """Record the program for these addresses, in the order of a stream."""
        for d in held:
            where.order(d, stream)
            d.stream = stream
        self._inputs = [where.empty(a.shape, a.dtype, stream) for a in others]
        self._results = [where.empty(s, np.dtype(d), stream) for s, d in self.instance.outputs[len(self.donated) :]]
        self._first = None
        self._call = self.f.bind([*held, *self._inputs], [*(held[j] for j in self.donated), *self._results])
        self._stream = stream

    def release(self) -> None:
        """The state has other memory from now on."""
        self._call = None
