"""Gradients of weights that share values: the sum over all weights of a value is the gradient of each."""

from __future__ import annotations

from dnnc.array.core import Array
from dnnc.array.distribution import bincount
from dnnc.array.manipulation import reshape, take

CLUSTERS = 256  # values of a codebook


def of_clusters(g: Array, codes: Array) -> Array:
    """Sums of a gradient over equal codes, uint8 of its shape, at each of their places."""
    flat = reshape(codes, (codes.size,)).astype("int32")
    sums = bincount(flat, reshape(g, (g.size,)), CLUSTERS)
    return reshape(take(sums, flat), g.shape).astype(g.dtype)
