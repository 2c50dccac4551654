"""LLVM text of `lookup`, numbers of a small table by the low bits of integers, and of `recode`, bytes of 256.

With AVX-512 one instruction takes 16 of 16 numbers and reads no more than the low bits of each index, so that a code is
not even cut out of its word. AVX2 takes of two tables of 8. Elsewhere tables of integers in order are conversions, and
others lie in memory.

256 bytes are four registers. AVX-512 VBMI takes 64 of 128 bytes at once, so two such and a choice by the top bit serve
16 indices in 32 bits each as well. Without it, 16-bit numbers are taken likewise. AVX2 gathers from memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.llvm.spelling import literal, scalar, vector
from dnnc.ir.dtype import DType, boolean, f32, i8, i16, i32, i64, u8, u32
from dnnc.ir.expr import Const, Expr, Op, unwrap, value
from dnnc.ir.loops.intrinsics import cast_target

if TYPE_CHECKING:
    from dnnc.backends.llvm.emit import FuncEmitter

Array = np.ndarray[Any, Any]
WIDE, HALF = 16, 8  # numbers that one instruction takes of a table of as many
BYTES = 256  # that a byte tells apart
REGISTER = 64  # bytes


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


def recode(em: FuncEmitter, e: Op) -> str:
    """Bytes of a table of 256 by bytes."""
    table = np.array([unwrap(w) for w in e.args[1:]], "<i8").view(np.uint8)
    i = em.operand(e.args[0], e.lanes)
    if 1 < e.lanes <= WIDE and em.has("avx512bw"):
        return _permuted_bytes(em, table, i, e.lanes)
    ty, name = vector(i32, e.lanes), _table_in_memory(em, table)
    wide = em.pure(f"zext {vector(u8, e.lanes)} {i} to {ty}", i, here=True)
    if e.lanes == HALF and em.has("avx2"):
        given = (ty, "zeroinitializer"), ("ptr", name), (ty, wide), (ty, literal(-1, i32, HALF)), ("i8", "4")
        found = em.call("llvm.x86.avx2.gather.d.d.256", ty, *given)
        return em.pure(f"trunc {ty} {found} to {vector(u8, e.lanes)}", found, here=True)
    return _one_by_one(em, name, wide, e.lanes)


def _permuted_bytes(em: FuncEmitter, table: Array, i: str, lanes: int) -> str:
    """Lanes of 32 bits, whose low bytes are the indices and the results; the other bytes are ignored."""
    ty, words = vector(i32, WIDE), vector(i32, lanes)

    def do(text: str, *operands: str) -> str:
        return em.pure(text, *operands, here=True)

    at = do(f"zext {vector(u8, lanes)} {i} to {words}", i)
    if lanes < WIDE:
        order = ", ".join(f"i32 {k % lanes}" for k in range(WIDE))
        at = do(f"shufflevector {words} {at}, {words} poison, <{WIDE} x i32> <{order}>", at)
    of_bytes = em.has("avx512vbmi")
    unit = i8 if of_bytes else i16
    count = 8 * REGISTER // unit.bits
    raw = vector(unit, count)
    number = at if of_bytes else do(f"lshr {ty} {at}, {literal(1, i32, WIDE)}", at)
    number = do(f"bitcast {ty} {number} to {raw}", number)
    parts = [vector_of(unit, part.view(unit.numpy)) for part in table.reshape(4, REGISTER)]
    name = f"llvm.x86.avx512.vpermi2var.{'qi' if of_bytes else 'hi'}.512"
    low, high = (em.call(name, raw, (raw, a), (raw, number), (raw, b)) for a, b in (parts[:2], parts[2:]))
    low, high = (do(f"bitcast {raw} {v} to {ty}", v) for v in (low, high))
    upper = do(f"icmp ugt {ty} {at}, {literal(BYTES // 2 - 1, i32, WIDE)}", at)
    found = do(f"select {vector(boolean, WIDE)} {upper}, {ty} {high}, {ty} {low}", upper, high, low)
    if not of_bytes:
        odd = do(f"and {ty} {at}, {literal(1, i32, WIDE)}", at)
        by = do(f"shl {ty} {odd}, {literal(3, i32, WIDE)}", odd)
        found = do(f"lshr {ty} {found}, {by}", found, by)
    found = do(f"trunc {ty} {found} to {vector(u8, WIDE)}", found)
    if lanes < WIDE:
        order = ", ".join(f"i32 {k}" for k in range(lanes))
        bytes_ = vector(u8, WIDE)
        found = do(f"shufflevector {bytes_} {found}, {bytes_} poison, <{lanes} x i32> <{order}>", found)
    return found


def vector_of(dtype: DType, numbers: Array) -> str:
    """A constant vector."""
    return "<" + ", ".join(f"{scalar(dtype)} {literal(int(v), dtype)}" for v in numbers) + ">"


def _table_in_memory(em: FuncEmitter, table: Array) -> str:
    """256 bytes as numbers of 32 bits, so that a gather reads nothing else."""
    name = f"@dnnc.bytes.{table.tobytes().hex()}"
    numbers = ", ".join(f"i32 {v}" for v in table)
    em.decls.add(f"{name} = private unnamed_addr constant [{BYTES} x i32] [{numbers}], align 64")
    return name


def _one_by_one(em: FuncEmitter, name: str, i: str, lanes: int) -> str:
    ty, out = vector(u8, lanes), "poison"
    for k in range(lanes):
        at = i if lanes == 1 else em.pure(f"extractelement {vector(i32, lanes)} {i}, i64 {k}", i, here=True)
        place = em.pure(f"zext i32 {at} to i64", at, here=True)
        p = em.pure(f"getelementptr i32, ptr {name}, i64 {place}", place, here=True)
        x = em.pure(f"load i8, ptr {p}", p, here=True)  # the lowest byte
        if lanes == 1:
            return x
        out = em.pure(f"insertelement {ty} {out}, i8 {x}, i64 {k}", x, here=True)
    return out
