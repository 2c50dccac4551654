"""A scheduled program -> native code: kernels compiled (or taken from the cache), checked, and linked with the
program's entry function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dnnc.backends.llvm import compile as compile_
from dnnc.backends.llvm import emit, spelling, values
from dnnc.backends.llvm.compile import compile_text, llvm_version, load_objects
from dnnc.backends.llvm.control import control_text
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.entry import entry_text
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.native import ENTRY, FORMAT, Native
from dnnc.backends.llvm.worker_pool import CompileService
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.link import Linker, describe, describe_control, lay_out_constants
from dnnc.backends.runtime.program import Call
from dnnc.backends.runtime.prologue import prologue_of
from dnnc.ir.errors import DnncError
from dnnc.passes.planning.ladder import Failure, fail
from dnnc.passes.planning.program import Program, Step

Array = np.ndarray[Any, Any]


@cache
def printer_version() -> str:
    """A hash of the modules that turn kernel text into code, so that a change of theirs never meets objects of
    before.
    """
    h = hashlib.sha256()
    for module in (emit, values, spelling, compile_):
        h.update(Path(str(module.__file__)).read_bytes())
    return h.hexdigest()


def symbol_of(text: str, target: CpuTarget) -> str:
    """A kernel's name: the hash of all that its code depends on."""
    key = "\0".join([FORMAT, printer_version(), llvm_version(), target.cpu, target.features, text])
    return "k_" + hashlib.sha256(key.encode()).hexdigest()


Check = Callable[[Step, int], None]  # a step and the address of its kernel
Progress = Callable[[str, int, int], None]


def build(
    program: Program,
    target: CpuTarget,
    kernels: KernelCache,
    service: CompileService,
    check: Check | None,
    progress: Progress | None = None,
    given: Mapping[str, bytes] | None = None,
    flush: bool = False,
    spare: dict[str, bytes] | None = None,
) -> Native:
    """Compile, check and link.

    Args:
        program: scheduled kernels with their plan.
        target: the CPU.
        kernels: where kernels are looked for first, and kept.
        service: compiles those that are missing.
        check: `check(step, address)` runs once for every kernel that was not in the cache, before it enters it.
        progress: told (stage, done, of).
        given: objects by symbol, out of a saved model; the cache is not asked for these.
        flush: are denormals zero while the program runs?
        spare: takes the objects of this program, for a second attempt at it; the cache may keep none.

    Raises:
        KernelsFailed: kernels failed, and the program can step down.
        DnncError: what the first one failed with, where it cannot.
    """
    symbols = {s.text: symbol_of(s.text, target) for s in program.kernels}
    objects: dict[str, bytes] = {}
    missing: dict[str, Step] = {}
    for s in program.kernels:
        name = symbols[s.text]
        if name in objects or name in missing:
            continue
        found = (
            given[name]
            if given and name in given
            else spare[name]
            if spare and name in spare
            else kernels.get(name[2:])
        )
        if found is not None:
            objects[name] = found
        else:
            missing[name] = s
    texts, failures = _emitted(missing, target)
    tell = (lambda done, of: progress("compile", done, of)) if progress else None
    failed: dict[str, Exception] = {}
    made = service.compile_many(list(texts.items()), target.cpu, target.features, tell, failed)
    failures += [Failure(missing[name], "compilation", e) for name, e in failed.items()]
    if check is not None and made:
        failures += _check_all(missing, made, check, progress)
    wrong = {id(f.step) for f in failures}
    for name, obj in made.items():
        if id(missing[name]) not in wrong:
            kernels.put(name[2:], obj)
    if spare is not None:
        spare.update({name: obj for name, obj in made.items() if id(missing[name]) not in wrong})
    fail(program, failures)
    objects.update(made)
    constants, offsets = lay_out_constants(program)
    linker = Linker(program, symbols, offsets)
    made_calls = linker.entry()
    control = [control_text(c) for c in linker.controls()]
    texts[ENTRY] = entry_text(made_calls, functions=control, flush=flush)
    objects[ENTRY] = compile_text(texts[ENTRY], target.cpu, target.features)
    return _linked(program, symbols, objects, constants, made_calls, control, texts, len(missing), flush)


def _emitted(missing: Mapping[str, Step], target: CpuTarget) -> tuple[dict[str, str], list[Failure]]:
    """The LLVM text of kernels by symbol, and those that cannot be emitted."""
    texts: dict[str, str] = {}
    failures: list[Failure] = []
    for name, s in missing.items():
        try:
            texts[name] = emit_kernel(s.kernel, name, target.feature_set)
        except Exception as e:
            failures.append(Failure(s, "emission", e))
    return texts, failures


def _check_all(
    missing: Mapping[str, Step], made: Mapping[str, bytes], check: Check, progress: Progress | None
) -> list[Failure]:
    """Check new kernels, linked with each other only. Returns those that are refused."""
    trial = load_objects(list(made.values()))
    failures: list[Failure] = []
    for k, name in enumerate(made):
        try:
            check(missing[name], trial.address(name))
        except DnncError as e:
            failures.append(Failure(missing[name], "kernel check", e))
        if progress:
            progress("check", k + 1, len(made))
    return failures


def _linked(
    program: Program,
    symbols: Mapping[str, str],
    objects: Mapping[str, bytes],
    constants: Array,
    made_calls: Sequence[Call],
    control: Sequence[str],
    texts: Mapping[str, str],
    compiled: int,
    flush: bool,
) -> Native:
    loaded = load_objects(list(objects.values()))
    return Native(
        loaded,
        loaded.address(ENTRY),
        constants,
        tuple(made_calls),
        program.dims,
        tuple(v.type for v in program.graph.outputs),
        program.memory.arena,
        (*describe(program, symbols), *describe_control(program, control)),
        objects,
        program.graph.text,
        compiled,
        texts,
        program,
        flush,
        prologue_of(program),
    )
