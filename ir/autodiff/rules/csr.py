"""Rules of products with sparse matrices, whose values and dense factors have cotangents.

    y = A @ x                          ->   cot values = (cot y @ x^T) at the places of A;  cot x = A^T @ cot y
    s = (a @ b^T) at the places of A   ->   cot a = A(cot s) @ b;  cot b = A(cot s)^T @ a

The transpose has the same values in another order, and the structure that nodes carry for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dnnc.ir.autodiff.reverse import derived
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node

Cotangents = Mapping[int, Any]


def _transposed(b: Builder, columns: Any, starts: Any, t_starts: Any, t_rows: Any, order: Any) -> list[Any]:
    """The structure of the transpose behind its factors: starts, columns, and what derivatives of it read."""
    back = b.sort(order, axis=0)[1]
    return [t_starts, t_rows, b.gather(columns, order, axis=0), starts, columns, back]


def _is_whole(n: Node) -> bool:
    """Has a node the structure of the transpose? Without it, the tensor expression says the derivative, slower."""
    return len(n.inputs) == 8 and None not in n.inputs


def matmul(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (g,), (values, x) = cotangents, n.inputs[:2]
    if not _is_whole(n):
        return derived(b, n, cotangents, needed)
    starts, columns, rows, t_starts, t_rows, order = n.inputs[2:]
    out = {}
    if 0 in needed:
        out[0] = b.csr_sampled(g, x, rows, columns, starts, t_starts, t_rows, order, **n.attrs)
    if 1 in needed:
        turned = _transposed(b, columns, starts, t_starts, t_rows, order)
        out[1] = b.csr_matmul(b.gather(values, order, axis=0), g, *turned, **n.attrs)
    return out


def sampled(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (g,), (x, y) = cotangents, n.inputs[:2]
    if not _is_whole(n):
        return derived(b, n, cotangents, needed)
    rows, columns, starts, t_starts, t_rows, order = n.inputs[2:]
    out = {}
    if 0 in needed:
        out[0] = b.csr_matmul(g, y, starts, columns, rows, t_starts, t_rows, order, **n.attrs)
    if 1 in needed:
        turned = _transposed(b, columns, starts, t_starts, t_rows, order)
        out[1] = b.csr_matmul(b.gather(g, order, axis=0), x, *turned, **n.attrs)
    return out
