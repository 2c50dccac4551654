"""A machine to tune for: how kernels are made for it, what it can do at most, and the text under which a log knows it.

In: a target text. Out: a Machine, which schedules and compiles without the device being there, and which figures
features and rooflines take. What measures on it is in `cpu_bench` and `gpu_bench`. A GPU's machine loads nothing of
LLVM, a CPU's nothing of CUDA.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol

from dnnc.autotune.search.task import Setting
from dnnc.ir.loops.stmt import Eval, Kernel, walk_stmts
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.target import parse_target as parse_words
from dnnc.passes.base import PassContext, pass_context
from dnnc.passes.lower.expand import decompose
from dnnc.passes.planning.program import is_parallel
from dnnc.passes.schedule.problem import Choice, Problem, Template
from dnnc.passes.schedule.step import apply_choice

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget
    from dnnc.backends.llvm.features import CpuTarget

# Of CPUs nothing below is asked from the machine: equal targets must give equal figures, and only their proportions
# matter.
CPU_CLOCK = 3.3e9  # Hz: servers keep up 2.7 to 4.1 under vector code
CORE_BANDWIDTH, SOCKET_BANDWIDTH = 24e9, 300e9  # bytes per second out of memory
LAST_LEVEL = 32 << 20  # bytes of the last cache, where it is not that of this machine
CORE_L2_BANDWIDTH = 200e9
CPU_START = 2e-6  # seconds of a call that all threads join
GPU_CLOCK = 1.7e9
GPU_START = 1.2e-6  # seconds of a kernel in a recorded graph
# float16 operations of the tensor cores of one SM in a cycle, sums in float32, by the number of the architecture
MATRIX_OPS = {80: 2048, 86: 512, 89: 512, 90: 4096, 100: 8192, 120: 512}


@dataclass(frozen=True)
class Limits:
    """What a machine can do at most, as nominal figures: the same for equal targets on every machine.

    Args:
        kind: "cpu" or "gpu".
        cores: threads of a call, or SMs.
        lanes: float32 numbers of a vector register, or of a warp.
        registers: vector registers of a core, or registers of 32 bits of an SM.
        near: bytes of a core's L1 data cache, or of an SM's shared memory.
        near_each: bytes of it that one block may have; of a CPU the same.
        l2: bytes of a core's L2, or of the device's.
        l3: bytes of the last cache; 0 of a GPU.
        threads: that an SM holds; 1 of a CPU.
        flops: float32 operations per second of all cores, a multiply-add counted as two.
        matrix_flops: the same in float16 on tensor cores; of a CPU the same as `flops`.
        bandwidth: bytes per second out of memory.
        l2_bandwidth: bytes per second out of L2, all cores together.
        start: seconds that a call costs at least.
    """

    kind: str
    cores: int
    lanes: int
    registers: int
    near: int
    near_each: int
    l2: int
    l3: int
    threads: int
    flops: float
    matrix_flops: float
    bandwidth: float
    l2_bandwidth: float
    start: float


@dataclass(frozen=True)
class Built:
    """A kernel's machine code with what it takes to run it.

    Args:
        symbol: the function's name within the code.
        code: an ELF object or a cubin.
        facts: what `Bench.load` of this machine wants to know, as JSON.
        spills: bytes per thread that registers were too few for, where the compiler tells.
        seconds: of printing and compiling.
    """

    symbol: str
    code: bytes
    facts: dict[str, Any] = field(default_factory=dict)
    spills: int = 0
    seconds: float = 0.0

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the code and its launch; cubins that differ in the function's name alone have the same."""
        nameless = self.code.replace(self.symbol.encode(), b"?" * len(self.symbol))
        return hashlib.sha256(nameless + json.dumps(self.facts, sort_keys=True).encode()).hexdigest()


