"""Schedule primitive: loop versioning, without the guards where they hold in all inner iterations.

    for t in range(k):                              for t in range(max(..), min(..)):
        for i in unroll(4):                             if 0 <= t + p and t + p + 3 < n:
            if 0 <= t + p + i:                              for i in unroll(4): s
                if t + p + i < n:             ->        else:
                    s                                       for i in unroll(4):
                                                                if 0 <= t + p + i: if t + p + i < n: s

So a register tile with padding at some taps tests one condition per tap, and pixels only where it fails.
"""

from __future__ import annotations

from functools import reduce

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Linear, Op, Var, free, op, substitute, value
from dnnc.ir.loops.stmt import Block, For, If, walk_stmts
from dnnc.passes.schedule.loops import guarded, guards_of
from dnnc.passes.schedule.state import edit, find, renamed, replace_stmt


def version(b: Block, name: str, inner: str) -> Block:
    """Compute an iteration of `name` without the guards of `inner` where they hold for all iterations of that; skip it
    where they hold for none.

    The guards are `<` and `<=`; the gap between their sides is monotonic in `inner`'s variable. Other bodies stay.
    """
    outer, loop = find(b, name), find(b, inner)
    if not any(s is loop for s in walk_stmts(outer.body)):
        raise ScheduleError(f"{inner} is not inside {name}")
    conds, body = guards_of(loop.body)
    if not conds:
        return b
    first, last = loop.lo, loop.hi - 1
    if value(loop.extent) is None or any(
        x.var in free(c) for c in conds for x in walk_stmts(outer.body) if isinstance(x, For) and x is not loop
    ):
        raise ScheduleError(f"the guards of {inner} depend on other loops inside {name}, or its extent is not constant")
    every, some = [], []
    for c in conds:
        if (
            not (isinstance(c, Op) and c.name in ("<", "<="))
            or (sign := _trend(c.args[1] - c.args[0], loop.var)) is None
        ):
            raise ScheduleError(f"the guard {c!r} is not monotonic in {loop.var.name}")
        at_first, at_last = (substitute(c, {loop.var: e}) for e in (first, last))
        every.append(at_first if sign > 0 else at_last)  # where the guard is nearest to failing
        some.append(at_last if sign > 0 else at_first)
    all_hold = reduce(_and, every)
    free_of_guards = For(loop.var, loop.lo, loop.hi, loop.kind, body)

    def go(s: For) -> Block:
        whole, known = replace_stmt(s.body, loop, lambda: (free_of_guards,)), value(all_hold)
        parts: Block = (If(all_hold, whole, renamed(s.body, "_b")),) if known is None else whole if known else s.body
        return (For(s.var, s.lo, s.hi, s.kind, guarded([c for c in some if value(c) != 1], parts)),)

    return edit(b, name, go)


def _trend(e: Expr, v: Var) -> int | None:
    """Return 1 if `e` never falls as `v` grows, -1 if it never rises, 0 if independent; None if unknown."""
    if v not in free(e):
        return 0
    if e is v:
        return 1
    if isinstance(e, Linear):
        trends = [(_trend(t, v), k) for t, k in e.terms]
        signs = {None if t is None else t if k > 0 else -t for t, k in trends} - {0}
    elif isinstance(e, Op) and (e.name in ("min", "max") or (e.name == "//" and (value(e.args[1]) or 0) > 0)):
        signs = {_trend(x, v) for x in e.args} - {0}
    else:
        return None
    return signs.pop() if len(signs) == 1 else None


def _and(a: Expr, b: Expr) -> Expr:
    return op("&", a, b)
