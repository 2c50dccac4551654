"""Memory for results: a large block that nobody refers to any more serves the next result that fits.

In: shapes and dtypes. Out: uninitialised arrays of NumPy. Fresh pages come from the system filled with zeros and one fault each, which costs
two to five times what writing a result into pages that are there does. Blocks come back when their last view is gone; views of an array
lead to its owner, not to each other, so the owner is no array but a buffer whose end is watched.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from dnnc.backends.runtime import aligned_empty

Array = np.ndarray[Any, Any]
LEAST = 1 << 20  # bytes of a result worth it: a smaller one comes from memory that the process has
KEPT = 256 << 20  # bytes that wait for another result, all together
STEP = 1 << 16  # sizes of blocks are multiples of it, so that results of nearly one size share them
LOOSE = 1.25  # a block may be so much larger than the result


class Results:
    """Blocks that wait. Threads share it; the end of an array may come at any moment, also within a method here."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept, self._lock = kept, threading.RLock()
        self._free: list[Array] = []

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """An uninitialised array in C order. MemoryError where there is no memory for it."""
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes < LEAST:
            return np.empty(shape, kind)
        size = -(-nbytes // STEP) * STEP
        block = self._taken(size)
        if block is None:
            block = aligned_empty(size)
        owner = (ctypes.c_char * nbytes).from_buffer(block)
        weakref.finalize(owner, self._given_back, block).atexit = False
        return np.frombuffer(owner, kind).reshape(shape)

    @property
    def waiting(self) -> int:
        """Bytes."""
        with self._lock:
            return sum(b.nbytes for b in self._free)

    def _taken(self, size: int) -> Array | None:
        """The smallest block that fits."""
        with self._lock:
            fitting = [b for b in self._free if size <= b.nbytes <= LOOSE * size]
            if not fitting:
                return None
            best = min(fitting, key=lambda b: b.nbytes)
            self._free = [b for b in self._free if b is not best]
            return best

    def _given_back(self, block: Array) -> None:
        """The oldest go where there are too many."""
        with self._lock:
            self._free.append(block)
            while self.waiting > self._kept:
                self._free.pop(0)


@cache
def results() -> Results:
    """Those of this process."""
    return Results()


def maker(outputs: Sequence[tuple[Sequence[int], Any]]) -> Callable[[Sequence[int], Any], Array]:
    """What makes arrays for these shapes and dtypes: NumPy alone where all are small, since asking each time costs a quick model 3 %."""
    large = any(math.prod(s) * np.dtype(d).itemsize >= LEAST for s, d in outputs)
    return results().empty if large else np.empty
