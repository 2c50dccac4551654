"""Rules of ops whose sizes the data tells: what was cut off gets zeros, what was viewed is viewed as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.ir.dtype import i64
from dnnc.ir.expr import const, unwrap
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import Dim

Cotangents = Mapping[int, Any]


def truncate(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    x, (g,) = n.inputs[0], cotangents
    assert x is not None
    axis = normalize_axis(n.attrs["axis"], x.type.rank)
    more: list[Dim] = [0] * x.type.rank
    more[axis] = unwrap(const(x.type.shape[axis]) - g.type.shape[axis])
    return {0: b.pad(g, pads=(*(0 for _ in more), *more))}


def view(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    x, (g,) = n.inputs[0], cotangents
    assert x is not None
    shape = x.type.shape
    sizes = [b.reshape(_size(b, d), shape=(1,)) for d in shape]
    target = b.concat(*sizes, axis=0) if sizes else b.constant(np.zeros(0, np.int64))
    return {0: b.view(g, target, shape=shape, copy_zeros=False)}


def _size(b: Builder, d: Dim) -> Any:
    """A dim as a value."""
    if isinstance(d, int):
        return b.constant(np.int64(d))
    return b.reduce_sum(b.full(shape=(d,), value=1, dtype=i64), axes=(0,), keepdims=False)
