"""A scheduled graph -> a program for the CPU: kernels compiled (or taken from the cache), checked, and linked with the
program's entry function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from dnnc.backends.base import BuildJob
from dnnc.backends.llvm import compile as compile_
from dnnc.backends.llvm import emit, gathers, spelling, statements, streams, values
from dnnc.backends.llvm.backend import FORMAT
from dnnc.backends.llvm.check import check_kernel
from dnnc.backends.llvm.code import load_code
from dnnc.backends.llvm.compile import compile_text, llvm_version, load_objects
from dnnc.backends.llvm.control import control_text
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.entry import ENTRY, entry_text
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.worker_pool import CompileService
from dnnc.backends.runtime.link import link
from dnnc.backends.runtime.program import Program
from dnnc.backends.runtime.prologue import prologue_of
from dnnc.ir.errors import DnncError
from dnnc.ir.graph import Graph
from dnnc.passes.planning.ladder import Failure, fail
from dnnc.passes.planning.program import Program as ScheduledGraph
from dnnc.passes.planning.program import Step


@cache
def printer_version() -> str:
    """A hash of the modules that turn kernel text into code, so that a change of theirs never meets objects of
    before.
    """
    h = hashlib.sha256()
    for module in (emit, statements, values, gathers, streams, spelling, compile_):
        h.update(Path(str(module.__file__)).read_bytes())
    return h.hexdigest()


def symbol_of(text: str, target: CpuTarget) -> str:
    """A kernel's name: the hash of all that its code depends on."""
    key = "\0".join([FORMAT, printer_version(), llvm_version(), target.cpu, target.features, text])
    return "k_" + hashlib.sha256(key.encode()).hexdigest()


def build(scheduled: ScheduledGraph, target: CpuTarget, job: BuildJob) -> Program:
    """Compile, check and link; see `Backend.build`."""
    symbols = {s.text: symbol_of(s.text, target) for s in scheduled.kernels}
    steps = {symbols[s.text]: (s, graph) for s, graph in scheduled.walk() if isinstance(s, Step)}
    objects = {name: found for name in steps if (found := job.find(name)) is not None}
    missing = {name: v for name, v in steps.items() if name not in objects}
    texts, failures = _emitted(missing, target)
    failed: dict[str, Exception] = {}
    with CompileService(target.threads) as service:
        compiled = service.compile_many(list(texts.items()), target.cpu, target.features, job.tell("compile"), failed)
    failures += [Failure(missing[name][0], "compilation", e) for name, e in failed.items()]
    if job.check and compiled:
        failures += _checked(missing, compiled, job)
    wrong = {id(f.step) for f in failures}
    job.keep({name: obj for name, obj in compiled.items() if id(missing[name][0]) not in wrong})
    fail(scheduled, failures)
    return _linked(scheduled, symbols, {**objects, **compiled}, target, job, texts, len(missing))


Missing = Mapping[str, tuple[Step, Graph]]  # steps by symbol, each with its graph


def _emitted(missing: Missing, target: CpuTarget) -> tuple[dict[str, str], list[Failure]]:
    """The LLVM text of kernels by symbol, and those that cannot be emitted."""
    texts: dict[str, str] = {}
    failures: list[Failure] = []
    for name, (s, _) in missing.items():
        try:
            texts[name] = emit_kernel(s.kernel, name, target.feature_set)
        except Exception as e:
            failures.append(Failure(s, "emission", e))
    return texts, failures


def _checked(missing: Missing, compiled: Mapping[str, bytes], job: BuildJob) -> list[Failure]:
    """Check new kernels, linked with each other only. Returns those that are refused."""
    trial = load_objects(list(compiled.values()))
    failures: list[Failure] = []
    tell = job.tell("check")
    for k, name in enumerate(compiled):
        step, graph = missing[name]
        try:
            check_kernel(graph, step, trial.address(name))
        except DnncError as e:
            failures.append(Failure(step, "kernel check", e))
        if tell is not None:
            tell(k + 1, len(compiled))
    return failures


def _linked(
    scheduled: ScheduledGraph,
    symbols: Mapping[str, str],
    objects: dict[str, bytes],
    target: CpuTarget,
    job: BuildJob,
    texts: dict[str, str],
    compiled: int,
) -> Program:
    program = link(scheduled, symbols, control_text)
    if not job.entry:
        return replace(program, code=objects, texts=texts, compiled=compiled)
    texts[ENTRY] = entry_source(program, job.flush)
    objects[ENTRY] = compile_text(texts[ENTRY], target.cpu, target.features)
    return replace(
        program,
        code=objects,
        texts=texts,
        compiled=compiled,
        prologue=prologue_of(scheduled),
        flush=job.flush,
        loaded=load_code(objects),
    )


def entry_source(program: Program, flush: bool) -> str:
    """The LLVM text of a program's entry function, with its loops and branches."""
    control = [k.text for k in reversed(program.kernels) if k.control]
    return entry_text(list(program.calls), functions=control, flush=flush)
