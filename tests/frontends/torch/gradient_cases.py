"""Calls whose gradients are held against PyTorch, beside those of `operator_cases`: layers, pools, losses, writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from operator_cases import Case, f

A, IMAGE = f(3, 4), f(2, 3, 9, 8)
HEADS = (f(2, 2, 5, 8),) * 3
TWICE = torch.tensor([0, 2, 2])
TABLE = torch.tensor([[0, 0], [1, 3], [2, 2]])

CONVOLUTIONS: list[Case] = [
    ("strided", lambda x, w, b: F.conv2d(x, w, b, 2, 1), (f(2, 4, 9, 8), f(6, 4, 3, 3), f(6))),
    ("groups", lambda x, w: F.conv2d(x, w, None, 1, 2, 2, 2), (f(2, 4, 9, 8), f(6, 2, 3, 3))),
    ("1d", lambda x, w, b: F.conv1d(x, w, b, 3, 1), (f(2, 4, 11), f(6, 4, 4), f(6))),
    ("3d", lambda x, w, b: F.conv3d(x, w, b, 1, 1), (f(2, 2, 4, 5, 6), f(3, 2, 3, 3, 3), f(3))),
    ("transposed", lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 2), (f(2, 4, 5, 6), f(4, 3, 3, 3), f(6))),
    ("transposed 1d", lambda x, w: F.conv_transpose1d(x, w, None, 3, 1, 1, 1, 2), (f(2, 4, 5), f(4, 3, 5))),
    ("transposed 3d", lambda x, w, b: F.conv_transpose3d(x, w, b, 2), (f(1, 2, 3, 3, 3), f(2, 3, 2, 2, 2), f(3))),
    ("no image gradient", lambda x, w: F.conv2d(x.detach(), w), (f(2, 4, 5, 5), f(6, 4, 3, 3))),
]
POOLS: list[Case] = [
    ("max", lambda x: F.max_pool2d(x, 3, 2, 1), (IMAGE,)),
    ("max, ceil_mode", lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), (f(2, 3, 8, 8),)),
    ("max, dilated, no batch", lambda x: F.max_pool2d(x, 2, 1, 0, 2), (f(3, 9, 8),)),
    ("max 3d", lambda x: F.max_pool3d(x, 2), (f(2, 3, 4, 6, 8),)),
    ("max 1d", lambda x: F.max_pool1d(x, 3, 2), (f(2, 3, 9),)),
    ("max and indices", lambda x: F.max_pool2d(x, 2, return_indices=True), (f(2, 3, 8, 8),)),
    ("unpool", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (f(2, 3, 8, 8),)),
    ("mean", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), (IMAGE,)),
    ("mean, divisor", lambda x: F.avg_pool2d(x, 2, divisor_override=3), (IMAGE,)),
    ("mean 1d", lambda x: F.avg_pool1d(x, 3, 1, 1), (f(2, 3, 8),)),
    ("mean 3d", lambda x: F.avg_pool3d(x, 2), (f(2, 3, 4, 4, 4),)),
    ("adaptive mean", lambda x: F.adaptive_avg_pool2d(x, (3, 2)), (f(2, 3, 7, 6),)),
    ("adaptive mean 1d", lambda x: F.adaptive_avg_pool1d(x, 3), (f(2, 3, 7),)),
    ("adaptive mean 3d", lambda x: F.adaptive_avg_pool3d(x, 2), (f(2, 3, 4, 4, 4),)),
    ("adaptive max", lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True), (f(2, 3, 7, 6),)),
    ("adaptive max 1d", lambda x: F.adaptive_max_pool1d(x, 3), (f(2, 3, 7),)),
    ("adaptive max 3d", lambda x: F.adaptive_max_pool3d(x, 2), (f(2, 3, 5, 4, 6),)),
    *((f"pad {m}", lambda x, m=m: F.pad(x, (1, 2, 2, 1), mode=m), (IMAGE,)) for m in ("reflect", "replicate")),
    ("pad replicate 1d", lambda x: F.pad(x, (1, 2), mode="replicate"), (f(2, 3, 6),)),
    ("pad replicate 3d", lambda x: F.pad(x, (1, 2, 1, 1, 2, 0), mode="replicate"), (f(1, 2, 4, 5, 6),)),
    *(
        (f"{m} to {n}", lambda x, m=m, n=n: F.interpolate(x, size=n, mode=m), (f(2, 3, 4, 5),))
        for m in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
        for n in ((8, 10), (7, 3))
    ),
    ("corners", lambda x: F.interpolate(x, size=(7, 9), mode="bilinear", align_corners=True), (f(2, 3, 4, 5),)),
    ("linear", lambda x: F.interpolate(x, scale_factor=3, mode="linear"), (f(2, 3, 4),)),
    ("trilinear", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (f(1, 2, 3, 4, 3),)),
    ("nearest 3d", lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), (f(1, 2, 3, 4, 3),)),
    ("aten's bilinear", lambda x: torch.ops.aten.upsample_bilinear2d(x, [7, 9], False), (f(2, 3, 4, 5),)),
    ("aten's nearest", lambda x: torch.ops.aten.upsample_nearest2d(x, [8, 10]), (f(2, 3, 4, 5),)),
    ("unfold", lambda x: F.unfold(x, 3, padding=1, stride=2), (f(2, 3, 7, 6),)),
    ("fold", lambda x: F.fold(x, (4, 5), 2), (f(2, 12, 12),)),
]
NORMS: list[Case] = [
    ("batch norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (f(4, 3, 5, 5), f(3), f(3))),
    ("instance norm", lambda x, w, b: F.instance_norm(x, None, None, w, b), (f(4, 3, 5, 5), f(3), f(3))),
    ("layer norm", lambda x, w, b: F.layer_norm(x, (5, 6), w, b), (f(4, 3, 5, 6), f(5, 6), f(5, 6))),
    ("layer norm, bare", lambda x: F.layer_norm(x, (6,)), (f(4, 3, 6),)),
    ("group norm", lambda x, w, b: F.group_norm(x, 2, w, b), (f(3, 4, 5, 6), f(4), f(4))),
    ("rms norm", lambda x, w: F.rms_norm(x, (6,), w), (f(4, 3, 6), f(6))),
    ("local response", lambda x: F.local_response_norm(x, 3), (f(2, 5, 4, 4),)),
    ("weight norm", lambda v, g: torch._weight_norm(v, g, 0), (f(4, 6), f(4, 1))),
    ("distances", lambda x, y: torch.cdist(x, y), (f(4, 6), f(5, 6))),
    ("distances, p = 1", lambda x, y: torch.cdist(x, y, p=1.0), (f(4, 6), f(5, 6))),
    ("distances, p = 3", lambda x, y: torch.cdist(x, y, p=3.0), (f(2, 4, 6), f(2, 5, 6))),
    ("distances of equal rows", lambda x: torch.cdist(x, x), (f(4, 6),)),
]
ATTENTION: list[Case] = [
    ("plain", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), HEADS),
    ("causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), HEADS),
    (
        "mask",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(5, 7, dtype=torch.bool).tril()),
        (f(2, 2, 5, 8), f(2, 2, 7, 8), f(2, 2, 7, 8)),
    ),
    ("trained mask", lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), (*HEADS, f(5, 5))),
    (
        "shared heads",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (f(2, 4, 5, 8), f(2, 2, 5, 8), f(2, 2, 5, 8)),
    ),
    ("no heads", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.2), (f(2, 5, 8),) * 3),
]
LOSSES: list[Case] = [
    ("cross entropy", lambda x: F.cross_entropy(x, torch.tensor([0, 3, -100])), (f(3, 5),)),
    (
        "cross entropy, weights",
        lambda x: F.cross_entropy(
            x, torch.tensor([0, 3, 1]), torch.linspace(0.5, 2, 5, dtype=x.dtype), label_smoothing=0.1
        ),
        (f(3, 5),),
    ),
    ("nll of each", lambda x: F.nll_loss(x, torch.tensor([0, 3, 1]), reduction="none"), (f(3, 5),)),
    (
        "of pixels",
        lambda x: F.cross_entropy(x, torch.tensor([[[0, 3], [1, -100]]]), reduction="sum"),
        (f(1, 5, 2, 2),),
    ),
    ("bce", lambda x: F.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.3)), (A,)),
    ("bce with logits", lambda x: F.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.3)), (A,)),
    ("kl", lambda x: F.kl_div(F.log_softmax(x, 1), torch.full_like(x, 0.2), reduction="batchmean"), (A,)),
    *((n, getattr(F, n), (A, A)) for n in ("huber_loss", "smooth_l1_loss", "l1_loss", "mse_loss")),
    ("multilabel", lambda x: F.multilabel_soft_margin_loss(x, torch.ones_like(x)), (A,)),
    ("triplet", F.triplet_margin_loss, (A, A, A)),
    ("gaussian", lambda x, v: F.gaussian_nll_loss(x, torch.ones_like(x), v.abs() + 0.1), (A, A)),
]
ACTIVATIONS: list[Case] = [
    *(
        (n, getattr(F, n), (f(3, 7, low=-4, high=4),))
        for n in (
            "relu relu6 gelu silu mish hardswish hardtanh softplus softsign tanhshrink softshrink hardshrink elu selu "
            "celu leaky_relu logsigmoid sigmoid tanh"
        ).split()
    ),
    ("gelu, tanh", lambda x: F.gelu(x, approximate="tanh"), (f(3, 7),)),
    ("glu", F.glu, (f(3, 8),)),
    ("prelu", F.prelu, (f(3, 4, 2), f(4))),
    ("threshold", lambda x: F.threshold(x, 0.1, 2.0), (f(3, 7),)),
]
WRITES: list[Case] = [
    ("embedding", lambda w: F.embedding(torch.tensor([[0, 2, 2], [4, 1, 0]]), w, padding_idx=1), (f(5, 4),)),
    (
        "embedding by frequency",
        lambda w: F.embedding(torch.tensor([[0, 2, 2], [4, 1, 0]]), w, scale_grad_by_freq=True),
        (f(5, 4),),
    ),
    ("scatter_add", lambda x, y: x.scatter_add(1, TABLE, y), (A, f(3, 2))),
    ("gather", lambda x: x.gather(1, TABLE), (A,)),
    ("index", lambda x: x[TWICE, torch.tensor([1, 1, 1])], (A,)),
    ("index_put", lambda x, y: x.index_put((TWICE,), y, accumulate=True), (A, A)),
    ("index_add", lambda x, y: x.index_add(0, TWICE, y), (A, A)),
    ("slice_scatter", lambda x, y: x.slice_scatter(y, 1, 1, 3), (f(3, 5), f(3, 2))),
    ("slice_scatter, step", lambda x, y: x.slice_scatter(y, 1, 0, 5, 2), (f(3, 5), f(3, 3))),
    ("select_scatter", lambda x, y: x.select_scatter(y, 0, 1), (f(3, 5), f(5))),
    ("diagonal_scatter", lambda x, y: x.diagonal_scatter(y, 1), (f(3, 4), f(3))),
    ("diagonal", lambda x: x.diagonal(1), (f(3, 5),)),
    ("as_strided", lambda x: (x * 2).as_strided((3, 2), (2, 1)), (A,)),
    ("unfold an axis", lambda x: x.unfold(1, 3, 2), (f(3, 7),)),
    ("write to a slice", lambda x: (y := x * 1, y[:, 1:3].mul_(2), y)[2], (A,)),
    ("write to a column", lambda x: (y := x * 1, y.__setitem__((slice(None), 0), x[:, 1] * 3), y)[2], (A,)),
    ("cumsum", lambda x: x.cumsum(1), (A,)),
    ("cumprod over a zero", lambda x: x.round().cumprod(1), (A,)),
    ("sort", lambda x: x.sort(1)[0], (A,)),
    ("checkpoint", lambda x: torch.utils.checkpoint.checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False), (A,)),
]
GRADIENTS: list[Case] = [
    (f"{group}: {name}", fn, given)
    for group, cases in (
        ("convolution", CONVOLUTIONS),
        ("pool", POOLS),
        ("norm", NORMS),
        ("attention", ATTENTION),
        ("loss", LOSSES),
        ("activation", ACTIVATIONS),
        ("write", WRITES),
    )
    for name, fn, given in cases
]
