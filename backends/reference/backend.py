"""The graph interpreter as a target: slow and right; what everything else is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.backends.base import Backend
from dnnc.backends.runtime.results import copy_results
from dnnc.ir.errors import TargetError
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.target import Target
from dnnc.passes.base import pass_context
from dnnc.passes.rewrites.precision import precision as set_precision

Array = np.ndarray[Any, Any]


class ReferenceBackend(Backend):
    """Runs graphs node by node in NumPy; see Backend."""

    name = "reference"
    stages = ("graph",)
    any_sizes = True
    compiles = False

    def __init__(self, target: Target, threads: int | None = None) -> None:
        if target.options:
            raise TargetError(f"target={str(target)!r}: the interpreter has no options")

    def interpret(self, graph: Graph, precision: str | None, outputs: Sequence[str]) -> InterpretedProgram:
        return InterpretedProgram(stored(graph, precision), precision, tuple(outputs))

    def runner(self, parameters: Any | None) -> ReferenceRunner:
        return ReferenceRunner(parameters)

    @classmethod
    def availability(cls) -> dict[str, Any]:
        return {"name": cls.name, "available": True, "reason": "", "what": "the graph interpreter in NumPy; slow"}


class InterpretedProgram:
    """A graph whose results are rounded to their declared dtypes, for all sizes. `names`: of the outputs."""

    def __init__(self, graph: Graph, precision: str | None, names: Sequence[str]) -> None:
        self.graph, self.precision, self.names = graph, precision, names


class InterpretedInstance:
    """See Instance; sizes come with each call."""

    outputs = None
    in_place: frozenset[int] = frozenset()

    def __init__(self, program: InterpretedProgram, runner: ReferenceRunner) -> None:
        self.program, self._runner, self.used = program, runner, False

    def call(self, arrays: Sequence[Array]) -> list[Array]:
        return [np.array(r) for r in run(self._runner.graph(self.program), arrays)]

    def into(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        copy_results(run(self._runner.graph(self.program), arrays), results, self.program.names)


class ReferenceRunner:
    """See Runner; parameters are constants of the graph until a refit."""

    def __init__(self, parameters: Any | None) -> None:
        self._parameters = parameters
        self._frozen: dict[InterpretedProgram, Graph] = {}

    def instance(
        self, program: InterpretedProgram, dims: Mapping[Var, int], in_place: frozenset[int]
    ) -> InterpretedInstance:
        return InterpretedInstance(program, self)

    def refitted(self, instances: Sequence[Any]) -> None:
        self._frozen.clear()

    def graph(self, program: InterpretedProgram) -> Graph:
        """The graph with what parameters hold now."""
        if self._parameters is None:
            return program.graph
        if program not in self._frozen:
            self._frozen[program] = stored(self._parameters.frozen(program.graph), program.precision)
        return self._frozen[program]


def stored(graph: Graph, precision: str | None) -> Graph:
    """The graph with the types in which values are stored."""
    if precision is None or graph.parameters:
        return graph
    graph = graph.copy()
    set_precision(graph, pass_context(precision=precision))
    return graph
