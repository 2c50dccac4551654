"""Contractions in 16-bit floats on Hopper's tensor cores: which problems suit the kernel of `wgmma_kernel.py`, and with which tiles.

A problem suits it when both factors are plain matrices, dense along the sum or (the second one) along the columns, whatever number of axes
they had: the copy engine needs one stride for rows and one for batches. Everything that follows the sum is done in registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.nest import Contraction, Operand, contraction_of
from dnnc.backends.cuda.templates.wgmma_conv import window_of
from dnnc.backends.cuda.templates.wgmma_kernel import ROW, Finish, Product, Tiling, Window, build, steps_of
from dnnc.ir.dtype import bf16, f16, f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Var, const, load, rebuild, substitute, terms, value, var, walk
from dnnc.ir.operator.stmt import Buffer, Kernel, Param, loop_var
from dnnc.passes.schedule.problem import Knobs, Problem

TYPES = (f16, bf16)
MIN_ROWS = 16  # with fewer rows the product is as fast as its weights can be read
PRODUCTS, BYTES = 2048, 48  # a cycle of a multiprocessor: multiplications of 16-bit floats, bytes out of the L2 cache
TILE, PIECE = 800, 150  # cycles: a tile's beginning and end, and 64 x 64 elements of its end
SHARE, PEER_BYTES = 2000, 25  # cycles of a cluster's two barriers; bytes a cycle out of other blocks' shared memory
STEP = ROW // 2  # of a sum, in 16-bit floats
SPLITS, MAX_SPLIT_COLUMNS = (2, 4, 8), 128
STAGES = 8  # more hide nothing
GROUP = 16  # row tiles that walk over the columns together: what they read stays in the L2 cache


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Best guess first; none where the kernel does not apply."""
    p = product_of(problem) if target.has_wgmma else None
    if p is None or p.m < MIN_ROWS:
        return []
    found = tilings(p.batch, p.m, p.n, steps_of(p, STEP) * STEP, target)
    return [knobs_of(t) for t in found if t.split == 1 or p.stored_by_copies]


