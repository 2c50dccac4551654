"""Graph networks: messages along edges, joined by scatters, segments, dense adjacency or tables."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.entry import Made, Row, edges, floats, integers

NODES, EDGES, WIDTH = 200, 1000, 64


def scatter_add(x: Tensor, index: Tensor, nodes: int) -> Tensor:
    """[edges, width] -> [nodes, width], by the operator that exporters know best."""
    return torch.zeros(nodes, x.shape[1], dtype=x.dtype).scatter_add(0, index[:, None].expand(-1, x.shape[1]), x)


def scatter_reduce(x: Tensor, index: Tensor, nodes: int, how: str) -> Tensor:
    base = torch.zeros(nodes, x.shape[1], dtype=x.dtype)
    return base.scatter_reduce(0, index[:, None].expand(-1, x.shape[1]), x, how, include_self=how == "sum")


def segment_softmax(scores: Tensor, index: Tensor, nodes: int) -> Tensor:
    """A softmax over the edges of each target. scores: [edges, heads]."""
    largest = scatter_reduce(scores, index, nodes, "amax")[index]
    e = (scores - largest).exp()
    return e / (scatter_add(e, index, nodes)[index] + 1e-16)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Gcn(nn.Module):
    """Graph convolution (Kipf and Welling): degrees are counted by a scatter, then symmetric normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index[0], edge_index[1]
        n = x.shape[0]
        degree = torch.ones(n).index_add(0, target, torch.ones(target.shape[0]))
        scale = degree.rsqrt()
        weight = (scale[source] * scale[target])[:, None]
        for k, layer in enumerate(self.layers):
            h = layer(x)
            x = torch.zeros_like(h).index_add(0, target, h[source] * weight) + h * (scale * scale)[:, None]
            x = x.relu() if k < 2 else x
        return x.log_softmax(-1)


class Gat(nn.Module):
    """Graph attention: scores per edge and head, segment softmax, weighted sum."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, WIDTH // heads
        self.project = nn.ModuleList([nn.Linear(32, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.score = nn.ParameterList([nn.Parameter(torch.randn(2, heads, self.width) * 0.3) for _ in range(2)])
        self.last = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index[0], edge_index[1]
        n = x.shape[0]
        for project, a in zip(self.project, self.score):
            h = project(x).view(-1, self.heads, self.width)
            s = (h * a[0]).sum(-1)[source] + (h * a[1]).sum(-1)[target]
            weight = segment_softmax(F.leaky_relu(s, 0.2), target, n)
            x = F.elu(scatter_add((h[source] * weight[:, :, None]).reshape(-1, WIDTH), target, n))
        return self.last(x)


class GatV2(nn.Module):
    """Attention scores from a layer over both ends (Brody et al.), edge features included."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.edge = nn.Linear(32, WIDTH), nn.Linear(32, WIDTH), nn.Linear(8, WIDTH)
        self.score, self.last = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor, edge_index: Tensor, attributes: Tensor) -> Tensor:
        source, target = edge_index[0], edge_index[1]
        left, right = self.left(x), self.right(x)
        s = self.score(F.leaky_relu(left[source] + right[target] + self.edge(attributes), 0.2))
        weight = segment_softmax(s, target, x.shape[0])
        return self.last(scatter_add(left[source] * weight, target, x.shape[0]))


