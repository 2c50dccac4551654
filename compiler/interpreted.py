"""target="reference": the graph interpreter behind the interface of compiled programs. Slow and right; what everything
else is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.cpu_compiler import only_for_devices
from dnnc.hybrid import copy_results
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.options import CompileOptions
from dnnc.parameters import Parameters, frozen
from dnnc.program_cache import ModelCompiler
from dnnc.report.log import Log
from dnnc.tools.accuracy import as_stored

Array = np.ndarray[Any, Any]


class InterpretedProgram:
    """A graph that NumPy runs node by node, each result rounded to its declared dtype; an instance of itself for all
    sizes.
    """

    outputs = None
    at_once: frozenset[int] = frozenset()

    def __init__(self, graph: Graph, names: Sequence[str]) -> None:
        """`names`: of the outputs, for messages."""
        self.graph, self._names, self.used = graph, names, False

    @property
    def program(self) -> InterpretedProgram:
        return self

    def call(self, arrays: Sequence[Array]) -> list[Array]:
        return [np.array(r) for r in run(self.graph, arrays)]

    def into(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        copy_results(run(self.graph, arrays), results, self._names)


class InterpreterCompiler(ModelCompiler):
    """Compiles nothing; one program serves all sizes."""

    onnx = None
    target = None

    def __init__(
        self,
        graph: Graph,
        names: tuple[Sequence[str], Sequence[str]],
        options: CompileOptions,
        parameters: Parameters | None = None,
    ) -> None:
        """`parameters`: what those of the graph hold."""
        self.interface, (self.inputs, self.outputs), self._precision, self._parameters = (
            graph,
            names,
            options.precision,
            parameters,
        )
        self.options = CompileOptions(target="reference", donate=options.donate)
        self.log = Log(graph.name, "reference", 1)
        self._program = InterpretedProgram(graph, self.outputs)
        self.refitted(())

    def refitted(self, instances: Sequence[Any]) -> None:
        graph = self.interface if self._parameters is None else frozen(self.interface, self._parameters.held)
        self._program.graph = as_stored(graph, self._precision)

    @property
    def graph(self) -> Graph:
        return self._program.graph

    def sizes(self, dims: Mapping[Var, int]) -> tuple[int, ...]:
        return ()

    def compile(self, dims: Mapping[Var, int]) -> InterpretedProgram:
        return self._program

    def instance(self, program: InterpretedProgram, dims: Mapping[Var, int]) -> InterpretedProgram:
        return program

    def source(self, program: Any, stage: str, kernel: str | None) -> str:
        raise UnsupportedError("the target reference runs the graph as it is: look at `graph`")

    def save(self, path: Any, programs: Mapping[tuple[int, ...], Any], small: bool, archs: Sequence[str]) -> None:
        from dnnc.artifact.writer import save_reference

        only_for_devices(archs)
        save_reference(path, self.graph, self.inputs, self.outputs, self.options)
