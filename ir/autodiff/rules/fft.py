"""The rule of discrete Fourier transforms: the transpose is a transform in the other direction.

With W the matrix of exp(-2 pi i j k / n), as real numbers in pairs, y = W x has cot x = conj(W) cot y, which is n times
the inverse transform. A transform of a half spectrum counts the numbers twice that stand for their mirror images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node
from dnnc.ir.shapes import normalize_axis


def dft(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Mapping[int, Any]:
    (x,), (g,) = n.inputs, cotangents
    assert x is not None
    axis, inverse, half = normalize_axis(n.attrs["axis"], x.type.rank), n.attrs["inverse"], n.attrs["onesided"]
    size, parts = x.type.shape[axis], x.type.shape[-1]
    assert isinstance(size, int)
    wide = g.type.dtype.computed
    g = g if wide is g.type.dtype else b.cast(g, to=wide)
    if inverse and half:
        length = g.type.shape[axis]
        made = b.dft(g, axis=axis, onesided=True)
        made = b.mul(made, _shares(b, made, axis, length, 2.0, 1.0 / length))
    elif inverse:
        length = g.type.shape[axis]
        made = b.mul(b.dft(g, axis=axis), 1.0 / length)
    elif half and parts == 1:
        length = n.attrs["length"] or size
        made = b.dft(
            b.mul(g, _shares(b, g, axis, length, 0.5, length)), axis=axis, length=length, inverse=True, onesided=True
        )
    else:
        length = n.attrs["length"] or size
        made = b.mul(b.dft(_fitted(b, g, axis, length), axis=axis, inverse=True), float(length))
    made = _fitted(b, made, axis, size)
    if made.type.shape[-1] != parts:  # a real operand
        made = b.slice(made, starts=(0,) * x.type.rank, steps=(1,) * x.type.rank, shape=x.type.shape)
    return {0: made if made.type.dtype is x.type.dtype else b.cast(made, to=x.type.dtype)}


def _shares(b: Builder, spectrum: Any, axis: int, length: int, twice: float, scale: float) -> Any:
    """Factors of a half spectrum: `scale`, times `twice` for numbers with a mirror image; the others are real."""
    k = np.arange(spectrum.type.shape[axis])
    alone = (k == 0) | (2 * k == length)
    shares = np.stack([np.where(alone, 1.0, twice), np.where(alone, 0.0, twice)], -1) * scale
    shape = [1] * spectrum.type.rank
    shape[axis], shape[-1] = len(k), 2
    return b.constant(shares.reshape(shape), dtype=spectrum.type.dtype)


def _fitted(b: Builder, x: Any, axis: int, size: int) -> Any:
    """Cut, or filled with zeros, to a size along an axis."""
    t = x.type
    if t.shape[axis] > size:
        shape = (*t.shape[:axis], size, *t.shape[axis + 1 :])
        return b.slice(x, starts=(0,) * t.rank, steps=(1,) * t.rank, shape=shape)
    more = [0] * t.rank
    more[axis] = size - t.shape[axis]
    return b.pad(x, pads=(*(0 for _ in more), *more)) if more[axis] else x
