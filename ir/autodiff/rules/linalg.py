"""Rules of determinants and inverses, by closed forms: no step of the elimination is differentiated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node

Cotangents = Mapping[int, Any]
MINORS = 4  # size of matrices up to which cofactors are determinants: n^5 operations, and right for singular ones


def inverse(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """cot A = -A^-T cot(A^-1) A^-T"""
    y = _transposed(b, n.output)
    return {0: b.neg(b.matmul(b.matmul(y, cotangents[0]), y))}


def det(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """cot A = cot(det A) * cofactors of A.

    Cofactors of matrices up to MINORS rows are determinants of minors. Those of larger ones are det A * A^-T, which is
    NaN for a singular A.
    """
    (x,), (g,) = n.inputs, cotangents
    assert x is not None
    size = x.type.shape[-1]
    assert isinstance(size, int)
    lead = x.type.shape[:-2]
    if size == 0:
        return {}
    if size == 1:
        return {0: b.reshape(g, shape=x.type.shape)}
    if size > MINORS:
        scale = b.reshape(b.mul(g, n.output), shape=(*lead, 1, 1))
        return {0: b.mul(scale, _transposed(b, b.inverse(x)))}
    rest = np.array([[k for k in range(size) if k != i] for i in range(size)])
    at = rest[:, None, :, None] * size + rest[None, :, None, :]
    flat = b.reshape(x, shape=(*lead, size * size))
    minors = b.det(b.gather(flat, b.constant(at), axis=len(lead)))
    sign = b.constant((-1.0) ** np.add.outer(np.arange(size), np.arange(size)), dtype=x.type.dtype)
    return {0: b.mul(b.reshape(g, shape=(*lead, 1, 1)), b.mul(sign, minors))}


def _transposed(b: Builder, x: Any) -> Any:
    r = x.type.rank
    return b.transpose(x, perm=(*range(r - 2), r - 1, r - 2))
