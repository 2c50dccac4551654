"""Operators of custom ONNX domains. In: functions of array code, or operator-IR text. Out: converters of nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dnnc.array.core import Array
from dnnc.array.creation import asarray
from dnnc.array.custom import custom_op
from dnnc.frontends.onnx.call import KNOWN_LIMIT, Call
from dnnc.frontends.onnx.reader import Model, load
from dnnc.frontends.trace.spec import Spec
from dnnc.frontends.trace.tracer import trace
from dnnc.ir import checks
from dnnc.ir.errors import DnncError, InputError, ParseError, a_type
from dnnc.ir.graph import Value
from dnnc.ir.graph.expand import inline


@dataclass(frozen=True)
class Converter:
    """A converter of the nodes of one operator: it traces a function for a node's inputs and inlines its graph."""

    name: str
    fn: Callable[..., Any]

    def __call__(self, c: Call) -> tuple[Value, ...]:
        constants = {k for k, i in enumerate(c.items) if i is not None and _is_small(i.array)}
        traced = [k for k in range(len(c.items)) if c.has(k) and k not in constants]

        def call(*arrays: Any) -> tuple[Array, ...]:
            given: list[Any] = [asarray(c.array(k)) if k in constants else None for k in range(len(c.items))]
            for k, a in zip(traced, arrays):
                given[k] = a
            return self.results(given, c.attrs)

        types = [c.type_of(k) for k in traced]
        graph = trace(call, *(Spec(t.shape, t.dtype.numpy) for t in types))
        if len(graph.outputs) < len(c.outputs):
            raise InputError(
                f"custom_ops: the function of {self.name} returns {_count(len(graph.outputs), 'array')}, but the node "
                f"has {_count(len(c.outputs), 'output')}"
            )
        for n in graph.nodes():
            n.locs = ()  # they are those of the ONNX node
        return tuple(inline(c.b, graph, [c.x(k) for k in traced])[: len(c.outputs)])

    def results(self, arrays: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[Array, ...]:
        """What the function returns."""
        checks.function(self.fn, f"custom_ops[{self.name!r}]", arrays, attributes)
        try:
            result = self.fn(*arrays, **attributes)
        except DnncError:
            raise
        except Exception as e:  # of the user's code
            raise InputError(f"custom_ops: the function of {self.name} failed: {type(e).__name__}: {e}") from e
        many = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        for x in many:
            if not isinstance(x, Array):
                raise InputError(
                    f"custom_ops: the function of {self.name} must return an array of dnnc.array or a tuple of them, "
                    f"got {a_type(x)}"
                )
        return many


class Nest:
    """A loop nest in operator IR as a function of arrays."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        try:
            self.op = custom_op(name.partition("::")[2], text)
        except ParseError as e:
            raise ParseError(f"custom_ops[{name!r}]: {e}") from e

    def __reduce__(self) -> Any:
        return Nest, (self.name, self.text)

    def __call__(self, *arrays: Any, **attributes: Any) -> Any:
        if attributes or any(x is None for x in arrays):
            found = f"the attributes {', '.join(sorted(attributes))}" if attributes else "an input that is left out"
            raise InputError(
                f"custom_ops: the node has {found}, which operator IR cannot express; define {self.name} by a Python "
                "function"
            )
        return self.op(*arrays)


def load_with(model: Any, custom_ops: Mapping[str, Callable[..., Any] | str] | None) -> Model:
    """Read a model with these operators. Errors are those of `load` and `converters`."""
    return replace(load(model), custom=converters(custom_ops)) if custom_ops else load(model)


def converters(custom_ops: Mapping[str, Callable[..., Any] | str]) -> dict[tuple[str, str], Converter]:
    """The converters of operators by (domain, name).

    Args:
        custom_ops: functions of arrays, or texts of the operator IR, by `domain::Operator`.

    Raises:
        InputError: a name or a definition is of another kind; ParseError: a text is no operator IR.
    """
    made = {}
    for name, definition in checks.operators(custom_ops, "custom_ops").items():
        domain, _, op = name.partition("::")
        made[domain, op] = Converter(name, Nest(name, definition) if isinstance(definition, str) else definition)
    return made


def _is_small(array: Any) -> bool:
    """Does a function get a constant with its values, so that Python can read axes and sizes from it?"""
    return array is not None and array.size <= KNOWN_LIMIT


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
