"""The interpreter's memory: flat arrays that buffers look into, with what is needed to notice a read of garbage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from dnnc.ir.dtype import DType
from dnnc.ir.errors import VerifyError
from dnnc.ir.expr import Const, Expr, Linear, Op, Product, Var
from dnnc.ir.operator.stmt import Buffer

Array = Any  # a NumPy array, or a NumPy or Python scalar
PRIVATE = ("register", "local")


class KernelError(VerifyError):
    """A kernel did something forbidden while it was interpreted; the message quotes the statement."""

    quoted = False


class Memory:
    """`data` is [elements], or [copies, elements] where every thread has its own."""

    def __init__(self, data: Array, private: bool = False, tracked: bool = False) -> None:
        self.data = data
        self.private = private
        self.tracked = tracked  # may be written by the kernel: races are possible
        self.written: Array | None = None  # shared memory: elements that hold something
        self.in_flight: Array | None = None  # elements that an asynchronous copy will still write

    @property
    def size(self) -> int:
        return int(self.data.shape[-1])


def garbage(shape: tuple[int, ...], dtype: DType) -> Array:
    """What uninitialised memory holds: NaN, or a value that no index survives."""
    t = dtype.numpy
    if dtype.is_float or dtype.kind == "c":
        return np.full(shape, np.nan).astype(t)
    return np.full((*shape[:-1], shape[-1] * t.itemsize), 1 if dtype.kind == "b" else 0xA5, np.uint8).view(t)


@dataclass(frozen=True, slots=True)
class View:
    """A buffer's window on memory. Numbers are ints, or [threads] where they differ between threads (in a called Func).

    `strides` is None for a swizzled buffer, whose `address` is then evaluated over `axes`; `foreign`: the memory is the caller's, so that
    bounds of the buffer say nothing of the memory's.
    """

    buf: Buffer
    memory: Memory
    base: Array
    shape: tuple[Array, ...]
    strides: tuple[Array, ...] | None
    axes: tuple[Var, ...] = ()
    address: Expr | None = None
    foreign: bool = False

    def offset(self, index: list[Array]) -> Array:
        """Offset of an element in the memory; index values are all scalars, all [threads] or all [threads, lanes]."""
        if self.address is not None:
            return self.base + index_value(self.address, dict(zip(self.axes, index)))
        assert self.strides is not None
        r = self.base
        for i, s in zip(index, self.strides):
            r = r + (i if s is not None and type(s) is int and s == 1 else i * column(s, i))
        return r

    def spread(self, rows: int, n: int) -> View:
        """The same window for `rows * n` threads."""
        numbers = (self.base, *self.shape, *(self.strides or ()))
        if not any(isinstance(v, np.ndarray) for v in numbers):
            return self
        base, *rest = (spread(v, rows, n) for v in numbers)
        k = len(self.shape)
        return replace(self, base=base, shape=tuple(rest[:k]), strides=None if self.strides is None else tuple(rest[k:]))


def make_view(buf: Buffer, memory: Memory, base: Array, env: dict[Var, Array], foreign: bool = False) -> View:
    shape = tuple(index_value(d, env) for d in buf.shape)
    if not buf.swizzle:
        return View(buf, memory, base, shape, tuple(index_value(s, env) for s in buf.full_strides()), foreign=foreign)
    axes = tuple(Var_(f"axis{k}") for k in range(len(shape)))
    return View(buf, memory, base, shape, None, axes, buf.offset(axes), foreign)


def Var_(name: str) -> Var:
    from dnnc.ir.expr import var

    return var(name, lo=0)


def column(v: Array, like: Array) -> Array:
    """[threads] as [threads, 1] beside a value with lanes."""
    return v[:, None] if np.ndim(v) == 1 and np.ndim(like) == 2 else v


def spread(v: Array, rows: int, n: int) -> Array:
    """A value of `rows` threads for `rows * n`: each one repeated n times; uniform values stay as they are."""
    if n > 1 and rows > 1 and isinstance(v, np.ndarray) and v.ndim and len(v) == rows:
        return np.repeat(v, n, 0)
    return v


def index_value(e: Expr, env: dict[Var, Array]) -> Array:
    """An index expression without loads, for shapes and strides."""
    if isinstance(e, Const):
        return e.value
    if isinstance(e, Var):
        if e not in env:
            raise KernelError(f"{e.name} is not defined here")
        return env[e]
    if isinstance(e, Linear):
        r: Array = e.const
        for t, c in e.terms:
            r = r + index_value(t, env) * c
        return r
    if isinstance(e, Product):
        r = 1
        for f in e.factors:
            r = r * index_value(f, env)
        return r
    assert isinstance(e, Op), f"{e!r} may not load"
    return apply(e.name, [index_value(a, env) for a in e.args])


def apply(name: str, args: list[Array]) -> Array:
    """An operator of two operands."""
    a, b = args
    if name in ("min", "max"):
        if type(a) is int and type(b) is int:
            return min(a, b) if name == "min" else max(a, b)
        return (np.minimum if name == "min" else np.maximum)(a, b)
    return getattr(a, _DUNDER[name])(b)


_DUNDER = {"//": "__floordiv__"}
