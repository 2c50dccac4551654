"""The CPU: LLVM IR through llvmlite, called by the threads of one pool."""

# mypy: disable-error-code="no-any-return"
# What `_toolchain` returns: its module is loaded by the first use, so it has no type here.

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import astuple, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.base import Backend, Bench, BuildJob, Built, Ceilings, ParameterTables, Samples
from dnnc.backends.llvm.code import FORMAT, load_code
from dnnc.backends.llvm.compile import llvm_version
from dnnc.backends.llvm.expression import CpuExpressions
from dnnc.backends.llvm.features import X86_CPUS, CpuTarget, canonical_text, enabled, host_cpu, parse_target
from dnnc.backends.llvm.instance import CpuInstance, CpuRunner
from dnnc.backends.llvm.runtime import runtime
from dnnc.backends.runtime.codec import decode
from dnnc.backends.runtime.frames import aligned_array, has_threads
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.program import CompiledKernel, MemoryRef, Program
from dnnc.ir.errors import TargetError
from dnnc.ir.target import Limits, Target, TargetFacts

if TYPE_CHECKING:
    from dnnc.backends.runtime.prologue import Pack
    from dnnc.ir.graph import Value
    from dnnc.ir.loops.stmt import Kernel
    from dnnc.passes.planning.program import ScheduledGraph, Step
    from dnnc.passes.schedule.problem import Template

Array = np.ndarray[Any, Any]
# Nominal figures: equal targets must give equal ones on every machine, and only their proportions matter.
CLOCK = 3.3e9  # Hz: servers keep up 2.7 to 4.1 under vector code
CORE_BANDWIDTH, SOCKET_BANDWIDTH = 24e9, 300e9  # bytes per second out of memory
LAST_LEVEL = 32 << 20  # bytes of the last cache
CORE_L2_BANDWIDTH = 200e9
START = 2e-6  # seconds of a call that all threads join


