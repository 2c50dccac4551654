"""Deep Compression on the digits: size of the file, accuracy, and how fast the weights come back.

    python benchmarks/coded_weights.py [lenet mobilenet_v2] [--steps 300] [--sparsity 0.9] [--bits 5]

Each network is trained dense, then with gradual pruning, then its shared values are trained (the steps of
`examples/deep_compression.py`). Images are enlarged: 28 x 28 for LeNet-5, 64 x 64 for MobileNetV2. Rates are bytes of
float32 weights over the shortest time of decoding, and of `dnnc.load` as a whole, which also loads machine code.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import dnnc
from dnnc import nn, optim
from dnnc.artifact.compressed import expanded
from dnnc.artifact.format import open_artifact

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from deep_compression import LeNet, enlarged, train
from train_digits import load_data

RATE, SHARED_RATE, REPEATS = 1e-3, 1e-4, 20


class Inverted(nn.Module):
    """An inverted residual: `t` times as many channels between two 1 x 1 convolutions."""

    def __init__(self, i: int, o: int, stride: int, t: int) -> None:
        super().__init__()
        h = i * t
        self.body = nn.Sequential(*(unit(i, h, 1) if t > 1 else ()), *unit(h, h, 3, stride, h), *unit(h, o, 1)[:2])
        self.adds = stride == 1 and i == o

    def forward(self, x: Any) -> Any:
        return x + self.body(x) if self.adds else self.body(x)


def unit(i: int, o: int, k: int, stride: int = 1, groups: int = 1) -> tuple[Any, ...]:
    return (
        nn.Conv2d(i, o, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o), nn.ReLU6(),
    )  # fmt: skip


def mobilenet_v2() -> Any:
    """MobileNetV2 for images of one channel and ten classes."""
    layers, c = [*unit(1, 32, 3, 2)], 32
    for t, o, n, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for k in range(n):
            layers.append(Inverted(c, o, stride if k == 0 else 1, t))
            c = o
    return nn.Sequential(*layers, *unit(c, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 10))


def larger(x: Any) -> Any:
    """[n, 1, 8, 8] to [n, 1, 64, 64]"""
    return x.repeat(8, 2).repeat(8, 3)


NETS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], tuple[int, int]]] = {
    "lenet": (LeNet, enlarged, (28, 28)),
    "mobilenet_v2": (mobilenet_v2, larger, (64, 64)),
}


def shortest(f: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return min(times)


def report(name: str, args: argparse.Namespace) -> str:
    make, form, sides = NETS[name]
    x, y, x_test, y_test = load_data(np.random.default_rng(0))
    data = form(x), y, form(x_test), y_test
    batch = len(y_test)

    dnnc.random.seed(0)
    net = make()
    dense = train(net, args.steps, RATE, data, "dense")
    floats = 4 * sum(p.size for p in net.parameters())
    dnnc.random.seed(0)
    net = make()
    train(
        net, args.steps, RATE, data, "pruning",
        lambda o: optim.GradualPruning(o, args.sparsity, begin=args.steps // 10, end=args.steps * 2 // 3, scope="lamp"),
    )  # fmt: skip
    spec = [dnnc.Spec(("N", 1, *sides))]
    module = nn.from_onnx(dnnc.prune(dnnc.to_onnx(net, inputs=spec), sparsity=0.0, bits=args.bits, measure=False).model)
    module.train()
    train(module, args.steps // 3, SHARED_RATE, data, "shared values", lambda o: optim.KeepZeros(o, shared=True))

    compiled = dnnc.compile(dnnc.to_onnx(module, inputs=spec), dims={"N": batch})
    with tempfile.TemporaryDirectory() as folder:
        plain, path = str(Path(folder) / "plain.dnnc"), str(Path(folder) / "m.dnnc")
        compiled.save(plain)
        compiled.save(path, compress=True)
        size, before = Path(path).stat().st_size, Path(plain).stat().st_size
        after = float((dnnc.load(path)(data[2]).argmax(1) == y_test).mean())
        decoding, loading, bare = (
            shortest(f)
            for f in (
                lambda: expanded(open_artifact(path)), lambda: dnnc.load(path), lambda: dnnc.load(plain),
            )
        )  # fmt: skip
    left = sum(int(np.count_nonzero(p.numpy())) for p in module.parameters() if p.ndim > 1)
    every = sum(p.size for p in module.parameters() if p.ndim > 1)
    sizes = (
        f"{floats / 1e6:.2f} | {left / every:.1%} | {dense:.2%} | {after:.2%} | {before / 1e6:.2f} | {size / 1e3:.0f}"
    )
    rates = f"{floats / size:.1f} | {floats / decoding / 1e6:.0f} | {loading * 1e3:.1f} | {bare * 1e3:.1f}"
    return f"| {name} | {sizes} | {rates} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(NETS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--bits", type=int, default=5)
    args = parser.parse_args()
    columns = (
        "network", "float32 weights, MB", "nonzeros", "accuracy", "compressed", "plain file, MB", "compressed, KB",
        "times smaller", "decoded, MB/s", "dnnc.load, ms", "of the plain file, ms",
    )  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name in args.nets:
        print(report(name, args), flush=True)


if __name__ == "__main__":
    main()
