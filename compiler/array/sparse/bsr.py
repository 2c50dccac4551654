"""Products of a matrix of dense blocks with a dense one: a block's rows share each vector of the other factor.

    for each row of blocks, shared among threads; for tiles of columns of y; for `H` rows of the blocks:
        acc[H, tile] = 0
        for each block, for each column c of it:
            acc[h, tile] += block[h, c] * x[first column + c, tile]
        y[rows, tile] = acc

So there are `H` multiply-adds for each load of x, as in a dense product, and one index for each block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from dnnc.array.core import Array, from_buffer
from dnnc.array.devices import HOST
from dnnc.array.lazy import compiler
from dnnc.array.sparse import products
from dnnc.array.sparse.structure import Host, Structure
from dnnc.ir.dtype import DType, from_numpy, i64
from dnnc.ir.expr import Expr, cast, const, dim, fma, minimum
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel, call

SERIAL_BELOW = 1 << 17  # multiply-adds that other threads do not speed up
LARGEST = 1 << 40  # of a size
NATIVE = ("float32", "float64")
SUMS = 24  # vectors of sums that registers hold beside the factors
MOST_ROWS = 8  # of a block that are multiplied together


def product(values: Array, s: Structure, x: Array) -> Array | None:
    """A matrix of blocks f32[Z, R, C] times a matrix [K, N] of the host; None where that has no kernel."""
    _, r, c = values.shape
    m, k = s.shape[0] * r, s.shape[1] * c
    fits = x.ndim == 2 and x.shape[0] == k and x.shape[1] > 1 and r > 1
    if not s.stored or not fits or not (products.at_hand(values) and products.at_hand(x)):
        return None
    values, x = products.numbers("matmul", values, x)
    if values.dtype.name not in NATIVE:
        return None
    n = x.shape[1]
    backend = compiler().backend
    lanes = backend.target.vector_bits // 8 // values.dtype.itemsize
    count = backend.threads if values.size * n >= SERIAL_BELOW else 1
    kernel = _function(from_numpy(values.dtype), from_numpy(s.columns.dtype), (r, c), lanes, count)
    if kernel is None:
        return None
    goals = np.arange(1, count) * (s.stored / count)
    edges = np.concatenate([[0], np.searchsorted(s.starts[:-1], goals), [s.shape[0]]]).astype(np.int64)
    y = np.empty((m, n), values.dtype)
    sizes = {"M": s.shape[0], "K": s.shape[1], "N": n, "Z": s.stored}
    kernel([edges, s.starts, s.columns, values.numpy(), x.numpy(), y], [sizes[w] for w in sorted(sizes)])
    return from_buffer(y, HOST)


@cache
def _function(
    value: DType, index: DType, size: tuple[int, int], lanes: int, shares: int
) -> Callable[[list[Host], list[int]], None] | None:
    made, kernel = compiler(), product_kernel(value, index, size, lanes, shares)
    found: Callable[[list[Host], list[int]], None] | None = made.backend.function(kernel, made.cache)
    return found


def product_kernel(value: DType, index: DType, size: tuple[int, int], lanes: int, shares: int) -> Kernel:
    """y[M * R, N] = A x[K * C, N] for A of Z blocks of `size` R x C; each share has rows of blocks edges[s] on."""
    m, k, n, stored = (dim(w, 1, LARGEST) for w in "MKNZ")
    high, wide = size
    rows = max(h for h in range(1, MOST_ROWS + 1) if high % h == 0)
    tiles = max(SUMS // rows, 1)
    b = Builder()
    edges, starts = Buffer("edges", i64, (const(shares + 1),)), Buffer("starts", index, (m + 1,))
    columns, values = Buffer("columns", index, (stored,)), Buffer("values", value, (stored, const(high), const(wide)))
    x, y = Buffer("x", value, (k, const(wide), n)), Buffer("y", value, (m, const(high), n))

    def part(i: Expr, first: Expr, vectors: int, limit: Expr | None) -> None:
        """All rows of a row of blocks for some vectors of columns of y; a limit says how many lanes there are."""
        with b.loop("g", high // rows) as g:
            acc = b.alloc("acc", value, rows, vectors, lanes)
            for h in range(rows):
                for v in range(vectors):
                    b.store(acc, (h, v, 0), const(0, value), lanes)
            lo, hi = (call("trusted", cast(starts[i + j], i64), 0, stored + 1) for j in (0, 1))
            with b.loop("z", hi, lo=lo) as z, b.loop("c", wide) as c:
                column = call("trusted", cast(columns[z], i64), 0, k)
                for v in range(vectors):
                    f = x.at(column, c, first + v * lanes, lanes=lanes, limit=limit)
                    for h in range(rows):
                        total = fma(values[z, g * rows + h, c], f, acc.at(h, v, 0, lanes=lanes))
                        b.store(acc, (h, v, 0), total, lanes)
            for h in range(rows):
                for v in range(vectors):
                    total = acc.at(h, v, 0, lanes=lanes)
                    b.store(y, (i, g * rows + h, first + v * lanes), total, lanes, limit)

    with b.loop("s", shares, "parallel") as s:
        begin, end = (call("trusted", edges[s + j], 0, m + 1) for j in (0, 1))
        with b.loop("i", end, lo=begin) as i:
            step = tiles * lanes
            with b.loop("t", n // step) as t:
                part(i, t * step, tiles, None)
            done = b.let("done", n // step * step)
            with b.loop("u", (n - done + (lanes - 1)) // lanes) as u:
                at = b.let("at", done + u * lanes)
                part(i, at, 1, minimum(n - at, lanes))
    buffers = edges, starts, columns, values, x, y
    return Kernel((Func("bsr_product", (*sorted((m, k, n, stored), key=lambda w: w.name), *buffers), b.block()),))
