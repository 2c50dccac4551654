"""Rules of convolutions: each cotangent is again a convolution, for which there are kernels.

y = conv(x, w)             cot x = conv_transpose(g, w)      cot w = conv_backward_filter(x, g)
y = conv_transpose(x, w)   cot x = conv(g, w)                cot w = conv_backward_filter(g, x)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dnnc.ir.autodiff import reverse
from dnnc.ir.errors import GradientError
from dnnc.ir.expr import const, unwrap
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node

Cotangents = Mapping[int, Any]
SIDES = ("strides", "pads", "dilations", "group")


def conv(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x, w, *_), (g,) = n.inputs, cotangents
    assert x is not None and w is not None
    if n.attrs["panel"] or g.type.dtype is not x.type.dtype or w.type.dtype is not x.type.dtype:
        return reverse.derived(b, n, cotangents, needed)
    sides = {k: n.attrs[k] for k in SIDES}
    out: dict[int, Any] = {}
    if 0 in needed:
        out[0] = images(b, g, w, x.type.shape[2:], sides)
    if 1 in needed:
        out[1] = b.conv_backward_filter(x, g, kernel=w.type.shape[2:], **sides)
    if 2 in needed:
        out[2] = b.reduce_sum(g, axes=(0, *range(2, g.type.rank)), keepdims=False)
    return out


def images(b: Builder, g: Any, w: Any, spatial: Sequence[Any], sides: Mapping[str, Any]) -> Any:
    """The cotangent of a convolution's images, which are of the size `spatial`."""
    rank = len(spatial)
    strided = any(s > 1 for s in sides["strides"] or ())
    if strided and all(k == 1 for k in w.type.shape[2:]) and not any(sides["pads"] or ()):
        each = b.conv_transpose(g, w, group=sides["group"])  # of the pixels that are read; the others are 0
        return b.avg_pool_backward(each, spatial=tuple(spatial), kernel=(1,) * rank, strides=sides["strides"])
    made = b.conv_transpose(g, w, **sides)
    short = [unwrap(const(d) - m) for d, m in zip(spatial, made.type.shape[2:])]  # where strides do not divide
    if all(d is const(0) or d == 0 for d in short):
        return made
    return b.conv_transpose(g, w, output_padding=tuple(short), **sides)


def conv_transpose(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x, w, *_), (g,) = n.inputs, cotangents
    assert x is not None and w is not None
    sides = {k: n.attrs[k] for k in SIDES}
    rank = x.type.rank - 2
    more, pads = n.attrs["output_padding"] or (0,) * rank, sides["pads"] or (0,) * 2 * rank
    if any(pads) or any(more):  # what the result is longer by is read by no window
        cut = tuple(unwrap(const(e) - m) for e, m in zip(pads[rank:], more))
        sides["pads"] = (*pads[:rank], *cut)
    out: dict[int, Any] = {}
    if 0 in needed:
        out[0] = b.conv(g, w, **sides)
    if 1 in needed:
        out[1] = b.conv_backward_filter(g, x, kernel=w.type.shape[2:], **sides)
    if 2 in needed:
        out[2] = b.reduce_sum(g, axes=(0, *range(2, g.type.rank)), keepdims=False)
    return out


def conv_backward_filter(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (x, g), (h,) = n.inputs, cotangents
    assert x is not None and g is not None
    if n.attrs["parts"] > 1:
        raise GradientError("conv_backward_filter of parts has no derivative: differentiate before the passes run")
    sides = {k: n.attrs[k] for k in SIDES}
    out: dict[int, Any] = {}
    if 0 in needed:
        out[0] = images(b, g, h, x.type.shape[2:], sides)
    if 1 in needed:
        out[1] = b.conv(x, h, **sides)
    return out


def turn_filters(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    (g,) = cotangents
    return {0: b.turn_filters(g, group=n.attrs["group"])}
