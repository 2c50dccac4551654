"""Which elements of a sparse matrix are stored: indices in compressed sparse rows, checked when they are made.

A structure is data of the host that never changes. Programs know it by identity: under `dnnc.jit` it is part of what a
program was compiled for, as a shape is. What only some operations need, such as the order of the elements by columns,
is computed when it is first asked for.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from dnnc.array.devices import HOST, moved_to
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import Lazy, Program, leaf
from dnnc.pytree import Static

Host = np.ndarray[Any, Any]
INT32 = np.iinfo(np.int32).max


class Structure(Static):
    """The stored elements of a matrix, row by row; none is stored twice. Columns of a row rise, but in products.

    Attributes:
        shape: of the matrix.
        starts: int[M + 1], the number of stored elements ahead of each row.
        columns: int[Z], the column of each stored element.
    """

    def __init__(self, shape: tuple[int, int], starts: Host, columns: Host) -> None:
        self.shape = shape
        kind = np.int32 if max(*shape, len(columns)) <= INT32 else np.int64
        self.starts, self.columns = (_frozen(a.astype(kind, copy=False)) for a in (starts, columns))
        self.programs: dict[Any, Program | None] = {}  # of products, by what they depend on beside this
        self._leaves: dict[tuple[str, str | None], Lazy] = {}
        self._blocks: dict[tuple[int, int], tuple[Structure, Host]] = {}

    def __deepcopy__(self, memo: Any) -> Structure:
        return self  # it never changes

    def __reduce__(self) -> Any:
        return Structure, (self.shape, self.starts, self.columns)  # programs are of this process

    @property
    def stored(self) -> int:
        """The number of stored elements."""
        return len(self.columns)

    @cached_property
    def rows(self) -> Host:
        """int[Z]: the row of each stored element."""
        return _frozen(np.repeat(np.arange(self.shape[0], dtype=self.columns.dtype), np.diff(self.starts)))

    @cached_property
    def order(self) -> Host:
        """int[Z]: the numbers of the stored elements column by column, the rows of a column rising."""
        return _frozen(np.argsort(self.columns, kind="stable").astype(self.columns.dtype))

    @cached_property
    def transposed(self) -> Structure:
        """The structure of the transpose."""
        m, k = self.shape
        starts = np.concatenate([[0], np.cumsum(np.bincount(self.columns, minlength=k))])
        turned = Structure((k, m), starts, self.rows[self.order])
        turned.__dict__["transposed"] = self
        back = np.empty_like(self.order)
        back[self.order] = np.arange(self.stored, dtype=back.dtype)
        turned.__dict__["order"] = _frozen(back)
        return turned

    def array(self, name: str) -> Host:
        """One of the arrays that ops of the graph IR read."""
        if name in ("t_starts", "t_rows"):
            return self.transposed.starts if name == "t_starts" else self.transposed.columns
        made: Host = getattr(self, name)
        return made

    def value(self, name: str, device: str | None) -> Lazy:
        """The same as an operand of programs on a device; None: of traced programs, which may run on any."""
        found = self._leaves.get((name, device))
        if found is None:
            found = self._leaves[name, device] = operand(self.array(name), device)
        return found

    @cached_property
    def places(self) -> Host:
        """int64[Z, 1]: the place of each stored element in the matrix, row by row."""
        return _frozen((self.rows.astype(np.int64) * self.shape[1] + self.columns)[:, None])

    def of_blocks(self, height: int, width: int) -> tuple[Structure, Host]:
        """The elements of blocks whose structure this is, and for each its place in the array of blocks."""
        made = self._blocks.get((height, width))
        if made is None:
            m, k = self.shape
            counts = np.diff(self.starts).astype(np.int64)
            first = np.repeat(self.starts[:-1].astype(np.int64), height)  # of the blocks of each row of elements
            each = np.repeat(counts, height)
            starts = np.concatenate([[0], np.cumsum(each * width)])
            row = np.repeat(np.arange(m * height), each)
            block = np.arange(starts[-1] // width) - np.repeat(starts[:-1] // width, each) + first[row]
            columns = (self.columns[block].astype(np.int64) * width)[:, None] + np.arange(width)
            places = ((block * height + row % height) * width)[:, None] + np.arange(width)
            whole = Structure((m * height, k * width), starts, columns.reshape(-1))
            made = self._blocks[height, width] = whole, _frozen(places.reshape(-1))
        return made


def operand(data: Host, device: str | None) -> Lazy:
    """Indices as an operand of programs on a device; None: of traced programs, which may run on any."""
    return leaf(data, device) if device in (None, HOST) else leaf(moved_to(data, str(device)))


def _frozen(a: Host) -> Host:
    a = np.ascontiguousarray(a)
    a.flags.writeable = False
    return a


def of_rows(starts: Any, columns: Any, shape: tuple[int, int] | None) -> tuple[Structure, Host | None, Host | None]:
    """The structure of compressed rows as SciPy has them, whose columns may be in any order and repeat.

    Args:
        starts: [M + 1]; columns: [Z]; shape: None takes the largest column.

    Returns:
        The structure; the order in which the given elements are its elements, None for the given one; where in that
        order the elements begin that are one, None where there are no duplicates.

    Raises:
        InputError: starts do not rise from 0 to Z, a column is outside of the matrix, or arrays are no vectors of
            integers.
    """
    starts, columns = _integers("indptr", starts), _integers("indices", columns)
    if not len(starts):
        raise ValueInputError("indptr: expected M + 1 numbers for M rows, got none")
    m = len(starts) - 1
    k = shape[1] if shape is not None else int(columns.max(initial=-1)) + 1
    if shape is not None and shape[0] != m:
        raise ValueInputError(f"indptr: expected {shape[0] + 1} numbers for {shape[0]} rows, got {m + 1}")
    if starts[0] != 0 or starts[-1] != len(columns):
        raise ValueInputError(
            f"indptr: expected it to begin with 0 and end with {len(columns)}, the number of stored elements, got "
            f"{starts[0]} and {starts[-1]}"
        )
    falls = np.flatnonzero(np.diff(starts) < 0)
    if len(falls):
        r = int(falls[0])
        raise ValueInputError(f"indptr: row {r} begins at {starts[r]} and ends at {starts[r + 1]}; it must not fall")
    _within("indices", columns, k, "column")
    rows = np.repeat(np.arange(m), np.diff(starts))
    steps = np.diff(columns)
    steps[(starts[1:-1] - 1)[(starts[1:-1] > 0) & (starts[1:-1] < len(columns))]] = 1  # of one row to the next
    if (steps > 0).all():
        return Structure((m, k), starts, columns), None, None
    return of_places(rows, columns, (m, k))


def of_places(rows: Any, columns: Any, shape: tuple[int, int] | None) -> tuple[Structure, Host | None, Host | None]:
    """The same of elements by row and column, in any order."""
    rows, columns = _integers("row", rows), _integers("col", columns)
    if len(rows) != len(columns):
        raise ValueInputError(f"row and col: expected equal lengths, got {len(rows)} and {len(columns)}")
    m, k = shape if shape is not None else (int(x.max(initial=-1)) + 1 for x in (rows, columns))
    _within("row", rows, m, "row")
    _within("col", columns, k, "column")
    flat = rows * max(k, 1) + columns if m * max(k, 1) < 1 << 62 else None
    if flat is not None and (np.diff(flat) > 0).all():
        return Structure((m, k), _starts(rows, m), columns), None, None
    order = np.argsort(flat, kind="stable") if flat is not None else np.lexsort((columns, rows))
    rows, columns = rows[order], columns[order]
    new = np.ones(len(rows), bool)
    new[1:] = (np.diff(rows) != 0) | (np.diff(columns) != 0)
    first = np.flatnonzero(new)
    merged = None if len(first) == len(rows) else np.append(first, len(rows))
    return Structure((m, k), _starts(rows[first], m), columns[first]), order, merged


def _starts(rows: Host, m: int) -> Host:
    return np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=m))])


def _integers(name: str, given: Any) -> Host:
    a = np.asarray(given)
    if a.ndim != 1:
        raise ValueInputError(f"{name}: expected a vector of integers, got shape {a.shape}")
    if a.size and a.dtype.kind not in "iu":
        raise ValueInputError(f"{name}: expected integers, got {a.dtype}")
    return a.astype(np.int64)


def _within(name: str, indices: Host, size: int, what: str) -> None:
    wrong = np.flatnonzero((indices < 0) | (indices >= size))
    if len(wrong):
        n = int(wrong[0])
        raise ValueInputError(
            f"{name}[{n}] is {indices[n]}: expected a {what} from 0 to {size - 1}"
            if size
            else f"{name}[{n}] is {indices[n]}: the matrix has no {what}s"
        )
