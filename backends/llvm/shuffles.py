"""LLVM text of operations that bring lanes of two vectors into another order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dnnc.backends.llvm.spelling import vector
from dnnc.ir.expr import Op, unwrap

if TYPE_CHECKING:
    from dnnc.backends.llvm.emit import FuncEmitter


def zipped(em: FuncEmitter, e: Op) -> str:
    """`zip_low`, `zip_high`: a half of each of two vectors, lane by lane in turn."""
    a, b = (em.operand(x, e.lanes) for x in e.args)
    ty, start = vector(e.dtype, e.lanes), e.lanes // 2 * (e.name == "zip_high")
    order = ", ".join(f"i32 {start + k // 2 + k % 2 * e.lanes}" for k in range(e.lanes))
    return em.pure(f"shufflevector {ty} {a}, {ty} {b}, <{e.lanes} x i32> <{order}>", a, b, here=True)


def interleaved(em: FuncEmitter, e: Op) -> str:
    """`interleave_low`, `interleave_high`: a half of each group of two vectors, units of lanes in turn."""
    a, b = (em.operand(x, e.lanes) for x in e.args[:2])
    unit, group = (int(unwrap(x)) for x in e.args[2:])
    start = group // 2 * (e.name == "interleave_high")
    places = []
    for k in range(e.lanes):
        turn, at = divmod(k % group, unit)
        places.append(k // group * group + start + turn // 2 * unit + at + turn % 2 * e.lanes)
    order, ty = ", ".join(f"i32 {p}" for p in places), vector(e.dtype, e.lanes)
    return em.pure(f"shufflevector {ty} {a}, {ty} {b}, <{e.lanes} x i32> <{order}>", a, b, here=True)
