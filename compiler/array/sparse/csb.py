"""Compressed sparse blocks: a matrix whose products with vectors are as fast for its transpose as for itself.

The matrix is cut into blocks of `side x side` places. An element is a value and one number, its row and its column
within the block: 2 bytes where a side has 256 places at most, 4 otherwise. Blocks that hold elements are listed row by
row of blocks; by columns of blocks there is a list of their numbers, so the transpose needs no second copy.

    for each row of blocks, shared among threads:          of the transpose: each column of blocks
        y[rows] = 0
        for each block, for each element (r, c, v) of it:
            y[first row + r] += v * x[first column + c]

Elements of a block are stored by wrapped diagonals, (c - r) mod side: neighbours have other rows and other columns, so
no sum waits for the one before it, in either direction. `RUN` elements in a row on a diagonal are a vector, of which
the place of the first one is stored; the vectors of a block come ahead of its other elements.

Source: Buluc, Fineman, Frigo, Gilbert, Leiserson, Parallel sparse matrix-vector and matrix-transpose-vector
multiplication using compressed sparse blocks, 2009. There a block has the order of a Z curve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from dnnc.array.core import Array, from_buffer
from dnnc.array.devices import HOST
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import compiler
from dnnc.array.sparse import products
from dnnc.array.sparse.structure import Host, Structure
from dnnc.backends.runtime.results import results
from dnnc.ir.dtype import DType, from_numpy, i64, u16
from dnnc.ir.expr import Expr, cast, const, dim, fma, minimum
from dnnc.ir.loops.stmt import Buffer, Builder, Eval, Func, Kernel, call
from dnnc.pytree import Static

SIDES = (256, 1024, 4096, 16384, 65536)  # slices of both vectors: in the first-level cache up to 4096
DIAGONAL = 2048  # of matrices of diagonals: what is added to a sum again is not on its way to memory any more
RUN = 16  # elements of a vector
TOGETHER = 4  # other elements of a round of the loop: a tenth less time than one
FULL = 256  # elements of a block on the average, of which the begin of a block's loop is a small part
AHEAD, LINE = 64, 64  # elements of the next block that are prefetched, bytes of a cache line
NARROW, WIDE = 8, 16  # bits of a row or column within a block
SERIAL_BELOW = 1 << 14  # elements that other threads do not speed up
LARGEST = 1 << 40  # of a size
SAMPLE, MOSTLY = 1024, 0.75  # elements that are asked for a neighbour on their diagonal, the share that has one
NATIVE = ("float32", "float64", "int32", "int64")
Run = Callable[[list[Host], list[int]], None]
Call = tuple[Run, list[Host], list[int]]


@dataclass(frozen=True)
class Side:
    """Blocks as one of both products walks them: by their rows, or by their columns.

    Attributes:
        starts: int64[B + 1], the number of listed blocks ahead of each row (column) of blocks.
        blocks: int64[blocks], their numbers.
        other: int64[blocks], the column (row) of blocks of each block, by number.
    """

    starts: Host
    blocks: Host
    other: Host

    def shares(self, begins: Host, count: int) -> tuple[Host, Host]:
        """Rows of blocks for each of `count` threads, the heaviest first to the one with the least: where each share
        begins, and the rows of all shares one after the other.
        """
        weights = np.add.reduceat(np.append(np.diff(begins)[self.blocks], 0), self.starts[:-1]) * (
            np.diff(self.starts) > 0
        )
        loads, taken = np.zeros(count), [list[int]() for _ in range(count)]
        for k in np.argsort(-weights, kind="stable"):
            least = int(loads.argmin())
            loads[least] += weights[k] + 1
            taken[least].append(int(k))
        edges = np.concatenate([[0], np.cumsum([len(t) for t in taken])])
        return edges, np.array([k for t in taken for k in sorted(t)], np.int64)


class Blocks(Static):
    """Where the elements of a matrix in compressed sparse blocks are. It never changes.

    Attributes:
        structure: the same by rows.
        side: rows and columns of a block.
        order: int[Z], for each element in the order of blocks its number in the order of rows.
        begins: int64[blocks + 1], the number of elements ahead of each block.
        runs: int64[blocks + 1], the number of vectors ahead of each block.
        heads: u16 or u32 [vectors], where they begin: row within the block * 2^8 or 2^16 + column within it.
        places: the same of each element that is in none.
        by_rows, by_columns: the blocks.
        turned: does this stand for the transpose?
    """

    def __init__(self, structure: Structure, side: int | None = None) -> None:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or not 1 <= side <= SIDES[-1]):
            raise ValueInputError(f"blocksize: expected a number from 1 to {SIDES[-1]}, got {side!r}")
        m, k = structure.shape
        rows, columns = structure.rows.astype(np.int64), structure.columns.astype(np.int64)
        self.structure, self.turned = structure, False
        self.side = side or _side(rows, columns, m, k)
        wide = -(-k // self.side)
        block = rows // self.side * wide + columns // self.side
        r, c = rows % self.side, columns % self.side
        order = np.argsort((block * self.side + (c - r) % self.side) * self.side + r)
        block, r, c = block[order], r[order], c[order]
        in_run = _runs(block, r, c)
        again = np.argsort(2 * block + ~in_run, kind="stable")
        self.order, block, r, c, in_run = (a[again] for a in (order, block, r, c, in_run))
        numbers, begins = np.unique(block, return_index=True)
        self.begins = np.append(begins, len(block))
        self.runs = np.append(0, np.cumsum(in_run))[self.begins] // RUN
        bits, kind = (NARROW, np.uint16) if self.side <= 1 << NARROW else (WIDE, np.uint32)
        places = (r << bits | c).astype(kind)
        self.heads, self.places = places[in_run][::RUN].copy(), places[~in_run]
        high, across = numbers // wide, numbers % wide
        by_columns = np.argsort(across, kind="stable")
        self.by_rows = Side(_starts(high, -(-m // self.side)), np.arange(len(numbers)), across)
        self.by_columns = Side(_starts(across, wide), by_columns, high)
        self._calls: dict[tuple[np.dtype[Any], bool, int], Call | None] = {}

    def __deepcopy__(self, memo: Any) -> Blocks:
        return self

    def __getstate__(self) -> dict[str, Any]:
        kept = {n: v for n, v in self.__dict__.items() if n != "transposed"}
        return {**kept, "_calls": {}}  # which are of this process

    @property
    def shape(self) -> tuple[int, int]:
        m, k = self.structure.shape
        return (k, m) if self.turned else (m, k)

    @property
    def stored(self) -> int:
        return self.structure.stored

    @cached_property
    def back(self) -> Host:
        """int[Z]: for each element in the order of rows its number in the order of blocks."""
        out = np.empty_like(self.order)
        out[self.order] = np.arange(len(out), dtype=out.dtype)
        return out

    @cached_property
    def transposed(self) -> Blocks:
        """The same blocks, of the transpose."""
        made = object.__new__(Blocks)
        made.__dict__.update(self.__dict__, turned=not self.turned)
        made.__dict__["transposed"] = self
        return made

    @property
    def bytes(self) -> int:
        """Of everything but the values."""
        sides = [a for s in (self.by_rows, self.by_columns) for a in (s.starts, s.blocks, s.other)]
        return sum(a.nbytes for a in (self.heads, self.places, self.begins, self.runs, *sides))

    def product(self, values: Array, x: Array) -> Array | None:
        """The product with a vector [K]; None where that has no kernel: on a device, traced, or of other dtypes."""
        m, k = self.shape
        if not self.stored or x.shape != (k,) or not (products.at_hand(values) and products.at_hand(x)):
            return None
        if values.dtype != x.dtype:
            values, x = products.numbers("matmul", values, x)
        count = compiler().backend.threads if self.stored >= SERIAL_BELOW else 1
        key = values.dtype, self.turned, count
        found = self._calls[key] if key in self._calls else self._calls.setdefault(key, self._call(*key))
        if found is None:
            return None
        kernel, arrays, sizes = found
        y = results().empty((m,), values.dtype)
        kernel([*arrays, values.numpy(), x.numpy(), y], sizes)
        return from_buffer(y, HOST)

    def _call(self, dtype: np.dtype[Any], turned: bool, count: int) -> Call | None:
        """The kernel of a dtype for some threads, its first arrays and its sizes; None where there is none."""
        if dtype.name not in NATIVE:
            return None
        kernel = _function(from_numpy(dtype), from_numpy(self.places.dtype), turned, count)
        if kernel is None:
            return None
        walk, other = (self.by_columns, self.by_rows) if turned else (self.by_rows, self.by_columns)
        heads, places = _some(self.heads), _some(self.places)
        sizes = {
            "M": self.shape[0], "R": len(walk.starts) - 1, "C": len(other.starts) - 1, "S": self.side,
            "B": len(walk.other), "Z": self.stored, "H": len(heads), "P": len(places),
        }  # fmt: skip
        shares = walk.shares(self.begins, count)
        arrays = [*shares, walk.starts, walk.blocks, walk.other, self.begins, self.runs, heads, places]
        return kernel, arrays, [sizes[n] for n in sorted(sizes)]


def _runs(block: Host, r: Host, c: Host) -> Host:
    """bool[Z]: elements of whole vectors. Those of a block are by diagonals, and by rows within them."""
    joined = np.append(False, (np.diff(block) == 0) & (np.diff(r) == 1) & (np.diff(c) == 1))
    first = np.flatnonzero(~joined)
    length = np.diff(np.append(first, len(r)))
    found: Host = np.arange(len(r)) - np.repeat(first, length) < np.repeat(length // RUN * RUN, length)
    return found


def _some(a: Host) -> Host:
    """An operand: one without elements gets one that nobody reads."""
    return a if len(a) else np.zeros(1, a.dtype)


def _starts(lines: Host, count: int) -> Host:
    """Where each line's blocks begin in a list that is sorted by lines."""
    return np.concatenate([[0], np.cumsum(np.bincount(lines, minlength=count))])


