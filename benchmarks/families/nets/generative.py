"""Generators, decoders of fields, flows, super-resolution, dense prediction."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.entry import Made, floats, image


class RealNvp(nn.Module):
    """Affine couplings on checkerboards of features, both the value and the log-determinant."""

    def __init__(self, width: int = 16, steps: int = 4) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 48), nn.Tanh(), nn.Linear(48, 2 * width)) for _ in range(steps)]
        )
        masks = torch.stack([(torch.arange(width) % 2 == k % 2).float() for k in range(steps)])
        self.register_buffer("masks", masks)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(x.shape[0])
        for net, mask in zip(self.nets, self.masks):
            s, t = net(x * mask).chunk(2, -1)
            s = s.tanh() * (1 - mask)
            x = x * mask + (1 - mask) * (x * s.exp() + t)
            total = total + s.sum(-1)
        return x, total


class Glow(nn.Module):
    """Squeeze, activation norms, invertible 1x1 convolutions with their determinant, couplings by convolutions."""

    def __init__(self, channels: int = 12, steps: int = 3) -> None:
        super().__init__()
        self.scale = nn.ParameterList([nn.Parameter(torch.rand(1, channels, 1, 1) + 0.5) for _ in range(steps)])
        self.weight = nn.ParameterList(
            [nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0]) for _ in range(steps)]
        )
        self.nets = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(channels // 2, 32, 3, padding=1),
                    nn.ReLU(),
                    nn.Conv2d(32, 32, 1),
                    nn.ReLU(),
                    nn.Conv2d(32, channels, 3, padding=1),
                )
                for _ in range(steps)
            ]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, total = F.pixel_unshuffle(x, 2), torch.zeros(1)
        for scale, weight, net in zip(self.scale, self.weight, self.nets):
            x = F.conv2d(x * scale, weight[:, :, None, None])
            a, b = x.chunk(2, 1)
            s, t = net(a).chunk(2, 1)
            s = (s + 2).sigmoid()
            x = torch.cat([a, b * s + t], 1)
            total = total + s.log().flatten(1).sum(-1) + scale.log().sum()
        return x, total


class Spline(nn.Module):
    """Neural spline flow: monotonic rational-quadratic pieces found by comparing with cumulative bins."""

    def __init__(self, width: int = 8, bins: int = 6) -> None:
        super().__init__()
        self.bins = bins
        self.net = nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, width * (3 * bins + 1)))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        p = self.net(a).view(*b.shape, -1)
        w, h, d = (
            p[..., : self.bins].softmax(-1),
            p[..., self.bins : 2 * self.bins].softmax(-1),
            F.softplus(p[..., 2 * self.bins :]) + 1e-2,
        )
        u = b.sigmoid()
        right, top = w.cumsum(-1), h.cumsum(-1)
        k = (u[..., None] >= right).sum(-1, keepdim=True).clamp(max=self.bins - 1)
        wk, hk = w.gather(-1, k), h.gather(-1, k)
        t = ((u[..., None] - (right - w).gather(-1, k)) / wk).clamp(0, 1)
        slope, d0, d1 = hk / wk, d.gather(-1, k), d.gather(-1, k + 1)
        y = (top - h).gather(-1, k) + hk * (slope * t * t + d0 * t * (1 - t)) / (
            slope + (d1 + d0 - 2 * slope) * t * (1 - t)
        )
        return torch.cat([a, y[..., 0]], -1)


class Vae(nn.Module):
    """Convolutional variational autoencoder with noise as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 64, 64),
        )
        self.first = nn.Linear(32, 64 * 64)
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encode(x).chunk(2, -1)
        z = mean + noise * (0.5 * log).exp()
        return self.decode(self.first(z).view(-1, 64, 8 * 2, 4)), mean, log


