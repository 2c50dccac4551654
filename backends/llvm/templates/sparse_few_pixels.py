"""Products of a sparse constant matrix with few pixels: vectors are elements of its rows. They wait for the weights.

    parallel over shares of the rows, each with about as many nonzeros:
        for each row r:
            acc[pixels] = 0
            for vectors of the nonzeros p of the row:
                acc[m] += values[p] * other[m, columns[p]]           gathered
            y[m, r] = epilogue(sum of acc[m])

A matrix of blocks that are as wide as a vector needs no gathers, and its rows share vectors of the other factor:

        for each row of blocks:
            acc[height, pixels] = 0
            for each block z of it:
                acc[h, m] += values[z, h] * other[m, columns of z]
            y[m, rows] = epilogue(sums of acc)
"""

from __future__ import annotations

from dnnc.backends.llvm.templates.sparse_product import Product, end_of_share, word
from dnnc.ir.dtype import f32, i64
from dnnc.ir.expr import Expr, Load, cast, const, fma, free, load, minimum, op, select, substitute
from dnnc.ir.loops.stmt import Block, Buffer, Builder, Store, call
from dnnc.passes.rewrites.sparse import FEW_PIXELS, pixels_at_once


def takes(p: Product) -> bool:
    """Are vectors elements of the matrix's rows, and not pixels?"""
    return p.encoding.group == 1 and p.pixels.size <= FEW_PIXELS


def fits(p: Product) -> bool:
    """Can elements of the other factor be read by their column?"""
    return len(p.form.red.loops) == 1 and not p.other.conds and isinstance(p.other.value, Load)


def _side_by_side(p: Product, width: int) -> bool:
    """Are elements of a block's columns neighbours? They lie in a row or in blocks, x[c // width, m, c % width]."""
    (loop,), e = p.form.red.loops, p.other.value
    assert isinstance(e, Load), f"{e!r} is no element of a row"
    *front, last = e.idx
    if last is loop:
        return not any(loop in free(i) for i in front)
    blocks = [op(sign, loop, const(width)) for sign in ("//", "%")]
    return last == blocks[1] and all(i == blocks[0] for i in front if loop in free(i))


def body(p: Product, shares: int, lanes: int) -> Block:
    """The kernel's body."""
    b, height = Builder(), p.encoding.pattern.height
    with b.loop("s", shares, "parallel") as share:
        ends = [b.let(name, end_of_share(p, height, share + j, shares)) for j, name in enumerate(("begin", "end"))]
        with b.loop("r", minimum(ends[1], len(p.encoding.pattern.blocks)), lo=ends[0]) as r:
            (_rows if height > 1 else _row)(b, p, r, lanes)
    return b.block()


def _sums(b: Builder, *shape: int) -> Buffer:
    """Vectors of 0."""
    acc = b.alloc("acc", f32, *shape)
    with b.loop("i", shape[0], "unroll") as i, b.loop("m", shape[1], "unroll") as m:
        b.store(acc, (i, m, 0), const(0.0, f32), shape[2])
    return acc


def _row(b: Builder, p: Product, r: Expr, lanes: int) -> None:
    """Gather the factors of a row's elements."""
    acc = _sums(b, 1, p.pixels.size, lanes)
    numbers = op("lanes", const(lanes), dtype=i64, lanes=lanes)
    first, last = word(p, "starts", r), word(p, "starts", r + 1)
    with b.loop("v", (last - first + (lanes - 1)) // lanes) as v:
        left = last - first - v * lanes
        values, columns = (
            load(p.weights, (p.encoding.sections[name][0] + first + v * lanes,), lanes, left)
            for name in ("values", "columns")
        )
        weight = op("bits_f32", values, dtype=f32)
        column = call("trusted", cast(columns, i64), 0, p.encoding.pattern.columns)
        with b.loop("m", p.pixels.size, "unroll") as m:
            e = _at_columns(p, m, column, 1)
            e = select(op("<", numbers, left), e, const(0.0, f32))
            b.store(acc, (0, m, 0), fma(weight, e, acc.at(0, m, 0, lanes=lanes)), lanes)
    with b.loop("m", p.pixels.size, "unroll") as m:
        _finish(b, p, r, m, acc.at(0, m, 0, lanes=lanes))


def _rows(b: Builder, p: Product, r: Expr, vector: int) -> None:
    """Multiply the blocks of a row of blocks, for as many pixels at once as registers hold sums of."""
    most = pixels_at_once(p.encoding.pattern.height, vector)
    for first in range(0, p.pixels.size, most):
        _some_pixels(b, p, r, range(first, min(first + most, p.pixels.size)))


def _some_pixels(b: Builder, p: Product, r: Expr, pixels: range) -> None:
    pattern = p.encoding.pattern
    height, lanes = pattern.height, pattern.width
    numbers, apart = op("lanes", const(lanes), dtype=i64, lanes=lanes), not _side_by_side(p, lanes)
    acc = _sums(b, height, len(pixels), lanes)
    begin, _ = p.encoding.sections["values"]
    with b.loop("z", word(p, "starts", r + 1), lo=word(p, "starts", r)) as z:
        column = b.let("column", word(p, "columns", z) * lanes)
        with b.loop("m", len(pixels), "unroll") as m:
            at = m + pixels[0]
            x = _at_columns(p, at, column + numbers, 1) if apart else _at_columns(p, at, column, lanes)
            with b.loop("h", height, "unroll") as h:
                weight = op("bits_f32", load(p.weights, (begin + (z * height + h) * lanes,), lanes), dtype=f32)
                b.store(acc, (h, m, 0), fma(weight, x, acc.at(h, m, 0, lanes=lanes)), lanes)
    with b.loop("h", height, "unroll") as h:  # loops that are not unrolled would keep the sums in memory all the time
        with b.when(const(True) if p.rows.size % height == 0 else op("<", r * height + h, const(p.rows.size))):
            with b.loop("m", len(pixels), "unroll") as m:
                _finish(b, p, r * height + h, m + pixels[0], acc.at(h, m, 0, lanes=lanes))


def _finish(b: Builder, p: Product, row: Expr, pixel: Expr, total: Expr) -> None:
    env = {**p.rows.at(row), **p.pixels.at(pixel), p.form.acc[0]: call("hsum", total)}
    s = p.form.store
    b.emit(Store(s.buf, tuple(substitute(i, env) for i in s.idx), substitute(s.value, env)))


def _at_columns(p: Product, pixel: Expr, columns: Expr, lanes: int) -> Expr:
    """A vector of elements of the other factor: one for each column, or `lanes` neighbours from one on."""
    (loop,) = p.form.red.loops
    e = substitute(p.other.value, p.pixels.at(pixel))
    assert isinstance(e, Load), f"{e!r} is no element of a row"
    return load(e.buf, [substitute(i, {loop: columns}) for i in e.idx], lanes)
