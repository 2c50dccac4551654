"""`dnnc.nn`: modules with PyTorch's names, weights and defaults; `dnnc.nn.functional` has their functions."""
# ruff: noqa: I001  (this file is the list of the public names, by the module that has them)

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dnnc.array.methods import no_name as _no_name
from dnnc.nn import (
    functional as functional, init as init, utils as utils,
)  # fmt: skip
from dnnc.nn.calls import functional_call as functional_call
from dnnc.nn.containers import (
    ModuleDict as ModuleDict, ModuleList as ModuleList, ParameterDict as ParameterDict,
    ParameterList as ParameterList, Sequential as Sequential,
)  # fmt: skip
from dnnc.nn.layers.conv import (
    Conv1d as Conv1d, Conv2d as Conv2d, Conv3d as Conv3d, ConvTranspose1d as ConvTranspose1d,
    ConvTranspose2d as ConvTranspose2d, ConvTranspose3d as ConvTranspose3d,
)  # fmt: skip
from dnnc.nn.layers.linear import (
    Bilinear as Bilinear, Embedding as Embedding, EmbeddingBag as EmbeddingBag, Flatten as Flatten,
    Identity as Identity, Linear as Linear, Unflatten as Unflatten,
)  # fmt: skip
from dnnc.nn.layers.norm import (
    BatchNorm1d as BatchNorm1d, BatchNorm2d as BatchNorm2d, BatchNorm3d as BatchNorm3d, GroupNorm as GroupNorm,
    InstanceNorm1d as InstanceNorm1d, InstanceNorm2d as InstanceNorm2d, InstanceNorm3d as InstanceNorm3d,
    LayerNorm as LayerNorm, LocalResponseNorm as LocalResponseNorm, RMSNorm as RMSNorm,
)  # fmt: skip
from dnnc.nn.layers.quantize import (
    FakeQuantize as FakeQuantize, QuantAware as QuantAware, quantize_aware as quantize_aware,
)  # fmt: skip
from dnnc.nn.layers.recurrent import (
    GRU as GRU, GRUCell as GRUCell, LSTM as LSTM, LSTMCell as LSTMCell, RNN as RNN, RNNCell as RNNCell,
)  # fmt: skip
from dnnc.nn.layers.sparse import SparseLinear as SparseLinear
from dnnc.nn.layers.transformer import (
    MultiheadAttention as MultiheadAttention, Transformer as Transformer, TransformerDecoder as TransformerDecoder,
    TransformerDecoderLayer as TransformerDecoderLayer, TransformerEncoder as TransformerEncoder,
    TransformerEncoderLayer as TransformerEncoderLayer,
)  # fmt: skip
from dnnc.nn.layers.wrapped import (
    AdaptiveAvgPool1d as AdaptiveAvgPool1d, AdaptiveAvgPool2d as AdaptiveAvgPool2d,
    AdaptiveAvgPool3d as AdaptiveAvgPool3d, AdaptiveMaxPool1d as AdaptiveMaxPool1d,
    AdaptiveMaxPool2d as AdaptiveMaxPool2d, AdaptiveMaxPool3d as AdaptiveMaxPool3d, AlphaDropout as AlphaDropout,
    AvgPool1d as AvgPool1d, AvgPool2d as AvgPool2d, AvgPool3d as AvgPool3d, BCELoss as BCELoss,
    BCEWithLogitsLoss as BCEWithLogitsLoss, CELU as CELU, CReLU as CReLU, CTCLoss as CTCLoss,
    ChannelShuffle as ChannelShuffle, CircularPad1d as CircularPad1d, CircularPad2d as CircularPad2d,
    CircularPad3d as CircularPad3d, ConstantPad1d as ConstantPad1d, ConstantPad2d as ConstantPad2d,
    ConstantPad3d as ConstantPad3d, CosineEmbeddingLoss as CosineEmbeddingLoss, CosineSimilarity as CosineSimilarity,
    CrossEntropyLoss as CrossEntropyLoss, Dropout as Dropout, Dropout1d as Dropout1d, Dropout2d as Dropout2d,
    Dropout3d as Dropout3d, ELU as ELU, FeatureAlphaDropout as FeatureAlphaDropout, Fold as Fold, GELU as GELU,
    GLU as GLU, GaussianNLLLoss as GaussianNLLLoss, Hardshrink as Hardshrink, Hardsigmoid as Hardsigmoid,
    Hardswish as Hardswish, Hardtanh as Hardtanh, HingeEmbeddingLoss as HingeEmbeddingLoss, HuberLoss as HuberLoss,
    KLDivLoss as KLDivLoss, L1Loss as L1Loss, LPPool1d as LPPool1d, LPPool2d as LPPool2d, LPPool3d as LPPool3d,
    LeakyReLU as LeakyReLU, LogSigmoid as LogSigmoid, LogSoftmax as LogSoftmax, MSELoss as MSELoss,
    MarginRankingLoss as MarginRankingLoss, MaxPool1d as MaxPool1d, MaxPool2d as MaxPool2d, MaxPool3d as MaxPool3d,
    MaxUnpool1d as MaxUnpool1d, MaxUnpool2d as MaxUnpool2d, MaxUnpool3d as MaxUnpool3d, Maxout as Maxout, Mish as Mish,
    MultiLabelSoftMarginLoss as MultiLabelSoftMarginLoss,
    MultiMarginLoss as MultiMarginLoss, NLLLoss as NLLLoss, PReLU as PReLU, PairwiseDistance as PairwiseDistance,
    PixelShuffle as PixelShuffle, PixelUnshuffle as PixelUnshuffle, PoissonNLLLoss as PoissonNLLLoss, RReLU as RReLU,
    ReLU as ReLU, ReLU6 as ReLU6, ReflectionPad1d as ReflectionPad1d, ReflectionPad2d as ReflectionPad2d,
    ReflectionPad3d as ReflectionPad3d, ReplicationPad1d as ReplicationPad1d, ReplicationPad2d as ReplicationPad2d,
    ReplicationPad3d as ReplicationPad3d, SELU as SELU, SiLU as SiLU, Sigmoid as Sigmoid,
    SmoothL1Loss as SmoothL1Loss, SoftMarginLoss as SoftMarginLoss, Softmax as Softmax, Softmax2d as Softmax2d,
    Softmin as Softmin, Softplus as Softplus, Softshrink as Softshrink, Softsign as Softsign, Tanh as Tanh,
    Tanhshrink as Tanhshrink, Threshold as Threshold, TripletMarginLoss as TripletMarginLoss, Unfold as Unfold,
    Upsample as Upsample, UpsamplingBilinear2d as UpsamplingBilinear2d, UpsamplingNearest2d as UpsamplingNearest2d,
    ZeroPad1d as ZeroPad1d, ZeroPad2d as ZeroPad2d, ZeroPad3d as ZeroPad3d,
)  # fmt: skip
from dnnc.nn.module import Module as Module
from dnnc.nn.parameter import Parameter as Parameter

if TYPE_CHECKING:
    from dnnc.nn.caffe import from_caffe as from_caffe
    from dnnc.nn.onnx_module import from_onnx as from_onnx

_READERS = {"from_caffe": "dnnc.nn.caffe", "from_onnx": "dnnc.nn.onnx_module"}  # which load onnx, when they are used


if not TYPE_CHECKING:  # so that type checkers report misspelt names

    def __getattr__(name: str) -> Any:
        if name not in _READERS:
            raise _no_name("dnnc.nn", name, globals())
        return getattr(import_module(_READERS[name]), name)
