"""Prune a digit classifier: while it trains, and by removing channels of the trained network.

    python examples/prune.py [--steps 900] [--output digits.pruned.onnx]

The network is that of `train_digits.py`. `optim.GradualPruning` drops 90 % of the weights along a cubic schedule.
`dnnc.prune` with `method="structured"` removes channels: random choices are tried and the best one is taken;
`nn.from_onnx` trains the smaller network on.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from train_digits import Digits, batches, load_data, loss_of

import dnnc
from dnnc import nn, optim

RATE = 2e-3
Array = np.ndarray
Data = tuple[Array, Array, Array, Array]


def train(net: Any, steps: int, seed: int, data: Data, title: str, hook: Callable[[Any], Any] | None = None) -> float:
    """Train a network in place; its accuracy on the test images. `hook`: called with the optimizer."""
    x, y, x_test, y_test = data
    optimizer = optim.Adam(lr=RATE)
    if hook is not None:
        hook(optimizer)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step = dnnc.train_step(loss_of, optimizer, net)
    for batch in (bar := dnnc.progress(batches(np.random.default_rng(seed), steps, x, y), total=steps, title=title)):
        bar.tell(loss=step(*batch))
        schedule.step()
    net.eval().to("cpu")
    return float((net(x_test).numpy().argmax(1) == y_test).mean())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prune a digit classifier.")
    parser.add_argument("--steps", type=int, default=900, help="of each training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="", help="where to write the network with 90 % of its weights gone")
    args = parser.parse_args(argv)
    data = load_data(np.random.default_rng(args.seed))
    inputs = [dnnc.Spec(("N", 1, 8, 8))]

    dnnc.random.seed(args.seed)
    net = Digits()
    print(f"dense: {train(net, args.steps, args.seed, data, 'dense'):.2%} of {len(data[3])} test images")
    model = dnnc.to_onnx(net, inputs=inputs)

    dnnc.random.seed(args.seed)
    sparse = Digits()
    begin, end = args.steps // 9, args.steps * 2 // 3
    accuracy = train(
        sparse, args.steps, args.seed, data, "gradual pruning",
        lambda o: optim.GradualPruning(o, 0.9, begin=begin, end=end, scope="lamp"),
    )  # fmt: skip
    weights = [p.numpy() for p in sparse.parameters() if p.ndim > 1]
    gone = sum((w == 0).sum() for w in weights) / sum(w.size for w in weights)
    print(f"gradual pruning: {accuracy:.2%} with {gone:.1%} of the weights gone")
    with tempfile.TemporaryDirectory() as folder:
        path = args.output or str(Path(folder) / "digits.pruned.onnx")
        dnnc.to_onnx(sparse, path, inputs=inputs)

    small = dnnc.prune(model, data[0][:256], method="structured", sparsity=0.5, candidates=20)
    assert small.operations is not None and small.before is not None and small.after is not None
    print(f"channels: {1 - small.operations[1] / small.operations[0]:.1%} fewer multiplications, "
          f"{small.before / small.after:.2f} times as fast; {small.notes[0]}")  # fmt: skip
    module = nn.from_onnx(small.model)
    print(f"trained on: {train(module, args.steps, args.seed, data, 'fewer channels'):.2%}")


if __name__ == "__main__":
    main()
