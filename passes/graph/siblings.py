"""Products of one matrix with several constant ones (or parameters) become one product: queries, keys and values of a transformer in one kernel.

    q = transpose(reshape(add(matmul(x, wq), bq), [B, S, H, D]), (0, 2, 1, 3)), k and v likewise
        ->   t = transpose(reshape(add(matmul(x, [wq wk wv]), [bq bk bv]), [B, S, 3, H, D]), (2, 0, 1, 3 + ...)),  q = t[0], k = t[1], v = t[2]

The parts are slices along the outermost axis of one value, places in its memory: nothing is copied. Chains must be alike and have no other
readers; sizes must be known, since a place in memory needs an offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.ir.builder import Builder
from dnnc.ir.graph import Graph, Node, Value, union
from dnnc.passes.base import PassContext
from dnnc.passes.graph.prologue import held_in

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """A product and what follows it: `end` is its last value."""

    product: Node
    bias: Value | None
    shape: Shape  # of the product's columns, after a reshape that takes them apart
    perm: Shape
    end: Value

    @property
    def form(self) -> tuple[Any, ...]:
        """What chains have in common when they may become one."""
        w = self.product.inputs[1]
        assert w is not None
        return w.type, self.bias is None, self.shape, self.perm


def siblings(graph: Graph, ctx: PassContext) -> bool:
    """Merge products wherever two or more chains of one form read one value."""
    if ctx.strict:
        return False
    changed = False
    readers: dict[Value, list[Chain]] = {}
    for n in graph.nodes():
        chain = _chain(graph, n) if n.op.name == "matmul" else None
        if chain is not None and n.inputs[0] is not None:
            readers.setdefault(n.inputs[0], []).append(chain)
    for chains in readers.values():
        for form in dict.fromkeys(c.form for c in chains):
            alike = [c for c in chains if c.form == form]
            if len(alike) > 1:
                _merge(graph, alike)
                changed = True
    return changed


def _only_reader(graph: Graph, v: Value, op: str) -> Node | None:
    users = {u for u, _ in v.uses}
    found = next(iter(users)) if len(users) == 1 and not graph.is_output(v) else None
    return found if found is not None and found.op.name == op else None


def _chain(graph: Graph, n: Node) -> Chain | None:
    """The chain that begins with a product of a value and a constant matrix; None where it has another form."""
    x, w = n.inputs[0], n.inputs[1]
    assert x is not None and w is not None
    if not graph.settled(w) or w.type.rank != 2 or x.type.rank < 2 or not n.output.type.static or n.output.type.layout is not None:
        return None
    end, bias = n.output, None
    add = _only_reader(graph, end, "add")
    if add is not None:
        other = add.inputs[1] if add.inputs[0] is end else add.inputs[0]
        if other is not None and graph.settled(other) and other.type.shape == w.type.shape[1:]:
            end, bias = add.output, other
    lead = end.type.rank - 1
    apart = _only_reader(graph, end, "reshape")
    if apart is None or apart.output.type.shape[:lead] != end.type.shape[:-1]:
        return None
    end = apart.output
    shape: Shape = tuple(int(d) for d in end.type.shape[lead:])  # type: ignore[arg-type]
    perm: Shape = tuple(range(end.type.rank))
    turned = _only_reader(graph, end, "transpose")
    if turned is not None:
        end, perm = turned.output, tuple(turned.attrs["perm"])
    return None if graph.is_output(end) else Chain(n, bias, shape, perm, end)


def _merge(graph: Graph, chains: list[Chain]) -> None:
    first = chains[0].product
    x = first.inputs[0]
    assert x is not None
    locs = first.locs
    for c in chains[1:]:
        locs = union(locs, c.product.locs)
    b = Builder(graph, first, locs)
    y = b.matmul(x, _joined(graph, [c.product.inputs[1] for c in chains], 1))
    if chains[0].bias is not None:
        y = b.add(y, _joined(graph, [c.bias for c in chains], 0))
    lead = x.type.rank - 1
    parts = b.reshape(y, shape=(*x.type.shape[:-1], len(chains), *chains[0].shape))
    perm = (lead, *(p if p < lead else p + 1 for p in chains[0].perm))
    stacked = b.transpose(parts, perm=perm)
    for k, c in enumerate(chains):
        shape = c.end.type.shape
        cut = b.slice(stacked, starts=(k, *(0 for _ in shape)), steps=(1,) * (len(shape) + 1), shape=(1, *shape))
        graph.replace_all_uses(c.end, b.reshape(cut, shape=shape))
    for c in chains:
        _erase(graph, c)


def _joined(graph: Graph, parts: Sequence[Value | None], axis: int) -> Value:
    """Constants side by side as one; parameters in the prologue."""
    given = [v for v in parts if v is not None]
    if all(v in graph.constants for v in given):
        return graph.constant(np.concatenate([graph.constants[v] for v in given], axis=axis))
    assert graph.prologue is not None
    made = Builder(graph.prologue).concat(*(held_in(graph, v) for v in given), axis=axis)
    return graph.parameter(made, made.type, given[0].name)


def _erase(graph: Graph, c: Chain) -> None:
    """Remove the nodes of a chain, last first."""
    n: Node | None = c.end.node
    while n is not None:
        before = None if n is c.product else next(v.node for v in n.inputs if v is not None and v.node is not None)
        graph.erase(n)
        n = before
