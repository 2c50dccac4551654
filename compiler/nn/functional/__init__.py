"""`dnnc.nn.functional`: layers, activations and losses as functions of arrays, by PyTorch's names.

Each runs on lazy arrays, in traced functions, and is differentiable by `dnnc.grad` and `backward`.
"""
# ruff: noqa: I001  (this file is the list of the public names, by the module that has them)

from typing import TYPE_CHECKING as _TYPE_CHECKING

from dnnc.array.errors import make_public
from dnnc.array.methods import no_name as _no_name
from dnnc.nn.functional.activation import (
    celu as celu, crelu as crelu, elu as elu, gelu as gelu, glu as glu, gumbel_softmax as gumbel_softmax,
    hardshrink as hardshrink, hardsigmoid as hardsigmoid, hardswish as hardswish, hardtanh as hardtanh,
    leaky_relu as leaky_relu, log_softmax as log_softmax, logsigmoid as logsigmoid, maxout as maxout, mish as mish,
    prelu as prelu, relu as relu, relu6 as relu6, rrelu as rrelu, selu as selu, sigmoid as sigmoid, silu as silu,
    softmax as softmax, softmin as softmin, softplus as softplus, softshrink as softshrink, softsign as softsign,
    tanh as tanh, tanhshrink as tanhshrink, threshold as threshold,
)  # fmt: skip
from dnnc.nn.functional.attention import scaled_dot_product_attention as scaled_dot_product_attention
from dnnc.nn.functional.conv import (
    conv1d as conv1d, conv2d as conv2d, conv3d as conv3d, conv_transpose1d as conv_transpose1d,
    conv_transpose2d as conv_transpose2d, conv_transpose3d as conv_transpose3d,
)  # fmt: skip
from dnnc.nn.functional.ctc import ctc_loss as ctc_loss
from dnnc.nn.functional.dropouts import (
    alpha_dropout as alpha_dropout, dropout as dropout, dropout1d as dropout1d, dropout2d as dropout2d,
    dropout3d as dropout3d, feature_alpha_dropout as feature_alpha_dropout,
)  # fmt: skip
from dnnc.nn.functional.loss import (
    accuracy as accuracy, binary_cross_entropy as binary_cross_entropy,
    binary_cross_entropy_with_logits as binary_cross_entropy_with_logits,
    cosine_embedding_loss as cosine_embedding_loss, cross_entropy as cross_entropy,
    gaussian_nll_loss as gaussian_nll_loss, hinge_embedding_loss as hinge_embedding_loss, huber_loss as huber_loss,
    kl_div as kl_div, l1_loss as l1_loss, margin_ranking_loss as margin_ranking_loss, mse_loss as mse_loss,
    multi_margin_loss as multi_margin_loss, multilabel_soft_margin_loss as multilabel_soft_margin_loss,
    nll_loss as nll_loss, poisson_nll_loss as poisson_nll_loss, smooth_l1_loss as smooth_l1_loss,
    soft_margin_loss as soft_margin_loss, triplet_margin_loss as triplet_margin_loss,
)  # fmt: skip
from dnnc.nn.functional.norms import (
    batch_norm as batch_norm, group_norm as group_norm, instance_norm as instance_norm, layer_norm as layer_norm,
    local_response_norm as local_response_norm, rms_norm as rms_norm,
)  # fmt: skip
from dnnc.nn.functional.pool import (
    adaptive_avg_pool1d as adaptive_avg_pool1d, adaptive_avg_pool2d as adaptive_avg_pool2d,
    adaptive_avg_pool3d as adaptive_avg_pool3d, adaptive_max_pool1d as adaptive_max_pool1d,
    adaptive_max_pool2d as adaptive_max_pool2d, adaptive_max_pool3d as adaptive_max_pool3d, avg_pool as avg_pool,
    avg_pool1d as avg_pool1d, avg_pool2d as avg_pool2d, avg_pool3d as avg_pool3d, lp_pool1d as lp_pool1d,
    lp_pool2d as lp_pool2d, lp_pool3d as lp_pool3d, max_pool as max_pool, max_pool1d as max_pool1d,
    max_pool2d as max_pool2d, max_pool3d as max_pool3d, max_unpool1d as max_unpool1d, max_unpool2d as max_unpool2d,
    max_unpool3d as max_unpool3d,
)  # fmt: skip
from dnnc.nn.functional.products import (
    bilinear as bilinear, cosine_similarity as cosine_similarity, embedding as embedding,
    embedding_bag as embedding_bag, linear as linear, normalize as normalize, one_hot as one_hot,
    pairwise_distance as pairwise_distance,
)  # fmt: skip
from dnnc.nn.functional.quantize import fake_quantize as fake_quantize
from dnnc.nn.functional.sampling import affine_grid as affine_grid, grid_sample as grid_sample
from dnnc.nn.functional.vision import (
    channel_shuffle as channel_shuffle, fold as fold, interpolate as interpolate, pad as pad,
    pixel_shuffle as pixel_shuffle, pixel_unshuffle as pixel_unshuffle, unfold as unfold,
)  # fmt: skip

make_public(globals())
del make_public

if not _TYPE_CHECKING:  # so that type checkers report misspelt names

    def __getattr__(name: str) -> object:
        raise _no_name("dnnc.nn.functional", name, globals())
