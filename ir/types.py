"""Types of graph values: dtype, logical shape, and the layout in which a buffer holds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from dnnc.ir.dtype import DType
from dnnc.ir.expr import E, Expr, const, unwrap

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
    """How a tensor lies in memory: its physical axes, outermost first; written `0 1/16 2 3 1%16` for NCHW16c.

    An axis is either one part or split into blocks `axis/b` and `axis%b` (or more levels), each level once. A blocked
    axis whose size is no multiple of the block is padded; padding lanes hold 0 (inf times a zero weight is NaN).

    winograd: m, written `winograd4 2 3 0/16 ...`: a constant, the 3 x 3 filters of a convolution, lies transformed for
        F(m x m, 3 x 3), m+2
    points along each axis of taps (see winograd.py); the parts say how the points lie.
    """

    parts: tuple[Part, ...]
    winograd: int = 0

    def __str__(self) -> str:
        return " ".join([*([f"winograd{self.winograd}"] if self.winograd else []), *map(str, self.parts)])

    def shape(self, logical: Sequence[Dim]) -> tuple[Dim, ...]:
        """The physical shape."""
        out: list[Dim] = []
        if self.winograd:  # points instead of taps
            logical = (*logical[:2], *(unwrap(const(n) + (self.winograd - 1)) for n in logical[2:]))
        for p in self.parts:
            n: Dim = logical[p.axis]
            if p.div > 1:
                n = unwrap((const(n) + (p.div - 1)) // p.div)
            out.append(p.mod if p.mod else n)
        return tuple(out)

    def index(self, logical: Sequence[E]) -> tuple[Expr, ...]:
        """Where an element lies: physical index from the logical one."""
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
        """Does a physical buffer hold lanes that are no element?"""
        return any(p.div > 1 and not _divides(logical[p.axis], p.div) for p in self.parts)

    def block(self, axis: int) -> int:
        """The innermost block of an axis, 1 when it is not blocked."""
        return min((p.mod for p in self.parts if p.axis == axis and p.mod), default=1)


def _divides(n: Dim, d: int) -> bool:
    return bool(unwrap(const(n) % d) == 0)


def parse_layout(text: str) -> Layout:
    """Read `0 1/16 2 3 1%16`. ValueError where it is not a layout."""
    parts = []
    words = text.split()
    winograd = int(words.pop(0).removeprefix("winograd")) if words and words[0].startswith("winograd") else 0
    for word in words:
        head, _, mod = word.partition("%")
        axis, _, div = head.partition("/")
        parts.append(Part(int(axis), int(div or 1), int(mod or 0)))
    return Layout(tuple(parts), winograd)


@dataclass(frozen=True, slots=True)
class TensorType:
    """`f32[N, 64, 56, 56]`, with `@ "0 1/16 2 3 1%16"` if not row-major. Dims are ints or expressions."""

    dtype: DType
    shape: tuple[Dim, ...]
    layout: Layout | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def static(self) -> bool:
        return all(isinstance(d, int) for d in self.shape)

    @property
    def physical(self) -> tuple[Dim, ...]:
        return self.shape if self.layout is None else self.layout.shape(self.shape)

    @property
    def size(self) -> Dim:
        """Logical elements."""
        return product(self.shape)

    @property
    def nbytes(self) -> Dim:
        """Bytes of the buffer, padding included."""
        return product([*self.physical, self.dtype.bytes])

    def __str__(self) -> str:
        dims = ", ".join(d if isinstance(d, str) else repr(d) for d in self.shape)
        return (f"{self.dtype}[{dims}]" if dims else str(self.dtype)) + (f' @ "{self.layout}"' if self.layout else "")


def product(dims: Sequence[Dim]) -> Dim:
    if all(type(d) is int for d in dims):
        return math.prod(dims)
    r: Expr = const(1)
    for d in dims:
        r = r * d
    return unwrap(r)  # type: ignore[no-any-return]


def tensor(dtype: DType, *shape: Dim | Expr, layout: Layout | None = None) -> TensorType:
    return TensorType(dtype, tuple(unwrap(d) if isinstance(d, Expr) else int(d) for d in shape), layout)
