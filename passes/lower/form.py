"""The form of a kernel: what it computes, as lowering knows it from tensor expressions. Schedules build on it.

    Contraction    C[outer] = epilogue(sum over red of A * B)       a product of matrices, a convolution of any rank
    Weighted       an op of products that has several reductions: attention
    Rows           other reductions
    Scan           elements of a row depend on those before them
    Map            the rest

`Scattered` and `Recurrent`, in files of their own, are the forms of updates and of recurrences. A form is data: loops
are their variables, which know their bounds, and expressions read the kernel's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from dnnc.ir.bounds import nonneg
from dnnc.ir.dtype import DType, i64
from dnnc.ir.expr import (
    E,
    Expr,
    Load,
    Op,
    Product,
    Var,
    const,
    extent,
    fma,
    free,
    minimum,
    op,
    substitute,
    unwrap,
    value,
    walk,
)
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, Store, call, loop_var
from dnnc.ir.types import product
from dnnc.passes.schedule.buffers import joined_axes, rereading

RUN = 8  # elements that make reading along an axis worth while


@dataclass(frozen=True, eq=False)
class Reduction:
    """`for loops: if conds: acc[0] = combine(acc[0], term)` in loops `around`. A row kept in `acc`: no `combine`."""

    acc: Buffer
    combine: str
    loops: tuple[Var, ...]
    term: Expr
    conds: tuple[Expr, ...] = ()
    around: frozenset[Var] = frozenset()

    @property
    def empty(self) -> bool:
        """Does a condition never hold? There are no loops then."""
        return any(value(c) is not None for c in self.conds)


@dataclass(frozen=True, eq=False, kw_only=True)
class Form:
    """`outer`: output loops, outermost first; `reductions` by their ends; `panels`: block loop -> its counter."""

    kind: ClassVar[str]
    outer: tuple[Var, ...] = ()
    panels: Mapping[Var, Var] = field(default_factory=dict)
    reductions: tuple[Reduction, ...] = ()

    @property
    def elements(self) -> int | Expr:
        """Iterations of the innermost statements, a measure of the work: output elements times reduced ones."""
        first = [v for r in self.reductions[:1] if not r.empty for v in r.loops]
        return product([unwrap(extent(v)) for v in (*self.outer, *first)])


class Map(Form):
    """Each element by itself."""

    kind = "map"


class Rows(Form):
    """Reductions, and what reads them."""

    kind = "reduce"


@dataclass(frozen=True, eq=False, kw_only=True)
class Scan(Form):
    """Rows whose elements are computed one after the other: the iterations of the loops `along`, or `steps` of them in
    loops that are none of `outer`.
    """

    kind = "sequence"
    along: tuple[Var, ...] = ()
    steps: int = 1

    @property
    def elements(self) -> int | Expr:
        return product([super().elements, self.steps])


@dataclass(frozen=True, eq=False, kw_only=True)
class Weighted(Form):
    """An op of products that has several reductions; `store` writes an element of the output."""

    kind = "attention"
    kernel: Kernel
    store: Store


@dataclass(frozen=True)
class Axis:
    """Loops from 0 that are walked as one, the last one fastest."""

    loops: tuple[Var, ...] = ()

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Iterations of each loop, 0 where they are not known."""
        return tuple(value(extent(v)) or 0 for v in self.loops)

    @cached_property
    def size(self) -> int:
        return math.prod(self.extents)

    @property
    def inner(self) -> int:
        """Iterations of the innermost loop."""
        return self.extents[-1] if self.loops else 1

    @property
    def vars(self) -> frozenset[Var]:
        return frozenset(self.loops)

    def inside(self, i: Expr, lanes: int, *used: Expr) -> Expr:
        """Return a step (a vector of lanes) that a guard keeps inside and divisions can be seen to split."""
        divided = any(
            isinstance(x, Op) and x.name in ("//", "%") and self.vars & free(x) for e in used for x in walk(e)
        )
        return minimum(i, self.size // lanes - 1) if divided or len(self.loops) > 1 else i

    def named(self, b: Builder, i: E) -> dict[Expr, Expr]:
        """The loops' variables at step i, each as a value of its own."""
        at = self.at(i)
        return {v: b.let(v.name, at[v]) for v in self.loops}

    def at(self, i: E, lanes: int = 1, lane: E = 0) -> dict[Expr, Expr]:
        """Return loop variables at step i, or `lane` of vector i, which must divide the innermost loop."""
        out: dict[Expr, Expr] = {}
        left = const(i)
        for v, n in zip(self.loops[:0:-1], self.extents[::-1]):
            n //= lanes
            out[v] = left % n * lanes + lane
            left, lanes, lane = left // n, 1, 0
        if self.loops:
            out[self.loops[0]] = left * lanes + lane
        return out


@dataclass(frozen=True)
class Operand:
    """A factor: its value in accumulator type where all `conds` hold, else 0. `axis`: the side it belongs to."""

    value: Expr
    conds: tuple[Expr, ...] = ()
    axis: Axis = Axis()

    @property
    def loads(self) -> list[Load]:
        return [x for x in walk(self.value) if isinstance(x, Load)]

    def in_order(self, axis: Axis, others: Sequence[Axis], run: int = RUN) -> bool:
        """Do the first `run` elements along an axis lie in memory one after the other?"""
        return axis.size > 1 and self.dense_loads(axis, others, run) == len(self.loads)

    def dense_loads(self, axis: Axis, others: Sequence[Axis], run: int = RUN) -> int:
        """How many loads have their first `run` elements along an axis one after the other."""
        zero: dict[Expr, Expr] = {v: const(0) for other in others for v in other.vars}
        last = min(axis.size, run) - 1
        ends = [[substitute(x.buf.offset(x.idx), {**zero, **axis.at(k)}) for k in (0, last)] for x in self.loads]
        return sum(value(there - here) == last for here, there in ends) if last > 0 else 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Contraction(Form):
    """A sum of products, and what is done to it: `store` writes an output element from `acc[0]`.

        for batch, rows, cols:                     C[b, m, n] = epilogue(sum over k of A[b, m, k] * B[b, n, k])
            acc = 0
            for red: if conds: acc = fma(a, b, acc)
            y[..] = epilogue(acc)

    A loop on which both factors depend, or none, is a batch loop; of the two sides the one that holds the innermost
    output loop is `cols`: along it the results lie in memory. Several loops of one side are walked as one index. So
    matrix products and convolutions differ only in index expressions. `kernel` has the parameters that the expressions
    refer to; the sum is computed anew in each iteration of the loops `around`.
    """

    kind = "contraction"
    kernel: Kernel
    red: Axis
    a: Operand
    b: Operand
    acc: Buffer
    store: Store
    swapped: bool = False  # b is the first factor of the product
    more: tuple[Store, ...] = ()  # of other outputs, at the same elements, ahead of `store`
    around: frozenset[Var] = frozenset()
    counts: bool = False  # is a term not the product of the factors but the number of bits in which they differ?

    @cached_property
    def joined(self) -> Contraction | None:
        """The same with as few loops as can be, where all sizes are constant and none is 0."""
        sizes = [value(extent(v)) for v in (*self.outer, *self.red.loops)]
        return _joined(self) if all(sizes) and self.whole and self.dtype is not i64 else None

    @cached_property
    def batch(self) -> Axis:
        return Axis(tuple(v for v in self.outer if v not in self.rows.vars | self.cols.vars))

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

    @property
    def whole(self) -> bool:
        """Is the sum computed anew for each element of the output?"""
        return all(v in self.around or value(extent(v)) == 1 for v in self.outer)

    @property
    def without_single(self) -> Contraction:
        """The same without loops of one iteration."""
        single = [v for v in (*self.outer, *self.red.loops) if value(extent(v)) == 1]
        return _moved(self, {v: const(0) for v in single}, dict.fromkeys(single, ()))

    @property
    def empty(self) -> bool:
        """Does a condition never hold?"""
        return any(value(e) is not None for e in (*self.a.conds, *self.b.conds))

    @property
    def is_guarded_apart(self) -> bool:
        """Does every condition say something of one factor, by the place alone?"""
        return not any(
            (free(e) & self.rows.vars and free(e) & self.cols.vars) or any(isinstance(x, Load) for x in walk(e))
            for e in (*self.a.conds, *self.b.conds)
        )

    def of(self, x: Expr, y: Expr) -> Contraction:
        """The same of other factors."""
        a, b = (y, x) if self.swapped else (x, y)
        return _sided(replace(self, a=replace(self.a, value=a), b=replace(self.b, value=b)))

    @property
    def loads(self) -> list[Load]:
        stores = (e for s in (*self.more, self.store) for e in (*s.idx, s.value))
        every = (self.a.value, self.b.value, *self.a.conds, *self.b.conds, *stores)
        return [x for e in every for x in walk(e) if isinstance(x, Load)]

    @property
    def factors(self) -> tuple[Expr, Expr]:
        """In the order of the product."""
        return (self.b.value, self.a.value) if self.swapped else (self.a.value, self.b.value)

    def update(self, acc: Expr, a: Expr, b: Expr) -> Expr:
        """One step of the sum, as the naive nest has it."""
        x, y = (b, a) if self.swapped else (a, b)
        if self.counts:
            return acc + op(f"cast_{self.dtype}", call("popcount", x ^ y), dtype=self.dtype)
        if self.dtype.is_float:
            return fma(x, y, acc)
        return acc + x * y


class Normed(Contraction):
    """A contraction of rows that other reductions, those of a norm, make in the same kernel."""

    kind = "normed"


def contraction(
    form: Form, kernel: Kernel, r: Reduction, store: Store, more: tuple[Store, ...] = ()
) -> Contraction | None:
    """A kernel as the contraction that one of its reductions is; None where that is no sum of products."""
    term = r.term
    factors = term.args if isinstance(term, Op) and term.name == "*" else ()
    factors = term.factors if isinstance(term, Product) else factors  # of indices
    counted = _counted(term)
    factors = factors if counted is None else counted
    if r.combine != "sum" or len(factors) != 2:
        return None
    cls = Contraction if len(form.reductions) == 1 else Normed
    a, b = map(Operand, factors, (r.conds, ()))
    return _sided(
        cls(
            outer=form.outer, panels=form.panels, reductions=form.reductions, kernel=kernel,
            red=Axis(r.loops), a=a, b=b, acc=r.acc,
            store=store, more=more, around=r.around, counts=counted is not None,
        )
    )  # fmt: skip


def _counted(term: Expr) -> tuple[Expr, ...] | None:
    """cast(popcount(x ^ y)) -> x, y"""
    for name in ("cast_i32", "popcount", "^"):
        if not isinstance(term, Op) or term.name != name:
            return None
        found, term = term.args, term.args[0]
    return found


def _sided(c: Contraction) -> Contraction:
    """Give every loop its side, and every condition to the factor that it depends on."""
    x, y = map(free, c.factors)
    mine, other = (Axis(tuple(v for v in c.outer if v in here and v not in there)) for here, there in ((x, y), (y, x)))
    conds: tuple[list[Expr], list[Expr]] = [], []
    for e in (*c.a.conds, *c.b.conds):
        conds[bool(free(e) & other.vars)].append(e)
    a, b = (Operand(f, tuple(held), axis) for f, held, axis in zip(c.factors, conds, (mine, other)))
    swapped = bool(c.outer) and c.outer[-1] in mine.vars
    return replace(c, a=b, b=a, swapped=True) if swapped else replace(c, a=a, b=b, swapped=False)


# --- as few loops as can be -------------------------------------------------------------------------------------------


def _joined(c: Contraction) -> Contraction | None:
    """Return the contraction without unit loops, groups of channels apart, and neighbours of one side joined."""
    guarded = {
        x.buf.name for x in c.loads if not all(nonneg(i) and nonneg(d - 1 - i) for i, d in zip(x.idx, x.buf.shape))
    }
    c = _collapsed(c.without_single, guarded)
    apart, at = groups(c.outer, (c.update(c.acc[0], c.a.value, c.b.value), c.store.value))
    c = _moved(c, at, apart).without_single
    sides = [c.batch.vars, c.rows.vars, c.cols.vars]
    # the loop along which operands lie in memory is the innermost
    red = sorted(c.red.loops, key=lambda v: _neighbours(c, v))
    c = _fused(c, c.outer, [next(k for k, vs in enumerate(sides) if v in vs) for v in c.outer])
    c = replace(c, red=Axis(tuple(red)))
    if c.red.inner % RUN:  # whole vectors do not fit the innermost loop; they may fit the loops together
        c = _fused(c, red, [0] * len(red))
    return _collapsed(c, guarded) if c.is_guarded_apart and not c.empty else None


def _moved(c: Contraction, env: dict[Expr, Expr], loops: Mapping[Var, tuple[Var, ...]]) -> Contraction:
    """A contraction with other loops in place of some."""

    def at(o: Operand) -> Operand:
        conds = (substitute(e, env) for e in o.conds)
        return Operand(substitute(o.value, env), tuple(e for e in conds if value(e) in (None, False)))

    def over(old: Sequence[Var]) -> tuple[Var, ...]:
        return tuple(v for x in old for v in loops.get(x, (x,)))

    def stored(s: Store) -> Store:
        return replace(s, idx=tuple(substitute(i, env) for i in s.idx), value=substitute(s.value, env))

    store, more = stored(c.store), tuple(map(stored, c.more))
    both = replace(c, outer=over(c.outer), red=Axis(over(c.red.loops)), a=at(c.a), b=at(c.b), store=store, more=more)
    return _sided(both)


def _fused(c: Contraction, loops: Sequence[Var], sides: Sequence[int]) -> Contraction:
    """Fuse neighbours of one side, outermost first: their `(k // d) % m` and `k % d` become one index again."""
    last: tuple[Var, int] | None = None
    for v, side in zip(loops, sides):
        if last is not None and side == last[1]:
            u, n = last[0], extent(v)
            both = loop_var(u.name, const(0), extent(u) * n)
            c, v = _moved(c, {u: both // n, v: both % n}, {u: (both,), v: ()}), both
        last = v, side
    return c


def _collapsed(c: Contraction, keep: Collection[str]) -> Contraction:
    kernel, (x, y), (store, *more) = collapsed(c.kernel, (c.a.value, c.b.value), (c.store, *c.more), keep)
    factors = replace(c.a, value=x), replace(c.b, value=y)
    return replace(c, kernel=kernel, a=factors[0], b=factors[1], store=store, more=tuple(more))


def collapsed(
    kernel: Kernel, exprs: Sequence[Expr], stores: Sequence[Store], keep: Collection[str] = ()
) -> tuple[Kernel, list[Expr], list[Store]]:
    """Join axes of buffers whose indices have become one, in expressions and stores; parameters keep their places."""
    every = (*exprs, *(e for s in stores for e in (*s.idx, s.value)))
    reads = [(x.buf, x.idx) for e in every for x in walk(e) if isinstance(x, Load)]
    now, index = joined_axes(kernel.entry.buffers, [*reads, *((s.buf, s.idx) for s in stores)], keep)
    go = rereading(now, index)
    params = tuple(now.get(p, p) if isinstance(p, Buffer) else p for p in kernel.entry.params)
    kernel = replace(kernel, funcs=(*kernel.funcs[:-1], replace(kernel.entry, params=params)))
    made = [
        replace(s, buf=now.get(s.buf, s.buf), idx=index(s.buf, s.idx) if s.buf in now else s.idx, value=go(s.value))
        for s in stores
    ]
    return kernel, [go(e) for e in exprs], made


def _neighbours(c: Contraction, v: Var) -> int:
    """How many loads move by one element when v does: of elements, not of numbers that say where these are."""
    loads = (*c.a.loads, *c.b.loads)
    inner = {y for x in loads for i in x.idx for y in walk(i) if isinstance(y, Load)}
    at = [x.buf.offset(x.idx) for x in loads if x not in inner]
    return sum(value(substitute(i, {v: const(1)}) - substitute(i, {v: const(0)})) == 1 for i in at)


def groups(outer: Sequence[Var], exprs: Iterable[Expr]) -> tuple[dict[Var, tuple[Var, Var]], dict[Expr, Expr]]:
    """Split loops whose index takes the group, `i // n`, into groups and elements, and return i in terms of these."""
    sizes: dict[Var, int] = {}
    for x in (x for e in exprs for x in walk(e)):
        if isinstance(x, Op) and x.name == "//" and isinstance(v := x.args[0], Var) and v in outer:
            n = value(x.args[1])
            if n is not None and (value(extent(v)) or 0) % n == 0:
                sizes[v] = n
    loops = {
        v: (loop_var(v.name + "g", const(0), extent(v) // n), loop_var(v.name + "c", const(0), const(n)))
        for v, n in sizes.items()
    }
    return loops, {v: g * sizes[v] + k for v, (g, k) in loops.items()}
