"""From a model to an Executable: the stages in order. The only module that sees all parts of the compiler."""

from __future__ import annotations

import difflib
import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Union

from dnnc.accuracy import check_model
from dnnc.backends.cache import KernelCache
from dnnc.backends.llvm.build import build
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.features import parse_target as parse_cpu
from dnnc.backends.llvm.gate import check_kernel
from dnnc.backends.llvm.gate_work import not_checked
from dnnc.backends.llvm.native import Native
from dnnc.backends.llvm.spelling import spelled
from dnnc.backends.llvm.templates import recurrence, templates
from dnnc.backends.llvm.worker_pool import CompileService
from dnnc.backends.runtime import runtime
from dnnc.bound import of_function, of_graph
from dnnc.donation import copied, donated
from dnnc.executable import Executable
from dnnc.ir import checks
from dnnc.ir.errors import InputError, ShapeError, UnsupportedError, a_type
from dnnc.ir.expr import Var
from dnnc.ir.form import ARRAY
from dnnc.ir.graph import Graph, identifier
from dnnc.ir.shapes import bound_dims, lows_without_empties, specialise
from dnnc.ir.target import parse_target
from dnnc.late import Given, LateExecutable, Special, Test
from dnnc.memory import check_possible, check_program
from dnnc.options import CompileOptions, cache_folder, check_every_pass, make_options, steps_down, thread_count
from dnnc.origin import OnnxParts, Origin
from dnnc.parameters import Parameters, frozen, with_parameters
from dnnc.passes.base import PassContext, PassManager, PassRecord
from dnnc.passes.graph.segments import needs_host
from dnnc.passes.ladder import built
from dnnc.passes.pipelines import compile_program
from dnnc.passes.program import Program
from dnnc.reference import ReferenceExecutable
from dnnc.report import LADDER
from dnnc.report.collect import program_report
from dnnc.report.log import Laps, Log
from dnnc.schedules import schedules_for
from dnnc.signature import TensorSpec
from dnnc.staged import Make, StagedExecutable
from dnnc.tuned import choose_of, resolved, revise_of, tell

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dnnc.compiled import CompiledModel
    from dnnc.device_driver import Machine
    from dnnc.device_executable import DeviceExecutable
    from dnnc.options import Options

__all__ = ["Executable", "TensorSpec", "compile"]

Progress = Callable[[str, int, int], None]
LARGEST = (1 << 31) - 1  # what a size may be of which nothing is said


Made = Union[Executable, ReferenceExecutable, StagedExecutable, "DeviceExecutable"]
Compiled = Union[Made, LateExecutable]


def compile(
    model: Any,
    progress: Progress | None = None,
    *,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | Sequence[str] | bool | None = None,
    **options: Unpack[Options],
) -> CompiledModel:
    """Compile a model.

    Args:
        model: path to an .onnx file, its bytes, an onnx.ModelProto, a dnnc.ir Graph, a function of array code, a torch.nn.Module, or a program
            of torch.export.
        progress: called with (stage, done, of) while kernels compile.
        inputs: of a function: what `dnnc.trace` takes, a Spec for each array; or a dict of them by the names of its arguments.
        parameters: weights that are bound by reference and may be replaced or changed by their owner, see `Executable.refit`: of a function a
            dict by the names of its arguments, which then are none of a call's, or of any names for arrays of dnnc.array that it captures; of an
            ONNX model the names of initializers, a dict of arrays for them, or True for all float ones; of a graph constants or inputs likewise.
        **options: see CompileOptions.

    Returns:
        A callable; see Executable.

    Raises:
        DnncError: a subclass that says what is wrong with the model, the options or the target.
    """
    opts = make_options(options)
    checks.optional_function(progress, "progress")
    check_parameters(parameters)
    if is_torch(model):
        from dnnc.torch_program import compile_module

        module: Any = compile_module(model, inputs, progress, opts, options)  # a TorchProgram is called as PyTorch calls a module
        return module  # type: ignore[no-any-return]
    bound: Mapping[str, Any] | None = None
    if inputs is not None or inspect.isroutine(model) or hasattr(model, "__wrapped__"):
        model, bound = traced_graph(model, inputs, parameters)
        opts = open_dims(opts, model)
    elif isinstance(model, Graph) and parameters:
        model, bound = of_graph(model, () if isinstance(parameters, bool) else parameters)
    if parameters and isinstance(opts.tune, (int, float)):
        raise InputError("tune: a search takes no parameters; tune the model without them, and give the log to this compilation")
    if isinstance(opts.tune, (int, float)):
        return tuned_first(model, opts.tune, progress, options)
    opts = resolved(opts)
    if isinstance(model, Graph):
        return compile_graph(model, ([v.name for v in model.inputs], [v.name for v in model.outputs]), opts, progress, parameters=bound)
    if isinstance(model, (str, os.PathLike, bytes, bytearray)) or type(model).__name__ == "ModelProto":
        return compile_onnx(model, opts, progress) if not parameters else compile_bound(model, parameters, opts, progress)
    raise InputError(
        f"cannot compile {a_type(model)}: expected a path to an .onnx file, its bytes, a ModelProto, a dnnc.ir.Graph, or a function and its inputs"
    )


