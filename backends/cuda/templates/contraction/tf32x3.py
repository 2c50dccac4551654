"""Contractions of f32 on tensor cores, each operand as a sum of two TF32 numbers: the accuracy is that of f32.

    x = high + low, high = x rounded to TF32         a * b = low_a * high_b + high_a * low_b + high_a * high_b

What is left out, low_a * low_b and the bits that a low part loses, is at most 2^-22 of a product and has either sign.
Tensor cores cut sums off instead of rounding them, which would add up over a long sum: so the sums of each step of `bk`
elements begin at 0 and are added to the totals on ordinary cores. An infinite operand gives NaN. Tiles, fragments and
the division of the sum are those of `tf32`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import simt
from dnnc.backends.cuda.templates.contraction.mma import Shape, cost, gathering, ranked, varied_shapes
from dnnc.backends.cuda.templates.contraction.tf32 import DEPTHS, ORDER, STEP, TILES, Tf32, single_contraction
from dnnc.ir.dtype import f32, i32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, const, op
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, call
from dnnc.passes.schedule.problem import Knobs, Problem

__all__ = ["ORDER", "apply", "candidates", "space"]

ARCHITECTURES = (80, 90, 100)  # whose tensor cores do more TF32 products than three times what ordinary cores do in f32
HALF_UNIT, HIGH = 1 << 12, -(1 << 13)  # of the last of TF32's bits; mask of its bits


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    c = single_contraction(problem)
    if c is None or target.number not in ARCHITECTURES or min(c.sizes[1:]) < STEP:
        return []
    shapes = [
        Shape(bm, bn, down, across, bk, stages, element=4)
        for bm, bn, down, across in ((64, 64, 2, 2), (32, 64, 1, 2), (64, 32, 2, 1), (32, 32, 2, 2), (64, 128, 2, 4))
        for bk, stages in ((16, 4), (32, 3))
    ]
    return ranked(c, target, shapes)


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    c = single_contraction(problem)
    if c is None or target.number not in ARCHITECTURES:
        return []
    return varied_shapes(c, target, [Shape(*tile, 16, 3, element=4) for tile in TILES], DEPTHS)


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    c = single_contraction(problem)
    if c is None:
        raise ScheduleError("the nest is no contraction of f32 operands")
    return _Split(c, Shape(**{k: int(v) for k, v in knobs.items()}, element=4)).build()


def high_part(x: Expr) -> Expr:
    """The number rounded to TF32, ties away from 0."""
    return op("bits_f32", (op("bits_i32", x, dtype=i32) + const(HALF_UNIT, i32)) & const(HIGH, i32), dtype=f32)


class _Split(Tf32):
    def products(self, b: Builder, slot: Expr, acc: Buffer, shared: tuple[Buffer, Buffer]) -> None:
        down, across = self.wm // 16, self.wn // 8
        group, member = self.lane // 4, self.lane % 4
        high = [b.alloc(name, f32, n, r) for name, n, r in (("ah", down, 4), ("bh", across, 2))]
        low = [b.alloc(name, f32, n, r) for name, n, r in (("al", down, 4), ("bl", across, 2))]
        step = b.alloc("step", f32, down, across, 4)
        with b.loop("i", down, "unroll") as i, b.loop("j", across, "unroll") as j:
            b.store(step, (i, j, 0), 0.0, 4)
        with b.loop("k", self.s.bk // STEP, "unroll") as k:
            with b.loop("i", down, "unroll") as i, b.loop("r", 4, "unroll") as r:
                place = self.row + i * 16 + r % 2 * 8 + group, k * STEP + r // 2 * 4 + member
                self.split(b, high[0], low[0], (i, r), self.element(0, shared[0], slot, *place))
            with b.loop("j", across, "unroll") as j, b.loop("r", 2, "unroll") as r:
                place = self.col + j * 8 + group, k * STEP + r * 4 + member
                self.split(b, high[1], low[1], (j, r), self.element(1, shared[1], slot, *place))
            for left, right in ((low[0], high[1]), (high[0], low[1]), (high[0], high[1])):
                with b.loop("i", down, "unroll") as i, b.loop("j", across, "unroll") as j:
                    factors = left.at(i, 0, lanes=4), right.at(j, 0, lanes=2)
                    b.store(step, (i, j, 0), call("mma_m16n8k8_cut", step.at(i, j, 0, lanes=4), *factors), 4)
        with b.loop("i", down, "unroll") as i, b.loop("j", across, "unroll") as j:
            b.store(acc, (i, j, 0), acc.at(i, j, 0, lanes=4) + step.at(i, j, 0, lanes=4), 4)

    def split(self, b: Builder, high: Buffer, low: Buffer, at: tuple[Expr, Expr], x: Expr) -> None:
        x = b.let("x", x)
        b.store(high, at, high_part(x))
        b.store(low, at, x - high[at])
