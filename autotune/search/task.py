"""A task: one kernel as plain data that another process can rebuild, and its name in a log.

In: a ScheduledGraph, or the problem of one group. Out: Tasks, each once, with how often the program calls them; the
problem of a Task. The key of a workload covers the naive kernel (operators, shapes, types, layouts, what is fused),
which buffers are constants, the target and the numerics: all that decides schedules and speed, no weights.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from dnnc.ir.errors import InternalError
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.text import show_kernel
from dnnc.passes.lower.nests import scalar_constant
from dnnc.passes.planning.fuse import Group
from dnnc.passes.planning.program import ScheduledGraph, Step, lower_group
from dnnc.passes.schedule.problem import Problem, classify


@dataclass(frozen=True)
class Setting:
    """Where and how a kernel is to run."""

    # canonical text of a CPU or GPU, as `dnnc.autotune.runners.machine.machine_of` reads it: "llvm -mcpu=znver5
    # -threads=2", "cuda -arch=sm_90a"
    target: str
    numerics: str = "standard"  # "strict", "standard" or "fast"
    rounded: bool = False  # may operands of products be rounded to TF32?


@dataclass(frozen=True)
class Task:
    """One kernel to tune."""

    key: str  # hex SHA-256 of the workload; what a log's trials refer to
    name: str  # the kernel's, for people
    kind: str  # of the Problem
    graph: str  # its group as the text of a graph, layouts included
    inplace: int | None  # number of the input whose memory the first output takes
    constants: tuple[int, ...]  # numbers of the inputs that no kernel of the program writes
    setting: Setting  # where and how it runs
    flops: int  # of one call
    others: tuple[int, ...] = ()  # for each further output the number of the input whose memory it takes, or -1
    nodes: tuple[str, ...] = field(default=(), compare=False)  # of the model, one for each call, for people

    @cached_property
    def shape(self) -> str:
        """The type of the first output, such as `f32[1, 64, 56, 56]`."""
        return str(parse(self.graph).outputs[0].type).partition(" @")[0] if self.graph else ""

    @property
    def node(self) -> str:
        """The node of the first call, and how many more calls there are: `layer1.0.conv2 +3`."""
        more = len(self.nodes) - 1
        return (self.nodes[0] if self.nodes else "") + (f" +{more}" if more > 0 else "")

    @cached_property
    def rebuilt(self) -> tuple[Graph, Group, Problem]:
        """Return graph, group and problem. InternalError unless the text gives the key's workload."""
        found = self.of(parse(self.graph))
        if workload_key(found[2], self.setting) != self.key:
            raise InternalError(
                f"task {self.name}: its graph is that of another workload; remove it from the log\n{self.graph}"
            )
        return found

    def renewed(self) -> Task:
        """Return the graph under today's key of its kernel: another where lowering has changed."""
        return replace(self, key=workload_key(self.of(parse(self.graph))[2], self.setting))

    def of(self, g: Graph) -> tuple[Graph, Group, Problem]:
        """A graph of the task, its one group, and the problem to schedule."""
        nodes = tuple(g.nodes())
        group = Group(nodes, tuple(g.outputs), self.kind)
        taken = (-1 if self.inplace is None else self.inplace, *self.others)
        inplace: dict[Value, Value] = {v: g.inputs[k] for v, k in zip(g.outputs, taken) if k >= 0}
        lowered = lower_group(g, group, inplace)
        return g, group, classify(nodes, lowered, {*g.constants, *(g.inputs[k] for k in self.constants)})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> Task:
        many: dict[str, Any] = {k: tuple(record[k]) for k in ("constants", "others", "nodes") if k in record}
        return Task(**{**record, **many, "setting": Setting(**record["setting"])})


def workload_key(problem: Problem, setting: Setting) -> str:
    """The name of a workload: equal for equal kernels to schedule, wherever their models come from."""
    parts = (
        show_kernel(problem.kernel),
        ",".join(sorted(problem.constants)),
        setting.target,
        setting.numerics,
        str(setting.rounded),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def extract(program: ScheduledGraph, setting: Setting) -> list[tuple[Task, int]]:
    """Tasks of a program with their numbers of calls, in order. Kernels with sizes of run time are left out."""
    found: dict[str, Task] = {}
    calls: Counter[str] = Counter()
    nodes: dict[str, list[str]] = {}
    for step, graph in program.walk():
        if isinstance(step, Step) and not step.dims:
            task = task_of(graph, step.group, program.memory.inplace, setting)
            found.setdefault(task.key, task)
            calls[task.key] += 1
            nodes.setdefault(task.key, []).append(node_of(step.group))
    return [(replace(t, nodes=tuple(nodes[key])), calls[key]) for key, t in found.items()]


def node_of(group: Group) -> str:
    """The model's name of what a group computes: of its last node that has one, or of its first output."""
    named = [loc.name for n in group.nodes for loc in n.locs if loc.name]
    return named[-1] if named else group.outputs[0].name


def task_of(graph: Graph, group: Group, inplace: Mapping[Value, Value], setting: Setting) -> Task:
    """The task of one group of a graph. `inplace`: for some outputs of groups, the input whose memory each takes."""
    lowered = lower_group(graph, group, inplace)
    problem = classify(group.nodes, lowered, graph.constants)
    alone, inputs = _alone(graph, group.nodes, group.outputs)
    constants = tuple(k for k, v in enumerate(inputs) if v in graph.constants)
    at, *others = (inputs.index(inplace[v]) if v in inplace else -1 for v in group.outputs)
    kind = group.kind
    key, first = workload_key(problem, setting), at if at >= 0 else None
    work = int(str(problem.flops))
    return Task(key, problem.kernel.name, kind, alone.text(), first, constants, setting, work, tuple(others))


def _alone(graph: Graph, nodes: Sequence[Node], outputs: Sequence[Value]) -> tuple[Graph, list[Value]]:
    """A group as a graph, and its inputs' values. Constants that are kernel literals stay, others become inputs."""
    g = Graph("task")
    made: dict[Value, Value] = {}
    inputs: list[Value] = []
    for n in nodes:
        for v in n.inputs:
            if v is None or v in made:
                continue
            if scalar_constant(graph, v) is not None:
                made[v] = g.constant(graph.constants[v], f"c{len(made)}")
                continue
            made[v] = g.add_input(f"x{len(inputs)}", v.type)
            inputs.append(v)
        new = g.append(
            Node(n.op, [None if v is None else made[v] for v in n.inputs], n.attrs, [o.type for o in n.outputs])
        )
        made.update(zip(n.outputs, new.outputs))
    g.outputs += [made[v] for v in outputs]
    return g, inputs