def check_parameters(parameters: Any) -> None:
    """InputError for what is neither a dict of arrays by name, nor a sequence of names, nor a bool."""
    if isinstance(parameters, Mapping):
        checks.names(list(parameters), "parameters")
    elif isinstance(parameters, str):
        raise InputError(f"parameters={parameters!r}: expected a sequence of names, such as [{parameters!r}], or a dict of arrays")
    elif parameters is not None and not isinstance(parameters, bool):
        checks.names(parameters, "parameters")


def is_torch(model: Any) -> bool:
    """Is this a module of PyTorch, or a program that it has exported? torch is not imported to say so."""
    return any(
        f"{c.__module__}.{c.__name__}" in ("torch.nn.modules.module.Module", "torch.export.exported_program.ExportedProgram")
        for c in type(model).__mro__
    )


def open_dims(opts: CompileOptions, graph: Graph) -> CompileOptions:
    """Options for a traced graph: sizes that are names are for one program to serve, unless the options say more of them."""
    return replace(opts, dims={**dict.fromkeys(graph.dims, (1, LARGEST)), **opts.dims}) if graph.dims else opts


def traced_graph(fn: Any, inputs: Sequence[Any] | Mapping[str, Any] | None, parameters: Any = None) -> tuple[Graph, Mapping[str, Any]]:
    """The graph of a function of array code, and its parameters. InputError where it is none, or nothing says what it takes."""

    if not callable(fn):
        raise InputError(f"inputs: only a function takes them, not {a_type(fn)}; sizes of a model are given by dims")
    if inputs is None:
        raise InputError("a function needs inputs=[...], a dnnc.Spec(shape, dtype) for each array; dnnc.jit finds them at each call")
    if isinstance(inputs, Mapping):
        checks.names(list(inputs), "inputs")
    else:
        inputs = checks.sequence(inputs, "inputs")
    if parameters is None:
        from dnnc.frontends.trace import trace

        return trace(fn, **inputs) if isinstance(inputs, Mapping) else trace(fn, *inputs), {}
    if not isinstance(parameters, Mapping):
        raise InputError("parameters: of a function they are a dict of arrays, by the names of its arguments")
    return of_function(fn, inputs, parameters)


def tuned_first(model: Any, budget: float, progress: Progress | None, options: Mapping[str, Any]) -> CompiledModel:
    """Search for `budget` seconds, then compile with the winners."""
    from dnnc.tuning import Event, tune

    def tell(e: Event) -> None:
        if progress is not None:
            progress("tune", min(int(e.progress.seconds), int(budget)), int(budget))

    tuned = tune(model, budget=budget, callbacks=[tell], **{n: v for n, v in options.items() if n != "tune"})
    compiled: CompiledModel = tuned.compile(progress)
    return compiled


def compile_onnx(model: Any, opts: CompileOptions, progress: Progress | None) -> Compiled:
    """Compile what `dnnc.frontends.onnx.read` takes."""
    from dnnc.frontends.onnx import NeedsValues, read_model
    from dnnc.frontends.onnx.declared import declared
    from dnnc.frontends.onnx.reader import load
    from dnnc.frontends.onnx.stored import take_apart

    start = time.perf_counter()
    opened = load(model)
    said = declared(opened)
    unknown = sorted(set(opts.dims) - set(said.dims))
    if unknown:
        raise InputError(f"dims: the model has no symbolic size {', '.join(unknown)}; it has {', '.join(said.dims) or 'none'}")

    def late(asks: tuple[str, ...] = ()) -> LateExecutable:
        return LateExecutable(said, asks, reader(model, opts, progress), needs, opts, lambda: take_apart(model))

    if not said.plain:
        f = late()
        f.prepare()
        return f
    try:
        imported = read_model(opened, dims=opts.dims)
    except (NeedsValues, ShapeError) as e:
        by_condition = isinstance(e, NeedsValues) and e.condition is not None
        asks = e.inputs if isinstance(e, NeedsValues) and not by_condition else ()
        # symbolic sizes may not show what numbers will (that two paths end with equal sizes); a model of fixed sizes is simply wrong
        if not asks and not said.dims and not by_condition:
            raise
        return late(asks)
    if any(r is not ARRAY for r in imported.results):  # though nothing is declared of them
        return late()
    del opened  # its weights are in the graph
    names = list(imported.inputs), list(imported.outputs)
    seconds = time.perf_counter() - start
    onnx = (lambda: take_apart(model)) if imported.graph.dims else None
    made = compile_graph(imported.graph, names, replace(opts, dims=_left(opts, imported.graph)), progress, seconds, onnx)
    if not isinstance(made, ReferenceExecutable) and said.dims:
        # the import takes symbolic dims to be at least 1, which lets shapes simplify; empty inputs get a program of their own
        read = rereader(model, opts, progress)
        made.when_empty(lambda shapes: read({}, dict(zip(names[0], shapes))))
    return made


