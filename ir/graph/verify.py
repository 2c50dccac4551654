"""Invariants of the graph IR, one function each: they return nothing, or raise VerifyError with the node."""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from typing import Any

from dnnc.ir.dtype import DType
from dnnc.ir.errors import DnncError, VerifyError, count, locations
from dnnc.ir.expr import Expr, Var, free
from dnnc.ir.graph.builder import infer
from dnnc.ir.graph.core import Graph, Node, Value
from dnnc.ir.op import Trait
from dnnc.ir.types import ROW_MAJOR, Layout, TensorType


def verify(g: Graph) -> None:
    """Check a graph and its subgraphs. VerifyError says which rule is broken, where, and shows the node."""
    _check_names(g)
    _check_constants(g)
    defined = set(g.inputs)
    defined.update(g.constants)
    defined.update(g.parameters)
    previous: Node | None = None
    found = 0
    for n in g.nodes():
        if n.graph is not g or n.prev is not previous:
            raise _broken(g, n, "its links to the neighbours are wrong")
        _check_operands(g, n, defined)
        _check_attrs(g, n)
        _check_types(g, n)
        defined.update(n.outputs)
        previous, found = n, found + 1
    if found != len(g):
        raise VerifyError(f"graph {g.name} counts {count(len(g), 'node')} and holds {found}")
    _check_uses(g, defined)
    for v in g.outputs:
        if v not in defined:
            raise VerifyError(f"graph {g.name}: the output {v!r} is not defined in it")
    _check_dims(g)


def _broken(g: Graph, n: Node, message: str) -> VerifyError:
    return VerifyError(
        f"graph {g.name}, node {n.outputs[0].name if n.outputs else '?'}{locations(n.locs)}: {message}\n    {n!r}"
    )


def _values(g: Graph) -> Iterator[Value]:
    yield from g.inputs
    yield from g.constants
    yield from g.parameters
    for n in g.nodes():
        yield from n.outputs


def _check_names(g: Graph) -> None:
    """Names are ASCII identifiers, each once."""
    seen: set[str] = set()
    for v in _values(g):
        if v.name in seen:
            raise VerifyError(f"graph {g.name}: two values are called {v.name}")
        seen.add(v.name)
        if not _is_name(v.name):
            raise VerifyError(f"graph {g.name}: the value name {v.name!r} is not an identifier")


def _is_name(name: str) -> bool:
    return name.isidentifier() and name.isascii() and not keyword.iskeyword(name)


def _check_constants(g: Graph) -> None:
    """Constants and parameters have arrays of their type; inputs, constants and parameters have no node."""
    for v, a in g.constants.items():
        if a.shape != v.type.shape or a.dtype != v.type.dtype.numpy:
            raise VerifyError(f"graph {g.name}: the constant {v!r} holds {a.dtype} {list(a.shape)}")
    for v in (*g.inputs, *g.constants, *g.parameters):
        if v.node is not None:
            raise VerifyError(f"graph {g.name}: the input or constant {v!r} is made by {v.node!r}")
    for v, held in g.parameters.items():
        if (held.type.dtype, held.type.shape) != (v.type.dtype, v.type.shape):
            raise VerifyError(f"graph {g.name}: the parameter {v!r} holds {held!r}")


def _check_operands(g: Graph, n: Node, defined: set[Value]) -> None:
    """Operands are defined above in the same graph and know of this use; outputs know their node."""
    for i, v in enumerate(n.inputs):
        if v is None:
            continue
        if v not in defined:
            where = "by a later node" if v.node is not None and v.node.graph is g else "outside this graph"
            raise _broken(g, n, f"operand {i} ({v!r}) is defined {where}")
        if (n, i) not in v.uses:
            raise _broken(g, n, f"operand {i} ({v!r}) does not list this use")
    for i, o in enumerate(n.outputs):
        if o.node is not n or o.index != i:
            raise _broken(g, n, f"output {i} ({o!r}) does not point back")


def _check_uses(g: Graph, defined: set[Value]) -> None:
    """Every listed use exists."""
    for v in defined:
        for n, i in v.uses:
            if n.graph is not g or i >= len(n.inputs) or n.inputs[i] is not v:
                raise VerifyError(f"graph {g.name}: {v!r} lists a use as operand {i} that does not exist:\n    {n!r}")


def _check_attrs(g: Graph, n: Node) -> None:
    """Attributes are of the kinds that have a text; subgraphs are themselves valid."""
    for k, a in n.attrs.items():
        if not _is_name(k) or not _is_attr(a):
            raise _broken(g, n, f"the attribute {k}={a!r} has no text form")
        if isinstance(a, Graph):
            if a is g:
                raise _broken(g, n, f"the attribute {k} is the graph itself")
            verify(a)
            for x, v in zip(reversed(a.inputs), reversed(n.inputs)) if Trait.CONTROL in n.op.traits else ():
                if x.type.encoding != (ROW_MAJOR if v is None else v.type.encoding):
                    raise _broken(g, n, f"the body {k} takes {x!r}, the operand is {v!r}")


def _is_attr(a: Any) -> bool:
    if isinstance(a, tuple):
        return all(map(_is_attr, a))
    return a is None or isinstance(a, (bool, int, float, str, DType, Expr, Layout, TensorType, Graph))


def _check_types(g: Graph, n: Node) -> None:
    """The type rule gives what the outputs say; layouts apart, which it may leave open."""
    try:
        found = infer(n.op, n.inputs, n.attrs, n.locs)
    except DnncError as e:
        raise _broken(g, n, f"the type rule refuses it: {e}") from e
    if len(found) != len(n.outputs):
        raise _broken(g, n, f"the type rule gives {count(len(found), 'output')}, the node has {len(n.outputs)}")
    for t, o in zip(found, n.outputs):
        if (t.dtype, t.shape) != (o.type.dtype, o.type.shape) or (not t.row_major and t.encoding != o.type.encoding):
            raise _broken(g, n, f"the type rule gives {t} for {o!r}")


def _check_dims(g: Graph) -> None:
    """Every variable of a type or attribute is declared, and declared once over all subgraphs."""
    for name, x in g.dims.items():
        if x.name != name or not _is_name(name):
            raise VerifyError(f"graph {g.name}: the dim {x.name!r} is declared as {name!r}, or is no identifier")
    for v in _values(g):
        for d in v.type.shape:
            if not isinstance(d, int):
                _declared(g, free(d), v.name)
    for n in g.nodes():
        for a in n.attrs.values():
            if isinstance(a, Expr):
                _declared(g, free(a), n.outputs[0].name)
            for name, x in a.dims.items() if isinstance(a, Graph) else ():
                if g.dims.get(name, x) is not x:
                    raise _broken(g, n, f"the dim {name} has other bounds in the subgraph {a.name}")


def _declared(g: Graph, used: frozenset[Var], where: str) -> None:
    for x in used:
        if g.dims.get(x.name) is not x:
            raise VerifyError(f"graph {g.name}: the dim {x.name} of {where} is not declared, or with other bounds")
