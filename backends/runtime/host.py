"""The host's memory and CPUs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

ALIGN = 64  # bytes: a cache line, and the widest vector


def aligned_empty(nbytes: int, align: int = ALIGN) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Uninitialised bytes, uint8[nbytes], whose address is a multiple of `align` (a power of two)."""
    raw = np.empty(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start:][:nbytes]  # in two steps: an empty slice forgets its start


def cpu_count() -> int:
    """The CPUs on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
