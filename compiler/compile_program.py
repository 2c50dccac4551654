"""A graph to a program: passes, schedules, machine code, checks. The one way for all backends that compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dnnc.backends.base import Backend
from dnnc.backends.check_cost import not_checked
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.program import Program
from dnnc.backends.runtime.prologue import Pack
from dnnc.donation import Donation, copied
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.ir.shapes import bound_dims, specialise
from dnnc.memory import check_program
from dnnc.options import CompileOptions, check_every_pass, for_prologue, steps_down
from dnnc.passes.base import FOLD_LIMIT, PassContext, PassManager, PassRecord, pass_context
from dnnc.passes.pipelines import compile_program as schedule_graph
from dnnc.passes.planning.ladder import built
from dnnc.passes.planning.program import ScheduledGraph
from dnnc.passes.schedule.problem import Template
from dnnc.report import LADDER
from dnnc.report.collect import program_report
from dnnc.report.log import Laps
from dnnc.schedules import schedules_for
from dnnc.tools.accuracy import check_model
from dnnc.tune_option import choose_of, revise_of, rounds_products, tell

if TYPE_CHECKING:
    from dnnc.graph_compiler import GraphCompiler


def context_of(options: CompileOptions, backend: Backend, fold_limit: int = FOLD_LIMIT) -> PassContext:
    """What passes may ask. `fold_limit`: bytes up to which values are computed while compiling."""
    return pass_context(
        backend.facts(options.numerics),
        numerics=options.numerics,
        precision=options.precision,
        fold_limit=fold_limit,
        memory=None if options.memory is None else int(options.memory),
        fallback=steps_down(options),
        check=check_every_pass(),
    )


def templates_of(options: CompileOptions, backend: Backend) -> list[Template]:
    """The schedules that a compilation may choose from."""
    rounded = backend.rounds_products and rounds_products(options)
    return [*backend.templates(options.numerics, rounded), *backend.library_templates(options.numerics)]


def schedule(
    graph: Graph,
    backend: Backend,
    options: CompileOptions,
    manager: PassManager | None = None,
    cache: KernelCache | None = None,
) -> ScheduledGraph:
    """Run the graph passes (which change the graph in place), plan, and schedule kernels. `cache` keeps schedules."""
    choose = choose_of(options, backend, cache)
    scheduled = schedule_graph(
        graph,
        context_of(options, backend),
        templates_of(options, backend),
        choose,
        options.opt_level,
        manager,
        revise_of(choose),
        schedules_for(options, backend, cache),
        backend.passes(options.opt_level),
    )
    tell(choose, scheduled, manager)
    return scheduled


def compile_program(c: GraphCompiler, dims: Mapping[Var, int]) -> Program:
    """A program for these dims, or for all that it may serve."""
    laps, manager = Laps(), PassManager()
    shared, graph = c.serves_all(dims), c.graph
    if shared:
        g = specialise(bound_dims(graph, {n: (low, None) for n, low in (c.shared or {}).items()}), {})
    else:
        g = specialise(graph, {v.name: n for v, n in dims.items()})
    scheduled = schedule(g, c.backend, c.options, manager, c.cache)
    laps.lap("passes")
    job = c.job(laps.through(c.progress))

    def build(scheduled: ScheduledGraph) -> Program:
        if not scheduled.dims:  # sizes are known: what cannot be called is not compiled; a check takes as much memory
            check_program(scheduled, c.inputs, c.outputs)
        program = c.backend.build(scheduled, job)
        laps.lap("link")
        if program.prologue is not None and c.backend.present:
            program.prologue = program.prologue.compiled(lambda part: _packer(c, part), c.packers)
            laps.lap("prologue")
        if c.parameters is not None and c.backend.device is not None:
            c.parameters.load(program, c.backend.bind_parameters)
        c.backend.check(program, job)
        return program

    scheduled, program = built(scheduled, build)
    laps.lap("link")
    if c.options.verify == "model" and c.backend.present and all(dims.values()):
        instance, donation = c.instance(program, dims), Donation(c.pairs, c.inputs, bool(graph.held))
        checked = graph if c.parameters is None else c.parameters.frozen(graph)
        check_model(lambda *arrays: donation.checked(instance, arrays), checked, dims, c.outputs, c.options.precision)
        laps.lap("check model")
    records = [*manager.records, *_notes(c, scheduled)]
    report = program_report(program, dims, shared, records, laps.seconds)
    c.log.add(replace(report, fallbacks=(*report.fallbacks, *c.backend.fallbacks(program))))
    return program


def _packer(c: GraphCompiler, graph: Graph) -> Pack:
    """What runs a prologue's graph, compiled."""
    options, job = for_prologue(c.options), replace(c.job(None), code={}, checked=frozenset())

    def build(scheduled: ScheduledGraph) -> Program:
        program = c.backend.build(scheduled, job)
        c.backend.check(program, job)
        return program

    return c.backend.packer(built(schedule(graph, c.backend, options, cache=c.cache), build)[1])


def _notes(c: GraphCompiler, scheduled: ScheduledGraph) -> list[PassRecord]:
    """Remarks as records of the report: schedules that had to step down, kernels that are not checked, and so on."""
    size = len(scheduled.graph)
    checked = c.options.verify and not scheduled.dims
    remarks: dict[str, Any] = {
        LADDER: scheduled.steps_down,
        "kernel check": not_checked(scheduled.kernels, {}, c.backend.check_limit) if checked else (),
        **c.backend.notes(scheduled),
        "donate": copied(scheduled, c.outputs),
        "cache": c.cache.notes,
    }
    return [PassRecord(name, 0.0, size, size, False, tuple(n)) for name, n in remarks.items() if n]
