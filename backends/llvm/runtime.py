"""The one thread pool of this process, and what runs entry functions on it.

Every program of the process shares the pool, so two models never start twice as many threads as there are cores. The
pool is built at first need and starts its threads at first need.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dnnc.backends.llvm.compile import Loaded, cached_object, load_objects
from dnnc.backends.llvm.pool import POOL_BYTES, pool_text
from dnnc.backends.runtime.frames import Launch, has_threads
from dnnc.backends.runtime.kernel_cache import KernelCache


class Runtime:
    """The thread pool of this process; `runtime()` is the one that everybody uses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: NativePool | None = None

    def start(self, cache: KernelCache | None = None) -> NativePool:
        """The pool, built at the first call with `cache` for its object. Threads start with the first parallel run."""
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
        """Run `i64 entry(frame, buffers, dims, tid, nthreads)` on `nthreads` threads, the caller's included.

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
    """A loaded pool, compiled or cached. Stop it before its last reference goes: its threads run its code."""
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
