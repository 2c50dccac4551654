"""Targets as data, so that passes can ask what a machine has without importing a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dnnc.ir.errors import TargetError


@dataclass(frozen=True)
class CoreRates:
    """What one CPU core sustains in a cycle at most; vectors are of the width that generated code uses.

    Attributes:
        fma: vectors of multiply-adds.
        loads: vectors loaded from the L1 cache.
        stores: vectors stored to it.
        latency: cycles until the result of a multiply-add can be used.
        l2: bytes read from the L2 cache.
        memory: bytes read from memory while the other cores of the chip read as well.
    """

    fma: float = 2.0
    loads: float = 2.0
    stores: float = 1.0
    latency: float = 4.0
    l2: float = 57.0
    memory: float = 6.0

    @property
    def chains(self) -> int:
        """Independent multiply-adds that hide their latency."""
        return round(self.fma * self.latency)


WIDE_CORE = CoreRates()  # two 512-bit multiply-adds a cycle


@dataclass(frozen=True)
class ReductionSplit:
    """When a reduction with few results is worth parts, whose results are reduced again.

    Attributes:
        blocks: that the parts should fill: of threads, or shares of threads.
        line: neighbouring results that one block computes.
        row, column: elements of a sum, in one piece and lying apart, that are worth parts.
        part_row, part_column: what a part has of them at least.
        parts: at most.
        work: elements, all sums together, below which one thread is fast enough.
        by_axes: GPUs: sums over several axes are computed axis by axis, norms of long rows come apart, and a small copy
            may come first.
    """

    blocks: int
    line: int
    row: int
    part_row: int
    column: int
    part_column: int
    parts: int
    work: int = 0
    by_axes: bool = False


CORE_SPLIT = ReductionSplit(64, 64, 1 << 18, 1 << 13, 1 << 12, 1 << 8, 64, 1 << 18)
GPU_SPLIT = ReductionSplit(128, 32, 1 << 16, 1 << 12, 2048, 64, 256, by_axes=True)


@dataclass(frozen=True)
class TargetFacts:
    """What graph passes may ask about a target. Defaults suit a CPU with 512-bit vectors.

    Attributes:
        lanes: float32 elements of a vector register.
        rates: of a core, by which algorithms are weighed against each other.
        native_intrinsics: float32 intrinsics that the target has itself; others are expanded into arithmetic.
        channels_last: do images lie with their channels last (GPUs), instead of in blocks of `lanes`?
        serial_rows: do threads walk rows one element after the other fast (CPUs)? Sorts then go by digits, else by
            merging.
        align: bytes; where a value may begin within the memory of another is a multiple of it.
        reductions: which are split.
        fuses_attention: is there a kernel for attention as one op?
        fuses_norm: given a norm and the contraction that alone reads its result: is there a kernel for both?
        supports_scan_kernel: given the form of a loop (`dnnc.passes.lower.recurrent_form`): is there a kernel for
            all of its steps?
    """

    lanes: int = 16
    rates: CoreRates = WIDE_CORE
    native_intrinsics: frozenset[str] = frozenset()
    channels_last: bool = False
    serial_rows: bool = True
    align: int = 1
    reductions: ReductionSplit = CORE_SPLIT
    fuses_attention: bool = False
    fuses_norm: Callable[[Any, Any], bool] | None = None
    supports_scan_kernel: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class Limits:
    """What a machine can do at most, as nominal figures: the same for equal targets on every machine.

    Attributes:
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
class Target:
    """What to compile for: `llvm -mcpu=skylake-avx512 -threads=2`, `cuda:1 -arch=sm_90a`, `reference`.

    Attributes:
        kind: name of the backend.
        device: number of the device.
        options: (name, value) of `-name=value` in order.
    """

    kind: str
    device: int = 0
    options: tuple[tuple[str, str], ...] = ()

    def option(self, name: str, default: str = "") -> str:
        return dict(self.options).get(name, default)

    def __str__(self) -> str:
        head = f"{self.kind}:{self.device}" if self.device else self.kind
        return " ".join([head, *(f"-{k}={v}" for k, v in self.options)])


def parse_target(text: str | Target) -> Target:
    """Read a target. TargetError says what is wrong with it."""
    if isinstance(text, Target):
        return text
    words = text.split()
    kind, _, device = words[0].partition(":") if words else ("", "", "")
    if not kind or kind.startswith("-"):
        raise TargetError(f"target={text!r}: expected a backend such as 'llvm' or 'cuda' first")
    if device and not device.isdigit():
        raise TargetError(f"target={text!r}: a device number is written cuda:1")
    options = []
    for w in words[1:]:
        name, _, v = w.partition("=")
        if not w.startswith("-") or "=" not in w:
            raise TargetError(
                f"target={text!r}: {w!r} is no option; they are written -name=value, such as -mcpu=skylake-avx512"
            )
        options.append((name.lstrip("-"), v))
    return Target(kind, int(device or 0), tuple(options))
