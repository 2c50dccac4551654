"""The order in which groups run: that of the nodes, with what frees memory ahead of the rest.

    dx = dy @ w'; dw = x' @ dy; ...; w2 = w - r * dw    ->    dw and w2 run at once, and x, dy and dw are gone

Traces compute updates last, and a sum or product that fuses with an update stands there with it, while its operands
wait. So after each group those run that are ready and give back more bytes than they take, alone or with what reads
their result next (a transposed copy, the product, the update). Single numbers, such as rates of updates, are computed
as soon as they can be.

    dw = x' @ dy; pack(w); dx = dy @ pack; w2 = w - r * dw    ->    dw runs behind dx, next to the update, which
                                                                    overwrites w and so waits for the packing

The same rule backward in time: ahead of each group those run, all of whose readers are behind, that take more bytes
than they give back. Each order is taken if fewer bytes are alive at the worst step, or as many there and fewer over all
steps together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import TYPE_CHECKING

from dnnc.ir.arena import ALIGN
from dnnc.ir.autodiff.residuals import nominal_bytes
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import Trait
from dnnc.passes.analysis.alias import Alias, root
from dnnc.passes.lower.nests import group_inputs

if TYPE_CHECKING:
    from dnnc.passes.planning.fuse import Group

SLACK = 1 << 12  # bytes of two peaks that are as good as equal
AHEAD = 4  # groups, each the one reader of the one before, that are weighed together
FIXED = ("host", "control")  # kinds of groups that stay where they are


def in_order(
    graph: Graph, groups: Sequence[Group], nodes: Mapping[Node, int], aliases: Mapping[Value, Alias]
) -> list[Group]:
    """Groups in the order in which they run. `nodes`: the place of each node."""
    o = _Order(graph, groups, nodes, aliases)
    plain = o.by_place()
    assert len(plain) == len(groups), "groups read each other's results"
    early = o.freeing(plain)
    order = early if o.saves(early, plain) else plain
    late = o.freeing(order[::-1], backward=True)[::-1]
    return [groups[k] for k in (late if o.saves(late, order) else order)]


class _Order:
    """Groups by number, with what they read of each other, and the memory that they use.

    A value is known by the one in whose memory it lies, or where groups write that part by part (a concatenation), by
    the part. `made` and `read`: of each group those that live in the arena.
    """

    def __init__(
        self, graph: Graph, groups: Sequence[Group], nodes: Mapping[Node, int], aliases: Mapping[Value, Alias]
    ) -> None:
        self.graph, self.groups, self.nodes = graph, groups, nodes
        owner = cache(lambda v: root(aliases, v)[0])
        self.bytes = cache(lambda v: nominal_bytes(v.type))
        maker = {v: k for k, g in enumerate(groups) for v in g.outputs}
        inputs = [group_inputs(g.nodes) for g in groups]
        self.ahead = [_makers(vs, maker) - {k} for k, vs in enumerate(inputs)]
        self.behind: list[list[int]] = [[] for _ in groups]
        for k, found in enumerate(self.ahead):
            for j in found:
                self.behind[j].append(k)
        results = {owner(v) for v in graph.outputs}
        parts: dict[Value, list[Value]] = {}  # of what groups write part by part, the parts
        for v in maker:
            if owner(v) is v or owner(v) not in maker:
                parts.setdefault(owner(v), []).append(v)
        held = {v for r, vs in parts.items() for v in vs if r not in results}
        made = [list(dict.fromkeys(map(owner, g.outputs))) for g in groups]
        self.made = [_held((owner(v) if owner(v) in maker else v for v in g.outputs), held) for g in groups]
        self.read = [_held((x for v in vs for x in parts.get(owner(v), ())), held) for vs in inputs]
        self.readers: dict[Value, set[int]] = {v: set() for v in held}
        for k, vs in enumerate(self.read):
            for v in vs:
                self.readers[v].add(k)
        self.makers: dict[Value, set[int]] = {v: set() for v in held}
        for k, vs in enumerate(self.made):
            for v in vs:
                self.makers[v].add(k)
        given: dict[Value, list[int]] = {v: [] for v in graph.inputs}
        for k, vs in enumerate(inputs):
            for x in {owner(v) for v in vs} & given.keys():
                given[x].append(k)
        writers: dict[Value, set[int]] = {}
        for k, vs in enumerate(made):
            for y in vs:
                writers.setdefault(y, set()).add(k)
        pairs = [(graph.inputs[j], owner(graph.outputs[k])) for k, j in graph.donated.items()]
        self.donors = [(given[x], writers.get(y, set())) for x, y in pairs]  # groups that read, and that write there

    def by_place(self) -> list[int]:
        """Each behind those that it reads, otherwise by their last nodes.

        A group that holds a late node (a norm with the statistics that its gradient reads) comes before its first
        reader. What only moves elements of inputs (weights that are packed in each call) comes right before its first
        reader, so that its memory is in use for that long only.
        """
        place = [float(self.nodes[g.nodes[-1]]) for g in self.groups]
        for k in _in_places(self.behind, self.ahead, place)[::-1]:
            needed = min((place[j] for j in self.behind[k]), default=place[k]) - 0.5
            moves = not self.ahead[k] and all(Trait.MOVEMENT in n.op.traits for n in self.groups[k].nodes)
            place[k] = needed if moves and self.behind[k] else min(place[k], needed)
        return _in_places(self.behind, self.ahead, place)

    def freeing(self, plain: Sequence[int], backward: bool = False) -> list[int]:
        """The groups in this order, but those first that free memory. Donated memory is written after it is read.

        `backward`: `plain` and the result run back in time, in which values begin with their last reader.
        """
        place = {k: i for i, k in enumerate(plain)}
        ahead, behind = [set(a) for a in self.ahead], [set(b) for b in self.behind]
        when = {k: -i if backward else i for k, i in place.items()}
        for read, written in self.donors:
            if read and written and max(when[k] for k in read) <= min(when[k] for k in written):
                for k in written:
                    ahead[k].update(set(read) - {k})
                for k in read:
                    behind[k].update(written - {k})
        if backward:
            ahead, behind, begins, ends, enders = behind, ahead, self.read, self.made, self.makers
        else:
            begins, ends, enders = self.made, self.read, self.readers
        waits = [len(a) for a in ahead]
        done: set[int] = set()
        left = {v: set(ks) for v, ks in enders.items()}
        begun: set[Value] = set()
        out: list[int] = []
        ready = [(place[k], k) for k, n in enumerate(waits) if n == 0]
        heapify(ready)

        def run(k: int) -> list[int]:
            """Those that may pay off now."""
            done.add(k)
            out.append(k)
            begun.update(begins[k])
            for v in ends[k]:
                left[v].discard(k)
            for j in behind[k]:
                waits[j] -= 1
                if waits[j] == 0:
                    heappush(ready, (place[j], j))
            touched = behind[k].union(*(left[v] for v in (*ends[k], *begins[k])))
            return sorted((j for j in touched if j not in done and waits[j] == 0), key=lambda j: place[j])

        def pays(k: int) -> bool:
            """Does a group free more bytes than it takes, alone or with those that each read the one before?"""
            these: set[int] = set()
            change = 0
            while len(these) < AHEAD and self.groups[k].kind not in FIXED:
                these.add(k)
                change += sum(self.bytes(v) for v in begins[k] if v not in begun)
                change -= sum(self.bytes(v) for v in ends[k] if these.issuperset(left[v]))
                if change < 0:
                    return True
                following = [j for j in behind[k] if j not in done and all(i in done or i in these for i in ahead[j])]
                if len(following) != 1:
                    return False
                (k,) = following
            return False

        todo = [k for k in plain if waits[k] == 0]
        while ready:
            while todo:
                j = todo.pop(0)
                if j not in done and ((self.small(j) and not backward) or pays(j)):
                    todo += run(j)
            _, k = heappop(ready)
            todo = [] if k in done else run(k)
        return out

    def small(self, k: int) -> bool:
        """Does a group make numbers only, such as the rate of an update, for which others may wait?"""
        g = self.groups[k]
        return g.kind not in FIXED and all(self.bytes(v) <= ALIGN for v in g.outputs)

    def saves(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """Does an order need less memory than another at the worst step, or else less over all steps?"""
        alive, others = self.alive(a), self.alive(b)
        more = max(alive) - max(others)
        return more < -SLACK or (more <= SLACK and sum(alive) < sum(others))

    def alive(self, order: Sequence[int]) -> list[int]:
        """Bytes of the arena that are alive at each step."""
        at = {k: i for i, k in enumerate(order)}
        change = [0] * (len(order) + 1)
        first: dict[Value, int] = {}
        for i, k in enumerate(order):
            for v in self.made[k]:
                first.setdefault(v, i)
        for v, start in first.items():
            change[start] += self.bytes(v)
            change[max((at[k] for k in self.readers[v]), default=start) + 1] -= self.bytes(v)
        return list(accumulate(change))


def _in_places(
    behind: Sequence[Collection[int]], ahead: Sequence[Collection[int]], place: Sequence[float]
) -> list[int]:
    """Items behind those that they wait for, otherwise by their places."""
    waits = list(map(len, ahead))
    ready = [(place[k], k) for k, n in enumerate(waits) if n == 0]
    heapify(ready)
    out: list[int] = []
    while ready:
        _, k = heappop(ready)
        out.append(k)
        for j in behind[k]:
            waits[j] -= 1
            if waits[j] == 0:
                heappush(ready, (place[j], j))
    return out


def _held(values: Iterable[Value], held: Collection[Value]) -> list[Value]:
    return [v for v in dict.fromkeys(values) if v in held]


def _makers(values: Iterable[Value], maker: Mapping[Value, int]) -> set[int]:
    """The groups that make values, or what these are of by nodes that are no kernels."""
    found: set[int] = set()
    left, seen = list(values), set[Value]()
    while left:
        v = left.pop()
        if v in maker:
            found.add(maker[v])
        elif v.node is not None and v not in seen:
            left += [x for x in v.node.inputs if x is not None]
        seen.add(v)
    return found
