"""Gradients of filters on one GPU: our kernels beside cuDNN through PyTorch, channels last.

    python benchmarks/gpu/filters.py [--only WORD,WORD] [--candidates N] [--warm] [--repeats N] [--json OUT]
                                     [--emit-only]

What a line says, and how it is measured, stands in single.py.
"""

from __future__ import annotations

import sys
from typing import Any

from single import LAST, Case, Schedules, case, options, run

# name -> input channels, output channels, height and width, filter, stride, padding, groups
LAYERS = {
    "l1_1x1a": (64, 64, 56, 1, 1, 0, 1), "l1_3x3": (64, 64, 56, 3, 1, 1, 1), "l1_1x1c": (64, 256, 56, 1, 1, 0, 1),
    "l2_3x3s2": (128, 128, 56, 3, 2, 1, 1), "l2_3x3": (128, 128, 28, 3, 1, 1, 1), "l3_3x3": (256, 256, 14, 3, 1, 1, 1),
    "l3_1x1c": (256, 1024, 14, 1, 1, 0, 1), "l4_3x3": (512, 512, 7, 3, 1, 1, 1), "depthwise": (96, 96, 56, 3, 1, 1, 96),
    "groups": (128, 128, 28, 3, 1, 1, 4),
}  # fmt: skip
DEPTHWISE = '@ "1 2 3 0"'


def filters(name: str, images: int, t: str) -> Case:
    ci, co, hw, k, stride, pad, group = LAYERS[name]
    out = (hw + 2 * pad - k) // stride + 1

    def peer(x: Any, g: Any) -> Any:
        import torch

        return torch.nn.grad.conv2d_weight(x, (co, ci // group, k, k), g, stride, pad, 1, group)

    order = DEPTHWISE if group == ci else LAST
    sides = f"kernel=({k}, {k}), strides=({stride}, {stride}), pads=({pad}, {pad}, {pad}, {pad}), group={group}"
    inputs = f"x: {t}[{images}, {ci}, {hw}, {hw}] {LAST}, g: {t}[{images}, {co}, {out}, {out}] {LAST}"
    body = f"y: {t}[{co}, {ci // group}, {k}, {k}] {order} = conv_backward_filter(x, g, {sides})"
    return case(f"{t}_{name}_b{images}", inputs, body, peer)


def main() -> int:
    ap = options(__doc__)
    ap.add_argument("--candidates", type=int, default=3, help="schedules of each case and template, best guess first")
    a, schedules = ap.parse_args(), Schedules()
    names = ("wgmma", "mma", "tf32x3", "simt", "reduce")
    cases = [filters(name, n, t) for t in ("f32", "f16") for n in (1, 32) for name in LAYERS if name != "depthwise"]
    return run(cases, lambda p: schedules.offered(p, names, a.candidates), schedules, a)


if __name__ == "__main__":
    sys.exit(main())