class Gin(nn.Module):
    """Isomorphism network on a batch of graphs: sum of neighbours, MLP, then a sum of nodes by graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp(32, WIDTH, WIDTH), mlp(WIDTH, WIDTH, WIDTH), mlp(WIDTH, WIDTH, WIDTH)])
        self.eps, self.last = nn.Parameter(torch.tensor([0.1, 0.2, -0.1])), nn.Linear(3 * WIDTH, 2)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor) -> Tensor:
        pooled = []
        for k, layer in enumerate(self.layers):
            around = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
            x = layer((1 + self.eps[k]) * x + around).relu()
            pooled.append(torch.zeros(16, WIDTH).index_add(0, graph, x))
        return self.last(torch.cat(pooled, 1))


class Sage(nn.Module):
    """GraphSAGE with the mean or the maximum of neighbours."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.own = nn.ModuleList([nn.Linear(32, WIDTH), nn.Linear(WIDTH, 16)])
        self.other = nn.ModuleList([nn.Linear(32, WIDTH), nn.Linear(WIDTH, 16)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for k, (own, other) in enumerate(zip(self.own, self.other)):
            around = scatter_reduce(x[edge_index[0]], edge_index[1], x.shape[0], self.how)
            x = F.normalize(own(x) + other(around), dim=-1)
            x = x.relu() if k == 0 else x
        return x


class SageTable(nn.Module):
    """GraphSAGE over a table of sampled neighbours, as in serving: a gather and a mean, no scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, WIDTH), nn.Linear(2 * WIDTH, 16)

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        x = self.first(torch.cat([x, x[neighbours].mean(1)], -1)).relu()
        return self.second(torch.cat([x, x[neighbours].amax(1)], -1))


class EdgeConv(nn.Module):
    """DGCNN: nearest neighbours in feature space, edges from differences, the maximum over neighbours."""

    def __init__(self, k: int = 8) -> None:
        super().__init__()
        self.k = k
        self.convs = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(2 * i, o, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2))
                for i, o in ((3, 32), (32, 64))
            ]
        )
        self.last = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for conv in self.convs:
            square = (x * x).sum(1)
            distance = square[:, :, None] + square[:, None, :] - 2 * x.transpose(1, 2) @ x
            near = distance.topk(self.k, -1, largest=False).indices
            b, c, n = x.shape
            flat = near.reshape(b, 1, n * self.k).expand(-1, c, -1)
            other = x.gather(2, flat).view(b, c, n, self.k)
            own = x[:, :, :, None].expand_as(other)
            x = conv(torch.cat([own, other - own], 1)).amax(-1)
            out.append(x)
        return self.last(torch.cat(out, 1).amax(-1))


class MessagePassing(nn.Module):
    """Neural message passing (Gilmer et al.): weights of messages from edge features, GRU updates, gated sum."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.width = width
        self.first, self.message = nn.Linear(16, width), mlp(6, 48, width * width)
        self.update, self.gate, self.last = nn.GRUCell(width, width), nn.Linear(width + 16, 32), nn.Linear(width, 32)

    def forward(self, x: Tensor, edge_index: Tensor, attributes: Tensor) -> Tensor:
        h = self.first(x).relu()
        weight = self.message(attributes).view(-1, self.width, self.width)
        for _ in range(3):
            m = torch.bmm(h[edge_index[0]][:, None], weight)[:, 0] / self.width**0.5
            h = self.update(torch.zeros_like(h).index_add(0, edge_index[1], m), h)
        return (self.gate(torch.cat([h, x], -1)).sigmoid() * self.last(h)).sum(0, keepdim=True)


class MeshGraph(nn.Module):
    """MeshGraphNet: edges and nodes updated in turns by MLPs with layer norms, residually."""

    def __init__(self) -> None:
        super().__init__()

        def block(i: int) -> nn.Module:
            return nn.Sequential(mlp(i, WIDTH, WIDTH), nn.LayerNorm(WIDTH))

        self.nodes, self.edges = block(12), block(4)
        self.node_steps = nn.ModuleList([block(2 * WIDTH) for _ in range(4)])
        self.edge_steps = nn.ModuleList([block(3 * WIDTH) for _ in range(4)])
        self.last = mlp(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor, edge_index: Tensor, attributes: Tensor) -> Tensor:
        source, target = edge_index[0], edge_index[1]
        h, e = self.nodes(x), self.edges(attributes)
        for node_step, edge_step in zip(self.node_steps, self.edge_steps):
            e = e + edge_step(torch.cat([e, h[source], h[target]], -1))
            h = h + node_step(torch.cat([h, scatter_add(e, target, x.shape[0])], -1))
        return self.last(h)


class SchNet(nn.Module):
    """Continuous filters over distances of atoms, in radial basis functions, and a sum per molecule."""

    offsets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.register_buffer("offsets", torch.linspace(0, 5, 32))
        self.filters = nn.ModuleList([mlp(32, WIDTH, WIDTH) for _ in range(3)])
        self.before = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
        self.after = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        )
        self.last = nn.Sequential(nn.Linear(WIDTH, 32), nn.Softplus(), nn.Linear(32, 1))

    def forward(self, z: Tensor, position: Tensor, edge_index: Tensor, graph: Tensor) -> Tensor:
        source, target = edge_index[0], edge_index[1]
        distance = ((position[source] - position[target]) ** 2).sum(-1).add(1e-6).sqrt()
        basis = torch.exp(-10 * (distance[:, None] - self.offsets) ** 2)
        cutoff = 0.5 * (torch.cos(distance * torch.pi / 5) + 1) * (distance < 5).float()
        h = self.embedding(z)
        for f, before, after in zip(self.filters, self.before, self.after):
            m = before(h)[source] * f(basis) * cutoff[:, None]
            h = h + after(scatter_add(m, target, z.shape[0]))
        return scatter_add(self.last(h), graph, 16)


class Egnn(nn.Module):
    """Equivariant network: features and positions are updated together."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.messages = nn.ModuleList(
            [nn.Sequential(nn.Linear(65, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU()) for _ in range(3)]
        )
        self.moves = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1)) for _ in range(3)])
        self.updates = nn.ModuleList([nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 32)) for _ in range(3)])

    def forward(self, x: Tensor, position: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        source, target = edge_index[0], edge_index[1]
        h = self.first(x)
        for message, move, update in zip(self.messages, self.moves, self.updates):
            d = position[target] - position[source]
            square = (d * d).sum(-1, keepdim=True)
            m = message(torch.cat([h[target], h[source], square], -1))
            position = position + scatter_add(d / (square.sqrt() + 1) * move(m), target, x.shape[0]) / 8
            h = h + update(torch.cat([h, scatter_add(m, target, x.shape[0])], -1))
        return h, position


class Rgcn(nn.Module):
    """Relational graph convolution: a weight matrix per relation from a basis, chosen by the edge's type."""

    def __init__(self, relations: int = 5, bases: int = 3) -> None:
        super().__init__()
        self.basis, self.mix = (
            nn.Parameter(torch.randn(bases, 32, WIDTH) / 6),
            nn.Parameter(torch.randn(relations, bases)),
        )
        self.own, self.last = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, edge_index: Tensor, kind: Tensor) -> Tensor:
        weight = torch.einsum("rb,bio->rio", self.mix, self.basis)
        every = torch.einsum("ni,rio->nro", x, weight)
        m = every[edge_index[0], kind]
        return self.last((self.own(x) + scatter_reduce(m, edge_index[1], x.shape[0], "mean")).relu())


