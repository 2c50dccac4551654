"""From a graph to an Executable: fixed and bounded dims, parameters and donations, then the compiler that fits."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dnnc.backends.base import Backend, Progress
from dnnc.backends.registry import open_backend
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.donation import donated
from dnnc.executable import Executable
from dnnc.graph_compiler import GraphCompiler, SavedCode
from dnnc.hybrid import HybridCompiler, has_control, staged
from dnnc.ir.errors import InputError, UnsupportedError
from dnnc.ir.graph import Graph, identifier
from dnnc.ir.shapes import bound_dims, nonempty_lows, specialise, without_unused_dims
from dnnc.ir.types import Encoding
from dnnc.memory import check_possible
from dnnc.options import CompileOptions, cache_folder, thread_count
from dnnc.parameters import Parameters, with_parameters
from dnnc.passes.analysis.segments import needs_host
from dnnc.program_cache import OnnxParts
from dnnc.report.log import Log
from dnnc.tune_option import resolved

LARGEST = (1 << 31) - 1  # what a size may be of which nothing is said


def compile_graph(
    graph: Graph,
    names: tuple[list[str], list[str]],
    opts: CompileOptions,
    progress: Progress | None = None,
    import_seconds: float = 0.0,
    onnx: Callable[[], OnnxParts] | None = None,
    parameters: Mapping[str, Any] | None = None,
    held: Mapping[int, Encoding | None] | None = None,
    internal: Mapping[int, Encoding | None] | None = None,
) -> Executable:
    """Compile a graph, which stays as it is.

    Args:
        graph: what to compile.
        names: what users call its inputs and outputs.
        opts: see CompileOptions.
        progress: told (stage, done, of).
        import_seconds: for the report.
        onnx: gives the model that it was read from; a saved executable keeps it.
        parameters: inputs that are bound to these arrays and are no arguments of a call; see `Executable.refit`.
        held: inputs by number that lie in these encodings when the program is run through its instance, None: the
            compiler chooses one, see `Program.inputs`. Calls of the Executable take all arrays in rows.
        internal: outputs by number that only other programs read, through the instance: they lie in these encodings,
            None: as they are computed, see `Program.outputs`.
    """
    opts = resolved(opts)
    graph = specialise(graph, {n: d for n, d in opts.dims.items() if isinstance(d, int)})
    graph = bound_dims(graph, {n: d for n, d in opts.dims.items() if not isinstance(d, int)})
    graph = without_unused_dims(graph)
    names = expose(graph, names, opts.outputs)
    backend = open_backend(opts.target, opts.threads)
    graph, names, bound = with_roles(graph, names, opts, parameters or {}, backend)
    graph.held, graph.internal = dict(held or {}), dict(internal or {})
    cache = KernelCache(cache_folder(opts.cache))
    return compile_for(graph, names, opts, backend, cache, progress, import_seconds, onnx, bound)


def compile_for(
    graph: Graph,
    names: tuple[Sequence[str], Sequence[str]],
    opts: CompileOptions,
    backend: Backend,
    cache: KernelCache,
    progress: Progress | None = None,
    import_seconds: float = 0.0,
    onnx: Callable[[], OnnxParts] | None = None,
    parameters: Parameters | None = None,
    saved: SavedCode | None = None,
    notes: tuple[str, ...] = (),
) -> Executable:
    """Compile a graph whose dims are as the options say for a backend; see `compile_graph`.

    Args:
        saved: machine code out of a saved model.
        notes: for the report.
    """
    if not backend.compiles:
        opts = CompileOptions(target=opts.target, precision=opts.precision, donate=opts.donate)
    else:
        check_possible(graph)
    backend.start(cache)
    threads = min(thread_count(opts.threads), backend.threads)
    log = Log(graph.name, str(opts.target), threads, import_seconds, notes)
    if backend.compiles and needs_host(graph):
        return staged(HybridCompiler(graph, names, opts, backend, log, cache, progress, onnx))
    symbolic = bool(graph.dims) and set(opts.dims) >= set(graph.dims) and not has_control(graph)
    shared = nonempty_lows(graph) if symbolic and backend.any_sizes else None
    compiler = GraphCompiler(
        graph,
        names,
        opts,
        backend,
        log,
        cache,
        shared=shared,
        progress=progress,
        saved=saved,
        parameters=parameters,
        onnx=onnx,
        again=compile_graph,
    )
    f = Executable(compiler, parameters)
    if not graph.dims:
        f.prepare([tuple(int(str(d)) for d in v.type.shape) for v in graph.inputs])
    return f


def with_roles(
    graph: Graph,
    names: tuple[list[str], list[str]],
    opts: CompileOptions,
    parameters: Mapping[str, Any],
    backend: Backend,
) -> tuple[Graph, tuple[list[str], list[str]], Parameters | None]:
    """Return a graph with parameters and donated inputs, other names, Parameters. InputError: an array does not fit."""
    bound = None
    if parameters:
        device = backend.device if backend.present else None
        graph, inputs, bound = with_parameters(graph, names[0], parameters, device)
        names = inputs, names[1]
    if opts.donate:
        graph = graph if bound is not None else graph.copy()
        graph.donated = donated(graph, names, opts.donate)
    if (bound is not None or opts.donate) and backend.compiles and needs_host(graph):
        asked = "parameters" if bound is not None else "donate"
        raise UnsupportedError(
            f"{asked}= is for models without steps on the host; `report` of the model compiled without it names those"
        )
    return graph, names, bound


def expose(graph: Graph, names: tuple[list[str], list[str]], wanted: Sequence[str]) -> tuple[list[str], list[str]]:
    """Add intermediates to a graph's outputs. InputError lists near names when there is no such value."""
    if not wanted:
        return names
    by_name = {v.name: v for n in graph.nodes() for v in n.outputs}
    for w in wanted:
        v = by_name.get(w) or by_name.get(identifier(w))
        if v is None:
            near = difflib.get_close_matches(w, by_name, 3)
            raise InputError(
                f"outputs: the model has no value {w!r}" + (f"; did you mean {', '.join(near)}?" if near else "")
            )
        graph.outputs.append(v)
    return names[0], [*names[1], *wanted]


def open_dims(opts: CompileOptions, graph: Graph) -> CompileOptions:
    """Return the options for a traced graph: one program serves all sizes that are names, unless they say more."""
    return replace(opts, dims={**dict.fromkeys(graph.dims, (1, LARGEST)), **opts.dims}) if graph.dims else opts
