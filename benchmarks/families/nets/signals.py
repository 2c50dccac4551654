"""One-dimensional nets: speech, music, separation, codecs, sensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.entry import Made, floats


class WaveNet(nn.Module):
    """Gated dilated causal convolutions with skip sums."""

    def __init__(self, width: int = 32, skip: int = 64, layers: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList([nn.Conv1d(width, 2 * width, 2, dilation=2**k) for k in range(layers)])
        self.skips = nn.ModuleList([nn.Conv1d(width, skip, 1) for _ in range(layers)])
        self.rest = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(layers)])
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(skip, skip, 1), nn.ReLU(), nn.Conv1d(skip, 256, 1))

    def forward(self, x: Tensor) -> Tensor:
        h, total = self.first(x), torch.zeros(1)
        for k, (gate, skip, rest) in enumerate(zip(self.gates, self.skips, self.rest)):
            a, b = gate(F.pad(h, (2**k, 0))).chunk(2, 1)
            z = a.tanh() * b.sigmoid()
            total, h = total + skip(z), h + rest(z)
        return self.last(total)


class Tcn(nn.Module):
    """Residual blocks of dilated causal convolutions whose weights are normalized by gain and direction."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        norm = torch.nn.utils.parametrizations.weight_norm
        self.blocks = nn.ModuleList(
            [
                nn.ModuleList(
                    [
                        norm(nn.Conv1d(8 if k == 0 else width, width, 3, dilation=2**k)),
                        norm(nn.Conv1d(width, width, 3, dilation=2**k)),
                    ]
                )
                for k in range(5)
            ]
        )
        self.short, self.last = nn.Conv1d(8, width, 1), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for k, (a, b) in enumerate(self.blocks):
            pad = (2 * 2**k, 0)
            h = b(F.pad(a(F.pad(x, pad)).relu(), pad)).relu()
            x = (h + (self.short(x) if k == 0 else x)).relu()
        return self.last(x[..., -1])


class TasBlock(nn.Module):
    def __init__(self, width: int, hidden: int, dilation: int) -> None:
        super().__init__()
        self.up, self.a = nn.Conv1d(width, hidden, 1), nn.PReLU()
        self.n1, self.n2 = nn.GroupNorm(1, hidden), nn.GroupNorm(1, hidden)
        self.depth, self.b = (
            nn.Conv1d(hidden, hidden, 3, padding=dilation, dilation=dilation, groups=hidden),
            nn.PReLU(),
        )
        self.down = nn.Conv1d(hidden, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.n2(self.b(self.depth(self.n1(self.a(self.up(x)))))))


