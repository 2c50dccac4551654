"""Models that can only be read for a call's inputs. Call-dependent facts are the key of a variant:

- how inputs that are sequences, optionals or maps are made up (a *form*), and the shapes of tensors of undeclared rank;
- sizes, where symbolic ones do not show that two paths end with equal sizes;
- values of conditions, where the branches of an If make different types or one of them does not fit the inputs: a call
  computes the condition, then runs the program with that branch;
- contents of inputs on which shapes depend (a Reshape to a shape that is an input), as a last resort.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.base import Instance
from dnnc.frontends.onnx.signature import Declared
from dnnc.ir.checks import sequence
from dnnc.ir.errors import InputError
from dnnc.ir.form import ARRAY, Form, Kind
from dnnc.ir.graph import Graph
from dnnc.options import CompileOptions
from dnnc.program_cache import ModelCompiler, OnnxParts
from dnnc.report import Report
from dnnc.report.log import Log
from dnnc.signature import Signature, TensorSpec
from dnnc.structure import assemble, flatten

if TYPE_CHECKING:
    from dnnc.executable import Executable
    from dnnc.tools.profile import Profile

MAX_VARIANTS = 16

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ImportInputs:
    """What a model is read for: forms of inputs, and shapes and contents by tensor name (`x`, `xs[0]`)."""

    forms: Mapping[str, Form]
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, Array]
    decisions: Mapping[str, bool] = field(default_factory=dict)  # values of conditions that choose the branch of an If


@dataclass(frozen=True)
class Condition:
    """A model for certain inputs that computes the condition `name`, on which the rest depends."""

    name: str
    inner: Executable


@dataclass(frozen=True)
class Variant:
    """A model for certain inputs: the executable (`inner`, None if all results are empty) and the results' form."""

    inner: Executable | None
    results: tuple[Form, ...]

    def together(self, made: Sequence[Array]) -> Any:
        """What the caller gets: arrays as the forms say, and outputs that were asked for beside them."""
        arrays = iter(made)
        out = [assemble(f, arrays) for f in self.results]
        out += list(arrays)
        return out[0] if len(out) == 1 else tuple(out)


class ImportCache:
    """The variants of a model. `read(inputs)` compiles it for the inputs of a call, or the next condition on which it
    depends; where shapes depend on the contents of inputs, it raises an error in which `needs` finds their names.
    """

    def __init__(
        self,
        declared: Declared,
        wanted: tuple[str, ...],
        read: Callable[[ImportInputs], Variant | Condition],
        needs: Callable[[Exception], tuple[str, ...]],
    ) -> None:
        self._declared, self._read, self._needs = declared, read, needs
        self._names = [n for n, _ in declared.inputs]
        self._wanted = set(wanted)
        self._variants: OrderedDict[Any, Variant] = OrderedDict()
        self._conditions: OrderedDict[Any, Condition] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Names and dtypes; of sequences, optionals and maps the type in place of the dtype. Shapes are open."""
        return tuple(TensorSpec(n, str(k), ("?",) * (k.rank or 0)) for n, k in self._declared.inputs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Names; dtypes and shapes are known once a call has come."""
        last = next(reversed(self._variants.values()), None)
        if last is not None and last.inner is not None and all(f is ARRAY for f in last.results):
            return last.inner.outputs
        return tuple(TensorSpec(n, _shown(k), ()) for n, k in self._declared.outputs)

    @property
    def variants(self) -> list[Executable]:
        """What was compiled so far, the one used last at the end."""
        with self._lock:
            return [v.inner for v in self._variants.values() if v.inner is not None]

    @property
    def last(self) -> Executable:
        """The variant that was used last. InputError before the first call."""
        variants = self.variants
        if not variants:
            raise InputError(f"nothing is compiled yet: {self._reason()}, so call the model first")
        return variants[-1]

    def _reason(self) -> str:
        if self._wanted:
            return f"shapes depend on the contents of {', '.join(sorted(self._wanted))}"
        structured = [f"{n} ({k})" for n, k in self._declared.inputs if k.kind != "tensor"]
        return (
            f"the model is compiled for the structure of {', '.join(structured)}"
            if structured
            else "the model is compiled for the shapes of a call"
        )

    def arguments(self, inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """What `Executable.run` takes as the arguments of a call: a mapping by name, or a list or tuple in order."""
        return ((), inputs) if isinstance(inputs, Mapping) else (tuple(sequence(inputs, "inputs")), {})

    def run(self, args: tuple[Any, ...], named: Mapping[str, Any], outputs: Sequence[Array] | None = None) -> Any:
        """A call, into these buffers where all outputs are arrays."""
        leaves, forms = self._collect(self._by_name(args, named))
        variant = self._variant(leaves, forms)
        if outputs is not None and any(f is not ARRAY for f in variant.results):
            raise InputError(
                "an output of this model is a sequence, optional or map, for which no buffer can be given; leave "
                "`outputs` out"
            )
        if variant.inner is None:
            return variant.together(())
        results = variant.inner.run(list(leaves.values()), outputs)
        return variant.together(results if isinstance(results, tuple) else (results,))

    def profile(self, args: tuple[Any, ...], named: Mapping[str, Any], repeats: int | None) -> Profile:
        """See Executable."""
        leaves, forms = self._collect(self._by_name(args, named))
        inner = self._variant(leaves, forms).inner
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
            self._keep(_key(forms, shapes, {}, {}), self._read(ImportInputs(forms, shapes, {})))
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
            raise InputError(
                f"the model has the inputs {', '.join(self._names)}; given are {', '.join(given) or 'none'}"
            )
        return given

    def _is_input(self, alone: dict[Any, Any]) -> bool:
        """Is a dict that stands alone the one input itself, a map?"""
        return [k.kind for _, k in self._declared.inputs] == ["map"] and not any(
            isinstance(v, Mapping) for v in alone.values()
        )

    def _collect(self, given: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Form]]:
        """The arrays of a call by name, in order, and how the inputs are made up."""
        leaves: dict[str, Array] = {}
        return leaves, {n: flatten(given[n], k, n, leaves) for n, k in self._declared.inputs}

    def _variant(self, leaves: Mapping[str, Array], forms: Mapping[str, Form]) -> Variant:
        shapes = {n: a.shape for n, a in leaves.items()}
        decisions: dict[str, bool] = {}
        with self._lock:
            while True:
                values = {n: leaves[n] for n in sorted(self._wanted) if n in leaves}
                key = _key(forms, shapes, values, decisions)
                condition = self._conditions.get(key)
                if condition is not None:
                    self._conditions.move_to_end(key)
                    result = condition.inner.run(list(leaves.values()))
                    decisions[condition.name] = bool(np.asarray(result[0] if isinstance(result, tuple) else result))
                    continue
                found = self._variants.get(key)
                if found is not None:
                    self._variants.move_to_end(key)
                    return found
                try:
                    made = self._read(ImportInputs(forms, shapes, values, dict(decisions)))
                except Exception as e:
                    more = set(self._needs(e)) - self._wanted
                    if not more:
                        raise
                    self._wanted |= more
                    continue
                self._keep(key, made)
                if isinstance(made, Variant):
                    return made

    def _keep(self, key: Any, made: Variant | Condition) -> None:
        kept: OrderedDict[Any, Any] = self._conditions if isinstance(made, Condition) else self._variants
        kept[key] = made
        while len(kept) > MAX_VARIANTS:
            kept.popitem(last=False)


