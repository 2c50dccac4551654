"""Transposed convolutions as convolutions: one for all phases of the stride, then the phases are interleaved.

    y = conv_transpose(x, w, stride s)            ->   z = conv(x, w'); y = interleave(z, strides=s)
    y = conv_transpose(x, w, stride s, group=g)   ->   z_r = conv(x, w_r, group=g); y = interleave(concat(z_0, z_1, ..),
                                                       strides=s)

Output u = s*q + r gathers x[q - m] * w[s*m + r] over m: for each phase r a convolution of stride 1 with every s-th tap
(the sub-pixel form of Shi et al., "Is the deconvolution layer the same as a convolutional layer?", 2016). Nothing is
multiplied with the zeros that a stretched input would have. Without groups the phases of all axes are channels of one
convolution. Where images lie in blocks of channels, each phase has whole blocks, if need be with channels of zeros:
then whole vectors change places. With groups each phase is a convolution, whose channels are in the order of the
result's; where that makes too many they are one, and the channels of its groups change places with phases. Filters are
rearranged by ops: of constants they are folded, of parameters they go into the prologue.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

from dnnc.ir.expr import Expr, const, value
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.ops.window import node_window
from dnnc.ir.types import Dim
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import replace_each

MOST_PHASES = 64  # that are convolutions of their own
MOST_WASTE = 1.5  # taps, with those that are zeros, for each that is none


def conv_transpose(graph: Graph, ctx: PassContext) -> bool:
    """Rewrite those whose channels and kernels have known sizes. Returns whether any was."""
    block = 1 if ctx.facts.channels_last else ctx.facts.lanes
    return replace_each(graph, {"conv_transpose": lambda n: _Rewrite(graph, n, block).run() if _applies(n) else None})


def _applies(n: Node) -> bool:
    x, w = n.inputs[0], n.inputs[1]
    assert x is not None and w is not None
    win = node_window(w.type.shape[2:], n.attrs)
    sized = all(isinstance(d, int) and d > 0 for d in (x.type.shape[1], *w.type.shape))
    if not sized or any(not isinstance(p, int) or p < 0 for p in (*win.begin, *win.end)):
        return False
    rows = zip(x.type.shape[2:], n.output.type.shape[2:], win.begin, win.strides)
    fixed = all(_grown(size, made, int(begin) % s, s) is not None for size, made, begin, s in rows)  # type: ignore[arg-type]
    return fixed


def _rows(made: Dim, crop: int, stride: int) -> Expr:
    """How many elements of a phase there are among `crop` elements that are cut off and `made` ones."""
    return (const(made) + (crop + stride - 1)) // stride


def _grown(size: Dim, made: Dim, crop: int, stride: int) -> int | None:
    """By how many elements a phase is longer than the input, None where that depends on the input's size."""
    return value(_rows(made, crop, stride) - const(size))


