"""Networks of few bits, trained on scikit-learn's 8x8 digits by straight-through gradients.

python examples/binary_digits.py [--steps 600] [--nets float bwn twn bnn lut]

float   64 -> 256 -> 256 -> 10, as a measure
bwn     binary weights times a scale for each column (binary weight networks)
twn     ternary weights times a scale for each column (ternary weight networks)
bnn     binary weights and activations: its middle layer is computed by exclusive or and counts of bits
lut     layers of tables with 4 binary inputs each; when trained, a neuron is 16 bits
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any

import numpy as np
from scikit import load_digits

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn, optim
from dnnc.array.binary import binary_matmul, sign_words

BATCH, HIDDEN, SEED = 64, 256, 0
TABLES, INPUTS = 640, 4  # neurons of a layer of tables, and what each of them reads
Array = np.ndarray


def through(hard: Any, soft: Any) -> Any:
    """The value of `hard` with the gradient of `soft`."""
    return soft + dnnc.stop_gradient(hard - soft)


def signs(x: Any) -> Any:
    return xp.where(x < 0, xp.full_like(x, -1.0), xp.full_like(x, 1.0))


def binary(w: Any) -> Any:
    """Signs times the mean size of each column."""
    return through(signs(w) * xp.mean(xp.abs(w), 0, keepdims=True), w)


def ternary(w: Any) -> Any:
    """-1, 0 or 1 times the mean size of those that are not 0, column by column."""
    size = xp.abs(w)
    kept = xp.astype(size > 0.7 * xp.mean(size, 0, keepdims=True), "float32")
    scale = xp.sum(size * kept, 0, keepdims=True) / (xp.sum(kept, 0, keepdims=True) + 1e-6)
    return through(signs(w) * kept * scale, w)


class Dense(nn.Module):
    """Layers without biases, with a batch norm behind each; `weights` says what a weight becomes."""

    def __init__(self, weights: Any, binary_inputs: bool) -> None:
        super().__init__()
        rng = np.random.default_rng(SEED)
        sizes = 64, HIDDEN, HIDDEN, 10
        shapes = list(pairwise(sizes))
        self.w = nn.ParameterList([nn.Parameter(rng.standard_normal(s).astype(np.float32) * 0.1) for s in shapes])
        self.norms = nn.ModuleList([nn.BatchNorm1d(n) for n in sizes[1:]])
        self.weights, self.binary_inputs = weights, binary_inputs

    def forward(self, x: Any) -> Any:
        for k in range(3):
            if k:
                x = through(signs(x), xp.clip(x, -1.0, 1.0)) if self.binary_inputs else F.relu(x)
            x = self.norms[k](x @ self.weights(self.w[k]))
        return x


class Tables(nn.Module):
    """Two layers of tables, each read at 4 binary numbers, and for each digit a sum of outputs."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(SEED)
        self.reads = [rng.integers(0, n, (TABLES, INPUTS)) for n in (64, TABLES)]
        start = [rng.standard_normal((TABLES, 1 << INPUTS)).astype(np.float32) * 0.5 for _ in range(2)]
        self.tables = nn.ParameterList([nn.Parameter(t) for t in start])

    def forward(self, x: Any) -> Any:
        x = xp.astype(x > 0.0, "float32")
        for read, table in zip(self.reads, self.tables):
            found = xp.take(x, read.reshape(-1), axis=1).reshape(-1, TABLES, INPUTS)
            t = F.sigmoid(table * 4.0)
            t = xp.expand_dims(through(xp.astype(t > 0.5, "float32"), t), 0)
            for k in range(INPUTS):  # halves of the table, chosen by one input; gradients by both
                bit = found[:, :, k : k + 1]
                t = t[..., 0::2] * (1.0 - bit) + t[..., 1::2] * bit
            x = t[..., 0]
        return xp.sum(x.reshape(-1, 10, TABLES // 10), -1) * 0.3


def counted(net: Dense, x: Array) -> Array:
    """The layers of a binary network, the middle one by counts of bits."""
    first = net.norms[0](xp.asarray(x) @ net.weights(net.w[0]))
    w = np.asarray(net.w[1].numpy())
    sums = binary_matmul(sign_words(first), xp.transpose(sign_words(xp.asarray(w.T.copy()))), HIDDEN)
    middle = net.norms[1](xp.astype(sums, "float32") * np.abs(w).mean(0, keepdims=True))
    return np.asarray(net.norms[2](signs(middle) @ net.weights(net.w[2])))


NETS = {
    "float": lambda: Dense(lambda w: w, False),
    "bwn": lambda: Dense(binary, False),
    "twn": lambda: Dense(ternary, False),
    "bnn": lambda: Dense(binary, True),
    "lut": Tables,
}


def loss_of(net: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(net(x), y)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--nets", nargs="*", choices=NETS, default=list(NETS))
    args = parser.parse_args(argv)
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(x))
    x, y = (x[order] / 8 - 1).astype(np.float32), y[order].astype(np.int64)
    train, test = slice(0, 1400), slice(1400, None)
    for name in args.nets:
        dnnc.random.seed(SEED)
        net, rng = NETS[name](), np.random.default_rng(SEED)
        optimizer = optim.Adam(lr=5e-3)
        schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        step = dnnc.train_step(loss_of, optimizer, net)
        for _ in range(args.steps):
            at = rng.integers(0, 1400, BATCH)
            step(x[train][at], y[train][at])
            schedule.step()
        net.eval()
        logits = np.asarray(net(xp.asarray(x[test])))
        print(f"{name}: accuracy {(logits.argmax(1) == y[test]).mean():.1%}", end="")
        same = np.allclose(counted(net, x[test]), logits, atol=1e-3) if name == "bnn" else None
        print("" if same is None else f", counts of bits {'give the same' if same else 'DIFFER'}")


if __name__ == "__main__":
    main()