def _side(rows: Host, columns: Host, m: int, k: int) -> int:
    """The smallest side whose blocks hold enough elements; one for long diagonals."""
    flat, sample = rows * k + columns, np.linspace(0, max(len(rows) - 1, 0), SAMPLE, dtype=np.int64)
    if len(rows) and np.isin(flat[sample] + k + 1, flat).mean() > MOSTLY:
        return DIAGONAL
    for side in SIDES[:-1]:
        high, wide = -(-m // side), -(-k // side)
        block = rows // side * wide + columns // side
        few = high * wide <= 4 * len(block)
        count = np.count_nonzero(np.bincount(block)) if few else len(np.unique(block))
        if count * FULL <= len(block) or side >= max(m, k):
            return side
    return SIDES[-1]


@cache
def _function(value: DType, place: DType, turned: bool, shares: int) -> Run | None:
    made = compiler()
    kernel = product_kernel(value, place, turned, shares)
    found: Run | None = made.backend.function(kernel, made.cache)
    return found


def product_kernel(value: DType, place: DType, turned: bool, shares: int) -> Kernel:
    """y[R, S] = A x[C, S] for A of Z elements in B blocks of S x S places, which lie in R rows and C columns of blocks.

    Of the elements, H vectors and P others. `edges` of shares are in `lines`. Of y there are M elements; what the last
    blocks have beyond the matrix is neither read nor written.
    """
    rows, columns, side, blocks, stored, vectors, singles, m = (dim(n, 1, LARGEST) for n in "RCSBZHPM")
    bits = NARROW if place is u16 else WIDE
    b = Builder()
    edges, lines = Buffer("edges", i64, (const(shares + 1),)), Buffer("lines", i64, (rows,))
    starts, listed = Buffer("starts", i64, (rows + 1,)), Buffer("blocks", i64, (blocks,))
    other = Buffer("other", i64, (blocks,))
    begins, runs = (Buffer(name, i64, (blocks + 1,)) for name in ("begins", "runs"))
    heads, places = Buffer("heads", place, (vectors,)), Buffer("places", place, (singles,))
    values, x, y = (
        Buffer("values", value, (stored,)),
        Buffer("x", value, (columns, side)),
        Buffer("y", value, (rows, side)),
    )

    def multiply(line: Expr, across: Expr, at: Expr, head: Expr, lanes: int) -> None:
        """The products of `lanes` elements on a diagonal, of which `head` says the first one's place."""
        both = b.let("both", cast(head, i64))
        row, column = (call("trusted", n, 0, side - (lanes - 1)) for n in (both // (1 << bits), both % (1 << bits)))
        to, of = (column, row) if turned else (row, column)
        v, f, sum_ = (m.at(*i, lanes=lanes) for m, i in ((values, (at,)), (x, (across, of)), (y, (line, to))))
        b.store(y, (line, to), fma(v, f, sum_) if value.is_float else sum_ + v * f, lanes)

    def one(line: Expr, across: Expr, e: Expr, vectors_ahead: Expr) -> None:
        """The product of an element that is in no vector."""
        head = places[call("trusted", e - vectors_ahead * RUN, 0, singles)]
        multiply(line, across, call("trusted", e, 0, stored), head, 1)

    with b.loop("s", shares, "parallel") as s:
        first, last = (_at(edges, s + k, rows + 1) for k in (0, 1))
        with b.loop("n", last, lo=first) as n:
            line = b.let("line", _at(lines, n, rows))
            with b.loop("r", minimum(side, m - line * side)) as r:
                b.store(y, (line, r), const(0, value))
            with b.loop("j", _at(starts, line + 1, blocks + 1), lo=_at(starts, line, blocks + 1)) as j:
                block = b.let("block", _at(listed, j, blocks))
                behind = _at(listed, minimum(j + 1, blocks - 1), blocks)  # lies elsewhere where columns are walked
                for ahead in range(0, AHEAD, LINE // 4):
                    at = minimum(_at(begins, behind, stored + 1) + ahead, stored - 1)
                    b.emit(Eval("prefetch", (values.ref(at),)))
                across = b.let("across", _at(other, block, columns))
                begin, end = (b.let(w, _at(begins, block + k, stored + 1)) for k, w in ((0, "begin"), (1, "end")))
                head, tail = (b.let(w, _at(runs, block + k, vectors + 1)) for k, w in ((0, "head"), (1, "tail")))
                with b.loop("t", tail, lo=head) as t:
                    at = call("trusted", begin + (t - head) * RUN, 0, stored - (RUN - 1))
                    multiply(line, across, at, heads[call("trusted", t, 0, vectors)], RUN)
                single = b.let("single", begin + (tail - head) * RUN)
                groups = b.let("groups", (end - single) // TOGETHER)
                with b.loop("g", groups) as g:
                    for k in range(TOGETHER):
                        one(line, across, single + g * TOGETHER + k, tail)
                with b.loop("e", end, lo=single + groups * TOGETHER) as e:
                    one(line, across, e, tail)
    sizes = sorted((rows, columns, side, blocks, stored, vectors, singles, m), key=lambda v: v.name)
    buffers = edges, lines, starts, listed, other, begins, runs, heads, places, values, x, y
    return Kernel((Func("csb_product", (*sizes, *buffers), b.block()),))


def _at(buf: Buffer, i: Expr, size: Expr) -> Expr:
    """A number that the maker of the blocks keeps below `size`."""
    found: Expr = call("trusted", buf[i], 0, size)
    return found
