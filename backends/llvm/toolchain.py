"""What a CPU needs to compile and measure: passes' facts, schedules, texts, builds. A saved model runs without it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.backends.base import Built, Samples
from dnnc.backends.llvm.bench import CpuBench
from dnnc.backends.llvm.build import build, entry_source, symbol_of
from dnnc.backends.llvm.ceilings import ceilings
from dnnc.backends.llvm.check import run_native
from dnnc.backends.llvm.compile import asm_text, compile_text, load_objects
from dnnc.backends.llvm.control import control_text
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.entry import entry_text, timed_entry_text
from dnnc.backends.llvm.facts import facts
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.instance import CpuInstance
from dnnc.backends.llvm.kernel_code import kernel_code
from dnnc.backends.llvm.runtime import runtime
from dnnc.backends.llvm.single import function_of
from dnnc.backends.llvm.templates import templates
from dnnc.backends.llvm.timing import Timed
from dnnc.backends.runtime.frames import Frame
from dnnc.backends.runtime.link import link
from dnnc.backends.runtime.program import CompiledKernel, MemoryRef, Program
from dnnc.ir.graph import Value
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.shapes import concrete_shape
from dnnc.passes.planning.program import ScheduledGraph, Step, is_parallel

Array = np.ndarray[Any, Any]

__all__ = ["CpuBench", "build", "ceilings", "facts", "function_of", "templates"]


def describe(scheduled: ScheduledGraph, target: CpuTarget) -> Program:
    """The program without machine code."""
    return link(scheduled, {s.text: symbol_of(s.text, target) for s in scheduled.kernels}, control_text)


def kernel_text(kernel: CompiledKernel, stage: str, target: CpuTarget) -> str:
    """A kernel as LLVM IR or assembly."""
    if not kernel.control:
        return _in_stage(emit_kernel(parse_kernel(kernel.text), kernel.symbol, target.feature_set), stage, target)
    return kernel.text if stage == "llvm" else _in_stage(entry_text((), functions=[kernel.text]), stage, target)


def program_text(program: Program, stage: str, target: CpuTarget) -> str:
    """The entry function as LLVM IR or assembly."""
    comment = "#" if stage == "asm" else ";"
    return f"{comment} the entry function\n" + _in_stage(entry_source(program, program.flush), stage, target)


def _in_stage(text: str, stage: str, target: CpuTarget) -> str:
    return text if stage == "llvm" else asm_text(text, target.cpu, target.features)


def measure(
    instance: CpuInstance, arrays: Callable[[], list[Array]], repeats: int | None, target: CpuTarget
) -> Samples:
    """Time a program's kernels on these arrays, donated ones of which it writes into; see `Backend.measure`."""
    buffers = len(instance.program.inputs) + len(instance.outputs)
    timed = Timed(instance, target.cpu, target.features, buffers)

    pairs = instance.program.donated  # as in a call, whose results take the memory of the inputs, or one of their own
    kept = {k: np.empty(*instance.outputs[k]) for k in pairs if k not in instance.in_place}

    def call() -> None:
        given = arrays()
        fresh = [None if k in pairs else np.empty(s, d) for k, (s, d) in enumerate(instance.outputs)]
        timed.bound.into(
            given, [kept[k] if k in kept else given[pairs[k]] if r is None else r for k, r in enumerate(fresh)]
        )

    return timed.measure(call, repeats)


def kernel_runner(program: Program, step: Step) -> Callable[[Mapping[Value, Array]], Sequence[Array]]:
    """Runs one kernel of a program on its operands; gives its output in logical order."""
    address = program.loaded.address(program.symbols[step.text])
    return lambda operands: run_native(step, address, operands, {}, {})


def run_calls(
    program: Program, count: int, arrays: Sequence[Array], threads: int, target: CpuTarget
) -> Callable[[MemoryRef, int], bytes]:
    """Run the first calls of a program. Gives a function that reads bytes of its memory afterwards."""
    calls = list(program.calls[:count])
    addresses = {c.symbol: program.loaded.address(c.symbol) for c in calls}
    stamps = len(arrays) + len(program.outputs)  # a buffer behind the others, for times that nobody reads
    stride = 8 * (2 * len(calls) + 8)
    text = timed_entry_text(calls, addresses, stamps, stride, program.flush)
    loaded = load_objects([compile_text(text, target.cpu, target.features)])
    results = [np.empty(concrete_shape(o, {}), o.dtype.numpy) for o in program.outputs]
    buffers = [*map(np.ascontiguousarray, arrays), *results, np.zeros((target.threads, stride), np.int64)]
    pointers = (ctypes.c_void_p * len(buffers))(*[b.ctypes.data for b in buffers])
    frame = Frame(program.sizes({})[1], 0, program.constants.ctypes.data)
    dims = np.zeros(1, np.int64)
    nthreads = min(threads, target.threads) if program.parallel else 1
    runtime().run(loaded.address("entry"), frame.address, ctypes.addressof(pointers), dims.ctypes.data, nthreads)

    def read(ref: MemoryRef, nbytes: int) -> bytes:
        whole = frame.arena if ref.space == "arena" else buffers[ref.number].reshape(-1).view(np.uint8)
        start = ref.offset if ref.space == "arena" else ref.inside
        return whole[start : start + nbytes].tobytes()

    return read


def compile_kernel(kernel: Kernel, symbol: str, target: CpuTarget) -> Built:
    """Machine code of one kernel; see `Backend.compile_kernel`."""
    start = time.perf_counter()
    code = kernel_code(kernel, symbol, target)
    return Built(symbol, code, {"parallel": is_parallel(kernel)}, 0, time.perf_counter() - start)
