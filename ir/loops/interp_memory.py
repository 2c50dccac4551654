"""The interpreter's memory: flat arrays that buffers look into, with what is needed to notice a read of garbage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dnnc.ir.dtype import DType
from dnnc.ir.expr import Expr, Var, var
from dnnc.ir.loops.interp_values import column, index_value, spread
from dnnc.ir.loops.stmt import Buffer

Array = Any
PRIVATE = ("register", "local", "tile")


class Memory:
    """`data` is [elements], or [copies, elements] where every thread has its own."""

    def __init__(self, data: Array, private: bool = False, tracked: bool = False, born_empty: bool = False) -> None:
        self.data = data
        self.private = private
        self.tracked = tracked  # the kernel may write it, so races are possible
        self.written: Array | None = (
            np.zeros(self.size, np.bool_) if born_empty else None
        )  # elements that hold something
        self.in_flight: Array | None = (
            None  # elements that an asynchronous copy (of registers: a product) will still write
        )
        self.pinned: Array | None = None  # how many asynchronous reads of an element are under way
        self.copied: Array | None = None  # elements written last by a copy, not by a thread

    @property
    def size(self) -> int:
        return int(self.data.shape[-1])


def garbage(shape: tuple[int, ...], dtype: DType) -> Array:
    """What uninitialized memory holds: NaN, or an integer that no index survives."""
    t = dtype.numpy
    if dtype.is_float or dtype.kind == "c":
        return np.full(shape, np.nan).astype(t)
    return np.full((*shape[:-1], shape[-1] * t.itemsize), 1 if dtype.kind == "b" else 0xA5, np.uint8).view(t)


@dataclass(frozen=True, slots=True)
class View:
    """A buffer's window on memory. Numbers are ints, or [threads] where they differ between threads (in a called Func).

    A swizzled buffer has an `address` over `axes` instead of strides. `foreign`: the memory is the caller's, so an
    index inside the buffer's shape may still be outside of the memory.
    """

    buf: Buffer
    memory: Memory
    base: Array
    shape: tuple[Array, ...]
    strides: tuple[Array, ...]
    axes: tuple[Var, ...] = ()
    address: Expr | None = None
    foreign: bool = False

    def offset(self, index: list[Array], wide: bool) -> Array:
        """Offset of elements in the memory; `wide`: the index has lanes."""
        if self.address is not None:
            return column(self.base, wide) + index_value(self.address, dict(zip(self.axes, index)))
        r = column(self.base, wide)
        for i, s in zip(index, self.strides):
            r = r + (i if type(s) is int and s == 1 else i * column(s, wide))
        return r

    def spread(self, rows: int, n: int) -> View:
        """The same window for `rows * n` threads."""
        numbers = (self.base, *self.shape, *self.strides)
        if not any(isinstance(v, np.ndarray) for v in numbers):
            return self
        base, *rest = (spread(v, rows, n) for v in numbers)
        k = len(self.shape)
        return replace(self, base=base, shape=tuple(rest[:k]), strides=tuple(rest[k:]))

    def name(self, offset: int) -> str:
        """An element of the memory, named by this buffer's index where that is easy."""
        at = offset - self.base if type(self.base) is int else -1
        if self.address is None and at >= 0 and self.buf.strides is None and all(type(d) is int for d in self.shape):
            return f"{self.buf.name}[{', '.join(str(i) for i in np.unravel_index(at, self.shape))}]"
        return f"{self.buf.name}, element {offset}"


def make_view(buf: Buffer, memory: Memory, base: Array, env: dict[Var, Array], foreign: bool = False) -> View:
    """Bind a buffer: its shape and strides are evaluated now."""
    shape = tuple(index_value(d, env) for d in buf.shape)
    if not buf.swizzle:
        return View(buf, memory, base, shape, tuple(index_value(s, env) for s in buf.full_strides()), foreign=foreign)
    axes = tuple(var(f"axis{k}", lo=0) for k in range(len(shape)))
    return View(buf, memory, base, shape, (), axes, buf.offset(axes), foreign)
