"""Which values of a forward graph are kept for its reverse: the fewest bytes that all others can be computed from.

A value is a vertex with the capacity of its bytes; edges lead from operands to results that are cheap to compute again.
The minimum cut between what cannot, or shall not, be computed again and what the reverse graph reads is what is kept.
Of equal cuts it is the one next to the readers, which leaves the least to compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from dnnc.ir.expr import Var, const, free
from dnnc.ir.graph.core import Node, Value
from dnnc.ir.op import Cost, Trait
from dnnc.ir.shapes import as_env, resolve
from dnnc.ir.types import TensorType

NEVER_AGAIN = frozenset((Trait.RANDOM, Trait.HOST, Trait.SIZED, Trait.CONTROL))
NOMINAL = 64  # the size of a symbolic dim
INFINITE = 1 << 60

Vertex = tuple[Value, bool] | None  # a value's entrance or exit; None: the source


def nominal_bytes(t: TensorType) -> int:
    """The bytes of a value, where symbolic dims have a size that is usual."""
    n = const(t.nbytes)
    sizes: dict[Var, int] = {v: _size(v) for v in free(n)}
    found = resolve(n, as_env(sizes))
    return found if isinstance(found, int) else NOMINAL


def _size(v: Var) -> int:
    low, high = (x if isinstance(x, int) else None for x in (v.lo, v.hi))
    return max(low or 0, min(NOMINAL, NOMINAL if high is None else high))


def is_cheap(n: Node) -> bool:
    """May the results of a node be computed again, rather than kept?"""
    return n.op.cost <= Cost.LIGHT and n.op.traits.isdisjoint(NEVER_AGAIN)


def kept(
    readers: Collection[Value], at_hand: Collection[Value], stored: Collection[Value] = (), again: bool = False
) -> list[Value]:
    """The values to keep, in a fixed order.

    Args:
        readers: what the reverse graph reads.
        at_hand: values that it has anyway, constants among them. Other inputs of the graph can only be kept.
        stored: values that are kept for another reason already.
        again: compute everything again that can be, however long that takes.
    """
    capacity: dict[Value, int] = {}
    edges: dict[Vertex, dict[Vertex, int]] = {None: {}}
    sinks: set[Vertex] = set()
    stack = [v for v in readers if v not in at_hand]
    for v in stack:
        sinks.add((v, True))
    while stack:
        v = stack.pop()
        if v in capacity:
            continue
        capacity[v] = 1 + (0 if v in stored else nominal_bytes(v.type))
        _edge(edges, (v, False), (v, True), capacity[v])
        n = v.node
        if n is None or not (again or is_cheap(n)):
            _edge(edges, None, (v, False), INFINITE)
            continue
        for x in n.inputs:
            if x is not None and x not in at_hand:
                _edge(edges, (x, True), (v, False), INFINITE)
                stack.append(x)
    while _augment(edges, sinks):
        pass
    near = _reaching(edges, sinks)
    return [v for v in capacity if (v, True) in near and (v, False) not in near]


def _edge(edges: dict[Vertex, dict[Vertex, int]], a: Vertex, b: Vertex, capacity: int) -> None:
    edges.setdefault(a, {})[b] = capacity
    edges.setdefault(b, {}).setdefault(a, 0)


def _augment(edges: dict[Vertex, dict[Vertex, int]], sinks: Collection[Vertex]) -> bool:
    """Send what fits along a shortest path from the source to a sink; False if there is none. The rest stays."""
    before: dict[Vertex, Vertex] = {None: None}
    queue: deque[Vertex] = deque([None])
    while queue:
        a = queue.popleft()
        if a in sinks:
            path = [a]
            while path[-1] is not None:
                path.append(before[path[-1]])
            steps = list(zip(path[1:], path))
            flow = min(edges[a][b] for a, b in steps)
            for a, b in steps:
                edges[a][b] -= flow
                edges[b][a] += flow
            return True
        for b, capacity in edges[a].items():
            if capacity and b not in before:
                before[b] = a
                queue.append(b)
    return False


def _reaching(edges: dict[Vertex, dict[Vertex, int]], sinks: Collection[Vertex]) -> set[Vertex]:
    """The vertices from which a sink could still be reached."""
    found = set(sinks)
    stack = list(sinks)
    while stack:
        b = stack.pop()
        for a in edges[b]:
            if a not in found and edges[a].get(b, 0):
                found.add(a)
                stack.append(a)
    return found
