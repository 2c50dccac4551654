"""Does a value depend on another by floats? A derivative that is zero for want of a path may be a mistake."""

from __future__ import annotations

from collections.abc import Collection

from dnnc.ir.errors import GradientError, locations
from dnnc.ir.graph.core import Graph, Node, Value


def cut_at(g: Graph, x: Value, results: Collection[Value]) -> Node | None:
    """The first node that ends all float paths from a value, where results depend on it by other paths only.

    Conditions and indices of derivatives are constant almost everywhere: what depends on them alone is zero.
    """
    smooth, cut = {x}, {x}  # by floats alone; by any path, but for those of derivatives
    first = None
    for n in g.nodes():
        operands = {v for v in n.inputs if v is not None}
        floats = [o for o in n.outputs if o.type.dtype.is_float]
        if not smooth.isdisjoint(operands):
            smooth.update(floats)
        if cut.isdisjoint(operands) or (smooth.isdisjoint(operands) and any(loc.derivative for loc in n.locs)):
            continue
        cut.update(n.outputs)
        if first is None and not floats and not smooth.isdisjoint(operands):
            first = n
    return first if smooth.isdisjoint(results) and not cut.isdisjoint(results) else None


def require_path(g: Graph, x: Value, results: Collection[Value], name: str) -> None:
    """GradientError where results depend on a value, but only through what is no float."""
    first = cut_at(g, x, results)
    if first is not None:
        raise GradientError(
            f"the result depends on {name} only through {first.op.name}{locations(first.locs)}, which gives "
            f"{first.outputs[0].type.dtype}: there is no derivative. Say stop_gradient if zero is meant"
        )
