"""Gradients of models: an ONNX model or a graph in, a graph out that computes derivatives of its outputs.

The result is an ordinary graph, which compiles, exports and can be differentiated again. Weights stay constants of it,
by their names, so that `dnnc.compile(..., parameters=[...])` can bind them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dnnc.frontends.onnx import NeedsValues, read_model
from dnnc.frontends.onnx.parameters import bound_weights
from dnnc.frontends.onnx.reader import load
from dnnc.frontends.trace.onnx_operators import load_with
from dnnc.ir import checks
from dnnc.ir.autodiff.paths import cut_at, require_path
from dnnc.ir.autodiff.reverse import pullback, zeros
from dnnc.ir.errors import GradientError, InputError, UnsupportedError
from dnnc.ir.form import ARRAY
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.expand import prune
from dnnc.ir.types import TensorType

T = TypeVar("T")
COTANGENTS = (None, "sum", "input")


def grad_of_model(
    model: Any,
    wrt: str | Sequence[str] | bool,
    of: str | Sequence[str] | None = None,
    value: bool = False,
    *,
    cotangent: str | None = None,
    dims: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | None]] | None = None,
    values: Mapping[str, Any] | None = None,
    custom_ops: Mapping[str, Any] | None = None,
) -> Graph:
    """The gradient of a model's output by weights and inputs, as a graph for `dnnc.compile` and `dnnc.to_onnx`.

    Args:
        model: the path of an `.onnx` file, its bytes, a ModelProto, or a dnnc.ir Graph.
        wrt: names of float initializers (of a graph: constants) and inputs; True for all initializers of floats.
        of: the output that is differentiated, or several, whose sum is; default is the only one.
        value: give the model's outputs too, ahead of the gradients.
        cotangent: None for an output of one element. Of a larger one "sum" differentiates the sum of its elements;
            "input" adds an input `cotangent_NAME` that weighs them, which makes the result the vector-Jacobian product.
        dims, shapes, values, custom_ops: of an ONNX model, as for `dnnc.from_onnx`.

    Returns:
        A graph with the model's inputs, and for each name of `wrt` an output `grad_NAME` of its type.

    Raises:
        GradientError: an op between `wrt` and `of` has no derivative (says which node), or one of them is no float.
        InputError: a name that the model does not have; an output of many elements without `cotangent`.
        DnncError: as `dnnc.from_onnx`.
    """
    if isinstance(model, Graph):
        if dims or shapes or values or custom_ops:
            raise InputError(
                "grad: dims, shapes, values and custom_ops are for ONNX models; the sizes of a graph are its own"
            )
        read = read_graph(model)
    else:
        read = read_onnx(load_with(model, custom_ops), wrt, dims, shapes, values)
    return read.gradient(wrt, of, value, cotangent)


def gradient_graph(
    graph: Graph,
    of: Sequence[Value],
    wrt: Sequence[Value],
    values: bool = True,
    cotangent: str | None = None,
    names: Mapping[Value, str] | None = None,
) -> Graph:
    """A graph with derivatives; arguments are as for `grad_of_model`, values in the place of names.

    Args:
        graph: stays as it is.
        of: outputs of the graph.
        wrt: inputs, constants or parameters of the graph.
        values: give the graph's outputs too.
        cotangent: of every output in `of`.
        names: what users call values, for messages; default is their names.
    """
    called = names or {}
    for v in (*of, *wrt):
        if not v.type.dtype.is_float:
            raise GradientError(f"{called.get(v, v.name)} is {v.type}: only floats have derivatives")
    if cotangent not in COTANGENTS:
        raise InputError(f"cotangent={cotangent!r}: expected one of {', '.join(map(repr, COTANGENTS))}")
    numbers = [next(k for k, o in enumerate(graph.outputs) if o is v) for v in of]
    where = {v: place for v, place in _places(graph)}
    made = graph.copy()
    made.donated = {}
    there = {place: v for v, place in _places(made)}
    by = [there[where[v]] for v in wrt]
    b = Builder(made)
    seeds: dict[Value, Value] = {}
    for v, k in zip(of, numbers):
        o = made.outputs[k]
        seed = _seed(b, o, called.get(v, v.name), cotangent)
        seeds[o] = b.add(seeds[o], seed) if o in seeds else seed  # outputs may be one value
    found = pullback(made, seeds, by)
    for v, x, c in zip(wrt, by, found):
        if c is None:
            require_path(made, x, [made.outputs[k] for k in numbers], called.get(v, v.name))
    gradients = [zeros(b, v.type) if c is None else c for v, c in zip(by, found)]
    taken = set(made.outputs) if values else set()
    for k, (v, c) in enumerate(zip(by, gradients)):
        if c.node is None or c in taken:  # an output is a node's own, and has a name of its own
            gradients[k] = c = b.reshape(c, shape=c.type.shape)
        taken.add(c)
        made.rename(c, f"grad_{v.name}")
    made.outputs = [*(made.outputs if values else ()), *gradients]
    prune(made)
    return made


def _places(graph: Graph) -> Iterable[tuple[Value, tuple[str, int]]]:
    """Values without a node, and where a copy of the graph has them."""
    for kind, values in (("input", graph.inputs), ("constant", graph.constants), ("parameter", graph.parameters)):
        yield from ((v, (kind, k)) for k, v in enumerate(values))


def _seed(b: Builder, o: Value, name: str, cotangent: str | None) -> Value:
    """The cotangent of an output."""
    if cotangent == "input":
        return b.graph.add_input(f"cotangent_{o.name}", TensorType(o.type.dtype, o.type.shape))
    if cotangent is None and o.type.size != 1:
        raise InputError(
            f"grad: the output {name} is {o.type}, and a gradient is that of one number; "
            f'cotangent="sum" differentiates the sum of its elements, cotangent="input" takes their weights as an input'
        )
    return b.expand(b.constant(1.0, dtype=o.type.dtype), shape=o.type.shape)  # type: ignore[no-any-return]


# --- models by names --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A graph with what users call its inputs, constants and outputs; `weights` are names of float constants."""

    graph: Graph
    sources: Mapping[str, Value]
    outputs: Mapping[str, Value]
    weights: tuple[str, ...]

    def differentiable(self, targets: Sequence[Value], inputs: bool = False) -> tuple[str, ...]:
        """The weights but those that outputs depend on by integers and truth values only; float inputs too, if asked.

        Inputs come ahead of weights, both in their order.
        """
        given = {v for v in self.graph.inputs if inputs and v.type.dtype.is_float}
        every = [*(n for n, v in self.sources.items() if v in given), *self.weights]
        return tuple(n for n in every if cut_at(self.graph, self.sources[n], targets) is None)

    def gradient(
        self,
        wrt: str | Sequence[str] | bool,
        of: str | Sequence[str] | None = None,
        values: bool = False,
        cotangent: str | None = None,
    ) -> Graph:
        """`gradient_graph` by names. InputError: a name that is not there, or twice."""
        if of is None and len(self.outputs) != 1:
            raise InputError(
                f"the model has the outputs {', '.join(self.outputs)}; say which is differentiated, such as "
                f"of={next(iter(self.outputs), '')!r}"
            )
        many = list(self.outputs) if of is None else checks.names(of, "of")
        targets = [_named(n, self.outputs, "of", "output") for n in _once(many, "of")]
        if isinstance(wrt, bool):
            wrt = self.differentiable(targets) if wrt else ()
        by = [_named(n, self.sources, "wrt", "input or initializer") for n in _once(checks.names(wrt, "wrt"), "wrt")]
        if not by:
            raise InputError("wrt names nothing; give inputs or initializers of floats, or True for all of the latter")
        called = {v: n for n, v in (*self.sources.items(), *self.outputs.items())}
        return gradient_graph(self.graph, targets, by, values, cotangent, called)


