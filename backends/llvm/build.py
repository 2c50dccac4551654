"""A scheduled graph -> a CPU program: kernels compiled or cached, checked, and linked with an entry function."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from dnnc.backends.base import BuildJob
from dnnc.backends.build import Check, build_kernels
from dnnc.backends.llvm import compile as compile_
from dnnc.backends.llvm import (
    dot_products,
    elf,
    emit,
    gathers,
    lookups,
    matrix_tiles,
    shuffles,
    sparse_rows,
    spelling,
    statements,
    streams,
    values,
)
from dnnc.backends.llvm.check import check_kernel
from dnnc.backends.llvm.code import FORMAT, load_code
from dnnc.backends.llvm.compile import compile_text, llvm_version, load_objects
from dnnc.backends.llvm.control import control_text
from dnnc.backends.llvm.entry import ENTRY, entry_text
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.kernel_code import SharedTexts
from dnnc.backends.llvm.worker_pool import CompileService
from dnnc.backends.runtime.link import link
from dnnc.backends.runtime.program import Program
from dnnc.backends.runtime.prologue import prologue_of
from dnnc.passes.planning.program import ScheduledGraph


@cache
def printer_version() -> str:
    """A hash of modules that turn kernel text into code, so that stale objects are never used."""
    h = hashlib.sha256()
    printers = (
        emit,
        statements,
        values,
        dot_products,
        matrix_tiles,
        lookups,
        shuffles,
        gathers,
        sparse_rows,
        streams,
        spelling,
    )
    for module in (*printers, elf, compile_):
        h.update(Path(str(module.__file__)).read_bytes())
    return h.hexdigest()


def symbol_of(text: str, target: CpuTarget) -> str:
    """A kernel's name: the hash of all that its code depends on."""
    key = "\0".join([FORMAT, printer_version(), llvm_version(), target.cpu, target.features, text])
    return "k_" + hashlib.sha256(key.encode()).hexdigest()


def build(scheduled: ScheduledGraph, target: CpuTarget, job: BuildJob) -> Program:
    """Compile, check and link; see `Backend.build`."""
    symbols = {s.text: symbol_of(s.text, target) for s in scheduled.kernels}

    shared = SharedTexts(target, {name: text for text, name in symbols.items()}, lambda text: symbol_of(text, target))

    def by_llvm(texts: Mapping[str, str], failed: dict[str, Exception]) -> dict[str, bytes]:
        with CompileService(target.threads) as service:
            return service.compile_many(list(texts.items()), target.cpu, target.features, job.tell("compile"), failed)

    def checker(code: Mapping[str, bytes]) -> Check:
        if target.foreign:  # its instructions would end the process
            return lambda graph, step, name: None
        trial = load_objects(list(code.values()))
        return lambda graph, step, name: check_kernel(graph, step, trial.address(name), rows=shared.repeats(name))

    built = build_kernels(
        scheduled, symbols, job, shared.emit, lambda texts, failed: shared.compile(texts, failed, by_llvm), checker
    )
    program = replace(
        link(scheduled, symbols, control_text), code=built.code, texts=built.texts, compiled=built.compiled
    )
    return _with_entry(scheduled, program, target, job) if job.entry else program


def _with_entry(scheduled: ScheduledGraph, program: Program, target: CpuTarget, job: BuildJob) -> Program:
    """The program with its entry function, loaded."""
    text = entry_source(program, job.flush)
    code = {**program.code, ENTRY: compile_text(text, target.cpu, target.features)}
    return replace(
        program,
        code=code,
        texts={**program.texts, ENTRY: text},
        prologue=prologue_of(scheduled),
        flush=job.flush,
        loaded=load_code(code),
    )


def entry_source(program: Program, flush: bool) -> str:
    """The LLVM text of a program's entry function, with its loops and branches."""
    control = [k.text for k in reversed(program.kernels) if k.control]
    return entry_text(list(program.calls), functions=control, flush=flush)
