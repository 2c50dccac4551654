"""One CUDA device, which is the interpreter, for whatever a test compiles or puts on `cuda:0`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dnnc.array import devices, lazy
from dnnc.array.lazy import PROGRAMS_MADE
from dnnc.backends.cuda import target as cuda_target
from dnnc.backends.cuda.interpreted import DeviceBuffer, InterpretedDevice
from dnnc.backends.cuda.target import GpuTarget
from support.devices import install

GPU = "cuda:0"


def one_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[InterpretedDevice]:
    """What a fixture yields from."""

    def clear() -> None:
        devices.place.cache_clear()
        lazy.compiler.cache_clear()
        PROGRAMS_MADE.made.clear()

    own = InterpretedDevice()
    monkeypatch.setenv("DNNC_CACHE_DIR", str(tmp_path))
    install(monkeypatch, own)
    monkeypatch.setattr(cuda_target, "ask_device", lambda k=0: GpuTarget() if k == 0 else None)
    clear()
    yield own
    clear()


def there(device: InterpretedDevice, *arrays: np.ndarray[Any, Any]) -> list[DeviceBuffer]:
    """Arrays on the device."""
    return [device.empty(a.shape, a.dtype).set(a) for a in arrays]
