"""Products of two sparse matrices, row by row (Gustavson): C[i, :] is the sum of rows of B, one for each A[i, k].

The first pass counts the products of each row, of which a row of C has no more elements: that is how much memory there
must be, and how rows are shared. The second writes columns and values. It keeps for each column where it was met last:
`mark`, an array of each share, so no column is searched for. Then the shares are moved together. Columns of a row stand
in the order in which they are met, as in SciPy.

The passes are kernels of the operator IR whose loops have loaded bounds; both structures were checked when they were
made. Where values are traced, or lie on a device, the products are listed by the element that they go to, and one op of
the graph IR adds them up: it has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from dnnc.array.core import Array, cast, from_buffer
from dnnc.array.creation import zeros
from dnnc.array.devices import HOST
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import compiler
from dnnc.array.manipulation import reshape
from dnnc.array.sparse import products
from dnnc.array.sparse.structure import Host, Structure
from dnnc.ir.dtype import DType, from_numpy, i64
from dnnc.ir.expr import Expr, Var, const, dim, fma, minimum, select
from dnnc.ir.expr import cast as cast_expr
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel, call

SERIAL_BELOW = 1 << 14  # products that other threads do not speed up
AT_ONCE = 1 << 28  # elements that there is memory for at once; what is not written takes none
SAMPLE = 256  # elements at each of some places that tell how columns follow each other
RARE = 1 / 256  # of the columns: products of a row that hardly ever meet
LARGEST = 1 << 40  # of a size
NATIVE = ("float32", "float64", "int32", "int64")


def multiplied(a: Array, s: Structure, b: Array, t: Structure) -> tuple[Array, Structure]:
    """Values and structure of the product of two sparse matrices, by values and structure of each."""
    if s.shape[1] != t.shape[0]:
        raise ValueInputError(f"matmul: sparse arrays of shapes {s.shape} and {t.shape} do not fit")
    a, b = products.numbers("matmul", a, b)
    shape = s.shape[0], t.shape[1]
    if not s.stored or not t.stored:
        empty = Structure(shape, np.zeros(shape[0] + 1, np.int64), np.zeros(0, np.int64))
        return zeros((0,), dtype=a.dtype, device=a.device), empty
    if a.device != HOST or products.followed(a) or products.followed(b) or s.columns.dtype != t.columns.dtype:
        return _listed(a, s, b, t, shape)
    wide = a.dtype if a.dtype.name in NATIVE else np.dtype(np.float32 if a.dtype.itemsize == 2 else np.int64)
    made = _native(cast(a, wide).numpy(), s, cast(b, wide).numpy(), t, shape)
    return _listed(a, s, b, t, shape) if made is None else (cast(from_buffer(made[0], HOST), a.dtype), made[1])


# --- native -----------------------------------------------------------------------------------------------------------


def _native(a: Host, s: Structure, b: Host, t: Structure, shape: tuple[int, int]) -> tuple[Host, Structure] | None:
    index, value = from_numpy(s.columns.dtype), from_numpy(a.dtype)
    most = np.empty(shape[0], np.int64)
    structure = [s.starts, s.columns, t.starts, t.columns]
    sizes = {"M": shape[0], "K": s.shape[1], "N": shape[1], "Y": s.stored, "Z": t.stored}
    bound = _function(bound_kernel, index)
    if bound is None:
        return None
    bound([*structure, most], [sizes[n] for n in sorted(sizes)])
    ahead = np.concatenate([[0], np.cumsum(most)])
    counts, made = np.empty(shape[0], np.int64), []
    row = 0
    while row < shape[0]:  # as many rows as there is memory for
        end = max(int(np.searchsorted(ahead, ahead[row] + AT_ONCE, "right")) - 1, row + 1)
        shares = compiler().backend.threads if ahead[end] - ahead[row] >= SERIAL_BELOW else 1
        goals = ahead[row] + np.arange(1, shares) * ((ahead[end] - ahead[row]) / shares)
        edges = np.concatenate([[row], np.searchsorted(ahead[row:end], goals) + row, [end]]).astype(np.int64)
        begins = ahead[edges] - ahead[row]
        columns, values = (np.empty(max(begins[-1], 1), x.dtype) for x in (s.columns, a))
        fill = _function(fill_kernel, index, value, shares, _is_foreseen(t, int(ahead[-1]) // shape[0], shape[1]))
        if fill is None:
            return None
        mark = np.full((shares, shape[1]), -1, s.columns.dtype)
        sizes["C"] = len(columns)
        arrays = [*structure, edges, begins, mark, a, b, columns, values, counts]
        fill(arrays, [sizes[n] for n in sorted(sizes)])
        done = np.diff(np.concatenate([[0], np.cumsum(counts[row:end])])[edges - row])
        made.append([_moved(x, begins, done) for x in (columns, values)])
        row = end
    parts = list(zip(*made))
    columns, values = (p[0] if len(p) == 1 else np.concatenate(p) for p in parts)
    return values, Structure(shape, np.concatenate([[0], np.cumsum(counts)]), columns)


def _is_foreseen(t: Structure, terms: int, columns: int) -> bool:
    """Can a CPU foresee which of the `terms` products of a row are the first ones of their elements? In bands, whose
    columns run on, and where nearly all are.
    """
    if terms <= columns * RARE:
        return True
    places = np.linspace(0, max(t.stored - SAMPLE, 0), 16).astype(np.int64)
    steps = [np.diff(t.columns[k : k + SAMPLE]) for k in places]
    return bool(np.mean(np.concatenate(steps) == 1) > 0.5) if t.stored > 1 else True


def _moved(x: Host, begins: Host, counts: Host) -> Host:
    """The parts of an array that shares have written, moved together within it."""
    end = int(counts[0])
    for first, n in zip(begins[1:], counts[1:]):
        x[end : end + n] = x[first : first + n]
        end += int(n)
    return x[:end]


@cache
def _function(kernel: Callable[..., Kernel], *types: Any) -> Callable[[list[Host], list[int]], None] | None:
    made = compiler()
    found: Callable[[list[Host], list[int]], None] | None = made.backend.function(kernel(*types), made.cache)
    return found


class _Operands:
    """The structures of both factors, and the loops over the products of a row."""

    def __init__(self, index: DType) -> None:
        self.sizes = {n: dim(n, 1, LARGEST) for n in "MKNYZ"}
        m, k, _, y, z = self.sizes.values()
        self.starts, self.columns = Buffer("starts", index, (m + 1,)), Buffer("columns", index, (y,))
        self.b_starts, self.b_columns = Buffer("b_starts", index, (k + 1,)), Buffer("b_columns", index, (z,))

    @contextmanager
    def terms(self, b: Builder, i: Expr) -> Iterator[tuple[Expr, tuple[Expr, Expr]]]:
        """For each element of row i of A: its number, and the range of the row of B that it meets."""
        _, k, _, y, z = self.sizes.values()
        lo, hi = _range(self.starts, i, y)
        with b.loop("p", hi, lo=lo) as p:
            row = b.let("row", call("trusted", cast_expr(self.columns[p], i64), 0, k))
            yield p, _range(self.b_starts, row, z)

    def kernel(self, name: str, buffers: tuple[Buffer, ...], b: Builder, *more: Var) -> Kernel:
        sizes = sorted((*self.sizes.values(), *more), key=lambda v: v.name)
        structure = self.starts, self.columns, self.b_starts, self.b_columns
        return Kernel((Func(name, (*sizes, *structure, *buffers), b.block()),))


def _range(buf: Buffer, i: Expr, size: Expr) -> tuple[Expr, Expr]:
    """The range that a row has, which its maker keeps within `size`."""
    lo, hi = (call("trusted", cast_expr(buf[i + k], i64), 0, size + 1) for k in (0, 1))
    return lo, hi


def bound_kernel(index: DType) -> Kernel:
    """most[i] = the number of products of row i, or of columns if there are fewer."""
    o, b = _Operands(index), Builder()
    m, _, n, _, _ = o.sizes.values()
    most = Buffer("most", i64, (m,))
    with b.loop("i", m, "parallel") as i:
        found = b.alloc("found", i64, 1)
        b.store(found, (0,), const(0))
        with o.terms(b, i) as (_, (lo, hi)):
            b.store(found, (0,), found[0] + (hi - lo))
        b.store(most, (i,), minimum(found[0], n))
    return o.kernel("count_products", (most,), b)


def fill_kernel(index: DType, value: DType, shares: int, branches: bool) -> Kernel:
    """Columns and values of rows edges[s] to edges[s + 1] from begins[s] on, and counts[i], the elements of a row.

    mark[s, j] = where the last element of a share with column j stands. `branches`: is it foreseen which products are
    the first ones of their elements? Others then store one number, not four.
    """
    o, b, size = _Operands(index), Builder(), dim("C", 1, LARGEST)
    m, _, n, y, z = o.sizes.values()
    edges, begins = (Buffer(name, i64, (const(shares + 1),)) for name in ("edges", "begins"))
    mark = Buffer("mark", index, (const(shares), n))
    left, right = Buffer("a", value, (y,)), Buffer("b", value, (z,))
    columns, values = Buffer("c_columns", index, (size,)), Buffer("c", value, (size,))
    counts = Buffer("counts", i64, (m,))
    with b.loop("s", shares, "parallel") as s:
        at = b.alloc("at", i64, 1)
        b.store(at, (0,), begins[s])
        lo, hi = _range(edges, s, m)
        with b.loop("i", hi, lo=lo) as i:
            first = b.alloc("first", i64, 1)
            b.store(first, (0,), at[0])
            with o.terms(b, i) as (p, (lo, hi)), b.loop("q", hi, lo=lo) as q:
                column = b.let("column", call("trusted", cast_expr(o.b_columns[q], i64), 0, n))
                last = b.let("last", cast_expr(mark[s, column], i64))
                new, product = b.let("new", last < first[0]), (left[p], right[q])

                def add(before: Expr, place: Expr, product: tuple[Expr, Expr] = product) -> None:
                    x, y = product
                    b.store(values, (place,), fma(x, y, before) if value.is_float else before + x * y)

                def begin(place: Expr, column: Expr = column) -> None:
                    b.store(columns, (place,), cast_expr(column, index))
                    b.store(mark, (s, column), cast_expr(place, index))

                def first_one() -> None:
                    place = b.let("place", call("trusted", at[0], 0, size))
                    add(const(0, value), place)
                    begin(place)
                    b.store(at, (0,), at[0] + 1)

                def further_one(last: Expr = last) -> None:
                    place = b.let("place", call("trusted", last, 0, size))
                    add(values[place], place)

                if branches:
                    b.branch(new, first_one, further_one)
                else:
                    place = b.let("place", call("trusted", select(new, at[0], last), 0, size))
                    add(select(new, const(0, value), values[place]), place)
                    begin(place)
                    b.store(at, (0,), at[0] + select(new, const(1), const(0)))
            b.store(counts, (i,), at[0] - first[0])
    buffers = edges, begins, mark, left, right, columns, values, counts
    return o.kernel("sparse_product", buffers, b, size)


# --- in graphs --------------------------------------------------------------------------------------------------------


def _listed(a: Array, s: Structure, b: Array, t: Structure, shape: tuple[int, int]) -> tuple[Array, Structure]:
    """The product as sums of listed products, which the structures say ahead."""
    counts = np.diff(t.starts).astype(np.int64)[s.columns]  # products of each element of A
    left = np.repeat(np.arange(s.stored), counts)
    ends = np.cumsum(counts)
    right = np.arange(ends[-1]) + np.repeat(t.starts[:-1].astype(np.int64)[s.columns] - (ends - counts), counts)
    flat = s.rows[left].astype(np.int64) * shape[1] + t.columns[right]
    order = np.argsort(flat, kind="stable")
    keys, begins = np.unique(flat[order], return_index=True)
    rows, columns = keys // shape[1], keys % shape[1]
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=shape[0]))])
    sums = Structure((len(keys), t.stored), np.append(begins, len(flat)), right[order])
    values = products.matmul(products.gathered(a, left[order]), sums, reshape(b, (t.stored, 1)))
    return reshape(values, (len(keys),)), Structure(shape, starts, columns)
