"""Encodings other than `Dense`, and their names in texts.

    w: f32[64, 64, 3, 3] @ "winograd4 2 3 0/16 1/16 1%16 0%16"

A further encoding is one class: it derives from `Encoding`, and `register` enters the name that its text begins with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from dnnc.ir import winograd
from dnnc.ir.blocks import Blocks
from dnnc.ir.bundles import Bundles
from dnnc.ir.dtype import DType, bf16, f64, i8, u8, u32
from dnnc.ir.expr import E, Expr, cast, const, op
from dnnc.ir.pairs import Pairs
from dnnc.ir.sparse import Sparse
from dnnc.ir.types import Array, Dense, Dim, Encoding, Layout, Part, TensorType, parse_layout, product

C = TypeVar("C", bound=type[Encoding])
_CLASSES: dict[str, type[Encoding]] = {"": Dense}


def register(name: str) -> Callable[[C], C]:
    """Enter a class for texts that begin with a name (of lower-case letters)."""

    def enter(cls: C) -> C:
        if not re.fullmatch("[a-z]+", name) or _CLASSES.setdefault(name, cls) is not cls:
            raise ValueError(f"an encoding cannot have the name {name!r}: it is taken, or not of lower-case letters")
        return cls

    return enter


def parse_encoding(text: str) -> Encoding:
    """Read `0 1/16 2 3 1%16` or `winograd4 2 3 0/16 ...`. ValueError where it is no encoding."""
    name = text[: len(text) - len(text.lstrip("abcdefghijklmnopqrstuvwxyz"))]
    if name not in _CLASSES:
        raise ValueError(f"no encoding has the name {name!r}")
    return _CLASSES[name].parse(text)


@register("quads")
@dataclass(frozen=True, slots=True)
class Quads(Encoding):
    """Dense, with the last two parts of the layout as one axis: 64 bytes are 16 columns of a block of 4 of a sum.

        w: i8[256, 64] @ "quads 1/16 0/4 1%16 0%4"      a buffer of i8[4, 64, 64]
        w: bf16[256, 64] @ "quads 1/16 0/2 1%16 0%2"    a buffer of bf16[4, 128, 32]

    So what `dot4` or `dot2` reads is one vector. Constants and parameters only; `quads_of` has what a kernel packs.
    """

    layout: Layout

    @classmethod
    def parse(cls, text: str) -> Quads:
        return cls(parse_layout(text.partition(" ")[2]))

    def __str__(self) -> str:
        return f"quads {self.layout}"

    def buffers(self, type: TensorType) -> tuple[TensorType, ...]:
        return (TensorType(type.dtype, self._joined(self.layout.shape(type.shape))),)

    def load(self, memory: Sequence[Callable[..., Expr]], index: Sequence[E]) -> Expr:
        *outer, column, row = self.layout.index(index)
        return memory[0](*outer, column * self.layout.parts[-1].mod + row)

    def pack(self, array: Array) -> tuple[Array, ...]:
        packed = self.layout.pack(array)
        return (packed.reshape(self._joined(packed.shape)),)

    def pack_nodes(self, b: Any, x: Any) -> tuple[Any, ...] | None:
        packed = self.layout.pack_nodes(b, x)
        return (b.reshape(packed, shape=self._joined(packed.type.shape)),)

    def block(self, axis: int) -> int:
        return self.layout.block(axis)

    @staticmethod
    def _joined(shape: Sequence[Dim]) -> tuple[Dim, ...]:
        return (*shape[:-2], product(shape[-2:]))


QUAD = 4  # bytes of a sum that lie side by side


def neighbours(t: DType) -> int:
    """The elements of a sum that lie side by side, as many as 32 bits hold: four bytes, two bfloat16."""
    return 32 // t.bits


def quads_of(t: TensorType) -> Quads | None:
    """The quads that lie in memory as a type says; None where it has no such blocks.

    A kernel that packs bytes writes `1/16 0/4 1%16 0%4`: the same memory, with an axis for each part.
    """
    if isinstance(t.encoding, Quads):
        return t.encoding
    parts = t.layout.parts[-2:] if isinstance(t.encoding, Dense) and t.layout is not None else ()
    if len(parts) < 2 or t.dtype not in (i8, bf16) or t.layout is None:
        return None
    (column, row), rank = parts, t.rank
    lanes = column == Part(rank - 1, 1, column.mod) and column.mod
    return Quads(t.layout) if lanes and row == Part(rank - 2, 1, neighbours(t.dtype)) else None


register("sparse")(Sparse)
register("bundles")(Bundles)
register("blocks")(Blocks)
register("pairs")(Pairs)
WORD = 32  # bits of a word of `Packed`


@register("packed")
@dataclass(frozen=True, slots=True)
class Packed(Encoding):
    """Integers of 4 or 2 bits in words of 32: those along the last part of the layout share a word, lowest bits first.

        w: u4[256, 64] @ "packed 1/16 0/8 1%16 0%8"      a buffer of u32[4, 32, 16]

    So the 16 words that one vector holds are 8 rows of 16 columns, and a shift by a constant selects a row. Unsigned
    integers, constants only.
    """

    layout: Layout

    @classmethod
    def parse(cls, text: str) -> Packed:
        return cls(parse_layout(text.partition(" ")[2]))

    def __str__(self) -> str:
        return f"packed {self.layout}"

    def buffers(self, type: TensorType) -> tuple[TensorType, ...]:
        return (TensorType(u32, self.layout.shape(type.shape)[:-1]),)

    def load(self, memory: Sequence[Callable[..., Expr]], index: Sequence[E]) -> Expr:
        *outer, place = self.layout.index(index)
        bits = WORD // self.layout.parts[-1].mod
        word = op("shr", memory[0](*outer), cast(place * bits, u32))
        return cast(word & ((1 << bits) - 1), u8)

    def pack(self, array: Array) -> tuple[Array, ...]:
        packed = self.layout.pack(np.asarray(array).astype(np.uint8))
        count = packed.shape[-1]
        words = np.zeros(packed.shape[:-1], np.uint32)
        for k in range(count):
            words |= packed[..., k].astype(np.uint32) << np.uint32(k * (WORD // count))
        return (words,)

    def block(self, axis: int) -> int:
        return self.layout.block(axis)


@register("winograd")
@dataclass(frozen=True, slots=True)
class Winograd(Encoding):
    """The 3 x 3 filters of a convolution, transformed for F(m x m, 3 x 3): m + 2 points in place of three taps along
    each spatial axis (see `winograd.py`), in the order of a layout. Constants and parameters only.
    """

    m: int
    layout: Layout

    @classmethod
    def parse(cls, text: str) -> Winograd:
        head, _, rest = text.partition(" ")
        return cls(int(head.removeprefix("winograd")), parse_layout(rest))

    def __str__(self) -> str:
        return f"winograd{self.m} {self.layout}"

    def buffers(self, type: TensorType) -> tuple[TensorType, ...]:
        n = winograd.points(self.m)
        return (TensorType(type.dtype, self.layout.shape((*type.shape[:2], n, n))),)

    def load(self, memory: Sequence[Callable[..., Expr]], index: Sequence[E]) -> Expr:
        o, c, row, column = map(const, index)
        return winograd.tap(lambda r, s: memory[0](*self.layout.index((o, c, r, s))), self.m, row, column)

    def pack(self, array: Array) -> tuple[Array, ...]:
        return (self.layout.pack(winograd.weights(array, self.m)),)

    def pack_nodes(self, b: Any, x: Any) -> tuple[Any, ...] | None:
        if self.layout.parts[:2] != (Part(2), Part(3)):
            return None
        taps = self.layout.pack_nodes(b, x)  # they lie as the points do, which one product makes of them
        matrix, n, (_, _, *rest) = winograd.matrix(self.m), winograd.points(self.m), taps.type.shape
        wide = b.cast(b.reshape(taps, shape=(matrix.shape[1], product(rest))), to=f64)
        return (b.reshape(b.cast(b.matmul(matrix, wide), to=x.type.dtype), shape=(n, n, *rest)),)

    def block(self, axis: int) -> int:
        return self.layout.block(axis)