def _named(name: str, values: Mapping[str, T], argument: str, what: str) -> T:
    if name in values:
        return values[name]
    near = difflib.get_close_matches(name, values, 3)
    shown = list(values)[:20]
    more = f" and {len(values) - len(shown)} more" if len(values) > len(shown) else ""
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {', '.join(shown) or 'none'}{more}"
    raise InputError(f"{argument}: the model has no {what} {name!r}; {hint}")


def _once(names: Sequence[str], argument: str) -> Sequence[str]:
    twice = sorted({n for n in names if list(names).count(n) > 1})
    if twice:
        raise InputError(f"{argument} names {', '.join(twice)} twice")
    return names


def read_graph(graph: Graph) -> Model:
    """A hand-built or imported graph: its own names."""
    sources = {v.name: v for v in (*graph.inputs, *graph.constants, *graph.parameters)}
    weights = tuple(v.name for v in (*graph.constants, *graph.parameters) if _is_weight(v))
    return Model(graph, sources, {v.name: v for v in graph.outputs}, weights)


def read_onnx(
    model: Any,
    wrt: str | Sequence[str] | bool,
    dims: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | None]] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Model:
    """Read an ONNX model so that nothing of what `wrt` names is folded. NeedsValues: shapes depend on its contents."""
    opened = load(model)
    initial = [t.name for t in opened.graph.initializer]
    if not isinstance(wrt, bool):
        known = dict.fromkeys([*(i.name for i in opened.graph.input), *initial])
        for name in checks.names(wrt, "wrt"):
            _named(name, known, "wrt", "input or initializer")
    if isinstance(wrt, bool):
        _, every = bound_weights(opened, True)
        asked = [n for n in every if n in set(initial)]
    else:
        asked = [n for n in initial if n in set(checks.names(wrt, "wrt"))]
    while True:
        changed, arrays = bound_weights(opened, asked)
        try:
            imported = read_model(changed, dims=dims, shapes=shapes, values=values)
            break
        except NeedsValues as e:
            steering = sorted(set(e.inputs) & set(asked))
            if steering and isinstance(wrt, bool):
                asked = [n for n in asked if n not in steering]
                continue
            if steering:
                raise UnsupportedError(
                    f"wrt: the model cannot be differentiated by {', '.join(steering)}, whose contents steer it: {e}"
                ) from e
            raise
    graph = imported.graph
    named = dict(zip(imported.inputs, graph.inputs))
    for name in asked:
        v = named[name]
        graph.inputs.remove(v)
        graph.constants[v] = as_constant(arrays[name])
    plain = all(r is ARRAY for r in imported.results)
    return Model(graph, named, dict(zip(imported.outputs, graph.outputs)) if plain else {}, tuple(asked))


def as_constant(array: Any) -> Any:
    """An array as graphs hold it: a view that nobody writes."""
    view = array.view()
    view.flags.writeable = False
    return view


def _is_weight(v: Value) -> bool:
    return v.type.dtype.is_float and v.type.size != 1
