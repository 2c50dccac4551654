"""Convolutions of bytes with few output channels: neighbouring pixels of the result become channels.

    conv(x, w [3, C, 3, 3])   ->   split the channels of conv(x, v [12, C, 3, 6], strides=(1, 4)) into 3 times 4 columns

Kernels have output channels in the lanes of vectors, so three channels leave most lanes idle. Here v holds w four
times, each time one column further to the right, with zeros around it. A result takes 6 columns of taps for 4 pixels,
in place of 3 for each. Sums are those of before, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.ir.graph import Value
from dnnc.ir.graph.builder import Builder

Array = np.ndarray[Any, Any]
GAIN = 1.3  # times fewer products, from which on it is worth a pass over the result
LEAST = 48  # channels times rows of taps, times vectors that are saved for each of them


def pixels_together(shape: Sequence[Any], weights: Array, attrs: Mapping[str, Any], lanes: int) -> int:
    """How many neighbouring pixels are best computed as channels; 1 where that gains nothing.

    Args:
        shape: of the image [N, C, ..., W].
        weights: [O, C, ..., k].
        attrs: of the convolution.
        lanes: output channels of a vector; 0 where kernels do not have them in vectors.
    """
    channels, terms, taps = int(weights.shape[0]), int(weights.shape[1]), int(weights.shape[-1])
    rows = int(np.prod(weights.shape[2:-1]))
    plain = all(s == 1 for name in ("strides", "dilations") for s in attrs.get(name) or ())
    if not plain or attrs.get("group", 1) != 1 or weights.ndim < 3 or not isinstance(shape[-1], int):
        return 1

    def vectors(pixels: int) -> float:
        return (taps + pixels - 1) * -(-channels * pixels // lanes) / pixels

    width = _width(shape, weights, attrs)
    few = [p for p in (2, 4, 8, 16) if lanes and p * channels <= lanes and p <= width]  # pieces of vectors
    best = min(few, key=vectors, default=1)
    saves = best > 1 and (vectors(1) - vectors(best)) * terms * rows >= LEAST
    return best if saves and vectors(1) >= GAIN * vectors(best) else 1


def _width(shape: Sequence[Any], weights: Array, attrs: Mapping[str, Any]) -> int:
    """Columns of the result."""
    rank = weights.ndim - 2
    pads = attrs.get("pads") or (0,) * 2 * rank
    return int(shape[-1]) + int(pads[rank - 1]) + int(pads[-1]) - int(weights.shape[-1]) + 1


def widened(weights: Array, pixels: int) -> Array:
    """The filters of so many neighbouring pixels: channel o of pixel p is output channel o * pixels + p."""
    *outer, taps = weights.shape
    out = np.zeros((outer[0], pixels, *outer[1:], taps + pixels - 1), weights.dtype)
    for p in range(pixels):
        out[:, p, ..., p : p + taps] = weights
    return out.reshape(-1, *out.shape[2:])


def attributes(shape: Sequence[Any], weights: Array, attrs: Mapping[str, Any], pixels: int) -> dict[str, Any]:
    """Of the convolution with widened filters. The image gets as many columns as whole groups of pixels read."""
    rank, width = weights.ndim - 2, _width(shape, weights, attrs)
    pads = [*(attrs.get("pads") or (0,) * 2 * rank)]
    pads[-1] += -width % pixels
    return {**attrs, "pads": tuple(pads) if any(pads) else None, "strides": (*(1,) * (rank - 1), pixels)}


def apart(b: Builder, y: Value, shape: Sequence[Any], weights: Array, attrs: Mapping[str, Any], pixels: int) -> Any:
    """The result [N, O, ..., W] of [N, O * pixels, ..., W / pixels]; `attrs`: of the convolution as it was."""
    n, _, *inner, last = y.type.shape
    rank, channels = y.type.rank, weights.shape[0]
    v = b.reshape(y, shape=(n, channels, pixels, *inner, last))
    v = b.transpose(v, perm=(0, 1, *range(3, rank + 1), 2))
    v = b.reshape(v, shape=(n, channels, *inner, last * pixels))
    width = _width(shape, weights, attrs)
    if width == last * pixels:
        return v
    return b.slice(v, starts=(0,) * rank, steps=(1,) * rank, shape=(n, channels, *inner, width))
