"""What class of kernel a node makes, and whether it makes one at all."""

from __future__ import annotations

from dnnc.ir.graph import Node
from dnnc.ir.op import Trait


def kind_of(n: Node) -> str:
    """The class of a node: contraction, reduction, scatter, map, host or control."""
    if n.op.host is not None:
        return "host"
    for trait in (Trait.CONTROL, Trait.CONTRACTION, Trait.REDUCTION, Trait.SCATTER):
        if trait in n.op.traits:
            return str(trait.value)
    return "reduction" if Trait.LOOPS in n.op.traits else "map"


def is_kernel(kind: str) -> bool:
    """Does a node of this kind run within a kernel, where it may be fused with others?"""
    return kind not in ("host", "control")


def is_view(n: Node) -> bool:
    """Does the node only rename memory? Row-major in, row-major out."""
    x = n.inputs[0] if n.inputs else None
    return Trait.VIEW in n.op.traits and x is not None and x.type.row_major and n.output.type.row_major


def is_pointwise(n: Node) -> bool:
    """True if a result element depends only on operand elements at its place, broadcast, and on the place."""
    return not n.op.traits.isdisjoint((Trait.ELEMENTWISE, Trait.PLACED))
