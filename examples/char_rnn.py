"""A letter-by-letter LSTM with truncated backpropagation through time, as a define-by-run loop.

    python examples/char_rnn.py [--target llvm|cuda] [--steps 300]

The text runs through the network in one piece: the state of a step is where the next one begins. Gradients do not go
back for ever: `unchain_backward` cuts the history behind the state. Each iteration has the same structure, so its
program is compiled once.
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

ROWS, LENGTH = 16, 20
TEXT = np.array(["".join(topics[name] for name in sorted(topics))]).view(np.uint32)
LETTERS, NUMBERS = np.unique(TEXT, return_inverse=True)


class CharRNN(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 32)
        self.lstm = nn.LSTM(32, width, batch_first=True)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, letters: Any, state: Any = None) -> Any:
        """Logits of what follows each of `letters` [N, t], and the state after the last."""
        seen, state = self.lstm(self.embed(letters), state)
        return self.head(seen), state


def model(width: int = 96) -> Any:
    return CharRNN(width)


def loss_of(net: Any, letters: Any, following: Any, state: Any = None) -> Any:
    logits, _ = net(letters, state)
    return F.cross_entropy(logits.reshape(-1, len(LETTERS)), following.reshape(-1))


def batches(rng: np.random.Generator, steps: int, length: int = LENGTH) -> Iterator[tuple[np.ndarray, ...]]:
    """ROWS places of the text, `length` letters further in each step; and the letters that follow."""
    at = rng.integers(0, len(NUMBERS), ROWS)[:, None] + np.arange(length + 1)
    for k in range(steps):
        now = (at + k * length) % len(NUMBERS)
        yield NUMBERS[now[:, :-1]], NUMBERS[now[:, 1:]]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A letter-by-letter LSTM.")
    parser.add_argument("--target", default="llvm", help="llvm or cuda")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--length", type=int, default=LENGTH, help="letters between two cuts of the history")
    args = parser.parse_args(argv)
    device = "cpu" if args.target == "llvm" else "cuda:0"
    dnnc.random.seed(0)
    net = model(args.width).to(device)
    optimizer = optim.Adam(net.parameters(), lr=5e-3)
    rng = np.random.default_rng(0)
    state, losses = None, []
    for batch in (bar := dnnc.progress(batches(rng, args.steps, args.length), total=args.steps)):
        letters, following = (xp.asarray(a, device=device) for a in batch)
        logits, state = net(letters, state)
        loss = F.cross_entropy(logits.reshape(-1, len(LETTERS)), following.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        for part in state:
            part.unchain_backward()  # the next step's gradient ends here
        optim.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()  # loss, state and new weights: one program
        losses.append(float(loss))
        bar.tell(loss=losses[-1])
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} nats a letter")


if __name__ == "__main__":
    main()
