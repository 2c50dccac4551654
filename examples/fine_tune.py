"""Fine-tune an ONNX model: the digits classifier learns other classes, the number of holes in a digit's shape.

    python examples/fine_tune.py                                 # a few seconds; writes holes.onnx
    python examples/fine_tune.py --target cuda --log run.jsonl   # then: dnnc curves run.jsonl

The model is cut ahead of its last layer. First a new layer is trained on its features, then all weights with a smaller
learning rate. What is written is an ONNX model again, for any runtime.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scikit import load_digits

import dnnc
import dnnc.nn.functional as F
from dnnc import nn, optim

HOLES = np.array([1, 0, 0, 0, 1, 0, 1, 0, 2, 1])  # of the digits 0 to 9


def load_data(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Images f32[n, 1, 8, 8] with pixels from 0 (paper) to 1 (ink), and the holes of their digits."""
    x, y = load_digits(return_X_y=True)
    return (x[:size] / 16).astype(np.float32).reshape(-1, 1, 8, 8), HOLES[y[:size]]


def loss_fn(net: nn.Module, x: dnnc.array.Array, y: dnnc.array.Array) -> dnnc.array.Array:
    return F.cross_entropy(net(x), y)


def accuracy(net: nn.Module, x: np.ndarray, y: np.ndarray) -> float:
    net.eval()
    right = net(dnnc.array.asarray(x, device=next(net.parameters()).device)).numpy().argmax(1) == y
    net.train()
    return float(right.mean())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "digits.onnx"))
    parser.add_argument("--output", default="holes.onnx")
    parser.add_argument("--size", type=int, default=1797, help="images, half of them to train on")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--log", help="file for a line of JSON a step")
    args = parser.parse_args(argv)

    dnnc.random.seed(0)
    rng = np.random.default_rng(0)
    x, y = load_data(args.size)
    half = len(x) // 2
    features = nn.from_onnx(args.model, outputs="r3")  # f32[N, 64], after the last ReLU
    net = nn.Sequential(features, nn.Linear(64, 3))
    print(f"before: {accuracy(net, x[half:], y[half:]):.1%} of {len(x) - half} images")

    for part, rate in (("the new layer", 1e-2), ("all weights", 1e-3)):
        features.requires_grad_(part == "all weights")
        epochs = args.epochs // 2
        step = dnnc.train_step(loss_fn, optim.Adam(lr=rate), net, target=args.target)
        order = np.concatenate([rng.permutation(half)[: half // 32 * 32] for _ in range(epochs)]).reshape(-1, 32)
        for at in (bar := dnnc.progress(order, title=part, log=args.log)):
            bar.tell(loss=step(x[at], y[at]), lr=rate)
        print(f"{part}: {accuracy(net, x[half:], y[half:]):.1%}")

    dnnc.to_onnx(net, args.output, inputs=[dnnc.Spec(("N", 1, 8, 8))])
    again = dnnc.compile(args.output, dims={"N": len(x) - half})
    same = float((again(x[half:]).argmax(1) == y[half:]).mean())
    print(f"{args.output}: {same:.1%}")


if __name__ == "__main__":
    main()
