"""Pad images ahead of convolutions that matrix tiles compute (`ir/loops/tiles.py`).

    conv(x, w, pads=(1, 1, 1, 1))  ->  conv(pad(x, pads=(0, 0, 1, 1, 0, 0, 1, 1)), w)

All rows of a tile see the same taps, so none may lie on padding. The image is copied once, and its convolution is
three to six times as fast as by vectors of float32. Channels that fill a row of a tile, 64 bytes, lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from dnnc.ir.dtype import bf16, f32
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.loops.tiles import ROW
from dnnc.ir.op import ContractionForm
from dnnc.ir.ops.window import node_window
from dnnc.ir.target import CoreRates
from dnnc.ir.types import Dim, product
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.orders import added_up

LEAST_ROWS = 8  # of a product: with fewer, vectors are as fast
LEAST_PIXELS = 6  # of a row of an image, the same
LEAST_STEPS = 4  # products of a tile of bytes, whose sums take the time of about as many


def pad_images(graph: Graph, ctx: PassContext) -> bool:
    """Rewrite for a CPU with matrix tiles; returns whether anything changed."""
    made: dict[tuple[Value, tuple[int, ...]], Value] = {}
    changed = False
    for n in list(graph.nodes()):
        x, pads = n.inputs[0] if n.inputs else None, n.attrs.get("pads")
        if n.op.contraction is not ContractionForm.CONVOLUTION or x is None or not pads or not any(pads):
            continue
        if not all(isinstance(p, int) for p in pads) or not takes_tiles(graph, n, ctx.facts.rates, ctx.strict):
            continue
        rank = len(pads) // 2
        key = x, (0, 0, *pads[:rank], 0, 0, *pads[rank:])
        b = Builder(graph, n, n.locs)
        if key not in made:
            made[key] = b.pad(x, pads=key[1])
        y: Value = b.conv(made[key], *n.inputs[1:], **{**n.attrs, "pads": None})
        graph.replace_all_uses(n.output, y)
        graph.erase(n)
        changed = True
    return changed


def takes_tiles(graph: Graph, n: Node, rates: CoreRates, strict: bool) -> bool:
    """Do tiles multiply a contraction's factors, bytes or bf16, and does it fill some rows of them? `strict` excludes
    sums of bf16, which have an order of their own.
    """
    x, w = n.inputs[:2]
    if not rates.tile_rows or x is None or w is None or added_up(n, not strict) == 1:
        return False
    if n.op.contraction is ContractionForm.PRODUCT:
        rows = x.type.shape[:-1] if w.type.rank == 2 else x.type.shape[-2:-1]
        return _many(rows, LEAST_ROWS)
    if n.op.contraction is not ContractionForm.CONVOLUTION or n.attrs["group"] != 1:
        return False
    if not graph.variance(w).call_invariant or not _fills_rows(n):
        return False
    pixels = n.output.type.shape[2:]
    flat = node_window(w.type.shape[2:], n.attrs).flat
    return _many(pixels, LEAST_ROWS) if flat else _many(pixels[-1:], LEAST_PIXELS)


def _fills_rows(n: Node) -> bool:
    """Do the channels of an image fill rows of tiles? Bytes need many of them; a block of bf16 is half a row."""
    x, w = n.inputs[:2]
    assert x is not None and w is not None
    channels, terms = x.type.shape[1], product(w.type.shape[1:])
    if not isinstance(channels, int) or not isinstance(terms, int):
        return False
    if x.type.dtype is bf16:
        return channels >= ROW // f32.bytes
    return channels % ROW == 0 and terms >= LEAST_STEPS * ROW


def row_of_channels(n: Node) -> int:
    """Channels that lie side by side in an image that tiles multiply: a row of bytes. Of bf16 it is a row for windows
    of several taps, whose images are mostly copied anyway, else half of one, as in other images.
    """
    x, w = n.inputs[:2]
    assert x is not None and w is not None
    channels, whole = x.type.shape[1], ROW // x.type.dtype.bytes
    if x.type.dtype is not bf16:
        return whole
    several = product(w.type.shape[2:]) != 1 and isinstance(channels, int) and channels % whole == 0
    return whole if several else whole // 2


def _many(sizes: Sequence[Dim], least: int) -> bool:
    """Are these rows of a tile enough, as far as their number is known?"""
    count = product(sizes)
    return not isinstance(count, int) or count >= least
