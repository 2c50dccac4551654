"""`dnnc.nn.utils.parametrizations`: weights by length and direction, and of bounded norm, under PyTorch's names."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np

from dnnc.array.core import Array
from dnnc.array.creation import zeros
from dnnc.array.elementwise import maximum, sqrt
from dnnc.array.manipulation import matrix_transpose, moveaxis, reshape
from dnnc.array.statistical import sum as total
from dnnc.ir.errors import InputError
from dnnc.nn.functional.norms import update_buffer
from dnnc.nn.functional.operands import detached
from dnnc.nn.init import normal_
from dnnc.nn.module import Module
from dnnc.nn.utils.parametrize import register_parametrization

M = TypeVar("M", bound=Module)


def weight_norm(module: M, name: str = "weight", dim: int | None = 0) -> M:
    """w = g v / |v|: a weight's length and its direction are parameters, `original0` and `original1`.

    Args:
        module: changed in place.
        name: of the weight.
        dim: along which each slice has a length of its own; None: one for all.

    Source: Salimans and Kingma, 2016.
    """
    return register_parametrization(module, name, _WeightNorm(dim))


def spectral_norm(
    module: M, name: str = "weight", n_power_iterations: int = 1, eps: float = 1e-12, dim: int | None = None
) -> M:
    """w / sigma: a weight, as a matrix, has a largest singular value of about 1.

    Each forward in training mode improves the singular vectors, which are buffers, by power iterations.

    Args:
        module: changed in place.
        name: of the weight.
        n_power_iterations: in each forward.
        eps: below which a length is no divisor.
        dim: the rows of the matrix; by default 0, of transposed convolutions 1.

    Source: Miyato et al., 2018.

    Raises:
        InputError: there is no iteration, or no such weight.
    """
    if n_power_iterations < 1:
        raise InputError(f"spectral_norm: n_power_iterations={n_power_iterations}, expected at least 1")
    weight = getattr(module, name, None)
    rows = dim if dim is not None else int(getattr(module, "transposed", False))
    if not isinstance(weight, Array):
        raise InputError(f"spectral_norm: {type(module).__name__} has no weight {name!r}")
    return register_parametrization(module, name, _SpectralNorm(weight, n_power_iterations, rows, eps))


class _WeightNorm(Module):
    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, length: Array, direction: Array) -> Array:
        return direction * (length / self._length(direction))

    def right_inverse(self, weight: Array) -> tuple[Array, Array]:
        return self._length(weight), weight

    def _length(self, v: Array) -> Array:
        if self.dim is None:
            return sqrt(total(v * v))
        axes = tuple(k for k in range(v.ndim) if k != self.dim % v.ndim)
        return sqrt(total(v * v, axis=axes, keepdims=True))


class _SpectralNorm(Module):
    _u: Array
    _v: Array

    def __init__(self, weight: Array, iterations: int, dim: int, eps: float) -> None:
        super().__init__()
        self.n_power_iterations, self.dim, self.eps = iterations, dim % max(weight.ndim, 1), eps
        if weight.ndim > 1:
            rows = weight.shape[self.dim]
            for name, size in (("_u", rows), ("_v", math.prod(weight.shape) // max(rows, 1))):
                start = normal_(zeros((size,), dtype=weight.dtype, device=weight.device))
                self.register_buffer(name, self._unit(start))
            self._iterate(self._matrix(detached(weight)), 15)

    def forward(self, weight: Array) -> Array:
        if weight.ndim == 1:
            return self._unit(weight)
        matrix = self._matrix(weight)
        if self.training:
            self._iterate(detached(matrix), self.n_power_iterations)
        u, v = (detached(x) for x in (self._u, self._v))
        return weight / total(u * (matrix @ v))

    def right_inverse(self, value: Array) -> Array:
        return value

    def _iterate(self, matrix: Array, times: int) -> None:
        u, v = self._u, self._v
        for _ in range(times):
            u = self._unit(matrix @ v)
            v = self._unit(matrix_transpose(matrix) @ u)
        update_buffer(self._u, u)
        update_buffer(self._v, v)

    def _matrix(self, weight: Array) -> Array:
        return reshape(moveaxis(weight, self.dim, 0), (weight.shape[self.dim], -1))

    def _unit(self, x: Array) -> Array:
        return x / maximum(sqrt(total(x * x)), np.asarray(self.eps, x.dtype).item())
