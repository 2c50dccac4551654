"""Template `patch`: a convolution with image and filters, read off a problem and checked against its nest."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction.mma import half_contraction
from dnnc.ir.dtype import bf16, f16, f32
from dnnc.ir.expr import Load, const, substitute, value, walk
from dnnc.ir.loops.stmt import Block, Buffer, Kernel
from dnnc.ir.op import ContractionForm
from dnnc.ir.ops.window import node_window
from dnnc.ir.types import TensorType
from dnnc.passes.lower.form import Contraction
from dnnc.passes.rewrites.channels_last import last, taps_first
from dnnc.passes.schedule.problem import Problem

SAMPLES = 40  # points at which the nest is compared with the convolution
VECTOR = 8  # channels of 16 bits that make 16 bytes
PLANES = 4  # channels of an image that may lie in planes: a chunk, with zeros


@dataclass(frozen=True)
class Image:
    """A convolution. `x`: [images, *inside, row]; `w`: [outputs, taps * channels]; `sizes` of the result, `taps`,
    strides and so on by axis; `row`: elements of a pixel in memory; `channels` of a group.

    Of a depthwise one the channels are columns, and `w` is [taps, row]. An image of a few channels may have them in
    `planes`, [images, planes, *inside], its filters [outputs, planes, taps]; `channels` then counts zeros too.
    """

    c: Contraction
    x: Buffer
    w: Buffer
    images: int
    inside: tuple[int, ...]
    sizes: tuple[int, ...]
    taps: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    row: int
    channels: int
    depthwise: bool = False
    planes: int = 0

    @cached_property
    def fold(self) -> int:
        """Return groups merged into one by zero filters: as many as fill vectors of 8 channels of 16 bits."""
        n = VECTOR // math.gcd(self.channels, VECTOR)
        return (
            n
            if self.x.dtype.bytes == 2 and not self.depthwise and not self.planes and self.c.batch.size % n == 0
            else 1
        )

    @property
    def units(self) -> int:
        """Groups, or as many as count as one."""
        return self.c.batch.size // self.fold

    @property
    def wide(self) -> int:
        """Channels of a unit."""
        return self.channels * self.fold

    @property
    def outs(self) -> int:
        """Columns of a unit."""
        return self.c.cols.size * self.fold

    @cached_property
    def tensor(self) -> bool:
        """Do tensor cores multiply?"""
        return self.x.dtype.bytes == 2 and (self.wide % VECTOR == 0 or self.planes > 0)

    @cached_property
    def chunk(self) -> int:
        """Neighbouring channels that are read together."""
        return PLANES if self.planes else VECTOR if self.tensor else math.gcd(self.channels, 4)

    @property
    def chunks(self) -> int:
        """Of the sum."""
        return self.red // self.chunk

    @property
    def red(self) -> int:
        """Elements of the sum, those included that fill chunks."""
        return math.prod(self.taps) * self.wide

    @property
    def together(self) -> int:
        """Chunks of a step: of one product of the tensor cores."""
        return 16 // self.chunk if self.tensor else 1

    @property
    def steps(self) -> int:
        return -(-self.chunks // self.together)

    @property
    def unit(self) -> int:
        """Pixels that a warp takes at a time."""
        return 16 if self.tensor else 32

    @property
    def lanes_across(self) -> int:
        """Columns that a warp takes at a time."""
        return 8 if self.tensor else 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of a warp."""
        return (8, 16, 32, 64) if self.tensor else (2, 4, 8)

    def place(self, m: int, tap: int, channel: int) -> int | None:
        """Where a channel of the image lies that a tap meets at pixel m of the result; None in the padding."""
        at: list[int] = []
        for n, taps, size, s, d, begin in reversed(
            list(zip(self.sizes, self.taps, self.inside, self.strides, self.dilations, self.begin))
        ):
            (m, i), (tap, t) = divmod(m, n), divmod(tap, taps)
            at.insert(0, i * s + t * d - begin)
            if not 0 <= at[0] < size:
                return None
        if self.planes:
            m = m * self.planes + channel
        for i, size in zip(at, self.inside):
            m = m * size + i
        return m if self.planes else m * self.row + channel

    def with_body(self, body: Block) -> Kernel:
        """The kernel, whose image and filters are the buffers here."""
        kernel, swap = self.c.kernel, {p.name: p for p in (self.x, self.w)}
        params = tuple(swap.get(p.name, p) for p in kernel.entry.params)
        return replace(kernel, funcs=(*kernel.funcs[:-1], replace(kernel.entry, params=params))).with_body(body)


_READ: WeakKeyDictionary[Problem, Image | None] = WeakKeyDictionary()


def image_of(problem: Problem, target: GpuTarget) -> Image | None:
    """The convolution of a problem with its image and filters; None where it is none that suits."""
    if problem not in _READ:
        _READ[problem] = _image_of(problem)
    found = _READ[problem]
    return found if found is None or target.major >= 8 else None


