"""Train a small convolutional network on scikit-learn's 8x8 digits with NumPy alone, and write it as ONNX.

    python examples/train_digits.py        # five seconds; writes digits.onnx and digits_samples.npz beside this file

    image f32[N, 1, 8, 8] -> conv 3x3, 16 -> relu -> conv 3x3, 32 -> relu -> max-pool 2
        -> gemm 64 -> relu -> gemm 10 -> logits f32[N, 10]

Pixels run from 0 (paper) to 1 (ink). The seed fixes the split, the first weights and the order of the batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

HERE = Path(__file__).parent
SEED, EPOCHS, BATCH, RATE = 0, 20, 32, 2e-3
Array = np.ndarray
Params = dict[str, Array]


def load_data(rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
    """Images f32[n, 1, 8, 8] and labels i64[n]: four fifths to train on, one fifth to test."""
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32).reshape(-1, 1, 8, 8), y.astype(np.int64)
    order = rng.permutation(len(x))
    cut = len(x) * 4 // 5
    train, test = order[:cut], order[cut:]
    return x[train], y[train], x[test], y[test]


def first_weights(rng: np.random.Generator) -> Params:
    """He initialisation: variance 2 / fan-in keeps the scale of activations through relu."""
    shapes = {"conv1.w": (16, 1, 3, 3), "conv2.w": (32, 16, 3, 3), "fc1.w": (512, 64), "fc2.w": (64, 10)}
    p: Params = {}
    for name, shape in shapes.items():
        conv = len(shape) == 4
        fan_in = np.prod(shape[1:]) if conv else shape[0]
        p[name] = (rng.standard_normal(shape) * np.sqrt(2 / fan_in)).astype(np.float32)
        p[name.replace(".w", ".b")] = np.zeros(shape[0] if conv else shape[1], np.float32)
    return p


def windows(x: Array) -> Array:
    """The 3x3 neighbourhood of every pixel, zeros outside: [n, c, h, w] -> [n, h, w, c, 3, 3], a view."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return sliding_window_view(padded, (3, 3), axis=(2, 3)).transpose(0, 2, 3, 1, 4, 5)


def conv(x: Array, w: Array, b: Array) -> Array:
    """A 3x3 convolution that keeps height and width."""
    return np.tensordot(windows(x), w, axes=((3, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2) + b[:, None, None]


def conv_grad(x: Array, w: Array, dy: Array) -> tuple[Array, Array, Array]:
    """Gradients by x, w and b. That by x is a convolution with the filter turned and channels swapped."""
    dw = np.tensordot(dy, windows(x), axes=((0, 2, 3), (0, 1, 2)))
    dx = conv(dy, w[:, :, ::-1, ::-1].transpose(1, 0, 2, 3), np.zeros(w.shape[1], np.float32))
    return dx, dw, dy.sum((0, 2, 3))


def forward(p: Params, x: Array) -> tuple[Array, Params]:
    """The logits, and the activations that the backward pass needs."""
    a: Params = {"x": x}
    a["h1"] = np.maximum(conv(x, p["conv1.w"], p["conv1.b"]), 0)
    a["h2"] = np.maximum(conv(a["h1"], p["conv2.w"], p["conv2.b"]), 0)
    n, c, h, w = a["h2"].shape
    tiles = a["h2"].reshape(n, c, h // 2, 2, w // 2, 2)
    pooled = tiles.max((3, 5))
    a["winner"] = tiles == pooled[:, :, :, None, :, None]
    a["flat"] = pooled.reshape(n, -1)
    a["h3"] = np.maximum(a["flat"] @ p["fc1.w"] + p["fc1.b"], 0)
    return a["h3"] @ p["fc2.w"] + p["fc2.b"], a


def gradients(p: Params, x: Array, y: Array) -> Params:
    """Gradients of the mean cross-entropy by every parameter."""
    logits, a = forward(p, x)
    e = np.exp(logits - logits.max(1, keepdims=True))
    d = e / e.sum(1, keepdims=True)
    d[np.arange(len(y)), y] -= 1
    d /= len(y)
    g = {"fc2.w": a["h3"].T @ d, "fc2.b": d.sum(0)}
    d = (d @ p["fc2.w"].T) * (a["h3"] > 0)
    g |= {"fc1.w": a["flat"].T @ d, "fc1.b": d.sum(0)}
    d = (d @ p["fc1.w"].T).reshape(len(x), 32, 4, 1, 4, 1) * a["winner"]
    d = d.reshape(a["h2"].shape) * (a["h2"] > 0)
    d, g["conv2.w"], g["conv2.b"] = conv_grad(a["h1"], p["conv2.w"], d)
    _, g["conv1.w"], g["conv1.b"] = conv_grad(a["x"], p["conv1.w"], d * (a["h1"] > 0))
    return g


def batches(rng: np.random.Generator, n: int) -> Iterator[Array]:
    order = rng.permutation(n)
    for i in range(0, n, BATCH):
        yield order[i : i + BATCH]


def train(rng: np.random.Generator, x: Array, y: Array) -> Params:
    """Adam, with a rate that falls to zero along a cosine."""
    p = first_weights(rng)
    m = {k: np.zeros_like(v) for k, v in p.items()}
    v = {k: np.zeros_like(w) for k, w in p.items()}
    step, steps = 0, EPOCHS * -(-len(x) // BATCH)
    for _ in range(EPOCHS):
        for at in batches(rng, len(x)):
            rate = RATE * 0.5 * (1 + np.cos(np.pi * step / steps))
            step += 1
            for k, g in gradients(p, x[at], y[at]).items():
                m[k] = 0.9 * m[k] + 0.1 * g
                v[k] = 0.999 * v[k] + 0.001 * g * g
                update = m[k] / (1 - 0.9**step) / (np.sqrt(v[k] / (1 - 0.999**step)) + 1e-8)
                p[k] = (p[k] - rate * update).astype(np.float32)
    return p


def to_onnx(p: Params) -> onnx.ModelProto:
    """The network as an ONNX model whose batch size is the symbolic dimension N."""
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


def main() -> None:
    rng = np.random.default_rng(SEED)
    x_train, y_train, x_test, y_test = load_data(rng)
    p = train(rng, x_train, y_train)
    accuracy = float((forward(p, x_test)[0].argmax(1) == y_test).mean())
    print(f"test accuracy {accuracy:.2%} on {len(y_test)} images")
    onnx.save(to_onnx(p), HERE / "digits.onnx")
    picks = [int(np.flatnonzero(y_test == k % 10)[k // 10]) for k in range(12)]  # every digit once, 0 and 1 twice
    np.savez_compressed(HERE / "digits_samples.npz", images=x_test[picks], labels=y_test[picks])


if __name__ == "__main__":
    main()
