"""Sums over segments, the loops of a sparse matrix whose rows begin where memory says: what the backends share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeGuard

from dnnc.ir.expr import Expr, Load, Op, Var, const, extent, free, substitute, value, var, walk
from dnnc.ir.loops.stmt import Builder, Store, walk_stmts
from dnnc.passes.lower.form import Reduction, Rows
from dnnc.passes.schedule.memory import Vectorizer
from dnnc.passes.schedule.problem import Problem


@dataclass(frozen=True)
class Segments:
    """A reduction over the nonzeros of a row; `column`: the loop over columns, if there is one."""

    sum: Reduction
    row: Var
    column: Var | None
    store: Store
    stored: Expr  # how many nonzeros the matrix has

    @property
    def bounds(self) -> tuple[Expr, Expr]:
        """The nonzeros of a row."""
        (n,) = self.sum.loops
        return const(n.lo if n.lo is not None else 0), const(n.hi if n.hi is not None else 0) + 1


def segments_of(problem: Problem) -> Segments | None:
    """The reduction over segments that a kernel is; None for all others."""
    form = problem.form
    if not isinstance(form, Rows) or len(form.reductions) != 1 or form.panels:
        return None
    (r,) = form.reductions
    if len(r.loops) != 1 or r.conds or not r.combine:
        return None
    ends = [e for e in (r.loops[0].lo, r.loops[0].hi) if isinstance(e, Expr)]
    read = {x.buf for e in ends for x in walk(e) if isinstance(x, Load)}
    rows = {v for e in ends for v in free(e)} & set(form.outer)
    stores = [s for s in walk_stmts(problem.kernel.entry.body) if isinstance(s, Store) and s.buf.space == "global"]
    wide = [v for v in form.outer if v not in rows and value(extent(v)) != 1]
    if len(read) != 1 or len(rows) != 1 or len(stores) != 1 or len(wide) > 1:
        return None
    if any(x.buf is stores[0].buf for e in (r.term, *ends) for x in walk(e) if isinstance(x, Load)):
        return None
    end = const(r.loops[0].hi if r.loops[0].hi is not None else 0) + 1
    stored = [a for a in end.args if not any(isinstance(x, Load) for x in walk(a))] if _is_min(end) else []
    if len(stored) != 1:
        return None
    single: dict[Expr, Expr] = {v: const(0) for v in form.outer if v not in rows and v not in wide}
    (store,) = stores
    store = replace(store, idx=tuple(substitute(i, single) for i in store.idx), value=substitute(store.value, single))
    if wide:
        here, there = (substitute(store.buf.offset(store.idx), {wide[0]: const(k)}) for k in (0, 1))
        if value(there - here) != 1:
            return None
    r = replace(r, term=substitute(r.term, single))
    return Segments(r, rows.pop(), wide[0] if wide else None, store, stored[0])


def _is_min(e: Expr) -> TypeGuard[Op]:
    return isinstance(e, Op) and e.name == "min"


def finish(b: Builder, p: Segments, i: Expr, first: Expr, limit: Expr | None, total: Expr) -> None:
    """Store a vector of sums, neighbours along the columns."""
    assert p.column is not None
    wide = Vectorizer(p.column, first, total.lanes)
    wide.limit = limit
    one, whole = var("sum", total.dtype), var("sum", total.dtype, lanes=total.lanes)
    wide.lets[one] = whole
    here: dict[Expr, Expr] = {p.row: i, p.sum.acc[0]: one}
    s = p.store
    made = wide.store(Store(s.buf, tuple(substitute(k, here) for k in s.idx), substitute(s.value, here)))
    b.emit(Store(made.buf, made.idx, substitute(made.value, {whole: total}), made.lanes, made.limit))
