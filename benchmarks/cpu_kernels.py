"""Single kernels on one thread as a share of the FMA peak that the same run measures.

    python benchmarks/cpu_kernels.py [--seconds 3] [--only gemm] [--dtype bf16]

Each kernel goes the whole way: graph text, layout, fusion, lowering to a naive nest, the recipe's own first choice,
LLVM. Its blocks of calls alternate with a loop of independent FMAs, so that a change of clock or a busy neighbour meets
both.
"""

from __future__ import annotations

import argparse

import numpy as np
from rich.console import Console
from rich.table import Table
from single_kernel import case, measure

from dnnc.backends.llvm.ceilings import fma_probe
from dnnc.backends.llvm.features import parse_target

CASES = {
    "gemm 1024^3": "def g(a: f32[1024, 1024], *, b: f32[1024, 1024]):\n    y = matmul(a, b)\n    return y",
    "gemm 128x3072x768": "def g(a: f32[128, 768], *, b: f32[768, 3072]):\n    y = matmul(a, b)\n    return y",
    "gemm 128x768x3072": "def g(a: f32[128, 3072], *, b: f32[3072, 768]):\n    y = matmul(a, b)\n    return y",
    "conv 3x3 64->64 @56": "def g(a: f32[1, 64, 56, 56], *, b: f32[64, 64, 3, 3]):\n    y = conv(a, b, pads=(1, 1, 1, "
    "1))\n    return y",
    "conv 3x3 128->128 @28": "def g(a: f32[1, 128, 28, 28], *, b: f32[128, 128, 3, 3]):\n    y = conv(a, b, pads=(1, "
    "1, 1, 1))\n    return y",
    "conv 3x3 256->256 @14": "def g(a: f32[1, 256, 14, 14], *, b: f32[256, 256, 3, 3]):\n    y = conv(a, b, pads=(1, "
    "1, 1, 1))\n    return y",
    "conv 3x3 512->512 @7": "def g(a: f32[1, 512, 7, 7], *, b: f32[512, 512, 3, 3]):\n    y = conv(a, b, pads=(1, 1, "
    "1, 1))\n    return y",
    "conv 1x1 64->256 @56": "def g(a: f32[1, 64, 56, 56], *, b: f32[256, 64, 1, 1]):\n    y = conv(a, b)\n    return y",
    "conv 1x1 1024->256 @14": "def g(a: f32[1, 1024, 14, 14], *, b: f32[256, 1024, 1, 1]):\n    y = conv(a, b)\n    "
    "return y",
    "conv 7x7 s2 3->64 @224": "def g(a: f32[1, 3, 224, 224], *, b: f32[64, 3, 7, 7]):\n    y = conv(a, b, strides=(2, "
    "2), pads=(3, 3, 3, 3))\n    return y",
}


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--seconds", type=float, default=2.0, help="per kernel")
    ap.add_argument("--only", default="", help="part of a name")
    ap.add_argument("--target", default="llvm")
    ap.add_argument(
        "--dtype", default="f32", choices=("f32", "f16", "bf16"), help="how operands and results are stored"
    )
    a = ap.parse_args()
    target = parse_target(a.target)
    top = fma_probe(target)
    table = Table(
        title=f"{target.cpu}, {target.vector_bits}-bit vectors, one thread; share of the FMA peak of the same run"
    )
    for c in ("kernel", "schedule", "ms (min)", "GFLOP/s", "% of peak (min)", "% of peak (median)", "error / scale"):
        table.add_column(c, justify="left" if c in ("kernel", "schedule") else "right")
    for name, text in CASES.items():
        if a.only not in name:
            continue
        item = case(name, text, target, dtype=a.dtype)
        p, t = measure([top, item], a.seconds)
        fast, mid = (
            item.flops / x / (top.flops / y) * 100 for x, y in ((min(t), min(p)), (np.median(t), np.median(p)))
        )
        table.add_row(
            name,
            item.choice,
            f"{min(t) * 1e3:.3f}",
            f"{item.flops / min(t) / 1e9:.0f}",
            f"{fast:.1f}",
            f"{mid:.1f}",
            f"{item.error:.1e}",
        )
    table.caption = f"peak: {top.flops / min(p) / 1e9:.0f} GFLOP/s"
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
