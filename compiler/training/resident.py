"""A program whose state stays where it is: inputs whose memory outputs take, held from one call to the next.

The state is nobody else's memory, so a call checks nothing of it. On the host, a result that the plan could not put
into the memory of its input goes to a second buffer, and the two change places. On a device, all is queued in the
order of the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.array.devices import HOST, DeviceData, Place, place
from dnnc.executable import Executable

Buffer = Any  # numpy.ndarray, or DeviceData


class Resident:
    """Runs `f` on a state and further arrays. The first inputs of `f` are the state, its donated inputs.

    Args:
        f: compiled for fixed sizes, with donated inputs.
        where: the device of the state.
        state: which arrays of the state `f` takes, by number, in order.
        donated: which of these outputs replace, by the number of the output, ahead of all other outputs.
    """

    def __init__(self, f: Executable, where: str, state: Sequence[int], donated: Sequence[int]) -> None:
        self.f, self.state, self.donated = f, tuple(state), tuple(donated)
        self.place: Place | None = None if where == HOST else place(where)
        self._all = self.state == tuple(range(len(self.state)))
        if self.place is None:
            shapes = tuple(tuple(int(str(d)) for d in v.shape) for v in f.inputs)
            self.instance = f.cache.instance(shapes)
            outputs = self.instance.outputs
            assert outputs is not None, "sizes are fixed"
            self._moved = [(k, j) for k, j in enumerate(self.donated) if k not in self.instance.in_place]
            self._spare = {k: np.empty(*outputs[k]) for k, _ in self._moved}
            self._fresh = list(outputs[len(self.donated) :])

    def __call__(self, held: list[Buffer], others: Sequence[Buffer]) -> list[Buffer]:
        """The outputs that are no part of the state; `held`, the state, is brought up to date."""
        inputs = [*(held if self._all else [held[k] for k in self.state]), *others]
        if self.place is not None:
            return self._queue(self.place, held, inputs)
        results = [held[j] for j in self.donated]
        for k, _ in self._moved:
            results[k] = self._spare[k]
        results += [np.empty(s, d) for s, d in self._fresh]
        self.instance.into(inputs, results)
        for k, j in self._moved:
            self._spare[k], held[j] = held[j], results[k]
        return results[len(self.donated) :]

    def _queue(self, where: Place, held: list[Buffer], inputs: Sequence[Buffer]) -> list[Buffer]:
        given = [a if isinstance(a, DeviceData) else where.upload(a) for a in inputs]
        made = self.f(*given)
        results = list(made) if isinstance(made, tuple) else [made]
        for k, j in enumerate(self.donated):
            held[j] = results[k]
        return results[len(self.donated) :]
