"""Weights to integers or 8-bit floats: a scale for each output channel or block, to nearest or as GPTQ does it.

GPTQ rounds the weights of a sum one after the other, and moves each rounding error to those that are still to come, as
the inputs' correlations say: the error of the sum becomes small, not that of each weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from dnnc.quantization.ranges import FP8_MAX, LEAST_SCALE

Array = np.ndarray[Any, Any]
DAMPING = 0.01  # of the mean of the diagonal that GPTQ adds to it
LAZY = 128  # columns whose errors GPTQ collects before it moves them to those behind
SHRUNK = np.linspace(0.7, 1.0, 16)  # of a block's largest weight that are tried as its range
MOST_BIAS = 1 << 30  # a bias in units of its scale


@dataclass(frozen=True)
class Rounded:
    """Weights [O, K] as integers with scales [O, blocks], or bit patterns of e4m3.

    Attributes:
        q: i8[O, K], of fp8 u8.
        scales: f32[O, K / block], one column where there are no blocks.
        values: f32[O, K], what q stands for.
        block: weights that share a scale; 0: all of a channel.
    """

    q: Array
    scales: Array
    values: Array
    block: int


def scales_of(w: Array, bits: int, block: int, bias: Array | None = None, x_scale: float = 1.0) -> Array:
    """Symmetric scales [O, blocks] for weights [O, K].

    Scales of channels are those of the largest weight, enlarged where a bias would not fit into 32 bits beside it.
    Scales of blocks are those with the least square error, of several ranges that are tried.
    """
    top = (1 << (bits - 1)) - 1
    if not block:
        scale = np.abs(w).max(1, initial=0.0, keepdims=True) / top
        if bias is not None:
            scale = np.maximum(scale, np.abs(bias).reshape(-1, 1) / (MOST_BIAS * max(x_scale, LEAST_SCALE)))
        return _positive(scale)
    parts = _blocks(w, block)
    largest = _positive(np.abs(parts).max(2) / top)
    best, least = largest, np.full(largest.shape, np.inf)
    for s in SHRUNK if bits < 8 else (1.0,):
        scale = _positive(largest * np.float32(s))
        q = np.clip(np.rint(parts / scale[..., None]), -top - 1, top)
        error = ((q * scale[..., None] - parts) ** 2).sum(2)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best.astype(np.float32)


def _positive(scale: Array) -> Array:
    return np.where(scale == 0, 1.0, np.maximum(scale, LEAST_SCALE)).astype(np.float32)


def _blocks(w: Array, block: int) -> Array:
    """[O, blocks, block], filled up with zeros."""
    more = -w.shape[1] % block
    return np.pad(w, [(0, 0), (0, more)]).reshape(w.shape[0], -1, block)


def nearest(w: Array, scales: Array, bits: int, block: int) -> Rounded:
    """Each weight to the nearest integer."""
    top = (1 << (bits - 1)) - 1
    spread = spread_scales(scales, w.shape[1], block)
    low = -top - 1 if block else -top
    q = np.clip(np.rint(w / spread), low, top).astype(np.int8)
    return Rounded(q, scales, (q * spread).astype(np.float32), block)


def spread_scales(scales: Array, terms: int, block: int) -> Array:
    """Scales [O, blocks] beside weights [O, K]."""
    return np.repeat(scales, block, axis=1)[:, :terms] if block else scales


def gptq(w: Array, scales: Array, bits: int, block: int, products: Array) -> Rounded:
    """Round column by column, and move each error to the columns behind.

    Args:
        w: f32[O, K].
        scales: [O, blocks].
        products: the sum of x x^T over the samples, f32[K, K].
    """
    top = (1 << (bits - 1)) - 1
    low = -top - 1 if block else -top
    h = products.astype(np.float64, copy=True)
    dead = np.diag(h) <= 0
    h[dead, dead] = 1.0
    h[np.diag_indices_from(h)] += DAMPING * np.diag(h).mean()
    try:
        upper = np.linalg.cholesky(np.linalg.inv(h)).T.astype(np.float32)
    except np.linalg.LinAlgError:
        return nearest(w, scales, bits, block)
    spread = np.broadcast_to(spread_scales(scales, w.shape[1], block), w.shape)
    left, q = w.astype(np.float32, copy=True), np.zeros(w.shape, np.int8)
    for begin in range(0, w.shape[1], LAZY):
        end = min(begin + LAZY, w.shape[1])
        errors = np.zeros((w.shape[0], end - begin), np.float32)
        for k in range(begin, end):
            scale = spread[:, k]
            q[:, k] = np.clip(np.rint(left[:, k] / scale), low, top)
            errors[:, k - begin] = (left[:, k] - q[:, k] * scale) / upper[k, k]
            left[:, k + 1 : end] -= errors[:, k - begin, None] * upper[k, k + 1 : end]
        left[:, end:] -= errors @ upper[begin:end, end:]
    return Rounded(q, scales, (q * spread).astype(np.float32), block)


def float8(w: Array) -> Rounded:
    """Each weight to the nearest e4m3, with a scale for each channel."""
    scales = _positive(np.abs(w).max(1, initial=0.0, keepdims=True) / FP8_MAX)
    q = (w / scales).astype(ml_dtypes.float8_e4m3fn)
    return Rounded(q.view(np.uint8), scales, (q.astype(np.float32) * scales).astype(np.float32), 0)


def corrected_bias(bias: Array | None, w: Array, rounded: Array, means: Array, group: int) -> Array:
    """A bias [O] that makes up for what rounding weights adds to the mean of each output channel.

    Args:
        w, rounded: weights [O, K] before and after; K = input channels of a group * taps.
        means: of the input channels.
    """
    error = (rounded.astype(np.float64) - w).reshape(w.shape[0], means.size // group, -1).sum(2)
    of_group = np.repeat(means.reshape(group, -1), w.shape[0] // group, axis=0)  # [O, channels of its group]
    shift: Array = (error * of_group).sum(1)
    moved: Array = -shift if bias is None else bias.reshape(-1) - shift
    return moved.astype(np.float32)
