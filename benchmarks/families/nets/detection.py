"""Detectors and their post-processing: anchors, non-maximum suppression, top-k, centre peaks, queries, samplers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from families.entry import Made, floats, image


def conv(
    i: int, o: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: nn.Module | None = None
) -> nn.Sequential:
    pad = kernel // 2
    return nn.Sequential(
        nn.Conv2d(i, o, kernel, stride, pad, groups=groups, bias=False), nn.BatchNorm2d(o), act or nn.ReLU()
    )


class Pyramid(nn.Module):
    """A small backbone with a feature pyramid: strides 8, 16, 32."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 16, 3, 2), conv(16, 24, 3, 2))
        self.stages = nn.ModuleList([conv(24, 48, 3, 2), conv(48, 64, 3, 2), conv(64, 96, 3, 2)])
        self.lateral = nn.ModuleList([nn.Conv2d(c, width, 1) for c in (48, 64, 96)])
        self.smooth = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(3)])

    def forward(self, x: Tensor) -> list[Tensor]:
        x, levels = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        levels = [lateral(f) for lateral, f in zip(self.lateral, levels)]
        for k in (1, 0):
            levels[k] = levels[k] + F.interpolate(levels[k + 1], size=levels[k].shape[-2:], mode="nearest")
        return [smooth(f) for smooth, f in zip(self.smooth, levels)]


def grid(h: int, w: int, stride: int) -> Tensor:
    """Centres of cells, [h * w, 2] as x, y."""
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    return (torch.stack((x, y), -1).reshape(-1, 2).float() + 0.5) * stride


def by_level(maps: list[Tensor], channels: int) -> Tensor:
    """[batch, cells of all levels, channels]."""
    return torch.cat([m.permute(0, 2, 3, 1).reshape(m.shape[0], -1, channels) for m in maps], 1)


