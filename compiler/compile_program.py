"""A graph to a program: passes, schedules, machine code, checks. The one way for all backends that compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache as cache_result
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
from dnnc.kept_programs import KeptPrograms
from dnnc.memory import check_program, check_scheduled
from dnnc.options import CompileOptions, check_every_pass, for_prologue, steps_down
from dnnc.passes.base import FOLD_LIMIT, PassContext, PassManager, PassRecord, pass_context, remark
from dnnc.passes.pipelines import compile_program as schedule_graph
from dnnc.passes.planning.ladder import built
from dnnc.passes.planning.program import ScheduledGraph
from dnnc.passes.schedule.problem import Template
from dnnc.program_key import ProgramKey, program_key
from dnnc.report import LADDER, ProgramReport
from dnnc.report.collect import program_report
from dnnc.report.log import Laps
from dnnc.schedules import keeps_programs, schedules_for
from dnnc.tools.accuracy import check_model
from dnnc.tune_option import choose_of, revise_of, rounds_products, tell

if TYPE_CHECKING:
    from dnnc.graph_compiler import GraphCompiler


def context_of(options: CompileOptions, backend: Backend, fold_limit: int = FOLD_LIMIT) -> PassContext:
    """What passes may ask. `fold_limit`: bytes up to which values are computed while compiling."""
    facts = backend.facts(options.numerics)
    if options.tune is not None:  # a log names schedules of kernels that know their sizes
        facts = replace(facts, parallel_from=0)
    return pass_context(
        facts,
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
    dump: Callable[[str, Graph], None] | None = None,
) -> ScheduledGraph:
    """Run the graph passes (which change the graph in place), plan, and schedule kernels.

    Args:
        graph: the imported graph.
        backend: schedules and facts of the target.
        options: of the compilation.
        manager: keeps records of the passes.
        cache: keeps schedules.
        dump: see PassContext.
    """
    choose, context = choose_of(options, backend, cache), replace(context_of(options, backend), dump=dump)
    if not graph.donated:  # a model is compiled once and called often, and kernels that know their sizes are faster
        context = replace(context, facts=replace(context.facts, parallel_from=0))
    scheduled = schedule_graph(
        graph,
        context,
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
    laps, shared = Laps(), c.serves_all(dims)
    lows = (c.shared or {}) if shared else None
    sizes = [] if shared else sorted((v.name, n) for v, n in dims.items())
    graph, options, backend, cache = c.graph, c.options, c.backend, c.cache
    kept, key = _kept(c, graph, options, sizes, lows)
    found = None if key is None else kept.find(key, graph, c.job(None).find, backend)
    if found is None:
        program, records, final = _new(c, dict(sizes), lows, laps)
        if key is not None and final:
            kept.put(key, graph, program, records)
            laps.lap("link")
    else:
        program, records = found
        # `c`, which notes the report of this program, stays out of it
        program.make_scheduled = lambda: schedule(_specialised(graph, dict(sizes), lows), backend, options, cache=cache)
        if not program.dims:
            check_program(program, c.inputs, c.outputs)
        _bind(c, program)
        laps.lap("load")
    if c.options.verify == "model" and c.backend.present and all(dims.values()):
        instance, donation = c.instance(program, dims), Donation(c.pairs, c.inputs, bool(graph.held))
        checked = graph if c.parameters is None else c.parameters.frozen(graph)
        check_model(lambda *arrays: donation.checked(instance, arrays), checked, dims, c.outputs, c.options.precision)
        laps.lap("check model")
    noted = [remark("cache", len(graph), cache.notes)] if cache.notes else []
    fallbacks = backend.fallbacks(program)

    def report() -> ProgramReport:
        told = program_report(program, dims, shared, [*records, *noted], laps.seconds, fallbacks)
        return replace(told, kept=found is not None)

    c.log.add(report() if found is None else cache_result(report))  # the memory curve takes as long as all else
    return program


def rescheduled(
    c: GraphCompiler, program: ProgramReport, dump: Callable[[str, Graph], None] | None = None
) -> ScheduledGraph:
    """A program of this model scheduled again from the imported graph, to look at its stages. `dump`: see PassContext.

    The choices are those of the compilation: they follow from the graph, the options and the tuning log.
    """
    graph = _specialised(c.graph, {} if program.symbolic else program.dims, c.shared if program.symbolic else None)
    return schedule(graph, c.backend, c.options, cache=c.cache, dump=dump)


def _specialised(graph: Graph, sizes: Mapping[str, int], lows: Mapping[str, int] | None) -> Graph:
    """A new graph for these sizes, or for all from these bounds on."""
    if lows is None:
        return specialise(graph, sizes)
    return specialise(bound_dims(graph, {n: (low, None) for n, low in lows.items()}), {})


def _kept(
    c: GraphCompiler,
    graph: Graph,
    options: CompileOptions,
    sizes: Sequence[tuple[str, int]] = (),
    lows: Mapping[str, int] | None = None,
) -> tuple[KeptPrograms, ProgramKey | None]:
    """The programs of earlier compilations, and the key of this one; None where nothing is kept."""
    names = (c.inputs, c.outputs) if graph is c.graph else ((), ())
    key = program_key(graph, sizes, lows, names, options, c.backend) if keeps_programs(c.backend, c.cache) else None
    return KeptPrograms(c.cache), key


def _new(
    c: GraphCompiler, sizes: Mapping[str, int], lows: Mapping[str, int] | None, laps: Laps
) -> tuple[Program, tuple[PassRecord, ...], bool]:
    """A program with records of its passes and remarks; False if it is not the best that a compilation can give."""
    manager = PassManager()
    scheduled = schedule(_specialised(c.graph, sizes, lows), c.backend, c.options, manager, c.cache)
    laps.lap("passes")
    job = c.job(laps.through(c.progress))

    def build(scheduled: ScheduledGraph) -> Program:
        if not scheduled.dims:  # sizes are known: what cannot be called is not compiled; a check takes as much memory
            check_scheduled(scheduled, c.inputs, c.outputs)
        program = c.backend.build(scheduled, job)
        laps.lap("link")
        if _bind(c, program):
            laps.lap("prologue")
        c.backend.check(program, job)
        return program

    scheduled, program = built(scheduled, build)
    laps.lap("link")
    return program, (*manager.records, *_notes(c, scheduled)), not scheduled.steps_down


def _bind(c: GraphCompiler, program: Program) -> bool:
    """Give a program what it reads of parameters; True if a prologue was compiled."""
    prologue = program.prologue
    if prologue is not None and c.backend.present:
        program.prologue = prologue.compiled(lambda part: _packer(c, part), c.packers)
    if c.parameters is not None and c.backend.device is not None:
        c.parameters.load(program, c.backend.bind_parameters)
    return prologue is not None and c.backend.present


def _packer(c: GraphCompiler, graph: Graph) -> Pack:
    """What runs a prologue's graph, compiled."""
    options, job = for_prologue(c.options), replace(c.job(None), code={}, checked=frozenset())
    kept, key = _kept(c, graph, options)
    found = None if key is None else kept.find(key, graph, job.find, c.backend)
    if found is not None:
        return c.backend.packer(found[0])

    def build(scheduled: ScheduledGraph) -> Program:
        program = c.backend.build(scheduled, job)
        c.backend.check(program, job)
        return program

    scheduled, program = built(schedule(graph.copy(), c.backend, options, cache=c.cache), build)
    if key is not None and not scheduled.steps_down:
        kept.put(key, graph, program, ())
    return c.backend.packer(program)


def _notes(c: GraphCompiler, scheduled: ScheduledGraph) -> list[PassRecord]:
    """Remarks as records of the report: schedules that had to step down, kernels that are not checked, and so on."""
    checked = c.options.verify and not scheduled.dims
    remarks: dict[str, Any] = {
        LADDER: scheduled.steps_down,
        "kernel check": not_checked(scheduled.kernels, {}, c.backend.check_limit) if checked else (),
        **c.backend.notes(scheduled),
        "donate": copied(scheduled, c.outputs),
    }
    return [remark(name, len(scheduled.graph), tuple(n)) for name, n in remarks.items() if n]
