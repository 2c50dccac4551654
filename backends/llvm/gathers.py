"""Gathers whose lanes all lie in one vector of memory become a load and a shuffle.

x[i, 4 * (lanes(16) // 4) + 2]   ->   shufflevector(load x[i, 0:+16], <2, 2, 2, 2, 6, 6, 6, 6, ..>)

Those of few lanes whose indices are read from memory become loads of single elements: addresses are then computed by
scalar loads, and no index crosses from a vector to a register.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dnnc.backends.llvm.spelling import stored
from dnnc.ir.bounds import nonneg
from dnnc.ir.expr import Expr, Load, Op, const, load, op, value
from dnnc.ir.linear import lane_offsets

if TYPE_CHECKING:
    from dnnc.backends.llvm.emit import FuncEmitter

FEW = 4  # lanes that are loaded one by one


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


def one_by_one(em: FuncEmitter, e: Load) -> str:
    """The value of up to FEW lanes, each loaded by itself; "" for other gathers."""
    at = [[lane_of(i, k) for i in e.idx] for k in range(e.lanes)] if e.lanes <= FEW and e.limit is None else []
    if not at or any(i is None for idx in at for i in idx):
        return ""
    ty, one, made = stored(e.buf.dtype, e.lanes), stored(e.buf.dtype, 1), "poison"
    for k, idx in enumerate(at):
        p = em.address(e.buf, tuple(i for i in idx if i is not None))
        text = f"load {one}, ptr {p}, align {e.buf.dtype.bytes}"
        v = em.pure(text, p, here=True) if e.buf in em.readonly else em.effect(text)
        made = em.pure(f"insertelement {ty} {made}, {one} {v}, i64 {k}", made, v, here=True)
    return made


def lane_of(i: Expr, lane: int) -> Expr | None:
    """One lane of a vector of indices that are read from memory in a row; None for other vectors."""
    if i.lanes == 1:
        return i
    if isinstance(i, Load) and i.limit is None and all(x.lanes == 1 for x in i.idx):
        return load(i.buf, (*i.idx[:-1], i.idx[-1] + lane))
    if isinstance(i, Op) and i.name in ("guard", "trusted", "cast_i64"):
        inner = lane_of(i.args[0], lane)
        return None if inner is None else op(i.name, inner, *i.args[1:], dtype=i.dtype)
    return None


def _span(offsets: tuple[int, ...], start: Expr, row: int, lanes: int) -> tuple[Expr, int]:
    """Return a vector's start and lanes, 0 if none: the whole row if it is a vector, for all offsets."""
    low, high = min(offsets), max(offsets)
    if row == lanes and nonneg(start + low) and nonneg(row - 1 - start - high) and value(start) is not None:
        return const(0), lanes
    width = 1 << (high - low).bit_length()
    fits = width <= lanes and nonneg(start + low) and nonneg(row - width - start - low)
    return start + low, width if fits else 0
