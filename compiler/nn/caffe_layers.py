"""The types of Caffe's layers, each as a function from a layer to a module; `LAYERS` is the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import dnnc.array as xp
from dnnc.array.core import Array
from dnnc.ir.errors import InputError, ModelError, UnsupportedError, count
from dnnc.nn import functional as F
from dnnc.nn.layers.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from dnnc.nn.layers.linear import Linear
from dnnc.nn.layers.norm import BatchNorm2d
from dnnc.nn.layers.wrapped import ELU, Dropout, LeakyReLU, ReLU, Sigmoid, Softplus, Tanh
from dnnc.nn.module import Module
from dnnc.nn.parameter import Parameter

Blobs = dict[str, Array]
Tied = dict[str, Parameter]


@dataclass
class Layer:
    """A layer in one form. `proto` has its parameters; `shared`: names of blobs that layers share, "" for none."""

    name: str
    kind: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    proto: Any
    blobs: list[np.ndarray[Any, Any]]
    shared: Sequence[str]

    def wrong(self, why: str) -> ModelError:
        return ModelError(f"layer {self.name!r} ({self.kind}): {why}")


class Op(Module):
    """A layer without weights: a function of its bottoms."""

    def __init__(self, kind: str, fn: Callable[..., Any], shown: str = "") -> None:
        super().__init__()
        self._kind, self._fn, self._shown = kind, fn, shown

    def forward(self, *blobs: Any) -> Any:
        return self._fn(*blobs)

    def extra_repr(self) -> str:
        return f"{self._kind}{', ' if self._shown else ''}{self._shown}"


# --- products ---------------------------------------------------------------------------------------------------------


def _number(x: float) -> float:
    """A float32 of a message, as people write it: 1e-5, not 9.99999974e-06."""
    return float(str(np.float32(x)))


def _sizes(layer: Layer, p: Any, name: str, rank: int, default: int) -> tuple[int, ...]:
    """A size for each spatial axis: of the repeated field, or of the fields for height and width."""
    short = "kernel" if name == "kernel_size" else name
    if hasattr(p, f"{short}_h") and (p.HasField(f"{short}_h") or p.HasField(f"{short}_w")):
        return int(getattr(p, f"{short}_h")), int(getattr(p, f"{short}_w"))
    given = tuple(map(int, getattr(p, name)))
    if len(given) not in (0, 1, rank):
        raise layer.wrong(f"{name} has {count(len(given), 'number')} for {rank} axes")
    return given if len(given) == rank else (given or (default,)) * rank


def _kernel(layer: Layer, p: Any) -> tuple[int, ...]:
    """The filter's size, whose rank the blob tells where it has spatial axes."""
    rank = layer.blobs[0].ndim - 2 if layer.blobs else 2
    kernel = _sizes(layer, p, "kernel_size", rank, 0)
    if not all(kernel) or rank not in (1, 2, 3):
        raise layer.wrong(f"a kernel of size {kernel}; expected one to three axes of 1 and more")
    return kernel


def _convolution(layer: Layer) -> Module:
    p = layer.proto.convolution_param
    if not layer.blobs:
        raise layer.wrong("it has no weights; give the .caffemodel that the definition belongs to")
    if p.axis != 1:
        raise UnsupportedError(f"layer {layer.name!r}: axis={p.axis}; channels must be axis 1")
    kernel, out, groups = _kernel(layer, p), int(p.num_output), int(p.group)
    rank = len(kernel)
    window = {
        "stride": _sizes(layer, p, "stride", rank, 1),
        "padding": _sizes(layer, p, "pad", rank, 0),
        "dilation": _sizes(layer, p, "dilation", rank, 1),
    }
    back = layer.kind == "Deconvolution"
    channels = layer.blobs[0].size // math.prod(kernel) // max(out, 1) * groups
    kinds: tuple[Any, ...] = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d) if back else (Conv1d, Conv2d, Conv3d)
    if out < 1 or channels < 1:
        raise layer.wrong(f"num_output={out} and a blob of shape {layer.blobs[0].shape} do not fit")
    made: Module = kinds[rank - 1](channels, out, kernel, groups=groups, bias=p.bias_term, **window)
    return made


