"""Ops with data-dependent shapes: native code for the largest possible result, then `truncate`.

What is kept is a list of flags. Its running count says where each kept element goes (`running_count`, two levels of
blocks), and a search in that count which element stands at each place (`positions`), so elements are computed at once
and in order. An op here takes the fresh dim of its result as the attribute `size`; see `dnnc.ir.ops.host`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.bounds import bounds
from dnnc.ir.dtype import DType, boolean, i64
from dnnc.ir.expr import Expr, const, maximum, minimum, select
from dnnc.ir.expr import dim as symbol
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import LOOPS, PURE, OpDef, require
from dnnc.ir.ops.common import Array, both, clamp, dim, rows_flops, same_dim, sample
from dnnc.ir.ops.host import HOST
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

BLOCK = 64  # flags that are counted one by one
DIRECT = 1 << 10  # block sums up to which a running sum is taken by the plain quadratic op
FAN = 16  # samples that a step of a search compares
MOST = 1 << 32  # elements of an axis whose bound is not known
DYNAMIC = PURE | HOST


def without_elements(shape: tuple[Dim, ...], dtype: DType) -> Tensor:
    """A result of no elements, or of nothing that counts: zeros, for there is nothing that an expression could read."""
    return te.compute(shape, dtype, lambda *i: const(False if dtype is boolean else 0, dtype.computed))


# --- running counts ---------------------------------------------------------------------------------------------------


def _blocks(n: Dim) -> Dim:
    return dim((const(n) + (BLOCK - 1)) // BLOCK)


def _numbers(x: TensorType) -> None:
    require(x.dtype is i64 and x.rank == 1, "a running count is of an i64 vector; got {}", x)


def _sums_type(x: TensorType) -> TensorType:
    _numbers(x)
    return TensorType(i64, (_blocks(x.shape[0]),))


def _sums(x: Tensor) -> Tensor:
    (n,) = x.dims
    if n == 0:
        return without_elements((0,), i64)

    def element(i: Expr, r: Expr) -> Expr:
        j = i * BLOCK + r
        return select(j < n, x[clamp(j, n)], const(0))

    return te.reduce((_blocks(n),), [BLOCK], i64, "sum", element)


def _sums_numpy(x: Array) -> Array:
    padded = np.concatenate([x, np.zeros(-len(x) % BLOCK, x.dtype)])
    return padded.reshape(-1, BLOCK).sum(1, dtype=x.dtype)


def _running_type(x: TensorType, before: TensorType) -> TensorType:
    _numbers(x)
    ok = before.dtype is i64 and before.rank == 1 and same_dim(before.shape[0], _blocks(x.shape[0]))
    require(ok, "sums of blocks; got {}", before)
    return x


def _running(x: Tensor, before: Tensor) -> Tensor:
    (n,) = x.dims
    if n == 0:
        return without_elements((0,), i64)
    inside = te.reduce(
        (n,),
        [BLOCK],
        i64,
        "sum",
        lambda i, r: select(i // BLOCK * BLOCK + r <= i, x[minimum(i // BLOCK * BLOCK + r, const(n) - 1)], const(0)),
    )
    return te.compute((n,), i64, lambda i: inside[i] + before[i // BLOCK])


def _running_numpy(x: Array, before: Array) -> Array:
    rows = np.concatenate([x, np.zeros(-len(x) % BLOCK, x.dtype)]).reshape(-1, BLOCK)
    return (np.cumsum(rows, 1, dtype=x.dtype) + before[:, None]).reshape(-1)[: len(x)]


def running_count(b: Any, flags: Any) -> Any:
    """How many of the flags up to each one are true: bool[n] -> i64[n]."""
    return _prefix(b, b.cast(flags, to=i64))


def _prefix(b: Any, x: Any) -> Any:
    n = x.type.shape[0]
    if isinstance(n, int) and n <= BLOCK:
        return b.cumsum(x, axis=0)
    sums = b.block_sums(x)
    m = sums.type.shape[0]
    before = (
        b.sub(_prefix(b, sums), sums) if isinstance(m, int) and m > DIRECT else b.cumsum(sums, axis=0, exclusive=True)
    )
    return b.block_running(x, before)


# --- where the kept elements stand ------------------------------------------------------------------------------------


def _positions_type(running: TensorType) -> TensorType:
    _numbers(running)
    return running


def _positions(running: Tensor) -> Tensor:
    (n,) = running.dims
    if n == 0:
        return without_elements((0,), i64)
    found: list[tuple[Tensor, int]] = []

    def so_far(k: Expr) -> Expr:
        total: Expr = const(0)
        for t, span in found:
            total = total + t[k] * span
        return total

    def taken(span: int) -> Any:
        def element(k: Expr, r: Expr) -> Expr:
            j = so_far(k) + r * span + (span - 1)
            return select(both(j < n, running[clamp(j, n)] <= k), const(1), const(0))

        return element

    most = n if isinstance(n, int) else bounds(n)[1] or MOST
    for span in _spans(most):
        samples = FAN if found else min(FAN, -(-most // span))
        found.append((te.reduce((n,), [samples], i64, "sum", taken(span), name="passed"), span))
    return te.compute((n,), i64, lambda k: clamp(so_far(k), n))


def _spans(n: int) -> list[int]:
    """The distances of the samples at each step of a search among n."""
    spans = [1]
    while spans[0] * FAN < n:
        spans.insert(0, spans[0] * FAN)
    return spans


def _positions_numpy(running: Array) -> Array:
    """The search as it is, so that of counts that do not grow, which no model makes, the result is the same, too."""
    n = len(running)
    k, at = np.arange(n)[:, None], np.zeros((n, 1), np.int64)
    for span in _spans(n) if n else ():
        j = at + np.arange(FAN) * span + (span - 1)
        at += ((j < n) & (running[np.minimum(j, n - 1)] <= k)).sum(1, keepdims=True) * span
    return np.clip(at[:, 0], 0, max(n - 1, 0))


def kept(b: Any, flags: Any) -> tuple[Any, Any]:
    """Return the positions of true in bool[n], in order (i64[n], arbitrary behind them), and their count (i64[])."""
    n = flags.type.shape[0]
    if isinstance(n, int) and n == 0:
        return b.full(shape=(0,), value=0, dtype=i64), b.full(shape=(), value=0, dtype=i64)
    return b.positions(running_count(b, flags)), b.reduce_sum(b.cast(flags, to=i64), axes=(0,), keepdims=False)


# --- nonzero, compress ------------------------------------------------------------------------------------------------


def _unravel_type(at: TensorType, *, shape: tuple[Dim, ...]) -> TensorType:
    _numbers(at)
    return TensorType(i64, (len(shape), at.shape[0]))


def _unravel(at: Tensor, *, shape: tuple[Dim, ...]) -> Tensor:
    if product(shape) == 0:
        return without_elements((len(shape), at.dims[0]), i64)

    def element(d: Expr, k: Expr) -> Expr:
        flat = maximum(at[k], const(0))
        out: Expr = const(0)
        for axis in range(len(shape)):
            inner = product(shape[axis + 1 :])
            here = flat // const(inner) if axis == 0 else flat // const(inner) % const(shape[axis])
            out = here if axis == 0 else select(d.eq(axis), here, out)
        return out

    return te.compute((len(shape), at.dims[0]), i64, element)


def _unravel_numpy(at: Array, *, shape: Any) -> Array:
    out = np.zeros((len(shape), len(at)), np.int64)
    flat = np.maximum(at, 0)
    for axis in reversed(range(len(shape))):
        size = max(int(shape[axis]), 1)
        out[axis] = flat if axis == 0 else flat % size
        flat = flat // size
    return out


def _nonzero_type(x: TensorType, *, size: Dim) -> TensorType:
    return TensorType(i64, (x.rank, size))


def _nonzero(b: Any, x: Any, *, size: Dim) -> Any:
    flat = b.reshape(x, shape=(x.type.size,))
    flags = flat if x.type.dtype is boolean else b.not_equal(flat, 0)
    at, count = kept(b, flags)
    return b.truncate(b.unravel(at, shape=x.type.shape), count, size=size, axis=1)


def _compress_type(x: TensorType, keep: TensorType, *, size: Dim, axis: int | None = None) -> TensorType:
    require(keep.dtype is boolean and keep.rank == 1, "what to keep is a bool vector; got {}", keep)
    if axis is None:
        return TensorType(x.dtype, (size,))
    a = normalize_axis(axis, x.rank)
    return TensorType(x.dtype, (*x.shape[:a], size, *x.shape[a + 1 :]))


def _compress(b: Any, x: Any, keep: Any, *, size: Dim, axis: int | None) -> Any:
    x = b.reshape(x, shape=(x.type.size,)) if axis is None else x
    a = normalize_axis(axis or 0, x.type.rank)
    at, count = kept(b, keep)
    return b.gather(x, b.truncate(at, count, size=size), axis=a)


# --- unique -----------------------------------------------------------------------------------------------------------


def _unique_type(x: TensorType, *, size: Dim, axis: int | None = None, sorted: bool = True) -> tuple[TensorType, ...]:
    a = None if axis is None else normalize_axis(axis, x.rank)
    y = (size,) if a is None else (*x.shape[:a], size, *x.shape[a + 1 :])
    n = x.size if a is None else x.shape[a]
    return TensorType(x.dtype, y), TensorType(i64, (size,)), TensorType(i64, (n,)), TensorType(i64, (size,))


def _unique(b: Any, x: Any, *, size: Dim, axis: int | None, sorted: bool) -> tuple[Any, ...]:
    """Sort and start a group where neighbours differ; the inverse of the sort brings the numbers back."""
    if axis is None:
        x = b.reshape(x, shape=(x.type.size,))
    a = normalize_axis(axis or 0, x.type.rank)
    order = _order(b, x, a)
    first = b.differs(b.gather(_rows(b, x, a), order, axis=0))  # of its group
    group = b.sub(running_count(b, first), 1)
    at, count = kept(b, first)
    n = order.type.shape[0]
    counts = b.run_lengths(at, count)
    indices = b.gather(order, at, axis=0)
    inverse = b.gather(group, _inverse(b, order), axis=0)
    if not sorted:  # groups in the order of their first elements
        real = b.less(b.iota(shape=(n,), axis=0, dtype=i64), b.reshape(count, shape=(1,)))
        groups = b.sort(b.where(real, indices, b.constant(np.int64(MOST))), axis=0, descending=False)[1]
        indices, counts = b.gather(indices, groups, axis=0), b.gather(counts, groups, axis=0)
        inverse = b.gather(_inverse(b, groups), inverse, axis=0)
    indices = b.truncate(indices, count, size=size)
    return b.gather(x, indices, axis=a), indices, inverse, b.truncate(counts, count, size=size)


def _inverse(b: Any, permutation: Any) -> Any:
    return b.sort(permutation, axis=0, descending=False)[1]


def _order(b: Any, x: Any, axis: int) -> Any:
    """Return the stable lexicographic order of the slices along an axis, sorting by the last element first."""
    rows = _rows(b, x, axis)
    if rows.type.rank == 1:
        return b.sort(rows, axis=0, descending=False)[1]
    order = None
    for k in reversed(range(int(rows.type.shape[1]))):
        column = b.gather(rows, b.constant(np.int64(k)), axis=1)
        column = column if order is None else b.gather(column, order, axis=0)
        step = b.sort(column, axis=0, descending=False)[1]
        order = step if order is None else b.gather(order, step, axis=0)
    return order if order is not None else b.iota(shape=(rows.type.shape[0],), axis=0, dtype=i64)


def _rows(b: Any, x: Any, axis: int) -> Any:
    """[n] or [n, elements of a slice]"""
    if x.type.rank == 1:
        return x
    rest = [k for k in range(x.type.rank) if k != axis]
    y = x if axis == 0 else b.transpose(x, perm=(axis, *rest))
    return b.reshape(y, shape=(x.type.shape[axis], product(tuple(x.type.shape[k] for k in rest))))


def _differs_type(x: TensorType) -> TensorType:
    require(x.rank in (1, 2), "rows or numbers are compared; got {}", x)
    return TensorType(boolean, (x.shape[0],))


def _differs(x: Tensor) -> Tensor:
    def other(i: Expr, *c: Expr) -> Expr:
        a, b = x[(maximum(i - 1, const(0)), *c)], x[(i, *c)]
        if x.dtype.is_float:
            return both(
                a.ne(b), call("isnan", a).eq(const(False, boolean)) | call("isnan", b).eq(const(False, boolean))
            )
        return a.ne(b)

    if x.dims[0] == 0:
        return without_elements((0,), boolean)
    if len(x.dims) == 1:
        return te.compute(x.dims, boolean, lambda i: i.eq(0) | other(i))
    found = te.reduce(x.dims[:1], x.dims[1:], i64, "max", lambda i, c: select(other(i, c), const(1), const(0)))
    return te.compute(x.dims[:1], boolean, lambda i: i.eq(0) | (const(0) < found[i]))


def _differs_numpy(x: Array) -> Array:
    rows = x.reshape(len(x), -1) if len(x) else x.reshape(0, 1)
    before, here = rows[:-1], rows[1:]
    other = (before != here) & ((before == before) | (here == here))
    return np.concatenate([np.ones(min(len(x), 1), bool), other.any(1)])


def _lengths_type(at: TensorType, count: TensorType) -> TensorType:
    _numbers(at)
    require(count.shape == () and count.dtype is i64, "the number of runs is an i64; got {}", count)
    return at


def _lengths(at: Tensor, count: Tensor) -> Tensor:
    (n,) = at.dims
    if n == 0:
        return without_elements((0,), i64)

    def element(k: Expr) -> Expr:
        return select(k + 1 < count[()], at[minimum(k + 1, const(n) - 1)], const(n)) - at[k]

    return te.compute((n,), i64, element)


def _lengths_numpy(at: Array, count: Array) -> Array:
    n = len(at)
    after = np.concatenate([at[1:], np.full(min(n, 1), n, at.dtype)])
    return np.where(np.arange(n) + 1 < count, after, n) - at


# --- records ----------------------------------------------------------------------------------------------------------


def _n(most: int) -> Dim:
    return symbol("n", 0, most)


def _count_flops(*types: TensorType, **_: Any) -> Dim:
    return dim(const(types[0].size) * BLOCK)


def _search_flops(x: TensorType, **_: Any) -> Dim:
    n = x.shape[0]
    return dim(const(n) * FAN * len(_spans(n if isinstance(n, int) else bounds(n)[1] or MOST)))


DYNAMIC_OPS: tuple[OpDef, ...] = (
    # sums of blocks of BLOCK elements
    OpDef(
        "block_sums",
        _sums_type,
        _sums,
        reference=_sums_numpy,
        flops=lambda x: x.shape[0],
        traits=LOOPS,
        samples=(sample("i64[200]", domain=(0, 3)), sample("i64[64]", domain=(0, 3)), sample("i64[5]", domain=(-3, 3))),
    ),
    # running sums within blocks, plus what comes before each block
    OpDef(
        "block_running",
        _running_type,
        _running,
        reference=_running_numpy,
        flops=_count_flops,
        traits=LOOPS,
        samples=(
            sample("i64[200]", "i64[4]", domain=(0, 3)),
            sample("i64[64]", "i64[1]", domain=(0, 3)),
            sample("i64[5]", "i64[1]", domain=(-3, 3)),
        ),
    ),
    # out[k] is the first index at which a running count exceeds k, or the last index where it never does
    OpDef(
        "positions",
        _positions_type,
        _positions,
        reference=_positions_numpy,
        flops=_search_flops,
        traits=LOOPS,
        samples=(
            sample("i64[1]", domain=(0, 1)),
            sample("i64[7]", domain=(0, 0)),
            sample("i64[300]", domain=(301, 301)),
        ),
    ),
    # does a number or row differ from the one before it? The first one does. NaNs are equal to each other
    OpDef(
        "differs",
        _differs_type,
        _differs,
        reference=_differs_numpy,
        flops=rows_flops(1),
        traits=LOOPS,
        samples=(
            sample("i32[9]", domain=(0, 1)),
            sample("f32[7, 3]", domain=(0.0, 0.0)),
            sample("u8[9, 2]", domain=(0, 1)),
            sample("bool[8]"),
        ),
    ),
    # the lengths of runs that begin at the first `count` of `at`, the last one ending at len(at); what comes after them
    # is any number
    OpDef(
        "run_lengths",
        _lengths_type,
        _lengths,
        reference=_lengths_numpy,
        flops=rows_flops(1),
        traits=PURE,
        samples=(sample("i64[6]", "i64[]", domain=(0, 6)), sample("i64[1]", "i64[]", domain=(0, 1))),
    ),
    # indices into a flat array as one row of indices for each axis
    OpDef(
        "unravel",
        _unravel_type,
        _unravel,
        reference=_unravel_numpy,
        flops=rows_flops(2),
        traits=PURE,
        samples=(
            sample("i64[9]", shape=(2, 3, 5), domain=(0, 29)),
            sample("i64[4]", shape=(7,), domain=(0, 6)),
            sample("i64[2]", shape=(), domain=(0, 0)),
        ),
    ),
    OpDef(
        "nonzero",
        _nonzero_type,
        decompose=_nonzero,
        flops=_count_flops,
        traits=DYNAMIC,
        samples=(
            sample("i32[3, 4]", size=_n(12), domain=(-1, 1)),
            sample("f32[300]", size=_n(300), domain=(-1.0, 1.0)),
            sample("bool[2, 3, 2]", size=_n(12)),
            sample("f16[]", size=_n(1)),
        ),
    ),
    OpDef(
        "compress",
        _compress_type,
        decompose=_compress,
        traits=DYNAMIC,
        samples=(
            sample("f32[5, 3]", "bool[5]", size=_n(5), axis=0),
            sample("i64[2, 7]", "bool[4]", size=_n(4), axis=-1),
            sample("f16[3, 4]", "bool[12]", size=_n(12)),
        ),
    ),
    OpDef(
        "unique",
        _unique_type,
        decompose=_unique,
        traits=DYNAMIC,
        samples=(
            sample("i32[90]", size=_n(90), domain=(-9, 9)),
            sample("f32[3, 7]", size=_n(21), sorted=False),
            sample("i64[6, 2]", size=_n(6), axis=0, domain=(0, 1)),
            sample("u8[3, 9, 2]", size=_n(9), axis=1, sorted=False, domain=(0, 1)),
        ),
    ),
)
