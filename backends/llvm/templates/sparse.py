"""Recipe for products of a sparse constant matrix: its rows times columns of pixels, one multiply-add for each nonzero.

    parallel over strips of `tiles` vectors of pixels, times shares of the rows:
        x[k, p] = the other factor at the strip's pixels             a thread's own memory, in its L2 cache
        for each row r of the share:
            acc[tiles] = 0
            for p in starts[r] .. starts[r + 1]:
                acc[t] += values[p] * x[columns[p], t]
            y[r, pixels] = epilogue(acc)

The indices are those of the encoding (`dnnc.ir.sparse`), checked when it was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dnnc.backends.llvm.features import CpuTarget
from dnnc.ir import encodings
from dnnc.ir.dtype import f32, i64
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, cast, const, fma, minimum, op, substitute, value, var, walk
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, Store, call
from dnnc.passes.lower.form import Axis, Contraction, Operand
from dnnc.passes.schedule.memory import Vectorizer
from dnnc.passes.schedule.problem import Knobs, Problem

MOST_TILES = 7  # vectors of sums of a row: more of them share an index, and 7 rows of 16 are a row of 112 pixels
ORDER = ()
Knob = Mapping[str, "int | str"]


@dataclass(frozen=True)
class Product:
    """A product for this builder: `weights` as they lie in memory, the other factor, and the sides."""

    form: Contraction
    encoding: encodings.Sparse
    weights: Buffer
    other: Operand
    rows: Axis  # of the sparse matrix
    pixels: Axis  # of the other factor

    @property
    def terms(self) -> int:
        return self.form.red.size


def product_of(problem: Problem) -> Product | None:
    """The product of a group whose weights are sparse; None for all others."""
    anchor = problem.anchor
    weights = anchor.inputs[1] if anchor is not None and len(anchor.inputs) > 1 else None
    encoding = weights.type.encoding if weights is not None else None
    form = problem.product
    if not isinstance(encoding, encodings.Sparse) or form is None:
        return None
    name = dict(zip(problem.lowered.params, problem.kernel.entry.buffers))[weights].name
    sides = [any(x.buf.name == name for x in walk(o.value) if isinstance(x, Load)) for o in (form.a, form.b)]
    if sum(sides) != 1 or form.batch.loops or form.acc.dtype is not f32:
        return None
    sparse, other = (form.a, form.b) if sides[0] else (form.b, form.a)
    buffer = next(x.buf for x in walk(sparse.value) if isinstance(x, Load) and x.buf.name == name)
    return Product(form, encoding, buffer, other, sparse.axis, other.axis)


# --- choice -----------------------------------------------------------------------------------------------------------


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    p = product_of(problem)
    return [] if p is None or len(p.pixels.loops) != 1 else [_knobs(p, target, t) for t in range(MOST_TILES, 0, -1)]


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    return []


def _knobs(p: Product, target: CpuTarget, tiles: int) -> Knobs:
    every = -(-p.pixels.size // target.lanes)
    tiles = min(tiles, every)
    strips = -(-every // tiles)
    shares = 1 if strips % target.threads == 0 or strips > 8 * target.threads else target.threads
    return (("tiles", tiles), ("shares", min(shares, p.rows.size)))


# --- the kernel -------------------------------------------------------------------------------------------------------


def apply(problem: Problem, knobs: Knob, target: CpuTarget) -> Kernel:
    p = product_of(problem)
    if p is None:
        raise ScheduleError("the weights are not sparse")
    tiles, shares, lanes = int(knobs["tiles"]), int(knobs["shares"]), target.lanes
    strip = tiles * lanes
    strips = -(-p.pixels.size // strip)
    b = Builder()
    with b.loop("s", strips * shares, "parallel") as item:
        first = b.let("first", item // shares * strip)
        share = item % shares
        x = b.alloc("x", f32, p.terms, tiles | 1, lanes, space="local")
        with b.loop("k", p.terms) as k, b.loop("v", tiles, "unroll") as v:
            b.store(x, (k, v, 0), _pixels(p, k, first + v * lanes, lanes), lanes)
        ends = [b.let(name, (share + j) * p.rows.size // shares) for j, name in enumerate(("from", "to"))]
        with b.loop("r", ends[1], lo=ends[0]) as r:
            acc = b.alloc("acc", f32, tiles, lanes)
            with b.loop("v", tiles, "unroll") as v:
                b.store(acc, (v, 0), const(0.0, f32), lanes)
            with b.loop("n", _word(p, "starts", r + 1), lo=_word(p, "starts", r)) as n:
                weight, column = _value(p, n), b.let("column", _word(p, "columns", n))
                with b.loop("v", tiles, "unroll") as v:
                    step = fma(weight, x.at(column, v, 0, lanes=lanes), acc.at(v, 0, lanes=lanes))
                    b.store(acc, (v, 0), step, lanes)
            with b.loop("v", tiles, "unroll") as v:
                b.emit(_result(p, r, first + v * lanes, lanes, acc.at(v, 0, lanes=lanes)))
    return p.form.kernel.with_body(b.block())


def _word(p: Product, section: str, i: Expr) -> Expr:
    """An index out of the encoding: a number of stored blocks, or a column."""
    begin, _ = p.encoding.sections[section]
    most = p.encoding.pattern.count + 1 if section == "starts" else p.encoding.pattern.columns
    return call("trusted", cast(p.weights[begin + i], i64), 0, most)


def _value(p: Product, n: Expr) -> Expr:
    begin, _ = p.encoding.sections["values"]
    return op("bits_f32", p.weights[begin + n], dtype=f32)


def _limit(p: Product, first: Expr, lanes: int) -> Expr | None:
    """How many lanes of a vector of pixels there are, where not all are."""
    size = p.pixels.size
    return None if size % lanes == 0 else const(size) - first


def _pixels(p: Product, k: Expr, first: Expr, lanes: int) -> Expr:
    """A vector of the other factor."""
    wide = Vectorizer(p.pixels.loops[0], first, lanes)
    wide.limit = _limit(p, first, lanes)
    return wide.expr(substitute(p.other.value, p.form.red.at(k)))


def _result(p: Product, r: Expr, first: Expr, lanes: int, total: Expr) -> Store:
    """Finish a vector of sums and store it."""
    wide, s = Vectorizer(p.pixels.loops[0], first, lanes), p.form.store
    wide.limit = _limit(p, first, lanes)
    one, whole = var("sum", f32), var("sum", f32, lanes=lanes)
    wide.lets[one] = whole
    env: dict[Expr, Expr] = {**p.rows.at(r), p.form.acc[0]: one}
    made = wide.store(Store(s.buf, tuple(substitute(i, env) for i in s.idx), substitute(s.value, env)))
    return Store(made.buf, made.idx, substitute(made.value, {whole: total}), made.lanes, made.limit)
