"""LLVM text -> ELF object -> addresses, through llvmlite.

In: the text of a module without target lines. Out: relocatable objects as bytes, which the cache keeps and any process
of the same CPU features can load; and loaded objects with the addresses of their functions. llvmlite is imported at
first use: the CUDA path never needs it. The objects are ELF on every system, and what they need from outside is checked
against a list before they are loaded.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from dnnc.backends.llvm.amx import request_tiles
from dnnc.backends.llvm.elf import symbols_of, undefined_symbols
from dnnc.backends.llvm.spelling import LIBRARY
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.ir.errors import InternalError

# What an object may take from the process, libm's functions too. LLVM adds memcpy, memmove and memset.
ALLOWED_SYMBOLS = LIBRARY | frozenset(
    (
        "aligned_alloc free memcpy memmove memset pthread_create pthread_join "
        "pthread_sigmask sched_getcpu sched_getaffinity sched_setaffinity sched_yield syscall"
    ).split()
)
KERNEL_PREFIX = "k_"  # kernels; an entry function calls those of other objects
CODEGEN_LEVEL = 2
# Vectors are explicit in the text, so promotion of register tiles and a clean-up are all that code needs.
PASSES = ("sroa", "simplify_cfg", "dead_code_elimination")
# Loop strength reduction turns the addresses of run-time strides into long chains: such kernels fall to 33-64 % of
# their speed with it.
LLVM_OPTIONS = ("-disable-lsr",)
# Instructions of Intel's cores with AVX512-FP16 that wait for what their destination held, so that a loop's turns wait
# for one another: x * sigmoid(x) may take twice its time. LLVM clears destinations on CPUs of the right name, but
# hypervisors show other CPUs' names.
WAITING = ("range", "perm", "getmant", "mulc", "mullq")


def compile_text(text: str, cpu: str, features: str, passes: bool = True) -> bytes:
    """Compile a module to a position-independent ELF object.

    Args:
        text: LLVM IR without `target` lines.
        cpu: LLVM's name of the CPU; it must be one that LLVM knows (`features.CPUS`), for LLVM ends the process
            otherwise.
        features: `+avx2,-avx512f` and so on, added to what `cpu` implies.
        passes: False skips the IR passes and generates code from the text as it stands.

    InternalError: the text is not valid, or needs a symbol that is neither a kernel nor in ALLOWED_SYMBOLS.
    """
    machine, module = _prepare(text, cpu, features, passes)
    try:
        obj: bytes = machine.emit_object(module)
    except RuntimeError as e:
        raise InternalError(f"LLVM cannot generate code for {cpu}: {e}") from e
    foreign = sorted(s for s in undefined_symbols(obj) if s not in ALLOWED_SYMBOLS and not s.startswith(KERNEL_PREFIX))
    if foreign:
        raise InternalError(
            f"generated code calls {', '.join(foreign)}, which is not in ALLOWED_SYMBOLS; the emitter must expand it\n"
            f"{_callers(text, foreign)}"
        )
    return obj


def asm_text(text: str, cpu: str, features: str, passes: bool = True) -> str:
    """The assembly of a module, as `compile_text` would encode it."""
    machine, module = _prepare(text, cpu, features, passes)
    return str(machine.emit_assembly(module))


def object_key(text: str, cpu: str, features: str) -> str:
    """Return the hex SHA-256 of all that decides the bytes of `compile_text(text, cpu, features)`."""
    parts = (llvm_version(), _triple(), *LLVM_OPTIONS, *PASSES, str(CODEGEN_LEVEL), cpu, _tuned(features), text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cached_object(text: str, cpu: str, cache: KernelCache | None) -> bytes:
    """The object of `compile_text(text, cpu, "")`, out of the cache where that has it, else kept there."""
    key = object_key(text, cpu, "")
    found = cache.get(key) if cache is not None else None
    if found is not None:
        return found
    made = compile_text(text, cpu, "")
    if cache is not None:
        cache.put(key, made)
    return made


def llvm_version() -> str:
    """The version of the LLVM that llvmlite carries, such as 22.1.0."""
    return ".".join(map(str, binding().llvm_version_info))


@dataclass(frozen=True)
class Loaded:
    """Linked objects. The library owns their code: keep this as long as any function of it may run."""

    library: Any
    names: frozenset[str]

    def address(self, name: str) -> int:
        """The address of a function. InternalError if no object defines it."""
        if name not in self.names:
            raise InternalError(f"no loaded object defines {name}; there are {', '.join(sorted(self.names)[:20])}")
        return int(self.library[name])


def load_objects(objs: Sequence[bytes]) -> Loaded:
    """Link objects together and into this process. InternalError: a duplicate or unknown symbol, or no link."""
    defined: set[str] = set()
    wanted: set[str] = set()
    for obj in objs:
        here, undefined = symbols_of(obj)
        if defined & here:
            raise InternalError(f"defined by two objects: {', '.join(sorted(defined & here))}")
        defined |= here
        wanted |= undefined
    missing = sorted(wanted - defined - ALLOWED_SYMBOLS)
    if missing:
        raise InternalError(f"no object defines {', '.join(missing)}, and it is not in ALLOWED_SYMBOLS")
    request_tiles()  # code may use them
    llvm = binding()
    absent = [s for s in sorted(wanted & LIBRARY) if not llvm.address_of_symbol(s)]
    if absent:
        raise InternalError(f"this process has no {', '.join(absent)}: its C library lacks them")
    machine = _target().create_target_machine(opt=CODEGEN_LEVEL, codemodel="default", jit=True)
    # JITLink keeps the sections of an object together, wherever memory is free, and reaches other objects through stubs
    builder = llvm.JITLibraryBuilder().add_current_process()
    for obj in objs:
        builder.add_object_img(obj)
    for name in defined:
        builder.export_symbol(name)
    try:
        library = builder.link(llvm.create_lljit_compiler(machine, use_jit_link=True), "dnnc")
    except RuntimeError as e:
        raise InternalError(f"objects cannot be linked: {e}") from e
    return Loaded(library, frozenset(defined))


# --- LLVM -------------------------------------------------------------------------------------------------------------


@cache
def binding() -> Any:
    """llvmlite's binding, set up. LLVM takes an option once per process."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    for option in LLVM_OPTIONS:
        llvm.set_option("dnnc", option)
    return llvm


