"""Models that can only be read for the inputs of a call: shapes depend on the *contents* of inputs (a Reshape to a shape that is an input), or
symbolic sizes do not show that two paths end with equal sizes. Compiled at the call, once per shapes and contents."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.executable import Executable
from dnnc.frontends.onnx.declared import Declared
from dnnc.ir.errors import InputError
from dnnc.options import CompileOptions
from dnnc.origin import OnnxParts
from dnnc.reference import ReferenceExecutable
from dnnc.report import Report
from dnnc.signature import TensorSpec, converted

if TYPE_CHECKING:
    from dnnc.profile import Profile

MAX_PROGRAMS = 16

Array = np.ndarray[Any, Any]
Inner = Executable | ReferenceExecutable


class LateExecutable:
    """Like Executable. `read(values, shapes)` compiles the model for contents of some inputs and shapes of all; it may ask for more inputs
    by raising an error that has their names in `.inputs`, which `needs` tells."""

    def __init__(
        self,
        declared: Declared,
        wanted: tuple[str, ...],
        read: Callable[[Mapping[str, Array], Mapping[str, tuple[int, ...]]], Inner],
        needs: Callable[[Exception], tuple[str, ...]],
        options: CompileOptions,
        onnx: Callable[[], OnnxParts],
    ) -> None:
        self._declared, self._read, self._needs = declared.inputs, read, needs
        self._names = [n for n, _, _ in declared.inputs]
        self._outputs = declared.outputs
        self._wanted = set(wanted)
        self._options, self._onnx = options, onnx
        self._programs: OrderedDict[Any, Inner] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(n, str(d.numpy), ("?",) * r) for n, d, r in self._declared)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Names; dtypes and shapes are known once a call has come."""
        last = next(reversed(self._programs.values()), None)
        return last.outputs if last is not None else tuple(TensorSpec(n, "?", ()) for n in self._outputs)

    @property
    def report(self) -> Report:
        """The report of the last program. InputError before the first call."""
        programs = self.programs
        if not programs:
            raise InputError(f"nothing is compiled yet: shapes depend on the contents of {', '.join(sorted(self._wanted))}, so call the model first")
        return programs[-1].report

    @property
    def programs(self) -> list[Inner]:
        """The executables compiled so far."""
        with self._lock:
            return list(self._programs.values())

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the model. InputError as of Executable."""
        arrays = self._collect(args, named)
        return self._program(arrays)(*arrays.values())

    def run(self, inputs: Any, outputs: Sequence[Array] | None = None) -> Any:
        """Run into given buffers, as Executable does; without them as a call."""
        arrays = self._collect((inputs,) if isinstance(inputs, Mapping) else tuple(inputs), {})
        return self._program(arrays).run(list(arrays.values()), outputs)

    def save(self, path: str | os.PathLike[str], small: bool = False) -> None:
        """Write the model with the options to a file that `dnnc.load` reads. Programs are compiled anew for the first calls after it;
        `small` makes no difference. ArtifactError if the file cannot be written, ModelError if the model's file is not there any more.
        """
        from dnnc.artifacts import save_late

        save_late(path, self._options, self._onnx())

    def profile(self, *args: Any, repeats: int | None = None, **named: Any) -> Profile:
        """Where the time of a call on these inputs goes, as of Executable."""
        arrays = self._collect(args, named)
        return self._program(arrays).profile(*arrays.values(), repeats=repeats)

    def _collect(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Array]:
        if len(args) == 1 and not named and type(by_name := args[0]) is dict:
            args, named = (), by_name
        given = {**dict(zip(self._names, args)), **named}
        if len(args) + len(named) != len(self._names) or set(given) != set(self._names):
            raise InputError(f"the model has the inputs {', '.join(self._names)}; given are {', '.join(given) or 'none'}")
        return {n: converted(given[n], n, d.numpy, r) for n, d, r in self._declared}

    def _program(self, arrays: Mapping[str, Array]) -> Inner:
        shapes = {n: a.shape for n, a in arrays.items()}
        with self._lock:
            while True:
                key = (tuple(shapes.values()), tuple((n, arrays[n].tobytes()) for n in sorted(self._wanted)))
                found = self._programs.get(key)
                if found is not None:
                    return found
                try:
                    made = self._read({n: arrays[n] for n in self._wanted}, shapes)
                except Exception as e:
                    more = set(self._needs(e)) - self._wanted
                    if not more:
                        raise
                    self._wanted |= more
                    continue
                self._programs[key] = made
                while len(self._programs) > MAX_PROGRAMS:
                    self._programs.popitem(last=False)
                return made
