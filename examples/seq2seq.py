"""A sequence-to-sequence network with attention (Luong et al. 2015): "3 may 1998" becomes "1998-05-03".

    python examples/seq2seq.py [--target llvm|cuda] [--steps 500]

The encoder reads both ways. While it is trained, the decoder gets the right letters so far (teacher forcing), so all of
its steps attend in one product. At the end the network writes letter by letter what it holds for the most probable.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterator
from typing import Any

import numpy as np

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn, optim

BATCH, LONGEST, WRITTEN = 64, 18, 10
LETTERS = " -0123456789abcdefghijklmnoprstuvy"  # number 0 fills up, and stands ahead of what is written
FIRST, LAST = datetime.date(1950, 1, 1).toordinal(), datetime.date(2050, 1, 1).toordinal()


class Translator(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 16)
        self.encoder = nn.GRU(16, width, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(16, 2 * width, batch_first=True)
        self.mix = nn.Linear(4 * width, 2 * width)
        self.head = nn.Linear(2 * width, len(LETTERS))

    def forward(self, read: Any, written: Any) -> Any:
        """Logits [N, t, letters] of what follows each letter of `written` [N, t], from `read` [N, s]."""
        seen, last = self.encoder(self.embed(read))
        first = xp.swapaxes(last, 0, 1).reshape(1, last.shape[1], -1)  # both directions beside each other
        states, _ = self.decoder(self.embed(written), first)
        weights = F.softmax(states @ xp.swapaxes(seen, 1, 2), dim=-1)  # [N, t, s]
        return self.head(xp.tanh(self.mix(xp.concat([states, weights @ seen], -1))))


def model(width: int = 64) -> Any:
    return Translator(width)


def loss_of(net: Any, read: Any, written: Any, following: Any) -> Any:
    return F.cross_entropy(net(read, written).reshape(-1, len(LETTERS)), following.reshape(-1))


def numbers(text: str, length: int) -> list[int]:
    return [LETTERS.index(c) for c in text.lower().ljust(length)]


def batches(rng: np.random.Generator, steps: int, size: int = BATCH) -> Iterator[tuple[np.ndarray, ...]]:
    """Dates as people write them [size, LONGEST], the ISO form with a blank ahead of it, and without."""
    for _ in range(steps):
        dates = [datetime.date.fromordinal(int(n)) for n in rng.integers(FIRST, LAST, size)]
        forms = rng.choice(["{0.day} {0:%B} {0.year}", "{0:%b} {0.day} {0.year}", "{0.day} {0:%b} {0:%y}"], size)
        read = [numbers(form.format(d), LONGEST) for form, d in zip(forms, dates)]
        iso = np.array([numbers(" " + d.isoformat(), WRITTEN + 1) for d in dates])
        yield np.array(read), iso[:, :-1].copy(), iso[:, 1:].copy()


def translated(net: Any, read: np.ndarray) -> np.ndarray:
    """The letters [N, WRITTEN] that follow: each is read again for the next one."""
    written = np.zeros((len(read), WRITTEN), np.int64)
    for k in range(WRITTEN):
        following = xp.argmax(net(read, written)[:, k], axis=-1).numpy()
        if k + 1 == WRITTEN:
            return np.concatenate([written[:, 1:], following[:, None]], axis=1)
        written[:, k + 1] = following
    raise AssertionError


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Dates, by a sequence-to-sequence network.")
    parser.add_argument("--target", default="llvm", help="llvm or cuda")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=BATCH)
    args = parser.parse_args(argv)
    dnnc.random.seed(0)
    rng = np.random.default_rng(0)
    net = model(args.width)
    step = dnnc.train_step(loss_of, optim.Adam(lr=5e-3), net, target=args.target, clip_norm=1.0)
    losses = []
    for batch in (bar := dnnc.progress(batches(rng, args.steps, args.batch), total=args.steps)):
        losses.append(step(*batch))
        bar.tell(loss=losses[-1])

    net.eval().to("cpu")
    ((read, _, iso),) = batches(rng, 1)
    found = translated(net, read)
    for k in range(4):
        text, made = ("".join(LETTERS[i] for i in row) for row in (read[k], found[k]))
        print(f"{text} -> {made}")
    print(
        f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}; {np.mean((found == iso).all(1)):.0%} of dates right"
    )


if __name__ == "__main__":
    main()
