"""Contractions in 16-bit floats or bytes on Hopper's tensor cores: problems and tiles for `wgmma_kernel.py`.

A problem suits it when both factors are plain matrices, dense along the sum or (the second one) along the columns, of
any rank: the copy engine needs one stride for rows and one for batches. Bytes lie along the sum. The epilogue runs in
registers. Sizes of sums below are those of 16-bit floats: two bytes take the place and the time of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction.wgmma_conv import window_of
from dnnc.backends.cuda.templates.contraction.wgmma_kernel import ROW, Finish, Product, Tiling, Window, Writer, steps_of
from dnnc.backends.cuda.templates.contraction.wgmma_split import SplitWriter
from dnnc.backends.cuda.templates.reduction.partial import PEER_BYTES, SHARE, SPLITS
from dnnc.ir.dtype import FLOAT8, DType, bf16, f16, f32, i8, i32, u8
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Var, const, free, load, rebuild, substitute, terms, value, var, walk
from dnnc.ir.loops.stmt import Buffer, Kernel, Param, loop_var
from dnnc.passes.lower.form import Axis, Contraction, Operand
from dnnc.passes.schedule.problem import Knobs, Problem

# types of the sums -> of the operands; of the results
FACTORS = {
    f32: ((f16, f16), (bf16, bf16), *((a, b) for a in FLOAT8 for b in FLOAT8)),
    i32: tuple((a, b) for a in (u8, i8) for b in (u8, i8)),
}
RESULTS = (f16, bf16, f32, i32, u8, i8, *FLOAT8)
MIN_ROWS = 16  # with fewer rows the product is as fast as its weights can be read
PRODUCTS, BYTES = 2048, 48  # a cycle of a multiprocessor: multiplications of 16-bit floats, bytes out of the L2 cache
PROMOTING = 0.8  # the part of these that products reach whose sums are promoted every few steps
TILE, PIECE = 800, 150  # cycles: a tile's beginning and end, and 64 x 64 elements of its end, stored as they are
ISSUE = 32  # cycles in which a multiprocessor does an operation on 64 x 64 elements
PLAIN = 3  # operations on each element that is stored as it is
# operations beyond the plain ones that an epilogue's steps are; 1/x, 2^x and so on have an eighth of the rate
OPERATIONS = {
    "exp": 8,
    "/": 8,
    "sqrt": 8,
    "log": 20,
    "erf": 5,
    "tanh": 14,
    "sin": 30,
    "cos": 30,
    "pow": 40,
    "log1p": 25,
    "expm1": 25,
}
HIDDEN = 0.6  # of the other cores' time is lost where each scheduler has one warp
LATENCY = 700  # cycles from asking for a stage to having it
REGISTERS = 64  # of a thread besides its sums
RESIDENT = (1, 2, 3, 4)  # blocks that share a multiprocessor
RESULT = "result."
STEP = ROW // 2  # of a sum, in 16-bit floats
MAX_SPLIT_COLUMNS = 128
STAGES, ENOUGH = 8, 5  # more hide nothing; so many hide what the L2 cache takes
RESERVED = 1024  # bytes of shared memory that the system takes of each block
COLUMNS = (256, 192, 176, 128, 64)  # of a tile; 176 where the results of a tile fit into registers twice
WIDE_STAGES = 3  # at least, of the widest tiles of several blocks
DEEP, GROUPS = 12, (1, 2, 4, 8, 32, 64)  # stages and row tiles to try
ORDER = ("split",)
GROUP = 16  # row tiles that walk over the columns together: what they read stays in the L2 cache


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Best guess first; none where the kernel does not apply."""
    p = product_of(problem) if target.has_wgmma else None
    if p is None or p.m < MIN_ROWS:
        return []
    return [knobs_of(t) for t in tilings_of(p, target)]


def estimate(problem: Problem, target: GpuTarget) -> float:
    """Cycles of the best tiling; infinite where the kernel does not apply."""
    p = product_of(problem) if target.has_wgmma else None
    if p is None or p.m < MIN_ROWS:
        return math.inf
    found, (k, red) = tilings_of(p, target), depths_of(p)
    return _cycles((p.batch, p.m, p.n, k), found[0], p.work, red / k, rate_of(p)) if found else math.inf


def rate_of(p: Product) -> float:
    """Multiplications of 16-bit floats, or of two bytes, in a cycle of a multiprocessor."""
    return PRODUCTS * (PROMOTING if p.promotes else 1)


