"""Networks that read: BERT from transformers, GPT-2 in plain PyTorch, an LSTM."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.weights import jitter


class Tensors(nn.Module):
    """A module of transformers with tensors as operands and results."""

    def __init__(self, inner: nn.Module, names: tuple[str, ...], pick: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.names, self.pick = inner, names, pick

    def forward(self, *given: Tensor) -> Any:
        return self.pick(self.inner(**dict(zip(self.names, given))))


def bert(attention: str = "eager") -> nn.Module:
    """`attention`: of transformers; eager is spelled out in small ops, sdpa is PyTorch's kernel."""
    from transformers import BertConfig, BertModel

    inner = BertModel(BertConfig(attn_implementation=attention))
    names = ("input_ids", "attention_mask", "token_type_ids")
    return jitter(Tensors(inner, names, lambda o: (o.last_hidden_state, o.pooler_output)))


def minilm() -> nn.Module:
    from transformers import BertConfig, BertModel

    inner = BertModel(BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536))
    return jitter(Tensors(inner, ("input_ids", "attention_mask"), lambda o: o.last_hidden_state.mean(1)))


class Block(nn.Module):
    """A layer of GPT-2: attention over the cache and the new tokens, then the feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None, past: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        width = self.width  # a number: the tracer would take one of x.shape for an expression
        parts = self.qkv(self.norm1(x)).split(width, 2)
        q, k, v = (t.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in parts)
        if past:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        scores = q @ k.transpose(2, 3) / math.sqrt(width // self.heads)
        if mask is not None:
            scores = scores + mask
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), k, v


class Gpt2(nn.Module):
    """GPT-2 small. `cached`: takes keys and values of all layers, and returns them longer by the new tokens."""

    mask: Tensor

    def __init__(
        self,
        cached: bool,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocabulary: int = 50257,
        context: int = 1024,
    ) -> None:
        super().__init__()
        self.cached = cached
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks, self.norm = nn.ModuleList([Block(width, heads) for _ in range(layers)]), nn.LayerNorm(width)
        self.register_buffer("mask", torch.full((context, context), -1e9).triu(1), persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        length, before = ids.shape[1], past[0].shape[2] if self.cached else 0
        x = self.token(ids) + self.position(torch.arange(before, before + length, device=ids.device).unsqueeze(0))
        mask = None if self.cached else self.mask[:length, :length]
        cache: list[Tensor] = []
        for i, layer in enumerate(self.blocks):
            x, k, v = layer(x, mask, past[2 * i : 2 * i + 2])
            cache += [k, v]
        logits = F.linear(self.norm(x), self.token.weight)
        return (logits, *cache) if self.cached else (logits,)


def gpt2(cached: bool) -> nn.Module:
    return jitter(Gpt2(cached), 0.02)


class LstmModel(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, vocabulary: int = 10000, width: int = 512) -> None:
        super().__init__()
        self.token, self.cells = nn.Embedding(vocabulary, width), nn.LSTM(width, width, 2, batch_first=True)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.cells(self.token(ids), (h, c))
        return self.out(y).log_softmax(-1), h, c


def lstm_model() -> nn.Module:
    return LstmModel().eval()
