"""Where every value lies: inputs, outputs and constants by number, everything else in one arena.

Lifetimes are counted in steps (kernels in order). Views share their source's memory; a kernel may write over an input
that nobody reads later, when both have the same bytes and the kernel reads each element before it writes it. Offsets
come from a greedy placement, largest value first, at the lowest address that is free throughout its life (Pisarchyk and
Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020, section 5). Sizes may be symbolic: order and
sharing are decided once, offsets are evaluated for each shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dnnc.ir.arena import ALIGN, Arena, Piece, place_slots
from dnnc.ir.expr import Var, const, value
from dnnc.ir.graph import Graph, Value
from dnnc.ir.op import Trait
from dnnc.ir.types import Dim, TensorType
from dnnc.passes.analysis.alias import root
from dnnc.passes.lower.nests import group_inputs
from dnnc.passes.planning.fuse import FusionPlan, Group
from dnnc.passes.planning.result_memory import Result, Stretch, place_within

__all__ = ["ALIGN", "MemoryPlan", "Slot", "place_slots", "plan_memory"]


@dataclass(frozen=True)
class Slot:
    """A stretch of the arena that holds `values` in turn (in place) or under several shapes, from first to last step.

    `pieces`: the byte, the bytes, and the step that writes them, where several kernels fill it (the operands of a
        concatenation).
    """

    values: tuple[Value, ...]
    nbytes: Dim
    first: int
    last: int
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Guest:
    """A slot in the memory of an output that is written later, and the byte there at which it begins."""

    slot: Slot
    output: int
    byte: int


@dataclass(frozen=True)
class MemoryPlan:
    """`place[v]` is ("input" | "output" | "constant" | "parameter" | "arena", number); an arena's number is a slot's.
    `inside[v]`: the byte there at which v begins, where that is not 0. `guests`: slots that are no longer in the arena,
    but in the memory of outputs. `bound`: what the kernels read of parameters, values of the prologue in the types that
    they have here.
    """

    place: Mapping[Value, tuple[str, int]]
    inside: Mapping[Value, int]
    slots: tuple[Slot, ...]
    inplace: Mapping[Value, Value]  # outputs of groups -> the input whose memory each takes
    aliases: Mapping[Value, tuple[Value, int]]  # what lies in the memory of others: of which value, at which byte
    scratch: Mapping[
        Group, tuple[int, ...]
    ]  # of loops: a second slot for each carried value, and one for the condition
    bound: tuple[tuple[Value, TensorType], ...] = ()
    guests: tuple[Guest, ...] = ()

    @cached_property
    def arena(self) -> Arena:
        """The slots as sizes and lifetimes."""
        lives = tuple((s.first, s.last) for s in self.slots)
        return Arena(tuple(s.nbytes for s in self.slots), lives, tuple(s.pieces for s in self.slots))

    def offsets(self, dims: Mapping[Var, int]) -> tuple[list[int], int]:
        """Byte offsets of the slots and the arena's size, for given dims."""
        return self.arena.offsets(dims)

    def lower_bound(self, dims: Mapping[Var, int]) -> int:
        """The most bytes that are alive at any step: no placement can need less."""
        return self.arena.lower_bound(dims)


@dataclass(frozen=True, eq=False)
class Region:
    """A graph with its groups and what may work in place; `nested` are the regions of each group of control flow."""

    graph: Graph
    fusion: FusionPlan
    inplace: Mapping[Value, Value]
    nested: Mapping[Group, tuple[Region, ...]]


def plan_memory(
    graph: Graph,
    fusion: FusionPlan,
    inplace: Mapping[Value, Value] | None = None,
    nested: Mapping[Group, tuple[Region, ...]] | None = None,
    draft: bool = False,
) -> MemoryPlan:
    """Place all values of a planned graph. `inplace`: inputs overwritten by outputs; `nested`: its regions; `draft`:
    outputs that are inputs, constants or each other have no copies yet (`copy_outputs`), and count for nothing.
    """
    return _Planner(Region(graph, fusion, inplace or {}, nested or {}), draft).run()


