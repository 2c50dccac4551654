"""The driver's stages for CUDA targets, for models with and without host steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from dnnc.backends.cuda.build import Compiler, Given, NvrtcCompiler, build, step_call
from dnnc.backends.cuda.device import open_device
from dnnc.backends.cuda.facts import facts
from dnnc.backends.cuda.gate import MAX_STEPS
from dnnc.backends.cuda.graph import LoadedProgram
from dnnc.backends.cuda.instance import CudaInstance
from dnnc.backends.cuda.library import described, need
from dnnc.backends.cuda.native import CudaNative, Device
from dnnc.backends.cuda.packer import Packer
from dnnc.backends.cuda.templates import library
from dnnc.backends.llvm.gate_work import not_checked
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.prologue import Pack
from dnnc.contexts import context_of
from dnnc.device_calls import CudaCalls
from dnnc.donation import Donation, copied, donated
from dnnc.executable import Executable
from dnnc.hybrid import HybridCompiler, staged
from dnnc.ir.errors import DnncError, InternalError, TargetError
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.ir.shapes import specialise
from dnnc.ir.target import parse_target as parse_words
from dnnc.memory import check_program
from dnnc.options import CompileOptions, for_prologue, thread_count
from dnnc.parameters import Parameters, frozen
from dnnc.passes.analysis.segments import needs_host
from dnnc.passes.base import PassManager, PassRecord
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.ladder import Failure, built, fail
from dnnc.passes.planning.program import Program
from dnnc.passes.schedule.problem import Template
from dnnc.program_cache import ModelCompiler, OnnxParts, ProgramCache
from dnnc.report import LADDER, Report
from dnnc.report.collect import program_report
from dnnc.report.log import Laps, Log, Progress
from dnnc.schedules import schedules_for
from dnnc.signature import Signature
from dnnc.tools.accuracy import check_model
from dnnc.tune_option import choose_of, revise_of, rounds_products, tell

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget
    from dnnc.tools.profile import Profile


@dataclass(frozen=True)
class Machine:
    """What compiles and runs programs for a device. `present`: there is one, so kernels are checked while compiling."""

    target: GpuTarget
    compiler: Compiler
    templates: Sequence[Template]
    device: Callable[[], Device]
    present: bool


def cuda_machine(options: CompileOptions) -> Machine:
    """The machine of a target such as `cuda:1` or `cuda -arch=sm_90a`. TargetError where it is none, or NVRTC is
    missing.
    """
    from dnnc.backends.cuda.target import ask_device, parse_target, why_no_device
    from dnnc.backends.cuda.templates import templates

    target = parse_words(str(options.target))
    number, gpu = parse_target(str(options.target))

    @cache
    def device() -> Device:  # asking takes a millisecond or two
        found = ask_device(number)
        if found is not None and found.arch != gpu.arch:
            raise TargetError(
                f"device {number} is {found.arch}, and this program is for {gpu.arch}: compile it with "
                f"target='cuda:{number}'"
            )
        if found is None and target.option("arch"):
            raise TargetError(
                f"this program is for {gpu.arch} and cannot run here: {why_no_device(number)}; save it with "
                "f.save('model.dnnc') and load it on a "
                f"machine with such a GPU"
            )
        return open_device(number)

    here = ask_device(number)
    present = here is not None and here.arch == gpu.arch
    strict = options.numerics == "strict"
    own = templates(gpu, rounds_products(options), strict)
    return Machine(
        gpu,
        NvrtcCompiler(thread_count(options.threads)),
        own if strict else (*own, *library.library_templates()),
        device,
        present,
    )


def compile_for_device(
    graph: Graph,
    names: tuple[Sequence[str], Sequence[str]],
    opts: CompileOptions,
    cache: KernelCache,
    machine: Machine,
    progress: Progress | None = None,
    import_seconds: float = 0.0,
    onnx: Callable[[], OnnxParts] | None = None,
    given: Given | None = None,
    notes: tuple[str, ...] = (),
    parameters: Parameters | None = None,
) -> Executable:
    """Compile a graph whose dims are as the options say; see `dnnc.driver.compile_graph`. `given`: code out of a saved
    model.
    """
    if needs_host(graph):
        own = replace(
            opts, dims={}, outputs=(), verify="kernels" if opts.verify else False
        )  # random values between steps would mean nothing

        def make(segment: Graph, shared: bool) -> Executable:
            inner = [v.name for v in segment.inputs], [v.name for v in segment.outputs]
            return Executable(
                CudaCompiler(segment, inner, own, machine, Log(segment.name, str(opts.target), 1), cache, progress)
            )

        return staged(HybridCompiler(graph, names, opts, machine.target, 1, import_seconds, make, onnx, machine.device))
    log = Log(graph.name, str(opts.target), 1, import_seconds, notes)
    f = Executable(CudaCompiler(graph, names, opts, machine, log, cache, progress, given, parameters, onnx), parameters)
    if not graph.dims:
        f.prepare([tuple(int(str(d)) for d in v.type.shape) for v in graph.inputs])
    return f


class CudaCompiler(ModelCompiler):
    """Programs of one graph for a CUDA device; each shape has one of its own."""

    def __init__(
        self,
        graph: Graph,
        names: tuple[Sequence[str], Sequence[str]],
        options: CompileOptions,
        machine: Machine,
        log: Log,
        cache: KernelCache,
        progress: Progress | None = None,
        given: Given | None = None,
        parameters: Parameters | None = None,
        onnx: Callable[[], OnnxParts] | None = None,
    ) -> None:
        """`given`: code out of a saved model."""
        self.interface, (self.inputs, self.outputs) = graph, names
        self.options, self.machine, self.target, self.log, self.onnx = options, machine, machine.target, log, onnx
        self.cache, self.progress, self.given, self.parameters = cache, progress, given, parameters
        self._instances: weakref.WeakSet[CudaInstance] = weakref.WeakSet()
        self._packers: dict[str, Pack] = {}  # compiled parts of prologues, by the text of their graph
        self._before: list[
            LoadedProgram
        ] = []  # with the weights of before the last refit: work of theirs may still be queued

    @property
    def graph(self) -> Graph:
        return self.interface

    def compile(self, dims: Mapping[Var, int]) -> CudaNative:
        laps, manager = Laps(), PassManager()
        program = make_program(
            specialise(self.graph, {v.name: n for v, n in dims.items()}),
            self.machine,
            self.options,
            manager,
            self.cache,
        )
        laps.lap("passes")
        m = self.machine
        spare: dict[str, bytes] = {}

        def build_one(program: Program) -> CudaNative:
            check_program(program, self.inputs, self.outputs)
            native = build(
                program,
                m.target,
                self.cache,
                m.compiler,
                bool(self.options.verify),
                laps.through(self.progress),
                self.given,
                spare,
            )
            laps.lap("link")
            if native.prologue is not None and m.present:
                native.prologue = native.prologue.compiled(self._packer, self._packers)
            if self.parameters is not None:
                self.parameters.load(native)
            if m.present:
                check_native(native, m.device(), laps.through(self.progress))
            return native

        program, native = built(program, build_one)
        if m.present:
            self._try(native, dims, laps)
        notes = not_checked(program.kernels, {}, MAX_STEPS) if self.options.verify else ()
        copies = copied(program, self.outputs)
        said = {
            LADDER: program.steps_down,
            "kernel gate": notes,
            "libraries": library_notes(program),
            "donate": copies,
            "cache": self.cache.notes,
        }
        size = len(program.graph)
        gaps = [PassRecord(name, 0.0, size, size, False, tuple(n)) for name, n in said.items() if n]
        report = program_report(native, dims, False, [*manager.records, *gaps], laps.seconds)
        stepwise = tuple(f"{where} (the host reads its condition)" for where in native.stepwise())
        self.log.add(replace(report, fallbacks=(*report.fallbacks, *stepwise)))
        return native

    def _packer(self, graph: Graph) -> Packer:
        """A program for what a prologue computes."""
        options, m = for_prologue(self.options), self.machine
        program = make_program(graph, m, options, cache=self.cache)

        def build_one(program: Program) -> CudaNative:
            native = build(program, m.target, self.cache, m.compiler, bool(options.verify))
            check_native(native, m.device())
            return native

        return Packer(built(program, build_one)[1], m.device())

    def _try(self, native: CudaNative, dims: Mapping[Var, int], laps: Laps) -> None:
        """Check the whole model, if that is asked for."""
        if self.options.verify == "model" and all(dims.values()):
            donation = Donation(donated(self.graph, (self.inputs, self.outputs), self.options.donate), self.inputs)
            instance = self.instance(native, dims)
            graph = self.graph if self.parameters is None else frozen(self.graph, self.parameters.held)
            check_model(
                lambda *arrays: donation.checked(instance, arrays), graph, dims, self.outputs, self.options.precision
            )
            laps.lap("check model")

    def instance(self, program: CudaNative, dims: Mapping[Var, int]) -> CudaInstance:
        instances = self._instances
        instance = CudaInstance(
            program, self.machine.device, lambda: [p for i in list(instances) if (p := i.ready) is not None]
        )
        instances.add(instance)
        if self.machine.present and not instance.empty:
            instance.loaded()
        return instance

    def refitted(self, instances: Sequence[CudaInstance]) -> None:
        """New weights are loaded at the next call."""
        self._before = [p for i in instances if (p := i.reload()) is not None]

    def device_calls(self, signature: Signature, donation: Donation | None, cache: ProgramCache) -> CudaCalls:
        return CudaCalls(self.machine.device, signature, donation, cache)

    def report(self, signature: Signature, programs: Sequence[CudaNative]) -> Report:
        """Says too how many kernels no device has checked."""
        told, fresh = self.log.report(signature), sum(len(n.checks) for n in programs)
        return (
            told
            if not fresh
            else replace(
                told, notes=(*told.notes, f"{fresh} kernels unverified: each is checked when a device first loads it")
            )
        )

    def source(self, program: CudaNative, stage: str, kernel: str | None) -> str:
        from dnnc.report.device_sources import sources_of

        return sources_of(program, self.target).text(stage, kernel)

    def profile(self, f: Executable, collect: Callable[[], list[Any]], repeats: int | None) -> Profile:
        from dnnc.tools.device_profile import profile

        arrays = collect()
        instance = f.cache.instance(tuple([a.shape for a in arrays]))
        assert isinstance(instance, CudaInstance)
        return profile(f.report, instance, arrays, self.target, repeats)

    def save(
        self, path: Any, programs: Mapping[tuple[int, ...], CudaNative], small: bool, archs: Sequence[str]
    ) -> None:
        """The graph, and the machine code of the programs so far. Loading runs the passes again; `small` makes no
        difference.
        """
        from dnnc.artifact.writer import save_device

        cubins: dict[str, bytes] = {}
        checked: set[str] = set()
        others = [self._elsewhere(a) for a in dict.fromkeys(archs) if a != self.target.arch]
        dims = [dict(zip(sorted(self.graph.dims.values(), key=lambda v: v.name), sizes)) for sizes in programs]
        for native in (*(c.compile(d) for c in others for d in dims), *programs.values()):
            cubins.update(native.cubins)
            checked |= set(native.cubins) - set(native.checks)
        names = self.inputs, self.outputs
        save_device(
            path, self.graph, names, self.options, (cubins, checked), None if self.onnx is None else self.onnx()
        )

    def _elsewhere(self, arch: str) -> CudaCompiler:
        """The same model for another architecture."""
        options = replace(self.options, target=f"cuda -arch={arch}", dims={})
        log, machine = Log(self.graph.name, str(options.target), 1), cuda_machine(options)
        return CudaCompiler(
            self.graph,
            (self.inputs, self.outputs),
            options,
            machine,
            log,
            self.cache,
            self.progress,
            None,
            self.parameters,
        )


def check_native(native: CudaNative, device: Device, tell: Progress | None = None) -> dict[str, Any]:
    """Load the kernels of a program and check those that no device has checked. Returns the functions by symbol; raises
    as `build` does.
    """
    program = native.program
    assert program is not None
    steps = {native.symbols[s.text]: s for s in program.kernels}
    functions, failures = {}, []
    for symbol in native.cubins:
        try:
            functions[symbol] = native.function(symbol, device)
        except InternalError as e:
            failures.append(Failure(steps[symbol], "loading", e))
    count = len(native.checks)
    for k, symbol in enumerate([s for s in native.checks if s in functions]):
        try:
            native.check(symbol, device, functions[symbol])
        except DnncError as e:
            failures.append(Failure(steps[symbol], "kernel check", e))
        if tell is not None:
            tell("check", k + 1, count)
    fail(program, failures)
    return functions


def library_notes(program: Program) -> tuple[str, ...]:
    """For the report: the kernels that are calls of libraries, and of which version."""
    called = {s.text: (s.kernel, call) for s in program.kernels if (call := step_call(s)) is not None}
    return tuple(f"{k.name} is a library call: {described(call)}, version {need(k)}" for k, call in called.values())


def make_program(
    graph: Graph,
    machine: Machine,
    opts: CompileOptions,
    manager: PassManager | None = None,
    cache: KernelCache | None = None,
) -> Program:
    """Graph passes (which change the graph in place), plans, scheduled kernels. `cache`: keeps schedules."""
    ctx = context_of(opts, facts(machine.target, opts.numerics))
    choose = choose_of(opts, f"cuda -arch={machine.target.arch}", cache)
    known = schedules_for(opts, machine.target, cache)
    program = compile_program(graph, ctx, machine.templates, choose, opts.opt_level, manager, revise_of(choose), known)
    tell(choose, program, manager)
    return program
