"""Well-known architectures as plain torch modules, with seeded weights: what `torch_models.py` compiles. The others it
takes from `zoo`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv(
    i: int, o: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: Callable[[], nn.Module] | None = nn.ReLU
) -> nn.Sequential:
    """A convolution, its batch norm and its activation."""
    parts = [nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(o)]
    return nn.Sequential(*parts, *([act()] if act else []))


# --- ResNet-50, VGG-16, DenseNet-121 ----------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, i: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(i, width), conv(width, width, 3, stride), conv(width, 4 * width, act=None))
        self.short = conv(i, 4 * width, 1, stride, act=None) if stride > 1 or i != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


def resnet50() -> nn.Module:
    parts: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for k in range(blocks):
            parts.append(Bottleneck(i, width, stride if k == 0 else 1))
            i = 4 * width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def vgg16() -> nn.Module:
    parts: list[nn.Module] = []
    i = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            parts += [nn.Conv2d(i, width, 3, padding=1), nn.ReLU()]
            i = width
        parts.append(nn.MaxPool2d(2))
    head = [
        nn.Linear(25088, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 1000),
    ]
    return nn.Sequential(*parts, nn.Flatten(), *head)


class DenseLayer(nn.Module):
    def __init__(self, i: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(i), nn.ReLU(), conv(i, 128), nn.Conv2d(128, 32, 3, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet121() -> nn.Module:
    parts: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for count in (6, 12, 24, 16):
        for _ in range(count):
            parts.append(DenseLayer(i))
            i += 32
        if count != 16:
            parts += [nn.BatchNorm2d(i), nn.ReLU(), nn.Conv2d(i, i // 2, 1, bias=False), nn.AvgPool2d(2)]
            i //= 2
    return nn.Sequential(
        *parts, nn.BatchNorm2d(i), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 1000)
    )


# --- MobileNetV3-Large, EfficientNet-B0 -------------------------------------------------------------------------------


class Squeeze(nn.Module):
    """Channels weighed by what their means say."""

    def __init__(self, c: int, inner: int, act: Callable[[], nn.Module], gate: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, inner, 1), act(), nn.Conv2d(inner, c, 1), gate()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.body(x)


class Inverted(nn.Module):
    """Wider, depthwise, narrower."""

    def __init__(
        self,
        i: int,
        wide: int,
        o: int,
        kernel: int,
        stride: int,
        act: Callable[[], nn.Module],
        squeeze: nn.Module | None,
    ) -> None:
        super().__init__()
        first = [conv(i, wide, act=act)] if wide != i else []
        self.body = nn.Sequential(
            *first,
            conv(wide, wide, kernel, stride, wide, act),
            *([squeeze] if squeeze else []),
            conv(wide, o, act=None),
        )
        self.same = stride == 1 and i == o

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.same else self.body(x)


def mobilenet_v3() -> nn.Module:
    table = (
        (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2), (5, 120, 40, 1, 0, 1),
        (5, 120, 40, 1, 0, 1),
        (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1),
        (3, 480, 112, 1, 1, 1),
        (3, 672, 112, 1, 1, 1), (5, 672, 160, 1, 1, 2), (5, 960, 160, 1, 1, 1), (5, 960, 160, 1, 1, 1),
    )  # fmt: skip
    parts: list[nn.Module] = [conv(3, 16, 3, 2, act=nn.Hardswish)]
    i = 16
    for kernel, wide, o, squeezed, hard, stride in table:
        squeeze = Squeeze(wide, (wide // 4 + 7) // 8 * 8, nn.ReLU, nn.Hardsigmoid) if squeezed else None
        parts.append(Inverted(i, wide, o, kernel, stride, nn.Hardswish if hard else nn.ReLU, squeeze))
        i = o
    head = [
        conv(160, 960, act=nn.Hardswish),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(960, 1280, 1),
        nn.Hardswish(),
        nn.Flatten(),
        nn.Linear(1280, 1000),
    ]
    return nn.Sequential(*parts, *head)


def efficientnet_b0() -> nn.Module:
    parts: list[nn.Module] = [conv(3, 32, 3, 2, act=nn.SiLU)]
    i = 32
    for ratio, o, count, stride, kernel in ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)):  # fmt: skip
        for k in range(count):
            wide = i * ratio
            parts.append(
                Inverted(
                    i,
                    wide,
                    o,
                    kernel,
                    stride if k == 0 else 1,
                    nn.SiLU,
                    Squeeze(wide, max(i // 4, 1), nn.SiLU, nn.Sigmoid),
                )
            )
            i = o
    return nn.Sequential(
        *parts, conv(320, 1280, act=nn.SiLU), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)
    )


# --- ViT-S/16, BERT base, ConvNeXt-T ----------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, n, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, n, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(batch, n, width))


class Layer(nn.Module):
    """`first`: norms in front of what they are for, as in ViT; else behind, as in BERT."""

    def __init__(self, width: int, heads: int, first: bool) -> None:
        super().__init__()
        self.first, self.attention = first, Attention(width, heads)
        self.n1, self.n2 = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-6)
        self.f = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.first:
            x = x + self.attention(self.n1(x))
            return x + self.f(self.n2(x))
        x = self.n1(x + self.attention(x, mask))
        return self.n2(x + self.f(x))


class Vit(nn.Module):
    def __init__(self, width: int = 384, heads: int = 6, depth: int = 12) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.token, self.place = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(0.02 * torch.randn(1, 197, width))
        self.layers = nn.Sequential(*(Layer(width, heads, True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width, 1e-6), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.place
        return self.head(self.norm(self.layers(x))[:, 0])


class Bert(nn.Module):
    def __init__(self, width: int = 768, heads: int = 12, depth: int = 12, words: int = 30522) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (
            nn.Embedding(words, width),
            nn.Embedding(512, width),
            nn.Embedding(2, width),
        )
        self.norm, self.layers = (
            nn.LayerNorm(width, 1e-12),
            nn.ModuleList(Layer(width, heads, False) for _ in range(depth)),
        )
        self.pool = nn.Linear(width, width)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = (
            self.words(ids)
            + self.places(torch.arange(ids.shape[1], device=ids.device))
            + self.kinds(torch.zeros_like(ids))
        )
        x, seen = self.norm(x), (mask > 0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, seen)
        return {"last_hidden_state": x, "pooled": torch.tanh(self.pool(x[:, 0]))}


class ChannelsNorm(nn.Module):
    """A layer norm over the channels of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width, 1e-6)
        self.f = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(self.norm(self.deep(x).permute(0, 2, 3, 1))) * self.scale
        return x + y.permute(0, 3, 1, 2)


