"""What class of kernel a node makes, and whether it makes one at all."""

from __future__ import annotations

from dnnc.ir.graph import Node
from dnnc.ir.op import Cost, Trait


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


def numbers_of_bytes(n: Node) -> bool:
    """True if a node makes numbers of bytes by cheap element-wise steps with constants of one element.

    mul(cast(sub(cast(x, to=i32), 3), to=f32), 0.25)
    """
    while is_pointwise(n) and n.op.cost is Cost.CHEAP:
        of = [x for x in n.inputs if x is not None and x.type.size != 1]
        if len(of) != 1 or of[0].type.shape != n.output.type.shape:
            return False
        (x,) = of
        if x.type.dtype.bits <= 8:
            return True
        if x.node is None or len({u for u, _ in x.uses}) > 1:
            return False
        n = x.node
    return False
