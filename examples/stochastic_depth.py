"""Stochastic depth (Huang et al. 2016): in each step, Python's `if` decides which residual blocks run.

    python examples/stochastic_depth.py [--target llvm|cuda] [--steps 100] [--blocks 6]

A plain loop over blocks and a draw of Python: each pattern of blocks is a structure of its own, whose program is made
of kernels that are known. A block that is skipped costs nothing, neither forward nor backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from scikit import load_digits

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn, optim
from dnnc.array.lazy import PROGRAMS_MADE

BATCH, CHANNELS = 32, 8


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.GroupNorm(2, channels), nn.GroupNorm(2, channels)

    def forward(self, x: Any) -> Any:
        return self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))


class Net(nn.Module):
    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList([Block(CHANNELS) for _ in range(blocks)])
        self.head = nn.Linear(CHANNELS * 16, 10)

    def keep(self, k: int) -> float:
        """How probable it is that block k runs: the later the less, down to a half."""
        return 1 - 0.5 * (k + 1) / len(self.blocks)

    def forward(self, x: Any, runs: Any = None) -> Any:
        """Logits; `runs` are the numbers of the blocks that run, without them all do, as much as they were trained."""
        x = F.relu(self.first(x))
        for k, block in enumerate(self.blocks):
            if runs is None:
                x = F.relu(x + self.keep(k) * block(x))
            elif k in runs:
                x = F.relu(x + block(x))
        return self.head(F.max_pool2d(x, 2).reshape(x.shape[0], -1))


def model(blocks: int = 6) -> Any:
    return Net(blocks)


def loss_of(net: Any, x: Any, y: Any, runs: Any) -> Any:
    return F.cross_entropy(net(x, runs), y)


def batches(rng: np.random.Generator, steps: int, blocks: int = 6, size: int = BATCH) -> Iterator[tuple[Any, ...]]:
    """Images f32[size, 1, 8, 8], labels, and the blocks that run in this step."""
    x, y = load_digits(return_X_y=True)
    keep = 1 - 0.5 * np.arange(1, blocks + 1) / blocks
    for _ in range(steps):
        at = rng.integers(0, len(x), size)
        runs = tuple(int(k) for k in np.flatnonzero(rng.random(blocks) < keep))
        yield (x[at] / 16).astype(np.float32).reshape(-1, 1, 8, 8), y[at].astype(np.int64), runs


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A residual network with stochastic depth.")
    parser.add_argument("--target", default="llvm", help="llvm or cuda")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--batch", type=int, default=BATCH)
    args = parser.parse_args(argv)
    device = "cpu" if args.target == "llvm" else "cuda:0"
    dnnc.random.seed(0)
    net = model(args.blocks).to(device)
    optimizer = optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    rng = np.random.default_rng(0)
    patterns, losses, before = set(), [], PROGRAMS_MADE.compiled
    for x, y, runs in (bar := dnnc.progress(batches(rng, args.steps, args.blocks, args.batch), total=args.steps)):
        optimizer.zero_grad()
        loss = loss_of(net, xp.asarray(x, device=device), xp.asarray(y, device=device), runs)
        loss.backward()
        optimizer.step()
        patterns.add(runs)
        losses.append(float(loss))
        bar.tell(loss=losses[-1], blocks=len(runs))
    made = PROGRAMS_MADE.compiled - before
    print(f"{args.steps} steps of {len(patterns)} patterns of blocks, {made} programs")
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f}")


if __name__ == "__main__":
    main()
