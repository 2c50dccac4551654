"""Attention on one GPU: our kernels beside PyTorch's scaled_dot_product_attention, without causal masks.

    python benchmarks/gpu/attention.py [--only WORD,WORD]
        [--candidates N | --knobs ROWS,WARPS,KEYS,STAGES,SLICES,PARTS:...]
                                       [--warm] [--repeats N] [--json OUT] [--emit-only]
    PYTHONPATH=.types python3 benchmarks/gpu/attention.py     where dnnc is not installed; `make .types` makes that
                                                              folder

What a line says, and how it is measured, stands in single.py. Names are of the type, batch B, heads H, queries M, keys
N, elements D of a head. Float32 is float32 on both sides.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from single import Case, Schedules, case, options, run

from dnnc.backends.cuda.templates.attention.choice import shapes
from dnnc.backends.cuda.templates.attention.nest import attention_of
from dnnc.ir.dtype import f32
from dnnc.passes.schedule.problem import Choice, Knobs, Problem

NAMES = ("rows", "warps", "keys", "stages", "slices", "parts")


def heads(b: int, h: int, m: int, n: int, d: int, t: str = "f16", mask: str = "") -> Case:
    """softmax(q kT / sqrt(d) + mask) v; `mask`: its shape."""
    scale = d**-0.5

    def peer(q: Any, k: Any, v: Any, more: Any = None) -> Any:
        import torch

        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None if more is None else more.to(q.dtype), scale=scale
        )

    inputs = ", ".join(f"{x}: {t}[{b}, {h}, {s}, {d}]" for x, s in (("q", m), ("k", n), ("v", n))) + (
        f", mask: f32[{mask}]" if mask else ""
    )
    name = f"{t}_B{b}_H{h}_M{m}_N{n}_D{d}{'_mask' if mask else ''}"
    return case(name, inputs, f"y = attention(q, k, v, {'mask, ' if mask else ''}scale={scale})", peer)


def cases() -> list[Case]:
    out = [heads(1, 12, 128, 128, 64), heads(32, 12, 128, 128, 64), heads(1, 12, 128, 128, 64, mask="1, 1, 1, 128")]
    out += [heads(8, 16, 2048, 2048, d, t) for d in (64, 128) for t in ("f16", "bf16")]
    out += [
        heads(8, 16, 2048, 2048, 64, mask="8, 1, 1, 2048"),
        heads(1, 6, 197, 197, 64),
        heads(32, 6, 197, 197, 64),
        heads(4, 8, 4096, 4096, 40),
    ]
    out += [heads(2, 8, 1024, 1024, 256), heads(64, 4, 49, 49, 32)]
    out += [
        heads(*s)
        for s in (
            (1, 12, 1, 128, 64),
            (1, 12, 1, 1024, 64),
            (1, 32, 1, 4096, 128),
            (32, 32, 1, 4096, 128),
            (1, 12, 8, 4096, 64),
        )
    ]
    out += [
        heads(*s, "f32")
        for s in ((1, 12, 128, 128, 64), (8, 16, 1024, 1024, 64), (1, 12, 1, 1024, 64), (32, 6, 197, 197, 64))
    ]
    return out


def knobs_of(text: str) -> list[Knobs]:
    """`128,4,64,2,1,1:64,4,64,2,1,1`"""
    return [tuple(zip(NAMES, map(int, one.split(",")))) for one in text.split(":")]


def wanted(a: argparse.Namespace, p: Problem, schedules: Schedules) -> list[Choice]:
    if a.knobs:
        return [Choice("attention", knobs) for knobs in knobs_of(a.knobs)]
    if a.candidates > 0:
        return schedules.offered(p, ("attention",), a.candidates)
    found = attention_of(p)
    assert found is not None
    every = shapes(found, schedules.target, found.q.loads[0].dtype is not f32)
    return [Choice("attention", tuple((name, getattr(s, name)) for name in NAMES)) for s in every]


def main() -> int:
    ap = options(__doc__)
    ap.add_argument("--candidates", type=int, default=4, help="schedules of each case, best guess first; 0: all")
    ap.add_argument("--knobs", default="", help="these settings instead")
    a = ap.parse_args()
    schedules = Schedules()
    return run(cases(), lambda p: wanted(a, p, schedules), schedules, a)


if __name__ == "__main__":
    sys.exit(main())
