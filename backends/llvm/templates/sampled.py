"""Recipe for scalar products of rows that indices pick, as those of the elements of a product at few places (SDDMM):

    parallel over groups of as many places n as a vector has lanes:
        for chunks of the rows' elements d:
            a[v] = x[rows[n], d + v]                      once, where all places of the group have one row
            for each place j of the group, for each vector v:
                acc[j] += a[v] * y[columns[n + j], d + v]
        z[n ..] = epilogue(sums over the lanes of acc[0], acc[1], ..)

Rows of y come from the L2 cache, at half the rate at which registers are multiplied: so nothing else may be loaded for
each product. The sums over lanes of a square of vectors take log2(lanes) rounds of shuffles and additions, three
instructions for a place, and give a vector of results. Places with rows of their own load both factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.pool import SERIAL_BELOW
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import (
    Expr,
    Load,
    Op,
    Var,
    const,
    extent,
    fma,
    free,
    maximum,
    minimum,
    op,
    select,
    substitute,
    unwrap,
    value,
    var,
    walk,
)
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, Store, call, walk_stmts
from dnnc.passes.lower.form import Reduction, Rows
from dnnc.passes.schedule.memory import Vectorizer
from dnnc.passes.schedule.problem import Knobs, Problem, varied

ORDER = ("lanes",)
REGISTERS = {32: 8, 16: 4}  # vectors of a chunk beside as many sums as a vector has lanes, of so many registers
Knob = Mapping[str, "int | str"]


@dataclass(frozen=True)
class Sampled:
    """`row`: the number that picks the first factor's row at place `n`."""

    sum: Reduction
    n: Var
    factors: tuple[Expr, Expr]
    row: Load
    store: Store

    @property
    def terms(self) -> int:
        return int(str(unwrap(extent(self.sum.loops[0]))))


def sampled_of(problem: Problem) -> Sampled | None:
    """The scalar products of picked rows that a kernel computes; None for all others."""
    form = problem.form
    if not isinstance(form, Rows) or len(form.reductions) != 1 or form.panels:
        return None
    (r,) = form.reductions
    if len(r.loops) != 1 or r.conds or r.combine != "sum" or not r.acc.dtype.is_float:
        return None
    (d,), wide = r.loops, [v for v in form.outer if value(extent(v)) != 1]
    stores = [s for s in walk_stmts(problem.kernel.entry.body) if isinstance(s, Store) and s.buf.space == "global"]
    if value(extent(d)) is None or value(d.lo if d.lo is not None else 0) != 0 or len(wide) != 1 or len(stores) != 1:
        return None
    single: dict[Expr, Expr] = {v: const(0) for v in form.outer if v is not wide[0]}
    (s,), (n,) = stores, wide
    s = Store(s.buf, tuple(substitute(i, single) for i in s.idx), substitute(s.value, single))
    term = substitute(r.term, single)
    if not (isinstance(term, Op) and term.name == "*" and len(term.args) == 2):
        return None
    here, there = (s.buf.offset(tuple(substitute(i, {n: const(k)}) for i in s.idx)) for k in (0, 1))
    if value(there - here) != 1:
        return None
    names = [buf.name for buf in problem.kernel.entry.buffers]
    numbers = [_picked(f, n, d) for f in term.args]
    picked = [(names.index(x.buf.name), k) for k, x in enumerate(numbers) if x is not None]
    if len(picked) < 2 or any(x.buf is s.buf for x in walk(term) if isinstance(x, Load)):
        return None
    (_, a), (_, other) = sorted(picked)
    row = numbers[a]
    assert row is not None
    return Sampled(r, n, (term.args[a], term.args[other]), row, s)


def _picked(factor: Expr, n: Var, d: Var) -> Load | None:
    """The index that picks the row of a factor, read at place `n`; None for other factors."""
    loads = [x for x in walk(factor) if isinstance(x, Load)]
    rows = [x for x in loads if d in free(x)]
    numbers = [x for x in loads if d not in free(x)]
    if len(rows) != 1 or len(numbers) != 1 or Vectorizer(d, const(0), 2).contiguous(rows[0].buf, rows[0].idx) is None:
        return None
    (number,) = numbers
    one = len(number.idx) == 1 and number.idx[0] is n and number.dtype.kind in "iu"
    return number if one else None


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    p = sampled_of(problem)
    if p is None:
        return []
    lanes = target.vector_bits // 8 // max(p.sum.acc.dtype.bytes, 4)
    while lanes > 4 and p.terms <= lanes // 2:
        lanes //= 2
    return [(("lanes", lanes), ("vectors", REGISTERS[32 if target.vector_bits == 512 else 16]))]


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """Fewer vectors of a row at once."""
    return [varied(k, vectors=n) for k in candidates(problem, target) for n in (2, 4, 8)]


