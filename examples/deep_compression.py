"""Deep Compression (Han et al., 2016) of LeNet-5: prune, share weights, train the shared values, save coded.

    python examples/deep_compression.py [--steps 600] [--sparsity 0.95] [--bits 4] [--output lenet.dnnc]

scikit-learn's digits are enlarged to 28 x 28, for which LeNet-5 with 431 thousand weights is made. Gradual pruning
drops most weights while the network trains. A k-means makes the rest of each layer share 2^bits values, which are
trained on. The file has a codebook and Huffman-coded places for each layer; `dnnc.load` decodes it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from train_digits import batches, load_data, loss_of

import dnnc
import dnnc.nn.functional as F
from dnnc import nn, optim

RATE, SHARED_RATE = 1e-3, 1e-4
Array = np.ndarray
Data = tuple[Array, Array, Array, Array]


class LeNet(nn.Module):
    """LeNet-5 as in Caffe."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(800, 500), nn.Linear(500, 10)

    def forward(self, image: Any) -> Any:
        h = F.max_pool2d(self.conv1(image), 2)
        h = F.max_pool2d(self.conv2(h), 2)
        return self.fc2(F.relu(self.fc1(h.reshape(h.shape[0], -1))))


def enlarged(x: Array) -> Array:
    """[n, 1, 8, 8] to [n, 1, 28, 28]: each pixel three times each way, and a margin."""
    return np.pad(x.repeat(3, 2).repeat(3, 3), [(0, 0), (0, 0), (2, 2), (2, 2)])


def train(net: Any, steps: int, rate: float, data: Data, title: str, hook: Callable[[Any], Any] | None = None) -> float:
    """Train a network in place; its accuracy on the test images. `hook`: called with the optimizer."""
    x, y, x_test, y_test = data
    optimizer = optim.Adam(lr=rate)
    if hook is not None:
        hook(optimizer)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step = dnnc.train_step(loss_of, optimizer, net)
    for batch in (bar := dnnc.progress(batches(np.random.default_rng(0), steps, x, y), total=steps, title=title)):
        bar.tell(loss=step(*batch))
        schedule.step()
    net.eval().to("cpu")
    return float((net(x_test).numpy().argmax(1) == y_test).mean())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Deep Compression of LeNet-5.")
    parser.add_argument("--steps", type=int, default=600, help="of each training")
    parser.add_argument("--sparsity", type=float, default=0.95)
    parser.add_argument("--bits", type=int, default=4, help="of a codebook's places")
    parser.add_argument("--output", default="", help="where to save the compressed model")
    args = parser.parse_args(argv)
    x, y, x_test, y_test = load_data(np.random.default_rng(0))
    data = enlarged(x), y, enlarged(x_test), y_test

    dnnc.random.seed(0)
    net = LeNet()
    dense = train(net, args.steps, RATE, data, "dense")
    floats = 4 * sum(p.size for p in net.parameters())
    print(f"dense: {dense:.2%} of {len(y_test)} test images, {floats:,} bytes")

    dnnc.random.seed(0)
    net = LeNet()
    end = args.steps * 2 // 3
    accuracy = train(
        net, args.steps, RATE, data, "pruning",
        lambda o: optim.GradualPruning(o, args.sparsity, begin=args.steps // 10, end=end, scope="lamp"),
    )  # fmt: skip
    print(f"pruned: {accuracy:.2%} with {args.sparsity:.0%} of the weights gone")

    model = dnnc.to_onnx(net, inputs=[dnnc.Spec(("N", 1, 28, 28))])
    module = nn.from_onnx(dnnc.prune(model, sparsity=0.0, bits=args.bits, measure=False).model)
    before = float((module.eval()(data[2]).numpy().argmax(1) == y_test).mean())
    module.train()
    after = train(
        module, args.steps // 3, SHARED_RATE, data, "shared values", lambda o: optim.KeepZeros(o, shared=True)
    )
    print(f"shared: {before:.2%} after the k-means, {after:.2%} with trained values")

    with tempfile.TemporaryDirectory() as folder:
        path = args.output or str(Path(folder) / "lenet.dnnc")
        compiled = dnnc.compile(dnnc.to_onnx(module, inputs=[dnnc.Spec(("N", 1, 28, 28))]), dims={"N": len(y_test)})
        compiled.save(path, compress=True)
        size = Path(path).stat().st_size
        loaded = float((dnnc.load(path)(data[2]).argmax(1) == y_test).mean())
    print(f"file: {size:,} bytes, {floats / size:.1f} times smaller, {loaded:.2%}")


if __name__ == "__main__":
    main()
