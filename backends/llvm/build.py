"""A scheduled program -> native code: kernels compiled (or taken from the cache), checked, and linked with the program's entry function."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dnnc.backends.cache import KernelCache
from dnnc.backends.llvm import compile as compile_
from dnnc.backends.llvm import emit, spelling, values
from dnnc.backends.llvm.compile import Loaded, compile_text, llvm_version, load_objects
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.entry import Call, Place, entry_text
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.worker_pool import CompileService
from dnnc.backends.runtime import ALIGN, aligned_empty
from dnnc.ir.expr import Expr, Var, const, substitute, value
from dnnc.ir.graph import Value
from dnnc.ir.operator.stmt import Buffer, stored
from dnnc.ir.types import Layout, Part, TensorType
from dnnc.passes.graph.alias import root as root_of
from dnnc.passes.program import Program, Step

Array = np.ndarray[Any, Any]
FORMAT = "1"  # of kernels and their calling convention; part of every cache key


def pack(array: Array, type: TensorType) -> Array:
    """The bytes of a constant as its layout orders them; padding is 0."""
    if type.layout is None:
        return np.ascontiguousarray(array)
    return _packed(array, type.layout)


def _packed(a: Array, layout: Layout) -> Array:
    parts = layout.parts
    levels = {k: sorted((p for p in parts if p.axis == k), key=lambda p: -p.div) for k in range(a.ndim)}
    widths: list[tuple[int, int]] = []
    split: list[int] = []
    where: dict[Part, int] = {}
    for k in range(a.ndim):
        top = levels[k][0]
        outer = -(-a.shape[k] // top.div)
        widths.append((0, outer * top.div - a.shape[k]))
        for p in levels[k]:
            where[p] = len(split)
            split.append(outer if p is top else p.mod)
    return np.ascontiguousarray(np.pad(a, widths).reshape(split).transpose([where[p] for p in parts]))


@cache
def printer_version() -> str:
    """A hash of the modules that turn kernel text into code, so that a change of theirs never meets objects of before."""
    h = hashlib.sha256()
    for module in (emit, values, spelling, compile_):
        h.update(Path(str(module.__file__)).read_bytes())
    return h.hexdigest()


def symbol_of(text: str, target: CpuTarget) -> str:
    """A kernel's name: the hash of all that its code depends on."""
    key = "\0".join([FORMAT, printer_version(), llvm_version(), target.cpu, target.features, text])
    return "k_" + hashlib.sha256(key.encode()).hexdigest()


@dataclass
class Native:
    """A program that can be called: `entry` is the address of its entry function; it lives as long as this object."""

    program: Program
    loaded: Loaded
    entry: int
    constants: Array
    calls: tuple[Call, ...]  # what the entry function does, in order: one for each step
    symbols: dict[str, str]  # kernel text -> symbol
    texts: dict[str, str]  # symbol -> LLVM text
    compiled: int  # kernels that were not in the cache

    @property
    def parallel(self) -> bool:
        """Does any kernel share its work between threads?"""
        return any(c.parallel for c in self.calls)

    def sizes(self, dims: Mapping[Var, int]) -> tuple[list[int], int]:
        return self.program.memory.offsets(dims)


Check = Callable[[Step, int], None]  # a step and the address of its kernel
Progress = Callable[[str, int, int], None]


def build(
    program: Program, target: CpuTarget, kernels: KernelCache, service: CompileService, check: Check | None, progress: Progress | None = None
) -> Native:
    """Compile, check and link. `check(step, address)` runs once for every kernel that was not in the cache, before it enters it."""
    symbols = {s.text: symbol_of(s.text, target) for s in program.steps}
    texts: dict[str, str] = {}
    objects: dict[str, bytes] = {}
    missing: dict[str, Step] = {}
    for s in program.steps:
        name = symbols[s.text]
        if name in objects or name in missing:
            continue
        found = kernels.get(name[2:])
        if found is not None:
            objects[name] = found
        else:
            missing[name] = s
            texts[name] = emit_kernel(s.kernel, name, target.feature_set)
    tell = (lambda done, of: progress("compile", done, of)) if progress else None
    made = service.compile_many([(n, texts[n]) for n in missing], target.cpu, target.features, tell)
    if check is not None and made:
        trial = load_objects(list(made.values()))
        for k, (name, step) in enumerate(missing.items()):
            check(step, trial.address(name))
            if progress:
                progress("check", k + 1, len(missing))
    for name, obj in made.items():
        kernels.put(name[2:], obj)
    objects.update(made)
    constants, offsets = lay_out_constants(program)
    made_calls = calls(program, symbols, offsets)
    text = entry_text(made_calls)
    objects["entry"] = compile_text(text, target.cpu, target.features)
    loaded = load_objects(list(objects.values()))
    texts["entry"] = text
    return Native(program, loaded, loaded.address("entry"), constants, tuple(made_calls), symbols, texts, len(missing))


def lay_out_constants(program: Program) -> tuple[Array, dict[Value, int]]:
    """One block with every constant that a kernel reads, each 64-byte aligned; equal bytes are stored once."""
    aliases = {v: (source, at) for v, source, at in program.fusion.views}
    packed: list[tuple[int, Array]] = []
    offsets: dict[Value, int] = {}
    known: dict[tuple[str, str], int] = {}
    total = 0
    for v in dict.fromkeys(v for s in program.steps for v in s.params if program.memory.place[v][0] == "constant"):
        root, inside = root_of(aliases, v)  # a view of a constant is its bytes
        key = (program.graph.digest(root), str(root.type))
        if key not in known:
            bytes_ = pack(program.graph.constants[root], root.type)
            known[key] = total
            packed.append((total, bytes_))
            total += -(-bytes_.nbytes // ALIGN) * ALIGN
        offsets[v] = known[key] + inside
    block = aligned_empty(max(total, 1))
    for at, a in packed:
        block[at : at + a.nbytes] = a.reshape(-1).view(np.uint8) if a.dtype != np.bool_ else a.reshape(-1).astype(np.uint8)
    return block, offsets


def calls(program: Program, symbols: Mapping[str, str], constants: Mapping[Value, int]) -> list[Call]:
    """The steps as calls with places; offsets are literal when every size is."""
    static = not program.dims
    arena = program.memory.offsets({})[0] if static else []
    n_inputs = len(program.graph.inputs)
    position = {v: k for k, v in enumerate(program.dims)}

    def place(v: Value) -> Place:
        space, number = program.memory.place[v]
        if space == "constant":
            return Place("constant", constants[v])
        inside, size = program.memory.inside.get(v, 0), value(const(v.type.nbytes))
        if space in ("input", "output"):
            return Place("buffer", number + (n_inputs if space == "output" else 0), nbytes=-1 if size is None else size, inside=inside)
        return Place("arena", number, arena[number] + inside, size or 0) if static else Place("arena", number, inside=inside)

    out = []
    for s in program.steps:
        written = stored(s.kernel.entry.body)
        args = tuple(place(v) for v in s.params)
        buffers: Sequence[Buffer] = s.kernel.entry.buffers
        writes = tuple(a for a, b in zip(args, buffers) if b in written)
        out.append(Call(symbols[s.text], args, writes, tuple(position[d] for d in s.dims), s.parallel))
    return out


def shape_of(t: TensorType, env: Mapping[Expr, Expr]) -> tuple[int, ...]:
    """A shape with its symbolic dims filled in."""
    out = []
    for d in t.shape:
        n = value(substitute(const(d), env))
        assert n is not None, f"{d!r} is not fixed by the dims of the call"
        out.append(n)
    return tuple(out)
