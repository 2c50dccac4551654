"""A scheduled program -> a CudaNative: kernels compiled (or taken from the cache), values given their places, nothing
of it on a device yet.

No device is needed. Kernels that no device has checked carry their check with them; it runs when the program is first
loaded on one.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import dnnc.backends.cuda as package
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.gate import check_kernel
from dnnc.backends.cuda.launch import Launch
from dnnc.backends.cuda.library import ONE, LibraryCall, call_of, installed, is_library, need, version_of
from dnnc.backends.cuda.native import Check, CudaNative, Device
from dnnc.backends.cuda.nvrtc import compile_many, nvrtc_identity
from dnnc.backends.runtime import codec
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.link import Linker, control_names, describe, describe_control, place_constants
from dnnc.backends.runtime.program import Control, Loop, NativeKernel
from dnnc.backends.runtime.prologue import prologue_of
from dnnc.ir.errors import DnncError, TargetError
from dnnc.ir.graph import Graph
from dnnc.ir.loops.stmt import Kernel
from dnnc.passes.planning.ladder import Failure, fail
from dnnc.passes.planning.program import Program, Step

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

FORMAT = "cuda-1"  # of kernels and their calling convention; part of every cache key
Progress = Callable[[str, int, int], None]


class Compiler(Protocol):
    """Makes machine code. `version` says all of it that code depends on besides the kernel's text and the
    architecture.
    """

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


@cache
def printer_version() -> str:
    """A hash of the modules of this package that turn kernel text into code, so that a change of theirs never meets
    code of before.
    """
    h = hashlib.sha256()
    for path in sorted(Path(str(package.__file__)).parent.glob("*.py")):
        if path.stem not in (
            "native",
            "graph",
            "gate",
            "device",
            "build",
            "tensor_maps",
            "arrays",
        ) and not path.stem.startswith("library"):
            h.update(path.read_bytes())
    return h.hexdigest()


def symbol_of(text: str, arch: str, version: str) -> str:
    """A kernel's name: the hash of all that its code depends on."""
    return "k_" + hashlib.sha256("\0".join([FORMAT, version, arch, text]).encode()).hexdigest()


def symbols_of(program: Program, arch: str, version: str) -> dict[str, str]:
    """The names of a program's kernels by their texts. Those of calls depend on the version of the library, which
    decides what is computed how.
    """
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


@dataclass(frozen=True)
class Given:
    """Code of a saved model, by symbol, and the symbols of kernels that a device had checked."""

    cubins: Mapping[str, bytes]
    checked: frozenset[str]


def build(
    program: Program,
    target: GpuTarget,
    kernels: KernelCache,
    compiler: Compiler,
    verify: bool = True,
    progress: Progress | None = None,
    given: Given | None = None,
    spare: dict[str, bytes] | None = None,
) -> CudaNative:
    """Compile and link.

    Args:
        program: scheduled kernels with their plan, for fixed sizes.
        target: the GPU.
        kernels: where code is looked for first, and kept.
        compiler: makes what is missing.
        verify: are kernels to be checked before they are used?
        progress: told ("compile", done, of).
        given: code out of a saved model; the cache is not asked for it.
        spare: takes the code of this program, for a second attempt at it; the cache may keep none.

    Raises:
        KernelsFailed: kernels failed, and the program can step down.
        DnncError: what the first one failed with, where it cannot.
    """
    symbols = symbols_of(program, target.arch, compiler.version)
    steps = {symbols[s.text]: (s, graph) for s, graph in program.walk() if isinstance(s, Step)}
    calls = {name: call for name, (s, _) in steps.items() if (call := step_call(s)) is not None}
    for name in calls:
        need(steps[name][0].kernel)
    cubins = {name: call.code for name, call in calls.items()}
    for name in (name for name in steps if name not in calls):
        found = given.cubins.get(name) if given else spare.get(name) if spare else None
        found = kernels.get(name[2:]) if found is None else found
        if found is not None:
            cubins[name] = found
    missing = {name: s for name, (s, _) in steps.items() if name not in cubins}
    tell = (lambda done, of: progress("compile", done, of)) if progress else None
    made, failures = _compiled(missing, target, compiler, tell) if missing else ({}, [])
    for name, cubin in made.items():
        kernels.put(name[2:], cubin)
        cubins[name] = cubin
    if spare is not None:
        spare.update(made)
    launches = {}
    for name, (s, _) in steps.items():
        try:
            launches[name] = ONE if name in calls else launched(name, s, kernels)
        except DnncError as e:
            failures.append(Failure(s, "launch", e))
    fail(program, failures)
    checks = _checks(steps, kernels, given) if verify else {}
    params = {name: tuple(p.name for p in s.nest.entry.params) for name, (s, _) in steps.items()}
    return _linked(program, target, symbols, cubins, (launches, params), checks, len(missing))


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


def _checks(steps: Mapping[str, tuple[Step, Graph]], kernels: KernelCache, given: Given | None) -> dict[str, Check]:
    """By symbol, the checks of kernels that no device has made."""
    known = given.checked if given else frozenset()
    fresh = {name: v for name, v in steps.items() if name not in known and kernels.get(checked_key(name)) is None}
    return {name: _check(name, s, graph, kernels) for name, (s, graph) in fresh.items()}


def _check(name: str, step: Step, graph: Graph, kernels: KernelCache) -> Check:
    def check(device: Device, function: Any, launch: Launch) -> None:
        check_kernel(graph, step, device, function, launch)
        kernels.put(checked_key(name), b"checked")

    return check


def linked_texts(program: Program, target: GpuTarget, version: str) -> tuple[NativeKernel, ...]:
    """The kernels of a program as data, then its loops and branches; nothing is compiled."""
    symbols = symbols_of(program, target.arch, version)
    return _described(
        program,
        symbols,
        {c.symbol: c for c in Linker(program, symbols, place_constants(program, parameters=True).offsets).controls()},
    )


def _described(
    program: Program, symbols: Mapping[str, str], controls: Mapping[str, Control]
) -> tuple[NativeKernel, ...]:
    texts = [control_text(controls[name]) for name in reversed(control_names(program))]
    return *describe(program, symbols), *describe_control(program, texts)


def _linked(
    program: Program,
    target: GpuTarget,
    symbols: Mapping[str, str],
    cubins: Mapping[str, bytes],
    started: tuple[Mapping[str, Launch], Mapping[str, tuple[str, ...]]],
    checks: dict[str, Check],
    compiled: int,
) -> CudaNative:
    constants = place_constants(program, parameters=True)
    linker = Linker(program, symbols, constants.offsets)
    controls: dict[str, Control] = {c.symbol: c for c in linker.controls()}
    graph = program.graph
    return CudaNative(
        target.arch,
        cubins,
        *started,
        tuple(linker.entry()),
        controls,
        constants,
        tuple(v.type for v in graph.inputs),
        tuple(v.type for v in graph.outputs),
        program.memory.arena,
        _described(program, symbols, controls),
        graph.text,
        compiled,
        checks,
        program,
        prologue_of(program),
        dict(graph.donated),
    )


def control_text(c: Control) -> str:
    """A loop or branch in words: it has no kernel."""
    if not isinstance(c, Loop):
        return f"{c.symbol}: {len(c.then)} calls if the condition holds, else {len(c.other)}\n"
    end = "" if c.condition is None else " while the condition holds"
    often = (
        "as often as asked"
        if c.length is None
        else f"{c.length} times"
        if c.trips is None
        else f"as often as asked, {c.length} times at most"
    )
    return f"{c.symbol}: {len(c.body)} calls, {often}{end}\n"
