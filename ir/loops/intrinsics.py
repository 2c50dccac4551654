"""Intrinsics: a record each, with result type and NumPy meaning. Backends have the spelling tables.

In `meaning` arrays are [threads] or [threads, lanes]; a warp collective sees 32 consecutive rows as a warp. Effects (no
meaning) are methods of the interpreter. What a target cannot spell, `passes/lower/expand.py` expands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import erf
from typing import Any

import numpy as np

from dnnc.ir.dtype import BY_NAME, DType, bf16, boolean, f16, f32, from_numpy, i8, i32, i64, u8, u32
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import Expr
from dnnc.ir.loops import gpu_intrinsics as gpu
from dnnc.ir.loops import hopper
from dnnc.ir.loops.pieces import pieces

Array = Any
WORD_PARTS = (f16, bf16, i8, u8)
TypeOf = Callable[..., tuple[DType, int]]


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """type(*args) -> (dtype, lanes) where it is not that of the first operand; `effect`: a statement without value."""

    name: str
    meaning: Callable[..., Array] | None = None
    type: TypeOf | None = None
    effect: bool = False
    collective: bool = False  # all threads of a warp must reach it
    costly: bool = False  # it takes more than simple arithmetic
    regroups: bool = False  # its operands have other numbers of lanes than its result


def _erf(x: Array) -> Array:

    return np.vectorize(erf, otypes=[np.float64])(x)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once: in the next wider type, where a float has one."""
    kind = np.asarray(a).dtype
    if kind.kind != "f":
        return np.asarray(a * b + c)
    wide = np.float64 if kind.itemsize < 8 else np.longdouble
    return np.asarray(np.asarray(a, wide) * b + c).astype(kind)


def _dot4(acc: Array, a: Array, b: Array) -> Array:
    x, y = (np.asarray(v, np.int64).reshape(*np.shape(v)[:-1], -1, 4) for v in (a, b))
    return (np.asarray(acc, np.int64) + (x * y).sum(-1)).astype(np.int32)


def _dot2(a: Array, b: Array) -> Array:
    x, y = (np.asarray(v, np.float32).reshape(*np.shape(v)[:-1], -1, 2) for v in (a, b))
    return np.asarray((x * y).sum(-1, dtype=np.float32))


def _popcount(x: Array) -> Array:
    x = np.ascontiguousarray(x)
    bits = np.unpackbits(x.view(np.uint8).reshape(*x.shape, x.dtype.itemsize), axis=-1)
    return bits.sum(-1, dtype=np.int64).astype(x.dtype)


def _lookup(i: Array, xs: tuple[Array, ...]) -> Array:
    table = np.array([np.ravel(x)[0] for x in xs])
    return table[np.asarray(i) % len(xs)]


def _recode(i: Array, words: tuple[Array, ...]) -> Array:
    table = np.array([np.ravel(w)[0] for w in words], "<i8").view(np.uint8)
    return table[np.asarray(i)]


def _trusted(x: Array, lo: Array, hi: Array) -> Array:
    if (np.asarray(x) < lo).any() or (np.asarray(x) >= hi).any():
        raise InternalError(f"an index is not what it was packed as: {x} outside of [{lo}, {hi})")
    return x


def _truncdiv(a: Array, b: Array) -> Array:
    """Integer division toward zero; x / 0 -> 0, INT_MIN / -1 wraps."""
    with np.errstate(all="ignore"):
        safe = np.where(b == 0, 1, b)
        q = a // safe
        q = np.where((a % safe != 0) & ((a < 0) != (b < 0)), q + 1, q)
        return np.where(b == 0, 0, q).astype(np.asarray(a).dtype)


def _floormod(a: Array, b: Array) -> Array:
    """Remainder with the sign of the divisor; x mod 0 -> 0 for integers, NaN for floats."""
    with np.errstate(all="ignore"):
        if np.asarray(a).dtype.kind == "f":
            return np.asarray(np.mod(a, b))
        return np.where(b == 0, 0, a % np.where(b == 0, 1, b)).astype(np.asarray(a).dtype)


def _truncmod(a: Array, b: Array) -> Array:
    """Remainder with the sign of the dividend; x mod 0 -> 0 for integers."""
    with np.errstate(all="ignore"):
        if np.asarray(a).dtype.kind in "iu":
            return np.where(b == 0, 0, a - _truncdiv(a, b) * b).astype(np.asarray(a).dtype)
        return np.fmod(a, b)


