"""How numbers are distributed: quantiles, counts in bins, and interpolation between known points."""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.array.core import Array, array_of, cast
from dnnc.array.creation import asarray, full_like, linspace
from dnnc.array.elementwise import add, divide, less_equal, logical_and, multiply, one, subtract, where
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import apply
from dnnc.array.manipulation import Axes, axes_of, concat, expand_dims, moveaxis, reshape, sliced, take
from dnnc.array.promotion import DEFAULTS, float_of
from dnnc.array.searching import searchsorted, sort
from dnnc.array.statistical import max as max_
from dnnc.array.statistical import min as min_
from dnnc.ir.dtype import from_numpy

METHODS = ("linear", "lower", "higher", "nearest", "midpoint")


def quantile(x: Array, q: Any, /, axis: Axes = None, method: str = "linear", keepdims: bool = False) -> Array:
    """Values below which a share `q` (0 to 1) of the elements lies.

    Args:
        x: real numbers.
        q: a number or numbers, whose axes come first in the result; looked at.
        axis: one, several, or all.
        method: between two elements: "linear", "lower", "higher", "nearest" or "midpoint".
        keepdims: do the axes stay, with size 1?

    Raises:
        ValueInputError: a share outside of 0 to 1, another method, or no elements.
    """
    shares = np.asarray(q, np.float64)
    if method not in METHODS:
        raise ValueInputError(f"quantile: method={method!r}: expected one of {', '.join(METHODS)}")
    if not ((shares >= 0) & (shares <= 1)).all():
        raise ValueInputError(f"quantile: q={q!r}: expected shares from 0 to 1")
    axes = axes_of(axis, x.ndim)
    y = cast(x, float_of(x.dtype))
    rest = [k for k in range(x.ndim) if k not in axes]
    y = moveaxis(y, axes, tuple(range(len(rest), x.ndim)))
    y = reshape(y, (*(x.shape[k] for k in rest), -1))
    n = y.shape[-1]
    if not n:
        raise ValueInputError(f"quantile: no elements along axis {axis} of {x.shape}")
    ordered = sort(y)
    found = [_between(ordered, share * (n - 1), method) for share in shares.reshape(-1).tolist()]
    if keepdims:
        shape = tuple(1 if k in axes else d for k, d in enumerate(x.shape))
        found = [reshape(f, shape) for f in found]
    if not shares.ndim:
        return found[0]
    line = concat([expand_dims(f, axis=0) for f in found], axis=0)
    return reshape(line, (*shares.shape, *found[0].shape))


def _between(ordered: Array, place: float, method: str) -> Array:
    """The value at a place among sorted elements; NaN where one of them is NaN, since these are last."""
    low = int(np.floor(place))
    share = place - low
    if method in ("lower", "higher", "nearest", "midpoint"):
        share = {"lower": 0.0, "higher": 1.0, "midpoint": 0.5, "nearest": float(np.round(place) - low)}[method] * (
            share > 0
        )
    k, n = ordered.ndim - 1, ordered.shape[-1]

    def at(i: int) -> Array:
        return reshape(sliced(ordered, k, i, 1), ordered.shape[:-1])

    a = at(low)
    found = a if not share else add(a, multiply(subtract(at(low + 1), a), share))
    last = at(n - 1)
    return where(_not_nan(last), found, last)


def _not_nan(x: Array) -> Array:
    return array_of(apply("equal", one(x), one(x)))


def percentile(x: Array, q: Any, /, axis: Axes = None, method: str = "linear", keepdims: bool = False) -> Array:
    """`quantile` in hundredths."""
    return quantile(x, np.asarray(q, np.float64) / 100, axis, method, keepdims)


def median(x: Array, /, axis: Axes = None, keepdims: bool = False) -> Array:
    """The element in the middle, or the mean of the two."""
    return quantile(x, 0.5, axis, "midpoint", keepdims)


# --- counts -----------------------------------------------------------------------------------------------------------


