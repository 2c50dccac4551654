"""NVIDIA GPUs: CUDA C++ through NVRTC, launched through CuPy's runtime or recorded as a graph."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from dnnc.backends.base import Backend, Bench, BuildJob, Built, Ceilings, Samples
from dnnc.backends.cuda.bench import GpuBench
from dnnc.backends.cuda.build import Compiler, NvrtcCompiler, build, check_program, notes_of, symbols_of
from dnnc.backends.cuda.check import MAX_STEPS, run_kernel
from dnnc.backends.cuda.device import device_problem, open_device
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.expression import CudaExpressions
from dnnc.backends.cuda.facts import facts
from dnnc.backends.cuda.instance import CudaInstance, CudaRunner
from dnnc.backends.cuda.library import ONE, VENDORS, call_of, installed, is_library, need
from dnnc.backends.cuda.loading import bind_parameters, load_kernel, stepwise
from dnnc.backends.cuda.nvrtc import OPTIONS, compile_cuda, library, nvrtc_version
from dnnc.backends.cuda.packer import Packer
from dnnc.backends.cuda.target import FACTS, GpuTarget, ask_device, devices, parse_target, why_no_device
from dnnc.backends.cuda.templates import templates
from dnnc.backends.cuda.templates.library import library_choices, library_templates
from dnnc.backends.cuda.timing import Timed, ceilings
from dnnc.backends.runtime.codec import encode
from dnnc.backends.runtime.device import Device, Weights
from dnnc.backends.runtime.frames import cpu_count
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.link import link
from dnnc.backends.runtime.program import CompiledKernel, Program
from dnnc.ir.errors import TargetError, TuneError, install
from dnnc.ir.graph import Value
from dnnc.ir.loops.stmt import Eval, Kernel, walk_stmts
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.target import Limits, Target, TargetFacts
from dnnc.passes.planning.program import ScheduledGraph, Step
from dnnc.passes.schedule.problem import Choice, Problem, Template

Array = np.ndarray[Any, Any]
# Nominal figures: equal targets must give equal ones on every machine, and only their proportions matter.
CLOCK = 1.7e9
START = 1.2e-6  # seconds of a kernel in a recorded graph
# float16 operations of the tensor cores of one SM in a cycle, sums in float32, by the number of the architecture
MATRIX_OPS = {80: 2048, 86: 512, 89: 512, 90: 4096, 100: 8192, 120: 512}


class CudaBackend(Backend):
    """A GPU; see Backend. `compiler` makes machine code."""

    name = "cuda"
    stages = ("graph", "operator", "cuda", "ptx")
    comments = {"cuda": "//", "ptx": "//"}
    check_limit = MAX_STEPS
    rounds_products = True
    exclusive = False
    numbered = True

    target: GpuTarget

    def __init__(self, target: Target, threads: int | None = None) -> None:
        self.asked = target
        self.number, self.target = self._parsed(target)
        self.host_threads = threads or cpu_count()
        here = self._device_here()
        self.present = here is not None and here.arch == self.target.arch

    def _parsed(self, target: Target) -> tuple[int, GpuTarget]:
        return parse_target(target)

    def _device_here(self) -> GpuTarget | None:
        return ask_device(self.number)

    @cached_property
    def compiler(self) -> Compiler:
        """TargetError: NVRTC is missing."""
        return NvrtcCompiler(self.host_threads)

    @property
    def text(self) -> str:
        return f"cuda -arch={self.target.arch}"

    def elsewhere(self, arch: str) -> CudaBackend:
        """The backend of another architecture."""
        return type(self)(Target(self.name, 0, (("arch", arch),)), self.host_threads)

    # --- compilation --------------------------------------------------------------------------------------------------

    def facts(self, numerics: str) -> TargetFacts:
        return facts(self.target, numerics)

    def templates(self, numerics: str, rounded: bool = False) -> Sequence[Template]:
        return templates(self.target, rounded, numerics == "strict")

    def library_templates(self, numerics: str) -> Sequence[Template]:
        return () if numerics == "strict" else library_templates()

    @property
    def code_version(self) -> str:
        return self.compiler.version

    def build(self, scheduled: ScheduledGraph, job: BuildJob) -> Program:
        return build(scheduled, self.target, self.compiler, job)

    def check(self, program: Program, job: BuildJob) -> None:
        if self.present:
            check_program(program, self._opened(), job)

    def describe(self, scheduled: ScheduledGraph) -> Program:
        symbols = symbols_of(scheduled, self.target.arch, self.compiler.version)
        return link(scheduled, symbols, parameters=True)

    def notes(self, scheduled: ScheduledGraph) -> Mapping[str, Sequence[str]]:
        return {"libraries": notes_of(scheduled)}

    def fallbacks(self, program: Program) -> tuple[str, ...]:
        return tuple(f"{where} (the host reads its condition)" for where in stepwise(program))

    # --- execution ----------------------------------------------------------------------------------------------------

    def load(self, program: Program) -> None:
        """Its first call loads it."""

    def runner(self, parameters: Any | None) -> CudaRunner:
        return CudaRunner(self._opened, self.present)

    def expressions(self, cache: KernelCache, check: bool) -> CudaExpressions:
        return CudaExpressions(self._opened, cache, check)

    @property
    def device(self) -> Callable[[], Device]:
        return self._opened

    @cached_property
    def _opened(self) -> Callable[[], Device]:
        found: list[Device] = []

        def device() -> Device:  # asking takes a millisecond or two
            if not found:
                found.append(self._open())
            return found[0]

        return device

    def _open(self) -> Device:
        here = ask_device(self.number)
        if here is not None and here.arch != self.target.arch:
            raise TargetError(
                f"device {self.number} is {here.arch}, and this program is for {self.target.arch}: compile it with "
                f"target='cuda:{self.number}'"
            )
        if here is None and self.asked.option("arch"):
            raise TargetError(
                f"this program is for {self.target.arch} and cannot run here: {why_no_device(self.number)}; save it "
                "with f.save('model.dnnc') and load it on a machine with such a GPU"
            )
        return open_device(self.number)

    def packer(self, program: Program) -> Packer:
        return Packer(program, self._opened())

    def bind_parameters(self, program: Program, weights: Weights, fetch: Callable[[Any], Array]) -> None:
        bind_parameters(program, weights, fetch)

    # --- texts, measurements ------------------------------------------------------------------------------------------

    def kernel_text(self, kernel: CompiledKernel, stage: str) -> str:
        if kernel.control:
            return kernel.text
        if is_library(kernel.choice):
            return f"// no code of ours: schedule {kernel.choice} calls a library, which the report names\n"
        text = emit_kernel(parse_kernel(kernel.text), kernel.symbol, self.target)
        return text if stage == "cuda" else ptx_text(text, self.target.arch)

    def measure(self, instance: CudaInstance, arrays: Callable[[], list[Array]], repeats: int | None) -> Samples:
        results = [np.empty(s, d) for s, d in instance.outputs]
        return Timed(instance.own_frame(), arrays(), results).measure(repeats, self.target.sms)

    def ceilings(self, threads: int) -> Ceilings:
        return ceilings(self.target)

    def kernel_runner(self, program: Program, step: Step) -> Callable[[Mapping[Value, Array]], Sequence[Array]]:
        device, symbol = self._opened(), program.symbols[step.text]
        function, launch = load_kernel(program, symbol, device), program.launches[symbol]
        return lambda operands: run_kernel(step, device, function, launch, operands, {}, {})

    # --- tuning -------------------------------------------------------------------------------------------------------

    @cached_property
    def limits(self) -> Limits:
        t = self.target
        cycles = t.sms * CLOCK
        matrix = MATRIX_OPS.get(t.number) or MATRIX_OPS[max((n for n in MATRIX_OPS if n <= t.number), default=80)]
        return Limits(
            kind="gpu",
            cores=t.sms,
            lanes=32,
            registers=t.registers,
            near=t.shared_per_sm,
            l2=t.l2_bytes,
            l3=0,
            threads=t.threads_per_sm,
            flops=256 * cycles,
            matrix_flops=matrix * cycles,
            bandwidth=t.bandwidth * 1e9,
            l2_bandwidth=64 * cycles,
            start=START,
        )

    @property
    def machine_name(self) -> str:
        return self.target.name

    def here(self) -> str:
        found = ask_device(self.number)
        if found is None:
            raise TargetError(f"no CUDA device: {why_no_device(self.number)}")
        if found.arch != self.target.arch:
            raise TargetError(f"this machine has {found.name}, {found.arch}, not {self.target.arch}")
        return found.name

    def library_choices(self, problem: Problem | None, numerics: str, rounded: bool) -> list[Choice]:
        names = self._installed()
        return [] if problem is None or numerics == "strict" else library_choices(problem, names, rounded)

    def _installed(self) -> tuple[str, ...]:
        """The libraries that are here. TuneError: there are none."""
        names = installed()
        if not names:
            missing = " and ".join(v.title for v in VENDORS.values())
            raise TuneError(
                f"libraries=True: {missing} are not here: {install('libraries')}, or tune without libraries"
            )
        return names

    def bench(self) -> Bench:
        try:
            device = self._opened()
        except TargetError as e:
            raise TargetError(f"{self.text} cannot be measured on cuda:{self.number}: {e}") from e
        return GpuBench(self.target, device)

    def compile_kernel(self, kernel: Kernel, symbol: str) -> Built:
        start = time.perf_counter()
        params = [p.name for p in kernel.entry.params]
        call = call_of(kernel)
        if call is not None:
            facts = {"launch": encode(ONE), "params": params, "overlaps": False, "version": need(kernel)}
            return Built(symbol, call.code, facts, 0, time.perf_counter() - start)
        compiled = compile_cuda(emit_kernel(kernel, symbol, self.target), self.target.arch)
        waits = any(isinstance(s, Eval) and s.name == "pdl_wait" for f in kernel.funcs for s in walk_stmts(f.body))
        facts = {"launch": encode(launch_of(kernel)), "params": params, "overlaps": waits}
        facts["registers"] = compiled.registers
        return Built(symbol, compiled.cubin, facts, compiled.spills, time.perf_counter() - start)

    def trial_symbol(self, text: str) -> str:
        return "k_" + hashlib.sha256(text.encode()).hexdigest()[:24]

    # --- what the command line says -----------------------------------------------------------------------------------

    @classmethod
    def device_problem(cls, number: int) -> str:
        return device_problem(number)

    @classmethod
    def arch_here(cls, device: int) -> str:
        found = ask_device(device)
        return found.arch if found is not None else ""

    @classmethod
    def availability(cls) -> dict[str, Any]:
        cupy = find_spec("cupy") is not None
        count, driver = devices()
        compiler = ""
        missing = [] if cupy else [f"CuPy is not installed: {install('cuda13')} (or cuda12)"]
        if cupy:
            try:
                compiler = f"NVRTC {nvrtc_version()}"
            except TargetError as e:
                missing.append(str(e))
        if driver:
            missing.append(f"{driver}; models can be compiled for others: 'cuda -arch=sm_90a'" if compiler else driver)
        gpus = [f"{n}: {t.name} ({t.arch}, {t.sms} SMs)" for n in range(count) if (t := ask_device(n)) is not None]
        return {
            "name": "cuda",
            "available": not missing,
            "reason": "; ".join(missing),
            "cupy": "installed" if cupy else "missing",
            "compiler": compiler or "missing",
            "architectures": sorted(FACTS),
            "devices": gpus or count,
        }


def ptx_text(text: str, arch: str) -> str:
    """CUDA C++ as PTX. TargetError: NVRTC is missing."""
    compile_cuda(text, arch)  # an error is told with the lines that it names
    nvrtc = library()
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={arch}", *OPTIONS))
        return bytes(nvrtc.getPTX(program)).rstrip(b"\0").decode()
    finally:
        nvrtc.destroyProgram(program)
