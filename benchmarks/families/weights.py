"""Seeded weights under which any module behaves like a trained one: activations neither vanish nor blow up, no gain or
bias is trivial.

Weights keep the distribution of their module's own initialization. What that leaves at a constant (biases, gains, layer
scales, branches that begin at zero) is drawn; batch norms take the statistics of the data; a layer whose output is far
from unit size is scaled, in the order of a forward pass, as in layer-sequential unit-variance initialization (Mishkin
and Matas, 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SMALLEST, LARGEST = 0.1, 10.0  # standard deviation of a layer's output; beyond, it is scaled to 0.5 or 1
SMALL_GAIN = 0.01  # a constant gain below is a layer scale, which training raises


def settle(module: nn.Module, samples: Sequence[Tensor], seed: int) -> nn.Module:
    """Draw what is constant, scale layers and measure batch norms on `samples`; the module in evaluation mode."""
    rng = torch.Generator().manual_seed(seed)
    module.eval()
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point() and p.numel() and bool((p == p.flatten()[0]).all()):
                _draw(p, rng)
        _calibrate(module, samples)
    return module.eval()


def _draw(p: Tensor, rng: torch.Generator) -> None:
    value = float(p.flatten()[0])
    normal, uniform = torch.randn(p.shape, generator=rng), torch.rand(p.shape, generator=rng)
    if p.numel() == 1:
        p.fill_(0.3 if value == 0 else value)
    elif value == 0:
        p.copy_(normal * (0.05 if p.dim() == 1 else 1 / math.sqrt(p[0].numel())))
    elif abs(value) < SMALL_GAIN:
        p.copy_(0.3 + 0.4 * uniform)
    else:
        p.copy_(value * (0.7 + 0.6 * uniform))


def _calibrate(module: nn.Module, samples: Sequence[Tensor]) -> None:
    hooks = [m.register_forward_hook(_scaler()) for m in module.modules() if isinstance(m, LINEAR)]
    norms = [m for m in module.modules() if isinstance(m, BATCH_NORMS) and m.track_running_stats]
    for m in norms:
        m.momentum = 1.0  # the statistics of this pass alone
        m.train()
    try:
        module(*samples)
    except ValueError:  # one value per channel has no variance
        for m in norms:
            m.eval()
        module(*samples)
    finally:
        for h in hooks:
            h.remove()
    for m in norms:
        m.momentum = 0.1


def _scaler() -> Callable[..., Any]:
    """A hook that scales a layer once."""
    seen: list[bool] = []

    def hook(m: Any, given: Any, out: Any) -> Tensor | None:
        if seen or not isinstance(out, Tensor) or not out.is_floating_point() or out.numel() < 2:
            return None
        seen.append(True)
        size = float(out.float().std())
        if SMALLEST <= size <= LARGEST or not math.isfinite(size) or size == 0:
            return None
        factor = (0.5 if size < SMALLEST else 1.0) / size
        m.weight.mul_(factor)
        if m.bias is not None:
            m.bias.mul_(factor)
        return out * factor

    return hook
