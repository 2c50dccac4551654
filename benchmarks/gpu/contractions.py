"""Matrix products and convolutions on one GPU by the templates gemv, mma, tf32x3, simt and tf32: our kernels beside
PyTorch (cuBLAS, cuDNN).

    python benchmarks/gpu/contractions.py [--only WORD,WORD] [--templates gemv,mma,tf32x3,simt] [--tf32]
                                          [--candidates N] [--warm] [--repeats N] [--json OUT] [--emit-only]
    PYTHONPATH=.types python3 benchmarks/gpu/contractions.py     where dnnc is not installed; `make .types` makes that
                                                                 folder

What a line says, and how it is measured, stands in single.py. Float32 is float32 on both sides, with --tf32 TF32 on
both.
"""

from __future__ import annotations

import sys
from typing import Any

from single import LAST, Case, Schedules, case, options, run


def product(m: int, n: int, k: int, t: str = "f32", nk: bool = False, batch: int = 0) -> Case:
    """x @ w, the weights as in ONNX (k, n) or as in PyTorch (n, k)."""
    b = f"{batch}, " if batch else ""
    name = f"{t}_{'b' + str(batch) + '_' if batch else ''}{m}x{n}x{k}{'_nk' if nk else ''}"
    if nk:
        return case(name, f"w: {t}[{n}, {k}], x: {t}[{k}, {m}]", "y = matmul(w, x)", lambda w, x: w @ x)
    return case(name, f"x: {t}[{b}{m}, {k}], w: {t}[{b}{k}, {n}]", "y = matmul(x, w)", lambda x, w: x @ w)


def dense(m: int, n: int, k: int, t: str) -> Case:
    def peer(x: Any, w: Any, c: Any, r: Any) -> Any:
        import torch

        return torch.nn.functional.gelu(x @ w + c) + r

    inputs = f"x: {t}[{m}, {k}], w: {t}[{k}, {n}], c: {t}[{n}], r: {t}[{m}, {n}]"
    return case(f"{t}_dense_{m}x{n}x{k}", inputs, "a = matmul(x, w); b = add(a, c); d = gelu(b); y = add(d, r)", peer)


def conv(
    name: str,
    x: tuple[int, ...],
    w: tuple[int, ...],
    stride: int = 1,
    pad: int = 0,
    t: str = "f32",
    group: int = 1,
    last: bool = False,
) -> Case:
    """`last`: channels are, as in whole models."""

    def peer(a: Any, b: Any) -> Any:
        import torch

        return torch.nn.functional.conv2d(a, b, None, stride, pad, 1, group)

    text = f"y = conv(x, w, strides=({stride}, {stride}), pads=({pad}, {pad}, {pad}, {pad}), group={group})"
    order = f" {LAST}" if last else ""
    size = [(n + 2 * pad - k) // stride + 1 for n, k in zip(x[2:], w[2:])]
    text = text.replace("y =", f"y: {t}[{x[0]}, {w[0]}, {size[0]}, {size[1]}]{order} =")
    inputs = f"x: {t}[{', '.join(map(str, x))}]{order}, w: {t}[{', '.join(map(str, w))}]{order}"
    return case(f"{t}_conv_{name}{'_nhwc' if last else ''}", inputs, text, peer)


def cases() -> list[Case]:
    out = [product(*s) for s in ((4096, 4096, 4096), (1024, 1024, 1024), (512, 512, 512), (128, 3072, 768),
    (128, 768, 768), (128, 768, 3072),
                                 (197, 384, 1536), (197, 1536, 384), (2048, 2048, 2048), (16, 4096, 4096),
                                 (1000, 1000, 1000))]  # fmt: skip
    out += [
        product(1, 480, 20),
        product(1, 1152, 48),
        product(1, 4096, 4096),
        product(1, 1, 4096, nk=True),
        product(128, 128, 64, batch=96),
        dense(1024, 1024, 1024, "f32"),
    ]
    out += [product(*s, "f16") for s in ((4096, 4096, 4096), (1024, 1024, 1024), (128, 3072, 768), (128, 768, 768),
    (16, 4096, 4096),
                                         (1000, 1000, 1000))]  # fmt: skip
    out += [product(1, n, k, "f16") for n, k in ((4096, 4096), (768, 768), (3072, 768), (768, 3072), (50257, 768))]
    out += [
        product(1, n, k, "f16", nk=True) for n, k in ((4096, 4096), (768, 768), (3072, 768), (768, 3072), (50257, 768))
    ]
    out += [product(8, 4096, 4096, "f16"), product(128, 128, 64, "f16", batch=96), dense(1024, 1024, 1024, "f16")]
    layers = {"l1_3x3": ((64, 56, 56), (64, 64, 3, 3), 1, 1), "l2_3x3s2": ((128, 56, 56), (128, 128, 3, 3), 2, 1),
              "l3_3x3": ((256, 14, 14), (256, 256, 3, 3), 1, 1), "l4_3x3": ((512, 7, 7), (512, 512, 3, 3), 1, 1),
              "l1_1x1": ((64, 56, 56), (256, 64, 1, 1), 1, 0), "l4_1x1": ((512, 7, 7), (2048, 512, 1, 1), 1, 0),
              "stem": ((3, 224, 224), (64, 3, 7, 7), 2, 3)}  # fmt: skip
    out += [
        conv(f"{name}_b1", (1, *x), w, stride, pad, last=True)
        for name, (x, w, stride, pad) in layers.items()
        if name != "stem"
    ]
    for t in ("f32", "f16"):
        for n in (1, 32):
            out += [conv(f"{name}_b{n}", (n, *x), w, stride, pad, t) for name, (x, w, stride, pad) in layers.items()]
    return out


def main() -> int:
    ap = options(__doc__)
    ap.add_argument("--templates", default="gemv,mma,tf32x3,simt", help="of gemv, wgmma, mma, tf32x3, simt, threads")
    ap.add_argument("--tf32", action="store_true", help="the template tf32 in the place of simt, and PyTorch with TF32")
    ap.add_argument("--candidates", type=int, default=4, help="schedules of each case and template, best guess first")
    a = ap.parse_args()
    schedules = Schedules(rounded=a.tf32)
    names = (a.templates.replace("simt", "tf32") if a.tf32 else a.templates).split(",")
    return run(cases(), lambda p: schedules.offered(p, names, a.candidates), schedules, a)


if __name__ == "__main__":
    sys.exit(main())