def _triple() -> str:
    """The process's triple, but as ELF: the engine links ELF on every system."""
    triple: str = binding().get_process_triple()
    return triple if sys.platform == "linux" else f"{triple}-elf"


def _target() -> Any:
    return binding().Target.from_triple(_triple())


def _header(machine: Any) -> str:
    """One line without an end, so that LLVM's line numbers are those of the text."""
    return f'target triple = "{_triple()}" target datalayout = "{machine.target_data}" '


def _prepare(text: str, cpu: str, features: str, passes: bool) -> tuple[Any, Any]:
    """(target machine, verified module after the passes). The module keeps its context alive."""
    llvm = binding()
    machine = _target().create_target_machine(
        cpu=cpu, features=_tuned(features), opt=CODEGEN_LEVEL, reloc="pic", codemodel="default"
    )
    try:
        module = llvm.parse_assembly(_header(machine) + text, llvm.create_context())
        module.verify()
    except RuntimeError as e:
        raise InternalError(f"generated LLVM text is not valid: {_explain(str(e), text)}") from e
    if passes:
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
        manager = llvm.create_new_module_pass_manager()
        for name in PASSES:
            getattr(manager, f"add_{name}_pass")()
        manager.run(module, builder)
    return machine, module


def _tuned(features: str) -> str:
    """With what the features tell of the CPU's make; sse4a is AMD's."""
    flags = features.split(",")
    waits = "+avx512fp16" in flags and "+sse4a" not in flags
    return ",".join([*flags, *(f"+false-deps-{name}" for name in WAITING)]) if waits else features


def _explain(message: str, text: str) -> str:
    """LLVM's message with numbered lines around: parse errors give a line, verifier errors an instruction."""
    lines = text.splitlines()
    found = re.search(r"<string>:(\d+):\d+: error: (.*)", message)
    if found:
        at, what = int(found[1]) - 1, found[2]
    else:
        quoted = {part.strip() for part in message.splitlines()[1:]}
        at, what = next((k for k, line in enumerate(lines) if line.strip() in quoted), -1), message.strip()
    if at < 0:
        return what
    shown = range(max(at - 2, 0), min(at + 3, len(lines)))
    return what + "".join(f"\n{'>' if k == at else ' '}{k + 1:6} | {lines[k]}" for k in shown)


def _callers(text: str, names: Sequence[str]) -> str:
    """Return the first lines with a foreign symbol, if in the text: LLVM expands `frem` to fmodf."""
    hits = [f"{k:6} | {line}" for k, line in enumerate(text.splitlines(), 1) if any(n in line for n in names)]
    return (
        "\n".join(hits[:3])
        if hits
        else "the text does not name it: an instruction that this CPU lacks was expanded to a library call"
    )
