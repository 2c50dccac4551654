"""Random QDQ nets of odd shapes: dnnc, ONNX Runtime and OpenVINO run the same file.

    python benchmarks/quantized_shapes.py FIRST:END [--cache DIR] [--budget 0.1] [--threads 2]

A seed is a net of a few layers: convolutions (with residuals, depthwise, of one dimension), products, attention. Sizes
of images, channels and sequences are drawn from lists of which most are no multiples of 16. Weights are i8 with a scale
for each output channel, activations u8 with a zero point. The line of a seed has the milliseconds of each engine, the
ratio to the faster peer, and the share of outputs within a step of ONNX Runtime without graph optimizations.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from engines import PEERS, Engine, Task
from judge import share_within_a_step
from onnx import ModelProto, TensorProto, helper, numpy_helper
from quantized import ours, reference
from timing import geometric_mean

from dnnc.tools.timing import alternate

Array = np.ndarray[Any, Any]
KINDS = ("conv", "conv", "conv1d", "matmul", "attention", "residual", "depthwise", "gemm")
LAYERS = 4


class Net:
    """A net of one seed while it grows; `v` is the last value, `width` its channels."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.kind = KINDS[seed % len(KINDS)]
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []
        self.shape: list[int] = []
        {"conv": self.images, "residual": self.images, "depthwise": self.images, "conv1d": self.signals,
         "matmul": self.rows, "gemm": self.rows, "attention": self.attention}[self.kind]()  # fmt: skip

    def pick(self, *of: int) -> int:
        return int(self.rng.choice(of))

    def constant(self, a: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(a), f"c{len(self.constants)}"))
        return self.constants[-1].name

    def node(self, op: str, *inputs: str, **attrs: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [f"v{len(self.nodes)}"], **attrs))
        return str(self.nodes[-1].output[0])

    def rounded(self, v: str, deviation: float = 1.0) -> str:
        scheme = self.constant(np.float32(deviation / 40)), self.constant(np.uint8(self.rng.choice([0, 128, 117])))
        return self.node("DequantizeLinear", self.node("QuantizeLinear", v, *scheme), *scheme)

    def weights(self, shape: tuple[int, ...], axis: int) -> str:
        n = shape[axis]
        scales = (self.rng.uniform(0.5, 1.5, n) / np.sqrt(np.prod(shape) / n) / 60).astype(np.float32)
        codes = self.constant(self.rng.integers(-127, 128, shape).astype(np.int8))
        return self.node(
            "DequantizeLinear", codes, self.constant(scales), self.constant(np.zeros(n, np.int8)), axis=axis
        )

    def bias(self, n: int) -> str:
        return self.constant(self.rng.standard_normal(n).astype(np.float32))

    def start(self, *shape: int) -> None:
        self.shape = list(shape)
        self.v = self.rounded("x")

    def convolve(self, n: int, *kernel: int, **attrs: Any) -> str:
        w = self.weights((n, self.width, *kernel), 0)
        return self.node("Conv", self.v, w, self.bias(n), **attrs)

    def images(self) -> None:
        n, self.width, size = self.pick(1, 1, 2, 3), self.pick(3, 7, 16, 24, 33, 40, 100, 136), 0
        size = self.pick(7, 13, 14, 20, 29, 56, 61)
        size = min(size, 20) if self.width >= 100 else size
        self.start(n, self.width, size, size + self.pick(0, 0, 3))
        for k in range(LAYERS):
            if self.kind == "depthwise" and k % 2 == 0:
                op, rows = self.rng.choice(["Relu", "HardSwish"]), 5 if self.rng.random() < 0.5 else 3
                w = self.weights((self.width, 1, rows, 3), 0)
                zeros = self.constant(np.zeros(self.width, np.float32))
                y = self.node("Conv", self.v, w, zeros, group=self.width, pads=[1] * 4)
                self.v = self.rounded(self.node(str(op), y))
                continue
            n, size = self.pick(5, 16, 24, 31, 48, 72, 96, 130), self.pick(1, 1, 3, 3, 5)
            y = self.convolve(n, size, size, pads=[size // 2] * 4)
            if self.kind == "residual" and n == self.width:
                y = self.node("Add", y, self.v)
            relu = self.rng.random() < 0.7
            y = self.node("Relu", y) if relu else self.node("Mul", y, self.node("Sigmoid", y))
            self.v, self.width = self.rounded(y), n
            if self.kind == "residual":
                y = self.node("Add", self.convolve(n, 3, 3, pads=[1] * 4), self.v)
                self.v = self.rounded(self.node("Relu", y))

    def signals(self) -> None:
        n, self.width = self.pick(1, 2), self.pick(20, 64, 80, 129)
        self.start(n, self.width, self.pick(100, 333, 1000))
        for _ in range(LAYERS):
            n, size, step = self.pick(32, 64, 65, 128, 200), self.pick(1, 3, 5, 9), self.pick(1, 1, 2, 4)
            y = self.convolve(n, size, pads=[size // 2 * step] * 2, dilations=[step])
            self.v, self.width = self.rounded(self.node("Relu", y)), n

    def rows(self) -> None:
        m, self.width = self.pick(1, 5, 17, 77, 128, 300), self.pick(64, 100, 257, 384, 768, 1000)
        batch = () if self.kind == "gemm" else (self.pick(1, 2),)
        self.start(*batch, m, self.width)
        for _ in range(LAYERS):
            n = self.pick(10, 64, 100, 333, 384, 512, 1536)
            if self.kind == "gemm":
                y = self.node("Gemm", self.v, self.weights((n, self.width), 0), self.bias(n), transB=1)
            else:
                y = self.linear(n)
            if self.rng.random() < 0.4:
                y = self.node("Gelu", y)
            elif self.rng.random() < 0.5:
                y = self.node("Relu", y)
            self.v, self.width = self.rounded(y), n

    def linear(self, n: int) -> str:
        return self.node("Add", self.node("MatMul", self.v, self.weights((self.width, n), 1)), self.bias(n))

    def attention(self) -> None:
        batch, length = self.pick(1, 2), self.pick(50, 77, 130, 197)
        self.width, size = self.pick(128, 192, 320, 384), self.pick(32, 40, 64)
        heads = max(self.width // size, 1)
        inner = heads * size
        self.start(batch, length, self.width)
        for _ in range(LAYERS // 2):
            parts = []
            for k in range(3):
                y = self.node("Reshape", self.rounded(self.linear(inner)), self.constant([batch, length, heads, size]))
                parts.append(self.node("Transpose", y, perm=[0, 2, 3, 1] if k == 1 else [0, 2, 1, 3]))
            scores = self.rounded(self.node("MatMul", *parts[:2]), 8.0)
            shares = self.node("Softmax", self.node("Mul", scores, self.constant(np.float32(size**-0.5))))
            y = self.node("MatMul", self.rounded(shares, 0.01), parts[2])
            y = self.node(
                "Reshape", self.node("Transpose", y, perm=[0, 2, 1, 3]), self.constant([batch, length, inner])
            )
            y = self.node("MatMul", self.rounded(y, 0.3), self.weights((inner, self.width), 1))
            ones, zeros = (self.constant(np.full(self.width, v, np.float32)) for v in (1, 0))
            self.v = self.rounded(self.node("LayerNormalization", self.node("Add", y, self.v), ones, zeros))

    def model(self) -> ModelProto:
        info = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
        graph = helper.make_graph(
            self.nodes, self.kind, [info("x", shape=self.shape)], [info(self.v, shape=None)], self.constants
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def measure(seed: int, a: argparse.Namespace) -> float:
    """Time the engines, print the line of a seed; the ratio to the faster peer."""
    net = Net(seed)
    model, inputs = net.model(), {"x": net.rng.standard_normal(net.shape).astype(np.float32)}
    task = Task(f"seed {seed}", model, inputs, a.threads, a.cache)
    engines: list[Engine] = [partial(ours, "dnnc")(task), PEERS["onnxruntime"](task), PEERS["openvino"](task)]
    got = engines[0].outputs(engines[0].call())
    share = share_within_a_step(got, reference(model, inputs))
    times = alternate([e.call for e in engines], 3, a.budget, lambda _: None)
    ms = [float(np.median(np.concatenate([r[k] for r in times]))) * 1e3 for k in range(len(engines))]
    ratio = min(ms[1:]) / ms[0]
    cells = [str(seed), net.kind, "x".join(map(str, net.shape)), *(f"{t:.3f}" for t in ms), f"{ratio:.2f}"]
    print(f"| {' | '.join(cells)} | {share:.2%} |", flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", help="FIRST:END")
    parser.add_argument("--cache", type=Path, help="of compiled kernels; a new one by default")
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of timing for each net and repeat")
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    first, end = map(int, a.seeds.split(":"))
    print("| seed | net | input | dnnc | ONNX Runtime | OpenVINO | ratio to the faster | within a step |")
    print("|" + "---|" * 8)
    with tempfile.TemporaryDirectory() as scratch:
        a.cache = a.cache or Path(scratch)
        ratios = [measure(seed, a) for seed in range(first, end)]
    print(f"\nGeometric mean {geometric_mean(ratios):.2f}, lowest {min(ratios):.2f}")


if __name__ == "__main__":
    main()
