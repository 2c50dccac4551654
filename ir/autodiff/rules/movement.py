"""Rules of ops that move elements: the way back is a movement too, so that it fuses and simplifies as the forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dnnc.ir.autodiff.rules.common import unbroadcast
from dnnc.ir.expr import const, unwrap
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import Dim

Cotangents = Mapping[int, Any]


def identity(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    return {0: cotangents[0]}


def reshape(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x,) = n.inputs
    assert x is not None
    return {0: b.reshape(cotangents[0], shape=x.type.shape)}


def transpose(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    perm = n.attrs["perm"]
    return {0: b.transpose(cotangents[0], perm=tuple(perm.index(k) for k in range(len(perm))))}


def expand(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x,) = n.inputs
    assert x is not None
    return {0: unbroadcast(b, cotangents[0], x)}


def tile(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """The sum over the copies, which stand side by side."""
    (x,) = n.inputs
    assert x is not None
    parts = [d for r, d in zip(n.attrs["repeats"], x.type.shape) for d in (r, d)]
    copies = b.reshape(cotangents[0], shape=tuple(parts))
    return {0: b.reduce_sum(copies, axes=tuple(range(0, len(parts), 2)), keepdims=False)}


def concat(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (g,), out = cotangents, {}
    axis = normalize_axis(n.attrs["axis"], g.type.rank)
    start: Dim = 0
    for k, x in enumerate(n.inputs):
        assert x is not None
        starts = tuple(start if a == axis else 0 for a in range(g.type.rank))
        if k in needed:
            out[k] = b.slice(g, starts=starts, steps=(1,) * g.type.rank, shape=x.type.shape)
        start = _sum(start, x.type.shape[axis])
    return out


def slice_(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """Zeros around the elements, and between them where some were left out."""
    (g,), (x,) = cotangents, n.inputs
    assert x is not None
    rank, steps, shape = x.type.rank, n.attrs["steps"], n.attrs["shape"]
    if any(s < 0 for s in steps):
        first = tuple(_sum(m, -1) if s < 0 else 0 for s, m in zip(steps, shape))
        g = b.slice(g, starts=first, steps=tuple(-1 if s < 0 else 1 for s in steps), shape=shape)
    starts = [_sum(a, (const(m) - 1) * s) if s < 0 else a for a, s, m in zip(n.attrs["starts"], steps, shape)]
    for k, s in enumerate(map(abs, steps)):
        if s == 1:
            continue
        dims = g.type.shape
        apart = b.reshape(g, shape=(*dims[: k + 1], 1, *dims[k + 1 :]))
        apart = b.pad(apart, pads=tuple(s - 1 if a == rank + 1 + k + 1 else 0 for a in range(2 * rank + 2)))
        g = b.reshape(apart, shape=(*dims[:k], _sum(const(dims[k]) * s), *dims[k + 1 :]))
    ends = tuple(_sum(d, -const(a), -const(m)) for d, a, m in zip(x.type.shape, starts, g.type.shape))
    return {0: b.pad(g, pads=(*starts, *ends))}


def pack(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x,) = n.inputs
    assert x is not None
    return {0: b.pack(cotangents[0], layout=x.type.layout)}


def _sum(*parts: Any) -> Dim:
    total = const(0)
    for p in parts:
        total = total + p
    return unwrap(total)  # type: ignore[no-any-return]
