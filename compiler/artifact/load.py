"""A file that `save` wrote to an executable: `dnnc.load(path)`.

Where the code in the file fits the machine, nothing is compiled and no pass runs; they are not even imported. Constants
are used where they lie in the file, which is mapped. The imported graph is read when something is to be compiled after
all: sizes that the file has no program for, or all of it where the code does not fit.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import dnnc
from dnnc.artifact.format import REMEDY, open_artifact
from dnnc.artifact.manifest import SavedModel, ranges
from dnnc.artifact.reader import Restored
from dnnc.backends.llvm.compile import llvm_version
from dnnc.backends.llvm.features import CpuTarget, enabled, host_cpu, parse_target
from dnnc.backends.llvm.native import FORMAT
from dnnc.backends.runtime.codec import decode
from dnnc.backends.runtime.frames import runtime
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.cpu_compiler import CpuCompiler
from dnnc.donation import donated
from dnnc.executable import Executable
from dnnc.ir.errors import ArtifactError, ArtifactWarning, DnncError, InputError
from dnnc.ir.graph import Graph
from dnnc.ir.target import parse_target as parse_words
from dnnc.options import CompileOptions, cache_folder, thread_count
from dnnc.report.log import Log

KINDS = ("programs", "staged", "reference", "late", "device")


def load(
    path: str | os.PathLike[str] | BinaryIO,
    code: bool = True,
    threads: int | None = None,
    cache: bool | str | Path = "auto",
) -> Executable:
    """Load a model that `save` wrote. It behaves as the one that was saved.

    Loading runs code that is in the file, as loading a shared library does: load only what you trust. Checksums find
    damage, not intent.

    Args:
        path: the file, or an open binary file, of which a copy is taken. It must not be overwritten in place while the
            model is in use; `save` replaces files, which is safe.
        code: False leaves the machine code in the file alone and compiles from the graph in it.
        threads: threads of a call, as for `dnnc.compile`; default: as it was compiled.
        cache: where kernels that have to be compiled are kept, as for `dnnc.compile`.

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
    options = _options(saved, threads, cache)
    if saved.model.kind == "late":
        from dnnc.driver import compile_onnx

        return compile_onnx(saved.onnx_model(), options, None)
    if saved.model.kind == "reference":
        from dnnc.interpreted import InterpreterCompiler

        return Executable(InterpreterCompiler(saved.graph, (saved.model.inputs, saved.model.outputs), options))
    if saved.model.kind == "staged":
        return _staged(saved, options)
    if saved.model.kind == "device":
        return _device(saved, options, code)
    reason = unfit(saved.model) if code else "code=False"
    if code and reason:
        warnings.warn(
            f"{saved.path}: {reason}; compiling again from the graph in the file", ArtifactWarning, stacklevel=2
        )
    return _executable(saved, options, reason, start)


def _staged(saved: Restored, options: CompileOptions) -> Executable:
    """A model with host steps, compiled from its graph; kernels that this machine has met come from its cache."""
    from dnnc.driver import compile_graph

    graph, names = saved.graph, (list(saved.model.inputs), list(saved.model.outputs))
    left = {n: d for n, d in options.dims.items() if n in graph.dims}
    f = compile_graph(
        graph, names, replace(options, dims=left, outputs=()), onnx=None if saved.model.onnx is None else saved.onnx
    )
    if saved.model.onnx is not None:
        f.cache.when_empty = lambda shapes: _reread(saved, options, shapes)
    return f


def _device(saved: Restored, options: CompileOptions, code: bool) -> Executable:
    """A model for a CUDA device. Kernels whose code is in the file, made by the same versions for the same
    architecture, are not compiled again.
    """
    from dnnc.backends.cuda.build import Given
    from dnnc.device_driver import compile_for_device, cuda_machine

    options, moved = _for_device_here(options)
    machine = cuda_machine(options)
    given = Given(*saved.cubins()) if code else None
    names, onnx = (
        (list(saved.model.inputs), list(saved.model.outputs)),
        None if saved.model.onnx is None else saved.onnx,
    )
    notes = (f"loaded from {saved.path}" if code else f"compiled again from {saved.path}: code=False", *moved)
    own = replace(options, dims={}, outputs=())
    saved.graph.donated = donated(saved.graph, names, options.donate)
    f = compile_for_device(
        saved.graph, names, own, KernelCache(cache_folder(options.cache)), machine, onnx=onnx, given=given, notes=notes
    )
    if onnx is not None:
        f.cache.when_empty = lambda shapes: _reread(saved, options, shapes)
    return f


