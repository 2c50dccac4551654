"""Depthwise convolutions by shared patches: a thread has a channel vector of `tm` pixels of a row.

    filters and patch are copied to shared memory;
        the patch has zeros where the image ends, so that no tap asks whether its pixel exists
    for every row of taps:
        the pixels that this row of taps reads for all tm results, and the row's weights, come into registers once
        sums[tm] += products
    y = epilogue(sums)

Image and filters have their channels innermost, [images, *inside, row] and [taps, row].
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction.patch_image import Image
from dnnc.backends.cuda.templates.contraction.patch_kernel import PatchCopy
from dnnc.backends.cuda.templates.contraction.staging import L2_RATE, LATENCY, resident
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, cast, const, minimum
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel
from dnnc.passes.schedule.problem import Knobs

PIECE = 16  # taps of a row that are unrolled together
COPY, FINISH, ROW = (
    30,
    12,
    10,
)  # instructions of a warp: a vector that is copied, one that is finished, a row of taps beside its products
ISSUED, ALONE = (
    4,
    1.6,
    # instructions a cycle of an SM; cycles of one of a warp that has the SM's share to itself: its sums are independent
)
SHARED_RATE = 128  # bytes a cycle
SECTOR = 32  # bytes that memory gives at the least
REFINED = 24  # slabs of which bank conflicts are counted
# instructions for a product of the template `window`, which loads both factors and checks each pixel
WINDOW = 5.6


@dataclass(frozen=True)
class Slab:
    """A block's `tile` of pixels and `channels`; a thread's `tm` pixels and `lanes` channels."""

    image: Image
    tile: tuple[int, ...]
    channels: int
    tm: int
    lanes: int

    @staticmethod
    def of(image: Image, knobs: Mapping[str, int | str]) -> Slab:
        k = {name: int(v) for name, v in knobs.items()}
        tile = (k.get("tile", 1), k["rows"], k["pixels"])[3 - len(image.sizes) :]
        return Slab(image, tile, k["group"], k["tm"], k["tn"])

    @property
    def knobs(self) -> Knobs:
        tile = dict(zip(("tile", "rows", "pixels")[3 - len(self.tile) :], self.tile))
        return tuple({"rows": 1, **tile, "group": self.channels, "tm": self.tm, "tn": self.lanes}.items())

    @cached_property
    def threads(self) -> int:
        return math.prod(self.tile) // self.tm * (self.channels // self.lanes)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(-(-n // t) for n, t in zip(self.image.sizes, self.tile))

    @cached_property
    def slabs(self) -> int:
        return -(-self.image.row // self.channels)

    @cached_property
    def blocks(self) -> int:
        return self.image.images * math.prod(self.counts) * self.slabs

    @cached_property
    def patch(self) -> tuple[int, ...]:
        """Pixels of the image that a tile reads, along each axis."""
        i = self.image
        return tuple((t - 1) * s + (k - 1) * d + 1 for t, s, k, d in zip(self.tile, i.strides, i.taps, i.dilations))

    @cached_property
    def copied(self) -> int:
        """Channels that a thread copies at a time."""
        return math.gcd(16 // self.image.x.dtype.bytes, self.channels, self.image.row)

    @cached_property
    def _pitch(self) -> tuple[int, int]:
        """Visits of shared memory per warp read, and a pixel's elements: padding keeps lanes off the same bank."""
        return min((self._visits(self.channels + k * self.copied), self.channels + k * self.copied) for k in range(4))

    @property
    def pitch(self) -> int:
        """Elements of a pixel in shared memory."""
        return self._pitch[1]

    @property
    def visits(self) -> int:
        """How often a read of a warp visits shared memory."""
        return self._pitch[0]

    def _visits(self, pitch: int) -> int:
        i, wide = self.image, self.lanes * self.image.x.dtype.bytes
        vectors, together, count = self.channels // self.lanes, min(SHARED_RATE // max(wide, 4), 32), 0
        for first in range(0, 32, together):
            words: set[int] = set()
            for t in range(first, first + together):
                at, run, far = 0, t // vectors, 1
                for n, step, size in zip(
                    (self.tile[-1] // self.tm, *self.tile[-2::-1]),
                    (i.strides[-1] * self.tm, *i.strides[-2::-1]),
                    self.patch[::-1],
                ):
                    at, run, far = at + run % n * step * far, run // n, far * size
                start = at * pitch * i.x.dtype.bytes + t % vectors * wide
                words.update(range(start // 4, -(-(start + wide) // 4)))
            count += max(collections.Counter(w % 32 for w in words).values())
        return count

    @cached_property
    def shared_bytes(self) -> int:
        return (
            math.prod(self.patch) * (self.channels + 3 * self.copied) + math.prod(self.image.taps) * self.channels
        ) * self.image.x.dtype.bytes

    @cached_property
    def reads(self) -> tuple[int, int]:
        """Pixels and weights that a thread reads for a row of taps, some taps at a time."""
        i, taps = self.image, self.image.taps[-1]
        each = [
            len({p * i.strides[-1] + t * i.dilations[-1] for p in range(self.tm) for t in range(n)})
            for _, n in pieces(taps)
        ]
        return sum(each), taps

    @cached_property
    def registers(self) -> int:
        """Of a thread: sums, the pixels and weights of a piece of a row, places."""
        n, i = min(self.image.taps[-1], PIECE), self.image
        return (self.tm + (self.tm - 1) * i.strides[-1] + (n - 1) * i.dilations[-1] + 1 + n) * self.lanes + 36


def pieces(taps: int) -> list[tuple[int, int]]:
    """Runs of taps of a row: first one and number."""
    return [(k, min(PIECE, taps - k)) for k in range(0, taps, PIECE)]


def slabs(image: Image) -> Iterator[Slab]:
    """Tiles, slabs of channels and divisions among threads."""
    size = image.x.dtype.bytes
    widths = [n for n in (8, 4, 2) if n * size <= 16 and image.row % n == 0]
    for lanes, vectors in itertools.product(widths, (4, 8, 16, 32)):
        channels = lanes * vectors
        if channels > max(image.row, lanes * 4):
            continue
        for tile in _tiles(image.sizes):
            for tm in (1, 2, 4, 7, 8):
                if tile[-1] % tm == 0:
                    yield Slab(image, tile, channels, tm, lanes)


def _tiles(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    each = []
    for k, n in enumerate(reversed(sizes)):
        sizes_of = (4, 7, 8, 14, 16, 28, 32, 64) if k == 0 else (1, 2, 4, 7, 8, 14, 16) if k == 1 else (1, 2, 4)
        each.append([p for p in sizes_of if p < 2 * n])
    yield from (tile[::-1] for tile in itertools.product(*each))


def ranked(image: Image, target: GpuTarget) -> list[tuple[float, Slab]]:
    """The slabs that fit, by estimated cycles."""
    found = [(cost(image, s, target), k, s) for k, s in enumerate(slabs(image)) if fits(s, target)]
    best = sorted(found, key=lambda x: x[:2])[:REFINED]
    again = sorted(((cost(image, s, target, s.visits), k, s) for _, k, s in best), key=lambda x: x[:2])
    return [(cycles, s) for cycles, _, s in again]


def fits(s: Slab, target: GpuTarget) -> bool:
    return (
        32 <= s.threads <= 512 and s.threads % 32 == 0 and s.registers <= 160 and s.shared_bytes <= target.shared_bytes
    )


def cost(image: Image, s: Slab, target: GpuTarget, visits: int = 1) -> float:
    """Estimated cycles of the busiest SM, as of `patch.cost`. `visits` of shared memory for a read of a warp."""
    size, warps, lanes = image.x.dtype.bytes, s.threads // 32, s.lanes
    most = -(-s.blocks // target.sms)
    together = min(most, resident(target, warps, s.registers, s.shared_bytes))
    pixels, rows = math.prod(s.patch), math.prod(image.taps[:-1])
    copies = (pixels + math.prod(image.taps)) * s.channels / s.copied / s.threads * COPY
    reads, taps = sum(s.reads), image.taps[-1]
    own = copies + rows * (ROW + reads * (1 + lanes * (size == 2)) + s.tm * taps * lanes) + s.tm * (FINISH + 4 * lanes)
    shared = warps * rows * reads * max(visits, 32 * lanes * size / SHARED_RATE)
    fetched = (pixels + math.prod(s.tile) + math.prod(image.taps)) * -(-s.channels * size // SECTOR) * SECTOR
    asked = max(warps * own / ISSUED, shared, fetched / L2_RATE)
    return max(most * asked, -(-most // together) * (2 * LATENCY + ALONE * own + fetched / L2_RATE))


def window_cost(image: Image, target: GpuTarget) -> float:
    """The same of the template `window`: its instructions, or the wait for one tap after the other."""
    products = image.images * math.prod(image.sizes) * image.row * math.prod(image.taps)
    return max(products * WINDOW / 128 / target.sms, 2 * LATENCY + math.prod(image.taps) * 40)


class DepthwiseKernel:
    """Kernel of one convolution and slab. `constants`: buffers readable before the previous kernel ends."""

    def __init__(self, image: Image, slab: Slab, constants: frozenset[str]) -> None:
        self.i, self.s, self.early = image, slab, image.w.name in constants
        if slab.tile[-1] % slab.tm or not 1 <= slab.threads <= 1024:
            raise ScheduleError(f"{slab.threads} threads with {slab.tm} pixels each are no tile of {slab.tile}")

    def build(self) -> Kernel:
        i, s, b = self.i, self.s, Builder()
        with b.loop("block", s.blocks, "block.x") as block:
            self.first, at = b.let("slab", block % s.slabs) * s.channels, block // s.slabs
            origin: list[Expr] = []
            for n, t in reversed(list(zip(s.counts, s.tile))):
                origin.insert(0, b.let("tile0", at % n) * t)
                at = at // n
            self.image, self.origin = b.let("image", at), origin
            patch = b.alloc("patch", i.x.dtype, math.prod(s.patch), s.pitch, space="shared")
            filters = b.alloc("filters", i.x.dtype, math.prod(i.taps), s.channels, space="shared")
            with b.loop("t", s.threads, "thread.x") as thread:
                copy = PatchCopy(i, s.threads, thread)
                if self.early:
                    b.do("pdl_launch")
                across = s.channels // s.copied
                with copy.turns(b, math.prod(i.taps), across, "tap") as (tap, vector):
                    channel = self.first + vector * s.copied
                    copy.vector(b, channel < i.row, filters, (tap, vector * s.copied), i.w, (tap, channel), s.copied)
                if self.early:
                    b.do("pdl_wait")
                copy.patch(b, patch, s.patch, (self.image, *origin), self.first, s.channels, s.copied)
                copy.wait(b)
                self.products(b, thread, patch, filters)
        return i.with_body(b.block())

    def products(self, b: Builder, t: Expr, patch: Buffer, filters: Buffer) -> None:
        i, s, lanes = self.i, self.s, self.s.lanes
        vectors, kind = s.channels // lanes, i.x.dtype
        channel, run = b.let("channel", t % vectors * lanes), t // vectors
        place: list[Expr] = []
        for n in ((s.tile[-1] // s.tm), *reversed(s.tile[:-1])):
            place.insert(0, b.let("place", run % n))
            run = run // n
        place[-1] = place[-1] * s.tm
        start = _flat([p * k for p, k in zip(place, i.strides)], s.patch)
        acc = b.alloc("sum", f32, s.tm, lanes)
        with b.loop("m", s.tm, "unroll") as m, b.loop("v", lanes, "unroll") as v:
            b.store(acc, (m, v), 0.0)
        step, far = i.strides[-1], i.dilations[-1]
        with b.loop("row", math.prod(i.taps[:-1])) as row:
            at = b.let("at", start + self.tap(row))
            for first, taps in pieces(i.taps[-1]):
                reach = (s.tm - 1) * step + (taps - 1) * far + 1
                own, weights = b.alloc("own", kind, reach, lanes), b.alloc("weights", kind, taps, lanes)
                with b.loop("k", reach, "unroll") as k:
                    b.store(own, (k, 0), patch.at(at + first * far + k, channel, lanes=lanes), lanes)
                with b.loop("k", taps, "unroll") as k:
                    b.store(weights, (k, 0), filters.at(row * i.taps[-1] + first + k, channel, lanes=lanes), lanes)
                with (
                    b.loop("k", taps, "unroll") as k,
                    b.loop("m", s.tm, "unroll") as m,
                    b.loop("v", lanes, "unroll") as v,
                ):
                    factors = cast(own[m * step + k * far, v], f32), cast(weights[k, v], f32)
                    b.store(acc, (m, v), i.c.update(acc[m, v], *factors))
        with b.loop("m", s.tm, "unroll") as m:
            pixel = [o + p for o, p in zip(self.origin, (*place[:-1], place[-1] + m))]
            inside = self.first + channel < i.c.cols.size
            for p, n in zip(pixel, i.sizes):
                inside = inside & (p < n)
            with b.when(inside):
                index = minimum(_flat([self.image, *pixel], (i.images, *i.sizes)), i.c.rows.size - 1)
                store_row(b, i.c, {}, index, self.first + channel, acc, (m, const(0)), lanes)

    def tap(self, row: Expr) -> Expr:
        """Pixels of the patch from a window's first one to that of a row of taps."""
        at: list[Expr] = [const(0)]
        for n, d in reversed(list(zip(self.i.taps[:-1], self.i.dilations[:-1]))):
            at.insert(0, row % n * d)
            row = row // n
        return _flat(at, self.s.patch)


def _flat(place: list[Expr], sizes: tuple[int, ...]) -> Expr:
    """The number of an element of an array, in order."""
    at: Expr = const(0)
    for p, n in zip(place, sizes):
        at = at * n + p
    return at
