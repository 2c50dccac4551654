"""Models that can only be read for the inputs of a call. What only a call knows, each part of it a key of the programs kept:

- how inputs that are sequences, optionals or maps are made up (a *form*), and the shapes of tensors of undeclared rank;
- sizes, where symbolic ones do not show that two paths end with equal sizes;
- values of conditions, where the branches of an If make different types or one of them does not fit the inputs: a call computes the condition,
  then runs the program with that branch;
- contents of inputs on which shapes depend (a Reshape to a shape that is an input), as a last resort.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Union

import numpy as np

from dnnc.compiled import CompiledModel
from dnnc.executable import Executable
from dnnc.frontends.onnx.declared import Declared
from dnnc.ir.checks import sequence
from dnnc.ir.errors import InputError
from dnnc.ir.form import ARRAY, Form, Kind
from dnnc.options import CompileOptions
from dnnc.origin import OnnxParts
from dnnc.reference import ReferenceExecutable
from dnnc.report import Report
from dnnc.signature import TensorSpec
from dnnc.staged import StagedExecutable
from dnnc.structure import assemble, flatten

if TYPE_CHECKING:
    from dnnc.device_executable import DeviceExecutable
    from dnnc.profile import Profile

MAX_PROGRAMS = 16

Array = np.ndarray[Any, Any]
Inner = Union[Executable, ReferenceExecutable, StagedExecutable, "DeviceExecutable"]


@dataclass(frozen=True)
class Given:
    """What a model is read for: the forms of inputs, and by the names of their tensors (`x`, `xs[0]`) shapes, and contents where needed."""

    forms: Mapping[str, Form]
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, Array]
    decisions: Mapping[str, bool] = field(default_factory=dict)  # values of conditions that choose the branch of an If


@dataclass(frozen=True)
class Test:
    """A program for certain inputs that computes the condition `name`, on which the rest of the model depends."""

    name: str
    inner: Inner


@dataclass(frozen=True)
class Special:
    """A program for certain inputs: the executable, which takes and gives arrays, and how its results are put together.

    `inner` is None where there is nothing to compute: all results are empty.
    """

    inner: Inner | None
    results: tuple[Form, ...]

    def together(self, made: Sequence[Array]) -> Any:
        """What the caller gets: arrays as the forms say, and outputs that were asked for beside them."""
        arrays = iter(made)
        out = [assemble(f, arrays) for f in self.results]
        out += list(arrays)
        return out[0] if len(out) == 1 else tuple(out)


class LateExecutable(CompiledModel):
    """Like Executable. `read(given)` compiles the model for the inputs of a call, or the next condition on which it depends; where shapes depend
    on the contents of inputs, it raises an error in which `needs` finds their names."""

    def __init__(
        self,
        declared: Declared,
        wanted: tuple[str, ...],
        read: Callable[[Given], Special | Test],
        needs: Callable[[Exception], tuple[str, ...]],
        options: CompileOptions,
        onnx: Callable[[], OnnxParts],
    ) -> None:
        self._declared, self._read, self._needs = declared, read, needs
        self._names = [n for n, _ in declared.inputs]
        self._wanted = set(wanted)
        self._options, self._onnx = options, onnx
        self._programs: OrderedDict[Any, Special] = OrderedDict()
        self._tests: OrderedDict[Any, Test] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def options(self) -> CompileOptions:
        """How it was compiled."""
        return self._options

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Names and dtypes; of sequences, optionals and maps the type in place of the dtype. Shapes are open."""
        return tuple(TensorSpec(n, str(k), ("?",) * (k.rank or 0)) for n, k in self._declared.inputs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Names; dtypes and shapes are known once a call has come."""
        last = next(reversed(self._programs.values()), None)
        if last is not None and last.inner is not None and all(f is ARRAY for f in last.results):
            return last.inner.outputs
        return tuple(TensorSpec(n, _shown(k), ()) for n, k in self._declared.outputs)

    @property
    def report(self) -> Report:
        """The report of the last program. InputError before the first call."""
        programs = self.programs
        if not programs:
            raise InputError(f"nothing is compiled yet: {self._reason()}, so call the model first")
        return programs[-1].report

    def _reason(self) -> str:
        if self._wanted:
            return f"shapes depend on the contents of {', '.join(sorted(self._wanted))}"
        made_up = [f"{n} ({k})" for n, k in self._declared.inputs if k.kind != "tensor"]
        return f"the model is compiled for the structure of {', '.join(made_up)}" if made_up else "the model is compiled for the shapes of a call"

    @property
    def programs(self) -> list[Inner]:
        """The executables compiled so far, the one used last at the end."""
        with self._lock:
            return [p.inner for p in self._programs.values() if p.inner is not None]

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the model. InputError as of Executable."""
        return self.run(self._by_name(args, named))

    def run(self, inputs: Any, outputs: Sequence[Array] | None = None) -> Any:
        """Run into given buffers, as Executable does (where all outputs are arrays); without them as a call."""
        if not isinstance(inputs, Mapping):
            inputs = self._by_name(sequence(inputs, "inputs"), {})
        leaves, forms = self._collect(self._by_name((), inputs))
        program = self._program(leaves, forms)
        if outputs is not None and any(f is not ARRAY for f in program.results):
            raise InputError("an output of this model is a sequence, optional or map, for which no buffer can be given; leave `outputs` out")
        if program.inner is None:
            return program.together(())
        made = program.inner.run(list(leaves.values()), outputs)
        return program.together(made if isinstance(made, tuple) else (made,))

    def save(self, path: str | os.PathLike[str] | BinaryIO, small: bool = False) -> None:
        """Write the model with the options to a file that `dnnc.load` reads. Programs are compiled anew for the first calls after it;
        `small` makes no difference. ArtifactError if the file cannot be written, ModelError if the model's file is not there any more.
        """
        from dnnc.artifacts import save_late

        save_late(path, self._options, self._onnx())

    def profile(self, *args: Any, repeats: int | None = None, **named: Any) -> Profile:
        """Where the time of a call on these inputs goes, as of Executable."""
        leaves, forms = self._collect(self._by_name(args, named))
        inner = self._program(leaves, forms).inner
        if inner is None:
            raise InputError("for these inputs there is nothing to compute, so there is no profile")
        return inner.profile(*leaves.values(), repeats=repeats)

    def prepare(self) -> None:
        """Compile ahead of the first call where all is known: shapes are declared, and no contents are needed."""
        shapes = self._declared.shapes
        if shapes is None:
            return
        forms = dict.fromkeys(shapes, ARRAY)
        try:
            self._keep(_key(forms, shapes, {}, {}), self._read(Given(forms, shapes, {})))
        except Exception as e:
            self._wanted |= set(self._needs(e))
            if not self._wanted:
                raise

    def _by_name(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of a call by name; optional ones may be left out."""
        if len(args) == 1 and not named and type(by_name := args[0]) is dict and not self._is_input(by_name):
            args, named = (), by_name
        absent = {n: None for n, k in self._declared.inputs[len(args) :] if k.kind == "optional" and n not in named}
        given = {**dict(zip(self._names, args)), **named, **absent}
        if len(args) + len(named) + len(absent) != len(self._names) or set(given) != set(self._names):
            raise InputError(f"the model has the inputs {', '.join(self._names)}; given are {', '.join(given) or 'none'}")
        return given

    def _is_input(self, alone: dict[Any, Any]) -> bool:
        """Is a dict that stands alone the one input itself, a map?"""
        return [k.kind for _, k in self._declared.inputs] == ["map"] and not any(isinstance(v, Mapping) for v in alone.values())

    def _collect(self, given: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Form]]:
        """The arrays of a call by name, in order, and how the inputs are made up."""
        leaves: dict[str, Array] = {}
        return leaves, {n: flatten(given[n], k, n, leaves) for n, k in self._declared.inputs}

    def _program(self, leaves: Mapping[str, Array], forms: Mapping[str, Form]) -> Special:
        shapes = {n: a.shape for n, a in leaves.items()}
        decisions: dict[str, bool] = {}
        with self._lock:
            while True:
                values = {n: leaves[n] for n in sorted(self._wanted) if n in leaves}
                key = _key(forms, shapes, values, decisions)
                test = self._tests.get(key)
                if test is not None:
                    self._tests.move_to_end(key)
                    result = test.inner.run(list(leaves.values()))
                    decisions[test.name] = bool(np.asarray(result[0] if isinstance(result, tuple) else result))
                    continue
                found = self._programs.get(key)
                if found is not None:
                    self._programs.move_to_end(key)
                    return found
                try:
                    made = self._read(Given(forms, shapes, values, dict(decisions)))
                except Exception as e:
                    more = set(self._needs(e)) - self._wanted
                    if not more:
                        raise
                    self._wanted |= more
                    continue
                self._keep(key, made)
                if isinstance(made, Special):
                    return made

    def _keep(self, key: Any, made: Special | Test) -> None:
        kept: OrderedDict[Any, Any] = self._tests if isinstance(made, Test) else self._programs
        kept[key] = made
        while len(kept) > MAX_PROGRAMS:
            kept.popitem(last=False)


def _key(forms: Mapping[str, Form], shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Array], decisions: Mapping[str, bool]) -> Any:
    return (tuple(forms.values()), tuple(shapes.values()), tuple((n, _content(a)) for n, a in values.items()), tuple(decisions.items()))


def _content(a: Array) -> Any:
    return tuple(a.reshape(-1)) if a.dtype == object else a.tobytes()


def _shown(k: Kind | None) -> str:
    return "?" if k is None or k.kind == "tensor" else str(k)
