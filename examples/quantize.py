"""Quantize a digit classifier: after training, and by training on with rounded weights and activations.

    python examples/quantize.py [--steps 400] [--aware-steps 150] [--output digits.int8.onnx]

The network is that of `train_digits.py`. `dnnc.quantize` makes 8 and 4 bits of the trained weights; `nn.quantize_aware`
lets the network see the rounding while it trains, and `dnnc.to_onnx` writes its integers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from train_digits import Digits, batches, load_data, loss_of

import dnnc
from dnnc import nn, optim

RATE, AWARE_RATE = 2e-3, 2e-4
Array = np.ndarray


def train(net: Any, rate: float, steps: int, rng: np.random.Generator, x: Array, y: Array, title: str) -> None:
    """Train a network in place."""
    step = dnnc.train_step(loss_of, optim.Adam(lr=rate), net)
    for batch in (bar := dnnc.progress(batches(rng, steps, x, y), total=steps, title=title)):
        bar.tell(loss=step(*batch))
    net.eval().to("cpu")


def accuracy(model: Any, x: Array, y: Array) -> float:
    """Of a compiled model."""
    return float((model(x).argmax(1) == y).mean())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Quantize a digit classifier.")
    parser.add_argument("--steps", type=int, default=400, help="of the float network")
    parser.add_argument("--aware-steps", type=int, default=150, help="with rounded weights and activations")
    parser.add_argument("--output", default="", help="where to write the network that was trained for 8 bits")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    dnnc.random.seed(0)
    x_train, y_train, x_test, y_test = load_data(rng)
    net, inputs = Digits(), [dnnc.Spec(("N", 1, 8, 8))]
    train(net, RATE, args.steps, rng, x_train, y_train, "float")
    model = dnnc.to_onnx(net, inputs=inputs)
    whole = dnnc.compile(model)
    print(f"float: {accuracy(whole, x_test, y_test):.2%} of {len(y_test)} test images")

    for scheme in ("int8", "w4a16"):
        q = dnnc.quantize(model, x_train[:128], scheme=scheme)
        kept = f"constants {q.sizes[0] / q.sizes[1]:.1f} times smaller, outputs off by {q.error:.2%}"
        print(f"{scheme} after training: {accuracy(q.compile(), x_test, y_test):.2%}; {kept}")

    nn.quantize_aware(net)
    train(net.train(), AWARE_RATE, args.aware_steps, rng, x_train, y_train, "quantization-aware")
    with tempfile.TemporaryDirectory() as folder:
        path = args.output or str(Path(folder) / "digits.int8.onnx")
        dnnc.to_onnx(net, path, inputs=inputs, opset=21)
        aware = dnnc.compile(path)
        print(f"int8 trained on: {accuracy(aware, x_test, y_test):.2%}, {Path(path).stat().st_size:,} bytes")
    same = (aware(x_test).argmax(1) == whole(x_test).argmax(1)).mean()
    print(f"it sees what the float network sees in {same:.2%} of the images")


if __name__ == "__main__":
    main()
