"""`parameters=` of dnnc.compile: arguments and captures of functions, inputs and constants of graphs.

Out comes a graph with an input for each, and the arrays by the inputs' names, as `dnnc.compile_graph.compile_graph`
takes them; of ONNX models `dnnc.frontends.onnx.parameters` does this.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.frontends.trace import trace
from dnnc.ir.errors import InputError
from dnnc.ir.graph import Graph, Value
from dnnc.parameters import flat
from dnnc.passes.base import graphs

Array = np.ndarray[Any, Any]
Bound = dict[str, Any]


def of_function(
    fn: Any, inputs: Sequence[Any] | Mapping[str, Any], parameters: Mapping[str, Any]
) -> tuple[Graph, Bound]:
    """Trace a function with parameters, arguments or captured arrays. InputError: a captured array is not found."""

    known = inspect.signature(fn).parameters
    arguments = {n: tree for n, tree in parameters.items() if n in known}
    captured = flat({n: tree for n, tree in parameters.items() if n not in known})
    if isinstance(inputs, Mapping):
        graph = trace(fn, **inputs, **arguments)
    else:
        left = [n for n in known if n not in arguments][: len(inputs)]
        graph = trace(fn, **dict(zip(left, inputs)), **arguments)
    bound = flat(arguments)
    for name, a in captured.items():
        from_constant(graph, holder(graph, name, a), name)
        bound[name] = a
    return graph, bound


def holder(graph: Graph, name: str, a: Any) -> Value:
    """The constant whose memory is that of an array."""
    given = np.asarray(a)
    found = [v for v, c in graph.constants.items() if _same_memory(c, given)]
    within = any(_same_memory(c, given) for g in graphs(graph) if g is not graph for c in g.constants.values())
    if not found or within:
        why = (
            "the body of a loop or branch has a copy of it: make it an argument"
            if within
            else (
                "it is no argument of the function, which does not read its memory either: NumPy's arrays are copied "
                "where they meet arrays of dnnc.array, so convert it outside by dnnc.array.asarray(a, copy=False)"
            )
        )
        raise InputError(f"parameters: {name}: {why}")
    return found[0]


def _same_memory(a: Array, b: Array) -> bool:
    return (
        a.ctypes.data == b.ctypes.data
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.strides == b.strides
        and a.size > 0
    )


def of_graph(graph: Graph, parameters: Mapping[str, Any] | Sequence[str]) -> tuple[Graph, Bound]:
    """Copy a graph with these constants as inputs. Names without arrays take the constants' contents."""
    made = graph.copy()
    given = parameters if isinstance(parameters, Mapping) else dict.fromkeys(parameters)
    constants, inputs = {v.name: v for v in made.constants}, {v.name for v in made.inputs}
    bound: Bound = {}
    for name, a in given.items():
        if name not in constants and (name not in inputs or a is None):
            has = f"the constants {', '.join(constants) or 'none'}" + (
                "" if a is None else f" and the inputs {', '.join(inputs) or 'none'}"
            )
            raise InputError(f"parameters: the graph has no {name!r}; it has {has}")
        bound[name] = made.constants[constants[name]] if a is None else a
        if name in constants:
            from_constant(made, constants[name], name)
    return made, bound


def from_constant(graph: Graph, v: Value, name: str) -> None:
    """An input in the place of a constant."""
    new = graph.add_input(name, v.type, v.locs)
    graph.replace_all_uses(v, new)
    graph.erase_constant(v)
    graph.rename(new, name)
