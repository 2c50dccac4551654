"""What runs compiled code in this process: the frame that an entry function gets, and the one thread pool.

In: addresses of an entry function, a frame, buffers and dims. Out: Frame.status. Every executable of the process shares
one pool, so two models never start twice as many threads as there are cores; the pool is built at first need and starts
its threads at first need. Importing this module does not load llvmlite.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    pass

# Slots of a frame, int64 each. The entry function, the pool and the kernels read and write them by these numbers.
FRAME_ARENA = 0  # address of the arena, 64-byte aligned
FRAME_OFFSETS = 1  # address of the int64 offsets of a symbolic plan
FRAME_DIMS = 2  # address of the int64 dims of this call
FRAME_CONSTANTS = 3  # address of the constants, 64-byte aligned
FRAME_STATUS = 4  # three slots: code (0 is success), kernel id, value
FRAME_BARRIER = 7  # address of void(ptr frame)
FRAME_POOL = 8  # address of the pool that runs this frame
FRAME_NTHREADS = 9  # threads of this run
FRAME_BOUND = 10  # address of the table of what kernels read of parameters: an address each
FRAME_SLOTS = 16
ALIGN = 64  # bytes: a cache line, and the widest vector

# (entry, frame, buffers, dims, nthreads) -> status, addresses as ints
Launch = Callable[[int, int, int, int, int], int]


def aligned_empty(nbytes: int, align: int = ALIGN) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Uninitialized bytes, uint8[nbytes], whose address is a multiple of `align` (a power of two)."""
    raw = np.empty(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start:][:nbytes]  # in two steps: an empty slice forgets its start


def aligned_array(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An uninitialized, contiguous array whose address is a multiple of ALIGN."""
    nbytes = math.prod(shape) * dtype.itemsize
    return aligned_empty(max(nbytes, 1))[:nbytes].view(dtype).reshape(shape)


def cpu_count() -> int:
    """The CPUs on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_threads() -> bool:
    """True if a pool exists here: it needs futexes and the pause instruction; elsewhere runs have one thread."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and sys.maxsize > 2**32


class Frame:
    """Memory of a call in flight: slots, arena, offsets. An executable keeps a free list of frames.

    Args:
        arena_bytes: size of the arena.
        offsets: how many offsets a symbolic plan has; `frame.offsets` is written before a call.
        constants: address of the constants, which outlive the frame.
    """

    __slots__ = ("address", "arena", "offsets", "slots")

    def __init__(self, arena_bytes: int, offsets: int = 0, constants: int = 0) -> None:
        self.slots = aligned_empty(8 * FRAME_SLOTS).view(np.int64)
        self.slots[:] = 0
        self.arena = aligned_empty(arena_bytes)
        self.offsets = np.zeros(offsets, np.int64)
        self.slots[FRAME_ARENA] = self.arena.ctypes.data
        self.slots[FRAME_OFFSETS] = self.offsets.ctypes.data
        self.slots[FRAME_CONSTANTS] = constants
        self.address: int = self.slots.ctypes.data

    @property
    def status(self) -> tuple[int, int, int]:
        """(code, kernel id, value) of the last run; code 0 is success."""
        code, kernel, value = self.slots[FRAME_STATUS : FRAME_STATUS + 3].tolist()
        return code, kernel, value

    def forget(self) -> None:
        """Success again, so that the frame serves another call."""
        self.slots[FRAME_STATUS : FRAME_STATUS + 3] = 0
