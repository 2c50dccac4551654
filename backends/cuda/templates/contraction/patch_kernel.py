"""The kernel of the template `patch`: copies, products by tensor cores or ordinary cores, and the end of the sums.

Tensor cores (mma.m16n8k16) take 16 pixels x 16 elements of the sum x 8 columns. The sum consists of chunks of
neighbouring channels of a tap. `ldmatrix` brings chunks of 8, each lane giving the place of one, so that neighbouring
chunks may be of different taps. Of chunks of 4, which only images in planes have, any order of the sum will do if both
operands have the same one: lane 4*r + q holds chunk 4*step + q of pixels r and r + 8 and of column r. Ordinary cores
give each lane some pixels and columns of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from dnnc.backends.cuda.templates.contraction.patch_image import VECTOR, Image
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.ir.dtype import boolean, f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, cast, const, minimum
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, call
from dnnc.passes.schedule.problem import Knobs

UNROLLED = 12  # steps of a sum that are unrolled
WIDE = 8  # results that a thread finishes at a time


@dataclass(frozen=True)
class PatchCopy:
    """Code of thread `t` of `threads` that brings image and filter parts of a block into shared memory."""

    image: Image
    threads: int
    t: Expr

    @contextmanager
    def turns(self, b: Builder, rows: int, across: int, name: str) -> Iterator[tuple[Expr, Expr]]:
        """The elements of an array, by row and column, the threads taking turns."""
        n = -(-rows * across // self.threads)
        with b.loop("r", n, "unroll" if n <= 4 else "range") as r:
            e = r * self.threads + self.t
            row, column = b.let(name, e // across), b.let("column", e % across)
            with b.when(row < rows):
                yield row, column

    def vector(
        self,
        b: Builder,
        cond: Expr,
        to: Buffer,
        there: tuple[Expr, ...],
        source: Buffer,
        here: tuple[Expr, ...],
        lanes: int,
    ) -> None:
        """Copy a vector, or put zeros where `cond` does not hold."""

        def copied() -> None:
            if lanes * source.dtype.bytes >= 4:
                b.do("cp_async", to.ref(*there, lanes=lanes), source.ref(*here, lanes=lanes))
            else:
                b.store(to, there, source.at(*here))

        b.branch(cond, copied, lambda: b.store(to, there, const(0, to.dtype), lanes))

    def gather(self, b: Builder, cond: Expr, to: Buffer, there: tuple[Expr, ...], elements: Sequence[Expr]) -> None:
        """Fill a chunk with elements of several places and zeros behind; only zeros where `cond` fails."""
        own = b.alloc("gathered", to.dtype, self.image.channels)
        b.store(own, (0,), const(0, to.dtype), self.image.channels)
        with b.when(cond):
            for n, e in enumerate(elements):
                b.store(own, (n,), e)
        b.store(to, there, own.at(0, lanes=self.image.channels), self.image.channels)

    def patch(
        self,
        b: Builder,
        to: Buffer,
        sizes: tuple[int, ...],
        origin: Sequence[Expr],
        first: Expr,
        channels: int,
        lanes: int,
    ) -> None:
        """The pixels that a tile reads: `sizes` of them along each axis, for results from `origin` on, of which the
        first number is the image's; channels from `first` on. Outside of the image there are zeros.
        """
        i, across = self.image, channels // lanes
        with self.turns(b, math.prod(sizes), across, "pixel") as (pixel, channel):
            channel = channel * lanes
            at: list[Expr] = []
            cond, left = const(bool(i.planes), boolean) | (first + channel < i.row), pixel
            for k in reversed(range(len(sizes))):
                place = b.let("at", origin[k + 1] * i.strides[k] + left % sizes[k] - i.begin[k])
                left, cond = left // sizes[k], cond & (place >= 0) & (place < i.inside[k])
                at.insert(0, place)
            if i.planes:
                self.gather(
                    b, cond, to, (pixel, const(0)), [i.x.at(origin[0], plane, *at) for plane in range(i.planes)]
                )
            else:
                self.vector(b, cond, to, (pixel, channel), i.x, (origin[0], *at, first + channel), lanes)

    def wait(self, b: Builder) -> None:
        """Until what all threads copied is there."""
        b.do("cp_async_commit")
        b.do("cp_async_wait", 0)
        b.do("barrier")


@dataclass(frozen=True)
class Shape:
    """How a convolution is divided: a block's `tile` of pixels, `group` groups with `bn` columns each; a warp's tm
    units of pixels and tn columns; `slices` groups of warps that share the sum.
    """

    image: Image
    tile: tuple[int, ...]
    group: int
    bn: int
    tm: int
    tn: int
    slices: int

    @staticmethod
    def of(image: Image, knobs: Mapping[str, int | str]) -> Shape:
        k = {name: int(v) for name, v in knobs.items()}
        rank = len(image.sizes)
        tile = (k.get("tile", 1), k["rows"], k["pixels"])[3 - rank :]
        return Shape(image, tile, k["group"], k["bn"], k["tm"], k["tn"], k["slices"])

    @property
    def knobs(self) -> Knobs:
        names = ("tile", "rows", "pixels")[3 - len(self.tile) :]
        tile = dict(zip(names, self.tile)) if len(self.tile) > 1 else {"rows": 1, "pixels": self.tile[0]}
        return tuple(
            {**tile, "group": self.group, "bn": self.bn, "tm": self.tm, "tn": self.tn, "slices": self.slices}.items()
        )

    @cached_property
    def pixels(self) -> int:
        return math.prod(self.tile)

    @cached_property
    def down(self) -> int:
        """Warps over the pixels."""
        return -(-self.pixels // (self.image.unit * self.tm))

    @cached_property
    def across(self) -> int:
        """Warps over the columns of a group."""
        return -(-self.bn // self.tn)

    @cached_property
    def warps(self) -> int:
        return self.slices * self.group * self.across * self.down

    @cached_property
    def steps(self) -> int:
        """Of a slice."""
        return -(-self.image.steps // self.slices)

    @cached_property
    def parts(self) -> int:
        """Of a group's columns."""
        return -(-self.image.outs // self.bn)

    @cached_property
    def slabs(self) -> int:
        return -(-self.image.units // self.group) * self.parts

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Tiles along each axis."""
        return tuple(-(-n // t) for n, t in zip(self.image.sizes, self.tile))

    @cached_property
    def blocks(self) -> int:
        return self.image.images * math.prod(self.counts) * self.slabs

    @cached_property
    def patch(self) -> tuple[int, ...]:
        """Pixels of the image that a tile reads, along each axis."""
        i = self.image
        return tuple((t - 1) * s + (k - 1) * d + 1 for t, s, k, d in zip(self.tile, i.strides, i.taps, i.dilations))

    @cached_property
    def patch_pixels(self) -> int:
        return math.prod(self.patch)

    @cached_property
    def patch_lanes(self) -> int:
        """Elements of the image that a thread copies at a time."""
        if self.image.planes:
            return self.image.channels
        return math.gcd(16 // self.image.x.dtype.bytes, self.group * self.image.wide, self.image.row)

    @cached_property
    def filter_lanes(self) -> int:
        return math.gcd(
            16 // self.image.x.dtype.bytes,
            self.image.c.red.size,
            self.image.channels if self.image.fold > 1 else self.image.c.red.size,
        )

    @cached_property
    def pitch(self) -> int:
        """Return a pixel's elements in shared memory: an odd number of vectors spreads neighbours over banks."""
        if self.image.planes:
            return self.image.channels
        wide = 16 // self.image.x.dtype.bytes
        return (-(-self.group * self.image.wide // wide) | 1) * wide

    @cached_property
    def filter_pitch(self) -> int:
        """Elements of a filter in shared memory, with zeros up to whole steps; an odd number of vectors."""
        wide = 16 // self.image.x.dtype.bytes
        return (-(-self.filter_size // wide) | 1) * wide

    @cached_property
    def filter_size(self) -> int:
        """Elements of a filter, zeros up to the last step included."""
        return self.slices * self.steps * self.image.together * self.image.chunk

    @cached_property
    def sum_rows(self) -> int:
        return self.down * self.image.unit * self.tm

    @cached_property
    def sum_pitch(self) -> int:
        """Elements of a row of sums: an odd number of vectors of 16 bytes."""
        return (-(-self.group * self.bn // 4) | 1) * 4

    @cached_property
    def shared_bytes(self) -> int:
        copies = (self.patch_pixels + 1) * self.pitch + self.group * self.bn * self.filter_pitch
        return copies * self.image.x.dtype.bytes + self.slices * self.sum_rows * self.sum_pitch * 4

    @cached_property
    def registers(self) -> int:
        """Of a thread: sums, fragments, places."""
        across = self.tn // self.image.lanes_across
        sums = self.tm * across * (4 if self.image.tensor else 1)
        return sums + (self.tm * 4 + across * 4 if self.image.tensor else (self.tm + 2) * self.image.chunk) + 48

    @cached_property
    def width(self) -> int:
        """Neighbouring results that a thread finishes at a time."""
        return math.gcd(WIDE, self.bn, self.image.c.cols.size)


class PatchKernel:
    """Kernel of one convolution and shape. `constants`: buffers readable before the previous kernel ends."""

    def __init__(self, image: Image, shape: Shape, constants: frozenset[str]) -> None:
        self.i, self.s, self.c = image, shape, image.c
        self.early = image.w.name in constants
        if not 1 <= shape.warps <= 32 or shape.tn % image.lanes_across:
            raise ScheduleError(f"{shape.warps} warps of {shape.tn} columns are no block")

    def build(self) -> Kernel:
        i, s, b = self.i, self.s, Builder()
        with b.loop("block", s.blocks, "block.x") as block:
            slab, at = block % s.slabs, block // s.slabs
            self.group0, self.col0 = b.let("group0", slab // s.parts) * s.group, b.let("part0", slab % s.parts) * s.bn
            origin: list[Expr] = []
            for n, t in reversed(list(zip(s.counts, s.tile))):
                origin.insert(0, b.let("tile0", at % n) * t)
                at = at // n
            self.image, self.origin = b.let("image", at), origin
            self.patch = b.alloc(
                "patch", i.x.dtype, s.patch_pixels + 1, s.pitch, space="shared"
            )  # the last pixel is zeros
            self.filters = b.alloc("filters", i.x.dtype, s.group * s.bn, s.filter_pitch, space="shared")
            self.sums = b.alloc("sums", f32, s.slices, s.sum_rows, s.sum_pitch, space="shared")
            with b.loop("w", s.warps, "warp") as w, b.loop("l", 32, "lane") as lane:
                self.body(b, w, lane)
        return i.with_body(b.block())

    def body(self, b: Builder, w: Expr, lane: Expr) -> None:
        s, t = self.s, w * 32 + lane
        copy = PatchCopy(self.i, s.warps * 32, t)
        if self.early:
            b.do("pdl_launch")
        self.copy_filters(b, copy)
        if self.early:
            b.do("pdl_wait")
        channels, first = s.group * self.i.wide, self.group0 * self.i.wide
        copy.patch(b, self.patch, s.patch, (self.image, *self.origin), first, channels, s.patch_lanes)
        copy.wait(b)
        self.row = b.let("m0", w % s.down) * s.tm * self.i.unit
        self.col = b.let("n0", w // s.down % s.across) * s.tn
        self.g = b.let("g", w // (s.down * s.across) % s.group)
        self.slice = b.let("slice", w // (s.down * s.across * s.group))
        (self.tensor_products if self.i.tensor else self.plain_products)(b, lane)
        b.do("barrier")
        self.finish(b, copy)

    def copy_filters(self, b: Builder, copy: PatchCopy) -> None:
        """Rows of filters, and zeros behind each."""
        i, s, c = self.i, self.s, self.c
        lanes, size = (i.channels if i.planes else s.filter_lanes), i.red
        with copy.turns(b, s.group * s.bn, size // lanes, "filter") as (f, k):
            unit, col = self.group0 + f // s.bn, self.col0 + f % s.bn
            cond, start = (unit < i.units) & (col < i.outs), k * lanes
            at = minimum(unit * i.outs + col, i.units * i.outs - 1)
            if i.fold > 1:  # zeros for the channels of other groups
                tap, channel = start // i.wide, start % i.wide
                cond, start = (
                    cond
                    & (channel // i.channels >= col // c.cols.size)
                    & (channel // i.channels <= col // c.cols.size),
                    tap * i.channels + channel % i.channels,
                )
            if i.planes:
                copy.gather(b, cond, self.filters, (f, k * lanes), [i.w.at(at, plane, k) for plane in range(i.planes)])
            else:
                copy.vector(b, cond, self.filters, (f, k * lanes), i.w, (at, start), lanes)
        if i.tensor:
            with copy.turns(b, 1, s.group * i.wide // i.chunk, "zero") as (_, k):
                b.store(self.patch, (s.patch_pixels, k * i.chunk), const(0, i.x.dtype), i.chunk)
        left, wide = s.filter_size - size, i.chunk
        if left:
            with copy.turns(b, s.group * s.bn, left // wide, "zero") as (f, k):
                b.store(self.filters, (f, size + k * wide), const(0, i.w.dtype), wide)

    # --- products -----------------------------------------------------------------------------------------------------

    def place(self, m: Expr) -> Expr:
        """Of pixel m of the tile: the first pixel of the patch that it reads."""
        at, left, far = const(0), minimum(m, self.s.pixels - 1), 1
        for k in reversed(range(len(self.s.tile))):
            at = at + left % self.s.tile[k] * (self.i.strides[k] * far)
            left, far = left // self.s.tile[k], far * self.s.patch[k]
        return at

    def tap(self, chunk: Expr) -> tuple[Expr, Expr]:
        """Pixels from the first one of a window to a chunk's, and the chunk's first channel."""
        i, each = self.i, self.i.wide // self.i.chunk
        at, left, far = const(0), chunk // each, 1
        for k in reversed(range(len(i.taps))):
            at = at + left % i.taps[k] * (i.dilations[k] * far)
            left, far = left // i.taps[k], far * self.s.patch[k]
        return at, chunk % each * i.chunk

    def each_step(self, b: Builder) -> list[tuple[int, bool]]:
        """Runs of steps: how many, and whether all of their chunks exist."""
        i, s = self.i, self.s
        if i.chunks == s.slices * s.steps * i.together:
            return [(s.steps, True)]
        if s.slices > 1:
            return [(s.steps, False)]
        return [(s.steps - 1, True), (1, False)]

    def tensor_products(self, b: Builder, lane: Expr) -> None:
        i, s, v = self.i, self.s, self.i.chunk
        across, pairs, kind = s.tn // 8, -(-s.tn // 16), i.x.dtype
        r, q = lane // 4, lane % 4
        acc = b.alloc("sum", f32, s.tm, across, 4)
        with b.loop("i", s.tm, "unroll") as m, b.loop("j", across, "unroll") as n:
            b.store(acc, (m, n, 0), 0.0, 4)
        done = 0
        for steps, whole in self.each_step(b):
            with b.loop("step", steps, "unroll" if s.steps <= UNROLLED else "range") as step:
                first = b.let("first", (self.slice * s.steps + step + done) * i.together)
                fb, fa = b.alloc("fb", kind, pairs, 8), b.alloc("fa", kind, 8)
                with b.loop("j", pairs, "unroll") as n:
                    if v == VECTOR:
                        f = self.filter(self.col + n * 16 + lane // 16 * 8 + lane % 8)
                        loaded = call("ldmatrix_x4", self.filters.ref(f, (first + lane // 8 % 2) * v, lanes=8))
                        b.store(fb, (n, 0), loaded, 8)
                    else:
                        for k in range(2):
                            f = self.filter(self.col + n * 16 + k * 8 + r)
                            b.store(fb, (n, k * 4), self.filters.at(f, (first + q) * v, lanes=v), v)
                pixel, channel = self.chunk(b, first + (lane // 16 if v == VECTOR else q), whole)
                with b.loop("i", s.tm, "unroll") as m:
                    if v == VECTOR:
                        at = self.place(self.row + m * 16 + lane % 16) + pixel
                        b.store(
                            fa,
                            (0,),
                            call(
                                "ldmatrix_x4",
                                self.patch.ref(at if whole else minimum(at, s.patch_pixels), channel, lanes=8),
                            ),
                            8,
                        )
                    else:
                        for h in range(2):
                            own = b.alloc("own", kind, v)
                            at = self.place(self.row + m * 16 + h * 8 + r) + pixel
                            vector = self.patch.at(at if whole else minimum(at, s.patch_pixels), channel, lanes=v)
                            b.store(own, (0,), vector, v)
                            b.store(fa, (h * 2,), own.at(0, lanes=2), 2)
                            b.store(fa, (h * 2 + 4,), own.at(2, lanes=2), 2)
                    with b.loop("j", across, "unroll") as n:
                        filters = fb.at(n // 2, n % 2 * 4, lanes=4)
                        made = call("mma_m16n8k16", acc.at(m, n, 0, lanes=4), fa.at(0, lanes=8), filters)
                        b.store(acc, (m, n, 0), made, 4)
            done += steps
        with b.loop("i", s.tm, "unroll") as m, b.loop("j", across, "unroll") as n, b.loop("h", 2, "unroll") as half:
            lanes = 2 - s.bn % 2
            for k in range(0, 2, lanes):
                at = self.col // lanes + (n * 8 + q * 2 + k) // lanes  # of vectors of a group's columns
                with b.when(at < s.bn // lanes):
                    place = (self.slice, self.row + m * 16 + half * 8 + r, self.g * s.bn + at * lanes)
                    b.store(self.sums, place, acc.at(m, n, half * 2 + k, lanes=lanes), lanes)

    def filter(self, col: Expr) -> Expr:
        """Where a column of the warp's unit has its filter."""
        return self.g * self.s.bn + minimum(col, self.s.bn - 1)

    def chunk(self, b: Builder, number: Expr, whole: bool) -> tuple[Expr, Expr]:
        """Offset of a chunk of the sum from a window's first pixel and channel. Missing chunks are zero pixels."""
        i = self.i
        pixel, channel = self.tap(number if whole else minimum(number, i.chunks - 1))
        if not whole:
            pixel = pixel + number // i.chunks * self.s.patch_pixels
        return b.let("tap", pixel), b.let("channel", self.g * i.wide + channel)

    def plain_products(self, b: Builder, lane: Expr) -> None:
        i, s, v = self.i, self.s, self.i.chunk
        acc = b.alloc("sum", f32, s.tm, s.tn)
        with b.loop("i", s.tm, "unroll") as m, b.loop("j", s.tn, "unroll") as n:
            b.store(acc, (m, n), 0.0)
        done = 0
        for steps, whole in self.each_step(b):
            with b.loop("step", steps, "unroll" if s.steps <= UNROLLED else "range") as step:
                chunk = b.let("chunk", self.slice * s.steps + step + done)
                with b.when(const(whole, boolean) | (chunk < i.chunks)):
                    pixel, channel = self.tap(chunk if whole else minimum(chunk, i.chunks - 1))
                    pixel, channel = b.let("tap", pixel), b.let("first", self.g * i.wide + channel)
                    own, other = b.alloc("own", i.x.dtype, s.tm, v), b.alloc("other", i.x.dtype, v)
                    with b.loop("i", s.tm, "unroll") as m:
                        vector = self.patch.at(self.place(self.row + m * 32 + lane) + pixel, channel, lanes=v)
                        b.store(own, (m, 0), vector, v)
                    with b.loop("j", s.tn, "unroll") as n:
                        f = self.g * s.bn + minimum(self.col + n, s.bn - 1)
                        b.store(other, (0,), self.filters.at(f, chunk * v, lanes=v), v)
                        with b.loop("k", v, "unroll") as k, b.loop("i", s.tm, "unroll") as m:
                            b.store(acc, (m, n), self.c.update(acc[m, n], cast(own[m, k], f32), cast(other[k], f32)))
            done += steps
        lanes = math.gcd(s.tn, s.bn, 4)
        with b.loop("i", s.tm, "unroll") as m, b.loop("j", s.tn // lanes, "unroll") as n:
            at = self.col // lanes + n
            with b.when(at < s.bn // lanes):
                place = (self.slice, self.row + m * 32 + lane, self.g * s.bn + at * lanes)
                b.store(self.sums, place, acc.at(m, n * lanes, lanes=lanes), lanes)

    def finish(self, b: Builder, copy: PatchCopy) -> None:
        """Neighbouring threads finish neighbouring results of a pixel."""
        i, s, c, width = self.i, self.s, self.c, self.s.width
        across = s.group * s.bn // width
        with copy.turns(b, s.pixels, across, "m") as (m, col):
            col = col * width
            unit, col0 = b.let("unit", self.group0 + col // s.bn), self.col0 + col % s.bn
            row, left, far, cond = self.image * math.prod(i.sizes), m, 1, (unit < i.units) & (col0 < i.outs)
            group, col0 = unit * i.fold + col0 // c.cols.size, col0 % c.cols.size if i.fold > 1 else col0
            for k in reversed(range(len(s.tile))):
                y = b.let("at", self.origin[k] + left % s.tile[k])
                row, cond = row + y * far, cond & (y < i.sizes[k])
                left, far = left // s.tile[k], far * i.sizes[k]
            with b.when(cond):
                total, lanes = b.alloc("total", f32, width), math.gcd(width, 4)
                for p in range(0, width, lanes):
                    total_at = sum(
                        (self.sums.at(z, m, col + p, lanes=lanes) for z in range(1, s.slices)),
                        self.sums.at(0, m, col + p, lanes=lanes),
                    )
                    b.store(total, (p,), total_at, lanes)
                batch = c.batch.named(b, minimum(group, c.batch.size - 1))
                store_row(b, c, batch, minimum(row, c.rows.size - 1), col0, total, (const(0),), width)
