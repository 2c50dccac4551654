"""Converters of normalizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.onnx.call import Call
from dnnc.ir.dtype import f32
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.graph import Value
from dnnc.ir.shapes import normalize_axis

Converter = Callable[[Call], Any]


def batch_normalization(c: Call) -> Any:
    x, scale, bias, mean, var = (c.x(i) for i in range(5))
    epsilon = c.number("epsilon", 1e-5)
    if c.opset < 9 and not c.flag("spatial", True):
        raise UnsupportedError("attribute spatial=0: statistics per element instead of per channel")
    if c.training is not None or c.opset < 14 or not c.flag("training_mode"):
        y = c.b.batch_norm(x, scale, bias, mean, var, epsilon=epsilon)
        return (y, mean, var) if c.wants(1) or c.wants(2) else y
    y, *statistics = c.b.batch_norm_training(x, scale, bias, epsilon=epsilon)
    now, spread = (c.cast(v, mean.type.dtype) for v in statistics)
    momentum = c.number("momentum", 0.9)
    running = [
        c.b.add(c.b.mul(old, momentum), c.b.mul(new, 1.0 - momentum)) for old, new in ((mean, now), (var, spread))
    ]
    return (y, *running)


def layer_normalization(c: Call) -> Any:
    """Over the axes from `axis` on; the second and third outputs are the mean and 1/deviation of each row."""
    x = c.x()
    axis, epsilon = normalize_axis(c.integer("axis", -1), x.type.rank), c.number("epsilon", 1e-5)
    y = c.b.layer_norm(x, c.x(1), c.opt(2), axis=axis, epsilon=epsilon)
    if not (c.wants(1) or c.wants(2)):
        return y
    axes = tuple(range(axis, x.type.rank))
    wide = c.cast(x, f32 if x.type.dtype.bits < 32 else x.type.dtype)
    mean = c.b.reduce_mean(wide, axes=axes, keepdims=True)
    off = c.b.sub(wide, mean)
    var = c.b.reduce_mean(c.b.mul(off, off), axes=axes, keepdims=True)
    inverse = c.b.reciprocal(c.b.sqrt(c.b.add(var, epsilon)))
    stash = c.dtype("stash_type", f32)
    return y, c.cast(mean, stash), c.cast(inverse, stash)


def rms_normalization(c: Call) -> Any:
    return c.b.rms_norm(c.x(0), c.x(1), axis=c.integer("axis", -1), epsilon=c.number("epsilon", 1e-5))


def instance_normalization(c: Call) -> Any:
    return c.b.instance_norm(c.x(0), c.x(1), c.x(2), epsilon=c.number("epsilon", 1e-5))


def group_normalization(c: Call) -> Any:
    """Scale and bias are per group before opset 21, per channel since."""
    x, scale, bias = c.x(0), c.x(1), c.x(2)
    groups, channels = c.integer("num_groups"), x.type.shape[1]
    if c.opset < 21 and isinstance(channels, int) and groups > 0 and channels % groups == 0:
        scale, bias = (_per_channel(c, v, groups, channels) for v in (scale, bias))
    return c.b.group_norm(x, scale, bias, groups=groups, epsilon=c.number("epsilon", 1e-5))


def _per_channel(c: Call, v: Value, groups: int, channels: int) -> Any:
    wide = c.b.expand(c.b.reshape(v, shape=(groups, 1)), shape=(groups, channels // groups))
    return c.b.reshape(wide, shape=(channels,))


def lp_normalization(c: Call) -> Any:
    return c.b.lp_norm(c.x(), axis=c.integer("axis", -1), p=c.integer("p", 2))


def lrn(c: Call) -> Any:
    alpha, beta, bias = c.number("alpha", 1e-4), c.number("beta", 0.75), c.number("bias", 1.0)
    return c.b.lrn(c.x(), size=c.integer("size"), alpha=alpha, beta=beta, bias=bias)


NORM: dict[str, Converter] = {
    "BatchNormalization": batch_normalization,
    "LayerNormalization": layer_normalization,
    "RMSNormalization": rms_normalization,
    "InstanceNormalization": instance_normalization,
    "GroupNormalization": group_normalization,
    "LpNormalization": lp_normalization,
    "LRN": lrn,
}
