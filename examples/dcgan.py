"""A DCGAN of digits (Radford et al. 2016): two networks against each other, as a define-by-run loop.

    python examples/dcgan.py [--target llvm|cuda] [--steps 300]

The discriminator learns to tell images from the generator's, the generator to be taken for real. `detach` keeps the
discriminator's gradient out of the generator. Each of the two updates becomes one program.
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

BATCH, CODE = 32, 16


def generator(width: int = 16) -> Any:
    return nn.Sequential(
        nn.ConvTranspose2d(CODE, 2 * width, 2, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Sigmoid(),
    )  # fmt: skip


def discriminator(width: int = 16) -> Any:
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 1, 2), nn.Flatten(0),
    )  # fmt: skip


def first_values(m: Any) -> None:
    """The paper's: weights of deviation 0.02."""
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)


def judged(logits: Any, real: bool) -> Any:
    """The loss of a discriminator that should find all of them real, or none."""
    return xp.mean(F.softplus(-logits if real else logits))


def batches(rng: np.random.Generator, steps: int, size: int = BATCH) -> Iterator[tuple[np.ndarray, ...]]:
    """Images f32[size, 1, 8, 8] and codes f32[size, CODE, 1, 1]."""
    x = (load_digits().data / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    for _ in range(steps):
        yield x[rng.integers(0, len(x), size)], rng.standard_normal((size, CODE, 1, 1)).astype(np.float32)


def drawn(images: np.ndarray) -> str:
    rows = np.concatenate(list(images.reshape(-1, 8, 8)), axis=1)
    return "\n".join("".join(" .:-=+*#%@"[min(9, int(10 * v))] * 2 for v in row) for row in rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A DCGAN of digits.")
    parser.add_argument("--target", default="llvm", help="llvm or cuda")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=BATCH)
    args = parser.parse_args(argv)
    device = "cpu" if args.target == "llvm" else "cuda:0"
    dnnc.random.seed(0)
    makes, tells = generator(args.width).to(device), discriminator(args.width).to(device)
    makes.apply(first_values)
    tells.apply(first_values)
    first, second = (optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999)) for net in (tells, makes))
    rng = np.random.default_rng(0)
    for batch in (bar := dnnc.progress(batches(rng, args.steps, args.batch), total=args.steps)):
        real, code = (xp.asarray(a, device=device) for a in batch)
        fake = makes(code)

        first.zero_grad()
        loss = judged(tells(real), True) + judged(tells(fake.detach()), False)
        loss.backward()
        first.step()

        second.zero_grad()
        fooled = judged(tells(fake), True)
        fooled.backward()
        second.step()
        bar.tell(discriminator=loss, generator=fooled)

    makes.eval()
    seen = makes(xp.asarray(rng.standard_normal((6, CODE, 1, 1)).astype(np.float32), device=device)).numpy()
    print(drawn(seen))
    print(
        f"losses: discriminator {float(loss):.3f}, generator {float(fooled):.3f}; mean of the pixels {seen.mean():.3f}"
    )


if __name__ == "__main__":
    main()
