"""Batch norm in training mode: images normalized by the statistics of their batch, and these statistics."""

from __future__ import annotations

from typing import Any

from dnnc.ir.autodiff.rules import batch_norm as rules
from dnnc.ir.op import REDUCTION, OpDef, require
from dnnc.ir.ops.common import channel_dims, rows_flops, same_dim, sample
from dnnc.ir.types import TensorType


def _type(
    x: TensorType, scale: TensorType, bias: TensorType, *, epsilon: float = 1e-5
) -> tuple[TensorType, TensorType, TensorType]:
    """The result, and mean and biased variance of each channel."""
    require(x.rank >= 2 and x.dtype.is_float, "batch norm needs [N, C, ...] of floats; got {}", x)
    for p in (scale, bias):
        ok = p.rank == 1 and p.dtype.is_float and same_dim(p.shape[0], x.shape[1])
        require(ok, "a parameter must be [{}]; got {}", x.shape[1], p)
    numbers = TensorType(x.dtype.computed, (x.shape[1],))
    return x, numbers, numbers


def _batch_norm(b: Any, x: Any, scale: Any, bias: Any, *, epsilon: float) -> Any:
    wide = x.type.dtype.computed
    v = x if x.type.dtype is wide else b.cast(x, to=wide)
    axes = tuple(k for k in range(x.type.rank) if k != 1)
    beside = b.reduce_mean(v, axes=axes, keepdims=True)
    off = b.sub(v, beside)
    mean, var = b.reshape(beside, shape=(x.type.shape[1],)), b.reduce_mean(b.mul(off, off), axes=axes)
    return b.batch_norm(x, scale, bias, mean, var, epsilon=epsilon), mean, var


_SAMPLES = (("f32[2, 3, 5, 4]", 3), ("f32[6, 4]", 4), ("f16[3, 2, 7]", 2), ("f64[2, 2, 3, 2, 4]", 2))

BATCH_NORM_OPS: tuple[OpDef, ...] = (
    OpDef(
        "batch_norm_training",
        _type,
        decompose=_batch_norm,
        flops=rows_flops(8),
        traits=REDUCTION,
        equal_dims=channel_dims,
        vjp=rules.batch_norm_training,
        samples=tuple(sample(x, f"{x[:3]}[{c}]", f"{x[:3]}[{c}]", epsilon=1e-3) for x, c in _SAMPLES),
    ),
)
