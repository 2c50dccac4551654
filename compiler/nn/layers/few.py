"""Weights of few values: where these are stored alone, what computes the weight, and products that do not need it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dnnc.array.core import Array
from dnnc.array.creation import zeros
from dnnc.array.manipulation import matrix_transpose, moveaxis, reshape
from dnnc.array.sparse.arrays import csr_array
from dnnc.nn.layers.sparse import checksum
from dnnc.nn.module import PARAMETRIZATIONS, Module

SLOWER = 3.0  # how much longer a step's multiplications by few values take than as many in dense products
MOVED = (
    80.0  # a dense product of a pixel by so many channels takes as long as moving the pixel's channels ahead and back
)


class FewValues(Module):
    """A weight of which few elements are not 0, as a parametrization: of the values at fixed places.

    The name of a buffer has a checksum of the places, so that states of other places do not load.
    """

    def __init__(self, weight: Array) -> None:
        super().__init__()
        self.shape = tuple(weight.shape)
        self._places = csr_array(weight.numpy().reshape(self.shape[0], -1))
        self.register_buffer(f"places_{checksum(self._places)}", zeros((1,), dtype=np.uint8))

    def matrix(self, values: Array) -> csr_array:
        """The weight as [its first axis, all else], sparse."""
        return self._places.with_data(values)

    def forward(self, values: Array) -> Array:
        return reshape(self.matrix(values).toarray(), self.shape)

    def right_inverse(self, weight: Array) -> Array:
        """The elements of a weight at the places."""
        return reshape(weight, (math.prod(self.shape),))[self._places.structure.places[:, 0]]

    def extra_repr(self) -> str:
        return f"{self._places.nnz} of {math.prod(self.shape)} weights"


def sparse_weight(module: Module, name: str) -> csr_array | None:
    """A weight that `to_sparse` made few values of, as [its first axis, all else]; None for others."""
    holder = module._modules.get(PARAMETRIZATIONS)
    held: Any = None if holder is None else holder._modules.get(name)
    first = None if held is None else held.get_submodule("0")
    if held is None or not isinstance(first, FewValues) or len(held._modules) > 1:
        return None
    return first.matrix(held.original)


def times_rows(x: Array, w: csr_array) -> Array:
    """x W^T for a sparse W [outputs, inputs] and x [..., inputs]."""
    y = matrix_transpose(w @ matrix_transpose(reshape(x, (-1, w.shape[1]))))
    return reshape(y, (*x.shape[:-1], w.shape[0]))


def is_faster(x: Array, w: csr_array) -> bool:
    """Is a step of training a 1 x 1 convolution of images x by a sparse filter faster than by a dense one?"""
    share = w.nnz / (w.shape[0] * w.shape[1])
    return SLOWER * share + (0.0 if x.shape[0] == 1 else MOVED / min(w.shape)) < 0.95


def times_pixels(w: csr_array, x: Array) -> Array:
    """A 1 x 1 convolution of images x [N, inputs, ...] by a sparse filter [outputs, inputs]."""
    y = w @ reshape(moveaxis(x, 1, 0), (w.shape[1], -1))
    return moveaxis(reshape(y, (w.shape[0], x.shape[0], *x.shape[2:])), 0, 1)
