"""Video, volumes and points: three-dimensional convolutions, factorised ones, sets of points, voxels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.entry import Made, floats


def conv3d(
    i: int, o: int, kernel: int | tuple[int, int, int] = 3, stride: int | tuple[int, int, int] = 1, groups: int = 1
) -> nn.Sequential:
    k = (kernel,) * 3 if isinstance(kernel, int) else kernel
    return nn.Sequential(
        nn.Conv3d(i, o, k, stride, tuple(s // 2 for s in k), groups=groups, bias=False), nn.BatchNorm3d(o), nn.ReLU()
    )


def c3d() -> nn.Module:
    return nn.Sequential(
        *(
            conv3d(3, 16),
            nn.MaxPool3d((1, 2, 2)),
            conv3d(16, 32),
            nn.MaxPool3d(2),
            conv3d(32, 64),
            conv3d(64, 64),
            nn.MaxPool3d(2),
        ),
        *(nn.Flatten(), nn.Linear(64 * 2 * 6 * 6, 128), nn.ReLU(), nn.Linear(128, 20)),
    )


class Factorised(nn.Module):
    """R(2+1)D: spatial convolutions, then temporal ones, residually."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(conv3d(3, 24, (1, 7, 7), (1, 2, 2)), conv3d(24, 32, (3, 1, 1)))
        self.blocks = nn.ModuleList(
            [nn.Sequential(conv3d(32, 48, (1, 3, 3)), conv3d(48, 32, (3, 1, 1))) for _ in range(2)]
        )
        self.down, self.last = (
            nn.Sequential(conv3d(32, 72, (1, 3, 3), (1, 2, 2)), conv3d(72, 64, (3, 1, 1), (2, 1, 1))),
            nn.Linear(64, 20),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = (x + block(x)).relu()
        return self.last(self.down(x).mean((2, 3, 4)))


class X3d(nn.Module):
    """Depthwise 3-D convolutions in inverted bottlenecks with squeeze-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv3d(3, 16, (1, 3, 3), (1, 2, 2), (0, 1, 1)),
            nn.Conv3d(16, 16, (5, 1, 1), padding=(2, 0, 0), groups=16),
            nn.BatchNorm3d(16),
            nn.ReLU(),
        )
        self.up = nn.ModuleList([conv3d(16, 36, 1) for _ in range(2)])
        self.depth = nn.ModuleList(
            [nn.Sequential(nn.Conv3d(36, 36, 3, padding=1, groups=36), nn.BatchNorm3d(36)) for _ in range(2)]
        )
        self.gate = nn.ModuleList(
            [
                nn.Sequential(
                    nn.AdaptiveAvgPool3d(1), nn.Conv3d(36, 8, 1), nn.ReLU(), nn.Conv3d(8, 36, 1), nn.Sigmoid()
                )
                for _ in range(2)
            ]
        )
        self.down = nn.ModuleList(
            [nn.Sequential(nn.SiLU(), nn.Conv3d(36, 16, 1), nn.BatchNorm3d(16)) for _ in range(2)]
        )
        self.last = nn.Linear(16, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, depth, gate, down in zip(self.up, self.depth, self.gate, self.down):
            h = depth(up(x))
            x = x + down(h * gate(h))
        return self.last(x.mean((2, 3, 4)))


class UNet3d(nn.Module):
    """Segmentation of volumes: instance norms, transposed convolutions, joined scales."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def block(i: int, o: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv3d(i, o, 3, padding=1),
                nn.InstanceNorm3d(o, affine=True),
                nn.LeakyReLU(0.01),
                nn.Conv3d(o, o, 3, padding=1),
                nn.InstanceNorm3d(o, affine=True),
                nn.LeakyReLU(0.01),
            )

        self.down = nn.ModuleList([block(1, width), block(width, 2 * width), block(2 * width, 4 * width)])
        self.ups = nn.ModuleList(
            [nn.ConvTranspose3d(4 * width, 2 * width, 2, 2), nn.ConvTranspose3d(2 * width, width, 2, 2)]
        )
        self.joins = nn.ModuleList([block(4 * width, 2 * width), block(2 * width, width)])
        self.last = nn.Conv3d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down[0](x)
        b = self.down[1](F.max_pool3d(a, 2))
        c = self.down[2](F.max_pool3d(b, 2))
        b = self.joins[0](torch.cat([self.ups[0](c), b], 1))
        return self.last(self.joins[1](torch.cat([self.ups[1](b), a], 1))).softmax(1)


