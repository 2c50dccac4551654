"""What a converter sees: an ONNX node with typed access to inputs and attributes, and a graph builder.

An ONNX value is an `Item` while a model is read: a value of the graph, a constant that is not in the graph yet, the
*contents* of a small integer tensor (shape arithmetic), or a sequence of items. Converters ask for the form they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import onnx

from dnnc.frontends.onnx.tensors import Array, decode, dtype_of
from dnnc.ir.dtype import DType, from_numpy, i64
from dnnc.ir.errors import DnncError, ModelError, UnsupportedError
from dnnc.ir.expr import Expr, free, unwrap
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.types import Dim, TensorType

T = TypeVar("T")
KNOWN_LIMIT = 64  # elements of an integer tensor whose contents are kept as dims


@dataclass(frozen=True)
class Condition:
    """The condition of an If that selects how a model is read; `graph` computes it from the model's `inputs`."""

    name: str
    graph: Graph
    inputs: tuple[str, ...]


class NeedsValues(UnsupportedError):
    """A shape or attribute depends on a call: on data of the graph `inputs`, or on the symbolic `dims`.

    `read(model, values={input: array}, dims={dim: size})` reads the model for these. A named `condition` suffices.
    """

    def __init__(
        self, message: str, inputs: tuple[str, ...] = (), dims: tuple[str, ...] = (), condition: Condition | None = None
    ) -> None:
        super().__init__(message)
        self.inputs, self.dims, self.condition = inputs, dims, condition


def reword(e: DnncError, message: str) -> DnncError:
    """The same error with another message."""
    copy = NeedsValues(message, e.inputs, e.dims, e.condition) if isinstance(e, NeedsValues) else type(e)(message)
    copy.located = getattr(e, "located", False)  # type: ignore[attr-defined]
    return copy


def number(d: Dim, what: str) -> int:
    """A dim that must be a number."""
    if isinstance(d, int):
        return d
    names = tuple(sorted(v.name for v in free(d)))
    raise NeedsValues(f"{what} must be a number, but it is {d!r}; fix {', '.join(names)} with dims={{...}}", dims=names)


@dataclass(eq=False)
class Item:
    """An ONNX value, given as one of `value`, `array`, `contents`, `items`; `value` is filled in on demand.

    `contents` is an object array of ints and expressions. `origins`: inputs whose data it needs. With `keys` it is a
    map of elements of `value` [len(keys)], or a sequence of maps, one for each row of `value` [n, len(keys)].
    """

    type: TensorType
    value: Value | None = None
    array: Array | None = None
    contents: Array | None = None
    items: tuple[Item, ...] | None = None
    name: str = ""
    origins: frozenset[str] = field(default=frozenset())
    keys: tuple[Any, ...] | None = None

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape

    @property
    def constant(self) -> bool:
        return self.array is not None


def of_value(v: Value, origins: frozenset[str] = frozenset()) -> Item:
    return Item(v.type, value=v, origins=origins)


def of_array(a: Any, name: str = "") -> Item:
    a = np.asarray(a)
    return Item(TensorType(from_numpy(a.dtype), a.shape), array=a, name=name)


def of_contents(contents: Any, dtype: DType = i64) -> Item:
    """An item whose elements are dims: an array where all are numbers."""
    c = np.empty(np.shape(contents), object)
    c[...] = contents
    flat = [unwrap(x) if isinstance(x, Expr) else x for x in c.reshape(-1)]
    if not any(isinstance(x, Expr) for x in flat):
        return of_array(np.array(flat, dtype.numpy).reshape(c.shape))
    c.reshape(-1)[:] = flat
    return Item(TensorType(dtype, c.shape), contents=c)


def contents_of(item: Item) -> Array | None:
    """The elements as an object array of ints, floats, bools and expressions, where they are known and few."""
    if item.contents is not None:
        return item.contents
    if item.array is not None and item.array.size <= KNOWN_LIMIT and item.array.dtype.kind in "iubf":
        return item.array.astype(object)
    return None


