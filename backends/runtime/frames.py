"""What runs compiled code in this process: the frame that an entry function gets, and the one thread pool.

In: addresses of an entry function, a frame, buffers and dims. Out: Frame.status. Every executable of the process shares
one pool, so two models never start twice as many threads as there are cores; the pool is built at first need and starts
its threads at first need. Importing this module does not load llvmlite.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dnnc.backends.llvm.compile import Loaded
    from dnnc.backends.runtime.kernel_cache import KernelCache

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
    """Uninitialised bytes, uint8[nbytes], whose address is a multiple of `align` (a power of two)."""
    raw = np.empty(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start:][:nbytes]  # in two steps: an empty slice forgets its start


def cpu_count() -> int:
    """The CPUs on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_threads() -> bool:
    """Is there a pool on this system? It is written for futexes and the pause instruction; elsewhere every run has one
    thread.
    """
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and sys.maxsize > 2**32


class Frame:
    """The memory of one call in flight: slots, arena and offsets. One call at a time; an executable keeps a free list
    of them.

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


class Runtime:
    """The thread pool of this process; `runtime()` is the one that everybody uses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: NativePool | None = None

    def start(self, cache: KernelCache | None = None) -> NativePool:
        """The pool, built at the first call, with its object taken from `cache` or put there. Its threads start with
        the first run of more than one.
        """
        if self._pool is None:
            with self._lock:
                if self._pool is None:
                    self._pool = load_pool(cache)
        return self._pool

    @property
    def launch(self) -> Launch:
        """`run` without a look-up: keep it for repeated calls. It stays valid, also in a forked child."""
        return (self._pool or self.start()).launch

    @property
    def call(self) -> Callable[[int, Sequence[Any], Sequence[Any]], int]:
        """Runs an entry function on arrays: `call(record, arrays, results) -> status`.

        The record (see `dnnc.backends.llvm.pool`, CALL_OUT and so on) says what to run, and where the addresses of the
        arrays go. Arrays are contiguous objects with the buffer protocol. Releases the GIL while the program runs.
        """
        return (self._pool or self.start()).call

    def run(self, entry: int, frame: int, buffers: int, dims: int, nthreads: int) -> int:
        """Run `i64 entry(frame, buffers, dims, tid, nthreads)` on `nthreads` threads, the caller's among them; the
        others are addresses.

        Releases the GIL. While another call has the pool, this one runs on the caller's thread alone.

        Returns:
            Frame.status: 0, or the code of the first error.
        """
        return self.launch(entry, frame, buffers, dims, nthreads)

    def stop(self) -> bool:
        """End the pool's threads; the next run starts them anew. False when a run is under way, which is left alone."""
        return self._pool is None or self._pool.stop() == 0

    def _forget(self) -> None:
        """In a forked child: the parent's threads are not here, and its locks may have been held."""
        self._lock = threading.Lock()
        if self._pool is not None:
            self._pool.clear()


@dataclass(frozen=True)
class NativePool:
    """The functions of one loaded pool. `loaded` owns the code, and the pool's memory with it."""

    loaded: Loaded
    state: int
    bytes: int
    launch: Launch
    call: Callable[[int, Sequence[Any], Sequence[Any]], int]
    stop: Callable[[], int]

    def clear(self) -> None:
        """Forget all threads without ending them: zero is a pool that has none."""
        ctypes.memset(self.state, 0, self.bytes)


def load_pool(cache: KernelCache | None = None) -> NativePool:
    """A pool of its own, compiled or from the cache, and loaded. Stop it before the last reference to it goes: its
    threads run its code.
    """
    # Imported here: they serve the LLVM backend alone, and the pool's text needs the frame layout above.
    from dnnc.backends.llvm.compile import cached_object, load_objects
    from dnnc.backends.llvm.pool import POOL_BYTES, pool_text

    text, cpu = pool_text(threads=has_threads()), "x86-64" if has_threads() else "generic"
    loaded = load_objects([cached_object(text, cpu, cache)])

    def function(name: str, result: Any, *args: Any) -> Any:
        f: Any = ctypes.CFUNCTYPE(result, *args)(loaded.address(name))
        f.loaded = loaded  # the engine must outlive its functions
        return f

    state: int = function("dnnc_pool_state", ctypes.c_void_p)()
    run = function("dnnc_pool_run", ctypes.c_int64, *[ctypes.c_void_p] * 5, ctypes.c_int64)
    stop = function("dnnc_pool_stop", ctypes.c_int64, ctypes.c_void_p)
    objects = ctypes.c_void_p, ctypes.py_object, ctypes.py_object
    call: Any = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, *objects)(loaded.address("dnnc_pool_call"))
    call.loaded = loaded
    return NativePool(loaded, state, POOL_BYTES, partial(run, state), partial(call, state), partial(stop, state))


_RUNTIME = Runtime()


def runtime() -> Runtime:
    """The runtime of this process."""
    return _RUNTIME


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_RUNTIME._forget)
atexit.register(_RUNTIME.stop)
