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

    def forward(self, *inputs: Any) -> Any:
        named = {n: getattr(self, n) for n in self._signature().parameters}
        if "training" in inspect.signature(type(self).function).parameters:
            named["training"] = self.training
        if len(inputs) != self.arrays:
            raise InputError(f"{type(self).__name__}: expected {self.arrays} arrays, got {len(inputs)}")
        return type(self).function(*inputs, **named)

    def extra_repr(self) -> str:
        parts = []
        for n, p in self._signature().parameters.items():
            value = getattr(self, n)
            if not isinstance(value, Array) and (p.default is p.empty or value != p.default):
                parts.append(f"{n}={value!r}")
        return ", ".join(parts)


def layer(name: str, function: Callable[..., Any], arrays: int = 1, order: str = "", base: type = Wrapped) -> Any:
    """The class of a layer that calls a function."""
    summary = (function.__doc__ or "").partition("\n")[0]
    text = f"{summary} See `dnnc.nn.functional.{function.__name__}`."
    fields = {"function": staticmethod(function), "arrays": arrays, "order": tuple(order.split()), "__doc__": text}
    return type(name, (base,), {**fields, "__module__": __name__, "__qualname__": name})


# --- activations ------------------------------------------------------------------------------------------------------

ReLU, ReLU6, Hardtanh = layer("ReLU", F.relu), layer("ReLU6", F.relu6), layer("Hardtanh", F.hardtanh)
LeakyReLU, ELU, SELU = layer("LeakyReLU", F.leaky_relu), layer("ELU", F.elu), layer("SELU", F.selu)
CELU, GELU, SiLU = layer("CELU", F.celu), layer("GELU", F.gelu), layer("SiLU", F.silu)
Mish, Sigmoid, Tanh = layer("Mish", F.mish), layer("Sigmoid", F.sigmoid), layer("Tanh", F.tanh)
LogSigmoid, Tanhshrink = layer("LogSigmoid", F.logsigmoid), layer("Tanhshrink", F.tanhshrink)
Softplus, Softsign = layer("Softplus", F.softplus), layer("Softsign", F.softsign)
Hardsigmoid, Hardswish = layer("Hardsigmoid", F.hardsigmoid), layer("Hardswish", F.hardswish)
Hardshrink, Softshrink = layer("Hardshrink", F.hardshrink), layer("Softshrink", F.softshrink)
Threshold, GLU, RReLU = layer("Threshold", F.threshold), layer("GLU", F.glu), layer("RReLU", F.rrelu)
Softmax, LogSoftmax, Softmin = (
    layer("Softmax", F.softmax),
    layer("LogSoftmax", F.log_softmax),
    layer("Softmin", F.softmin),
)
Maxout, CReLU = layer("Maxout", F.maxout), layer("CReLU", F.crelu)


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

Dropout, AlphaDropout = layer("Dropout", F.dropout), layer("AlphaDropout", F.alpha_dropout)
Dropout1d, Dropout2d = layer("Dropout1d", F.dropout1d), layer("Dropout2d", F.dropout2d)
Dropout3d, FeatureAlphaDropout = (
    layer("Dropout3d", F.dropout3d),
    layer("FeatureAlphaDropout", F.feature_alpha_dropout),
)

# --- pools ------------------------------------------------------------------------------------------------------------

WINDOW = "kernel_size stride padding dilation return_indices ceil_mode"
MaxPool1d, MaxPool2d, MaxPool3d = (
    layer(f"MaxPool{k}d", f, order=WINDOW) for k, f in enumerate((F.max_pool1d, F.max_pool2d, F.max_pool3d), 1)
)
AvgPool1d, AvgPool2d, AvgPool3d = (
    layer(f"AvgPool{k}d", f) for k, f in enumerate((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), 1)
)
LPPool1d, LPPool2d, LPPool3d = (
    layer(f"LPPool{k}d", f) for k, f in enumerate((F.lp_pool1d, F.lp_pool2d, F.lp_pool3d), 1)
)
AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d = (
    layer(f"AdaptiveAvgPool{k}d", f)
    for k, f in enumerate((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), 1)
)
AdaptiveMaxPool1d, AdaptiveMaxPool2d, AdaptiveMaxPool3d = (
    layer(f"AdaptiveMaxPool{k}d", f)
    for k, f in enumerate((F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d), 1)
)

# --- images -----------------------------------------------------------------------------------------------------------