def compile_bound(model: Any, parameters: Mapping[str, Any] | Sequence[str] | bool, opts: CompileOptions, progress: Progress | None) -> Made:
    """Compile an ONNX model some of whose weights are parameters. UnsupportedError where sizes depend on what they hold, or on other contents."""
    from dnnc.frontends.onnx import NeedsValues, read_model
    from dnnc.frontends.onnx.parameters import bound_weights
    from dnnc.frontends.onnx.reader import load

    start = time.perf_counter()
    opened = load(model)
    while True:
        changed, bound = bound_weights(opened, parameters)
        try:
            made = read_model(changed, dims=opts.dims)
            break
        except NeedsValues as e:
            own = set(e.inputs) & set(bound)
            if not own or not isinstance(parameters, bool):
                what = f"the contents of {', '.join(sorted(own))} steer it" if own else str(e)
                raise UnsupportedError(f"parameters: the model cannot be compiled with weights that are not known: {what}") from e
            parameters = [n for n in bound if n not in own]
    names = list(made.inputs), list(made.outputs)
    return compile_graph(made.graph, names, replace(opts, dims=_left(opts, made.graph)), progress, time.perf_counter() - start, None, bound)


def needs(error: Exception) -> tuple[str, ...]:
    """The inputs whose contents a reading asks for."""
    from dnnc.frontends.onnx import NeedsValues

    return error.inputs if isinstance(error, NeedsValues) else ()


def reader(model: Any, opts: CompileOptions, progress: Progress | None) -> Callable[[Given], Special | Test]:
    """A function that reads and compiles an ONNX model for what a call gives, or the condition that must be known first."""
    from dnnc.frontends.onnx import NeedsValues, read_model

    def read(given: Given) -> Special | Test:
        try:
            made = read_model(model, values=given.values, shapes=given.shapes, forms=given.forms, decisions=given.decisions)
        except NeedsValues as e:
            if e.condition is None:
                raise
            small = replace(opts, dims={}, outputs=(), donate={})
            return Test(e.condition.name, compile_graph(e.condition.graph, (list(e.condition.inputs), ["condition"]), small, progress))
        if not made.outputs and not opts.outputs:
            return Special(None, made.results)
        names = list(made.inputs), list(made.outputs)
        return Special(compile_graph(made.graph, names, replace(opts, dims={}), progress), made.results)

    return read


Reread = Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], Made]


