"""Products and convolutions of bytes and bfloat16 with matrix tiles (AMX), with vectors, and by ONNX Runtime.

    python benchmarks/matrix_tiles.py [--threads 1] [--budget 2]

For CPUs from Sapphire Rapids on. Bytes come and go as float32, as in a model with QuantizeLinear and DequantizeLinear;
bfloat16 is the precision of a float32 model, which ONNX Runtime computes in float32. Times are medians of alternating
calls, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import dnnc
from dnnc.tools.timing import alternate

Array = np.ndarray[Any, Any]
PRODUCTS = (
    (128, 768, 768), (128, 768, 3072), (128, 3072, 768), (512, 1024, 1024), (197, 384, 1536), (100, 320, 80),
    (1, 768, 768),
)  # fmt: skip
# input channels, pixels of a side, output channels, taps of a side, stride
CONVOLUTIONS = (
    (64, 56, 64, 3, 1), (128, 28, 128, 3, 1), (256, 14, 256, 3, 1), (512, 7, 512, 3, 1), (256, 56, 64, 1, 1),
    (64, 56, 256, 1, 1), (1024, 14, 256, 1, 1), (64, 28, 128, 3, 2),
)  # fmt: skip


def model(op: str, x: tuple[int, ...], w: Array, quantized: bool, **attrs: Any) -> bytes:
    """An ONNX file of one product or convolution with constant weights."""
    nodes, constants = [helper.make_node(op, ["x", "w"], ["y"], **attrs)], {"w": w}
    if quantized:
        codes = np.clip(np.rint(w * 40), -127, 127).astype(np.int8)
        constants = {"w8": codes, "sw": np.float32(1 / 40), "s": np.float32(1 / 50), "z": np.uint8(128)}
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["x8"]),
            helper.make_node("DequantizeLinear", ["x8", "s", "z"], ["xd"]),
            helper.make_node("DequantizeLinear", ["w8", "sw"], ["wd"]),
            helper.make_node(op, ["xd", "wd"], ["y"], **attrs),
        ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    data: bytes = made.SerializeToString()
    return data


def race(name: str, data: bytes, x: Array, precision: str | None, flops: float, a: argparse.Namespace) -> None:
    import onnxruntime  # optional

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = a.threads
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    targets = (f"llvm {flags}-threads={a.threads}" for flags in ("", "-mattr=-amx-tile "))
    ours = [dnnc.compile(data, target=t, precision=precision) for t in targets]  # type: ignore[call-overload]
    tiles, vectors = (np.asarray(f(x)) for f in ours)
    assert np.abs(tiles - vectors).max() <= 0.01 * np.abs(vectors).max(), f"{name}: results differ"
    calls: list[Callable[[], Any]] = [*(lambda f=f: f(x) for f in ours), lambda: session.run(None, {"x": x})]
    times = alternate(calls, 3, a.budget, lambda text: None)
    with_tiles, without, peer = (
        statistics.median(statistics.median(part[k]) for part in times) for k in range(len(calls))
    )
    by = next(
        (str(k.choice) for p in ours[0].report.programs for k in p.kernels if "matrix" in str(k.choice)), "vectors"
    )
    print(
        f"| {name} | {with_tiles * 1e6:.0f} | {without * 1e6:.0f} | {peer * 1e6:.0f} | {without / with_tiles:.2f} | "
        f"{flops / with_tiles / 1e9:.0f} | {by} |",
        flush=True,
    )


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--budget", type=float, default=2.0, help="seconds of timing per row")
    a = ap.parse_args()
    rng = np.random.default_rng(0)
    print("| layer | tiles | vectors | ONNX Runtime | vectors / tiles | GFLOP/s | schedule |")
    print("|---|---|---|---|---|---|---|")
    for kind, precision in (("int8", None), ("bfloat16", "bfloat16")):
        for m, k, n in PRODUCTS:
            x, w = (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n)))
            data = model("MatMul", x.shape, w, kind == "int8")
            race(f"{kind} {m} x {k} x {n}", data, x, precision, 2.0 * m * k * n, a)
        for c, side, o, taps, stride in CONVOLUTIONS:
            x, w = (rng.standard_normal(s).astype(np.float32) for s in ((1, c, side, side), (o, c, taps, taps)))
            data = model("Conv", x.shape, w, kind == "int8", pads=[taps // 2] * 4, strides=[stride] * 2)
            flops = 2.0 * c * o * taps**2 * (-(-side // stride)) ** 2
            race(f"{kind} conv {c} -> {o}, {side} x {side}, {taps} x {taps} / {stride}", data, x, precision, flops, a)


if __name__ == "__main__":
    main()
