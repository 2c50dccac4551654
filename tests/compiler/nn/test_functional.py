"""The functions of `dnnc.nn.functional` against PyTorch in float64: values and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import dnnc.array as xp
import dnnc.nn.functional as F

rng = np.random.default_rng(11)


def f(*shape: int) -> Any:
    return rng.standard_normal(shape)


def i(high: int, *shape: int) -> Any:
    return rng.integers(0, high, shape)


def p(*shape: int) -> Any:
    """Probabilities."""
    return rng.uniform(0.05, 0.95, shape)


@dataclass(frozen=True)
class Case:
    name: str
    args: tuple[Any, ...]
    named: dict[str, Any]

    def __str__(self) -> str:
        shapes = ["x".join(map(str, a.shape)) for a in self.args if isinstance(a, np.ndarray)]
        return "-".join([self.name, *shapes, *(f"{k}={v}" for k, v in self.named.items() if np.ndim(v) == 0)])


def case(name: str, *args: Any, **named: Any) -> Case:
    return Case(name, args, named)


CASES = [
    *(
        case(name, 3 * f(4, 7))
        for name in (
            "relu relu6 leaky_relu elu selu celu gelu sigmoid logsigmoid silu mish tanh tanhshrink softplus softsign "
            "hardtanh hardsigmoid hardswish hardshrink softshrink rrelu"
        ).split()
    ),
    case("leaky_relu", f(4, 7), negative_slope=0.2),
    case("elu", f(4, 7), alpha=0.7),
    case("celu", f(4, 7), alpha=0.7),
    case("gelu", f(4, 7), approximate="tanh"),
    case("hardtanh", 4 * f(4, 7), min_val=-2.0, max_val=0.5),
    case("hardtanh", np.array([-1.0, 1.0, 0.0, 2.0])),
    case("relu6", np.array([-1.0, 0.0, 6.0, 7.0, 3.0])),
    case("softplus", 9 * f(4, 7), beta=2.0, threshold=3.0),
    case("hardshrink", f(4, 7), lambd=0.3),
    case("softshrink", f(4, 7), lambd=0.3),
    case("threshold", f(4, 7), 0.1, 2.5),
    case("glu", f(4, 6), dim=1),
    case("glu", f(4, 6), dim=0),
    case("prelu", f(2, 3, 4), p(3)),
    case("prelu", f(2, 3), p(3)),
    case("prelu", f(2, 3, 4), p(1)),
    case("softmax", f(3, 5, 2), dim=1),
    case("softmin", f(3, 5), dim=-1),
    case("log_softmax", f(3, 5), dim=0),
    case("linear", f(2, 3, 5), f(4, 5), f(4)),
    case("linear", f(5), f(4, 5)),
    case("linear", f(3, 5), f(5)),
    case("bilinear", f(2, 3, 5), f(2, 3, 4), f(6, 5, 4), f(6)),
    case("embedding", i(9, 2, 3), f(9, 4)),
    case("embedding", i(5, 4, 3), f(5, 4), padding_idx=-2),
    case("cosine_similarity", f(3, 4), f(3, 4), dim=1),
    case("pairwise_distance", f(3, 4), f(3, 4)),
    case("pairwise_distance", f(3, 4), f(3, 4), p=3.0, keepdim=True),
    case("normalize", f(3, 4, 2)),
    case("normalize", f(3, 4), p=1.0, dim=0),
    case("normalize", np.zeros((2, 3))),
    # convolutions
    case("conv1d", f(2, 4, 9), f(6, 2, 3), f(6), stride=2, padding=1, groups=2),
    case("conv2d", f(2, 4, 9, 8), f(6, 4, 3, 2), f(6), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
    case("conv2d", f(2, 3, 7, 8), f(4, 3, 4, 3), padding="same", dilation=(1, 2)),
    case("conv2d", f(3, 7, 8), f(6, 1, 3, 3), groups=3, padding="valid"),
    case("conv3d", f(1, 2, 5, 6, 4), f(3, 2, 2, 3, 2), f(3), stride=(1, 2, 1), padding=1),
    case("conv_transpose1d", f(2, 4, 6), f(4, 3, 3), f(3), stride=2, padding=1, output_padding=1),
    case("conv_transpose2d", f(2, 4, 5, 4), f(4, 3, 3, 2), f(6), stride=2, groups=2, dilation=(2, 1)),
    case("conv_transpose3d", f(1, 2, 3, 4, 3), f(2, 3, 2, 2, 2), stride=(1, 2, 1)),
    # pools
    case("max_pool1d", f(2, 3, 11), 3, 2, 1),
    case("max_pool2d", f(2, 3, 9, 8), (3, 2)),
    case("max_pool2d", f(3, 9, 8), 3, stride=2, padding=1, ceil_mode=True),
    case("max_pool2d", f(2, 3, 9, 8), 2, stride=3, dilation=2, ceil_mode=True),
    case("max_pool3d", f(1, 2, 5, 6, 4), 2, stride=1),
    case("avg_pool1d", f(2, 3, 11), 3, 2, 1),
    case("avg_pool2d", f(2, 3, 9, 8), 3, 2, 1, True, False),
    case("avg_pool2d", f(2, 3, 9, 8), 3, 2, 1, ceil_mode=True),
    case("avg_pool2d", f(2, 3, 9, 8), (2, 3), divisor_override=5),
    case("avg_pool3d", f(1, 2, 5, 6, 4), 2),
    case("lp_pool1d", p(2, 3, 9), 2, 3, 2),
    case("lp_pool2d", p(2, 3, 9, 8), 3, 2),
    case("lp_pool2d", p(2, 3, 9, 8), 1.5, 2, stride=2, ceil_mode=True),
    case("adaptive_avg_pool1d", f(2, 3, 10), 4),
    case("adaptive_avg_pool2d", f(2, 3, 8, 6), (4, 3)),
    case("adaptive_avg_pool2d", f(2, 3, 9, 7), (4, None)),
    case("adaptive_avg_pool2d", f(3, 9, 7), 1),
    case("adaptive_avg_pool3d", f(1, 2, 5, 6, 4), (2, 3, 3)),
    case("adaptive_max_pool1d", f(2, 3, 10), 4),
    case("adaptive_max_pool2d", f(2, 3, 8, 6), (4, 3)),
    case("adaptive_max_pool3d", f(2, 5, 6, 4), (2, 3, 3)),
    # normalizations
    case("batch_norm", f(4, 3, 5), f(3), p(3), f(3), f(3)),
    case("batch_norm", f(4, 3), None, None, None, None, training=True),
    case("batch_norm", f(4, 3, 5, 2), None, None, f(3), f(3), training=True, eps=1e-2),
    case("layer_norm", f(2, 3, 4), (3, 4), f(3, 4), f(3, 4)),
    case("layer_norm", f(2, 3, 4), (4,)),
    case("layer_norm", f(2, 3, 4), (4,), None, f(4), eps=1e-2),
    case("rms_norm", f(2, 3, 4), (4,), f(4)),
    case("rms_norm", f(2, 3, 4), (3, 4), eps=1e-2),
    case("group_norm", f(2, 6, 4), 3, f(6), f(6)),
    case("group_norm", f(2, 6), 2),
    case("instance_norm", f(2, 3, 4, 5), None, None, f(3), f(3)),
    case("instance_norm", f(2, 3, 4), f(3), p(3), use_input_stats=False),
    case("local_response_norm", f(2, 7, 3), 3, alpha=0.5),
    case("local_response_norm", f(2, 7, 3, 2), 4, alpha=0.5, beta=0.6, k=2.0),
    # losses
    *(
        case(name, f(4, 5), f(4, 5), reduction=r)
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
        for r in ("mean", "sum", "none")
    ),
    case("smooth_l1_loss", 3 * f(4, 5), f(4, 5), beta=0.5),
    case("huber_loss", 3 * f(4, 5), f(4, 5), delta=0.5),
    case("mse_loss", f(4, 5), f(4, 5), weight=p(4, 5)),
    case("cross_entropy", f(4, 5), i(5, 4)),
    case("cross_entropy", f(4, 5), np.array([1, -100, 4, 0]), p(5)),
    case("cross_entropy", f(4, 5, 3), i(5, 4, 3), p(5), ignore_index=2, reduction="sum"),
    case("cross_entropy", f(4, 5, 3), i(5, 4, 3), p(5), label_smoothing=0.2, ignore_index=1),
    case("cross_entropy", f(4, 5), i(5, 4), label_smoothing=0.2, reduction="none"),
    case("cross_entropy", f(4, 5), p(4, 5), p(5), label_smoothing=0.1),
    case("cross_entropy", f(4, 5, 2), p(4, 5, 2)),
    case("cross_entropy", f(5), np.array(3)),
    case("nll_loss", f(4, 5), i(5, 4), p(5)),
    case("nll_loss", f(4, 5, 2, 3), i(5, 4, 2, 3), ignore_index=0, reduction="none"),
    case("binary_cross_entropy", p(4, 5), p(4, 5), p(4, 5)),
    case("binary_cross_entropy_with_logits", 3 * f(4, 5), p(4, 5), pos_weight=p(5)),
    case("binary_cross_entropy_with_logits", 30 * f(4, 5), p(4, 5), p(5), reduction="sum"),
    case("kl_div", f(4, 5), p(4, 5), reduction="batchmean"),
    case("kl_div", f(4, 5), f(4, 5), log_target=True),
    case("poisson_nll_loss", f(4, 5), 3 * p(4, 5), full=True),
    case("poisson_nll_loss", p(4, 5), 3 * p(4, 5), log_input=False),
    case("gaussian_nll_loss", f(4, 5), f(4, 5), p(4, 5), full=True),
    case("hinge_embedding_loss", f(4, 5), 2.0 * i(2, 4, 5) - 1),
    case("margin_ranking_loss", f(4), f(4), 2.0 * i(2, 4) - 1, margin=0.3),
    case("soft_margin_loss", f(4, 5), 2.0 * i(2, 4, 5) - 1),
    case("multi_margin_loss", f(4, 5), i(5, 4), weight=p(5)),
    case("multi_margin_loss", f(4, 5), i(5, 4), p=2, margin=0.5),
    case("multilabel_soft_margin_loss", f(4, 5), p(4, 5)),
    case("cosine_embedding_loss", f(4, 5), f(4, 5), 2 * i(2, 4) - 1, margin=0.1),
    case("triplet_margin_loss", f(4, 5), f(4, 5), f(4, 5), swap=True),
    # attention
    case("scaled_dot_product_attention", f(2, 3, 4, 5), f(2, 3, 6, 5), f(2, 3, 6, 2)),
    case("scaled_dot_product_attention", f(2, 4, 5), f(2, 4, 5), f(2, 4, 5), is_causal=True, scale=0.7),
    case("scaled_dot_product_attention", f(2, 4, 5), f(2, 6, 5), f(2, 6, 5), f(4, 6)),
    case("scaled_dot_product_attention", f(2, 4, 5), f(2, 6, 5), f(2, 6, 5), i(2, 2, 4, 6) > 0),
    case("scaled_dot_product_attention", f(2, 4, 3, 5), f(2, 2, 6, 5), f(2, 2, 6, 5), enable_gqa=True),
    # images
    case("pad", f(2, 3, 4), (1, 2), value=1.5),
    case("pad", f(2, 3, 4), (1, 2, -1, 3)),
    case("pad", f(2, 3, 4, 5), (2, 1, 1, 3), mode="reflect"),
    case("pad", f(2, 3, 4, 5), (2, 1, 1, 3), mode="replicate"),
    case("pad", f(2, 3, 4, 5), (2, 1, 1, 3), mode="circular"),
    case("interpolate", f(2, 3, 4, 5), scale_factor=2),
    case("interpolate", f(2, 3, 4, 5), (7, 3), mode="nearest-exact"),
    case("interpolate", f(2, 3, 4, 5), (7, 8), mode="bilinear"),
    case("interpolate", f(2, 3, 4, 5), (7, 8), mode="bilinear", align_corners=True),
    case("interpolate", f(2, 3, 4, 5), scale_factor=(1.5, 0.6), mode="bilinear"),
    case("interpolate", f(2, 3, 4, 5), (7, 8), mode="bicubic"),
    case("interpolate", f(2, 3, 5), 9, mode="linear"),
    case("interpolate", f(2, 3, 2, 3, 3), (4, 3, 5), mode="trilinear"),
    case("interpolate", f(2, 3, 8, 9), (4, 3), mode="area"),
    case("pixel_shuffle", f(2, 8, 3, 4), 2),
    case("pixel_unshuffle", f(2, 2, 4, 6), 2),
    case("channel_shuffle", f(2, 6, 3, 4), 3),
    case("unfold", f(2, 3, 6, 7), (3, 2), dilation=(1, 2), padding=1, stride=2),
    case("fold", f(2, 12, 20), (5, 6), 2),
    case("fold", f(2, 12, 9), (7, 6), (2, 2), 1, (0, 0), 2),
]


def float_array(a: Any) -> bool:
    return isinstance(a, np.ndarray) and a.dtype.kind == "f"


# arguments that PyTorch gives no gradient
CONSTANT = {
    "batch_norm": (1, 2),
    "instance_norm": (1, 2),
    "cross_entropy": (2,),
    "nll_loss": (2,),
    "binary_cross_entropy": (2,),
    "binary_cross_entropy_with_logits": (2,),
    "hinge_embedding_loss": (1,),
    "soft_margin_loss": (1,),
    "margin_ranking_loss": (2,),
}


@pytest.mark.slow
def test_cross_entropy_of_large_logits() -> None:
    """float32: neither overflow nor the spacing of large numbers shows. A target that does not count may be NaN."""
    x = (1e6 + 40 * rng.standard_normal((6, 9))).astype(np.float32)
    t = np.array([0, 3, 8, 2, -100, 5])
    x[0, 0] = x[0].max() + 200
    want = torch.nn.functional.cross_entropy(torch.tensor(x, dtype=torch.float64), torch.tensor(t), reduction="none")
    x[4] = np.nan
    got = F.cross_entropy(xp.asarray(x), xp.asarray(t), reduction="none")
    np.testing.assert_allclose(np.asarray(got), want.numpy(), 1e-6, 1e-6)


@pytest.mark.family("samples")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_in_torch(case: Case) -> None:
    constant = CONSTANT.get(case.name, ())
    free = [float_array(a) and k not in constant for k, a in enumerate(case.args)]
    given = [torch.tensor(a, requires_grad=g) if isinstance(a, np.ndarray) else a for a, g in zip(case.args, free)]
    ours = [xp.asarray(a) if isinstance(a, np.ndarray) else a for a in case.args]
    for x, g in zip(ours, free):
        if g:
            x.requires_grad = True
    fn = getattr(torch.nn.functional, case.name, None) or getattr(torch, case.name)
    want = fn(*given, **{k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in case.named.items()})
    got = getattr(F, case.name)(*ours, **case.named)
    np.testing.assert_allclose(np.asarray(got), want.detach().numpy(), 1e-7, 1e-9)
    cotangent = rng.standard_normal(tuple(want.shape))
    want.backward(torch.tensor(cotangent))
    got.backward(cotangent)
    for x, g in zip(ours, given):
        if torch.is_tensor(g) and g.requires_grad:
            expected = torch.zeros_like(g) if g.grad is None else g.grad
            np.testing.assert_allclose(np.asarray(x.grad), expected.numpy(), 1e-6, 1e-8)
