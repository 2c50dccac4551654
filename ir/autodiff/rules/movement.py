"""Rules of ops that move elements: the way back is a movement too, so that it fuses and simplifies as the forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dnnc.ir.autodiff.reverse import derived
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
    """Zeros around it; where elements were left out, what the expression implies."""
    (x,) = n.inputs
    assert x is not None
    if any(s != 1 for s in n.attrs["steps"]):
        return derived(b, n, cotangents, needed)
    starts, shape = n.attrs["starts"], n.attrs["shape"]
    ends = tuple(_sum(d, -const(s), -const(m)) for d, s, m in zip(x.type.shape, starts, shape))
    return {0: b.pad(cotangents[0], pads=(*starts, *ends))}


def pad(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """A constant border: what is inside, and for the fill the sum of the rest."""
    if n.attrs["mode"] != "constant" or 1 in needed:
        return derived(b, n, cotangents, needed)
    (g,), x = cotangents, n.inputs[0]
    assert x is not None
    return {0: b.pad(g, pads=tuple(unwrap(-const(p)) for p in n.attrs["pads"]))}


def pack(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x,) = n.inputs
    assert x is not None
    return {0: b.pack(cotangents[0], layout=x.type.layout)}


def _sum(*parts: Any) -> Dim:
    total = const(0)
    for p in parts:
        total = total + p
    return unwrap(total)  # type: ignore[no-any-return]
