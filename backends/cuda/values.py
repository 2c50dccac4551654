"""CUDA C++ of operations on values: arithmetic, conversions, vectors. Prelude helpers cover C++'s undefined cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import ml_dtypes

from dnnc.backends.cuda import index
from dnnc.backends.cuda.index import CHOICE, INFIX, PLUS, TIMES, UNARY, Text
from dnnc.backends.cuda.spelling import MATH, ctype, literal, scalar
from dnnc.ir.dtype import DType, f16, f32, f64, i32, i64
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import COMPARE, Const, Expr, Load, Op, cast
from dnnc.ir.loops.intrinsics import WORD_PARTS, cast_target
from dnnc.passes.lower.conversions import is_small, narrow, to_odd, widen
from dnnc.passes.lower.expand import expand_lookup, expand_recode

if TYPE_CHECKING:
    from dnnc.backends.cuda.emit import FuncEmitter

FLOAT = {"+": "add", "-": "subtract", "*": "mul", "/": "divide"}
INTEGER = {"+": "add", "-": "sub", "*": "mul"}
DIVIDE = {"//": "floordiv", "%": "floorrem"}
LOGIC = {"&": "bit_and", "|": "bit_or", "^": "bit_xor"}
ORDER = {"<": "less", "<=": "less_equal", "==": "equal", "!=": "not_equal"}
RENAMED = {
    "min": "minimum", "max": "maximum", "fmin": "second_min", "fmax": "second_max", "abs": "absolute", "neg": "negate",
    "isnan": "is_nan", "exp2": "power_of_two", "recip": "reciprocal",
    "not": "logical_not", "bitnot": "bitnot", "popcount": "popcount",
    "truncdiv": "truncdiv", "truncmod": "truncmod", "floormod": "floormod",
    "shl": "shl", "shr": "shr",
    "fma": "fused", "shfl_xor": "shfl_xor", "shfl_up": "shfl_up", "shfl_down": "shfl_down", "shfl": "shfl",
}  # fmt: skip
PLAIN = frozenset(("hsum", "hprod", "hmax", "hmin", "zip_low", "zip_high"))


def compute(em: FuncEmitter, e: Op) -> Text:
    """The text of one operation."""
    target = cast_target(e.name)
    if target is not None:
        return bits(em, e, target[0]) if target[1] else convert(em, e.args[0], target[0], e.lanes)
    special = SPECIAL.get(e.name)
    if special is not None:
        return special(em, e)
    found = index.operation(em, e)
    if found is not None:
        return found
    t, lanes = e.args[0].dtype, e.lanes
    vs = [em.operand(a, lanes) for a in e.args]
    if e.name in COMPARE:
        return infix(em, e) if lanes == 1 else call(em, ORDER[e.name], vs, lanes)
    if (x := _erf_and_one(e)) is not None:
        return call(em, "erf_and_one", [em.operand(x, lanes)], lanes)
    if e.name in FLOAT and t.is_float:
        return infix(em, e) if lanes == 1 else _operator(em, e)
    if e.name in INTEGER and t.is_int:
        return call(em, INTEGER[e.name], vs, lanes)
    if e.name in DIVIDE and t is i64:  # of indices, lane by lane; by a positive number
        return call(em, DIVIDE[e.name], vs, lanes)
    if e.name in LOGIC:
        return infix(em, e) if lanes == 1 and (t.kind == "b" or t.bits >= 32) else call(em, LOGIC[e.name], vs, lanes)
    if e.name in MATH and t in (f32, f64):
        return call(em, e.name + ("f" if t is f32 else ""), vs, lanes)
    if e.name in PLAIN:
        return f"{e.name}({', '.join(vs)})", UNARY
    if e.name in RENAMED and (not is_small(t) or e.name.startswith("shfl")):
        return call(em, RENAMED[e.name], vs, lanes)
    raise InternalError(f"{e.name} on {t} has no CUDA spelling")


def call(em: FuncEmitter, name: str, vs: list[str], lanes: int) -> Text:
    """A call of a scalar function, lane by lane for vectors."""
    if lanes > 1:
        em.use(f"{name}/{len(vs)}")
    return f"{name}({', '.join(vs)})", UNARY


def _erf_and_one(e: Op) -> Expr | None:
    """x of erf(x) + 1, as in GELU."""
    if e.name != "+" or e.dtype is not f32:
        return None
    erf, one = e.args
    found = isinstance(erf, Op) and erf.name == "erf" and isinstance(one, Const) and one.value == 1.0
    return erf.args[0] if found and isinstance(erf, Op) else None


def infix(em: FuncEmitter, e: Op) -> Text:
    if e.name in INFIX:
        return index.infix(em, e)
    p = PLUS if e.name in "+-" else TIMES
    a, b = em.text(e.args[0], p), em.text(e.args[1], p + 1)
    return f"{a} {e.name} {b}", p


def _operator(em: FuncEmitter, e: Op) -> Text:
    p = PLUS if e.name in "+-" else TIMES
    em.use(f"operator{e.name}")
    return f"{em.operand(e.args[0], e.lanes, p)} {e.name} {em.operand(e.args[1], e.lanes, p + 1)}", p


def _select(em: FuncEmitter, e: Op) -> Text:
    c, a, b = e.args
    if e.lanes == 1:
        if e.dtype is i64 and (found := index.operation(em, e)) is not None:
            return found
        return f"{em.text(c, CHOICE + 1)} ? {em.text(a, CHOICE + 1)} : {em.text(b, CHOICE + 1)}", CHOICE
    if c.lanes == 1:  # both arms are there, so the choice is one of whole vectors
        return f"{em.text(c, CHOICE + 1)} ? {em.operand(a, e.lanes)} : {em.operand(b, e.lanes)}", CHOICE
    return call(em, "choose", [em.operand(x, e.lanes) for x in e.args], e.lanes)


def _lanes(em: FuncEmitter, e: Op) -> Text:
    return f"lanes<{e.lanes}>()", UNARY


def _ldexp(em: FuncEmitter, e: Op) -> Text:
    x, n = e.args
    operands = [em.operand(x, e.lanes), em.operand(n if n.dtype is i32 else cast(n, i32), e.lanes)]
    return call(em, "scale_by_power", operands, e.lanes)


def _guard(em: FuncEmitter, e: Op) -> Text:
    found = index.operation(em, e)
    if found is not None:
        return found
    x, lo, hi = (em.operand(a, e.lanes) for a in e.args)
    em.use("guard/3")
    return f"guard({x}, {lo}, {hi}, status, {em.unit.number})", UNARY


def _shuffle(em: FuncEmitter, e: Op) -> Text:
    """The lane number is the same for all lanes of a vector."""
    name, x = RENAMED[e.name], em.operand(e.args[0], e.lanes)
    if e.lanes > 1:
        em.use(f"{name}/shuffle")
    return f"{name}({x}, {em.text(e.args[1])})", UNARY


def _lookup(em: FuncEmitter, e: Op) -> Text:
    chosen = expand_lookup(*e.args)
    assert isinstance(chosen, Op)
    return compute(em, chosen)


def _recode(em: FuncEmitter, e: Op) -> Text:
    chosen = expand_recode(*e.args)
    assert isinstance(chosen, Op)
    return compute(em, chosen)


def _dot4(em: FuncEmitter, e: Op) -> Text:
    if e.lanes != 1:
        raise InternalError(f"dot4 adds to one sum at a time, not {e.lanes}")
    em.use("V")
    return _matrix(em, e)


def _halves(em: FuncEmitter, e: Op) -> Text:
    em.use("V")
    return _matrix(em, e)


def _words(em: FuncEmitter, e: Op) -> Text:
    """Words that memory has are read as such: compilers would keep parts of 16 bits apart."""
    a = e.args[0]
    if e.name == "words" and isinstance(a, Load) and a.buf.space == "global" and a.limit is None:
        per = 32 // a.dtype.bits
        together = 1 if any(i.lanes > 1 for i in a.idx) else em.aligned(a.buf, a.idx, a.lanes)
        if together % per == 0:
            p = f"(const u32*)({em.pointer(a.buf, a.idx)})"
            return (f"ld<{together // per}, {e.lanes}>({p})" if e.lanes > 1 else f"*{p}"), UNARY
    return f"bit_cast<{ctype(e.dtype, e.lanes)}>({em.text(e.args[0])})", UNARY


def _matrix(em: FuncEmitter, e: Op) -> Text:
    return f"{e.name}({', '.join(em.text(a) for a in e.args)})", UNARY


def _sparse_matrix(em: FuncEmitter, e: Op) -> Text:
    """Which lanes have the places is a part of the instruction."""
    *args, part = e.args
    return f"{e.name}<{index.constant(part, 'the part')}>({', '.join(em.text(a) for a in args)})", UNARY


# --- conversions ------------------------------------------------------------------------------------------------------


def bits(em: FuncEmitter, e: Op, to: DType) -> Text:
    a = e.args[0]
    if a.dtype is to:
        return em.operand(a, e.lanes), 0
    x = em.operand(a, e.lanes)
    return f"bit_cast<{ctype(to, e.lanes)}>({x})", UNARY


def convert(em: FuncEmitter, arg: Expr, to: DType, lanes: int) -> Text:
    """Value conversion between any two types."""
    src = arg.dtype
    if src is to:
        return em.operand(arg, lanes), 0
    if is_small(src):
        if to is not f32:
            return em.operand(cast(cast(arg, f32), to), lanes), 0
        name = f"{'up' if em.converts(src) else 'from'}_{scalar(src)}"
        if src.bits < 16 and not em.converts(src):
            em.unit.define(name, src, widen)
        return call(em, name, [em.operand(arg, lanes)], lanes)
    if is_small(to):
        if src is f64 and to is not f16:
            return em.operand(cast(to_odd(arg), to), lanes), 0
        if src is not f32 and src is not f64:
            return em.operand(cast(cast(arg, f32), to), lanes), 0
        if em.converts(to) and (inside := _clipped(arg, to)) is not None:
            return call(em, f"clip_{scalar(to)}", [em.operand(inside, lanes)], lanes)
        name = f"{'down' if em.converts(to) and src is f32 else 'to'}_{scalar(to)}"
        if to.bits < 16 and name.startswith("to"):
            em.unit.define(name, f32, lambda x: narrow(x, to))
        return call(em, name, [em.operand(arg, lanes)], lanes)
    return _number(em, arg, to, lanes)


def _clipped(e: Expr, to: DType) -> Expr | None:
    """x of min(m, max(-m, x)) in float32, where m is the largest number of an 8-bit float: its conversion clips."""
    for name, sign in (("fmin", 1), ("fmax", -1)):
        if not isinstance(e, Op) or e.name != name or e.dtype is not f32:
            return None
        bound, e = e.args
        if not isinstance(bound, Const) or bound.value != sign * float(ml_dtypes.finfo(to.numpy).max):  # type: ignore[no-untyped-call]
            return None
    return e


def _number(em: FuncEmitter, arg: Expr, to: DType, lanes: int) -> Text:
    """Conversion between types that registers compute with."""
    src = arg.dtype
    if to.kind == "b":
        if lanes == 1:
            return f"{em.text(arg, index.EQUAL)} != {literal(0, src) if src.is_float else 0}", index.EQUAL
        return call(em, "to_bool", [em.operand(arg, lanes)], lanes)
    if src is f32 and to is i32 and isinstance(arg, Op) and arg.name == "rint":
        return call(em, "nearest_i32", [em.operand(arg.args[0], lanes)], lanes)
    if src.is_float and to.is_int:
        return call(em, f"to_{scalar(to)}", [em.operand(arg, lanes)], lanes)
    if lanes == 1:
        return f"({scalar(to)}){em.text(arg, UNARY)}", UNARY
    return f"convert<{scalar(to)}>({em.operand(arg, lanes)})", UNARY


SPECIAL: dict[str, Callable[[FuncEmitter, Op], Text]] = {
    "select": _select, "lanes": _lanes, "ldexp": _ldexp, "guard": _guard, "ldmatrix_x4": _matrix,
    "ldmatrix_x4_trans": _matrix,
    "mma_m16n8k16": _matrix, "mma_m16n8k32": _matrix, "dot4": _dot4, "lookup": _lookup, "recode": _recode,
    "halves_f16": _halves, "halves_bf16": _halves,
    "words": _words, **{f"{t}_words": _words for t in WORD_PARTS},
    "mma_m16n8k8": _matrix, "mma_m16n8k8_cut": _matrix, "mma_sp_m16n8k32": _sparse_matrix,
    "shfl_xor": _shuffle, "shfl_up": _shuffle, "shfl_down": _shuffle,
    "shfl": _shuffle,
}  # fmt: skip
