"""When are groups of nodes alike? Then `lower` makes the same kernel of them, so one is lowered and scheduled."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.attributes import attrs_key
from dnnc.ir.sparse import Sparse
from dnnc.ir.types import TensorType
from dnnc.passes.lower.nests import group_inputs, scalar_constant


def likeness(
    graph: Graph,
    nodes: Sequence[Node],
    outputs: Sequence[Value],
    inplace: Mapping[Value, Value] | None = None,
    patterns: bool = True,
) -> Hashable:
    """Equal for groups of which `lower` makes the same kernel and `classify` the same problem, the values and locations
    apart: layers of a model that repeat each other are lowered once. Values go by number, attributes by their text,
    dims and numbers by identity.

    Args:
        patterns: tell patterns of sparse weights apart that become a part of code.
    """
    outside = group_inputs(nodes)
    number: dict[Value | None, int] = {v: k for k, v in enumerate((*outside, *(v for n in nodes for v in n.outputs)))}
    given = tuple(
        (_memory(v.type, patterns), scalar_constant(graph, v), graph.variance(v).call_invariant) for v in outside
    )
    made = tuple(
        (n.op, tuple(map(number.get, n.inputs)), attrs_key(n), tuple(v.type for v in n.outputs)) for n in nodes
    )
    writes = tuple((number[v], number.get((inplace or {}).get(v))) for v in outputs)
    return given, made, writes, frozenset(graph.dims.values())


def pattern_in_code(nodes: Sequence[Node]) -> Sparse | None:
    """The encoding of a group's weights whose pattern becomes a part of code; None where there is none."""
    found = {e for v in group_inputs(nodes) if isinstance(e := v.type.encoding, Sparse) and e.group > 1}
    return found.pop() if len(found) == 1 else None


def _memory(t: TensorType, patterns: bool) -> Hashable:
    """What a kernel knows of an operand. Loops read patterns of sparse weights from memory."""
    e = t.encoding
    if not isinstance(e, Sparse):
        return t
    return t.dtype, t.shape, e.kind, e.pattern if patterns and e.group > 1 else None
