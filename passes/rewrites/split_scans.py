"""Few long running sums become many short ones: those of parts, each added to the sum of the parts before it.

    y = cumsum(x, axis=0)  of f32[640000]   ->   p = x as [1, 64, 10000]; y = cumsum(p, axis=2) + cumsum(reduce_sum(p,
                                                 axes=(2,)), axis=1, exclusive=True)

A sum waits for the one before it, so a core adds up a row at a quarter of the rate at which it adds up four rows in
turns, and one thread has all of it. Parts are read twice, and written once: the last addition is made where the sums
are written. Elements that fill no part follow by themselves. Parts are the same for any number of threads. Adds floats
up in another order, so not for strict numerics; products of floats stay, since parts may overflow.
"""

from __future__ import annotations

import math
from typing import Any

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import replace_each

PARTS = 64
LONG = 1 << 16  # elements of a row that is worth parts
FEW = 4  # rows that leave units of a core, or threads, without work
HOW = {
    "cumsum": ("reduce_sum", "add", True),
    "cumprod": ("reduce_prod", "mul", False),
}  # the op of a part's total, the op that joins totals, and whether floats may go by parts


def split_scans(graph: Graph, ctx: PassContext) -> bool:
    """Rewrite where cores walk rows. Returns whether anything changed."""
    if not ctx.facts.serial_rows:
        return False
    return replace_each(graph, dict.fromkeys(HOW, lambda n: _rewritten(graph, n) if _worth(n, ctx) else None))


def _worth(n: Node, ctx: PassContext) -> bool:
    t = n.output.type
    sizes = [d if isinstance(d, int) else 0 for d in t.shape]
    if t.layout is not None or t.dtype.bits < 32 or (t.dtype.is_float and (ctx.strict or not HOW[n.op.name][2])):
        return False
    axis = n.attrs["axis"] % len(sizes)
    return sizes[axis] >= LONG and math.prod(sizes[axis + 1 :]) == 1 and 0 < math.prod(sizes[:axis]) <= FEW


def _rewritten(graph: Graph, n: Node) -> Value:
    x, t, b = n.inputs[0], n.output.type, Builder(graph, n, n.locs)
    assert x is not None
    axis, back, name = n.attrs["axis"] % t.rank, n.attrs["reverse"], n.op.name
    total, join, _ = HOW[name]
    sizes = [d if isinstance(d, int) else 0 for d in t.shape]
    length, outer = sizes[axis], math.prod(sizes[:axis])
    size, rest = divmod(length, PARTS)
    rows = b.reshape(x, shape=(outer, length))

    def piece(start: int, count: int) -> Any:
        return b.op("slice", rows, starts=(0, start), steps=(1, 1), shape=(outer, count)) if count < length else rows

    parts = b.reshape(piece(rest if back else 0, length - rest), shape=(outer, PARTS, size))
    totals = b.op(total, parts, axes=(2,), keepdims=True)
    before = b.op(name, totals, axis=1, exclusive=True, reverse=back)
    y = b.reshape(
        b.op(join, b.op(name, parts, axis=2, exclusive=n.attrs["exclusive"], reverse=back), before),
        shape=(outer, length - rest),
    )
    if rest:
        left = b.op(
            name, piece(0 if back else length - rest, rest), axis=1, exclusive=n.attrs["exclusive"], reverse=back
        )
        left = b.op(join, left, b.reshape(b.op(total, totals, axes=(1,), keepdims=True), shape=(outer, 1)))
        y = b.op("concat", *((left, y) if back else (y, left)), axis=1)
    made = b.reshape(y, shape=t.shape)
    assert isinstance(made, Value)
    return made
