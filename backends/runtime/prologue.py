"""What kernels read of parameters: computed by NumPy from the arrays that users gave, when these change.

    prologue: w_0 = transpose(w)     kernels read w_0 @ "1/16 0 1%16"     ->     the transposed weights in panels, in memory of their own

What is read as it was given stays the user's memory: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from dnnc.backends.runtime.frames import ALIGN
from dnnc.backends.runtime.link import pack_aligned
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.interp import run
from dnnc.ir.op import Trait
from dnnc.ir.types import TensorType
from dnnc.passes.base import pass_context
from dnnc.passes.planning.program import Program
from dnnc.passes.rewrites.dce import dce

Array = np.ndarray[Any, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Prologue:
    """`graph` takes the parameters and gives what kernels read, in the order of the table; `types` say how each lies in
    memory.
    """

    graph: Graph
    types: tuple[TensorType, ...]

    def as_they_lie(self, given: Mapping[str, T]) -> dict[int, T]:
        """Of these parameters those that kernels read as they are given, by their numbers in the table."""
        known = {v: given[v.name] for v in self.graph.inputs if v.name in given}
        roots = [_seen(v) for v in self.graph.outputs]
        return {k: known[v] for k, (v, t) in enumerate(zip(roots, self.types)) if v in known and t.layout is None}

    def reads(self, there: Container[int]) -> set[str]:
        """The parameters whose contents are needed to make the table without these numbers."""
        values = {v for k, v in enumerate(self.graph.outputs) if k not in there}
        for n in self.graph.nodes(reverse=True):
            if not values.isdisjoint(n.outputs):
                values.update(v for v in n.inputs if v is not None)
        return {v.name for v in self.graph.inputs if v in values}

    def run(self, parameters: Mapping[str, Array | None]) -> list[Array]:
        """The arrays of the table, contiguous.

        Args:
            parameters: contiguous arrays of the right types, by the names of the graph's inputs; None for one whose
                contents do not matter.
        """
        asked = [(v, parameters[v.name]) for v in self.graph.inputs]
        given = [
            np.empty([int(str(d)) for d in v.type.shape], v.type.dtype.numpy) if a is None else a for v, a in asked
        ]
        own = dict(zip(self.graph.inputs, given))
        made = iter(run(self.graph, given))
        values = [own.get(v, a) for v, a in zip(self.graph.outputs, made)]
        return [_laid(a, t, given) for a, t in zip(values, self.types)]


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
        t.layout is None
        and a.flags.c_contiguous
        and (a.ctypes.data % ALIGN == 0 or any(np.may_share_memory(a, g) for g in given))
    ):
        return a
    return pack_aligned(a, t)


def prologue_of(program: Program) -> Prologue | None:
    """The prologue of a program whose plan numbers what its kernels read of parameters; None where they read none."""
    made, bound = program.graph.prologue, program.memory.bound
    if made is None or not bound:
        return None
    made.outputs = [held for held, _ in bound]
    dce(made, pass_context())
    return Prologue(made, tuple(t for _, t in bound))
