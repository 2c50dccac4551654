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
