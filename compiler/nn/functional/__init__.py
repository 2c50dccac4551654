"""`dnnc.nn.functional`: layers, activations and losses as functions of arrays, by PyTorch's names.

Each runs on lazy arrays, in traced functions, and is differentiable by `dnnc.grad` and `backward`.
"""
# ruff: noqa: F401  (this file is the list of the public names, by the module that has them)

from dnnc.array.errors import make_public
from dnnc.nn.functional.activation import (
    celu,
    crelu,
    elu,
    gelu,
    glu,
    gumbel_softmax,
    hardshrink,
    hardsigmoid,
    hardswish,
    hardtanh,
    leaky_relu,
    log_softmax,
    logsigmoid,
    maxout,
    mish,
    prelu,
    relu,
    relu6,
    rrelu,
    selu,
    sigmoid,
    silu,
    softmax,
    softmin,
    softplus,
    softshrink,
    softsign,
    tanh,
    tanhshrink,
    threshold,
)  # fmt: skip
from dnnc.nn.functional.attention import scaled_dot_product_attention
from dnnc.nn.functional.conv import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)  # fmt: skip
from dnnc.nn.functional.ctc import ctc_loss
from dnnc.nn.functional.dropouts import (
    alpha_dropout,
    dropout,
    dropout1d,
    dropout2d,
    dropout3d,
    feature_alpha_dropout,
)  # fmt: skip
from dnnc.nn.functional.loss import (
    accuracy,
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cosine_embedding_loss,
    cross_entropy,
    gaussian_nll_loss,
    hinge_embedding_loss,
    huber_loss,
    kl_div,
    l1_loss,
    margin_ranking_loss,
    mse_loss,
    multi_margin_loss,
    multilabel_soft_margin_loss,
    nll_loss,
    poisson_nll_loss,
    smooth_l1_loss,
    soft_margin_loss,
    triplet_margin_loss,
)  # fmt: skip
from dnnc.nn.functional.norms import (
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    local_response_norm,
    rms_norm,
)  # fmt: skip
from dnnc.nn.functional.pool import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
    avg_pool,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    lp_pool1d,
    lp_pool2d,
    lp_pool3d,
    max_pool,
    max_pool1d,
    max_pool2d,
    max_pool3d,
)  # fmt: skip
from dnnc.nn.functional.products import (
    bilinear,
    cosine_similarity,
    embedding,
    linear,
    normalize,
    one_hot,
    pairwise_distance,
)  # fmt: skip
from dnnc.nn.functional.vision import (
    channel_shuffle,
    fold,
    interpolate,
    pad,
    pixel_shuffle,
    pixel_unshuffle,
    unfold,
)  # fmt: skip

make_public(globals())
del make_public
