"""Types of graph values: dtype, logical shape, and the encoding in which buffers hold it."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Union

import numpy as np

from dnnc.ir.dtype import DType
from dnnc.ir.errors import InternalError, count
from dnnc.ir.expr import E, Expr, const, unwrap

Array = np.ndarray[Any, Any]
Dim = Union[int, Expr]


@dataclass(frozen=True, slots=True)
class Part:
    """One physical axis: `(i[axis] // div) % mod`; mod 0 means no remainder is taken."""

    axis: int
    div: int = 1
    mod: int = 0

    def __str__(self) -> str:
        return f"{self.axis}" + (f"/{self.div}" if self.div > 1 else "") + (f"%{self.mod}" if self.mod else "")


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of a tensor's elements in memory: its physical axes, outermost first; `0 1/16 2 3 1%16` is NCHW16c.

    An axis is either one part or split into blocks `axis/b` and `axis%b` (or more levels), each level once. A blocked
    axis whose size is no multiple of the block is padded; padding lanes hold 0 (inf * 0 is NaN).
    """

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.parts))

    def shape(self, logical: Sequence[Dim]) -> tuple[Dim, ...]:
        """The physical shape."""
        out: list[Dim] = []
        for p in self.parts:
            n: Dim = logical[p.axis]
            if p.div > 1:
                n = unwrap((const(n) + (p.div - 1)) // p.div)
            out.append(p.mod if p.mod else n)
        return tuple(out)

    def index(self, logical: Sequence[E]) -> tuple[Expr, ...]:
        """The physical index of an element from its logical one."""
        out: list[Expr] = []
        for p in self.parts:
            i = const(logical[p.axis])
            i = i // p.div if p.div > 1 else i
            out.append(i % p.mod if p.mod else i)
        return tuple(out)

    def logical(self, physical: Sequence[E]) -> tuple[Expr, ...]:
        """The logical index at a physical one (which may be a padding lane)."""
        out: list[Expr] = [const(0)] * (1 + max((p.axis for p in self.parts), default=-1))
        for p, i in zip(self.parts, physical):
            out[p.axis] = out[p.axis] + const(i) * p.div
        return tuple(out)

    def padded(self, logical: Sequence[Dim]) -> bool:
        """True if a physical buffer holds lanes that are no element."""
        return any(p.div > 1 and not _divides(logical[p.axis], p.div) for p in self.parts)

    def block(self, axis: int) -> int:
        """The innermost block of an axis, 1 when it is not blocked."""
        return min((p.mod for p in self.parts if p.axis == axis and p.mod), default=1)

    def levels(self, axis: int) -> list[Part]:
        """The parts of an axis, outermost first."""
        return sorted((p for p in self.parts if p.axis == axis), key=lambda p: -p.div)

    def pack(self, array: Array) -> Array:
        """Array in physical order, padded with 0; where possible a view."""
        ends, split, order = self._split(array.shape)
        full = np.pad(array, [(0, end) for end in ends]) if any(ends) else array
        return full.reshape(split).transpose(order)

    def pack_nodes(self, b: Any, x: Any) -> Any:
        """The same as nodes, of a value whose shape is static: a row-major value of the physical shape."""
        ends, split, order = self._split(x.type.shape)
        full = b.pad(x, pads=(*(0 for _ in ends), *ends)) if any(ends) else x
        return b.transpose(b.reshape(full, shape=split), perm=order)

    def _split(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Padding behind each axis, the shape with each axis split into its levels, and the physical order of these."""
        blocks = [self.levels(k) for k in range(len(shape))]
        outer = [-(-n // b[0].div) for n, b in zip(shape, blocks)]
        ends = tuple(m * b[0].div - n for n, m, b in zip(shape, outer, blocks))
        split = tuple(m if p is b[0] else p.mod for m, b in zip(outer, blocks) for p in b)
        levels = [p for b in blocks for p in b]
        return ends, split, tuple(levels.index(p) for p in self.parts)

    def unpack(self, packed: Array, shape: Sequence[int]) -> tuple[Array, Array]:
        """Array of a logical shape from its physical order, and the contents of the padding lanes."""
        order = [p for k in range(len(shape)) for p in self.levels(k)]
        steps = [self.levels(k)[0].div for k in range(len(shape))]
        full = packed.transpose([self.parts.index(p) for p in order])
        full = full.reshape([-(-n // step) * step for n, step in zip(shape, steps)])
        inside = tuple(slice(0, n) for n in shape)
        padding = np.ones(full.shape, bool)
        padding[inside] = False
        return full[inside], full[padding]


def _divides(n: Dim, d: int) -> bool:
    return bool(unwrap(const(n) % d) == 0)


def parse_layout(text: str) -> Layout:
    """Read `0 1/16 2 3 1%16`. ValueError where it is not a layout."""
    parts = []
    for word in text.split():
        head, _, mod = word.partition("%")
        axis, _, div = head.partition("/")
        parts.append(Part(int(axis), int(div or 1), int(mod or 0)))
    return Layout(tuple(parts))


class Encoding(ABC):
    """How the elements of a tensor are stored: in which buffers, in which order, as which numbers.

    A subclass is a frozen dataclass, hashable and equal by its fields. What is not `Dense` has a name under which
    `encodings.register` enters it; its text begins with this name.
    """

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Encoding:
        """Read what `str` prints. ValueError where the text is none of this encoding."""

    @abstractmethod
    def __str__(self) -> str:
        """The text between the quotes of `f32[4, 8] @ "1 0"`."""

    @abstractmethod
    def buffers(self, type: TensorType) -> tuple[TensorType, ...]:
        """The physical buffers of a tensor, each a row-major array of a dtype and a shape."""

    @abstractmethod
    def load(self, memory: Sequence[Callable[..., Expr]], index: Sequence[E]) -> Expr:
        """An element at a logical index; `memory[k](i, j, ...)` is the element of buffer k at a physical index."""

    @abstractmethod
    def pack(self, array: Array) -> tuple[Array, ...]:
        """The contents of the buffers for an array in logical order; where possible views."""

    def pack_nodes(self, b: Any, x: Any) -> tuple[Any, ...] | None:
        """Nodes for what `pack` computes of a static value: row-major buffers. None where only `pack` can."""
        return None

    def held(self, array: Array) -> Array:
        """An array as the encoding holds it: that of a sparse one has zeros outside of its pattern."""
        return array

    @property
    def any_bytes(self) -> bool:
        """Are any bytes the contents of some array? False where kernels trust indices among them."""
        return True

    def block(self, axis: int) -> int:
        """Neighbours along an axis that lie in one innermost block, 1 where it is not blocked."""
        return 1


@dataclass(frozen=True, slots=True)
class Dense(Encoding):
    """One buffer of the tensor's dtype, in the order of a layout; row-major where that is None."""

    layout: Layout | None = None

    @classmethod
    def parse(cls, text: str) -> Dense:
        return cls(parse_layout(text))

    def __str__(self) -> str:
        return "" if self.layout is None else str(self.layout)

    def buffers(self, type: TensorType) -> tuple[TensorType, ...]:
        return (type if self.layout is None else TensorType(type.dtype, self.layout.shape(type.shape)),)

    def load(self, memory: Sequence[Callable[..., Expr]], index: Sequence[E]) -> Expr:
        return memory[0](*(index if self.layout is None else self.layout.index(index)))

    def pack(self, array: Array) -> tuple[Array, ...]:
        return (array if self.layout is None else self.layout.pack(array),)

    def pack_nodes(self, b: Any, x: Any) -> tuple[Any, ...] | None:
        return (x if self.layout is None else self.layout.pack_nodes(b, x),)

    def block(self, axis: int) -> int:
        return 1 if self.layout is None else self.layout.block(axis)


ROW_MAJOR = Dense()


def dense(*parts: Part) -> Dense:
    """One buffer in the order of these physical axes, outermost first."""
    return Dense(Layout(parts))


@dataclass(frozen=True, slots=True)
class TensorType:
    """`f32[N, 64, 56, 56]`, with `@ "0 1/16 2 3 1%16"` if not row-major. Dims are ints or expressions."""

    dtype: DType
    shape: tuple[Dim, ...]
    encoding: Encoding = ROW_MAJOR

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def static(self) -> bool:
        return all(isinstance(d, int) for d in self.shape)

    @property
    def row_major(self) -> bool:
        return self.encoding == ROW_MAJOR

    @property
    def layout(self) -> Layout | None:
        """The layout of a dense tensor, None when it is row-major. InternalError for every other encoding."""
        if not isinstance(self.encoding, Dense):
            raise InternalError(f"{self} is not dense: it has no layout")
        return self.encoding.layout

    @property
    def buffers(self) -> tuple[TensorType, ...]:
        """The physical buffers."""
        return self.encoding.buffers(self)

    @property
    def buffer(self) -> TensorType:
        """The only physical buffer. InternalError where there are several."""
        if len(self.buffers) != 1:
            raise InternalError(f"{self} lies in {count(len(self.buffers), 'buffer')} where one was expected")
        return self.buffers[0]

    @property
    def physical(self) -> tuple[Dim, ...]:
        """The shape of the only buffer."""
        return self.buffer.shape

    @property
    def size(self) -> Dim:
        """Logical elements."""
        return product(self.shape)

    @property
    def nbytes(self) -> Dim:
        """Bytes of the buffers, padding included."""
        sizes = [product([*b.shape, b.dtype.bytes]) for b in self.buffers]
        return sizes[0] if len(sizes) == 1 else unwrap(reduce(operator.add, map(const, sizes)))

    def __str__(self) -> str:
        dims = ", ".join(d if isinstance(d, str) else repr(d) for d in self.shape)
        form = "" if self.row_major else f' @ "{self.encoding}"'
        return (f"{self.dtype}[{dims}]" if dims else str(self.dtype)) + form


def product(dims: Sequence[Dim]) -> Dim:
    if all(type(d) is int for d in dims):
        return math.prod(dims)
    r: Expr = const(1)
    for d in dims:
        r = r * d
    return unwrap(r)  # type: ignore[no-any-return]


def tensor(dtype: DType, *shape: Dim | Expr, encoding: Encoding = ROW_MAJOR) -> TensorType:
    return TensorType(dtype, tuple(unwrap(d) if isinstance(d, Expr) else int(d) for d in shape), encoding)
