"""Schedule primitive `stretches`: k-blocking of a long sum, with the tiles' sums in memory in between.

    for p in range(5):                            sums: f32[5, 12, 2, 16] @ local
        acc: f32[12, 2, 16] @ register            for k in range(4):
        acc[..] = 0.0                                 for p in range(5):
        for k in range(4):                                acc: f32[12, 2, 16] @ register
            acc[..] = fma(.., acc[..])     ->             if k < 1: acc[..] = 0.0
        y[p, ..] = acc[..]                                else: acc[..] = sums[p, ..]
                                                          acc[..] = fma(.., acc[..])
                                                          if k < 3: sums[p, ..] = acc[..]
                                                          else: y[p, ..] = acc[..]

What a stretch reads of both operands then stays in a near cache while all tiles pass. Sums keep their order, unless
stretches are added up `apart`: each then starts from 0, and is added to the sums in memory at its end.
"""

from __future__ import annotations

from collections.abc import Callable

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, const, free, load, value
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, For, If, Store, loop_var, walk_stmts
from dnnc.passes.schedule.parallel_legality import obstacle
from dnnc.passes.schedule.state import edit

LIMIT = 1 << 18  # elements of all sums: 1 MB of float32, on the thread's stack and in its second-level cache


def stretches(b: Block, name: str, along: str, apart: bool = False) -> Block:
    """Bring the loop `along`, the outermost of a sum, outside of the loop over tiles called `name`.

    Legal when the iterations of `name` may run at once, and its body is the declaration of one register tile, whole
    vectors of which are set, to 0 if `apart`, then the loop, then what is made of the tile.
    """

    def go(s: For) -> Block:
        at = next((k for k, x in enumerate(s.body) if isinstance(x, For) and x.var.name == along), None)
        first = s.body[0] if s.body else None
        if (
            at is None
            or not isinstance(first, Alloc)
            or first.buf.space != "register"
            or any(isinstance(x, Alloc) for x in s.body[1:])
        ):
            raise ScheduleError(f"{name} is no loop over tiles whose sums run along {along}")
        loop, acc = s.body[at], first.buf
        assert isinstance(loop, For)
        start, end = s.body[1:at], s.body[at + 1 :]
        _check(s, loop, acc, start, apart)
        sums = Buffer(f"{acc.name}_{name}", acc.dtype, (s.extent, *acc.shape), "local")
        if (value(sums.size()) or LIMIT + 1) > LIMIT:
            raise ScheduleError(f"the sums of all tiles would take {sums.size()!r} elements, the limit is {LIMIT}")
        place, lanes = s.var - s.lo, value(acc.shape[-1]) or 1

        def before(idx: tuple[Expr, ...]) -> Store:
            waiting = load(sums, (place, *idx), lanes)
            return Store(acc, idx, load(acc, idx, lanes) + waiting if apart else waiting, lanes)

        again = _each(acc, f"{name}l", before)
        kept = _each(acc, f"{name}s", lambda idx: Store(sums, (place, *idx), load(acc, idx, lanes), lanes))
        last = If(loop.var < loop.hi - 1, kept, end)
        if apart:
            body = (first, *start, *loop.body, If(loop.lo < loop.var, again), last)
        else:
            body = (first, If(loop.var < loop.lo + 1, start, again), *loop.body, last)
        return (Alloc(sums), For(loop.var, loop.lo, loop.hi, loop.kind, (For(s.var, s.lo, s.hi, s.kind, body),)))

    return edit(b, name, go)


def _check(s: For, loop: For, acc: Buffer, start: Block, apart: bool) -> None:
    if value(s.extent) is None or value(loop.extent) is None or loop.kind != "range" or s.var in free(loop.lo):
        raise ScheduleError(
            f"{s.var.name} and {loop.var.name} have no constant numbers of iterations, which the memory for sums needs"
        )
    if apart and any(isinstance(x, Store) and x.value is not const(0.0, acc.dtype) for x in walk_stmts(start)):
        raise ScheduleError(f"{acc.name} does not start from 0, so stretches cannot be added up apart")
    if any(isinstance(x, Store) and (x.buf is not acc or x.lanes != value(acc.shape[-1])) for x in walk_stmts(start)):
        raise ScheduleError(f"{acc.name} is not all that is set ahead of {loop.var.name}, or not in whole vectors")
    if why := obstacle(s):
        raise ScheduleError(f"the tiles of {s.var.name} depend on each other: {why}")


def _each(acc: Buffer, prefix: str, store: Callable[[tuple[Expr, ...]], Store]) -> Block:
    """A store for each vector of a tile, whose axis of lanes is the last."""
    loops = [loop_var(f"{prefix}{k}", const(0), d) for k, d in enumerate(acc.shape[:-1])]
    body: Block = (store((*loops, const(0))),)
    for v, d in zip(reversed(loops), reversed(acc.shape[:-1])):
        body = (For(v, const(0), d, "unroll", body),)
    return body