class Machine(Protocol):
    """A machine to tune for. Everything here works where the device is not."""

    @property
    def name(self) -> str:
        """For people: "znver5", "NVIDIA H200"."""
        ...

    @property
    def text(self) -> str:
        """For `Setting.target`: the same for equal machines, and `machine_of(text)` is this machine."""
        ...

    @property
    def limits(self) -> Limits: ...

    @property
    def exclusive(self) -> bool:
        """Does compiling on the host disturb what is measured?"""
        ...

    def templates(self, setting: Setting) -> Sequence[Template]: ...

    def context(self, setting: Setting, precision: str | None = None) -> PassContext:
        """What graph passes ask, so that a graph becomes the kernels of a compilation."""
        ...

    def kernel(self, problem: Problem, choice: Choice, setting: Setting) -> Kernel:
        """The kernel as a compilation makes it. InternalError or VerifyError where the choice does not apply; knobs
        that a template does not know may fail in any way.
        """
        ...

    def compile(self, kernel: Kernel, symbol: str) -> Built:
        """InternalError where the text does not compile, TargetError where the compiler is missing."""
        ...

    def symbol(self, text: str) -> str:
        """What to call the kernel with this text."""
        ...


def machine_of(target: str) -> CpuMachine | GpuMachine:
    """The machine of a target: "llvm", "llvm -mcpu=znver4 -threads=2", "cuda:1", "cuda -arch=sm_90a". TargetError where
    it is none.
    """
    if parse_words(target).kind == "cuda":
        from dnnc.backends.cuda.target import parse_target as parse_gpu

        number, gpu = parse_gpu(target)
        return GpuMachine(gpu, number)
    from dnnc.backends.llvm.features import parse_target as parse_cpu

    return CpuMachine(parse_cpu(target))


def canonical(target: str, threads: int | None = None) -> str:
    """The text of a target for `Setting.target`. `threads`: of a CPU's calls, where the text does not say; default: the
    CPUs of the process.
    """
    if parse_words(target).kind == "cuda":
        return machine_of(target).text
    from dnnc.backends.llvm.features import parse_target as parse_cpu

    return CpuMachine(parse_cpu(target, threads)).text


def scheduled(problem: Problem, choice: Choice, templates: Sequence[Template], spelled: frozenset[str]) -> Kernel:
    """A problem's kernel by a choice, with only what the target can spell, verified."""
    return verify_kernel(decompose(apply_choice(problem, templates, choice), spelled))


@dataclass(frozen=True)
class CpuMachine:
    """A CPU of a number of threads."""

    target: CpuTarget
    exclusive = True

    @property
    def name(self) -> str:
        return self.target.cpu

    @cached_property
    def text(self) -> str:
        t = self.target
        return " ".join(["llvm", f"-mcpu={t.cpu}", *_unusual(t), f"-threads={t.threads}"])

    @cached_property
    def limits(self) -> Limits:
        t = self.target
        flops = 2 * t.rates.fma * t.lanes * CPU_CLOCK * t.threads
        bandwidth = min(CORE_BANDWIDTH * t.threads, SOCKET_BANDWIDTH)
        near = CORE_L2_BANDWIDTH * t.threads
        return Limits(
            "cpu",
            t.threads,
            t.lanes,
            t.registers,
            t.l1,
            t.l1,
            t.l2,
            LAST_LEVEL,
            1,
            flops,
            flops,
            bandwidth,
            near,
            CPU_START,
        )

    def templates(self, setting: Setting) -> Sequence[Template]:
        from dnnc.backends.llvm.templates import templates

        return templates(self.target, setting.numerics == "strict")

    def context(self, setting: Setting, precision: str | None = None) -> PassContext:
        from dnnc.backends.llvm.facts import facts

        return pass_context(facts(self.target, setting.numerics), numerics=setting.numerics, precision=precision)

    def kernel(self, problem: Problem, choice: Choice, setting: Setting) -> Kernel:
        from dnnc.backends.llvm.spelling import spelled

        return scheduled(problem, choice, self.templates(setting), spelled(setting.numerics, self.target.feature_set))

    def compile(self, kernel: Kernel, symbol: str) -> Built:
        from dnnc.backends.llvm.compile import compile_text
        from dnnc.backends.llvm.emit import emit_kernel

        t, start = self.target, time.perf_counter()
        code = compile_text(emit_kernel(kernel, symbol, t.feature_set), t.cpu, t.features)
        return Built(symbol, code, {"parallel": is_parallel(kernel)}, 0, time.perf_counter() - start)

    def symbol(self, text: str) -> str:
        return "k_tried"


