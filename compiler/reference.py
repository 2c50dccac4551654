"""target="reference": the graph interpreter behind the interface of an executable. Slow and right; what everything else is compared with."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

import numpy as np

from dnnc.accuracy import as_stored
from dnnc.compiled import CompiledModel
from dnnc.ir.errors import InputError, UnsupportedError, count
from dnnc.ir.graph import Graph
from dnnc.ir.interp import run
from dnnc.options import CompileOptions
from dnnc.parameters import Parameters, frozen
from dnnc.report import Report
from dnnc.signature import Signature, TensorSpec, described

Array = np.ndarray[Any, Any]


class ReferenceExecutable(CompiledModel):
    """A model that NumPy runs node by node, each result rounded to its declared dtype."""

    def __init__(
        self, graph: Graph, names: tuple[Sequence[str], Sequence[str]], precision: str | None = None, parameters: Parameters | None = None
    ) -> None:
        """`precision`: see CompileOptions; `parameters`: what those of the graph hold."""
        self._imported, self._precision, self._parameters = graph, precision, parameters
        self._signature = Signature(graph, *names)
        self._graph = self._as_run()

    def _as_run(self) -> Graph:
        return as_stored(self._imported if self._parameters is None else frozen(self._imported, self._parameters.held), self._precision)

    @property
    def options(self) -> CompileOptions:
        """How it was compiled."""
        return CompileOptions(target="reference")

    @property
    def graph(self) -> Graph:
        """The imported graph, with the dims that were fixed."""
        return self._graph

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """See Executable."""
        return self._parameters.specs if self._parameters is not None else ()

    def refit(self, changed: Mapping[str, Any] | None = None) -> None:
        """See Executable."""
        if self._parameters is None:
            raise InputError("refit: the model has no parameters; compile it with parameters=")
        self._parameters.refit(changed or {})
        self._graph = self._as_run()

    @property
    def report(self) -> Report:
        """Names and types; nothing is compiled for this target."""
        return Report(self._graph.name, "reference", 1, self.inputs, self.outputs, 0.0, ())

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._signature.outputs

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the model. InputError names the input, what was expected and what was given."""
        arrays = self._signature.collect(args, named)
        results = self._donated([np.array(r) for r in run(self._graph, arrays)], arrays)
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, inputs: Any, outputs: Sequence[Array] | None = None) -> Any:
        """Run into given buffers of the right shapes and dtypes; without them as a call."""
        arrays = self._signature.collect(self._signature.arguments(inputs), {})
        results = self._donated(run(self._graph, arrays), arrays)
        given = [np.array(r) for r in results] if outputs is None else self._signature.buffers(outputs)
        if len(given) != len(results):
            raise InputError(f"the model has {count(len(results), 'output')}, got {count(len(given), 'buffer')}")
        for name, out, r in zip(self._signature.output_names, given, results):
            if not isinstance(out, np.ndarray) or out.shape != r.shape or out.dtype != r.dtype or not out.flags.writeable:
                raise InputError(f"output {name}: expected a writable array {r.dtype} {r.shape}, got {described(out)}")
            out[...] = r
        return given[0] if len(given) == 1 else tuple(given)

    def _donated(self, results: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
        """Results in the memory of the inputs that were donated for them."""
        out = list(results)
        for k, j in self._graph.donated.items():
            arrays[j][...] = out[k]
            out[k] = arrays[j]
        return out

    def save(self, path: str | os.PathLike[str] | BinaryIO, small: bool = False) -> None:
        """Write the model to a file that `dnnc.load` reads; `small` makes no difference. ArtifactError if it cannot be written."""
        from dnnc.artifacts import save_reference

        names = self._signature.input_names, self._signature.output_names
        save_reference(path, self._graph, *names, self.options)

    def profile(self, *args: Any, **named: Any) -> NoReturn:
        """UnsupportedError: nothing is compiled for this target."""
        raise UnsupportedError("a profile is of compiled code; the target reference has none")