def bincount(x: Array, /, weights: Any = None, minlength: int = 0) -> Array:
    """How often each integer from 0 occurs, or the sum of its weights.

    Args:
        x: a vector of nonnegative integers, evaluated for its largest element. In a trace `minlength` is the length of
            the result, and larger elements are not counted.
        weights: of the shape of `x`.
        minlength: the least length of the result.
    """
    if x.ndim != 1 or x.dtype.kind not in "iu":
        raise ValueInputError(f"bincount: expected a vector of integers, got {x.dtype} of shape {x.shape}")
    n = minlength
    if not any(p.traced for p in x._parts) and x.size:
        if int(min_(x)) < 0:
            raise ValueInputError("bincount: expected integers that are not negative")
        n = max(minlength, int(max_(x)) + 1)
    w = full_like(x, 1, dtype=DEFAULTS["i"]) if weights is None else cast(asarray(weights), DEFAULTS["f"])
    if w.shape != x.shape:
        raise ValueInputError(f"bincount: weights of shape {w.shape} for {x.shape}")
    at = cast(x, DEFAULTS["i"])
    inside = less_equal(at, n - 1)
    return _counted(where(inside, at, 0), where(inside, w, 0), n)


def histogram(
    x: Array, /, bins: Any = 10, range: tuple[float, float] | None = None, weights: Any = None
) -> tuple[Array, Array]:
    """Counts of the elements in bins, and the edges of these; the last bin has both of its edges.

    Args:
        x: real numbers.
        bins: how many of equal width, or their edges in order.
        range: the outer edges; by default the smallest and the largest element, which is evaluated.
        weights: of the shape of `x`: the weight of each element.
    """
    y = cast(reshape(x, (x.size,)), float_of(x.dtype))
    if isinstance(bins, (int, np.integer)):
        if bins < 1:
            raise ValueInputError(f"histogram: bins={bins}: expected at least one")
        low, high = range if range is not None else (float(min_(y)), float(max_(y))) if x.size else (0.0, 1.0)
        if not low <= high:
            raise ValueInputError(f"histogram: range={range!r}: expected the lower edge first")
        low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
        edges = linspace(low, high, int(bins) + 1, dtype=y.dtype)
    else:
        edges = cast(asarray(bins), y.dtype)
    n = edges.size - 1
    at = searchsorted(edges, y, side="right")
    last, first = edges[n : n + 1], edges[:1]
    inside = logical_and(less_equal(first, y), less_equal(y, last))
    at = where(less_equal(last, y), n, at)
    w = full_like(y, 1, dtype=DEFAULTS["i"]) if weights is None else reshape(asarray(weights), (x.size,))
    counts = _counted(where(inside, subtract(at, 1), 0), where(inside, w, 0), n)
    return counts, edges


def _counted(at: Array, weights: Array, n: int) -> Array:
    """Sums of weights by places from 0 to n - 1."""
    zeros = apply("full", shape=(n,), value=0, dtype=from_numpy(weights.dtype))
    if not at.size or not n:
        return array_of(zeros)
    return array_of(apply("scatter_nd", zeros, one(reshape(at, (at.size, 1))), one(weights), reduction="add"))


# --- between points ---------------------------------------------------------------------------------------------------


def interp(x: Any, xp: Any, fp: Any, /, left: Any = None, right: Any = None) -> Array:
    """Values between known points on straight lines; beyond them `left` and `right`, by default those of the ends.

    Args:
        x: where values are wanted, of any shape.
        xp: a vector: where they are known, rising.
        fp: the known values, of the same shape.
    """
    dtype = float_of(asarray(fp).dtype)
    at, known, values = (cast(asarray(a), dtype) for a in (x, xp, fp))
    n = known.size
    if known.ndim != 1 or known.shape != values.shape or not n:
        raise ValueInputError(f"interp: points of shape {known.shape} with values of shape {values.shape}")
    first, last = values[0], values[n - 1]
    if n == 1:
        found = full_like(at, 0) + first
    else:
        line = reshape(at, (at.size,))
        k = searchsorted(known, line, side="right")
        k = where(less_equal(k, 1), 1, where(less_equal(n, k), n - 1, k))
        x0, x1, y0, y1 = (take(a, i) for a in (known, values) for i in (k - 1, k))
        share = divide(subtract(line, x0), subtract(x1, x0))
        found = reshape(add(y0, multiply(share, subtract(y1, y0))), at.shape)
    found = where(at < known[0], first if left is None else left, found)
    return where(at > known[n - 1], last if right is None else right, found)