class Appnp(nn.Module):
    """Personalised propagation: an MLP, then ten steps of a dense normalized adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp(32, WIDTH, 7)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        a = (adjacency > 0.95).float() + torch.eye(adjacency.shape[0])
        scale = a.sum(1).rsqrt()
        a = a * scale[:, None] * scale[None, :]
        h = z = self.mlp(x)
        for _ in range(10):
            z = 0.9 * (a @ z) + 0.1 * h
        return z


class DiffPool(nn.Module):
    """Dense graphs that are pooled by learned assignments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.assign, self.second, self.last = (
            nn.Linear(32, WIDTH),
            nn.Linear(32, 16),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        a = (adjacency > 0.9).float()
        a = a / (a.sum(-1, keepdim=True) + 1)
        z, s = (a @ self.embed(x)).relu(), (a @ self.assign(x)).softmax(-1)
        x, a = s.transpose(1, 2) @ z, s.transpose(1, 2) @ a @ s
        return self.last((a @ self.second(x)).relu().amax(1))


class GraphTransformer(nn.Module):
    """Attention over all nodes with a bias from distances of a table (Graphormer)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias = nn.Linear(16, WIDTH), nn.Embedding(8, 4)
        self.degree = nn.Embedding(12, WIDTH)
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.up, self.down = (
            nn.ModuleList([nn.Linear(WIDTH, 128) for _ in range(2)]),
            nn.ModuleList([nn.Linear(128, WIDTH) for _ in range(2)]),
        )
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(4)])

    def forward(self, x: Tensor, degree: Tensor, distance: Tensor) -> Tensor:
        h = self.first(x) + self.degree(degree)
        bias = self.bias(distance).permute(0, 3, 1, 2)
        for k in range(2):
            b, n, _ = h.shape
            q, key, v = self.qkv[k](self.norms[2 * k](h)).view(b, n, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
            h = h + ((q @ key.transpose(2, 3) / 4 + bias).softmax(-1) @ v).transpose(1, 2).reshape(b, n, WIDTH)
            h = h + self.down[k](F.gelu(self.up[k](self.norms[2 * k + 1](h))))
        return h.mean(1)


class TopKPool(nn.Module):
    """Graph pooling that keeps the best nodes by score, and the induced dense adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.score, self.last = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        a = (adjacency > 0.9).float()
        h = (a @ self.first(x) / 6).relu()
        value, kept = self.score(h)[..., 0].topk(25, -1)
        h = h.gather(1, kept[:, :, None].expand(-1, -1, WIDTH)) * value.tanh()[:, :, None]
        a = a.gather(1, kept[:, :, None].expand(-1, -1, a.shape[2])).gather(2, kept[:, None, :].expand(-1, 25, -1))
        return self.last((a @ h).mean(1))


class LightGcn(nn.Module):
    """Recommendation by propagation over a bipartite graph with a sorted list of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(500, 32) * 0.3)

    def forward(self, edge_index: Tensor, users: Tensor, items: Tensor) -> Tensor:
        source, target = edge_index[0], edge_index[1]
        degree = torch.ones(500).index_add(0, target, torch.ones(target.shape[0]))
        h, total = self.embedding, self.embedding
        for _ in range(3):
            h = torch.zeros(500, 32).index_add(0, target, h[source] / degree[source][:, None])
            total = total + h
        return (total[users] * total[items]).sum(-1)


def nodes(width: int = 32) -> Row:
    return floats("x", f"nodes:{NODES}", width)


def on_edges(module: nn.Module, *more: Row, width: int = 32) -> Made:
    return Made(module, [nodes(width), edges(NODES, EDGES), *more])


def attributes(width: int) -> Row:
    return floats("attributes", f"edges:{EDGES}", width)


def graph_of_nodes() -> Row:
    return integers("graph", f"nodes:{NODES}", hi=16, sorted=True)


def dense(module: nn.Module, count: int = 50) -> Made:
    return Made(module, [floats("x", "batch", count, 32), floats("adjacency", "batch", count, count, lo=0.0, hi=1.0)])


def schnet() -> Made:
    return Made(
        SchNet(),
        [
            integers("z", f"nodes:{NODES}", hi=20),
            floats("position", f"nodes:{NODES}", 3, scale=2.0),
            edges(NODES, EDGES),
            graph_of_nodes(),
        ],
    )


def graphormer() -> Made:
    n = 40
    return Made(
        GraphTransformer(),
        [floats("x", "batch", n, 16), integers("degree", "batch", n, hi=12), integers("distance", "batch", n, n, hi=8)],
    )


NETS: dict[str, Callable[[], Made]] = {
    "gcn": lambda: on_edges(Gcn()),
    "gat": lambda: on_edges(Gat()),
    "gatv2": lambda: on_edges(GatV2(), attributes(8)),
    "gin": lambda: on_edges(Gin(), graph_of_nodes()),
    "sage_mean": lambda: on_edges(Sage("mean")),
    "sage_max": lambda: on_edges(Sage("amax")),
    "sage_table": lambda: Made(SageTable(), [nodes(), integers("neighbours", f"nodes:{NODES}", 10, hi=NODES)]),
    "edgeconv": lambda: Made(EdgeConv(), [floats("x", "batch", 3, 128)]),
    "mpnn": lambda: on_edges(MessagePassing(), attributes(6), width=16),
    "meshgraphnet": lambda: on_edges(MeshGraph(), attributes(4), width=12),
    "schnet": schnet,
    "egnn": lambda: Made(Egnn(), [nodes(16), floats("position", f"nodes:{NODES}", 3), edges(NODES, EDGES)]),
    "rgcn": lambda: on_edges(Rgcn(), integers("kind", f"edges:{EDGES}", hi=5)),
    "appnp": lambda: Made(Appnp(), [floats("x", 100, 32), floats("adjacency", 100, 100, lo=0.0, hi=1.0)]),
    "diffpool": lambda: dense(DiffPool()),
    "graphormer": graphormer,
    "topk_pool": lambda: dense(TopKPool()),
    "lightgcn": lambda: Made(
        LightGcn(), [edges(500, 2000), integers("users", "batch", hi=300), integers("items", "batch", lo=300, hi=500)]
    ),
}
