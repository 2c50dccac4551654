"""A graph as scheduled kernels: what the passes hand to a backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Protocol, Union

from dnnc.ir.arena import Arena
from dnnc.ir.errors import InternalError, locations
from dnnc.ir.expr import Expr, Var
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.loops.count import statements
from dnnc.ir.loops.stmt import For, Kernel, walk_stmts
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.op import Trait
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.lower.digits import lower_digits
from dnnc.passes.lower.expand import decompose
from dnnc.passes.lower.likeness import likeness, pattern_in_code
from dnnc.passes.lower.nests import Lowered, group_inputs, lower
from dnnc.passes.lower.recurrence import lower_recurrence
from dnnc.passes.lower.size_generic import Family, Kind, Nest, family_of, nest_of
from dnnc.passes.lower.sort_network import lower_network
from dnnc.passes.planning.fuse import FusionPlan, Group, plan_fusion
from dnnc.passes.planning.inplace import find_inplace
from dnnc.passes.planning.kin import Kin
from dnnc.passes.planning.ladder import Failure, Ladder, Refusal, Unfit, reason
from dnnc.passes.planning.memory_plan import MemoryPlan, Region, plan_memory
from dnnc.passes.planning.scheduling import applied, try_schedules
from dnnc.passes.schedule.cascade import in_rows
from dnnc.passes.schedule.problem import Choice, Problem, Template, classify
from dnnc.passes.schedule.step import NAIVE, Choose, schedule


@dataclass(frozen=True)
class Scheduled:
    """A scheduled nest: its text, schedule, whether all threads run it (else thread 0), statements of a run."""

    text: str
    choice: Choice
    parallel: bool
    statements: int

    @staticmethod
    def of(kernel: Kernel, choice: Choice) -> Scheduled:
        return Scheduled(show_kernel(kernel), choice, is_parallel(kernel), statements(kernel.entry.body, {}))


def is_parallel(kernel: Kernel) -> bool:
    return any(isinstance(s, For) and s.kind == "parallel" for s in walk_stmts(kernel.entry.body))


class Known(Protocol):
    """What nests became before: for the same machine, by the same templates and the same way to choose."""

    def find(self, nest: str, problem: Problem) -> Scheduled | None: ...

    def record(self, nest: str, problem: Problem, made: Scheduled) -> None: ...


@dataclass(frozen=True)
class Step:
    """One kernel call: which values its buffers are, which of them each output of the group is (by number), which dims
    its scalars are. `nest` is the kernel as it was lowered
    for the first group that is like this one; it has the name, the parameters and the places of the scheduled one and
    writes the same of them. `refusal` tells of the schedule that was to be used, where another one had to be. `sizes`:
    of a kernel that serves several, its first arguments. `naive`: what schedules depend on, `Problem.text`.
    """

    group: Group
    nest: Kernel
    scheduled: Scheduled
    make: Callable[[], Kernel] = field(compare=False)
    params: tuple[Value, ...]
    outputs: tuple[int, ...]
    dims: tuple[Var, ...]
    flops: int | Expr
    refusal: Refusal | None = None
    sizes: tuple[int, ...] = ()
    naive: str = ""

    @cached_property
    def kernel(self) -> Kernel:
        """Return the scheduled kernel, made only now if its text was known: code is found by the text alone."""
        return self.make()

    @property
    def text(self) -> str:
        return self.scheduled.text

    @property
    def choice(self) -> Choice:
        return self.scheduled.choice

    @property
    def parallel(self) -> bool:
        """Do all threads take part? Otherwise thread 0 runs the kernel alone."""
        return self.scheduled.parallel


@dataclass(frozen=True)
class Body:
    """A subgraph of a control step: its inputs and outputs are the buffers of its steps."""

    graph: Graph
    steps: tuple[AnyStep, ...]


@dataclass(frozen=True)
class ControlStep:
    """A loop or a branch: the entry function runs the steps of its bodies. `params` are the values that it reads, in
    order, without absent ones, then those it makes; `scratch` are slots of its own, `within` those of its bodies.
    """

    group: Group
    params: tuple[Value, ...]
    bodies: tuple[Body, ...]
    scratch: tuple[int, ...]
    within: tuple[int, ...]

    @property
    def node(self) -> Node:
        return self.group.nodes[0]


AnyStep = Union[Step, ControlStep]
Revise = Callable[[Region, MemoryPlan], "tuple[Region, MemoryPlan]"]  # another plan of the same graph
ANY_TARGET = TargetFacts()


@dataclass(frozen=True)
class ScheduledGraph:
    """The steps of a model (fixed or symbolic dims) with its memory plan. `region`: the source of both."""

    graph: Graph
    fusion: FusionPlan
    memory: MemoryPlan
    steps: tuple[AnyStep, ...]
    region: Region
    planner: Planner | None = field(default=None, compare=False, repr=False)

    @cached_property
    def arena(self) -> Arena:
        """The memory between kernels; its offsets are computed once for the same sizes."""
        return self.memory.arena

    @property
    def can_step_down(self) -> bool:
        """Is there another program to try where kernels of this one fail?"""
        return self.planner is not None and self.planner.ladder.down

    def stepped_down(self, failures: Sequence[Failure]) -> ScheduledGraph:
        """Return the program without failed schedules. Raise a failure where its node has no other schedule."""
        assert self.planner is not None
        return self.planner.without(self, failures)

    @property
    def steps_down(self) -> tuple[str, ...]:
        """For the report: where another schedule had to be taken, or a group to be split, and why."""
        taken = {(s.text, s.refusal): s for s in self.kernels if s.refusal is not None}
        lines = [f"{s.nest.name}{locations(s.nest.locs)}: {s.refusal}; {s.choice} is used" for s in taken.values()]
        return (*(() if self.planner is None else self.planner.ladder.notes), *lines)

    @property
    def dims(self) -> tuple[Var, ...]:
        """Symbolic dims in the order in which a call passes them."""
        return tuple(sorted(self.graph.dims.values(), key=lambda v: v.name))

    @property
    def kernels(self) -> Iterator[Step]:
        """The kernel calls of the program, those within loops and branches once."""
        return (s for s, _ in self.walk() if isinstance(s, Step))

    @property
    def control(self) -> tuple[ControlStep, ...]:
        """Loops and branches, outer ones before those within them."""
        return tuple(s for s, _ in self.walk() if isinstance(s, ControlStep))

    def walk(self) -> Iterator[tuple[AnyStep, Graph]]:
        """All steps, each with the graph that it belongs to."""
        return _walk(self.steps, self.graph)


def _walk(steps: Sequence[AnyStep], graph: Graph) -> Iterator[tuple[AnyStep, Graph]]:
    for s in steps:
        yield s, graph
        if isinstance(s, ControlStep):
            for b in s.bodies:
                yield from _walk(b.steps, b.graph)


def plan_region(graph: Graph, fuse: bool = True, facts: TargetFacts = ANY_TARGET, cut: Collection[Node] = ()) -> Region:
    """Group nodes, nested ones too, and find work in place. `cut`: nodes kept apart from their readers' groups."""
    fusion = plan_fusion(graph, fuse, facts.align, facts.fuses_norm, cut, facts.serial_rows, facts.stores_several)
    nested = {
        g: tuple(plan_region(s, fuse, facts, cut) for s in g.nodes[0].subgraphs())
        for g in fusion.groups
        if g.kind == "control"
    }
    return Region(graph, fusion, find_inplace(graph, fusion), nested)


