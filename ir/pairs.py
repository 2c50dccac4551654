"""The encoding of a 2:4 sparse constant for sparse tensor cores: two of each four neighbours of a sum, and which two.

    w: f16[4096, 1024] @ "pairs 1 4096x1024 tiles"

A constant is a matrix [rows, columns] here, as in `dnnc.ir.blocks`: its rows are the results of a pixel, its columns
the terms of a sum. Any matrix whose groups of four neighbouring columns hold two numbers other than 0 at most has this
encoding; its text does not depend on the pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dnnc.ir.bundles import matrix_of
from dnnc.ir.dtype import i64, u16
from dnnc.ir.expr import E, Expr, cast, const, op, select
from dnnc.ir.types import Array, Encoding, TensorType

GROUP, KEPT = 4, 2  # neighbours of a sum, of which so many are stored
ROWS, STEP = 128, 64  # rows and columns of a tile
HALF = 64  # rows of one warp group product
LINE = 64  # elements of a line of the buffer: 128 bytes
LINES = HALF + 8  # of a tile: values, places


@dataclass(frozen=True)
class Pairs(Encoding):
    """One buffer of 16-bit floats, tiles of 128 rows and 64 columns, those of a row of tiles one after the other:

    values: [64 lines, 2 halves, 16 groups, 2], line r of row r of each half of 64 rows.
    places: 8 lines of bits, [2 halves, 4 warps, 8, 4, 2] words of 16 bits: of row 16 * warp + g + 8 * h of a half the
        word [g, j, h]. It has 4 bits for each of four groups, the places of both elements, the first lowest, which is
        less than the second. They are groups 4 * j + q, or with `order` "lanes" 4 * q + j.

    "tiles" is the order of warp group products (wgmma.sp). A lane of a warp product (mma.sp) that reads vectors of four
    groups multiplies their elements by "lanes". Rows and columns are padded with zeros to whole tiles.
    """

    axis: int  # of the rows
    shape: tuple[int, ...]  # of the tensor
    order: str = "tiles"

    @classmethod
    def parse(cls, text: str) -> Pairs:
        _, axis, shape, order = text.split()
        if order not in ("tiles", "lanes"):
            raise ValueError(f"pairs lie in the order of tiles or lanes, not of {order!r}")
        return cls(int(axis), tuple(map(int, shape.split("x"))), order)

    def __str__(self) -> str:
        return f"pairs {self.axis} {'x'.join(map(str, self.shape))} {self.order}"

    @staticmethod
    def of(array: Array, axis: int, order: str = "tiles") -> Pairs:
        """The encoding of a constant, whose `axis` are the rows."""
        return Pairs(axis, array.shape, order)

    @property
    def rows(self) -> int:
        return self.shape[self.axis]

    @property
    def columns(self) -> int:
        return int(np.prod(self.shape)) // self.rows

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows of tiles, and tiles of each."""
        return -(-self.rows // ROWS), -(-self.columns // STEP)

    def buffers(self, type: TensorType) -> tuple[TensorType, ...]:
        high, wide = self.tiles
        return (TensorType(type.dtype, (high * wide * LINES * LINE,)),)

    def held(self, array: Array) -> Array:
        """The first two elements of each group that are not 0."""
        matrix = matrix_of(array, self.axis)
        whole = self._groups(matrix)
        kept = np.where(np.cumsum(whole != 0, -1) <= KEPT, whole, np.zeros((), array.dtype))
        flat = kept.reshape(len(kept), -1)[: self.rows, : self.columns]
        rest = [n for k, n in enumerate(self.shape) if k != self.axis]
        return np.moveaxis(np.moveaxis(flat.reshape(self.rows, *rest[1:], *rest[:1]), -1, 1), 0, self.axis)

    @property
    def any_bytes(self) -> bool:
        return False

    def load(self, memory: Sequence[Callable[..., Expr]], index: Sequence[E]) -> Expr:
        inner = [k for k in range(len(self.shape)) if k != self.axis]
        row, column = const(index[self.axis]), const(0)
        for k in (*inner[1:], *inner[:1]):
            column = column * self.shape[k] + index[k]
        tile = (row // ROWS * self.tiles[1] + column // STEP) * (LINES * LINE)
        half, line, group, place = row % ROWS // HALF, row % HALF, column % STEP // GROUP, column % GROUP
        at = tile + line * LINE + half * (LINE // 2) + group * KEPT
        j, q = (group // 4, group % 4) if self.order == "tiles" else (group % 4, group // 4)
        word = ((half * 4 + line // 16) * 8 + line % 8) * 8 + j * 2 + line % 16 // 8
        bits = cast(op("bits_u16", memory[0](tile + HALF * LINE + word), dtype=u16), i64)
        nibble = op("shr", bits, q * 4) & const(15, i64)
        first, second = memory[0](at), memory[0](at + 1)
        zero = const(0.0, first.dtype)
        later = select(op("==", op("shr", nibble, const(2, i64)), place), second, zero)
        return select(op("==", nibble & const(3, i64), place), first, later)

    def pack(self, array: Array) -> tuple[Array, ...]:
        groups = self._groups(matrix_of(array, self.axis))
        stored = groups != 0
        if stored.sum(-1).max(initial=0) > KEPT:
            raise ValueError(f"a group of {GROUP} neighbours has more than {KEPT} numbers other than 0")
        first, last = stored.argmax(-1), GROUP - 1 - stored[..., ::-1].argmax(-1)
        alone = first == last  # beside any zero
        places = np.stack([np.where(alone, 0, first), np.where(alone & (last == 0), 1, last)], -1)
        values = np.take_along_axis(groups, places, -1)
        high, wide = self.tiles
        out = np.empty((high, wide, LINES, LINE), array.dtype)
        out[:, :, :HALF] = (
            values.reshape(high, 2, HALF, wide, LINE // 2).transpose(0, 3, 2, 1, 4).reshape(high, wide, HALF, LINE)
        )
        nibbles = (places[..., 0] | places[..., 1] << 2).astype(np.uint16).reshape(-1, 4, 4)
        if self.order == "lanes":
            nibbles = nibbles.transpose(0, 2, 1)
        words = np.bitwise_or.reduce(nibbles << np.arange(0, 16, 4, dtype=np.uint16), axis=-1)
        words = words.reshape(high, 2, 4, 2, 8, wide, 4).transpose(0, 5, 1, 2, 4, 6, 3)
        out[:, :, HALF:] = np.ascontiguousarray(words).view(array.dtype).reshape(high, wide, LINES - HALF, LINE)
        return (out.reshape(-1),)

    def _groups(self, matrix: Array) -> Array:
        """[rows of tiles, groups, 4] of a matrix, with zeros past its ends."""
        high, wide = self.tiles
        whole = np.zeros((high * ROWS, wide * STEP), matrix.dtype)
        whole[: self.rows, : self.columns] = matrix
        return whole.reshape(high * ROWS, -1, GROUP)


def is_two_of_four(array: Array) -> bool:
    """Does each group of four neighbours of a column of [terms, rows] hold two numbers other than 0 at most?"""
    stored = (array != 0).view(np.uint8)
    counts = np.zeros((-(-len(array) // GROUP), array.shape[1]), np.uint8)
    for k in range(GROUP):
        part = stored[k::GROUP]
        counts[: len(part)] += part
    return bool(counts.max(initial=0) <= KEPT)
