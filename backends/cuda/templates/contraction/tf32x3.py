"""Contractions of f32 on tensor cores, each operand as a sum of two TF32 numbers: the accuracy is that of f32.

    x = high + low, high = x rounded to TF32         a * b = low_a * high_b + high_a * low_b + high_a * high_b

What is left out, low_a * low_b and the bits that a low part loses, is at most 2^-22 of a product and has either sign.
Tensor cores cut sums off instead of rounding them, which would add up over a long sum: so the sums of each step of `bk`
elements begin at 0 and are added to the totals on ordinary cores. An infinite operand gives NaN. Tiles, fragments and
the division of the sum are those of `tf32`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction.mma import TILES, Shape, block_tiles, gathering, ranked, varied_shapes
from dnnc.backends.cuda.templates.contraction.staging import resident
from dnnc.backends.cuda.templates.contraction.tf32 import DEPTHS, ORDER, STEP, Tf32, single_contraction
from dnnc.backends.cuda.templates.reduction.partial import busiest
from dnnc.ir.dtype import f32, i32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, const, op
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, call
from dnnc.passes.lower.form import Contraction
from dnnc.passes.schedule.problem import Knobs, Problem

__all__ = ["ORDER", "apply", "candidates", "space"]

ARCHITECTURES = (80, 90, 100)  # whose tensor cores do more TF32 products than three times what ordinary cores do in f32
# tiles and their division among warps: rows of up to 128 in one tile, so that the columns' operand is read once
SHAPES = (
    Shape(16, 32, 1, 2), Shape(16, 64, 1, 4), Shape(32, 64, 1, 2), Shape(32, 64, 2, 2), Shape(64, 32, 2, 1),
    Shape(64, 64, 2, 2), Shape(64, 128, 2, 2), Shape(64, 128, 2, 4), Shape(128, 64, 2, 2), Shape(128, 64, 4, 2),
    Shape(128, 128, 2, 4), Shape(128, 128, 4, 2),
)  # fmt: skip
DEEP = ((16, 4), (32, 3), (32, 4), (64, 2))  # elements of a step, stages
RATE, L2 = 512, 30  # products a cycle of an SM by tensor cores; bytes a cycle that it gets of the second-level cache
ISSUE, WARP_ISSUE = 0.5, 0.32  # instructions a cycle of a scheduler: at most, and of one warp
EACH, STEP_INSTRUCTIONS = 6, 105  # instructions for an element of a fragment; of a step beside
WAIT, BARRIER = 2200, 30  # cycles from asking for tiles to having them, while all ask; of a barrier
OVERLAP = 3.5  # power of the mean of what overlaps
START, SHARE, END = 650, 2100, 2400  # cycles of a launch, of a cluster's launch and barriers, to store 16 x 32 sums
OWN = 6  # bytes a cycle of parts of sums
SHORT = 16  # elements of a sum below which the steps of a fragment are not filled
HALF_UNIT, HIGH = 1 << 12, -(1 << 13)  # of the last of TF32's bits; mask of its bits


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    c = single_contraction(problem)
    if c is None or target.number not in ARCHITECTURES or min(c.sizes[1:]) < STEP or c.red.size < SHORT:
        return []
    return ranked(c, target, [replace(s, bk=bk, stages=stages, element=4) for s in SHAPES for bk, stages in DEEP], cost)


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    c = single_contraction(problem)
    if c is None or target.number not in ARCHITECTURES:
        return []
    return varied_shapes(c, target, [Shape(*tile, 16, 3, element=4) for tile in TILES], DEPTHS, cost)


def cost(c: Contraction, target: GpuTarget, s: Shape, gathers: tuple[float, float] | None = None) -> float:
    """Estimated cycles of the busiest SM. Figures are fitted to 200 kernels on an H200.

    What a step of the blocks of an SM takes of tensor cores, of the issue of instructions, of the traffic with the
    second-level cache and of the wait for it overlaps in part.
    """
    warps, depth = s.warps * s.slices, s.bk * s.slices
    most = busiest(target, block_tiles(c, s), s.split)
    together = min(most, resident(target, warps, s.registers, s.shared_bytes()))
    wm, wn = s.bm // s.down, s.bn // s.across
    elements, products = wm // 16 * 4 + wn // 8 * 2, wm // 16 * (wn // 8) * 3  # of a lane, for STEP elements of the sum
    instructions = s.bk // STEP * (EACH * elements + products) + STEP_INSTRUCTIONS
    occupied = together * warps / 4  # warps of a scheduler
    times = (
        together * s.bm * s.bn * depth * 3 / RATE,
        instructions * occupied / min(ISSUE, WARP_ISSUE * occupied),
        together * (s.bm + s.bn) * depth * 4 / L2,
        WAIT / (s.stages - 1),
    )
    gathers = gathers or gathering(c)
    scattered = together * (s.bm * gathers[0] + s.bn * gathers[1]) * depth
    step: float = sum(x**OVERLAP for x in times) ** (1 / OVERLAP) + scattered + BARRIER
    rounds, shared = -(-c.red.size // (depth * s.split)), s.slices * s.split > 1
    sums = s.bm * s.bn * s.slices * 4
    end = sums / OWN if shared else wm * wn / 512 * END / min(together, 4)
    waves = -(-most // together)
    return most / together * (rounds * step + together * end * shared) + waves * (
        START + SHARE * (s.split > 1) + end * (not shared)
    )


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    c = single_contraction(problem)
    if c is None:
        raise ScheduleError("the nest is no contraction of f32 operands")
    return _Split(c, Shape(**{k: int(v) for k, v in knobs.items()}, element=4)).build()


def high_part(x: Expr) -> Expr:
    """The number rounded to TF32, ties away from 0."""
    return op("bits_f32", (op("bits_i32", x, dtype=i32) + const(HALF_UNIT, i32)) & const(HIGH, i32), dtype=f32)


class _Split(Tf32):
    def first(self) -> Expr:
        return self.block % self.steps

    def products(self, b: Builder, slot: Expr, acc: Buffer, shared: tuple[Buffer, Buffer]) -> None:
        down, across = self.wm // 16, self.wn // 8
        high = [b.alloc(name, f32, n, r) for name, n, r in (("ah", down, 4), ("bh", across, 2))]
        low = [b.alloc(name, f32, n, r) for name, n, r in (("al", down, 4), ("bl", across, 2))]
        step = b.alloc("step", f32, down, across, 4)
        with b.loop("i", down, "unroll") as i, b.loop("j", across, "unroll") as j:
            b.store(step, (i, j, 0), 0.0, 4)
        with b.loop("k", self.s.bk // STEP, "unroll") as k:
            self.fragments(b, 0, shared[0], slot, k, high[0], low[0], down)
            self.fragments(b, 1, shared[1], slot, k, high[1], low[1], across)
            for left, right in ((low[0], high[1]), (high[0], low[1]), (high[0], high[1])):
                with b.loop("i", down, "unroll") as i, b.loop("j", across, "unroll") as j:
                    factors = left.at(i, 0, lanes=4), right.at(j, 0, lanes=2)
                    b.store(step, (i, j, 0), call("mma_m16n8k8_cut", step.at(i, j, 0, lanes=4), *factors), 4)
        with b.loop("i", down, "unroll") as i, b.loop("j", across, "unroll") as j:
            b.store(acc, (i, j, 0), acc.at(i, j, 0, lanes=4) + step.at(i, j, 0, lanes=4), 4)

    def fragments(
        self, b: Builder, side: int, buf: Buffer, slot: Expr, k: Expr, high: Buffer, low: Buffer, count: int
    ) -> None:
        """Load STEP elements of the sum of 16 rows, or of 8 columns, at a time, and split them."""
        group, member, first = self.lane // 4, self.lane % 4, (self.row, self.col)[side]
        if self.tiles[side].rows == "side":  # 8 rows of 16 bytes are a matrix
            m, r = self.lane // 8, self.lane % 8
            row, part = (m % 2 * 8 + r, m // 2) if side == 0 else (m // 2 * 8 + r, m % 2)
            with b.loop("i", count if side == 0 else count // 2, "unroll") as i:
                read = b.alloc("read", f32, 4)
                place = buf.ref(slot, first + i * 16 + row, k * STEP + part * 4, lanes=4)
                b.store(read, (0,), call("ldmatrix_x4", place), 4)
                with b.loop("r", 4, "unroll") as e:
                    at = (i, e) if side == 0 else (i * 2 + e // 2, e % 2)
                    self.split(b, high, low, at, read[e])
            return
        with b.loop("i", count, "unroll") as i, b.loop("r", 4 if side == 0 else 2, "unroll") as e:
            if side == 0:
                x = buf.at(slot, k * STEP + e // 2 * 4 + member, first + i * 16 + e % 2 * 8 + group)
            else:
                x = buf.at(slot, k * STEP + e * 4 + member, first + i * 8 + group)
            self.split(b, high, low, (i, e), x)

    def split(self, b: Builder, high: Buffer, low: Buffer, at: tuple[Expr, Expr], x: Expr) -> None:
        x = b.let("x", x)
        b.store(high, at, high_part(x))
        b.store(low, at, x - high[at])