class LlvmBackend(Backend):
    """A CPU; see Backend."""

    name = "llvm"
    stages = ("graph", "operator", "llvm", "asm")
    comments = {"llvm": ";"}
    any_sizes = True
    saves_programs = True

    def __init__(self, target: Target, threads: int | None = None) -> None:
        self.target: CpuTarget = parse_target(str(replace(target, kind=LlvmBackend.name)), threads)
        self.threads = self.target.threads

    @cached_property
    def text(self) -> str:
        return canonical_text(self.target)

    @property
    def target_key(self) -> str:
        return repr(astuple(self.target))  # `repr` of the target is short

    @cached_property
    def _toolchain(self) -> Any:
        from dnnc.backends.llvm import toolchain  # loads passes and emitters, without which a saved model runs

        return toolchain

    # --- compilation --------------------------------------------------------------------------------------------------

    def facts(self, numerics: str) -> TargetFacts:
        return self._toolchain.facts(self.target, numerics)

    def templates(self, numerics: str, rounded: bool = False) -> Sequence[Template]:
        return self._toolchain.templates(self.target, numerics == "strict")

    @property
    def code_version(self) -> str:
        return f"kernel format {FORMAT}, LLVM {llvm_version()}"

    def build(self, scheduled: ScheduledGraph, job: BuildJob) -> Program:
        return self._toolchain.build(scheduled, self.target, job)

    def describe(self, scheduled: ScheduledGraph) -> Program:
        return self._toolchain.describe(scheduled, self.target)

    # --- execution ----------------------------------------------------------------------------------------------------

    def start(self, cache: KernelCache) -> None:
        runtime().start(cache)

    def load(self, program: Program) -> None:
        program.loaded = load_code(program.code)

    def runner(self, parameters: ParameterTables | None) -> CpuRunner:
        return CpuRunner(self.threads, parameters, self._refusal())

    def packer(self, program: Program) -> Pack:
        instance = CpuInstance(program, {}, self.threads, [], refusal=self._refusal())

        def pack(arrays: Sequence[Array]) -> list[Array]:
            results = [aligned_array(shape, dtype) for shape, dtype in instance.outputs]
            instance.into(arrays, results)
            return results

        return pack

    def expressions(self, cache: KernelCache, check: bool) -> CpuExpressions:
        return CpuExpressions(cache, self.threads)

    def function(self, kernel: Kernel, cache: KernelCache) -> Callable[[Sequence[Array], Sequence[int]], None] | None:
        return self._toolchain.function_of(kernel, self.target, self.expressions(cache, False))

    def unfit(self, code_version: str, target: Any) -> str:
        if code_version != self.code_version:
            return f"it was compiled for {code_version}, this is {self.code_version}"
        cpu = decode(CpuTarget, target)
        missing = sorted(enabled(cpu.features) - enabled(host_cpu()[1]))
        return f"it was compiled for {cpu.cpu}, and this CPU lacks {', '.join(missing)}" if missing else ""

    def like(self, target: Any) -> LlvmBackend:
        backend = copy(self)
        backend.target = decode(CpuTarget, target)
        return backend

    # --- texts, measurements ------------------------------------------------------------------------------------------

    def kernel_text(self, kernel: CompiledKernel, stage: str) -> str:
        return self._toolchain.kernel_text(kernel, stage, self.target)

    def program_text(self, program: Program, stage: str) -> str:
        return self._toolchain.program_text(program, stage, self.target)

    def measure(self, instance: CpuInstance, arrays: Callable[[], list[Array]], repeats: int | None) -> Samples:
        return self._toolchain.measure(instance, arrays, repeats, self.target)

    def ceilings(self, threads: int) -> Ceilings:
        return self._toolchain.ceilings(self.target, threads)

    def kernel_runner(self, program: Program, step: Step) -> Callable[[Mapping[Value, Array]], Sequence[Array]] | None:
        return self._toolchain.kernel_runner(program, step)

    def run_calls(
        self, program: Program, count: int, arrays: Sequence[Array], threads: int
    ) -> Callable[[MemoryRef, int], bytes] | None:
        return self._toolchain.run_calls(program, count, arrays, threads, self.target)

    # --- tuning -------------------------------------------------------------------------------------------------------

    @cached_property
    def limits(self) -> Limits:
        t = self.target
        flops = 2 * t.rates.fma * t.lanes * CLOCK * t.threads
        return Limits(
            kind="cpu",
            cores=t.threads,
            lanes=t.lanes,
            registers=t.registers,
            near=t.l1,
            l2=t.l2,
            l3=LAST_LEVEL,
            threads=1,
            flops=flops,
            matrix_flops=flops,
            bandwidth=min(CORE_BANDWIDTH * t.threads, SOCKET_BANDWIDTH),
            l2_bandwidth=CORE_L2_BANDWIDTH * t.threads,
            start=START,
        )

    @property
    def machine_name(self) -> str:
        return self.target.cpu

    def here(self) -> str:
        if why := self._refusal():
            raise TargetError(why)
        return host_cpu()[0]

    def _refusal(self) -> str:
        """Why this machine cannot run code for the target; empty where it can."""
        lacks = ", ".join(self.target.foreign[:4])
        what = f"this machine is {host_cpu()[0]}, which lacks {lacks} of {self.target.cpu}"
        return lacks and f"{what}: run what is compiled for it there (`save`, `dnnc.load`), or compile for 'llvm'"

    def bench(self) -> Bench:
        return self._toolchain.CpuBench(self.target)

    def compile_kernel(self, kernel: Kernel, symbol: str) -> Built:
        return self._toolchain.compile_kernel(kernel, symbol, self.target)

    @classmethod
    def availability(cls) -> dict[str, Any]:
        t = parse_target("llvm")
        known = {f for features in X86_CPUS.values() for f in features}
        return {
            "name": "llvm",
            "available": True,
            "reason": "",
            "cpu": t.cpu,
            "llvm": llvm_version(),
            "vectors": f"{t.vector_bits} bits, {t.registers} registers",
            "threads": t.threads if has_threads() else f"1 (no thread pool on {sys.platform})",
            "l1": t.l1,
            "l2": t.l2,
            "features": sorted(t.feature_set & known),
        }
