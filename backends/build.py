"""Builds programs whose code runs in this process: kernels are found or printed, compiled, checked, kept, then linked.

A backend gives what differs: how it prints a kernel, compiles texts, and checks a kernel. A kernel that fails in any
of these is a `Failure`, for which the ladder takes the next schedule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.check import check_run, run_bytes
from dnnc.backends.runtime.host_runner import Function
from dnnc.backends.runtime.link import link
from dnnc.backends.runtime.program import Program
from dnnc.backends.runtime.prologue import prologue_of
from dnnc.ir.errors import DnncError, InputError
from dnnc.ir.graph import Graph, Value
from dnnc.ir.loops.stmt import Kernel
from dnnc.passes.planning.ladder import Failure, fail
from dnnc.passes.planning.program import ScheduledGraph, Step

if TYPE_CHECKING:
    from dnnc.backends.base import Backend, BuildJob

Array = np.ndarray[Any, Any]
Emit = Callable[[Kernel, str], str]  # kernel, symbol -> text
# texts by symbol, where to note errors by symbol -> code by symbol
Compile = Callable[[Mapping[str, str], dict[str, Exception]], Mapping[str, bytes]]
Check = Callable[[Graph, Step, str], None]  # graph, step, symbol; AccuracyError: the kernel is wrong


@dataclass(frozen=True)
class BuiltKernels:
    """Kernels by symbol."""

    code: dict[str, bytes]  # of all of them
    texts: dict[str, str]  # of those that were printed here
    compiled: int  # how many the cache did not have


def build_kernels(
    scheduled: ScheduledGraph,
    symbols: Mapping[str, str],
    job: BuildJob,
    emit: Emit,
    compile: Compile,
    checker: Callable[[Mapping[str, bytes]], Check],
) -> BuiltKernels:
    """Build the kernels of a program.

    Args:
        scheduled: the program.
        symbols: names of kernels by their operator IR.
        job: where code is looked for and kept, and whether it is checked.
        emit: prints a kernel.
        compile: compiles texts.
        checker: loads new code, and gives what checks a kernel of it.

    KernelsFailed: kernels failed, and the schedule can step down. DnncError: what the first one failed with, where it
    cannot.
    """
    steps = {symbols[s.text]: (s, graph) for s, graph in scheduled.walk() if isinstance(s, Step)}
    objects = {name: code for name in steps if (code := job.find(name)) is not None}
    missing = {name: v for name, v in steps.items() if name not in objects}
    texts: dict[str, str] = {}
    failures: list[Failure] = []
    for name, (step, _) in missing.items():
        try:
            texts[name] = emit(step.kernel, name)
        except Exception as e:
            failures.append(Failure(step, "emission", e))
    failed: dict[str, Exception] = {}
    compiled = compile(texts, failed)
    failures += [Failure(missing[name][0], "compilation", e) for name, e in failed.items()]
    if job.check and compiled:
        check, tell = checker(compiled), job.tell("check")
        for k, name in enumerate(compiled):
            step, graph = missing[name]
            try:
                check(graph, step, name)
            except DnncError as e:
                if isinstance(e, InputError) and graph is not scheduled.graph:
                    continue  # constant indices leave their axis in a branch, which may never run; a call of it says so
                failures.append(Failure(step, "kernel check", e))
            if tell is not None:
                tell(k + 1, len(compiled))
    wrong = {id(f.step) for f in failures}
    job.keep({name: code for name, code in compiled.items() if id(missing[name][0]) not in wrong})
    fail(scheduled, failures)
    return BuiltKernels({**objects, **compiled}, texts, len(missing))


def symbols_of(scheduled: ScheduledGraph, backend: Backend) -> dict[str, str]:
    """Names of kernels by their operator IR: hashes of all that their code depends on."""
    key = f"{backend.name}\0{backend.code_version}\0{backend.target_key}\0".encode()
    return {s.text: "k_" + hashlib.sha256(key + s.text.encode()).hexdigest() for s in scheduled.kernels}


def build_program(scheduled: ScheduledGraph, backend: Backend, job: BuildJob) -> Program:
    """Build a program by a backend's `emit`, `compile` and `functions`; see `Backend.build`."""
    symbols, tell = symbols_of(scheduled, backend), job.tell("compile")

    def compile(texts: Mapping[str, str], failed: dict[str, Exception]) -> Mapping[str, bytes]:
        return backend.compile(texts, failed, tell)

    built = build_kernels(
        scheduled, symbols, job, backend.emit, compile, lambda code: checker_of(backend.functions(code))
    )
    return replace(
        link(scheduled, symbols),
        code=built.code,
        texts=built.texts,
        compiled=built.compiled,
        prologue=prologue_of(scheduled),
        loaded=backend.functions(built.code),
    )


def checker_of(functions: Mapping[str, Function]) -> Check:
    """What compares kernels with float64."""

    def check(graph: Graph, step: Step, symbol: str) -> None:
        def execute(buffers: Mapping[Value, Array], zones: Mapping[Value, Array]) -> tuple[int, int, int]:
            return functions[symbol]([buffers[v].ctypes.data for v in step.params]), 0, 0

        check_run(graph, step, lambda inputs, dims, env: run_bytes(step, inputs, env, execute))

    return check
