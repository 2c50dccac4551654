"""Normalization layers. Running statistics are buffers, which a call in training mode updates."""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.array.core import Array, from_buffer
from dnnc.array.devices import home
from dnnc.array.elementwise import add
from dnnc.array.promotion import dtype_of
from dnnc.ir.errors import InputError
from dnnc.nn import functional as F
from dnnc.nn import init
from dnnc.nn.functional.norms import keep_along, updating_batch_norm
from dnnc.nn.layers.linear import DTYPE, empty
from dnnc.nn.module import Module

_RUNNING = "running_mean", "running_var", "num_batches_tracked"


class _Statistics(Module):
    """Scale and bias of each channel, and running mean and variance."""

    ranks: tuple[int, ...]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        for name in ("weight", "bias"):
            self.register_parameter(name, empty((num_features,), dtype, device) if affine else None)
        if self.weight is not None:
            init.ones_(self.weight)
        buffers = {"running_mean": np.zeros(num_features), "running_var": np.ones(num_features)}
        kind = dtype_of(DTYPE if dtype is None else dtype)
        given = {name: a.astype(kind) for name, a in buffers.items()} | {"num_batches_tracked": np.array(0)}
        for name, a in given.items():
            self.register_buffer(name, from_buffer(a, home(device)) if track_running_stats else None)

    def _checked(self, input: Any) -> None:
        ndim = getattr(input, "ndim", None)
        if ndim not in self.ranks:
            words = " or ".join(map(str, self.ranks))
            raise InputError(f"{type(self).__name__}: expected an array of {words} axes, got {ndim}")

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}"
        )


class _BatchNorm(_Statistics):
    def forward(self, input: Any) -> Array:
        self._checked(input)
        momentum: Any = self.momentum
        training, tracked = self.training, self.track_running_stats
        mean, var, batches = map(self._buffers.get, _RUNNING) if tracked else [None] * 3
        if mean is None or var is None or batches is None:
            return F.batch_norm(input, mean, var, self.weight, self.bias, training or mean is None, momentum, self.eps)
        if training and momentum is not None:
            return updating_batch_norm(input, self.weight, self.bias, float(momentum), self.eps, mean, var, batches)
        if training:  # all batches count evenly
            batches._written(add(batches, 1)._parts)
            momentum = 1.0 / batches.astype("float64" if mean.dtype.itemsize == 8 else "float32")
        y = F.batch_norm(input, mean, var, self.weight, self.bias, training, momentum, self.eps)
        if training:
            keep_along(y, batches)
        return y


class BatchNorm1d(_BatchNorm):
    """Normalize each channel of [N, C] or [N, C, L] over the batch; see `dnnc.nn.functional.batch_norm`."""

    ranks: tuple[int, ...] = 2, 3


class BatchNorm2d(_BatchNorm):
    """Normalize each channel of [N, C, H, W] over the batch; see `dnnc.nn.functional.batch_norm`."""

    ranks: tuple[int, ...] = (4,)


class BatchNorm3d(_BatchNorm):
    """Normalize each channel of [N, C, D, H, W] over the batch; see `dnnc.nn.functional.batch_norm`."""

    ranks: tuple[int, ...] = (5,)


class _InstanceNorm(_Statistics):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)

    def forward(self, input: Any) -> Array:
        self._checked(input)
        single = input.ndim == self.ranks[0]
        x = input[None, ...] if single else input
        of_input = self.training or not self.track_running_stats
        y = F.instance_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, of_input, self.momentum or 0.0, self.eps
        )
        return y[0, ...] if single else y


class InstanceNorm1d(_InstanceNorm):
    """Normalize each channel of each of [N, C, L]; see `dnnc.nn.functional.instance_norm`."""

    ranks: tuple[int, ...] = 2, 3


class InstanceNorm2d(_InstanceNorm):
    """Normalize each channel of each of [N, C, H, W]; see `dnnc.nn.functional.instance_norm`."""

    ranks: tuple[int, ...] = 3, 4


class InstanceNorm3d(_InstanceNorm):
    """Normalize each channel of each of [N, C, D, H, W]; see `dnnc.nn.functional.instance_norm`."""

    ranks: tuple[int, ...] = 4, 5


class LayerNorm(Module):
    """Normalize rows of the last axes; see `dnnc.nn.functional.layer_norm`."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _shape(normalized_shape)
        self.eps, self.elementwise_affine = eps, elementwise_affine
        with_bias = elementwise_affine and bias
        self.register_parameter("weight", _scale(self.normalized_shape, elementwise_affine, dtype, device))
        self.register_parameter("bias", empty(self.normalized_shape, dtype, device) if with_bias else None)

    def forward(self, input: Any) -> Array:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


def _shape(given: Any) -> tuple[int, ...]:
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _scale(shape: Any, there: bool, dtype: Any, device: Any) -> Any:
    return init.ones_(empty(shape, dtype, device)) if there else None


class RMSNorm(Module):
    """Divide rows of the last axes by the root of the mean of their squares; see `dnnc.nn.functional.rms_norm`."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _shape(normalized_shape)
        self.eps, self.elementwise_affine = eps, elementwise_affine
        self.register_parameter("weight", _scale(self.normalized_shape, elementwise_affine, dtype, device))

    def forward(self, input: Any) -> Array:
        return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class GroupNorm(Module):
    """Normalize groups of channels; see `dnnc.nn.functional.group_norm`."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise InputError(f"GroupNorm: {num_channels} channels do not divide into {num_groups} groups")
        self.num_groups, self.num_channels, self.eps, self.affine = num_groups, num_channels, eps, affine
        self.register_parameter("weight", _scale((num_channels,), affine, dtype, device))
        self.register_parameter("bias", empty((num_channels,), dtype, device) if affine else None)

    def forward(self, input: Any) -> Array:
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"


class LocalResponseNorm(Module):
    """Divide by a power of neighbouring channels' squares; see `dnnc.nn.functional.local_response_norm`."""

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> None:
        super().__init__()
        self.size, self.alpha, self.beta, self.k = size, alpha, beta, k

    def forward(self, input: Any) -> Array:
        return F.local_response_norm(input, self.size, self.alpha, self.beta, self.k)

    def extra_repr(self) -> str:
        return f"{self.size}, alpha={self.alpha}, beta={self.beta}, k={self.k}"
