"""The encoding of a block-sparse constant for tensor cores: the square blocks of a matrix that hold a number.

    w: f16[4096, 1024] @ "blocks 1 4096x1024 32x32 1024x4096 eNr..."

A constant is a matrix [rows, columns] here, as in `dnnc.ir.bundles`; its rows are the results of a pixel. Rows of
blocks stand in the order of their lengths, longest first, so that none of the longest begins last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dnnc.ir.bundles import matrix_of
from dnnc.ir.dtype import i64
from dnnc.ir.expr import E, Expr, cast, const, maximum, minimum, op, select
from dnnc.ir.sparse import Pattern
from dnnc.ir.types import Array, Encoding, TensorType

BASE, DIGITS = 256, 4  # numbers are written as digits that 16-bit floats hold exactly


@dataclass(frozen=True)
class Blocks(Encoding):
    """One buffer of 16-bit floats:

    values: [stored blocks, size, size], rows of the matrix first, in the order of places.
    columns: the column of blocks of each stored block; starts: the blocks ahead of each place, and an end;
    rows: the row of blocks of each place; slots: of each block row by row 1 + its number, or 0 where it is not stored.

    Whole numbers are 4 digits to base 256, lowest first. Indices are checked by construction: they are computed from
    the pattern, so kernels may trust them.
    """

    axis: int  # of the rows
    shape: tuple[int, ...]  # of the tensor
    pattern: Pattern

    @classmethod
    def parse(cls, text: str) -> Blocks:
        _, axis, shape, rest = text.split(" ", 3)
        return cls(int(axis), tuple(map(int, shape.split("x"))), Pattern.parse(rest))

    def __str__(self) -> str:
        return f"blocks {self.axis} {'x'.join(map(str, self.shape))} {self.pattern}"

    @staticmethod
    def of(array: Array, axis: int, size: int) -> Blocks:
        """The encoding that stores the blocks of a matrix that hold a number other than 0; they divide its shape."""
        return Blocks(axis, array.shape, Pattern.of(matrix_of(array, axis), size, size))

    @property
    def size(self) -> int:
        """Rows and columns of a block."""
        return self.pattern.height

    @cached_property
    def order(self) -> Array:
        """int[places]: the row of blocks of each place."""
        order: Array = np.argsort(-self.pattern.blocks.sum(1), kind="stable")
        return order

    @cached_property
    def starts(self) -> Array:
        """int[places + 1]: the stored blocks ahead of each place."""
        return np.concatenate([[0], np.cumsum(self.pattern.blocks.sum(1)[self.order])])

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """Begin of each part of the buffer, and the numbers in it."""
        high, wide = self.pattern.blocks.shape
        count = self.pattern.count
        sizes = {"columns": count, "starts": high + 1, "rows": high, "slots": high * wide}
        out, at = {"values": (0, self.pattern.stored)}, self.pattern.stored
        for name, n in sizes.items():
            out[name] = at, n
            at += n * DIGITS
        return out

    def buffers(self, type: TensorType) -> tuple[TensorType, ...]:
        begin, n = self.sections["slots"]
        return (TensorType(type.dtype, (begin + n * DIGITS,)),)

    def held(self, array: Array) -> Array:
        rest = [n for k, n in enumerate(self.shape) if k != self.axis]
        mask = self.pattern.mask.reshape(self.pattern.rows, *rest[1:], *rest[:1])
        return np.where(np.moveaxis(np.moveaxis(mask, -1, 1), 0, self.axis), array, np.zeros((), array.dtype))

    @property
    def any_bytes(self) -> bool:
        return False

    def number(self, memory: Callable[[Expr], Expr], section: str, i: E) -> Expr:
        """Number i of a section, from the elements that `memory` gives."""
        at, made = self.sections[section][0] + const(i) * DIGITS, const(0, i64)
        for k in range(DIGITS):
            made = made + cast(memory(at + k), i64) * BASE**k
        return made

    def load(self, memory: Sequence[Callable[..., Expr]], index: Sequence[E]) -> Expr:
        inner = [k for k in range(len(self.shape)) if k != self.axis]
        row, column, size = const(index[self.axis]), const(0), self.size
        for k in (*inner[1:], *inner[:1]):
            column = column * self.shape[k] + index[k]
        slot = self.number(memory[0], "slots", row // size * self.pattern.blocks.shape[1] + column // size)
        block = minimum(maximum(slot - 1, 0), self.pattern.count - 1)
        value = memory[0](block * (size * size) + row % size * size + column % size)
        return select(op("!=", slot, const(0, i64)), value, const(0.0, value.dtype))

    def pack(self, array: Array) -> tuple[Array, ...]:
        begin, n = self.sections["slots"]
        out = np.zeros(begin + n * DIGITS, array.dtype)
        p, order = self.pattern, self.order
        stored = p.blocks[order]
        blocks = p.values(matrix_of(array, self.axis))
        first = p.starts[order]
        lengths = stored.sum(1)
        source = np.repeat(first - self.starts[:-1], lengths) + np.arange(p.count)  # in the order of the matrix
        out[: p.stored] = blocks[source].reshape(-1)
        slots = np.zeros(p.blocks.shape, np.int64)
        place, wide = np.nonzero(stored)
        slots[order[place], wide] = 1 + np.arange(p.count)
        for name, numbers in (("columns", wide), ("starts", self.starts), ("rows", order), ("slots", slots)):
            at, n = self.sections[name]
            digits = numbers.reshape(-1, 1) // BASE ** np.arange(DIGITS) % BASE
            out[at : at + n * DIGITS] = digits.reshape(-1).astype(array.dtype)
        return (out,)
