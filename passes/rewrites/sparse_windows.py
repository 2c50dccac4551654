"""Windows of sparse convolutions as shifts of an image that lies flat: where each tap of a window reads.

    flat[f] = padded[f // pitch, f % pitch]         y[o] = sum over channels and taps of w[..] * flat[o + tap]

Results are counted as elements of the flat image are: `pitch` of each row, of which the first `width` exist. With
strides the padded image is split into phases, each flat: rows and columns by their remainders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from dnnc.ir.graph import Node
from dnnc.ir.op import ContractionForm
from dnnc.ir.target import CoreRates

GROUP = 24  # rows of straight-line code: of 32 registers some hold vectors of the other factor
NEAR_CODE = 24 << 10  # bytes that stay in the instruction cache
LONG = 11  # bytes of code of a product, and of its share of a load with a displacement of four bytes
CODE = 15  # the same with its value
CALL = 60  # cycles of a run beside its products: sums are loaded and stored
TURN = 4  # cycles to transpose a vector of a square
UNALIGNED = 1.0  # loads that a vector which lies in two lines of the cache takes


@dataclass(frozen=True)
class Window:
    """Sizes of a convolution of images; pairs are of rows and of columns."""

    images: int
    channels: int
    results: tuple[int, int]  # of an image
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pitch: int

    @cached_property
    def phases(self) -> tuple[tuple[int, int], ...]:
        """The remainders that taps have."""
        pairs = zip(self.kernel, self.dilations, self.strides)
        rows, columns = (sorted({k * d % s for k in range(n)}) for n, d, s in pairs)
        return tuple((a, b) for a in rows for b in columns)

    @cached_property
    def taps(self) -> tuple[tuple[int, int], ...]:
        """The phase of each tap, and its place there."""
        out = []
        for k in range(math.prod(self.kernel)):
            at = [i * d for i, d in zip(divmod(k, self.kernel[1]), self.dilations)]
            (i, a), (j, b) = (divmod(p, s) for p, s in zip(at, self.strides))
            out.append((self.phases.index((a, b)), i * self.pitch + j))
        return tuple(out)

    @property
    def reach(self) -> int:
        """The furthest place of a tap."""
        return max(place for _, place in self.taps)

    def vectors(self, lanes: int) -> int:
        """Of the results of an image."""
        return vectors(self.results, self.pitch, lanes)

    def held(self, tiles: int, lanes: int) -> int:
        """Vectors of a phase that a strip of `tiles` vectors of results reads; odd, so that caches have room for all
        channels.
        """
        return (tiles + -(-self.reach // lanes)) | 1


def vectors(results: tuple[int, int], pitch: int, lanes: int) -> int:
    return -(-(results[0] * pitch - pitch + results[1]) // lanes)


def window_of(n: Node, lanes: int) -> Window | None:
    """The window of a convolution of images; None where it has one tap, groups, or strides and dilations."""
    x, w, out = n.inputs[0], n.inputs[1], n.output.type
    if n.op.contraction is not ContractionForm.CONVOLUTION or x is None or w is None or out.rank != 4:
        return None
    sizes = (*x.type.shape, *w.type.shape, *out.shape)
    if not all(isinstance(k, int) for k in sizes) or n.attrs["group"] != 1:
        return None
    high, wide = int(str(w.type.shape[2])), int(str(w.type.shape[3]))
    strides, dilations = ((*(n.attrs[name] or (1, 1)),) for name in ("strides", "dilations"))
    pads = n.attrs["pads"] or (0, 0, 0, 0)
    if high * wide == 1 or any(s > 1 and d > 1 for s, d in zip(strides, dilations)) or min(pads) < 0:
        return None
    rows, columns = int(str(out.shape[2])), int(str(out.shape[3]))
    if rows == 1 or columns == 1:
        return None
    if strides[1] == 1:  # what pads the end of a row pads the beginning of the next one
        pitch = int(str(x.type.shape[3])) + max(pads[1], pads[3])
    else:
        pitch = columns + (wide - 1) // strides[1]
    even = -(-pitch // lanes) * lanes  # some taps then read whole lines of the cache
    if vectors((rows, columns), even, lanes) <= vectors((rows, columns), pitch, lanes):
        pitch = even
    images, channels = int(str(x.type.shape[0])), int(str(x.type.shape[1]))
    return Window(images, channels, (rows, columns), (high, wide), strides, dilations, pitch)


def span_of(w: Window, count: int, rows: int) -> int:
    """Columns of a run of straight-line code: those of whole channels, as many as the instruction cache takes."""
    groups, taps = -(-rows // GROUP), len(w.taps)
    spans = max(-(-count * LONG // (groups * NEAR_CODE)), 1)
    return -(-w.channels // spans) * taps


def strip_cycles(w: Window, count: float, rows: float, tiles: int, lanes: int, rates: CoreRates) -> float:
    """Estimate cycles of straight-line code for a strip of vectors of results.

    Args:
        w: the window.
        count, rows: nonzeros and rows of the weights, of a core's share.
        tiles: vectors of the strip.
        lanes: of a vector.
        rates: of a core.
    """
    columns, groups = w.channels * len(w.taps), math.ceil(rows / GROUP)
    used = 1 - (1 - count / (rows * columns)) ** GROUP  # of the columns, by a group
    loads = (count + UNALIGNED * used * columns * groups) / rates.loads
    products = max(count / rates.fma, loads) + CALL * groups
    filled = TURN * w.channels * len(w.phases) * w.held(tiles, lanes)
    code = count * CODE / rates.l2 if count * CODE > NEAR_CODE else 0.0
    return tiles * (products + TURN * rows) + filled + code
