"""The orders in which images and weights lie in memory."""

from __future__ import annotations

from dnnc.ir.dtype import bf16, i8, i32, u8
from dnnc.ir.encodings import QUAD, Packed, Quads, Winograd
from dnnc.ir.graph import Node
from dnnc.ir.types import Dense, Encoding, Layout, Part, TensorType, dense, product


def blocked(rank: int, lanes: int) -> Dense:
    """`0 1/16 2 3 1%16`: channels in blocks, innermost."""
    return dense(Part(0), Part(1, lanes), *(Part(k) for k in range(2, rank)), Part(1, 1, lanes))


def pixel_blocks(rank: int, lanes: int) -> Dense:
    """`0 2 3/16 1 3%16`: neighbours along the last axis as vectors, one for each channel."""
    last = rank - 1
    return dense(Part(0), *(Part(k) for k in range(2, last)), Part(last, lanes), Part(1), Part(last, 1, lanes))


def of_channels(t: TensorType, rank: int, images: Encoding) -> Dense | None:
    """`0/16 1 2 0%16`: numbers of the channels of blocked images, [64, 1, 1], as vectors; None for all else."""
    axis, block = t.rank - rank + 1, images.block(1)
    if block == 1 or axis < 0 or t.shape[axis] == 1 or product(t.shape) != t.shape[axis]:
        return None
    return dense(*(Part(k, block if k == axis else 1) for k in range(t.rank)), Part(axis, 1, block))


def panels(rank: int, lanes: int) -> Dense:
    """`1/16 0 1%16`: the last axis in blocks, each block a contiguous panel over the axis before it."""
    lead = tuple(Part(k) for k in range(rank - 2))
    return dense(*lead, Part(rank - 1, lanes), Part(rank - 2), Part(rank - 1, 1, lanes))


def filters(rank: int, lanes: int, block_inputs: bool) -> Dense:
    """`0/16 1/16 2 3 1%16 0%16`: output channels in panels; input channels as the activations have them."""
    taps = tuple(Part(k) for k in range(2, rank))
    if block_inputs:
        return dense(Part(0, lanes), Part(1, lanes), *taps, Part(1, 1, lanes), Part(0, 1, lanes))
    return dense(Part(0, lanes), Part(1), *taps, Part(0, 1, lanes))


def added_up(n: Node, pairs: bool) -> int:
    """How many products of a contraction's sum one instruction adds up: four of bytes, two of bfloat16 if there are
    `pairs`, else one.
    """
    x, w = n.inputs[:2]
    assert x is not None and w is not None
    types = x.type.dtype, w.type.dtype
    if n.output.type.dtype is i32 and types in ((u8, i8), (i8, i8)):
        return QUAD
    return 2 if pairs and types == (bf16, bf16) else 1


def quad_panels(rank: int, lanes: int, of: int = QUAD) -> Quads:
    """`quads 1/16 0/4 1%16 0%4`: panels of bytes, four neighbours along the axis before the last side by side."""
    lead = tuple(Part(k) for k in range(rank - 2))
    rows, columns = rank - 2, rank - 1
    parts = (*lead, Part(columns, lanes), Part(rows, of), Part(columns, 1, lanes), Part(rows, 1, of))
    return Quads(Layout(parts))


def quad_filters(rank: int, lanes: int, block: int, of: int = QUAD) -> Quads:
    """`quads 0/16 1/16 2 3 1/4%4 0%16 1%4`: filters of bytes, for input channels in blocks."""
    taps = tuple(Part(k) for k in range(2, rank))
    inner = (Part(1, of, block // of),) if block > of else ()
    return Quads(Layout((Part(0, lanes), Part(1, block), *taps, *inner, Part(0, 1, lanes), Part(1, 1, of))))


def word_panels(rank: int, lanes: int, codes: int) -> Packed:
    """`packed 1/16 0/8 1%16 0%8`: panels of words, each of neighbours along the axis before the last."""
    lead = tuple(Part(k) for k in range(rank - 2))
    rows, columns = rank - 2, rank - 1
    parts = (*lead, Part(columns, lanes), Part(rows, codes), Part(columns, 1, lanes), Part(rows, 1, codes))
    return Packed(Layout(parts))


def word_rows(rank: int, codes: int) -> Packed:
    """`packed 0 1/8 1%8`: words of neighbours along the last axis."""
    lead = tuple(Part(k) for k in range(rank - 1))
    return Packed(Layout((*lead, Part(rank - 1, codes), Part(rank - 1, 1, codes))))


def winograd_filters(lanes: int, tile: int) -> Winograd:
    """`winograd4 2 3 0/16 1/16 1%16 0%16`: per point, panels of output channels with all input channels."""
    parts = (Part(2), Part(3), Part(0, lanes), Part(1, lanes), Part(1, 1, lanes), Part(0, 1, lanes))
    return Winograd(tile, Layout(parts))
