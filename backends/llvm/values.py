"""LLVM text of the operations on values (what is no index, address or statement); undefined cases are guarded as spelling.py's table says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dnnc.backends.llvm.spelling import FLOAT, FLOAT_COMPARE, INT, INTRINSIC, LIBM, literal, mangle, scalar, vector
from dnnc.ir.bounds import bounds
from dnnc.ir.dtype import DType, boolean
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import COMPARE, Expr, Op, value
from dnnc.ir.operator.intrinsics import cast_target

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
    vs = [em.operand(a, e.lanes) for a in e.args]
    t = e.args[0].dtype
    if e.name in COMPARE:
        return compare(em, e.name, t, vs[0], vs[1], e.lanes)
    if e.name in ("min", "max", "fmin", "fmax"):
        return extremum(em, e.name, t, vs[0], vs[1], e.lanes)
    if t.is_float:
        return floating(em, e.name, t, vs, e.lanes)
    return integral(em, e, vs)


def floating(em: FuncEmitter, name: str, t: DType, vs: list[str], lanes: int) -> str:
    ty = vector(t, lanes)
    if name in FLOAT:
        return em.pure(f"{FLOAT[name]} {ty} {vs[0]}, {vs[1]}", *vs, here=True)
    if name == "neg":
        return em.pure(f"fneg {ty} {vs[0]}", *vs, here=True)
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


def extremum(em: FuncEmitter, name: str, t: DType, a: str, b: str, lanes: int) -> str:
    """min/max propagate NaN; fmin/fmax give the second operand where one is NaN, which is one x86 instruction."""
    ty = vector(t, lanes)
    if not t.is_float:
        kind = ("s" if t.kind == "i" else "u") + name.removeprefix("f")
        return em.call(f"llvm.{kind}.{mangle(t, lanes)}", ty, (ty, a), (ty, b), here=lanes > 1)
    greater = name.endswith("max")
    if name in ("fmax", "fmin"):
        c = em.pure(f"fcmp {'ogt' if greater else 'olt'} {ty} {a}, {b}", a, b, here=True)
        return choose(em, c, a, b, ty, lanes)
    if not b.startswith("%"):  # a constant, which is no NaN: x < c ? c : x keeps a NaN in x
        c = em.pure(f"fcmp {'olt' if greater else 'ogt'} {ty} {a}, {b}", a, b, here=True)
        return choose(em, c, b, a, ty, lanes)
    c = em.pure(f"fcmp {'ugt' if greater else 'ult'} {ty} {a}, {b}", a, b, here=True)
    r = choose(em, c, a, b, ty, lanes)
    nan = em.pure(f"fcmp uno {ty} {b}, {b}", b, here=True)
    return choose(em, nan, b, r, ty, lanes)


def integral(em: FuncEmitter, e: Op, vs: list[str]) -> str:
    t, lanes = e.args[0].dtype, e.lanes
    ty, name = vector(t, lanes), e.name
    here = lanes > 1
    if name in INT:
        return em.pure(f"{INT[name]} {ty} {vs[0]}, {vs[1]}", *vs, here=here)
    if name in ("//", "%"):
        if lanes == 1 and (bounds(e.args[0])[0] is None or bounds(e.args[0])[0] < 0):  # type: ignore[operator]
            return _floor_index(em, e, vs)
        return em.pure(f"{'udiv' if name == '//' else 'urem'} {ty} {vs[0]}, {vs[1]}", *vs, here=here)
    if name in ("truncdiv", "truncmod", "floormod"):
        return _divide(em, name, t, vs, lanes)
    if name in ("shl", "shr"):
        return _shift(em, name, t, vs, lanes)
    ones = literal(-1, t, lanes) if t.kind != "b" else literal(True, t, lanes)
    if name in ("not", "bitnot"):
        return em.pure(f"xor {ty} {vs[0]}, {ones}", *vs, here=here)
    if name == "neg":
        return em.pure(f"sub {ty} {literal(0, t, lanes)}, {vs[0]}", *vs, here=here)
    if name == "abs":
        return vs[0] if t.kind == "u" else em.call(f"llvm.abs.{mangle(t, lanes)}", ty, (ty, vs[0]), ("i1", "false"))
    raise InternalError(f"{name} on {t} has no LLVM spelling")


def _floor_index(em: FuncEmitter, e: Op, vs: list[str]) -> str:
    """Floor division of an index that may be negative: by a power of two it is a shift, else round toward zero and correct."""
    d = value(e.args[1])
    if d is not None and d & (d - 1) == 0:
        if e.name == "//":
            return em.pure(f"ashr i64 {vs[0]}, {d.bit_length() - 1}", vs[0])
        return em.pure(f"and i64 {vs[0]}, {d - 1}", vs[0])
    q = em.pure(f"sdiv i64 {vs[0]}, {vs[1]}", *vs)
    m = em.pure(f"sub i64 {vs[0]}, {em.pure(f'mul i64 {q}, {vs[1]}', q, vs[1])}", vs[0], q)
    neg = em.pure(f"ashr i64 {m}, 63", m)
    if e.name == "//":
        return em.pure(f"add i64 {q}, {neg}", q, neg)
    fix = em.pure(f"and i64 {neg}, {vs[1]}", neg, vs[1])
    return em.pure(f"add i64 {m}, {fix}", m, fix)


def _divide(em: FuncEmitter, name: str, t: DType, vs: list[str], lanes: int) -> str:
    """x / 0 is 0 and INT_MIN / -1 wraps (as truncmod it is 0): the divisor is replaced where the instruction would trap."""
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


def _shift(em: FuncEmitter, name: str, t: DType, vs: list[str], lanes: int) -> str:
    ty = vector(t, lanes)
    top = literal(t.bits - 1, t, lanes)
    big = em.pure(f"icmp ugt {ty} {vs[1]}, {top}", vs[1], here=True)
    n = choose(em, big, top, vs[1], ty, lanes)
    ins = "shl" if name == "shl" else "ashr" if t.kind == "i" else "lshr"
    r = em.pure(f"{ins} {ty} {vs[0]}, {n}", vs[0], n, here=True)
    return r if ins == "ashr" else choose(em, big, literal(0, t, lanes), r, ty, lanes)


def bits(em: FuncEmitter, e: Op, to: DType) -> str:
    v = em.operand(e.args[0], e.lanes)
    a, b = vector(e.args[0].dtype, e.lanes), vector(to, e.lanes)
    return v if a == b else em.pure(f"bitcast {a} {v} to {b}", v, here=True)


def convert(em: FuncEmitter, arg: Expr, to: DType, lanes: int) -> str:
    """Value conversion between any two types."""
    v, src = em.operand(arg, lanes), arg.dtype
    if src.name in ("bf16", "f16") and to is not src:
        return _from_half(em, v, src, to, lanes)
    if to.name in ("bf16", "f16") and to is not src:
        return _to_half(em, v, src, to, lanes)
    a, b = vector(src, lanes), vector(to, lanes)
    if to.kind == "b":
        return em.pure(
            f"fcmp une {a} {v}, {literal(0.0, src, lanes)}" if src.is_float else f"icmp ne {a} {v}, {literal(0, src, lanes)}", v, here=True
        )
    if src.is_float and to.is_float:
        if src.bits == to.bits:
            return v
        return em.pure(f"{'fpext' if src.bits < to.bits else 'fptrunc'} {a} {v} to {b}", v, here=True)
    if src.is_float:
        return em.call(f"llvm.fpto{'s' if to.kind == 'i' else 'u'}i.sat.{mangle(to, lanes)}.{mangle(src, lanes)}", b, (a, v))
    if to.is_float:
        return em.pure(f"{'sitofp' if src.kind == 'i' else 'uitofp'} {a} {v} to {b}", v, here=True)
    if a == b:
        return v
    small = src.kind == "b" or src.bits < to.bits
    return em.pure(f"{('sext' if src.kind == 'i' else 'zext') if small else 'trunc'} {a} {v} to {b}", v, here=lanes > 1)


def _from_half(em: FuncEmitter, v: str, src: DType, to: DType, lanes: int) -> str:
    from dnnc.ir.dtype import f32

    f = vector(f32, lanes)
    if src.name == "f16":
        w = em.pure(f"fpext {vector(src, lanes)} {v} to {f}", v, here=True)
    else:  # bfloat16 is the upper half of float32
        i32 = f"<{lanes} x i32>" if lanes > 1 else "i32"
        z = em.pure(f"zext {vector(src, lanes)} {v} to {i32}", v, here=True)
        sixteen = "splat (i32 16)" if lanes > 1 else "16"
        w = em.pure(f"bitcast {i32} {em.pure(f'shl {i32} {z}, {sixteen}', z, here=True)} to {f}", z, here=True)
    return w if to is f32 else _converted(em, w, f32, to, lanes)


def _converted(em: FuncEmitter, v: str, src: DType, to: DType, lanes: int) -> str:
    """convert() of a value that has no expression of its own."""
    from dnnc.ir.expr import var

    holder = var(f"{v}.", src, lanes=lanes)
    em.values[holder] = v
    return convert(em, holder, to, lanes)


def _to_half(em: FuncEmitter, v: str, src: DType, to: DType, lanes: int) -> str:
    """Through float32 with round to nearest even; a NaN stays one (its quiet bit is set)."""
    from dnnc.ir.dtype import f32

    if src is not f32:
        v = _converted(em, v, src, f32, lanes)
    f, h = vector(f32, lanes), vector(to, lanes)
    if to.name == "f16":
        return em.pure(f"fptrunc {f} {v} to {h}", v, here=True)
    i32 = f"<{lanes} x i32>" if lanes > 1 else "i32"

    def k(n: int) -> str:
        return f"splat (i32 {n})" if lanes > 1 else str(n)

    b = em.pure(f"bitcast {f} {v} to {i32}", v, here=True)
    odd = em.pure(f"and {i32} {em.pure(f'lshr {i32} {b}, {k(16)}', b, here=True)}, {k(1)}", b, here=True)
    up = em.pure(f"add {i32} {em.pure(f'add {i32} {b}, {k(0x7FFF)}', b, here=True)}, {odd}", b, odd, here=True)
    nan = em.pure(f"fcmp uno {f} {v}, {v}", v, here=True)
    r = choose(em, nan, em.pure(f"or {i32} {b}, {k(0x400000)}", b, here=True), up, i32, lanes)
    return em.pure(f"trunc {i32} {em.pure(f'lshr {i32} {r}, {k(16)}', r, here=True)} to {h}", r, here=True)


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
        return em.effect(f"call reassoc {s} @{name}({s} {literal(0.0 if e.name == 'hsum' else 1.0, x.dtype)}, {ty} {v})")
    sign = "" if x.dtype.is_float else "s" if x.dtype.kind == "i" else "u"
    kind = {"hsum": "add", "hprod": "mul", "hmax": ("fmaximum" if not sign else sign + "max"), "hmin": ("fminimum" if not sign else sign + "min")}[
        e.name
    ]
    return em.call(f"llvm.vector.reduce.{kind}.{mangle(x.dtype, x.lanes)}", s, (ty, v))


def _lanes(em: FuncEmitter, e: Op) -> str:
    return "<" + ", ".join(f"i64 {k}" for k in range(e.lanes)) + ">"


def _ldexp(em: FuncEmitter, e: Op) -> str:
    """x * 2**n for n (an integer as a float) with a normal result: n is added to the exponent bits of 1.0."""
    from dnnc.ir.dtype import f32, i32

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
    ty, b1 = vector(e.dtype, lanes), vector(boolean, lanes)
    below = em.pure(f"icmp slt {ty} {x}, {lo}", x, lo, here=True)
    above = em.pure(f"icmp sge {ty} {x}, {hi}", x, hi, here=True)
    bad = em.pure(f"or {b1} {below}, {above}", below, above, here=True)
    if lanes > 1:
        bad = em.call(f"llvm.vector.reduce.or.v{lanes}i1", "i1", (b1, bad))
    em.raise_status(bad)
    top = em.pure(f"sub {ty} {hi}, {literal(1, e.dtype, lanes)}", hi, here=True)
    m = mangle(e.dtype, lanes)
    low = em.call(f"llvm.smin.{m}", ty, (ty, x), (ty, top))
    return em.call(f"llvm.smax.{m}", ty, (ty, low), (ty, lo))


_SPECIAL: dict[str, Callable[[FuncEmitter, Op], str]] = {
    "select": _select, "hsum": _horizontal, "hmax": _horizontal, "hmin": _horizontal, "hprod": _horizontal, "lanes": _lanes,
    "ldexp": _ldexp, "guard": _guard,
}  # fmt: skip
