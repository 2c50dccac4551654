"""Compute a cheap value again where a late reader has its operands at hand anyway, in the place of keeping it.

    h = matmul(x, w); d = div(h, c); e = erf(d); y = mul(h, e)      h, y and d were kept for the gradient
    ...                                                        ->   d2 = div(h, c)
    g = mul(mul(dy, h), exp(mul(d, d)))                             g = mul(mul(dy, h), exp(mul(d2, d2)))

A reader is late if contractions stand in between, as between a forward part and its gradient: it is in another kernel,
and the value would lie in memory for it. All late readers have to be element-wise, so that the copy is part of their
kernels; the operands are read there, or later, by others. So nothing lives longer, no kernel reads more, and what is
computed again takes no longer than to load it.
"""

from __future__ import annotations

from itertools import accumulate

from dnnc.ir.autodiff.residuals import is_cheap, nominal_bytes
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import Trait
from dnnc.passes.analysis.kinds import kind_of
from dnnc.passes.base import PassContext, is_pure

LATE = 2  # contractions between a value and a reader
LEAST = 1 << 16  # bytes of a value that is worth it
CHAIN = 6  # nodes that are repeated for one value at most


def recompute(graph: Graph, ctx: PassContext) -> bool:
    """Give late readers of cheap values copies of these, where that takes no operand out of memory."""
    return _Recompute(graph).run()


class _Recompute:
    """Nodes go by stage: the number of contractions ahead of them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = list(graph.nodes())
        self.number = {n: (k, 0) for k, n in enumerate(self.nodes)}  # copies stand ahead of a node, in their order
        stages = accumulate(int(kind_of(n) == "contraction") for n in self.nodes)
        self.stage = dict(zip(self.nodes, stages))
        self.first: dict[int, Node] = {}  # of each stage, behind its contraction
        for n, k in self.stage.items():
            if kind_of(n) != "contraction":
                self.first.setdefault(k, n)
        self.results = set(graph.outputs)
        self.copies: dict[tuple[Value, int], Value] = {}

    def run(self) -> bool:
        changed = False
        for n in self.nodes:
            if not self.repeats(n) or n.output in self.results or nominal_bytes(n.output.type) < LEAST:
                continue
            uses = list(n.output.uses)
            late = [(u, k) for u, k in uses if self.stage[u] - self.stage[n] >= LATE]
            fused = all(Trait.ELEMENTWISE in u.op.traits and self.has_shape(u, n.output) for u, _ in late)
            if not late or len(late) == len(uses) or not fused:
                continue
            chains = {at: self.chain(n, at) for at in {self.stage[u] for u, _ in late}}
            if any(c is None for c in chains.values()):
                continue
            for at, chain in sorted(chains.items()):
                for m in chain or ():
                    self.copy(m, at)
            for u, k in late:
                u.set_input(k, self.copies[n.output, self.stage[u]])
            changed = True
        return changed

    def repeats(self, n: Node) -> bool:
        """May a node be computed again?"""
        return len(n.outputs) == 1 and Trait.ELEMENTWISE in n.op.traits and is_cheap(n) and is_pure(n)

    def has_shape(self, u: Node, v: Value) -> bool:
        return len(u.outputs) == 1 and u.output.type.shape == v.type.shape

    def chain(self, n: Node, at: int) -> list[Node] | None:
        """The nodes that compute a value of what is in memory at a stage, in order; None where something is not."""
        found: dict[Node, None] = {}
        stack = [n]
        while stack:
            m = stack.pop()
            if m in found:
                continue
            found[m] = None
            if len(found) > CHAIN or not self.repeats(m):
                return None
            for x in m.inputs:
                if x is not None and (x, at) not in self.copies and not self.at_hand(x, at):
                    assert x.node is not None
                    stack.append(x.node)
        return sorted(found, key=self.number.__getitem__)

    def at_hand(self, v: Value, at: int) -> bool:
        """Is a value in memory at a stage, for the caller or for a reader there or later?"""
        if v.node is None or v in self.results or v.type.size == 1:
            return True
        return any(self.stage[u] >= at for u, _ in v.uses)

    def copy(self, n: Node, at: int) -> None:
        inputs = [None if v is None else self.copies.get((v, at), v) for v in n.inputs]
        made = self.graph.insert_before(Node(n.op, inputs, n.attrs, [n.output.type], n.locs), self.first[at])
        self.stage[made] = at
        self.number[made] = self.number[self.first[at]][0] - 1, 1 + len(self.copies)
        self.copies[n.output, at] = made.output
