"""Contractions in 16-bit floats on Hopper's tensor cores: which problems suit the kernel of `wgmma_kernel.py`, and with which tiles.

A problem suits it when both factors are plain matrices, dense along the sum or (the second one) along the columns, whatever number of axes
they had: the copy engine needs one stride for rows and one for batches. Everything that follows the sum is done in registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.nest import Axis, Contraction, Operand, contraction_of
from dnnc.backends.cuda.templates.wgmma_kernel import ROW, Product, Tiling, build
from dnnc.ir.dtype import bf16, f16, f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Var, const, load, rebuild, substitute, terms, walk
from dnnc.ir.operator.stmt import Buffer, Kernel, Param
from dnnc.passes.schedule.problem import Knobs, Problem

TYPES = (f16, bf16)
MIN_ROWS = 16  # with fewer rows the product is as fast as its weights can be read
PRODUCTS, BYTES = 2048, 48  # a cycle of a multiprocessor: multiplications of 16-bit floats, bytes out of the L2 cache
TILE, PIECE = 800, 150  # cycles: a tile's beginning and end, and 64 x 64 elements of its end
SHARE = 2600  # cycles: two barriers of a cluster and the sums of its other blocks
SPLITS, MAX_SPLIT_COLUMNS = (2, 4, 8), 128
STAGES = 8  # more hide nothing
GROUP = 16  # row tiles that walk over the columns together: what they read stays in the L2 cache


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Best guess first; none where the kernel does not apply."""
    p = product_of(problem) if target.has_wgmma else None
    if p is None or p.m < MIN_ROWS:
        return []
    return [
        (("bm", t.bm), ("bn", t.bn), ("stages", t.stages), ("group", t.group), ("split", t.split)) for t in tilings(p.batch, p.m, p.n, p.k, target)
    ]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    p = product_of(problem)
    if p is None:
        raise ScheduleError("the kernel of tensor cores takes plain matrices of 16-bit floats")
    return build(p, Tiling(*(int(knobs[k]) for k in ("bm", "bn", "stages", "group")), target.sms, int(knobs["split"])))


