"""LLVM text of operations on values; undefined cases are guarded as in spelling.py's table."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from dnnc.backends.llvm.dot_products import add_dot2, dot2, dot4
from dnnc.backends.llvm.lookups import lookup, recode
from dnnc.backends.llvm.shuffles import interleaved, zipped
from dnnc.backends.llvm.spelling import FLOAT, FLOAT_COMPARE, INT, INTRINSIC, LIBM, literal, mangle, scalar, vector
from dnnc.ir.bounds import bounds, nonneg
from dnnc.ir.dtype import DType, boolean, f16, f32, f64, i32, i64, u32
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import COMPARE, Const, Expr, Op, cast, value
from dnnc.ir.loops.intrinsics import cast_target
from dnnc.ir.loops.pieces import ROWS
from dnnc.ir.loops.verify import scalarise
from dnnc.passes.lower.conversions import is_small, narrow, rounded, to_odd, widen, widen_by_half
from dnnc.passes.lower.requantization import clip_range

if TYPE_CHECKING:
    from dnnc.backends.llvm.emit import FuncEmitter


def compute(em: FuncEmitter, e: Op) -> str:
    """The SSA value of one operation."""
    target = cast_target(e.name)
    if target is not None:
        return bits(em, e, target[0]) if target[1] else convert(em, e.args[0], target[0], e.lanes)
    special = _SPECIAL.get(e.name)
    if special is not None:
        return special(em, e)
    if e.name in ("floor", "ceil", "trunc", "rint") and em.lacks("sse4.1"):
        return em.operand(rounded(e.name, e.args[0]), e.lanes)
    if e.name == "+" and any(isinstance(a, Op) and a.name == "dot2" for a in e.args):
        return add_dot2(em, e)
    vs = [em.operand(a, e.lanes) for a in e.args]
    t = e.args[0].dtype
    if e.name in COMPARE:
        return compare(em, e.name, t, vs[0], vs[1], e.lanes)
    if e.name in ("min", "max", "fmin", "fmax"):
        b = e.args[1]
        return extremum(em, e.name, t, vs[0], vs[1], e.lanes, isinstance(b, Const) and b.value == b.value)
    if t.is_float:
        return floating(em, e.name, t, vs, e.lanes)
    return integral(em, e, vs)


def floating(em: FuncEmitter, name: str, t: DType, vs: list[str], lanes: int) -> str:
    ty = vector(t, lanes)
    if name in FLOAT:
        return em.pure(f"{FLOAT[name]} {ty} {vs[0]}, {vs[1]}", *vs, here=True)
    if name == "neg":
        return em.pure(f"fneg {ty} {vs[0]}", *vs, here=True)
    if name == "fma" and em.lacks("fma"):  # a call of fmaf otherwise
        product = em.pure(f"fmul {ty} {vs[0]}, {vs[1]}", *vs[:2], here=True)
        return em.pure(f"fadd {ty} {product}, {vs[2]}", product, vs[2], here=True)
    if name in INTRINSIC:
        return em.call(f"{INTRINSIC[name]}.{mangle(t, lanes)}", ty, *((ty, v) for v in vs))
    if name in LIBM:
        return per_lane(em, name + ("f" if t.bits == 32 else ""), t, vs, lanes)
    if name == "truncmod":
        return per_lane(em, "fmodf" if t.bits == 32 else "fmod", t, vs, lanes)
    if name == "floormod":
        return _float_floormod(em, t, vs, lanes)
    if name == "isnan":
        return em.pure(f"fcmp uno {ty} {vs[0]}, {vs[0]}", *vs, here=True)
    raise InternalError(f"{name} on {t} has no LLVM spelling")


def per_lane(em: FuncEmitter, function: str, t: DType, vs: list[str], lanes: int) -> str:
    """A scalar function of the C library on every lane: right, not fast."""
    s, ty = scalar(t), vector(t, lanes)
    if lanes == 1:
        return em.call(function, s, *((s, v) for v in vs))
    out = "poison"
    for k in range(lanes):
        args = [em.pure(f"extractelement {ty} {v}, i64 {k}", v, here=True) for v in vs]
        r = em.call(function, s, *((s, a) for a in args))
        out = em.pure(f"insertelement {ty} {out}, {s} {r}, i64 {k}", r, here=True)
    return out


def _float_floormod(em: FuncEmitter, t: DType, vs: list[str], lanes: int) -> str:
    """fmod, plus the divisor where the signs differ: the remainder has the sign of the divisor."""
    ty, zero = vector(t, lanes), literal(0.0, t, lanes)
    r = per_lane(em, "fmodf" if t.bits == 32 else "fmod", t, vs, lanes)
    nonzero = em.pure(f"fcmp une {ty} {r}, {zero}", r, here=True)
    r_neg, b_neg = (em.pure(f"fcmp olt {ty} {v}, {zero}", v, here=True) for v in (r, vs[1]))
    b1 = vector(boolean, lanes)
    differ = em.pure(f"xor {b1} {r_neg}, {b_neg}", r_neg, b_neg, here=True)
    fix = em.pure(f"and {b1} {nonzero}, {differ}", nonzero, differ, here=True)
    plus = em.pure(f"fadd {ty} {r}, {vs[1]}", r, vs[1], here=True)
    return choose(em, fix, plus, r, ty, lanes)


def choose(em: FuncEmitter, cond: str, a: str, b: str, ty: str, lanes: int) -> str:
    ct = f"<{lanes} x i1>" if lanes > 1 else "i1"
    return em.pure(f"select {ct} {cond}, {ty} {a}, {ty} {b}", cond, a, b, here=True)


def compare(em: FuncEmitter, name: str, t: DType, a: str, b: str, lanes: int) -> str:
    ty = vector(t, lanes)
    if t.is_float:
        return em.pure(f"fcmp {FLOAT_COMPARE[name]} {ty} {a}, {b}", a, b, here=True)
    sign = "s" if t.kind == "i" else "u"
    pred = {"<": sign + "lt", "<=": sign + "le", "==": "eq", "!=": "ne"}[name]
    return em.pure(f"icmp {pred} {ty} {a}, {b}", a, b, here=lanes > 1)


def extremum(em: FuncEmitter, name: str, t: DType, a: str, b: str, lanes: int, number: bool) -> str:
    """min/max propagate NaN; fmin/fmax take the second for NaN, as one x86 instruction. `number`: b is no NaN."""
    ty = vector(t, lanes)
    if not t.is_float:
        kind = ("s" if t.kind == "i" else "u") + name.removeprefix("f")
        return em.call(f"llvm.{kind}.{mangle(t, lanes)}", ty, (ty, a), (ty, b), here=lanes > 1)
    greater = name.endswith("max")
    if name in ("fmax", "fmin"):
        c = em.pure(f"fcmp {'ogt' if greater else 'olt'} {ty} {a}, {b}", a, b, here=True)
        return choose(em, c, a, b, ty, lanes)
    if number:  # x < c ? c : x keeps a NaN in x
        c = em.pure(f"fcmp {'olt' if greater else 'ogt'} {ty} {a}, {b}", a, b, here=True)
        return choose(em, c, b, a, ty, lanes)
    # x86: the maximum of b and a gives a where one is NaN, and is not taken where b is: two instructions. b is what is
    # new in a reduction, and tested while a is being computed
    c = em.pure(f"fcmp {'ogt' if greater else 'olt'} {ty} {b}, {a}", a, b, here=True)
    r = choose(em, c, b, a, ty, lanes)
    number_b = em.pure(f"fcmp ord {ty} {b}, {b}", b, here=True)
    return choose(em, number_b, r, b, ty, lanes)


def integral(em: FuncEmitter, e: Op, vs: list[str]) -> str:
    t, lanes = e.args[0].dtype, e.lanes
    ty, name = vector(t, lanes), e.name
    here = lanes > 1
    if name in INT:
        return em.pure(f"{INT[name]} {ty} {vs[0]}, {vs[1]}", *vs, here=here)
    if name in ("//", "%"):
        if (
            bounds(e.args[1])[0] or 0
        ) < 1 and lanes == 1:  # code is placed ahead of the loop that never runs when a dim is 0
            vs[1] = em.call("llvm.smax.i64", "i64", ("i64", vs[1]), ("i64", "1"), here=False)
        if nonneg(scalarise(e.args[0])):
            return em.pure(f"{'udiv' if name == '//' else 'urem'} {ty} {vs[0]}, {vs[1]}", *vs, here=here)
        return _floor_index(em, e, vs)
    if name in ("truncdiv", "truncmod", "floormod"):
        return _divide(em, name, t, vs, lanes)
    if name in ("shl", "shr"):
        return _shift(em, e, vs)
    ones = literal(-1, t, lanes) if t.kind != "b" else literal(True, t, lanes)
    if name == "popcount":
        return em.call(f"llvm.ctpop.{mangle(t, lanes)}", ty, (ty, vs[0]), here=here)
    if name in ("not", "bitnot"):
        return em.pure(f"xor {ty} {vs[0]}, {ones}", *vs, here=here)
    if name == "neg":
        return em.pure(f"sub {ty} {literal(0, t, lanes)}, {vs[0]}", *vs, here=here)
    if name == "abs":
        return vs[0] if t.kind == "u" else em.call(f"llvm.abs.{mangle(t, lanes)}", ty, (ty, vs[0]), ("i1", "false"))
    raise InternalError(f"{name} on {t} has no LLVM spelling")


def _floor_index(em: FuncEmitter, e: Op, vs: list[str]) -> str:
    """Floor division of an index that may be negative: a shift for powers of two, else corrected."""
    d, lanes, here = value(e.args[1]), e.lanes, e.lanes > 1
    ty = vector(i64, lanes)

    def do(text: str, *operands: str) -> str:
        return em.pure(text, *operands, here=here)

    if d is not None and d & (d - 1) == 0:
        by = d.bit_length() - 1 if e.name == "//" else d - 1
        return do(f"{'ashr' if e.name == '//' else 'and'} {ty} {vs[0]}, {literal(by, i64, lanes)}", vs[0])
    q = do(f"sdiv {ty} {vs[0]}, {vs[1]}", *vs)
    back = do(f"mul {ty} {q}, {vs[1]}", q, vs[1])
    m = do(f"sub {ty} {vs[0]}, {back}", vs[0], back)
    neg = do(f"ashr {ty} {m}, {literal(63, i64, lanes)}", m)
    if e.name == "//":
        return do(f"add {ty} {q}, {neg}", q, neg)
    fix = do(f"and {ty} {neg}, {vs[1]}", neg, vs[1])
    return do(f"add {ty} {m}, {fix}", m, fix)


def _divide(em: FuncEmitter, name: str, t: DType, vs: list[str], lanes: int) -> str:
    """x / 0 is 0, INT_MIN / -1 wraps (truncmod: 0): the divisor is replaced where the instruction traps."""
    ty, (a, b) = vector(t, lanes), vs
    b1 = vector(boolean, lanes)
    zero, one = literal(0, t, lanes), literal(1, t, lanes)
    by_zero = em.pure(f"icmp eq {ty} {b}, {zero}", b, here=True)
    trap, minus = by_zero, ""
    if t.kind == "i":
        minus = em.pure(f"icmp eq {ty} {b}, {literal(-1, t, lanes)}", b, here=True)
        trap = em.pure(f"or {b1} {by_zero}, {minus}", by_zero, minus, here=True)
    safe = choose(em, trap, one, b, ty, lanes)
    s = "s" if t.kind == "i" else "u"
    if name == "truncdiv":
        q = em.pure(f"{s}div {ty} {a}, {safe}", a, safe, here=True)
        q = choose(em, by_zero, zero, q, ty, lanes)
        if minus:
            q = choose(em, minus, em.pure(f"sub {ty} {zero}, {a}", a, here=True), q, ty, lanes)
        return q
    r = em.pure(f"{s}rem {ty} {a}, {safe}", a, safe, here=True)  # x rem 1 = 0: right for -1, and what 0 gives
    if name == "truncmod" or t.kind == "u":
        return r
    nonzero = em.pure(f"icmp ne {ty} {r}, {zero}", r, here=True)
    differ = em.pure(f"icmp slt {ty} {em.pure(f'xor {ty} {r}, {b}', r, b, here=True)}, {zero}", r, b, here=True)
    fix = em.pure(f"and {b1} {nonzero}, {differ}", nonzero, differ, here=True)
    return choose(em, fix, em.pure(f"add {ty} {r}, {b}", r, b, here=True), r, ty, lanes)


def _shift(em: FuncEmitter, e: Op, vs: list[str]) -> str:
    name, t, lanes = e.name, e.args[0].dtype, e.lanes
    ty = vector(t, lanes)
    ins = "shl" if name == "shl" else "ashr" if t.kind == "i" else "lshr"
    count = e.args[1]
    while isinstance(count, Op) and cast_target(count.name) is not None and count.args[0].dtype.is_int:
        count = count.args[0]  # no conversion changes a count that is in range
    by = value(em.without_unrolled(count)) if count.lanes == 1 else None
    if by is not None and 0 <= by < t.bits:
        return em.pure(f"{ins} {ty} {vs[0]}, {literal(by, t, lanes)}", vs[0], here=True)
    low, high = bounds(count)
    if low is not None and high is not None and 0 <= low <= high < t.bits:
        return em.pure(f"{ins} {ty} {vs[0]}, {vs[1]}", *vs, here=True)
    top = literal(t.bits - 1, t, lanes)
    big = em.pure(f"icmp ugt {ty} {vs[1]}, {top}", vs[1], here=True)
    n = choose(em, big, top, vs[1], ty, lanes)
    r = em.pure(f"{ins} {ty} {vs[0]}, {n}", vs[0], n, here=True)
    return r if ins == "ashr" else choose(em, big, literal(0, t, lanes), r, ty, lanes)


def bits(em: FuncEmitter, e: Op, to: DType) -> str:
    v = em.operand(e.args[0], e.lanes)
    a, b = vector(e.args[0].dtype, e.lanes), vector(to, e.lanes)
    return v if a == b else em.pure(f"bitcast {a} {v} to {b}", v, here=True)


def convert(em: FuncEmitter, arg: Expr, to: DType, lanes: int) -> str:
    """Value conversion between any two types."""
    src = arg.dtype
    if src is to:
        return em.operand(arg, lanes)
    if to is i32 and (found := _nearest_function(em, arg, lanes)) is not None:
        assert isinstance(arg, Op)
        return _nearest(em, em.operand(arg.args[0], lanes), found, lanes)
    if to.is_int and to.bits == 8 and src is i32 and lanes > 1:
        v = _low_byte(em, arg, lanes)
        return em.pure(f"trunc {vector(src, lanes)} {v} to {vector(to, lanes)}", v, here=True)
    if is_small(src):
        wide = cast(cast(arg, f32), to) if to is not f32 else arg if em.has_half(src) else _widened(em, arg)
        return _number(em, em.operand(arg, lanes), src, to, lanes) if wide is arg else em.operand(wide, lanes)
    if is_small(to) and not (src is f32 and em.has_half(to)):
        half = to_odd(arg) if src is f64 else cast(arg, f32)
        return em.operand(narrow(half, to) if src is f32 else cast(half, to), lanes)
    inside = False
    if to.is_int and to.bits <= 32 and src.is_float:
        low, high = to.range
        whole = arg.args[0] if isinstance(arg, Op) and arg.name == "rint" else arg
        inside = to is not u32 and _within(whole, max(low, -NEAR), min(high, NEAR))
    return _number(em, em.operand(arg, lanes), src, to, lanes, inside)


def _widened(em: FuncEmitter, arg: Expr) -> Expr:
    """A small float as float32."""
    wide = widen_by_half(arg) if em.has_half(f16) else None
    return widen(arg) if wide is None else wide


NEAR = 1 << 30  # floats up to it are in the range of i32
# conversions that round to the nearest integer: (lanes, feature) -> function
_NEAREST = {
    (16, "avx512f"): "llvm.x86.avx512.mask.cvtps2dq.512",
    (8, "avx"): "llvm.x86.avx.cvt.ps2dq.256",
    (4, "sse2"): "llvm.x86.sse2.cvtps2dq",
}


def _within(e: Expr, low: int, high: int) -> bool:
    """Is this a clip between constants from low to high? NaN passes it."""
    found = clip_range(e)
    return found is not None and low <= found[0] and found[1] <= high


def _low_byte(em: FuncEmitter, e: Expr, lanes: int) -> str:
    """An i32 of which only the lowest eight bits matter. They are 0 where NaN is converted, with or without a mask."""
    if isinstance(e, Op) and e.name == "+" and isinstance(e.args[1], Const):
        v, more = _low_byte(em, e.args[0], lanes), literal(e.args[1].value, i32, lanes)
        return em.pure(f"add {vector(i32, lanes)} {v}, {more}", v, here=True)
    found = _nearest_function(em, e.args[0], lanes) if isinstance(e, Op) and e.name == "cast_i32" else None
    if found is None:
        return em.operand(e, lanes)
    assert isinstance(e, Op) and isinstance(e.args[0], Op)
    return _nearest(em, em.operand(e.args[0].args[0], lanes), found, lanes, masked=False)


def _nearest_function(em: FuncEmitter, e: Expr, lanes: int) -> str | None:
    """The instruction that converts `rint(x)` to i32, x a clip; None where there is none."""
    if not isinstance(e, Op) or e.name != "rint" or e.dtype is not f32 or not _within(e.args[0], -NEAR, NEAR):
        return None
    if em.features is None or "neon" in em.features:
        return None
    return next((v for (n, f), v in _NEAREST.items() if n == lanes and not em.lacks(f)), None)


def _nearest(em: FuncEmitter, v: str, function: str, lanes: int, masked: bool = True) -> str:
    """The nearest integers of numbers in the range of i32, ties to even; 0 of NaN, not `masked` what there is."""
    a, b, zero = vector(f32, lanes), vector(i32, lanes), literal(0, i32, lanes)
    number = em.pure(f"fcmp ord {a} {v}, {v}", v, here=True) if masked else ""
    if lanes == 16:
        mask = em.pure(f"bitcast <16 x i1> {number} to i16", number, here=True) if masked else "-1"
        return em.call(function, b, (a, v), (b, zero), ("i16", mask), ("i32", "4"))
    i = em.call(function, b, (a, v))
    return choose(em, number, i, zero, b, lanes) if masked else i


def _number(em: FuncEmitter, v: str, src: DType, to: DType, lanes: int, inside: bool = False) -> str:
    """Conversion where LLVM has an instruction. `inside`: a float is NaN or in the range of the integer type."""
    a, b = vector(src, lanes), vector(to, lanes)
    if to.kind == "b":
        return em.pure(
            f"fcmp une {a} {v}, {literal(0.0, src, lanes)}"
            if src.is_float
            else f"icmp ne {a} {v}, {literal(0, src, lanes)}",
            v,
            here=True,
        )
    if src.is_float and to.is_float:
        return em.pure(f"{'fpext' if src.bits < to.bits else 'fptrunc'} {a} {v} to {b}", v, here=True)
    if src.is_float and inside:
        number = em.pure(f"fcmp ord {a} {v}, {v}", v, here=True)
        wide = vector(i32, lanes)
        i = em.pure(f"fptosi {a} {v} to {wide}", v, here=True)
        i = choose(em, number, i, literal(0, i32, lanes), wide, lanes)
        return i if wide == b else em.pure(f"trunc {wide} {i} to {b}", i, here=True)
    if src.is_float and lanes > 1 and to is not u32 and to.bits <= 32:
        return _saturated(em, v, src, to, lanes)
    if src.is_float:
        return em.call(
            f"llvm.fpto{'s' if to.kind == 'i' else 'u'}i.sat.{mangle(to, lanes)}.{mangle(src, lanes)}", b, (a, v)
        )
    if to.is_float:
        return em.pure(f"{'sitofp' if src.kind == 'i' else 'uitofp'} {a} {v} to {b}", v, here=True)
    if a == b:
        return v
    small = src.kind == "b" or src.bits < to.bits
    return em.pure(f"{('sext' if src.kind == 'i' else 'zext') if small else 'trunc'} {a} {v} to {b}", v, here=lanes > 1)


def _saturated(em: FuncEmitter, v: str, src: DType, to: DType, lanes: int) -> str:
    """Conversion to integers that i32 holds: the nearest one in the range, 0 of NaN.

    LLVM does lane by lane what `llvm.fptosi.sat` means. i32's largest number is no float32: what is above it is chosen.
    """
    a, wide, low, high = vector(src, lanes), vector(i32, lanes), *map(float, to.range)
    rounds_up = src is f32 and to is i32
    last = literal(np.nextafter(np.float32(high), np.float32(0)).item() if rounds_up else high, src, lanes)
    number, above, below = (
        em.pure(f"fcmp {how} {a} {v}, {other}", v, here=True)
        for how, other in (("ord", v), ("ogt", last), ("olt", literal(low, src, lanes)))
    )
    inside = choose(em, below, literal(low, src, lanes), choose(em, above, last, v, a, lanes), a, lanes)
    i = em.pure(f"fptosi {a} {inside} to {wide}", inside, here=True)
    if rounds_up:
        i = choose(em, above, literal(to.range[1], i32, lanes), i, wide, lanes)
    i = choose(em, number, i, literal(0, i32, lanes), wide, lanes)
    return i if to.bits == 32 else em.pure(f"trunc {wide} {i} to {vector(to, lanes)}", i, here=True)


def _select(em: FuncEmitter, e: Op) -> str:
    lanes, ty = e.lanes, vector(e.dtype, e.lanes)
    c = em.expr(e.args[0]) if e.args[0].lanes == 1 else em.operand(e.args[0], lanes)
    a, b = em.operand(e.args[1], lanes), em.operand(e.args[2], lanes)
    ct = f"<{lanes} x i1>" if e.args[0].lanes > 1 else "i1"
    return em.pure(f"select {ct} {c}, {ty} {a}, {ty} {b}", c, a, b, here=lanes > 1)


def _horizontal(em: FuncEmitter, e: Op) -> str:
    x = e.args[0]
    v, ty, s = em.expr(x), vector(x.dtype, x.lanes), scalar(x.dtype)
    if x.dtype.is_float and e.name in ("hsum", "hprod"):
        name = f"llvm.vector.reduce.{'fadd' if e.name == 'hsum' else 'fmul'}.{mangle(x.dtype, x.lanes)}"
        em.decls.add(f"declare {s} @{name}({s}, {ty})")
        # reassoc: a tree of halves instead of a chain
        return em.effect(
            f"call reassoc {s} @{name}({s} {literal(0.0 if e.name == 'hsum' else 1.0, x.dtype)}, {ty} {v})"
        )
    if x.dtype.is_float:
        return _float_extremum(em, e, v)
    sign = "s" if x.dtype.kind == "i" else "u"
    kind = {"hsum": "add", "hprod": "mul", "hmax": sign + "max", "hmin": sign + "min"}[e.name]
    return em.call(f"llvm.vector.reduce.{kind}.{mangle(x.dtype, x.lanes)}", s, (ty, v))


# vrcp14ps, and the estimates before it: (lanes, feature) -> function and relative error as a power of two
_ESTIMATES = {
    (16, "avx512f"): ("llvm.x86.avx512.rcp14.ps.512", 14),
    (8, "avx512vl"): ("llvm.x86.avx512.rcp14.ps.256", 14),
    (4, "avx512vl"): ("llvm.x86.avx512.rcp14.ps.128", 14),
    (8, "fma"): ("llvm.x86.avx.rcp.ps.256", 11),
    (4, "fma"): ("llvm.x86.sse.rcp.ps", 11),
}


def _recip(em: FuncEmitter, e: Op) -> str:
    """1 / x; of vectors wider than the estimate, part by part."""
    x, lanes = em.operand(e.args[0], e.lanes), e.lanes
    most = max((n for n, f in _ESTIMATES if em.has(f)), default=0)
    if e.dtype is not f32 or em.has("sse4a") or not 0 < most < lanes or lanes & (lanes - 1):
        return _reciprocal(em, x, e.dtype, lanes, e.name)
    return by_parts(em, [x], lanes, most, lambda vs, n: _reciprocal(em, vs[0], f32, n, e.name))


def by_parts(em: FuncEmitter, vs: list[str], lanes: int, most: int, f: Callable[[list[str], int], str]) -> str:
    """f of float32 vectors, part by part where they have more than `most` lanes; both are powers of two."""

    def shuffled(a: str, b: str, n: int, order: range) -> str:
        ty = vector(f32, n)
        text = f"shufflevector {ty} {a}, {ty} {b}, <{len(order)} x i32> <{', '.join(f'i32 {k}' for k in order)}>"
        return em.pure(text, a, b, here=True)

    if lanes <= most:
        return f(vs, lanes)
    parts = [f([shuffled(v, v, lanes, range(at, at + most)) for v in vs], most) for at in range(0, lanes, most)]
    while len(parts) > 1:
        n = lanes // len(parts)
        parts = [shuffled(a, b, n, range(2 * n)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _scale(em: FuncEmitter, e: Op) -> str:
    """An instruction of AVX-512 of 4, 8 or 16 lanes."""

    def one(parts: list[str], n: int) -> str:
        ty, wide = vector(f32, n), n == 16
        rounding = (("i32", "4"),) if wide else ()  # as it is set
        mask = ("i16" if wide else "i8", "-1")
        name = f"llvm.x86.avx512.mask.scalef.ps.{32 * n}"
        return em.call(name, ty, *((ty, v) for v in parts), (ty, "zeroinitializer"), mask, *rounding)

    return _avx512(em, e, e.args, 4, one)


def _piece(em: FuncEmitter, e: Op) -> str:
    """Two registers of 16 numbers, from which one instruction of AVX-512 takes 16."""
    t, k = e.args
    assert isinstance(k, Const)
    row = f"@dnnc.row{k.value}"
    em.decls.add(f"{row} = {_row(int(k.value))}")
    # as with the constants of an epilogue: what LLVM knows the address of it would keep in registers
    at = em.effect(f'call ptr asm sideeffect "", "=r,0"(ptr {row})') if em.table else row
    high = em.pure(f"getelementptr float, ptr {at}, i64 16", at, here=True)
    halves = [em.pure(f"load <16 x float>, ptr {p}, align 64", p, here=True) for p in (at, high)]

    def one(parts: list[str], n: int) -> str:
        places = em.pure(f"bitcast <16 x float> {parts[0]} to <16 x i32>", parts[0], here=True)
        f = ("<16 x float>", halves[0]), ("<16 x i32>", places), ("<16 x float>", halves[1])
        return em.call("llvm.x86.avx512.vpermi2var.ps.512", "<16 x float>", *f)

    return _avx512(em, e, (t,), 16, one)


@cache
def _row(k: int) -> str:
    """A row of the tables as a constant of LLVM."""
    numbers = ", ".join(f"float {literal(v, f32)}" for v in ROWS[k].tolist())
    return f"private unnamed_addr constant [32 x float] [{numbers}], align 64"


def _avx512(em: FuncEmitter, e: Op, args: tuple[Expr, ...], least: int, one: Callable[[list[str], int], str]) -> str:
    """Of vectors of `least` to 16 lanes, by parts where there are more; fewer lanes are a part of so many."""
    lanes = e.lanes
    if e.dtype is not f32 or not em.has("avx512vl") or lanes & (lanes - 1):
        raise InternalError(f"{e.name} of {lanes} lanes of {e.dtype} has no LLVM spelling")
    if lanes >= least:
        return by_parts(em, [em.operand(a, lanes) for a in args], lanes, 16, one)

    def widened(a: Expr) -> str:
        if isinstance(a, Const):
            return em.operand(a, least)
        if lanes == 1 or a.lanes == 1:
            return em.splat(em.expr(a), f32, least)
        v, ty, order = em.expr(a), vector(f32, lanes), ", ".join(f"i32 {j % lanes}" for j in range(least))
        return em.pure(f"shufflevector {ty} {v}, {ty} {v}, <{least} x i32> <{order}>", v, here=True)

    r, ty = one([widened(a) for a in args], least), vector(f32, least)
    if lanes == 1:
        return em.pure(f"extractelement {ty} {r}, i64 0", r, here=True)
    order = ", ".join(f"i32 {j}" for j in range(lanes))
    return em.pure(f"shufflevector {ty} {r}, {ty} {r}, <{lanes} x i32> <{order}>", r, here=True)


def _reciprocal(em: FuncEmitter, x: str, t: DType, lanes: int, name: str) -> str:
    """1 / x by the estimate y: y + y * h, h = 1 - x * y (older CPUs: h + h^2), y where h is NaN; else a quotient."""
    ty = vector(t, lanes)
    one = literal(1.0, t, lanes)
    # sse4a tells AMD's CPUs, whose quotients take little more than an estimate alone: 2.6 cycles for 16 of them
    found = None if em.has("sse4a") else next((v for (n, f), v in _ESTIMATES.items() if n == lanes and em.has(f)), None)
    if found is None or t is not f32:
        return em.pure(f"fdiv {ty} {one}, {x}", x, here=True)
    function, bits_ = found
    mask = "i16" if lanes == 16 else "i8"
    y = (
        em.call(function, ty, (ty, x), (ty, "zeroinitializer"), (mask, "-1"))
        if bits_ == 14
        else em.call(function, ty, (ty, x))
    )
    if name == "estimate" and bits_ == 14:
        return y
    fma = f"llvm.fma.{mangle(f32, lanes)}"
    minus = em.pure(f"fneg {ty} {x}", x, here=True)
    h = em.call(fma, ty, (ty, minus), (ty, y), (ty, one))
    g = h if bits_ == 14 else em.call(fma, ty, (ty, h), (ty, h), (ty, h))
    r = em.call(fma, ty, (ty, y), (ty, g), (ty, y))
    return choose(em, em.pure(f"fcmp ord {ty} {h}, {h}", h, here=True), r, y, ty, lanes)


def _float_extremum(em: FuncEmitter, e: Op, v: str) -> str:
    """hmax, hmin: halves against each other, as fmax does it, and NaN where any lane is."""
    t, n, x = e.dtype, e.args[0].lanes, v
    while n > 1:
        half, ty = n // 2, vector(t, n)
        low, high = (", ".join(f"i32 {start + k}" for k in range(half)) for start in (0, half))
        if half == 1:
            a, b = (em.pure(f"extractelement {ty} {x}, i64 {k}", x, here=True) for k in (0, 1))
        else:
            a, b = (
                em.pure(f"shufflevector {ty} {x}, {ty} poison, <{half} x i32> <{order}>", x, here=True)
                for order in (low, high)
            )
        x, n = extremum(em, "f" + e.name[1:], t, a, b, half, False), half
    ty, lanes = vector(t, e.args[0].lanes), e.args[0].lanes
    nan = em.pure(f"fcmp uno {ty} {v}, {v}", v, here=True)
    bits_ = em.pure(f"bitcast <{lanes} x i1> {nan} to i{lanes}", nan, here=True)
    some = em.pure(f"icmp ne i{lanes} {bits_}, 0", bits_, here=True)
    return choose(em, some, literal(float("nan"), t), x, vector(t, 1), 1)


def _lanes(em: FuncEmitter, e: Op) -> str:
    return "<" + ", ".join(f"i64 {k}" for k in range(e.lanes)) + ">"


def _ldexp(em: FuncEmitter, e: Op) -> str:
    """x * 2**n for n (an integer as a float) with a normal result: n is added to the exponent bits of 1.0."""
    lanes, t = e.lanes, e.dtype
    if t is not f32:
        raise InternalError(f"ldexp on {t} has no LLVM spelling")
    n = convert(em, e.args[1], i32, lanes) if e.args[1].dtype.is_float else em.operand(e.args[1], lanes)
    ty = vector(i32, lanes)
    biased = em.pure(f"add {ty} {n}, {literal(127, i32, lanes)}", n, here=True)
    shifted = em.pure(f"shl {ty} {biased}, {literal(23, i32, lanes)}", biased, here=True)
    scale = em.pure(f"bitcast {ty} {shifted} to {vector(t, lanes)}", shifted, here=True)
    x = em.operand(e.args[0], lanes)
    return em.pure(f"fmul {vector(t, lanes)} {x}, {scale}", x, scale, here=True)


def _guard(em: FuncEmitter, e: Op) -> str:
    """Clamp an index into [lo, hi) and note in Frame.status when it was outside."""
    lanes = e.lanes
    x, lo, hi = (em.operand(a, lanes) for a in e.args)
    ty, b1, m = vector(e.dtype, lanes), vector(boolean, lanes), mangle(e.dtype, lanes)
    last = value(e.args[2])
    if lanes == 1 and value(e.args[1]) == 0 and last is not None and last > 0:  # as unsigned, one comparison
        em.raise_status(em.pure(f"icmp uge {ty} {x}, {hi}", x, here=True))
        return em.call(f"llvm.umin.{m}", ty, (ty, x), (ty, literal(last - 1, e.dtype)))
    below = em.pure(f"icmp slt {ty} {x}, {lo}", x, lo, here=True)
    above = em.pure(f"icmp sge {ty} {x}, {hi}", x, hi, here=True)
    bad = em.pure(f"or {b1} {below}, {above}", below, above, here=True)
    if lanes > 1:
        bad = em.call(f"llvm.vector.reduce.or.v{lanes}i1", "i1", (b1, bad))
    em.raise_status(bad)
    top = em.pure(f"sub {ty} {hi}, {literal(1, e.dtype, lanes)}", hi, here=True)
    low = em.call(f"llvm.smin.{m}", ty, (ty, x), (ty, top))
    return em.call(f"llvm.smax.{m}", ty, (ty, low), (ty, lo))


_SPECIAL: dict[str, Callable[[FuncEmitter, Op], str]] = {
    "select": _select, "hsum": _horizontal, "hmax": _horizontal, "hmin": _horizontal, "hprod": _horizontal,
    "lanes": _lanes, "dot2": dot2, "dot4": dot4, "lookup": lookup, "recode": recode,
    "recip": _recip, "estimate": _recip, "scale": _scale, "piece": _piece,
    "zip_low": zipped, "zip_high": zipped, "ldexp": _ldexp, "guard": _guard,
    "interleave_low": interleaved, "interleave_high": interleaved,
    "trusted": lambda em, e: em.operand(e.args[0], e.lanes),
}  # fmt: skip
