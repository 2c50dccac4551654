"""Recurrent nets and what replaced them: attention, scans, long convolutions, mixers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.entry import Made, floats, image, integers

STEPS, WIDTH = 24, 48


class RecurrentAttention(nn.Module):
    """A bidirectional LSTM or GRU with additive attention over its steps."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(500, 32), kind(32, WIDTH, 2, batch_first=True, bidirectional=True)
        self.a, self.b, self.last = nn.Linear(2 * WIDTH, 32), nn.Linear(32, 1, bias=False), nn.Linear(2 * WIDTH, 5)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        h = self.rnn(self.embedding(x))[0]
        s = self.b(self.a(h).tanh())[..., 0].masked_fill(valid == 0, -1e9)
        return self.last((s.softmax(-1)[..., None] * h).sum(1))


class Crnn(nn.Module):
    """Text recognition: convolutions to a row of features, LSTMs, log-probabilities, greedy labels."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *(
                nn.Conv2d(1, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ),
            *(
                nn.Conv2d(64, 64, 3, padding=1),
                nn.BatchNorm2d(64),
                nn.ReLU(),
                nn.MaxPool2d((2, 1)),
                nn.Conv2d(64, 64, (4, 1)),
                nn.ReLU(),
            ),
        )
        self.rnn, self.last = nn.LSTM(64, WIDTH, 1, bidirectional=True), nn.Linear(2 * WIDTH, 37)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.last(self.rnn(self.convs(x)[:, :, 0].permute(2, 0, 1))[0]).log_softmax(-1)
        return p, p.argmax(-1)


class Seq2Seq(nn.Module):
    """GRU encoder, a decoder of cells with dot attention, eight greedy steps unrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(300, WIDTH), nn.Embedding(300, WIDTH)
        self.encode, self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.GRUCell(2 * WIDTH, WIDTH)
        self.last = nn.Linear(2 * WIDTH, 300)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        memory, state = self.encode(self.source(x))
        h, token, context = state[0], torch.ones_like(x[:, 0]), memory.mean(1)
        tokens, scores = [], torch.zeros(1)
        for _ in range(8):
            h = self.cell(torch.cat([self.target(token), context], -1), h)
            w = (memory @ h[..., None])[..., 0].div(WIDTH**0.5).softmax(-1)
            context = (w[:, None] @ memory)[:, 0]
            logits = self.last(torch.cat([h, context], -1))
            token, scores = logits.argmax(-1), scores + logits.log_softmax(-1).amax(-1)
            tokens.append(token)
        return torch.stack(tokens, 1), scores


class Qrnn(nn.Module):
    """Quasi-recurrent: gates by causal convolutions, a cheap element-wise recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.convs, self.last = (
            nn.ModuleList([nn.Conv1d(16 if k == 0 else WIDTH, 3 * WIDTH, 2) for k in range(2)]),
            nn.Linear(WIDTH, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            z, f, o = conv(F.pad(x, (1, 0))).chunk(3, 1)
            z, f, c, out = z.tanh(), f.sigmoid(), torch.zeros_like(z[..., 0]), []
            for t in range(STEPS):
                c = f[..., t] * c + (1 - f[..., t]) * z[..., t]
                out.append(c)
            x = torch.stack(out, -1) * o.sigmoid()
        return self.last(x[..., -1])


class Sru(nn.Module):
    """Simple recurrent units: all products at once, then a loop of element-wise steps."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.v = (
            nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)]),
            nn.ParameterList([nn.Parameter(torch.randn(2, WIDTH) * 0.3) for _ in range(2)]),
        )
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for product, v in zip(self.products, self.v):
            u, f, r = product(x).chunk(3, -1)
            c, out = torch.zeros_like(u[:, 0]), []
            for t in range(STEPS):
                forget, reset = (f[:, t] + v[0] * c).sigmoid(), (r[:, t] + v[1] * c).sigmoid()
                c = forget * c + (1 - forget) * u[:, t]
                out.append(reset * c + (1 - reset) * x[:, t])
            x = torch.stack(out, 1)
        return self.last(x[:, -1])


