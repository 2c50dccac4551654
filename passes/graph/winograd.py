"""Which convolutions are worth Winograd's algorithm, and with which tiles. In comes a node of a graph, out comes a tile's size.

Decided where layouts are, since it is the weights that are stored differently; the rest is a matter of the kernel.
"""

from __future__ import annotations

from dnnc.ir.dtype import f32
from dnnc.ir.graph import Node


def winograd_tile(n: Node) -> int:
    """m of F(m x m, 3 x 3) for a convolution in blocked layout; 0 where it is better computed directly."""
    x, w = n.inputs[0], n.inputs[1]
    assert x is not None and w is not None
    out = n.output.type
    pads = n.attrs["pads"] or (0,) * 4
    plain = all(k == 1 for k in (*(n.attrs["strides"] or ()), *(n.attrs["dilations"] or ()))) and n.attrs["group"] == 1
    sizes = (*x.type.shape[1:], *out.shape[1:], *pads)
    if not plain or w.type.shape[2:] != (3, 3) or {x.type.dtype, w.type.dtype, out.dtype} != {f32} or not all(isinstance(k, int) for k in sizes):
        return 0
    return 4
