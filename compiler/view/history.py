"""What passes changed, told node by node: from which nodes of the imported graph each later one comes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dnnc.ir.errors import Loc
from dnnc.ir.graph import Graph, Node
from dnnc.passes.base import graphs

FEW = 12  # nodes from one place that a new node may come from; more of them (a line of source) tell nothing
Origins = frozenset[int]


@dataclass(frozen=True)
class Change:
    """Nodes that a pass replaced (`before`) by others (`after`), as text; `origins`: numbers of imported nodes.

    `number` counts the passes.
    """

    number: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    origins: Origins


class History:
    """Notes each pass of a compilation; it is a `dump` of PassContext.

    Imported nodes are numbered from `first` on, those of nested graphs before the node that has the graph.

    Attributes:
        changes: in the order in which they were made.
        origins: of the nodes of the graph as it is now.
        imported: the nodes before the first pass, as text.
    """

    def __init__(self, first: int = 0) -> None:
        self.first, self.passes = first, 0
        self.changes: list[Change] = []
        self.origins: dict[Node, Origins] = {}
        self._texts: dict[Node, str] = {}
        self._seen: dict[Node, Any] = {}  # in order
        self._at: dict[Loc, set[int]] = defaultdict(set)

    def __call__(self, title: str, graph: Graph) -> None:
        nodes = every_node(graph)
        if not self._seen and title.startswith("before "):
            self._begin(nodes)
            return
        self._after(nodes)
        self.passes += 1

    def _begin(self, nodes: Sequence[Node]) -> None:
        for k, n in enumerate(nodes, self.first):
            self.origins[n] = frozenset((k,))
            for loc in n.locs:
                self._at[loc].add(k)
            self._note(n)

    def _note(self, n: Node) -> None:
        self._seen[n], self._texts[n] = form(n), repr(n)

    def _after(self, nodes: Sequence[Node]) -> None:
        live = set(nodes)
        removed = [n for n in self._seen if n not in live]
        added = [n for n in nodes if n not in self._seen]
        other = [n for n in nodes if n in self._seen and form(n) != self._seen[n] and repr(n) != self._texts[n]]
        if not (removed or added or other):
            return
        self._find_origins(removed, added, nodes)
        before = [(self.origins[n], self._texts[n]) for n in (*removed, *other)]
        for n in (*added, *other):
            self._note(n)
        after = [(self.origins[n], self._texts[n]) for n in (*added, *other)]
        self._record(before, after)
        for n in removed:
            del self._seen[n], self._texts[n], self.origins[n]
        self._seen = {n: self._seen[n] for n in nodes}

    def _find_origins(self, removed: Sequence[Node], added: Sequence[Node], nodes: Sequence[Node]) -> None:
        """A new node comes from what made the value of its name, from removed nodes of its place, or its neighbours."""
        makers = {name: n for n in removed for name, _ in self._seen[n][-1]}  # as they were: passes hand values on
        places: dict[Loc, list[Node]] = defaultdict(list)
        for n in removed:
            for loc in n.locs:
                places[loc].append(n)
        old = {n: k for k, n in enumerate(self._seen)}
        span = _between(nodes, old)
        for n in added:
            named = [makers[v.name] for v in n.outputs if v.name in makers]
            near = list(dict.fromkeys(m for loc in n.locs for m in places[loc]))
            low, high = span[n]
            around = [m for m in (near or removed) if low < old[m] < high]
            here = around if len(around) <= FEW and (near or not n.locs) else near if len(near) <= FEW else []
            found = _union(self.origins[m] for m in (*named, *here))
            self.origins[n] = found or self._by_place(n)
        for n in reversed(added):  # a copy ahead of a node belongs to it, as what follows one does
            if not self.origins[n]:
                users = [u for v in n.outputs for u, _ in v.uses]
                self.origins[n] = _union(self.origins.get(u, frozenset()) for u in users[:FEW])
        for n in added:
            if not self.origins[n]:
                made = [v.node for v in n.inputs if v is not None and v.node is not None]
                self.origins[n] = _union(self.origins.get(m, frozenset()) for m in made)

    def _by_place(self, n: Node) -> Origins:
        found = _union(self._at.get(loc, ()) for loc in n.locs)
        return found if len(found) <= FEW else frozenset()

    def _record(self, before: Sequence[tuple[Origins, str]], after: Sequence[tuple[Origins, str]]) -> None:
        """One change for each set of nodes that share origins."""
        leader: dict[int, int] = {}

        def find(k: int) -> int:
            while leader.setdefault(k, k) != k:
                leader[k] = k = leader[leader[k]]
            return k

        for origins, _ in (*before, *after):
            first, *rest = [find(k) for k in origins] or [-1]
            for k in rest:
                leader[k] = first
        sides: dict[int, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for side, nodes in enumerate((before, after)):
            for origins, text in nodes:
                sides[find(next(iter(origins), -1))][side].append(text)
        members: dict[int, set[int]] = defaultdict(set)
        for origins, _ in (*before, *after):
            members[find(next(iter(origins), -1))].update(origins)
        self.changes += [
            Change(self.passes, tuple(old), tuple(new), frozenset(members[k])) for k, (old, new) in sides.items()
        ]


def every_node(graph: Graph) -> list[Node]:
    """The nodes of a graph and of those nested in it, inner ones first."""
    return [n for g in graphs(graph) for n in g.nodes()]


def form(n: Node) -> Any:
    """What the text of a node depends on, in little time."""
    made = [(v.name, v.type) for v in n.outputs]
    return n.op, id(n.attrs), [None if v is None else v.name for v in n.inputs], made


def _between(nodes: Sequence[Node], old: Mapping[Node, int]) -> dict[Node, tuple[int, int]]:
    """For each new node, the old places of the nodes before and behind it that stayed."""
    low: dict[Node, int] = {}
    at = -1
    for n in nodes:
        at = old.get(n, at)
        low[n] = at
    span: dict[Node, tuple[int, int]] = {}
    at = len(old)
    for n in reversed(nodes):
        at = old.get(n, at)
        span[n] = low[n], at
    return span


def _union(sets: Iterable[Iterable[int]]) -> Origins:
    return frozenset(k for s in sets for k in s)
