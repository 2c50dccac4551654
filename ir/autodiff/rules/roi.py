"""The rule of pooling over regions: pixels of a region are summed for each region, then regions for each image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dnnc.ir.autodiff.reverse import derived, zeros
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node


def rows(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Mapping[int, Any]:
    """cot x[batch[r]] += transpose(weights[r]) @ cot y[r]"""
    (x, batch, weights), (g,) = n.inputs, cotangents
    assert x is not None and batch is not None and weights is not None
    out = dict(derived(b, n, cotangents, [2])) if 2 in needed else {}
    if 0 in needed:
        r, bins, height = weights.type.shape
        across = b.reshape(b.transpose(weights, perm=(0, 2, 1)), shape=(r, 1, height, bins))
        at = b.reshape(batch, shape=(r, 1))
        out[0] = b.scatter_nd(zeros(b, x.type), at, b.matmul(across, g), reduction="add")
    return out