class ConvTasNet(nn.Module):
    """Speech separation: learned filters, depthwise dilated blocks with global norms, masks, transposed filters."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.norm, self.first = nn.Conv1d(1, 128, 16, 8), nn.GroupNorm(1, 128), nn.Conv1d(128, 64, 1)
        self.blocks = nn.Sequential(*[TasBlock(64, 128, 2**k) for _ in range(2) for k in range(4)])
        self.mask, self.decode = (
            nn.Sequential(nn.PReLU(), nn.Conv1d(64, 256, 1), nn.Sigmoid()),
            nn.ConvTranspose1d(128, 1, 16, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        w = self.encode(x).relu()
        masks = self.mask(self.blocks(self.first(self.norm(w)))).view(x.shape[0], 2, 128, -1)
        parts = (masks * w[:, None]).flatten(0, 1)
        return self.decode(parts).view(x.shape[0], 2, -1)


class DualPath(nn.Module):
    """Dual-path recurrent separation: LSTMs within chunks and across them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv1d(1, width, 16, 8), nn.ConvTranspose1d(width, 1, 16, 8)
        self.inner = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.outer = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.a, self.b = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.mask = nn.Conv1d(width, 2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        w = self.encode(x).relu()
        b, c, t = w.shape
        h = w.transpose(1, 2).reshape(b, 10, t // 10, c)
        h = h + self.a(self.inner(h.reshape(b * 10, t // 10, c))[0]).view(b, 10, t // 10, c)
        across = h.transpose(1, 2).reshape(b * (t // 10), 10, c)
        h = h + self.b(self.outer(across)[0]).view(b, t // 10, 10, c).transpose(1, 2)
        mask = self.mask(h.reshape(b, t, c).transpose(1, 2)).sigmoid().view(b, 2, c, t)
        return self.decode((mask * w[:, None]).flatten(0, 1)).view(b, 2, -1)


class HifiGan(nn.Module):
    """Vocoder: transposed convolutions and the mean of dilated residual stacks with several kernel sizes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, width, 7, padding=3)
        self.ups = nn.ModuleList([nn.ConvTranspose1d(width >> k, width >> (k + 1), 8, 4, 2) for k in range(3)])
        self.stacks = nn.ModuleList(
            [
                nn.ModuleList(
                    [
                        nn.ModuleList(
                            [
                                nn.Conv1d(width >> k, width >> k, s, padding=d * (s - 1) // 2, dilation=d)
                                for d in (1, 3, 5)
                            ]
                        )
                        for s in (3, 7, 11)
                    ]
                )
                for k in (1, 2, 3)
            ]
        )
        self.last = nn.Conv1d(width >> 3, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, stacks in zip(self.ups, self.stacks):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(self.stack(s, x) for s in stacks) / len(stacks)
        return self.last(F.leaky_relu(x)).tanh()

    def stack(self, convs: nn.ModuleList, x: Tensor) -> Tensor:
        for c in convs:
            x = x + c(F.leaky_relu(x, 0.1))
        return x


class Snake(nn.Module):
    """x + sin(a x)^2 / a with a per channel (BigVGAN)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(1, width, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.a * x).sin() ** 2 / self.a


class Codec(nn.Module):
    """Neural audio codec: strided encoder with an LSTM, residual vector quantization by nearest codes, decoder."""

    def __init__(self, width: int = 16, codes: int = 128, stages: int = 4) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv1d(1, width, 7, padding=3),
            *[m for k in range(3) for m in (Snake(width << k), nn.Conv1d(width << k, width << (k + 1), 8, 4, 2))],
        )
        self.rnn = nn.LSTM(width << 3, width << 3, batch_first=True)
        self.books = nn.Parameter(torch.randn(stages, codes, width << 3) * 0.5)
        self.decode = nn.Sequential(
            *[
                m
                for k in (3, 2, 1)
                for m in (Snake(width << k), nn.ConvTranspose1d(width << k, width << (k - 1), 8, 4, 2))
            ],
            nn.Conv1d(width, 1, 7, padding=3),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x).transpose(1, 2)
        z = z + self.rnn(z)[0]
        rest, total, indices = z, torch.zeros_like(z), []
        for book in self.books:
            distance = (rest * rest).sum(-1, keepdim=True) - 2 * rest @ book.T + (book * book).sum(-1)
            k = distance.argmin(-1)
            q = F.embedding(k, book)
            rest, total = rest - q, total + q
            indices.append(k)
        return self.decode(total.transpose(1, 2)), torch.stack(indices, 1)


class SincNet(nn.Module):
    """Band-pass filters from two frequencies each, by sin and a window, then convolutions with layer norms."""

    def __init__(self, filters: int = 32, size: int = 65) -> None:
        super().__init__()
        self.low, self.band = (
            nn.Parameter(torch.linspace(0.005, 0.3, filters)),
            nn.Parameter(torch.full((filters,), 0.05)),
        )
        self.register_buffer("n", torch.arange(-(size // 2), size // 2 + 1).float())
        self.register_buffer("window", torch.hamming_window(size))
        self.rest = nn.Sequential(
            nn.MaxPool1d(3),
            nn.BatchNorm1d(filters),
            nn.LeakyReLU(),
            nn.Conv1d(filters, 40, 5),
            nn.MaxPool1d(3),
            nn.BatchNorm1d(40),
            nn.LeakyReLU(),
        )
        self.last = nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        def low_pass(f: Tensor) -> Tensor:
            return 2 * f[:, None] * torch.sinc(2 * f[:, None] * self.n)

        filters = (low_pass(self.low + self.band.abs()) - low_pass(self.low)) * self.window
        return self.last(self.rest(F.conv1d(x, filters[:, None])).mean(-1))


class Spectrum(nn.Module):
    """Mel spectrogram in the graph: framing and DFT by a strided convolution, mel filters, log; a 2-D net."""

    def __init__(self, size: int = 256, hop: int = 128, mels: int = 40) -> None:
        super().__init__()
        n, f = torch.arange(size).float(), torch.arange(size // 2 + 1).float()[:, None]
        window = torch.hann_window(size)
        angle = 2 * math.pi * f * n / size
        self.hop = hop
        self.register_buffer("basis", torch.cat([angle.cos() * window, -angle.sin() * window])[:, None])
        self.register_buffer("mel", torch.rand(mels, size // 2 + 1) * (torch.rand(mels, size // 2 + 1) < 0.1))
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.last = nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        re, im = F.conv1d(x[:, None], self.basis, stride=self.hop).chunk(2, 1)
        mel = (self.mel @ (re * re + im * im) + 1e-6).log()
        return self.last(self.net(mel[:, None]).mean((2, 3)))


class Tdnn(nn.Module):
    """Speaker embedding (ECAPA-like): Res2 convolutions, squeeze-excitation, attentive statistics."""

    def __init__(self, width: int = 64, scale: int = 4) -> None:
        super().__init__()
        self.scale, each = scale, width // scale
        self.first = nn.Sequential(nn.Conv1d(40, width, 5, padding=2), nn.ReLU(), nn.BatchNorm1d(width))
        self.parts = nn.ModuleList([nn.Conv1d(each, each, 3, padding=2, dilation=2) for _ in range(scale - 1)])
        self.squeeze, self.excite = nn.Conv1d(width, 16, 1), nn.Conv1d(16, width, 1)
        self.a, self.b = nn.Conv1d(3 * width, 32, 1), nn.Conv1d(32, width, 1)
        self.norm, self.last = nn.BatchNorm1d(2 * width), nn.Linear(2 * width, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out, y = [], torch.zeros(1)
        for k, part in enumerate(x.chunk(self.scale, 1)):
            y = part if k == 0 else self.parts[k - 1](part + y if k > 1 else part).relu()
            out.append(y)
        h = torch.cat(out, 1)
        x = x + h * self.excite(self.squeeze(h.mean(-1, keepdim=True)).relu()).sigmoid()
        mean, std = x.mean(-1, keepdim=True), x.var(-1, keepdim=True).clamp(min=1e-5).sqrt()
        w = self.b(self.a(torch.cat([x, mean.expand_as(x), std.expand_as(x)], 1)).tanh()).softmax(-1)
        mu = (w * x).sum(-1)
        sigma = ((w * x * x).sum(-1) - mu * mu).clamp(min=1e-5).sqrt()
        return F.normalize(self.last(self.norm(torch.cat([mu, sigma], -1))), dim=-1)


class Inception1d(nn.Module):
    """Time-series classification: parallel kernels of several lengths, bottlenecks, residuals (InceptionTime)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.ModuleList(
                    [
                        nn.Conv1d(6 if k == 0 else 64, 16, 1, bias=False),
                        *[nn.Conv1d(16, 16, s, padding=s // 2, bias=False) for s in (9, 19, 39)],
                        nn.Conv1d(6 if k == 0 else 64, 16, 1, bias=False),
                        nn.BatchNorm1d(64),
                    ]
                )
                for k in range(3)
            ]
        )
        self.last = nn.Linear(64, 7)

    def forward(self, x: Tensor) -> Tensor:
        for narrow, a, b, c, pooled, norm in self.blocks:
            h = narrow(x)
            x = norm(torch.cat([a(h), b(h), c(h), pooled(F.max_pool1d(x, 3, 1, 1))], 1)).relu()
        return self.last(x.mean(-1))


class EcgNet(nn.Module):
    """One-dimensional residual net with squeeze-excitation and strided pooling shortcuts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(12, 32, 15, padding=7)
        self.convs = nn.ModuleList(
            [
                nn.Sequential(
                    nn.BatchNorm1d(32),
                    nn.ReLU(),
                    nn.Conv1d(32, 32, 7, 2, 3),
                    nn.BatchNorm1d(32),
                    nn.ReLU(),
                    nn.Conv1d(32, 32, 7, padding=3),
                )
                for _ in range(4)
            ]
        )
        self.gates = nn.ModuleList(
            [
                nn.Sequential(
                    nn.AdaptiveAvgPool1d(1),
                    nn.Flatten(),
                    nn.Linear(32, 8),
                    nn.ReLU(),
                    nn.Linear(8, 32),
                    nn.Hardsigmoid(),
                )
                for _ in range(4)
            ]
        )
        self.last = nn.Linear(32, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for conv, gate in zip(self.convs, self.gates):
            h = conv(x)
            x = F.max_pool1d(x, 2) + h * gate(h)[..., None]
        return self.last(x.amax(-1))


NETS: dict[str, Callable[[], Made]] = {
    "wavenet": lambda: Made(WaveNet(), [floats("x", "batch", 1, 512)]),
    "tcn": lambda: Made(Tcn(), [floats("x", "batch", 8, 200)]),
    "conv_tasnet": lambda: Made(ConvTasNet(), [floats("x", "batch", 1, 2000)]),
    "dprnn": lambda: Made(DualPath(), [floats("x", "batch", 1, 1608)]),
    "hifigan": lambda: Made(HifiGan(), [floats("x", "batch", 80, 24)]),
    "audio_codec": lambda: Made(Codec(), [floats("x", "batch", 1, 2048)]),
    "sincnet": lambda: Made(SincNet(), [floats("x", "batch", 1, 1600)]),
    "mel_classifier": lambda: Made(Spectrum(), [floats("x", "batch", 8000)]),
    "ecapa": lambda: Made(Tdnn(), [floats("x", "batch", 40, 150)]),
    "inception_time": lambda: Made(Inception1d(), [floats("x", "batch", 6, 256)]),
    "ecg_resnet": lambda: Made(EcgNet(), [floats("x", "batch", 12, 1024)]),
}