PixelShuffle, PixelUnshuffle = layer("PixelShuffle", F.pixel_shuffle), layer("PixelUnshuffle", F.pixel_unshuffle)
ChannelShuffle, Fold, Unfold = (
    layer("ChannelShuffle", F.channel_shuffle),
    layer("Fold", F.fold),
    layer("Unfold", F.unfold),
)
Upsample = layer("Upsample", F.interpolate, order="size scale_factor mode align_corners recompute_scale_factor")
CosineSimilarity = layer("CosineSimilarity", F.cosine_similarity, 2)
PairwiseDistance = layer("PairwiseDistance", F.pairwise_distance, 2)


class _Pad(Module):
    mode: ClassVar[str]
    rank: ClassVar[int]

    def __init__(self, padding: Any) -> None:
        super().__init__()
        self.padding = (padding,) * 2 * self.rank if isinstance(padding, int) else tuple(padding)

    def forward(self, input: Any) -> Array:
        return F.pad(input, self.padding, mode=self.mode)

    def extra_repr(self) -> str:
        return str(self.padding)


def _pad(name: str, rank: int, mode: str) -> Any:
    text = f"`dnnc.nn.functional.pad` of the last {rank} axes, by {mode}: a number, or pairs of the last axis first."
    return type(name, (_Pad,), {"rank": rank, "mode": mode, "__doc__": text, "__module__": __name__})


ZeroPad1d, ZeroPad2d, ZeroPad3d = (_pad(f"ZeroPad{k}d", k, "constant") for k in (1, 2, 3))
ReflectionPad1d, ReflectionPad2d, ReflectionPad3d = (_pad(f"ReflectionPad{k}d", k, "reflect") for k in (1, 2, 3))
ReplicationPad1d, ReplicationPad2d, ReplicationPad3d = (_pad(f"ReplicationPad{k}d", k, "replicate") for k in (1, 2, 3))
CircularPad1d, CircularPad2d, CircularPad3d = (_pad(f"CircularPad{k}d", k, "circular") for k in (1, 2, 3))


# --- losses -----------------------------------------------------------------------------------------------------------


class Loss(Wrapped):
    """A loss; weights that are arrays are buffers."""

    def _take(self, name: str, value: Any) -> None:
        if name in ("weight", "pos_weight"):
            self.register_buffer(name, None if value is None else array(type(self).__name__, name, value))
        else:
            super()._take(name, value)


def _loss(name: str, function: Callable[..., Any], arrays: int = 2, order: str = "") -> Any:
    return layer(name, function, arrays, order, Loss)


MSELoss = _loss("MSELoss", F.mse_loss, order="reduction")
L1Loss = _loss("L1Loss", F.l1_loss, order="reduction")
SmoothL1Loss = _loss("SmoothL1Loss", F.smooth_l1_loss)
HuberLoss = _loss("HuberLoss", F.huber_loss, order="reduction delta")
CrossEntropyLoss = _loss("CrossEntropyLoss", F.cross_entropy)
NLLLoss = _loss("NLLLoss", F.nll_loss)
BCELoss = _loss("BCELoss", F.binary_cross_entropy)
BCEWithLogitsLoss = _loss("BCEWithLogitsLoss", F.binary_cross_entropy_with_logits)
KLDivLoss = _loss("KLDivLoss", F.kl_div)
PoissonNLLLoss = _loss("PoissonNLLLoss", F.poisson_nll_loss)
GaussianNLLLoss = _loss("GaussianNLLLoss", F.gaussian_nll_loss, 3)
HingeEmbeddingLoss = _loss("HingeEmbeddingLoss", F.hinge_embedding_loss)
MarginRankingLoss = _loss("MarginRankingLoss", F.margin_ranking_loss, 3)
SoftMarginLoss = _loss("SoftMarginLoss", F.soft_margin_loss)
MultiMarginLoss = _loss("MultiMarginLoss", F.multi_margin_loss)
MultiLabelSoftMarginLoss = _loss("MultiLabelSoftMarginLoss", F.multilabel_soft_margin_loss)
CosineEmbeddingLoss = _loss("CosineEmbeddingLoss", F.cosine_embedding_loss, 3)
TripletMarginLoss = _loss("TripletMarginLoss", F.triplet_margin_loss, 3)
CTCLoss = _loss("CTCLoss", F.ctc_loss, 4)
