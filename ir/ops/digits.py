"""Sorting rows where a core walks rows: by digits, by a network, and for the few largest by groups.

The keys are those of `sort`. `sort_digits` moves them once for each digit, n * 4 moves for 32 bits. Short rows are
sorted side by side by `sort_network`, whose steps are the same for all of them. Of a long row of which few elements are
asked for, those lie in the `keep` groups of neighbours whose first elements are the first ones: vectors find the first
of each group, and what is sorted is one element of each group, and then the members of `keep` groups. Groups are in the
order of their elements, so that ties are those of a full sort, and work is fixed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.dtype import i64, u32, u64
from dnnc.ir.expr import Expr, cast, const, op, select, value
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import PURE, OpDef, Trait, require
from dnnc.ir.ops.common import Array, clamp, dim, require_kind, rows_flops, same_dim, sample
from dnnc.ir.ops.sort_keys import indices_of, key_numpy, ordered, sort_along
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType

RANKED = 64  # keys that are sorted by counting, for each, those before it
SIDE_BY_SIDE = 8  # rows from which on a network sorts them
# Keys of a row that a network sorts: longer rows take fewer steps by digits. Vectors of 512 bits have 8 keys, and one
# instruction for the smaller ones of two vectors.
WIDE_NETWORK, NETWORK = 512, 128
WIDE = 16  # float32 elements of vectors of 512 bits
FEW = 32  # elements for each one asked for, from which on groups pay
MOST = 64  # elements of a group
VALUE = 32, 64  # bits of a key that hold an element's order

# --- by digits --------------------------------------------------------------------------------------------------------


def _digits_type(x: TensorType, *, keep: int, low: int = 32, high: int = 64) -> TensorType:
    n = x.shape[-1] if x.rank else None
    require(x.dtype is u64 and isinstance(n, int), "rows of u64 keys of a constant length; got {}", x)
    ok = 0 <= keep <= (n if isinstance(n, int) else 0) and 0 <= low < high <= 64
    require(ok, "{} keys by bits {} to {} of {}", keep, low, high, x)
    return TensorType(u64, (*x.shape[:-1], keep))


def _digits(x: Tensor, *, keep: int, low: int, high: int) -> Tensor:
    """Stable order of `passes/lower/digits.py`: an element follows those of smaller bits and earlier equal ones."""
    n = x.dims[-1]

    def bits(*v: Expr) -> Expr:
        return call("shr", x[v], const(low, u64)) & const((1 << (high - low)) - 1, u64)

    def before(*v: Expr) -> Expr:
        *row, i, j = v
        mine, other = bits(*row, i), bits(*row, j)
        return select((other < mine) | (other.eq(mine) & (j < i)), const(1), const(0))

    rank = te.reduce(x.dims, [n], i64, "sum", before)
    shape = (*x.dims[:-1], keep)
    return te.reduce(
        shape, [n], u64, "max", lambda *v: select(rank[(*v[:-2], v[-1])].eq(v[-2]), x[(*v[:-2], v[-1])], const(0, u64))
    )


def _digits_numpy(x: Array, *, keep: int, low: int = 32, high: int = 64) -> Array:
    bits = (x >> np.uint64(low)) & np.uint64((1 << (high - low)) - 1)
    return np.asarray(np.take_along_axis(x, np.argsort(bits, -1, kind="stable")[..., :keep], -1))


# --- by a network -----------------------------------------------------------------------------------------------------


def _network_type(x: TensorType, *, keep: int) -> TensorType:
    require(x.rank == 2, "keys are a matrix; got {}", x)
    return _digits_type(x, keep=keep, low=0, high=64)


def _network(x: Tensor, *, keep: int) -> Tensor:
    return _digits(x, keep=keep, low=0, high=64)


# --- by groups --------------------------------------------------------------------------------------------------------


def _groups_type(x: TensorType, *, group: int, descending: bool = False) -> TensorType:
    require_kind("what is sorted", x, "fiub")
    ok = x.rank > 0 and isinstance(x.shape[-1], int) and x.dtype.bits < 64 and group > 0
    require(ok, "rows of a constant length; got {}", x)
    return TensorType(u32, (*x.shape[:-1], -(-int(x.shape[-1]) // group)))  # type: ignore[arg-type]


def _order(x: Tensor, i: tuple[Expr, ...], descending: bool) -> Expr:
    order = ordered(x[(*i[:-1], clamp(i[-1], x.dims[-1]))])
    return call("bitnot", order) if descending else order


def _groups(x: Tensor, *, group: int, descending: bool) -> Tensor:
    """Rising positions of each neighbour group's first element. The last group repeats its last element."""
    shape = (*x.dims[:-1], -(-int(x.dims[-1]) // group))  # type: ignore[arg-type]
    return te.reduce(shape, [group], u32, "min", lambda *v: _order(x, (*v[:-2], v[-2] * group + v[-1]), descending))


def _order_numpy(x: Array, descending: bool) -> Array:
    return np.asarray(key_numpy(x, size=x.shape[-1], descending=descending) >> np.uint64(32)).astype(np.uint32)


def _groups_numpy(x: Array, *, group: int, descending: bool = False) -> Array:
    order = _order_numpy(x, descending)
    padded = np.concatenate([order, np.repeat(order[..., -1:], -order.shape[-1] % group, -1)], -1)
    return np.asarray(padded.reshape(*x.shape[:-1], -1, group).min(-1))


def _members_type(x: TensorType, groups: TensorType, *, group: int, descending: bool = False) -> TensorType:
    _groups_type(x, group=group)
    fits = groups.dtype is i64 and groups.rank == x.rank and all(map(same_dim, x.shape[:-1], groups.shape[:-1]))
    require(fits, "numbers of groups for each row of {}; got {}", x, groups)
    return TensorType(u64, (*x.shape[:-1], dim(const(groups.shape[-1]) * group)))


def _members(x: Tensor, groups: Tensor, *, group: int, descending: bool) -> Tensor:
    """Keys of the members of groups, numbered as they come; elements behind the row's end are last."""
    n = x.dims[-1]

    def element(*i: Expr) -> Expr:
        at = groups[(*i[:-1], i[-1] // group)] * group + i[-1] % group
        order = select(at < n, _order(x, (*i[:-1], at), descending), const((1 << 32) - 1, u32))
        return op("|", call("shl", cast(order, u64), const(32, u64)), cast(i[-1], u64))

    return te.compute((*x.dims[:-1], dim(const(groups.dims[-1]) * group)), u64, element)


def _members_numpy(x: Array, groups: Array, *, group: int, descending: bool = False) -> Array:
    n = x.shape[-1]
    at = (groups[..., None] * group + np.arange(group)).reshape(*groups.shape[:-1], -1)
    order = np.take_along_axis(_order_numpy(x, descending), np.clip(at, 0, n - 1), -1)
    order = np.where(at < n, order, np.uint32((1 << 32) - 1)).astype(np.uint64)
    return np.asarray((order << np.uint64(32)) | np.arange(at.shape[-1], dtype=np.uint64))


# --- sort -------------------------------------------------------------------------------------------------------------


def sort_by_digits(b: Any, x: Any, *, axis: int, descending: bool, keep: Dim | None, lanes: int) -> tuple[Any, Any]:
    """`sort` where cores walk rows. `lanes`: float32 elements of a vector."""
    return sort_along(b, x, axis, descending, keep, partial(_indices, lanes))


def _indices(lanes: int, b: Any, rows: Any, descending: bool, keep: Dim) -> Any:
    """Where the first `keep` elements of each sorted row stand."""
    n = rows.type.shape[-1]
    if not isinstance(n, int) or not isinstance(keep, int):
        return indices_of(b, rows, descending, keep)
    if rows.type.dtype.bits == 64:
        first = _places(lanes, b, b.sort_key(rows, size=n, descending=descending, word="low"), n)
        moved = b.gather_elements(rows, first, axis=-1)
        second = _places(lanes, b, b.sort_key(moved, size=n, descending=descending, word="high"), keep)
        return b.gather_elements(first, second, axis=-1)
    if n <= RANKED or n < FEW * keep:
        return _places(lanes, b, b.sort_key(rows, size=n, descending=descending), keep)
    group = min(1 << (math.isqrt(n // keep).bit_length() - 1), MOST)
    firsts = b.sort_groups(rows, group=group, descending=descending)
    best = b.cast(_indices(lanes, b, firsts, False, keep), to=u64)
    best = b.cast(_smallest(lanes, b, best, keep, 0, int(firsts.type.shape[-1]).bit_length()), to=i64)
    found = _places(lanes, b, b.sort_members(rows, best, group=group, descending=descending), keep)
    inside = b.bitwise_and(found, b.constant(np.int64(group - 1)))
    return b.add(b.mul(b.gather_elements(best, b.div(found, group), axis=-1), group), inside)


def _places(lanes: int, b: Any, keys: Any, keep: int) -> Any:
    """The lower halves of the first keys."""
    smallest = _smallest(lanes, b, keys, keep, *VALUE)
    return b.cast(b.bitwise_and(smallest, b.constant(np.uint64(0xFFFFFFFF))), to=i64)


def _smallest(lanes: int, b: Any, keys: Any, keep: int, low: int, high: int) -> Any:
    """The first keys by their bits from `low` to `high`. Those below rise along a row, those above are 0."""
    *outer, n = keys.type.shape
    rows = math.prod(map(const, outer), start=const(1))
    if n <= (WIDE_NETWORK if lanes >= WIDE else NETWORK) and (value(rows) or SIDE_BY_SIDE) >= SIDE_BY_SIDE:
        first = b.sort_network(b.reshape(keys, shape=(dim(rows), n)), keep=keep)
        return b.reshape(first, shape=(*outer, keep))
    if n <= RANKED:
        return b.sort_place(keys, b.sort_rank(keys), keep=keep)
    return b.sort_digits(keys, keep=keep, low=low, high=high)


DIGITS_OPS: tuple[OpDef, ...] = (
    OpDef(
        "sort_digits",
        _digits_type,
        _digits,
        reference=_digits_numpy,
        flops=rows_flops(8),  # counted and moved once for each digit
        traits=PURE | {Trait.LOOPS, Trait.SEQUENTIAL},
        samples=(
            sample("u64[3, 20]", keep=20, low=0, high=16, domain=(0, 9e3)),
            sample("u64[2, 2, 9]", keep=4, low=0, high=20, domain=(0, 9e5)),
            sample("u64[30]", keep=7, low=3, high=9, domain=(0, 2e3)),
        ),
    ),
    OpDef(
        "sort_network",
        _network_type,
        _network,
        reference=lambda x, *, keep: np.sort(x, -1)[:, :keep],
        flops=rows_flops(16),
        traits=PURE | {Trait.LOOPS, Trait.SEQUENTIAL},
        samples=(
            sample("u64[3, 20]", keep=20, domain=(0, 9e3)),
            sample("u64[18, 33]", keep=4, domain=(0, 9e15)),
        ),
    ),
    OpDef(
        "sort_groups",
        _groups_type,
        _groups,
        reference=_groups_numpy,
        flops=rows_flops(6),
        traits=PURE | {Trait.BITS, Trait.LOOPS},
        samples=(
            sample("f32[3, 20]", group=8, descending=True),
            sample("f16[17]", group=4),
            sample("i8[2, 9]", group=4, descending=True, domain=(-128, 127)),
        ),
    ),
    OpDef(
        "sort_members",
        _members_type,
        _members,
        reference=_members_numpy,
        flops=rows_flops(6),
        traits=PURE | {Trait.BITS},
        samples=(
            sample("f32[3, 20]", "i64[3, 2]", group=8, descending=True, domain=(0, 2)),
            sample("u8[9]", "i64[3]", group=4, domain=(0, 2)),
        ),
    ),
)
