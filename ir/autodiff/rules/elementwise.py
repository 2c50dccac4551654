"""Rules of element-wise ops with kinks, and of those whose derivative has a shorter form than the derived one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node

Cotangents = Mapping[int, Any]


def cast(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x,), (g,) = n.inputs, cotangents
    assert x is not None
    return {0: b.cast(g, to=x.type.dtype)}


def relu(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """1 above 0, 0 at 0 and below."""
    (g,) = cotangents
    return {0: b.where(b.less_equal(n.output, 0.0), b.constant(0.0, dtype=g.type.dtype), g)}


def sigmoid(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    y, (g,) = n.output, cotangents
    return {0: b.mul(g, b.mul(y, b.sub(b.constant(1.0, dtype=y.type.dtype), y)))}