def knobs_of(t: Tiling) -> Knobs:
    return (("bm", t.bm), ("bn", t.bn), ("stages", t.stages), ("group", t.group), ("split", t.split))


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    p = product_of(problem)
    if p is None:
        raise ScheduleError("the kernel of tensor cores takes plain matrices of 16-bit floats")
    bm, bn, stages, group, split = (int(knobs[k]) for k in ("bm", "bn", "stages", "group", "split"))
    return build(p, Tiling(bm, bn, stages, group, target.sms, split))


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
    steps = -(-k // STEP)
    return t.bn <= MAX_SPLIT_COLUMNS and steps % t.split == 0 and steps >= 2 * t.split and _tiles(batch, m, n, t) * t.split <= 2 * t.blocks


def _cycles(batch: int, m: int, n: int, k: int, t: Tiling, target: GpuTarget) -> float:
    waves = -(-_tiles(batch, m, n, t) * t.split // target.sms)
    step = max(t.bm * t.bn * STEP / PRODUCTS, t.stage_bytes / BYTES)
    steps = -(-k // STEP) // t.split
    return waves * (steps * step + TILE + PIECE * t.bm * t.bn / 4096 + (SHARE + t.bm * t.bn * 4 / PEER_BYTES if t.split > 1 else 0))


# --- reading the nest ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """One variable for each side of a contraction, in place of its loops."""

    c: Contraction
    z: Var
    i: Var
    j: Var
    k: Var

    def offset(self, x: Load) -> Expr:
        """Where an element lies, as far as it can be said by sums of steps."""
        c = self.c
        at = {**c.batch.at(self.z), **c.rows.at(self.i), **c.cols.at(self.j), **c.red.at(self.k)}
        return substitute(x.buf.offset(x.idx), at)

    def step(self, x: Load) -> dict[Var, int]:
        """How far apart two elements are that follow one another along each side; empty where the offset is more than that."""
        ts, first = terms(self.offset(x))
        found = {t: n for t, n in ts if isinstance(t, Var)}
        return found if first == 0 and len(found) == len(ts) else {}


def steps_along(c: Contraction) -> Steps:
    batch, m, n, k = c.sizes
    return Steps(c, *(loop_var(name, const(0), const(size)) for name, size in (("z.", batch), ("i.", m), ("j.", n), ("k.", k))))


def product_of(problem: Problem) -> Product | None:
    """The product that a contraction is, with its parameters seen as matrices; None where it is none."""
    c = contraction_of(problem)
    if c is None or c.dtype is not f32 or len(c.cols.loops) not in (1, 2):
        return None
    a, b, out = _factor(c.a), _factor(c.b), load(c.store.buf, c.store.idx)
    assert isinstance(out, Load)
    if a is None or b is None or a.buf.dtype is not b.buf.dtype or out.buf.dtype not in (*TYPES, f32) or len({a.buf, b.buf, out.buf}) < 3:
        return None
    along = steps_along(c)
    factors, result = _factors(problem, along, a, b), _matrix(out, along, along.i, along.j) or _blocks(out, along)
    made = _with_result(c.store.value, out, result) if result is not None else None
    if factors is None or result is None or made is None or any(isinstance(x, Load) and x.buf in (a.buf, b.buf) for x in walk(made)):
        return None
    left, right, flipped, window = factors
    swap: dict[Param, Param] = {a.buf: left, b.buf: right, out.buf: result}
    params = tuple(swap.get(p, p) for p in c.kernel.entry.params)
    batch, m, n, k = c.sizes
    block = value(result.shape[-1]) or 0 if len(result.shape) > 2 + bool(batch > 1) else 0
    p = Product(c.kernel.name, params, left, right, result, batch, m, n, k, _finish(c, made, result, block), flipped, window, problem.kernel.locs)
    return replace(p, block=block, fixed=_fixed(problem, a, b))


def _finish(c: Contraction, stored: Expr, result: Buffer, block: int) -> Finish:
    """The epilogue at (batch, row, column, lane)."""

    def finish(z: Expr, row: Expr, col: Expr, lane: Expr, total: Expr) -> Expr:
        at: dict[Expr, Expr] = {load(c.acc, (0,)): total} | c.batch.at(z) | c.rows.at(row)
        size = c.cols.inner
        inner = col + lane if len(c.cols.loops) == 1 else col % size + lane
        at |= {c.cols.loops[-1].var: inner} | ({c.cols.loops[0].var: col // size} if len(c.cols.loops) == 2 else {})
        if not block:
            at[_result(result)] = load(result, (*((z,) if len(result.shape) > 2 else ()), row, col + lane))
        return substitute(stored, at)

    return finish


def _fixed(problem: Problem, a: Load, b: Load) -> str:
    """Which factors are constants of the model."""
    graph = problem.anchor.graph if problem.anchor is not None else None
    if graph is None:
        return ""
    names = [x.name for x in problem.kernel.entry.buffers]
    values = dict(zip(names, problem.lowered.params))
    return "".join(side for side, x in (("a", a), ("b", b)) if values[x.buf.name] in graph.constants)


def _factor(x: Operand) -> Load | None:
    """The element of a 16-bit buffer that a factor is."""
    v = x.value
    if not isinstance(v, Op) or v.name != "cast_f32" or not isinstance(e := v.args[0], Load) or e.buf.dtype not in TYPES:
        return None
    return e if e.lanes == 1 and e.limit is None else None


def _factors(problem: Problem, along: Steps, a: Load, b: Load) -> tuple[Buffer, Buffer, bool, Window | None] | None:
    """The factors as buffers, whether the rows of the second one are those of the sum, and how those of the first lie in an image."""
    flipped = along.step(b).get(along.j) == 1
    left, right = _matrix(a, along, along.i, along.k), _matrix(b, along, *((along.k, along.j) if flipped else (along.j, along.k)))
    if left is not None and right is not None and _suits(left) and _suits(right) and not (along.c.a.conds or along.c.b.conds):
        return left, right, flipped, None
    found = window_of(problem, a, along.offset(a), b, along.offset(b), along.i, along.j, along.k)
    return None if found is None else (found[1], found[2], False, found[0])


def _matrix(x: Load, along: Steps, rows: Var, cols: Var) -> Buffer | None:
    """The buffer as [batch, rows, cols] or [rows, cols], dense along cols, if that is how the nest reads it."""
    step, sizes = along.step(x), dict(zip((along.z, along.i, along.j, along.k), along.c.sizes))
    batch = [v for v in (along.z,) if v in step]
    if step.get(cols) != 1 or rows not in step or len(step) != 2 + len(batch):
        return None
    shape = (*(sizes[v] for v in batch), sizes[rows], sizes[cols])
    strides = (*(step[v] for v in batch), step[rows], 1)
    if any(s <= 0 for s in strides):
        return None
    dense = (*(sizes[rows] * sizes[cols] for _ in batch), sizes[cols], 1)
    return Buffer(x.buf.name, x.buf.dtype, tuple(map(const, shape)), "global", None if strides == dense else tuple(map(const, strides)))


def _blocks(x: Load, along: Steps) -> Buffer | None:
    """The result as [batch, blocks of columns, rows, columns of a block], as heads lie: a block holds whole rows of a store buffer."""
    c = along.c
    if len(c.cols.loops) != 2:
        return None
    outer, inner = (loop.var for loop in c.cols.loops)
    ts, first = terms(substitute(x.buf.offset(x.idx), c.batch.at(along.z) | c.rows.at(along.i)))
    step = {t: n for t, n in ts}
    width, batch, z = c.cols.inner, c.sizes[0], (along.z,) if c.sizes[0] > 1 else ()
    if first or set(step) != {inner, outer, along.i, *z} or step[inner] != 1 or min(step.values()) <= 0 or width * x.buf.dtype.bytes % ROW:
        return None
    shape = (*(batch for _ in z), c.cols.size // width, c.rows.size, width)
    strides = (*(step[v] for v in z), step[outer], step[along.i], 1)
    found = Buffer(x.buf.name, x.buf.dtype, tuple(map(const, shape)), "global", tuple(map(const, strides)))
    return found if _suits(found) else None


def _suits(b: Buffer) -> bool:
    """Can the copy engine read it? Rows must begin at multiples of 16 bytes."""
    return all(value(s * b.dtype.bytes % 16) == 0 for s in b.full_strides()[:-1])


def _result(result: Buffer) -> Var:
    """Stands for what lies where the result is stored."""
    return var("result.", result.dtype)


def _with_result(stored: Expr, out: Load, result: Buffer) -> Expr | None:
    """The epilogue where it updates what it stores to: each element is read before it is written, by the thread that computes it."""
    own, mark = load(out.buf, out.idx), _result(result)

    def go(e: Expr) -> Expr:
        return mark if e is own else rebuild(e, go)

    found = go(stored)
    return None if any(isinstance(x, Load) and x.buf is out.buf for x in walk(found)) else found
