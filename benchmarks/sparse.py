"""Pruned weights on the CPU: products, convolutions and whole models by sparse kernels beside the same weights dense.

    python benchmarks/sparse.py products [--threads 1] [--cpu haswell]
    python benchmarks/sparse.py models [--onnx DIR] [--densities 0.2 0.1] [--threads 2] [--cpu haswell]

`products` are 1 x 1 and 3 x 3 convolutions of an image in rows, all kernels of a call, and of one in blocks of
channels, the kernel alone: time, share of the FMA peak by nonzeros, speed over our dense kernels and 95 % of the peak.
`models` prunes all 1 x 1 convolutions: MobileNetV1 and V2 are built here, by PyTorch, others come from DIR
(`python benchmarks/zoo build`). Masks are random. Times are the shortest of interleaved calls; the error is that
against numerics="strict", whose weights are dense.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import zoo
from onnx import TensorProto, helper, numpy_helper
from timing import geometric_mean

import dnnc
from dnnc.backends.registry import open_backend

Array = np.ndarray[Any, Any]
# outputs, inputs, side of the image, side of the window
SHAPES = (
    (64, 32, 112, 1), (96, 24, 56, 1), (24, 144, 56, 1), (128, 128, 56, 1), (256, 256, 28, 1), (512, 512, 14, 1),
    (1024, 1024, 7, 1), (512, 2048, 7, 1), (128, 128, 28, 3), (256, 256, 14, 3),
    (64, 64, 56, 3), (512, 512, 7, 3),
)  # fmt: skip
FOREIGN = ("efficientnet_b0", "resnet50")


def pruned(shape: Sequence[int], density: float, seed: int = 0, block: tuple[int, int] = (1, 1)) -> Array:
    """Random weights, of which a random share is not 0: single ones, or blocks of output and input channels."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(shape).astype(np.float32)
    if density < 1:
        stays = np.zeros([-(-n // k) for n, k in zip(shape, (*block, *[1] * len(shape)))], np.bool_)
        stays.reshape(-1)[rng.permutation(stays.size)[: max(int(density * stays.size), 1)]] = True
        for axis, (n, k) in enumerate(zip(shape, block)):
            stays = stays.repeat(k, axis).take(np.arange(n), axis)
        w *= stays
    return w / np.float32(np.sqrt(np.prod(shape[1:]) * density))


# --- products ---------------------------------------------------------------------------------------------------------


def convolution(
    shape: tuple[int, int, int, int],
    density: float,
    blocks: bool,
    block: tuple[int, int] = (1, 1),
    images: int = 1,
    stride: int = 1,
) -> onnx.ModelProto:
    """A convolution with bias and ReLU; `blocks`: behind a dense one, and in front of a global sum."""
    o, c, side, k = shape
    weights = {"w": pruned((o, c, k, k), density, 0, block), "b": pruned((o,), 1.0)}
    nodes = [
        helper.make_node(
            "Conv", ["x", "w", "b"], ["c"], "pruned", kernel_shape=[k, k], pads=[k // 2] * 4, strides=[stride] * 2
        ),
        helper.make_node("Relu", ["c"], ["y"], "relu"),
    ]
    if blocks:
        weights["v"] = pruned((c, c, 1, 1), 1.0, 1)
        nodes[0].input[0] = "p"
        nodes = [helper.make_node("Conv", ["x", "v"], ["p"], "dense", kernel_shape=[1, 1]), *nodes]
    return _model(nodes, weights, [images, c, side, side])


def _model(nodes: list[Any], weights: dict[str, Array], shape: list[int]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(w, n) for n, w in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def kernel_time(f: Any, x: Array, blocks: bool) -> float:
    """Seconds of the convolution's kernel; of all kernels where images come in rows, which dense ones pack."""
    f(x)
    times = []
    for _ in range(3):
        times.append(sum(k.seconds for k in f.profile(x).kernels if not blocks or any("pruned" in n for n in k.nodes)))
    return min(times)


def products(args: argparse.Namespace, target: str) -> None:
    peak = open_backend(target).ceilings(args.threads).flops
    for blocks in (False, True):
        print(f"\nimages in {'blocks of channels' if blocks else 'rows'}, {peak / 1e9:.0f} GFLOP/s at the peak\n")
        print("| shape | nonzeros | us | share of the peak | over our dense | over 95 % of the peak |")
        print("|---|---|---|---|---|---|")
        for density in args.densities:
            ours, ideal = [], []
            for shape in SHAPES:
                o, c, side, k = shape
                x = np.random.default_rng(2).standard_normal((1, c, side, side)).astype(np.float32)
                dense, sparse = (
                    kernel_time(dnnc.compile(convolution(shape, d, blocks), target=target), x, blocks)
                    for d in (1.0, density)
                )
                flops = 2 * o * c * k * k * side * side
                ours.append(dense / sparse)
                ideal.append(flops / (0.95 * peak) / sparse)
                share = flops * density / sparse / peak
                name = f"{o}x{c} {k}x{k} @{side} | {density:.0%} | {sparse * 1e6:.1f} | {share:.0%}"
                print(f"| {name} | {ours[-1]:.2f} | {ideal[-1]:.2f} |", flush=True)
            print(f"| geometric mean | {density:.0%} | | | {geometric_mean(ours):.2f} | {geometric_mean(ideal):.2f} |")


# --- models -----------------------------------------------------------------------------------------------------------


def mobilenet(version: int) -> Any:
    """MobileNetV1 or V2 in PyTorch, with random weights."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    def conv(i: int, o: int, k: int, stride: int = 1, group: int = 1, act: bool = True) -> Any:
        norm = nn.BatchNorm2d(o)
        norm.running_var.fill_(1 / 6)  # of the results of uniform weights, behind a ReLU
        return nn.Sequential(
            nn.Conv2d(i, o, k, stride, k // 2, groups=group, bias=False), norm, *([nn.ReLU6()] if act else [])
        )

    class Inverted(nn.Module):
        def __init__(self, i: int, o: int, stride: int, t: int) -> None:
            super().__init__()
            h = i * t
            self.adds = stride == 1 and i == o
            self.body = nn.Sequential(
                *([conv(i, h, 1)] if t != 1 else []), conv(h, h, 3, stride, h), conv(h, o, 1, act=False)
            )

        def forward(self, x: Any) -> Any:
            return x + self.body(x) if self.adds else self.body(x)

    layers, c = [conv(3, 32, 3, 2)], 32
    if version == 1:
        for o, stride in (
            (64, 1),
            (128, 2),
            (128, 1),
            (256, 2),
            (256, 1),
            (512, 2),
            *[(512, 1)] * 5,
            (1024, 2),
            (1024, 1),
        ):
            layers += [conv(c, c, 3, stride, c), conv(c, o, 1)]
            c = o
    else:
        blocks = (
            (1, 16, 1, 1),
            (6, 24, 2, 2),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        )
        for t, o, n, stride in blocks:
            for k in range(n):
                layers.append(Inverted(c, o, stride if k == 0 else 1, t))
                c = o
        layers.append(conv(c, 1280, 1))
        c = 1280
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 1000)).eval()


def exported(version: int, path: Path) -> onnx.ModelProto:
    import torch

    torch.onnx.export(mobilenet(version), (torch.randn(1, 3, 224, 224),), path, dynamo=False, opset_version=17)
    return onnx.load(path)


def prune(model: onnx.ModelProto, density: float) -> onnx.ModelProto:
    """The model with that share of the weights of its 1 x 1 convolutions, but for depthwise ones."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    arrays = {t.name: t for t in model.graph.initializer}
    for k, name in enumerate(dict.fromkeys(n.input[1] for n in model.graph.node if n.op_type == "Conv")):
        w = numpy_helper.to_array(arrays[name])
        if w.shape[2:] == (1, 1) and w.shape[1] > 1:
            mask = pruned(w.shape, density, k) != 0  # no two layers share code
            arrays[name].CopyFrom(numpy_helper.from_array(np.where(mask, w / np.float32(np.sqrt(density)), 0), name))
    return model


def models(args: argparse.Namespace, target: str) -> None:
    folder = Path(args.onnx)
    folder.mkdir(parents=True, exist_ok=True)
    found = {f"mobilenet_v{k}": exported(k, folder / f"mobilenet_v{k}.onnx") for k in (1, 2)}
    found.update({n: zoo.materialize(p) for n in FOREIGN if (p := folder / f"{n}.onnx").exists()})
    print("| model | nonzeros | dense ms | sparse ms | ratio | compile, dense and sparse, s | largest error |")
    print("|---|---|---|---|---|---|---|")
    gains: dict[float, list[float]] = {d: [] for d in args.densities}
    for name, model in found.items():
        x = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
        calls, seconds, errors = [], [], []
        for density in (1.0, *args.densities):
            file = model if density == 1 else prune(model, density)
            start = time.perf_counter()
            f = dnnc.compile(file, target=target, cache=False)
            seconds.append(time.perf_counter() - start)
            want = dnnc.compile(file, target=target, numerics="strict")(x)
            errors.append(float(np.abs(f(x) - want).max() / np.abs(want).max()))
            calls.append(f)
        best = [float("inf")] * len(calls)
        for _ in range(args.repeats):
            for k, f in enumerate(calls):
                start = time.perf_counter()
                f(x)
                best[k] = min(best[k], time.perf_counter() - start)
        for k, density in enumerate(args.densities, 1):
            gains[density].append(best[0] / best[k])
            print(
                f"| {name} | {density:.0%} | {best[0] * 1e3:.2f} | {best[k] * 1e3:.2f} | {best[0] / best[k]:.2f} "
                f"| {seconds[0]:.1f}, {seconds[k]:.1f} | {errors[k]:.1e} |",
                flush=True,
            )
    for density, ratios in gains.items():
        print(f"\n{density:.0%}: geometric mean {geometric_mean(ratios):.2f}, lowest {min(ratios):.2f}")


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", choices=("products", "models"))
    ap.add_argument("--onnx", default="models")
    ap.add_argument("--densities", type=float, nargs="+", default=[0.2, 0.1, 0.05])
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--repeats", type=int, default=30)
    ap.add_argument("--cpu", default="")
    args = ap.parse_args()
    target = f"llvm{f' -mcpu={args.cpu}' if args.cpu else ''} -threads={args.threads}"
    (products if args.what == "products" else models)(args, target)


if __name__ == "__main__":
    main()