def _key(
    forms: Mapping[str, Form],
    shapes: Mapping[str, tuple[int, ...]],
    values: Mapping[str, Array],
    decisions: Mapping[str, bool],
) -> Any:
    return (
        tuple(forms.values()),
        tuple(shapes.values()),
        tuple((n, _content(a)) for n, a in values.items()),
        tuple(decisions.items()),
    )


def _content(a: Array) -> Any:
    return tuple(a.reshape(-1)) if a.dtype == object else a.tobytes()


def _shown(k: Kind | None) -> str:
    return "?" if k is None or k.kind == "tensor" else str(k)


class ImportCompiler(ModelCompiler):
    """A model that is read for the inputs of a call; see ImportCache."""

    def __init__(self, imports: ImportCache, options: CompileOptions, onnx: Callable[[], OnnxParts]) -> None:
        self.interface, self.inputs, self.outputs = Graph("deferred"), [], []
        self.options, self.log, self.onnx, self.imports = (
            options,
            Log("deferred", str(options.target), 1),
            onnx,
            imports,
        )

    @property
    def graph(self) -> Graph:
        """Of the variant that was used last. InputError before the first call."""
        return self._last.graph

    @property
    def target(self) -> Any:
        return self._last.target

    @property
    def _last(self) -> Executable:
        assert self.imports is not None
        return self.imports.last

    def compile(self, dims: Mapping[Any, int]) -> Any:
        raise AssertionError("variants are compiled")

    def instance(self, program: Any, dims: Mapping[Any, int]) -> Instance:
        raise AssertionError("variants are called")

    def report(self, signature: Signature, programs: Sequence[Any]) -> Report:
        """Of the variant that was used last. InputError before the first call."""
        return self._last.report

    def source(self, program: Any, stage: str, kernel: str | None) -> str:
        return self._last.source(stage, kernel)

    def save(self, path: Any, programs: Mapping[tuple[int, ...], Any], small: bool, archs: Sequence[str]) -> None:
        """Recompile variants at the first calls after loading. ModelError if the model's file is gone."""
        from dnnc.artifact.writer import save_onnx  # loads what writes, which a call does without

        assert self.onnx is not None
        save_onnx(path, self.options, self.onnx())
