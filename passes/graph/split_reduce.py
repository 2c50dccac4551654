"""Long reductions with few results become two on GPUs: the first for parts of what is reduced, the second over the parts.

    y = reduce_mean(x, axes=(1,))  of f16[1, 12544, 32]   ->   p = reduce_mean(cast(x, f32) as [1, 64, 196, 32], axes=(2,)); y = reduce_mean(p, axes=(1,))

    y = reduce_mean(x, axes=(2, 3))  of f16[1, 32, 112, 112]  ->  y = reduce_mean(reduce_mean(x, axes=(3,), keepdims=True), axes=(2, 3))

Blocks of threads cannot meet, so a kernel computes each result within one, and thirty results would leave all but one multiprocessor of a
hundred without work. Several axes are split between them, since a reshape would cost images their layout. A second kernel costs a microsecond or two. Parts are of one size, so a mean of means is the mean; parts of half
types are kept in float32. Adds roundings in another order, so not for strict numerics.
"""

from __future__ import annotations

import math
from typing import Any

from dnnc.ir.builder import Builder
from dnnc.ir.dtype import f32
from dnnc.ir.graph import Graph, Node, Value
from dnnc.passes.base import PassContext

OPS = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod")
BLOCKS = 128  # that the parts should fill
LINE = 32  # neighbouring results that one block computes
LONG_ROW, SHORT_ROW = 1 << 16, 1 << 12  # elements in one piece: worth parts, and what a part has at least
LONG_COLUMN, SHORT_COLUMN = 2048, 64  # elements that lie apart, likewise
MOST_PARTS = 256


def split_reductions(graph: Graph, ctx: PassContext) -> bool:
    """Rewrite where channels lie last, that is for GPUs. Returns whether anything changed."""
    if not ctx.channels_last or ctx.strict:
        return False
    changed = False
    for n in graph.nodes():
        if n.op.name not in OPS or not _sized(n):
            continue
        found = None if _by_axes(n) else _parts(n)
        if found is None and not _by_axes(n):
            continue
        y = _rewritten(graph, n, *found) if found is not None else _axis_by_axis(graph, n)
        graph.replace_all_uses(n.output, y)
        graph.erase(n)
        changed = True
    return changed


def _sized(n: Node) -> bool:
    x = n.inputs[0]
    assert x is not None
    return all(isinstance(d, int) and d > 0 for d in x.type.shape) and n.attrs["axes"] != ()


def _sizes(n: Node) -> tuple[list[int], list[int]]:
    """The shape, and the reduced axes that have more than one element."""
    x, axes = n.inputs[0], n.attrs["axes"]
    assert x is not None
    sizes = [int(d) for d in x.type.shape]  # type: ignore[arg-type]
    return sizes, sorted(k for k in {a % len(sizes) for a in (axes if axes is not None else range(len(sizes)))} if sizes[k] > 1)


def _by_axes(n: Node) -> bool:
    """Images reduced over their height and width, whose channels may lie side by side."""
    sizes, reduced = _sizes(n)
    if len(reduced) < 2 or reduced[0] < 1 or reduced != list(range(reduced[0], len(sizes))):
        return False
    results = math.prod(sizes[: reduced[0]])
    return math.prod(sizes[reduced[0] :]) >= LONG_COLUMN and -(-results // LINE) * 2 <= BLOCKS


def _axis_by_axis(graph: Graph, n: Node) -> Value:
    x, b = n.inputs[0], Builder(graph, n, n.locs)
    assert x is not None
    _, reduced = _sizes(n)
    to, made = n.output.type, x
    if x.type.dtype.is_float and x.type.dtype.bits < 32:
        made = _value(b.cast(made, to=f32))
    made = _value(b.op(n.op.name, made, axes=(reduced[-1],), keepdims=True))
    made = _value(b.op(n.op.name, made, **n.attrs))
    return made if made.type.dtype is to.dtype else _value(b.cast(made, to=to.dtype))


def _parts(n: Node) -> tuple[int, int, int, int] | None:
    """What lies before the reduced axes, the number of parts, the size of a part, what lies behind; None where one kernel does."""
    sizes, reduced = _sizes(n)
    if not reduced:
        return None
    first, last = reduced[0], reduced[-1]
    if any(sizes[k] > 1 for k in range(first, last + 1) if k not in reduced):
        return None
    outer, length, inner = math.prod(sizes[:first]), math.prod(sizes[first : last + 1]), math.prod(sizes[last + 1 :])
    long, short = (LONG_ROW, SHORT_ROW) if inner == 1 else (LONG_COLUMN, SHORT_COLUMN)
    blocks = outer if inner == 1 else -(-outer * inner // LINE)
    if length < long or blocks * 2 > BLOCKS:
        return None
    most = min(MOST_PARTS, length // short, 2 * BLOCKS // blocks)
    parts = max((k for k in range(1, most + 1) if length % k == 0), default=1)
    return (outer, parts, length // parts, inner) if parts >= 4 else None


def _rewritten(graph: Graph, n: Node, outer: int, parts: int, size: int, inner: int) -> Value:
    x, b = n.inputs[0], Builder(graph, n, n.locs)
    assert x is not None
    to, made = n.output.type, x
    if x.type.dtype.is_float and x.type.dtype.bits < 32:
        made = _value(b.cast(made, to=f32))
    made = _value(b.reshape(made, shape=(outer, parts, size, inner)))
    made = _value(b.op(n.op.name, made, axes=(2,), keepdims=False))
    made = _value(b.op(n.op.name, made, axes=(1,), keepdims=False))
    if made.type.shape != to.shape:
        made = _value(b.reshape(made, shape=to.shape))
    return made if made.type.dtype is to.dtype else _value(b.cast(made, to=to.dtype))


def _value(v: Any) -> Value:
    assert isinstance(v, Value)
    return v