class ConvLstm(nn.Module):
    """Convolutional LSTM over frames."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width, self.gates, self.last = width, nn.Conv2d(1 + width, 4 * width, 3, padding=1), nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], self.width, x.shape[3], x.shape[4])
        for t in range(6):
            i, f, o, g = self.gates(torch.cat([x[:, t], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.last(h)


class LayerNormLstm(nn.Module):
    """An LSTM with layer norms and zoneout-like mixing, unrolled by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(16, 4 * WIDTH, bias=False), nn.Linear(WIDTH, 4 * WIDTH)
        self.norms, self.last = (
            nn.ModuleList([nn.LayerNorm(4 * WIDTH), nn.LayerNorm(4 * WIDTH), nn.LayerNorm(WIDTH)]),
            nn.Linear(WIDTH, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], WIDTH)
        for t in range(STEPS):
            i, f, o, g = (self.norms[0](self.x(x[:, t])) + self.norms[1](self.h(h))).chunk(4, -1)
            c = 0.9 * (f.sigmoid() * c + i.sigmoid() * g.tanh()) + 0.1 * c
            h = o.sigmoid() * self.norms[2](c).tanh()
        return self.last(h)


class Linear(nn.Module):
    """Linear attention with elu + 1 features: causal by cumulative sums of outer products."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out, self.norm = (
            heads,
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = (k[..., :, None] * v[..., None, :]).cumsum(2)
        y = (q[..., None, :] @ state)[..., 0, :] / ((q * k.cumsum(2)).sum(-1, keepdim=True) + 1e-6)
        return x + self.out(y.transpose(1, 2).reshape(b, n, -1))


class Performer(nn.Module):
    """Random features of the softmax kernel, not causal."""

    def __init__(self, heads: int = 4, features: int = 32) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("w", torch.randn(WIDTH // heads, features))

    def features(self, x: Tensor) -> Tensor:
        x = x / x.shape[-1] ** 0.25
        p = x @ self.w - (x * x).sum(-1, keepdim=True) / 2
        return (p - p.amax((-2, -1), keepdim=True)).exp() + 1e-4

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.features(q), self.features(k)
        y = q @ (k.transpose(2, 3) @ v) / (q @ k.sum(2)[..., None])
        return x + self.out(y.transpose(1, 2).reshape(b, n, -1))


class Linformer(nn.Module):
    """Keys and values projected along the sequence."""

    def __init__(self, heads: int = 4, rank: int = 8) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.e, self.f = nn.Parameter(torch.randn(rank, STEPS) / 5), nn.Parameter(torch.randn(rank, STEPS) / 5)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, self.e @ k, self.f @ v)
        return x + self.out(y.transpose(1, 2).reshape(b, n, -1))


class Rwkv(nn.Module):
    """Time mixing with a stable running softmax, and channel mixing; shifts by one step."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(5, WIDTH))
        self.decay, self.bonus = nn.Parameter(torch.rand(WIDTH) * 2 - 1), nn.Parameter(torch.randn(WIDTH) * 0.5)
        self.k, self.v, self.r, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.ck, self.cv, self.cr = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(3 * WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        before = F.pad(h, (0, 0, 1, -1))
        k, v, r = (f(h * m + before * (1 - m)) for f, m in zip((self.k, self.v, self.r), self.mix))
        w, out = -self.decay.exp(), []
        a = b = torch.zeros_like(k[:, 0])
        p = torch.full_like(a, -1e38)
        for t in range(STEPS):
            kt, vt = k[:, t], v[:, t]
            q = torch.maximum(p, self.bonus + kt)
            e1, e2 = (p - q).exp(), (self.bonus + kt - q).exp()
            out.append((e1 * a + e2 * vt) / (e1 * b + e2))
            q = torch.maximum(p + w, kt)
            e1, e2 = (p + w - q).exp(), (kt - q).exp()
            a, b, p = e1 * a + e2 * vt, e1 * b + e2, q
        x = x + self.out(r.sigmoid() * torch.stack(out, 1))
        h = self.n2(x)
        before = F.pad(h, (0, 0, 1, -1))
        k = self.ck(h * self.mix[3] + before * (1 - self.mix[3])).relu() ** 2
        return x + (self.cr(h * self.mix[4] + before * (1 - self.mix[4]))).sigmoid() * self.cv(k)


class Mamba(nn.Module):
    """A selective scan: discretised by input-dependent steps, a causal depthwise convolution, a gate."""

    def __init__(self, states: int = 8, rank: int = 4) -> None:
        super().__init__()
        self.rank, self.states, width = rank, states, 2 * WIDTH
        self.norm, self.first, self.conv = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * width),
            nn.Conv1d(width, width, 4, groups=width, padding=3),
        )
        self.x, self.dt, self.out = (
            nn.Linear(width, rank + 2 * states, bias=False),
            nn.Linear(rank, width),
            nn.Linear(width, WIDTH),
        )
        self.a, self.d = (
            nn.Parameter(torch.arange(1, states + 1).float().repeat(width, 1).log()),
            nn.Parameter(torch.rand(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.first(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :STEPS].transpose(1, 2))
        dt, b, c = self.x(u).split([self.rank, self.states, self.states], -1)
        dt = F.softplus(self.dt(dt))
        a = (dt[..., None] * -self.a.exp()).exp()
        bu = (dt * u)[..., None] * b[:, :, None]
        h, out = torch.zeros_like(bu[:, 0]), []
        for t in range(STEPS):
            h = a[:, t] * h + bu[:, t]
            out.append((h * c[:, t, None]).sum(-1))
        return x + self.out((torch.stack(out, 1) + u * self.d) * F.silu(z))


class Ssm(nn.Module):
    """S4D: the kernel of a diagonal state space as a sum of damped cosines, applied as a long causal convolution by a
    Toeplitz matrix.
    """

    def __init__(self, states: int = 8) -> None:
        super().__init__()
        self.re, self.im = nn.Parameter(torch.rand(WIDTH, states)), nn.Parameter(torch.rand(WIDTH, states) * 3)
        self.c, self.d, self.out = (
            nn.Parameter(torch.randn(WIDTH, states)),
            nn.Parameter(torch.rand(WIDTH)),
            nn.Linear(WIDTH, 2 * WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        t = torch.arange(STEPS).float()
        kernel = (self.c[..., None] * (-self.re.exp()[..., None] * t * 0.1).exp() * (self.im[..., None] * t).cos()).sum(
            1
        )
        lag = torch.arange(STEPS)[:, None] - torch.arange(STEPS)
        toeplitz = kernel[:, lag.clamp(min=0)] * (lag >= 0)
        y = torch.einsum("dts,bsd->btd", toeplitz, x) + x * self.d
        return x + F.glu(self.out(F.gelu(y)), -1)


class Retention(nn.Module):
    """Decayed products of queries and keys with rotations, group norm per head, a gate."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkvg, self.out = heads, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)
        gamma = 1 - 2.0 ** (-5 - torch.arange(heads).float())
        lag = (torch.arange(STEPS)[:, None] - torch.arange(STEPS)).float()
        self.register_buffer("decay", torch.where(lag >= 0, gamma[:, None, None] ** lag.clamp(min=0), 0.0))
        angle = torch.arange(STEPS).float()[:, None] * 10000 ** -torch.linspace(
            0, 1, WIDTH // heads // 2
        ).repeat_interleave(2)
        self.register_buffer("sin", angle.sin())
        self.register_buffer("cos", angle.cos())
        self.norm = nn.GroupNorm(heads, WIDTH, affine=False)

    def rotate(self, x: Tensor) -> Tensor:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * self.cos + turned * self.sin

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v, g = self.qkvg(x).view(b, n, 4, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        s = self.rotate(q) @ self.rotate(k).transpose(2, 3) * self.decay
        y = (s / s.abs().sum(-1, keepdim=True).clamp(min=1)) @ v
        y = self.norm(y.transpose(1, 2).reshape(b * n, WIDTH)).view(b, n, WIDTH)
        return x + self.out(F.silu(g.transpose(1, 2).reshape(b, n, WIDTH)) * y)


class DeltaNet(nn.Module):
    """Delta rule: a fast-weight matrix is corrected by each key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.beta, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        k, beta, state, out = (
            F.normalize(F.silu(k), dim=-1),
            self.beta(x).sigmoid(),
            torch.zeros(x.shape[0], WIDTH, WIDTH),
            [],
        )
        for t in range(12):
            error = v[:, t] - (state @ k[:, t, :, None])[..., 0]
            state = state + beta[:, t, :, None] * error[..., None] * k[:, t, None]
            out.append((state @ q[:, t, :, None])[..., 0])
        return self.out(torch.stack(out, 1))


class Hyena(nn.Module):
    """Gated long convolutions with implicit filters from sines, and short depthwise ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.short, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, padding=2, groups=3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.implicit = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        a, b, v = self.short(self.first(x).transpose(1, 2))[..., :STEPS].chunk(3, 1)
        t = torch.linspace(0, 1, STEPS)[:, None]
        bands = t * torch.arange(1, 5) * 2 * math.pi
        h = (self.implicit(torch.cat([t, bands.sin(), bands.cos()], -1)) * (-3 * t).exp()).T
        y = F.conv1d(F.pad(v * b, (STEPS - 1, 0)), h.flip(-1)[:, None], groups=WIDTH)
        return x + self.out((y * a).transpose(1, 2))


class FourierMixer(nn.Module):
    """FNet: real parts of transforms along both axes by products with constant matrices, then a net."""

    def __init__(self) -> None:
        super().__init__()
        for name, n in (("rows", STEPS), ("columns", WIDTH)):
            angle = 2 * math.pi * torch.outer(torch.arange(n), torch.arange(n)).float() / n
            self.register_buffer(f"{name}_cos", angle.cos())
            self.register_buffer(f"{name}_sin", angle.sin())
        self.n1, self.n2, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 96),
            nn.Linear(96, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.rows_cos @ x @ self.columns_cos - self.rows_sin @ x @ self.columns_sin
        x = self.n1(x + y / 8)
        return self.n2(x + self.down(F.gelu(self.up(x))))


class TrueFourier(nn.Module):
    """Global filter network: a 2-D transform, learned complex weights, the inverse."""

    def __init__(self, size: int = 14, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 4, 4)
        self.filter = nn.Parameter(torch.randn(size, size // 2 + 1, width, 2) * 0.3)
        self.norm, self.up, self.down, self.last = (
            nn.LayerNorm(width),
            nn.Linear(width, 64),
            nn.Linear(64, width),
            nn.Linear(width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).permute(0, 2, 3, 1)
        f = torch.fft.rfft2(self.norm(x), dim=(1, 2), norm="ortho") * torch.view_as_complex(self.filter)
        y = torch.fft.irfft2(f, s=(14, 14), dim=(1, 2), norm="ortho")
        x = x + self.down(F.gelu(self.up(y)))
        return self.last(x.mean((1, 2)))


class Mixer(nn.Module):
    """MLP mixer over patches with a permutator along height and width."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first, self.norms = nn.Conv2d(3, width, 8, 8), nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.tokens, self.h, self.w = (
            nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)),
            nn.Linear(8 * 6, 8 * 6),
            nn.Linear(8 * 6, 8 * 6),
        )
        self.channels, self.last = (
            nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)),
            nn.Linear(width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        b, _, c = x.shape
        g = self.norms[1](x).view(b, 8, 8, 8, 6)
        h = self.h(g.permute(0, 3, 2, 1, 4).reshape(b, 8, 8, 48)).view(b, 8, 8, 8, 6).permute(0, 3, 2, 1, 4)
        w = self.w(g.permute(0, 1, 3, 2, 4).reshape(b, 8, 8, 48)).view(b, 8, 8, 8, 6).permute(0, 1, 3, 2, 4)
        x = x + (h + w).reshape(b, 64, c)
        return self.last((x + self.channels(self.norms[2](x))).mean(1))


def steps(module: nn.Module, width: int = WIDTH) -> Made:
    return Made(module, [floats("x", "batch", STEPS, width)])


def words(kind: type[nn.RNNBase]) -> Made:
    valid = {"name": "valid", "dtype": "int64", "shape": ["batch", STEPS], "prefix": True}
    return Made(RecurrentAttention(kind), [integers("x", "batch", STEPS, hi=500), valid])


NETS: dict[str, Callable[[], Made]] = {
    "lstm_attention": lambda: words(nn.LSTM),
    "gru_attention": lambda: words(nn.GRU),
    "crnn": lambda: Made(Crnn(), [image(1, 32, 96)]),
    "seq2seq_greedy": lambda: Made(Seq2Seq(), [integers("x", "batch", 12, hi=300)]),
    "qrnn": lambda: Made(Qrnn(), [floats("x", "batch", 16, STEPS)]),
    "sru": lambda: steps(Sru()),
    "conv_lstm": lambda: Made(ConvLstm(), [floats("x", "batch", 6, 1, 24, 24)]),
    "layer_norm_lstm": lambda: steps(LayerNormLstm(), 16),
    "linear_attention": lambda: steps(Linear()),
    "performer": lambda: steps(Performer()),
    "linformer": lambda: steps(Linformer()),
    "rwkv": lambda: steps(Rwkv()),
    "mamba_scan": lambda: steps(Mamba()),
    "s4d": lambda: steps(Ssm()),
    "retention": lambda: steps(Retention()),
    "delta_rule": lambda: steps(DeltaNet()),
    "hyena": lambda: steps(Hyena()),
    "fnet_matrices": lambda: steps(FourierMixer()),
    "global_filter_fft": lambda: Made(TrueFourier(), [image(3, 56, 56)]),
    "mixer_permutator": lambda: Made(Mixer(), [image(3, 64, 64)]),
}