class RetinaNet(nn.Module):
    """Shared heads over levels with nine anchors; the best boxes of one image by class-wise suppression."""

    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        self.classes, self.backbone = classes, Pyramid()
        self.scores = nn.Sequential(conv(32, 32), nn.Conv2d(32, 9 * classes, 3, padding=1))
        self.boxes = nn.Sequential(conv(32, 32), nn.Conv2d(32, 36, 3, padding=1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        levels = self.backbone(x)
        scores = by_level([self.scores(f) for f in levels], 9 * self.classes).reshape(-1, self.classes).sigmoid()
        deltas = by_level([self.boxes(f) for f in levels], 36).reshape(-1, 4)
        anchors = torch.cat([self.anchors(f.shape[-2], f.shape[-1], s) for f, s in zip(levels, (8, 16, 32))])
        size = anchors[:, 2:] * deltas[:, 2:].clamp(-2, 2).exp()
        centre = anchors[:, :2] + deltas[:, :2] * anchors[:, 2:]
        boxes = torch.cat([centre - size / 2, centre + size / 2], -1)
        best, label = scores.max(-1)
        best, order = best.topk(200)
        boxes, label = boxes[order], label[order]
        kept = torchvision.ops.nms(boxes + label[:, None].float() * 1000, best, 0.5)[:50]
        return boxes[kept], best[kept], label[kept]

    def anchors(self, h: int, w: int, stride: int) -> Tensor:
        sizes = [
            (stride * 4 * 2 ** (k / 3) / math.sqrt(r), stride * 4 * 2 ** (k / 3) * math.sqrt(r))
            for r in (0.5, 1, 2)
            for k in range(3)
        ]
        size = torch.tensor(sizes)
        centre = grid(h, w, stride)[:, None].expand(-1, 9, -1)
        return torch.cat([centre, size[None].expand(centre.shape[0], -1, -1)], -1).reshape(-1, 4)


class Fcos(nn.Module):
    """One box per cell from distances to its sides, centredness, and the best cells by top-k."""

    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        self.classes, self.backbone = classes, Pyramid()
        self.tower = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU())
        self.scores, self.sides = nn.Conv2d(32, classes, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)
        self.centre, self.scale = nn.Conv2d(32, 1, 3, padding=1), nn.Parameter(torch.tensor([0.9, 1.1, 1.3]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = []
        for k, (f, stride) in enumerate(zip(self.backbone(x), (8, 16, 32))):
            t = self.tower(f)
            score = (self.scores(t).sigmoid() * self.centre(t).sigmoid()).sqrt()
            sides = (self.sides(t) * self.scale[k]).relu() * stride
            at = grid(f.shape[-2], f.shape[-1], stride)
            s = sides.flatten(2).transpose(1, 2)
            box = torch.cat([at - s[..., :2], at + s[..., 2:]], -1)
            out.append((score.flatten(2).transpose(1, 2), box))
        scores, boxes = torch.cat([s for s, _ in out], 1), torch.cat([b for _, b in out], 1)
        value, label = scores.max(-1)
        value, order = value.topk(50, 1)
        return boxes.gather(1, order[..., None].expand(-1, -1, 4)), value, label.gather(1, order)


class CenterNet(nn.Module):
    """Peaks of a heat map by max pooling, offsets and sizes gathered at them; transposed convolutions upsample."""

    def __init__(self, classes: int = 6) -> None:
        super().__init__()
        self.classes = classes
        self.down = nn.Sequential(conv(3, 16, 7, 2), conv(16, 32, 3, 2), conv(32, 64, 3, 2), conv(64, 96, 3, 2))
        self.up = nn.Sequential(
            *[
                m
                for i, o in ((96, 64), (64, 32))
                for m in (nn.ConvTranspose2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.ReLU())
            ]
        )
        self.heat, self.offset, self.size = nn.Conv2d(32, classes, 1), nn.Conv2d(32, 2, 1), nn.Conv2d(32, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f = self.up(self.down(x))
        heat = self.heat(f).sigmoid()
        peaks = heat * (F.max_pool2d(heat, 3, 1, 1) == heat).float()
        b, _, h, w = peaks.shape
        value, at = peaks.view(b, -1).topk(40)
        label, cell = torch.div(at, h * w, rounding_mode="floor"), at % (h * w)
        xy = torch.stack([(cell % w).float(), torch.div(cell, w, rounding_mode="floor").float()], -1)
        where = cell[:, :, None].expand(-1, -1, 2)
        offset = self.offset(f).flatten(2).transpose(1, 2).gather(1, where)
        size = self.size(f).flatten(2).transpose(1, 2).gather(1, where)
        return torch.cat([xy + offset, size.exp()], -1), value, label


class Yolo(nn.Module):
    """Focus stem, cross-stage blocks, anchor-free decoding with distributions over distances (as in newer YOLOs)."""

    def __init__(self, classes: int = 10, bins: int = 8) -> None:
        super().__init__()
        self.bins, act = bins, nn.SiLU()
        self.stem = conv(12, 16, 3, 1, act=act)
        self.stages = nn.ModuleList(
            [
                nn.Sequential(conv(i, o, 3, 2, act=act), conv(o, o, 3, act=act))
                for i, o in ((16, 32), (32, 64), (64, 96))
            ]
        )
        self.boxes = nn.ModuleList([nn.Conv2d(c, 4 * bins, 1) for c in (32, 64, 96)])
        self.scores = nn.ModuleList([nn.Conv2d(c, classes, 1) for c in (32, 64, 96)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)
        x = self.stem(x)
        boxes, scores = [], []
        for stage, box, score, stride in zip(self.stages, self.boxes, self.scores, (4, 8, 16)):
            x = stage(x)
            b, _, h, w = x.shape
            d = box(x).view(b, 4, self.bins, h * w).softmax(2)
            side = (d * torch.arange(self.bins, dtype=torch.float32).view(1, 1, -1, 1)).sum(2).transpose(1, 2)
            at = grid(h, w, stride)
            boxes.append(torch.cat([at - side[..., :2] * stride, at + side[..., 2:] * stride], -1))
            scores.append(score(x).flatten(2).transpose(1, 2).sigmoid())
        return torch.cat(boxes, 1), torch.cat(scores, 1)


class Detr(nn.Module):
    """Queries over a flattened map with sine positions, by PyTorch's transformer layers."""

    def __init__(self, width: int = 64, queries: int = 30) -> None:
        super().__init__()
        self.width = width
        self.backbone = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2), conv(32, 64, 3, 2), conv(64, width, 3, 2))
        self.encoder = nn.TransformerEncoderLayer(width, 4, 128, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, 4, 128, batch_first=True)
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.scores, self.boxes = (
            nn.Linear(width, 11),
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.backbone(x)
        b, c, h, w = f.shape
        rate = torch.exp(-torch.arange(0, c // 2, 2).float() * math.log(1000.0) / (c // 2))
        y, xs = torch.arange(h).float()[:, None] * rate, torch.arange(w).float()[:, None] * rate
        py, px = torch.cat([y.sin(), y.cos()], -1), torch.cat([xs.sin(), xs.cos()], -1)
        position = torch.cat([py[:, None].expand(h, w, -1), px[None].expand(h, w, -1)], -1).reshape(1, h * w, c)
        memory = self.encoder(f.flatten(2).transpose(1, 2) + position)
        q = self.decoder(self.queries[None].expand(b, -1, -1), memory)
        return self.scores(q).softmax(-1), self.boxes(q).sigmoid()


class RegionHead(nn.Module):
    """Second stage of a two-stage detector: aligned regions of a feature map, two layers, boxes by class."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2), conv(32, 32, 3, 2))
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(32 * 25, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.scores, self.boxes = nn.Linear(64, 6), nn.Linear(64, 24)

    def forward(self, x: Tensor, corner: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        boxes = torch.cat([corner, corner + size], -1)
        rois = torch.cat([torch.zeros(boxes.shape[0], 1), boxes], -1)
        f = self.layers(torchvision.ops.roi_align(self.backbone(x), rois, 5, 0.125, 2, True))
        return self.scores(f).softmax(-1), self.boxes(f)


class Deformable(nn.Module):
    """Deformable attention over one level: offsets from queries, bilinear samples by grid_sample, weighted sum."""

    def __init__(self, width: int = 64, heads: int = 4, points: int = 4) -> None:
        super().__init__()
        self.heads, self.points, self.width = heads, points, width
        self.backbone = nn.Sequential(conv(3, 32, 3, 2), conv(32, width, 3, 2))
        self.offset, self.weight = nn.Linear(width, heads * points * 2), nn.Linear(width, heads * points)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.queries, self.at = nn.Parameter(torch.randn(50, width)), nn.Parameter(torch.rand(50, 2) * 1.6 - 0.8)

    def forward(self, x: Tensor) -> Tensor:
        f = self.backbone(x)
        b, c, h, w = f.shape
        n, each = self.queries.shape[0], self.width // self.heads
        value = self.value(f.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(b * self.heads, each, h, w)
        at = self.at[:, None, None] + 0.1 * self.offset(self.queries).view(n, self.heads, self.points, 2).tanh()
        at = at.permute(1, 0, 2, 3)[None].expand(b, -1, -1, -1, -1).reshape(b * self.heads, n, self.points, 2)
        weight = self.weight(self.queries).view(n, self.heads, self.points).softmax(-1).permute(1, 0, 2)
        weight = weight[None].expand(b, -1, -1, -1).reshape(b * self.heads, 1, n, self.points)
        sampled = F.grid_sample(value, at, mode="bilinear", padding_mode="zeros", align_corners=False)
        return self.out((sampled * weight).sum(-1).view(b, c, n).transpose(1, 2))


class Prior(nn.Module):
    """SSD: boxes of several maps against constant priors, softmax scores, L2-normalized first map."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.classes = classes
        self.first = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2))
        self.more = nn.ModuleList([conv(32, 48, 3, 2), conv(48, 48, 3, 2)])
        self.gain = nn.Parameter(torch.full((1, 32, 1, 1), 5.0))
        self.scores = nn.ModuleList([nn.Conv2d(c, 4 * classes, 3, padding=1) for c in (32, 48, 48)])
        self.boxes = nn.ModuleList([nn.Conv2d(c, 16, 3, padding=1) for c in (32, 48, 48)])
        self.priors = nn.Parameter(torch.rand(4 * (32 * 32 + 16 * 16 + 8 * 8), 4) * 0.5 + 0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.first(x)
        maps = [F.normalize(f, dim=1) * self.gain]
        for layer in self.more:
            f = layer(f)
            maps.append(f)
        scores = torch.cat(
            [s(m).permute(0, 2, 3, 1).reshape(m.shape[0], -1, self.classes) for s, m in zip(self.scores, maps)], 1
        )
        boxes = torch.cat([b(m).permute(0, 2, 3, 1).reshape(m.shape[0], -1, 4) for b, m in zip(self.boxes, maps)], 1)
        centre = self.priors[:, :2] + boxes[..., :2] * 0.1 * self.priors[:, 2:]
        return scores.softmax(-1), torch.cat([centre, self.priors[:, 2:] * (boxes[..., 2:] * 0.2).exp()], -1)


class Keypoints(nn.Module):
    """Heat maps of key points: soft-argmax, arg-max with a quarter's shift, and their values."""

    def __init__(self, points: int = 17) -> None:
        super().__init__()
        self.net = nn.Sequential(conv(3, 24, 3, 2), conv(24, 48, 3, 2), conv(48, 48), nn.Conv2d(48, points, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heat = self.net(x)
        b, p, h, w = heat.shape
        soft = heat.flatten(2).softmax(-1).view(b, p, h, w)
        xs, ys = torch.linspace(0, 1, w), torch.linspace(0, 1, h)
        mean = torch.stack([(soft.sum(2) * xs).sum(-1), (soft.sum(3) * ys).sum(-1)], -1)
        value, at = heat.flatten(2).max(-1)
        return mean, value, at


NETS: dict[str, Callable[[], Made]] = {
    "retinanet_nms": lambda: Made(RetinaNet(), [{**image(3, 128, 128), "shape": [1, 3, 128, 128]}]),
    "fcos": lambda: Made(Fcos(), [image(3, 128, 128)]),
    "centernet": lambda: Made(CenterNet(), [image(3, 128, 128)]),
    "yolo": lambda: Made(Yolo(), [image(3, 128, 128)]),
    "detr_plain": lambda: Made(Detr(), [image(3, 128, 128)]),
    "region_head": lambda: Made(
        RegionHead(),
        [
            {**image(3, 96, 128), "shape": [1, 3, 96, 128]},
            floats("corner", "boxes:40", 2, lo=0.0, hi=60.0),
            floats("size", "boxes:40", 2, lo=8.0, hi=40.0),
        ],
    ),
    "deformable_attention": lambda: Made(Deformable(), [image(3, 64, 64)]),
    "ssd": lambda: Made(Prior(), [image(3, 128, 128)]),
    "keypoints": lambda: Made(Keypoints(), [image(3, 96, 64)]),
}
