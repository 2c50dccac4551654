"""Convolutions of few channels a group: a block keeps its image patch and filters in shared memory.

    for block in block.x(images * tiles of pixels * slabs of channels):
        filters, then the patch, are copied to shared memory               all of the sum at once: no ring, one barrier
        for every 4 chunks of the sum: sums += products                    a chunk: 4 or 8 channels of a tap
        y = epilogue(sums)                                                 through shared memory, whole rows of channels

Each element of the image is fetched once for all taps that meet it, where the tiles of an implicit matrix product
(`mma`, `simt`) fetch it once for each. `patch_kernel.py` has the kernel; this module reads the convolution off the
problem and estimates what a schedule costs. Images have 1 to 3 spatial axes and their channels last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import mma, patch_depthwise, simt, tf32, wgmma
from dnnc.backends.cuda.templates.contraction.patch_image import Image, image_of
from dnnc.backends.cuda.templates.contraction.patch_kernel import PatchKernel, Shape
from dnnc.backends.cuda.templates.contraction.staging import L2_RATE, LATENCY, resident
from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.stmt import Kernel
from dnnc.passes.schedule.problem import Knobs, Problem

ORDER = ("slices",)  # of groups of warps; within one the chunks are added up in order
SECTOR = 32  # bytes that memory gives at the least
COPY = 40  # instructions of a warp for a vector of each thread: its place in the image, guards
GATHER = 4  # the same for each element of a vector that comes from several planes
FINISH = 60  # the same for a vector of results, beside the arithmetic of its elements
STEP = 16  # the same for a step of the sum: which taps its chunks are of
ISSUED = 4  # instructions a cycle of an SM
ALONE = 2.5  # cycles of an instruction of a warp, on the average, where others fill no gaps
WAIT = 40  # cycles of a step: a read of shared memory and a product that wait for each other
START = 150  # instructions of a warp: which tile it has, the addresses that it begins with
SHARED_RATE = 128  # bytes a cycle of an SM
SEARCHED = 60  # shapes of a search
REFINED = 12  # tiles and slabs of which all divisions among warps are estimated
SURE = (
    0.75  # of the estimate of `wgmma`, which has been held against measurements, from which that of a patch is believed
)


def candidates(problem: Problem, target: GpuTarget, rounded: bool = False) -> list[Knobs]:
    """Return the shapes that should beat other templates' kernels; `rounded`: `tf32` is one of those."""
    image = image_of(problem, target)
    if image is None:
        return []
    found = ranked(image, target)
    if not found or found[0][0] >= (
        patch_depthwise.window_cost(image, target) if image.depthwise else product_cost(problem, target, rounded)
    ):
        return []
    return [s.knobs for _, s in found[:8]]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """All shapes by their estimated time."""
    image = image_of(problem, target)
    return [] if image is None else [s.knobs for _, s in ranked(image, target)[:SEARCHED]]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    image = image_of(problem, target)
    if image is None:
        raise ScheduleError("the nest is no convolution of an image with channels last")
    constants = problem.constants if target.major >= 9 else frozenset()
    if image.depthwise:
        return patch_depthwise.DepthwiseKernel(image, patch_depthwise.Slab.of(image, knobs), constants).build()
    return PatchKernel(image, Shape.of(image, knobs), constants).build()


def ranked(image: Image, target: GpuTarget) -> Sequence[tuple[float, Shape | patch_depthwise.Slab]]:
    """What fits, by estimated cycles."""
    return patch_depthwise.ranked(image, target) if image.depthwise else ranked_shapes(image, target)


def product_cost(problem: Problem, target: GpuTarget, rounded: bool) -> float:
    """Estimated cycles of the best tiles of a matrix product; infinite where no template takes the problem as one."""
    halves = min(mma.estimate(problem, target), SURE * wgmma.estimate(problem, target))
    floats = min(simt.estimate(problem, target), tf32.estimate(problem, target) if rounded else math.inf)
    return min(halves, floats)


# --- what a schedule costs --------------------------------------------------------------------------------------------


def ranked_shapes(image: Image, target: GpuTarget) -> list[tuple[float, Shape]]:
    """Return fitting shapes by estimated cycles: tiles and slabs by some warp splits, then all of the best."""
    pairs = [(tile, slab) for tile in _tiles(image.sizes) for slab in _slabs(image.units, image.outs, image.wide)]
    first = (
        (
            min(
                (cost(image, s, target) for s in divisions(image, *p, some=True) if fits(image, s, target)),
                default=math.inf,
            ),
            p,
        )
        for p in pairs
    )
    best = sorted((x for x in first if x[0] < math.inf), key=lambda x: x[0])[:REFINED]
    found = [(cost(image, s, target), s) for _, p in best for s in divisions(image, *p) if fits(image, s, target)]
    return sorted(found, key=lambda x: x[0])


