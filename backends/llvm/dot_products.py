"""LLVM text of `dot4` and `dot2`.

`dot4` is vpdpbusd where there is VNNI, else an exact expansion, with the same bits.

Without VNNI bytes become 16-bit numbers, even and odd ones apart, of which `vpmaddwd` adds pairs of products in 32
bits. `vpmaddubsw`, which is one instruction less, saturates pairs of products at 16 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dnnc.backends.llvm.spelling import literal, vector
from dnnc.ir.dtype import f32, i8, i16, i32
from dnnc.ir.expr import Expr, Op

if TYPE_CHECKING:
    from dnnc.backends.llvm.emit import FuncEmitter

# lanes -> (features of which one is needed, function)
_VNNI = {16: ("avx512vnni",), 8: ("avx512vnni", "avxvnni"), 4: ("avx512vnni", "avxvnni")}
_PAIRS = {
    16: ("avx512bw", "llvm.x86.avx512.pmaddw.d.512"),
    8: ("avx2", "llvm.x86.avx2.pmadd.wd"),
    4: ("", "llvm.x86.sse2.pmadd.wd"),
}


def dot4(em: FuncEmitter, e: Op) -> str:
    """acc + the sum of four products of bytes, lane by lane."""
    acc, x, w = em.expr(e.args[0]), _lanes(em, e.args[1], e.lanes), _lanes(em, e.args[2], e.lanes)
    if e.args[1].dtype is i8:  # x = (x + 128) - 128, of which the first is a u8
        ty, high = vector(i32, e.lanes), literal(-0x7F7F7F80, i32, e.lanes)
        shifted = em.pure(f"xor {ty} {x}, {high}", x, here=True)
        ones = em.pure(f"sub {ty} {acc}, {_unsigned(em, literal(0, i32, e.lanes), high, w, e.lanes)}", acc, here=True)
        return _unsigned(em, ones, shifted, w, e.lanes)
    return _unsigned(em, acc, x, w, e.lanes)


def dot2(em: FuncEmitter, e: Op) -> str:
    """The sum of two products of bf16, lane by lane."""
    return _add_pairs(em, literal(0.0, f32, e.lanes), e)


def add_dot2(em: FuncEmitter, e: Op) -> str:
    """acc + dot2(a, b) or dot2(a, b) + acc, lane by lane: one instruction where there is one."""
    pairs = next(a for a in e.args if isinstance(a, Op) and a.name == "dot2")
    acc = next(a for a in e.args if a is not pairs)
    return _add_pairs(em, em.operand(acc, e.lanes), pairs)


def _add_pairs(em: FuncEmitter, acc: str, e: Op) -> str:
    n = e.lanes
    x, y = (_lanes(em, a, n) for a in e.args)
    ty, words = vector(f32, n), vector(i32, n)
    if n in (4, 8, 16) and em.has("avx512bf16") and (n == 16 or em.has("avx512vl")):
        raw = f"<{2 * n} x bfloat>"
        x, y = (em.pure(f"bitcast {words} {v} to {raw}", v, here=True) for v in (x, y))
        return em.call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * n}", ty, (ty, acc), (raw, x), (raw, y))
    for how, by in (("shl", 16), ("and", -0x10000)):  # the lower bf16 of each word as f32, then the upper one
        a, b = (em.pure(f"{how} {words} {v}, {literal(by, i32, n)}", v, here=True) for v in (x, y))
        a, b = (em.pure(f"bitcast {words} {v} to {ty}", v, here=True) for v in (a, b))
        product = em.pure(f"fmul {ty} {a}, {b}", a, b, here=True)
        acc = em.pure(f"fadd {ty} {acc}, {product}", acc, product, here=True)
    return acc


def _lanes(em: FuncEmitter, e: Expr, lanes: int) -> str:
    """Bytes or bf16 as vectors of i32; what fills one i32 alone is that of all lanes."""
    n = e.lanes * e.dtype.bits // 32
    v = em.expr(e)
    v = em.pure(f"bitcast {vector(e.dtype, e.lanes)} {v} to {vector(i32, n)}", v, here=True)
    return v if n == lanes else em.splat(v, i32, lanes)


def _unsigned(em: FuncEmitter, acc: str, x: str, w: str, lanes: int) -> str:
    """acc, and products of the unsigned bytes of x and the signed ones of w."""
    if any(map(em.has, _VNNI.get(lanes, ()))):
        return _vnni(em, acc, x, w, lanes)
    feature, function = _PAIRS.get(lanes, ("", ""))
    ty, half = vector(i32, lanes), vector(i16, 2 * lanes)

    def do(text: str, *operands: str) -> str:
        return em.pure(text, *operands, here=True)

    def halves(name: str, a: str, by: int) -> str:
        wide = do(f"bitcast {ty} {a} to {half}", a)
        return do(f"{name} {half} {wide}, {literal(by, i16, 2 * lanes)}", wide)

    left = do(f"bitcast {half} {halves('shl', w, 8)} to {ty}", w)
    pairs = (halves("and", x, 255), halves("ashr", left, 8)), (halves("lshr", x, 8), halves("ashr", w, 8))
    for a, b in pairs:
        s = (
            em.call(function, ty, (half, a), (half, b))
            if function
            and em.features is not None
            and "neon" not in em.features
            and not (feature and em.lacks(feature))
            else _pair_sums(em, a, b, lanes)
        )
        acc = do(f"add {ty} {acc}, {s}", acc, s)
    return acc


def _vnni(em: FuncEmitter, acc: str, x: str, w: str, lanes: int) -> str:
    ty, raw = vector(i32, lanes), vector(i8, 4 * lanes)
    x, w = (em.pure(f"bitcast {ty} {v} to {raw}", v, here=True) for v in (x, w))
    return em.call(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", ty, (ty, acc), (raw, x), (raw, w))


def _pair_sums(em: FuncEmitter, a: str, b: str, lanes: int) -> str:
    """Products of 16-bit numbers, added by pairs."""
    half, wide, ty = vector(i16, 2 * lanes), vector(i32, 2 * lanes), vector(i32, lanes)

    def do(text: str, *operands: str) -> str:
        return em.pure(text, *operands, here=True)

    x, y = (do(f"sext {half} {v} to {wide}", v) for v in (a, b))
    p = do(f"mul {wide} {x}, {y}", x, y)
    if lanes == 1:
        even, odd = (do(f"extractelement {wide} {p}, i64 {k}", p) for k in (0, 1))
    else:
        even, odd = (
            do(f"shufflevector {wide} {p}, {wide} poison, <{lanes} x i32> <{_every_second(k, lanes)}>", p)
            for k in (0, 1)
        )
    return do(f"add {ty} {even}, {odd}", even, odd)


def _every_second(first: int, lanes: int) -> str:
    return ", ".join(f"i32 {first + 2 * k}" for k in range(lanes))
