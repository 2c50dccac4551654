"""A graph as scheduled kernels: what the passes hand to a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dnnc.ir.errors import InternalError, ScheduleError, VerifyError, locations
from dnnc.ir.expr import Expr, Var
from dnnc.ir.graph import Graph, Value
from dnnc.ir.operator.stmt import For, Kernel, walk_stmts
from dnnc.ir.operator.text import show_kernel
from dnnc.ir.operator.verify import verify_kernel
from dnnc.passes.graph.fuse import FusionPlan, Group
from dnnc.passes.graph.memory_plan import MemoryPlan
from dnnc.passes.lower import lower
from dnnc.passes.operator.decompose import decompose
from dnnc.passes.schedule.problem import Choice, Problem, Template, classify
from dnnc.passes.schedule.step import Choose, schedule


@dataclass(frozen=True)
class Step:
    """One kernel call: which values its buffers are, which dims its scalars are. `text` is the kernel's identity."""

    group: Group
    kernel: Kernel
    text: str
    params: tuple[Value, ...]
    dims: tuple[Var, ...]
    choice: Choice
    flops: int | Expr

    @property
    def parallel(self) -> bool:
        """Do all threads take part? Otherwise thread 0 runs the kernel alone."""
        return is_parallel(self.kernel)


def is_parallel(kernel: Kernel) -> bool:
    return any(isinstance(s, For) and s.kind == "parallel" for s in walk_stmts(kernel.entry.body))


@dataclass(frozen=True)
class Program:
    """The steps of one model (for fixed or symbolic dims) with the plan of its memory."""

    graph: Graph
    fusion: FusionPlan
    memory: MemoryPlan
    steps: tuple[Step, ...]

    @property
    def dims(self) -> tuple[Var, ...]:
        """Symbolic dims in the order in which a call passes them."""
        return tuple(sorted(self.graph.dims.values(), key=lambda v: v.name))


def _scheduled(problem: Problem, templates: Sequence[Template], choose: Choose) -> tuple[Kernel, Choice]:
    """A kernel by the schedule chosen. Sizes that are known at run time only may leave too little to be proved: then the other schedules
    are tried, and at last the nest as it was lowered, which holds for all sizes."""
    try:
        kernel, choice = schedule(problem, templates, choose)
        return verify_kernel(decompose(kernel)), choice
    except (InternalError, VerifyError):
        if not problem.lowered.dims:
            raise
    for t in templates:
        for knobs in t.candidates(problem)[:1]:
            try:
                return verify_kernel(decompose(t.apply(problem, dict(knobs)))), Choice(t.name, knobs)
            except (ScheduleError, VerifyError):
                continue
    return verify_kernel(decompose(problem.kernel)), Choice("naive", ())


def build_steps(graph: Graph, fusion: FusionPlan, memory: MemoryPlan, templates: Sequence[Template], choose: Choose) -> tuple[Step, ...]:
    """Lower and schedule every group. Groups with the same naive kernel are scheduled once."""
    known: dict[str, tuple[Kernel, str, Choice]] = {}
    steps: list[Step] = []
    for g in fusion.groups:
        if g.kind == "host":
            raise InternalError(f"{g.nodes[0].op.name}{locations(g.output.locs)} runs on the host and cannot be a kernel")
        low = lower(graph, g.nodes, g.output, memory.inplace.get(g))
        problem = classify(g.nodes, low)
        key = show_kernel(low.kernel)
        made = known.get(key)
        if made is None:
            verify_kernel(low.kernel)
            scheduled, choice = _scheduled(problem, templates, choose)
            made = known[key] = (scheduled, show_kernel(scheduled), choice)
        kernel, text, choice = made
        steps.append(Step(g, kernel, text, low.params, low.dims, choice, problem.flops))
    return tuple(steps)
