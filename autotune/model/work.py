"""What a kernel has to do, read off its naive nest: sizes, arithmetic by kind, and how each buffer is walked.

In: a Problem. Out: a Work, plain numbers that the roofline and the features of all its schedules share. Nothing is
scheduled. A size that is known at run time only counts as UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any

from dnnc.ir.dtype import i64
from dnnc.ir.expr import Expr, Load, Op, Var, extent, free, terms, value, walk
from dnnc.ir.loops.stmt import Block, Buffer, For, If, Store, blocks, exprs, walk_stmts
from dnnc.ir.op import ContractionForm
from dnnc.passes.lower.form import Contraction, Operand, Weighted, contraction
from dnnc.passes.schedule.problem import Problem

UNKNOWN = 64
FAR = 4096  # bytes by which an access moves whose index is divided: somewhere else
CHEAP = frozenset(("+", "-", "*", "fma", "neg", "abs"))
COMPARED = frozenset(("min", "max", "fmin", "fmax", "select", "<", "<=", "==", "!=", "&", "|"))
DIVIDED = frozenset(("/", "sqrt", "rsqrt", "recip"))
KINDS = ("cheap", "compared", "divided", "transcendental", "cast", "index")  # of arithmetic


@dataclass(frozen=True)
class Walked:
    """A parameter of the nest."""

    element: int  # bytes of one
    nbytes: float  # of all
    touches: float  # elements read or written in all iterations
    inner: int  # bytes by which its accesses move as the innermost loop around them goes on; the largest
    across: int  # the same for the innermost loop of the output
    # elements that lie side by side, aligned to as many, along one of its loops: those of one access, 16 bytes at most
    grain: int
    written: bool  # is it the output?
    constant: bool  # is it written by no kernel?

    @property
    def reuse(self) -> float:
        """How often an element is used."""
        return max(self.touches * self.element / max(self.nbytes, 1.0), 1e-3)


@dataclass(frozen=True)
class Work:
    """A kernel in numbers."""

    kind: str  # of the problem
    # of a contraction, the loops of both factors, of each, and of the sum; the results lie in memory along `cols`. Of a
    # reduction, `rows` and elements of each, `red`; of a map, the innermost loop, `cols`, and the others, `rows`.
    batch: int
    rows: int
    cols: int
    red: int
    run: int  # rows that one index walks: an image's row, or all where they lie one behind the other
    taps: int  # elements of a window; 1 for what is no convolution
    element: int  # bytes of the factors, or of what is read
    flops: float  # of multiply-adds and the like, two each
    ops: tuple[float, ...]  # arithmetic by KINDS, in all iterations
    buffers: tuple[Walked, ...]  # the parameters, the largest first
    fetched: tuple[Walked, ...]  # of a contraction, the factor along the rows and that along the columns
    passes: int  # over what is reduced
    guarded: bool  # do conditions (padding) stand in the nest?

    @property
    def nbytes(self) -> float:
        """Of all parameters, each once."""
        return sum(b.nbytes for b in self.buffers)

    @property
    def outputs(self) -> float:
        """Results of a contraction."""
        return float(self.batch * self.rows * self.cols)

    @property
    def weights(self) -> float:
        """Bytes of the factor along the columns."""
        return float(self.batch * self.cols * self.red * self.element)


@dataclass
class _Walk:
    """What one walk over a nest finds."""

    out: frozenset[str]
    merged: bool
    ops: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    touches: dict[Buffer, float] = field(default_factory=dict)
    steps: dict[Buffer, tuple[int, int]] = field(default_factory=dict)
    grains: dict[Buffer, int] = field(default_factory=dict)
    written: set[Buffer] = field(default_factory=set)
    sums: list[tuple[float, tuple[For, ...]]] = field(default_factory=list)  # loops around stores within reductions
    guarded: bool = False

    def block(self, b: Block, around: tuple[For, ...], trips: float) -> None:
        for s in b:
            self.guarded |= isinstance(
                s, If
            )  # whose conditions are bounds of loops in what is scheduled: no arithmetic
            for e in exprs(s) if not isinstance(s, (For, If)) else ():
                self.expr(e, around, trips)
            if isinstance(s, Store):
                self.access(s.buf, s.idx, around, trips)
                if s.buf.space == "global":
                    self.written.add(s.buf)
                elif around and around[-1].var.name not in self.out:
                    self.sums.append((trips, around))
            if isinstance(s, For):
                self.block(s.body, (*around, s), trips * known(s.extent))
            else:
                for inner in blocks(s):
                    self.block(inner, around, trips)

    def expr(self, e: Expr, around: tuple[For, ...], trips: float) -> None:
        for x in walk(e):
            if isinstance(x, Load):
                self.access(x.buf, x.idx, around, trips)
            elif isinstance(x, Op):
                self.ops[kind_of(x)] += trips

    def access(self, buf: Buffer, idx: tuple[Expr, ...], around: tuple[For, ...], trips: float) -> None:
        if buf.space != "global":
            return
        self.touches[buf] = self.touches.get(buf, 0.0) + trips
        at, size = buf.offset(idx), buf.dtype.bytes
        outer = [f for f in around if f.var.name in self.out]
        inner, across = (abs(step(at, loops[-1].var)) * size if loops else 0 for loops in (around, outer))
        known_inner, known_across = self.steps.get(buf, (0, 0))
        self.steps[buf] = max(inner, known_inner), max(across, known_across)
        self.grains[buf] = gcd(grain(at, around, 16 // size, self.merged), self.grains.get(buf, 0))


def known(e: Expr | int) -> int:
    n = value(e)
    return UNKNOWN if n is None else n


def kind_of(x: Op) -> str:
    """Which of KINDS an operation is."""
    if not x.dtype.is_float and x.dtype.kind != "b":
        return "index"
    if x.name in CHEAP or x.name in COMPARED:
        return "cheap" if x.name in CHEAP else "compared"
    if x.name in DIVIDED:
        return "divided"
    return "cast" if x.name.startswith("cast") else "transcendental"


def step(at: Expr, v: Var) -> int:
    """Elements by which an offset moves with a variable; many where the variable is divided or multiplied by others."""
    parts, _ = terms(at)
    return sum(c if t is v else FAR for t, c in parts if t is v or v in free(t))


def grain(at: Expr, around: Sequence[For], most: int, merged: bool) -> int:
    """Elements of a vector of at most so many that is aligned wherever an access begins: along the term whose steps are
    elements, where what this term has and all other strides are multiples of it. `merged`: loops may join.
    """
    parts, rest = terms(at)
    extents = {f.var: known(f.extent) for f in around}
    along = next((t for t, c in parts if c == 1 and _counted(t, extents)), None)
    if along is None:
        return 1
    run, others = _counted(along, extents), {t: c for t, c in parts if t is not along}
    while merged and (t := next((t for t, c in others.items() if c == run and t in extents), None)) is not None:
        run *= extents[t]
        del others[t]
    return gcd(most, run, rest, *others.values())


def _counted(t: Expr, extents: Mapping[Any, int]) -> int:
    """Return a term's successive values: a loop's, or remainders (channel blocks). 0: it is another term."""
    if isinstance(t, Op) and t.name == "%":
        return gcd(extents.get(t.args[0], 0), value(t.args[1]) or 1) if t.args[0] in extents else 0
    return extents.get(t, 0)


def work_of(problem: Problem) -> Work:
    """Read a problem's nest."""
    low = problem.lowered
    w = _Walk(frozenset(low.out_loops), problem.kind == "map")
    w.block(problem.kernel.entry.body, (), 1.0)
    sizes, factors_read = _sizes(problem, w)
    buffers = []
    for b in problem.kernel.entry.buffers:
        nbytes = float(prod(known(d) for d in b.shape)) * b.dtype.bytes
        walked = b.dtype.bytes, nbytes, w.touches.get(b, 0.0), *w.steps.get(b, (0, 0)), w.grains.get(b, 1)
        buffers.append(Walked(*walked, b in w.written, b.name in problem.constants))
    of = dict(zip(problem.kernel.entry.buffers, buffers))
    buffers.sort(key=lambda b: -b.nbytes)
    read = [b for b in buffers if not b.written] or buffers
    flops = problem.flops if isinstance(problem.flops, int) else 0
    counted = w.ops["cheap"] + w.ops["compared"] + w.ops["divided"] + w.ops["transcendental"]
    return Work(
        problem.kind, *sizes, taps(problem), read[0].element if read else 4, max(float(flops), counted),
        tuple(w.ops[k] for k in KINDS),
        tuple(buffers), tuple(of[b] for b in factors_read), max(len(low.reductions), 1), w.guarded,
    )  # fmt: skip


