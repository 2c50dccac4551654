"""Few rows that a norm makes, times a matrix: every block computes the norm anew, for itself.

    for rows: for cols:                                      for block: for thread:
        mean and variance of x[row, :]                           the first weights, scale and bias are asked for
        for k: acc += norm(x[row, k]) * w[k, col]       ->       row[:] = norm(x[row, :]), in shared memory, by all
                                                                 threads
        y[row, col] = epilogue(acc)                              the product of `row` and w, as `gemv` has it

A row has a few thousand elements, which the second-level cache gives to all blocks while their weights are on their way
from memory. A kernel of its own for the norm would take longer to start than that. `takes` says for which nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import gemv
from dnnc.backends.cuda.templates.contraction.staging import readable, vector_of
from dnnc.ir.dtype import DType, boolean
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Var, cast, const, extent, free, load, rebuild, substitute, value, walk
from dnnc.ir.graph import Node
from dnnc.ir.loops.stmt import Alloc, Buffer, Builder, Kernel, call
from dnnc.ir.op import ContractionForm, Trait
from dnnc.ir.types import Dense
from dnnc.passes.lower.form import Axis, Contraction, Normed, Reduction
from dnnc.passes.lower.scatter import combine
from dnnc.passes.schedule.problem import Knobs, Problem

ROWS = 4  # more make the product longer than its weights take to come, and tensor cores better
ELEMENTS = 8192  # of all rows: 32 KiB of shared memory
WEIGHTS = (
    1 << 24
    # for which nearly all blocks run at once; later ones compute the norm while little else runs
)
SHORT = 1024  # elements of a row, for less than which the norm takes no less time
THREADS = (256, 512)
WARP = 32
KEPT = 32  # elements of the rows that a thread may hold
ORDER = gemv.ORDER


def takes(norm: Node, product: Node) -> bool:
    """True if a product and the norm behind its first operand (also element-wise) share one kernel."""
    return Trait.NORM in norm.op.traits and fits(norm, product, WEIGHTS)


def fits(made: Node, product: Node, most: float) -> bool:
    """May every block compute the rows of a product that a node makes? `most`: weights."""
    x, out = product.inputs[0], product.output.type
    if (
        product.op.contraction is not ContractionForm.PRODUCT
        or x is None
        or any(not v.type.row_major for v in (x, product.output, made.output, *made.inputs[:1]) if v)
    ):
        return False
    sizes = [d for t in (made.output.type, x.type, out) for d in t.shape]
    weights = product.inputs[1]
    if (
        weights is None
        or weights.type.rank != 2
        or not isinstance(weights.type.encoding, Dense)
        or made.output.type.shape != x.type.shape
        or not all(isinstance(d, int) for d in sizes)
    ):
        return False
    *rows, k = (int(str(d)) for d in x.type.shape)
    n, count = int(str(out.shape[-1])), 1
    for d in rows:
        count *= d
    last = made.attrs.get("axis", -1) in (-1, x.type.rank - 1)
    return (
        bool(rows)
        and last
        and 1 <= count <= ROWS < n
        and WARP <= k
        and count * k <= ELEMENTS
        and n * max(k, SHORT) <= most
    )


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    found = split(problem)
    if found is None:
        return []
    knobs = gemv.divisions(found[1], target)
    return list(
        dict.fromkeys(tuple((name, t if name == "threads" else v) for name, v in k) for t in THREADS for k in knobs)
    )


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """The ways to share the product among threads for which a thread's part of the rows stays in registers."""
    found = split(problem)
    if found is None:
        return []
    norm, c = found
    held = norm.rows.size * (value(extent(norm.k)) or 0) * len(norm.expressions)
    return [k for k in gemv.every_division(c, target) if held <= KEPT * int(dict(k)["threads"])]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    found = split(problem)
    if found is None:
        raise ScheduleError("the nest is no product of rows that a norm makes")
    norm, c = found
    constants = gemv.early(problem, target)
    return gemv.made(c, knobs, constants, Rows(norm, int(knobs["threads"]), constants))


# --- what the nest computes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """`row[i, k]` = `value` over loops `rows` and `k`; `statistics`: successive sums over k, read as `acc[0]`."""

    rows: Axis
    k: Var
    statistics: tuple[tuple[Buffer, Expr], ...]
    value: Expr
    row: Buffer

    @property
    def expressions(self) -> tuple[Expr, ...]:
        return *(e for _, e in self.statistics), self.value


def split(problem: Problem) -> tuple[Norm, Contraction] | None:
    """The norm, and the contraction that reads the rows which it leaves in shared memory."""
    found = normed_product(problem)
    if found is None or not gemv.applies(found[1]) or found[1].batch.size != 1:
        return None
    norm, product = found
    return found if [x.buf for x in gemv.sides(product)[1].loads] == [norm.row] else None


