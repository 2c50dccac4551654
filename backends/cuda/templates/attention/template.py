"""Schedules of attention: one kernel, in which scores never leave the registers of a warp.

Knobs are the block's tile: `rows` of queries over `warps`, `keys` of a step, `stages` of tiles in shared memory; and
`slices` of the block and `parts` of a cluster that divide the keys: few rows or heads need those for loads in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates.attention.choice import cost, shapes
from dnnc.backends.cuda.templates.attention.kernel import Flash, Shape
from dnnc.backends.cuda.templates.attention.mma import Mma
from dnnc.backends.cuda.templates.attention.nest import attention_of
from dnnc.backends.cuda.templates.attention.simt import DOWN, Simt
from dnnc.ir.dtype import DType, bf16, f16, f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.stmt import Kernel
from dnnc.passes.schedule.problem import Knobs, Problem

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

FRAGMENT = 16  # rows of a fragment of the tensor cores
LARGEST = 256  # elements of a head: more do not fit into the registers of a tile
CANDIDATES, SEARCHED = 12, 200
ORDER = ("keys", "slices", "parts")


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    a, dtype = attention_of(problem), _dtype(problem)
    if a is None or dtype is None or target.major < 8 or max(a.depth.size, a.cols.size) > LARGEST:
        return []
    half = dtype is not f32
    found = sorted((cost(a, target, s, half), k, s) for k, s in enumerate(shapes(a, target, half)))
    return [_knobs(s) for _, _, s in found[:CANDIDATES]]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Every tile that fits, by estimated time."""
    a, dtype = attention_of(problem), _dtype(problem)
    if a is None or dtype is None or target.major < 8 or max(a.depth.size, a.cols.size) > LARGEST:
        return []
    half = dtype is not f32
    found = sorted((cost(a, target, s, half), k, s) for k, s in enumerate(shapes(a, target, half, wide=True)))
    return [_knobs(s) for _, _, s in found[:SEARCHED]]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    a, dtype = attention_of(problem), _dtype(problem)
    if a is None or dtype is None:
        raise ScheduleError("the nest is no attention in f16, bf16 or f32")
    shape = Shape(**{k: int(v) for k, v in knobs.items()})
    least = DOWN if dtype is f32 else FRAGMENT
    if shape.rows % (shape.warps * least):
        raise ScheduleError(f"{shape.rows} rows are not {least} or more for each of {shape.warps} warps")
    if shape.parts > 1 and not target.has_tma:
        raise ScheduleError(f"{target.arch} has no clusters, which parts > 1 needs")
    kernel: Flash = Simt(a, shape) if dtype is f32 else Mma(a, shape, dtype)
    return kernel.build()


def _dtype(problem: Problem) -> DType | None:
    """The type of the op's operands, if it is one of ours."""
    first = problem.anchor.inputs[0] if problem.anchor is not None else None
    return first.type.dtype if first is not None and first.type.dtype in (f16, bf16, f32) else None


def _knobs(s: Shape) -> Knobs:
    return (
        ("rows", s.rows),
        ("warps", s.warps),
        ("keys", s.keys),
        ("stages", s.stages),
        ("slices", s.slices),
        ("parts", s.parts),
    )