@dataclass(frozen=True)
class GpuMachine:
    """A GPU; `number` is the device's on this host, where it has one."""

    target: GpuTarget
    number: int = 0
    exclusive = False

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def text(self) -> str:
        return f"cuda -arch={self.target.arch}"

    @cached_property
    def limits(self) -> Limits:
        t = self.target
        cycles = t.sms * GPU_CLOCK
        matrix = MATRIX_OPS.get(t.number) or MATRIX_OPS[max((n for n in MATRIX_OPS if n <= t.number), default=80)]
        rest = (t.threads_per_sm, 256 * cycles, matrix * cycles, t.bandwidth * 1e9, 64 * cycles, GPU_START)
        return Limits("gpu", t.sms, 32, t.registers, t.shared_per_sm, t.shared_bytes, t.l2_bytes, 0, *rest)

    def templates(self, setting: Setting) -> Sequence[Template]:
        from dnnc.backends.cuda.templates import templates

        return templates(self.target, setting.rounded, setting.numerics == "strict")

    def context(self, setting: Setting, precision: str | None = None) -> PassContext:
        from dnnc.backends.cuda.facts import facts

        return pass_context(facts(self.target, setting.numerics), numerics=setting.numerics, precision=precision)

    def kernel(self, problem: Problem, choice: Choice, setting: Setting) -> Kernel:
        from dnnc.backends.cuda.spelling import spelled
        from dnnc.backends.cuda.templates.library import library_templates

        called = () if setting.numerics == "strict" else library_templates()
        return scheduled(problem, choice, (*self.templates(setting), *called), spelled(setting.numerics))

    def compile(self, kernel: Kernel, symbol: str) -> Built:
        from dnnc.backends.cuda.emit import emit_kernel, launch_of
        from dnnc.backends.cuda.library import ONE, call_of, need
        from dnnc.backends.cuda.nvrtc import compile_cuda
        from dnnc.backends.runtime.codec import encode

        start = time.perf_counter()
        call = call_of(kernel)
        if call is not None:
            facts = {
                "launch": encode(ONE),
                "params": [p.name for p in kernel.entry.params],
                "overlaps": False,
                "version": need(kernel),
            }
            return Built(symbol, call.code, facts, 0, time.perf_counter() - start)
        made = compile_cuda(emit_kernel(kernel, symbol, self.target), self.target.arch)
        waits = any(isinstance(s, Eval) and s.name == "pdl_wait" for f in kernel.funcs for s in walk_stmts(f.body))
        facts = {
            "launch": encode(launch_of(kernel)),
            "params": [p.name for p in kernel.entry.params],
            "overlaps": waits,
        }
        return Built(
            symbol, made.cubin, {**facts, "registers": made.registers}, made.spills, time.perf_counter() - start
        )

    def symbol(self, text: str) -> str:
        return "k_" + hashlib.sha256(text.encode()).hexdigest()[:24]  # a device shares functions by their names


@cache
def _unusual(t: CpuTarget) -> tuple[str, ...]:
    """`-mattr=` with the features that count and differ from those of CPUs of this name; "" if none does."""
    from dnnc.backends.llvm.features import X86_CPUS, enabled

    usual = frozenset(X86_CPUS.get(t.cpu, ()))
    counted = frozenset(f for names in X86_CPUS.values() for f in names)
    on = t.feature_set & counted

    def gives(flags: Sequence[str]) -> bool:
        return enabled(",".join([*(f"+{f}" for f in sorted(usual)), *flags])) & counted == on

    flags = sorted(
        [*(f"+{f}" for f in on - usual), *(f"-{f}" for f in usual - on)],
        key=lambda f: (f[0], re.sub(r"\d+", "", f[1:]), f),
    )
    for f in sorted(flags, key=lambda f: (-len(f), f)):  # one that follows from another need not be said
        rest = [x for x in flags if x != f]
        if gives(rest):
            flags = rest
    return (f"-mattr={','.join(flags)}",) if flags else ()
