"""Filters' gradients of many images are sums for parts of the images, which are added up: few filters make few tiles.

    w = conv_backward_filter(x, g)  of f32[32, 64, 56, 56] twice  ->  p = conv_backward_filter(x, g, parts=8);
        w = reduce_sum(p as [8, 64, 64, 1, 1], axes=(0,))

A tile's sum runs over the pixels of all images. A GPU divides it among the blocks of a cluster, eight at most; a 1 x 1
convolution of 64 channels is one tile, which leaves most multiprocessors without work. The parts are the same in every
run. Half types are not split: their parts would be rounded.
"""

from __future__ import annotations

import math

from dnnc.ir.dtype import f32, f64
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import replace_each

TILE = 64  # rows and columns of a tile
SHARED = 4  # blocks of a cluster that share a tile's sum well
LEAST = 1024  # pixels of a part
WARP = 32  # neighbouring channels of a depthwise convolution that a block sums up


def split_filters(graph: Graph, ctx: PassContext) -> bool:
    """Rewrite for a GPU; returns whether anything changed."""
    machine = ctx.facts.reductions
    if ctx.strict or not machine.by_axes:
        return False

    def split(n: Node) -> Value | None:
        x, g = n.inputs
        assert x is not None and g is not None
        parts = parts_of(n, machine.blocks)
        if parts == 1:
            return None
        b = Builder(graph, n, n.locs)
        each = b.op("conv_backward_filter", x, g, **{**n.attrs, "parts": parts})
        apart = b.op("reshape", each, shape=(parts, *n.output.type.shape))
        whole: Value = b.op("reduce_sum", apart, axes=(0,), keepdims=False)
        return whole

    return replace_each(graph, {"conv_backward_filter": split})


def parts_of(n: Node, blocks: int) -> int:
    """The number of parts that gives so many blocks work."""
    (x, g), group = n.inputs, n.attrs["group"]
    assert x is not None and g is not None
    sizes = (*g.type.shape, *n.output.type.shape)
    if n.attrs["parts"] > 1 or n.output.type.dtype not in (f32, f64) or not all(isinstance(d, int) for d in sizes):
        return 1
    images, made, *pixels = (int(str(d)) for d in g.type.shape)
    terms = math.prod(int(str(d)) for d in n.output.type.shape[1:])
    if group == made == x.type.shape[1] and group > 1:
        wanted = -(-blocks * WARP // (made * terms))
    else:
        tiles = group * -(-made // group // TILE) * -(-terms // TILE)
        wanted = -(-blocks // (SHARED * tiles))
    fits = (p for p in range(1, images + 1) if images % p == 0 and p <= wanted)
    return max((p for p in fits if images // p * math.prod(pixels) >= LEAST), default=1)