def _shift(a: Array, n: Array, left: bool) -> Array:
    """Shifts by the width or more give 0 (or the sign)."""
    bits = np.asarray(a).dtype.itemsize * 8
    big, m = np.asarray(n) >= bits, np.minimum(n, bits - 1)
    r = np.left_shift(a, m) if left else np.right_shift(a, m)
    return np.where(
        big, 0 if left or np.asarray(a).dtype.kind == "u" else np.where(np.asarray(a) < 0, -1, 0), r
    ).astype(np.asarray(a).dtype)


def _pow(a: Array, b: Array) -> Array:
    with np.errstate(all="ignore"):
        if np.asarray(a).dtype.kind in "iu":
            return np.power(np.asarray(a, np.float64), b).astype(np.asarray(a).dtype)
        return np.power(a, b)


def _first(*args: Expr) -> tuple[DType, int]:
    return args[0].dtype, max(a.lanes for a in args)


def _quiet(f: Callable[..., Array]) -> Callable[..., Array]:
    def g(*args: Array) -> Array:
        with np.errstate(all="ignore"):
            return f(*args)

    return g


def _scale(x: Array, n: Array) -> Array:
    wide = np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        y = np.ldexp(wide, np.clip(np.floor(np.nan_to_num(n)), -999, 999).astype(np.int64))
        y = np.where(np.isnan(x), np.where(np.isposinf(n), n, np.where(np.isneginf(n), 0.0, y)), y)
        return np.where(np.isnan(n), n, y).astype(np.asarray(x).dtype)


def cast_numpy(x: Array, to: DType) -> Array:
    """Convert as the IR defines: float to integer truncates, saturates, NaN -> 0; integers wrap; != 0 for bool."""
    x = np.asarray(x)
    if to.kind == "b":
        return x != 0
    if to.is_int and (x.dtype.kind == "f" or (x.dtype.kind == "V" and from_numpy(x.dtype).is_float)):
        lo, hi = to.range
        y = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=float("inf"), neginf=float("-inf")))
        inside = (y >= lo) & (y < float(hi) + 1)
        limit = np.where(y < 0, np.array(lo, to.numpy), np.array(hi, to.numpy))
        return np.where(inside, np.where(inside, y, 0).astype(to.numpy), limit)
    with np.errstate(all="ignore"):
        return x.astype(to.numpy)


_COSTLY: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "erf": _erf, "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "log1p": np.log1p, "expm1": np.expm1,
}  # fmt: skip
_UNARY: dict[str, Callable[[Array], Array]] = {
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint, "abs": np.abs,
    "neg": np.negative, "exp2": np.exp2,
    # 1 / x to 1 ulp; what is below the normal numbers is 0
    "recip": lambda x: (1 / np.asarray(x)).astype(np.asarray(x).dtype),
    # 1 / x, off by at most 2^-14 of it; x and 1 / x are normal numbers
    "estimate": lambda x: (1 / np.asarray(x)).astype(np.asarray(x).dtype),
}  # fmt: skip