def materialize(item: Item, b: Builder) -> Value:
    """Return the item as a value of the builder's graph or an outer one. Constants are made where they are read."""
    if (
        item.value is not None
        and (item.array is None or item.value in b.graph.constants)
        and (item.contents is None or item.value.node is None or item.value.node.graph is b.graph)
    ):
        return item.value
    if item.items is not None:
        raise UnsupportedError("a sequence stands where a tensor is needed")
    if item.array is not None:
        item.value = b.graph.constant(item.array, item.name or None, b.locs)
    else:
        assert item.contents is not None
        parts = [b.full(shape=(1,), value=x, dtype=item.type.dtype) for x in item.contents.reshape(-1)]
        v = parts[0] if len(parts) == 1 else b.concat(*parts, axis=0)
        item.value = v if item.type.rank == 1 else b.reshape(v, shape=item.shape)
    return item.value


_KINDS = {
    onnx.AttributeProto.FLOAT: "float",
    onnx.AttributeProto.INT: "int",
    onnx.AttributeProto.STRING: "string",
    onnx.AttributeProto.TENSOR: "tensor",
    onnx.AttributeProto.GRAPH: "graph",
    onnx.AttributeProto.SPARSE_TENSOR: "sparse tensor",
    onnx.AttributeProto.TYPE_PROTO: "type",
    onnx.AttributeProto.FLOATS: "floats",
    onnx.AttributeProto.INTS: "ints",
    onnx.AttributeProto.STRINGS: "strings",
    onnx.AttributeProto.TENSORS: "tensors",
    onnx.AttributeProto.GRAPHS: "graphs",
}


def attribute_value(a: onnx.AttributeProto, folder: Any = None) -> Any:
    """The content of an attribute: a number, string, array, graph, or a tuple of them."""
    kind = _KINDS.get(a.type)
    if kind == "float":
        return a.f
    if kind == "int":
        return a.i
    if kind == "string":
        return a.s.decode("utf-8", "surrogateescape")
    if kind == "tensor":
        return decode(a.t, folder)
    if kind in ("floats", "ints"):
        return tuple(a.floats if kind == "floats" else a.ints)
    if kind == "strings":
        return tuple(s.decode("utf-8", "surrogateescape") for s in a.strings)
    if kind == "tensors":
        return tuple(decode(t, folder) for t in a.tensors)
    return {"graph": a.g, "graphs": tuple(a.graphs), "sparse tensor": a.sparse_tensor, "type": a.tp}.get(kind or "")


