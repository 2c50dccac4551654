"""Donated inputs: memory that a call may write its results to, because the caller does not need the contents any more.

    f = dnnc.compile(step, donate={"past": "present"})      f(past=cache) writes `present` where `past` was, and gives that very array

Where the plan proves that nothing is written there before it was read for the last time, kernels do so at once; else the result is copied
there in the end. Either way it is one array instead of two that the caller holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.backends.places import Call
from dnnc.ir.errors import InputError
from dnnc.ir.graph import Graph

Array = np.ndarray[Any, Any]


def donated(graph: Graph, names: tuple[Sequence[str], Sequence[str]], donate: Mapping[str, str]) -> dict[int, int]:
    """What Graph.donated says, of users' names. InputError where there is no such input or output, or their types differ."""
    inputs, outputs = (list(n) for n in names)
    pairs: dict[int, int] = {}
    for a, b in donate.items():
        for what, name, known in (("input", a, inputs), ("output", b, outputs)):
            if name not in known:
                raise InputError(f"donate: the model has no {what} {name!r}; it has {', '.join(known)}")
        j, k = inputs.index(a), outputs.index(b)
        have, want = graph.inputs[j].type, graph.outputs[k].type
        if (have.dtype, have.shape) != (want.dtype, want.shape):
            raise InputError(f"donate: the input {a} is {have}, the output {b} {want}; only an output of the same type can take its memory")
        if have.dtype.kind == "s":
            raise InputError(f"donate: {a} holds strings, which have no memory of their own")
        pairs[k] = j
    return pairs


def placed(pairs: Mapping[int, int], calls: Sequence[Call], inputs: int) -> frozenset[int]:
    """The outputs that a program writes into the memory of their input: it knows no other place for them."""
    used = {p.number for c in calls for p in c.args if p.space == "buffer"}
    return frozenset(k for k in pairs if inputs + k not in used)


@dataclass(frozen=True)
class Donation:
    """The pairs of one executable, by number, and the names of the inputs."""

    pairs: Mapping[int, int]
    names: Sequence[str]

    def check(self, arrays: Sequence[Array], weights: Sequence[Array] = ()) -> None:
        """InputError where a donated array cannot be written to, or another argument or a parameter lies in its memory."""
        for j in self.pairs.values():
            a = arrays[j]
            if not a.flags.writeable:
                raise InputError(f"input {self.names[j]} is donated, but read-only: give a copy")
            for i, b in enumerate(arrays):
                if i != j and np.may_share_memory(a, b):
                    raise InputError(f"input {self.names[j]} is donated, and {self.names[i]} lies in its memory: give a copy of one")
            if any(np.may_share_memory(a, w) for w in weights):
                raise InputError(f"input {self.names[j]} is donated, and a parameter lies in its memory: give a copy")

    def place(self, at_once: frozenset[int], arrays: Sequence[Array], results: list[Array]) -> list[Array]:
        """Buffers for a call: the memory of inputs where the program writes there."""
        return [arrays[self.pairs[k]] if k in at_once else r for k, r in enumerate(results)]

    def finish(self, buffers: Sequence[Array], arrays: Sequence[Array], results: list[Array] | None) -> list[Array]:
        """The results of a call: in the memory of inputs, and of what the caller gave other buffers for (`results`), there too."""
        out = list(buffers)
        for k, j in self.pairs.items():
            if out[k] is not arrays[j]:
                np.copyto(arrays[j], out[k])
                out[k] = arrays[j]
            if results is not None and results[k].ctypes.data != arrays[j].ctypes.data:
                np.copyto(results[k], arrays[j])
                out[k] = results[k]
        return out
