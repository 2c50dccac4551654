"""A small GPT learns the reference that Python ships with, letter by letter, and goes on with a text.

    python examples/gpt.py [--target llvm|cuda] [--steps 500] [--width 96] [--blocks 3]

Blocks are those of GPT-2: layer norm ahead of causal attention and of two linear layers with GELU, and residual sums.
The program of a step has no loop over letters: `is_causal` of the attention hides what comes later.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn, optim

CONTEXT, BATCH, HEADS = 64, 16, 4
TEXT = np.array(["".join(topics[name] for name in sorted(topics))]).view(np.uint32)
LETTERS, NUMBERS = np.unique(TEXT, return_inverse=True)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        n, t, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(n, t, 3, HEADS, width // HEADS)
        q, k, v = (xp.swapaxes(parts[:, :, i], 1, 2) for i in range(3))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(xp.swapaxes(seen, 1, 2).reshape(n, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 96, blocks: int = 3) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(len(LETTERS), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, letters: Any) -> Any:
        """Logits [N, t, letters] of what follows each of `letters` [N, t]."""
        x = 0.1 * (self.letter(letters) + self.place.weight[: letters.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model(width: int = 96, blocks: int = 3) -> Any:
    return GPT(width, blocks)


def loss_of(net: Any, letters: Any, following: Any) -> Any:
    return F.cross_entropy(net(letters).reshape(-1, len(LETTERS)), following.reshape(-1))


def batches(rng: np.random.Generator, steps: int, size: int = BATCH, t: int = CONTEXT) -> Iterator[Any]:
    for _ in range(steps):
        at = rng.integers(0, len(NUMBERS) - t - 1, size)[:, None] + np.arange(t + 1)
        yield NUMBERS[at[:, :-1]], NUMBERS[at[:, 1:]]


def continued(net: Any, text: str, count: int, rng: np.random.Generator) -> str:
    """The text and `count` letters more, drawn by their probability; all calls are one program, of CONTEXT letters."""
    known = [int(np.searchsorted(LETTERS, ord(c))) for c in text]
    for _ in range(count):
        seen = known[-CONTEXT:]
        padded = np.array([seen + [0] * (CONTEXT - len(seen))])  # what follows is hidden from what comes before
        p = F.softmax(net(padded)[0, len(seen) - 1] / 0.8, dim=-1).numpy().astype(np.float64)
        known.append(int(rng.choice(len(p), p=p / p.sum())))
    return "".join(chr(LETTERS[k]) for k in known)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A small GPT learns Python's reference.")
    parser.add_argument("--target", default="llvm", help="llvm or cuda")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--letters", type=int, default=200, help="how many to write at the end")
    args = parser.parse_args(argv)
    dnnc.random.seed(0)
    rng = np.random.default_rng(0)
    net = model(args.width, args.blocks)
    optimizer = optim.AdamW([{"params": "*norm*", "weight_decay": 0.0}, {"params": "*"}], lr=3e-3, weight_decay=0.1)
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, args.steps)
    step = dnnc.train_step(loss_of, optimizer, net, target=args.target, clip_norm=1.0)
    losses = []
    for batch in (bar := dnnc.progress(batches(rng, args.steps, args.batch), total=args.steps)):
        losses.append(step(*batch))
        bar.tell(loss=losses[-1])
        schedule.step()
    print(continued(net.eval().to("cpu"), "The statement ", args.letters, rng))
    print(f"loss {float(losses[0]):.3f} -> {np.mean([float(x) for x in losses[-10:]]):.3f} nats a letter")


if __name__ == "__main__":
    main()
