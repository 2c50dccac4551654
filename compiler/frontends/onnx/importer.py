"""Walks an ONNX graph and builds ours: names, opsets, inlined functions, shape arithmetic, constants.

For each node, in this order: evaluate it over dims (shape_inference.py), evaluate it if all inputs are small constants,
inline it if it is a function of the model, convert it by the tables, inline its schema's function. Errors name the
node.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from dnnc.frontends.onnx import schemas
from dnnc.frontends.onnx.call import (
    Call,
    Item,
    NeedsValues,
    attribute_value,
    contents_of,
    materialize,
    number,
    of_array,
    of_value,
    reword,
    scratch,
)
from dnnc.frontends.onnx.dim_constraints import Facts, Refined, must_match, of_factors
from dnnc.frontends.onnx.ops.constant_indices import check_indices
from dnnc.frontends.onnx.ops.control import CONTROL
from dnnc.frontends.onnx.ops.gradient import GRADIENT, differentiated
from dnnc.frontends.onnx.ops.sequence import SEQUENCE, structured_input, structured_output
from dnnc.frontends.onnx.reader import LATEST, Model, function_opsets, initial_arrays, standard
from dnnc.frontends.onnx.shape_inference import RULES
from dnnc.frontends.onnx.signature import kind_of, symbol_of
from dnnc.frontends.onnx.tables import CONVERTERS, WITHOUT_SCHEMA
from dnnc.frontends.onnx.tensors import Array
from dnnc.ir.dtype import from_numpy
from dnnc.ir.errors import DnncError, Loc, ModelError, ShapeError, UnsupportedError, count
from dnnc.ir.expr import Expr
from dnnc.ir.form import Form, Kind
from dnnc.ir.graph import Graph, Node, Value, identifier
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.op import Attrs, OpDef
from dnnc.ir.types import Dim, TensorType

FOLD_INPUTS = 1 << 16  # elements: constant inputs up to this size are evaluated while reading
FOLD_OUTPUTS = 1 << 16
MAX_DEPTH = 64  # functions within functions
EAGER = frozenset(
    ("Constant", "Identity", "ZipMap", *CONTROL, *SEQUENCE, *GRADIENT)
)  # converters that cope with constants themselves
RANDOM = frozenset(
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout")
)
QUANTIZED = frozenset(("DequantizeLinear",))  # of which passes make better use than floats

# What Python raises where a model breaks an expectation that nothing checks by itself.
MALFORMED = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    ZeroDivisionError,
    AssertionError,
    RuntimeError,
)

Entry = Item | None


class _Noting(Builder):
    """A builder that, where dims do not fit, notes what would make them fit as a fact and has the model read again."""

    facts: Facts
    tentative = 0  # branches being read that the data may exclude: they note no facts

    def node(self, op: OpDef, inputs: Sequence[Value | None], attrs: Attrs, names: Sequence[str] = ()) -> Node:
        try:
            return super().node(op, inputs, attrs, names)
        except ShapeError as e:
            types = [None if v is None else v.type for v in inputs]
            for a, b in must_match(op, types, attrs):
                if self.tentative and (isinstance(a, Expr) or isinstance(b, Expr)):
                    raise NeedsValues(str(e)) from e
                if any(self.facts.equate(x, y) for x, y in [(a, b), *of_factors(a, b)]):
                    raise Refined from e
            raise


@dataclass(frozen=True)
class Scope:
    """Lookup of names: items by ONNX name, opsets, and for a function body the attributes of its call."""

    items: dict[str, Entry]
    opsets: Mapping[str, int]
    parent: Scope | None = None
    attrs: Mapping[str, Any] | None = None
    calls: tuple[str, ...] = ()  # the functions that we are within
    prefix: tuple[Loc, ...] = ()

    def find(self, name: str) -> Entry:
        s: Scope | None = self
        while s is not None:
            if name in s.items:
                return s.items[name]
            s = s.parent
        raise KeyError(name)

    def names(self) -> list[str]:
        """All that can be found."""
        return [*self.items, *(self.parent.names() if self.parent is not None else ())]


class Importer:
    """One reading of a model under given facts."""

    def __init__(
        self,
        model: Model,
        weights: Mapping[str, Array],
        facts: Facts,
        values: Mapping[str, Any],
        shapes: Mapping[str, Sequence[Dim | None]],
        name: str | None,
        forms: Mapping[str, Form] | None = None,
        decisions: Mapping[str, bool] | None = None,
        training: bool | None = None,
    ) -> None:
        self.model, self.weights, self.facts, self.values, self.shapes = model, weights, facts, values, shapes
        self.graph = Graph(name or model.graph.name or "main")
        self.whole = self.graph  # `graph` is another one while a body is read
        self.decisions, self.training = decisions or {}, training
        self.undecided = 0  # conditions of Ifs met so far that are computed from data
        self.b = _Noting(self.graph)
        self.b.facts = facts
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.by_contents = (
            False  # sizes that only the data tells are no fresh dims: the contents of inputs must tell them
        )
        self.forms, self.results = forms or {}, list[Form]()
        self.fold_all = bool(values)
        self.fresh: dict[str, int] = {}  # dims that only the data tells, made so far, by the stem of their names
        self.differentiated = differentiated(model)
        self.opaque: set[Value] = set()  # constants whose contents nothing may depend on while the model is read

    def run(self) -> Graph:
        g = self.model.graph
        scope = Scope({}, self.model.opsets)
        wanted = {identifier(o.name) for o in g.output}
        self.initializers(g, scope)
        for i in g.input:
            if i.name not in scope.items:
                scope.items[i.name] = self.graph_input(i)
        self.graph.reserve(wanted)
        self.nodes(g.node, scope)
        for o in g.output:
            self.graph_output(o.name, scope)
        return self.graph

    # --- what the graph begins and ends with ---

    def initializers(self, g: onnx.GraphProto, scope: Scope) -> None:
        arrays = self.weights if g is self.model.graph else initial_arrays(g, self.model.folder)
        scope.items.update((name, self.unfolded(of_array(a, name), name)) for name, a in arrays.items())

    def unfolded(self, item: Item, name: str) -> Item:
        """The constant as a value without known contents if the model differentiates by it."""
        if name not in self.differentiated or item.array is None:
            return item
        v = self.graph.constant(item.array, name, (Loc(name),))
        self.opaque.add(v)
        return of_value(v)

    def graph_input(self, i: onnx.ValueInfoProto) -> Entry:
        kind = kind_of(i.type, f"input {i.name!r}")
        if kind.kind == "tensor":
            return self.tensor_input(i.name, kind, self.input_shape(i))
        return structured_input(
            i.name, kind, self.forms.get(i.name), lambda name, k: self.tensor_input(name, k, self.shapes[name])
        )

    def tensor_input(self, name: str, kind: Kind, shape: Sequence[Dim | None]) -> Item:
        """An input of the graph: one of the model, or one of the tensors that such an input holds."""
        assert kind.dtype is not None
        if name in self.inputs:
            raise ModelError(f"two inputs are called {name!r}")
        v = self.graph.add_input(name, TensorType(kind.dtype, self.given_shape(name, shape)), (Loc(name),))
        self.inputs.append(name)
        if name in self.values:
            a = np.asarray(self.values[name])
            if from_numpy(a.dtype) is not v.type.dtype:
                raise ModelError(f"input {name!r}: the value given has dtype {a.dtype}, the model says {v.type.dtype}")
            return of_array(a, name)
        return of_value(v, frozenset((name,)))

    def given_shape(self, name: str, shape: Sequence[Dim | None]) -> tuple[Dim, ...]:
        """A shape in which None is a symbol of its own."""
        return tuple(self.facts.symbol(f"{identifier(name)}_d{k}") if n is None else n for k, n in enumerate(shape))

    def input_shape(self, i: onnx.ValueInfoProto) -> tuple[Dim | None, ...]:
        t = i.type.tensor_type
        given = self.shapes.get(i.name, np.shape(self.values[i.name]) if i.name in self.values else None)
        if given is not None:
            return tuple(n if n is None or isinstance(n, Expr) else int(n) for n in given)
        if not t.HasField("shape"):
            raise UnsupportedError(
                f"input {i.name!r} has no shape, so not even its rank is known; give one (shapes={{{i.name!r}: [...]}})"
            )
        return tuple(self.dim(d, i.name, k) for k, d in enumerate(t.shape.dim))

    def dim(self, d: Any, name: str, axis: int) -> Dim:
        """A dim of an input: a number, a symbol by its name, or a symbol of its own where the name says nothing."""
        symbol = symbol_of(d, name, axis)
        return self.facts.symbol(symbol) if symbol else int(d.dim_value)

    def graph_output(self, name: str, scope: Scope) -> None:
        item = self.lookup(name, scope, f"the output {name!r} of the graph")
        self.results.append(structured_output(item, name, self.tensor_output))

    def tensor_output(self, item: Item, name: str) -> None:
        self.b.locs = (Loc(name),)
        v = materialize(item, self.b)
        self.graph.outputs.append(v)
        self.outputs.append(name)
        self.graph.release({identifier(name)})
        if v.node is not None and sum(o is v for o in self.graph.outputs) == 1:
            self.graph.rename(v, name)

    # --- nodes ---

    def lookup(self, name: str, scope: Scope, what: str) -> Entry:
        if not name:
            return None
        try:
            return scope.find(name)
        except KeyError:
            raise ModelError(f"{what}: there is no value {name!r}; nothing before this place makes it") from None

    def nodes(self, nodes: Iterable[onnx.NodeProto], scope: Scope) -> None:
        for n in nodes:
            self.node(n, scope)

    def node(self, n: onnx.NodeProto, scope: Scope) -> None:
        domain = standard(n.domain)
        loc = Loc(n.name or next((o for o in n.output if o), ""), n.op_type, scope.opsets.get(domain, 0))
        self.b.locs = (*scope.prefix, loc)
        try:
            results = self.convert(n, domain, scope, loc)
        except Refined:
            raise
        except DnncError as e:
            raise _located(e, loc, domain) from e
        except MemoryError as e:
            raise ModelError(f"node {loc} makes a constant that is larger than the memory there is: {e}") from e
        except MALFORMED as e:
            raise ModelError(
                f"node {loc} is malformed or uses its operator in a way that dnnc does not know: {type(e).__name__}: "
                f"{e}"
            ) from e
        for name, item in zip(n.output, results):
            self.bind(name, item, scope, loc)

    def bind(self, name: str, item: Entry, scope: Scope, loc: Loc) -> None:
        if not name:
            return
        if name in scope.items:
            raise ModelError(f"node {loc} makes {name!r}, which exists already: every value is made once")
        scope.items[name] = item = None if item is None else self.unfolded(item, name)
        if item is not None and not item.name and item.array is not None:
            item.name = name
        if (
            item is not None
            and item.value is not None
            and item.value.node is not None
            and item.value.name[1:].isdigit()
        ):
            self.graph.rename(item.value, name)

    def convert(self, n: onnx.NodeProto, domain: str, scope: Scope, loc: Loc) -> list[Entry]:
        items = [self.lookup(i, scope, f"node {loc}") for i in n.input]
        function = self.model.functions.get((domain, n.op_type, getattr(n, "overload", "")))
        attrs = self.attributes(n, scope)
        custom = self.model.custom.get((domain, n.op_type))
        if custom is not None:
            call = Call(self.b, n.op_type, domain, 0, items, attrs, list(n.output), (self, scope))
            return self.items_of(custom(call), call)
        if function is not None:
            return self.inline(function, items, attrs, scope, loc, n.output)
        opset = scope.opsets.get(domain)
        if opset is None:
            raise UnsupportedError(
                f"the model declares no opset of domain {domain or 'ai.onnx'!r}, which this operator belongs to"
            )
        if opset > LATEST.get(domain, opset):
            raise UnsupportedError(
                f"opset {opset} of domain {domain or 'ai.onnx'!r} is newer than what dnnc knows ({LATEST[domain]})"
            )
        schema = schemas.find(domain, n.op_type, opset)
        if schema is not None:
            schemas.check(schema, attrs, len(n.input), [bool(i) for i in n.input])
        call = Call(self.b, n.op_type, domain, opset, items, attrs, list(n.output), (self, scope))
        check_indices(call)
        return self.evaluate(call, n, schema, scope)

    def attributes(self, n: onnx.NodeProto, scope: Scope) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for a in n.attribute:
            if not a.ref_attr_name:
                out[a.name] = attribute_value(a, self.model.folder)
            elif scope.attrs is not None and a.ref_attr_name in scope.attrs:
                out[a.name] = scope.attrs[a.ref_attr_name]
        return out

    # --- ways to convert ---

    def evaluate(self, c: Call, n: onnx.NodeProto, schema: Any, scope: Scope) -> list[Entry]:
        key = (c.domain, c.op)
        converter = CONVERTERS.get(key)
        rule = RULES.get(key)
        if rule is not None and all(
            i is None or i.items is not None or contents_of(i) is not None or c.op in ("Shape", "Size") for i in c.items
        ):
            if c.op in ("Shape", "Size") or any(i is not None and i.contents is not None for i in c.items):
                found = rule(c)
                if found is not None:
                    return list(found) if isinstance(found, tuple) else [found]
        if converter is not None and (schema is not None or key in WITHOUT_SCHEMA):
            return self.folded(c, converter) or self.items_of(converter(c), c)
        if schema is None:
            raise self.unknown(c)
        body = schemas.function_body(schema, c, n)
        if body is None:
            raise self.unknown(c)
        return self.inline(body, c.items, schemas.with_defaults(schema, c.attrs), scope, None, c.outputs)

    def folded(self, c: Call, converter: Callable[[Call], Any]) -> list[Entry] | None:
        """The outputs as constants where all inputs are small constants and the outputs are small."""
        given = [i for i in c.items if i is not None]
        kept = c.op in QUANTIZED and not self.fold_all
        if kept or c.op in EAGER or c.op in RANDOM or any(not i.constant for i in given) or not given:
            return None
        if not self.fold_all and sum(i.array.size for i in given if i.array is not None) > FOLD_INPUTS:
            return None
        s = scratch(c)
        made = self.items_of(converter(s), s)
        values = [i.value for i in made if i is not None and i.value is not None]
        if any(
            not v.type.static or (not self.fold_all and number(v.type.size, "a size") > FOLD_OUTPUTS) for v in values
        ):
            return None
        if any(i is not None and i.items is not None for i in made):
            return None
        s.b.graph.outputs = values
        arrays = dict(zip(values, run(s.b.graph, []))) if values else {}
        return [i if i is None or i.value is None else of_array(arrays[i.value]) for i in made]

    def items_of(self, result: Any, c: Call) -> list[Entry]:
        many = result if isinstance(result, (tuple, list)) else (result,)
        origins = frozenset().union(*(i.origins for i in c.items if i is not None))
        out: list[Entry] = []
        for r in many:
            if isinstance(r, Value):
                known = next((i for i in c.items if i is not None and i.value is r), None)
                if known is not None:
                    out.append(known)
                    continue
                array = None if r in self.opaque else c.b.graph.constants.get(r)
                item = of_value(r, origins)
                item.array = array
                out.append(item)
            else:
                out.append(r)
        return out

    def unknown(self, c: Call) -> UnsupportedError:
        names = sorted({op for d, op in CONVERTERS if d == c.domain} | schemas.names(c.domain))
        near = [x for x in difflib.get_close_matches(c.op, names, 4, 0.8) if x != c.op]
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        since = schemas.since(c.domain, c.op)
        if since and since > c.opset:
            return UnsupportedError(
                f"the operator {c.op} came with opset {since} of domain {c.domain or 'ai.onnx'!r}, the model declares "
                f"{c.opset}"
            )
        if c.domain and not names:
            hint = f'; define it: custom_ops={{"{c.domain}::{c.op}": function}}'
        return UnsupportedError(
            f"dnnc does not know the operator {c.op} of domain {c.domain or 'ai.onnx'!r} at opset {c.opset}{hint}"
        )

    # --- functions and subgraphs ---

    def inline(
        self,
        f: onnx.FunctionProto,
        items: Sequence[Entry],
        attrs: Mapping[str, Any],
        scope: Scope,
        loc: Loc | None,
        outputs: Sequence[str],
    ) -> list[Entry]:
        """Inline a function: its nodes with outputs `outputs`; `loc` is the call's where the model defines it."""
        key = f"{f.domain}:{f.name}"
        if key in scope.calls and loc is not None:
            raise ModelError(f"function {key} calls itself: {' -> '.join((*scope.calls, key))}")
        if len(scope.calls) > MAX_DEPTH:
            raise ModelError(
                f"functions within functions go deeper than {MAX_DEPTH}: {' -> '.join(scope.calls[:4])} ..."
            )
        if len(items) > len(f.input):
            raise ModelError(f"function {key} takes {count(len(f.input), 'input')}, got {len(items)}")
        given = dict(attrs)
        for a in getattr(f, "attribute_proto", ()):
            given.setdefault(a.name, attribute_value(a, self.model.folder))
        bound: dict[str, Entry] = dict.fromkeys(f.input)
        bound.update(zip(f.input, items))
        opsets = {**scope.opsets, **function_opsets(f)} if loc is None else function_opsets(f)
        wanted = [bool(o) for o in outputs] + [False] * len(f.output)
        inner = Scope(bound, opsets, None, given, (*scope.calls, key), self.b.locs)
        self.nodes(f.node, inner)
        return [
            self.lookup(o, inner, f"output of function {key}") if o in inner.items or asked else None
            for o, asked in zip(f.output, wanted)
        ]

    def subgraph(self, g: onnx.GraphProto, scope: Scope, items: Sequence[Entry] = ()) -> list[Entry]:
        """The nodes of a subgraph in place: its outputs. Its inputs are `items`, all else it sees from around it."""
        inner = replace(scope, items=dict(zip((i.name for i in g.input), items)), parent=scope)
        self.initializers(g, inner)
        self.nodes(g.node, inner)
        return [self.lookup(o.name, inner, f"output of the subgraph {g.name!r}") for o in g.output]


def _located(e: DnncError, loc: Loc, domain: str) -> DnncError:
    """The error with the node that it arose at, unless it names one already."""
    text = str(e)
    if getattr(e, "located", False) or str(loc) in text:
        return e
    shown = f"{loc}" if not domain else f"{loc} of {domain}"
    message = f"node {shown}: {text}"
    copy = reword(e, message)
    copy.located = True  # type: ignore[attr-defined]
    return copy
