"""What a lowered attention computes, read off its naive nest: the ground that its schedules build on.

    for batch, rows:                             the nest has the scores three times: for the largest, the sum of
                                                 weights, the mean
        top = max over keys of score(sum over depth of Q[b, m, d] * K[b, n, d])
        total = sum over keys of exp(score - top)
        for cols: y[..] = epilogue(sum over keys of exp(score - top) * V[b, n, e], total)

`score` is what stands between the sum of products and the softmax: a scale, a mask. Output loops on which only Q
depends are rows, those of V alone columns, all others batch loops. So transposes are only other index expressions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dnnc.backends.cuda.templates.contraction.staging import in_vectors
from dnnc.ir.dtype import DType, f32
from dnnc.ir.expr import Expr, Load, Op, cast, free, load, op, substitute, walk
from dnnc.ir.loops.stmt import Buffer, Kernel, Store, call
from dnnc.passes.lower.form import Axis, Contraction, Operand, Reduction, Weighted, collapsed, groups
from dnnc.passes.schedule.problem import Problem


@dataclass(frozen=True)
class Attention:
    """`score` says in terms of `dots[0]` what goes into the softmax; `store` writes an element from `mixed[0]`, the sum
    of weighted values, and `inverse[0]`, one over the sum of weights (NaN for rows without keys).
    """

    kernel: Kernel
    batch: Axis
    keys: Axis
    depth: Axis
    q: Operand
    k: Operand
    v: Operand
    score: Expr
    dots: Buffer
    mixed: Buffer
    inverse: Buffer
    store: Store

    @property
    def rows(self) -> Axis:
        return self.q.axis

    @property
    def cols(self) -> Axis:
        return self.v.axis

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Batch, M, N, D, E."""
        return self.batch.size, self.rows.size, self.keys.size, self.depth.size, self.cols.size

    @property
    def products(self) -> Contraction:
        """Queries times keys, as the staging of tiles wants it."""
        return self._contraction(self.depth, self.k, self.dots)

    @property
    def mean(self) -> Contraction:
        """Weights times values. The weights are in registers: only their side counts."""
        return self._contraction(self.keys, self.v, self.mixed)

    def with_whole_queries(self, t: DType) -> Attention:
        """The same with queries, where they are computed, in a form that vectors of 16 bytes can have."""
        return replace(self, q=replace(self.q, value=in_vectors(self.q.value, self.depth, 16 // t.bytes)))

    def _contraction(self, red: Axis, b: Operand, acc: Buffer) -> Contraction:
        outer = (*self.batch.loops, *self.rows.loops, *b.axis.loops)
        return Contraction(outer=outer, kernel=self.kernel, red=red, a=self.q, b=b, acc=acc, store=self.store)

    def stored_as(self, t: DType) -> Attention:
        """The same with operands in the type in which tiles of them are kept."""
        return replace(self, q=_stored(self.q, t), k=_stored(self.k, t), v=_stored(self.v, t))


def _stored(o: Operand, t: DType) -> Operand:
    e = o.value
    if isinstance(e, Op) and e.name == f"cast_{f32}" and isinstance(x := e.args[0], Load) and x.dtype is t:
        return replace(o, value=x)
    return o if e.dtype is t else replace(o, value=cast(e, t))


def attention_of(problem: Problem) -> Attention | None:
    """The attention of a problem of constant sizes, with scores in f32; None when its nest has another form."""
    form = problem.form
    attention = _read(form) if isinstance(form, Weighted) and not problem.lowered.dims else None
    return attention if attention is not None and min(attention.sizes) > 0 else None


def _read(form: Weighted) -> Attention | None:
    """The parts of an attention: three reductions beside one another, each of which has the scores once more."""
    tops = [r for r in form.reductions if all(r.around.isdisjoint(other.loops) for other in form.reductions)]
    if len(form.reductions) != 6 or len(tops) != 3 or any(len(r.loops) != 1 or r.conds for r in form.reductions):
        return None
    top, total, mixed = sorted(tops, key=lambda r: (r.combine == "sum") + len(_factors(r)))
    (keys,), weighted = mixed.loops, _factors(mixed)
    dots = next(r for r in form.reductions if keys in r.around)
    products = _factors(dots)
    if not products or not weighted or mixed.acc.dtype is not f32:
        return None
    score, of_top = _exponent(weighted[0])
    inverse = Buffer("inverse", f32, mixed.acc.shape, "register")
    end = _end(form.store, mixed.acc, total.acc, inverse)
    if score is None or end is None or not isinstance(of_top, Load) or of_top.buf is not top.acc:
        return None
    apart, at = groups(form.outer, (*(r.term for r in form.reductions), form.store.value))
    outer = [w for v in form.outer for w in apart.get(v, (v,))]
    end = replace(end, idx=tuple(substitute(i, at) for i in end.idx), value=substitute(end.value, at))
    exprs = [substitute(e, at) for e in (*products, weighted[1], score)]
    kernel, (*values, score), (end,) = collapsed(form.kernel, exprs, [end])
    q, k, v = (free(e) for e in values)
    rows = tuple(o for o in outer if o in q and o not in k | v)
    cols = tuple(o for o in outer if o in v and o not in q | k)
    batch = tuple(o for o in outer if o not in rows and o not in cols)
    if {*cols, *dots.loops} & free(score) or keys in q:
        return None
    a, b, c = (Operand(e, (), Axis(side)) for e, side in zip(values, (rows, (keys,), cols)))
    accs = dots.acc, mixed.acc, inverse
    return Attention(kernel, Axis(batch), Axis((keys,)), Axis(dots.loops), a, b, c, score, *accs, end)


def _factors(r: Reduction) -> tuple[Expr, ...]:
    """Of a sum of products."""
    return r.term.args if r.combine == "sum" and isinstance(r.term, Op) and r.term.name == "*" else ()


def _exponent(e: Expr) -> tuple[Expr | None, Expr | None]:
    """x and y of `exp(x - y)`"""
    if isinstance(e, Op) and e.name == "exp" and isinstance(d := e.args[0], Op) and d.name == "-":
        return d.args[0], d.args[1]
    return None, None


def _end(store: Store, mixed: Buffer, total: Buffer, inverse: Buffer) -> Store | None:
    """`mixed / total` becomes `mixed * inverse`, and `isnan(total)` is asked of the inverse, which is NaN with it."""
    m, t, i = (load(x, (0,)) for x in (mixed, total, inverse))
    made = substitute(store.value, {op("/", m, t): m * i, call("isnan", t): call("isnan", i)})
    return None if any(x is t for x in walk(made)) else Store(store.buf, store.idx, made)
