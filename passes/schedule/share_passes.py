"""Loop fusion in rows: passes over a row that do not wait for each other become one.

    a[0] = -inf                                         a[0] = -inf
    for r in range(n): a[0] = max(a[0], x[r])           s[0] = 0
    s[0] = 0                                       ->   for r in range(n): a[0] = max(a[0], x[r]); s[0] = s[0] + x[r]
    for k in range(n): s[0] = s[0] + x[k]               y[0] = a[0]
    y[0] = a[0]

In: the body of a schedule. Out: the same with fewer loops. What a row holds is read once then, and sums that wait for
their own last step only take turns.
"""

from __future__ import annotations

from dnnc.ir.expr import Expr
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, For, Stmt, Store, accesses, map_stmt, substitute_block, walk_stmts

KINDS = ("range", "unroll")


def share_passes(b: Block) -> Block:
    """Join each nest with one before it that has the same loops and none of its data."""
    out: list[Stmt] = []
    for s in (map_stmt(s, lambda e: e, share_passes) for s in b):
        if not (isinstance(s, For) and _joined_with_one(out, s)):
            out.append(s)
    return tuple(out)


def _joined_with_one(before: list[Stmt], s: For) -> bool:
    """Join a nest with one of the statements ahead of it, in place. What it needs of those between moves ahead."""
    needed: list[Stmt] = []
    others: list[Stmt] = []
    for k in range(len(before) - 1, -1, -1):
        t = before[k]
        if not isinstance(t, (Alloc, For, Store)):
            return False
        wanted = any(_meet(t, x) for x in (s, *needed))
        if isinstance(t, For) and not wanted and (one := _as_one(t, s)) is not None:
            before[k:] = [*needed, one, *others]
            return True
        (needed if wanted else others).insert(0, t)
    return False


def _as_one(a: For, b: For) -> For | None:
    """Two nests over the same ranges as one; None if they are not."""
    first, second = nest(a), nest(b)
    if len(first) != len(second) or any(
        x.lo is not y.lo or x.hi is not y.hi or x.kind != y.kind or x.kind not in KINDS for x, y in zip(first, second)
    ):
        return None
    if not all(isinstance(x, Store) for x in (*first[-1].body, *second[-1].body)):
        return None
    renamed: dict[Expr, Expr] = {y.var: x.var for x, y in zip(first, second)}
    body: Block = (*first[-1].body, *substitute_block(second[-1].body, renamed))
    for x in reversed(first):
        body = (For(x.var, x.lo, x.hi, x.kind, body),)
    (one,) = body
    assert isinstance(one, For)
    return one


def nest(s: For) -> list[For]:
    """A loop and those perfectly nested in it."""
    out = [s]
    while len(out[-1].body) == 1 and isinstance(inner := out[-1].body[0], For):
        out.append(inner)
    return out


def _meet(a: Stmt, b: Stmt) -> bool:
    """Does one of two statements write what the other one touches?"""
    return not (_written(a).isdisjoint(_touched(b)) and _written(b).isdisjoint(_touched(a)))


def _written(s: Stmt) -> set[Buffer]:
    return {x.buf for x in walk_stmts((s,)) if isinstance(x, (Store, Alloc))}


def _touched(s: Stmt) -> set[Buffer]:
    return _written(s) | {x.buf for x in accesses((s,))}
