"""A variational autoencoder of digits (Kingma and Welling 2014): a gradient that goes through a sample.

    python examples/vae.py [--target llvm|cuda] [--steps 1000]

The encoder gives mean and log-variance of a code, `mean + deviation * noise` is a sample of it (so the gradient goes
through it), and the decoder gives the pixels of that. At the end, codes drawn at random become digits.
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

BATCH, CODE = 64, 8


class VAE(nn.Module):
    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 2 * CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, hidden), nn.Tanh(), nn.Linear(hidden, 64))

    def forward(self, x: Any, noise: Any) -> Any:
        """Logits of the pixels, and mean and log-variance of the code."""
        found = self.encoder(x)
        mean, logvar = found[:, :CODE], found[:, CODE:]
        return self.decoder(mean + xp.exp(0.5 * logvar) * noise), mean, logvar


def model() -> Any:
    return VAE()


def loss_of(net: Any, x: Any, noise: Any) -> Any:
    """The negative evidence lower bound of an image: reconstruction, and divergence from the normal distribution."""
    logits, mean, logvar = net(x, noise)
    pixels = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    divergence = -0.5 * xp.sum(1 + logvar - mean * mean - xp.exp(logvar))
    return (pixels + divergence) / x.shape[0]


def batches(rng: np.random.Generator, steps: int) -> Iterator[tuple[np.ndarray, ...]]:
    x = (load_digits().data / 16).astype(np.float32)
    for _ in range(steps):
        yield x[rng.integers(0, len(x), BATCH)], rng.standard_normal((BATCH, CODE)).astype(np.float32)


def drawn(images: np.ndarray) -> str:
    """Images [n, 64] side by side as text."""
    rows = np.concatenate(list(images.reshape(-1, 8, 8)), axis=1)
    return "\n".join("".join(" .:-=+*#%@"[min(9, int(10 * v))] * 2 for v in row) for row in rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A variational autoencoder of digits.")
    parser.add_argument("--target", default="llvm", help="llvm or cuda")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args(argv)
    dnnc.random.seed(0)
    rng = np.random.default_rng(0)
    net = model()
    step = dnnc.train_step(loss_of, optim.Adam(lr=3e-3), net, target=args.target)
    for batch in (bar := dnnc.progress(batches(rng, args.steps), total=args.steps)):
        bar.tell(bound=step(*batch))

    net.eval().to("cpu")
    (batch,) = batches(rng, 1)
    print(drawn(F.sigmoid(net.decoder(batch[1][:6])).numpy()))
    print(f"bound: {float(loss_of(net, *batch)):.2f} nats an image")


if __name__ == "__main__":
    main()
