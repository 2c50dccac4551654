"""Group nodes into kernels. The result is a FusionPlan: data that prints, that lowering obeys, and that tuning may vary.

A group is a connected set of nodes with one output, around at most one *anchor* (a contraction, a reduction, a row op). A node joins the
group of its producer when it is that value's only reader and one of the rules below allows it; each rule has its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dnnc.ir.expr import unwrap
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.types import Layout

COSTLY = frozenset(("exp", "log", "erf", "tanh", "pow", "sin", "cos", "tan", "sqrt", "sigmoid", "gelu", "softplus", "mish", "div"))
MAX_NODES = 24  # of a group: longer chains gain nothing and make kernels that nobody can read


@dataclass(frozen=True)
class Group:
    """Nodes in order, the one value they make for others, and the class of the anchor ("contraction", "reduction", "map", "host")."""

    nodes: tuple[Node, ...]
    output: Value
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}: {' + '.join(n.op.name for n in self.nodes)} -> {self.output.name}"


@dataclass(frozen=True)
class FusionPlan:
    """Groups in order of execution, and the values that are another one's memory under a new shape: (view, source)."""

    groups: tuple[Group, ...]
    views: tuple[tuple[Value, Value], ...]

    def __str__(self) -> str:
        return "\n".join([*(f"group {k}: {g}" for k, g in enumerate(self.groups)), *(f"view: {a.name} = {b.name}" for a, b in self.views)])


def kind_of(n: Node) -> str:
    if n.op.host is not None:
        return "host"
    for trait in ("contraction", "reduction"):
        if trait in n.op.traits:
            return trait
    return "map"


def is_view(n: Node) -> bool:
    """Does the node only rename memory? Row-major in, row-major out."""
    x = n.inputs[0] if n.inputs else None
    return "view" in n.op.traits and x is not None and x.type.layout is None and n.output.type.layout is None


def plan_fusion(graph: Graph, fuse: bool = True) -> FusionPlan:
    """Group the nodes of a graph whose layouts are set. `fuse=False`: every node alone."""
    return _Fuser(graph, fuse).run()


class _Fuser:
    def __init__(self, graph: Graph, fuse: bool) -> None:
        self.graph, self.fuse = graph, fuse
        self.members: dict[int, list[Node]] = {}
        self.kind: dict[int, str] = {}
        self.group_of: dict[Node, int] = {}
        self.outputs = set(graph.outputs)

    def run(self) -> FusionPlan:
        for k, n in enumerate(self.graph.nodes()):
            self.members[k], self.kind[k], self.group_of[n] = [n], kind_of(n), k
            if self.fuse:
                for v in dict.fromkeys(n.inputs):
                    if v is not None and v.node is not None:
                        self.try_join(v, n)
        groups: list[Group] = []
        views: list[tuple[Value, Value]] = []
        order = {n: i for i, n in enumerate(self.graph.nodes())}
        for g, nodes in self.members.items():
            nodes.sort(key=order.__getitem__)
            if len(nodes) == 1 and is_view(nodes[0]):
                source = nodes[0].inputs[0]
                assert source is not None
                views.append((nodes[0].output, source))
                continue
            outs = [v for n in nodes for v in n.outputs if v in self.outputs or any(self.group_of[u] != g for u, _ in v.uses)]
            outs = outs or [nodes[-1].outputs[0]]
            groups += [Group(tuple(_needed(nodes, v)), v, self.kind[g]) for v in outs]
        groups.sort(key=lambda grp: order[grp.nodes[-1]])
        return FusionPlan(tuple(groups), tuple(views))

    def try_join(self, v: Value, n: Node) -> None:
        """Merge the group that makes v into n's, when v has no other reader and a rule allows it."""
        p = v.node
        assert p is not None
        a, b = self.group_of[p], self.group_of[n]
        if a == b or v in self.outputs or len({u for u, _ in v.uses}) != 1 or len(p.outputs) != 1 or len(n.outputs) != 1:
            return
        if len(self.members[a]) + len(self.members[b]) > MAX_NODES or "host" in (self.kind[a], self.kind[b]):
            return
        if not self.allowed(a, v, n, b):
            return
        self.members[b] = self.members.pop(a) + self.members[b]
        anchored = self.kind[a] if self.kind[a] != "map" else self.kind[b]
        for m in self.members[b]:
            self.group_of[m] = b
        self.kind[b] = anchored
        del self.kind[a]

    def allowed(self, a: int, v: Value, n: Node, b: int) -> bool:
        """Rules for `v`, made by group a, being read by node n of group b."""
        traits, out = n.op.traits, n.output.type
        same_size = _same(v.type.shape, out.shape)
        if len(self.members[a]) == 1 and is_view(self.members[a][0]):
            return False  # its reader takes the memory under the new shape
        anchored_a, anchored_b = self.kind[a] != "map", self.kind[b] != "map"
        if anchored_a and anchored_b:
            return False  # two anchors would run in one nest
        if "elementwise" in traits:
            if anchored_a:  # an epilogue: applied to the accumulator before it is stored
                return same_size and v.type.layout == out.layout
            return same_size or not self.costly(a)  # a chain; a broadcast operand is computed again for each element
        if is_view(n):  # free by itself; worth a place in a nest only in front of a transpose of the same nest
            users = [u for u, _ in n.output.uses]
            permuted = len(users) == 1 and users[0].op.name == "transpose" and self.keeps_last(users[0], n.output)
            return self.kind[a] == "contraction" and self.keeps_last(n, v) and permuted and n.output not in self.outputs
        if "movement" in traits:
            if anchored_a:  # a permuted store, as long as the vectors stay whole
                return self.kind[a] == "contraction" and self.keeps_last(n, v)
            return _same_count(v, n)  # each element is computed once, where it goes
        if "reduction" in traits:
            return _same(v.type.shape, n.inputs[0].type.shape) and v is n.inputs[0] and not self.costly(a)  # type: ignore[union-attr]
        if "contraction" in traits:
            return v is n.inputs[0] and v.type.layout is None and self.only_transposes(a)  # an index map in the broadcast operand
        return False

    def costly(self, g: int) -> bool:
        return any(n.op.name in COSTLY for n in self.members[g])

    def only_transposes(self, g: int) -> bool:
        """Transposes: reading through them costs address arithmetic alone."""
        return all(n.op.name == "transpose" for n in self.members[g])

    def keeps_last(self, n: Node, v: Value) -> bool:
        """Does each vector along v's last axis stay a vector along the output's last axis?"""
        if v.type.layout is not None or n.output.type.layout is not None:
            return False
        if n.op.name == "transpose":
            return bool(n.attrs["perm"][-1] == v.type.rank - 1)
        if not is_view(n) or not n.output.type.shape:
            return False
        last = n.output.type.shape[-1]
        return isinstance(last, int) and last % 16 == 0


def _needed(nodes: Sequence[Node], v: Value) -> list[Node]:
    """The nodes of a group that one of its outputs needs."""
    need: set[Node] = set()
    stack = [v.node]
    inside = set(nodes)
    while stack:
        n = stack.pop()
        if n is None or n in need or n not in inside:
            continue
        need.add(n)
        stack += [u.node for u in n.inputs if u is not None]
    return [n for n in nodes if n in need]


def _same(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(x is y or x == y for x, y in zip(a, b))


def _same_count(v: Value, n: Node) -> bool:
    return bool(unwrap(v.type.size) == n.output.type.size) or unwrap(v.type.size) is n.output.type.size  # type: ignore[arg-type]


__all__ = ["FusionPlan", "Group", "Layout", "is_view", "kind_of", "plan_fusion"]