class _Planner:
    """Steps are counted through: those of a loop's body lie between the loop's first step and its last."""

    def __init__(self, region: Region, draft: bool) -> None:
        self.region, self.draft = region, draft
        self.aliases: dict[Value, tuple[Value, int]] = {}
        self.place: dict[Value, tuple[str, int]] = {}
        self.order: list[tuple[Region, Group]] = []
        self.span: dict[Group, tuple[int, int]] = {}
        self.clock = 0
        self.first: dict[Value, int] = {}
        self.last: dict[Value, int] = {}
        self.pieces: dict[Value, list[Piece]] = {}
        self.bound: dict[tuple[Value, TensorType], int] = {}

    def root(self, v: Value) -> Value:
        return root(self.aliases, v)[0]

    def run(self) -> MemoryPlan:
        self.visit(self.region)
        place = self.place
        donated = self.donate()
        slots, inplace, scratch = self.slots()
        inplace.update(donated)
        guests = self.guests(slots)
        left = [k for k in range(len(slots)) if k not in guests]
        number = {k: j for j, k in enumerate(left)}
        begins: dict[Value, int] = {}
        for k, s in enumerate(slots):
            for v in s.values:
                place[v] = ("output", guests[k].output) if k in guests else ("arena", number[k])
                begins[v] = guests[k].byte if k in guests else 0
        for v in self.aliases:
            r, at = root(self.aliases, v)
            place[v] = place[r]
            begins[v] = begins.get(r, 0) + at
        return MemoryPlan(
            place,
            {v: at for v, at in begins.items() if at},
            tuple(slots[k] for k in left),
            inplace,
            self.aliases,
            {g: tuple(number[k] for k in ks) for g, ks in scratch.items()},
            tuple(self.bound),
            tuple(guests.values()),
        )

    def visit(self, region: Region) -> None:
        """Lifetimes, and the places that are given: inputs, outputs and constants, by number."""
        self.place.update((v, ("input", k)) for k, v in enumerate(region.graph.inputs))
        self.place.update((v, ("constant", k)) for k, v in enumerate(region.graph.constants))
        self.place.update(
            (v, ("parameter", self.bound.setdefault((held, v.type), len(self.bound))))
            for v, held in region.graph.parameters.items()
        )
        self.aliases.update((v, (source, at)) for v, source, at in region.fusion.views)
        for k, v in enumerate(region.graph.outputs):
            r = self.root(v)
            assert self.draft or r not in self.place, f"output {v.name} needs a copy"
            self.place.setdefault(r, ("output", k))
        for g in region.fusion.groups:
            start = self.clock
            self.order.append((region, g))
            self.clock += 1
            for inner in region.nested.get(g, ()):
                self.visit(inner)
            if g in region.nested:
                self.clock += 1
            self.span[g] = start, self.clock - 1
            self.live(g)

    def live(self, g: Group) -> None:
        start, end = self.span[g]
        for v in g.outputs:
            r, at = root(self.aliases, v)
            self.first.setdefault(r, start)
            self.last[r] = end
            if r is not v and isinstance(v.type.nbytes, int):
                self.pieces.setdefault(r, []).append((at, v.type.nbytes, start))
        for v in group_inputs(g.nodes):
            self.last[self.root(v)] = end

    def donate(self) -> dict[Value, Value]:
        """Put outputs into donated inputs that are not read later. Return the outputs that then work in place."""
        graph = self.region.graph
        inplace: dict[Value, Value] = {}
        for k, j in graph.donated.items():
            x, y = graph.inputs[j], self.root(graph.outputs[k])
            if y not in self.first or value(const(x.type.nbytes) - const(y.type.nbytes)) != 0:
                continue
            start, last = self.first[y], self.last.get(x, -1)
            if last < start:
                self.place[y] = "input", j
                continue
            g, made = next((g, v) for _, g in self.order for v in g.outputs if self.root(v) is y)
            old = self.region.inplace.get(made)
            if old is not None and self.root(old) is x and self.may_overwrite(old, y, start):
                self.place[y], inplace[made] = ("input", j), old
            elif self.is_state(g, x, y) and (start, last) == self.span[g]:
                self.place[y] = "input", j
        return inplace

    def is_state(self, g: Group, x: Value, y: Value) -> bool:
        """Is `x` a loop's first state, and nothing else to it, and `y` the last one?"""
        n = g.nodes[0]
        if Trait.ITERATES not in n.op.traits:
            return False
        read = [None if v is None else root(self.aliases, v) for v in n.inputs]
        made = [self.root(v) for v in n.outputs]
        j = made.index(y) if y in made else len(made)
        whole = all(v is None or self.root(v) is not x or v.type.nbytes == x.type.nbytes for v in n.inputs)
        return (
            j < n.attrs["carried"]
            and read.count((x, 0)) == 1
            and read[2 + j] == (x, 0)
            and whole
            and [r and r[0] for r in read].count(x) == 1
        )

    def slots(self) -> tuple[list[Slot], dict[Value, Value], dict[Group, tuple[int, ...]]]:
        slots: list[Slot] = []
        holder: dict[Value, int] = {}
        inplace: dict[Value, Value] = {}
        scratch: dict[Group, tuple[int, ...]] = {}
        for region, g in self.order:
            start, end = self.span[g]
            for v, made in {self.root(v): v for v in g.outputs}.items():
                if v in self.place or v in holder:
                    continue
                old = region.inplace.get(made)
                k = holder.get(self.root(old)) if old is not None else None
                if old is not None and k is not None and self.may_overwrite(old, v, start):
                    slots[k] = Slot(
                        (*slots[k].values, v), slots[k].nbytes, slots[k].first, self.last[v], slots[k].pieces
                    )
                    inplace[made] = old
                else:
                    k = len(slots)
                    slots.append(Slot((v,), v.type.nbytes, self.first[v], self.last[v], tuple(self.pieces.get(v, ()))))
                holder[v] = k
            if Trait.ITERATES in g.nodes[0].op.traits:
                sizes = (*(v.type.nbytes for v in g.outputs[: g.nodes[0].attrs["carried"]]), 2 * ALIGN)
                scratch[g] = tuple(range(len(slots), len(slots) + len(sizes)))
                slots += [Slot((), n, start, end) for n in sizes]
        return slots, inplace, scratch

    def guests(self, slots: Sequence[Slot]) -> dict[int, Guest]:
        """Of the slots, by number, those that lie in results: of values that no loop or branch uses for itself.

        A donated output may be its input's memory, and sizes that a call decides have no fixed places.
        """
        graph = self.region.graph
        stretches = [Stretch(s.nbytes, s.first, s.last, s.pieces) for s in slots if isinstance(s.nbytes, int)]
        if len(stretches) < len(slots):
            return {}
        results = [
            Result(k, r.type.nbytes, self.first[r])
            for k, r in enumerate(map(self.root, graph.outputs))
            if k not in graph.donated and r in self.first and isinstance(r.type.nbytes, int)
        ]
        own = {self.root(v) for region, g in self.order if region is self.region for v in g.outputs}
        movable = [k for k, s in enumerate(slots) if s.values and own.issuperset(s.values)]
        found = place_within(stretches, movable, results)
        return {k: Guest(slots[k], output, byte) for k, (output, byte) in found.items()}

    def may_overwrite(self, old: Value, new: Value, step: int) -> bool:
        """Is all of the memory in which `old` lies free after this step, and is it what the new value needs?"""
        whole = self.root(old)
        same = all(value(const(x.type.nbytes) - const(new.type.nbytes)) == 0 for x in (old, whole))
        return same and self.last[whole] == step and old.type.dtype is new.type.dtype
