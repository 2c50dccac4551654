"""Horizontal fusion: groups that compute elements of one shape, or reduce the same rows, become one group with several
outputs where that saves memory traffic.

    add(mul(m, 0.9), mul(g, 0.1)) -> m2                          add + mul + mul + sub -> m2, p2
    sub(p, mul(m2, rate)) -> p2, which reads m2       ->         m2 is stored, and used on

    layer_norm(x, s) -> y, reduce_mean(x) -> m        ->         layer_norm + reduce_mean -> y, m

In come groups with one output each, out come groups of nodes. Two groups are joined if

- what one makes is read by the other, or both read an operand, at the same elements: that is read once then;
- their results are computed in one pass: element-wise, over the rows of one kind, or by windows at the same places;
- no other kernel has to run between them;
- the second one does not run far ahead of its place: what is computed again for a gradient would be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.attributes import attrs_key
from dnnc.ir.op import Cost, Trait
from dnnc.passes.analysis.kinds import is_pointwise, kind_of
from dnnc.passes.analysis.outputs import main_output
from dnnc.passes.analysis.rows import Rows, rows_of
from dnnc.passes.planning.group_order import GroupOrder

MAX_NODES = 24  # of a group: longer chains gain nothing and make kernels that nobody can read
FAR = 4  # contractions from a reader of one group to another group: it would run far ahead of its place there
Several = Callable[[Node], bool]  # `stores_several` of TargetFacts
FEW = 1 << 16  # bytes of updates that take less time than the start of a kernel
FEW_ELEMENTS = 256  # that are computed again in less time than a kernel starts
MOST_OUTPUTS = 6  # of a kernel: each is an address that a thread holds; twice as many with the numbers of rows


@dataclass(frozen=True)
class Part:
    """Nodes of a group, in order of the graph, and its kind."""

    nodes: tuple[Node, ...]
    kind: str


class Joiner:
    """Joins groups of one graph.

    Attributes:
        parts: all groups by number, those of nodes that make no kernel as well.
    """

    def __init__(
        self,
        graph: Graph,
        parts: Mapping[int, Part],
        numbers: Mapping[Value, Rows],
        no_kernel: Callable[[Node], bool],
        cut: Collection[Node],
        serial_rows: bool = False,
        stores_several: Several | None = None,
    ) -> None:
        """`numbers`: of rows; `no_kernel`: does a node need none; `cut`: nodes whose groups are not joined;
        `serial_rows`, `stores_several`: see TargetFacts.
        """
        self.graph, self.parts, self.numbers, self.no_kernel, self.cut = graph, dict(parts), numbers, no_kernel, cut
        self.before, self.serial_rows, self.stores_several = dict(parts), serial_rows, stores_several
        self.order = {n: k for k, n in enumerate(graph.nodes())}
        self.contractions = list(accumulate(int(kind_of(n) == "contraction") for n in self.order))  # up to each node
        self.needed: dict[Node, int] = {}  # of these, the number of the last one of which a node is computed
        for n, k in zip(self.order, self.contractions):
            made = (self.needed[v.node] for v in n.inputs if v is not None and v.node is not None)
            self.needed[n] = k if kind_of(n) == "contraction" else max(made, default=0)
        self.results = set(graph.outputs)
        self.donors = {self.source(graph.outputs[k]): graph.inputs[j] for k, j in graph.donated.items()}
        self.of = {n: g for g, p in parts.items() for n in p.nodes}
        self.of_before = dict(self.of)
        self.tried: dict[tuple[tuple[Node, ...], ...], Part | None] = {}  # nodes as one pass, by those of both groups
        self.ranks = GroupOrder(sorted(self.parts, key=self.place), self.fed)

    def source(self, v: Value) -> Value:
        """The value that a view shows, or the value itself."""
        while v.node is not None and self.is_view(v.node) and v.node.inputs[0] is not None:
            v = v.node.inputs[0]
        return v

    def run(self) -> dict[int, Part]:
        changed = True
        while changed:
            changed = False
            for b in sorted(self.parts, key=self.place, reverse=True):
                while b in self.parts and self.joins(b):
                    changed = True
        for g in list(self.parts) if self.serial_rows else ():
            self.take_out(g)
        for g in list(self.parts):
            self.narrow(g)
        return self.parts

    def narrow(self, g: int) -> None:
        """Round what others read rounded alone, such as a norm's result that a residual takes in 16 bits, where it is
        made: fewer bytes are stored and read.
        """
        nodes = self.parts[g].nodes
        if not self.open(g):
            return
        for v in self.outputs(nodes):
            casts = [u for u, _ in v.uses if u not in nodes]
            if v in self.results or not casts or not all(self.rounds(u, v) for u in casts):
                continue
            more = tuple(sorted({*nodes, *casts}, key=self.order.__getitem__))
            outputs = self.outputs(more)
            if len(outputs) > MOST_OUTPUTS or main_output(more, outputs) is None:
                continue
            for u in casts:
                k = self.of[u]
                self.parts[k] = Part(tuple(n for n in self.parts[k].nodes if n is not u), self.parts[k].kind)
                self.of[u] = g
            nodes = more
            self.parts[g] = Part(nodes, self.parts[g].kind)

    def rounds(self, u: Node, v: Value) -> bool:
        """Does a node of a group of several store v in fewer bits, both in one layout?"""
        to, group = u.outputs[0], self.parts[self.of[u]].nodes
        floats = v.type.dtype.is_float and to.type.dtype.is_float and to.type.dtype.bits < v.type.dtype.bits
        return floats and Trait.CONVERSION in u.op.traits and _same(v, to) and len(group) > 1 and u is not group[-1]

    def take_out(self, g: int) -> None:
        """Make elements that are stored, and that rows are reduced of, in a kernel of their own again: one pass over
        memory is faster than to compute them for each pass over a row.
        """
        nodes = self.parts[g].nodes
        rows = next((r for r in map(rows_of, nodes) if r is not None), None)
        if rows is None or self.is_small(rows):
            return
        part_of = {n: self.of_before[n] for n in nodes}
        for k in {part_of[n] for n in nodes if n.outputs[0] in self.outputs(nodes) and rows.of_elements(n.outputs[0])}:
            part = self.before[k]
            others = {v for n in nodes if part_of[n] != k for v in n.outputs}
            reads_others = not others.isdisjoint(v for n in part.nodes for v in n.inputs if v is not None)
            if part.kind == "map" and not reads_others and self.feeds_reduction(part.nodes[-1], nodes):
                remaining = tuple(n for n in self.parts[g].nodes if part_of[n] != k)
                other = g if g != k else part_of[remaining[-1]]  # the group may have the number of what leaves it
                self.parts[other], self.parts[k] = Part(remaining, "reduction"), part
                self.of.update((n, other) for n in remaining)
                self.of.update((n, k) for n in part.nodes)
                g = other

    def is_small(self, rows: Rows) -> bool:
        """Are elements computed again in less time than a kernel starts?"""
        sizes = [d for d in rows.shape if isinstance(d, int)]
        return len(sizes) == len(rows.shape) and prod(sizes) <= FEW_ELEMENTS

    def feeds_reduction(self, n: Node, nodes: Collection[Node]) -> bool:
        """Does one of the nodes reduce a row of what n makes?"""
        readers = [u for u, _ in n.outputs[0].uses if u in nodes]
        return any(rows_of(u) is not None or self.feeds_reduction(u, nodes) for u in readers)

    def joins(self, b: int) -> bool:
        """Join a group with the first of its neighbours that it may be joined with, if there is one."""
        if not self.open(b):
            return False
        for a in self.neighbours(b):
            part = self.joined(a, b)
            if part is not None:
                groups = {self.of[n] for n in part.nodes} | {b}
                for g in groups - {b}:
                    del self.parts[g]
                self.parts[b] = part
                self.of.update((n, b) for n in part.nodes)
                self.ranks.merge(groups, b)
                return True
        return False

    def open(self, g: int) -> bool:
        """May a group be joined with others?"""
        nodes = self.parts[g].nodes
        return (
            all(self.joinable(n) and Trait.SEQUENTIAL not in n.op.traits for n in nodes)
            and all(len(n.outputs) == 1 and n not in self.cut for n in nodes)
            and not all(map(self.no_kernel, nodes))
        )

    def joinable(self, n: Node) -> bool:
        product = kind_of(n) == "contraction" and self.stores_several is not None and self.stores_several(n)
        return product or kind_of(n) in ("map", "reduction") or (kind_of(n) == "scatter" and not self.serial_rows)

    def neighbours(self, b: int) -> Iterator[int]:
        """Groups ahead of b whose results it reads, through views too, and those that read what it reads."""
        seen = {b}
        for v in self.reads(b):
            n = self.source(v).node
            others = [] if n is None else [self.of[n]]
            last = self.order[self.parts[b].nodes[-1]]
            shared = () if v.type.size == 1 or self.graph.variance(v).call_invariant else v.uses
            readers = [g for u, _ in shared if self.order[u] < last and (g := self.of[u]) != b]
            for g in (*others, *readers[::-1][:2]):  # of those that share an operand the nearest
                if g not in seen and self.open(g):
                    seen.add(g)
                    yield g

    def is_view(self, n: Node) -> bool:
        """Does a node show memory of its operand?"""
        return self.no_kernel(n) and len(n.inputs) == 1

    def is_alone(self, n: Node) -> bool:
        """Is a node a view that is in no group?"""
        return self.is_view(n) and len(self.parts[self.of[n]].nodes) == 1

    def reads(self, g: int) -> list[Value]:
        """What a group reads, in order of first use."""
        nodes = self.parts[g].nodes
        inside = {v for n in nodes for v in n.outputs}
        return list(dict.fromkeys(v for n in nodes for v in n.inputs if v is not None and v not in inside))

    def joined(self, a: int, b: int) -> Part | None:
        """The two groups as one, with the views between them; None where they stay apart."""
        first, second = self.parts[a].nodes, self.parts[b].nodes
        views = self.views_between(set(first), b)
        tried = first, tuple(views), second
        if tried not in self.tried:
            kinds = self.parts[a].kind, self.parts[b].kind
            kind = next((k for k in ("contraction", "reduction", "scatter") if k in kinds), "map")
            self.tried[tried] = self.together(*tried, kind)
        part = self.tried[tried]
        return None if part is None or self.ranks.runs_between({self.of[n] for n in part.nodes}) else part

    def together(
        self, first: tuple[Node, ...], views: tuple[Node, ...], second: tuple[Node, ...], kind: str
    ) -> Part | None:
        """The nodes of two groups as one, whatever runs between them; None if that is not one pass."""
        nodes = tuple(sorted({*first, *views, *second}, key=self.order.__getitem__))
        outputs = self.outputs(nodes)
        stored = [v for v in outputs if v not in self.numbers]  # a number of a row is stored outside of the loops
        if any(Trait.RELAYOUT in n.op.traits for n in nodes):
            return None  # blocks and rows are transposed by squares of vectors, which one array is stored in
        if computing(nodes) > MAX_NODES or len(stored) > MOST_OUTPUTS or len(outputs) > 2 * MOST_OUTPUTS:
            return None
        if main_output(nodes, outputs) is None or not self.in_one_pass(nodes, outputs, {*first}, {*second}):
            return None
        return None if self.is_far(first, second) else Part(nodes, kind)

    def is_far(self, first: Sequence[Node], second: Sequence[Node]) -> bool:
        """Would contractions whose results the second nodes read run far ahead of their place, where a reader of the
        first nodes stands?
        """
        inside = {*first, *second}
        readers = [self.order[u] for n in first for v in n.outputs for u in self.readers(v) if u not in inside]
        makers = {v.node for n in second for v in n.inputs if v is not None} - inside
        late = max((self.needed[n] for n in makers if n is not None), default=0)
        return bool(readers) and late - self.contractions[min(readers)] >= FAR

    def readers(self, v: Value) -> Iterator[Node]:
        """The nodes that read a value or a view of it."""
        for u, _ in v.uses:
            yield from self.readers(u.outputs[0]) if self.is_view(u) else (u,)

    def views_between(self, first: Collection[Node], b: int) -> list[Node]:
        """Views of what one group makes that another one reads."""
        found: list[Node] = []
        for v in self.reads(b):
            chain: list[Node] = []
            n = v.node
            while n is not None and n not in first and self.is_alone(n):
                chain.append(n)
                n = None if n.inputs[0] is None else n.inputs[0].node
            found += chain if n in first else []
        return found

    def outputs(self, nodes: Sequence[Node]) -> list[Value]:
        """What is read outside of a group, or is a result of the graph, but for views, which are no memory of their
        own.
        """
        inside = set(nodes)
        return [v for n in nodes for v in n.outputs if self.is_read(v, inside) and not self.is_view(n)]

    def is_read(self, v: Value, inside: Collection[Node]) -> bool:
        """Is a value, or a view of it, a result or read by other nodes than these?"""
        return v in self.results or any(
            u not in inside or (self.is_view(u) and self.is_read(u.outputs[0], inside)) for u, _ in v.uses
        )

    def place(self, g: int) -> int:
        """The place of a group's last node."""
        return self.order[self.parts[g].nodes[-1]]

    def fed(self, g: int) -> set[int]:
        """The groups that read what a group makes."""
        return {self.of[u] for n in self.parts[g].nodes for v in n.outputs for u, _ in v.uses} - {g}

    # --- one pass -----------------------------------------------------------------------------------------------------

    def in_one_pass(
        self, nodes: Sequence[Node], outputs: Sequence[Value], first: Collection[Node], second: Collection[Node]
    ) -> bool:
        """Are the results computed in one pass over memory, in which something is read once and not twice?"""
        anchors = [n for n in nodes if kind_of(n) != "map"]
        if any(kind_of(n) == "scatter" for n in anchors):
            return self.update_together(anchors, outputs)
        if any(kind_of(n) == "contraction" for n in anchors):
            return len(anchors) == 1 and self.goes_on(nodes, outputs, first, second)
        kinds = {rows_of(n) for n in anchors}
        if len(kinds) > 1 or None in kinds:
            return _same_windows(nodes)
        rows = next(iter(kinds), None)
        if rows is not None and not rows.worth():
            return False
        if rows is not None and self.reduces_donated(nodes, outputs, rows):
            return False  # several passes would read what the last one overwrites
        along = self.along(nodes, outputs, rows)
        if not all(n in along for n in anchors) or not all(v.node in along for v in outputs):
            return False
        crossing = [n for n in first if any(u in nodes and u not in first for u, _ in n.outputs[0].uses)]
        if crossing and all(any(n.op.index is not None for n in part) for part in (first, second)):
            return False  # an index is written several times into an expression, which would grow exponentially
        if crossing:
            again = rows is not None and any(rows_of(u) is not None for u in second)
            return all(n in along for n in crossing) and not (again and any(_takes_long(n, rows) for n in first))
        mine, theirs = (self.along_operands([n for n in along if n in part], rows) for part in (first, second))
        return bool(mine & theirs)

    def update_together(self, anchors: Sequence[Node], outputs: Sequence[Value]) -> bool:
        """Do two scatters put a few updates into donated arrays at the same places? To start a kernel takes longer."""
        made = [n.outputs[0] for n in anchors]
        if len(made) != 2 or set(made) != set(outputs) or not all(v in self.donors for v in made):
            return False
        a, b = anchors
        small = isinstance(size := a.inputs[-1].type.nbytes if a.inputs[-1] is not None else None, int) and size <= FEW
        types = [[None if v is None else v.type for v in n.inputs] for n in anchors]
        alike = a.op is b.op and attrs_key(a) == attrs_key(b) and a.inputs[1] is b.inputs[1] and types[0] == types[1]
        return small and alike and made[0] not in b.inputs and made[1] not in a.inputs

    def reduces_donated(self, nodes: Sequence[Node], outputs: Sequence[Value], rows: Rows) -> bool:
        """Are rows reduced of a donated input, of which the elements that the pass stores take the memory?"""
        donors = {self.donors[v] for v in outputs if v in self.donors and rows.of_elements(v)}
        behind: set[Node] = set()
        for n in reversed(nodes):
            if rows_of(n) is not None or any(u in behind for u, _ in n.outputs[0].uses):
                behind.add(n)
        return not donors.isdisjoint(self.source(v) for n in behind for v in n.inputs if v is not None)

    def goes_on(
        self, nodes: Sequence[Node], outputs: Sequence[Value], first: Collection[Node], second: Collection[Node]
    ) -> bool:
        """Does the second group compute elements of what the first one, a contraction's, makes of the same places?"""
        along, made = self.along(nodes, outputs, None), {v for n in first for v in n.outputs}
        crossing = {n for n in first if any(u in second for u, _ in n.outputs[0].uses)}
        for n in (n for n in nodes if n in second):
            if not made.isdisjoint(n.inputs) or n.outputs[0] in outputs:
                if n not in along:
                    return False
                made.update(n.outputs)
        return bool(crossing) and crossing <= along

    def along(self, nodes: Sequence[Node], outputs: Sequence[Value], rows: Rows | None) -> set[Node]:
        """The nodes each of whose elements is computed once in the pass, or once for each row: all that reads them in
        the group reads the element of its own place, or the number of its own row.
        """
        inside, out = set(nodes), set[Node]()
        for n in reversed(nodes):
            v = n.outputs[0]
            readers = [(u, k) for u, k in v.uses if u in inside]
            fits = rows is None or rows.of_elements(v) or self.numbers.get(v) == rows or rows_of(n) == rows
            if not fits or (not readers and v not in outputs):
                continue
            if all(u in out and self.reads_own(v, u, k, rows) for u, k in readers):
                out.add(n)
        return out

    def reads_own(self, v: Value, u: Node, k: int, rows: Rows | None) -> bool:
        """Does operand k of u, in its place, read the element of v of its own place, or the number of its own row?"""
        result = u.outputs[0]
        if rows is None:
            return _same(v, result) and (is_pointwise(u) or (u.op.index is not None and u.op.index.operand == k))
        if rows_of(u) == rows:
            return k == 0 and rows.of_elements(v)
        if self.numbers.get(result) == rows:
            return self.numbers.get(v) == rows
        return is_pointwise(u) and rows.of_elements(result) and (rows.of_elements(v) or rows.reads_own(v))

    def along_operands(self, along: Sequence[Node], rows: Rows | None) -> set[Value]:
        """Operands from outside that nodes of a pass read in it, as large as what is passed over."""
        inside = set(along)
        return {
            v
            for u in along
            for k, v in enumerate(u.inputs)
            if v is not None and v.node not in inside and v.type.size != 1 and self.reads_own(v, u, k, rows)
        }


