"""What a model takes and gives: the names and types of its inputs and outputs, and arguments checked against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from dnnc.ir.checks import integer, sequence
from dnnc.ir.errors import InputError, a_type, count
from dnnc.ir.graph import Graph, Value

Array = np.ndarray[Any, Any]
_NONE: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (`float32`, ...) and shape of an input or output; symbolic dims are strings."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class Signature:
    """Names and types of inputs and outputs; `collect` turns the arguments of a call into arrays in order."""

    def __init__(self, graph: Graph, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.input_names, self.output_names = list(inputs), list(outputs)
        self.inputs = tuple(_spec(n, v) for n, v in zip(inputs, graph.inputs))
        self.outputs = tuple(_spec(n, v) for n, v in zip(outputs, graph.outputs))
        self.expected = [(n, v.type.dtype.numpy, v.type.rank) for n, v in zip(inputs, graph.inputs)]

    def collect(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[Array]:
        """Arguments as contiguous arrays of the right dtype and rank. InputError names input, expected and got."""
        return self.convert(self.in_order(args, named))

    def arguments(self, inputs: Any) -> tuple[Any, ...]:
        """Arguments of `run` and `bind`: a mapping by name, a sequence in order, or a single array; else InputError."""
        if isinstance(inputs, Mapping):
            return (dict(inputs),)
        if isinstance(inputs, (list, tuple)):
            return tuple(inputs)
        if len(self.expected) == 1 and is_array(inputs):
            return (inputs,)
        names = ", ".join(self.input_names)
        raise InputError(
            f"inputs: expected a list of arrays in the order of {names or 'no inputs'}, or a dict by name, got "
            f"{a_type(inputs)}"
        )

    def buffers(self, outputs: Any) -> list[Any]:
        """Return the output buffers as a list, from a sequence or a single array. InputError for anything else."""
        if isinstance(outputs, (list, tuple)):
            return list(outputs)
        if len(self.output_names) == 1 and is_array(outputs):
            return [outputs]
        raise InputError(
            f"outputs: expected a list of arrays, one for each of {', '.join(self.output_names)}, got {a_type(outputs)}"
        )

    def in_order(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return a call's arguments in the order of the inputs. InputError where one is missing or unknown."""
        if len(args) == 1 and not named and type(by_name := args[0]) is dict:
            args, named = (), by_name
        if named:
            args = self._by_name(args, named)
        if len(args) != len(self.expected):
            raise InputError(
                f"the model has {count(len(self.expected), 'input')} ({', '.join(self.input_names)}), got "
                f"{count(len(args), 'array')}"
            )
        return args

    def convert(self, args: Sequence[Any]) -> list[Array]:
        """Arguments in order as contiguous arrays of the right dtype and rank. InputError as of `collect`."""
        out = []
        for a, (name, dtype, rank) in zip(args, self.expected):
            if type(a) is not np.ndarray or a.dtype != dtype or not a.flags.c_contiguous or a.ndim != rank:
                a = converted(a, name, dtype, rank)
            if dtype.kind == "O" and not all(type(x) is str for x in a.reshape(-1)):
                a = _texts(a, name)
            out.append(a)
        return out

    def check_count(self, results: Sequence[Any]) -> None:
        """InputError where there is not one buffer for each output."""
        if len(results) != len(self.output_names):
            raise InputError(
                f"the model has {count(len(self.output_names), 'output')}, got {count(len(results), 'buffer')}"
            )

    def check_outputs(
        self,
        wanted: Sequence[tuple[tuple[int, ...], Any]],
        arrays: Sequence[Array],
        results: Sequence[Any],
        donated: Mapping[int, int] = _NONE,
    ) -> None:
        """Raise InputError unless a buffer is writable, contiguous, of (shape, dtype); only `donated` may overlap."""
        self.check_count(results)
        for k, (name, r, (shape, dtype)) in enumerate(zip(self.output_names, results, wanted)):
            fits = isinstance(r, np.ndarray) and r.shape == shape and r.dtype == dtype
            if not fits or not r.flags.c_contiguous or not r.flags.writeable:
                raise InputError(
                    f"output {name}: expected a writable contiguous array {dtype} {shape}, got {described(r)}"
                )
            own = [arrays[donated[k]]] if k in donated else []
            others = [
                a for a in (*arrays, *results[:k]) if not any(a is x and r.ctypes.data == x.ctypes.data for x in own)
            ]
            if any(np.may_share_memory(r, a) for a in others):
                raise InputError(f"output {name} overlaps another buffer of the call")

    def _by_name(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        values: list[Any] = list(args) + [_MISSING] * (len(self.expected) - len(args))
        for n, a in named.items():
            if n not in self.input_names:
                raise InputError(f"the model has no input {n!r}; its inputs are {', '.join(self.input_names)}")
            k = self.input_names.index(n)
            if values[k] is not _MISSING:
                raise InputError(f"input {n} is given twice")
            values[k] = a
        missing = [n for n, v in zip(self.input_names, values) if v is _MISSING]
        if missing:
            raise InputError(f"no array is given for {', '.join(missing)}")
        return tuple(values)


def shapes_of(shapes: Any, names: Sequence[str]) -> list[tuple[int, ...]]:
    """A shape for each input. InputError where it is something else."""
    given = sequence(shapes, "shapes")
    if len(given) != len(names):
        raise InputError(f"expected {count(len(names), 'shape')} for {', '.join(names)}, got {len(given)}")
    return [
        tuple(integer(n, f"shape of {name}", 0) for n in sequence(s, f"shape of {name}"))
        for name, s in zip(names, given)
    ]


def is_array(x: Any) -> bool:
    """An array of any library."""
    return any(hasattr(x, name) for name in ("__array__", "__dlpack__", "__cuda_array_interface__")) and not isinstance(
        x, type
    )


def converted(a: Any, name: str, dtype: Any, rank: int | None, what: str = "input") -> Array:
    """Convert lists, scalars, strided arrays and NumPy strings; another dtype is an error that names the cast."""
    if hasattr(a, "__array__") or hasattr(a, "__dlpack__"):
        x = np.asarray(a) if hasattr(a, "__array__") else np.from_dlpack(a)
        if dtype.kind == "O" and x.dtype.kind in "US":
            x = (
                x if x.dtype.kind == "U" else np.char.decode(np.asarray(x, np.bytes_), "utf-8", "surrogateescape")
            ).astype(object)
        if x.dtype != dtype:
            raise InputError(f"{what} {name}: expected {dtype}, got {x.dtype}; convert it with .astype({str(dtype)!r})")
    else:
        try:
            x = np.asarray(a, dtype)
        except (TypeError, ValueError) as e:
            raise InputError(f"{what} {name}: expected an array of {dtype}, got {type(a).__name__}: {e}") from None
    if rank is not None and x.ndim != rank:
        raise InputError(f"{what} {name}: expected {count(rank, 'dimension')}, got shape {x.shape}")
    return np.ascontiguousarray(x).reshape(x.shape)


def described(a: Any) -> str:
    """What was given in the place of an array that a call can write to or keep."""
    if not isinstance(a, np.ndarray):
        return a_type(a)
    flags = [
        word for word, on in (("not contiguous", not a.flags.c_contiguous), ("read-only", not a.flags.writeable)) if on
    ]
    return " ".join([str(a.dtype), str(a.shape), *(f"({', '.join(flags)})" for _ in flags[:1])])


_MISSING = object()


def _spec(name: str, v: Value) -> TensorSpec:
    return TensorSpec(name, str(v.type.dtype.numpy), tuple(d if isinstance(d, int) else str(d) for d in v.type.shape))


def _texts(a: Array, name: str) -> Array:
    """An array of strings; bytes are decoded. InputError names an element that is no text."""
    out = np.empty(a.size, object)
    for k, x in enumerate(a.reshape(-1)):
        if isinstance(x, bytes):
            x = x.decode("utf-8", "surrogateescape")
        if not isinstance(x, str):
            raise InputError(f"input {name}: expected strings, got {x!r} of type {type(x).__name__} at position {k}")
        out[k] = str(x)
    return out.reshape(a.shape)