def normed_product(problem: Problem, stored: DType | None = None) -> tuple[Norm, Contraction] | None:
    """The norm, and the contraction of its rows, which lie in shared memory, by any weights. `stored`: the rows' type,
    which a contraction in float32 reads.
    """
    form = problem.form
    c = form.without_single if isinstance(form, Normed) and not problem.lowered.dims else None
    if c is None or c.acc is not c.reductions[-1].acc or not c.whole or len(c.red.loops) != 1 or c.a.conds or c.b.conds:
        return None
    (k,) = c.red.loops
    sums = [_sum(r, k, problem.form.outer) for r in c.reductions[:-1]]
    statistics = tuple(x for x in sums if x is not None)
    used = {buf for buf, _ in statistics}
    normed = [e for e in c.factors if any(isinstance(x, Load) and x.buf in used for x in walk(e))]
    if len(statistics) != len(sums) or len(normed) != 1:
        return None
    own = frozenset().union(*(free(e) for e in (*(e for _, e in statistics), *normed)))
    rows, n = Axis(tuple(v for v in c.outer if v in own)), value(extent(k)) or 0
    made = normed[0] if stored is None else _stored(normed[0], stored)
    row = Buffer("row", made.dtype, (const(rows.size * n),), "shared")
    read = cast(load(row, (_number(rows) * n + k,)), normed[0].dtype)
    product = c.of(*(read if e is normed[0] else e for e in c.factors)).joined
    if product is None:
        return None
    return _relocated(Norm(rows, k, statistics, made, row), product.kernel), product


def elements_ahead(c: Contraction, stored: DType) -> tuple[Norm, Contraction] | None:
    """A contraction's first operand, which is computed of elements, as rows without statistics, and the contraction."""
    n = c.red.size
    if (
        len(c.red.loops) != 1
        or c.a.conds
        or any(isinstance(x, Load) and x.buf.space != "global" for x in walk(c.a.value))
    ):
        return None
    made = _stored(c.a.value, stored)
    row = Buffer("row", stored, (const(c.rows.size * n),), "shared")
    read = cast(load(row, (_number(c.rows) * n + c.red.loops[0],)), c.a.value.dtype)
    return Norm(c.rows, c.red.loops[0], (), made, row), replace(c, a=replace(c.a, value=read))


def _stored(e: Expr, t: DType) -> Expr:
    """A value as it is kept in a type, which it may be converted from."""
    return e.args[0] if isinstance(e, Op) and e.name == "cast_f32" and e.args[0].dtype is t else cast(e, t)


def _sum(r: Reduction, k: Var, outer: Sequence[Var]) -> tuple[Buffer, Expr] | None:
    """`acc = 0; for r: acc += e`: acc, and the new value of acc with k instead of r."""
    over = [v for v in r.loops if value(extent(v)) != 1]
    if r.combine != "sum" or r.conds or len(over) != 1 or over[0].hi != k.hi or not r.around.issuperset(outer):
        return None
    env: dict[Expr, Expr] = {v: const(0) for v in (*outer, *r.loops) if value(extent(v)) == 1}
    return r.acc, substitute(combine("sum", r.acc[0], r.term), {**env, over[0]: k})


def _number(axis: Axis) -> Expr:
    """The step of an axis that its loops' variables are at."""
    at: Expr = const(0)
    for v, n in zip(axis.loops, axis.extents):
        at = at * n + v
    return at


def _relocated(norm: Norm, kernel: Kernel) -> Norm:
    """The norm with the buffers of a kernel whose axes have been joined."""
    now = {b.name: b for b in kernel.entry.buffers}

    def go(e: Expr) -> Expr:
        if isinstance(e, Load) and e.buf.space == "global":
            to = now[e.buf.name]
            at, idx = e.buf.offset(tuple(map(go, e.idx))), []
            for d in reversed(to.shape[1:]):
                idx.append(at % d)
                at = at // d
            return load(to, (at, *reversed(idx)))
        return rebuild(e, go)

    return replace(norm, statistics=tuple((acc, go(e)) for acc, e in norm.statistics), value=go(norm.value))


