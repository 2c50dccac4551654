"""Patterns of sparse matrices, and the encoding of a constant that stores its nonzero blocks alone.

    w: f32[512, 256, 1, 1] @ "sparse 0 1x1 512x256 eNr..."

A constant is a matrix here: one axis are its rows, the others together its columns, in row-major order. Blocks of
`height x width` elements are stored whole; 1 x 1 is compressed sparse rows (CSR), more is BSR. Values lie row by row,
or by groups of rows, in which all of one column come before the next: so straight-line code reads them. Such code may
have the values in it, too; then these are a part of the encoding.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dnnc.ir.dtype import f32, i64, u32
from dnnc.ir.expr import E, Expr, cast, const, maximum, minimum, op, select
from dnnc.ir.types import Array, Encoding, TensorType

WORD = 32  # bits of a word of the bitmap
SHARES = 96  # equal parts of the stored blocks: threads that share the rows take some of these each


@dataclass(frozen=True)
class Pattern:
    """Which blocks of a matrix are stored. `bits`: one for each block, row by row, the lowest bit of a byte first."""

    rows: int
    columns: int
    height: int
    width: int
    bits: bytes

    @staticmethod
    def of(matrix: Array, height: int = 1, width: int = 1) -> Pattern:
        """The blocks of a matrix that hold a number other than 0 (NaN is one)."""
        rows, columns = matrix.shape
        bits = np.packbits(_blocks(matrix, height, width), bitorder="little").tobytes()
        return Pattern(rows, columns, height, width, bits)

    @cached_property
    def blocks(self) -> Array:
        """bool[block rows, block columns]"""
        shape = -(-self.rows // self.height), -(-self.columns // self.width)
        bits = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=shape[0] * shape[1], bitorder="little")
        return bits.reshape(shape).view(np.bool_)

    @cached_property
    def count(self) -> int:
        """Stored blocks."""
        return int(self.blocks.sum())

    @property
    def stored(self) -> int:
        """Stored elements."""
        return self.count * self.height * self.width

    @cached_property
    def places(self) -> tuple[Array, Array]:
        """Block rows and block columns of the stored blocks, row by row: they rise, and lie within the matrix."""
        high, wide = np.nonzero(self.blocks)
        return high, wide

    @cached_property
    def starts(self) -> Array:
        """int[block rows + 1]: the number of stored blocks ahead of each row of blocks."""
        return np.concatenate([[0], np.cumsum(self.blocks.sum(1))])

    def by_groups(self, group: int) -> Array:
        """bool[groups of rows of blocks, block columns, group]: stored blocks, in the order of groups."""
        high, wide = self.blocks.shape
        full = np.pad(self.blocks, ((0, -high % group), (0, 0)))
        made: Array = full.reshape(-1, group, wide).transpose(0, 2, 1)
        return made

    @cached_property
    def mask(self) -> Array:
        """bool[rows, columns]: the elements that are stored."""
        whole = self.blocks.repeat(self.height, 0).repeat(self.width, 1)
        return whole[: self.rows, : self.columns]

    def values(self, matrix: Array, group: int = 1) -> Array:
        """[stored blocks, height, width]: the elements of a matrix in the order of groups; past its ends 0."""
        places = self.by_groups(group)
        high, wide = len(places) * group, self.blocks.shape[1]
        ends = ((0, high * self.height - self.rows), (0, wide * self.width - self.columns))
        full = np.pad(matrix, ends) if any(e for _, e in ends) else matrix
        split: Array = full.reshape(len(places), group, self.height, wide, self.width).transpose(0, 3, 1, 2, 4)
        return split[places]

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        # random bits repeat nothing
        huffman = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
        bits = base64.b64encode(huffman.compress(self.bits) + huffman.flush()).decode()
        return f"{self.height}x{self.width} {self.rows}x{self.columns} {bits}"

    @staticmethod
    def parse(text: str) -> Pattern:
        block, shape, bits = text.split()
        (height, width), (rows, columns) = (map(int, t.split("x")) for t in (block, shape))
        return Pattern(rows, columns, height, width, zlib.decompress(base64.b64decode(bits)))


def _blocks(matrix: Array, height: int, width: int) -> Array:
    """bool[block rows, block columns]: which blocks hold a number other than 0."""
    some: Array = matrix != 0
    for axis, size in enumerate((height, width)):
        if size > 1:
            some = np.logical_or.reduceat(some, np.arange(0, some.shape[axis], size), axis=axis)
    return some


@dataclass(frozen=True)
class Sparse(Encoding):
    """One buffer of words of 32 bits: `values`, `starts` of rows of blocks, `columns` of blocks, `shares`: the row of
    blocks, or the group, with which each of `SHARES` equal parts begins, and for access to any element a bitmap in
    their order with the number of blocks ahead of each of its words. Constants of float32 only. Groups of several rows
    have neither starts nor columns: code holds them. Matrices of one `kind` differ in these contents alone. Where code
    holds the values, they are `values`, and a part of the kind.

    Indices are checked by construction: they are computed from the pattern, so kernels may trust them.
    """

    axis: int  # of the rows
    shape: tuple[int, ...]  # of the tensor
    pattern: Pattern
    group: int = 1  # rows of blocks whose values lie column by column
    values: bytes = b""  # float32 of the stored elements, in the order of groups, that are in code

    @classmethod
    def parse(cls, text: str) -> Sparse:
        _, axis, shape, group, *pattern = text.split(" ")
        values = base64.b64decode("".join(pattern[3:]))
        sizes = tuple(map(int, shape.split("x")))
        return cls(int(axis), sizes, Pattern.parse(" ".join(pattern[:3])), int(group), values)

    def __str__(self) -> str:
        values = f" {base64.b64encode(self.values).decode()}" if self.values else ""
        return f"sparse {self.axis} {'x'.join(map(str, self.shape))} {self.group} {self.pattern}{values}"

    @staticmethod
    def of(array: Array, axis: int, height: int = 1, width: int = 1, group: int = 1, immediate: bool = False) -> Sparse:
        """The encoding that stores the blocks of a constant that hold a number other than 0. `immediate`: in code."""
        matrix = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
        pattern = Pattern.of(matrix, height, width)
        values = pattern.values(matrix, group).astype("<f4").tobytes() if immediate else b""
        return Sparse(axis, array.shape, pattern, group, values)

    @property
    def room(self) -> int:
        """Stored blocks that the buffer has memory for, at most a sixteenth more: so patterns have few sizes."""
        step = 1 << max(self.pattern.count.bit_length() - 5, 0)
        return -(-self.pattern.count // step) * step

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for encodings that differ in their patterns alone, not in any size."""
        p = self.pattern
        return "sparse", self.axis, self.shape, self.group, p.rows, p.columns, p.height, p.width, self.room, self.values

    @cached_property
    def digest(self) -> str:
        """A hash of all of it."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    @property
    def words(self) -> int:
        """Words of the bitmap."""
        high, wide = self.pattern.blocks.shape
        return -(-(-(-int(high) // self.group) * self.group * int(wide)) // WORD)

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """Begin and length of each part of the buffer."""
        p, rows = self.pattern, self.group == 1
        sizes = {
            "values": self.room * p.height * p.width,
            "starts": rows * (p.blocks.shape[0] + 1),
            "columns": rows * self.room,
            "shares": SHARES + 1,
            "bits": self.words,
            "ahead": self.words,
        }
        out, at = {}, 0
        for name, size in sizes.items():
            out[name] = at, size
            at += size
        return out

    def buffers(self, type: TensorType) -> tuple[TensorType, ...]:
        return (TensorType(u32, (sum(n for _, n in self.sections.values()),)),)

    def matrix(self, array: Array) -> Array:
        """The constant as [rows, columns]."""
        matrix: Array = np.moveaxis(array, self.axis, 0).reshape(self.pattern.rows, self.pattern.columns)
        return matrix

    def held(self, array: Array) -> Array:
        if self.values:
            return self._whole.astype(array.dtype)
        rest = (n for k, n in enumerate(self.shape) if k != self.axis)
        mask = np.moveaxis(self.pattern.mask.reshape(self.shape[self.axis], *rest), 0, self.axis)
        return np.where(mask, array, np.zeros((), array.dtype))

    @cached_property
    def _whole(self) -> Array:
        """The constant whose elements are `values`."""
        p = self.pattern
        matrix = np.zeros((-(-p.rows // self.group), self.group, p.columns), np.float32)
        groups, columns, rows = np.nonzero(p.by_groups(self.group))
        matrix[groups, rows, columns] = np.frombuffer(self.values, "<f4")
        rest = (n for k, n in enumerate(self.shape) if k != self.axis)
        rows_first = matrix.reshape(-1, p.columns)[: p.rows].reshape(self.shape[self.axis], *rest)
        return np.moveaxis(rows_first, 0, self.axis)

    @property
    def any_bytes(self) -> bool:
        return False

    def load(self, memory: Sequence[Callable[..., Expr]], index: Sequence[E]) -> Expr:
        p, at = self.pattern, {name: begin for name, (begin, _) in self.sections.items()}
        row, column = const(index[self.axis]), const(0)
        for k, n in enumerate(self.shape):
            if k != self.axis:
                column = column * n + index[k]
        tall, wide = row // p.height, column // p.width
        order = (tall // self.group * p.blocks.shape[1] + wide) * self.group + tall % self.group
        word, bit = memory[0](at["bits"] + order // WORD), cast(order % WORD, u32)
        below = word & (op("shl", const(1, u32), bit) - const(1, u32))
        block = cast(memory[0](at["ahead"] + order // WORD), i64) + cast(op("popcount", below), i64)
        inner = minimum(block, self.room - 1) * (p.height * p.width) + row % p.height * p.width + column % p.width
        value = op("bits_f32", memory[0](at["values"] + maximum(inner, 0)), dtype=f32)
        stored = op("!=", op("shr", word, bit) & const(1, u32), const(0, u32))
        return select(stored, value, const(0.0, f32))

    def pack(self, array: Array) -> tuple[Array, ...]:
        p, s = self.pattern, self.sections
        out = np.zeros(sum(n for _, n in s.values()), np.uint32)

        def put(name: str, values: Array) -> None:
            at, _ = s[name]
            out[at : at + values.size] = values.reshape(-1)

        put("values", np.ascontiguousarray(p.values(self.matrix(array), self.group), np.float32).view(np.uint32))
        if self.group == 1:
            put("starts", p.starts)
            put("columns", p.places[1])
        ahead = np.append(p.starts[:: self.group], p.count)[: -(-len(p.blocks) // self.group) + 1]
        shares = np.searchsorted(ahead, np.arange(SHARES + 1) * (p.count / SHARES))
        shares[-1] = len(ahead) - 1  # rows without elements belong to the last one
        put("shares", shares)
        flat = p.by_groups(self.group).reshape(-1)
        bits = np.pad(flat, (0, self.words * WORD - len(flat))).reshape(-1, WORD)
        put("bits", np.packbits(bits, axis=-1, bitorder="little").view(np.uint32))
        put("ahead", np.cumsum(bits.sum(-1)) - bits.sum(-1))
        return (out,)
