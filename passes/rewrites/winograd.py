"""Which convolutions are worth Winograd's algorithm: node in, tile size out; decided with the layouts."""

from __future__ import annotations

from dnnc.ir.dtype import f32
from dnnc.ir.graph import Node
from dnnc.ir.target import CoreRates
from dnnc.ir.winograd import TILES, points

TRANSFORM = {
    2: 90,
    4: 200,
}  # cycles for a tile of one vector of channels, in or out, on a core that adds two vectors a cycle
GAIN = 1.2  # a tile must be this much faster than a smaller one, or than none: larger ones cost memory and accuracy


def winograd_tile(n: Node, lanes: int, rates: CoreRates) -> int:
    """m of F(m x m, 3 x 3) for a convolution in blocks of `lanes` channels; 0 where it is better computed directly."""
    if not takes_winograd(n):
        return 0
    best = 0
    for tile in TILES:
        if cycles(n, lanes, tile, rates) * GAIN < cycles(n, lanes, best, rates):
            best = tile
    return best


def takes_winograd(n: Node) -> bool:
    """Can Winograd's algorithm compute this convolution?"""
    x, w = n.inputs[0], n.inputs[1]
    assert x is not None and w is not None
    out = n.output.type
    ones = (*(n.attrs["strides"] or ()), *(n.attrs["dilations"] or ()), n.attrs["group"])
    sizes, pads = (*x.type.shape[1:], *out.shape[1:]), n.attrs["pads"] or ()
    if w.type.shape[2:] != (3, 3) or any(k != 1 for k in ones) or {x.type.dtype, w.type.dtype, out.dtype} != {f32}:
        return False
    return all(isinstance(k, int) and k > 0 for k in sizes) and all(isinstance(p, int) and p >= 0 for p in pads)


def cycles(n: Node, lanes: int, tile: int, rates: CoreRates) -> float:
    """Estimate cycles of one core: the larger of multiplications and weight traffic, plus transforms.

    Args:
        n: a convolution of fixed sizes.
        lanes: channels of a block.
        tile: m of F(m x m, 3 x 3); 0 is a direct convolution.
        rates: of the core.
    """
    batch, made, rows, columns = (k if isinstance(k, int) else 1 for k in n.output.type.shape)
    channels = n.inputs[0].type.shape[1]  # type: ignore[union-attr]
    assert isinstance(channels, int)
    panels, blocks = -(-made // lanes), -(-channels // lanes)
    square, tiles = (
        (points(tile) ** 2, batch * -(-rows // tile) * -(-columns // tile)) if tile else (9, batch * rows * columns)
    )
    work = square * blocks * lanes * panels * tiles / rates.fma
    weights = square * blocks * lanes * panels * lanes * 4
    return max(work, weights / rates.memory) + (tiles * (blocks + panels) * transform(tile, rates) if tile else 0)


def transform(tile: int, rates: CoreRates) -> float:
    """Cycles to transform a tile of one vector of channels, in or out: additions, as fast as multiply-adds."""
    return TRANSFORM[tile] * 2 / rates.fma
