"""Windows of sparse convolutions as vectors of pixels: which pixels are lanes, and where each tap of a window reads.

An image is cut into as many tiles as a vector has lanes, `down` x `across` of them, and a lane is a tile: vectors are
the same place in all tiles. So a tap is the vector at another place, of a tile and its halo, and no vector lies in two
lines of the cache. With strides, the padded image is split into phases: rows and columns by their remainders.

    x[channel, phase, i, j] = padded[phase + stride * (tile + (i, j))]
    y[o, i, j] = sum over channels and taps of w[..] * x[channel, phase of tap, i + .., j + ..]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from dnnc.ir.graph import Node
from dnnc.ir.op import ContractionForm
from dnnc.ir.target import CoreRates

GROUP = 24  # rows of straight-line code: of 32 registers some hold vectors of the other factor
NEAR_CODE = 8 << 10  # bytes of a run: beside its values, vectors of its columns then stay in the first-level cache
LONG = 11  # bytes of code of a product, and of its share of a load with a displacement of four bytes
CODE = 15  # the same with its value
CALL = 60  # cycles of a run beside its products: sums are loaded and stored
ROOM = 750 << 10  # bytes of a strip of an image, which stay in the L2 cache
TURN = 4  # cycles to transpose a vector of a square
MOST_PHASES = 8  # that a kernel copies by statements of their own


@dataclass(frozen=True)
class Window:
    """Sizes of a convolution of images; pairs are of rows and of columns."""

    images: int
    channels: int
    results: tuple[int, int]  # of an image
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]

    @cached_property
    def phases(self) -> tuple[tuple[int, int], ...]:
        """The remainders that taps have."""
        pairs = zip(self.kernel, self.dilations, self.strides)
        rows, columns = (sorted({k * d % s for k in range(n)}) for n, d, s in pairs)
        return tuple((a, b) for a in rows for b in columns)

    @cached_property
    def taps(self) -> tuple[tuple[int, int, int], ...]:
        """The phase of each tap, and its row and column there."""
        out = []
        for k in range(math.prod(self.kernel)):
            at = [i * d for i, d in zip(divmod(k, self.kernel[1]), self.dilations)]
            (i, a), (j, b) = (divmod(p, s) for p, s in zip(at, self.strides))
            out.append((self.phases.index((a, b)), i, j))
        return tuple(out)

    @property
    def halo(self) -> tuple[int, int]:
        """Rows and columns behind a tile that its results read."""
        return max(i for _, i, _ in self.taps), max(j for _, _, j in self.taps)


@dataclass(frozen=True)
class Tiling:
    """Strips of an image, each `down` x `across` tiles of `high` x `wide` results; and of a vector's `lanes`."""

    window: Window
    down: int
    across: int
    high: int
    wide: int

    @property
    def lanes(self) -> int:
        return self.down * self.across

    @property
    def strips(self) -> int:
        """Of an image."""
        return -(-self.window.results[0] // (self.down * self.high))

    @property
    def vectors(self) -> int:
        """Results of a strip."""
        return self.high * self.wide

    @property
    def pitch(self) -> int:
        """Vectors of a row of a tile and its halo."""
        return self.wide + self.window.halo[1]

    @property
    def held(self) -> int:
        """Vectors of a phase."""
        return (self.high + self.window.halo[0]) * self.pitch

    @property
    def row(self) -> int:
        """Vectors of a channel: an odd number, so that the cache has room for all channels."""
        return len(self.window.phases) * self.held | 1

    @property
    def offsets(self) -> tuple[int, ...]:
        """Elements from the vector of a result's place to those of the taps."""
        return tuple((p * self.held + i * self.pitch + j) * self.lanes for p, i, j in self.window.taps)


def window_of(n: Node) -> Window | None:
    """The window of a convolution of images; None where it has one tap, groups, strides and dilations, or more phases
    than a kernel has statements for.
    """
    x, w, out = n.inputs[0], n.inputs[1], n.output.type
    if n.op.contraction is not ContractionForm.CONVOLUTION or x is None or w is None or out.rank != 4:
        return None
    sizes = (*x.type.shape, *w.type.shape, *out.shape)
    if not all(isinstance(k, int) for k in sizes) or n.attrs["group"] != 1:
        return None
    images, channels, _, _, _, _, *kernel = (int(str(k)) for k in sizes[:8])
    rows, columns = int(str(out.shape[2])), int(str(out.shape[3]))
    strides, dilations = ((*(n.attrs[name] or (1, 1)),) for name in ("strides", "dilations"))
    if math.prod(kernel) == 1 or any(s > 1 and d > 1 for s, d in zip(strides, dilations)) or 1 in (rows, columns):
        return None
    found = Window(images, channels, (rows, columns), (kernel[0], kernel[1]), strides, dilations)
    return found if len(found.phases) <= MOST_PHASES else None


def tilings(w: Window, lanes: int, room: float) -> list[Tiling]:
    """The ways to cut an image for vectors of `lanes`, such that a strip of all channels fits in so many bytes; at
    least the one with the smallest strip.
    """
    found: dict[Tiling, int] = {}
    for across in (1 << k for k in range(lanes.bit_length())):
        down = lanes // across
        for strips in range(1, -(-w.results[0] // down) + 1):
            t = Tiling(w, down, across, -(-w.results[0] // (down * strips)), -(-w.results[1] // across))
            found[t] = w.channels * t.row * 4 * lanes
    least = min(found.values())
    return [t for t, size in found.items() if size <= max(room, least)]


def code_cycles(w: Window, count: int, rows: int, lanes: int, rates: CoreRates) -> float:
    """Estimate cycles of one core for a convolution by straight-line code."""
    every = tilings(w, lanes, ROOM)
    return w.images * min(t.strips * strip_cycles(t, count, rows, rates) for t in every)


def span_of(w: Window, count: int, rows: int) -> int:
    """Columns of a run of straight-line code: those of whole channels, as many as the caches take."""
    groups, taps = -(-rows // GROUP), len(w.taps)
    spans = max(-(-count * LONG // (groups * NEAR_CODE)), 1)
    return -(-w.channels // spans) * taps


def strip_cycles(t: Tiling, count: float, rows: float, rates: CoreRates) -> float:
    """Estimate cycles of straight-line code for a strip.

    Args:
        t: how the image is cut.
        count, rows: nonzeros and rows of the weights, of a core's share.
        rates: of a core.
    """
    w = t.window
    columns, groups = w.channels * len(w.taps), math.ceil(rows / GROUP)
    used = 1 - (1 - count / (rows * columns)) ** GROUP  # of the columns, by a group
    loads = (count + used * columns * groups) / rates.loads
    products = max(count / rates.fma, loads) + CALL * groups
    code = count * CODE / rates.l2
    return t.vectors * (products + TURN * rows) + TURN * w.channels * len(w.phases) * t.held + code
