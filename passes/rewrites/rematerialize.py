"""Compute values again in the place of keeping them, until the plan of memory fits a budget (`PassContext.memory`).

    a = tanh(x)          # kept until its gradient           a = tanh(x)
    ...                                                 ->   ...
    d = f(g, a)                                              a2 = tanh(x); d = f(g, a2)

The peak is that of the memory planner, on the groups that the fuser makes. At the peak, each value that waits for a
later reader may be dropped: the nodes that make it are repeated in front of that reader, from values that are alive
there anyway. Values are taken by bytes saved for the time that computing them again costs, as in dynamic tensor
rematerialization (Kirisame et al., 2021), cheap element-wise work first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dnnc.ir.expr import value
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import Trait
from dnnc.ir.types import TensorType
from dnnc.passes.analysis.alias import root
from dnnc.passes.analysis.kinds import is_view
from dnnc.passes.base import PassContext, is_pure
from dnnc.passes.planning.memory_plan import plan_memory
from dnnc.passes.planning.program import plan_region

ROUNDS = 24  # plans of memory that are made at most
CHAIN = 24  # nodes that are repeated for one value at most
FLOPS_OF_A_BYTE = 16.0  # operations that take as long as it takes to move a byte through memory


@dataclass(frozen=True)
class _Candidate:
    """A value that may be dropped at the peak: its late readers, the nodes to repeat, and what that is worth."""

    value: Value
    readers: tuple[Node, ...]
    chain: tuple[Node, ...]
    saved: int  # bytes at the peak
    cost: float  # bytes, or the time of operations in bytes


def rematerialize(graph: Graph, ctx: PassContext) -> bool:
    """Repeat nodes until the peak is within the budget, or nothing more can be dropped."""
    if ctx.memory is None or graph.dims:
        if ctx.memory is not None and ctx.note is not None:
            ctx.note("memory: sizes are symbolic, so nothing is computed again")
        return False
    changed, first, peak = False, 0, 0
    for _ in range(ROUNDS):
        state = _State(graph, ctx)
        peak = state.peak
        first = first or peak
        if peak <= ctx.memory:
            break
        taken = state.drop(peak - ctx.memory)
        if not taken:
            break
        changed = True
    if ctx.note is not None:
        over = "" if peak <= ctx.memory else ", above the budget: what is left is needed at one time"
        ctx.note(f"memory: {first:,} bytes at the peak, {peak:,} with values computed again{over}")
    return changed


class _State:
    """A graph with the plan of its memory."""

    def __init__(self, graph: Graph, ctx: PassContext) -> None:
        self.graph = graph
        self.region = plan_region(graph, True, ctx.facts)
        plan = plan_memory(graph, self.region.fusion, self.region.inplace, self.region.nested, draft=True)
        self.aliases = plan.aliases
        self.peak = plan.lower_bound({})
        self.order = {n: k for k, n in enumerate(graph.nodes())}
        groups = self.region.fusion.groups
        self.step = {n: k for k, g in enumerate(groups) for n in g.nodes}
        self.stored = {self.root(v) for g in groups for v in g.outputs}
        self.kept = {self.root(v) for v in graph.outputs}
        self.reads: dict[Value, list[Node]] = {}
        for n in self.step:  # views are no steps
            for v in n.inputs:
                if v is not None:
                    self.reads.setdefault(self.root(v), []).append(n)

    def root(self, v: Value) -> Value:
        return root(self.aliases, v)[0]

    def last(self, v: Value) -> int:
        """The last step that reads what lies in a value's memory."""
        if v in self.kept:
            return len(self.region.fusion.groups)
        return max((self.step[n] for n in self.reads.get(v, ())), default=-1)

    def alive(self) -> tuple[int, list[Value]]:
        """The step at which most bytes are alive, and the values that wait there for a later step."""
        steps = len(self.region.fusion.groups)
        change = [0] * (steps + 2)
        spans = {}
        for v in self.stored:
            if v.node not in self.step:
                continue
            first, last = self.step[v.node], self.last(v)
            if last < first:
                continue
            spans[v] = (first, last)
            change[first] += _bytes(v.type)
            change[last + 1] -= _bytes(v.type)
        total, most, at = 0, -1, 0
        for k, d in enumerate(change):
            total += d
            if total > most:
                most, at = total, k
        return at, [v for v, (first, last) in spans.items() if first < at < last and v not in self.kept]

    def drop(self, excess: int) -> int:
        """Repeat nodes in the place of keeping values, best first, until `excess` bytes are saved; the bytes saved."""
        at, waiting = self.alive()
        found = [c for v in waiting if (c := self.candidate(v, at)) is not None]
        found.sort(key=lambda c: (-c.saved / c.cost, self.order[c.value.node] if c.value.node else 0))
        saved, gone, needed = 0, set[Value](), set[Value]()
        for c in found:
            sources = {self.root(v) for n in c.chain for v in n.inputs if v is not None}
            if c.value in needed or sources & gone:  # what others are repeated from stays
                continue
            self.repeat(c)
            gone.add(c.value)
            needed |= sources
            saved += c.saved
            if saved >= excess:
                break
        return saved

    def candidate(self, v: Value, at: int) -> _Candidate | None:
        late = [n for n in self.reads.get(v, ()) if self.step[n] > at]
        views = all(self.viewed(x, v) for n in late for x in n.inputs if x is not None and self.root(x) is v)
        if not late or not views or any(self.step[n] == at for n in self.reads[v]):
            return None
        first = min(self.step[n] for n in late)
        chain, extended = self.chain(v, first)
        saved = _bytes(v.type) - extended
        if not chain or saved <= 0:
            return None
        cost = sum(_cost(n) for n in chain)
        return _Candidate(v, tuple(late), tuple(chain), saved, max(cost, 1.0))

    def viewed(self, x: Value, v: Value) -> bool:
        """Is a value another, or a view of it?"""
        while x is not v:
            if x.node is None or not is_view(x.node) or x.node.inputs[0] is None:
                return False
            x = x.node.inputs[0]
        return True

    def chain(self, v: Value, step: int) -> tuple[list[Node], int]:
        """The nodes that make a value from what is alive at a step, in order; and the bytes that must live longer."""
        nodes: dict[Node, None] = {}
        extended: dict[Value, int] = {}
        stack = [v.node]
        while stack:
            n = stack.pop()
            if n is None or n in nodes:
                continue
            if len(nodes) >= CHAIN or not is_pure(n) or Trait.CONTROL in n.op.traits or n.op.host is not None:
                return [], 0
            nodes[n] = None
            for x in n.inputs:
                if x is None or x.node is None:
                    continue
                r = self.root(x)
                if r in self.stored and r is not v:
                    if self.last(r) < step:
                        extended[r] = _bytes(r.type)
                    continue
                stack.append(x.node)
        return sorted(nodes, key=self.order.__getitem__), sum(extended.values())

    def repeat(self, c: _Candidate) -> None:
        """Put copies of the nodes in front of the first late reader, and let late readers read these."""
        anchor = min(c.readers, key=self.order.__getitem__)
        env: dict[Value, Value] = {}
        for n in c.chain:
            inputs = [None if v is None else env.get(v, v) for v in n.inputs]
            types = [o.type for o in n.outputs]
            copy = self.graph.insert_before(Node(n.op, inputs, n.attrs, types, n.locs), anchor)
            env.update(zip(n.outputs, copy.outputs))

        def again(x: Value) -> Value:
            if x not in env:
                n = x.node
                assert n is not None and n.inputs[0] is not None  # a view
                copy = Node(n.op, [again(n.inputs[0])], n.attrs, [x.type], n.locs)
                env[x] = self.graph.insert_before(copy, anchor).output
            return env[x]

        for n in c.readers:
            for k, x in enumerate(n.inputs):
                if x is not None and self.root(x) is c.value:
                    n.set_input(k, again(x))


def _bytes(t: TensorType) -> int:
    return int(value(t.size) or 0) * t.dtype.bytes


def _cost(n: Node) -> float:
    """What a node takes: bytes that it moves, or its operations."""
    moved = sum(_bytes(v.type) for v in (*n.inputs, *n.outputs) if v is not None)
    flops = 0.0
    if n.op.flops is not None:
        types: Sequence[TensorType | None] = [None if v is None else v.type for v in n.inputs]
        flops = float(value(n.op.flops(*types, **n.attrs)) or 0)
    return max(moved, flops / FLOPS_OF_A_BYTE)