def _image_of(problem: Problem) -> Image | None:
    node, c = problem.anchor, half_contraction(problem) or problem.contraction
    if node is None or node.op.contraction is not ContractionForm.CONVOLUTION or c is None or c.dtype is not f32:
        return None
    x, w, y = node.inputs[0], node.inputs[1], node.outputs[0]
    a, b = c.a.value, c.b.value
    if (
        x is None
        or w is None
        or not isinstance(a, Load)
        or not isinstance(b, Load)
        or a.dtype is not b.dtype
        or a.buf is b.buf
    ):
        return None
    group = int(node.attrs["group"])
    if any(v.type.dtype not in (f16, bf16, f32) or not _fixed(v.type) for v in (x, w, y)):
        return None
    if any(isinstance(e, Load) and e.buf in (a.buf, b.buf) for e in walk(c.store.value)):
        return None
    depthwise = group > 1 and c.cols.size == 1 and group == x.type.shape[1] == w.type.shape[0]
    if depthwise:  # channels are batches of the nest, each with one column
        c = replace(c, b=replace(c.b, axis=c.batch))
    elif c.batch.size != group or c.cols.size < 2 or c.cols.size * group != w.type.shape[0]:
        return None
    win = node_window(w.type.shape[2:], node.attrs)
    n, inside, sizes, taps = (
        _ints(x.type.shape[:1])[0],
        _ints(x.type.shape[2:]),
        _ints(y.type.shape[2:]),
        _ints(win.kernel),
    )
    each = math.prod(taps)
    if c.red.size % each or c.rows.size != n * math.prod(sizes):
        return None
    channels, row, planes = c.red.size // each, _row(x.type, depthwise or group == 1), 0
    if depthwise and row == c.cols.size and w.type.encoding == taps_first(w.type.rank, x.type.encoding.block(1)):
        filters: tuple[int, ...] = (each, row)
    elif not depthwise and row is not None and _row(w.type, group == 1) is not None and row >= group * channels:
        filters = (group * c.cols.size, c.red.size)
    elif group == 1 and x.type.row_major and w.type.row_major and channels <= PLANES:
        row, planes, filters = 0, channels, (c.cols.size, channels, each)
    else:
        return None
    shape = (n, planes, *inside) if planes else (n, *inside, row)
    image = Image(
        c,
        Buffer(a.buf.name, a.dtype, tuple(map(const, shape))),
        Buffer(b.buf.name, b.dtype, tuple(map(const, filters))),
        n, inside, sizes, taps, win.strides, win.dilations, _ints(win.begin), row, PLANES if planes else channels,
        depthwise, planes,
    )  # fmt: skip
    return image if _agrees(image, a, b) else None


def _fixed(t: TensorType) -> bool:
    return all(value(const(d)) is not None for d in t.shape)


def _ints(dims: Sequence[object]) -> tuple[int, ...]:
    return tuple(int(value(const(d)) or 0) for d in dims)  # type: ignore[arg-type]


def _row(t: TensorType, padded: bool) -> int | None:
    """Elements of a row of channels in memory; None where these do not lie last, or are `padded` and must not be."""
    n, block = int(value(const(t.shape[1])) or 0), t.encoding.block(1)
    if t.encoding != last(t.rank, 0, block) or (block > 1 and not padded):
        return None
    return -(-n // block) * block


def _agrees(image: Image, a: Load, b: Load) -> bool:
    """True if the nest reads what the conv's attributes say, at the axes' ends and at random points."""
    c, rng = image.c, random.Random(0)
    axes = (c.batch, c.rows, c.cols, c.red)
    points = [
        tuple(rng.choice((0, 1, x.size // 2, x.size - 1, rng.randrange(x.size))) % x.size for x in axes)
        for _ in range(SAMPLES)
    ]
    for g, m, o, k in points:
        env = {**c.batch.at(g), **c.rows.at(m), **c.cols.at(o), **c.red.at(k)}
        held = value(substitute(b.buf.offset(b.idx), env))
        if held is None:
            return False
        if image.planes:
            out, left = divmod(held, c.red.size)
            channel, tap = divmod(left, math.prod(image.taps))
        elif image.depthwise:
            tap, channel = divmod(held, image.row)
            out = channel
        else:
            out, left = divmod(held, c.red.size)
            tap, channel = divmod(left, image.channels)
            out, channel = out - g * c.cols.size, channel + g * image.channels
        place = image.place(m, tap, channel)
        if out != o or all(value(substitute(e, env)) for e in c.a.conds) != (place is not None):
            return False
        if place is not None and value(substitute(a.buf.offset(a.idx), env)) != place:
            return False
    return not c.b.conds
