"""Register tiles of contractions by estimated cycles: which loops make a tile, and how many rows and panels it has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from dnnc.backends.llvm.features import CpuTarget
from dnnc.ir.op import ContractionForm
from dnnc.ir.ops.window import node_window
from dnnc.passes.schedule.problem import Problem

BESIDE = 0.42  # of the L2 cache's rate: reading it while the core computes
# of the time that rows take to come from memory, asked for ahead as they are: what the multiply-adds do not hide
STREAMED = 0.18
# of a convolution's time for each accumulator past half of the registers, which others then lack
CROWDED = 0.005
NARROW = (1, 2, 3, 4, 6)  # panels of a tile, by guess


@dataclass(frozen=True)
class Nest:
    """Which loop of the naive nest plays which part. `panel` is "" while the vector loop is still to be split from
    `lane`; `columns` are those of the outer loops that the panels depend on: heads, matrices of a batch.
    """

    outer: tuple[str, ...]
    pixel: str
    panel: str
    lane: str
    reduction: tuple[str, ...]
    padding: int  # of the pixel axis, which makes the first and last tiles special
    stride: int
    block: int  # of the reduced channels in memory; 0 when they are not blocked
    tap: str = ""  # the reduction along the pixel axis
    depthwise: bool = False  # every lane has inputs of its own: the panel's loop is one more outer loop
    shuffled: int = (
        0  # panels that take the inputs of their lanes, of several groups or several times the same, out of one block
    )
    taps: int = 1  # along the pixel axis
    columns: tuple[str, ...] = ()
    together: int = 0  # panels side by side that read the same inputs, those of a group; 0: all
    panel_bytes: int = 0  # of a convolution's filters, of a vector of outputs; 0 where the size is not known
    image_bytes: int = 0  # of all rows, or pixels; 0 where that is not known
    window: int = 1  # taps in all
    quad: str = ""  # the loop over four bytes or two bf16, of which one instruction adds up the products
    codes: int = 0  # of a word of stored weights, which a step of the sum decodes; 0: the weights are no codes
    images: bool = False  # are a tile's rows the same pixel of several images?

    def order(self, name: str) -> list[str]:
        """The outer loops: all rows of tiles before the next panels, or all panels before the next rows."""
        rows = [n for n in self.outer if n not in self.columns]
        return {
            "rows": [*self.outer, "jo"],
            "panels": [*self.columns, "jo", *rows],
            "tiles": [*self.outer, "po", "jo"],
        }[name]


def window_cycles(problem: Problem, nest: Nest, tile: tuple[int, int], target: CpuTarget) -> float:
    """Estimated cycles of one channel and panel, over all pixels and taps that fall on the image; 0 where sizes are not
    known, or images cannot be rows.
    """
    anchor = problem.anchor
    if anchor is None or anchor.op.contraction is not ContractionForm.CONVOLUTION or nest.depthwise:
        return 0.0
    x, w = anchor.inputs[:2]
    assert x is not None and w is not None
    out, image, win = anchor.output.type.shape, x.type.shape[2:], node_window(w.type.shape[2:], anchor.attrs)
    if not all(isinstance(d, int) for d in (*out, *image, *win.kernel, *win.begin)):
        return 0.0
    mr, nv = tile
    near = nv * nest.panel_bytes <= target.l2

    @cache
    def step(rows: int) -> float:
        return step_cycles(rows, nv, target, near) / nv

    def tiled(rows: int) -> float:
        return math.ceil(rows / mr) * step(min(mr, rows))

    images, *pixels = (int(str(d)) for k, d in enumerate(out) if k != 1)
    if nest.pixel == "p":
        return images * tiled(math.prod(pixels))
    sides = zip(pixels, image, win.kernel, win.strides, win.dilations, win.begin)
    seen = [  # [axis][tap]: the first pixel at which a tap falls on the image, and that behind the last
        [(_within(begin - k * apart, by, made), _within(begin - k * apart + size, by, made)) for k in range(taps)]
        for made, size, taps, by, apart, begin in sides
    ]
    at = next((k for k in reversed(range(len(pixels))) if pixels[k] != 1), len(pixels) - 1)
    others = math.prod(sum(end - i for i, end in axis) for k, axis in enumerate(seen) if nest.images or k != at)
    if nest.images:
        return others * tiled(images)
    tiles_ = (min(end, k + mr) - max(i, k) for i, end in seen[at] for k in range(0, pixels[at], mr))
    return others * images * sum([step(rows) for rows in tiles_ if rows > 0])


def _within(place: int, by: int, pixels: int) -> int:
    """The first of so many pixels that lies at a place or behind it, where they are `by` places apart."""
    return min(max(-(-place // by), 0), pixels)


def streams(nest: Nest, target: CpuTarget) -> bool:
    """Do the rows come from beyond the L2 cache again for each panel of a tile? Bytes are multiplied so fast that the
    L2 cache is far as well.
    """
    return not nest.depthwise and nest.image_bytes > (target.l1 if nest.quad else target.l2 // 2)


def tiles(
    pixels: int | None, panels: int | None, target: CpuTarget, nest: Nest, inplace: bool, most: tuple[int, ...] = NARROW
) -> list[tuple[int, int]]:
    """Return (mr, nv) by estimated cycles, max(FMAs, loads) over rates. Unknown sizes: 30 rows, 10 panels."""
    # beside accumulators live the panels' vectors and a broadcast: one too many is spilled at every step
    n = target.registers
    scored: list[tuple[float, int, int]] = []
    for nv in most:
        if (
            (panels is not None and (nv > panels or (panels % nv and inplace)))
            or (nest.depthwise and nv != max(nest.shuffled, 1))
            or (nest.together and nest.together % nv)
        ):
            continue
        most_rows = min(n - 4, n - nv - 1) // nv
        if nest.shuffled:  # beside the sums live the pixels that all taps of a row read
            most_rows = max((n - nest.taps - 1) // (nv + nest.stride), 1)
        for mr in range(1, most_rows + 1):
            if pixels is not None and mr > pixels:
                break
            rows = -(-pixels // mr) * mr if pixels is not None else 30 + mr / 2
            work = rows * (-(-panels // nv) * nv if panels is not None else 10 + nv / 2)
            crowd = 1 + CROWDED * (4 if nest.depthwise else 1) * max(mr * nv - n // 2, 0) if nest.panel else 1.0
            near = nv * nest.panel_bytes <= target.l2
            come = STREAMED * mr * 4 / nest.window / target.rates.memory if streams(nest, target) else 0.0
            scored.append((work / (mr * nv) * (step_cycles(mr, nv, target, near) * crowd + come), -mr * nv, nv))
    return [(-size // nv, nv) for _, size, nv in sorted(scored)]


def step_cycles(mr: int, nv: int, target: CpuTarget, near: bool = True) -> float:
    """Cycles of a register tile's step: max of FMAs, loads, latency, panel reads; depthwise loads are vectors."""
    rates = target.rates
    panel = (
        nv * target.vector_bits / 8 / (BESIDE * rates.l2 if near else rates.memory)
    )  # every row of tiles reads it anew
    return max(mr * nv / rates.fma, (mr + nv) / rates.loads * 1.05, rates.latency, panel)