def divisions(image: Image, tile: tuple[int, ...], slab: tuple[int, int], some: bool = False) -> Iterator[Shape]:
    """Return warp divisions of a tile of pixels and a slab of groups and columns. `some`: a few good ones."""
    group, bn = slab
    units, depth = _up(math.prod(tile), image.unit) // image.unit, min(image.steps, 4)
    widths = list(dict.fromkeys(min(n, _up(bn, image.lanes_across)) for n in image.widths))
    for tn in widths[-2:] if some else widths:
        for tm in (2,) if some and units > 1 else (1, 2, 4):
            for slices in (1, 4)[: depth.bit_length()] if some else (1, 2, 4)[: depth.bit_length()]:
                if tm <= units:
                    yield Shape(image, tile, group, bn, tm, tn, slices)


def _tiles(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Tiles of pixels: powers of 2, and even parts of the image, along each axis."""
    each = []
    for k, n in enumerate(reversed(sizes)):
        powers = [
            p for p in ((4, 8, 16, 32, 64, 128, 256) if k == 0 else (1, 2, 4, 8, 16) if k == 1 else (1, 2, 4)) if p < n
        ]
        parts = [-(-n // d) for d in (1, 2, 4) if -(-n // d) <= 256]
        each.append(sorted({*powers, *(parts if k < 2 else parts[:1])} or {n}))
    for tile in itertools.product(*each):
        if 16 <= math.prod(tile) <= 512 or math.prod(tile) == math.prod(sizes):
            yield tile[::-1]


def _slabs(groups: int, cols: int, channels: int) -> Iterator[tuple[int, int]]:
    """Groups of a block and columns of each: several whole groups, or a part of one."""
    for g in (1, 2, 4, 8, 16, 32):
        if g <= groups and (g == 1 or g * max(channels, cols) <= 128):
            yield g, cols
    for parts in (2, 4, 8):
        part = _up(-(-cols // parts), 8)
        if part < cols:
            yield 1, part


def _up(n: int, by: int) -> int:
    return -(-n // by) * by


def fits(image: Image, s: Shape, target: GpuTarget) -> bool:
    return (
        1 <= s.warps <= 16
        and s.registers <= 200
        and s.registers * s.warps * 32 <= target.registers
        and s.shared_bytes <= target.shared_bytes
    )


def _sectors(nbytes: int) -> int:
    """Bytes that move for so many neighbours of a pixel."""
    return _up(nbytes, SECTOR)


def cost(image: Image, s: Shape, target: GpuTarget) -> float:
    """Estimated cycles of the busiest SM: what all its blocks ask of its slowest part, or as long as a block takes
    alone, as often as blocks follow one another. A block's phases wait for one another; other blocks fill the gaps.
    """
    size, across, v = image.x.dtype.bytes, s.tn // image.lanes_across, image.chunk
    most = -(-s.blocks // target.sms)
    together = min(most, resident(target, s.warps, s.registers, s.shared_bytes))
    slab, filters, results = s.group * image.wide, s.group * s.bn * image.red, s.pixels * s.group * s.bn
    fetched = s.patch_pixels * _sectors(slab * size) + s.pixels * _sectors(s.group * s.bn * size) + filters * size
    vectors = s.patch_pixels * slab / s.patch_lanes + filters / (image.channels if image.planes else s.filter_lanes)
    copies = vectors / 32 * (COPY + GATHER * image.planes)
    ends = results / s.width / 32 * (FINISH + 4 * s.width)
    if image.tensor:
        step: float = STEP + s.tm * (3 if v == 8 else 12) + across * (0.5 + s.tm)
        reads, products = (s.tm + across / 2) * 512 / SHARED_RATE, s.tm * across * 2.0
    else:
        step = STEP + 2 * (s.tm + s.tn) + s.tm * s.tn * v * (1.2 if size == 4 else 1.7)
        reads, products = 1.4 * s.tm * 32 * v * size / SHARED_RATE + s.tn, s.tm * s.tn * v / 4
    steps = s.warps * s.steps
    issued = copies + ends + steps * step + s.warps * START
    shared = steps * reads + results * 4 * (2 + s.slices) / SHARED_RATE
    asked = max(issued / ISSUED, shared, steps * products, fetched / L2_RATE)
    alone = (
        2 * LATENCY + ALONE * ((copies + ends) / s.warps + s.steps * step + START) + s.steps * WAIT + fetched / L2_RATE
    )
    return max(most * asked, -(-most // together) * alone)
