"""AlexNet on small images: digits in colour on coloured paper, 32 x 32.

    python examples/alexnet.py [--target llvm|cuda] [--steps 200] [--width 1.0]

The layers are those of Krizhevsky et al. (2012) with strides for small images: five convolutions, local response
normalization after the first two, overlapping pools, dropout between linear layers. Dropout draws in the compiled
program: each call of the step has another key.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from scikit import load_digits

import dnnc
import dnnc.nn.functional as F
from dnnc import nn, optim

BATCH = 32


def model(width: float = 1.0, dropout: float = 0.5) -> Any:
    """`width` scales all channels; 1 has a quarter of the paper's."""
    a, b, c, d = (max(4, int(n * width)) for n in (24, 64, 96, 256))
    return nn.Sequential(
        nn.Conv2d(3, a, 5, padding=2), nn.ReLU(), nn.LocalResponseNorm(5, k=2.0), nn.MaxPool2d(3, 2),
        nn.Conv2d(a, b, 5, padding=2), nn.ReLU(), nn.LocalResponseNorm(5, k=2.0), nn.MaxPool2d(3, 2),
        nn.Conv2d(b, c, 3, padding=1), nn.ReLU(),
        nn.Conv2d(c, c, 3, padding=1), nn.ReLU(),
        nn.Conv2d(c, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Flatten(), nn.Dropout(dropout), nn.Linear(9 * b, d), nn.ReLU(), nn.Dropout(dropout), nn.Linear(d, 10),
    )  # fmt: skip


def loss_of(net: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(net(x), y)


def batches(rng: np.random.Generator, steps: int, size: int = BATCH) -> Iterator[tuple[np.ndarray, ...]]:
    """Images f32[size, 3, 32, 32]: ink and paper have random colours, and the digit a random place."""
    digits, labels = load_digits(return_X_y=True)
    digits = (digits / 16).reshape(-1, 8, 8)
    for _ in range(steps):
        at = rng.integers(0, len(digits), size)
        ink = np.zeros((size, 1, 32, 32))
        for k, (row, column) in enumerate(rng.integers(0, 9, (size, 2))):
            ink[k, 0, row : row + 24, column : column + 24] = np.kron(digits[at[k]], np.ones((3, 3)))
        paper, pen = rng.uniform(-1, 0, (size, 3, 1, 1)), rng.uniform(0.5, 1.5, (size, 3, 1, 1))
        yield (paper + ink * (pen - paper)).astype(np.float32), labels[at].astype(np.int64)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="AlexNet on small images.")
    parser.add_argument("--target", default="llvm", help="llvm or cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=float, default=1.0, help="factor of all channels")
    parser.add_argument("--batch", type=int, default=BATCH)
    args = parser.parse_args(argv)
    dnnc.random.seed(0)
    rng = np.random.default_rng(0)
    net = model(args.width)
    step = dnnc.train_step(loss_of, optim.Adam(lr=1e-3), net, target=args.target)
    losses = []
    for batch in (bar := dnnc.progress(batches(rng, args.steps, args.batch), total=args.steps)):
        losses.append(step(*batch))
        bar.tell(loss=losses[-1])

    net.eval().to("cpu")
    ((x, y),) = batches(rng, 1, 100)
    print(
        f"loss {float(losses[0]):.3f} -> {float(loss_of(net, x, y)):.3f}, accuracy {float(F.accuracy(net(x), y)):.0%}"
    )


if __name__ == "__main__":
    main()
