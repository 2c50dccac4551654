"""Layers that call one function of `dnnc.nn.functional` with the arguments of their constructor.

A class names the function; its constructor takes what the function takes behind its arrays, unless `order` says
otherwise. In training mode a function that has an argument `training` is told so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from dnnc.array.core import Array
from dnnc.ir.errors import InputError
from dnnc.nn import functional as F
from dnnc.nn import init
from dnnc.nn.functional.operands import array
from dnnc.nn.layers.linear import empty
from dnnc.nn.module import Module

HIDDEN = ("training", "key", "dtype")  # what no constructor takes


class _Signature:
    """The signature of a layer, for `help` and `inspect.signature`: that of its constructor."""

    def __get__(self, layer: Any, kind: type[Wrapped]) -> inspect.Signature:
        return kind._signature()


class Wrapped(Module):
    """Call `function` with `arrays` arguments of the call, then those of the constructor."""

    function: ClassVar[Callable[..., Any]]
    arrays: ClassVar[int] = 1
    __signature__: ClassVar[Any] = _Signature()
    order: ClassVar[tuple[str, ...]] = ()  # of the constructor's arguments, where it is another than the function's

    def __init_subclass__(
        cls, function: Callable[..., Any] | None = None, arrays: int | None = None, order: str | None = None
    ) -> None:
        if arrays is not None:
            cls.arrays = arrays
        if order is not None:
            cls.order = tuple(order.split())
        if function is not None:
            cls.function = staticmethod(function)
            summary = (function.__doc__ or "").partition("\n")[0]
            cls.__doc__ = f"{summary} See `dnnc.nn.functional.{function.__name__}`."

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        try:
            bound = self._signature().bind(*args, **kwargs)
        except TypeError as e:
            raise InputError(f"{type(self).__name__}{self._signature()}: {e}") from None
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            self._take(name, value)

    def _take(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    @classmethod
    @functools.cache
    def _signature(cls) -> inspect.Signature:
        given = list(inspect.signature(cls.function).parameters.values())[cls.arrays :]
        held = {p.name: p for p in given if p.name not in HIDDEN}
        names = [n for n in cls.order if n in held] if cls.order else list(held)
        return inspect.Signature([held[n].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names])

    @classmethod
    @functools.cache
    def _options(cls) -> tuple[str, ...]:
        """Names of arguments that the module gives the function from its attributes."""
        asked = "training" in inspect.signature(cls.function).parameters
        return (*cls._signature().parameters, *["training"] * asked)

    def forward(self, *inputs: Any) -> Array:
        named = {n: getattr(self, n) for n in self._options()}
        if len(inputs) != self.arrays:
            raise InputError(f"{type(self).__name__}: expected {self.arrays} arrays, got {len(inputs)}")
        return type(self).function(*inputs, **named)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        parts = []
        for n, p in self._signature().parameters.items():
            value = getattr(self, n)
            if not isinstance(value, Array) and (p.default is p.empty or value != p.default):
                parts.append(f"{n}={value!r}")
        return ", ".join(parts)


# --- activations ------------------------------------------------------------------------------------------------------


# fmt: off
class ReLU(Wrapped, function=F.relu): ...
class ReLU6(Wrapped, function=F.relu6): ...
class Hardtanh(Wrapped, function=F.hardtanh): ...
class LeakyReLU(Wrapped, function=F.leaky_relu): ...
class ELU(Wrapped, function=F.elu): ...
class SELU(Wrapped, function=F.selu): ...
class CELU(Wrapped, function=F.celu): ...
class GELU(Wrapped, function=F.gelu): ...
class SiLU(Wrapped, function=F.silu): ...
class Mish(Wrapped, function=F.mish): ...
class Sigmoid(Wrapped, function=F.sigmoid): ...
class Tanh(Wrapped, function=F.tanh): ...
class LogSigmoid(Wrapped, function=F.logsigmoid): ...
class Tanhshrink(Wrapped, function=F.tanhshrink): ...
class Softplus(Wrapped, function=F.softplus): ...
class Softsign(Wrapped, function=F.softsign): ...
class Hardsigmoid(Wrapped, function=F.hardsigmoid): ...
class Hardswish(Wrapped, function=F.hardswish): ...
class Hardshrink(Wrapped, function=F.hardshrink): ...
class Softshrink(Wrapped, function=F.softshrink): ...
class Threshold(Wrapped, function=F.threshold): ...
class GLU(Wrapped, function=F.glu): ...
class RReLU(Wrapped, function=F.rrelu): ...
class Softmax(Wrapped, function=F.softmax): ...
class LogSoftmax(Wrapped, function=F.log_softmax): ...
class Softmin(Wrapped, function=F.softmin): ...
class Maxout(Wrapped, function=F.maxout): ...
class CReLU(Wrapped, function=F.crelu): ...
# fmt: on


class Softmax2d(Module):
    """`softmax` over the channels of [N, C, H, W] or [C, H, W]."""

    def forward(self, input: Any) -> Array:
        return F.softmax(input, dim=-3)


class PReLU(Module):
    """`prelu` with a slope that is learnt, or one for each channel."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.num_parameters = num_parameters
        self.weight = _filled((num_parameters,), init, dtype, device)

    def forward(self, input: Any) -> Array:
        return F.prelu(input, self.weight)

    def extra_repr(self) -> str:
        return f"num_parameters={self.num_parameters}"