def build_steps(
    region: Region,
    memory: MemoryPlan,
    templates: Sequence[Template],
    choose: Choose,
    supported: Collection[str] = (),
    ladder: Ladder | None = None,
    known: Known | None = None,
    groups: KnownGroups | None = None,
    parallel_from: int = 0,
) -> tuple[AnyStep, ...]:
    """Lower and schedule every group: equal groups are lowered once, equal naive kernels scheduled once.

    Args:
        region: a graph with its groups.
        memory: its plan.
        templates: ways to schedule.
        choose: which of what they offer.
        supported: intrinsics that stay as they are.
        ladder: what failed before, and whether another schedule is taken where one fails; else that is an InternalError
            or a VerifyError.
        known: what nests became before; they are not scheduled again, and their kernels are made when somebody asks for
            them.
        groups: of programs made before, by the same templates, choices and intrinsics; those of this one are added.
        parallel_from: `TargetFacts.parallel_from`.

    Unfit: the ladder may step down, and groups of several nodes have no schedule that holds.
    """
    made = _Steps(
        memory,
        templates,
        choose,
        supported,
        ladder or Ladder(),
        known,
        KnownGroups() if groups is None else groups,
        parallel_from,
    )
    steps = made.of(region)
    if made.unfit:
        raise Unfit(made.unfit)
    return steps


# Ops whose kernels no tensor expression describes.
SPECIAL: dict[str, Callable[[Graph, Node], Lowered]] = {
    "recurrence": lower_recurrence,
    "sort_digits": lambda graph, n: lower_digits(n),
    "sort_network": lambda graph, n: lower_network(n),
}


