"""GPU targets: what is written, what a device says of itself, and what is told when neither will do."""

from __future__ import annotations

from typing import Any

import pytest

from dnnc.backends.cuda import target
from dnnc.backends.cuda.target import FACTS, GpuTarget, from_properties, parse_target
from dnnc.ir.errors import TargetError

H100 = {
    "name": b"NVIDIA H100 PCIe", "major": 9, "minor": 0, "multiProcessorCount": 114, "sharedMemPerBlock": 49152,
    "sharedMemPerBlockOptin": 232448,
    "sharedMemPerMultiprocessor": 233472, "regsPerMultiprocessor": 65536, "maxThreadsPerBlock": 1024,
    "maxThreadsPerMultiProcessor": 2048,
    "l2CacheSize": 50 << 20, "memoryClockRate": 1593000, "memoryBusWidth": 5120,
}  # fmt: skip


class Runtime:
    """The CUDA runtime of a machine with these devices."""

    class CUDARuntimeError(Exception):
        pass

    def __init__(self, *devices: dict[str, Any]) -> None:
        self.devices = devices

    def getDeviceCount(self) -> int:
        if not self.devices:
            raise self.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return len(self.devices)

    def getDeviceProperties(self, k: int) -> dict[str, Any]:
        return self.devices[k]

    cudaDevAttrMemoryClockRate, cudaDevAttrGlobalMemoryBusWidth = 36, 37

    def deviceGetAttribute(self, attribute: int, k: int) -> int:
        if attribute == 37:
            raise self.CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
        return {36: 2619000}[attribute]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda runtime: monkeypatch.setattr(target, "_runtime", lambda: runtime)


def test_a_named_architecture_needs_no_device(machine: Any) -> None:
    machine(Runtime())
    device, gpu = parse_target("cuda:1 -arch=sm_80")
    assert (device, gpu) == (1, FACTS["sm_80"]) and gpu.major == 8 and not gpu.has_tma and not gpu.has_wgmma


def test_a_device_is_asked(machine: Any) -> None:
    machine(Runtime(H100, {**H100, "multiProcessorCount": 7}))
    device, gpu = parse_target("cuda:1")
    assert (
        device == 1
        and gpu.sms == 7
        and gpu.arch == "sm_90a"
        and gpu.name == "NVIDIA H100 PCIe"
        and gpu.l2_bytes == 50 << 20
    )
    assert gpu.bandwidth == pytest.approx(1835, rel=0.01)
    assert parse_target("cuda -arch=sm_90a")[1].sms == 114  # of the architecture asked for: its own facts
    assert parse_target("cuda -arch=sm_80")[1] == FACTS["sm_80"]


def test_properties_that_are_missing_are_asked_for(machine: Any) -> None:
    clockless = {k: v for k, v in H100.items() if k != "memoryClockRate"}
    machine(Runtime(clockless, {**clockless, "memoryBusWidth": 0}))
    assert parse_target("cuda")[1].bandwidth == pytest.approx(3017, rel=0.01)
    assert parse_target("cuda:1")[1].bandwidth == FACTS["sm_90a"].bandwidth  # the runtime does not tell it


@pytest.mark.parametrize("arch", FACTS)
def test_facts(arch: str) -> None:
    t = FACTS[arch]
    assert t.arch == arch and t.shared_default <= t.shared_bytes < t.shared_per_sm and t.major == t.number // 10
    assert t.has_wgmma == (arch == "sm_90a") and t.has_tma == (t.major >= 9)


def test_the_default_is_a_hopper() -> None:
    assert GpuTarget() == FACTS["sm_90a"] and GpuTarget().shared_bytes == 232448


def test_a_newer_device_takes_the_nearest_older_facts() -> None:
    gpu = from_properties({"name": "NVIDIA X", "major": 10, "minor": 3, "multiProcessorCount": 160})
    assert (
        gpu.arch == "sm_103"
        and gpu.sms == 160
        and gpu.l2_bytes == FACTS["sm_100"].l2_bytes
        and gpu.bandwidth == FACTS["sm_100"].bandwidth
    )


ERRORS = [
    ("llvm", None, "expected 'cuda'"),
    ("cuda -mcpu=x", None, "CUDA has no option -mcpu"),
    ("cuda -arch=sm_1", None, "unknown architecture sm_1; there are sm_80"),
    ("cuda", None, r"pip install -e '\.\[cuda13\]'.*write 'cuda -arch=sm_90a'"),
    ("cuda", Runtime(), "no CUDA-capable device|no NVIDIA driver|driver finds no device"),
    ("cuda:3", Runtime(H100), "there is 1 device, numbered from 0"),
    ("cuda", Runtime({**H100, "name": "Old", "major": 7}), "Old is of architecture sm_70; kernels need sm_80"),
]


@pytest.mark.parametrize("text,runtime,message", ERRORS, ids=[f"{t} {m[:20]}" for t, _, m in ERRORS])
def test_errors(text: str, runtime: Any, message: str, machine: Any) -> None:
    machine(runtime)
    with pytest.raises(TargetError, match=message):
        parse_target(text)


def test_this_machine_answers_or_says_why() -> None:
    found = target.ask_device(0)
    assert found is not None or target.why_no_device(0)
