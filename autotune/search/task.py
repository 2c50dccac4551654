"""What is tuned: one kernel of a program, as plain data that another process can rebuild, and the name under which a
log knows it.

In: a scheduled Program, or the problem of one group. Out: Tasks, each once, with how often the program calls them; the
problem of a Task. The key of a workload covers the naive kernel (operators, shapes, types, layouts, what is fused),
which buffers are constants, the target and the numerics: all that decides which schedules there are and how fast they
run, and no weights.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from dnnc.ir.errors import InternalError
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.text import show_kernel
from dnnc.passes.lower.nests import scalar_constant
from dnnc.passes.planning.fuse import Group
from dnnc.passes.planning.program import Program, Step, lower_group
from dnnc.passes.schedule.problem import Problem, classify


@dataclass(frozen=True)
class Setting:
    """Where and how a kernel is to run.

    Args:
        target: canonical text of a CPU or GPU, as `dnnc.autotune.runners.machine.machine_of` reads it: "llvm
            -mcpu=znver5 -threads=2", "cuda -arch=sm_90a".
        numerics: "strict", "standard" or "fast".
        rounded: may operands of products be rounded to TF32?
    """

    target: str
    numerics: str = "standard"
    rounded: bool = False


@dataclass(frozen=True)
class Task:
    """One kernel to tune.

    Args:
        key: hex SHA-256 of the workload; what a log's trials refer to.
        name: the kernel's, for people.
        kind: of the Problem.
        graph: its group as the text of a graph, layouts included.
        inplace: number of the input whose memory the first output takes.
        constants: numbers of the inputs that no kernel of the program writes.
        setting: where and how it runs.
        flops: of one call.
        others: for each further output the number of the input whose memory it takes, -1 for none.
    """

    key: str
    name: str
    kind: str
    graph: str
    inplace: int | None
    constants: tuple[int, ...]
    setting: Setting
    flops: int
    others: tuple[int, ...] = ()

    @cached_property
    def rebuilt(self) -> tuple[Graph, Group, Problem]:
        """The graph, its one group, and the problem to schedule. InternalError where the text does not give the
        workload of the key.
        """
        found = self.of(parse(self.graph))
        if workload_key(found[2], self.setting) != self.key:
            raise InternalError(
                f"task {self.name}: its graph is that of another workload; remove it from the log\n{self.graph}"
            )
        return found

    def renewed(self) -> Task:
        """The same graph under the key of the kernel that it is lowered to today, by changed lowering."""
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
        many: dict[str, Any] = {k: tuple(record[k]) for k in ("constants", "others") if k in record}
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


def extract(program: Program, setting: Setting) -> list[tuple[Task, int]]:
    """The tasks of a program, each with the number of its calls, in order of their first one.

    Kernels whose sizes are known at run time only are left out: what is best for one size need not be for another.
    """
    found: dict[str, Task] = {}
    calls: Counter[str] = Counter()
    for step, graph in program.walk():
        if isinstance(step, Step) and not step.dims:
            task = task_of(graph, step.group, program.memory.inplace, setting)
            found.setdefault(task.key, task)
            calls[task.key] += 1
    return [(t, calls[key]) for key, t in found.items()]


def task_of(graph: Graph, group: Group, inplace: Mapping[Value, Value], setting: Setting) -> Task:
    """The task of one group of a graph. `inplace`: for some outputs of groups, the input whose memory each takes."""
    lowered = lower_group(graph, group, inplace)
    problem = classify(group.nodes, lowered, graph.constants)
    alone, inputs = _alone(graph, group.nodes, group.outputs)
    constants = tuple(k for k, v in enumerate(inputs) if v in graph.constants)
    at, *others = (inputs.index(inplace[v]) if v in inplace else -1 for v in group.outputs)
    kind = group.kind
    return Task(
        workload_key(problem, setting),
        problem.kernel.name,
        kind,
        alone.text(),
        at if at >= 0 else None,
        constants,
        setting,
        int(str(problem.flops)),
        tuple(others),
    )


def _alone(graph: Graph, nodes: Sequence[Node], outputs: Sequence[Value]) -> tuple[Graph, list[Value]]:
    """A group as a graph of its own, and the values that its inputs were. Constants that are numbers in the kernel go
    along, others become inputs.
    """
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
