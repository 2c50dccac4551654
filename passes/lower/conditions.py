"""Conditions of reductions: their conjuncts, and the loop bounds that they state."""

from __future__ import annotations

from dnnc.ir import te
from dnnc.ir.dtype import boolean
from dnnc.ir.expr import Const, Expr, Load, Op, Var, const, free, maximum, minimum, terms, walk


def loaded_range(v: Var, end: Expr, cond: Expr) -> tuple[Expr, Expr, Expr]:
    """The range of a reduction's axis, which has `end` steps, and what is left of its condition: bounds that parameters
    hold, `starts[i] <= v` and `v < starts[i + 1]`, are bounds of the loop. So it takes the steps of its row alone.
    """
    lo, hi, left = const(0), end, const(True, boolean)
    for c in conjuncts(cond):
        loads = [x for x in walk(c) if isinstance(x, Load)]
        gap = c.args[1] - c.args[0] - int(c.name == "<") if isinstance(c, Op) and c.name in ("<", "<=") else None
        slope = dict(terms(gap)[0]).get(v, 0) if gap is not None and loads else 0
        alone = gap is not None and slope in (1, -1) and v not in free(gap - v * slope)
        if gap is None or not alone or any(isinstance(x.buf, te.Tensor) for x in loads):
            left = left & c
        elif slope == 1:
            lo = maximum(lo, v - gap)
        else:
            hi = minimum(hi, gap + v + 1)
    return lo, hi, left


def conjuncts(c: Expr) -> list[Expr]:
    if isinstance(c, Op) and c.name == "&":
        return [*conjuncts(c.args[0]), *conjuncts(c.args[1])]
    return [] if isinstance(c, Const) and c.value else [c]
