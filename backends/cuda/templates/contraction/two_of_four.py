"""Products of 2:4 sparse constant weights in 16-bit floats on Hopper's sparse tensor cores: problems and tiles for
`two_of_four_kernel.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product as pairs

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction.two_of_four_kernel import PairTiling, PairWriter
from dnnc.backends.cuda.templates.contraction.two_of_four_split import SplitPairWriter
from dnnc.backends.cuda.templates.contraction.wgmma import Steps, factor, matrix_view, suits, with_epilogue
from dnnc.backends.cuda.templates.contraction.wgmma_kernel import Product
from dnnc.backends.cuda.templates.reduction.partial import LANES, PEER_BYTES, SHARE, SPLITS
from dnnc.ir.dtype import bf16, f16, f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, const, substitute, value
from dnnc.ir.loops.stmt import Buffer, Kernel
from dnnc.ir.pairs import LINE, LINES, ROWS, STEP, Pairs
from dnnc.passes.lower.form import Contraction
from dnnc.passes.schedule.problem import Knobs, Problem

ORDER = ("split",)
VECTOR = 8  # elements of 16 bytes
COLUMNS = (256, 192, 128, 64)  # pixels of a tile
MOST_SHARED = 128  # pixels of a tile that blocks of a cluster share
STAGES, DEEP = 8, 10  # of the ring: a first guess at most, and what is measured
GROUPS = (4, 8, 16, 32)  # rows of tiles that walk over the pixels together
GROUP = 16
# Cycles, fitted to 232 kernels on an H200, whose times they tell to 9 %:
START = 3320  # of a launch
TILE, PIECE = 460, 115  # a tile's beginning and end, and 64 x 64 elements of its end
STEP_START = 123  # of a step, beside its products or the copy of its stage
PRODUCTS = 4096  # of 16-bit floats in a cycle, those with zeros that are not stored counted
BYTES = 66  # that a multiprocessor gets of the L2 cache in a cycle
LATENCY = 540  # from asking for a stage to having it
FEW, MEMORY, FIRST = 64, 0.58, 1500  # pixels that wait for weights of memory, at this share of the rate of copies
CLOCK = 1.755  # GHz


def pairs_of(problem: Problem, order: str) -> tuple[Contraction, Load, Buffer, Pairs] | None:
    """A contraction of 2:4 sparse weights that lie in an order: it, the other factor's element, the weights; None for
    all others.
    """
    anchor, c = problem.anchor, problem.contraction
    weights = anchor.inputs[1] if anchor is not None and len(anchor.inputs) > 1 else None
    encoding = weights.type.encoding if weights is not None else None
    if not isinstance(encoding, Pairs) or encoding.order != order or weights is None or c is None or c.batch.loops:
        return None
    name = dict(zip(problem.lowered.params, problem.kernel.entry.buffers))[weights].name
    reads, a = [x for x in c.b.loads if x.buf.name == name], factor(c.a, f32)
    if c.dtype is not f32 or a is None or c.a.conds or c.b.conds or not reads or a.buf.name == name:
        return None
    if a.buf.dtype not in (f16, bf16) or a.buf.dtype is not reads[0].buf.dtype or not c.cols.loops:
        return None
    if (c.cols.size, c.red.size) != (encoding.rows, encoding.columns) or not _in_order(c, encoding, reads):
        return None
    return c, a, reads[0].buf, encoding


def _in_order(c: Contraction, e: Pairs, reads: list[Load]) -> bool:
    """Does the nest read column k of the matrix in step k of its sum? Asked of some elements."""
    for row, k in pairs((0, 1, e.rows - 1), (0, 1, 5, e.columns // 2, e.columns - 1)):
        channel = min(axis for axis in range(len(e.shape)) if axis != e.axis)
        index = [const({e.axis: row, channel: k}.get(axis, 0)) for axis in range(len(e.shape))]
        seen: list[int | None] = []

        def element(at: Expr, seen: list[int | None] = seen) -> Expr:
            seen.append(value(at))
            return const(0.0, reads[0].buf.dtype)

        e.load((element,), index)
        at = {**c.cols.at(const(row)), **c.red.at(const(k))}
        if {value(substitute(x.buf.offset(x.idx), at)) for x in reads} != set(seen):
            return False
    return True


def product_of(problem: Problem) -> Product | None:
    """The product of a group whose weights are pairs in tiles; None where the copy engine cannot read its factor."""
    found = pairs_of(problem, "tiles")
    if found is None:
        return None
    c, a, weights, e = found
    along = Steps(c, c.batch, c.rows)
    _, i, _, k = along.vars
    left = matrix_view(a, along, i, k)
    if left is None or len(left.shape) != 2 or not suits(left):
        return None
    high, wide = e.tiles
    lines = Buffer(weights.name, weights.dtype, (const(high * wide * LINES), const(LINE)))
    p = with_epilogue(problem, along, {a.buf: left, weights: lines})
    return p if p is not None and p.again else None


# --- choice -----------------------------------------------------------------------------------------------------------


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    p = product_of(problem) if target.has_wgmma else None
    if p is None:
        return []
    return [knobs_of(t) for t in ranked(p.m, p.n, p.k, target) if t.split == 1 or p.aligned]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Every tile that fits, with other rings and numbers of row tiles in lockstep."""
    p = product_of(problem) if target.has_wgmma else None
    if p is None:
        return []
    every = [t for t in ranked(p.m, p.n, p.k, target) if t.split == 1 or p.aligned]
    out = list(every)
    for t in every:
        steps = -(-p.k // STEP) // t.split
        most = min((target.shared_bytes - replace(t, stages=0).shared_bytes) // t.stage_bytes, DEEP, steps)
        out += [replace(t, stages=n) for n in range(2, most + 1)]
        out += [replace(t, group=n) for n in GROUPS if n <= -(-p.n // ROWS)]
    return [knobs_of(t) for t in dict.fromkeys(out)]


def knobs_of(t: PairTiling) -> Knobs:
    return (("bn", t.bn), ("stages", t.stages), ("group", t.group), ("split", t.split))


def ranked(pixels: int, rows: int, terms: int, target: GpuTarget) -> list[PairTiling]:
    """Tiles of a product of these sizes, the fastest by estimate first."""
    return sorted(_tilings(pixels, rows, terms, target), key=lambda t: cycles(pixels, rows, terms, t, target))


def _tilings(pixels: int, rows: int, terms: int, target: GpuTarget) -> Iterator[PairTiling]:
    steps = max(-(-terms // STEP), 1)
    for bn, split in pairs(COLUMNS, SPLITS):
        t = PairTiling(ROWS, bn, 0, GROUP, target.sms, split)
        stages = min((target.shared_bytes - t.shared_bytes) // t.stage_bytes, STAGES, steps // split)
        tiles = -(-rows // ROWS) * -(-pixels // bn)
        shared = bn <= MOST_SHARED and steps % split == 0 and rows % LANES == 0 and tiles <= _at_once(t, target)
        if (bn == COLUMNS[-1] or bn < 2 * pixels) and (split == 1 or (shared and stages > 1)):
            yield replace(t, stages=stages)


def _at_once(t: PairTiling, target: GpuTarget) -> int:
    """Tiles that the multiprocessors work on at one time."""
    return max(int(target.sms * SPLITS[t.split] / t.split), 1)


def best_cycles(pixels: int, rows: int, terms: int, target: GpuTarget) -> float:
    """Estimated cycles of the fastest tile; infinite where there is no kernel: the copy engine reads matrices whose
    rows begin at multiples of 16 bytes.
    """
    if not target.has_wgmma or min(pixels, rows) < 2 or terms % VECTOR:
        return math.inf
    return min(cycles(pixels, rows, terms, t, target) for t in _tilings(pixels, rows, terms, target))


def cycles(pixels: int, rows: int, terms: int, t: PairTiling, target: GpuTarget) -> float:
    """Estimated cycles of the multiprocessor with the most tiles; of few pixels those in which memory gives weights."""
    high, steps = -(-rows // ROWS), -(-terms // STEP)
    step = max(ROWS * t.bn * STEP / PRODUCTS, t.stage_bytes / BYTES) + STEP_START
    each = steps // t.split * max(step, LATENCY / max(t.stages - 1, 1)) + TILE + PIECE * ROWS * t.bn / 4096
    if t.split > 1:
        each += SHARE + ROWS * t.bn * 4 / PEER_BYTES
    made = -(-high * -(-pixels // t.bn) // _at_once(t, target)) * each
    weights = FIRST + high * steps * LINES * LINE * 2 * CLOCK / (MEMORY * target.bandwidth)
    return START + (max(made, weights) if pixels <= FEW else made)


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    p = product_of(problem)
    if p is None:
        raise ScheduleError("the weights are no tiles of 2:4 sparse 16-bit floats, or matrices have another order")
    bn, stages, group, split = (int(knobs[k]) for k in ("bn", "stages", "group", "split"))
    t = PairTiling(ROWS, bn, stages, group, target.sms, split)
    return (SplitPairWriter if split > 1 else PairWriter)(p, t).kernel()
