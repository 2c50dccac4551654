"""A scheduled graph -> a Program, off device: kernels compiled or cached; checks wait for the first load."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import dnnc.backends.cuda as package
from dnnc.backends.base import BuildJob
from dnnc.backends.cuda.check import check_kernel
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.library import ONE, LibraryCall, call_of, described, installed, is_library, need, version_of
from dnnc.backends.cuda.loading import check_loaded, load_kernel
from dnnc.backends.cuda.nvrtc import compile_many, nvrtc_identity
from dnnc.backends.runtime import codec
from dnnc.backends.runtime.device import Device, Launch
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.link import link
from dnnc.backends.runtime.program import Check, Program
from dnnc.backends.runtime.prologue import prologue_of
from dnnc.ir.errors import DnncError, InternalError, TargetError
from dnnc.ir.graph import Graph
from dnnc.ir.loops.stmt import Kernel
from dnnc.passes.planning.ladder import Failure, fail
from dnnc.passes.planning.program import ScheduledGraph, Step

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

FORMAT = "cuda-1"  # of kernels and their calling convention; part of every cache key


class Compiler(Protocol):
    """Makes machine code. `version`: all that code depends on besides kernel text and architecture."""

    version: str

    def compile(
        self, kernels: Mapping[str, Kernel], target: GpuTarget, tell: Callable[[int, int], None] | None
    ) -> dict[str, bytes]:
        """Kernels by symbol -> code by symbol; `tell(done, of)` as they come."""
        ...


class NvrtcCompiler:
    """CUDA C++ through NVRTC, in threads. TargetError where it is missing."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.version = f"{nvrtc_identity()} {printer_version()}"

    def compile(
        self, kernels: Mapping[str, Kernel], target: GpuTarget, tell: Callable[[int, int], None] | None
    ) -> dict[str, bytes]:
        texts = {name: (emit_kernel(k, name, target), target.arch) for name, k in kernels.items()}
        done = itertools.count(1)
        made = compile_many(texts, self.threads, lambda _: tell(next(done), len(texts)) if tell else None)
        return {name: c.cubin for name, c in made.items()}


# modules that print no kernels
UNPRINTING = "backend constants graph check loading instance interpreted device build tensor_maps arrays".split()


@cache
def printer_version() -> str:
    """A hash of this package's modules that turn kernel text into code, so that stale code is never used."""
    h = hashlib.sha256()
    for path in sorted(Path(str(package.__file__)).parent.glob("*.py")):
        if path.stem not in UNPRINTING and not path.stem.startswith("library"):
            h.update(path.read_bytes())
    return h.hexdigest()


def symbol_of(text: str, arch: str, version: str) -> str:
    """A kernel's name: the hash of all that its code depends on."""
    return "k_" + hashlib.sha256("\0".join([FORMAT, version, arch, text]).encode()).hexdigest()


def symbols_of(program: ScheduledGraph, arch: str, version: str) -> dict[str, str]:
    """Return kernel names by text. A library call's text depends on the library's version."""
    known = {name: version_of(name) for name in installed()} if any(map(step_call, program.kernels)) else {}
    out = {}
    for s in program.kernels:
        call = step_call(s)
        out[s.text] = symbol_of(
            s.text, arch, version if call is None else f"{call.library} {known.get(call.library, 'missing')}"
        )
    return out


def step_call(s: Step) -> LibraryCall | None:
    """The call of a library that a step is, if it is one."""
    return call_of(s.kernel) if is_library(str(s.choice)) else None


def launched(symbol: str, step: Step, kernels: KernelCache) -> Launch:
    """How a kernel is launched; the cache knows it of those that were compiled before."""
    key = hashlib.sha256(f"launch {symbol}".encode()).hexdigest()
    data = kernels.get(key)
    if data is not None:
        return codec.loads(Launch, data)
    launch = launch_of(step.kernel)
    kernels.put(key, codec.dumps(launch))
    return launch


def checked_key(symbol: str) -> str:
    """Under which the cache notes that a device has checked a kernel."""
    return hashlib.sha256(f"checked {symbol}".encode()).hexdigest()


