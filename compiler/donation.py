"""Donated inputs: memory that a call may write its results to, because the caller does not need the contents any more.

    f = dnnc.compile(step, donate={"past": "present"})      f(past=cache) writes `present` where `past` was, and gives
                                                            that very array

Where the plan proves that nothing is written there before it was read for the last time, kernels do so at once; else
the result is copied there in the end. Either way the caller holds one array, on a device in its own memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.runtime.arrays import is_device_array
from dnnc.backends.runtime.device import DeviceArray
from dnnc.ir.errors import InputError
from dnnc.ir.graph import Graph
from dnnc.ir.types import TensorType

if TYPE_CHECKING:
    from dnnc.backends.base import Instance
    from dnnc.passes.planning.program import ScheduledGraph

Array = np.ndarray[Any, Any]


def donated(graph: Graph, names: tuple[Sequence[str], Sequence[str]], donate: Mapping[str, str]) -> dict[int, int]:
    """Check user-named donations (Graph.donated). InputError for unknown names or types that differ."""
    inputs, outputs = (list(n) for n in names)
    pairs: dict[int, int] = {}
    for a, b in donate.items():
        for what, name, known in (("input", a, inputs), ("output", b, outputs)):
            if name not in known:
                raise InputError(f"donate: the model has no {what} {name!r}; it has {', '.join(known)}")
        j, k = inputs.index(a), outputs.index(b)
        have, want = graph.inputs[j].type, graph.outputs[k].type
        if (have.dtype, have.shape) != (want.dtype, want.shape):
            raise InputError(
                f"donate: the input {a} is {have}, the output {b} {want}; only an output of the same type can take its "
                "memory"
            )
        if have.dtype.kind == "s":
            raise InputError(f"donate: {a} holds strings, which have no memory of their own")
        pairs[k] = j
    return pairs


def packed(a: Array, t: TensorType) -> Array:
    """An array as a program's input lies in memory: itself, or a copy."""
    return a if t.row_major else np.array(t.encoding.pack(a)[0], order="C")


def unpacked(a: Array, t: TensorType) -> Array:
    """An array of a program's memory in rows: itself, or a copy."""
    return a if t.row_major else np.array(t.layout.unpack(a, t.shape)[0], order="C")  # type: ignore[union-attr,arg-type]


def copied(program: ScheduledGraph, outputs: Sequence[str]) -> tuple[str, ...]:
    """What a report says of donated outputs that are not made where they end. `outputs`: users' names."""
    graph, place = program.graph, program.memory.place
    names = [outputs[k] for k, j in graph.donated.items() if place[graph.outputs[k]] != ("input", j)]
    return (f"{', '.join(names)}: copied to the memory of its input, which is read after it is made",) if names else ()


def are_apart(views: Sequence[DeviceArray]) -> bool:
    """Does each lie in memory of its own?"""
    return _spans_apart([(v.address, v.address + n) for v in views if (n := v.nbytes)])


def _spans_apart(spans: Sequence[tuple[int, int]]) -> bool:
    """Do these ranges of addresses, from the first to behind the last, not overlap?"""
    return all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))