class Rows:
    """All threads of a block compute the rows: a thread has vectors of `lanes` elements, `threads` vectors apart."""

    def __init__(self, norm: Norm, threads: int, known: Collection[str]) -> None:
        self.norm, self.threads, self.known = norm, threads, known
        self.n, self.length = norm.rows.size, value(extent(norm.k)) or 0
        self.loads = list(
            dict.fromkeys(x for e in norm.expressions for x in walk(e) if isinstance(x, Load) and norm.k in free(x))
        )
        self.lanes = self.vectors_of()
        self.vectors = self.length // self.lanes
        self.turns = -(-self.vectors // threads)
        self.tiles: dict[Load, Buffer] = {}
        self.parts: list[Buffer] = []

    def vectors_of(self) -> int:
        """As few elements as give every thread one vector, as many as a load can have."""
        most = 16 // max(x.dtype.bytes for x in self.loads)
        lanes = 1
        while lanes < most and self.threads * lanes < self.length:
            lanes *= 2
        k = Axis((self.norm.k,))
        while lanes > 1 and not all(readable(x, k, self.norm.rows, lanes) for x in self.loads):
            lanes //= 2
        return lanes

    def shared(self, b: Builder) -> None:
        b.emit(Alloc(self.norm.row))
        self.parts = [
            b.alloc("shares", acc.dtype, self.threads // WARP, self.n, space="shared")
            for acc, _ in self.norm.statistics
        ]

    def constants(self, b: Builder, t: Expr) -> None:
        self.read(b, t, [x for x in self.loads if x.buf.name in self.known])

    def run(self, b: Builder, t: Expr) -> None:
        self.read(b, t, [x for x in self.loads if x.buf.name not in self.known])
        totals: dict[Buffer, Buffer] = {}
        for (acc, e), part in zip(self.norm.statistics, self.parts):
            totals[acc] = b.alloc("total", acc.dtype, self.n)
            self.sum(b, t, acc, e, part, totals)
        out = b.alloc("normed", self.norm.row.dtype, self.lanes)
        with (
            b.loop("turn", self.turns, "unroll") as turn,
            b.when(self.inside(t, turn)),
            b.loop("i", self.n, "unroll") as i,
        ):
            with b.loop("j", self.lanes, "unroll") as j:
                b.store(out, (j,), self.at(self.norm.value, i, turn, j, totals))
            place = (i * self.length + self.vector(t, turn) * self.lanes,)
            b.store(self.norm.row, place, out.at(0, lanes=self.lanes), self.lanes)
        b.do("barrier")

    def vector(self, t: Expr, turn: Expr) -> Expr:
        return turn * self.threads + t

    def inside(self, t: Expr, turn: Expr) -> Expr:
        return self.vector(t, turn) < self.vectors if self.vectors % self.threads else const(True, boolean)

    def each_row(self, x: Load) -> bool:
        """Has a load a value for each row?"""
        return not self.norm.rows.vars.isdisjoint(free(x))

    def read(self, b: Builder, t: Expr, loads: Sequence[Load]) -> None:
        """This thread's elements of some loads."""
        for x in loads:
            n = self.n if self.each_row(x) else 1
            self.tiles[x] = tile = b.alloc(f"{x.buf.name}_v", x.dtype, n, self.turns, self.lanes)
            with (
                b.loop("turn", self.turns, "unroll") as turn,
                b.when(self.inside(t, turn)),
                b.loop("i", n, "unroll") as i,
            ):
                row, vector = self.norm.rows.at(i), self.vector(t, turn)
                b.store(
                    tile,
                    (i, turn, 0),
                    vector_of(x, lambda j: {**row, self.norm.k: vector * self.lanes + j}, self.lanes),
                    self.lanes,
                )

    def at(self, e: Expr, i: Expr, turn: Expr, j: Expr, totals: Mapping[Buffer, Buffer]) -> Expr:
        """An expression for one of the thread's elements of row i."""
        env: dict[Expr, Expr] = {x: tile[i if self.each_row(x) else 0, turn, j] for x, tile in self.tiles.items()}
        env.update({load(acc, (0,)): total[i] for acc, total in totals.items()})
        return substitute(e, env)

    def sum(self, b: Builder, t: Expr, acc: Buffer, e: Expr, part: Buffer, totals: Mapping[Buffer, Buffer]) -> None:
        """A statistic of each row: every thread gets the sum of all threads' elements."""
        total = totals[acc]
        with b.loop("i", self.n, "unroll") as i:
            b.store(total, (i,), const(0, acc.dtype))
        with (
            b.loop("turn", self.turns, "unroll") as turn,
            b.when(self.inside(t, turn)),
            b.loop("i", self.n, "unroll") as i,
        ):
            with b.loop("j", self.lanes, "unroll") as j:
                b.store(total, (i,), self.at(e, i, turn, j, totals))
        for mask in (16, 8, 4, 2, 1):
            with b.loop("i", self.n, "unroll") as i:
                b.store(total, (i,), total[i] + call("shfl_xor", total[i], const(mask)))
        with b.when((t % WARP).eq(0)), b.loop("i", self.n, "unroll") as i:
            b.store(part, (t // WARP, i), total[i])
        b.do("barrier")
        with b.loop("i", self.n, "unroll") as i:
            b.store(total, (i,), part[0, i])
            with b.loop("w", self.threads // WARP, "unroll", 1) as w:
                b.store(total, (i,), total[i] + part[w, i])
