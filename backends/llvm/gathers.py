"""Gathers whose lanes all lie in one vector of memory become a load and a shuffle.

x[i, 4 * (lanes(16) // 4) + 2]   ->   shufflevector(load x[i, 0:+16], <2, 2, 2, 2, 6, 6, 6, 6, ..>)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dnnc.backends.llvm.spelling import stored
from dnnc.ir.bounds import nonneg
from dnnc.ir.expr import Expr, Load, const, value
from dnnc.ir.linear import lane_offsets

if TYPE_CHECKING:
    from dnnc.backends.llvm.emit import FuncEmitter


def picked(em: FuncEmitter, e: Load) -> str:
    """The value in memory's type; "" where the lanes are not of one vector, or a vector would reach past the row."""
    if e.limit is not None or any(i.lanes > 1 for i in e.idx[:-1]) or value(e.buf.full_strides()[-1]) != 1:
        return ""
    found = lane_offsets(em.without_unrolled(e.idx[-1]), e.lanes)
    row = value(e.buf.shape[-1])
    if found is None or row is None:
        return ""
    offsets, start = found
    at, width = _span(offsets, start, row, e.lanes)
    if not width:
        return ""
    ty = stored(e.buf.dtype, width)
    p = em.address(e.buf, (*e.idx[:-1], at))
    text = f"load {ty}, ptr {p}, align {em.alignment(e.buf, width)}"
    v = em.pure(text, p, here=True) if e.buf in em.readonly else em.effect(text)
    skipped = value(start - at)
    assert skipped is not None
    order = ", ".join(f"i32 {k + skipped}" for k in offsets)
    return em.pure(f"shufflevector {ty} {v}, {ty} poison, <{e.lanes} x i32> <{order}>", v, here=True)


def _span(offsets: tuple[int, ...], start: Expr, row: int, lanes: int) -> tuple[Expr, int]:
    """Return a vector's start and lanes, 0 if none: the whole row if it is a vector, for all offsets."""
    low, high = min(offsets), max(offsets)
    if row == lanes and nonneg(start + low) and nonneg(row - 1 - start - high) and value(start) is not None:
        return const(0), lanes
    width = 1 << (high - low).bit_length()
    fits = width <= lanes and nonneg(start + low) and nonneg(row - width - start - low)
    return start + low, width if fits else 0
