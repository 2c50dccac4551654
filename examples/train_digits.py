"""Train a small convolutional network on scikit-learn's 8x8 digits, and write it as ONNX.

    python examples/train_digits.py [--target llvm|cuda] [--steps 900] [--log run.jsonl] [--report step.json]
    dnnc curves run.jsonl --report step.json -o run.html   # a page of the run

It writes digits.onnx and digits_samples.npz beside this file.

    image f32[N, 1, 8, 8] -> conv 3x3, 16 -> relu -> conv 3x3, 32 -> relu -> max-pool 2
        -> gemm 64 -> relu -> gemm 10 -> logits f32[N, 10]

Pixels run from 0 (paper) to 1 (ink). The seed fixes the split, the first weights and the order of the batches. A step
is one compiled program: forward, backward, and Adam with a rate that falls along a cosine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from scikit import load_digits

import dnnc
import dnnc.nn.functional as F
from dnnc import nn, optim

HERE = Path(__file__).parent
SEED, EPOCHS, BATCH, RATE = 0, 20, 32, 2e-3
Array = np.ndarray


def load_data(rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
    """Images f32[n, 1, 8, 8] and labels i64[n]: four fifths to train on, one fifth to test."""
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32).reshape(-1, 1, 8, 8), y.astype(np.int64)
    order = rng.permutation(len(x))
    cut = len(x) * 4 // 5
    train, test = order[:cut], order[cut:]
    return x[train], y[train], x[test], y[test]


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(512, 64), nn.Linear(64, 10)

    def forward(self, image: Any) -> Any:
        h = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(image)))), 2)
        return self.fc2(F.relu(self.fc1(h.reshape(h.shape[0], -1))))


def model() -> Any:
    return Digits()


def loss_of(net: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(net(x), y)


def batches(rng: np.random.Generator, steps: int, x: Array, y: Array) -> Iterator[tuple[Array, Array]]:
    """Each epoch has the images in another order."""
    order = np.concatenate([rng.permutation(len(x) // BATCH * BATCH) for _ in range(-(-steps * BATCH // len(x)) + 1)])
    for k in range(steps):
        at = order[k * BATCH : (k + 1) * BATCH]
        yield x[at], y[at]


def to_onnx(net: Any) -> onnx.ModelProto:
    """The network as an ONNX model whose batch size is the symbolic dimension N."""
    p = {n.replace("weight", "w").replace("bias", "b"): a.numpy() for n, a in net.state_dict().items()}
    p |= {n: p[n].T.copy() for n in ("fc1.w", "fc2.w")}  # Gemm has rows of inputs
    pads = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["image", "conv1.w", "conv1.b"], ["c1"], "conv1", **pads),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "conv2.w", "conv2.b"], ["c2"], "conv2", **pads),
        helper.make_node("Relu", ["c2"], ["r2"], "relu2"),
        helper.make_node("MaxPool", ["r2"], ["pool"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["pool"], ["flat"], "flatten"),
        helper.make_node("Gemm", ["flat", "fc1.w", "fc1.b"], ["f1"], "fc1"),
        helper.make_node("Relu", ["f1"], ["r3"], "relu3"),
        helper.make_node("Gemm", ["r3", "fc2.w", "fc2.b"], ["logits"], "fc2"),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(w, name) for name, w in sorted(p.items())],
    )
    model = helper.make_model(
        graph, producer_name="dnnc-examples", opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small convolutional network on digits.")
    parser.add_argument("--target", default="llvm", help="llvm or cuda")
    parser.add_argument("--steps", type=int, default=EPOCHS * 45, help="steps of 32 images, 45 of which are an epoch")
    parser.add_argument("--log", help="file for a line of JSON a step")
    parser.add_argument("--report", type=Path, help="file for the report of the step's program, as JSON")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(SEED)
    dnnc.random.seed(SEED)
    x_train, y_train, x_test, y_test = load_data(rng)
    net = model()
    optimizer = optim.Adam(lr=RATE)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    step = dnnc.train_step(loss_of, optimizer, net, target=args.target)
    given = batches(rng, args.steps, x_train, y_train)
    for batch in (bar := dnnc.progress(given, total=args.steps, log=args.log)):
        bar.tell(loss=step(*batch), lr=optimizer.param_groups[0]["lr"])
        schedule.step()
    if args.report is not None:
        args.report.write_text(step.programs[-1].report.to_json())

    net.eval().to("cpu")
    print(f"test accuracy {float(F.accuracy(net(x_test), y_test)):.2%} on {len(y_test)} images")
    onnx.save(to_onnx(net), HERE / "digits.onnx")
    picks = [int(np.flatnonzero(y_test == k % 10)[k // 10]) for k in range(12)]  # every digit once, 0 and 1 twice
    np.savez_compressed(HERE / "digits_samples.npz", images=x_test[picks], labels=y_test[picks])


if __name__ == "__main__":
    main()