def taps(problem: Problem) -> int:
    """Elements of a convolution's window."""
    a = problem.anchor
    if a is None or a.op.contraction is not ContractionForm.CONVOLUTION or a.inputs[1] is None:
        return 1
    return prod(known(d) for d in a.inputs[1].type.shape[2:])


def _sizes(problem: Problem, w: _Walk) -> tuple[tuple[int, int, int, int, int], tuple[Buffer, ...]]:
    """Batch, rows, cols, red, run; and the buffers that are `fetched`."""
    anchor, form = problem.anchor, problem.form
    if anchor is not None and isinstance(form, Weighted):
        q, _, v = (x.type.shape for x in anchor.inputs[:3] if x is not None)
        m = known(q[-2])
        return (prod(known(d) for d in q[:-2]), m, known(v[-2]), known(q[-1]) + known(v[-1]), m), ()
    if anchor is not None and isinstance(form, Contraction):
        # a norm's sum of squares may come first: the cost model that ships has learned from these numbers
        sums = (contraction(form, form.kernel, r, form.store) for r in form.reductions)
        products = [c for c in sums if c is not None and c.dtype is not i64 and not c.empty]
        if products:
            longest = max(products, key=lambda c: _product((*c.around & {*c.outer}, *c.red.loops)))
            return _contraction(longest, w.guarded, anchor.op.contraction is ContractionForm.CONVOLUTION)
    if w.sums:
        _, around = max(w.sums, key=lambda p: p[0])
        rows = prod(known(f.extent) for f in around if f.var.name in w.out)
        return (1, rows, 1, prod(known(f.extent) for f in around if f.var.name not in w.out), rows), ()
    extents = [
        known(s.extent) for s in walk_stmts(problem.kernel.entry.body) if isinstance(s, For) and s.var.name in w.out
    ] or [1]
    return (1, prod(extents[:-1]), extents[-1], 1, prod(extents[:-1])), ()


