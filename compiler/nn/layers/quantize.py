"""Training for quantization: layers that round their weights and inputs as the quantized model will."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np

from dnnc.array.core import Array, from_buffer
from dnnc.array.creation import asarray
from dnnc.array.devices import home
from dnnc.array.elementwise import abs as absolute
from dnnc.array.elementwise import clip, divide, maximum, minimum, where
from dnnc.array.elementwise import round as rounded
from dnnc.array.statistical import max as max_of
from dnnc.array.statistical import min as min_of
from dnnc.ir.errors import InputError, a_type
from dnnc.nn import functional as F
from dnnc.nn.calls import functional_call
from dnnc.nn.functional.norms import blend
from dnnc.nn.functional.operands import detached
from dnnc.nn.layers.conv import Conv1d, Conv2d, Conv3d
from dnnc.nn.layers.linear import Linear
from dnnc.nn.module import Module, replaced

M = TypeVar("M", bound=Module)
LAYERS = (Conv1d, Conv2d, Conv3d, Linear)
LEAST = 1e-8  # of a scale


class FakeQuantize(Module):
    """Round activations to uint8 with one scale, whose range follows the batches in training mode.

    The range is a moving average of the smallest and largest numbers of the batches, with 0 inside. Buffers: `low`,
    `high`, `scale`, `zero_point`, `num_batches_tracked`.
    """

    def __init__(self, momentum: float = 0.05) -> None:
        super().__init__()
        self.momentum = momentum
        values = {"low": np.float32(0), "high": np.float32(0), "scale": np.float32(1), "zero_point": np.uint8(0),
                  "num_batches_tracked": np.int64(0)}  # fmt: skip
        for name, value in values.items():
            self.register_buffer(name, from_buffer(np.array(value), home(None)))

    def forward(self, input: Any) -> Array:
        if self.training:
            self._follow(detached(input))
        return F.fake_quantize(input, self.scale, self.zero_point, "uint8")

    def _follow(self, x: Array) -> None:
        """Move the range towards that of a batch; the first batch is the range."""
        part = where(self.num_batches_tracked == 0, asarray(1.0, dtype=x.dtype), asarray(self.momentum, dtype=x.dtype))
        blend(self.low, minimum(min_of(x), 0.0), part)
        blend(self.high, maximum(max_of(x), 0.0), part)
        scale = maximum(divide(self.high - self.low, 255.0), LEAST)
        _write(self.scale, scale)
        _write(self.zero_point, clip(rounded(divide(-self.low, scale)), 0.0, 255.0).astype("uint8"))
        _write(self.num_batches_tracked, self.num_batches_tracked + 1)

    def extra_repr(self) -> str:
        return f"uint8, momentum={self.momentum}"


class QuantAware(Module):
    """A convolution or linear layer that rounds its input to uint8 and its weights to int8, by output channel.

    `layer` is the layer, `activation` the rounding of the input, `weight_scale` a buffer that follows the weights.
    """

    def __init__(self, layer: Module, momentum: float = 0.05) -> None:
        super().__init__()
        if not isinstance(layer, LAYERS):
            raise InputError(f"QuantAware: expected a Conv1d, Conv2d, Conv3d or Linear, got {a_type(layer)}")
        self.layer, self.activation = layer, FakeQuantize(momentum)
        weight = layer.weight.numpy().astype(np.float32)
        largest = np.abs(weight.reshape(weight.shape[0], -1)).max(1)
        self.register_buffer(
            "weight_scale", from_buffer(np.maximum(largest / 127, LEAST).astype(np.float32), home(None))
        )

    def forward(self, input: Any) -> Array:
        weight = self.layer.weight
        if self.training:
            w = detached(weight)
            largest = max_of(absolute(w), axis=tuple(range(1, w.ndim)))
            blend(self.weight_scale, maximum(divide(largest, 127.0), LEAST), 1.0)
        held = F.fake_quantize(weight, self.weight_scale, None, "int8", axis=0)
        result: Array = functional_call(self.layer, {"weight": held}, self.activation(input))
        return result


def _write(buffer: Any, value: Array) -> None:
    buffer._written(value.astype(buffer.dtype)._parts)


def quantize_aware(module: M, keep: str | Sequence[str] = (), momentum: float = 0.05) -> M:
    """Let the convolutions and linear layers of a module round as its quantized form will, in place.

    Train on, then `dnnc.to_onnx(module, path, inputs=...)` writes the quantized model. Parameters stay the same arrays;
    their names get a `layer` in the path (`conv1.layer.weight`). Make optimizers behind this call.

    Args:
        module: whose layers are replaced; a single layer is returned within a QuantAware.
        keep: patterns (`*`, `?`) of the names of layers that stay float.
        momentum: of the ranges of activations.

    Returns:
        The module.

    Raises:
        InputError: there is nothing to replace, or a pattern fits no layer.
    """
    if not isinstance(module, Module):
        raise InputError(f"quantize_aware: expected a Module, got {a_type(module)}")
    patterns = [keep] if isinstance(keep, str) else list(keep)
    if isinstance(module, LAYERS):
        return QuantAware(module, momentum)  # type: ignore[return-value]
    names = [n for n, m in module.named_modules() if isinstance(m, LAYERS) and not _is_wrapped(module, n)]
    unfit = [p for p in patterns if not any(fnmatchcase(n, p) for n in names)]
    if unfit:
        raise InputError(f"quantize_aware: no layer fits {unfit[0]!r}; layers are {', '.join(names[:20]) or 'none'}")
    chosen = [n for n in names if not any(fnmatchcase(n, p) for p in patterns)]
    if not chosen:
        raise InputError("quantize_aware: the module has no convolution and no linear layer that is float")
    layers = [module.get_submodule(n) for n in chosen]
    return replaced(module, {id(m): QuantAware(m, momentum) for m in layers})


def _is_wrapped(module: Module, name: str) -> bool:
    return isinstance(module.get_submodule(name.rpartition(".")[0]), QuantAware)
