"""Recommenders and nets for tables: embeddings with interactions, trees that are soft, attention over features."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.entry import Made, Row, floats, integers

FIELDS, CARDINALITY, DENSE = 8, 200, 13


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*[m for i, o in pairwise(sizes) for m in (nn.Linear(i, o), nn.ReLU())][:-1])


class Fields(nn.Module):
    """One table for all categorical fields, each with its own rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(FIELDS * CARDINALITY, width)
        self.register_buffer("start", torch.arange(FIELDS) * CARDINALITY)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x + self.start)


class Dlrm(nn.Module):
    """Dense features through a net, pairwise products with embeddings, upper triangle, a net on top."""

    def __init__(self) -> None:
        super().__init__()
        self.fields, self.bottom, self.top = Fields(16), mlp(DENSE, 64, 16), mlp(16 + 36, 64, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        d = self.bottom(dense).relu()
        z = torch.cat([d[:, None], self.fields(sparse)], 1)
        i, j = torch.triu_indices(FIELDS + 1, FIELDS + 1, 1)
        return self.top(torch.cat([d, (z @ z.transpose(1, 2))[:, i, j]], 1)).sigmoid()


class DeepFm(nn.Module):
    """A factorisation machine by squares of sums, and a net."""

    def __init__(self) -> None:
        super().__init__()
        self.fields, self.linear, self.deep = Fields(12), Fields(1), mlp(12 * FIELDS + DENSE, 64, 32, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        e = self.fields(sparse)
        pairs = 0.5 * (e.sum(1) ** 2 - (e * e).sum(1)).sum(-1, keepdim=True)
        return (pairs + self.linear(sparse).sum(1) + self.deep(torch.cat([e.flatten(1), dense], 1))).sigmoid()


class Cross(nn.Module):
    """Deep and cross net: x0 * (W x + b) + x, with low rank."""

    def __init__(self, rank: int = 16) -> None:
        super().__init__()
        width = 12 * FIELDS + DENSE
        self.fields = Fields(12)
        self.down, self.up = (
            nn.ModuleList([nn.Linear(width, rank, bias=False) for _ in range(3)]),
            nn.ModuleList([nn.Linear(rank, width) for _ in range(3)]),
        )
        self.deep, self.last = mlp(width, 64, 32), nn.Linear(width + 32, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x0 = x = torch.cat([self.fields(sparse).flatten(1), dense], 1)
        for down, up in zip(self.down, self.up):
            x = x0 * up(down(x)) + x
        return self.last(torch.cat([x, self.deep(x0)], 1)).sigmoid()


class XDeepFm(nn.Module):
    """Compressed interactions: outer products along fields, convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.fields = Fields(10)
        self.convs = nn.ModuleList([nn.Conv1d(FIELDS * h, 16, 1) for h in (FIELDS, 16)])
        self.last = nn.Linear(32, 1)

    def forward(self, sparse: Tensor) -> Tensor:
        x0 = h = self.fields(sparse)
        out = []
        for conv in self.convs:
            h = conv(torch.einsum("bhd,bmd->bhmd", h, x0).flatten(1, 2)).relu()
            out.append(h.sum(-1))
        return self.last(torch.cat(out, 1)).sigmoid()


class NeuralCf(nn.Module):
    """Neural collaborative filtering: products and a net of user and item."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.i, self.u2, self.i2 = (nn.Embedding(n, 16) for n in (500, 800, 500, 800))
        self.net, self.last = mlp(32, 64, 16), nn.Linear(32, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.last(
            torch.cat([self.u(user) * self.i(item), self.net(torch.cat([self.u2(user), self.i2(item)], -1))], -1)
        ).sigmoid()


class TwoTower(nn.Module):
    """A query against a catalogue of items: normalized towers, all products, the ten best."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.item = mlp(48, 64, 32), mlp(24, 64, 32)
        self.catalogue = nn.Parameter(torch.randn(2000, 24))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, items = F.normalize(self.query(x), dim=-1), F.normalize(self.item(self.catalogue), dim=-1)
        scores, at = (q @ items.T / 0.1).topk(10, -1)
        return scores, at


class Interest(nn.Module):
    """DIN: attention of a candidate over a history by a net on both, Dice-like activation, masked sum."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.score = nn.Embedding(500, 16), mlp(64, 32, 1)
        self.norm, self.alpha, self.deep = (
            nn.BatchNorm1d(32, affine=False),
            nn.Parameter(torch.rand(32)),
            nn.Linear(48, 32),
        )
        self.last = nn.Linear(32, 1)

    def forward(self, history: Tensor, valid: Tensor, candidate: Tensor) -> Tensor:
        h, c = self.items(history), self.items(candidate)
        q = c[:, None].expand_as(h)
        w = self.score(torch.cat([q, h, q - h, q * h], -1))[..., 0]
        w = torch.where(valid > 0, w, torch.zeros_like(w))
        user = (w[..., None] * h).sum(1)
        x = self.deep(torch.cat([user, c, user * c], -1))
        p = self.norm(x).sigmoid()
        return self.last(p * x + (1 - p) * self.alpha * x).sigmoid()


class Evolution(nn.Module):
    """DIEN and SASRec: a GRU over a history, then causal attention; the last valid step against all items."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.gru, self.attention = (
            nn.Embedding(500, 32),
            nn.GRU(32, 32, batch_first=True),
            nn.MultiheadAttention(32, 2, batch_first=True),
        )
        self.norm = nn.LayerNorm(32)

    def forward(self, history: Tensor) -> Tensor:
        h = self.gru(self.items(history))[0]
        n = h.shape[1]
        causal = torch.ones(n, n, dtype=torch.bool).triu(1)
        h = self.norm(h + self.attention(h, h, h, attn_mask=causal, need_weights=False)[0])
        return h[:, -1] @ self.items.weight.T


class FeatureTransformer(nn.Module):
    """FT-Transformer: every number is a token by its own weight, attention, the first token decides."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(DENSE, width)), nn.Parameter(torch.randn(DENSE, width))
        self.fields, self.first = Fields(width), nn.Parameter(torch.randn(1, 1, width))
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(width, 4, 64, activation="gelu", batch_first=True, norm_first=True)
                for _ in range(2)
            ]
        )
        self.last = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = torch.cat(
            [
                self.first.expand(dense.shape[0], -1, -1),
                dense[..., None] * self.weight + self.bias,
                self.fields(sparse),
            ],
            1,
        )
        for layer in self.layers:
            x = layer(x)
        return self.last(x[:, 0])


def sparsemax(x: Tensor) -> Tensor:
    """Projection onto the simplex by a sort and a cumulative sum."""
    z, _ = x.sort(-1, descending=True)
    total = z.cumsum(-1)
    k = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    size = (1 + k * z > total).to(x.dtype).sum(-1, keepdim=True)
    tau = (total.gather(-1, size.long() - 1) - 1) / size
    return (x - tau).clamp(min=0)


class TabNet(nn.Module):
    """Steps with sparse masks over features, gated linear units, prior scales."""

    def __init__(self, width: int = 16, steps: int = 3) -> None:
        super().__init__()
        self.norm, self.shared = nn.BatchNorm1d(DENSE), nn.Linear(DENSE, 4 * width)
        self.own = nn.ModuleList(
            [nn.Sequential(nn.BatchNorm1d(2 * width), nn.Linear(2 * width, 4 * width)) for _ in range(steps + 1)]
        )
        self.attend = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, DENSE), nn.BatchNorm1d(DENSE)) for _ in range(steps)]
        )
        self.last, self.width = nn.Linear(width, 4), width

    def features(self, k: int, x: Tensor) -> Tensor:
        h = F.glu(self.shared(x), -1)
        return (h + F.glu(self.own[k](h), -1)) * 0.5**0.5

    def forward(self, dense: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(dense)
        a, prior, total, masks = (
            self.features(0, x)[:, self.width :],
            torch.ones_like(x),
            torch.zeros(1),
            torch.zeros(1),
        )
        for k, attend in enumerate(self.attend):
            mask = sparsemax(attend(a) * prior)
            prior = prior * (1.3 - mask)
            d, a = self.features(k + 1, x * mask).chunk(2, -1)
            total, masks = total + d.relu(), masks + mask
        return self.last(total), masks


class Oblivious(nn.Module):
    """NODE: soft oblivious trees, whose leaves are products over the bins of every level."""

    def __init__(self, trees: int = 24, depth: int = 4) -> None:
        super().__init__()
        self.depth, self.trees = depth, trees
        self.choice, self.threshold = (
            nn.Parameter(torch.randn(DENSE, trees * depth)),
            nn.Parameter(torch.randn(trees, depth) * 0.5),
        )
        self.temperature, self.response = (
            nn.Parameter(torch.rand(trees, depth) + 0.5),
            nn.Parameter(torch.randn(trees, 2**depth, 3)),
        )
        codes = (torch.arange(2**depth)[:, None] >> torch.arange(depth)) & 1
        self.register_buffer("codes", codes.float())

    def forward(self, dense: Tensor) -> Tensor:
        f = (dense @ self.choice.softmax(0)).view(-1, self.trees, self.depth)
        right = ((f - self.threshold) / self.temperature * 4).clamp(-0.5, 0.5) + 0.5
        leaf = (right[:, :, None] * self.codes + (1 - right[:, :, None]) * (1 - self.codes)).prod(-1)
        return torch.einsum("btl,tlc->bc", leaf, self.response)


class Experts(nn.Module):
    """Multi-gate mixture of experts: three tasks, six experts, a softmax per task."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([mlp(DENSE, 32, 16) for _ in range(6)])
        self.gates, self.towers = (
            nn.ModuleList([nn.Linear(DENSE, 6) for _ in range(3)]),
            nn.ModuleList([mlp(16, 16, 1) for _ in range(3)]),
        )

    def forward(self, dense: Tensor) -> Tensor:
        e = torch.stack([f(dense) for f in self.experts], 1)
        return torch.cat([t((g(dense).softmax(-1)[..., None] * e).sum(1)) for g, t in zip(self.gates, self.towers)], -1)


class SparseExperts(nn.Module):
    """Two of eight experts per token by top-k, tokens kept in a dense dispatch."""

    def __init__(self, width: int = 32, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, width, 64) / 6),
            nn.Parameter(torch.randn(experts, 64, width) / 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        value, at = self.router(x).topk(2, -1)
        weight = torch.zeros(*x.shape[:-1], self.up.shape[0]).scatter(-1, at, value.softmax(-1))
        h = F.silu(torch.einsum("btd,edf->btef", x, self.up))
        return x + torch.einsum("btef,efd,bte->btd", h, self.down, weight)


class BagOfItems(nn.Module):
    """Embedding bags from flat lists with offsets given as sorted segments."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(1000, 32), mlp(64, 32, 1)

    def forward(self, items: Tensor, segment: Tensor) -> Tensor:
        e = self.table(items)
        at = segment[:, None].expand(-1, 32)
        total = torch.zeros(64, 32).scatter_add(0, at, e)
        largest = torch.zeros(64, 32).scatter_reduce(0, at, e, "amax", include_self=True)
        return self.net(torch.cat([total, largest], -1)).sigmoid()


def dense() -> Row:
    return floats("dense", "batch", DENSE)


def sparse() -> Row:
    return integers("sparse", "batch", FIELDS, hi=CARDINALITY)


def interest() -> Made:
    valid = {"name": "valid", "dtype": "int64", "shape": ["batch", 20], "prefix": True}
    return Made(Interest(), [integers("history", "batch", 20, hi=500), valid, integers("candidate", "batch", hi=500)])


NETS: dict[str, Callable[[], Made]] = {
    "dlrm": lambda: Made(Dlrm(), [dense(), sparse()]),
    "deepfm": lambda: Made(DeepFm(), [dense(), sparse()]),
    "dcn": lambda: Made(Cross(), [dense(), sparse()]),
    "xdeepfm": lambda: Made(XDeepFm(), [sparse()]),
    "ncf": lambda: Made(NeuralCf(), [integers("user", "batch", hi=500), integers("item", "batch", hi=800)]),
    "two_tower": lambda: Made(TwoTower(), [floats("x", "batch", 48)]),
    "din": interest,
    "sasrec_gru": lambda: Made(Evolution(), [integers("history", "batch", 30, hi=500)]),
    "ft_transformer": lambda: Made(FeatureTransformer(), [dense(), sparse()]),
    "tabnet": lambda: Made(TabNet(), [dense()]),
    "node_trees": lambda: Made(Oblivious(), [dense()]),
    "mmoe": lambda: Made(Experts(), [dense()]),
    "sparse_experts": lambda: Made(SparseExperts(), [floats("x", "batch", 20, 32)]),
    "embedding_bag": lambda: Made(
        BagOfItems(), [integers("items", "items:600", hi=1000), integers("segment", "items:600", hi=64, sorted=True)]
    ),
}
