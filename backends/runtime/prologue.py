"""What kernels read of parameters: computed from the arrays that users gave, when these change.

    prologue: w_0 = transpose(w) kernels read w_0 @ "1/16 0 1%16"
        -> the transposed weights in panels, in memory of their own

What is read as it was given stays the user's memory: nothing is copied. Large arrays are computed by kernels, which the
backend compiles (`Prologue.compiled`); small ones, and those for which there are no kernels, by NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from dnnc.backends.runtime.frames import ALIGN
from dnnc.backends.runtime.link import pack_aligned
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.op import Trait
from dnnc.ir.types import TensorType
from dnnc.passes.analysis.kinds import is_kernel, kind_of
from dnnc.passes.base import pass_context
from dnnc.passes.planning.program import ScheduledGraph
from dnnc.passes.rewrites.dce import dce

Array = np.ndarray[Any, Any]
T = TypeVar("T")
VIEWS = ("reshape", "identity")
LEAST = 1 << 18  # bytes of an array for which kernels are compiled: NumPy packs fewer in 0.1 ms


# Takes the contents of parameters and gives what kernels read of them, where the backend's kernels find it.
Pack = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class PrologueKernels:
    """A compiled part of a prologue."""

    text: str  # of the graph that it computes
    inputs: tuple[str, ...]  # names of the parameters that it reads, in order
    numbers: tuple[int, ...]  # of the arrays of the table that it makes, in order
    pack: Pack  # makes them


@dataclass(frozen=True)
class Prologue:
    """`graph` maps parameters to kernels' reads, in table order; `types`: their layouts; `kernels` compute some."""

    graph: Graph
    types: tuple[TensorType, ...]
    kernels: PrologueKernels | None = None

    def as_they_lie(self, given: Mapping[str, T]) -> dict[int, T]:
        """Of these parameters those that kernels read as they are given, by their numbers in the table."""
        known = {v: given[v.name] for v in self.graph.inputs if v.name in given}
        roots = [_seen(v) for v in self.graph.outputs]
        return {k: known[v] for k, (v, t) in enumerate(zip(roots, self.types)) if v in known and t.row_major}

    def reads(self, there: Container[int]) -> set[str]:
        """The parameters whose contents are needed to make the table without these numbers."""
        return {v.name for v in _cone(self.graph, [v for k, v in enumerate(self.graph.outputs) if k not in there])[0]}

    def compiled(self, compile: Callable[[Graph], Pack], known: dict[str, Pack]) -> Prologue:
        """The prologue with kernels for what is worth them. `known`: kernels made before, by the graph's text."""
        given = self.as_they_lie({v.name: None for v in self.graph.inputs})
        numbers = tuple(k for k in range(len(self.types)) if k not in given and self._is_worth_kernels(k))
        part = self._only(numbers)
        b = Builder(part)
        packed = {k: self.types[k].encoding.pack_nodes(b, v) for k, v in zip(numbers, part.outputs)}
        buffers = {k: several[0] for k, several in packed.items() if several is not None and len(several) == 1}
        if not buffers:
            return self
        part.outputs = list(buffers.values())
        dce(part, pass_context())
        part.inputs = [v for v in part.inputs if v.uses or part.is_output(v)]
        text, inputs = part.text(), tuple(v.name for v in part.inputs)
        if text not in known:
            known[text] = compile(part)
        return replace(self, kernels=PrologueKernels(text, inputs, tuple(buffers), known[text]))

    def _is_worth_kernels(self, k: int) -> bool:
        nodes = _cone(self.graph, [self.graph.outputs[k]])[1]
        size = self.types[k].nbytes
        return isinstance(size, int) and size >= LEAST and all(is_kernel(kind_of(n)) for n in nodes)

    def _only(self, numbers: Container[int]) -> Graph:
        """A copy of the graph with these outputs."""
        part = self.graph.copy()
        part.outputs = [v for k, v in enumerate(part.outputs) if k in numbers]
        dce(part, pass_context())
        return part

    @cached_property
    def _rest(self) -> tuple[Graph, tuple[int, ...]]:
        """What NumPy computes, and its numbers in the table."""
        done = () if self.kernels is None else self.kernels.numbers
        numbers = tuple(k for k in range(len(self.types)) if k not in done)
        return self._only(numbers), numbers

    def run(self, parameters: Mapping[str, Array]) -> list[Array]:
        """The arrays of the table, contiguous, of contiguous arrays of the right types by the names of the inputs."""
        k, table = self.kernels, self.by_numpy(parameters)
        if k is not None:
            table.update(zip(k.numbers, k.pack([parameters[n] for n in k.inputs])))
        return [table[n] for n in range(len(self.types))]

    def by_numpy(self, parameters: Mapping[str, Array | None]) -> dict[int, Array]:
        """What kernels do not compute, by its number in the table. None: a parameter's contents do not matter."""
        rest, numbers = self._rest
        arrays = ((v, parameters[v.name]) for v in rest.inputs)
        given = {
            v: np.empty([int(str(d)) for d in v.type.shape], v.type.dtype.numpy) if a is None else a for v, a in arrays
        }
        own = list(given.values())
        values = zip(numbers, rest.outputs, run(rest, own))
        return {k: _laid(given.get(v, a), self.types[k], own) for k, v, a in values}


def _cone(graph: Graph, values: Sequence[Value]) -> tuple[list[Value], list[Any]]:
    """The inputs and nodes of a graph that values depend on."""
    needed, nodes = set(values), []
    for n in graph.nodes(reverse=True):
        if not needed.isdisjoint(n.outputs):
            needed.update(v for v in n.inputs if v is not None)
            nodes.append(n)
    return [v for v in graph.inputs if v in needed], nodes


def _seen(v: Value) -> Value:
    """What a value is a view of, with all of its elements."""
    while v.node is not None and Trait.VIEW in v.node.op.traits:
        source = v.node.inputs[0]
        assert source is not None
        v = source
    return v


def _laid(a: Array, t: TensorType, given: list[Array]) -> Array:
    """An array as it lies in memory: as it is where it can be."""
    if (
        t.row_major
        and a.flags.c_contiguous
        and (a.ctypes.data % ALIGN == 0 or any(np.may_share_memory(a, g) for g in given))
    ):
        return a
    return pack_aligned(a, t)


def prologue_of(program: ScheduledGraph) -> Prologue | None:
    """The prologue of a program whose plan numbers what its kernels read of parameters; None where they read none."""
    made, bound = program.graph.prologue, program.memory.bound
    if made is None or not bound:
        return None
    made.outputs = [held for held, _ in bound]
    dce(made, pass_context())
    return Prologue(made, tuple(t for _, t in bound))
