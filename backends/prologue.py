"""What kernels read of parameters: computed by NumPy from the arrays that users gave, when these change.

    prologue: w_0 = transpose(w)     kernels read w_0 @ "1/16 0 1%16"     ->     the transposed weights in panels, in memory of their own

What is read as it was given stays the user's memory: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.backends.link import pack_aligned
from dnnc.backends.runtime import ALIGN
from dnnc.ir.graph import Graph
from dnnc.ir.interp import run
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext
from dnnc.passes.graph.dce import dce
from dnnc.passes.program import Program

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Prologue:
    """`graph` takes the parameters and gives what kernels read, in the order of the table; `types` say how each lies in memory."""

    graph: Graph
    types: tuple[TensorType, ...]

    def run(self, parameters: Mapping[str, Array]) -> list[Array]:
        """The arrays of the table, contiguous. `parameters`: contiguous arrays of the right types, by the names of the graph's inputs."""
        given = [parameters[v.name] for v in self.graph.inputs]
        own = dict(zip(self.graph.inputs, given))
        made = iter(run(self.graph, given))
        values = [own.get(v, a) for v, a in zip(self.graph.outputs, made)]
        return [_laid(a, t, given) for a, t in zip(values, self.types)]


def _laid(a: Array, t: TensorType, given: list[Array]) -> Array:
    """An array as it lies in memory: as it is where it can be."""
    if t.layout is None and a.flags.c_contiguous and (a.ctypes.data % ALIGN == 0 or any(np.may_share_memory(a, g) for g in given)):
        return a
    return pack_aligned(a, t)


def prologue_of(program: Program) -> Prologue | None:
    """The prologue of a program whose plan numbers what its kernels read of parameters; None where they read none."""
    made, bound = program.graph.prologue, program.memory.bound
    if made is None or not bound:
        return None
    made.outputs = [held for held, _ in bound]
    dce(made, PassContext())
    return Prologue(made, tuple(t for _, t in bound))