@dataclass(frozen=True)
class Donation:
    """The pairs of one executable, by number, and the names of the inputs. `held`: some may not lie in rows."""

    pairs: Mapping[int, int]
    names: Sequence[str]
    held: bool = False

    def check(self, arrays: Sequence[Array], weights: Sequence[Array] = ()) -> None:
        """Raise InputError where a donated array is read-only or shares memory with an argument or parameter."""
        every = [*arrays, *weights]
        apart = all(a.flags.c_contiguous for a in every) and _spans_apart(
            [(start, start + n) for a in every if (n := a.nbytes) for start in (a.__array_interface__["data"][0],)]
        )
        for j in self.pairs.values():
            a = arrays[j]
            others = () if apart else [i for i, b in enumerate(arrays) if i != j and np.may_share_memory(a, b)]
            self._check(j, not a.flags.writeable, others, not apart and any(np.may_share_memory(a, w) for w in weights))

    def check_views(self, views: Sequence[DeviceArray], weights: Sequence[DeviceArray] = ()) -> None:
        """The same of arrays on a device."""
        apart = are_apart([*views, *weights])  # as they nearly always are
        for j in self.pairs.values():
            a = views[j]
            others = () if apart else [i for i, b in enumerate(views) if i != j and a.overlaps(b)]
            self._check(j, a.read_only, others, not apart and any(map(a.overlaps, weights)))

    def _check(self, j: int, read_only: bool, others: Sequence[int], weight: bool) -> None:
        if read_only:
            raise InputError(f"input {self.names[j]} is donated, but read-only: give a copy")
        if others:
            raise InputError(
                f"input {self.names[j]} is donated, and {self.names[others[0]]} lies in its memory: give a copy of one"
            )
        if weight:
            raise InputError(f"input {self.names[j]} is donated, and a parameter lies in its memory: give a copy")

    def check_side(self, values: Sequence[Any], on_device: bool) -> None:
        """Raise InputError where a donated array is on the host and the call on a device, or vice versa."""
        for j in self.pairs.values():
            if is_device_array(values[j]) != on_device:
                where, first = ("host", "device") if on_device else ("device", "host")
                raise InputError(
                    f"input {self.names[j]} is donated and lies on the {where}, the first input on the {first}: bring "
                    "one to the other"
                )

    def run(
        self, instance: Instance, arrays: Sequence[Array], given: list[Array] | None, weights: Sequence[Array] = ()
    ) -> list[Array]:
        """A call whose results take the memory of inputs. `given`: the caller wants them in these buffers too."""
        self.check(arrays, weights)
        if self.held:
            return self._packed(instance, arrays, given)
        if given is None and instance.outputs is None:
            return self.finish(instance.call(arrays), arrays, None)
        results: Sequence[Any] = given if given is not None else [None] * len(instance.outputs or ())
        buffers = []
        for k, r in enumerate(results):
            if k in instance.in_place:
                r = arrays[self.pairs[k]]
            elif r is None:
                r = np.empty(*(instance.outputs or ())[k])
            elif k in self.pairs:  # what is copied in the end must not go through the buffer of an input
                r = np.empty_like(r)
            buffers.append(r)
        instance.into(arrays, buffers)
        return self.finish(buffers, arrays, given)

    def _packed(self, instance: Instance, arrays: Sequence[Array], given: list[Array] | None) -> list[Array]:
        """The same where donated inputs do not lie in rows."""
        program: Any = instance.program
        held = [packed(a, t) for a, t in zip(arrays, program.inputs)]
        buffers: list[Array] = []
        for k, (shape, dtype) in enumerate(instance.outputs or ()):
            free = np.empty(shape, dtype) if given is None or k in self.pairs else given[k]
            buffers.append(held[self.pairs[k]] if k in instance.in_place else free)
        instance.into(held, buffers)
        return self.finish([unpacked(b, t) for b, t in zip(buffers, program.outputs)], arrays, given)

    def checked(self, instance: Instance, arrays: Sequence[Array]) -> Any:
        """What a call gives for copies of these arrays: one array, or a list."""
        results = self.run(instance, [a.copy() for a in arrays], None)
        return results[0] if len(results) == 1 else results

    def finish(self, buffers: Sequence[Array], arrays: Sequence[Array], results: list[Array] | None) -> list[Array]:
        """Copy results into donated inputs, and into `results` where the caller gave other buffers."""
        out = list(buffers)
        for k, j in self.pairs.items():
            if out[k] is not arrays[j]:
                np.copyto(arrays[j], out[k])
                out[k] = arrays[j]
            if results is not None and results[k].ctypes.data != arrays[j].ctypes.data:
                np.copyto(results[k], arrays[j])
                out[k] = results[k]
        return out