def apply(problem: Problem, knobs: Knob, target: CpuTarget) -> Kernel:
    p = sampled_of(problem)
    if p is None:
        raise ScheduleError("no scalar products of rows that indices pick")
    lanes, vectors = int(knobs["lanes"]), int(knobs["vectors"])
    places, work = extent(p.n), unwrap(const(problem.flops))
    small = isinstance(work, int) and work < SERIAL_BELOW
    b = Builder()
    with b.loop("g", (places + (lanes - 1)) // lanes, "range" if small else "parallel") as g:
        first = b.let("first", g * lanes)
        left = places - first
        acc = b.alloc("acc", p.sum.acc.dtype, lanes, lanes)
        with b.loop("z", lanes, "unroll") as j:
            b.store(acc, (j, 0), const(0.0, acc.dtype), lanes)
        wide = Vectorizer(p.n, first, lanes)
        wide.limit = left
        rows = b.let("rows", wide.expr(p.row))
        one, few = op("==", call("hmin", rows), call("hmax", rows)), op("<", left, const(lanes))
        with b.when(const(lanes) <= left):
            b.branch(
                one,
                lambda: _products(b, p, acc, vectors, lambda j: first + j, first),
                lambda: _products(b, p, acc, vectors, lambda j: first + j, None),
            )
        if value(places % lanes) != 0:
            with b.loop("last", select(few, const(1), const(0))) as last:  # computed here alone, since its places are
                _products(b, p, acc, vectors, lambda j: maximum(minimum(first + last + j, places - 1), 0), None)
        _finish(b, p, first, left, _across(b, acc, lanes))
    return problem.kernel.with_body(b.block())


def _products(
    b: Builder, p: Sampled, acc: Buffer, most: int, place: Callable[[Expr], Expr], shared: Expr | None
) -> None:
    """Add the products of a group. `place`: of its members; `shared`: one whose row is that of all."""
    lanes = int(str(acc.shape[-1]))
    whole, rest = divmod(p.terms, lanes)
    width = min(most, whole)
    if width:
        chunks, over = divmod(whole, width)
        with b.loop("c", chunks) as c:
            _chunk(b, p, acc, c * (width * lanes), [None] * width, place, shared)
        if over:
            _chunk(b, p, acc, const(chunks * width * lanes), [None] * over, place, shared)
    if rest:
        _chunk(b, p, acc, const(whole * lanes), [const(rest)], place, shared)


def _chunk(
    b: Builder,
    p: Sampled,
    acc: Buffer,
    start: Expr,
    limits: list[Expr | None],
    place: Callable[[Expr], Expr],
    shared: Expr | None,
) -> None:
    """The products of some vectors of the rows' elements; a limit says how many lanes of one there are."""
    (d,), lanes = p.sum.loops, int(str(acc.shape[-1]))

    def vector(factor: Expr, n: Expr, v: int) -> Expr:
        wide = Vectorizer(d, start + v * lanes, lanes)
        wide.limit = limits[v]
        return wide.expr(substitute(factor, {p.n: n}))

    own = None if shared is None else [b.let("a", vector(p.factors[0], shared, v)) for v in range(len(limits))]
    with b.loop("j", lanes, "unroll") as j:
        n = place(j)
        for v in range(len(limits)):
            a = vector(p.factors[0], n, v) if own is None else own[v]
            b.store(acc, (j, 0), fma(a, vector(p.factors[1], n, v), acc.at(j, 0, lanes=lanes)), lanes)


def _across(b: Builder, acc: Buffer, lanes: int) -> Expr:
    """The sums over the lanes of each of `lanes` vectors, as a vector: vectors j and j + n / 2 become one."""
    tile, count = acc, lanes
    while count > 1:
        count //= 2
        made = b.alloc("across", acc.dtype, count, lanes)
        with b.loop("k", count, "unroll") as k:
            pair = [tile.at(k + h * count, 0, lanes=lanes) for h in (0, 1)]
            shuffle = const(count), const(2 * count)
            low, high = (call(f"interleave_{half}", *pair, *shuffle) for half in ("low", "high"))
            b.store(made, (k, 0), low + high, lanes)
        tile = made
    return tile.at(0, 0, lanes=lanes)


def _finish(b: Builder, p: Sampled, first: Expr, left: Expr, total: Expr) -> None:
    """Store a vector of sums."""
    wide = Vectorizer(p.n, first, total.lanes)
    wide.limit = left
    one, whole = var("sum", total.dtype), var("sum", total.dtype, lanes=total.lanes)
    wide.lets[one] = whole
    s = p.store
    here: dict[Expr, Expr] = {p.sum.acc[0]: one}
    made = wide.store(Store(s.buf, tuple(substitute(k, here) for k in s.idx), substitute(s.value, here)))
    b.emit(Store(made.buf, made.idx, substitute(made.value, {whole: total}), made.lanes, made.limit))
