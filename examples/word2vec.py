"""Word vectors by skip-grams with negative sampling (Mikolov et al. 2013), of the reference that Python ships with.

    python examples/word2vec.py [--target llvm|cuda] [--steps 3000]

A word's vector is to tell the words near it (label 1) from words drawn at random (label 0). Look at `loss_of`: two
embeddings and a batched product; the gradient of an embedding is a scatter in a fixed order, so runs repeat to the bit.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn, optim

WORDS, WIDTH, BATCH, WINDOW, NEGATIVE = 1500, 48, 256, 4, 5


class SkipGram(nn.Module):
    def __init__(self, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(words, width), nn.Embedding(words, width)

    def forward(self, word: Any, others: Any) -> Any:
        """Logits [N, k] of whether `others` [N, k] stand near `word` [N]."""
        return xp.sum(self.inner(word)[:, None, :] * self.outer(others), axis=-1)


def model() -> Any:
    return SkipGram(WORDS)


def loss_of(net: Any, word: Any, others: Any, near: Any) -> Any:
    return F.binary_cross_entropy_with_logits(net(word, others), near)


def corpus() -> tuple[list[str], np.ndarray]:
    """The most frequent words, and the text as their numbers."""
    text = re.findall(r"[a-z_]{2,}", " ".join(topics.values()).lower())
    words = [w for w, _ in Counter(text).most_common(WORDS)]
    number = {w: k for k, w in enumerate(words)}
    return words, np.array([number[w] for w in text if w in number])


def batches(rng: np.random.Generator, steps: int) -> Iterator[tuple[np.ndarray, ...]]:
    _, text = corpus()
    share = np.bincount(text, minlength=WORDS) ** 0.75  # negatives are drawn by it, as in the paper
    ends = np.cumsum(share / share.sum())
    near = np.zeros((BATCH, 1 + NEGATIVE), np.float32)
    near[:, 0] = 1
    for _ in range(steps):
        at = rng.integers(WINDOW, len(text) - WINDOW, BATCH)
        by = rng.integers(1, WINDOW + 1, BATCH) * rng.choice([-1, 1], BATCH)
        others = np.searchsorted(ends, rng.random((BATCH, NEGATIVE)))
        yield text[at], np.concatenate([text[at + by][:, None], np.minimum(others, WORDS - 1)], axis=1), near


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Word vectors by skip-grams.")
    parser.add_argument("--target", default="llvm", help="llvm or cuda")
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args(argv)
    dnnc.random.seed(0)
    net = model()
    with_small_values = {n: 0.3 * p for n, p in net.state_dict().items()}
    net.load_state_dict(with_small_values)
    step = dnnc.train_step(loss_of, optim.Adam(lr=5e-3), net, target=args.target)
    losses = []
    for batch in (bar := dnnc.progress(batches(np.random.default_rng(0), args.steps), total=args.steps)):
        losses.append(step(*batch))
        bar.tell(loss=losses[-1])

    words, _ = corpus()
    net.to("cpu")
    vectors = F.normalize(net.inner.weight, dim=1).numpy()
    for word in (w for w in ("float", "class", "left", "returns") if w in words):
        likeness = vectors @ vectors[words.index(word)]
        print(f"{word}: {' '.join(words[k] for k in np.argsort(-likeness)[1:6])}")
    print(f"loss {float(losses[0]):.3f} -> {np.mean([float(x) for x in losses[-20:]]):.3f}")


if __name__ == "__main__":
    main()
