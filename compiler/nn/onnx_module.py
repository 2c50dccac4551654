"""An ONNX model as a module: its weights are parameters, its graph runs on lazy arrays.

The model is read by `dnnc.frontends.onnx`, with weights as inputs, once for each mode and shape of its inputs. A call
makes calls on lazy arrays of the graph's nodes: the module is traced, differentiated and compiled as other modules are.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc import random
from dnnc.array.core import Array, array_of, from_buffer
from dnnc.array.creation import asarray
from dnnc.array.devices import HOST
from dnnc.array.elementwise import add
from dnnc.array.lazy import Lazy, leaf
from dnnc.array.manipulation import reshape
from dnnc.array.sizes import plain
from dnnc.array.sparse.arrays import csr_array
from dnnc.frontends.onnx import NeedsValues, read_model
from dnnc.frontends.onnx.parameters import bound_weights
from dnnc.frontends.onnx.reader import Model, initial_arrays
from dnnc.frontends.onnx.signature import declared
from dnnc.frontends.onnx.weights import cut, is_float, running_statistics, weights_of_layers, with_initializers
from dnnc.frontends.trace.functions import Replay
from dnnc.frontends.trace.onnx_operators import load_with
from dnnc.gradients.models import as_constant
from dnnc.ir.autodiff.paths import cut_at
from dnnc.ir.dtype import from_numpy, i32, i64
from dnnc.ir.errors import DnncError, GradientError, InputError, UnsupportedError, a_type, locations
from dnnc.ir.expr import Expr, free
from dnnc.ir.form import ARRAY
from dnnc.ir.graph import Graph, Node, Value
from dnnc.nn.functional.norms import batch_norm
from dnnc.nn.layers.few import is_faster, sparse_weight, times_pixels, times_rows
from dnnc.nn.module import Module, chosen, free_name
from dnnc.nn.parameter import Parameter, snapshot

GRAPHS = 32  # that a module keeps, one for each mode and shape of its inputs
FEW = 64  # elements of an integer input whose contents may decide shapes
DRAWS = ("random_uniform", "random_normal", "random_bits")


def from_onnx(
    model: Any,
    *,
    outputs: str | Sequence[str] | None = None,
    trainable: str | Sequence[str] | None = None,
    custom_ops: Mapping[str, Callable[..., Any] | str] | None = None,
) -> OnnxModule:
    """An ONNX model as a module that trains.

    Float initializers (and constants of the main graph) are parameters. Their names are those of the model, cut at `.`
    and `/` into modules: `features.0.weight` of a model that PyTorch wrote has PyTorch's name again. Running statistics
    of batch normalizations are buffers; all else is constant.

    Args:
        model: the path of an `.onnx` file, its bytes, or a ModelProto.
        outputs: values of the model that a call gives, in place of its outputs: features, ahead of another last layer.
        trainable: names or patterns (`*`, `?`) of the float initializers that are parameters. By default those with
            more than one element, or weights of layers, unless the model's shapes depend on their contents or its
            outputs do not depend on them by floats; `not_trainable` says which these are, and why.
        custom_ops: operators of custom domains, as for `dnnc.compile`.

    Returns:
        A module that takes the model's inputs, in order or by name, and gives its output, of several a tuple. Shapes
        may differ from the declared ones where the model's operators allow it. It is in training mode: batch
        normalizations take statistics of the batch, dropouts drop, and operators that draw random numbers draw others
        in each call.

    Raises:
        DnncError: as `dnnc.from_onnx`.
        InputError: a name that the model does not have.
        GradientError: `trainable` names what has no gradient.
    """
    opened = with_initializers(load_with(model, custom_ops))
    if outputs is not None:
        opened = cut(opened, [outputs] if isinstance(outputs, str) else list(outputs))
    wanted = None if trainable is None else [trainable] if isinstance(trainable, str) else list(trainable)
    return OnnxModule(opened, wanted)


@dataclass(frozen=True)
class Weight:
    """Where the array of an initializer is: a table of a module, and a name in it."""

    name: str
    path: str
    module: Module
    key: str
    dtype: Any

    @property
    def array(self) -> Array:
        found: Array = getattr(self.module, self.key)
        return found

    @property
    def few(self) -> csr_array | None:
        """A matrix that `nn.utils.to_sparse` made few values of."""
        return sparse_weight(self.module, self.key)


class OnnxModule(Module):
    """What `from_onnx` gives.

    Attributes:
        input_names, output_names: of the model.
        weight_names: names in the model, by the paths of parameters and buffers.
        not_trainable: float initializers of more than one element that are constants, with the reason.
    """

    stores_few = True

    def __init__(self, model: Model, trainable: Sequence[str] | None = None) -> None:
        super().__init__()
        self._graphs: OrderedDict[Any, Reading] = OrderedDict()
        self.not_trainable: dict[str, str] = {}
        arrays = {n: a for n, a in initial_arrays(model.graph, model.folder).items() if is_float(a)}
        statistics = running_statistics(model, arrays)
        asked = _asked(model, arrays, statistics, trainable)
        self._model, arrays = self._bound(model, asked, statistics, trainable is not None)
        kinds = [(n, k) for n, k in declared(self._model).inputs if n not in arrays]
        self.input_names = tuple(n for n, _ in kinds)
        self.output_names = tuple(o.name for o in model.graph.output)
        self._kinds = dict(kinds)
        for n, k in kinds:
            if k.kind != "tensor":
                raise UnsupportedError(f"from_onnx: the input {n!r} is {k}; a module takes tensors only")
        self._momenta = statistics
        self._weights = tuple(_placed(self, arrays, statistics))
        self.weight_names = {w.path: w.name for w in self._weights}

    def _bound(
        self, model: Model, asked: Sequence[str], statistics: Mapping[str, float], explicit: bool
    ) -> tuple[Model, dict[str, Any]]:
        """The model with weights as inputs, but for those that steer it or have no gradient; their contents by name."""
        taken = list(asked)
        while True:
            changed, arrays = bound_weights(model, [*taken, *statistics])
            lost = {}
            try:
                found = read_model(changed, training=False)
                named = dict(zip(found.inputs, found.graph.inputs))
                cuts = {n: cut_at(found.graph, named[n], found.graph.outputs) for n in taken}
                lost = {
                    n: f"{c.op.name}{locations(c.locs)} has no derivative" for n, c in cuts.items() if c is not None
                }
            except NeedsValues as e:  # if of no weight, the shapes of a call will tell
                lost = {n: f"the model's shapes depend on its contents: {e}" for n in taken if n in e.inputs}
            if not lost:
                return changed, arrays
            if explicit:
                raise GradientError(f"from_onnx: trainable: {'; '.join(f'{n}: {why}' for n, why in lost.items())}")
            self.not_trainable.update(lost)
            taken = [n for n in taken if n not in lost]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_graphs": OrderedDict()}

    def extra_repr(self) -> str:
        return f"{', '.join(self.input_names)} -> {', '.join(self.output_names)}"

    # --- calls --------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = self._given(args, kwargs)
        reading = self._reading(given)
        known = {v: given[n]._parts[0] for n, v in reading.inputs.items()}
        known.update((v, w.array._parts[0]) for v, w in reading.weights.items())
        made = _Run(reading, known).values(reading.graph.outputs)
        results = tuple(map(array_of, made))
        return results[0] if len(results) == 1 else results

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Array]:
        """Arguments by the model's names."""
        names = self.input_names
        bad = [n for n in kwargs if n not in names] + [n for n in names[: len(args)] if n in kwargs]
        if bad or len(args) + len(kwargs) != len(names):
            got = f"{len(args)} by position" + (f", {', '.join(kwargs)} by name" if kwargs else "")
            raise InputError(f"the model takes {', '.join(names) or 'no inputs'}; got {got}")
        made = {}
        for n, x in {**dict(zip(names, args)), **kwargs}.items():
            a = given_array(n, x)
            want, rank = self._kinds[n].dtype, self._kinds[n].rank
            if from_numpy(a.dtype) is not want:
                raise InputError(f"input {n}: expected {want}, got {a.dtype}; convert it with astype")
            if rank is not None and a.ndim != rank:
                raise InputError(f"input {n}: expected {rank} axes, got shape {a.shape}")
            made[n] = a
        for w in self._weights:
            if w.array.dtype != w.dtype:
                raise InputError(
                    f"{w.path} is {w.array.dtype}: expected {w.dtype}, in which the model computes; bring it back with "
                    f"module.to({w.dtype.name!r})"
                )
        return made

    def _reading(self, given: Mapping[str, Array]) -> Reading:
        """The graph for these inputs in this mode."""
        shapes = {n: tuple(map(plain, a.shape)) for n, a in given.items()}
        values: dict[str, Any] = {}
        while True:
            key = self.training, *shapes.items(), *((n, v.tobytes()) for n, v in values.items())
            if key in self._graphs:
                self._graphs.move_to_end(key)
                reading = self._graphs[key]
            else:
                try:
                    reading = self._read(shapes, values, self.training)
                except NeedsValues as e:
                    reading = Reading.needing(e)
                self._graphs[key] = reading
                if len(self._graphs) > GRAPHS:
                    self._graphs.popitem(last=False)
            if reading.failed is None:
                return reading
            values = {**values, **self._values(reading.failed, given, values)}

    def _values(self, e: NeedsValues, given: Mapping[str, Array], known: Mapping[str, Any]) -> dict[str, Any]:
        """Contents of arrays on which the model's shapes depend."""
        held = {**given, **{w.name: w.array for w in self._weights}}
        wanted = [n for n in e.inputs if n in held and n not in known]
        traced = [n for n in wanted if any(p.traced for p in held[n]._parts)]
        if not wanted:
            raise e
        if traced:
            raise UnsupportedError(
                f"the shapes of the model depend on the contents of {', '.join(traced)}, which a trace does not know; "
                f"call the module outside of traces, or leave what is a weight out of trainable=: {e}"
            ) from e
        return {n: held[n].numpy() for n in wanted}

    def _read(self, shapes: Mapping[str, Any], values: Mapping[str, Any], training: bool | None) -> Reading:
        imported = read_model(self._model, shapes=shapes or None, values=values or None, training=training)
        if any(r is not ARRAY for r in imported.results):
            odd = [n for n, r in zip(self.output_names, imported.results) if r is not ARRAY]
            raise UnsupportedError(f"the outputs {', '.join(odd)} are no tensors; leave them out by outputs=[...]")
        graph, named = imported.graph, dict(zip(imported.inputs, imported.graph.inputs))
        for n, shape in shapes.items():
            if named[n].type.shape != tuple(shape):
                raise InputError(f"input {n}: the model needs {named[n].type}, got shape {shape}")
        self._require_sizes(graph, shapes, values)
        weights = {named[w.name]: w for w in self._weights}
        running = {v: self._momenta[w.name] for v, w in weights.items() if w.name in self._momenta}
        return Reading(graph, {n: named[n] for n in self.input_names}, weights, running, training is True)

    def _require_sizes(self, graph: Graph, shapes: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Refuse sizes that only the data tells: NeedsValues where contents of small integer inputs may tell them."""
        known = {x for v in graph.inputs for d in v.type.shape if isinstance(d, Expr) for x in free(d)}
        for n in graph.nodes():
            dims = {d for o in n.outputs for d in o.type.shape if isinstance(d, Expr)}
            if all(free(d) <= known for d in dims):
                continue
            ints = [k for k, s in shapes.items() if self._kinds[k].dtype in (i32, i64) and k not in values]
            small = tuple(k for k in ints if all(isinstance(d, int) for d in shapes[k]) and math.prod(shapes[k]) <= FEW)
            why = f"{n.op.name}{locations(n.locs)} gives {n.outputs[0].type}, whose size only the data tells"
            if small:
                raise NeedsValues(why, small)
            raise UnsupportedError(f"{why}; a module needs sizes that follow from its inputs, dnnc.compile does not")

    # --- export -------------------------------------------------------------------------------------------------------

    def as_graph(self, shapes: Mapping[str, Any] | None = None) -> tuple[Graph, dict[Value, str]]:
        """The model in inference mode, its weights as constants, and their names in the model."""
        reading = self._read(shapes or {}, {}, False)
        graph = reading.graph
        for v, w in reading.weights.items():
            graph.inputs.remove(v)
            graph.constants[v] = as_constant(snapshot(w.array).numpy())
        return graph, {v: w.name for v, w in reading.weights.items()}


@dataclass
class Reading:
    """A graph, and whose values its inputs are. `running`: momenta of the running statistics among the weights."""

    graph: Graph
    inputs: dict[str, Value]
    weights: dict[Value, Weight]
    running: dict[Value, float]
    training: bool
    failed: NeedsValues | None = None

    def __post_init__(self) -> None:
        self.constants = {v: leaf(a, None) for v, a in self.graph.constants.items()}

    @classmethod
    def needing(cls, e: NeedsValues) -> Reading:
        """In place of one that takes contents of inputs."""
        return cls(Graph("none"), {}, {}, {}, False, e)


class _Run(Replay):
    """A call. In training mode, batch normalizations update running statistics, and draws take new keys."""

    def __init__(self, reading: Reading, known: Mapping[Value, Lazy]) -> None:
        super().__init__(reading.graph, {**reading.constants, **known})
        self.reading = reading

    def apply(self, n: Node, inputs: Sequence[Lazy | None]) -> Sequence[Lazy]:
        instead = PRODUCTS.get(n.op.name) or (TRAINED.get(n.op.name) if self.reading.training else None)
        made = None if instead is None else instead(self, n, inputs)
        return super().apply(n, inputs) if made is None else made

    def drawn(self, n: Node, inputs: Sequence[Lazy | None]) -> Sequence[Lazy] | None:
        """With a new key; None where the model computes its own."""
        if n.inputs[0] not in self.graph.constants:
            return None
        key = random.next_key(None, f"{n.op.name}{locations(n.locs)}")
        return super().apply(n, [key._parts[0], *inputs[1:]])

    def multiplied(self, n: Node, inputs: Sequence[Lazy | None]) -> Sequence[Lazy] | None:
        """By a matrix of few values; None for others."""
        w, unscaled = self._few(n), all(n.attrs.get(a, 1.0) == 1.0 for a in ("alpha", "beta"))
        if w is None or n.inputs[1].type.rank != 2:  # type: ignore[union-attr]
            return None
        if n.attrs.get("trans_a", False) or not unscaled:
            return None
        y = times_rows(self._first(inputs), w if n.attrs.get("trans_b", False) else w.T)
        return (y if len(inputs) < 3 or inputs[2] is None else add(y, array_of(inputs[2])))._parts

    def convolved(self, n: Node, inputs: Sequence[Lazy | None]) -> Sequence[Lazy] | None:
        """By a 1 x 1 filter of few values, where that is faster; None for others."""
        w, x = self._few(n), self._first(inputs)
        taps = n.inputs[1].type.shape[2:]  # type: ignore[union-attr]
        one = all(d == 1 for d in (*taps, *n.attrs["strides"], n.attrs.get("group", 1))) and not any(n.attrs["pads"])
        if w is None or not one or not is_faster(x, w):
            return None
        y = times_pixels(w, x)
        if len(inputs) > 2 and inputs[2] is not None:
            y = add(y, reshape(array_of(inputs[2]), (-1, *(1 for _ in taps))))
        return y._parts

    @staticmethod
    def _first(inputs: Sequence[Lazy | None]) -> Array:
        assert inputs[0] is not None
        return array_of(inputs[0])

    def _few(self, n: Node) -> csr_array | None:
        held = None if n.inputs[1] is None else self.reading.weights.get(n.inputs[1])
        return None if held is None else held.few

    def normalized(self, n: Node, inputs: Sequence[Lazy | None]) -> Sequence[Lazy] | None:
        """By statistics of the batch; None where the module that holds the running ones is in inference mode."""
        held = [self.reading.weights.get(v) if v in self.reading.running else None for v in n.inputs[3:]]
        if any(w is not None and not w.module.training for w in held):
            return None
        x, scale, bias = (array_of(v) for v in inputs[:3] if v is not None)
        momentum = next((self.reading.running[v] for v in n.inputs[3:] if v in self.reading.running), 0.9)
        average, variance = (None if w is None else w.array for w in held)
        return batch_norm(x, average, variance, scale, bias, True, 1.0 - momentum, n.attrs["epsilon"])._parts


# --- weights ----------------------------------------------------------------------------------------------------------


def _asked(
    model: Model, arrays: Mapping[str, Any], statistics: Mapping[str, float], patterns: Sequence[str] | None
) -> list[str]:
    """The initializers that are to be parameters. InputError: a pattern fits none."""
    weights = [n for n in arrays if n not in statistics]
    if patterns is not None:
        return chosen(weights, patterns, "from_onnx: trainable")
    weighed = weights_of_layers(model)
    return [n for n in weights if arrays[n].size > 1 or (n in weighed and arrays[n].size == 1)]


def _placed(root: Module, arrays: Mapping[str, Any], buffers: Mapping[str, float]) -> Iterator[Weight]:
    """Register arrays in modules by the parts of their names."""
    parts = {n: [re.sub(r"\W+", "_", p) or "_" for p in re.split(r"[./]+", n.strip("./"))] for n in arrays}
    holders = {tuple(p[:k]) for p in parts.values() for k in range(1, len(p))}
    taken: set[tuple[str, ...]] = set()
    for n, words in parts.items():
        module = root
        path = []
        for word in words[:-1]:
            path.append(free_name(module, word))
            if path[-1] not in module._modules:
                module.add_module(path[-1], Part())
            module = module.get_submodule(path[-1])
        *front, stem = words
        key = free_name(module, stem)
        number = 1
        while (*front, key) in taken or (*front, key) in holders:
            number += 1
            key = f"{stem}_{number}"
        taken.add((*front, key))
        a = arrays[n]
        if n in buffers:
            module.register_buffer(key, from_buffer(np.array(a), HOST))
        else:
            module.register_parameter(key, Parameter(np.array(a)))
        yield Weight(n, ".".join([*path, key]), module, key, a.dtype)


class Part(Module):
    """The weights of a model whose names begin alike."""

    stores_few = True


# What takes the place of nodes: by few weights, and in training mode.
PRODUCTS = {"matmul": _Run.multiplied, "gemm": _Run.multiplied, "conv": _Run.convolved}
TRAINED = {"batch_norm": _Run.normalized, **dict.fromkeys(DRAWS, _Run.drawn)}


def given_array(name: str, x: Any) -> Array:
    """An argument as an array. InputError names the input."""
    if isinstance(x, Array):
        return x
    if not hasattr(x, "__array__") and not hasattr(x, "__dlpack__"):
        raise InputError(f"input {name}: expected an array, got {a_type(x)}")
    try:
        return asarray(x)
    except (DnncError, BufferError, TypeError, ValueError, RuntimeError) as e:
        raise InputError(f"input {name}: {a_type(x)} does not become an array: {e}") from e