def lower_group(graph: Graph, g: Group, inplace: Mapping[Value, Value] | None = None) -> Lowered:
    """The naive kernel of a group. `inplace`: for some outputs of groups, the input whose memory each takes."""
    special = SPECIAL.get(g.nodes[0].op.name)
    if special is not None:
        return special(graph, g.nodes[0])
    return lower(graph, g.nodes, g.outputs, {v: x for v, x in (inplace or {}).items() if v in g.outputs})


@dataclass(frozen=True)
class Made:
    problem: Problem
    scheduled: Scheduled
    make: Callable[[], Kernel]
    refusal: Refusal | None = None
    nest: str = ""
    sizes: tuple[int, ...] = ()

    def step(self, g: Group, params: tuple[Value, ...]) -> Step:
        low, flops = self.problem.lowered, self.problem.flops
        return Step(
            g, low.kernel, self.scheduled, self.make, params, low.outputs, low.dims, flops, self.refusal, self.sizes,
            self.nest,
        )  # fmt: skip


def _in_rows(made: Made) -> bool:
    """Are a kernel's reductions made in the same order at all sizes?"""
    return in_rows(made.make(), [r.loops for r in made.problem.form.reductions])


class KnownGroups:
    """Groups' kernels by likeness; the last `most` new ones, for successive programs. Each keeps its graph."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._made: dict[
            Hashable, tuple[Made, tuple[int, ...]]
        ] = {}  # and which of a group's values the parameters are
        self.families: dict[Kind, list[tuple[Family, Made]]] = {}  # kernels that serve several sizes

    def find(self, like: Hashable) -> tuple[Made, tuple[int, ...]] | None:
        return self._made.get(like)

    def add(self, like: Hashable, made: Made, places: tuple[int, ...]) -> None:
        self._made[like] = made, places
        if self.most is not None and len(self._made) > self.most:
            del self._made[next(iter(self._made))]

    def forget(self, nests: Collection[str]) -> None:
        """Drop the groups whose naive kernels are these, or whose kernels of several sizes."""
        self._made = {
            like: (made, places)
            for like, (made, places) in self._made.items()
            if made.nest not in nests and made.scheduled.text not in nests
        }
        self.families.clear()


@dataclass(frozen=True)
class Planner:
    """Plans one graph, whose passes have run, as often as kernels of the plan fail.

    `revise`: may fuse differently; `known`, `groups`: see `build_steps`."""

    graph: Graph
    ctx: PassContext
    templates: Sequence[Template]
    choose: Choose
    fuse: bool
    revise: Revise | None = None
    known: Known | None = None
    groups: KnownGroups = field(default_factory=lambda: KnownGroups())
    ladder: Ladder = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ladder", Ladder(self.ctx.fallback))

    def region(self) -> Region:
        """The graph with its groups."""
        return plan_region(self.graph, self.fuse, self.ctx.facts, self.ladder.cut)

    def program(self) -> ScheduledGraph:
        """Groups, memory and kernels."""
        while True:
            region = self.region()
            memory = plan_memory(self.graph, region.fusion, region.inplace, region.nested)
            if self.revise is not None:
                region, memory = self.revise(region, memory)
            try:
                return self.scheduled(region, memory)
            except Unfit as e:
                self.ladder.split(e.groups)

    def scheduled(self, region: Region, memory: MemoryPlan) -> ScheduledGraph:
        steps = build_steps(
            region,
            memory,
            self.templates,
            self.choose,
            self.ctx.facts.native_intrinsics,
            self.ladder,
            self.known,
            self.groups,
            self.ctx.facts.parallel_from,
        )
        return ScheduledGraph(self.graph, region.fusion, memory, steps, region, self)

    def without(self, program: ScheduledGraph, failures: Sequence[Failure]) -> ScheduledGraph:
        """See `ScheduledGraph.stepped_down`."""
        nests = set()
        for f in failures:
            nodes = len(f.step.group.nodes)
            if not self.ladder.down or (nodes == 1 and f.step.choice == NAIVE):
                raise f.error
            nest = f.step.text if f.step.sizes else f.step.naive
            if nest not in nests:
                self.ladder.refuse(nest, f.step.choice, f"{f.stage}: {reason(f.error)}", nodes, built=True)
            nests.add(nest)
        self.groups.forget(nests)
        try:
            return self.scheduled(program.region, program.memory)
        except Unfit as e:
            self.ladder.split(e.groups)
            return self.program()


class _Steps:
    def __init__(
        self,
        memory: MemoryPlan,
        templates: Sequence[Template],
        choose: Choose,
        supported: Collection[str],
        ladder: Ladder,
        known: Known | None,
        groups: KnownGroups,
        parallel_from: int,
    ) -> None:
        self.memory, self.templates, self.choose, self.supported, self.ladder, self.known = (
            memory,
            templates,
            choose,
            supported,
            ladder,
            known,
        )
        self.groups, self.parallel_from = groups, parallel_from
        # lowered already, by likeness, and which of the group's values the parameters are
        self.problems: dict[Hashable, tuple[Problem, tuple[int, ...]]] = {}
        self.unfit: list[tuple[Group, str]] = []
        self.unfit_like: dict[Hashable, str] = {}
        self.made: dict[tuple[str, frozenset[str]], Made] = {}
        self.kin: dict[Hashable, Kin] = {}  # by likeness without patterns

    def of(self, region: Region) -> tuple[AnyStep, ...]:
        if self.parallel_from:
            self.join_sizes(region)
        made = (
            self.control(region, g) if g.kind == "control" else self.kernel(region.graph, g)
            for g in region.fusion.groups
        )
        return tuple(s for s in made if s is not None)

    def kernel(self, graph: Graph, g: Group) -> Step | None:
        """The kernel call of a group; None where it is unfit, which is noted."""
        if g.kind == "host":
            raise InternalError(
                f"{g.nodes[0].op.name}{locations(g.outputs[0].locs)} runs on the host and cannot be a kernel"
            )
        if Trait.RECURRENT in g.nodes[0].op.traits:  # its body reads values that the node does not list
            problem = self.lowered(graph, g)
            return self.made_of(problem, len(g.nodes)).step(g, problem.lowered.params)
        values = (*group_inputs(g.nodes), *g.outputs)
        like = likeness(graph, g.nodes, g.outputs, self.memory.inplace)
        found = self.groups.find(like)
        encoding = pattern_in_code(g.nodes) if found is None else None
        kin = encoding and likeness(graph, g.nodes, g.outputs, self.memory.inplace, patterns=False)
        if encoding is not None and kin in self.kin:
            found = self.kin[kin].of(encoding, self.ladder)
        if found is None:
            why = self.unfit_like.get(like)
            if why is None:
                try:
                    known = self.problems.pop(like) if like in self.problems else None
                    problem, places = known or self.placed(graph, g)
                    made = self.made_of(problem, len(g.nodes))
                except Exception as e:
                    if not self.ladder.down or len(g.nodes) == 1:
                        raise
                    why = self.unfit_like[like] = reason(e)
            if why is not None:
                self.unfit.append((g, why))
                return None
            found = made, places
            self.groups.add(like, *found)
            if encoding is not None:
                self.kin[kin] = Kin(made, places, encoding)
        made, places = found
        return made.step(g, tuple(values[k] for k in places))

    def lowered(self, graph: Graph, g: Group) -> Problem:
        low = lower_group(graph, g, self.memory.inplace)
        return classify(g.nodes, low, {*graph.constants, *graph.parameters})

    def placed(self, graph: Graph, g: Group) -> tuple[Problem, tuple[int, ...]]:
        """A lowered group, and which of its values the parameters are."""
        problem, values = self.lowered(graph, g), (*group_inputs(g.nodes), *g.outputs)
        return problem, tuple(map(values.index, problem.lowered.params))

    def made_of(self, problem: Problem, nodes: int) -> Made:
        """The kernel of a group that is like none before it. It may still be the same nest as one."""
        nest = problem.text
        key = nest, problem.constants
        made = self.made.get(key)
        if made is None:
            made = self.made[key] = self.found(nest, problem) or self.new(nest, problem, nodes)
        return replace(made, problem=problem, nest=nest)

    def join_sizes(self, region: Region) -> None:
        """Enter kernels that serve several sizes for the groups that differ in sizes alone."""
        candidates: dict[Hashable, tuple[Problem, Nest]] = {}
        for g in region.fusion.groups:
            if g.kind in ("host", "control") or Trait.RECURRENT in g.nodes[0].op.traits:
                continue
            like = likeness(region.graph, g.nodes, g.outputs, self.memory.inplace)
            if like in self.problems or self.groups.find(like) is not None:
                continue
            try:
                problem, _ = self.problems[like] = self.placed(region.graph, g)
                nest = None if self.ladder.refused(problem.text) else nest_of(problem.lowered)
                if nest is None or (problem.form.reductions and not _in_rows(self.made_of(problem, len(g.nodes)))):
                    continue
            except Exception:  # it fails again where it is scheduled
                continue
            candidates[like] = problem, nest
        for as_vectors in (True, False):
            alike: dict[Kind, dict[Hashable, Nest]] = {}
            for like, (problem, vectors) in candidates.items():
                nest = vectors if as_vectors else nest_of(problem.lowered, as_vectors=False)
                if nest is not None and like in self.problems:
                    alike.setdefault(nest.kind, {})[like] = nest
            for kind, members in alike.items():
                families = self.groups.families.setdefault(kind, [])
                self.serve(families, members)
                for key in (lambda n: n.frame, lambda n: n.head):  # first those with the same terms
                    self.found_families(families, list(members.values()), key)
                    self.serve(families, members)

    def found_families(
        self, families: list[tuple[Family, Made]], nests: Sequence[Nest], key: Callable[[Nest], str]
    ) -> None:
        """Add the families of nests with the same key."""
        groups: dict[str, list[Nest]] = {}
        for nest in nests:
            groups.setdefault(key(nest), []).append(nest)
        for alike in sorted(groups.values(), key=len, reverse=True):
            others = [n for n in nests if n.head == alike[0].head and key(n) != key(alike[0])]
            family = family_of(alike, others) if len({n.numbers for n in alike}) > 1 else None
            if family is not None and (made := self.generic(family)) is not None:
                families.append((family, made))

    def generic(self, family: Family) -> Made | None:
        """The kernel of a family; None where no schedule holds, or its code failed before."""
        problem = Problem(family.lowered, 0, inplace=family.lowered.inplace)
        nest = problem.text
        try:
            made = self.found(nest, problem)
            if made is None:
                kernel, choice = schedule(problem, self.templates)
                scheduled = Scheduled.of(verify_kernel(decompose(kernel, self.supported)), choice)
                made = Made(problem, scheduled, lambda: applied(problem, self.templates, choice, self.supported))
                if self.known is not None:
                    self.known.record(nest, problem, scheduled)
            if problem.form.reductions and not _in_rows(made):
                return None
        except Exception:  # each size has a kernel of its own then, whose failure is an error
            return None
        return None if self.ladder.refused(made.scheduled.text) else made

    def serve(self, families: Sequence[tuple[Family, Made]], members: dict[Hashable, Nest]) -> None:
        """Enter the kernels of families for the groups that belong to one, and take these from the members."""
        for like, nest in list(members.items()):
            for family, made in families:
                sizes = family.sizes(nest)
                if sizes is None:
                    continue
                problem, places = self.problems.pop(like)
                work = problem.form.elements
                parallel = made.scheduled.parallel and isinstance(work, int) and work >= self.parallel_from
                scheduled, text = replace(made.scheduled, parallel=parallel), problem.text
                own = replace(made, problem=problem, scheduled=scheduled, nest=text, sizes=sizes)
                self.groups.add(like, own, places)
                del members[like]
                break

    def found(self, nest: str, problem: Problem) -> Made | None:
        """What is known of a nest."""
        known = None if self.known is None or self.ladder.refused(nest) else self.known.find(nest, problem)
        if known is None:
            return None

        @cache
        def make() -> Kernel:
            kernel = applied(problem, self.templates, known.choice, self.supported)
            if show_kernel(kernel) != known.text:
                raise InternalError(
                    f"schedule {known.choice} makes another kernel of {problem.kernel.name} than before: clear the "
                    "cache of kernels"
                )
            return kernel

        return Made(problem, known, make)

    def new(self, nest: str, problem: Problem, nodes: int) -> Made:
        """A nest of so many nodes that nobody has scheduled."""
        verify_kernel(problem.kernel, limited=nodes > 1)
        kernel, choice, refusal = try_schedules(
            problem, self.templates, self.choose, self.supported, self.ladder, nest, nodes
        )
        made = Scheduled.of(kernel, choice)
        if self.known is not None and refusal is None:
            self.known.record(nest, problem, made)
        return Made(problem, made, lambda: kernel, refusal)

    def control(self, region: Region, g: Group) -> ControlStep:
        bodies = tuple(Body(r.graph, self.of(r)) for r in region.nested[g])
        params = (*(v for v in g.nodes[0].inputs if v is not None), *g.outputs)
        return ControlStep(g, params, bodies, self.memory.scratch.get(g, ()), self.slots(region.nested[g]))

    def slots(self, regions: Sequence[Region]) -> tuple[int, ...]:
        """The slots of the arena that the kernels of regions use for themselves."""
        out: set[int] = set()
        for r in regions:
            for g in r.fusion.groups:
                places = [self.memory.place[v] for v in g.outputs]
                out.update(k for space, k in places if space == "arena")
                out.update(self.memory.scratch.get(g, ()))
            for nested in r.nested.values():
                out.update(self.slots(nested))
        return tuple(sorted(out))
