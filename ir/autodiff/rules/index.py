"""Rules of ops that read or write places which data names: what is gathered is added up again, in a fixed order.

    y = gather(x, at)                            ->   cot x = scatter_nd(0, at, cot y, reduction="add")
    y = gather_elements(x, at), one of each row  ->   cot x = where(iota == at, cot y, 0)
    y = scatter_nd(x, at, u, reduction="add")    ->   cot x = cot y; cot u = gather_nd(cot y, at)

Scatters apply the updates of an element in their order, so these gradients have the same bits every time. Where indices
are constants that repeat or permute rows, the cotangent is gathered or summed instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.ir.autodiff.reverse import zeros
from dnnc.ir.dtype import f32, i32, i64
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import TensorType, product

Cotangents = Mapping[int, Any]
Array = np.ndarray[Any, Any]

# --- gathers ----------------------------------------------------------------------------------------------------------


def gather(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x, at), (g,) = n.inputs, cotangents
    assert x is not None and at is not None
    a, t = normalize_axis(n.attrs["axis"], x.type.rank), x.type
    before, after, count = t.shape[:a], t.shape[a + 1 :], product(at.type.shape)
    constant = b.graph.constants.get(at)
    if constant is not None:
        made = _by_constant(b, b.reshape(g, shape=(*before, count, *after)), constant.reshape(-1), t, a)
        if made is not None:
            return {0: made}
    if a == 0:
        return {0: b.scatter_nd(zeros(b, t), b.reshape(at, shape=(*at.type.shape, 1)), g, reduction="add")}
    updates = b.reshape(g, shape=(*before, count, *after))
    rows = b.expand(b.reshape(at, shape=(count, *(1 for _ in after))), shape=updates.type.shape)
    return {0: b.scatter_elements(zeros(b, t), rows, updates, axis=a, reduction="add")}


def _by_constant(b: Builder, g: Any, at: Array, t: TensorType, axis: int) -> Any:
    """The cotangent for indices that are a range, a permutation, or repeat all rows in order; None for others."""
    n, m = t.shape[axis], len(at)
    if not isinstance(n, int) or n == 0 or m == 0:
        return None
    at = at.astype(np.int64)
    at = np.where(at < 0, at + n, at)
    run = -(-m // n)
    if (at == np.arange(m) // run).all():
        more = [0] * t.rank
        more[axis] = n * run - m
        g = b.pad(g, pads=(*(0 for _ in more), *more)) if more[axis] else g
        split = b.reshape(g, shape=(*t.shape[: axis + 1], run, *t.shape[axis + 1 :]))
        return b.reduce_sum(split, axes=(axis + 1,), keepdims=False)
    if (at == at[0] + np.arange(m)).all() and 0 <= at[0] <= n - m:
        before, after = [0] * t.rank, [0] * t.rank
        before[axis], after[axis] = int(at[0]), n - m - int(at[0])
        return b.pad(g, pads=(*before, *after))
    if m == n and (np.sort(at) == np.arange(n)).all():
        return b.gather(g, b.constant(np.argsort(at)), axis=axis)
    return None


def gather_elements(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x, at), (g,) = n.inputs, cotangents
    assert x is not None and at is not None
    shape = x.type.shape
    axis = normalize_axis(n.attrs["axis"], len(shape))
    count = shape[axis]
    one_each = (*shape[:axis], 1, *shape[axis + 1 :])
    if at.type.shape != one_each or not isinstance(count, int) or count >= 1 << 31:
        return {0: b.scatter_elements(zeros(b, x.type), at, g, axis=axis, reduction="add")}
    # one element of each row, as a loss picks: no scatter, so that what reads the result makes it
    index = b.cast(b.where(b.less(at, 0), b.add(at, count), at), to=i32)
    line = tuple(count if k == axis else 1 for k in range(len(shape)))
    return {0: b.where(b.equal(b.iota(shape=line, axis=axis, dtype=i32), index), g, b.constant(0, dtype=g.type.dtype))}


def gather_nd(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x, at), (g,) = n.inputs, cotangents
    assert x is not None and at is not None
    lead = at.type.shape[:-1]
    batch = [b.iota(shape=(*lead, 1), axis=k, dtype=i64) for k in range(n.attrs["batch_dims"])]
    if batch:
        at = b.concat(*batch, b.cast(at, to=i64), axis=len(lead))
    return {0: b.scatter_nd(zeros(b, x.type), at, g, reduction="add")}


# --- scatters ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Places:
    """The places of a scatter's updates.

    take(v): the elements of v there; put(v, u, how): v updated there.
    rows: the dims of what is numbered for itself, of the result and of the updates: rows, or elements.
    distinct: no two updates have one place.
    """

    take: Callable[[Any], Any]
    put: Callable[[Any, Any, str], Any]
    rows: tuple[tuple[Any, ...], tuple[Any, ...]]
    distinct: bool


def scatter_elements(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    x, at, u = n.inputs
    assert x is not None and at is not None and u is not None
    axis = normalize_axis(n.attrs["axis"], x.type.rank)
    size, constant = x.type.shape[axis], b.graph.constants.get(at)
    distinct = at.type.shape[axis] == 1
    if constant is not None and isinstance(size, int):
        line = np.sort(np.where(constant < 0, constant.astype(np.int64) + size, constant), axis)
        distinct = bool((np.diff(line, axis=axis) != 0).all())
    places = _Places(
        lambda v: b.gather_elements(v, at, axis=axis),
        lambda v, w, how: b.scatter_elements(v, at, w, axis=axis, reduction=how),
        (x.type.shape, u.type.shape),
        distinct,
    )
    return _scatter(b, n, cotangents[0], needed, places)


def scatter_nd(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    x, at, u = n.inputs
    assert x is not None and at is not None and u is not None
    lead, width = at.type.shape[:-1], at.type.shape[-1]
    assert isinstance(width, int)
    sizes, constant = x.type.shape[:width], b.graph.constants.get(at)
    distinct = product(lead) == 1
    if constant is not None and all(isinstance(d, int) for d in sizes):
        rows = constant.reshape(-1, width).astype(np.int64)
        rows = np.where(rows < 0, rows + np.array(sizes, np.int64), rows)
        distinct = len(np.unique(rows, axis=0)) == len(rows)
    places = _Places(
        lambda v: b.gather_nd(v, at),
        lambda v, w, how: b.scatter_nd(v, at, w, reduction=how),
        (sizes, lead),
        distinct,
    )
    return _scatter(b, n, cotangents[0], needed, places)


def _scatter(b: Builder, n: Node, g: Any, needed: Sequence[int], places: _Places) -> Cotangents:
    x, _, u = n.inputs
    how = n.attrs["reduction"]
    assert x is not None and u is not None
    if how == "add":
        return {0: g, **({2: places.take(g)} if 2 in needed else {})}
    if how == "none":
        out = {0: places.put(g, zeros(b, u.type), "none")} if 0 in needed else {}
        return {**out, 2: _of_last(b, places.take(g), places)} if 2 in needed else out
    t = x.type.dtype
    if t.computed is t:
        found = _product(b, x, u, g, needed, places) if how == "mul" else _extreme(b, n.output, x, u, g, needed, places)
        return found
    y, x, u, g = (b.cast(v, to=f32) for v in (n.output, x, u, g))  # products and shares are rounded once
    found = _product(b, x, u, g, needed, places) if how == "mul" else _extreme(b, y, x, u, g, needed, places)
    return {k: b.cast(c, to=t) for k, c in found.items()}


def _of_last(b: Builder, g: Any, places: _Places) -> Any:
    """The cotangent of updates of which the last one of a place counts."""
    if places.distinct:
        return g
    shape, lead = places.rows
    count = product(lead)
    dtype = i32 if isinstance(count, int) and count < 1 << 31 else i64
    number = b.reshape(b.iota(shape=(count,), axis=0, dtype=dtype), shape=lead)
    last = places.take(places.put(b.full(shape=shape, value=0, dtype=dtype), number, "none"))
    counts = b.reshape(b.equal(last, number), shape=(*lead, *(1 for _ in g.type.shape[len(lead) :])))
    return b.where(counts, g, b.constant(0.0, dtype=g.type.dtype))


def _product(b: Builder, x: Any, u: Any, g: Any, needed: Sequence[int], places: _Places) -> Cotangents:
    """Each update is multiplied by the others of its place. Zeros are kept apart, so none is divided by.

    With p the product of the updates that are not zero, z the number of zeros and s their sum, the others of an update
    are p / u where z is 0, p where it is the only zero. Where one zero is left over the result is 0, but it is written
    as a multiple of s, on which second derivatives depend.
    """
    one, zero = b.constant(1.0, dtype=x.type.dtype), b.constant(0.0, dtype=x.type.dtype)
    ones = b.expand(one, shape=x.type.shape)
    out = {}
    if 0 in needed:
        out[0] = b.mul(g, places.put(ones, u, "mul"))
    if 2 not in needed:
        return out
    scaled = places.take(b.mul(g, x))
    if places.distinct:
        return {**out, 2: scaled}
    nothing = b.equal(u, zero)
    none = zeros(b, x.type)
    p = places.take(places.put(ones, b.where(nothing, one, u), "mul"))
    z = places.take(places.put(none, b.cast(nothing, to=x.type.dtype), "add"))
    s = places.take(places.put(none, b.where(nothing, u, zero), "add"))
    p = b.where(nothing, p, b.div(p, b.where(nothing, one, u)))
    left = b.sub(z, b.cast(nothing, to=x.type.dtype))  # zeros among the others
    others = b.where(
        b.equal(left, zero),
        p,
        b.where(b.equal(left, one), b.mul(p, b.sub(s, b.where(nothing, u, zero))), zero),
    )
    return {**out, 2: b.mul(scaled, others)}


def _extreme(b: Builder, y: Any, x: Any, u: Any, g: Any, needed: Sequence[int], places: _Places) -> Cotangents:
    """Equal elements share, as in PyTorch: the one that was there and all updates of its place."""
    t = x.type.dtype
    zero = b.constant(0.0, dtype=t)
    stays, wins = b.equal(x, y), b.equal(u, places.take(y))
    share = b.div(g, places.put(b.cast(stays, to=t), b.cast(wins, to=t), "add"))
    out = {0: b.where(stays, share, zero)} if 0 in needed else {}
    return {**out, 2: b.where(wins, places.take(share), zero)} if 2 in needed else out


# --- triangles, reversed sequences ------------------------------------------------------------------------------------


def trilu(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    return {0: b.trilu(cotangents[0], **n.attrs)}


def reverse_sequence(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """Reversing twice changes nothing."""
    return {0: b.reverse_sequence(cotangents[0], n.inputs[1], **n.attrs)}
