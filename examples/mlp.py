"""A multi-layer perceptron learns scikit-learn's handwritten digits; a step is one compiled program.

    python examples/mlp.py [--target llvm|cuda] [--steps 600]

`dnnc.train_step` compiles forward pass, backward pass and update, and holds the state where it is computed. The
schedule changes the learning rate from step to step, which compiles nothing. Dropout and smoothed labels bring the
accuracy on digits that it has not seen from 97 to 98 %.
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

BATCH = 64


def model(hidden: int = 128, dropout: float = 0.2) -> Any:
    return nn.Sequential(
        nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10),
    )  # fmt: skip


def loss_of(net: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(net(x), y, label_smoothing=0.1)


def data() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images f32[n, 64] from 0 to 1, and their digits i64[n], in a fixed order that is random."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(x))
    return (x[order] / 16).astype(np.float32), y[order].astype(np.int64)


def batches(rng: np.random.Generator, steps: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Random batches of the first half."""
    x, y = data()
    for _ in range(steps):
        at = rng.integers(0, len(x) // 2, BATCH)
        yield x[at], y[at]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A multi-layer perceptron learns digits.")
    parser.add_argument("--target", default="llvm", help="llvm or cuda")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args(argv)
    dnnc.random.seed(0)
    net = model()
    optimizer = optim.AdamW(lr=2e-3, weight_decay=0.05)
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, args.steps)
    step = dnnc.train_step(loss_of, optimizer, net, target=args.target)
    for batch in (bar := dnnc.progress(batches(np.random.default_rng(0), args.steps), total=args.steps)):
        bar.tell(loss=step(*batch))
        schedule.step()

    x, y = data()
    half = len(x) // 2
    net.eval().to("cpu")
    print(f"accuracy on the other half: {float(F.accuracy(net(x[half:]), y[half:])):.2%}")


if __name__ == "__main__":
    main()
