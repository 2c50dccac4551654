"""Attributes of nodes: the form in which the IR keeps them, defaults, and their text."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from dnnc.ir.dtype import DType
from dnnc.ir.errors import InternalError, a_type
from dnnc.ir.expr import Expr, unwrap
from dnnc.ir.graph.core import Graph, Node
from dnnc.ir.op import Attrs, OpDef
from dnnc.ir.types import Layout, TensorType


def normal(a: Any) -> Any:
    """An attribute as the IR keeps it: tuples for lists, Python numbers for NumPy's and for constant dims."""
    if a is None or isinstance(a, (bool, int, float, str, DType, Layout, TensorType, Graph)):
        return float(a) if isinstance(a, np.floating) else a  # np.float64 is a float
    if isinstance(a, (tuple, list)):
        return tuple(map(normal, a))
    if isinstance(a, Expr):
        return unwrap(a)
    if isinstance(a, np.generic):
        return normal(a.item())
    if isinstance(getattr(a, "dim", None), Expr):  # a size as users hold it
        return normal(a.dim)
    raise InternalError(f"an attribute cannot be {a_type(a)}: {a!r}; arrays are operands (constants)")


@functools.lru_cache(maxsize=1024)
def defaults(op: OpDef) -> dict[str, Any]:
    """The attributes that an op's type rule gives a default for."""
    kinds = (inspect.Parameter.KEYWORD_ONLY,)
    return {
        p.name: normal(p.default)
        for p in inspect.signature(op.type).parameters.values()
        if p.kind in kinds and p.default is not p.empty
    }


def complete(op: OpDef, attrs: Attrs) -> Attrs:
    """All attributes in normal form: those given, in that order, then the defaults of the others."""
    full = {k: normal(v) for k, v in attrs.items()}
    for k, v in defaults(op).items():
        if k not in full:
            full[k] = v
    return full


def show_attrs(op: OpDef, attrs: Attrs, names: Mapping[Graph, str] | None = None) -> str:
    """`axis=-1, keepdims=False`: the attributes that are not the defaults."""
    usual = defaults(op)
    shown = ((k, show_attr(a, names or {})) for k, a in attrs.items())
    return ", ".join(f"{k}={s}" for k, s in shown if k not in usual or s != show_attr(usual[k], {}))


def show_attr(a: Any, names: Mapping[Graph, str]) -> str:
    """An attribute as text; the same text means the same attribute."""
    if isinstance(a, tuple):
        return f"({', '.join(show_attr(x, names) for x in a)}{',' if len(a) == 1 else ''})"
    if isinstance(a, Layout):
        return f'layout("{a}")'
    if isinstance(a, Graph):
        return names.get(a, a.name)
    return str(a) if isinstance(a, (DType, TensorType)) else repr(a)


def attrs_key(n: Node) -> tuple[tuple[str, str], ...]:
    """Key of an attribute, by its text: 1, 1.0 and True differ, as 0.0 and -0.0 do; subgraphs by structure."""
    names = {s: s.structural_hash() for s in n.subgraphs()}
    return tuple((k, show_attr(a, names)) for k, a in sorted(n.attrs.items()))
