"""Networks that see: those of timm by name, and a few written out here because they are small or not in timm."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.weights import settle

ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU}


class _Inert(ModuleType):
    """A module in which every name is an empty class."""

    __path__: list[str] = []
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *args, **named: None, "__getattr__": lambda self, key: 0})
        for member in ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"):
            setattr(made, member, member)
        setattr(self, name, made)
        return made


class _InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision where it is not installed: timm imports it for reading images, which is not done here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Inert(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""


def from_timm(name: str, drawn: bool = True) -> nn.Module:
    """A model of timm; with `drawn` its weights are drawn anew, else they stay as timm initializes them."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_InertFinder())
    import timm

    model = timm.create_model(name, pretrained=False).eval()
    normed = any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    return settle(model, tuple(model.default_cfg["input_size"]) if normed else (), drawn)


def block(i: int, o: int, kernel: int = 1, stride: int = 1, activation: str = "relu") -> nn.Sequential:
    """Convolution, batch norm, activation."""
    conv = nn.Conv2d(i, o, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(o), ACTIVATIONS[activation]())


def max_pool(kernel: int = 3) -> nn.Module:
    return nn.MaxPool2d(kernel, 2, ceil_mode=True)


# --- classifiers ------------------------------------------------------------------------------------------------------


class Fire(nn.Module):
    """SqueezeNet's: few channels, then as many by 1x1 as by 3x3."""

    def __init__(self, i: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(i, squeezed, 1)
        self.one = nn.Conv2d(squeezed, expanded, 1)
        self.three = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


def squeezenet() -> nn.Module:
    fires = [Fire(64, 16, 64), Fire(128, 16, 64), max_pool(), Fire(128, 32, 128), Fire(256, 32, 128), max_pool()]
    fires += [Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256)]
    head = [nn.Dropout(), nn.Conv2d(512, 1000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return settle(nn.Sequential(nn.Conv2d(3, 64, 3, 2), nn.ReLU(), max_pool(), *fires, *head))


def alexnet() -> nn.Module:
    def conv(i: int, o: int, kernel: int, stride: int = 1, padding: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(i, o, kernel, stride, padding), nn.ReLU()]

    features = [*conv(3, 64, 11, 4, 2), nn.MaxPool2d(3, 2), *conv(64, 192, 5, 1, 2), nn.MaxPool2d(3, 2)]
    features += [*conv(192, 384, 3), *conv(384, 256, 3), *conv(256, 256, 3), nn.MaxPool2d(3, 2)]
    head = [
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(9216, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
    ]
    return settle(nn.Sequential(*features, *head, nn.Linear(4096, 1000)))


class Inception(nn.Module):
    """GoogLeNet's: 1x1, 3x3, a second 3x3 and a pooled branch side by side."""

    def __init__(self, i: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pooled: int) -> None:
        super().__init__()
        pool = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), block(i, pooled))
        by3, by5 = (
            nn.Sequential(block(i, few), block(few, many, 3)) for few, many in ((reduce3, three), (reduce5, five))
        )
        self.branches = nn.ModuleList([block(i, one), by3, by5, pool])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([b(x) for b in self.branches], 1)


def googlenet() -> nn.Module:
    stem = [block(3, 64, 7, 2), max_pool(), block(64, 64), block(64, 192, 3), max_pool()]
    body = [Inception(192, 64, 96, 128, 16, 32, 32), Inception(256, 128, 128, 192, 32, 96, 64), max_pool()]
    body += [
        Inception(480, 192, 96, 208, 16, 48, 64),
        Inception(512, 160, 112, 224, 24, 64, 64),
        Inception(512, 128, 128, 256, 24, 64, 64),
    ]
    body += [Inception(512, 112, 144, 288, 32, 64, 64), Inception(528, 256, 160, 320, 32, 128, 128), max_pool(2)]
    body += [Inception(832, 256, 160, 320, 32, 128, 128), Inception(832, 384, 192, 384, 48, 128, 128)]
    return settle(
        nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)), (3, 224, 224)
    )