def convnext_tiny() -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelsNorm(96)]
    for k, (width, count) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3))):
        if k:
            parts += [ChannelsNorm(width // 2), nn.Conv2d(width // 2, width, 2, 2)]
        parts += [ConvNextBlock(width) for _ in range(count)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(768, 1e-6), nn.Linear(768, 1000))


# --- what is benchmarked ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Net:
    """`make()` gives the module, `inputs()` example arguments; `drawn`: are its matrices to be drawn anew?"""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    drawn: bool = True


def image(n: int = 224) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(1, 3, n, n),)


def tokens(n: int, words: int, *more: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(words, (1, n)), *(f() for f in more))


def seeded(net: Net) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A module in eval mode under whose weights values neither grow nor vanish, and example inputs."""
    from zoo.weights import jitter, settle

    torch.manual_seed(0)
    module, inputs = net.make(), net.inputs()
    with torch.no_grad():
        image = inputs[0].is_floating_point()
        return (
            settle(module, tuple(inputs[0].shape[1:]), matrices=net.drawn) if image else jitter(module, 0.02)
        ), inputs


def nets() -> Sequence[Net]:
    from zoo.text import Gpt2, LstmModel
    from zoo.vision import UNet

    states = (lambda: torch.zeros(2, 1, 512),) * 2
    return (
        Net("resnet50", resnet50, image()),
        Net("mobilenet_v3_large", mobilenet_v3, image()),
        Net("efficientnet_b0", efficientnet_b0, image()),
        Net("vgg16", vgg16, image()),
        Net("densenet121", densenet121, image()),
        Net("vit_small_patch16", Vit, image(), False),
        Net("convnext_tiny", convnext_tiny, image(), False),
        Net("bert_base", Bert, tokens(128, 30522, lambda: torch.ones(1, 128, dtype=torch.int64))),
        Net("gpt2_prefill64", lambda: Gpt2(False), tokens(64, 50257)),
        Net("unet_small", UNet, image(256)),
        Net("lstm_lm", LstmModel, tokens(32, 10000, *states)),
    )
