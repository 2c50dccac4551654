"""From a model to an Executable: the stages in order. The only module that sees all parts of the compiler."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Union

from dnnc.accuracy import check_model
from dnnc.backends.cache import KernelCache
from dnnc.backends.llvm.build import Native, build
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.features import parse_target as parse_cpu
from dnnc.backends.llvm.gate import check_kernel
from dnnc.backends.llvm.templates import templates
from dnnc.backends.llvm.worker_pool import CompileService
from dnnc.backends.runtime import runtime
from dnnc.executable import Executable
from dnnc.ir.errors import InputError, ShapeError, UnsupportedError
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph, identifier
from dnnc.ir.shapes import bound_dims, lows_without_empties, specialise
from dnnc.ir.target import parse_target
from dnnc.late import LateExecutable
from dnnc.options import CompileOptions, cache_folder, check_every_pass, make_options, thread_count
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.pipelines import compile_program
from dnnc.passes.program import Program
from dnnc.reference import ReferenceExecutable
from dnnc.report.collect import Laps, Log, program_report
from dnnc.signature import TensorSpec

__all__ = ["Executable", "TensorSpec", "compile"]

Progress = Callable[[str, int, int], None]


Compiled = Union[Executable, ReferenceExecutable, LateExecutable]


def compile(model: Any, progress: Progress | None = None, **options: Any) -> Any:
    """Compile a model.

    Args:
        model: path to an .onnx file, its bytes, an onnx.ModelProto, or a dnnc.ir Graph.
        progress: called with (stage, done, of) while kernels compile.
        **options: see CompileOptions.

    Returns:
        A callable; see Executable.

    Raises:
        DnncError: a subclass that says what is wrong with the model, the options or the target.
    """
    opts = make_options(options)
    if isinstance(model, Graph):
        return compile_graph(model, ([v.name for v in model.inputs], [v.name for v in model.outputs]), opts, progress)
    if isinstance(model, (str, os.PathLike, bytes, bytearray)) or type(model).__name__ == "ModelProto":
        return compile_onnx(model, opts, progress)
    raise InputError(f"cannot compile a {type(model).__name__}: expected a path to an .onnx file, its bytes, a ModelProto or a dnnc.ir.Graph")


def compile_onnx(model: Any, opts: CompileOptions, progress: Progress | None) -> Compiled:
    from dnnc.frontends.onnx import NeedsValues, read_model
    from dnnc.frontends.onnx.declared import declared

    def read(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Executable | ReferenceExecutable:
        made = read_model(model, values=values, shapes=shapes)
        return compile_graph(made.graph, (list(made.inputs), list(made.outputs)), replace(opts, dims={}), progress)

    start = time.perf_counter()
    unknown = sorted(set(opts.dims) - set(declared(model).dims)) if opts.dims else []
    if unknown:
        raise InputError(f"dims: the model has no symbolic size {', '.join(unknown)}; it has {', '.join(declared(model).dims) or 'none'}")
    try:
        imported = read_model(model, dims=opts.dims)
    except (NeedsValues, ShapeError) as e:
        asks = e.inputs if isinstance(e, NeedsValues) else ()
        # symbolic sizes may not show what numbers will (that two paths end with equal sizes); a model of fixed sizes is simply wrong
        if not asks and not declared(model).dims:
            raise
        return LateExecutable(declared(model), asks, read, lambda error: error.inputs if isinstance(error, NeedsValues) else ())
    names = list(imported.inputs), list(imported.outputs)
    seconds = time.perf_counter() - start
    f = compile_graph(imported.graph, names, replace(opts, dims=_left(opts, imported.graph)), progress, seconds)
    if isinstance(f, Executable) and imported.graph.dims:
        # the import takes symbolic dims to be at least 1, which lets shapes simplify; empty inputs get a program of their own
        f.when_empty(lambda shapes: read({}, dict(zip(names[0], shapes))))
    return f


def _left(opts: CompileOptions, graph: Graph) -> dict[str, Any]:
    """Bounds of dims that the import did not use up."""
    return {n: d for n, d in opts.dims.items() if n in graph.dims}


def compile_graph(
    graph: Graph, names: tuple[list[str], list[str]], opts: CompileOptions, progress: Progress | None = None, import_seconds: float = 0.0
) -> Executable | ReferenceExecutable:
    """Compile a graph, which stays as it is. `names`: what users call its inputs and outputs; `import_seconds`: for the report."""
    graph = specialise(graph, {n: d for n, d in opts.dims.items() if isinstance(d, int)})
    graph = bound_dims(graph, {n: d for n, d in opts.dims.items() if not isinstance(d, int)})
    names = expose(graph, names, opts.outputs)
    target = parse_target(opts.target)
    if target.kind == "reference":
        return ReferenceExecutable(graph, names)
    if target.kind != "llvm":
        raise UnsupportedError(f"target {target}: this version compiles for llvm and reference")
    cpu = parse_cpu(str(target), opts.threads)
    cache = KernelCache(cache_folder(opts.cache))
    runtime().start(cache)
    symbolic = bool(graph.dims) and set(opts.dims) >= set(graph.dims)
    lows = lows_without_empties(graph) if symbolic else {}
    threads = min(thread_count(opts.threads), cpu.threads)
    log = Log(graph.name, str(target), threads, import_seconds)

    def common(dims: Mapping[Var, int]) -> bool:
        """Does the program for all sizes serve these? Small sizes, at which some value is empty, get programs of their own."""
        return symbolic and all(n >= lows.get(v.name, 0) for v, n in dims.items())

    def build_for(dims: Mapping[Var, int]) -> Native:
        laps, manager = Laps(), PassManager()
        if common(dims):
            g = specialise(bound_dims(graph, {n: (low, None) for n, low in lows.items()}), {})
        else:
            g = specialise(graph, {v.name: n for v, n in dims.items()})
        program = make_program(g, cpu, opts, manager)
        laps.lap("passes")
        native = build_native(program, cpu, opts, cache, laps.through(progress))
        laps.lap("link")
        if opts.verify == "model" and all(dims.values()):
            trial = Executable(graph, names, lambda _: native, threads, common, log, cpu)
            check_model(trial, graph, dims, names[1])
            laps.lap("check model")
        log.add(program_report(native, dims, common(dims), manager.records, laps.seconds))
        return native

    f = Executable(graph, names, build_for, threads, common, log, cpu)
    if not graph.dims:
        f.prepare([tuple(int(d) for d in v.type.shape if isinstance(d, int)) for v in graph.inputs])
    return f


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


def make_program(graph: Graph, cpu: CpuTarget, opts: CompileOptions, manager: PassManager | None = None) -> Program:
    """Graph passes (which change the graph in place), plans, scheduled kernels."""
    ctx = PassContext(numerics=opts.numerics, lanes=cpu.lanes, check=check_every_pass())
    return compile_program(graph, ctx, templates(cpu), opt_level=opts.opt_level, manager=manager)


def build_native(program: Program, cpu: CpuTarget, opts: CompileOptions, cache: KernelCache, progress: Progress | None) -> Native:
    """Machine code for a program, its new kernels checked."""
    check = (lambda step, address: check_kernel(program.graph, step, address)) if opts.verify else None
    with CompileService(cpu.threads) as service:
        return build(program, cpu, cache, service, check, progress)
