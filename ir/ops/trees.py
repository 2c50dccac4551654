"""Decision trees and sorted tables as arrays: many trees at once descend by gathers, all rows in step.

A forest is in normal form: every inner node asks `x[feature] <= split`, goes to `first` if so and to `second` if not;
NaN goes to `first` where the node says so. A leaf has itself as both children, so descending further stays there: the
number of steps is the largest depth. A node's row of `links` is [feature, first, second, NaN goes first].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.dtype import i64
from dnnc.ir.expr import Expr, cast, const, maximum, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import LOOPS, PURE, OpDef, require
from dnnc.ir.ops.common import Array, clamp, dim, require_kind, same_dim, same_dtype, sample
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

MAX_STEPS = 3  # levels within one expression, whose text grows fivefold with each
COMBINE = ("sum", "min", "max")


# --- descending -------------------------------------------------------------------------------------------------------


def _descend_type(
    x: TensorType, at: TensorType, links: TensorType, splits: TensorType, *, steps: int = 1
) -> TensorType:
    same_dtype(x, splits)
    require_kind("what trees compare", x, "f")
    require_kind("nodes and links", at, "i")
    ok = x.rank == 2 and at.rank == 2
    require(ok, "rows [n, features] and nodes [n or 1, trees] are needed; got {} and {}", x, at)
    require(same_dim(at.shape[0], 1) or same_dim(at.shape[0], x.shape[0]), "{} has other rows than {}", at, x)
    ok = splits.rank == 1 and links.rank == 2 and links.shape[1] == 4 and same_dim(links.shape[0], splits.shape[0])
    require(ok, "links [m, 4] and splits [m]; got {}", links)
    require(1 <= steps <= MAX_STEPS, "1 to {} steps; got {}", MAX_STEPS, steps)
    return TensorType(i64, (x.shape[0], at.shape[1]))


def _descend(x: Tensor, at: Tensor, links: Tensor, splits: Tensor, *, steps: int) -> Tensor:
    nodes, features = splits.dims[0], x.dims[1]

    def element(n: Expr, t: Expr) -> Expr:
        node = cast(at[0 if same_dim(at.dims[0], 1) else n, t], i64)
        for _ in range(steps):
            node = clamp(node, nodes)
            seen = x[n, clamp(cast(links[node, 0], i64), features)]
            first = (seen <= splits[node]) | (call("isnan", seen) & links[node, 3].ne(0))
            node = cast(select(first, links[node, 1], links[node, 2]), i64)
        return node

    return te.compute((x.dims[0], at.dims[1]), i64, element)


def _descend_numpy(x: Array, at: Array, links: Array, splits: Array, *, steps: int = 1) -> Array:
    node = np.broadcast_to(at, (len(x), at.shape[1])).astype(np.int64)
    rows = np.arange(len(x))[:, None]
    for _ in range(steps):
        seen = x[rows, links[node, 0]]
        first = (seen <= splits[node]) | (np.isnan(seen) & (links[node, 3] != 0))
        node = np.where(first, links[node, 1], links[node, 2]).astype(np.int64)
    return node


def _descend_flops(x: TensorType, at: TensorType, *_: Any, steps: int = 1) -> Dim:
    return dim(const(product((x.shape[0], at.shape[1]))) * (4 * steps))


# --- votes ------------------------------------------------------------------------------------------------------------


def _vote_type(
    leaf: TensorType, weights: TensorType, classes: TensorType, *, count: int, combine: str = "sum"
) -> TensorType:
    require_kind("leaves", leaf, "i")
    require_kind("weights", weights, "f")
    require_kind("classes", classes, "i")
    ok = leaf.rank == 2 and weights.rank == 2 and weights.shape == classes.shape
    require(ok, "votes [nodes, most]; got {} and {}", weights, classes)
    require(combine in COMBINE, "combine is one of {}; got {}", ", ".join(COMBINE), combine)
    return TensorType(weights.dtype, (leaf.shape[0], count))


def _vote(leaf: Tensor, weights: Tensor, classes: Tensor, *, count: int, combine: str) -> Tensor:
    """Of votes with class -1 there is none; where nobody votes for a class the result is 0."""
    nodes, most = weights.dims
    shape, extents, dtype = (leaf.dims[0], count), (leaf.dims[1], most), weights.dtype

    def hit(n: Expr, k: Expr, t: Expr, v: Expr) -> Expr:
        return cast(classes[clamp(cast(leaf[n, t], i64), nodes), v], i64).eq(k)

    def value(n: Expr, k: Expr, t: Expr, v: Expr) -> Expr:
        return weights[clamp(cast(leaf[n, t], i64), nodes), v]

    found = te.reduce(shape, extents, dtype, combine, value, hit, "votes")
    if combine == "sum":
        return found
    voted = te.reduce(shape, extents, i64, "max", lambda *_: const(1, i64), hit, "voted")
    return te.compute(shape, dtype, lambda n, k: select(voted[n, k].eq(1), found[n, k], const(0.0, dtype.computed)))


_JOIN: dict[str, Any] = {"sum": np.sum, "min": np.min, "max": np.max}


def _vote_numpy(leaf: Array, weights: Array, classes: Array, *, count: int, combine: str = "sum") -> Array:
    out = np.zeros((len(leaf), count), weights.dtype)
    for n, k in np.ndindex(out.shape):
        chosen = weights[leaf[n]][classes[leaf[n]] == k]
        out[n, k] = _JOIN[combine](chosen) if chosen.size else 0
    return out


def _vote_flops(leaf: TensorType, weights: TensorType, *_: Any, count: int, **__: Any) -> Dim:
    return dim(const(product((*leaf.shape, weights.shape[1]))) * count)


# --- sorted tables ----------------------------------------------------------------------------------------------------


def _lookup_type(x: TensorType, keys: TensorType) -> TensorType:
    same_dtype(x, keys)
    require_kind("what is looked up", x, "fiu")
    ok = keys.rank == 1 and isinstance(keys.shape[0], int) and keys.shape[0] > 0
    require(ok, "keys must be [k] with k > 0; got {}", keys)
    return TensorType(i64, x.shape)


def _blocks(count: int) -> tuple[int, int]:
    """About as many blocks of keys as a block has keys."""
    size = max(math.isqrt(count), 1)
    return -(-count // size), size


def _lookup(x: Tensor, keys: Tensor) -> Tensor:
    """The block by the first keys of all blocks, then the key within it."""
    n = int(keys.dims[0])  # type: ignore[arg-type]
    blocks, size = _blocks(n)
    rank = len(x.dims)
    first = te.reduce(
        x.dims, (blocks,), i64, "sum", lambda *v: const(1, i64), lambda *v: keys[v[-1] * size] <= x[v[:rank]], "blocks"
    )

    def place(v: tuple[Expr, ...]) -> Expr:
        return clamp((first[v[:rank]] - 1) * size + v[-1], n)

    found = te.reduce(
        x.dims, (size,), i64, "max", lambda *v: place(v), lambda *v: keys[place(v)].eq(x[v[:rank]]), "found"
    )
    return te.compute(x.dims, i64, lambda *i: maximum(found[i], -1))


def _lookup_flops(x: TensorType, keys: TensorType) -> Dim:
    return dim(const(x.size) * (2 * sum(_blocks(int(keys.shape[0])))))  # type: ignore[arg-type]


def _lookup_numpy(x: Array, keys: Array) -> Array:
    at = np.minimum(np.searchsorted(keys, x), len(keys) - 1)
    return np.where(keys[at] == x, at, -1).astype(np.int64)


TREE_OPS: tuple[OpDef, ...] = (
    # the nodes that `steps` levels further down are reached from the nodes `at`
    OpDef(
        "tree_descend",
        _descend_type,
        _descend,
        reference=_descend_numpy,
        flops=_descend_flops,
        traits=PURE,
        samples=(
            sample("f32[5, 4]", "i64[5, 3]", "i32[4, 4]", "f32[4]", steps=3, domain=(0, 3)),
            sample("f64[3, 7]", "i64[1, 2]", "i32[6, 4]", "f64[6]", steps=1, domain=(0, 5)),
        ),
    ),
    # for each row and class, the weights that the row's leaves hold for that class, combined
    OpDef(
        "tree_vote",
        _vote_type,
        _vote,
        reference=_vote_numpy,
        flops=_vote_flops,
        traits=LOOPS,
        samples=tuple(
            sample("i64[5, 3]", "f32[4, 2]", "i32[4, 2]", count=3, combine=c, domain=(0, 3)) for c in COMBINE
        ),
    ),
    # the place of each element among ascending keys, -1 where it is none of them
    OpDef(
        "lookup",
        _lookup_type,
        _lookup,
        reference=_lookup_numpy,
        flops=_lookup_flops,
        traits=LOOPS,
        samples=(sample("i64[9]", "i64[1]", domain=(0, 1)), sample("f32[2, 3]", "f32[1]", domain=(0, 1))),
    ),
)
