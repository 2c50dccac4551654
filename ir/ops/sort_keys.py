"""Stable sorting of rows: equal elements keep their order, -0 equals 0, NaN counts as the largest number.

An element becomes a *key*: its order as an unsigned number in the upper 32 bits, its index in the lower ones, so that
keys are distinct and an ordinary sort of them is stable and says where each element came from. `digits.py` has what
CPUs do with keys. For other targets blocks of up to BLOCK keys are sorted by counting, for each key, those before it;
then pairs of runs are merged, a kernel for each level: the p-th element of a merged pair counts those before it of the
first run (a search over FAN samples at a time). Levels keep no more than what is asked for, so the work is n * log(n)
for a sort and about n * BLOCK comparisons for the largest few. A 64-bit type is sorted twice, by its lower half first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.dtype import f32, i64, u32, u64
from dnnc.ir.expr import Expr, cast, const, op, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import LOOPS, PURE, OpDef, Trait, require
from dnnc.ir.ops.common import Array, both, clamp, dim, require_kind, rows_flops, sample
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType

BLOCK = 16  # keys that are sorted by counting
FAN = 4  # parts into which a step of a search divides a run
GROUP = 8  # keys of which only the first one competes, at first, when few are asked for
WORDS = ("whole", "low", "high")

# --- keys -------------------------------------------------------------------------------------------------------------


def _key_type(x: TensorType, *, size: Dim, descending: bool = False, word: str = "whole") -> TensorType:
    require_kind("what is sorted", x, "fiub")
    require(x.rank > 0, "what is sorted needs an axis; got {}", x)
    require(word in WORDS and (word == "whole") == (x.dtype.bits < 64), "word {} does not fit to {}", word, x)
    return TensorType(u64, (*x.shape[:-1], size))


def ordered(v: Expr) -> Expr:
    """A number as a u32 or u64 that compares like it."""
    if v.dtype.kind == "b":
        return select(v, const(1, u32), const(0, u32))
    if v.dtype.is_float:
        word, top = (u32, 31) if v.dtype is f32 else (u64, 63)
        bits = op(f"bits_{word}", v + 0.0, dtype=word)  # -0 becomes 0
        negative = call("shr", bits, const(top, word)).ne(0)
        order = select(negative, call("bitnot", bits), bits ^ const(1 << top, word))
        return select(call("isnan", v), const((2 << top) - 1, word), order)
    word, top = (u32, 31) if v.dtype.bits <= 32 else (u64, 63)
    bits = cast(v, word)
    return bits ^ const(1 << top, word) if v.dtype.kind == "i" else bits


def _key(x: Tensor, *, size: Dim, descending: bool, word: str) -> Tensor:
    n = x.dims[-1]

    def element(*i: Expr) -> Expr:
        padded = size is not n
        order = ordered(x[(*i[:-1], clamp(i[-1], n) if padded else i[-1])])
        order = call("bitnot", order) if descending else order
        order = call("shr", order, const(32, u64)) if word == "high" else order
        key = call("shl", cast(order, u64), const(32, u64))
        key = select(i[-1] < n, key, const(0xFFFFFFFF << 32, u64)) if padded else key
        return key | cast(i[-1], u64)

    return te.compute((*x.dims[:-1], size), u64, element)


def key_numpy(x: Array, *, size: int, descending: bool = False, word: str = "whole") -> Array:
    n = x.shape[-1]
    wide = x.dtype.itemsize == 8 and x.dtype.kind in "fiu"
    order: Array
    unsigned: Any
    unsigned, signed, top = (np.uint64, np.int64, 63) if wide else (np.uint32, np.int32, 31)
    if x.dtype.kind in "iub" or x.dtype.name in ("int4", "int2", "uint4", "uint2"):
        order = np.asarray(x.astype(np.int64) if not wide else x).astype(unsigned)
        if x.dtype.kind == "i" or x.dtype.name in ("int4", "int2"):
            order = order ^ unsigned(1 << top)
    else:
        v = np.asarray(x.astype(np.float64 if wide else np.float32) + 0)
        bits = v.view(unsigned)
        order = np.where(np.less(v.view(signed), 0), ~bits, bits ^ unsigned(1 << top))
        order = np.where(np.isnan(v), unsigned((2 << top) - 1), order)
    order = (~order if descending else order).astype(np.uint64)
    order = order >> np.uint64(32) if word == "high" else order
    key = np.full((*x.shape[:-1], size), 0xFFFFFFFF << 32, np.uint64)
    key[..., :n] = order << np.uint64(32)
    return key | np.arange(size, dtype=np.uint64)


# --- blocks -----------------------------------------------------------------------------------------------------------


def _rank_type(x: TensorType) -> TensorType:
    require(x.dtype is u64 and x.rank >= 1, "keys are u64; got {}", x)
    return TensorType(i64, x.shape)


def _rank(x: Tensor) -> Tensor:
    """How many keys of the row are smaller."""
    return te.reduce(
        x.dims, x.dims[-1:], i64, "sum", lambda *v: select(x[(*v[:-2], v[-1])] < x[v[:-1]], const(1), const(0))
    )


def _rank_numpy(x: Array) -> Array:
    order = np.argsort(x, -1, kind="stable")
    in_order = np.take_along_axis(x, order, -1)
    fresh = np.concatenate([np.ones((*x.shape[:-1], 1), bool), in_order[..., 1:] != in_order[..., :-1]], -1)
    out = np.empty(x.shape, np.int64)
    np.put_along_axis(out, order, np.maximum.accumulate(np.where(fresh, np.arange(x.shape[-1]), 0), -1), -1)
    return out


def _place_type(x: TensorType, rank: TensorType, *, keep: Dim) -> TensorType:
    ok = x.dtype is u64 and rank.dtype is i64 and x.rank == rank.rank >= 1
    require(ok, "u64 keys and their ranks; got {} and {}", x, rank)
    return TensorType(u64, (*x.shape[:-1], keep))


def _place(x: Tensor, rank: Tensor, *, keep: Dim) -> Tensor:
    """The key of each rank; 0 where none has it."""

    def value(*v: Expr) -> Expr:
        at = (*v[:-2], v[-1])
        return select(rank[at].eq(v[-2]), x[at], const(0, u64))

    return te.reduce((*x.dims[:-1], keep), x.dims[-1:], u64, "max", value)


def _place_numpy(x: Array, rank: Array, *, keep: int) -> Array:
    rows, places = x.reshape(-1, x.shape[-1]), rank.reshape(-1, x.shape[-1])
    out = np.zeros((len(rows), keep), np.uint64)
    row, column = np.nonzero((places >= 0) & (places < keep))
    np.maximum.at(out, (row, places[row, column]), rows[row, column])
    return out.reshape(*x.shape[:-1], keep)


# --- merging ----------------------------------------------------------------------------------------------------------


def _merge_type(x: TensorType, *, keep: int) -> TensorType:
    even = x.rank >= 2 and all(isinstance(d, int) for d in x.shape[-2:]) and x.shape[-2] % 2 == 0
    require(x.dtype is u64 and even, "an even number of runs of u64 keys; got {}", x)
    *lead, runs, run = x.shape
    assert isinstance(runs, int) and isinstance(run, int)
    require(0 < keep <= 2 * run, "{} of {} keys cannot be kept", keep, 2 * run)
    return TensorType(u64, (*lead, runs // 2, keep))


def _merge(x: Tensor, *, keep: int) -> Tensor:
    shape = _merge_type(TensorType(u64, x.dims), keep=keep).shape
    run = int(x.dims[-1])  # type: ignore[arg-type]

    def key(i: tuple[Expr, ...], which: int, j: Expr) -> Expr:
        return x[(*i[:-2], i[-2] * 2 + which, clamp(j, run))]

    def taken(i: tuple[Expr, ...], a: Expr) -> Expr:
        """Is element a of the first run among the elements up to this one?"""
        rest = i[-1] - a
        other = (const(run) < rest) | (key(i, 0, a) < key(i, 1, rest - 1))
        return both(a < run, const(0) < rest, other)

    found: list[tuple[Tensor, int]] = []

    def so_far(i: tuple[Expr, ...]) -> Expr:
        total: Expr = const(0)
        for t, span in found:
            total = total + t[i] * span
        return total

    for samples, span in _steps(run):
        found.append((_count(shape, samples, span, taken, so_far), span))

    def element(*i: Expr) -> Expr:
        a = so_far(i)
        rest = i[-1] - a
        mine, other = key(i, 0, a), key(i, 1, rest)
        return select(both(a < run, (const(run) <= rest) | (mine < other)), mine, other)

    return te.compute(shape, u64, element)


def _steps(run: int) -> list[tuple[int, int]]:
    """Samples that each step of a search in a run compares, and their distance, without a step's last sample."""
    spans = [1]
    while spans[0] * FAN < run:
        spans.insert(0, spans[0] * FAN)
    return [(-(-run // spans[0]), spans[0]), *((FAN - 1, span) for span in spans[1:])]


def _count(shape: tuple[Dim, ...], samples: int, span: int, taken: Any, so_far: Any) -> Tensor:
    """How many of the next samples, each the last one of `span` elements, are taken."""
    return te.reduce(
        shape,
        [samples],
        i64,
        "sum",
        lambda *v: select(taken(v[:-1], so_far(v[:-1]) + v[-1] * span + (span - 1)), const(1), const(0)),
        name="taken",
    )


def _merge_numpy(x: Array, *, keep: int) -> Array:
    """The same search (runs need not be sorted for it to have a meaning)."""
    run = x.shape[-1]
    one, two = x[..., ::2, :], x[..., 1::2, :]
    p = np.arange(keep)
    a = np.zeros((*one.shape[:-1], keep), np.int64)

    def both_keys(j: Array, k: Array) -> tuple[Array, Array]:
        return np.take_along_axis(one, np.clip(j, 0, run - 1), -1), np.take_along_axis(two, np.clip(k, 0, run - 1), -1)

    for samples, span in _steps(run):
        count = np.zeros_like(a)
        for r in range(samples):
            j = a + r * span + span - 1
            mine, other = both_keys(j, p - j - 1)
            count += (j < run) & (j < p) & ((run < p - j) | (mine < other))
        a = a + count * span
    mine, other = both_keys(a, p - a)
    return np.asarray(np.where((a < run) & ((p - a >= run) | (mine < other)), mine, other))


def _merge_flops(x: TensorType, *, keep: int) -> Dim:
    run = x.shape[-1]
    return dim(
        const(_merge_type(x, keep=keep).size) * (1 + sum(n for n, _ in _steps(run)) if isinstance(run, int) else 1)
    )


# --- sort -------------------------------------------------------------------------------------------------------------


def sort_type(
    x: TensorType, *, axis: int = -1, descending: bool = False, keep: Dim | None = None
) -> tuple[TensorType, TensorType]:
    require_kind("what is sorted", x, "fiub")
    require(x.rank >= 1, "sort needs an axis; got {}", x)
    a = normalize_axis(axis, x.rank)
    n, k = x.shape[a], x.shape[a] if keep is None else keep
    fits = not (isinstance(n, int) and isinstance(k, int)) or 0 <= k <= n
    require(fits, "of the {} elements along axis {} of {}, {} cannot be kept", n, axis, x, k)
    require(not isinstance(n, int) or n < 1 << 32, "sort takes fewer than 2^32 elements; got {}", x)
    shape = (*x.shape[:a], k, *x.shape[a + 1 :])
    return TensorType(x.dtype, shape), TensorType(i64, shape)


def sort_along(
    b: Any, x: Any, axis: int, descending: bool, keep: Dim | None, indices: Callable[..., Any]
) -> tuple[Any, Any]:
    """Sort along any axis by a function that finds where the first elements of sorted rows [..., n] stand."""
    a = normalize_axis(axis, x.type.rank)
    of_values = sort_type(x.type, axis=axis, descending=descending, keep=keep)[0]
    k = of_values.shape[a]
    if of_values.size == 0:
        zeros = (0,) * x.type.rank
        return b.slice(x, starts=zeros, steps=tuple(1 for _ in zeros), shape=of_values.shape), b.full(
            shape=of_values.shape, value=0, dtype=i64
        )
    order = [*(j for j in range(x.type.rank) if j != a), a]
    rows = x if order == sorted(order) else b.transpose(x, perm=tuple(order))
    index = indices(b, rows, descending, k)
    index = index if rows is x else b.transpose(index, perm=tuple(order.index(j) for j in range(x.type.rank)))
    return b.gather_elements(x, index, axis=a), index


def indices_of(b: Any, rows: Any, descending: bool, keep: Dim) -> Any:
    """Where the first `keep` elements of each sorted row [..., n] stand."""
    n = rows.type.shape[-1]
    if rows.type.dtype.bits < 64:
        return _indices(b, _by_key(b, rows, descending, keep, "whole"))
    first = _indices(b, _by_key(b, rows, descending, n, "low"))
    second = _indices(b, _by_key(b, b.gather_elements(rows, first, axis=-1), descending, keep, "high"))
    return b.gather_elements(first, second, axis=-1)


def _indices(b: Any, keys: Any) -> Any:
    return b.cast(b.bitwise_and(keys, b.constant(np.uint64(0xFFFFFFFF))), to=i64)


def _by_key(b: Any, rows: Any, descending: bool, keep: Dim, word: str) -> Any:
    """The first `keep` keys of each row, in order. Rows of symbolic length are one block."""
    n = rows.type.shape[-1]
    if not isinstance(n, int) or not isinstance(keep, int):
        keys = b.sort_key(rows, size=n, descending=descending, word=word)
        return b.sort_place(keys, b.sort_rank(keys), keep=keep)
    return _smallest(b, b.sort_key(rows, size=_padded(n, keep), descending=descending, word=word), keep)


def _padded(n: int, keep: int) -> int:
    """How many keys a row of n needs: whole groups, or equal blocks whose number is a power of two."""
    if n > 2 * GROUP * keep:
        return -(-n // GROUP) * GROUP
    levels = (-(-n // BLOCK) - 1).bit_length()
    return -(-n // (1 << levels)) << levels


def _smallest(b: Any, keys: Any, keep: int) -> Any:
    """The smallest keys of each row, in order."""
    *lead, n = keys.type.shape
    more = _padded(n, keep) - n
    if more:  # keys must be distinct
        last = b.constant(np.uint64((1 << 64) - 1) - np.arange(more, dtype=np.uint64))
        keys = b.concat(keys, b.expand(last, shape=(*lead, more)), axis=-1)
        n += more
    if n > 2 * GROUP * keep:
        # who is among the first `keep` has the first of its group among the first `keep` of all groups
        firsts = b.reduce_min(b.reshape(keys, shape=(*lead, n // GROUP, GROUP)), axes=(-1,))
        best = _indices(b, _smallest(b, _renumbered(b, firsts), keep))
        within = b.constant(np.arange(GROUP, dtype=np.int64))
        at = b.add(b.mul(b.reshape(best, shape=(*lead, keep, 1)), GROUP), within)
        return _smallest(b, b.gather_elements(keys, b.reshape(at, shape=(*lead, keep * GROUP)), axis=-1), keep)
    levels = (-(-n // BLOCK) - 1).bit_length()
    runs = b.reshape(keys, shape=(*lead, 1 << levels, n >> levels))
    runs = b.sort_place(runs, b.sort_rank(runs), keep=min(keep, n >> levels))
    for _ in range(levels):
        runs = b.sort_merge(runs, keep=min(keep, 2 * runs.type.shape[-1]))
    return b.reshape(runs, shape=(*lead, keep))


def _renumbered(b: Any, keys: Any) -> Any:
    """Keys with their places among the others in the lower half (their order stays: groups follow one another)."""
    places = b.constant(np.arange(keys.type.shape[-1], dtype=np.uint64))
    return b.bitwise_or(b.bitwise_and(keys, b.constant(np.uint64(0xFFFFFFFF << 32))), places)


KEY_OPS: tuple[OpDef, ...] = (
    OpDef(
        "sort_key",
        _key_type,
        _key,
        reference=key_numpy,
        flops=rows_flops(6),
        traits=PURE | {Trait.BITS},
        samples=(
            sample("f32[3, 7]", size=8),
            sample("f16[5]", size=5, descending=True),
            sample("bf16[9]", size=10),
            sample("i8[2, 5]", size=6, domain=(-128, 127)),
            sample("i64[6]", size=6, word="low", domain=(-9, 9)),
            sample("f64[6]", size=7, word="high", descending=True),
            sample("bool[4]", size=4),
        ),
    ),
    OpDef(
        "sort_rank",
        _rank_type,
        _rank,
        reference=_rank_numpy,
        flops=lambda x: dim(const(x.size) * x.shape[-1]),
        traits=LOOPS,
        samples=(sample("u64[2, 2, 5]", domain=(0, 1e15)), sample("u64[7]", domain=(0, 9))),
    ),
    OpDef(
        "sort_place",
        _place_type,
        _place,
        reference=_place_numpy,
        flops=lambda x, rank, *, keep: dim(const(x.size) * keep),
        traits=LOOPS,
        samples=(
            sample("u64[2, 2, 3]", "i64[2, 2, 3]", keep=2, domain=(0, 3)),
            sample("u64[3]", "i64[3]", keep=3, domain=(0, 2)),
        ),
    ),
    OpDef(
        "sort_merge",
        _merge_type,
        _merge,
        reference=_merge_numpy,
        flops=_merge_flops,
        traits=LOOPS,
        samples=(sample("u64[3, 2, 1]", keep=2, domain=(0, 9e3)), sample("u64[4, 20]", keep=13, domain=(0, 9e3))),
    ),
)
