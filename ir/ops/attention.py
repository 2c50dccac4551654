"""`attention`: softmax of a product, times a matrix, as one op, so that a kernel can keep the scores.

Vaswani et al., "Attention Is All You Need", section 3.2.1; by tiles as in Dao, "FlashAttention-2", where a target can.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.autodiff.rules import matmul as rules
from dnnc.ir.expr import Expr, cast, const, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import CONTRACTION, ContractionForm, OpDef, require
from dnnc.ir.ops.common import CHUNK, Array, dim, require_kind, same_dim, same_dtype, sample
from dnnc.ir.shapes import broadcast_shapes
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product


def _type(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    mask: TensorType | None = None,
    *,
    scale: float = 1.0,
    masked_rows: str = "nan",
) -> TensorType:
    same_dtype(q, k, v)
    require(masked_rows in ("nan", "zero"), "masked_rows is nan or zero; got {}", masked_rows)
    require_kind("attention's operands", q, "f")
    ok = q.rank == k.rank == v.rank >= 2
    require(ok, "attention takes operands of one rank, at least 2; got {}, {} and {}", q, k, v)
    ok = all(same_dim(a, b) and same_dim(a, c) for a, b, c in zip(q.shape[:-2], k.shape[:-2], v.shape[:-2]))
    require(ok, "batches differ: {}, {}, {}", q, k, v)
    require(same_dim(q.shape[-1], k.shape[-1]), "queries have {} elements, keys {}", q.shape[-1], k.shape[-1])
    require(same_dim(k.shape[-2], v.shape[-2]), "there are {} keys and {} values", k.shape[-2], v.shape[-2])
    scores = (*q.shape[:-1], k.shape[-2])
    if mask is not None:
        require_kind("the mask", mask, "f")
        ok = broadcast_shapes(scores, mask.shape) == scores
        require(ok, "mask {} does not broadcast to the scores {}", mask, list(scores))
    return TensorType(q.dtype, (*q.shape[:-1], v.shape[-1]))


def _compute(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float, masked_rows: str) -> Tensor:
    *batch, m, d = q.dims
    n, e, wide, b = k.dims[-2], v.dims[-1], q.dtype.computed, len(q.dims) - 2

    def score(*at: Expr) -> Expr:
        x = dots[at] * const(scale, wide)
        return x if mask is None else x + cast(mask[broadcast(mask, at)], wide)

    dots = te.reduce(
        (*batch, m, n), [d], wide, "sum", lambda *i: q[(*i[: b + 1], i[-1])] * k[(*i[:b], i[b + 1], i[-1])], name="dots"
    )
    scores = te.compute((*batch, m, n), wide, score, "scores")
    top = te.reduce((*batch, m), [n], wide, "fmax", lambda *i: scores[i], name="row_max")
    weights = te.compute((*batch, m, n), wide, lambda *i: call("exp", scores[i] - top[i[:-1]]), "weights")
    total = te.reduce((*batch, m), [n], wide, "sum", lambda *i: weights[i], name="row_sum")
    mixed = te.reduce(
        (*batch, m, e),
        [n],
        wide,
        "sum",
        lambda *i: weights[(*i[: b + 1], i[-1])] * v[(*i[:b], i[-1], i[b + 1])],
        name="mixed",
    )

    def mean(*i: Expr) -> Expr:
        x = mixed[i] / total[i[:-1]]
        return x if masked_rows == "nan" else select(call("isnan", total[i[:-1]]), const(0.0, wide), x)

    return te.compute((*batch, m, e), q.dtype, mean)


def broadcast(t: Tensor, at: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The index of an operand that broadcasts to something of index `at`."""
    return tuple(const(0) if d is const(1) or d == 1 else i for d, i in zip(t.dims, at[len(at) - len(t.dims) :]))


def _reference(
    q: Array, k: Array, v: Array, mask: Array | None = None, *, scale: float = 1.0, masked_rows: str = "nan"
) -> Array:
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) * np.asarray(scale, q.dtype)
    weights = _softmax(scores if mask is None else (scores + mask).astype(q.dtype))
    return _masked(np.matmul(weights, v), weights, masked_rows)


def _softmax(x: Array) -> Array:
    with np.errstate(invalid="ignore"):
        e = np.exp(x - np.max(x, -1, keepdims=True, initial=-np.inf))
        return e / np.sum(e, -1, keepdims=True)


def _masked(y: Array, weights: Array, masked_rows: str) -> Array:
    """Rows without keys are no numbers, or zero whatever the values are."""
    return y if masked_rows == "nan" else np.where(np.isnan(weights).any(-1, keepdims=True), np.zeros((), y.dtype), y)


def _reference_at(inputs: list[Array], points: Array, *, scale: float = 1.0, masked_rows: str = "nan") -> Array:
    """Whole rows for the points asked for, some at a time."""
    q, k, v, *rest = inputs
    rows, row = np.unique(points[:, :-1], axis=0, return_inverse=True)
    row, batch = row.reshape(-1), rows[:, :-1]
    mask = np.broadcast_to(rest[0], (*q.shape[:-1], k.shape[-2])) if rest and rest[0] is not None else None
    out = np.zeros(len(points), np.float64)
    step = max(1, CHUNK // max(k.shape[-2] * (k.shape[-1] + v.shape[-1]), 1))
    for s in range(0, len(rows), step):
        at, some = tuple(batch[s : s + step].T), tuple(rows[s : s + step].T)
        keys, values = (np.broadcast_to(x[at], (len(some[0]), *x.shape[-2:])).astype(np.float64) for x in (k, v))
        scores = np.einsum("rd,rnd->rn", q[some].astype(np.float64), keys) * scale
        weights = _softmax(scores if mask is None else scores + mask[some])
        found = _masked(np.einsum("rn,rne->re", weights, values), weights, masked_rows)
        mine = (row >= s) & (row < s + step)
        out[mine] = found[row[mine] - s, points[mine, -1]]
    return out


def _flops(q: TensorType, k: TensorType, v: TensorType, *_: Any, **__: Any) -> Dim:
    return dim(const(product(q.shape[:-1])) * k.shape[-2] * (const(q.shape[-1]) + v.shape[-1]) * 2)


ATTENTION_OPS: tuple[OpDef, ...] = (
    OpDef(
        "attention",
        _type,
        _compute,
        reference=_reference,
        reference_at=_reference_at,
        flops=_flops,
        traits=CONTRACTION,
        contraction=ContractionForm.ATTENTION,
        wide_operands=(3,),  # a mask is added to scores in registers, and says "never" by numbers that no half can hold
        samples=(
            sample("f32[2, 5, 8]", "f32[2, 7, 8]", "f32[2, 7, 4]", scale=0.35),
            sample("f32[1, 2, 9, 16]", "f32[1, 2, 20, 16]", "f32[1, 2, 20, 16]", "f32[1, 1, 1, 20]", scale=0.25),
            sample("f32[4, 8]", "f32[6, 8]", "f32[6, 3]", "f32[4, 1]", scale=0.5, masked_rows="zero"),
            sample("f16[3, 16]", "f16[10, 16]", "f16[10, 16]", "f32[3, 10]", scale=0.25),
        ),
        vjp=rules.attention,
    ),
)
