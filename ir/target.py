"""Targets as data, so that passes can ask what a machine has without importing a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dnnc.ir.errors import TargetError


@dataclass(frozen=True)
class CoreRates:
    """What one CPU core sustains in a cycle at most; vectors are of the width that generated code uses."""

    fma: float = 2.0  # vectors of multiply-adds
    loads: float = 2.0  # vectors loaded from the L1 cache
    stores: float = 1.0  # vectors stored to it
    pairs: float = 0.0  # vectors of sums of two bfloat16 products; 0: there is no such instruction
    tile_rows: float = (
        0.0  # rows of a product of two matrix tiles (`ir/loops/tiles.py`); 0: there are no such registers
    )
    latency: float = 4.0  # cycles until the result of a multiply-add can be used
    l2: float = 57.0  # bytes read from the L2 cache
    memory: float = 6.0  # bytes read from memory while the other cores of the chip read as well

    @property
    def chains(self) -> int:
        """Independent multiply-adds that hide their latency."""
        return round(self.fma * self.latency)


WIDE_CORE = CoreRates()  # two 512-bit multiply-adds a cycle


@dataclass(frozen=True)
class ReductionSplit:
    """When a reduction with few results is worth parts, whose results are reduced again."""

    blocks: int  # that the parts should fill: of threads, or shares of threads
    line: int  # neighbouring results that one block computes
    row: int  # contiguous elements of a sum that are worth parts
    part_row: int  # the least of them in a part
    column: int  # strided elements of a sum that are worth parts
    part_column: int  # the least of them in a part
    parts: int  # at most
    work: int = 0  # elements, all sums together, below which one thread is fast enough
    # GPUs: sums over several axes are computed axis by axis, norms of long rows come apart, and a small copy may come
    # first
    by_axes: bool = False


CORE_SPLIT = ReductionSplit(64, 64, 1 << 18, 1 << 13, 1 << 12, 1 << 8, 64, 1 << 18)
GPU_SPLIT = ReductionSplit(128, 32, 1 << 16, 1 << 12, 2048, 64, 256, by_axes=True)


@dataclass(frozen=True)
class TargetFacts:
    """What graph passes may ask about a target. Defaults suit a CPU with 512-bit vectors."""

    lanes: int = 16  # float32 elements of a vector register
    rates: CoreRates = WIDE_CORE  # of a core, by which algorithms are weighed against each other
    l2: int = 1 << 20  # bytes of a core's second-level cache
    # float32 intrinsics that the target has itself; others are expanded into arithmetic
    native_intrinsics: frozenset[str] = frozenset()
    channels_last: bool = False  # do images lie with their channels last (GPUs), instead of in blocks of `lanes`?
    # is a sum of products of bytes in i32 faster than one of floats? Quantized models then stay in bytes
    multiplies_bytes: bool = False
    packs_bytes: bool = False  # the same where both operands change with the call: kernels lay out the second for it
    recodes_bytes: bool = False  # is a table of 256 bytes faster than a few functions of floats?
    multiplies_float8: bool = False  # the same of 8-bit floats, summed in float32
    # do products decode weights of few bits as they read them? Else those are floats from the start
    decodes_weights: bool = False
    runs_sparse_rows: bool = False  # has it code for groups of rows of sparse weights, an instruction for each element?
    # given a graph and a product or convolution in it: how are weights with many zeros stored, and why? In place of a
    # choice for vectors of `lanes`; see `passes/rewrites/sparse.py`
    weighs_sparse: Callable[[Any, Any], Any] | None = None
    # of which products, all in 16-bit floats, if this is set: rows, sizes of the weights [k, n], bits of a code,
    # elements of a sum that share a scale
    decodes: Callable[[int, int, int, int, int], bool] | None = None
    # do threads walk rows one element after the other fast (CPUs)? Sorts then go by digits, else by merging
    serial_rows: bool = True
    align: int = 1  # bytes; where a value may begin within the memory of another is a multiple of it
    reductions: ReductionSplit = CORE_SPLIT  # which are split
    fuses_attention: bool = False  # is there a kernel for attention as one op?
    # given a norm or an element-wise node, and the contraction that alone reads its result: is there a kernel for both?
    fuses_norm: Callable[[Any, Any], bool] | None = None
    # given a contraction: may its kernel go on with the result and store several arrays, in the memory of what it reads
    # at the same elements too?
    stores_several: Callable[[Any], bool] | None = None
    # elements from which all threads take part in an element-wise kernel that serves several sizes; 0: each kernel
    # knows its sizes
    parallel_from: int = 0
    # given the form of a loop (`dnnc.passes.lower.recurrent_form`): is there a kernel for all of its steps?
    supports_scan_kernel: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class Limits:
    """What a machine can do at most, as nominal figures: the same for equal targets on every machine."""

    kind: str  # "cpu" or "gpu"
    cores: int  # threads of a call, or SMs
    lanes: int  # float32 numbers of a vector register, or of a warp
    registers: int  # vector registers of a core, or registers of 32 bits of an SM
    near: int  # bytes of a core's L1 data cache, or of an SM's shared memory
    l2: int  # bytes of a core's L2, or of the device's
    l3: int  # bytes of the last cache; 0 of a GPU
    threads: int  # that an SM holds; 1 of a CPU
    flops: float  # float32 operations per second of all cores, a multiply-add counted as two
    matrix_flops: float  # the same in float16 on tensor cores; of a CPU the same as `flops`
    bandwidth: float  # bytes per second out of memory
    l2_bandwidth: float  # bytes per second out of L2, all cores together
    start: float  # seconds that a call costs at least


@dataclass(frozen=True)
class Target:
    """What to compile for: `llvm -mcpu=skylake-avx512 -threads=2`, `cuda:1 -arch=sm_90a`, `reference`."""

    kind: str  # name of the backend
    device: int = 0  # number of the device
    options: tuple[tuple[str, str], ...] = ()  # (name, value) of `-name=value` in order

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
