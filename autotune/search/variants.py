"""Fusion and algorithms as choices: alternatives of a group as tasks, and plans as a log wants them.

In: a program, or a plan and what a log has decided. Out: Variations, whose parts are Tasks like any other; the plan
that is compiled. A decision travels among the winners as a Choice of its own kind, `fused(cuts=0, parts=KEY KEY)`,
under a name made of the group's key, so that whatever keeps winners (saved models, the option `tune`) keeps it too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dnnc.autotune.runners.machine import machine_of
from dnnc.autotune.search.task import Setting, Task, task_of, workload_key
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.ir.op import ContractionForm
from dnnc.ir.types import TensorType
from dnnc.passes.planning.fuse import Group
from dnnc.passes.planning.fusion_variants import Variant, cut, variants, vary, weights_encoding
from dnnc.passes.planning.memory_plan import MemoryPlan, Region, plan_memory
from dnnc.passes.planning.program import ScheduledGraph
from dnnc.passes.schedule.problem import Choice

if TYPE_CHECKING:
    from dnnc.autotune.log.record import Fusion

FUSED = "fused"  # the template's name of a choice that is a decision
NAME = "fusion of "


@dataclass(frozen=True)
class Variation:
    """A fused group, and tasks that make the same in another way."""

    task: Task  # the group in one kernel, as the compiler makes it
    variant: Variant  # the other way
    parts: tuple[Task, ...]  # its kernels, in order

    def __str__(self) -> str:
        return described(self.variant, [t.name for t in self.parts])


def described(variant: Variant, names: Sequence[str]) -> str:
    """For people: "conv | relu", "direct", "winograd4"."""
    if variant.tile is not None:
        return f"winograd{variant.tile}" if variant.tile else "direct"
    return " | ".join(names)


# --- what to measure --------------------------------------------------------------------------------------------------


def variations(programs: Sequence[ScheduledGraph], setting: Setting, keys: Collection[str]) -> list[Variation]:
    """Other ways to make the groups whose tasks have these keys, in order of the programs."""
    out: dict[tuple[str, Variant], Variation] = {}
    for p in programs:
        for v in _of_program(p, setting, keys):
            out.setdefault((v.task.key, v.variant), v)
    return list(out.values())


def _of_program(program: ScheduledGraph, setting: Setting, keys: Collection[str]) -> Iterator[Variation]:
    wholes: dict[str, tuple[Task, Graph, Group, list[Variant]]] = {}
    for graph, g, found in _variable(program.region, setting):
        task = _task(graph, g, program.memory, setting)
        if task is not None and task.key in keys:
            wholes.setdefault(task.key, (task, graph, g, found))
    for k in range(max((len(found) for *_, found in wholes.values()), default=0)):
        turn = [(task, graph, g, found[k]) for task, graph, g, found in wholes.values() if k < len(found)]
        memory = _planned(vary(program.region, {g: v for _, _, g, v in turn if v.tile is None}))
        for task, graph, g, v in turn:
            parts = (
                [_task(graph, p, memory, setting) for p in cut(g, v.cuts)]
                if v.tile is None
                else [retiled(task, v.tile)]
            )
            yield Variation(task, v, tuple(t for t in parts if t is not None))


def _variable(region: Region, setting: Setting) -> Iterator[tuple[Graph, Group, list[Variant]]]:
    """Groups that may be made in other ways, those of nested regions too."""
    rates = machine_of(setting.target).context(setting).facts.rates
    for g in region.fusion.groups:
        found = variants(region.graph, g, setting.numerics == "strict", rates)
        if found:
            yield region.graph, g, found
        for inner in region.nested.get(g, ()):
            yield from _variable(inner, setting)


def _task(graph: Graph, g: Group, memory: MemoryPlan, setting: Setting) -> Task | None:
    """None where sizes are known at run time only."""
    sizes = [d for n in g.nodes for v in (*n.inputs, *n.outputs) if v is not None for d in v.type.shape]
    return task_of(graph, g, memory.inplace, setting) if all(isinstance(d, int) for d in sizes) else None


def _planned(region: Region) -> MemoryPlan:
    return plan_memory(region.graph, region.fusion, region.inplace, region.nested)


def retiled(task: Task, tile: int) -> Task:
    """The task with the weights of its convolution stored for another algorithm."""
    g = parse(task.graph)
    conv = next(n for n in g.nodes() if n.op.contraction is ContractionForm.CONVOLUTION)
    x, w = conv.inputs[0], conv.inputs[1]
    assert x is not None and w is not None and not x.type.row_major
    w.type = TensorType(w.type.dtype, w.type.shape, weights_encoding(x.type.rank, x.type.encoding.block(1), tile))
    return replace(task, key=workload_key(task.of(g)[2], task.setting), graph=g.text())


# --- decisions among winners ------------------------------------------------------------------------------------------


def name_of(key: str) -> str:
    """The name under which the decision on a task is among winners."""
    return NAME + key


def as_choice(f: Fusion) -> Choice:
    """A decision as a schedule."""
    tile = () if f.tile is None else (("tile", f.tile),)
    return Choice(FUSED, (("cuts", " ".join(map(str, f.cuts))), *tile, ("parts", " ".join(f.parts))))


def read_decision(c: Choice) -> tuple[Variant, tuple[str, ...]] | None:
    """The variant and the keys of its parts; None where it is no decision that this dnnc knows."""
    knobs = dict(c.knobs)
    cuts, tile, parts = str(knobs.pop("cuts", "")).split(), knobs.pop("tile", None), str(knobs.pop("parts", "")).split()
    if c.template != FUSED or knobs or not parts or not all(k.isdigit() for k in cuts) or isinstance(tile, str):
        return None
    return Variant(tuple(map(int, cuts)), tile), tuple(parts)


@dataclass(frozen=True)
class _Wanted:
    """A group that a log wants to be made in another way. `parts`: the keys of what was measured."""

    graph: Graph
    task: Task
    variant: Variant
    parts: tuple[str, ...]


class Decisions:
    """What a log has decided on groups, and the plan that it asks for.

    Args:
        winners: among which the decisions are.
        setting: of the compilation.

    Attributes:
        notes: after `revise`: which groups are made in another way, and which decisions did not apply.
        taken: how many groups are.
    """

    def __init__(self, winners: Mapping[str, Choice], setting: Setting) -> None:
        self.setting = setting
        self.choices = {name.removeprefix(NAME): c for name, c in winners.items() if name.startswith(NAME)}
        self.notes: list[str] = []
        self.taken = 0

    def revise(self, region: Region, memory: MemoryPlan) -> tuple[Region, MemoryPlan]:
        """Apply to the plan the groups that were faster otherwise, if their parts are those measured."""
        if not self.choices:
            return region, memory
        wanted = self._wanted(region, memory)
        names: dict[Group, list[str]] = {}
        while True:  # each turn is the last, or leaves decisions out
            cuts = {g: w.variant for g, w in wanted.items() if w.variant.tile is None}
            memory = _planned(vary(region, cuts))
            for g, w in [(g, wanted[g]) for g in cuts]:
                made = [_task(w.graph, p, memory, self.setting) for p in cut(g, w.variant.cuts)]
                names[g] = [t.name for t in made if t is not None]
                if [t.key for t in made if t is not None] != list(w.parts):
                    self._leave(wanted.pop(g).task, "it would be cut into other kernels than those that were measured")
            if len(cuts) == sum(g in wanted for g in cuts):
                break
        self.notes += [f"fusion of {w.task.name}: {described(w.variant, names.get(g, ()))}" for g, w in wanted.items()]
        self.taken = len(wanted)
        made_so = vary(region, {g: w.variant for g, w in wanted.items()})
        return made_so, _planned(made_so)

    def _wanted(self, region: Region, memory: MemoryPlan) -> dict[Group, _Wanted]:
        """The groups to make in another way."""
        out: dict[Group, _Wanted] = {}
        for graph, g, found in _variable(region, self.setting):
            task = _task(graph, g, memory, self.setting)
            if task is None or task.key not in self.choices:
                continue
            decision = read_decision(self.choices[task.key])
            if decision is None:
                self._leave(task, f"{self.choices[task.key]} is unknown")
            elif decision[0] not in found:
                self._leave(task, "this group is not made in that way any more")
            elif decision[0].tile is not None and (retiled(task, decision[0].tile).key,) != decision[1]:
                self._leave(task, "the algorithm is another kernel than the one that was measured")
            else:
                out[g] = _Wanted(graph, task, *decision)
        return out

    def _leave(self, task: Task, why: str) -> None:
        self.notes.append(f"fusion of {task.name}: the log's decision is left out: {why}")


Variations = Callable[[Collection[str]], Sequence[Variation]]  # keys of tasks -> other ways to make them
