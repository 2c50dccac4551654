"""Schedule primitive `running`: sums over all elements up to each one (cumsum, cumprod), one step for each element.

    for c in range(C):                          for co in range(ceil(C / width)):
        for s in range(n):                          acc: f32[width] @ register
            acc = 0                                 for e in range(width): acc[e] = 0
            for r in range(n):           ->         for s in range(n):
                if r <= s: acc = acc + e(c, r)          for e in range(width):
            y[c, s] = f(acc)                                acc[e] = acc[e] + e(c, s)
                                                            y[c, s] = f(acc[e])

`width` neighbours in the loop around take their steps together: lanes of a vector, or rows whose additions do not wait
for each other. Each sum is added up in the order of its elements, whatever the width.
"""

from __future__ import annotations

from contextlib import nullcontext

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Op, fma, minimum, op, substitute, value
from dnnc.ir.loops.stmt import Block, Builder, accesses
from dnnc.passes.schedule.scan import Sums, sums_of
from dnnc.passes.schedule.state import edit, find, only

LANE = "e"  # the loops over neighbours are called e and e_1


def running(b: Block, around: str, width: int, overlap: bool) -> Block:
    """Sums along the one loop within the loop `around`, `width` iterations of which go together.

    Args:
        b: a nest whose innermost loops are `around` and the one along which sums run.
        around: a loop whose iterations are independent.
        width: of its iterations, at most its extent where they overlap.
        overlap: the last group repeats iterations of the one before it, unless these read what they have written;
            otherwise the last is guarded.
    """
    loop = find(b, around)
    x = sums_of(only(loop))
    extent = loop.extent
    overlap = overlap and all(a.buf is not x.out.buf for a in accesses((loop,)))
    if value(loop.lo) != 0 or (overlap and (value(extent) or 0) < width):
        raise ScheduleError(f"{around} has no groups of {width}")
    ragged = not overlap and value(extent % width) != 0
    make = Builder()
    with make.loop(f"{around}o", (extent + (width - 1)) // width) as group:
        first: Expr = minimum(group * width, extent - width) if overlap else group * width
        acc = make.alloc(x.acc.name, x.acc.dtype, width)
        with make.loop(LANE, width) as e:
            make.store(acc, (e,), x.start)
        with make.loop(x.s.name, x.n) as s:
            with make.loop(f"{LANE}_1", width) as e:
                at: dict[Expr, Expr] = {loop.var: first + e, x.s: x.n - 1 - s if x.backward else s, x.acc[0]: acc[e]}
                with make.when(op("<", first + e, extent)) if ragged else nullcontext():
                    if x.before:
                        _store(make, x, at)
                    make.store(acc, (e,), _added(x, acc[e], substitute(x.term, {loop.var: first + e, x.r: at[x.s]})))
                    if not x.before:
                        _store(make, x, at)
    return edit(b, around, lambda _: make.block())


def _added(x: Sums, total: Expr, term: Expr) -> Expr:
    """One step of a sum; a product that is summed is one multiply-add."""
    if x.how == "+" and isinstance(term, Op) and term.name == "*" and term.dtype.is_float:
        return fma(term.args[0], term.args[1], total)
    return op(x.how, total, term)


def _store(make: Builder, x: Sums, at: dict[Expr, Expr]) -> None:
    make.store(x.out.buf, tuple(substitute(i, at) for i in x.out.idx), substitute(x.out.value, at))