# fmt: off
TABLE: dict[str, Intrinsic] = {i.name: i for i in [
    *(Intrinsic(n, _quiet(f)) for n, f in _UNARY.items()),
    *(Intrinsic(n, _quiet(f), costly=True) for n, f in _COSTLY.items()),
    Intrinsic("fma", _quiet(_fma), _first),
    # dot4(acc, a, b): i32 lanes, to each of which four products of neighbouring bytes are added, exactly and modulo
    # 2^32; a is u8 or i8, four bytes a lane or four for all lanes, b is i8
    Intrinsic("dot4", _dot4, lambda acc, a, b: (i32, acc.lanes), regroups=True),
    # dot2(a, b): f32 lanes, each the sum of two products of neighbouring bf16; a has two a lane or two for all lanes
    Intrinsic("dot2", _quiet(_dot2), lambda a, b: (f32, b.lanes // 2), regroups=True),
    # halves_f16(q, z): q - z of eight codes, see gpu_intrinsics; exact where the numbers are
    Intrinsic("halves_f16", lambda q, z: gpu.halves(q, z, f16.numpy), lambda q, z: (f16, 8), regroups=True),
    Intrinsic("halves_bf16", lambda q, z: gpu.halves(q, z, bf16.numpy), lambda q, z: (bf16, 8), regroups=True),
    # words(x): lanes of 8 or 16 bits as u32, whole registers from one turn of a loop to the next; f16_words(w)
    # and so on: those lanes again
    Intrinsic("words", gpu.words, lambda x: (u32, x.lanes * x.dtype.bits // 32), regroups=True),
    *(Intrinsic(f"{t}_words", lambda w, t=t: gpu.of_words(w, t.numpy), lambda w, t=t: (t, w.lanes * 32 // t.bits),
                regroups=True) for t in WORD_PARTS),
    # x * 2^floor(n): rounded once, where that is below the normal numbers too; of NaN, infinity for n = inf, 0 for -inf
    Intrinsic("scale", _scale, _first),
    # of a table of 32 numbers, row k of `pieces.ROWS`, that which the low five bits of t say
    Intrinsic("piece", lambda t, k: pieces(t, int(np.ravel(k)[0])), _first),
    # lookup(i, x0, x1, ..): x[i mod n], of n constants of one float type, n a power of two; i an unsigned integer
    Intrinsic("lookup", lambda i, *xs: _lookup(i, xs), lambda i, *xs: (xs[0].dtype, i.lanes)),
    # recode(i, w0, .., w31): byte i of 256, eight in each constant of 64 bits, the lowest first; i a u8
    Intrinsic("recode", lambda i, *words: _recode(i, words), lambda i, *words: (u8, i.lanes)),
    Intrinsic("pow", _pow, _first, costly=True),
    Intrinsic("truncdiv", _truncdiv, _first), Intrinsic("truncmod", _truncmod, _first),
    Intrinsic("floormod", _floormod, _first),
    Intrinsic("shl", lambda a, n: _shift(a, n, True), _first),
    Intrinsic("shr", lambda a, n: _shift(a, n, False), _first),
    # fmax/fmin return the second operand where one is NaN (one instruction on x86); min/max propagate NaN
    Intrinsic("fmax", lambda a, b: np.where(np.asarray(a) > b, a, b), _first),
    Intrinsic("fmin", lambda a, b: np.where(np.asarray(a) < b, a, b), _first),
    Intrinsic("isnan", np.isnan, lambda x: (boolean, x.lanes)),
    Intrinsic("not", np.logical_not, lambda x: (boolean, x.lanes)),
    Intrinsic("bitnot", np.invert),
    # how many bits of an unsigned number are 1
    Intrinsic("popcount", lambda x: _popcount(x)),
    # horizontal reductions over lanes; the order of the sum is a binary tree of halves
    Intrinsic("hsum", lambda v: _tree(v, np.add), lambda v: (v.dtype, 1)),
    Intrinsic("hmax", lambda v: np.max(v, axis=-1), lambda v: (v.dtype, 1)),
    Intrinsic("hmin", lambda v: np.min(v, axis=-1), lambda v: (v.dtype, 1)),
    Intrinsic("hprod", lambda v: _tree(v, np.multiply), lambda v: (v.dtype, 1)),
    # the lower (upper) halves of two vectors, lane by lane in turn
    Intrinsic("zip_low", lambda a, b: _zip(a, b, 0), _first), Intrinsic("zip_high", lambda a, b: _zip(a, b, 1), _first),
    # units of elements of two vectors in turn, of the lower (upper) half of each group of lanes;
    # `interleave_low(a, b, unit, group)`
    Intrinsic("interleave_low", lambda a, b, unit, group: _interleave(a, b, unit, group, 0), _first),
    Intrinsic("interleave_high", lambda a, b, unit, group: _interleave(a, b, unit, group, 1), _first),
    # 0, 1, 2, ... as a vector; `lanes(n)`
    Intrinsic("lanes", lambda n: np.arange(int(np.ravel(n)[0]))[None, :], lambda n: (i64, int(n.value))),
    # x in [lo, hi): an index known only at run time; clamps and sets Frame.status outside
    Intrinsic("guard", lambda x, lo, hi: np.clip(x, lo, np.asarray(hi) - 1), lambda x, lo, hi: (i64, x.lanes)),
    # x, an index that lies in [lo, hi) because the array that it comes from was packed so; no code checks it
    Intrinsic("trusted", lambda x, lo, hi: _trusted(x, lo, hi), lambda x, lo, hi: (i64, x.lanes)),
    Intrinsic("ldexp", lambda x, n: np.ldexp(x, np.asarray(n).astype(np.int32)), _first),
    Intrinsic("barrier", effect=True), Intrinsic("syncwarp", effect=True), Intrinsic("prefetch", effect=True),
    Intrinsic("sparse_rows", effect=True),  # stmt.SparseRows
    *(Intrinsic(n, effect=True) for n in ("tile_zero", "tile_load", "tile_dot", "tile_store")),  # tiles.py
    Intrinsic("immediate_rows", effect=True),  # stmt.ImmediateRows
    # warp collectives; an address operand stands for the 16 bytes there
    Intrinsic("shfl_xor", gpu.shfl_xor, lambda x, mask: (x.dtype, x.lanes), collective=True),
    Intrinsic("shfl_up", gpu.shfl_up, lambda x, n: (x.dtype, x.lanes), collective=True),
    Intrinsic("shfl_down", gpu.shfl_down, lambda x, n: (x.dtype, x.lanes), collective=True),
    Intrinsic("shfl", gpu.shfl, lambda x, lane: (x.dtype, x.lanes), collective=True),
    Intrinsic("ldmatrix_x4", gpu.ldmatrix_x4, lambda r: (r.dtype, r.lanes), collective=True),
    Intrinsic("ldmatrix_x4_trans", gpu.ldmatrix_x4_trans, lambda r: (r.dtype, 8), collective=True),
    Intrinsic("mma_m16n8k16", gpu.mma_m16n8k16, lambda d, a, b: (d.dtype, 4), collective=True),
    Intrinsic("mma_m16n8k32", gpu.mma_m16n8k32, lambda d, a, b: (d.dtype, 4), collective=True),
    Intrinsic(
        "mma_sp_m16n8k32", gpu.mma_sp_m16n8k32, lambda d, a, b, places, part: (d.dtype, 4), collective=True
    ),
    Intrinsic("mma_m16n8k8", gpu.mma_m16n8k8, lambda d, a, b: (d.dtype, 4), collective=True),
    Intrinsic("mma_m16n8k8_cut", gpu.mma_m16n8k8_cut, lambda d, a, b: (d.dtype, 4), collective=True),
    # the kernel before this one may still run until pdl_wait(), and the one after it may begin from pdl_launch() on
    Intrinsic("pdl_wait", effect=True), Intrinsic("pdl_launch", effect=True),
    # cp_async(to, from[, n]): a thread copies as many lanes as `to` says; past the first n it writes 0. wait(n): all
    # but the newest n groups landed
    Intrinsic("cp_async", effect=True), Intrinsic("cp_async_commit", effect=True),
    Intrinsic("cp_async_wait", effect=True),
    # mbarriers, the copy engine, tensor cores of warp groups: hopper.py says what each does
    *(Intrinsic(n, effect=True) for n in hopper.EFFECTS),
    Intrinsic("peer", type=lambda r, rank: (r.dtype, r.lanes)),
]}
# fmt: on
COSTLY = frozenset(("/", *(i.name for i in TABLE.values() if i.costly)))  # names of operations on expressions


def _tree(v: Array, f: Callable[[Array, Array], Array]) -> Array:
    v = np.asarray(v)
    while v.shape[-1] > 1:
        half = v.shape[-1] // 2
        v = f(v[..., :half], v[..., half:])
    return v[..., 0]


def _zip(a: Array, b: Array, half: int) -> Array:
    a, b = np.broadcast_arrays(a, b)
    n = a.shape[-1] // 2
    both = np.stack([x[..., half * n : half * n + n] for x in (a, b)], -1)
    return both.reshape(*both.shape[:-2], 2 * n)


def _interleave(a: Array, b: Array, unit: Array, group: Array, half: int) -> Array:
    a, b = np.broadcast_arrays(a, b)
    each, whole = int(np.ravel(unit)[0]), int(np.ravel(group)[0])
    parts = [x.reshape(*x.shape[:-1], -1, 2, whole // each // 2, each)[..., half, :, :] for x in (a, b)]
    return np.stack(parts, -2).reshape(a.shape)


def cast_target(name: str) -> tuple[DType, bool] | None:
    """`cast_f32` -> (f32, False); `bits_i32` -> (i32, True): the same bits read as another type of that width."""
    for prefix, bits in (("cast_", False), ("bits_", True)):
        if name.startswith(prefix) and name[len(prefix) :] in BY_NAME:
            return BY_NAME[name[len(prefix) :]], bits
    return None


def known(name: str) -> bool:
    return name in TABLE or cast_target(name) is not None or name in ("min", "max", "select")


__all__ = ["TABLE", "Intrinsic", "cast_numpy", "cast_target", "i32", "known"]
