"""Rules of products: of matrices, and of attention, whose scores are computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dnnc.ir.autodiff.rules.common import narrow, unbroadcast, wide
from dnnc.ir.dtype import DType
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node
from dnnc.ir.types import product

Cotangents = Mapping[int, Any]


def swapped(b: Builder, v: Any) -> Any:
    """A stack of matrices, each transposed."""
    rank = v.type.rank
    return b.transpose(v, perm=(*range(rank - 2), rank - 1, rank - 2))


def matmul(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """cot x = g @ y^T and cot y = x^T @ g, summed over the batch axes that broadcast.

    A matrix y that meets a batch gets one product over all rows of the batch; vectors get products of elements.
    """
    (g,), (x, y) = cotangents, n.inputs
    assert x is not None and y is not None
    dtype = g.type.dtype
    p, q = narrow(b, x, dtype), narrow(b, y, dtype)  # out_dtype may be wider than both
    p = b.reshape(p, shape=(1, *x.type.shape)) if x.type.rank == 1 else p
    q = b.reshape(q, shape=(*y.type.shape, 1)) if y.type.rank == 1 else q
    batch, rows, columns = n.output.type.shape, p.type.shape[-2], q.type.shape[-1]
    batch = batch[: len(batch) - (x.type.rank > 1) - (y.type.rank > 1)]
    g = b.reshape(g, shape=(*batch, rows, columns)) if 1 in (x.type.rank, y.type.rank) else g
    out = {}
    if 0 in needed:
        c = b.mul(g, swapped(b, q)) if y.type.rank == 1 else b.matmul(g, swapped(b, q))
        out[0] = c
    if 1 in needed:
        if x.type.rank == 1:
            c = b.mul(swapped(b, p), g)
        elif y.type.rank <= 2 and batch:
            lines = product((*batch, rows))
            p, g = (b.reshape(v, shape=(lines, v.type.shape[-1])) for v in (_over(b, p, batch), g))
            c = b.matmul(swapped(b, p), g)
        else:
            c = b.matmul(swapped(b, p), g)
        out[1] = c
    return {k: _shaped(b, narrow(b, c, v.type.dtype), v) for k, c in out.items() if (v := n.inputs[k]) is not None}


def _over(b: Builder, v: Any, batch: Sequence[Any]) -> Any:
    shape = (*batch, *v.type.shape[-2:])
    return v if v.type.shape == shape else b.expand(v, shape=shape)


def _shaped(b: Builder, c: Any, v: Any) -> Any:
    """A cotangent of a matrix for an operand, which may be a vector."""
    if v.type.rank > 1:
        return unbroadcast(b, c, v)
    axes = tuple(range(c.type.rank - 2))
    c = b.reduce_sum(c, axes=axes, keepdims=False) if axes else c
    return b.reshape(c, shape=v.type.shape)


def attention_weights(b: Builder, n: Node) -> Any:
    """softmax(q k^T * scale + mask) of an attention, in the type in which it computes: [..., queries, keys]."""
    q, k, *rest = n.inputs[0], n.inputs[1], *n.inputs[3:]
    assert q is not None
    mask, dtype, scale = rest[0] if rest else None, q.type.dtype, n.attrs["scale"]
    scores = _product(b, q, swapped(b, k), dtype.computed)
    scores = scores if scale == 1.0 else b.mul(scores, scale)
    scores = scores if mask is None else b.add(scores, narrow(b, mask, dtype.computed))
    weights = b.softmax(scores, axis=-1)
    if n.attrs["masked_rows"] == "zero":
        weights = b.where(b.isnan(weights), b.constant(0.0, dtype=weights.type.dtype), weights)
    return weights


def attention(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """Dao, "FlashAttention-2", section 2.3.2: the weights again from the scores, and their cotangents by rows.

    The sum over keys of a weight times its cotangent is that of the result times its cotangent.
    """
    (g,), (q, k, v, *rest) = cotangents, n.inputs
    mask = rest[0] if rest else None
    assert q is not None and k is not None and v is not None
    dtype, scale = q.type.dtype, n.attrs["scale"]
    weights = attention_weights(b, n)
    out = {}
    if 2 in needed:
        out[2] = b.matmul(swapped(b, narrow(b, weights, dtype)), g)
    if {0, 1, 3}.isdisjoint(needed):
        return out
    mean = b.reduce_sum(b.mul(wide(b, g), wide(b, n.output)), axes=(-1,), keepdims=True)
    c = b.mul(weights, b.sub(_product(b, g, swapped(b, v), dtype.computed), mean))
    if 3 in needed and mask is not None:
        out[3] = narrow(b, unbroadcast(b, c, mask), mask.type.dtype)
    c = narrow(b, c if scale == 1.0 else b.mul(c, scale), dtype)
    if 0 in needed:
        out[0] = b.matmul(c, k)
    if 1 in needed:
        out[1] = b.matmul(swapped(b, c), q)
    return out


def _product(b: Builder, x: Any, y: Any, dtype: DType) -> Any:
    return b.matmul(x, y) if x.type.dtype is dtype else b.matmul(x, y, out_dtype=dtype)
