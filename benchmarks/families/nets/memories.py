"""Memories, routing, filters, solvers and decoders: nets whose steps are an algorithm."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.entry import Made, floats, image, integers

STEPS, WIDTH = 24, 48


class Hopfield(nn.Module):
    """Modern Hopfield retrieval: a few steps of softmax association with stored patterns, and its energy."""

    def __init__(self) -> None:
        super().__init__()
        self.patterns, self.first, self.last = (
            nn.Parameter(torch.randn(100, WIDTH)),
            nn.Linear(32, WIDTH),
            nn.Linear(WIDTH, 6),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        s = self.first(x)
        for _ in range(3):
            s = (s @ self.patterns.T / WIDTH**0.5).softmax(-1) @ self.patterns
        energy = -(s @ self.patterns.T).logsumexp(-1) + 0.5 * (s * s).sum(-1)
        return self.last(s), energy


class EnergyDescent(nn.Module):
    """Input-convex energy net; one step of descent with its gradient written out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.w = nn.Linear(16, 64), nn.Linear(16, 64), nn.Parameter(torch.rand(64, 64) / 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        u = self.a(x)
        z = F.softplus(u)
        v = z @ self.w + self.b(x)
        energy = F.softplus(v).sum(-1)
        dv = v.sigmoid()
        gradient = dv @ self.b.weight + ((dv @ self.w.T) * u.sigmoid()) @ self.a.weight
        return x - 0.1 * gradient, energy


class Capsules(nn.Module):
    """Capsules with three rounds of routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 32, 9), nn.Conv2d(32, 32, 9, 2)
        self.weight = nn.Parameter(torch.randn(1, 4 * 36, 10, 16, 8) * 0.1)

    def squash(self, x: Tensor) -> Tensor:
        n = (x * x).sum(-1, keepdim=True)
        return n / (1 + n) * x / (n + 1e-8).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        u = self.b(self.a(x).relu())
        u = self.squash(u.view(x.shape[0], 4, 8, 36).permute(0, 1, 3, 2).reshape(x.shape[0], 4 * 36, 8))
        votes = (self.weight @ u[:, :, None, :, None])[..., 0]
        logits = torch.zeros(x.shape[0], 4 * 36, 10)
        v = votes.sum(1)
        for k in range(3):
            v = self.squash((logits.softmax(-1)[..., None] * votes).sum(1))
            if k < 2:
                logits = logits + (votes * v[:, None]).sum(-1)
        return v.square().sum(-1).sqrt()


class Siamese(nn.Module):
    """Two images through shared weights: cosine and Euclidean distances, and a triplet's margin."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, 2, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(192, 32),
        )

    def forward(self, anchor: Tensor, same: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        a, p, n = self.net(anchor), self.net(same), self.net(other)
        return F.cosine_similarity(a, p), F.relu(F.pairwise_distance(a, p) - F.pairwise_distance(a, n) + 1.0)


class Memory(nn.Module):
    """End-to-end memory network: three hops over sentences of embedded words with position weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(200, 32) for _ in range(4)])
        j, d = torch.arange(1, 9).float()[:, None] / 8, torch.arange(1, 33).float() / 32
        self.register_buffer("weight", (1 - j) - d * (1 - 2 * j))

    def forward(self, story: Tensor, question: Tensor) -> Tensor:
        u = (self.tables[0](question) * self.weight).sum(1)
        for a, c in zip(self.tables, list(self.tables)[1:]):
            m, o = (a(story) * self.weight).sum(2), (c(story) * self.weight).sum(2)
            p = (m @ u[..., None])[..., 0].div(4).softmax(-1)
            u = u + (p[:, None] @ o)[:, 0]
        return u @ self.tables[3].weight.T


class Turing(nn.Module):
    """A neural Turing machine: content addressing, interpolation, shifts, sharpening; outer-product writes."""

    def __init__(self, rows: int = 16, width: int = 12) -> None:
        super().__init__()
        self.rows, self.width = rows, width
        self.cell, self.head, self.last = (
            nn.LSTMCell(8 + width, 32),
            nn.Linear(32, 3 * width + 6),
            nn.Linear(32 + width, 8),
        )
        self.start = nn.Parameter(torch.randn(rows, width) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        b, w = x.shape[0], self.width
        memory, weight, read = (
            self.start.expand(b, -1, -1),
            torch.full((b, self.rows), 1 / self.rows),
            torch.zeros(b, w),
        )
        state, out = (torch.zeros(b, 32), torch.zeros(b, 32)), []
        for t in range(8):
            state = self.cell(torch.cat([x[:, t], read], -1), state)
            p = self.head(state[0])
            key, erase, add = p[:, :w].tanh(), p[:, w : 2 * w].sigmoid(), p[:, 2 * w : 3 * w].tanh()
            beta, gate, power, shift = (
                F.softplus(p[:, -6:-5]),
                p[:, -5:-4].sigmoid(),
                1 + F.softplus(p[:, -4:-3]),
                p[:, -3:].softmax(-1),
            )
            content = (beta * F.cosine_similarity(memory, key[:, None], dim=-1)).softmax(-1)
            mixed = gate * content + (1 - gate) * weight
            mixed = shift[:, :1] * mixed.roll(1, -1) + shift[:, 1:2] * mixed + shift[:, 2:] * mixed.roll(-1, -1)
            sharp = (mixed + 1e-6) ** power
            weight = sharp / sharp.sum(-1, keepdim=True)
            memory = memory * (1 - weight[..., None] * erase[:, None]) + weight[..., None] * add[:, None]
            read = (weight[:, None] @ memory)[:, 0]
            out.append(self.last(torch.cat([state[0], read], -1)))
        return torch.stack(out, 1)


class Ode(nn.Module):
    """A neural ODE by Runge-Kutta steps of order four, on an augmented state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 16))

    def slope(self, t: float, x: Tensor) -> Tensor:
        return self.net(torch.cat([x, torch.full_like(x[:, :1], t)], -1))

    def forward(self, x: Tensor) -> Tensor:
        x, h = torch.cat([x, torch.zeros_like(x)], -1), 0.125
        for k in range(8):
            t = k * h
            a = self.slope(t, x)
            b = self.slope(t + h / 2, x + h / 2 * a)
            c = self.slope(t + h / 2, x + h / 2 * b)
            d = self.slope(t + h, x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return x


class Kalman(nn.Module):
    """A Kalman-like filter in four dimensions: predictions and updates, a 2x2 inverse in closed form."""

    def __init__(self) -> None:
        super().__init__()
        dynamics = torch.eye(4) + 0.1 * torch.eye(4).roll(2, 1).triu()
        self.register_buffer("f", dynamics)
        self.register_buffer("h", torch.eye(4)[:2])
        self.q, self.r = nn.Parameter(torch.rand(4) * 0.1 + 0.05), nn.Parameter(torch.rand(2) * 0.2 + 0.1)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        b = z.shape[0]
        x, p = torch.zeros(b, 4, 1), torch.eye(4).expand(b, 4, 4)
        out = []
        for t in range(10):
            x, p = self.f @ x, self.f @ p @ self.f.T + self.q.diag()
            s = self.h @ p @ self.h.T + self.r.diag()
            a, u, v, d = s[:, 0, 0], s[:, 0, 1], s[:, 1, 0], s[:, 1, 1]
            inverse = (
                torch.stack([torch.stack([d, -u], -1), torch.stack([-v, a], -1)], -2) / (a * d - u * v)[:, None, None]
            )
            gain = p @ self.h.T @ inverse
            x = x + gain @ (z[:, t, :, None] - self.h @ x)
            p = p - gain @ self.h @ p
            out.append(x[..., 0])
        return torch.stack(out, 1), p


class Sinkhorn(nn.Module):
    """Optimal matching of two sets (SuperGlue): cross attention, then log-domain Sinkhorn with a dustbin."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.norm, self.last = (
            nn.MultiheadAttention(WIDTH, 4, batch_first=True),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.bin = nn.Parameter(torch.tensor(0.5))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(a + self.cross(a, b, b, need_weights=False)[0])
        y = self.norm(b + self.cross(b, a, a, need_weights=False)[0])
        s = self.last(x) @ self.last(y).transpose(1, 2) / WIDTH**0.5
        s = F.pad(s, (0, 1, 0, 1)) + F.pad(torch.zeros_like(s), (0, 1, 0, 1), value=1.0) * self.bin
        u, v = torch.zeros_like(s[:, :, 0]), torch.zeros_like(s[:, 0])
        for _ in range(8):
            u = -(s + v[:, None]).logsumexp(2)
            v = -(s + u[..., None]).logsumexp(1)
        z = s + u[..., None] + v[:, None]
        return z.exp(), z[:, :-1, :-1].argmax(2)


class Pointer(nn.Module):
    """A pointer network: an LSTM's decoder chooses inputs one after another and masks what it chose."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.cell = nn.LSTM(2, 32, batch_first=True), nn.LSTMCell(2, 32)
        self.a, self.b, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        memory, (h, c) = self.encode(x)
        h, c, given = h[0], c[0], torch.zeros_like(x[:, 0])
        mask, keys, picked, total = torch.zeros_like(x[..., 0]), self.a(memory), [], torch.zeros(x.shape[0])
        for _ in range(10):
            h, c = self.cell(given, (h, c))
            scores = (self.v((keys + self.b(h)[:, None]).tanh())[..., 0] - 1e6 * mask).log_softmax(-1)
            value, k = scores.max(-1)
            mask = mask + F.one_hot(k, 10).float()
            given, total = x.gather(1, k[:, None, None].expand(-1, 1, 2))[:, 0], total + value
            picked.append(k)
        return torch.stack(picked, 1), total


class Crf(nn.Module):
    """Viterbi decoding of a linear-chain CRF over emissions of a GRU."""

    def __init__(self, tags: int = 9) -> None:
        super().__init__()
        self.embedding, self.rnn, self.last = (
            nn.Embedding(300, 32),
            nn.GRU(32, 32, batch_first=True, bidirectional=True),
            nn.Linear(64, tags),
        )
        self.transition = nn.Parameter(torch.randn(tags, tags))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        e = self.last(self.rnn(self.embedding(x))[0])
        score, back = e[:, 0], []
        for t in range(1, STEPS):
            score, k = (score[:, :, None] + self.transition).max(1)
            score = score + e[:, t]
            back.append(k)
        best, at = score.max(-1)
        path = [at]
        for k in reversed(back):
            at = k.gather(1, at[:, None])[:, 0]
            path.append(at)
        return best, torch.stack(path[::-1], 1)


NETS: dict[str, Callable[[], Made]] = {
    "hopfield": lambda: Made(Hopfield(), [floats("x", "batch", 32)]),
    "energy_descent": lambda: Made(EnergyDescent(), [floats("x", "batch", 16)]),
    "capsules": lambda: Made(Capsules(), [image(1, 28, 28)]),
    "siamese_triplet": lambda: Made(Siamese(), [image(3, 48, 48, n) for n in ("anchor", "same", "other")]),
    "memory_network": lambda: Made(
        Memory(), [integers("story", "batch", 20, 8, hi=200), integers("question", "batch", 8, hi=200)]
    ),
    "turing_machine": lambda: Made(Turing(), [floats("x", "batch", 8, 8)]),
    "neural_ode": lambda: Made(Ode(), [floats("x", "batch", 8)]),
    "kalman": lambda: Made(Kalman(), [floats("z", "batch", 10, 2)]),
    "sinkhorn_matching": lambda: Made(Sinkhorn(), [floats("a", "batch", 20, WIDTH), floats("b", "batch", 24, WIDTH)]),
    "pointer_network": lambda: Made(Pointer(), [floats("x", "batch", 10, 2)]),
    "crf_viterbi": lambda: Made(Crf(), [integers("x", "batch", STEPS, hi=300)]),
}