def _filled(shape: tuple[int, ...], value: float, dtype: Any, device: Any) -> Any:
    return init.constant_(empty(shape, dtype, device), value)


# --- dropout ----------------------------------------------------------------------------------------------------------


# fmt: off
class Dropout(Wrapped, function=F.dropout): ...
class AlphaDropout(Wrapped, function=F.alpha_dropout): ...
class Dropout1d(Wrapped, function=F.dropout1d): ...
class Dropout2d(Wrapped, function=F.dropout2d): ...
class Dropout3d(Wrapped, function=F.dropout3d): ...
class FeatureAlphaDropout(Wrapped, function=F.feature_alpha_dropout): ...
# fmt: on


# --- pools ------------------------------------------------------------------------------------------------------------

WINDOW = "kernel_size stride padding dilation return_indices ceil_mode"


class _MaxUnpool(Wrapped, arrays=2, order="kernel_size stride padding"):
    def forward(self, input: Any, indices: Any, output_size: Any = None) -> Array:
        given = (self.kernel_size, self.stride, self.padding, output_size)
        return type(self).function(input, indices, *given)  # type: ignore[no-any-return]


# fmt: off
class MaxPool1d(Wrapped, function=F.max_pool1d, order=WINDOW): ...
class MaxPool2d(Wrapped, function=F.max_pool2d, order=WINDOW): ...
class MaxPool3d(Wrapped, function=F.max_pool3d, order=WINDOW): ...
class AvgPool1d(Wrapped, function=F.avg_pool1d): ...
class AvgPool2d(Wrapped, function=F.avg_pool2d): ...
class AvgPool3d(Wrapped, function=F.avg_pool3d): ...
class LPPool1d(Wrapped, function=F.lp_pool1d): ...
class LPPool2d(Wrapped, function=F.lp_pool2d): ...
class LPPool3d(Wrapped, function=F.lp_pool3d): ...
class AdaptiveAvgPool1d(Wrapped, function=F.adaptive_avg_pool1d): ...
class AdaptiveAvgPool2d(Wrapped, function=F.adaptive_avg_pool2d): ...
class AdaptiveAvgPool3d(Wrapped, function=F.adaptive_avg_pool3d): ...
class MaxUnpool1d(_MaxUnpool, function=F.max_unpool1d): ...
class MaxUnpool2d(_MaxUnpool, function=F.max_unpool2d): ...
class MaxUnpool3d(_MaxUnpool, function=F.max_unpool3d): ...
class AdaptiveMaxPool1d(Wrapped, function=F.adaptive_max_pool1d): ...
class AdaptiveMaxPool2d(Wrapped, function=F.adaptive_max_pool2d): ...
class AdaptiveMaxPool3d(Wrapped, function=F.adaptive_max_pool3d): ...
# fmt: on


# --- images -----------------------------------------------------------------------------------------------------------

SIZES = "size scale_factor mode align_corners recompute_scale_factor"


# fmt: off
class PixelShuffle(Wrapped, function=F.pixel_shuffle): ...
class PixelUnshuffle(Wrapped, function=F.pixel_unshuffle): ...
class ChannelShuffle(Wrapped, function=F.channel_shuffle): ...
class Fold(Wrapped, function=F.fold): ...
class Unfold(Wrapped, function=F.unfold): ...
class Upsample(Wrapped, function=F.interpolate, order=SIZES): ...
class CosineSimilarity(Wrapped, function=F.cosine_similarity, arrays=2): ...
class PairwiseDistance(Wrapped, function=F.pairwise_distance, arrays=2): ...
# fmt: on


class UpsamplingNearest2d(Upsample, order="size scale_factor"):
    """`Upsample` by the nearest element."""


