"""What is known of a GPU: facts per architecture, from a table, or asked from the device where there is one.

A target is written `cuda`, `cuda:1` or `cuda:1 -arch=sm_90a`. Templates read the facts; NVRTC gets the architecture.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, replace
from typing import Any

from dnnc.ir.errors import TargetError, install
from dnnc.ir.target import Target
from dnnc.ir.target import parse_target as parse_words

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class GpuTarget:
    """An architecture and its facts: sizes in bytes, bandwidth in GB/s (measured copy rate or the vendor's figure)."""

    arch: str = "sm_90a"
    sms: int = 132
    shared_bytes: int = 227 * KIB  # of a block that asks for it
    shared_default: int = 48 * KIB  # of a block that does not
    shared_per_sm: int = 228 * KIB
    registers: int = 65536  # of 32 bits, per SM
    max_threads: int = 1024  # of a block
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32
    l2_bytes: int = 60 * MIB
    bandwidth: float = 4256.0
    name: str = "NVIDIA H200"

    @property
    def number(self) -> int:
        """90 for sm_90a."""
        return int("".join(c for c in self.arch if c.isdigit()))

    @property
    def major(self) -> int:
        return self.number // 10

    @property
    def has_float8(self) -> bool:
        """Does it convert 8-bit floats?"""
        return self.number >= 89

    @property
    def has_wgmma(self) -> bool:
        """Warpgroup matrix instructions: sm_90a alone has them."""
        return self.arch == "sm_90a"

    @property
    def has_tma(self) -> bool:
        """Tensor memory accelerator, clusters, mbarrier transactions, programmatic dependent launch."""
        return self.number >= 90


# One chip per architecture; whoever has another one gets its own figures from the device.
FACTS = {
    "sm_80": GpuTarget("sm_80", 108, 163 * KIB, shared_per_sm=164 * KIB, l2_bytes=40 * MIB, bandwidth=1800.0,
    name="NVIDIA A100"),
    "sm_86": GpuTarget("sm_86", 82, 99 * KIB, shared_per_sm=100 * KIB, threads_per_sm=1536, blocks_per_sm=16,
    l2_bytes=6 * MIB, bandwidth=850.0,
                       name="NVIDIA RTX 3090"),
    "sm_89": GpuTarget("sm_89", 128, 99 * KIB, shared_per_sm=100 * KIB, threads_per_sm=1536, blocks_per_sm=24,
    l2_bytes=72 * MIB, bandwidth=920.0,
                       name="NVIDIA RTX 4090"),
    "sm_90": GpuTarget("sm_90"),
    "sm_90a": GpuTarget("sm_90a"),
    "sm_100": GpuTarget("sm_100", 148, l2_bytes=126 * MIB, bandwidth=7000.0, name="NVIDIA B200"),
    "sm_120": GpuTarget("sm_120", 170, 99 * KIB, shared_per_sm=100 * KIB, threads_per_sm=1536, blocks_per_sm=24,
    l2_bytes=96 * MIB, bandwidth=1600.0,
                        name="NVIDIA RTX 5090"),
}  # fmt: skip
DEFAULT_ARCH = "sm_90a"
# properties that CUDA 13 no longer has, and the attributes of the same numbers
ATTRIBUTES = {"memoryClockRate": "cudaDevAttrMemoryClockRate", "memoryBusWidth": "cudaDevAttrGlobalMemoryBusWidth"}


def parse_target(text: str | Target) -> tuple[int, GpuTarget]:
    """Read `cuda:1 -arch=sm_80`: the device's number and the facts.

    Without `-arch` the device is asked; with it, the table's facts hold unless the device is of that architecture.
    TargetError: the text is no CUDA target, the architecture is unknown, or neither it nor a device is there.
    """
    target = parse_words(text)
    if target.kind != "cuda":
        raise TargetError(f"target={str(target)!r}: expected 'cuda', 'cuda:1' or 'cuda -arch=sm_90a'")
    unknown = [k for k, _ in target.options if k != "arch"]
    if unknown:
        raise TargetError(f"target={str(target)!r}: CUDA has no option -{unknown[0]}; it has -arch=sm_90a")
    arch = target.option("arch")
    if arch and arch not in FACTS:
        raise TargetError(f"target={str(target)!r}: unknown architecture {arch}; there are {', '.join(FACTS)}")
    found = ask_device(target.device)
    if found is None:
        if not arch:
            raise TargetError(
                f"target={str(target)!r}: no CUDA device {target.device} is here ({why_no_device(target.device)}); "
                f"to compile for one elsewhere write 'cuda -arch={DEFAULT_ARCH}'"
            )
        return target.device, FACTS[arch]
    return target.device, found if not arch or arch == found.arch else FACTS[arch]


def ask_device(device: int = 0) -> GpuTarget | None:
    """The facts of a device of this machine, or None when there is none (no CuPy, no driver, no such number)."""
    runtime = _runtime()
    if runtime is None:
        return None
    try:
        if device >= runtime.getDeviceCount():
            return None
        p = dict(runtime.getDeviceProperties(device))
    except runtime.CUDARuntimeError:
        return None
    for name, attribute in ATTRIBUTES.items():
        if not p.get(name):
            try:
                p[name] = runtime.deviceGetAttribute(getattr(runtime, attribute), device)
            except runtime.CUDARuntimeError:  # the table knows a device of its architecture
                continue
    return from_properties(p)


def from_properties(p: dict[str, Any]) -> GpuTarget:
    """Facts from what the CUDA runtime says of a device. TargetError if it is too old."""
    number = 10 * int(p["major"]) + int(p["minor"])
    name = p["name"].decode() if isinstance(p["name"], bytes) else str(p["name"])
    if number < 80:
        raise TargetError(f"{name} is of architecture sm_{number}; kernels need sm_80 or newer")
    arch = "sm_90a" if number == 90 else f"sm_{number}"
    near = (
        FACTS.get(arch)
        or FACTS[max((a for a, t in FACTS.items() if t.number <= number), key=lambda a: FACTS[a].number)]
    )
    own = near if near.name == name else replace(near, name=name, bandwidth=_bandwidth(p) or near.bandwidth)
    return replace(
        own,
        arch=arch,
        sms=int(p["multiProcessorCount"]),
        shared_bytes=int(p.get("sharedMemPerBlockOptin", near.shared_bytes)),
        shared_default=int(p.get("sharedMemPerBlock", near.shared_default)),
        shared_per_sm=int(p.get("sharedMemPerMultiprocessor", near.shared_per_sm)),
        registers=int(p.get("regsPerMultiprocessor", near.registers)),
        max_threads=int(p.get("maxThreadsPerBlock", near.max_threads)),
        threads_per_sm=int(p.get("maxThreadsPerMultiProcessor", near.threads_per_sm)),
        l2_bytes=int(p.get("l2CacheSize", near.l2_bytes)),
    )


def _bandwidth(p: dict[str, Any]) -> float:
    """90 % of what memory clock and bus width give, in GB/s; 0 where the runtime no longer tells them."""
    return 0.9 * 2e3 * float(p.get("memoryClockRate", 0)) * float(p.get("memoryBusWidth", 0)) / 8 / 1e9


def why_no_device(device: int) -> str:
    """For an error message: what is missing."""
    runtime = _runtime()
    if runtime is None:
        return f"CuPy is not installed: {install('cuda13')}"
    try:
        n = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as e:
        return devices()[1] or str(e)
    return (
        f"there {'is 1 device' if n == 1 else f'are {n} devices'}, numbered from 0"
        if device >= n
        else "it did not answer"
    )


def devices() -> tuple[int, str]:
    """(number of devices that the driver finds, why there are none)."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return 0, f"there is no NVIDIA driver ({name})"
    status, count = driver.cuInit(0), ctypes.c_int(0)
    if status or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return 0, f"the driver finds no device (CUDA status {status})"
    return count.value, ""


def _runtime() -> Any:
    """The CUDA runtime as CuPy wraps it, without importing CuPy itself (half a second); None where it is missing."""
    try:
        from cupy_backends.cuda.api import runtime
    except ImportError:
        return None
    return runtime
