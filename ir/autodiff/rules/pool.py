"""Rules of pooling: elements gather from the few windows that hold them.

The cotangent of a maximum goes to the first of equal elements, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node

Cotangents = Mapping[int, Any]


def max_pool(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x,), (g,) = n.inputs, cotangents
    assert x is not None
    offset = b.max_pool_offset(x, n.output, **n.attrs)
    return {0: b.max_pool_backward(offset, g, spatial=x.type.shape[2:], **n.attrs)}


def max_pool_backward(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (offset, _), (h,) = n.inputs, cotangents
    return {1: b.max_pool_select(offset, h, **{k: v for k, v in n.attrs.items() if k != "spatial"})}


def max_pool_select(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (offset, h), (g,) = n.inputs, cotangents
    assert h is not None
    return {1: b.max_pool_backward(offset, g, spatial=h.type.shape[2:], **n.attrs)}


def avg_pool(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x,), (g,) = n.inputs, cotangents
    assert x is not None
    return {0: b.avg_pool_backward(g, spatial=x.type.shape[2:], **n.attrs)}


def avg_pool_backward(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (h,) = cotangents
    return {0: b.avg_pool(h, **{k: v for k, v in n.attrs.items() if k != "spatial"})}
