"""The data of a view: graphs as imported and as fused, passes, kernels, memory, times; plain lists for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dnnc.backends.runtime.program import CompiledKernel, Program
from dnnc.compile_program import rescheduled
from dnnc.ir.errors import DnncError, Loc, locations
from dnnc.ir.expr import Var, const
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.shapes import as_env, resolve
from dnnc.passes.analysis.kinds import kind_of
from dnnc.passes.base import PassRecord
from dnnc.passes.pipelines import LEVELS
from dnnc.passes.planning.memory_plan import MemoryPlan
from dnnc.passes.planning.program import AnyStep, ControlStep, ScheduledGraph
from dnnc.report import KernelReport, ProgramReport
from dnnc.report.collect import kernel_reports
from dnnc.report.tables import show_dims, show_seconds
from dnnc.view.history import History, every_node
from dnnc.view.scopes import Path, constants_of, numbered, paths, tree

if TYPE_CHECKING:
    from dnnc.executable import Executable
    from dnnc.graph_compiler import GraphCompiler
    from dnnc.hybrid import HostStep
    from dnnc.tools.profile import Profile

LINE = 400  # characters of a node's text that are shown
LINES = 40  # of a change
Row = dict[str, Any]


@dataclass
class View:
    """What the page shows; nodes, steps, kernels and scopes are numbered.

    Attributes:
        nodes: of the graph as imported.
        steps: kernel calls, loops, branches, and nodes on the host, in order.
        kernels: unique ones.
        texts: of kernels, by what `kernels` say.
        memory: a plan for each program.
    """

    title: str
    target: str
    facts: list[tuple[str, str]]
    nodes: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)
    kernels: list[Row] = field(default_factory=list)
    passes: list[Row] = field(default_factory=list)
    changes: list[Row] = field(default_factory=list)
    memory: list[Row] = field(default_factory=list)
    scopes: list[tuple[str, int]] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    ceilings: Row | None = None
    texts: list[str] = field(default_factory=list)


def collect(f: Executable, profile: Profile | None = None, title: str = "") -> View:
    """Everything about a model. Its programs are scheduled again, with the choices that compiling made.

    Args:
        f: compiled; of a model that is read for the inputs of a call, the variant of the last one.
        profile: times, if they are to be shown.
        title: of the page; default: the name of the graph.
    """
    f = f.resolved
    report = f.report
    facts = [("target", report.target), ("threads", str(report.threads))]
    if report.programs and report.programs[-1].dims:
        facts.append(("dims", show_dims(report.programs[-1].dims.items())))
    view = View(title or report.name, report.target, facts)
    builder = _Builder(view, profile)
    program = f.last_program() if f.programs else None
    if program is None or not isinstance(program, Program):
        steps = getattr(program, "steps", None)
        for s in steps or ():
            builder.host(s) if not s.native else builder.segment(s.program)
        if not steps:
            builder.imported(f.graph)
    else:
        builder.segment(f)
    builder.finish()
    return view


class _Builder:
    """Adds one program after the other to a view."""

    def __init__(self, view: View, profile: Profile | None) -> None:
        self.view, self.profile = view, profile
        self.graph_nodes: list[Node] = []  # as `view.nodes`
        self.paths: list[Path] = []  # their layers
        self.number: dict[Node, int] = {}  # of imported nodes
        self.makers: dict[Value, int] = {}  # the step that makes a value
        self.between: dict[str, int] = {}  # the same by name, for values that one program makes and another reads
        self.places: dict[Loc, int] = {}
        self.kernels: dict[str, int] = {}  # by symbol
        self.times = {} if profile is None else {k.symbol: k for k in profile.kernels}
        self.measured: list[Any] = [] if profile is None else list(profile.calls)

    # --- graphs ---

    def imported(self, graph: Graph) -> None:
        """Add the nodes of a graph as it was imported."""
        nodes = every_node(graph)
        first = len(self.graph_nodes)
        self.number.update((n, k) for k, n in enumerate(nodes, first))
        self.graph_nodes += nodes
        self.paths += paths(nodes)  # now, for passes take nodes out of their graph
        for n in nodes:
            self.view.nodes.append(self.node_row(n))
            for loc in n.locs:
                self.places.setdefault(loc, self.number[n])

    def node_row(self, n: Node) -> Row:
        reads = [(v.node, v) for v in n.inputs if v is not None and v.node is not None]
        free = [v.name for v in n.inputs if v is not None and n.graph is not None and v in n.graph.inputs]
        row: Row = {
            "op": n.op.name,
            "kind": kind_of(n),
            "name": n.locs[0].name or n.outputs[0].name if n.locs else n.outputs[0].name,
            "line": _cut(repr(n)),
            "from": [[self.number[m], _shape(v)] for m, v in reads if m in self.number],
            "made": [f"{v.name}: {v.type}" for v in n.outputs],
            "loc": "; ".join(dict.fromkeys(str(loc) for loc in n.locs)),
        }
        weights = [f"{v.name}: {v.type}" for v in constants_of(n)]
        return {**row, **{k: v for k, v in (("weights", weights), ("inputs", free)) if v}}

    # --- programs ---

    def host(self, step: HostStep) -> None:
        """Add a node that runs on the host: part of both graphs."""
        n = step.node
        self.number[n] = len(self.graph_nodes)
        self.graph_nodes.append(n)
        self.paths += paths([n])
        self.view.nodes.append(self.node_row(n))
        self.add_step("host", n.op.name, [n], [v for v in n.inputs if v is not None], n.outputs)
        self.view.steps[-1]["origins"] = [self.number[n]]

    def segment(self, f: Executable) -> None:
        """Add a program: its graph as imported, its passes, its kernels, its memory."""
        compiler: GraphCompiler = f._compiler  # type: ignore[assignment]
        programs = f.report.programs
        if not programs:
            self.imported(f.graph)
            return
        report = programs[-1]
        found = History(len(self.graph_nodes))

        def dump(title: str, graph: Graph) -> None:
            if not found.origins and title.startswith("before"):
                self.imported(graph)
            found(title, graph)

        scheduled = rescheduled(compiler, report, dump)
        self.passes(compiler, report, found)
        linked = compiler.backend.describe(scheduled)
        self.add_kernels(f, compiler, linked, scheduled, report)
        begin = len(self.view.steps)
        calls = self.calls(scheduled)
        self.add_steps(scheduled.steps, scheduled, found, linked, calls, -1)
        self.add_memory(scheduled, report, begin)

    def passes(self, c: GraphCompiler, report: ProgramReport, found: History) -> None:
        why = {p.name: p.why for p in c.backend.passes(c.options.opt_level) or LEVELS[c.options.opt_level]}
        start = len(self.view.passes)
        ran = [p for p in report.passes if p.seconds or p.changed]  # others are remarks
        self.view.passes += [_pass_row(p, why.get(p.name, "")) for p in ran]
        same = len(ran) >= found.passes
        for change in found.changes:
            self.view.changes.append(
                {
                    "pass": start + change.number if same else -1,
                    "before": _lines(change.before),
                    "after": _lines(change.after),
                    "nodes": sorted(change.origins),
                }
            )

    def add_kernels(
        self, f: Executable, c: GraphCompiler, linked: Program, scheduled: ScheduledGraph, report: ProgramReport
    ) -> None:
        stages = [s for s in c.backend.stages if s not in ("graph", "operator", "asm")]
        self.view.stages = list(dict.fromkeys([*self.view.stages, *stages]))
        naive = {linked.symbols[s.text]: s for s in scheduled.kernels}
        work = self.work(linked, report)
        for k in linked.kernels:
            if k.symbol in self.kernels or k.control:
                continue
            self.kernels[k.symbol] = len(self.view.kernels)
            row: Row = {"name": k.name, "symbol": k.symbol, "choice": k.choice, "parallel": k.parallel}
            step = naive.get(k.symbol)
            if step is not None:
                row["naive"] = self.text(show_kernel(step.nest))
                row["refusal"] = str(step.refusal) if step.refusal is not None else ""
            row["operator"] = self.text(k.text)
            row.update((s, self.text(_source(c, linked, k, s))) for s in stages)
            r = work.get(k.symbol)
            row["flops"], row["bytes"] = (r.flops, r.bytes) if r is not None else (0, 0)
            self.view.kernels.append({**row, **self.time(k.symbol)})

    def work(self, linked: Program, report: ProgramReport) -> Mapping[str, KernelReport]:
        """Operations and bytes of kernels at the sizes of a report."""
        sizes = {v: report.dims[v.name] for v in linked.dims if v.name in report.dims}
        if len(sizes) < len(linked.dims):
            return {}
        return {r.symbol: r for r in kernel_reports(linked, sizes)}

    def text(self, text: str) -> int:
        self.view.texts.append(text)
        return len(self.view.texts) - 1

    def time(self, symbol: str) -> Row:
        t = self.times.get(symbol)
        if t is None:
            return {}
        return {
            "seconds": t.seconds, "calls": t.calls, "share": t.share, "balance": t.balance, "bound": t.bound,
            "reached": t.reached,
        }  # fmt: skip

    def calls(self, scheduled: ScheduledGraph) -> list[float]:
        """Seconds of each kernel call in order; empty where loops repeat calls, or nothing was measured."""
        steps = list(scheduled.kernels)
        if scheduled.control or len(self.measured) < len(steps):
            return []
        here = self.measured[: len(steps)]
        if any(t.kernel != s.nest.name for t, s in zip(here, steps)):
            return []
        del self.measured[: len(steps)]
        return [t.seconds for t in here]

    def add_steps(
        self,
        steps: Sequence[AnyStep],
        scheduled: ScheduledGraph,
        found: History,
        linked: Program,
        calls: list[float],
        outer: int,
    ) -> None:
        apart = _reasons(scheduled)
        for s in steps:
            if isinstance(s, ControlStep):
                n = s.node
                reads = [v for v in n.inputs if v is not None]
                self.add_step("control", n.op.name, [n], reads, n.outputs)
                row = self.view.steps[-1]
                row["origins"], row["outer"] = sorted(found.origins.get(n, ())), outer
                at = len(self.view.steps) - 1
                for b in s.bodies:
                    self.add_steps(b.steps, scheduled, found, linked, calls, at)
                continue
            group = s.group
            inside = set(group.nodes)
            reads = [v for n in group.nodes for v in n.inputs if v is not None and v.node not in inside]
            self.add_step("kernel", s.nest.name, group.nodes, reads, group.outputs)
            row = self.view.steps[-1]
            row["kernel"] = self.kernels[linked.symbols[s.text]]
            row["kind"], row["outer"] = group.kind, outer
            row["origins"] = sorted({k for n in group.nodes for k in found.origins.get(n, ())})
            row["main"] = self.main(group.nodes, found)
            row["why"] = apart.get(group.nodes[-1], "")
            if s.refusal is not None:
                row["refusal"] = str(s.refusal)
            if calls:
                row["seconds"] = calls.pop(0)

    def add_step(
        self,
        kind: str,
        name: str,
        nodes: Sequence[Node],
        reads: Sequence[Value],
        made: Sequence[Value],
    ) -> None:
        at = len(self.view.steps)
        sources: dict[int, str] = {}
        for v in dict.fromkeys(reads):
            for k in self.sources(v):
                sources.setdefault(k, _shape(v))
        constants = list(dict.fromkeys(f"{v.name}: {v.type}" for n in nodes for v in constants_of(n)))
        row = {
            "step": kind,
            "kind": kind,
            "name": name,
            "ops": [n.op.name for n in nodes],
            "lines": [_cut(repr(n)) for n in nodes],
            "from": [[k, label] for k, label in sources.items()],
            "made": [f"{v.name}: {v.type}" for v in made],
            "loc": locations(nodes[0].locs).removeprefix(" at "),
        }
        self.view.steps.append({**row, **({"weights": constants} if constants else {})})
        self.makers.update((v, at) for v in made)
        self.between.update((v.name, at) for v in made)

    def sources(self, v: Value) -> list[int]:
        """The steps that make a value; of a view, or of parts that lie in one memory, those that make its operands."""
        if v in self.makers:
            return [self.makers[v]]
        if v.node is None:
            return [self.between[v.name]] if v.name in self.between else []
        return [k for x in v.node.inputs if x is not None for k in self.sources(x)]

    def main(self, nodes: Sequence[Node], found: History) -> int:
        """The imported node that stands for a kernel: of its contraction, reduction or first node."""
        ranked = sorted(nodes, key=lambda n: n.op.cost, reverse=True)
        return next((min(found.origins[n]) for n in ranked if found.origins.get(n)), -1)

    def add_memory(self, scheduled: ScheduledGraph, report: ProgramReport, begin: int) -> None:
        plan = scheduled.memory
        dims = {v: report.dims[v.name] for v in scheduled.dims if v.name in report.dims}
        if len(dims) < len(scheduled.dims) or not plan.slots:
            return
        offsets, total = plan.offsets(dims)
        sizes = _bytes(plan, dims)
        self.view.memory.append(
            {
                "arena": total,
                "lower": plan.lower_bound(dims),
                "constants": report.memory.constants,
                "alive": plan.arena.alive(dims),
                "steps": _clock(scheduled.steps, begin),
                "slots": [
                    [[f"{v.name}: {v.type}" for v in s.values] or ["memory of a loop"], n, s.first, s.last, at]
                    for s, n, at in zip(plan.slots, sizes, offsets)
                ],
            }
        )

    # --- the whole ---

    def finish(self) -> None:
        """Scopes of both graphs, ceilings, links between forward and backward nodes."""
        view = self.view
        view.scopes, home = numbered(tree(self.paths))
        for k, row in enumerate(view.nodes):
            row["scope"] = home[k]
        for row in view.steps:
            k = row.get("main", -1)
            k = k if k >= 0 else next(iter(row.get("origins", ())), -1)
            row["scope"] = home.get(k, 0)
        for k, other in enumerate(_pairs(self.graph_nodes)):
            if other:
                view.nodes[k]["pairs"] = other
        p = self.profile
        if p is not None:
            levels = [[v.name, v.rate] for v in p.ceilings.levels]
            view.ceilings = {"flops": p.ceilings.flops, "levels": levels, "threads": p.ceilings.threads}
            view.facts += [("call", f"{show_seconds(p.total)}, median of {p.repeats}")]


def _pairs(nodes: Sequence[Node]) -> list[list[int]]:
    """Forward nodes and the backward nodes of their derivatives, both ways, by their places.

    A line of a traced function that runs several times has as many runs in the backward pass, in reverse order; where
    the numbers of runs agree, the runs belong together.
    """
    runs: dict[tuple[Loc, bool], list[list[int]]] = {}
    last: dict[bool, tuple[Loc, bool] | None] = {}
    for k, n in enumerate(nodes):
        if not n.locs:
            continue
        loc = n.locs[0]
        key = (Loc(loc.name, loc.op, loc.opset, loc.file, loc.line), loc.derivative)
        if last.get(loc.derivative) != key:
            runs.setdefault(key, []).append([])
        last[loc.derivative] = key
        runs[key][-1].append(k)
    out: list[list[int]] = [[] for _ in nodes]
    for (loc, backward), found in runs.items():
        forward = runs.get((loc, False), [])
        if not backward or not forward:
            continue
        joined = [[k for run in forward for k in run]] * len(found)
        for a, b in zip(forward[::-1] if len(forward) == len(found) else joined, found):
            for k in a:
                out[k] += b
            for k in b:
                out[k] += a
    return out


def _reasons(scheduled: ScheduledGraph) -> dict[Node, str]:
    """Why nodes are the last ones of their kernels."""
    found = dict(scheduled.fusion.apart)
    for s, _ in scheduled.walk():
        for inner in scheduled.region.nested.get(s.group, ()):
            found.update(inner.fusion.apart)
    return found


def _clock(steps: Sequence[AnyStep], begin: int) -> list[int]:
    """The step of the page at each step of the memory plan, which counts the end of a loop too."""
    out: list[int] = []
    number = begin

    def go(steps: Sequence[AnyStep]) -> None:
        nonlocal number
        for s in steps:
            at = number
            out.append(at)
            number += 1
            if isinstance(s, ControlStep):
                for b in s.bodies:
                    go(b.steps)
                out.append(at)

    go(steps)
    return out


def _bytes(plan: MemoryPlan, dims: Mapping[Var, int]) -> list[int]:
    env = as_env(dims)
    return [int(str(resolve(const(s.nbytes), env))) for s in plan.slots]


def _source(c: GraphCompiler, linked: Program, k: CompiledKernel, stage: str) -> str:
    """A kernel in a language of the target, or why there is none."""
    try:
        return c.sources(linked).kernel_text(k, stage)
    except DnncError as e:
        return f"# {e}"


def _pass_row(p: PassRecord, why: str) -> Row:
    return {
        "name": p.name, "why": why, "seconds": p.seconds, "before": p.nodes_before, "after": p.nodes_after,
        "changed": p.changed, "notes": list(p.notes),
    }  # fmt: skip


def _lines(lines: Sequence[str]) -> list[str]:
    more = len(lines) - LINES
    return [*(_cut(t) for t in lines[:LINES]), *([f"… and {more} more"] if more > 0 else [])]


def _cut(text: str) -> str:
    return text if len(text) <= LINE else text[: LINE - 1] + "…"


def _shape(v: Value) -> str:
    """`1x64x56x56`, as on edges of Netron."""
    return "x".join(map(str, v.type.shape)) or str(v.type.dtype)
