"""Random weights under which a network behaves like a trained one: activations neither vanish nor blow up, no bias or
gain is trivial.
"""

from __future__ import annotations

import math

import torch
from torch import nn

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def settle(model: nn.Module, shape: tuple[int, ...] = (), matrices: bool = True) -> nn.Module:
    """Seeded weights in place; the model in evaluation mode.

    Args:
        model: any module.
        shape: of one input without its batch; batch norms then take their statistics from noise of this shape. Empty:
            they keep them.
        matrices: draw the weights of convolutions and linear layers too (He's variance, and 1/n).
    """
    rng = torch.Generator().manual_seed(20_26)
    with torch.no_grad():
        for m in model.modules():
            if matrices and isinstance(m, (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
                _draw(m.weight, math.sqrt(_variance(m)), rng)
                _draw(m.bias, 0.05, rng)
            if isinstance(m, NORMS) and m.weight is not None:
                m.weight.copy_(0.7 + 0.6 * torch.rand(m.weight.shape, generator=rng))
                _draw(m.bias, 0.1, rng)
        if shape:
            _measure_norms(model, shape, rng)
    return model.eval()


def _draw(p: torch.Tensor | None, std: float, rng: torch.Generator) -> None:
    if p is not None:
        p.copy_(torch.randn(p.shape, generator=rng) * std)


def _variance(m: nn.Module) -> float:
    if isinstance(m, nn.Linear):
        return 1.0 / m.in_features
    terms = 4 * m.weight.shape[0] if isinstance(m, nn.ConvTranspose2d) else m.weight[0].numel()
    return 2.0 / terms


def _measure_norms(model: nn.Module, shape: tuple[int, ...], rng: torch.Generator) -> None:
    for m in model.modules():
        if isinstance(m, BATCH_NORMS):
            m.reset_running_stats()
            m.momentum = 0.6
            m.train()
    for _ in range(2):
        model(torch.randn((2, *shape), generator=rng))


def jitter(model: nn.Module, std: float = 0.05) -> nn.Module:
    """Noise on all biases and gains, which transformers initialize to 0 and 1; the model in evaluation mode."""
    rng = torch.Generator().manual_seed(20_27)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 or name.endswith("bias"):
                p.add_(torch.randn(p.shape, generator=rng) * std)
    return model.eval()
