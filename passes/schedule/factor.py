"""Schedule primitive `factor`: a factor that all terms of a loop share multiplies their sum.

    for k in range(32):                                        t[..] = 0.0
        acc[..] = fma(x[k], q[k, ..] * s[..], acc[..])    ->   for k in range(32):
                                                                   t[..] = fma(x[k], q[k, ..], t[..])
                                                               acc[..] = fma(t[..], s[..], acc[..])

So the scale of a block of weights costs one multiplication for each block. The sum is rounded in another order.
"""

from __future__ import annotations

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Var, const, fma, free, load, walk
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, For, Store, substitute_block, walk_stmts
from dnnc.passes.schedule.loops import is_reduction
from dnnc.passes.schedule.state import edit, loops, make_loop, replace_stmt


def factor(b: Block, name: str) -> Block:
    """Take what the terms share out of the loop `name` and the loops inside it."""

    def go(s: For) -> Block:
        stores = [x for x in walk_stmts((s,)) if isinstance(x, Store)]
        if len(stores) != 1 or not is_reduction(stores[0]):
            raise ScheduleError(f"{name} holds more than one sum")
        (st,), term = stores, stores[0].value
        if not isinstance(term, Op) or term.name != "fma":
            raise ScheduleError(f"{name} adds up {term!r}, which is no product")
        here = frozenset().union(*(free(i) for i in st.idx))
        inside = list(loops((s,)))
        tile = [x for x in inside if x.var in here]
        if s in tile:
            raise ScheduleError(f"{name} is no loop of the sum")
        x, y, shared = _shared(term, frozenset(v.var for v in inside if v not in tile), name)
        part = Buffer(f"{st.buf.name}_{name}", st.buf.dtype, st.buf.shape, st.buf.space)
        step = Store(part, st.idx, fma(x, y, load(part, st.idx, st.lanes)), st.lanes)
        total = Store(
            st.buf, st.idx, fma(load(part, st.idx, st.lanes), shared, load(st.buf, st.idx, st.lanes)), st.lanes
        )
        zero = Store(part, st.idx, const(0.0, part.dtype), st.lanes)
        return (
            Alloc(part),
            *_over(tile, zero, f"_{name}_0"),
            *replace_stmt((s,), st, lambda: (step,)),
            *_over(tile, total, f"_{name}_1"),
        )

    return edit(b, name, go)


def _shared(e: Op, along: frozenset[Var], name: str) -> tuple[Expr, Expr, Expr]:
    """The factors of the terms, and what they share: reads of memory that are the same all along the loops."""
    x, y, _ = e.args
    for first, second, flip in ((x, y, False), (y, x, True)):
        if isinstance(second, Op) and second.name == "*":
            for p, q in (second.args, second.args[::-1]):
                if not along & free(q) and any(isinstance(v, Load) for v in walk(q)):
                    return (p, first, q) if flip else (first, p, q)
    raise ScheduleError(f"the terms of {name} share no factor")


def _over(tile: list[For], st: Store, suffix: str) -> Block:
    """A statement in copies of loops, outermost first."""
    body: Block = (st,)
    for s in reversed(tile):
        old, inner = s.var, body

        def at(v: Expr, old: Var = old, inner: Block = inner) -> Block:
            return substitute_block(inner, {old: v})

        if s.lo is not const(0):
            raise ScheduleError(f"{old.name} does not begin at 0")
        body = (make_loop(old.name + suffix, s.extent, "unroll", at),)
    return body