def rereader(model: Any, opts: CompileOptions, progress: Progress | None) -> Reread:
    """A function that reads and compiles an ONNX model for the contents of some inputs and the shapes of all."""
    from dnnc.frontends.onnx import read_model

    def read(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Made:
        made = read_model(model, values=values, shapes=shapes)
        return compile_graph(made.graph, (list(made.inputs), list(made.outputs)), replace(opts, dims={}), progress)

    return read


def _left(opts: CompileOptions, graph: Graph) -> dict[str, Any]:
    """Bounds of dims that the import did not use up."""
    return {n: d for n, d in opts.dims.items() if n in graph.dims}


def compile_graph(
    graph: Graph,
    names: tuple[list[str], list[str]],
    opts: CompileOptions,
    progress: Progress | None = None,
    import_seconds: float = 0.0,
    onnx: Callable[[], OnnxParts] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Made:
    """Compile a graph, which stays as it is.

    Args:
        graph: what to compile.
        names: what users call its inputs and outputs.
        opts: see CompileOptions.
        progress: told (stage, done, of).
        import_seconds: for the report.
        onnx: gives the model that it was read from; a saved executable keeps it.
        parameters: inputs that are bound to these arrays and are no arguments of a call; see `Executable.refit`.
    """
    opts = resolved(opts)
    graph = specialise(graph, {n: d for n, d in opts.dims.items() if isinstance(d, int)})
    graph = bound_dims(graph, {n: d for n, d in opts.dims.items() if not isinstance(d, int)})
    names = expose(graph, names, opts.outputs)
    target = parse_target(opts.target)
    machine = None
    if target.kind == "cuda":
        from dnnc.device_driver import compile_for_device, cuda_machine

        machine = cuda_machine(opts)
    graph, names, bound = with_roles(graph, names, opts, parameters or {}, machine)
    if target.kind == "reference":
        return ReferenceExecutable(graph, names, opts.precision, bound)
    if machine is not None:
        kernels = KernelCache(cache_folder(opts.cache))
        return compile_for_device(graph, names, opts, kernels, machine, progress, import_seconds, onnx, parameters=bound)
    cpu = parse_cpu(str(target), opts.threads)
    check_possible(graph)
    cache = KernelCache(cache_folder(opts.cache))
    runtime().start(cache)
    if needs_host(graph):
        make = segment_maker(opts, cpu, cache, progress)
        return StagedExecutable(graph, names, opts, cpu, min(thread_count(opts.threads), cpu.threads), import_seconds, make, onnx)
    symbolic = bool(graph.dims) and set(opts.dims) >= set(graph.dims) and not has_control(graph)
    lows = lows_without_empties(graph) if symbolic else {}
    threads = min(thread_count(opts.threads), cpu.threads)
    log = Log(graph.name, str(target), threads, import_seconds)
    maker = Maker(graph, opts, cpu, threads, log, cache, lows if symbolic else None, progress, parameters=bound)
    f = Executable(maker.origin(names, onnx), threads, log, bound)
    if not graph.dims:
        f.prepare([tuple(int(d) for d in v.type.shape if isinstance(d, int)) for v in graph.inputs])
    return f


def with_roles(
    graph: Graph, names: tuple[list[str], list[str]], opts: CompileOptions, parameters: Mapping[str, Any], machine: Machine | None
) -> tuple[Graph, tuple[list[str], list[str]], Parameters | None]:
    """A graph in which some inputs are parameters and others donated, the names of what is left, and the parameters. `machine`: of a device.

    Raises:
        InputError: an array or a pair does not fit.
        UnsupportedError: there are host steps.
    """
    bound = None
    if parameters:
        graph, inputs, bound = with_parameters(graph, names[0], parameters, machine.device if machine is not None and machine.present else None)
        names = inputs, names[1]
    if opts.donate:
        graph = graph if bound is not None else graph.copy()
        graph.donated = donated(graph, names, opts.donate)
    if (bound is not None or opts.donate) and parse_target(opts.target).kind != "reference" and needs_host(graph):
        asked = "parameters" if bound is not None else "donate"
        raise UnsupportedError(f"{asked}= is for models without steps on the host; `report` of the model compiled without it names those")
    return graph, names, bound


def has_control(graph: Graph) -> bool:
    """Are there loops or branches? Their functions are made for fixed sizes."""
    return any("control" in n.op.traits for n in graph.nodes())


def segment_maker(opts: CompileOptions, cpu: CpuTarget, cache: KernelCache, progress: Progress | None) -> Make:
    """A function that compiles segments between host steps: for all sizes, or (False) for each that comes."""
    threads = min(thread_count(opts.threads), cpu.threads)
    own = replace(opts, dims={}, outputs=(), verify="kernels" if opts.verify else False)  # random values between steps would mean nothing

    def make(graph: Graph, shared: bool) -> Executable:
        empties = {n: 1 for n, x in graph.dims.items() if x.lo == 0}  # no elements: a program of their own
        all_sizes = shared and not has_control(graph)
        lows = {**empties, **lows_without_empties(bound_dims(graph, {n: (1, None) for n in empties}))} if all_sizes else None
        log = Log(graph.name, str(opts.target), threads)
        names = [v.name for v in graph.inputs], [v.name for v in graph.outputs]
        return Executable(Maker(graph, own, cpu, threads, log, cache, lows, progress).origin(names), threads, log)

    return make


@dataclass(frozen=True)
class Maker:
    """Makes the programs of one graph; see Origin for `shared`. `given` are objects by symbol, out of a saved model."""

    graph: Graph
    opts: CompileOptions
    cpu: CpuTarget
    threads: int
    log: Log
    cache: KernelCache
    shared: Mapping[str, int] | None
    progress: Progress | None = None
    given: Mapping[str, bytes] | None = None
    parameters: Parameters | None = None

    def origin(self, names: tuple[Sequence[str], Sequence[str]], onnx: Callable[[], OnnxParts] | None = None) -> Origin:
        """Where an executable of this graph comes from."""

        def specialise(dims: Mapping[Var, int]) -> Native:
            return self.make(origin, dims)

        origin = Origin(self.graph, *names, lambda: self.graph, specialise, self.shared, self.opts, self.cpu, onnx)
        return origin

    def make(self, origin: Origin, dims: Mapping[Var, int]) -> Native:
        """The program for these dims, or for all that it may serve."""
        laps, manager = Laps(), PassManager()
        common = origin.serves_all(dims)
        if common:
            g = specialise(bound_dims(self.graph, {n: (low, None) for n, low in (self.shared or {}).items()}), {})
        else:
            g = specialise(self.graph, {v.name: n for v, n in dims.items()})
        program = make_program(g, self.cpu, self.opts, manager, self.cache)
        laps.lap("passes")
        spare: dict[str, bytes] = {}

        def build_one(program: Program) -> Native:
            if not program.dims:  # sizes are known: what cannot be called need not be compiled, and checking its kernels takes as much memory
                check_program(program, origin.inputs, origin.outputs)
            return build_native(program, self.cpu, self.opts, self.cache, laps.through(self.progress), self.given, spare)

        program, native = built(program, build_one)
        laps.lap("link")
        if self.opts.verify == "model" and all(dims.values()):
            trial = Executable(replace(origin, specialise=lambda _: native), self.threads, self.log, self.parameters)
            graph = self.graph if self.parameters is None else frozen(self.graph, self.parameters.held)
            check_model(lambda *arrays: trial(*(a.copy() for a in arrays)), graph, dims, origin.outputs, self.opts.precision)
            laps.lap("check model")
        self.log.add(program_report(native, dims, common, [*manager.records, *self.gaps(program, origin)], laps.seconds))
        return native

    def gaps(self, program: Program, origin: Origin) -> list[PassRecord]:
        """Which kernels are too long for the gate, and which outputs are not made where they end, as records of the report."""
        size = len(program.graph)
        notes = not_checked(program.kernels, {}) if self.opts.verify and not program.dims else ()
        said = {LADDER: program.steps_down, "kernel gate": notes, "donate": copied(program, origin.outputs), "cache": self.cache.notes}
        return [PassRecord(name, 0.0, size, size, False, n) for name, n in said.items() if n]


def expose(graph: Graph, names: tuple[list[str], list[str]], wanted: Sequence[str]) -> tuple[list[str], list[str]]:
    """Add intermediates to a graph's outputs. InputError lists near names when there is no such value."""
    if not wanted:
        return names
    by_name = {v.name: v for n in graph.nodes() for v in n.outputs}
    for w in wanted:
        v = by_name.get(w) or by_name.get(identifier(w))
        if v is None:
            near = difflib.get_close_matches(w, by_name, 3)
            raise InputError(f"outputs: the model has no value {w!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
        graph.outputs.append(v)
    return names[0], [*names[1], *wanted]


def make_program(graph: Graph, cpu: CpuTarget, opts: CompileOptions, manager: PassManager | None = None, cache: KernelCache | None = None) -> Program:
    """Graph passes (which change the graph in place), plans, scheduled kernels. `cache`: keeps schedules."""
    own = spelled(opts.numerics, cpu.feature_set)
    ctx = PassContext(
        numerics=opts.numerics,
        lanes=cpu.lanes,
        rates=cpu.rates,
        precision=opts.precision,
        check=check_every_pass(),
        spelled=own,
        fallback=steps_down(opts),
        recurrent=None if opts.numerics == "strict" else lambda form: recurrence.takes(form, cpu),
    )
    choose = choose_of(opts, kept=cache)
    known = schedules_for(opts, cpu, cache)
    program = compile_program(graph, ctx, templates(cpu, ctx.strict), choose, opts.opt_level, manager, revise_of(choose), known)
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
    """Machine code for a program, its new kernels checked. `given`: objects by symbol, out of a saved model; `spare`: see `build`."""
    graphs = {id(step): graph for step, graph in program.walk()}
    check = (lambda step, address: check_kernel(graphs[id(step)], step, address)) if opts.verify else None
    with CompileService(cpu.threads) as service:
        return build(program, cpu, cache, service, check, progress, given, flush=opts.numerics == "fast", spare=spare)
