"""Types as text: the signature of a graph without nodes, which holds all that is known of the dims in them."""

from __future__ import annotations

from collections.abc import Sequence

from dnnc.ir.graph.core import Graph
from dnnc.ir.graph.text import parse
from dnnc.ir.types import TensorType


def show_types(name: str, typed: Sequence[tuple[str, TensorType]]) -> str:
    """Names and types as text; `name` is the graph's."""
    g = Graph(name)
    for n, t in typed:
        g.add_input(n, t)
    return str(g)


def numbered(stem: str, types: Sequence[TensorType]) -> list[tuple[str, TensorType]]:
    """Types with the names `stem0`, `stem1`, ..."""
    return [(f"{stem}{k}", t) for k, t in enumerate(types)]


def read_types(text: str) -> list[TensorType]:
    """The types of a text. ParseError: it is none."""
    return [v.type for v in parse(text).inputs]