def computing(nodes: Sequence[Node]) -> int:
    """Count nodes, in order of the graph, but for conversions, of which quantized values need two or three for each
    step. Nodes of one element that compute the same (`scalars` gives each reader its own) count once.
    """
    count, same = 0, dict[Value, Value]()  # a number -> the first one that is computed alike
    first: dict[object, Value] = {}
    for n in nodes:
        v = n.outputs[0]
        if v.type.size == 1:
            inputs = tuple(None if x is None else same.get(x, x) for x in n.inputs)
            same[v] = first.setdefault((n.op.name, attrs_key(n), inputs), v)
        count += Trait.CONVERSION not in n.op.traits and same.get(v, v) is v
    return count


def _same(v: Value, w: Value) -> bool:
    return v.type.layout == w.type.layout and tuple(v.type.shape) == tuple(w.type.shape)


def _takes_long(n: Node, rows: Rows | None) -> bool:
    """Does an element take longer than to read it from memory, where each pass over a row computes it again?"""
    if rows is None or not rows.of_elements(n.outputs[0]) or rows_of(n) is not None:
        return False  # a number of a row is computed once
    return n.op.cost >= Cost.LIGHT or (Trait.MOVEMENT in n.op.traits and n.op.index is None)


def _same_windows(nodes: Sequence[Node]) -> bool:
    """Do two nodes slide the same windows over one operand?"""
    if len(nodes) != 2:
        return False
    a, b = nodes
    windows = all(Trait.WINDOW in n.op.traits for n in nodes)
    return windows and a.inputs == b.inputs and a.attrs == b.attrs and _same(a.outputs[0], b.outputs[0])
