"""From a model to an Executable: the stages in order. The only module that sees all parts of the compiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from dnnc.backends.cache import KernelCache
from dnnc.backends.llvm.build import Native, build
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.features import parse_target as parse_cpu
from dnnc.backends.llvm.gate import check_kernel
from dnnc.backends.llvm.templates import templates
from dnnc.backends.llvm.worker_pool import CompileService
from dnnc.backends.runtime import runtime
from dnnc.executable import Executable, TensorSpec
from dnnc.ir.errors import InputError, UnsupportedError
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.ir.shapes import specialise
from dnnc.ir.target import parse_target
from dnnc.options import CompileOptions, cache_folder, check_every_pass, make_options, thread_count
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program

__all__ = ["Executable", "TensorSpec", "compile"]

Progress = Callable[[str, int, int], None]


def compile(model: Any, progress: Progress | None = None, **options: Any) -> Executable:
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
    graph, names = import_model(model)
    return compile_graph(graph, names, opts, progress)


def import_model(model: Any) -> tuple[Graph, tuple[list[str], list[str]]]:
    """The graph of a model, and the names that users know its inputs and outputs by."""
    if isinstance(model, Graph):
        return model, ([v.name for v in model.inputs], [v.name for v in model.outputs])
    if isinstance(model, (str, os.PathLike, bytes, bytearray)) or type(model).__name__ == "ModelProto":
        from dnnc.frontends.onnx import read_model

        imported = read_model(model)
        return imported.graph, (list(imported.inputs), list(imported.outputs))
    raise InputError(f"cannot compile a {type(model).__name__}: expected a path to an .onnx file, its bytes, a ModelProto or a dnnc.ir.Graph")


def compile_graph(graph: Graph, names: tuple[list[str], list[str]], opts: CompileOptions, progress: Progress | None = None) -> Executable:
    target = parse_target(opts.target)
    if target.kind != "llvm":
        raise UnsupportedError(f"target {target}: only llvm is available here")
    nthreads = thread_count(opts.threads)
    cpu = parse_cpu(str(target), opts.threads)
    cache = KernelCache(cache_folder(opts.cache))
    runtime().start(cache)
    fixed = {n: d for n, d in opts.dims.items() if isinstance(d, int)}
    graph = specialise(graph, fixed)
    bounded = {n for n, d in opts.dims.items() if not isinstance(d, int)}
    symbolic = bool(graph.dims) and bounded >= set(graph.dims)

    def build_for(dims: Mapping[Var, int]) -> Native:
        g = graph.copy() if symbolic else specialise(graph, {v.name: n for v, n in dims.items()})
        return build_native(g, cpu, opts, cache, progress)

    f = Executable(graph, names, build_for, min(nthreads, cpu.threads), symbolic)
    if not graph.dims:
        f.prepare([tuple(int(d) for d in v.type.shape if isinstance(d, int)) for v in graph.inputs])
    return f


def build_native(graph: Graph, cpu: CpuTarget, opts: CompileOptions, cache: KernelCache, progress: Progress | None) -> Native:
    """Graph passes, plan, kernels, machine code."""
    ctx = PassContext(numerics=opts.numerics, lanes=cpu.lanes, check=check_every_pass())
    program = compile_program(graph, ctx, templates(cpu), opt_level=opts.opt_level)
    check = (lambda step, address: check_kernel(program.graph, step, address)) if opts.verify else None
    with CompileService(cpu.threads) as service:
        return build(program, cpu, cache, service, check, progress)