def _for_device_here(options: CompileOptions) -> tuple[CompileOptions, tuple[str, ...]]:
    """The options, for the architecture of this machine's device where it is another one; and what to say of it."""
    from dnnc.backends.cuda.target import ask_device

    target = parse_words(str(options.target))
    arch, here = target.option("arch"), ask_device(target.device)
    if not arch or here is None or here.arch == arch:
        return options, ()
    return replace(options, target=f"cuda:{target.device}", dims=dict(options.dims)), (
        f"it was made for {arch}, this device is {here.arch}",
    )


def unfit(model: SavedModel) -> str:
    """Why the code of a saved model cannot run here; empty when it can."""
    here = {
        "dnnc": (model.dnnc, dnnc.__version__),
        "the kernel format": (model.kernels, FORMAT),
        "LLVM": (model.llvm, llvm_version()),
    }
    for what, (then, now) in here.items():
        if then != now:
            return f"it was compiled by {what} {then}, this is {what} {now}"
    if model.cpu is None:
        return ""
    missing = sorted(enabled(model.cpu.features) - enabled(host_cpu()[1]))
    return f"it was compiled for {model.cpu.cpu}, and this CPU lacks {', '.join(missing)}" if missing else ""


def _open(path: str | os.PathLike[str] | BinaryIO) -> Restored:
    file = open_artifact(path)
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


def _options(saved: Restored, threads: int | None, cache: bool | str | Path) -> CompileOptions:
    """The options that it was compiled with, on this machine. TargetError or InputError for `threads` and `cache`."""
    given = CompileOptions(target=saved.model.target, threads=threads, cache=cache)
    values = {**saved.model.options, "target": saved.model.target, "cache": cache}
    try:
        options = CompileOptions(**values)
    except (DnncError, TypeError) as e:
        raise ArtifactError(
            f"{saved.path}: the options in the manifest are not what they should be: {e}; {REMEDY}"
        ) from None
    return options if given.threads is None else replace(options, threads=threads, dims=dict(options.dims))


def _executable(saved: Restored, options: CompileOptions, reason: str, start: float) -> Executable:
    """`reason`: why its code is not to be used, or empty."""
    model, interface = saved.model, saved.interface
    here = parse_target(str(options.target), options.threads)
    cpu = CpuTarget(**vars(model.cpu)) if model.cpu is not None and not reason else here
    kernels = KernelCache(cache_folder(options.cache))
    runtime().start(kernels)
    threads = min(thread_count(options.threads), here.threads)
    note = f"compiled again from {saved.path}: {reason}" if reason else f"loaded from {saved.path}"
    log = Log(interface.name, str(options.target), threads, notes=(note,))
    objects: Mapping[str, bytes] = {} if reason else saved.objects()

    def graph() -> Graph:
        saved.graph.donated = donated(saved.graph, (model.inputs, model.outputs), options.donate)
        return saved.graph

    onnx, names = None if model.onnx is None else saved.onnx, (model.inputs, model.outputs)
    f = Executable(
        CpuCompiler(interface, names, options, cpu, log, kernels, model.shared, graph=graph, objects=objects, onnx=onnx)
    )
    if onnx is not None:
        f.cache.when_empty = lambda shapes: _reread(saved, options, shapes)
    ready = [p for p in model.programs if p.constants and not reason]
    for p in ready:
        f.cache.programs[p.sizes] = saved.native(p)
        log.add(saved.reporter(p))
    log.import_seconds = time.perf_counter() - start
    if not interface.dims and not ready:
        f.prepare([tuple(int(str(d)) for d in v.type.shape) for v in interface.inputs])
    return f


def _reread(saved: Restored, options: CompileOptions, shapes: Sequence[tuple[int, ...]]) -> Any:
    """The executable for sizes of which some are 0: the import takes symbolic sizes to be at least 1."""
    from dnnc.driver import rereader

    return rereader(saved.onnx_model(), options, None)({}, dict(zip(saved.model.inputs, shapes)))
