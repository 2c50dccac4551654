"""Sliding windows of convolution and pooling: sizes, positions in the operand, NumPy counterparts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as cartesian
from typing import Any

import numpy as np

from dnnc.ir.expr import Expr, const
from dnnc.ir.op import require
from dnnc.ir.ops.common import Array, both, dim, within
from dnnc.ir.types import Dim

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """A window of `kernel` positions per spatial dim. `begin`, `end`: padding of the operand, perhaps negative."""

    kernel: tuple[Dim, ...]
    strides: Ints
    begin: tuple[Dim, ...]
    end: tuple[Dim, ...]
    dilations: Ints

    def sizes(self, spatial: Sequence[Dim]) -> tuple[Dim, ...]:
        """How often the window fits, per spatial dim."""
        out = []
        for n, k, s, b, e, d in zip(spatial, self.kernel, self.strides, self.begin, self.end, self.dilations):
            room = const(n) + b + e - (const(k) - 1) * d - 1
            size = dim(room // s + 1)
            fits = not isinstance(size, int) or (size >= 0 if n == 0 else size > 0)
            require(fits, "a window of {} (dilation {}) does not fit into {} with pads {} and {}", k, d, n, b, e)
            out.append(size)
        return tuple(out)

    def positions(self, index: Sequence[Expr], r: Sequence[Expr]) -> tuple[Expr, ...]:
        """Where window `index` reads at offset `r`; outside the operand in the padding."""
        return tuple(i * s + k * d - b for i, k, s, b, d in zip(index, r, self.strides, self.begin, self.dilations))

    @property
    def padded(self) -> bool:
        return any(not isinstance(p, int) or p > 0 for p in (*self.begin, *self.end))

    @property
    def flat(self) -> bool:
        """Does a result have one tap, at its own place?"""
        return all(k == 1 for k in (*self.kernel, *self.strides)) and not any((*self.begin, *self.end))

    def inside(self, at: Sequence[Expr], spatial: Sequence[Dim]) -> Expr:
        return both(*(within(p, n) for p, n in zip(at, spatial)))


def window(
    rank: int,
    kernel: Sequence[Dim],
    strides: Ints | None = None,
    pads: Sequence[Dim] | None = None,
    dilations: Ints | None = None,
) -> Window:
    """Fill in attributes: strides, dilations 1, pads 0 (all begins, then all ends). ShapeError for a wrong length."""
    strides, dilations, pads = strides or (1,) * rank, dilations or (1,) * rank, pads or (0,) * 2 * rank
    for name, a, n in (
        ("kernel", kernel, rank),
        ("strides", strides, rank),
        ("dilations", dilations, rank),
        ("pads", pads, 2 * rank),
    ):
        require(len(a) == n, "{} needs {} numbers for {} spatial dims; got {}", name, n, rank, a)
    ok = all(s > 0 for s in (*strides, *dilations))
    require(ok, "strides {} and dilations {} must be positive", strides, dilations)
    return Window(tuple(kernel), strides, tuple(pads[:rank]), tuple(pads[rank:]), dilations)


def node_window(kernel: Sequence[Dim], attrs: Mapping[str, Any]) -> Window:
    """The window of a node with these attributes."""
    return window(len(kernel), kernel, attrs.get("strides"), attrs.get("pads"), attrs.get("dilations"))


def pad_numpy(x: Array, w: Window, fill: float) -> Array:
    """The operand with its spatial dims padded (cropped where a pad is negative)."""
    begin, end = [_int(b) for b in w.begin], [_int(e) for e in w.end]
    lead = x.ndim - len(begin)
    widths = [(0, 0)] * lead + [(max(b, 0), max(e, 0)) for b, e in zip(begin, end)]
    crop = tuple(slice(max(-b, 0), n - max(-e, 0)) for b, e, n in zip(begin, end, x.shape[lead:]))
    return np.pad(x[(slice(None),) * lead + crop], widths, constant_values=fill)


def _int(d: Dim) -> int:
    assert isinstance(d, int)
    return d


def offsets(w: Window) -> Iterator[Ints]:
    """Every position within the window, row by row."""
    return cartesian(*(range(_int(k)) for k in w.kernel))


def shifted(padded: Array, w: Window, sizes: Sequence[int], at: Ints) -> Array:
    """What all windows read at one offset: a view of shape [..., *sizes]."""
    cut = tuple(
        slice(k * d, k * d + (n - 1) * s + 1, s) if n else slice(0, 0)
        for k, d, n, s in zip(at, w.dilations, sizes, w.strides)
    )
    return padded[(...,) + cut]


def sizes_numpy(w: Window, spatial: Sequence[int]) -> Ints:
    return tuple(_int(n) for n in w.sizes(spatial))
