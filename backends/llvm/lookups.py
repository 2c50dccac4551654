"""LLVM text of `lookup`: numbers of a small table by the low bits of integers.

With AVX-512 one instruction takes 16 of 16 numbers and reads no more than the low bits of each index, so that a code is
not even cut out of its word. AVX2 takes of two tables of 8. Elsewhere tables of integers in order are conversions, and
others lie in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dnnc.backends.llvm.spelling import literal, scalar, vector
from dnnc.ir.dtype import boolean, f32, i32, i64, u32
from dnnc.ir.expr import Const, Expr, Op, value
from dnnc.ir.loops.intrinsics import cast_target

if TYPE_CHECKING:
    from dnnc.backends.llvm.emit import FuncEmitter

WIDE, HALF = 16, 8  # numbers that one instruction takes of a table of as many


def lookup(em: FuncEmitter, e: Op) -> str:
    """The number that the low bits of each lane of the first operand say."""
    table = [float(a.value) for a in e.args[1:] if isinstance(a, Const)]
    i = low_bits(e.args[0], len(table))
    wide = e.dtype is f32 and i.dtype is u32
    if wide and e.lanes == WIDE and em.has("avx512f"):
        return _permuted(em, "llvm.x86.avx512.permvar.sf.512", table * (WIDE // len(table)), em.operand(i, WIDE))
    index = _cut(em, i, e.lanes, len(table))
    shift = 32 - (len(table).bit_length() - 1)
    signed = [float(k if k < len(table) // 2 else k - len(table)) for k in range(len(table))]
    for numbers, negative in ((list(map(float, range(len(table)))), False), (signed, True)):
        by = {t - k for t, k in zip(table, numbers)}
        if e.dtype is f32 and len(by) == 1:
            return _converted(em, index, shift if negative else 0, by.pop(), e.lanes)
    if e.dtype is f32 and e.lanes == HALF and em.has("avx2"):
        return _by_halves(em, table * (WIDE // len(table)), index)
    return _from_memory(em, table, index, e)


def low_bits(e: Expr, size: int) -> Expr:
    """An integer with the same low bits, which a table of `size` numbers reads: masks and conversions fall away."""
    while isinstance(e, Op):
        target = cast_target(e.name)
        x = e.args[0]
        if target is not None and not target[1] and x.dtype.is_int and 1 << min(target[0].bits, x.dtype.bits) >= size:
            e = x
        elif e.name == "&" and (mask := value(e.args[1])) is not None and mask & (size - 1) == size - 1:
            e = x
        else:
            break
    return e


def _cut(em: FuncEmitter, i: Expr, lanes: int, size: int) -> str:
    """The low bits alone, as i32."""
    ty, v = vector(i32, lanes), em.operand(i, lanes)
    if i.dtype.bits != 32:
        word = "zext" if i.dtype.bits < 32 else "trunc"
        v = em.pure(f"{word} {vector(i.dtype, lanes)} {v} to {ty}", v, here=True)
    return em.pure(f"and {ty} {v}, {literal(size - 1, i32, lanes)}", v, here=True)


def _converted(em: FuncEmitter, i: str, shift: int, by: float, lanes: int) -> str:
    """Integers as floats, plus a number; `shift` brings the sign of a few bits to the top and back."""
    ty, floats = vector(i32, lanes), vector(f32, lanes)
    if shift:
        i = em.pure(f"shl {ty} {i}, {literal(shift, i32, lanes)}", i, here=True)
        i = em.pure(f"ashr {ty} {i}, {literal(shift, i32, lanes)}", i, here=True)
    x = em.pure(f"sitofp {ty} {i} to {floats}", i, here=True)
    return em.pure(f"fadd {floats} {x}, {literal(by, f32, lanes)}", x, here=True) if by else x


def _permuted(em: FuncEmitter, function: str, table: list[float], i: str) -> str:
    n = len(table)
    ty = vector(f32, n)
    numbers = "<" + ", ".join(f"float {literal(x, f32)}" for x in table) + ">"
    return em.call(function, ty, (ty, numbers), (vector(i32, n), i))


def _by_halves(em: FuncEmitter, table: list[float], i: str) -> str:
    low, high = (_permuted(em, "llvm.x86.avx2.permps", table[at : at + HALF], i) for at in (0, HALF))
    ty = vector(i32, HALF)
    upper = em.pure(f"icmp sgt {ty} {i}, {literal(HALF - 1, i32, HALF)}", i, here=True)
    floats = vector(f32, HALF)
    return em.pure(
        f"select {vector(boolean, HALF)} {upper}, {floats} {high}, {floats} {low}", upper, high, low, here=True
    )


def _from_memory(em: FuncEmitter, table: list[float], i: str, e: Op) -> str:
    ty, t = vector(e.dtype, e.lanes), scalar(e.dtype)
    numbers = ", ".join(f"{t} {literal(x, e.dtype)}" for x in table)
    name = f"@dnnc.table.{t}." + "_".join(literal(x, e.dtype).replace("-", "m").replace("+", "p") for x in table)
    em.decls.add(f"{name} = private unnamed_addr constant [{len(table)} x {t}] [{numbers}], align 64")
    out = "poison"
    for k in range(e.lanes):
        at = i if e.lanes == 1 else em.pure(f"extractelement {vector(i32, e.lanes)} {i}, i64 {k}", i, here=True)
        place = em.pure(f"zext i32 {at} to {scalar(i64)}", at, here=True)
        p = em.pure(f"getelementptr {t}, ptr {name}, i64 {place}", place, here=True)
        x = em.pure(f"load {t}, ptr {p}", p, here=True)
        if e.lanes == 1:
            return x
        out = em.pure(f"insertelement {ty} {out}, {t} {x}, i64 {k}", x, here=True)
    return out
