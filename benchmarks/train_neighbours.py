"""Further networks of `train_cpu.py`: other families and odd sizes, which no kernel was tuned for. See `train_nets`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from train_nets import Task, images, tokens


def norm_relu(nn: Any, kind: str, i: int, o: int, kernel: int, **kwargs: Any) -> Any:
    """A convolution of 1, 2 or 3 axes without bias, its batch norm and ReLU."""
    conv, norm = getattr(nn, f"Conv{kind}"), getattr(nn, f"BatchNorm{kind}")
    return nn.Sequential(conv(i, o, kernel, padding=kernel // 2, bias=False, **kwargs), norm(o), nn.ReLU())


def audio(nn: Any, F: Any, block: Any) -> Any:
    """A network on waveforms (Dai et al., 2016, M11 with fewer channels): long vectors, wide kernels."""
    layers = [nn.Conv1d(1, 48, 80, 4), nn.BatchNorm1d(48), nn.ReLU(), nn.MaxPool1d(4)]
    for i, o in pairwise((48, 48, 96, 192, 384)):
        layers += [norm_relu(nn, "1d", i, o, 3), norm_relu(nn, "1d", o, o, 3), nn.MaxPool1d(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(384, 35))


def video(nn: Any, F: Any, block: Any) -> Any:
    """Convolutions over time, height and width (Tran et al., 2015, smaller)."""
    layers = []
    for i, o in pairwise((3, 24, 48, 96)):
        layers += [norm_relu(nn, "3d", i, o, 3), nn.MaxPool3d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(96, 101))


def unet(nn: Any, F: Any, block: Any) -> Any:
    """Ronneberger et al., 2015, three levels, transposed convolutions; a class for each pixel."""

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            widths = (20, 40, 80)

            def pair(i: int, o: int) -> Any:
                return nn.Sequential(norm_relu(nn, "2d", i, o, 3), norm_relu(nn, "2d", o, o, 3))

            self.down = nn.ModuleList([pair(i, o) for i, o in pairwise((3, *widths))])
            self.pool = nn.MaxPool2d(2)
            self.bottom = pair(80, 160)
            self.up = nn.ModuleList([nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths)])
            self.merge = nn.ModuleList([pair(2 * w, w) for w in reversed(widths)])
            self.last = nn.Conv2d(20, 7, 1)

        def forward(self, x: Any) -> Any:
            kept = []
            for level in self.down:
                x = level(x)
                kept.append(x)
                x = self.pool(x)
            x = self.bottom(x)
            for up, merge in zip(self.up, self.merge):
                x = merge(cat(nn, (kept.pop(), up(x))))
            y = self.last(x)
            return y.mean((2, 3))

    return Net()


def cat(nn: Any, arrays: Any) -> Any:
    """Channels of arrays, one behind the other."""
    if nn.__name__.startswith("torch"):
        import torch

        return torch.cat(arrays, 1)
    import dnnc.array as xp

    return xp.concat(arrays, axis=1)


def resnext(nn: Any, F: Any, block: Any) -> Any:
    """Grouped convolutions (Xie et al., 2016), 12 groups."""

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, i: int, width: int, stride: int) -> None:
            super().__init__()
            self.reduce = norm_relu(nn, "2d", i, width, 1)
            self.grouped = norm_relu(nn, "2d", width, width, 3, stride=stride, groups=12)
            self.widen = nn.Sequential(nn.Conv2d(width, 2 * width, 1, bias=False), nn.BatchNorm2d(2 * width))
            self.short = nn.Conv2d(i, 2 * width, 1, stride, bias=False)

        def forward(self, x: Any) -> Any:
            return F.relu(self.widen(self.grouped(self.reduce(x))) + self.short(x))

    blocks = [Block(36, 60, 1), Block(120, 120, 2), Block(240, 240, 2)]
    return nn.Sequential(
        norm_relu(nn, "2d", 3, 36, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(480, 100)
    )


def dense(nn: Any, F: Any, block: Any) -> Any:
    """Each layer reads all that came before it (Huang et al., 2017), 18 channels a layer."""

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self, i: int) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(i), nn.Conv2d(i, 18, 3, padding=1, bias=False)

        def forward(self, x: Any) -> Any:
            return cat(nn, (x, self.conv(F.relu(self.norm(x)))))

    def stack(i: int, count: int) -> list[Any]:
        return [Layer(i + 18 * k) for k in range(count)]

    parts = [nn.Conv2d(3, 30, 3, padding=1), *stack(30, 6), nn.Conv2d(138, 69, 1), nn.AvgPool2d(2), *stack(69, 6)]
    return nn.Sequential(
        *parts, nn.BatchNorm2d(177), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(177, 10)
    )


def generator(nn: Any, F: Any, block: Any) -> Any:
    """Images of vectors, and their classes (Radford et al., 2015): transposed convolutions of stride 2."""
    layers = [nn.ConvTranspose2d(100, 192, 4), nn.BatchNorm2d(192), nn.ReLU()]
    for i, o in pairwise((192, 96, 48, 24)):
        layers += [nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    for i, o in pairwise((24, 48, 96)):
        layers += [nn.Conv2d(i, o, 4, 2, 1), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * 64, 10))


def gru(nn: Any, F: Any, block: Any) -> Any:
    """A bidirectional GRU over tokens; the mean over time is classified."""

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5000, 120)
            self.gru = nn.GRU(120, 150, batch_first=True, bidirectional=True)
            self.last = nn.Linear(300, 5)

        def forward(self, tokens: Any) -> Any:
            return self.last(self.gru(self.words(tokens))[0].mean(1))

    return Net()


def encoder(nn: Any, F: Any, block: Any) -> Any:
    """The library's own Transformer layers, 200 wide with 5 heads, over 77 tokens."""

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(8000, 200)
            self.layers = nn.ModuleList(
                [nn.TransformerEncoderLayer(200, 5, 700, 0.0, "gelu", batch_first=True) for _ in range(3)]
            )
            self.last = nn.Linear(200, 8000)

        def forward(self, tokens: Any) -> Any:
            x = self.words(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.last(x)

    return Net()


def wide(nn: Any, F: Any, block: Any) -> Any:
    """Residual blocks of two products with a layer norm and GELU, on rows of a table."""

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(300), nn.Linear(300, 600), nn.Linear(600, 300)

        def forward(self, x: Any) -> Any:
            return x + self.b(F.gelu(self.a(self.norm(x))))

    return nn.Sequential(nn.Linear(54, 300), *[Block() for _ in range(6)], nn.LayerNorm(300), nn.Linear(300, 7))


def convnext(nn: Any, F: Any, block: Any) -> Any:
    """Depthwise kernels of 7 x 7, layer norms over channels, GELU (Liu et al., 2022)."""

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, n: int) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(n, n, 7, padding=3, groups=n), nn.LayerNorm(n)
            self.a, self.b = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)

        def forward(self, x: Any) -> Any:
            y = self.norm(self.conv(x).swapaxes(1, 2).swapaxes(2, 3))
            return x + self.b(F.gelu(self.a(y))).swapaxes(2, 3).swapaxes(1, 2)

    parts = [nn.Conv2d(3, 56, 4, 4)]
    for k, n in enumerate((56, 112, 224)):
        parts += [*([nn.Conv2d(n // 2, n, 2, 2)] if k else []), Block(n), Block(n)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(224, 100))


def style(nn: Any, F: Any, block: Any) -> Any:
    """Instance norms, reflected borders and images made larger by interpolation (Johnson et al., 2016)."""
    layers = [nn.ReflectionPad2d(4), nn.Conv2d(3, 20, 9), nn.InstanceNorm2d(20, affine=True), nn.PReLU(20)]
    layers += [
        nn.Conv2d(20, 40, 3, 2, 1),
        nn.InstanceNorm2d(40, affine=True),
        nn.SiLU(),
        nn.Conv2d(40, 40, 3, padding=1),
    ]
    layers += [nn.GroupNorm(4, 40), nn.SiLU(), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)]
    layers += [
        nn.Conv2d(40, 20, 3, padding=1),
        nn.InstanceNorm2d(20, affine=True),
        nn.Tanh(),
        nn.Conv2d(20, 9, 5, padding=2),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


NEIGHBOURS = {
    "audio": Task(audio, images(12, 1, 8000, classes=35), images(2, 1, 8000, classes=35)),
    "video": Task(video, images(4, 3, 16, 56, 56, classes=101), images(2, 3, 8, 16, 16, classes=101)),
    "unet": Task(unet, images(5, 3, 96, 96, classes=7), images(2, 3, 32, 32, classes=7)),
    "resnext": Task(resnext, images(10, 3, 40, 40, classes=100), images(2, 3, 16, 16, classes=100)),
    "dense": Task(dense, images(12, 3, 32, 32, classes=10), images(2, 3, 16, 16, classes=10)),
    "generator": Task(generator, images(18, 100, 1, 1, classes=10), images(3, 100, 1, 1, classes=10)),
    "gru": Task(gru, tokens(24, 50, 5000, 5), tokens(3, 9, 5000, 5), rate=0.1),
    "encoder": Task(encoder, tokens(7, 77, 8000), tokens(2, 13, 8000), "Adam", 1e-4),
    "wide": Task(wide, images(500, 54, classes=7), images(20, 54, classes=7), "Adam", 1e-3),
    "convnext": Task(convnext, images(6, 3, 112, 112, classes=100), images(2, 3, 64, 64, classes=100), "Adam", 1e-4),
    "style": Task(style, images(3, 3, 90, 90, classes=9), images(2, 3, 32, 32, classes=9)),
}
