"""Packs parameters on a device: runs the compiled part of a prologue when parameters are bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.backends.cuda.graph import Frame
from dnnc.backends.cuda.instance import CudaInstance
from dnnc.backends.runtime.device import DEFAULT_STREAM, PARAMETER_ALIGN, Device, DeviceArray, Memory
from dnnc.backends.runtime.program import Program

Array = np.ndarray[Any, Any]


class Packer:
    """Takes the contents of parameters, on the host or the device, and gives what kernels read, on the device."""

    def __init__(self, program: Program, device: Device) -> None:
        self.device, self.instance = device, CudaInstance(program, lambda: device, tuple)

    def __call__(self, arrays: Sequence[Array | DeviceArray]) -> list[DeviceArray]:
        frame = Frame(self.instance.loaded())  # for this time alone: its memory is needed for calls
        kept = [self._upload(a) if isinstance(a, np.ndarray) else self._aligned(a) for a in arrays]
        results = [self.device.alloc(max(n, 1)) for n in frame.loaded.outputs]
        frame.on_memory([a.address for a in kept], [m.address for m in results])(DEFAULT_STREAM)
        status = frame.outcome(DEFAULT_STREAM)
        if status[0]:
            self.instance.fail(status)
        return [DeviceArray(m.address, s, d.name, m) for m, (s, d) in zip(results, self.instance.outputs)]

    def _upload(self, a: Array) -> Memory:
        memory = self.device.alloc(max(a.nbytes, 1))
        self.device.upload(memory.address, a.reshape(-1).view(np.uint8), DEFAULT_STREAM)
        return memory

    def _aligned(self, a: DeviceArray) -> Memory | DeviceArray:
        """The array itself where kernels can read it, else a copy."""
        if a.address % PARAMETER_ALIGN == 0:
            return a
        memory = self.device.alloc(max(a.nbytes, 1))
        self.device.copy(memory.address, a.address, a.nbytes, DEFAULT_STREAM)
        return memory