class Call:
    """A node to convert: inputs `x(i)`, `dims(i)`, `array(i)`, attributes ..., `b` builds. Errors name it."""

    def __init__(
        self,
        b: Builder,
        op: str,
        domain: str,
        opset: int,
        items: Sequence[Item | None],
        attrs: dict[str, Any],
        outputs: Sequence[str],
        env: Any = None,
    ) -> None:
        self.b, self.op, self.domain, self.opset = b, op, domain, opset
        self.items, self.attrs, self.outputs, self.env = list(items), attrs, list(outputs), env

    @property
    def training(self) -> bool | None:
        """Is the model read for training (True) or inference (False)? None: as its nodes say."""
        found: bool | None = None if self.env is None else self.env[0].training
        return found

    # --- inputs ---

    def has(self, i: int) -> bool:
        return i < len(self.items) and self.items[i] is not None

    def item(self, i: int) -> Item:
        """Input i, which must be there."""
        it = self.items[i] if i < len(self.items) else None
        if it is None:
            raise ModelError(f"input {i} is missing; it has {len(self.items)}")
        return it

    def x(self, i: int = 0) -> Value:
        """Input i as a value."""
        return materialize(self.item(i), self.b)

    def opt(self, i: int) -> Value | None:
        return self.x(i) if self.has(i) else None

    def all(self) -> list[Value]:
        return [self.x(i) for i in range(len(self.items))]

    def type_of(self, i: int = 0) -> TensorType:
        return self.item(i).type

    def rank(self, i: int = 0) -> int:
        return self.item(i).type.rank

    def array(self, i: int, what: str = "") -> Array:
        """Input i, which must be constant."""
        it = self.item(i)
        if it.array is None:
            raise self._unknown(i, what)
        return it.array

    def dims(self, i: int, what: str = "") -> tuple[Dim, ...]:
        """The elements of input i, an integer tensor, as ints or symbolic dims."""
        it = self.item(i)
        if it.array is not None:
            if it.array.dtype.kind not in "iu":
                raise ModelError(f"{what or f'input {i}'} must be integers, got {it.type}")
            return tuple(int(v) for v in it.array.reshape(-1))
        if it.contents is None:
            raise self._unknown(i, what)
        return tuple(it.contents.reshape(-1))

    def ints_in(self, i: int, what: str = "") -> tuple[int, ...]:
        """The elements of input i as numbers: axes, repeats of a rank and the like, which no symbol can stand for."""
        return tuple(number(d, what or f"input {i}") for d in self.dims(i, what))

    def scalar(self, i: int, what: str = "") -> Any:
        """Input i, a constant of one element, as a number."""
        a = self.array(i, what)
        if a.size != 1:
            raise ModelError(f"{what or f'input {i}'} must be one number, got shape {list(a.shape)}")
        return a.reshape(-1)[0].item()

    def _unknown(self, i: int, what: str) -> UnsupportedError:
        it = self.item(i)
        name = what or f"input {i}"
        if it.origins:
            names = ", ".join(sorted(it.origins))
            return NeedsValues(
                f"{name} is known only when the model runs: it depends on the data of {names}",
                tuple(sorted(it.origins)),
            )
        return UnsupportedError(f"{name} must be known when the model is compiled, but it is computed from data")

    # --- attributes ---

    def _get(self, name: str, kind: type[T]) -> T | None:
        v = self.attrs.get(name)
        if v is None or isinstance(v, kind):
            return v
        raise ModelError(f"attribute {name} must be of type {kind.__name__}, it is {type(v).__name__}")

    def integer(self, name: str, default: int = 0) -> int:
        v = self._get(name, int)
        return default if v is None else v

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.integer(name, int(default)))

    def number(self, name: str, default: float = 0.0) -> float:
        v = self._get(name, float)
        return default if v is None else v

    def text(self, name: str, default: str = "") -> str:
        v = self._get(name, str)
        return default if v is None else v

    def integers(self, name: str) -> tuple[int, ...] | None:
        return self._tuple(name, int)

    def numbers(self, name: str) -> tuple[float, ...] | None:
        return self._tuple(name, float)

    def texts(self, name: str) -> tuple[str, ...] | None:
        return self._tuple(name, str)

    def _tuple(self, name: str, kind: type[T]) -> tuple[T, ...] | None:
        v = self._get(name, tuple)
        if v is not None and not all(isinstance(e, kind) for e in v):
            raise ModelError(f"attribute {name} must hold values of type {kind.__name__}, got {v}")
        return v

    def tensor(self, name: str) -> Array | None:
        return self._get(name, np.ndarray)

    def graph(self, name: str) -> onnx.GraphProto:
        g = self._get(name, onnx.GraphProto)
        if g is None:
            raise ModelError(f"attribute {name} is missing")
        return g

    def dtype(self, name: str, default: DType | None = None) -> DType:
        """An attribute that names a dtype by ONNX's number."""
        if name in self.attrs:
            return dtype_of(self.integer(name), f"attribute {name}")
        if default is None:
            raise ModelError(f"attribute {name} is missing")
        return default

    # --- outputs ---

    def wants(self, i: int) -> bool:
        """Is output i given a name, that is, asked for?"""
        return i < len(self.outputs) and bool(self.outputs[i])

    def const(self, value: Any, dtype: DType) -> Value:
        return self.b.constant(value, dtype=dtype)

    def cast(self, v: Value, to: DType) -> Value:
        """The value in another dtype; itself where it has that one."""
        return v if v.type.dtype is to else self.b.cast(v, to=to)


def scratch(c: Call) -> Call:
    """The same node over a graph of its own, for evaluating it; its inputs must be constants."""
    items = [None if it is None else Item(it.type, array=it.array) if it.items is None else it for it in c.items]
    return Call(Builder(Graph("fold"), locs=c.b.locs), c.op, c.domain, c.opset, items, c.attrs, c.outputs, c.env)
