"""Where an executable comes from: what it knows of its model, and how it gets the programs that it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.native import Native
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.options import CompileOptions

OnnxParts = tuple[bytes, Sequence[np.ndarray[Any, Any]]]


@dataclass(frozen=True)
class Origin:
    """What an executable is made from.

    Attributes:
        interface: has the model's name, inputs and outputs. It is the imported graph, or of a loaded model a graph without nodes.
        inputs: what users call the inputs.
        outputs: what users call the outputs.
        graph: gives the imported graph before any pass, with the dims that were fixed and the outputs that were added.
        specialise: compiles for these dims; where `serves_all(dims)`, for all dims of which that is true.
        shared: one program serves all dims from these lower bounds on (a dim that is not named has its own); None: none does.
        options: how to compile, for programs that are still to come.
        target: the CPU.
        onnx: gives the ONNX model that was read, as a protobuf and the bytes of its large tensors; None where it is not needed any more.
    """

    interface: Graph
    inputs: Sequence[str]
    outputs: Sequence[str]
    graph: Callable[[], Graph]
    specialise: Callable[[Mapping[Var, int]], Native]
    shared: Mapping[str, int] | None
    options: CompileOptions
    target: CpuTarget
    onnx: Callable[[], OnnxParts] | None = None

    def serves_all(self, dims: Mapping[Var, int]) -> bool:
        """Does the program for all sizes serve these? Small sizes, at which some value is empty, get programs of their own."""
        return self.shared is not None and all(n >= self.shared.get(v.name, 0) for v, n in dims.items())
