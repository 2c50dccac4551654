"""Weight sharing: the weights of a layer that are not zero become few different ones, the centroids of a k-means.

Source: Han et al., Deep Compression, 2016: centroids begin at equal distances between the smallest and largest weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ROUNDS = 100  # of the k-means at most


def shared(w: Array, bits: int) -> Array:
    """Weights with at most 2^bits different values, zero among them where it was: each is its nearest centroid."""
    used = w != 0
    values = w[used].astype(np.float64)
    count = (1 << bits) - (values.size < w.size)
    if not values.size or np.unique(values).size <= count:
        return w
    order = np.sort(values)
    centroids = clustered(order, max(count, 1))
    nearest = np.searchsorted(_edges(centroids), values)
    out = np.zeros_like(w)
    out[used] = centroids[nearest].astype(w.dtype)
    return out


def clustered(order: Array, count: int) -> Array:
    """Centroids f64[count or fewer], ascending, of numbers in ascending order."""
    sums = np.concatenate([[0.0], np.cumsum(order)])
    centroids = np.linspace(order[0], order[-1], count)
    for _ in range(ROUNDS):
        cuts = np.concatenate([[0], np.searchsorted(order, _edges(centroids)), [order.size]])
        sizes = np.diff(cuts)
        kept = sizes > 0
        moved = np.diff(sums[cuts])[kept] / sizes[kept]
        if moved.size == centroids.size and np.array_equal(moved, centroids):
            break
        centroids = moved
    return centroids


def _edges(centroids: Array) -> Array:
    """Between neighbours."""
    return (centroids[1:] + centroids[:-1]) / 2