def depths_of(p: Product) -> tuple[int, int]:
    """The length of the sum in 16-bit floats, with what fills its steps and without."""
    return steps_of(p, ROW // p.a.dtype.bytes) * STEP, -(-p.k * p.a.dtype.bytes // 2)


def tilings_of(p: Product, target: GpuTarget) -> list[Tiling]:
    """Those of the product's sizes that suit its result, best guess first."""
    k, red = depths_of(p)
    return [t for t in tilings(p.batch, p.m, p.n, k, target, p.work, red, rate_of(p)) if p.suits(t)]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Return every tiling that fits; the best also with other rings and numbers of row tiles in lockstep."""
    p = product_of(problem) if target.has_wgmma else None
    if p is None or p.m < MIN_ROWS:
        return []
    k, every = depths_of(p)[0], tilings_of(p, target)
    out = list(every)
    for t in every[:10]:
        most = min((_room(t, target) - replace(t, stages=0).shared_bytes) // t.stage_bytes, DEEP, k // STEP // t.split)
        out += [replace(t, stages=n) for n in range(2, most + 1)]
    for t in every[:8]:
        out += [replace(t, group=n) for n in GROUPS if n <= max(-(-p.m // t.bm), 1)]
    return [knobs_of(t) for t in dict.fromkeys(out)]


def knobs_of(t: Tiling) -> Knobs:
    return (
        ("bm", t.bm),
        ("bn", t.bn),
        ("stages", t.stages),
        ("group", t.group),
        ("split", t.split),
        ("resident", t.resident),
    )


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    p = product_of(problem)
    if p is None:
        raise ScheduleError("the kernel of tensor cores takes plain matrices of 16-bit floats")
    bm, bn, stages, group, split, resident = (
        int({"resident": 1, **knobs}[k]) for k in ("bm", "bn", "stages", "group", "split", "resident")
    )
    return build(p, Tiling(bm, bn, stages, group, target.sms * resident, split, resident))


def tilings(
    batch: int, m: int, n: int, k: int, target: GpuTarget, work: int = 0, red: int = 0, rate: float = PRODUCTS
) -> list[Tiling]:
    """Tilings that fit into shared memory, in the order of their estimated times.

    Args:
        batch, m, n, k: sizes of the product; k with what fills the steps of its sum.
        target: the GPU.
        work: operations on each element after its sum.
        red: k without what fills steps, where that is less.
        rate: multiplications in a cycle of a multiprocessor.
    """
    found = []
    for bn in COLUMNS:  # of two that are as fast, the one with more columns
        for bm in (64, 128):
            for split, resident in ((s, r) for s in SPLITS for r in RESIDENT):
                t = Tiling(bm, bn, 0, GROUP, target.sms * resident, split, resident)
                t = replace(t, stages=_stages(batch, m, n, k, t, target))
                if (split == 1 or _splits(batch, m, n, k, t)) and _resides(batch, m, n, k, t, target):
                    found.append((_cycles((batch, m, n, k), t, work, (red or k) / k, rate), t))
    found.sort(key=lambda x: x[0])
    return [t for _, t in found]


def _stages(batch: int, m: int, n: int, k: int, t: Tiling, target: GpuTarget) -> int:
    """As many as fit, and no more than a block has steps. Where every block has a multiprocessor to itself, as many as
    leave room for a block of the next kernel, which then gets its first weights while this one runs.
    """
    room = _room(t, target)
    half = target.shared_per_sm // 2 - RESERVED
    tiles = _tiles(batch, m, n, t)
    if tiles * t.split <= target.sms and (half - t.shared_bytes) // t.stage_bytes >= ENOUGH:
        room = half
    return min((room - t.shared_bytes) // t.stage_bytes, STAGES, -(-k // STEP) // t.split * -(-tiles // t.blocks))


def _room(t: Tiling, target: GpuTarget) -> int:
    """Bytes of shared memory that a block may have."""
    return min(target.shared_bytes, target.shared_per_sm // t.resident - RESERVED)


def _resides(batch: int, m: int, n: int, k: int, t: Tiling, target: GpuTarget) -> bool:
    """Is there a ring, and are there registers and tiles for so many blocks on a multiprocessor?

    Tensor cores wait for two stages of wide tiles: 4096 x 3072 x 768 with GELU takes 54 us by two blocks with two
    stages each, 37 us by one block with four (H200).
    """
    least = WIDE_STAGES if t.resident > 1 and t.bn == max(COLUMNS) else 2
    if t.stages < min(least, -(-k // STEP)):
        return False
    registers = (t.bn // 2 + REGISTERS) * t.threads * t.resident
    return t.resident == 1 or (
        t.consumers == 1
        and t.split == 1
        and registers <= target.registers
        and _tiles(batch, m, n, t) > t.blocks - target.sms
    )


def _tiles(batch: int, m: int, n: int, t: Tiling) -> int:
    return batch * -(-m // t.bm) * -(-n // t.bn)


def _splits(batch: int, m: int, n: int, k: int, t: Tiling) -> bool:
    """Is it worth a try that blocks share a tile: all of them at once, two steps of the sum each?"""
    steps = -(-k // STEP)
    return (
        t.bn <= MAX_SPLIT_COLUMNS
        and steps % t.split == 0
        and steps >= 2 * t.split
        and _tiles(batch, m, n, t) <= _at_once(t)
    )


def _at_once(t: Tiling) -> int:
    """Tiles that the multiprocessors can work on at one time."""
    return int(t.blocks * SPLITS[t.split] / t.split)


def _cycles(sizes: tuple[int, int, int, int], t: Tiling, work: int, filled: float, rate: float) -> float:
    """Estimated cycles. A block's tile takes its steps and its end one after the other; of several blocks on a
    multiprocessor these overlap, until tensor cores, the other cores, or the L2 cache have no time left. `filled`: the
    part of the steps that is not filled up with zeros.
    """
    batch, m, n, k = sizes
    tiles, in_place, pieces = _tiles(batch, m, n, t), _at_once(t), t.bm * t.bn / 4096
    steps = -(-k // STEP) // t.split
    step = max(t.bm * t.bn * STEP / rate, t.stage_bytes * filled / BYTES)
    waiting = LATENCY / max(t.stages - 1, 1) if steps > t.stages else 0  # for the stage that was given back last
    alone = steps * max(step, waiting) + TILE + (PIECE + 1.1 * ISSUE * work) * pieces
    if t.split > 1:
        alone += SHARE + t.bm * t.bn * 4 / PEER_BYTES
    ends = ISSUE * (PLAIN + work) * pieces * (1 + HIDDEN / (t.resident * t.consumers))
    busiest = max(steps * step, ends)
    waves, rest = divmod(tiles, in_place)
    cycles = waves * max(alone, t.resident * busiest)
    return cycles + (max(alone, -(-rest * t.resident // in_place) * busiest) if rest else 0)


# --- reading the nest -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """A contraction with a variable for each side, not loops; z and i stand for loops `batch` and `rows`."""

    c: Contraction
    batch: Axis
    rows: Axis

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.batch.size, self.rows.size, self.c.cols.size, self.c.red.size

    @property
    def vars(self) -> tuple[Var, Var, Var, Var]:
        """z, i, j, k: of batches, rows, columns and the sum."""
        z, i, j, k = (loop_var(name, const(0), const(size)) for name, size in zip(("z.", "i.", "j.", "k."), self.sizes))
        return z, i, j, k

    def offset(self, x: Load) -> Expr:
        """Where an element lies."""
        z, i, j, k = self.vars
        return substitute(
            x.buf.offset(x.idx), self.batch.at(z) | self.rows.at(i) | self.c.cols.at(j) | self.c.red.at(k)
        )

    def step(self, x: Load) -> dict[Var, int]:
        """Return strides along each side; empty where the offset is not linear in them."""
        ts, first = terms(self.offset(x))
        found = {t: n for t, n in ts if isinstance(t, Var)}
        return found if first == 0 and len(found) == len(ts) else {}


def product_of(problem: Problem) -> Product | None:
    """The product that a contraction is, with its parameters seen as matrices; None where it is none."""
    c = problem.contraction
    if c is None or c.dtype not in FACTORS or not c.cols.loops:
        return None
    views = [Steps(c, c.batch, c.rows)]
    if (
        not c.batch.loops and len(c.rows.loops) > 1
    ):  # rows that do not lie in one sequence: the outermost loop counts matrices
        views.append(Steps(c, Axis(c.rows.loops[:1]), Axis(c.rows.loops[1:])))
    found = (_product(problem, along) for along in views)
    return next((p for p in found if p is not None), None)


def _product(problem: Problem, along: Steps) -> Product | None:
    c = along.c
    a, b = factor(c.a, c.dtype), factor(c.b, c.dtype)
    if a is None or b is None or (a.buf.dtype, b.buf.dtype) not in FACTORS[c.dtype]:
        return None
    found = _factors(problem, along, a, b)
    if found is None:
        return None
    left, right, flipped, window = found
    return with_epilogue(problem, along, {a.buf: left, b.buf: right}, flipped, window)


def with_epilogue(
    problem: Problem,
    along: Steps,
    factors: Mapping[Buffer, Buffer],
    flipped: bool = False,
    window: Window | None = None,
) -> Product | None:
    """The product of two factors with its result and epilogue; None where the result has an order of its own.

    Args:
        problem: the problem.
        along: its contraction.
        factors: the first one's buffer and its view as a matrix, then those of the second one.
        flipped: are the second one's rows the sum's?
        window: how the first one's rows lie in an image.
    """
    c, out = along.c, load(along.c.store.buf, along.c.store.idx)
    assert isinstance(out, Load)
    if out.buf.dtype not in RESULTS or len({*factors, out.buf}) < 3:
        return None
    _, i, j, _ = along.vars
    plain = matrix_view(out, along, i, j)
    result = plain or _apart(out, along)
    stored = _with_result(c.store.value, out, result) if result is not None else None
    if result is None or stored is None or not _readable(stored, along, tuple(factors), plain is None):
        return None
    rows, cols = ((), ()) if plain is not None else (_rows_of(out, along)[1], c.cols.extents)
    left, right = factors.values()
    swap: dict[Param, Param] = {**dict(factors.items()), out.buf: result}
    params = tuple(swap.get(p, p) for p in c.kernel.entry.params)
    fixed = "".join(side for side, x in zip("ab", factors) if x.name in problem.constants)
    finish = _finish(along, stored, result, plain is None)
    made = Product(c.kernel.name, params, left, right, result, *along.sizes, finish, flipped, window)
    beside = _beside(stored, along, result)
    made = replace(made, rows=rows, cols=cols, fixed=fixed, beside=beside, work=_work(stored), locs=problem.kernel.locs)
    again = not any(isinstance(x, Var) and x.name == RESULT for x in walk(stored))
    made = replace(made, sums=c.dtype, again=again)
    return made if plain is not None or made.in_vectors else None


def _work(stored: Expr) -> int:
    """Operations on an element beside those that every epilogue has: the addition of a bias, a maximum, conversions."""
    names = [x.name for x in walk(stored) if isinstance(x, Op) and x.dtype.is_float and not x.name.startswith("cast_")]
    return max(0, sum(OPERATIONS.get(name, 1) for name in names) - 2)


def _beside(stored: Expr, along: Steps, result: Buffer) -> tuple[Buffer, ...]:
    """Return the result-shaped matrices that the epilogue reads by element, perhaps the result, by TMA copies."""
    at = (*along.c.rows.loops, *along.c.cols.loops)
    if len(at) != 2 or along.batch.loops:
        return ()
    found = [result for x in walk(stored) if isinstance(x, Var) and x.name == RESULT]
    found += [
        x.buf
        for x in walk(stored)
        if isinstance(x, Load) and x.buf.space == "global" and x.idx == at and x.buf.dtype.bytes in (2, 4)
    ]
    return tuple(b for b in dict.fromkeys(found) if suits(b))


def _readable(stored: Expr, along: Steps, factors: tuple[Buffer, ...], blocked: bool) -> bool:
    """Can neighbouring columns of all that the epilogue reads be read together?"""
    if blocked and any(isinstance(x, Var) and x.name == RESULT for x in walk(stored)):
        return False
    cols, j = along.c.cols, along.vars[2]
    for x in walk(stored):
        if isinstance(x, Load) and x.buf in factors:
            return False
        if isinstance(x, Load) and len(cols.loops) > 1 and x.buf is not along.c.acc:
            if any(isinstance(e, Op) and j in free(e) for e in walk(substitute(x.buf.offset(x.idx), cols.at(j)))):
                return False
    return True


def _finish(along: Steps, stored: Expr, result: Buffer, apart: bool) -> Finish:
    """The epilogue at (batch, row, column, lane)."""
    cols = along.c.cols

    def finish(z: Expr, row: Expr, col: Expr, lane: Expr, total: Expr) -> Expr:
        at: dict[Expr, Expr] = {load(along.c.acc, (0,)): total} | along.batch.at(z) | along.rows.at(row)
        *outer, inner = cols.loops
        at[inner] = (col % cols.inner if outer else col) + lane
        at |= Axis(tuple(outer)).at(col // cols.inner)
        if not apart:
            at[_result(result)] = load(result, (*((z,) if len(result.shape) > 2 else ()), row, col + lane))
        return substitute(stored, at)

    return finish


def factor(x: Operand, sums: DType) -> Load | None:
    """The element of a buffer that a factor is, before its conversion to the type of the sums."""
    v = x.value
    if not isinstance(v, Op) or v.name != f"cast_{sums}" or not isinstance(e := v.args[0], Load):
        return None
    return e if e.lanes == 1 and e.limit is None else None


def _factors(problem: Problem, along: Steps, a: Load, b: Load) -> tuple[Buffer, Buffer, bool, Window | None] | None:
    """Return the factors' buffers, whether the second's rows are the sum's, and the first's image layout."""
    _, i, j, k = along.vars
    flipped = along.step(b).get(j) == 1
    left, right = matrix_view(a, along, i, k), matrix_view(b, along, *((k, j) if flipped else (j, k)))
    if flipped and b.buf.dtype.bytes == 1:
        return None
    if (
        left is not None
        and right is not None
        and suits(left)
        and suits(right)
        and not (along.c.a.conds or along.c.b.conds)
    ):
        return left, right, flipped, None
    found = window_of(problem, a, along.offset(a), b, along.offset(b), i, j, k) if not along.batch.loops else None
    return None if found is None else (found[1], found[2], False, found[0])


def matrix_view(x: Load, along: Steps, rows: Var, cols: Var) -> Buffer | None:
    """The buffer as [batch, rows, cols] or [rows, cols], dense along cols, if that is how the nest reads it."""
    step, sizes = along.step(x), dict(zip(along.vars, along.sizes))
    batch = [v for v in along.vars[:1] if v in step]
    if step.get(cols) != 1 or rows not in step or len(step) != 2 + len(batch):
        return None
    dense = (*(sizes[rows] * sizes[cols] for _ in batch), sizes[cols], 1)
    return _view(x, tuple(sizes[v] for v in (*batch, rows, cols)), tuple(step[v] for v in (*batch, rows, cols)), dense)


def _apart(x: Load, along: Steps) -> Buffer | None:
    """The result as [batch, outer loops of columns, loops of rows, columns], as heads lie, and batches of rows."""
    *outer, inner = along.c.cols.loops
    step, first = _offsets(x, along)
    rows, sizes = _rows_of(x, along)
    z = along.vars[0]
    batch = ((z, along.batch.size),) if along.batch.size > 1 else ()
    order = (
        *batch,
        *zip(outer, along.c.cols.extents),
        *zip(rows, sizes),
        (inner, along.c.cols.inner),
    )
    known = {z, *outer, *along.rows.loops, inner}
    if first or not set(step) <= known or any(v not in step for v, _ in order) or step[inner] != 1:
        return None
    return _view(x, tuple(n for _, n in order), tuple(step[v] for v, _ in order), ())


def _offsets(x: Load, along: Steps) -> tuple[dict[Expr, int], int]:
    """Return strides along each loop of rows, columns and batches, and the first offset."""
    ts, first = terms(substitute(x.buf.offset(x.idx), along.batch.at(along.vars[0])))
    return dict(ts), first


def _rows_of(x: Load, along: Steps) -> tuple[tuple[Var, ...], tuple[int, ...]]:
    """Return the loops of the result's rows and their sizes: contiguous neighbours count as the inner one."""
    step, _ = _offsets(x, along)
    found: list[tuple[Var, int]] = []
    for v, n in zip(along.rows.loops, along.rows.extents):
        if found and step.get(found[-1][0]) == step.get(v, 0) * n:
            n *= found.pop()[1]
        found.append((v, n))
    return tuple(v for v, _ in found), tuple(n for _, n in found)


def _view(x: Load, shape: tuple[int, ...], strides: tuple[int, ...], dense: tuple[int, ...]) -> Buffer | None:
    """The buffer in another shape. `dense`: the strides that need not be written."""
    if min(strides) <= 0:
        return None
    steps = None if strides == dense else tuple(map(const, strides))
    return Buffer(x.buf.name, x.buf.dtype, tuple(map(const, shape)), "global", steps)


def suits(b: Buffer) -> bool:
    """Can the copy engine read it? Rows must begin at multiples of 16 bytes."""
    return all(value(s * b.dtype.bytes % 16) == 0 for s in b.full_strides()[:-1])


def _result(result: Buffer) -> Var:
    """Stands for what lies where the result is stored."""
    return var(RESULT, result.dtype)


def _with_result(stored: Expr, out: Load, result: Buffer) -> Expr | None:
    """Return an in-place epilogue: one thread reads each element of its output before it writes it."""
    own, mark = load(out.buf, out.idx), _result(result)

    def go(e: Expr) -> Expr:
        return mark if e is own else rebuild(e, go)

    found = go(stored)
    return None if any(isinstance(x, Load) and x.buf is out.buf for x in walk(found)) else found


def build(p: Product, t: Tiling) -> Kernel:
    """The kernel; ScheduleError when `finish` reads what cannot be read several columns at a time."""
    return (SplitWriter if t.split > 1 else Writer)(p, t).kernel()