def tilings(batch: int, m: int, n: int, k: int, target: GpuTarget) -> list[Tiling]:
    """Tilings that fit into shared memory, in the order of their estimated times."""
    found = []
    for bn in (256, 192, 128, 64):  # of two that are as fast, the one with more columns
        for bm in (64, 128):
            for split in (1, *SPLITS):
                t = Tiling(bm, bn, 0, GROUP, target.sms, split)
                if split == 1 or _splits(batch, m, n, k, t):
                    stages = min((target.shared_bytes - t.shared_bytes) // t.stage_bytes, STAGES)
                    found.append((_cycles(batch, m, n, k, t, target), replace(t, stages=stages)))
    found.sort(key=lambda x: x[0])
    return [t for _, t in found]


def _tiles(batch: int, m: int, n: int, t: Tiling) -> int:
    return batch * -(-m // t.bm) * -(-n // t.bn)


def _splits(batch: int, m: int, n: int, k: int, t: Tiling) -> bool:
    """Is it worth a try that blocks share a tile: all of them at once, two steps of the sum each?"""
    steps = -(-k // (ROW // 2))
    return t.bn <= MAX_SPLIT_COLUMNS and steps % t.split == 0 and steps >= 2 * t.split and _tiles(batch, m, n, t) * t.split <= 2 * t.blocks


def _cycles(batch: int, m: int, n: int, k: int, t: Tiling, target: GpuTarget) -> float:
    waves = -(-_tiles(batch, m, n, t) * t.split // target.sms)
    step = max(t.bm * t.bn * (ROW // 2) / PRODUCTS, t.stage_bytes / BYTES)
    steps = -(-k // (ROW // 2)) // t.split
    return waves * (steps * step + TILE + PIECE * t.bm * t.bn / 4096 + (SHARE if t.split > 1 else 0))


# --- reading the nest ---------------------------------------------------------------------------------------------------------


def product_of(problem: Problem) -> Product | None:
    """The product that a contraction is, with its parameters seen as matrices; None where it is none."""
    c = contraction_of(problem)
    if c is None or c.dtype is not f32 or len(c.batch.loops) > 1 or any(len(x.loops) != 1 for x in (c.rows, c.cols, c.red)):
        return None
    a, b, out = _factor(c.a), _factor(c.b), load(c.store.buf, c.store.idx)
    assert isinstance(out, Load)
    if a is None or b is None or a.buf.dtype is not b.buf.dtype or out.buf.dtype not in TYPES or len({a.buf, b.buf, out.buf}) < 3:
        return None
    flipped = _coefficients(b, c.cols).get(c.cols.loops[0].var) == 1
    made = (_matrix(a, c, c.rows, c.red), _matrix(b, c, *((c.red, c.cols) if flipped else (c.cols, c.red))), _matrix(out, c, c.rows, c.cols))
    if any(x is None for x in made):
        return None
    left, right, result = (x for x in made if x is not None)
    value = _with_result(c.store.value, out, result, c)
    if value is None or any(isinstance(x, Load) and x.buf in (a.buf, b.buf) for x in walk(value)):
        return None
    swap: dict[Param, Param] = {a.buf: left, b.buf: right, out.buf: result}
    params = tuple(swap.get(p, p) for p in c.kernel.entry.params)
    batch, m, n, k = c.sizes

    def finish(z: Expr, row: Expr, col: Expr, total: Expr) -> Expr:
        at: dict[Expr, Expr] = {load(c.acc, (0,)): total, c.rows.loops[0].var: row, c.cols.loops[0].var: col}
        return substitute(value, at | {loop.var: z for loop in c.batch.loops})

    return Product(c.kernel.name, params, left, right, result, batch, m, n, k, finish, flipped, problem.kernel.locs)


def _factor(x: Operand) -> Load | None:
    """The element of a 16-bit buffer that a factor is."""
    v = x.value
    if x.conds or not isinstance(v, Op) or v.name != "cast_f32" or not isinstance(e := v.args[0], Load) or e.buf.dtype not in TYPES:
        return None
    return e if e.lanes == 1 and e.limit is None else None


def _coefficients(x: Load, *axes: Axis) -> dict[Var, int]:
    """How far apart two elements are that follow one another along each loop; empty where the offset is no sum of such steps alone."""
    ts, k = terms(x.buf.offset(x.idx))
    found = {t: c for t, c in ts if isinstance(t, Var)}
    return found if k == 0 and len(found) == len(ts) else {}


def _matrix(x: Load, c: Contraction, rows: Axis, cols: Axis) -> Buffer | None:
    """The buffer as [batch, rows, cols] or [rows, cols], dense along cols, if that is how the nest reads it."""
    step = _coefficients(x)
    i, j = rows.loops[0].var, cols.loops[0].var
    batch = [loop.var for loop in c.batch.loops if loop.var in step]
    if step.get(j) != 1 or i not in step or len(step) != 2 + len(batch):
        return None
    strides = (*(step[v] for v in batch), step[i], 1)
    if any(s <= 0 or s * x.buf.dtype.bytes % 16 for s in strides[:-1]):
        return None
    shape = (*(c.batch.size for _ in batch), rows.size, cols.size)
    dense = (*(rows.size * cols.size for _ in batch), cols.size, 1)
    return Buffer(x.buf.name, x.buf.dtype, tuple(map(const, shape)), "global", None if strides == dense else tuple(map(const, strides)))


def _with_result(value: Expr, out: Load, result: Buffer, c: Contraction) -> Expr | None:
    """The epilogue where it updates what it stores to: each element is read before it is written, by the thread that computes it."""
    own = load(out.buf, out.idx)
    at = (*(loop.var for loop in c.batch.loops[: len(result.shape) - 2]), c.rows.loops[0].var, c.cols.loops[0].var)

    def go(e: Expr) -> Expr:
        return load(result, at) if e is own else rebuild(e, go)

    made = go(value)
    return None if any(isinstance(x, Load) and x.buf is out.buf for x in walk(made)) else made
