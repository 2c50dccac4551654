"""Histograms of values, and the ranges that integers shall stand for.

A histogram has bins of equal width around 0. It grows by doubling its range and adding neighbours, so that one pass
over any amount of data takes the memory of its bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
HALF = 2048  # bins on each side of 0
SHARES = np.linspace(0.2, 1.0, 81)  # of the whole range that are tried
LEVELS = 256
LEAST_SCALE = 1e-30  # below that the inverse of a scale would not be finite
FP8_MAX = 448.0  # e4m3
MOST = 1 << 16  # numbers of an array that enter the bins; of a larger one every k-th does. Its ends are exact


class Histogram:
    """What is known of a value after some calls.

    Attributes:
        low, high: the smallest and the largest number.
        count, zeros: numbers, and those of them that are exactly 0.
        bad: numbers that are NaN or infinite; they are in no bin.
        counts: int64[2 * HALF] of the others but zeros, over -limit to limit.
    """

    def __init__(self) -> None:
        self.low, self.high = np.inf, -np.inf
        self.count = self.zeros = self.bad = 0
        self.limit = 0.0
        self.counts: Array = np.zeros(2 * HALF, np.int64)

    def add(self, a: Array, binned: bool = True) -> None:
        """Count the numbers of an array; `binned`: in bins, too."""
        a = a.reshape(-1)
        if a.dtype != np.float32:
            a = a.astype(np.float32)
        if not a.size:
            return
        low, high = float(a.min()), float(a.max())
        if not np.isfinite(low + high):
            finite = np.isfinite(a)
            self.bad += int(a.size - np.count_nonzero(finite))
            return self.add(a[finite], binned)
        self.count += a.size
        self.low, self.high = min(self.low, low), max(self.high, high)
        if not binned:
            return
        self._reach(max(-low, high))
        a = _thinned(a)
        if self.limit:
            at = (a * np.float32(HALF / self.limit)).astype(np.float32)
            np.floor(at, out=at)
            at += HALF
            np.clip(at, 0, 2 * HALF - 1, out=at)
            found = np.bincount(at.astype(np.intp), minlength=2 * HALF)
            zeros = int(a.size - np.count_nonzero(a))
            found[HALF] -= zeros
            self.counts += found
            self.zeros += zeros
        else:
            self.zeros += a.size

    def _reach(self, largest: float) -> None:
        """Double the range until it holds a number."""
        if largest == 0.0:
            return
        if not self.limit:
            self.limit = max(largest, LEAST_SCALE)
        while self.limit < largest:
            pairs = self.counts.reshape(-1, 2).sum(1)
            self.counts = np.zeros(2 * HALF, np.int64)
            self.counts[HALF // 2 : HALF // 2 + HALF] = pairs
            self.limit *= 2

    @property
    def centres(self) -> Array:
        """Of the bins."""
        return (np.arange(2 * HALF) - HALF + 0.5) * (self.limit / HALF)

    def joined(self, other: Histogram) -> Histogram:
        """What is known of both values together."""
        a, b = (self, other) if self.limit >= other.limit else (other, self)
        out = Histogram()
        out.low, out.high = min(a.low, b.low), max(a.high, b.high)
        out.count, out.zeros, out.bad = a.count + b.count, a.zeros + b.zeros, a.bad + b.bad
        out.limit, out.counts = a.limit, a.counts.copy()
        if b.limit:
            at = np.clip(np.floor(b.centres * (HALF / a.limit)).astype(np.intp) + HALF, 0, 2 * HALF - 1)
            np.add.at(out.counts, at, b.counts)
        return out


def _thinned(a: Array) -> Array:
    """Every k-th number, where k and the length have no common factor, so that all rows and channels are met."""
    step = a.size // MOST
    if step < 2:
        return a
    while math.gcd(step, a.size) > 1:
        step += 1
    some: Array = np.ascontiguousarray(a[::step])
    return some


@dataclass(frozen=True)
class Grid:
    """The numbers (q - zero) * scale for integers q; `kind`: uint8, int8 or fp8."""

    scale: np.float32
    zero: int
    kind: str

    def rounded(self, x: Array) -> Array:
        """The nearest numbers of the grid."""
        low, high = (0, 255) if self.kind == "uint8" else (-128, 127)
        q: Array = np.clip(np.rint(x / self.scale) + self.zero, low, high)
        values: Array = ((q - self.zero) * self.scale).astype(np.float32)
        return values


def grid(low: float, high: float, kind: str) -> Grid:
    """The grid of a type for a range; 0 is one of its numbers. A range of nothing but 0 has the scale 1."""
    low, high = min(low, 0.0), max(high, 0.0)
    if kind == "uint8":
        scale = (high - low) / (LEVELS - 1)
        scale = 1.0 if scale == 0.0 else max(scale, LEAST_SCALE)
        return Grid(np.float32(scale), int(np.clip(np.rint(-low / scale), 0, LEVELS - 1)), kind)
    scale = max(-low, high) / (FP8_MAX if kind == "fp8" else 127)
    return Grid(np.float32(1.0 if scale == 0.0 else max(scale, LEAST_SCALE)), 0, kind)


def chosen_range(h: Histogram, method: str, percentile: float, symmetric: bool = False) -> tuple[float, float]:
    """The range of a value.

    Args:
        method: minmax; percentile: that share of the numbers lies inside, as many beyond each end; mse: the least mean
            square error; entropy: the least divergence of the distributions before and after (Kullback and Leibler).
        symmetric: does the grid reach as far below 0 as above?
    """
    if not h.count or h.low >= h.high == 0.0:
        return 0.0, 0.0
    low, high = min(h.low, 0.0), max(h.high, 0.0)
    if symmetric:
        high = max(-low, high)
        low = -high
    if method == "minmax" or not h.limit:
        return low, high
    if method == "percentile":
        return _percentile(h, percentile, low, high)
    share = _best_share(h, low, high, method)
    return low * share, high * share


def _percentile(h: Histogram, percentile: float, low: float, high: float) -> tuple[float, float]:
    counts = h.counts.copy()
    counts[HALF] += h.zeros
    edge = h.limit / HALF
    beyond = (1 - percentile / 100) / 2 * counts.sum()
    first = int(np.searchsorted(np.cumsum(counts), beyond, side="right"))
    last = int(np.searchsorted(np.cumsum(counts[::-1]), beyond, side="right"))
    return max(low, min((first - HALF) * edge, 0.0)), min(high, max((HALF - last) * edge, 0.0))


def _best_share(h: Histogram, low: float, high: float, method: str) -> float:
    cost = _square_error if method == "mse" else _divergence
    costs = [cost(h, low * s, high * s) for s in SHARES]
    return float(SHARES[len(costs) - 1 - int(np.argmin(costs[::-1]))])


def _square_error(h: Histogram, low: float, high: float) -> float:
    """Of rounding inside of the range, and of cutting off what lies outside; zeros have none."""
    x, step = h.centres, (high - low) / (LEVELS - 1)
    beyond = np.where(x > high, x - high, np.where(x < low, x - low, 0.0))
    outside = beyond != 0
    return float((h.counts * beyond**2).sum() + step**2 / 12 * h.counts[~outside].sum())


def _divergence(h: Histogram, low: float, high: float) -> float:
    """Of the distribution with what lies outside put to the ends, from that of the levels spread over their bins."""
    edge = h.limit / HALF
    first, last = HALF + int(np.floor(low / edge)), HALF + int(np.ceil(high / edge))
    inside = h.counts[first:last].astype(np.float64)
    if inside.size == 0 or not inside.any():
        return np.inf
    whole = inside.copy()
    whole[0] += h.counts[:first].sum()
    whole[-1] += h.counts[last:].sum()
    levels = np.minimum((np.arange(inside.size) * LEVELS) // inside.size, LEVELS - 1)
    filled = inside > 0
    sums = np.bincount(levels, inside, LEVELS)
    bins = np.bincount(levels, filled, LEVELS)
    spread = np.where(filled, sums[levels] / np.maximum(bins[levels], 1), 0.0)
    p, q = whole / whole.sum(), spread / spread.sum()
    here = p > 0
    return float((p[here] * np.log(p[here] / np.maximum(q[here], 1e-12))).sum())
