"""Is a sparse layer ever slower than the same one dense? Random layers, as the compiler chooses, by density and CPU.

    python benchmarks/sparse_sweep.py --cpu haswell [--layers 40] [--seed 0] [--threads 1] [--forced] [--block 8x8]

Layers are products, and convolutions of 1 to 8 images by windows of 1 x 1 to 5 x 5, some with strides, between blocks
of channels; the time is that of the kernel alone, the shortest of interleaved calls. Each cell is the speed over the
dense layer and what was chosen: code, a loop, blocks, or dense. `--block` prunes blocks of output and input channels.
`--forced` takes sparse kernels wherever there are some, and adds the ratio that was expected.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sparse import convolution, pruned
from timing import geometric_mean

import dnnc
from dnnc.passes.rewrites import sparse as rules

DENSITIES = (0.02, 0.1, 0.2, 0.3, 0.5)
MOST = 1.5e8  # multiply-adds of a dense layer
ROUNDS = 5


def product(rows: int, terms: int, columns: int, density: float, block: tuple[int, int]) -> onnx.ModelProto:
    w = {"w": np.ascontiguousarray(pruned((columns, terms), density, 0, block).T), "b": pruned((columns,), 1.0)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"], "pruned"), helper.make_node("Add", ["m", "b"], ["y"])]
    values = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in (("x", [rows, terms]), ("y", None))
    ]
    graph = helper.make_graph(
        nodes, "g", values[:1], values[1:], [numpy_helper.from_array(a, name) for name, a in w.items()]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def layer(rng: np.random.Generator, block: tuple[int, int]) -> tuple[str, tuple[int, ...], Any]:
    """The name of a random layer, the shape of its input, and its model by density."""
    while True:
        kind = ("product", "product", "1x1", "1x1", "1x1", "3x3", "3x3", "5x5")[rng.integers(8)]
        images, stride = (1, 1, 1, 2, 4, 8)[rng.integers(6)], (1, 1, 1, 2)[rng.integers(4)]
        o, c = (int(2 ** rng.uniform(4, 9.5)) for _ in range(2))
        side = int(2 ** (rng.uniform(0, 8) if kind == "product" else rng.uniform(2.6, 5.8)))
        k = int(kind[0]) if kind != "product" else 1
        if kind == "product" and o * c * side < MOST:
            return f"{side} x {c} by {c} x {o}", (side, c), lambda d: product(side, c, o, d, block)
        if kind != "product" and side >= k and images * o * c * side**2 * k**2 < MOST:
            name = f"{o}x{c} {kind} @{side}{f' / {stride}' if stride > 1 else ''}{f', {images} images' * (images > 1)}"
            shape = images, c, side, side
            return name, shape, lambda d: convolution((o, c, side, k), d, True, block, images, stride)


FORMS = {"CSR": "loop", "straight-line code": "code", "blocks": "blocks"}


def chosen(f: Any) -> str:
    found = re.findall(f"w, [^\\n]*: sparse, ({'|'.join(FORMS)})", str(f.report))
    return FORMS[found[0]] if found else "dense"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forced", action="store_true")
    parser.add_argument("--block", default="1x1")
    args = parser.parse_args()
    high, wide = map(int, args.block.split("x"))
    if args.forced:
        rules.GAIN = rules.WINDOW_GAIN = rules.UNKNOWN_GAIN = 0.0
    target = f"llvm{f' -mcpu={args.cpu}' if args.cpu else ''} -threads={args.threads}"
    rng = np.random.default_rng(args.seed)
    taken: list[float] = []
    print(f"| layer | dense, us | {' | '.join(f'{d:.0%}' for d in DENSITIES)} |\n|---|---{'|---' * len(DENSITIES)}|")
    for _ in range(args.layers):
        name, shape, model = layer(rng, (high, wide))
        x = rng.standard_normal(shape).astype(np.float32)
        calls = [dnnc.compile(model(d), target=target) for d in (1.0, *DENSITIES)]
        best = [float("inf")] * len(calls)
        for _ in range(ROUNDS):
            for k, f in enumerate(calls):
                seconds = sum(r.seconds for r in f.profile(x).kernels if any("pruned" in n for n in r.nodes))
                best[k] = min(best[k], seconds)
        cells = []
        for f, t in zip(calls[1:], best[1:]):
            cells.append(f"{best[0] / t:.2f} {chosen(f)}")
            if chosen(f) != "dense":
                taken.append(best[0] / t)
            if args.forced and (m := re.search(r"w, [^\n]*?([\d.]+) times", str(f.report))):
                cells[-1] += f" ({m[1]})"
        print(f"| {name} | {best[0] * 1e6:.1f} | {' | '.join(cells)} |", flush=True)
    if taken:
        print(f"\n{len(taken)} sparse: {geometric_mean(taken):.2f} in geometric mean, {min(taken):.2f} at least")


if __name__ == "__main__":
    main()
