"""Matrix products and convolutions by wgmma on one GPU: our kernels, epilogues included, beside bare calls of cuBLAS
and cuDNN (through PyTorch).

    python benchmarks/gpu/kernels.py [--shapes MxNxK,... | none] [--convs NAME,... | all | none] [--batches 1,32]
        [--qkv BxSxHxD,...]
                                     [--act relu|gelu|silu] [--dtype f16|bf16] [--weights nk|kn] [--mma N]
                                     [--tilings N|all|BMxBNxSTAGES[xGROUP[xSPLIT[xRESIDENT]]]]
                                     [--only WORD,WORD] [--warm] [--replays N] [--repeats N] [--json OUT] [--emit-only]
    PYTHONPATH=.types python3 benchmarks/gpu/kernels.py        where dnnc is not installed; `make .types` makes that
                                                               folder

Ours computes act(A @ B + bias) or act(conv(x, w) + bias), or queries, keys and values of a batch in one product, stored
head by head; the library the bare product or convolution (NHWC, cudnn.benchmark). --mma adds kernels of the template
`mma`. What a line says, and how it is measured, stands in single.py.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from single import LAST, Case, Schedules, case, options, run

from dnnc.backends.cuda.templates.contraction.wgmma import GROUP
from dnnc.passes.schedule.problem import Choice, Problem

SHAPES = (
    "1024x1024x1024,2048x2048x2048,4096x4096x4096,8192x8192x8192,4096x3072x768,4096x768x3072,4096x768x768,128x2304x768,128x3072x768,"
    "128x768x3072,128x768x768,128x4096x4096,197x1536x384,1000x1000x1000"
)
# name -> input channels, output channels, height and width, filter, stride, padding: of ResNet-50, VGG and
# EfficientNet-B0
CONVS = {
    "l1_1x1a": (64, 64, 56, 1, 1, 0), "l1_3x3": (64, 64, 56, 3, 1, 1), "l1_1x1c": (64, 256, 56, 1, 1, 0),
    "l2_3x3s2": (128, 128, 56, 3, 2, 1),
    "l2_3x3": (128, 128, 28, 3, 1, 1), "l3_1x1s2": (512, 1024, 28, 1, 2, 0), "l3_3x3": (256, 256, 14, 3, 1, 1),
    "l3_1x1c": (256, 1024, 14, 1, 1, 0),
    "l4_3x3": (512, 512, 7, 3, 1, 1), "l4_1x1a": (2048, 512, 7, 1, 1, 0), "vgg_256": (256, 256, 56, 3, 1, 1),
    "eff_16_96": (16, 96, 112, 1, 1, 0), "eff_24_144": (24, 144, 56, 1, 1, 0), "eff_40_240": (40, 240, 28, 1, 1, 0),
    "eff_96_24": (96, 24, 56, 1, 1, 0),
}  # fmt: skip
KNOBS = ("bm", "bn", "stages", "group", "split", "resident")


def arguments() -> argparse.Namespace:
    ap = options(__doc__)
    ap.add_argument("--shapes", default=SHAPES, help="MxNxK, separated by commas; none")
    ap.add_argument("--convs", default="none", help=f"of {', '.join(CONVS)}; all; none")
    ap.add_argument("--batches", default="1,32", help="of the convolutions")
    ap.add_argument(
        "--qkv", default="none", help="BxSxHxD, separated by commas: batch, tokens, heads, elements of a head; none"
    )
    ap.add_argument("--act", default="relu", choices=("relu", "gelu", "silu"), help="what follows the bias")
    ap.add_argument("--mma", type=int, default=0, help="how many kernels of the template mma are timed as well")
    ap.add_argument("--dtype", default="f16", choices=("f16", "bf16"))
    ap.add_argument(
        "--weights", default="kn", choices=("nk", "kn"), help="how B lies in memory: as in ONNX (kn), or transposed"
    )
    ap.add_argument(
        "--tilings",
        default="3",
        help="how many, best guess first; all; or one, BMxBNxSTAGES[xGROUP[xSPLIT[xRESIDENT]]]",
    )
    return ap.parse_args()


def finished(y: str, act: str) -> str:
    """The lines of a graph that follow the bias: h -> y, of this type."""
    return f"s: {y} = sigmoid(h); y: {y} = mul(h, s)" if act == "silu" else f"y: {y} = {act}(h)"


def activated(x: Any, act: str) -> Any:
    from torch.nn import functional

    return getattr(functional, act)(x)


def matmul(m: int, n: int, k: int, a: argparse.Namespace) -> Case:
    d, kn = a.dtype, a.weights == "kn"
    y = f"{d}[{m}, {n}]"

    def peer(x: Any, w: Any, b: Any) -> Any:
        import torch

        return torch.mm(x, w if kn else w.t())

    inputs = f"x: {d}[{m}, {k}], w: {d}[{f'{k}, {n}' if kn else f'{n}, {k}'}], b: {d}[{n}]"
    body = f"h: {y} = add(matmul(x, {'w' if kn else 'transpose(w, perm=(1, 0))'}), b); {finished(y, a.act)}"
    return case(f"{m}x{n}x{k}", inputs, body, peer, lambda x, w, b: activated(peer(x, w, b) + b, a.act))


def conv(name: str, batch: int, a: argparse.Namespace) -> Case:
    ci, co, hw, r, stride, pad = CONVS[name]
    d, out = a.dtype, (hw + 2 * pad - r) // stride + 1
    y = f"{d}[{batch}, {co}, {out}, {out}] {LAST}"

    def peer(x: Any, w: Any, b: Any, bias: bool = False) -> Any:
        import torch

        return torch.nn.functional.conv2d(x, w, b if bias else None, stride, pad)

    inputs = f"x: {d}[{batch}, {ci}, {hw}, {hw}] {LAST}, w: {d}[{co}, {ci}, {r}, {r}] {LAST}, b: {d}[{co}]"
    body = (
        f"h: {y} = conv(x, w, b, strides=({stride}, {stride}), pads=({pad}, {pad}, {pad}, {pad})); {finished(y, a.act)}"
    )
    return case(f"{name} b{batch}", inputs, body, peer, lambda x, w, b: activated(peer(x, w, b, bias=True), a.act))


def qkv(batch: int, tokens: int, heads: int, size: int, a: argparse.Namespace) -> Case:
    k, d, rows = heads * size, a.dtype, f"{a.dtype}[{batch}, {tokens}"

    def peer(x: Any, w: Any, b: Any) -> Any:
        import torch

        return torch.mm(x.view(-1, k), w)

    def want(x: Any, w: Any, b: Any) -> Any:
        return (peer(x, w, b) + b).view(batch, tokens, 3, heads, size).permute(2, 0, 3, 1, 4)

    body = (
        f"h: {rows}, {3 * k}] = add(matmul(x, w), b); r: {rows}, 3, {heads}, {size}] = reshape(h, shape=({batch}, "
        f"{tokens}, 3, {heads}, {size}))"
    )
    body += f"; y: {d}[3, {batch}, {heads}, {tokens}, {size}] = transpose(r, perm=(2, 0, 3, 1, 4))"
    return case(
        f"qkv {batch}x{tokens}x{heads}x{size}",
        f"x: {rows}, {k}], w: {d}[{k}, {3 * k}], b: {d}[{3 * k}]",
        body,
        peer,
        want,
    )


def wanted(p: Problem, a: argparse.Namespace, schedules: Schedules) -> list[Choice]:
    """The tilings of --tilings among those that a problem offers, or one of one's own; then those of --mma."""
    if "x" in a.tilings:
        given = {"group": GROUP, "split": 1, "resident": 1} | dict(zip(KNOBS, map(int, a.tilings.split("x"))))
        found = [Choice("wgmma", tuple((name, given[name]) for name in KNOBS))]
    else:
        found = schedules.offered(p, ("wgmma",), None if a.tilings == "all" else int(a.tilings))
    return found + schedules.offered(p, ("mma",), a.mma)


def main() -> int:
    a, schedules = arguments(), Schedules()
    layers = list(CONVS) if a.convs == "all" else [c for c in a.convs.split(",") if c != "none"]
    cases = [matmul(*map(int, s.split("x")), a) for s in a.shapes.split(",") if s != "none"]  # type: ignore[arg-type, call-arg]
    cases += [conv(name, int(batch), a) for name in layers for batch in a.batches.split(",")]
    cases += [qkv(*map(int, s.split("x")), a) for s in a.qkv.split(",") if s != "none"]  # type: ignore[arg-type, call-arg]
    return run(cases, lambda p: wanted(p, a, schedules), schedules, a, dtype=a.dtype, weights=a.weights)


if __name__ == "__main__":
    sys.exit(main())