class _Rewrite:
    """One transposed convolution; new nodes stand in front of it."""

    def __init__(self, graph: Graph, n: Node, block: int) -> None:
        x, w = n.inputs[0], n.inputs[1]
        assert x is not None and w is not None
        self.n, self.x, self.bias, self.block = n, x, n.inputs[2] if len(n.inputs) > 2 else None, block
        self.b: Any = Builder(graph, n, n.locs)
        self.win, self.group = node_window(w.type.shape[2:], n.attrs), int(n.attrs["group"])
        self.strides, self.begin = self.win.strides, tuple(int(p) for p in self.win.begin)  # type: ignore[arg-type]
        self.rank, self.phases = len(self.strides), math.prod(self.strides)
        self.dilations: tuple[int, ...] = self.win.dilations
        if self.phases > 1 and any(d > 1 for d in self.dilations):
            w, self.dilations = self.stretched(w), (1,) * self.rank
        self.w = w
        self.inputs, self.each, *self.kernel = (int(d) for d in w.type.shape)  # type: ignore[arg-type]
        self.channels = self.each * self.group

    def run(self) -> Value:
        outs = self.n.output.type.shape
        together = self.phases == 1 or self.phases > MOST_PHASES or (self.group == 1 and not self.wastes())
        crop = [p % s for p, s in zip(self.begin, self.strides)] if together else [0] * self.rank
        y = self.as_one(crop) if together else self.by_phase()
        rows = [_rows(o, c, s) * s for o, c, s in zip(outs[2:], crop, self.strides)]
        if any(crop) or any(value(r - const(o)) != 0 for r, o in zip(rows, outs[2:])):
            y = self.b.slice(y, starts=(0, 0, *crop), steps=(1,) * (self.rank + 2), shape=outs)
        assert isinstance(y, Value)
        return y

    def wastes(self) -> bool:
        """Would many taps be zeros if all phases had as many, and do phases have whole blocks of channels?"""
        taps = math.prod(math.ceil(k / s) * s for k, s in zip(self.kernel, self.strides))
        return taps > MOST_WASTE * math.prod(self.kernel) and self.channels % self.block == 0

    def as_one(self, crop: list[int]) -> Value:
        """The phases of all axes as channels of one convolution, in steps of whole blocks."""
        taps = [math.ceil(k / s) for k, s in zip(self.kernel, self.strides)]
        more = -self.channels % self.block if self.group == 1 < self.phases and 2 * self.channels >= self.block else 0
        grown = self.sized(
            self.w, {1: self.each + more, **{2 + k: s * m for k, (s, m) in enumerate(zip(self.strides, taps))}}
        )
        filters = [self.filters(grown, phase, taps, self.each + more) for phase in product(*map(range, self.strides))]
        bias = self.sized(self.bias, {0: self.channels + more}) if self.bias is not None else None
        biases = (
            self.swapped(self.joined([bias] * self.phases), 0, self.phases, self.group) if bias is not None else None
        )
        y = self.conv(
            self.swapped(self.joined(filters), 0, self.phases, self.group), biases, taps, crop, list(self.begin)
        )
        y = self.swapped(y, 1, self.group, self.phases)
        made = self.b.interleave(y, strides=self.strides, channels=self.channels) if self.phases > 1 else y
        assert isinstance(made, Value)
        return made

    def swapped(self, v: Value, axis: int, first: int, second: int) -> Value:
        """An axis that counts phases and groups, [first, second, each], as [second, first, each]."""
        if min(first, second) == 1:
            return v
        shape = v.type.shape
        n = int(str(shape[axis]))
        apart = self.b.reshape(v, shape=(*shape[:axis], first, second, n // (first * second), *shape[axis + 1 :]))
        rest = range(axis + 2, len(shape) + 2)
        y = self.b.reshape(self.b.transpose(apart, perm=(*range(axis), axis + 1, axis, *rest)), shape=shape)
        assert isinstance(y, Value)
        return y

    def by_phase(self) -> Value:
        """A convolution for each phase of the result, of those taps that it has, from where its first element reads."""
        parts = []
        for at in product(*map(range, self.strides)):
            ahead = [r + p for r, p in zip(at, self.begin)]
            phase = tuple(a % s for a, s in zip(ahead, self.strides))
            taps = [max(math.ceil((k - r) / s), 1) for k, r, s in zip(self.kernel, phase, self.strides)]
            ends = {
                2 + k: max(s * (m - 1) + r + 1, size)
                for k, (s, m, r, size) in enumerate(zip(self.strides, taps, phase, self.kernel))
            }
            filters = self.filters(self.sized(self.w, ends), phase, taps, self.each)
            parts.append(self.conv(filters, self.bias, taps, [0] * self.rank, ahead))
        y = self.b.interleave(self.joined(parts, 1), strides=self.strides, channels=self.channels)
        assert isinstance(y, Value)
        return y

    def conv(self, filters: Value, bias: Value | None, taps: list[int], crop: list[int], ahead: list[int]) -> Value:
        """Return the convolution that starts `ahead` elements into the full result, without what is cropped."""
        back = [(m - 1) * d for m, d in zip(taps, self.dilations)]
        skipped = [a // s for a, s in zip(ahead, self.strides)]
        sizes = zip(self.x.type.shape[2:], self.n.output.type.shape[2:], crop, self.strides)
        grown = [value(_rows(made, c, s) - const(size)) for size, made, c, s in sizes]
        pads = (*(p - k for p, k in zip(back, skipped)), *(g + k for g, k in zip(grown, skipped) if g is not None))
        y = self.b.conv(self.x, filters, bias, pads=pads, dilations=self.dilations, group=self.group)
        assert isinstance(y, Value)
        return y

    def filters(self, w: Value, phase: tuple[int, ...], taps: list[int], each: int) -> Value:
        """[C, O/g, *K] -> [O, C/g, *taps]: the filter of a phase at tap t is w at s*(taps - 1 - t) + phase."""
        rows = (range(s * (m - 1) + r, -1, -s) for s, m, r in zip(self.strides, taps, phase))
        if all(len(row) == m and row[0] < k for row, m, k in zip(rows, taps, w.type.shape[2:])):
            return self.turned(w, phase, taps, each)
        last = tuple(s * (m - 1) + r for s, m, r in zip(self.strides, taps, phase))
        part = self.b.slice(
            w, starts=(0, 0, *last), steps=(1, 1, *(-s for s in self.strides)), shape=(self.inputs, each, *taps)
        )
        apart = self.b.reshape(part, shape=(self.group, self.inputs // self.group, each, *taps))
        turned = self.b.transpose(apart, perm=(0, 2, 1, *range(3, self.rank + 3)))
        made = self.b.reshape(turned, shape=(self.group * each, self.inputs // self.group, *taps))
        assert isinstance(made, Value)
        return made

    def turned(self, w: Value, phase: tuple[int, ...], taps: list[int], each: int) -> Value:
        """The same, of filters that are turned once for all phases."""
        y = self.b.turn_filters(w, group=self.group)
        size = w.type.shape[2:]
        first = tuple(k - 1 - r - s * (m - 1) for k, r, s, m in zip(size, phase, self.strides, taps))
        if tuple(taps) != size:
            shape = (self.group * each, self.inputs // self.group, *taps)
            y = self.b.slice(y, starts=(0, 0, *first), steps=(1, 1, *self.strides), shape=shape)
        assert isinstance(y, Value)
        return y

    def stretched(self, w: Value) -> Value:
        """Filters with the zeros of their dilation: [C, O/g, K] -> [C, O/g, (K - 1) * d + 1]."""
        for axis, d in enumerate(self.dilations, 2):
            lead, k, rest = w.type.shape[:axis], int(w.type.shape[axis]), w.type.shape[axis + 1 :]  # type: ignore[arg-type]
            apart = self.sized(self.b.reshape(w, shape=(*lead, k, 1, *rest)), {axis + 1: d})
            w = self.sized(self.b.reshape(apart, shape=(*lead, k * d, *rest)), {axis: (k - 1) * d + 1})
        return w

    def sized(self, v: Value, sizes: dict[int, int]) -> Value:
        """A value with zeros at the end of axes that are to be longer, and cut where they are to be shorter."""
        shape = [int(d) for d in v.type.shape]  # type: ignore[arg-type]
        more = [sizes.get(k, size) - size for k, size in enumerate(shape)]
        if any(more):
            v = self.b.pad(v, None, pads=(*(0,) * len(shape), *more))
        return v

    def joined(self, parts: list[Value], axis: int = 0) -> Value:
        made = self.b.concat(*parts, axis=axis) if len(parts) > 1 else parts[0]
        assert isinstance(made, Value)
        return made
