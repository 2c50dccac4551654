"""A graph to machine code for a CPU: passes, schedules, kernels compiled and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dnnc.backends.llvm.build import build
from dnnc.backends.llvm.facts import facts
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.gate import check_kernel
from dnnc.backends.llvm.gate_work import not_checked
from dnnc.backends.llvm.instance import CpuInstance
from dnnc.backends.llvm.native import Native
from dnnc.backends.llvm.templates import templates
from dnnc.backends.llvm.worker_pool import CompileService
from dnnc.backends.runtime.frames import aligned_array
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.prologue import Pack
from dnnc.contexts import context_of
from dnnc.cpu_compiler import Array, CpuCompiler
from dnnc.donation import Donation, copied
from dnnc.executable import Executable
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.ir.shapes import bound_dims, lows_without_empties, specialise
from dnnc.memory import check_program
from dnnc.options import CompileOptions, for_prologue, thread_count
from dnnc.parameters import frozen
from dnnc.passes.base import PassManager, PassRecord
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.ladder import built
from dnnc.passes.planning.program import Program
from dnnc.report import LADDER
from dnnc.report.collect import program_report
from dnnc.report.log import Laps, Log, Progress
from dnnc.schedules import schedules_for
from dnnc.tools.accuracy import check_model
from dnnc.tune_option import choose_of, revise_of, tell


def compile_native(c: CpuCompiler, dims: Mapping[Var, int]) -> Native:
    """A program for these dims, or for all that it may serve."""
    laps, manager = Laps(), PassManager()
    common, graph = c.serves_all(dims), c.graph
    if common:
        g = specialise(bound_dims(graph, {n: (low, None) for n, low in (c.shared or {}).items()}), {})
    else:
        g = specialise(graph, {v.name: n for v, n in dims.items()})
    program = make_program(g, c.target, c.options, manager, c.cache)
    laps.lap("passes")
    spare: dict[str, bytes] = {}

    def build_one(program: Program) -> Native:
        if (
            not program.dims
        ):  # sizes are known: what cannot be called need not be compiled, and checking its kernels takes as much memory
            check_program(program, c.inputs, c.outputs)
        return build_native(program, c.target, c.options, c.cache, laps.through(c.progress), c.objects, spare)

    program, native = built(program, build_one)
    laps.lap("link")
    if native.prologue is not None:
        native.prologue = native.prologue.compiled(lambda part: _packer(part, c), c.packers)
        laps.lap("prologue")
    if c.options.verify == "model" and all(dims.values()):
        instance, donation = c.instance(native, dims), Donation(c.pairs, c.inputs)
        checked = graph if c.parameters is None else frozen(graph, c.parameters.held)
        check_model(lambda *arrays: donation.checked(instance, arrays), checked, dims, c.outputs, c.options.precision)
        laps.lap("check model")
    c.log.add(program_report(native, dims, common, [*manager.records, *_notes(c, program)], laps.seconds))
    return native


def _packer(graph: Graph, c: CpuCompiler) -> Pack:
    """A program for what a prologue computes."""
    types = [v.type for v in graph.outputs]
    options = for_prologue(c.options)
    program = make_program(graph, c.target, options, cache=c.cache)
    _, native = built(program, lambda p: build_native(p, c.target, options, c.cache, None))
    instance = CpuInstance(native, {}, c.threads, [], None, frozenset())

    def pack(arrays: Sequence[Array]) -> list[Array]:
        results = [aligned_array([int(str(d)) for d in t.shape], t.dtype.numpy) for t in types]
        instance.into(arrays, results)
        return results

    return pack


def _notes(c: CpuCompiler, program: Program) -> list[PassRecord]:
    """Which kernels are too long for the check, and which outputs are not made where they end, as records of the
    report.
    """
    size = len(program.graph)
    notes = not_checked(program.kernels, {}) if c.options.verify and not program.dims else ()
    said = {
        LADDER: program.steps_down,
        "kernel gate": notes,
        "donate": copied(program, c.outputs),
        "cache": c.cache.notes,
    }
    return [PassRecord(name, 0.0, size, size, False, n) for name, n in said.items() if n]


def has_control(graph: Graph) -> bool:
    """Are there loops or branches? Their functions are made for fixed sizes."""
    return any("control" in n.op.traits for n in graph.nodes())


def segment_maker(
    opts: CompileOptions, cpu: CpuTarget, cache: KernelCache, progress: Progress | None
) -> Callable[[Graph, bool], Executable]:
    """A function that compiles segments between host steps: for all sizes, or (False) for each that comes."""
    threads = min(thread_count(opts.threads), cpu.threads)
    own = replace(
        opts, dims={}, outputs=(), verify="kernels" if opts.verify else False
    )  # random values between steps would mean nothing

    def make(graph: Graph, shared: bool) -> Executable:
        empties = {n: 1 for n, x in graph.dims.items() if x.lo == 0}  # no elements: a program of their own
        all_sizes = shared and not has_control(graph)
        lows = (
            {**empties, **lows_without_empties(bound_dims(graph, {n: (1, None) for n in empties}))}
            if all_sizes
            else None
        )
        log = Log(graph.name, str(opts.target), threads)
        names = [v.name for v in graph.inputs], [v.name for v in graph.outputs]
        return Executable(CpuCompiler(graph, names, own, cpu, log, cache, lows, progress=progress))

    return make


def make_program(
    graph: Graph,
    cpu: CpuTarget,
    opts: CompileOptions,
    manager: PassManager | None = None,
    cache: KernelCache | None = None,
) -> Program:
    """Graph passes (which change the graph in place), plans, scheduled kernels. `cache`: keeps schedules."""
    ctx = context_of(opts, facts(cpu, opts.numerics))
    choose = choose_of(opts, kept=cache)
    known = schedules_for(opts, cpu, cache)
    program = compile_program(
        graph, ctx, templates(cpu, ctx.strict), choose, opts.opt_level, manager, revise_of(choose), known
    )
    tell(choose, program, manager)
    return program


def build_native(
    program: Program,
    cpu: CpuTarget,
    opts: CompileOptions,
    cache: KernelCache,
    progress: Progress | None,
    given: Mapping[str, bytes] | None = None,
    spare: dict[str, bytes] | None = None,
) -> Native:
    """Machine code for a program, its new kernels checked. `given`: objects by symbol, out of a saved model; `spare`:
    see `build`.
    """
    graphs = {id(step): graph for step, graph in program.walk()}
    check = (lambda step, address: check_kernel(graphs[id(step)], step, address)) if opts.verify else None
    with CompileService(cpu.threads) as service:
        return build(program, cpu, cache, service, check, progress, given, flush=opts.numerics == "fast", spare=spare)