def build(scheduled: ScheduledGraph, target: GpuTarget, compiler: Compiler, job: BuildJob) -> Program:
    """Compile and link, for fixed sizes; nothing of it is on a device yet. See `Backend.build`."""
    symbols = symbols_of(scheduled, target.arch, compiler.version)
    steps = {symbols[s.text]: (s, graph) for s, graph in scheduled.walk() if isinstance(s, Step)}
    calls = {name: call for name, (s, _) in steps.items() if (call := step_call(s)) is not None}
    for name in calls:
        need(steps[name][0].kernel)
    found = {name: code for name in steps if name not in calls and (code := job.find(name)) is not None}
    cubins = {**{name: call.code for name, call in calls.items()}, **found}
    missing = {name: s for name, (s, _) in steps.items() if name not in cubins}
    compiled, failures = _compiled(missing, target, compiler, job.tell("compile")) if missing else ({}, [])
    job.keep(compiled)
    launches = {}
    for name, (s, _) in steps.items():
        try:
            launches[name] = ONE if name in calls else launched(name, s, job.cache)
        except DnncError as e:
            failures.append(Failure(s, "launch", e))
    fail(scheduled, failures)
    return replace(
        link(scheduled, symbols, parameters=True),
        code={**cubins, **compiled},
        launches=launches,
        params={name: tuple(p.name for p in s.nest.entry.params) for name, (s, _) in steps.items()},
        compiled=len(missing),
        checks=_checks(steps, job) if job.check else {},
        prologue=prologue_of(scheduled),
    )


def _compiled(
    missing: Mapping[str, Step], target: GpuTarget, compiler: Compiler, tell: Callable[[int, int], None] | None
) -> tuple[dict[str, bytes], list[Failure]]:
    """The code of kernels by symbol, and those that have none: where one of all fails, each is compiled by itself."""
    try:
        return compiler.compile({name: s.kernel for name, s in missing.items()}, target, tell), []
    except TargetError:
        raise
    except Exception as first:
        if len(missing) == 1:
            return {}, [Failure(s, "compilation", first) for s in missing.values()]
    made: dict[str, bytes] = {}
    failures: list[Failure] = []
    for name, s in missing.items():
        code, failed = _compiled({name: s}, target, compiler, None)
        made.update(code)
        failures += failed
    return made, failures


def _checks(steps: Mapping[str, tuple[Step, Graph]], job: BuildJob) -> dict[str, Check]:
    """By symbol, the checks of kernels that no device has made."""
    fresh = {n: v for n, v in steps.items() if n not in job.checked and job.cache.get(checked_key(n)) is None}
    return {name: _check(name, s, graph, job.cache) for name, (s, graph) in fresh.items()}


def _check(name: str, step: Step, graph: Graph, kernels: KernelCache) -> Check:
    def check(device: Device, function: Any, launch: Launch) -> None:
        check_kernel(graph, step, device, function, launch)
        kernels.put(checked_key(name), b"checked")

    return check


def check_program(program: Program, device: Device, job: BuildJob) -> None:
    """Load the kernels of a program and check those that no device has checked. Raises as `build` does."""
    scheduled = program.scheduled
    assert scheduled is not None
    steps = {program.symbols[s.text]: s for s in scheduled.kernels}
    functions, failures = {}, []
    for symbol in program.code:
        try:
            functions[symbol] = load_kernel(program, symbol, device)
        except InternalError as e:
            failures.append(Failure(steps[symbol], "loading", e))
    count, tell = len(program.checks), job.tell("check")
    for k, symbol in enumerate([s for s in program.checks if s in functions]):
        try:
            check_loaded(program, symbol, device, functions[symbol])
        except DnncError as e:
            failures.append(Failure(steps[symbol], "kernel check", e))
        if tell is not None:
            tell(k + 1, count)
    fail(scheduled, failures)


def notes_of(scheduled: ScheduledGraph) -> tuple[str, ...]:
    """For the report: the kernels that are calls of libraries, and of which version."""
    called = {s.text: (s.kernel, call) for s in scheduled.kernels if (call := step_call(s)) is not None}
    return tuple(f"{k.name} is a library call: {described(call)}, version {need(k)}" for k, call in called.values())