class Vq(nn.Module):
    """Quantized autoencoder: nearest codes of a book, then transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 4, 2, 1))
        self.book = nn.Embedding(256, 32)
        self.decode = nn.Sequential(nn.ConvTranspose2d(32, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x).permute(0, 2, 3, 1)
        k = torch.cdist(z.flatten(1, 2), self.book.weight[None]).argmin(-1)
        q = self.book(k).view_as(z).permute(0, 3, 1, 2)
        return self.decode(q), k


class Modulated(nn.Module):
    """StyleGAN2: weights modulated and demodulated per sample, run as grouped convolutions, noise and blur."""

    def __init__(self, width: int = 32, style: int = 64) -> None:
        super().__init__()
        self.width, self.map = (
            width,
            nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(style, style), nn.LeakyReLU(0.2))]),
        )
        self.start = nn.Parameter(torch.randn(1, width, 4, 4))
        self.weight = nn.ParameterList([nn.Parameter(torch.randn(width, width, 3, 3)) for _ in range(3)])
        self.style = nn.ModuleList([nn.Linear(style, width) for _ in range(3)])
        self.noise, self.rgb = (
            nn.ParameterList([nn.Parameter(torch.randn(1, 1, s, s)) for s in (4, 8, 16)]),
            nn.Conv2d(width, 3, 1),
        )
        self.register_buffer(
            "blur",
            (torch.tensor([1.0, 3, 3, 1])[:, None] * torch.tensor([1.0, 3, 3, 1]) / 64).expand(width, 1, 4, 4).clone(),
        )

    def forward(self, z: Tensor) -> Tensor:
        z = self.map(z * (z.square().mean(-1, keepdim=True) + 1e-8).rsqrt())
        b = z.shape[0]
        x = self.start.expand(b, -1, -1, -1)
        for k, (weight, style, noise) in enumerate(zip(self.weight, self.style, self.noise)):
            if k:
                x = F.conv2d(
                    F.pad(F.interpolate(x, scale_factor=2.0, mode="nearest"), (2, 1, 2, 1)),
                    self.blur,
                    groups=self.width,
                )
            w = weight * (style(z) + 1)[:, None, :, None, None]
            w = w * (w.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
            size = x.shape[-1]
            x = F.conv2d(
                x.reshape(1, b * self.width, size, size), w.view(b * self.width, self.width, 3, 3), padding=1, groups=b
            )
            x = F.leaky_relu(x.view(b, self.width, size, size) + 0.1 * noise, 0.2) * 2**0.5
        return self.rgb(x).tanh()


class Residual(nn.Module):
    """A block of a diffusion net: group norms, the time added, attention at the end."""

    def __init__(self, i: int, o: int, time: int) -> None:
        super().__init__()
        self.n1, self.c1, self.time = nn.GroupNorm(8, i), nn.Conv2d(i, o, 3, padding=1), nn.Linear(time, 2 * o)
        self.n2, self.c2, self.short = nn.GroupNorm(8, o), nn.Conv2d(o, o, 3, padding=1), nn.Conv2d(i, o, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        scale, shift = self.time(F.silu(t))[:, :, None, None].chunk(2, 1)
        h = self.n2(self.c1(F.silu(self.n1(x)))) * (1 + scale) + shift
        return self.short(x) + self.c2(F.silu(h))


class Diffusion(nn.Module):
    """U-Net of a diffusion model: sinusoidal time, self-attention and cross-attention to a text at the lowest scale."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.d1, self.d2 = Residual(width, width, 64), Residual(width, 2 * width, 64)
        self.down, self.mid = nn.Conv2d(width, width, 3, 2, 1), Residual(2 * width, 2 * width, 64)
        self.own, self.cross = (
            nn.MultiheadAttention(2 * width, 4, batch_first=True),
            nn.MultiheadAttention(2 * width, 4, batch_first=True, kdim=48, vdim=48),
        )
        self.norms = nn.ModuleList([nn.LayerNorm(2 * width) for _ in range(3)])
        self.gate, self.out = nn.Linear(2 * width, 8 * width), nn.Linear(4 * width, 2 * width)
        self.up, self.u1 = nn.Conv2d(2 * width, width, 3, padding=1), Residual(2 * width, width, 64)
        self.last = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        rate = torch.exp(-math.log(10000.0) * torch.arange(16).float() / 16)
        angle = t.float()[:, None] * rate
        e = self.time(torch.cat([angle.cos(), angle.sin()], -1))
        a = self.d1(self.first(x), e)
        h = self.mid(self.d2(self.down(a), e), e)
        b, c, height, w = h.shape
        s = h.flatten(2).transpose(1, 2)
        n = self.norms[0](s)
        s = s + self.own(n, n, n, need_weights=False)[0]
        s = s + self.cross(self.norms[1](s), text, text, need_weights=False)[0]
        p, q = self.gate(self.norms[2](s)).chunk(2, -1)
        h = (s + self.out(p * F.gelu(q))).transpose(1, 2).reshape(b, c, height, w)
        h = self.up(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return self.last(self.u1(torch.cat([h, a], 1), e))


class Edsr(nn.Module):
    """Residual super-resolution by pixel shuffle; `attend`: with channel attention (RCAN)."""

    def __init__(self, attend: bool, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.first, self.attend = nn.Conv2d(3, width, 3, padding=1), attend
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
                for _ in range(blocks)
            ]
        )
        self.gates = nn.ModuleList(
            [
                nn.Sequential(
                    nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 4, 1), nn.ReLU(), nn.Conv2d(4, width, 1), nn.Sigmoid()
                )
                for _ in range(blocks)
            ]
        )
        self.up = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1),
            nn.PixelShuffle(2),
            nn.Conv2d(width, 4 * width, 3, padding=1),
            nn.PixelShuffle(2),
            nn.Conv2d(width, 3, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.first(x)
        for block, gate in zip(self.blocks, self.gates):
            y = block(h)
            h = h + (y * gate(y) if self.attend else 0.1 * y)
        return self.up(h + first)


class Srgan(nn.Module):
    """Generator with PReLUs and batch norms, added to a bicubic enlargement."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, width, 9, padding=4), nn.PReLU())
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(width, width, 3, padding=1),
                    nn.BatchNorm2d(width),
                    nn.PReLU(),
                    nn.Conv2d(width, width, 3, padding=1),
                    nn.BatchNorm2d(width),
                )
                for _ in range(3)
            ]
        )
        self.up = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(), nn.Conv2d(width, 3, 9, padding=4)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return (F.interpolate(x, scale_factor=2.0, mode="bicubic", align_corners=False) + self.up(h)).clamp(-2, 2)


class Recurrent(nn.Module):
    """Video super-resolution step: a flow warps the last state by grid_sample."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.flow = nn.Sequential(nn.Conv2d(6, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 3, padding=1), nn.Tanh())
        self.net = nn.Sequential(
            nn.Conv2d(3 + width, 32, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(32, width, 3, padding=1)
        )
        self.up = nn.Sequential(nn.Conv2d(width, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x: Tensor, before: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        flow = self.flow(torch.cat([x, before], 1)).permute(0, 2, 3, 1) * 0.2
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, x.shape[2]), torch.linspace(-1, 1, x.shape[3]), indexing="ij")
        warped = F.grid_sample(
            state, torch.stack([xs, ys], -1) + flow, mode="bilinear", padding_mode="border", align_corners=True
        )
        h = self.net(torch.cat([x, warped], 1))
        return self.up(h) + F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False), h


class Nerf(nn.Module):
    """Radiance field: positional encodings, a skip, densities along rays composed by a cumulative sum of logarithms."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("rates", 2.0 ** torch.arange(6))
        self.a, self.b = (
            nn.Sequential(nn.Linear(39, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            nn.Sequential(nn.Linear(width + 39, width), nn.ReLU()),
        )
        self.density, self.colour = (
            nn.Linear(width, 1),
            nn.Sequential(nn.Linear(width + 3, 32), nn.ReLU(), nn.Linear(32, 3), nn.Sigmoid()),
        )

    def forward(self, origin: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.linspace(0.2, 2.0, 24)
        at = origin[:, None] + direction[:, None] * z[:, None]
        angle = (at[..., None] * self.rates).flatten(-2)
        e = torch.cat([at, angle.sin(), angle.cos()], -1)
        h = self.b(torch.cat([self.a(e), e], -1))
        alpha = 1 - (-self.density(h)[..., 0].relu() * 0.08).exp()
        seen = torch.cat([torch.ones_like(alpha[:, :1]), (1 - alpha + 1e-10).log().cumsum(-1).exp()[:, :-1]], -1)
        w = alpha * seen
        colour = self.colour(torch.cat([h, F.normalize(direction, dim=-1)[:, None].expand(-1, z.shape[0], -1)], -1))
        return (w[..., None] * colour).sum(1), (w * z).sum(1)


class HashField(nn.Module):
    """Instant-NGP: hashed corners of a multi-resolution grid, trilinear weights, a small net."""

    def __init__(self, levels: int = 4, size: int = 1024) -> None:
        super().__init__()
        self.levels, self.size = levels, size
        self.tables = nn.Parameter(torch.randn(levels, size, 2) * 0.3)
        self.net = nn.Sequential(nn.Linear(2 * levels, 32), nn.ReLU(), nn.Linear(32, 4))
        self.register_buffer("corners", torch.tensor([[(k >> d) & 1 for d in range(3)] for k in range(8)]))

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for level in range(self.levels):
            at = x * (8 * 2**level)
            low = at.floor()
            part = at - low
            corner = low.long()[:, None] + self.corners
            key = (corner[..., 0] * 1 + corner[..., 1] * 2531 + corner[..., 2] * 8053) % self.size
            w = torch.where(self.corners.bool(), part[:, None], 1 - part[:, None]).prod(-1)
            out.append((self.tables[level][key] * w[..., None]).sum(1))
        return self.net(torch.cat(out, -1))


class Transformer2d(nn.Module):
    """Spatial transformer: an affine grid from the image itself, bicubic samples, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.find = nn.Sequential(
            nn.Conv2d(1, 8, 7),
            nn.MaxPool2d(2, 2),
            nn.ReLU(),
            nn.Conv2d(8, 10, 5),
            nn.MaxPool2d(2, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(10 * 9, 6),
        )
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        )
        self.register_buffer("eye", torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, x: Tensor) -> Tensor:
        theta = (self.eye + 0.1 * self.find(x)).view(-1, 2, 3)
        grid = F.affine_grid(theta, [x.shape[0], 1, 28, 28], align_corners=False)
        return self.net(F.grid_sample(x, grid, mode="bicubic", padding_mode="zeros", align_corners=False)).log_softmax(
            -1
        )


class NonLocal(nn.Module):
    """Non-local block in a residual net: attention of all positions with pooled keys."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.q, self.k, self.v = (nn.Conv2d(width, width // 2, 1) for _ in range(3))
        self.out, self.norm, self.last = nn.Conv2d(width // 2, width, 1), nn.BatchNorm2d(width), nn.Conv2d(width, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        f = self.first(x)
        q, k = self.q(f).flatten(2), F.max_pool2d(self.k(f), 2).flatten(2)
        y = (q.transpose(1, 2) @ k).softmax(-1) @ F.max_pool2d(self.v(f), 2).flatten(2).transpose(1, 2)
        y = y.transpose(1, 2).reshape(f.shape[0], -1, *f.shape[2:])
        return F.interpolate(
            self.last(f + self.norm(self.out(y))), size=x.shape[2:], mode="bilinear", align_corners=True
        )


class DeepLab(nn.Module):
    """Dilated convolutions at several rates beside a pooled branch, joined with an early map, argmax of classes."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()

        def block(i: int, o: int, k: int = 3, d: int = 1, s: int = 1) -> nn.Module:
            return nn.Sequential(nn.Conv2d(i, o, k, s, d * (k // 2), d, bias=False), nn.BatchNorm2d(o), nn.ReLU())

        self.early, self.late = (
            nn.Sequential(block(3, 16, 3, 1, 2), block(16, width, 3, 1, 2)),
            nn.Sequential(block(width, 48, 3, 1, 2), block(48, 48, 3, 2)),
        )
        self.rates = nn.ModuleList([block(48, width, 1), block(48, width, 3, 6), block(48, width, 3, 12)])
        self.pool, self.join, self.last = (
            block(48, width, 1),
            block(4 * width, width, 1),
            nn.Sequential(block(2 * width, width), nn.Conv2d(width, 9, 1)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        e = self.early(x)
        f = self.late(e)
        pooled = F.interpolate(
            self.pool(f.mean((2, 3), keepdim=True)), size=f.shape[2:], mode="bilinear", align_corners=False
        )
        h = self.join(torch.cat([r(f) for r in self.rates] + [pooled], 1))
        h = F.interpolate(h, size=e.shape[2:], mode="bilinear", align_corners=False)
        out = F.interpolate(self.last(torch.cat([h, e], 1)), size=x.shape[2:], mode="bilinear", align_corners=False)
        return out, out.argmax(1)


class StyleTransfer(nn.Module):
    """Fast style transfer: reflection pads, instance norms, nearest enlargement."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def block(i: int, o: int, k: int, s: int = 1) -> list[nn.Module]:
            return [nn.ReflectionPad2d(k // 2), nn.Conv2d(i, o, k, s), nn.InstanceNorm2d(o, affine=True), nn.ReLU()]

        self.down = nn.Sequential(*block(3, width, 9), *block(width, 2 * width, 3, 2))
        self.mid = nn.ModuleList([nn.Sequential(*block(2 * width, 2 * width, 3)) for _ in range(3)])
        self.up = nn.Sequential(
            nn.Upsample(scale_factor=2), *block(2 * width, width, 3), nn.ReflectionPad2d(4), nn.Conv2d(width, 3, 9)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        for m in self.mid:
            x = x + m(x)
        return self.up(x)


class Stereo(nn.Module):
    """Cost volume of two images over disparities, a soft arg-min."""

    def __init__(self, shifts: int = 8) -> None:
        super().__init__()
        self.shifts = shifts
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.cost = nn.Sequential(nn.Conv3d(32, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 1, 3, padding=1))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.net(left), self.net(right)
        w = a.shape[-1]
        volume = torch.stack([torch.cat([a, F.pad(b, (d, 0))[..., :w]], 1) for d in range(self.shifts)], 2)
        p = (-self.cost(volume)[:, 0]).softmax(1)
        return (p * torch.arange(self.shifts).float().view(1, -1, 1, 1)).sum(1)


class Correlation(nn.Module):
    """RAFT step: all pairs of features, lookup around a flow by grid_sample, a convolutional GRU."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 24, 7, 2, 3), nn.ReLU(), nn.Conv2d(24, width, 3, 2, 1))
        self.z, self.r, self.q = (nn.Conv2d(width + 27, width, 3, padding=1) for _ in range(3))
        self.flow = nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = self.net(first), self.net(second)
        n, c, h, w = a.shape
        pairs = (a.flatten(2).transpose(1, 2) @ b.flatten(2) / c**0.5).view(n * h * w, 1, h, w)
        ys, xs = torch.meshgrid(torch.arange(h).float(), torch.arange(w).float(), indexing="ij")
        base, flow, state = torch.stack([xs, ys]), torch.zeros(n, 2, h, w), a.tanh()
        dy, dx = torch.meshgrid(torch.arange(-2, 3).float(), torch.arange(-2, 3).float(), indexing="ij")
        around = torch.stack([dx, dy], -1)[None]
        size = torch.tensor([w - 1.0, h - 1.0])
        for _ in range(2):
            at = (base + flow).permute(0, 2, 3, 1).reshape(-1, 1, 1, 2) + around
            found = F.grid_sample(pairs, 2 * at / size - 1, align_corners=True).view(n, h, w, 25).permute(0, 3, 1, 2)
            x = torch.cat([found, flow], 1)
            z, r = self.z(torch.cat([state, x], 1)).sigmoid(), self.r(torch.cat([state, x], 1)).sigmoid()
            state = (1 - z) * state + z * self.q(torch.cat([r * state, x], 1)).tanh()
            flow = flow + self.flow(state)
        return flow


def frames(size: int = 48) -> Made:
    return Made(
        Recurrent(), [image(3, size, size), image(3, size, size, "before"), floats("state", "batch", 16, size, size)]
    )


def pair(module: nn.Module, names: tuple[str, str], height: int, width: int) -> Made:
    return Made(module, [image(3, height, width, n) for n in names])


NETS: dict[str, Callable[[], Made]] = {
    "realnvp": lambda: Made(RealNvp(), [floats("x", "batch", 16)]),
    "glow": lambda: Made(Glow(), [image(3, 32, 32)], settled=False),
    "spline_flow": lambda: Made(Spline(), [floats("x", "batch", 16)]),
    "vae": lambda: Made(Vae(), [image(3, 64, 16), floats("noise", "batch", 32)]),
    "vqvae": lambda: Made(Vq(), [image(3, 32, 32)]),
    "stylegan": lambda: Made(Modulated(), [floats("z", "batch", 64)]),
    "diffusion_unet": lambda: Made(
        Diffusion(),
        [
            image(4, 32, 32),
            {"name": "t", "dtype": "int64", "shape": ["batch"], "lo": 0, "hi": 1000},
            floats("text", "batch", 12, 48),
        ],
    ),
    "edsr": lambda: Made(Edsr(False), [image(3, 40, 40)]),
    "rcan": lambda: Made(Edsr(True), [image(3, 40, 40)]),
    "srgan_bicubic": lambda: Made(Srgan(), [image(3, 48, 48)]),
    "video_sr_warp": frames,
    "nerf": lambda: Made(Nerf(), [floats("origin", "rays:128", 3, scale=0.3), floats("direction", "rays:128", 3)]),
    "hash_field": lambda: Made(HashField(), [floats("x", "points:500", 3, lo=0.0, hi=1.0)]),
    "spatial_transformer": lambda: Made(Transformer2d(), [image(1, 28, 28)]),
    "non_local": lambda: Made(NonLocal(), [image(3, 48, 48)]),
    "deeplab": lambda: Made(DeepLab(), [image(3, 96, 96)]),
    "style_transfer": lambda: Made(StyleTransfer(), [image(3, 64, 64)]),
    "stereo": lambda: pair(Stereo(), ("left", "right"), 32, 64),
    "raft_step": lambda: pair(Correlation(), ("first", "second"), 48, 64),
}
