"""A file that `save` wrote to an executable: `dnnc.load(path)`.

Where the code in the file fits the machine, nothing is compiled and no pass runs; they are not even imported. Constants
are used where they lie in the file, which is mapped. The imported graph is read when something is to be compiled after
all: sizes that the file has no program for, or all of it where the code does not fit.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import dnnc
from dnnc.artifact.compressed import expanded
from dnnc.artifact.format import REMEDY, open_artifact
from dnnc.artifact.manifest import SavedModel, ranges
from dnnc.artifact.reader import Restored
from dnnc.backends.base import Backend
from dnnc.backends.registry import backend_class, open_backend
from dnnc.backends.runtime.codec import decode
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.donation import donated
from dnnc.executable import Executable
from dnnc.graph_compiler import GraphCompiler, SavedCode
from dnnc.ir.errors import ArtifactError, ArtifactWarning, DnncError, InputError
from dnnc.ir.graph import Graph
from dnnc.ir.target import parse_target
from dnnc.options import CompileOptions, cache_folder, thread_count
from dnnc.report.log import Log

KINDS = ("programs", "graph", "onnx")


def load(
    path: str | os.PathLike[str] | BinaryIO,
    code: bool = True,
    threads: int | None = None,
    cache: bool | str | Path = "auto",
    custom_ops: Mapping[str, Callable[..., Any] | str] | None = None,
) -> Executable:
    """Load a model that `save` wrote. It behaves as the one that was saved.

    Loading runs code from the file, like loading a shared library: load only files that you trust.

    Args:
        path: the file, or an open binary file, of which a copy is taken. It must not be overwritten in place while the
            model is in use; `save` replaces files, which is safe.
        code: False leaves the machine code in the file alone and compiles from the graph in it.
        threads: threads of a call, as for `dnnc.compile`; default: as it was compiled.
        cache: where kernels that have to be compiled are kept, as for `dnnc.compile`.
        custom_ops: operators, as for `dnnc.compile`. Only a model that is read again for its inputs needs them: its
            shapes depend on contents, or its inputs are sequences, maps or empty.

    Returns:
        A callable; see Executable.

    Raises:
        ArtifactError: no such file, not a saved model, damaged, or of a newer format.
        TargetError: `threads` contradicts the target that it was compiled for.

    Warns:
        ArtifactWarning: the code does not fit this machine or this version, so the model is compiled again.
    """
    start = time.perf_counter()
    if not isinstance(code, bool):
        raise InputError(f"code={code!r}: expected True or False")
    saved = _open(path)
    options = _options(saved, threads, cache, custom_ops or {})
    if saved.model.kind == "onnx":
        from dnnc.driver import compile_onnx  # loads the importer

        return compile_onnx(saved.onnx_model(), options, None)
    options, moved = _for_device_here(options)
    backend = open_backend(options.target, options.threads)
    kernels = KernelCache(cache_folder(options.cache))
    if saved.model.kind == "programs":
        reason = unfit(saved.model, backend) if code else "code=False"
        if code and reason:
            text = f"{saved.path}: {reason}; compiling again from the graph in the file"
            warnings.warn(text, ArtifactWarning, stacklevel=2)
        return _with_programs(saved, options, backend, kernels, reason, start)
    from dnnc.compile_graph import compile_for  # loads the passes

    objects, checked = saved.code() if code else ({}, frozenset())
    names = list(saved.model.inputs), list(saved.model.outputs)
    graph = saved.graph
    graph.donated = donated(graph, names, options.donate)
    left = {n: d for n, d in options.dims.items() if n in graph.dims}
    f = compile_for(
        graph,
        names,
        replace(options, dims=left, outputs=()),
        backend,
        kernels,
        onnx=None if saved.model.onnx is None else saved.onnx,
        saved=SavedCode(objects, checked),
        notes=(f"loaded from {saved.path}" if code else f"compiled again from {saved.path}: code=False", *moved),
    )
    if saved.model.onnx is not None:
        f.cache.when_empty = lambda shapes: _reread(saved, options, shapes)
    return f


def _for_device_here(options: CompileOptions) -> tuple[CompileOptions, tuple[str, ...]]:
    """The options, for the device of this machine if that is of another architecture; and what to say of it."""
    target = parse_target(options.target)
    arch = target.option("arch")
    here = backend_class(target.kind).arch_here(target.device) if arch else ""
    if not arch or not here or here == arch:
        return options, ()
    moved = replace(target, options=())
    return replace(options, target=str(moved), dims=dict(options.dims)), (
        f"it was made for {arch}, this device is {here}",
    )


def unfit(model: SavedModel, backend: Backend) -> str:
    """Why the code of a saved model cannot run here; empty if it can."""
    if model.dnnc != dnnc.__version__:
        return f"it was compiled by dnnc {model.dnnc}, this is dnnc {dnnc.__version__}"
    return "" if model.machine is None else backend.unfit(model.code_version, model.machine)


def _open(path: str | os.PathLike[str] | BinaryIO) -> Restored:
    file = expanded(open_artifact(path))
    try:
        model = decode(SavedModel, dict(file.manifest))
    except (ValueError, RecursionError) as e:
        raise ArtifactError(f"{file.path}: the manifest is not what it should be: {e}; {REMEDY}") from None
    if model.kind not in KINDS:
        raise ArtifactError(
            f"{file.path}: the manifest speaks of a model of kind {model.kind!r}, expected {', '.join(KINDS)}; update "
            "dnnc"
        )
    for section, (at, size) in ranges(model):
        have = file.section(section).nbytes if size else at
        if at < 0 or size < 0 or at + size > have:
            raise ArtifactError(
                f"{file.path}: the manifest names bytes {at} to {at + size} of section {section!r}, which has {have}; "
                f"{REMEDY}"
            )
    return Restored(file, model)


def _options(
    saved: Restored, threads: int | None, cache: bool | str | Path, custom_ops: Mapping[str, Any]
) -> CompileOptions:
    """The options that it was compiled with, on this machine. TargetError or InputError for `threads` and `cache`."""
    given = CompileOptions(target=saved.model.target, threads=threads, cache=cache, custom_ops=custom_ops)
    values = {**saved.model.options, "target": saved.model.target, "cache": cache, "custom_ops": custom_ops}
    try:
        options = CompileOptions(**values)
    except (DnncError, TypeError) as e:
        raise ArtifactError(
            f"{saved.path}: the options in the manifest are not what they should be: {e}; {REMEDY}"
        ) from None
    return options if given.threads is None else replace(options, threads=threads, dims=dict(options.dims))


def _with_programs(
    saved: Restored, options: CompileOptions, backend: Backend, kernels: KernelCache, reason: str, start: float
) -> Executable:
    """An executable whose programs are in the file. `reason`: why they are not to be used, or empty."""
    model, interface = saved.model, saved.interface
    threads = min(thread_count(options.threads), backend.threads)
    if model.machine is not None and not reason:
        backend = backend.like(model.machine)
    backend.start(kernels)
    note = f"compiled again from {saved.path}: {reason}" if reason else f"loaded from {saved.path}"
    log = Log(interface.name, str(options.target), threads, notes=(note,))

    def graph() -> Graph:
        saved.graph.donated = donated(saved.graph, (model.inputs, model.outputs), options.donate)
        return saved.graph

    onnx = None if model.onnx is None else saved.onnx
    compiler = GraphCompiler(
        interface,
        (model.inputs, model.outputs),
        options,
        backend,
        log,
        kernels,
        shared=model.shared,
        graph=graph,
        saved=SavedCode({} if reason else saved.kernels()),
        onnx=onnx,
    )
    f = Executable(compiler)
    if onnx is not None:
        f.cache.when_empty = lambda shapes: _reread(saved, options, shapes)
    ready = [p for p in model.programs if p.constants and not reason]
    for p in ready:
        f.cache.programs[p.sizes] = saved.program(p, backend)
        log.add(saved.reporter(p))
    log.import_seconds = time.perf_counter() - start
    if not interface.dims and not ready:
        f.prepare([tuple(int(str(d)) for d in v.type.shape) for v in interface.inputs])
    return f


def _reread(saved: Restored, options: CompileOptions, shapes: Sequence[tuple[int, ...]]) -> Any:
    """The executable for sizes of which some are 0: the import takes symbolic sizes to be at least 1."""
    from dnnc.driver import rereader  # loads the importer

    return rereader(saved.onnx_model(), options, None)({}, dict(zip(saved.model.inputs, shapes)))
