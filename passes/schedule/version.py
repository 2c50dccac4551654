"""Schedule primitive: loop versioning. A loop whose guards hold for all iterations of a loop inside is computed without them.

    for t in range(k):                              for t in range(max(..), min(..)):
        for i in unroll(4):                             if 0 <= t + p and t + p + 3 < n:
            if 0 <= t + p + i:                              for i in unroll(4): s
                if t + p + i < n:             ->        else:
                    s                                       for i in unroll(4):
                                                                if 0 <= t + p + i: if t + p + i < n: s

So a register tile whose pixels see padding at some taps only tests one condition for each tap, and each pixel only where that fails.
"""

from __future__ import annotations

from functools import reduce

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Op, free, op, substitute, terms, value
from dnnc.ir.operator.stmt import Block, For, If, walk_stmts
from dnnc.passes.schedule.loops import guarded, guards_of
from dnnc.passes.schedule.state import edit, find, renamed, replace_stmt


def version(b: Block, name: str, inner: str) -> Block:
    """Compute an iteration of `name` without the guards of `inner` where they hold for all iterations of that; skip it where they hold for none.

    The guards are `<` and `<=` between linear forms of `inner`'s variable. A body without guards stays as it is."""
    outer, loop = find(b, name), find(b, inner)
    if not any(s is loop for s in walk_stmts(outer.body)):
        raise ScheduleError(f"{inner} is not inside {name}")
    conds, body = guards_of(loop.body)
    if not conds:
        return b
    first, last = loop.lo, loop.hi - 1
    if value(loop.extent) is None or any(x.var in free(c) for c in conds for x in walk_stmts(outer.body) if isinstance(x, For) and x is not loop):
        raise ScheduleError(f"the guards of {inner} depend on other loops inside {name}, or its extent is not constant")
    every, some = [], []
    for c in conds:
        slope = _slope(c, loop)
        at_first, at_last = (substitute(c, {loop.var: e}) for e in (first, last))
        every.append(at_first if slope > 0 else at_last)  # where the guard is nearest to failing
        some.append(at_last if slope > 0 else at_first)
    all_hold = reduce(_and, every)
    free_of_guards = For(loop.var, loop.lo, loop.hi, loop.kind, body)

    def go(s: For) -> Block:
        whole, known = replace_stmt(s.body, loop, lambda: (free_of_guards,)), value(all_hold)
        parts: Block = (If(all_hold, whole, renamed(s.body, "_b")),) if known is None else whole if known else s.body
        return (For(s.var, s.lo, s.hi, s.kind, guarded([c for c in some if value(c) != 1], parts)),)

    return edit(b, name, go)


def _slope(c: Expr, loop: For) -> int:
    """How the gap of a guard `0 <= gap` grows along a loop."""
    if isinstance(c, Op) and c.name in ("<", "<="):
        pairs, _ = terms(c.args[1] - c.args[0])
        slope = dict(pairs).get(loop.var, 0)
        if not any(loop.var in free(t) for t, _ in pairs if t is not loop.var):
            return slope
    raise ScheduleError(f"the guard {c!r} is not linear in {loop.var.name}")


def _and(a: Expr, b: Expr) -> Expr:
    return op("&", a, b)
