"""Contractions of f32 on tensor cores with operands rounded to TF32 (10 mantissa bits), on request.

The kernel is that of `mma`, with tiles of f32 in shared memory. Fragments are read element by element: the lanes of a
warp want 8 rows times 4 elements of the sum, which the padding of rows puts into 32 different banks, in any layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction.mma import (
    SHAPES,
    TILES,
    Mma,
    Shape,
    estimated,
    gathering,
    ranked,
    varied_shapes,
)
from dnnc.backends.cuda.templates.contraction.staging import Tile
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, call
from dnnc.passes.lower.form import Contraction
from dnnc.passes.schedule.problem import Knobs, Problem

ORDER = ("slices", "split", "bk")
DEPTHS = ((16, 2), (16, 3), (16, 4), (16, 5), (32, 2), (32, 3), (32, 4))  # elements of a step, stages
STEP = 8  # of the sum, in one instruction


def single_contraction(problem: Problem) -> Contraction | None:
    """A contraction in f32 whose operands are stored as such."""
    c = problem.product
    if c is None or c.dtype is not f32 or any(x.dtype is not f32 for o in (c.a, c.b) for x in o.loads):
        return None
    return c


def estimate(problem: Problem, target: GpuTarget) -> float:
    """Cycles of the best guess; infinite where the kernel does not apply."""
    c, found = single_contraction(problem), candidates(problem, target)
    return (
        math.inf
        if c is None or not found
        else estimated(c, target, Shape(**{k: int(v) for k, v in found[0]}, element=4), gathering(c))
    )


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    c = single_contraction(problem)
    if c is None or target.major < 8 or min(c.sizes[1:]) < STEP:
        return []
    depths = ((16, 4), (32, 3)) if c.red.size >= 64 else ((16, 2),)
    return ranked(c, target, [replace(s, bk=bk, stages=n, element=4) for s in SHAPES for bk, n in depths])


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    c = single_contraction(problem)
    if c is None or target.major < 8:
        return []
    return varied_shapes(c, target, [Shape(*tile, 16, 3, element=4) for tile in TILES], DEPTHS)


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    c = single_contraction(problem)
    if c is None:
        raise ScheduleError("the nest is no contraction of f32 operands")
    return Tf32(c, Shape(**{k: int(v) for k, v in knobs.items()}, element=4)).build()


class Tf32(Mma):
    def pad(self, tile: Tile) -> int:
        """Rows of the side: 8 of them, 4 words apart modulo 32; rows of the sum: 4 of them, 8 words apart."""
        return 4 if tile.rows == "side" else 8

    def products(self, b: Builder, slot: Expr, acc: Buffer, shared: tuple[Buffer, Buffer]) -> None:
        fa, fb = b.alloc("fa", f32, self.wm // 16, 4), b.alloc("fb", f32, self.wn // 8, 2)
        group, member = self.lane // 4, self.lane % 4
        with b.loop("k", self.s.bk // STEP, "unroll") as k:
            with b.loop("i", self.wm // 16, "unroll") as i, b.loop("r", 4, "unroll") as r:
                b.store(
                    fa,
                    (i, r),
                    self.element(
                        0, shared[0], slot, self.row + i * 16 + r % 2 * 8 + group, k * STEP + r // 2 * 4 + member
                    ),
                )
            with b.loop("j", self.wn // 8, "unroll") as j, b.loop("r", 2, "unroll") as r:
                b.store(
                    fb, (j, r), self.element(1, shared[1], slot, self.col + j * 8 + group, k * STEP + r * 4 + member)
                )
            with b.loop("i", self.wm // 16, "unroll") as i, b.loop("j", self.wn // 8, "unroll") as j:
                made = call("mma_m16n8k8", acc.at(i, j, 0, lanes=4), fa.at(i, 0, lanes=4), fb.at(j, 0, lanes=2))
                b.store(acc, (i, j, 0), made, 4)

    def element(self, which: int, buf: Buffer, slot: Expr, side: Expr, k: Expr) -> Expr:
        return buf.at(slot, side, k) if self.tiles[which].rows == "side" else buf.at(slot, k, side)
