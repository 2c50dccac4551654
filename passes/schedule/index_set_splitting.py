"""Index-set splitting: loops cut at the boundaries of concatenations and borders, and into an index's digits.

for i in range(9): y[i] = select(i < 4, a[min(i, 3)], b[max(i - 4, 0)])      ->  for i in range(4): y[i] = a[i] for i_1
                                                                                 in range(5): y[i_1 + 4] = b[i_1]
for i in range(8): y[i] = x[i % 2, i // 2]     ->  for io in range(4): for ii in range(2): y[2*io + ii] = x[ii, io]
"""

from __future__ import annotations

from collections.abc import Sequence

from dnnc.ir.bounds import bounds
from dnnc.ir.dtype import i64
from dnnc.ir.errors import ScheduleError, count
from dnnc.ir.expr import Expr, Load, Op, free, terms, value, walk
from dnnc.ir.loops.stmt import Block, For, accesses, exprs, substitute_block, walk_stmts
from dnnc.passes.schedule.state import edit, loops, make_loop, renamed

MANY_ROUNDS = 2  # more of them are digits rather than parts


def cut(b: Block, name: str, places: tuple[int, ...], suffixes: tuple[str, ...]) -> Block:
    """`for i in range(n): s` -> loops `[0, p)` and `[p, n)`, part k of several named with `suffixes[k]` behind."""

    def go(s: For) -> Block:
        n = value(s.extent)
        if n is None or value(s.lo) != 0 or s.kind != "range":
            raise ScheduleError(f"{name} is no plain loop from 0 to a constant")
        ends = (*places, n)
        if list(ends) != sorted({0, *ends})[1:] or len(suffixes) != len(ends):
            raise ScheduleError(
                f"{name} has {n} iterations and cannot be cut at {places} into {count(len(suffixes), 'part')}"
            )
        out = []
        for lo, hi, suffix in zip((0, *places), ends, suffixes):
            body = renamed(s.body, suffix) if suffix else s.body
            out.append(make_loop(name + suffix, hi - lo, s.kind, lambda v: substitute_block(body, {s.var: v + lo})))
        return tuple(out)

    taken = {x.var.name for x in loops(b)} | {x.buf.name for x in accesses(b)}
    if any(x.var.name + suffix in taken for suffix in suffixes if suffix for x in loops(b)):
        raise ScheduleError(f"the parts of {name} would have names that are there already")
    return edit(b, name, go)


def boundaries(loop: For, both: bool = False) -> tuple[int, ...]:
    """Return the iterations at which a `select` between loads changes sides; not `both`: or one between other values,
    or a `min` or `max` in the index of a load, as where an image is reflected at its borders.

    A condition on several loops has a boundary where it becomes, or ceases to be, the same for all iterations of the
    others, unless that is far apart (a triangle has no boundaries).
    """
    n = value(loop.extent)
    found: set[int] = set()
    for c in _conditions(loop.body, 2) if both else (*_conditions(loop.body, 1), *_limits(loop.body)):
        gap = c.args[1] - c.args[0] + int(c.name != "<")  # the condition is gap > 0
        slope = dict(terms(gap)[0]).get(loop.var, 0)
        rest = gap - loop.var * slope
        least, most = bounds(rest)
        if slope == 0 or loop.var in free(rest) or least is None or most is None:
            continue
        size = abs(slope)
        # from `first` on the condition differs from what it is at the loop's start for some, from `last` on for all
        first, last = (-(-least // size), -(-most // size)) if slope < 0 else (-most // size + 1, -least // size + 1)
        if last - first <= 1:
            found |= {first, last}
    return tuple(sorted(k for k in found if n is not None and 0 < k < n))


def _conditions(b: Block, least: int) -> list[Op]:
    """Comparisons of indices that choose between two operands, of which at least so many hold loads."""
    out: dict[Op, None] = {}
    for s in walk_stmts(b):
        for e in exprs(s):
            for x in walk(e):
                if (
                    isinstance(x, Op)
                    and x.name == "select"
                    and sum(any(isinstance(y, Load) for y in walk(a)) for a in x.args[1:]) >= least
                ):
                    for c in walk(x.args[0]):
                        if isinstance(c, Op) and c.name in ("<", "<=") and c.args[0].dtype is i64:
                            out[c] = None
    return list(out)


def _limits(b: Block) -> list[Op]:
    """The minima and maxima in indices of loads, but for those that a `select` keeps away from."""
    out: dict[Op, None] = {}
    seen: set[tuple[Expr, bool]] = set()

    def visit(e: Expr, inside: bool) -> None:
        if (e, inside) in seen:
            return
        seen.add((e, inside))
        if isinstance(e, Op) and e.name in ("min", "max") and inside:
            out[e] = None
        if isinstance(e, Op) and e.name == "select" and _of_indices(e.args[0]):
            return
        for x in e.idx if isinstance(e, Load) else e.args if isinstance(e, Op) else ():
            visit(x, inside or isinstance(e, Load))

    for s in walk_stmts(b):
        for e in exprs(s):
            visit(e, False)
    return list(out)


def _of_indices(condition: Expr) -> bool:
    return any(isinstance(c, Op) and c.name in ("<", "<=") and c.args[0].dtype is i64 for c in walk(condition))


def crossings(loop: For, offsets: Sequence[Expr]) -> tuple[int, ...]:
    """Return the iterations at which a sum divided by n in offsets passes a multiple of n, a block's end."""
    end = value(loop.extent)
    found: set[int] = set()
    for e in offsets:
        for x in walk(e):
            n = value(x.args[1]) if isinstance(x, Op) and x.name in ("//", "%") else None
            if n is None or end is None or n < end or not isinstance(x, Op):
                continue
            rest = x.args[0] - loop.var
            ts, k = terms(rest)
            if loop.var not in free(rest) and all(c % n == 0 for _, c in ts):
                found.add(n - k % n)
    return tuple(sorted(k for k in found if end is not None and 0 < k < end))


def turns(loop: For, offsets: Sequence[Expr]) -> tuple[int, ...]:
    """Return the iterations at which an index of a few rounds begins one, such as `(i + 55) % 56` of 58 iterations."""
    end = value(loop.extent)
    found: set[int] = set()
    for e in offsets:
        for x in walk(e):
            n = value(x.args[1]) if isinstance(x, Op) and x.name == "%" else None
            shift = value(x.args[0] - loop.var) if n and isinstance(x, Op) else None
            if n and end and shift and shift % n and end <= MANY_ROUNDS * n:
                found |= set(range(-shift % n, end, n))
    return tuple(sorted(k for k in found if k))


def digits(loop: For, offsets: Sequence[Expr]) -> int | None:
    """Return the one n by which offsets divide loop variable v, where n divides the extent: split by it."""
    found: set[int | None] = set()
    for e in offsets:
        for x in walk(e):
            if isinstance(x, Op) and x.name in ("//", "%") and loop.var in free(x):
                found.add(value(x.args[1]) if x.args[0] is loop.var else None)
    n = found.pop() if len(found) == 1 else None
    extent = value(loop.extent)
    return n if n is not None and extent is not None and 1 < n < extent else None
