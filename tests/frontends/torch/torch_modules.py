"""Small modules of the kinds that people write, and example inputs for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.b(F.relu(self.n(self.a(x)))))


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d))


class Padded(nn.Module):
    """An encoder whose sequences end early."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
        )

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.body(x, src_key_padding_mask=hidden)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **more: Any) -> None:
        super().__init__()
        self.body = kind(5, 6, batch_first=True, **more)

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


class Routed(nn.Module):
    """The two best of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8, 8) * 0.2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        weight, at = torch.topk(self.gate(x).softmax(-1), 2)
        dense = torch.zeros_like(self.gate(x)).scatter(1, at, weight)
        y = torch.einsum("be,eij,bj->bi", dense, self.experts, x)
        return {"y": y, "chosen": at}


class Several(nn.Module):
    """Nested arguments and results, one of them a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, pair: tuple[Tensor, Tensor], *, flag: bool = True) -> dict[str, Any]:
        x, y = pair
        return {"sum": (x + y) * self.scale, "parts": [x, (y, 3)], "none": None} if flag else {"sum": x}


Made = tuple[nn.Module, tuple[Any, ...]]


def image(*shape: int) -> Tensor:
    return torch.randn(shape)


MODULES: dict[str, Callable[[], Made]] = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3), nn.Softmax(-1)),
        (image(4, 6),),
    ),
    "cnn": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 5),
        ),
        (image(2, 3, 16, 16),),
    ),
    "residual": lambda: (Residual(), (image(2, 3, 8, 8),)),
    "encoder": lambda: (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu"), (image(2, 5, 16),)),
    "padded encoder": lambda: (Padded(), (image(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]]))),
    "causal": lambda: (Causal(), (image(2, 5, 16),)),
    "multi-head": lambda: (
        nn.MultiheadAttention(16, 2, batch_first=True),
        (image(2, 5, 16), image(2, 7, 16), image(2, 7, 16)),
    ),
    "lstm": lambda: (Recurrent(nn.LSTM, num_layers=2, bidirectional=True), (image(2, 7, 5),)),
    "gru": lambda: (Recurrent(nn.GRU, bias=False), (image(2, 7, 5),)),
    "rnn": lambda: (Recurrent(nn.RNN), (image(2, 7, 5),)),
    "lstm cell": lambda: (nn.LSTMCell(5, 6), (image(2, 5),)),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(10, 6, padding_idx=0), nn.Linear(6, 3)),
        (torch.randint(10, (2, 4)),),
    ),
    "transposed": lambda: (
        nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.GroupNorm(2, 4), nn.SiLU(), nn.Upsample(scale_factor=2)),
        (image(1, 3, 4, 4),),
    ),
    "resized": lambda: (
        nn.Sequential(nn.Conv2d(3, 2, 1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.InstanceNorm2d(2)),
        (image(1, 3, 4, 4),),
    ),
    "separable": lambda: (
        nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Hardswish(), nn.Conv2d(4, 8, 1), nn.PReLU(8)),
        (image(1, 4, 6, 6),),
    ),
    "routed": lambda: (Routed(), (image(3, 8),)),
    "several": lambda: (Several(), ((image(2, 3), image(2, 3)),)),
}


def made(name: str) -> Made:
    """A module of the table in eval mode, with batch norms that are not trivial."""
    torch.manual_seed(7)
    module, args = MODULES[name]()
    with torch.no_grad():
        for m in module.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_(std=0.3)
                m.running_var.uniform_(0.5, 1.5)
    return module.eval(), args
