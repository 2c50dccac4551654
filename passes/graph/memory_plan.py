"""Where every value lies: inputs, outputs and constants by number, everything else in one arena.

Lifetimes are counted in steps (kernels in order). Views share their source's memory; a kernel may write over an input that nobody reads
later, when both have the same bytes and the kernel reads each element before it writes it. Offsets come from a greedy placement, largest
value first, at the lowest address that is free throughout its life (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
Inference", 2020, section 5). Sizes may be symbolic: order and sharing are decided once, offsets are evaluated for each shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dnnc.ir.arena import ALIGN, Arena, place_slots
from dnnc.ir.expr import Var, const, value
from dnnc.ir.graph import Graph, Value
from dnnc.ir.types import Dim
from dnnc.passes.graph.alias import root
from dnnc.passes.graph.fuse import FusionPlan, Group
from dnnc.passes.lower import group_inputs

__all__ = ["ALIGN", "MemoryPlan", "Slot", "place_slots", "plan_memory"]


@dataclass(frozen=True)
class Slot:
    """A stretch of the arena that holds `values` one after another (in place) or under several shapes; alive from first to last step.

    `pieces`: bytes, and the step that writes them, where several kernels fill it (the operands of a concatenation).
    """

    values: tuple[Value, ...]
    nbytes: Dim
    first: int
    last: int
    pieces: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """`place[v]` is ("input" | "output" | "constant" | "arena", number); an arena's number is a slot's. `inside[v]`: the byte there at which
    v begins, where that is not 0."""

    place: Mapping[Value, tuple[str, int]]
    inside: Mapping[Value, int]
    slots: tuple[Slot, ...]
    inplace: Mapping[Group, Value]

    @property
    def arena(self) -> Arena:
        """The slots as sizes and lifetimes."""
        return Arena(
            tuple(s.nbytes for s in self.slots),
            tuple((s.first, s.last) for s in self.slots),
            tuple(s.pieces for s in self.slots),
        )

    def offsets(self, dims: Mapping[Var, int]) -> tuple[list[int], int]:
        """Byte offsets of the slots and the arena's size, for given dims."""
        return self.arena.offsets(dims)

    def lower_bound(self, dims: Mapping[Var, int]) -> int:
        """The most bytes that are alive at any step: no placement can need less."""
        return self.arena.lower_bound(dims)


def plan_memory(graph: Graph, plan: FusionPlan, inplace: Mapping[Group, Value] | None = None) -> MemoryPlan:
    """Place every value of a planned graph. `inplace`: for some groups, the input whose memory the output takes (checked here)."""
    return _Planner(graph, plan, inplace or {}).run()


class _Planner:
    def __init__(self, graph: Graph, plan: FusionPlan, wanted: Mapping[Group, Value]) -> None:
        self.graph, self.plan, self.wanted = graph, plan, wanted
        self.aliases = {v: (source, at) for v, source, at in plan.views}
        self.first: dict[Value, int] = {}
        self.last: dict[Value, int] = {}
        self.pieces: dict[Value, list[tuple[int, int]]] = {}

    def root(self, v: Value) -> Value:
        return root(self.aliases, v)[0]

    def run(self) -> MemoryPlan:
        place: dict[Value, tuple[str, int]] = {v: ("input", k) for k, v in enumerate(self.graph.inputs)}
        place.update((v, ("constant", k)) for k, v in enumerate(self.graph.constants))
        for k, v in enumerate(self.graph.outputs):
            r = self.root(v)
            assert r not in place, f"output {v.name} needs a copy"
            place[r] = ("output", k)
        for step, g in enumerate(self.plan.groups):
            r = self.root(g.output)
            self.first.setdefault(r, step)
            if r is not g.output and isinstance(g.output.type.nbytes, int):
                self.pieces.setdefault(r, []).append((g.output.type.nbytes, step))
            for v in (g.output, *group_inputs(g.nodes)):
                self.last[self.root(v)] = step
        slots, inplace = self.slots(place)
        for k, s in enumerate(slots):
            for v in s.values:
                place[v] = ("arena", k)
        inside: dict[Value, int] = {}
        for v in self.aliases:
            r, at = root(self.aliases, v)
            place[v] = place[r]
            if at:
                inside[v] = at
        return MemoryPlan(place, inside, tuple(slots), inplace)

    def slots(self, place: dict[Value, tuple[str, int]]) -> tuple[list[Slot], dict[Group, Value]]:
        slots: list[Slot] = []
        holder: dict[Value, int] = {}
        inplace: dict[Group, Value] = {}
        for step, g in enumerate(self.plan.groups):
            v = self.root(g.output)
            if v in place or v in holder:
                continue
            old = self.wanted.get(g)
            k = holder.get(self.root(old)) if old is not None else None
            if old is not None and k is not None and self.may_overwrite(old, v, step):
                slots[k] = Slot((*slots[k].values, v), slots[k].nbytes, slots[k].first, self.last[v], slots[k].pieces)
                inplace[g] = old
            else:
                k = len(slots)
                slots.append(Slot((v,), v.type.nbytes, step, self.last[v], tuple(self.pieces.get(v, ()))))
            holder[v] = k
        return slots, inplace

    def may_overwrite(self, old: Value, new: Value, step: int) -> bool:
        """Is all of the memory in which `old` lies free after this step, and is it what the new value needs?"""
        whole = self.root(old)
        same = all(value(const(x.type.nbytes) - const(new.type.nbytes)) == 0 for x in (old, whole))
        return same and self.last[whole] == step and old.type.dtype is new.type.dtype
