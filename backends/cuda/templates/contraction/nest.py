"""What a lowered contraction computes, read off its naive nest: the common ground of the schedules that tile it.

    for batch, rows, cols:                              C[b, m, n] = epilogue(sum over k of A[b, m, k] * B[b, n, k])
        acc = 0
        for red: if conds: acc = fma(a, b, acc)
        y[..] = epilogue(acc)

A loop on which both factors depend is a batch loop; of the two sides the one that holds the innermost output loop is
`cols`: along it the results lie in memory. Several loops of one side are walked as one index. So a matrix product and a
convolution of any rank, groups and dilations are the same thing: only the index expressions of the factors differ, and
those stay as the nest has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

from dnnc.ir.bounds import nonneg
from dnnc.ir.dtype import DType
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Const, E, Expr, Load, Op, Var, const, fma, free, minimum, substitute, value, walk
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, Builder, For, If, Kernel, Store, accesses, walk_stmts
from dnnc.passes.schedule.loops import factors, fuse, reorder, single, split
from dnnc.passes.schedule.problem import Problem
from dnnc.passes.schedule.state import Schedule, loops

RUN = 8  # elements that make reading along an axis worth while


@dataclass(frozen=True)
class Axis:
    """Loops from 0 that are walked as one, the last one fastest."""

    loops: tuple[For, ...]

    @cached_property
    def size(self) -> int:
        n = 1
        for loop in self.loops:
            n *= value(loop.extent) or 0
        return n

    @property
    def inner(self) -> int:
        """Iterations of the innermost loop."""
        return (value(self.loops[-1].extent) or 0) if self.loops else 1

    @property
    def vars(self) -> frozenset[Var]:
        return frozenset(loop.var for loop in self.loops)

    def inside(self, i: Expr, lanes: int, *used: Expr) -> Expr:
        """Return a step (a vector of lanes) that a guard keeps inside and divisions can be seen to split."""
        divided = any(
            isinstance(x, Op) and x.name in ("//", "%") and self.vars & free(x) for e in used for x in walk(e)
        )
        return minimum(i, self.size // lanes - 1) if divided or len(self.loops) > 1 else i

    def named(self, b: Builder, i: E) -> dict[Expr, Expr]:
        """The loops' variables at step i, each as a value of its own."""
        at = self.at(i)
        return {loop.var: b.let(loop.var.name, at[loop.var]) for loop in self.loops}

    def at(self, i: E, lanes: int = 1, lane: E = 0) -> dict[Expr, Expr]:
        """Return loop variables at step i, or `lane` of vector i, which must divide the innermost loop."""
        out: dict[Expr, Expr] = {}
        left = const(i)
        for loop in self.loops[:0:-1]:
            n = (value(loop.extent) or 0) // lanes
            out[loop.var] = left % n * lanes + lane
            left, lanes, lane = left // n, 1, 0
        if self.loops:
            out[self.loops[0].var] = left * lanes + lane
        return out


@dataclass(frozen=True)
class Operand:
    """A factor: its value in accumulator type where all `conds` hold, else 0. `axis`: the side it belongs to."""

    value: Expr
    conds: tuple[Expr, ...]
    axis: Axis

    @property
    def loads(self) -> list[Load]:
        return [x for x in walk(self.value) if isinstance(x, Load)]

    def in_order(self, axis: Axis, others: Sequence[Axis]) -> bool:
        """Do the first elements along an axis lie in memory one after the other?"""
        zero: dict[Expr, Expr] = {v: const(0) for other in others for v in other.vars}
        last = min(axis.size, RUN) - 1
        ends = [[substitute(x.buf.offset(x.idx), {**zero, **axis.at(k)}) for k in (0, last)] for x in self.loads]
        return last > 0 and all(value(there - here) == last for here, there in ends)


@dataclass(frozen=True)
class Contraction:
    """`kernel` has the parameters that expressions here refer to; `store` writes an output from `acc[0]`."""

    kernel: Kernel
    batch: Axis
    red: Axis
    a: Operand
    b: Operand
    acc: Buffer
    store: Store
    swapped: bool  # b is the first factor of the product

    @property
    def rows(self) -> Axis:
        return self.a.axis

    @property
    def cols(self) -> Axis:
        return self.b.axis

    @property
    def dtype(self) -> DType:
        return self.acc.dtype

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """Batch, M, N, K."""
        return self.batch.size, self.rows.size, self.cols.size, self.red.size

    def update(self, acc: Expr, a: Expr, b: Expr) -> Expr:
        """One step of the sum, as the naive nest has it."""
        x, y = (b, a) if self.swapped else (a, b)
        if self.dtype.is_float:
            return fma(x, y, acc)
        return acc + x * y


_READ: WeakKeyDictionary[Problem, Contraction | None] = (
    WeakKeyDictionary()
)  # each template asks; forgotten with the problem


def contraction_of(problem: Problem) -> Contraction | None:
    """The contraction of a problem of constant sizes; None when its nest has another form."""
    if problem.kind != "contraction" or problem.lowered.dims:
        return None
    if problem not in _READ:
        _READ[problem] = _contraction_of(problem)
    return _READ[problem]


def _contraction_of(problem: Problem) -> Contraction | None:
    s = Schedule(problem.kernel)
    try:
        found = _read(_joined(s))
    except ScheduleError:
        return None
    return found if found is not None and min(found.sizes) > 0 else None