def _contraction(
    c: Contraction, guarded: bool, conv: bool
) -> tuple[tuple[int, int, int, int, int], tuple[Buffer, ...]]:
    """`conv`: a side of one iteration is that of the filters, every channel having its own."""
    last = next((v for v in reversed(c.outer) if v in c.around), None)
    batch = _product([v for v in c.batch.loops if v in c.around])
    first, second = (c.b, c.a) if c.swapped else (c.a, c.b)
    m, n = (_product(o.axis.loops) for o in (first, second))
    deep = conv and batch > 1 and 1 in (m, n)
    if (m < n) if deep or last not in (*first.axis.loops, *second.axis.loops) else last in first.axis.loops:
        first, second, m, n = second, first, n, m
    read = [next((x.buf for x in o.loads if x.buf.space == "global"), None) for o in (first, second)]
    sizes = batch, m, n, _product(c.red.loops), _run(first, guarded)
    return sizes, tuple(b for b in read if b is not None) if None not in read else ()


def _product(loops: Iterable[Var]) -> int:
    return prod(known(extent(v)) for v in loops)


def _run(rows: Operand, guarded: bool) -> int:
    """Rows of the innermost loop, and of those around it where their elements lie as if it were longer."""
    at = [x.buf.offset(x.idx) for x in rows.loads]
    real = [v for v in rows.axis.loops if known(extent(v)) > 1]
    if not real:
        return 1
    n, inner = known(extent(real[-1])), real[-1]
    for v in reversed(real[:-1]):
        if guarded or any(step(e, v) != step(e, inner) * known(extent(inner)) for e in at):
            break
        n, inner = n * known(extent(v)), v
    return n