class Slow(nn.Module):
    """SlowFast: two frame rates with lateral connections."""

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.fast = conv3d(3, 32, (1, 5, 5), (1, 2, 2)), conv3d(3, 8, (5, 5, 5), (1, 2, 2))
        self.side = nn.Conv3d(8, 16, (5, 1, 1), (4, 1, 1), (2, 0, 0))
        self.slow2, self.fast2 = conv3d(48, 64, (3, 3, 3), (1, 2, 2)), conv3d(8, 16, 3, (1, 2, 2))
        self.last = nn.Linear(80, 20)

    def forward(self, x: Tensor) -> Tensor:
        slow, fast = self.slow(x[:, :, ::4]), self.fast(x)
        slow = self.slow2(torch.cat([slow, self.side(fast)], 1))
        return self.last(torch.cat([slow.mean((2, 3, 4)), self.fast2(fast).mean((2, 3, 4))], 1))


class ShiftNet(nn.Module):
    """Temporal shift: a part of the channels moves one frame forward or back between 2-D convolutions."""

    def __init__(self, frames: int = 8) -> None:
        super().__init__()
        self.frames = frames
        self.convs = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU())
                for i, o in ((3, 16), (16, 32), (32, 64))
            ]
        )
        self.last = nn.Linear(64, 20)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        x = x.flatten(0, 1)
        for k, conv in enumerate(self.convs):
            x = conv(self.shift(x, b) if k else x)
        return self.last(x.mean((2, 3))).view(b, self.frames, -1).mean(1)

    def shift(self, x: Tensor, batch: int) -> Tensor:
        x = x.view(batch, self.frames, *x.shape[1:])
        n = x.shape[2] // 8
        ahead = F.pad(x[:, 1:, :n], (0, 0, 0, 0, 0, 0, 0, 1))
        back = F.pad(x[:, :-1, n : 2 * n], (0, 0, 0, 0, 0, 0, 1, 0))
        return torch.cat([ahead, back, x[:, :, 2 * n :]], 2).flatten(0, 1)