def mlp() -> nn.Module:
    hidden = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()]
    return settle(nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, 10), nn.Softmax(-1)))


# --- segmentation and detection ---------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Four levels down, three up: two by transposed convolution, the last by bilinear interpolation."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        c = [width << k for k in range(4)]

        def two(i: int, o: int) -> nn.Sequential:
            return nn.Sequential(block(i, o, 3), block(o, o, 3))

        self.down = nn.ModuleList([two(i, o) for i, o in zip([3, *c], c)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(c[3], c[2], 2, 2), nn.ConvTranspose2d(c[2], c[1], 2, 2)])
        self.merge = nn.ModuleList([two(2 * c[2], c[2]), two(2 * c[1], c[1]), two(c[1] + c[0], c[0])])
        self.head = nn.Conv2d(c[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level in self.down[:3]:
            x = level(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[3](x)
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([up(x), kept.pop()], 1))
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.head(self.merge[2](torch.cat([x, kept.pop()], 1))).softmax(1)


def unet() -> nn.Module:
    return settle(UNet(), (3, 256, 256))


def silu(i: int, o: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    return block(i, o, kernel, stride, "silu")


class Split(nn.Module):
    """YOLO's cross-stage block: half of the channels goes through a chain, of which every stage is kept."""

    def __init__(self, i: int, o: int, stages: int) -> None:
        super().__init__()
        half = o // 2
        self.first, self.last = silu(i, o), silu(half * (stages + 2), o)
        self.chain = nn.ModuleList([nn.Sequential(silu(half, half, 3), silu(half, half, 3)) for _ in range(stages)])

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for stage in self.chain:
            parts.append(parts[-1] + stage(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Pyramid(nn.Module):
    """Max pools in a row, all kept."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.first, self.last = silu(c, c // 2), silu(2 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        return self.last(torch.cat(parts, 1))


class Detector(nn.Module):
    """A YOLO: three scales with three anchors each, boxes decoded in the graph."""

    def __init__(self, classes: int = 20) -> None:
        super().__init__()
        self.fields = 5 + classes
        self.fine = nn.Sequential(
            silu(3, 16, 3, 2), silu(16, 32, 3, 2), Split(32, 32, 1), silu(32, 64, 3, 2), Split(64, 64, 2)
        )
        self.middle = nn.Sequential(silu(64, 128, 3, 2), Split(128, 128, 2))
        self.coarse = nn.Sequential(silu(128, 256, 3, 2), Split(256, 256, 1), Pyramid(256))
        self.to_middle, self.to_fine = Split(256 + 128, 128, 1), Split(128 + 64, 64, 1)
        self.heads = nn.ModuleList(
            [nn.Sequential(silu(c, 64, 3), nn.Conv2d(64, 3 * self.fields, 1)) for c in (64, 128, 256)]
        )

    def forward(self, x: Tensor) -> Tensor:
        a = self.fine(x)
        b = self.middle(a)
        c = self.coarse(b)
        b = self.to_middle(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        a = self.to_fine(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1))
        return torch.cat(
            [self.decode(head(f), stride) for f, head, stride in zip((a, b, c), self.heads, (8, 16, 32))], 1
        )

    def decode(self, p: Tensor, stride: int) -> Tensor:
        batch, _, h, w = p.shape
        p = p.view(batch, 3, self.fields, h, w).permute(0, 1, 3, 4, 2).sigmoid()
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        cell = torch.stack((x, y), -1).float().view(1, 1, h, w, 2)
        centre = (p[..., :2] * 2 - 0.5 + cell) * stride
        size = (p[..., 2:4] * 2) ** 2 * (4.0 * stride)
        return torch.cat([centre, size, p[..., 4:]], -1).reshape(batch, -1, self.fields)


def detector() -> nn.Module:
    return settle(Detector(), (3, 320, 320))
