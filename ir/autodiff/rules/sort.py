"""The rule of sorting: each value goes back to where it stood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dnnc.ir.autodiff.reverse import zeros
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node


def sort(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Mapping[int, Any]:
    """Indices have no cotangent. Of equal elements the earlier one keeps its place, and gets what that place got."""
    (x,), g = n.inputs, cotangents[0]
    assert x is not None
    if g is None:
        return {}
    return {0: b.scatter_elements(zeros(b, x.type), n.outputs[1], g, axis=n.attrs["axis"], reduction="add")}
