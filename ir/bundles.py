"""The encoding of a sparse constant for GPUs: rows in bundles, which threads of a block share, in packs of elements.

    w: f32[512, 256, 1, 1] @ "bundles 0 512x256x1x1 64 256 1x1 512x256 eNr..."

A constant is a matrix [rows, columns] as in `dnnc.ir.sparse`, but for the columns of filters: channels are innermost.
With "0r" in place of the axis 0 they are outermost, in row-major order.
A bundle is a number of neighbouring rows in the order of their lengths, longest first, so that neighbouring threads
have rows of about the same length. A row is cut at each multiple of `depth` columns; each piece is padded to whole
packs of 4 elements, which are read at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dnnc.ir.dtype import f32, i64, u32
from dnnc.ir.expr import E, Expr, cast, const, maximum, minimum, op, select
from dnnc.ir.sparse import WORD, Pattern
from dnnc.ir.types import Array, Encoding, TensorType

PACK = 4  # elements that are read at once: 16 bytes of values, and of columns


@dataclass(frozen=True)
class Bundles(Encoding):
    """One buffer of words of 32 bits, each part of which begins at a multiple of 16 bytes:

    values: float32 [packs + 1, 4], the last pack of zeros.
    columns: [packs + 1, 4], less the first one of the piece; of padding `depth`, where kernels have a row of zeros.
    starts: [slots, pieces] and an end: the pack with which a piece of a row begins. A slot is a place of a bundle.
    rows: [slots], the row within its bundle; slots: [slots], the inverse of the slots in all.
    bits, ahead: a bitmap of all elements row by row, and the stored elements ahead of each of its words.

    Indices are checked by construction: they are computed from the pattern, so kernels may trust them.
    """

    axis: int  # of the rows
    shape: tuple[int, ...]  # of the tensor
    pattern: Pattern  # of single elements
    height: int  # rows of a bundle
    depth: int  # columns of a piece
    last: bool = True  # are channels the innermost of the columns?

    @classmethod
    def parse(cls, text: str) -> Bundles:
        _, axis, shape, height, depth, rest = text.split(" ", 5)
        sizes, last = tuple(map(int, shape.split("x"))), not axis.endswith("r")
        return cls(int(axis.rstrip("r")), sizes, Pattern.parse(rest), int(height), int(depth), last)

    def __str__(self) -> str:
        axis = f"{self.axis}{'' if self.last else 'r'}"
        return f"bundles {axis} {'x'.join(map(str, self.shape))} {self.height} {self.depth} {self.pattern}"

    @staticmethod
    def of(array: Array, axis: int, height: int, depth: int, last: bool = True) -> Bundles:
        """The encoding that stores the elements of a constant other than 0."""
        return Bundles(axis, array.shape, Pattern.of(matrix_of(array, axis, last)), height, depth, last)

    # --- sizes --------------------------------------------------------------------------------------------------------

    @property
    def pieces(self) -> int:
        """Of a row."""
        return -(-self.pattern.columns // self.depth)

    @property
    def bundles(self) -> int:
        return -(-self.pattern.rows // self.height)

    @property
    def count(self) -> int:
        """Slots: rows, and places for rows behind the last one."""
        return self.bundles * self.height

    @cached_property
    def lengths(self) -> Array:
        """int[rows of all bundles, pieces]: stored elements."""
        full = np.zeros((self.count, self.pieces * self.depth), np.bool_)
        full[: self.pattern.rows, : self.pattern.columns] = self.pattern.blocks
        sums: Array = full.reshape(self.count, self.pieces, self.depth).sum(-1)
        return sums

    @cached_property
    def order(self) -> Array:
        """int[slots]: the row of each slot."""
        whole = self.lengths.sum(-1).reshape(self.bundles, self.height)
        inner = np.argsort(-whole, axis=-1, kind="stable")
        order: Array = (inner + np.arange(self.bundles)[:, None] * self.height).reshape(-1)
        return order

    @cached_property
    def starts(self) -> Array:
        """int[slots * pieces + 1]: packs ahead of each piece, in the order of slots."""
        packs = -(-self.lengths[self.order] // PACK)
        return np.concatenate([[0], np.cumsum(packs.reshape(-1))])

    @property
    def packs(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """Begin and length of each part of the buffer."""
        words = -(-self.pattern.rows * self.pattern.columns // WORD)
        sizes = {
            "values": (self.packs + 1) * PACK,
            "columns": (self.packs + 1) * PACK,
            "starts": self.count * self.pieces + 1,
            "rows": self.count,
            "slots": self.count,
            "bits": words,
            "ahead": words,
        }
        out, at = {}, 0
        for name, size in sizes.items():
            out[name] = at, size
            at += -(-size // PACK) * PACK
        return out

    @property
    def size(self) -> int:
        """Words of the buffer."""
        begin, n = self.sections["ahead"]
        return begin + -(-n // PACK) * PACK

    # --- an encoding --------------------------------------------------------------------------------------------------

    def buffers(self, type: TensorType) -> tuple[TensorType, ...]:
        return (TensorType(u32, (self.size,)),)

    def held(self, array: Array) -> Array:
        rest = [n for k, n in enumerate(self.shape) if k != self.axis]
        if self.last:
            mask = np.moveaxis(self.pattern.blocks.reshape(self.pattern.rows, *rest[1:], *rest[:1]), -1, 1)
        else:
            mask = self.pattern.blocks.reshape(self.pattern.rows, *rest)
        return np.where(np.moveaxis(mask, 0, self.axis), array, np.zeros((), array.dtype))

    @property
    def any_bytes(self) -> bool:
        return False

    def column(self, index: Sequence[E]) -> Expr:
        """The column of an element."""
        inner = [k for k in range(len(self.shape)) if k != self.axis]
        at = const(0)
        for k in (*inner[1:], *inner[:1]) if self.last else inner:
            at = at * self.shape[k] + index[k]
        return at

    def load(self, memory: Sequence[Callable[..., Expr]], index: Sequence[E]) -> Expr:
        at = {name: begin for name, (begin, _) in self.sections.items()}
        row, column = const(index[self.axis]), self.column(index)

        def number(name: str, i: Expr, most: int) -> Expr:
            return minimum(maximum(cast(memory[0](at[name] + i), i64), 0), most)

        def ahead(column: Expr) -> tuple[Expr, Expr, Expr]:
            order = row * self.pattern.columns + column
            word, bit = memory[0](at["bits"] + order // WORD), cast(order % WORD, u32)
            below = word & (op("shl", const(1, u32), bit) - const(1, u32))
            return cast(memory[0](at["ahead"] + order // WORD), i64) + cast(op("popcount", below), i64), word, bit

        piece = column // self.depth
        here, word, bit = ahead(column)
        begin, _, _ = ahead(piece * self.depth)
        slot = number("slots", row, self.count - 1)
        place = number("starts", slot * self.pieces + piece, self.packs) * PACK + here - begin
        value = memory[0](at["values"] + minimum(maximum(place, 0), self.packs * PACK))
        stored = op("!=", op("shr", word, bit) & const(1, u32), const(0, u32))
        return select(stored, op("bits_f32", value, dtype=f32), const(0.0, f32))

    def pack(self, array: Array) -> tuple[Array, ...]:
        out = np.zeros(self.size, np.uint32)

        def put(name: str, values: Array) -> None:
            at, n = self.sections[name]
            out[at : at + n] = values.reshape(-1)

        matrix = matrix_of(array, self.axis, self.last)
        slots = np.argsort(self.order)
        high, wide = self.pattern.places
        piece = wide // self.depth
        key = slots[high] * self.pieces + piece
        order = np.argsort(key, kind="stable")
        key = key[order]
        first = np.searchsorted(key, key)  # of the elements of a piece
        at = self.starts[key] * PACK + np.arange(len(key)) - first
        values = np.zeros((self.packs + 1) * PACK, np.float32)
        columns = np.full((self.packs + 1) * PACK, self.depth, np.uint32)
        values[at] = matrix[high, wide][order]
        columns[at] = (wide - piece * self.depth)[order]
        put("values", values.view(np.uint32))
        put("columns", columns)
        put("starts", self.starts)
        put("rows", self.order % self.height)
        put("slots", slots)
        _, words = self.sections["bits"]
        flat = self.pattern.blocks.reshape(-1)
        bits = np.pad(flat, (0, words * WORD - len(flat))).reshape(-1, WORD)
        put("bits", np.packbits(bits, axis=-1, bitorder="little").view(np.uint32))
        put("ahead", np.cumsum(bits.sum(-1)) - bits.sum(-1))
        return (out,)


def matrix_of(array: Array, axis: int, last: bool = True) -> Array:
    """[rows, columns]: the axis of the rows first, then all others, of which the first one is innermost; as they stand
    where it is not to be `last`.
    """
    rows = np.moveaxis(array, axis, 0)
    inner: Array = np.moveaxis(rows, 1, -1) if rows.ndim > 2 and last else rows
    return inner.reshape(array.shape[axis], math.prod(array.shape) // max(array.shape[axis], 1))