def _joined(s: Schedule) -> Schedule:
    """Return the nest without unit loops, groups of channels apart, and neighbours of one side joined."""
    guarded = {
        x.buf.name
        for x in accesses(s.body)
        if not all(nonneg(i) and nonneg(d - 1 - i) for i, d in zip(x.idx, x.buf.shape))
    }
    s.apply(single, *(x.var.name for x in loops(s.body) if value(x.extent) == 1))
    s.collapse(*guarded)
    for name, n in _groups(s):
        s.apply(split, name, n, (name + "g", name + "c"))
    s.apply(single, *(x.var.name for x in loops(s.body) if value(x.extent) == 1))
    found = _read(s)
    if found is None:
        raise ScheduleError("the nest is no contraction")
    sides = [found.batch.vars, found.rows.vars, found.cols.vars]
    outer, _ = perfect(s.body)
    names = [x.var.name for x in outer]
    side = {x.var.name: next(k for k, vs in enumerate(sides) if x.var in vs) for x in outer}
    _fuse_runs(s, names, side)
    red = sorted(
        found.red.loops, key=lambda x: _neighbours(found, x.var)
    )  # the loop along which operands lie in memory is the innermost
    if red != list(found.red.loops):
        s.apply(reorder, *(x.var.name for x in red))
    if (
        value(red[-1].extent) or 0
    ) % RUN:  # whole vectors do not fit the innermost loop; they may fit the loops together
        _fuse_runs(s, [x.var.name for x in red], {})
    return s.collapse(*guarded)


def _neighbours(c: Contraction, v: Var) -> int:
    """How many loads move by one element when v does."""
    loads = [x.buf.offset(x.idx) for x in (*c.a.loads, *c.b.loads)]
    return sum(value(substitute(at, {v: const(1)}) - substitute(at, {v: const(0)})) == 1 for at in loads)


def _fuse_runs(s: Schedule, names: Sequence[str], side: Mapping[str, int]) -> None:
    """Fuse neighbours of one side, outermost first: their `(k // d) % m` and `k % d` become one index again."""
    last = names[0]
    for name in names[1:]:
        if side.get(last) == side.get(name):
            s.apply(fuse, last, name, last)
        else:
            last = name


def perfect(b: Block) -> tuple[list[For], Block]:
    """The loops that hold one another alone, and the block inside."""
    nest: list[For] = []
    while len(b) == 1 and isinstance(b[0], For):
        nest.append(b[0])
        b = b[0].body
    return nest, b


def _groups(s: Schedule) -> list[tuple[str, int]]:
    """Output loops of which an index takes the group, `i // n`, and n."""
    outer, inner = perfect(s.body)
    found: dict[str, int] = {}
    for x in (x for st in walk_stmts(inner) if isinstance(st, Store) for x in walk(st.value)):
        if isinstance(x, Op) and x.name == "//" and isinstance(v := x.args[0], Var) and any(v is o.var for o in outer):
            n = value(x.args[1])
            if n is not None and (value(s.loop(v.name).extent) or 0) % n == 0:
                found[v.name] = n
    return list(found.items())


def _read(s: Schedule) -> Contraction | None:
    """The parts of the nest as it stands."""
    outer, body = perfect(s.body)
    if len(body) != 4:
        return None
    alloc, init, loop, store = body
    if not (isinstance(alloc, Alloc) and isinstance(init, Store) and isinstance(store, Store)) or not _is_zero(
        init.value
    ):
        return None
    red, update = perfect((loop,))
    conds: list[Expr] = []
    while len(update) == 1 and isinstance(update[0], If) and not update[0].other:
        conds += _conjuncts(update[0].cond)
        update = update[0].then
    if (
        len(update) != 1
        or not isinstance(st := update[0], Store)
        or st.buf is not alloc.buf
        or init.buf is not alloc.buf
    ):
        return None
    if any(value(x.lo) != 0 or value(x.extent) is None for x in (*outer, *red)):
        return None
    found = factors(st.value, alloc.buf)
    return (
        None
        if found is None or not outer or not red
        else _sorted(s.kernel.with_body(s.body), outer, red, conds, found, alloc.buf, store)
    )


def _is_zero(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == 0


def _conjuncts(c: Expr) -> list[Expr]:
    if isinstance(c, Op) and c.name == "&":
        return [*_conjuncts(c.args[0]), *_conjuncts(c.args[1])]
    return [c]


def _sorted(
    kernel: Kernel,
    outer: list[For],
    red: list[For],
    conds: list[Expr],
    factors: tuple[Expr, Expr],
    acc: Buffer,
    store: Store,
) -> Contraction | None:
    """Assign loops to sides. A guard belongs to the factor it depends on; one that needs both is refused."""
    x, y = (free(f) for f in factors)
    mine, other = (
        Axis(tuple(o for o in outer if o.var in here and o.var not in there)) for here, there in ((x, y), (y, x))
    )
    both = Axis(tuple(o for o in outer if (o.var in x) == (o.var in y)))
    guards: tuple[list[Expr], list[Expr]] = [], []
    for c in conds:
        if any(isinstance(e, Load) for e in walk(c)) or (free(c) & mine.vars and free(c) & other.vars):
            return None
        guards[bool(free(c) & other.vars)].append(c)
    a, b = (Operand(f, tuple(guard), axis) for f, guard, axis in zip(factors, guards, (mine, other)))
    swapped = outer[-1].var in mine.vars
    return Contraction(kernel, both, Axis(tuple(red)), *((b, a) if swapped else (a, b)), acc, store, swapped)