class InnerProduct(Linear):
    """A linear layer of the axes from `axis` on."""

    axis: int = 1
    turned: bool = False

    def forward(self, input: Any) -> Array:
        axis = self.axis % input.ndim
        flat = xp.reshape(input, (*input.shape[:axis], -1))
        return F.linear(flat, self.weight.T if self.turned else self.weight, self.bias)


def _inner_product(layer: Layer) -> Module:
    p = layer.proto.inner_product_param
    out = int(p.num_output)
    if not layer.blobs or out < 1 or layer.blobs[0].size % out:
        shapes = [b.shape for b in layer.blobs]
        raise layer.wrong(f"num_output={out} and blobs of shapes {shapes} do not fit; give the .caffemodel of the net")
    made = InnerProduct(layer.blobs[0].size // out, out, bias=p.bias_term)
    made.axis, made.turned = int(p.axis), bool(p.transpose)
    if made.turned:
        made.weight = Parameter(np.zeros((made.in_features, out), np.float32))
    return made


# --- pools and normalizations -----------------------------------------------------------------------------------------


def _pooling(layer: Layer) -> Module:
    p = layer.proto.pooling_param
    if p.pool == 2:
        raise UnsupportedError(f"layer {layer.name!r}: stochastic pooling")
    if p.global_pooling:
        return Op(
            "Pooling", lambda x: (xp.max, xp.mean)[p.pool](x, axis=tuple(range(2, x.ndim)), keepdims=True), "global"
        )
    kernel, stride, pad = (_sizes(layer, p, n, 2, d) for n, d in (("kernel_size", 0), ("stride", 1), ("pad", 0)))
    if not all(kernel):
        raise layer.wrong("it has no kernel_size")
    name, pool = (("max_pool2d", F.max_pool2d), ("avg_pool2d", F.avg_pool2d))[p.pool]
    return Op("Pooling", lambda x: pool(x, kernel, stride, pad, ceil_mode=True), f"{name}, {kernel}, {stride}")


def _lrn(layer: Layer) -> Module:
    p = layer.proto.lrn_param
    size = int(p.local_size)
    if size % 2 == 0:
        raise layer.wrong(f"local_size={size}: expected an odd number")
    if p.norm_region == 0:
        return Op("LRN", lambda x: F.local_response_norm(x, size, p.alpha, p.beta, p.k), f"{size}")

    def within(x: Any) -> Any:
        return x * (F.avg_pool2d(x * x, size, 1, size // 2) * p.alpha + 1.0) ** -p.beta

    return Op("LRN", within, f"{size}, within channels")


class BatchNorm(BatchNorm2d):
    """Statistics of each channel, without scale and bias. Caffe's blobs are sums, to be divided by the third."""

    ranks: tuple[int, ...] = (2, 3, 4, 5)
    fixed = False

    def blob_names(self) -> list[str]:
        return []

    def forward(self, input: Any) -> Array:
        if not self.fixed:
            return super().forward(input)
        return F.batch_norm(input, self.running_mean, self.running_var, eps=self.eps)


def _batch_norm(layer: Layer) -> Module:
    p = layer.proto.batch_norm_param
    if len(layer.blobs) != 3 or layer.blobs[0].size != layer.blobs[1].size or layer.blobs[2].size != 1:
        raise layer.wrong(f"blobs of shapes {[b.shape for b in layer.blobs]}; expected mean, variance and one factor")
    made = BatchNorm(layer.blobs[0].size, _number(p.eps), 1 - _number(p.moving_average_fraction), affine=False)
    made.fixed = bool(p.use_global_stats)
    factor = float(layer.blobs[2].reshape(-1)[0])
    sums = {"running_mean": layer.blobs[0], "running_var": layer.blobs[1]}
    scaled = {n: (a.ravel() / factor if factor else a.ravel() * 0).astype(np.float32) for n, a in sums.items()}
    made.load_state_dict(scaled, strict=False)
    return made


class Scale(Module):
    """x * weight + bias along the axes from `axis` on; the second bottom in the place of a weight."""

    def __init__(self, axis: int, weight: tuple[int, ...] | None, bias: tuple[int, ...] | None, adds: bool) -> None:
        super().__init__()
        self.axis, self.adds = axis, adds
        for name, shape in (("weight", weight), ("bias", bias)):
            self.register_parameter(name, None if shape is None else Parameter(np.zeros(shape, np.float32)))

    def forward(self, x: Any, other: Any = None) -> Any:
        if other is not None:
            return x + self._spread(x, other) if self.adds else self._biased(x, x * self._spread(x, other))
        return self._biased(x, x if self.weight is None else x * self._spread(x, self.weight))

    def _biased(self, x: Any, y: Any) -> Any:
        return y if self.bias is None else y + self._spread(x, self.bias)

    def _spread(self, x: Any, a: Any) -> Any:
        behind = x.ndim - self.axis % x.ndim - a.ndim
        if behind < 0:
            raise InputError(f"a factor of shape {a.shape} does not fit {x.shape} from axis {self.axis} on")
        return xp.reshape(a, (*a.shape, *(1,) * behind))


def _scale(layer: Layer) -> Module:
    p = layer.proto.scale_param
    own = len(layer.bottoms) == 1
    shapes = [b.shape for b in layer.blobs]
    wanted = int(own) + int(p.bias_term)
    if len(shapes) != wanted:
        raise layer.wrong(f"{count(len(shapes), 'blob')}; expected {wanted}")
    return Scale(p.axis, shapes[0] if own else None, shapes[-1] if p.bias_term else None, False)


def _bias(layer: Layer) -> Module:
    shape = layer.blobs[0].shape if layer.blobs else None
    if (shape is None) == (len(layer.bottoms) == 1):
        raise layer.wrong(f"{count(len(layer.blobs), 'blob')} for {count(len(layer.bottoms), 'bottom')}")
    return Scale(layer.proto.bias_param.axis, None, shape, True)


def _mvn(layer: Layer) -> Module:
    p = layer.proto.mvn_param

    def normalized(x: Any) -> Any:
        axes = tuple(range(1 if p.across_channels else 2, x.ndim))
        off = x - xp.mean(x, axis=axes, keepdims=True)
        return off / (xp.sqrt(xp.mean(off * off, axis=axes, keepdims=True)) + p.eps) if p.normalize_variance else off

    return Op("MVN", normalized)


# --- elements ---------------------------------------------------------------------------------------------------------


class PReLU(Module):
    """max(x, 0) + weight * min(x, 0), a weight for each channel or one for all."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = Parameter(np.full(size, 0.25, np.float32))

    def forward(self, input: Any) -> Any:
        return F.prelu(input, self.weight)


def _prelu(layer: Layer) -> Module:
    if not layer.blobs:
        raise layer.wrong("it has no weights; give the .caffemodel that the definition belongs to")
    return PReLU(layer.blobs[0].size)


class TestScaledDropout(Dropout):
    """Dropout that scales in inference in place of training."""

    def forward(self, input: Any) -> Array:
        return super().forward(input) * (1 - self.p)  # type: ignore[no-any-return]


def _dropout(layer: Layer) -> Module:
    p = layer.proto.dropout_param
    return (Dropout if p.scale_train else TestScaledDropout)(_number(p.dropout_ratio))


def _relu(layer: Layer) -> Module:
    slope = layer.proto.relu_param.negative_slope
    return LeakyReLU(slope) if slope else ReLU()


def _power(layer: Layer) -> Module:
    p = layer.proto.power_param

    def powered(x: Any) -> Any:
        y = x if p.scale == 1 else x * p.scale
        y = y if p.shift == 0 else y + p.shift
        return y if p.power == 1 else y**p.power

    return Op("Power", powered)


def _exp(layer: Layer) -> Module:
    p = layer.proto.exp_param
    factor = math.log(p.base) if p.base > 0 else 1.0
    return Op("Exp", lambda x: xp.exp((x * p.scale + p.shift) * factor))


def _log(layer: Layer) -> Module:
    p = layer.proto.log_param
    factor = 1 / math.log(p.base) if p.base > 0 else 1.0
    return Op("Log", lambda x: xp.log(x * p.scale + p.shift) * factor)


def _eltwise(layer: Layer) -> Module:
    p = layer.proto.eltwise_param
    coefficients = list(p.coeff) or [1.0] * len(layer.bottoms)
    if len(coefficients) != len(layer.bottoms):
        raise layer.wrong(f"{count(len(coefficients), 'coefficient')} for {count(len(layer.bottoms), 'bottom')}")

    def combined(*xs: Any) -> Any:
        total = None
        for x, k in zip(xs, coefficients):
            x = x * k if p.operation == 1 and k != 1 else x
            total = x if total is None else (xp.multiply, xp.add, xp.maximum)[p.operation](total, x)
        return total

    return Op("Eltwise", combined, ("product", "sum", "max")[p.operation])


# --- movement ---------------------------------------------------------------------------------------------------------


def _concat(layer: Layer) -> Module:
    p = layer.proto.concat_param
    axis = int(p.concat_dim if p.HasField("concat_dim") else p.axis)
    return Op("Concat", lambda *xs: xp.concat(list(xs), axis=axis), f"axis={axis}")


def _slice(layer: Layer) -> Module:
    p = layer.proto.slice_param
    axis = int(p.slice_dim if p.HasField("slice_dim") else p.axis)
    points = [int(k) for k in p.slice_point]

    def sliced(x: Any) -> Any:
        n = x.shape[axis]
        if not points and n % len(layer.tops):
            raise InputError(f"layer {layer.name!r}: axis {axis} of {x.shape} is not {len(layer.tops)} equal parts")
        ends = [*points, n] if points else [n // len(layer.tops) * (k + 1) for k in range(len(layer.tops))]
        lead = (slice(None),) * (axis % x.ndim)
        return [x[(*lead, slice(a, b))] for a, b in zip([0, *ends], ends)]

    return Op("Slice", sliced, f"axis={axis}")


def _flatten(layer: Layer) -> Module:
    p = layer.proto.flatten_param if hasattr(layer.proto, "flatten_param") else None
    axis, end = (1, -1) if p is None else (int(p.axis), int(p.end_axis))

    def flat(x: Any) -> Any:
        a, b = axis % x.ndim, end % x.ndim
        return xp.reshape(x, (*x.shape[:a], math.prod(x.shape[a : b + 1]), *x.shape[b + 1 :]))

    return Op("Flatten", flat)


def _reshape(layer: Layer) -> Module:
    p = layer.proto.reshape_param
    dims = [int(d) for d in p.shape.dim]

    def reshaped(x: Any) -> Any:
        first = p.axis if p.axis >= 0 else x.ndim + p.axis + 1
        last = x.ndim if p.num_axes < 0 else first + p.num_axes
        new = [x.shape[first + k] if d == 0 else d for k, d in enumerate(dims)]
        return xp.reshape(x, (*x.shape[:first], *new, *x.shape[last:]))

    return Op("Reshape", reshaped, f"{dims}")


def _crop(layer: Layer) -> Module:
    p = layer.proto.crop_param
    offsets = [int(k) for k in p.offset]

    def cropped(x: Any, like: Any) -> Any:
        axis = p.axis % x.ndim
        given = offsets or [0]
        given = given * (x.ndim - axis) if len(given) == 1 else given
        window = [slice(o, o + like.shape[axis + k]) for k, o in enumerate(given)]
        return x[(*(slice(None),) * axis, *window)]

    return Op("Crop", cropped)


def _softmax(layer: Layer) -> Module:
    axis = int(layer.proto.softmax_param.axis)
    return Op("Softmax", lambda x: F.softmax(x, axis), f"axis={axis}")


LAYERS: dict[str, Callable[[Layer], Module]] = {
    "AbsVal": lambda layer: Op("AbsVal", xp.abs),
    "BNLL": lambda layer: Softplus(),
    "BatchNorm": _batch_norm,
    "Bias": _bias,
    "Concat": _concat,
    "Convolution": _convolution,
    "Crop": _crop,
    "Deconvolution": _convolution,
    "Dropout": _dropout,
    "ELU": lambda layer: ELU(layer.proto.elu_param.alpha),
    "Eltwise": _eltwise,
    "Exp": _exp,
    "Flatten": _flatten,
    "InnerProduct": _inner_product,
    "LRN": _lrn,
    "Log": _log,
    "MVN": _mvn,
    "PReLU": _prelu,
    "Permute": lambda layer: Op("Permute", lambda x: xp.permute_dims(x, tuple(layer.proto.permute_param.order))),
    "Pooling": _pooling,
    "Power": _power,
    "ReLU": _relu,
    "Reshape": _reshape,
    "Scale": _scale,
    "Sigmoid": lambda layer: Sigmoid(),
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": lambda layer: Op("Split", lambda x: x),
    "TanH": lambda layer: Tanh(),
}