class UpsamplingBilinear2d(Upsample, order="size scale_factor"):
    """`Upsample` by lines between elements, corners on corners."""

    def forward(self, *inputs: Any) -> Array:
        if len(inputs) != 1:
            return super().forward(*inputs)  # which says that it takes one
        return F.interpolate(inputs[0], self.size, self.scale_factor, "bilinear", True)


class _Pad(Module):
    mode: ClassVar[str]
    rank: ClassVar[int]

    def __init_subclass__(cls, rank: int, mode: str) -> None:
        cls.rank, cls.mode = rank, mode
        pairs = "a number, or pairs of the last axis first"
        cls.__doc__ = f"`dnnc.nn.functional.pad` of the last {rank} axes, by {mode}: {pairs}."

    def __init__(self, padding: Any) -> None:
        super().__init__()
        self.padding = (padding,) * 2 * self.rank if isinstance(padding, int) else tuple(padding)

    def forward(self, input: Any) -> Array:
        return F.pad(input, self.padding, mode=self.mode)

    def extra_repr(self) -> str:
        return str(self.padding)


# fmt: off
class ZeroPad1d(_Pad, rank=1, mode="constant"): ...
class ZeroPad2d(_Pad, rank=2, mode="constant"): ...
class ZeroPad3d(_Pad, rank=3, mode="constant"): ...
class ReflectionPad1d(_Pad, rank=1, mode="reflect"): ...
class ReflectionPad2d(_Pad, rank=2, mode="reflect"): ...
class ReflectionPad3d(_Pad, rank=3, mode="reflect"): ...
class ReplicationPad1d(_Pad, rank=1, mode="replicate"): ...
class ReplicationPad2d(_Pad, rank=2, mode="replicate"): ...
class ReplicationPad3d(_Pad, rank=3, mode="replicate"): ...
class CircularPad1d(_Pad, rank=1, mode="circular"): ...
class CircularPad2d(_Pad, rank=2, mode="circular"): ...
class CircularPad3d(_Pad, rank=3, mode="circular"): ...
# fmt: on


class _ConstantPad(_Pad, rank=0, mode="constant"):
    def __init_subclass__(cls, rank: int) -> None:
        super().__init_subclass__(rank, "constant")

    def __init__(self, padding: Any, value: float) -> None:
        super().__init__(padding)
        self.value = value

    def forward(self, input: Any) -> Array:
        return F.pad(input, self.padding, mode=self.mode, value=self.value)

    def extra_repr(self) -> str:
        return f"{self.padding}, value={self.value}"


# fmt: off
class ConstantPad1d(_ConstantPad, rank=1): ...
class ConstantPad2d(_ConstantPad, rank=2): ...
class ConstantPad3d(_ConstantPad, rank=3): ...
# fmt: on


# --- losses -----------------------------------------------------------------------------------------------------------


class Loss(Wrapped, arrays=2):
    """A loss; weights that are arrays are buffers."""

    def _take(self, name: str, value: Any) -> None:
        if name in ("weight", "pos_weight"):
            self.register_buffer(name, None if value is None else array(type(self).__name__, name, value))
        else:
            super()._take(name, value)


# fmt: off
class MSELoss(Loss, function=F.mse_loss, order="reduction"): ...
class L1Loss(Loss, function=F.l1_loss, order="reduction"): ...
class SmoothL1Loss(Loss, function=F.smooth_l1_loss): ...
class HuberLoss(Loss, function=F.huber_loss, order="reduction delta"): ...
class CrossEntropyLoss(Loss, function=F.cross_entropy): ...
class NLLLoss(Loss, function=F.nll_loss): ...
class BCELoss(Loss, function=F.binary_cross_entropy): ...
class BCEWithLogitsLoss(Loss, function=F.binary_cross_entropy_with_logits): ...
class KLDivLoss(Loss, function=F.kl_div): ...
class PoissonNLLLoss(Loss, function=F.poisson_nll_loss): ...
class GaussianNLLLoss(Loss, function=F.gaussian_nll_loss, arrays=3): ...
class HingeEmbeddingLoss(Loss, function=F.hinge_embedding_loss): ...
class MarginRankingLoss(Loss, function=F.margin_ranking_loss, arrays=3): ...
class SoftMarginLoss(Loss, function=F.soft_margin_loss): ...
class MultiMarginLoss(Loss, function=F.multi_margin_loss): ...
class MultiLabelSoftMarginLoss(Loss, function=F.multilabel_soft_margin_loss): ...
class CosineEmbeddingLoss(Loss, function=F.cosine_embedding_loss, arrays=3): ...
class TripletMarginLoss(Loss, function=F.triplet_margin_loss, arrays=3): ...
class CTCLoss(Loss, function=F.ctc_loss, arrays=4): ...
# fmt: on
