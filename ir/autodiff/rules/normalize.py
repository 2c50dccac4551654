"""Rules of softmax and of norms, in graph ops whose rows fuse. Half types are widened: rows are summed in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dnnc.ir.autodiff.rules.common import count, narrow, unbroadcast, wide
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node
from dnnc.ir.shapes import normalize_axes, normalize_axis

Cotangents = Mapping[int, Any]
Axes = tuple[int, ...]


def softmax(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """y * (g - sum(y * g)); of rounded_softmax as if nothing were rounded."""
    y, g = wide(b, n.output), wide(b, cotangents[0])
    axis = n.attrs.get("axis", -1)
    c = b.mul(y, b.sub(g, b.reduce_sum(b.mul(y, g), axes=(axis,), keepdims=True)))
    return {0: narrow(b, c, n.output.type.dtype)}


def log_softmax(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """g - exp(y) * sum(g)"""
    y, g = wide(b, n.output), wide(b, cotangents[0])
    c = b.sub(g, b.mul(b.exp(y), b.reduce_sum(g, axes=(n.attrs["axis"],), keepdims=True)))
    return {0: narrow(b, c, n.output.type.dtype)}


def layer_norm(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    x = n.inputs[0]
    assert x is not None
    axes = tuple(range(normalize_axis(n.attrs["axis"], x.type.rank), x.type.rank))
    standard, inverse = _standardized(b, x, axes, n.attrs["epsilon"], centered=True)
    return _scaled(b, n, cotangents[0], needed, standard, inverse, axes, centered=True)


def rms_norm(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    x = n.inputs[0]
    assert x is not None
    axes = tuple(range(normalize_axis(n.attrs["axis"], x.type.rank), x.type.rank))
    standard, inverse = _standardized(b, x, axes, n.attrs["epsilon"], centered=False)
    return _scaled(b, n, cotangents[0], needed, standard, inverse, axes, centered=False)


def mean_variance_norm(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    x = n.inputs[0]
    assert x is not None
    given = n.attrs["axes"]
    axes = tuple(range(x.type.rank)) if given is None else tuple(sorted(normalize_axes(given, x.type.rank)))
    standard, inverse = _standardized(b, x, axes, n.attrs["epsilon"], centered=True)
    c = _of_rows(b, wide(b, cotangents[0]), standard, inverse, axes, centered=True)
    return {0: narrow(b, c, x.type.dtype)}


def _standardized(b: Builder, x: Any, axes: Axes, epsilon: float, centered: bool) -> tuple[Any, Any]:
    """Rows divided by their deviation, and its inverse."""
    v = wide(b, x)
    d = b.sub(v, b.reduce_mean(v, axes=axes, keepdims=True)) if centered else v
    variance = b.reduce_mean(b.mul(d, d), axes=axes, keepdims=True)
    inverse = b.reciprocal(b.sqrt(b.add(variance, epsilon)))
    return b.mul(d, inverse), inverse


def _of_rows(b: Builder, g: Any, standard: Any, inverse: Any, axes: Axes, centered: bool) -> Any:
    """(g - mean(g) - standard * mean(g * standard)) * inverse"""
    size = count(b, standard, axes, standard.type.dtype)

    def mean(v: Any) -> Any:
        return b.div(b.reduce_sum(v, axes=axes, keepdims=True), size)

    rest = b.mul(standard, mean(b.mul(g, standard)))
    d = b.sub(b.sub(g, mean(g)), rest) if centered else b.sub(g, rest)
    return b.mul(d, inverse)


def _scaled(
    b: Builder,
    n: Node,
    cotangent: Any,
    needed: Sequence[int],
    standard: Any,
    inverse: Any,
    axes: Axes,
    centered: bool,
) -> Cotangents:
    """The cotangents of a norm of rows, of its scale, and of its bias."""
    x, scale, *rest = n.inputs
    assert x is not None and scale is not None
    g, out = wide(b, cotangent), {}
    if 0 in needed:
        out[0] = _of_rows(b, b.mul(g, wide(b, scale)), standard, inverse, axes, centered)
    if 1 in needed:
        out[1] = unbroadcast(b, b.mul(g, standard), scale)
    if 2 in needed and rest and rest[0] is not None:
        out[2] = unbroadcast(b, g, rest[0])
    return {k: narrow(b, c, x.type.dtype) for k, c in out.items()}


def lrn(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    """g / s^beta - x * (2 alpha beta / size) * the sum of g * y / s over the windows that an element is in.

    s is the denominator before it is raised. Sums over a window are sums of shifted channels.
    """
    x, dtype = n.inputs[0], n.output.type.dtype
    assert x is not None
    size, alpha, beta, bias = (n.attrs[k] for k in ("size", "alpha", "beta", "bias"))
    x, y, g = (wide(b, v) for v in (x, n.output, cotangents[0]))
    before = (size - 1) // 2
    s = b.add(b.mul(_neighbours(b, b.mul(x, x), before, size - 1 - before), alpha / size), bias)
    of_sums = _neighbours(b, b.div(b.mul(g, y), s), size - 1 - before, before)
    power = b.pow(s, b.constant(-beta, dtype=s.type.dtype))
    c = b.sub(b.mul(g, power), b.mul(b.mul(x, 2 * alpha * beta / size), of_sums))
    return {0: narrow(b, c, dtype)}


def _neighbours(b: Builder, v: Any, before: int, behind: int) -> Any:
    """For each channel the sum of those from `before` ahead of it to `behind` behind it."""
    rank, shape = v.type.rank, v.type.shape
    pads = tuple(before if k == 1 else behind if k == rank + 1 else 0 for k in range(2 * rank))
    padded = b.pad(v, pads=pads)
    total = None
    for k in range(before + behind + 1):
        starts = tuple(k if a == 1 else 0 for a in range(rank))
        part = b.slice(padded, starts=starts, steps=(1,) * rank, shape=shape)
        total = part if total is None else b.add(total, part)
    return total
