"""Random small networks, forward and backward through torch.compile, against eager PyTorch in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trained import train

pytestmark = pytest.mark.slow

NETS = 60
SMOOTH: list[Callable[[], nn.Module]] = [nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Mish, nn.Identity]
ACTIVATIONS = [*SMOOTH, nn.ReLU, nn.ELU, nn.LeakyReLU, nn.Hardswish, nn.Hardtanh, nn.PReLU, nn.SELU, nn.LogSigmoid]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


class Sum(nn.Module):
    """A branch beside its operand."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class First(nn.Module):
    """The first result of a module: of recurrent layers the sequence."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[0]


class Moved(nn.Module):
    """Two axes change places."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def images(r: random.Random, shape: list[int]) -> nn.Module:
    """A layer for [N, C, ...], of 1 to 3 axes; changes `shape`, that of an example."""
    c, rank = shape[1], len(shape) - 2
    convolution, pool = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1], (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
    means, norm = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    kind = r.choice(["conv", "conv", "conv", "transposed", "norm", "group", "instance", "max", "mean", "up", "sum"])
    if kind == "conv":
        group = r.choice([g for g in (1, 1, 2, c) if c % g == 0])
        more = {"bias": r.random() < 0.5, "dilation": r.choice([1, 1, 2])}
        out, kernel = group * r.randint(1, 4), r.choice([1, 2, 3, 3])
        layer = convolution(c, out, kernel, r.choice([1, 1, 2]), r.randint(0, 2), groups=group, **more)
    elif kind == "transposed":
        other = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
        layer = other(c, r.randint(1, 4), r.randint(1, 3), r.choice([1, 2]), bias=r.random() < 0.5)
    elif kind == "norm":
        layer = norm[rank - 1](c, affine=r.random() < 0.7, track_running_stats=r.random() < 0.7)
    elif kind == "group":
        layer = nn.GroupNorm(r.choice([g for g in range(1, c + 1) if c % g == 0]), c)
    elif kind == "instance":
        layer = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[rank - 1](c, affine=r.random() < 0.5)
    elif kind in ("max", "mean"):
        kernel = r.randint(1, 3)
        layer = (pool if kind == "max" else means)[rank - 1](
            kernel, r.randint(1, 2), r.randint(0, kernel // 2), ceil_mode=r.random() < 0.3
        )
    elif kind == "up":
        modes = ["nearest", ("linear", "bilinear", "trilinear")[rank - 1]]
        layer = nn.Upsample(scale_factor=2, mode=r.choice(modes))
    else:
        layer = Sum(nn.Sequential(convolution(c, c, 3, padding=1), r.choice(ACTIVATIONS)()))
    return fitted(r, shape, layer)


def rows(r: random.Random, shape: list[int]) -> nn.Module:
    """A layer for [N, T, C]."""
    c = shape[-1]
    kind = r.choice(["linear", "linear", "norm", "rms", "attention", "encoder", "lstm", "gru", "sum", "moved"])
    layer: nn.Module
    if kind == "linear":
        layer = nn.Linear(c, 2 * r.randint(1, 5), bias=r.random() < 0.7)
    elif kind in ("norm", "rms"):
        layer = nn.LayerNorm(c, elementwise_affine=r.random() < 0.7) if kind == "norm" else nn.RMSNorm(c)
    elif kind in ("attention", "encoder"):
        heads, more = r.choice([h for h in (1, 2, 4) if c % h == 0]), {"batch_first": True, "dropout": 0.0}
        layer = nn.TransformerEncoderLayer(c, heads, 8, norm_first=r.random() < 0.5, **more)
    elif kind in ("lstm", "gru"):
        recurrent = nn.LSTM if kind == "lstm" else nn.GRU
        layer = First(recurrent(c, r.randint(1, 3), batch_first=True, bidirectional=True))
    elif kind == "sum":
        layer = Sum(nn.Sequential(nn.Linear(c, c), r.choice(ACTIVATIONS)()))
    else:
        layer = Moved()
    return fitted(r, shape, layer)


def fitted(r: random.Random, shape: list[int], layer: nn.Module) -> nn.Module:
    """The layer where it fits and leaves something, not too much, to normalize; else an activation."""
    try:
        made = layer(torch.zeros(shape))
    except (RuntimeError, ValueError):
        return r.choice(ACTIVATIONS)()
    if not 1 < made[0, 0].numel() < 2000 or made.numel() > 10000:
        return r.choice(ACTIVATIONS)()
    shape[:] = made.shape
    return layer


def network(seed: int) -> tuple[nn.Module, Callable[[], tuple[Any, ...]]]:
    """A chain of layers, and what draws its arguments."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    count, layers = r.randint(2, 4), []
    if r.random() < 0.6:
        shape = [r.randint(2, 4), r.randint(1, 4), *(r.randint(4, 9) for _ in range(r.choice([1, 2, 2, 2, 3])))]
        draw, layer = shaped(shape), images
    elif r.random() < 0.5:
        shape = [r.randint(2, 4), r.randint(2, 6), 2 * r.randint(1, 5)]
        draw, layer = shaped(shape), rows
    else:
        n, t, c = r.randint(2, 4), r.randint(2, 6), 2 * r.randint(1, 5)
        layers.append(nn.Embedding(9, c, padding_idx=r.choice([None, 3])))
        shape, draw, layer = [n, t, c], lambda: (torch.randint(9, (n, t)),), rows
    for _ in range(count):
        layers.append(layer(r, shape))
        if r.random() < 0.5:
            layers.append(r.choice(ACTIVATIONS)())
    if r.random() < 0.5:
        layers += [nn.Flatten(), nn.Linear(torch.Size(shape[1:]).numel(), 3), nn.LogSoftmax(1)]
    return nn.Sequential(*layers), draw


def shaped(shape: list[int]) -> Callable[[], tuple[Tensor, ...]]:
    fixed = tuple(shape)
    return lambda: (torch.randn(fixed, dtype=torch.float64),)


@pytest.mark.family("random")
@pytest.mark.parametrize("seed", range(NETS))
def test_network(seed: int) -> None:
    module, draw = network(seed)
    torch.manual_seed(seed)
    train(module.double(), draw, 1e-7, steps=1)
