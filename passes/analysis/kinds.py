"""What class of kernel a node makes, and whether it makes one at all."""

from __future__ import annotations

from dnnc.ir.graph import Node

COSTLY = frozenset(
    ("exp", "log", "erf", "tanh", "pow", "sin", "cos", "tan", "sqrt", "sigmoid", "gelu", "softplus", "mish", "div")
)
LOOPS = frozenset(("cumsum", "cumprod"))  # they reduce within an element, though they are no row ops


def kind_of(n: Node) -> str:
    """The class of a node: contraction, reduction, scatter, map, host or control."""
    if n.op.host is not None:
        return "host"
    for trait in ("control", "contraction", "reduction", "scatter"):
        if trait in n.op.traits:
            return trait
    return "reduction" if n.op.name in LOOPS or "loops" in n.op.traits else "map"


def is_kernel(kind: str) -> bool:
    """Does a node of this kind run within a kernel, where it may be fused with others?"""
    return kind not in ("host", "control")


def is_view(n: Node) -> bool:
    """Does the node only rename memory? Row-major in, row-major out."""
    x = n.inputs[0] if n.inputs else None
    return "view" in n.op.traits and x is not None and x.type.layout is None and n.output.type.layout is None


def is_pointwise(n: Node) -> bool:
    """Does an element of the result depend on nothing but the operands' elements at its own place, broadcast, and
    perhaps on the place?
    """
    return not n.op.traits.isdisjoint(("elementwise", "placed"))


def reduces_axes(n: Node) -> bool:
    """Is the node one of dnnc's `reduce_*`, whose attribute `axes` lists what it reduces? A custom operator may have
    any name and attributes.
    """
    return n.op.name.startswith("reduce_") and "own" not in n.op.traits