class PointNet(nn.Module):
    """Learned transforms of points, shared layers, a maximum; per-point labels from local and global features."""

    def __init__(self) -> None:
        super().__init__()

        def shared(*sizes: int) -> nn.Module:
            return nn.Sequential(
                *[m for i, o in pairwise(sizes) for m in (nn.Conv1d(i, o, 1), nn.BatchNorm1d(o), nn.ReLU())]
            )

        self.transform, self.matrix = shared(3, 32, 128), nn.Linear(128, 9)
        self.local, self.whole, self.labels = (
            shared(3, 64),
            shared(64, 128, 256),
            nn.Sequential(shared(320, 64), nn.Conv1d(64, 6, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        m = self.matrix(self.transform(x).amax(-1)).view(-1, 3, 3) * 0.2 + torch.eye(3)
        f = self.local((x.transpose(1, 2) @ m).transpose(1, 2))
        g = self.whole(f).amax(-1, keepdim=True)
        return self.labels(torch.cat([f, g.expand(-1, -1, f.shape[-1])], 1)).log_softmax(1)


class PointNet2(nn.Module):
    """Farthest points, their neighbours in a table, a net per group, interpolation by inverse distances."""

    def __init__(self, centres: int = 16, near: int = 8) -> None:
        super().__init__()
        self.centres, self.near = centres, near
        self.group = nn.Sequential(
            nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64), nn.ReLU()
        )
        self.last = nn.Linear(67, 6)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        least, at, chosen = torch.full((b, n), 1e9), torch.zeros(b, dtype=torch.int64), []
        for _ in range(self.centres):
            chosen.append(at)
            d = ((x - x.gather(1, at[:, None, None].expand(-1, 1, 3))) ** 2).sum(-1)
            least = torch.minimum(least, d)
            at = least.argmax(-1)
        centre = x.gather(1, torch.stack(chosen, 1)[..., None].expand(-1, -1, 3))
        distance = torch.cdist(centre, x)
        near = distance.topk(self.near, -1, largest=False).indices
        grouped = (
            x.gather(1, near.view(b, -1, 1).expand(-1, -1, 3)).view(b, self.centres, self.near, 3) - centre[:, :, None]
        )
        f = self.group(grouped.permute(0, 3, 1, 2)).amax(-1).transpose(1, 2)
        w, k = distance.transpose(1, 2).topk(3, -1, largest=False)
        w = 1 / (w + 1e-3)
        w = w / w.sum(-1, keepdim=True)
        back = (f.gather(1, k.view(b, -1, 1).expand(-1, -1, 64)).view(b, n, 3, 64) * w[..., None]).sum(2)
        return self.last(torch.cat([x, back], -1))


class Pillars(nn.Module):
    """PointPillars: features of points in pillars, scattered into a map of the ground, then 2-D convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 32), nn.ReLU())
        self.convs = nn.Sequential(
            nn.Conv2d(32, 32, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 2, 2),
            nn.Conv2d(16, 7, 1),
        )

    def forward(self, points: Tensor, cell: Tensor) -> Tensor:
        f = self.net(points).amax(1)
        ground = torch.zeros(32, 32 * 32).index_put((torch.arange(32)[:, None], cell[None]), f.T)
        return self.convs(ground.view(1, 32, 32, 32))


class VoxelAttention(nn.Module):
    """Set transformer over points: induced points attend to all, pooling by a seed."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.induced, self.seed = nn.Parameter(torch.randn(1, 16, width)), nn.Parameter(torch.randn(1, 4, width))
        self.a, self.b, self.c = (nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(3))
        self.norms, self.last = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)]), nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        x, b = self.first(x), x.shape[0]
        i = self.induced.expand(b, -1, -1)
        h = self.norms[0](i + self.a(i, x, x, need_weights=False)[0])
        x = self.norms[1](x + self.b(x, h, h, need_weights=False)[0])
        s = self.seed.expand(b, -1, -1)
        return self.last(self.norms[2](s + self.c(s, x, x, need_weights=False)[0]))


NETS: dict[str, Callable[[], Made]] = {
    "c3d": lambda: Made(c3d(), [floats("x", "batch", 3, 8, 48, 48)]),
    "r2plus1d": lambda: Made(Factorised(), [floats("x", "batch", 3, 8, 56, 56)]),
    "x3d": lambda: Made(X3d(), [floats("x", "batch", 3, 8, 48, 48)]),
    "unet3d": lambda: Made(UNet3d(), [floats("x", "batch", 1, 16, 32, 32)]),
    "slowfast": lambda: Made(Slow(), [floats("x", "batch", 3, 16, 48, 48)]),
    "temporal_shift": lambda: Made(ShiftNet(), [floats("x", "batch", 8, 3, 64, 64)]),
    "pointnet": lambda: Made(PointNet(), [floats("x", "batch", 3, 256)]),
    "pointnet2": lambda: Made(PointNet2(), [floats("x", "batch", 96, 3)]),
    "pillars": lambda: Made(
        Pillars(),
        [floats("points", 120, 16, 9), {"name": "cell", "dtype": "int64", "shape": [120], "lo": 0, "hi": 1024}],
    ),
    "set_transformer": lambda: Made(VoxelAttention(), [floats("x", "batch", 200, 6)]),
}
