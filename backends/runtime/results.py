"""Memory for results: a large block that nobody refers to any more serves the next result that fits.

In: shapes and dtypes. Out: uninitialized arrays of NumPy. Fresh pages come from the system filled with zeros and one
fault each, which costs two to five times what writing a result into pages that are there does. Blocks come back when
their last view is gone; views of an array lead to its owner, not to each other, so the owner is no array but a buffer
with an end of its own: one of ctypes, which NumPy takes as it is. (A large result has just displaced the caches: there
this takes 50 us, where `from_buffer` and `weakref.finalize` take 160.)
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from dnnc.backends.runtime.frames import aligned_empty
from dnnc.ir.errors import InputError, a_type, count

Array = np.ndarray[Any, Any]
LEAST = 1 << 20  # bytes of a result worth it: a smaller one comes from memory that the process has
KEPT = 256 << 20  # bytes that wait for another result, all together; more where one call has as many results
STEP = 1 << 16  # sizes of blocks are multiples of it, so that results of nearly one size share them
LOOSE = 1.25  # a block may be so much larger than the result


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    """Memory, its size and where it begins, and what makes an owner of it."""

    data: Array
    nbytes: int
    address: int
    owner: Callable[[int], Any]


@lru_cache(64)
def owner_type(nbytes: int) -> type[Any]:
    """Make a ctypes type of owners of an address: buffers that return their block when nobody refers to them."""

    class Owner(ctypes.c_char * nbytes):  # type: ignore[misc]
        home: Results
        block: Block

        def __del__(self) -> None:
            self.home.give_back(self.block)

    return Owner


class Results:
    """Blocks that wait. Threads share it; the end of an array may come at any moment, also within a method here.

    Attributes:
        frames: with arenas that wait for the next program of an expression that needs a large one.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept, self._lock = kept, threading.RLock()
        self._free: list[Block] = []
        self._makers: weakref.WeakSet[Maker] = weakref.WeakSet()
        self.frames: list[Any] = []

    def maker(self, nbytes: int) -> Maker:
        """An allocator for the results of a call, `nbytes` in all; so many bytes may wait as long as it is alive."""
        made = Maker(self, nbytes)
        with self._lock:
            self._makers.add(made)
        return made

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """An uninitialized array in C order. MemoryError where there is no memory for it."""
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes < LEAST:
            return np.empty(shape, kind)
        block = self._taken(-(-nbytes // STEP) * STEP)
        owner = block.owner(block.address)
        owner.home, owner.block = self, block
        return np.ndarray(shape, kind, owner)

    @property
    def waiting(self) -> int:
        """Bytes."""
        with self._lock:
            total = 0
            for b in self._free:
                total += b.nbytes
            return total

    def _taken(self, size: int) -> Block:
        """The smallest block that fits, or a new one."""
        with self._lock:
            best: Block | None = None
            for b in self._free:
                if size <= b.nbytes <= LOOSE * size and (best is None or b.nbytes < best.nbytes):
                    best = b
            if best is not None:
                self._free.remove(best)
                return best
        data = aligned_empty(size)
        return Block(data, size, data.ctypes.data, owner_type(size).from_address)

    def release(self) -> None:
        """Return the memory that waits to the system."""
        with self._lock:
            self._free.clear()
            self.frames.clear()

    def give_back(self, block: Block) -> None:
        """The oldest go where there are too many."""
        with self._lock:
            self._free.append(block)
            waiting = self.waiting
            if waiting > self._kept:
                limit = max([self._kept, *(m.nbytes for m in self._makers)])
                while waiting > limit:
                    waiting -= self._free.pop(0).nbytes


@dataclass(frozen=True, eq=False)
class Maker:
    """An allocator for the results of a program at the sizes of a call, `nbytes` in all."""

    home: Results
    nbytes: int

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        return self.home.empty(shape, dtype)


@cache
def results() -> Results:
    """Those of this process."""
    return Results()


def maker(outputs: Sequence[tuple[Sequence[int], Any]]) -> Callable[[Sequence[int], Any], Array]:
    """Return an allocator for these arrays: plain NumPy where all are small, since asking costs quick models 3 %."""
    sizes = [math.prod(s) * np.dtype(d).itemsize for s, d in outputs]
    large = [-(-n // STEP) * STEP for n in sizes if n >= LEAST]
    return results().maker(sum(large)).empty if large else np.empty


def copy_results(results: Sequence[Array], buffers: Sequence[Array], names: Sequence[str]) -> None:
    """Copy outputs, whose sizes only the call has told, to buffers of the caller. InputError: one does not fit."""
    if len(buffers) != len(results):
        raise InputError(f"the model has {count(len(results), 'output')}, got {count(len(buffers), 'buffer')}")
    for name, out, r in zip(names, buffers, results):
        if not isinstance(out, np.ndarray) or out.shape != r.shape or out.dtype != r.dtype or not out.flags.writeable:
            shown = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else a_type(out)
            raise InputError(f"output {name}: expected a writable array {r.dtype} {r.shape}, got {shown}")
        out[...] = r
