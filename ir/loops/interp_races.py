"""Race detection: the interpreter steps threads in one order; these tables tell what others could do."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from dnnc.ir.loops.hopper import GROUP
from dnnc.ir.loops.interp_memory import Memory, View

Array = Any
_NOBODY, _SEVERAL = 0, -1  # identities start at 1, so that fresh tables are zeros


class Iterations:
    """Iterations of `parallel` loops and grid blocks: unordered, but for `reset`, a barrier of all.

    An element may be touched by two iterations if both read it, or write the same bits (overlapping tiles).
    """

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self.count = 0
        self._cells: weakref.WeakKeyDictionary[Memory, tuple[Array, Array]] = weakref.WeakKeyDictionary()

    def fresh(self, n: int) -> int:
        """The first of n new identities."""
        self.count += n
        return self.count - n + 1

    def reset(self) -> None:
        self._cells.clear()

    def access(self, view: View, who: Array, off: Array, write: bool, value: Array | None = None) -> str | None:
        """Report a race or None. `who`, `off` (and `value`, where writes repeat) have an entry per touched element."""
        mem = view.memory
        if mem not in self._cells:
            self._cells[mem] = (np.zeros(mem.size, np.int64), np.zeros(mem.size, np.int64))
        writer, reader = self._cells[mem]
        w = writer[off]
        bad = (w != _NOBODY) & (w != who)
        if value is not None:
            bad &= _differ(mem.data[off], value)
        if bad.any():
            return (
                f"one {self.noun} {'writes' if write else 'reads'} {view.name(off[bad][0])}, which another one writes"
            )
        if not write:
            self._read(reader, who, off)
            return None
        r = reader[off]
        bad = (r != _NOBODY) & (r != who)
        if bad.any():
            return f"one {self.noun} writes {view.name(off[bad][0])}, which another one reads"
        writer[off] = who
        bad = writer[off] != who
        if value is not None and bad.any():
            mem.data[off] = value  # as the store does next: of those that meet, one stays
            bad &= _differ(mem.data[off], value)
        return f"two {self.noun}s write {view.name(off[bad][0])}" if bad.any() else None

    @staticmethod
    def _read(reader: Array, who: Array, off: Array) -> None:
        r = reader[off]
        new = np.where((r == _NOBODY) | (r == who), who, _SEVERAL)
        reader[off] = new
        reader[off[reader[off] != new]] = _SEVERAL  # several of this batch read the element


def _differ(a: Array, b: Array) -> Array:
    """Where two arrays of one dtype do not have the same bits."""
    shape = (*a.shape, a.dtype.itemsize)
    parts = (np.ascontiguousarray(x.astype(a.dtype, copy=False)).view(np.uint8).reshape(shape) for x in (a, b))
    return np.not_equal(*parts).any(-1)


class Team:
    """Threads of a block: happens-before by vector clocks. clock[t, u] is what thread t knows of thread u.

    The tensor cores of warp groups are members too, after the threads: they read on their own.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.clock = np.eye(size + size // GROUP, dtype=np.int32)
        self._cells: weakref.WeakKeyDictionary[Memory, tuple[Array, Array, Array]] = weakref.WeakKeyDictionary()

    def cells(self, mem: Memory) -> tuple[Array, Array, Array]:
        """Of every element: 1 + the last writer, when it wrote, and when each member last read, [elements, members]."""
        if mem not in self._cells:
            n = mem.size
            self._cells[mem] = (np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros((n, len(self.clock)), np.int32))
        return self._cells[mem]

    def tick(self, threads: Array) -> None:
        self.clock[threads, threads] += 1

    def join(self, threads: Array) -> None:
        """These threads meet: what one knows, all know."""
        self.clock[threads] = self.clock[threads].max(0)
        self.tick(threads)

    def access(self, view: View, who: Array, off: Array, write: bool, record: bool = True) -> str | None:
        """`who` and `off` have one entry per touched element. -> what is wrong, or None."""
        writer, when, reads = self.cells(view.memory)
        w = writer[off] - 1
        bad = (w >= 0) & (w != who) & (self.clock[who, w] < when[off])
        if bad.any():
            verb = "writes" if write else "reads"
            return (
                f"thread {who[bad][0]} {verb} {view.name(off[bad][0])} written by thread {w[bad][0]} with no "
                "barrier between"
            )
        now = self.clock[who, who]
        if not write:
            if record:
                reads[off, who] = now
            return None
        late = reads[off] > self.clock[who]
        late[np.arange(len(who)), who] = False
        if late.any():
            k, u = np.argwhere(late)[0]
            return f"thread {who[k]} writes {view.name(off[k])} read by thread {u} with no barrier between"
        if record:
            writer[off], when[off] = who + 1, now
            bad = writer[off] != who + 1
            if bad.any():
                return f"two threads write {view.name(off[bad][0])} at once"
        return None

    def landed(self, mem: Memory, who: Array, off: Array, when: Array) -> None:
        """An asynchronous copy, issued by `who`, has written."""
        writer, times, _ = self.cells(mem)
        writer[off], times[off] = who + 1, when
