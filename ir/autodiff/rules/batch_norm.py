"""The rule of batch norm in training mode: two sums for each channel, then one pass over the elements.

s = (x - mean) * inverse            standardised
cot bias = sum(g)                   cot scale = sum(g * s)
cot x = (g - mean(g) - s * mean(g * s)) * scale * inverse
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dnnc.ir.autodiff.rules.common import count, narrow, wide
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node


def batch_norm_training(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Mapping[int, Any]:
    (x, scale, bias), (_, mean, var) = n.inputs, n.outputs
    assert x is not None and scale is not None and bias is not None
    (g, *given), rank = cotangents, x.type.rank
    out: dict[int, Any] = {}
    v = wide(b, x)
    inverse = b.reciprocal(b.sqrt(b.add(var, n.attrs["epsilon"])))

    def beside(p: Any) -> Any:
        return b.reshape(p, shape=(*p.type.shape, *(1,) * (rank - 2)))

    def total(p: Any) -> Any:
        """Of each channel: over every image, then over these, so that no sum is long."""
        axes = tuple(range(2, rank))
        return b.reduce_sum(b.reduce_sum(p, axes=axes) if axes else p, axes=(0,))

    # s without x - mean, a value that would be kept for it, since the forward has it too
    s = b.sub(b.mul(v, beside(inverse)), beside(b.mul(mean, inverse)))
    size = count(b, x, (0, *range(2, rank)), v.type.dtype)
    parts = []
    if g is not None:
        g = wide(b, g)
        shift, slope = total(g), total(b.mul(g, s))
        out |= {1: narrow(b, slope, scale.type.dtype), 2: narrow(b, shift, bias.type.dtype)}
        if 0 in needed:
            factor = b.mul(wide(b, scale), inverse)
            tilt = b.mul(factor, b.mul(inverse, b.div(slope, size)))
            lift = b.sub(b.mul(mean, tilt), b.mul(factor, b.div(shift, size)))
            parts.append(b.sub(b.add(b.mul(g, beside(factor)), beside(lift)), b.mul(v, beside(tilt))))
    if 0 in needed:
        parts += _of_statistics(b, v, mean, size, given, beside)
        if parts:
            made = parts[0]
            for p in parts[1:]:
                made = b.add(made, p)
            out[0] = narrow(b, made, x.type.dtype)
    return {k: c for k, c in out.items() if k in needed}


def _of_statistics(b: Builder, v: Any, mean: Any, size: Any, given: Sequence[Any], beside: Any) -> list[Any]:
    """What cotangents of mean and variance send to the elements."""
    of_mean, of_variance = given
    parts = []
    if of_mean is not None:
        parts.append(b.expand(beside(b.div(of_mean, size)), shape=v.type.shape))
    if of_variance is not None:
        each = b.div(b.mul(of_variance, 2.0), size)
        parts.append(b.mul(b.sub(v, beside(mean)), beside(each)))
    return parts
