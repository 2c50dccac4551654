"""Non-maximum suppression: by falling score, boxes that overlap none taken before, per batch and class.

Scores are sorted and cut to the most that any row has above the threshold, which is a size that only the data tells, or
are left as they are where `candidates` is their number: that is for few, since cutting ends a program's segment. Then
`suppress` goes along the rows, the only thing in it that is sequential: a box depends on all taken before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.dtype import f32, i32, i64
from dnnc.ir.expr import Expr, cast, const, maximum, minimum, select
from dnnc.ir.expr import dim as symbol
from dnnc.ir.op import PURE, OpDef, Trait, require
from dnnc.ir.ops.common import Array, both, dim, rows_flops, same_dim, sample
from dnnc.ir.ops.dynamic import kept, without_elements
from dnnc.ir.ops.host import HOST
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType

# --- suppress ---------------------------------------------------------------------------------------------------------


def _suppress_type(boxes: TensorType, counts: TensorType, most: TensorType, threshold: TensorType) -> TensorType:
    ok = boxes.dtype is f32 and boxes.rank == 3 and boxes.shape[0] == 4
    require(ok, "boxes are f32[4, rows, boxes]; got {}", boxes)
    fits = counts.dtype is i64 and counts.rank == 1 and same_dim(counts.shape[0], boxes.shape[1])
    require(fits, "counts are an i64 for each row of {}; got {}", boxes, counts)
    require(most.dtype is i64 and most.shape == (), "the most boxes of a row are an i64; got {}", most)
    require(threshold.dtype is f32 and threshold.shape == (), "the threshold is an f32; got {}", threshold)
    return TensorType(i32, boxes.shape[1:])


def _overlap(a: list[Expr], b: list[Expr], threshold: Expr) -> Expr:
    """True if two boxes (low and high corners) overlap by more than this part of their union; never if empty."""
    zero = const(0.0, f32)
    sides = [maximum(minimum(a[k + 2], b[k + 2]) - maximum(a[k], b[k]), zero) for k in (0, 1)]
    inside = sides[0] * sides[1]
    first, second = ((c[2] - c[0]) * (c[3] - c[1]) for c in (a, b))
    union = first + second - inside
    return both(zero < first, zero < second, zero < union, zero < inside, threshold < inside / union)


def _suppress(boxes: Tensor, counts: Tensor, most: Tensor, threshold: Tensor) -> Tensor:
    _, rows, n = boxes.dims
    if 0 in (rows, n):
        return without_elements((rows, n), i32)

    def element(own: Tensor, r: Expr, i: Expr) -> Expr:
        def so_far(row: Expr, at: Expr) -> Expr:
            last = own[row, maximum(at - 1, const(0))]
            return select(at < 1, const(0, i32), maximum(last, const(0, i32) - last))

        def wanted(row: Expr, at: Expr) -> Expr:
            return both(at < counts[row], cast(so_far(row, at), i64) < most[()])

        def hidden(row: Expr, at: Expr, j: Expr) -> Expr:
            box, other = ([boxes[c, row, x] for c in range(4)] for x in (at, j))
            return select(
                both(const(0, i32) < own[row, j], _overlap(box, other, threshold[()])), const(1, i32), const(0, i32)
            )

        def before(row: Expr, at: Expr, j: Expr) -> Expr:
            return both(wanted(row, at), j < at)

        found = te.reduce((rows, n), [n], i32, "max", hidden, before, "hidden")
        count = so_far(r, i)
        return select(both(wanted(r, i), found[r, i] < const(1, i32)), count + const(1, i32), const(0, i32) - count)

    return te.recur((rows, n), i32, element)


def _suppress_numpy(boxes: Array, counts: Array, most: Array, threshold: Array) -> Array:
    _, rows, n = boxes.shape
    low, high = boxes[:2], boxes[2:]
    area = np.prod(high - low, 0)
    out, count = np.zeros((rows, n), np.int32), np.zeros(rows, np.int32)
    for i in range(n):
        inside = np.prod(
            np.maximum(
                np.minimum(high[..., :i], high[..., i : i + 1]) - np.maximum(low[..., :i], low[..., i : i + 1]), 0
            ),
            0,
        )
        union = area[:, :i] + area[:, i : i + 1] - inside
        real = (area[:, :i] > 0) & (area[:, i : i + 1] > 0) & (union > 0) & (inside > 0)
        with np.errstate(all="ignore"):
            hidden = (real & (inside / union > threshold) & (out[:, :i] > 0)).any(1)
        taken = (i < counts) & (count < most) & ~hidden
        count = count + taken
        out[:, i] = np.where(taken, count, -count)
    return out


# --- the whole --------------------------------------------------------------------------------------------------------


def _nms_type(
    boxes: TensorType,
    scores: TensorType,
    most: TensorType,
    overlap: TensorType,
    score: TensorType | None,
    *,
    size: Dim,
    candidates: Dim,
    center: bool = False,
) -> TensorType:
    fits = boxes.rank == 3 and boxes.shape[2] == 4 and scores.rank == 3
    ok = fits and boxes.dtype is f32 and scores.dtype is f32
    require(ok, "boxes are f32[batches, boxes, 4], scores f32[batches, classes, boxes]; got {} and {}", boxes, scores)
    equal = same_dim(boxes.shape[0], scores.shape[0]) and same_dim(boxes.shape[1], scores.shape[2])
    require(equal, "boxes {} and scores {} differ in batches or boxes", boxes, scores)
    require(most.dtype is i64 and most.shape == (), "the most boxes of a class are an i64; got {}", most)
    ok = all(t is None or (t.dtype is f32 and t.shape == ()) for t in (overlap, score))
    require(ok, "thresholds are f32; got {} and {}", overlap, score)
    return TensorType(i64, (size, 3))


def _nms(
    b: Any, boxes: Any, scores: Any, most: Any, overlap: Any, score: Any, *, size: Dim, candidates: Dim, center: bool
) -> Any:
    batches, classes, n = scores.type.shape
    rows = dim(const(batches) * classes)
    values = b.reshape(scores, shape=(rows, n))
    if score is not None:  # what is not above the threshold comes last, NaN too
        above = b.greater(values, score)
        values = b.where(above, values, b.constant(np.float32(-np.inf)))
        counts = b.reduce_sum(b.cast(above, to=i64), axes=(1,), keepdims=False)
    else:
        counts = b.full(shape=(rows,), value=n, dtype=i64)
    order = b.sort(values, axis=1, descending=True)[1]
    k = n
    if score is not None and not same_dim(candidates, n):
        order, k = (
            b.truncate(order, b.reduce_max(counts, axes=(0,), keepdims=False), size=candidates, axis=1),
            candidates,
        )
    first = b.row_starts(rows=rows, classes=classes, n=n)
    flat = b.add(order, b.reshape(first, shape=(rows, 1)))
    corners = b.gather(_corners(b, boxes, center), b.reshape(flat, shape=(dim(const(rows) * k),)), axis=1)
    taken = b.suppress(b.reshape(corners, shape=(4, rows, k)), counts, most, overlap)
    at, count = kept(b, b.reshape(b.greater(taken, 0), shape=(dim(const(rows) * k),)))
    row = b.unravel(at, shape=(rows, k))
    where = b.gather(b.reshape(order, shape=(dim(const(rows) * k),)), at, axis=0)
    return b.truncate(b.triples(row, where, classes=classes), count, size=size)


def _starts_type(*, rows: Dim, classes: Dim, n: Dim) -> TensorType:
    return TensorType(i64, (rows,))


def _starts(*, rows: Dim, classes: Dim, n: Dim) -> Tensor:
    if rows == 0:
        return without_elements((0,), i64)
    return te.compute((rows,), i64, lambda r: r // const(classes) * const(n))


def _starts_numpy(*, rows: int, classes: int, n: int) -> Array:
    return np.arange(rows) // max(classes, 1) * n


def _triples_type(row: TensorType, box: TensorType, *, classes: Dim) -> TensorType:
    require(row.rank == 2 and box.rank == 1, "triples are made of rows [2, n] and boxes [n]; got {} and {}", row, box)
    return TensorType(i64, (box.shape[0], 3))


def _triples(row: Tensor, box: Tensor, *, classes: Dim) -> Tensor:
    if classes == 0:
        return without_elements((box.dims[0], 3), i64)

    def element(k: Expr, c: Expr) -> Expr:
        r = maximum(row[0, k], const(0))
        return select(c.eq(0), r // const(classes), select(c.eq(1), r % const(classes), box[k]))

    return te.compute((box.dims[0], 3), i64, element)


def _triples_numpy(row: Array, box: Array, *, classes: int) -> Array:
    r = np.maximum(row[0], 0)
    return np.stack([r // max(classes, 1), r % max(classes, 1), box], 1)


def _corners(b: Any, boxes: Any, center: bool) -> Any:
    """The low and high corners of boxes as f32[4, batches * boxes]."""
    batches, n, _ = boxes.type.shape
    flat = b.transpose(b.reshape(boxes, shape=(dim(const(batches) * n), 4)), perm=(1, 0))
    m = flat.type.shape[1]
    first, second = (b.slice(flat, starts=(s, 0), steps=(1, 1), shape=(2, m)) for s in (0, 2))
    if not center:
        return b.concat(b.min(first, second), b.max(first, second), axis=0)
    half = b.mul(second, 0.5)
    return b.concat(b.sub(first, half), b.add(first, half), axis=0)


_N = symbol("n", 0, 24)
_K = symbol("k", 0, 12)

SUPPRESS_OPS: tuple[OpDef, ...] = (
    # of the first counts[row] boxes of each row (low and high corners) those that overlap none taken before it, until
    # there are `most`; the result is how many are taken so far, negative (or 0) where a box is not
    OpDef(
        "suppress",
        _suppress_type,
        _suppress,
        reference=_suppress_numpy,
        flops=lambda boxes, *_: dim(
            const(boxes.size) * 8
        ),  # a few comparisons per box: how many there are is up to the data
        traits=PURE | {Trait.LOOPS, Trait.SEQUENTIAL},
        samples=(
            sample("f32[4, 3, 12]", "i64[3]", "i64[]", "f32[]", domain=(0.0, 12.0)),
            sample("f32[4, 1, 40]", "i64[1]", "i64[]", "f32[]", domain=(0.1, 30.0)),
            sample("f32[4, 2, 5]", "i64[2]", "i64[]", "f32[]", domain=(-1.0, 5.0)),
        ),
    ),
    # of each row of scores, the number of its batch times n
    OpDef(
        "row_starts",
        _starts_type,
        _starts,
        reference=_starts_numpy,
        traits=PURE,
        samples=(sample(rows=6, classes=3, n=10), sample(rows=2, classes=1, n=5)),
    ),
    # [batch, class, box] from the row in the scores and the number of the box
    OpDef(
        "triples",
        _triples_type,
        _triples,
        reference=_triples_numpy,
        flops=rows_flops(2),
        traits=PURE,
        samples=(
            sample("i64[2, 7]", "i64[7]", classes=3, domain=(0, 8)),
            sample("i64[2, 3]", "i64[3]", classes=1, domain=(0, 4)),
        ),
    ),
    OpDef(
        "non_max_suppression",
        _nms_type,
        decompose=_nms,
        flops=lambda boxes, scores, *_, **__: scores.size,
        traits=PURE | HOST,
        samples=(
            sample(
                "f32[1, 12, 4]", "f32[1, 2, 12]", "i64[]", "f32[]", "f32[]", size=_N, candidates=_K, domain=(0.3, 3.0)
            ),
            sample(
                "f32[2, 6, 4]",
                "f32[2, 2, 6]",
                "i64[]",
                "f32[]",
                "f32[]",
                size=_N,
                candidates=symbol("k", 0, 6),
                center=True,
                domain=(0.1, 4.0),
            ),
            sample(
                "f32[1, 7, 4]",
                "f32[1, 2, 7]",
                "i64[]",
                "f32[]",
                "f32[]",
                size=symbol("n", 0, 14),
                candidates=7,
                domain=(0.1, 1.0),
            ),
        ),
    ),
)
