"""Schedules of attention: one kernel from queries to the finished mean, whose scores never leave the registers of a warp.

Knobs are the block's tile: `rows` of queries over `warps`, `keys` of a step, `stages` of tiles in shared memory, and `slices` of the
block that divide the keys: few rows (decoding) or few heads need those to keep enough loads in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates.attention_kernel import Flash, Shape
from dnnc.backends.cuda.templates.attention_mma import Mma, rounded
from dnnc.backends.cuda.templates.attention_nest import Attention, attention_of
from dnnc.backends.cuda.templates.attention_simt import Simt
from dnnc.ir.dtype import DType, bf16, f16, f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.operator.stmt import Kernel
from dnnc.passes.schedule.problem import Knobs, Problem

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

LARGEST = 256  # elements of a head: more do not fit into the registers of a tile
TENSOR = tuple(
    Shape(rows, warps, keys, stages, slices)
    for rows, warps in ((128, 4), (128, 8), (64, 4), (32, 2), (16, 1))
    for keys in (64, 32, 128)
    for stages in (2, 3)
    for slices in ((1, 2, 4, 8) if rows == 16 * warps and rows < 128 else (1,))
)
ORDINARY = tuple(
    Shape(rows, warps, keys, 2, slices)
    for rows, warps in ((64, 4), (32, 4), (32, 2), (16, 2), (16, 1), (4, 1))
    for keys in (32, 64)
    for slices in ((1,) if rows == 64 else (1, 2, 4, 8, 16) if warps == 1 else (1, 2, 4))
)


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    a, dtype = attention_of(problem), _dtype(problem)
    if a is None or dtype is None or target.major < 8 or max(a.depth.size, a.cols.size) > LARGEST:
        return []
    half = dtype is not f32
    fitting = [s for s in (TENSOR if half else ORDINARY) if _fits(a, target, s, half)]
    found = sorted((cost(a, target, s, half), k) for k, s in enumerate(fitting))
    return [_knobs(fitting[k]) for _, k in found[:10]]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    a, dtype = attention_of(problem), _dtype(problem)
    if a is None or dtype is None:
        raise ScheduleError("the nest is no attention in f16, bf16 or f32")
    shape = Shape(**{k: int(v) for k, v in knobs.items()})
    if shape.parts > 1 and not target.has_tma:
        raise ScheduleError(f"{target.arch} has no clusters, which parts > 1 needs")
    kernel: Flash = Simt(a, shape) if dtype is f32 else Mma(a, shape, dtype)
    return kernel.build()


def _dtype(problem: Problem) -> DType | None:
    """The type of the op's operands, if it is one of ours."""
    first = problem.anchor.inputs[0] if problem.anchor is not None else None
    return first.type.dtype if first is not None and first.type.dtype in (f16, bf16, f32) else None


def _knobs(s: Shape) -> Knobs:
    return (("rows", s.rows), ("warps", s.warps), ("keys", s.keys), ("stages", s.stages), ("slices", s.slices))


# --- the choice -------------------------------------------------------------------------------------------------------------------


def _widths(a: Attention, half: bool) -> tuple[int, int]:
    """Elements of a row of Q and K, and of V, as tiles hold them."""
    return (rounded(a.depth.size), rounded(a.cols.size)) if half else (rounded(a.depth.size, 4), rounded(a.cols.size, 32))


def registers(a: Attention, s: Shape, half: bool) -> int:
    """Of a thread, at least."""
    depth, cols = _widths(a, half)
    wm = s.rows // s.warps
    if not half:
        return wm // 4 * (cols // 8 + s.keys // 8 + 8) + 48
    kept = depth // 4 if depth <= 64 or (wm == 16 and depth <= 128) else 0
    staged = sum(x % 2 != 0 for x in (a.depth.size, a.cols.size)) * s.keys * max(depth, cols) // (64 * s.warps)  # elements that no copy moves
    return wm // 16 * (cols // 2 + s.keys // 2 + kept + 8) + staged + 40


def shared_bytes(a: Attention, s: Shape, half: bool) -> int:
    depth, cols = _widths(a, half)
    size, pad, wm = (2, 8, s.rows // s.warps) if half else (4, 4, s.rows // s.warps)
    warps = s.warps * s.slices
    tiles = (s.rows + s.keys * s.stages * s.slices) * (depth + pad) + s.keys * s.stages * s.slices * (cols + pad)
    shares = warps * wm * (cols + 8) * 4 if s.shares > 1 else 0
    return tiles * size + shares + (0 if half else warps * wm * (s.keys + 4) * 4)


def _fits(a: Attention, target: GpuTarget, s: Shape, half: bool) -> bool:
    if shared_bytes(a, s, half) > target.shared_bytes - 1024 or s.threads > 512:
        return False
    return registers(a, s, half) <= min(255, target.registers // s.threads)


def cost(a: Attention, target: GpuTarget, s: Shape, half: bool) -> float:
    """Estimated cycles of the busiest SM: a quarter of it issues one instruction a cycle, a lone warp waits for most of its own results."""
    batch, m, n, d, e = a.sizes
    depth, cols = _widths(a, half)
    blocks, warps, wm = batch * -(-m // s.rows), s.warps * s.slices, s.rows // s.warps
    together = max(1, min(target.registers // (max(registers(a, s, half), 64) * s.threads), target.shared_per_sm // (shared_bytes(a, s, half) + 1024), 64 // warps))
    most = -(-blocks // target.sms)
    busy = min(most, together) * warps / 4
    steps = -(-n // (s.keys * s.slices))
    elements = wm * s.keys / 32
    if half:
        products = wm / 16 * s.keys / 8 * (depth + cols) / 16
        issue = products * 1.3 + elements * (6 if depth else 0) + 120
        work, latency = max(products * 8, issue), products * 10 + elements * 8 + 700
    else:
        products = wm * s.keys * (depth + cols) / 32
        work, latency = products * 1.3 + elements * 14 + 150, products * 1.6 + elements * 16 + 900
    step = max(work * max(busy, 1), latency)
    traffic = min(most, together) * s.slices * s.keys * (d + e) * (2 if half else 4) / 40
    return -(-most // together) * (1200 + steps * max(step, traffic) + 60 * s.slices + cols * wm / 16)
