"""Matrix tiles, as Intel's AMX has them: effects on two-dimensional registers, and what they mean in plain loops.

    sums: i32[4, 16, 16] @ tile             four tiles of 16 rows of 16 numbers
    tile_zero(addr(sums[k, 0, 0]))          a tile of zeros
    tile_load(addr(a[i, 0, 0]), addr(x[.., p, c]), step)
                                            row r of the tile: x[.., p + r*step, c:], as many elements as a row has
    tile_dot(addr(sums[k, 0, 0]), addr(a[i, 0, 0]), addr(b[j, 0, 0]))
                                            sums[k] += a[i] @ b[j]. A row of b has, for each column, as many neighbours
                                            of a sum as 32 bits hold: four bytes, added up exactly in i32, or two bf16,
                                            added up in f32 in any order
    tile_store(addr(y[.., p, c]), addr(sums[k, 0, 0]), step)
                                            y[.., p + r*step, c:] = row r of the tile

A buffer in the space `tile` is [tiles, rows, elements of a row]. A function has `TILES` of them, of at most `ROWS` rows
of `ROW` bytes. `meaning` is the definition: the interpreter runs it, the verifier checks it, and targets without such
registers compile it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dnnc.ir.dtype import bf16, f32, i8, i32, u8
from dnnc.ir.expr import E, Expr, Ref, const, load, value
from dnnc.ir.loops.stmt import Block, Buffer, Builder, Eval, call

TILES, ROWS, ROW = 8, 16, 64  # registers, their rows, bytes of a row
FACTORS = ((i32, u8, i8), (i32, i8, i8), (f32, bf16, bf16))  # types of sums and of their factors


def meaning(s: Eval) -> Block:
    """The loops that a statement of a tile stands for; `problems(s)` has none."""
    b = Builder()
    _MEANINGS[s.name](b, *s.args)
    return b.block()


def problems(s: Eval) -> Iterator[str]:
    """What is wrong with the operands of a statement of a tile."""
    want = {"tile_zero": "t", "tile_load": "tm#", "tile_dot": "ttt", "tile_store": "mt#"}[s.name]
    if len(s.args) != len(want) or not all(map(_is, want, s.args)):
        yield f"{s.name} takes {', '.join(_KINDS[k] for k in want)}"
    elif s.name == "tile_dot":
        sums, a, b = (x.buf for x in s.args if isinstance(x, Ref))
        if (sums.dtype, a.dtype, b.dtype) not in FACTORS:
            yield f"tile_dot adds no products of {a.dtype} and {b.dtype} up in {sums.dtype}"
        elif [sizes(b)[0] * (32 // b.dtype.bits), sizes(a)[0], sizes(sums)[1] * (32 // b.dtype.bits)] != [
            sizes(a)[1],
            sizes(sums)[0],
            sizes(b)[1],
        ]:
            yield f"tile_dot: tiles of {sizes(a)} and {sizes(b)} elements have no product of {sizes(sums)}"
    else:
        t, x = (a.buf for a in (s.args[0], s.args[-1 if s.name == "tile_zero" else 1]) if isinstance(a, Ref))
        if t.dtype is not x.dtype:
            yield f"{s.name} moves {x.dtype} and {t.dtype}"


def sizes(t: Buffer) -> tuple[int, int]:
    """Rows of a tile, and elements of a row."""
    rows, row = (value(d) or 0 for d in t.shape[-2:])
    return int(rows), int(row)


def fits(t: Buffer) -> bool:
    """Is this the shape of tiles that registers can hold?"""
    return len(t.shape) == 3 and 0 < sizes(t)[0] <= ROWS and 0 < sizes(t)[1] * t.dtype.bytes <= ROW


_KINDS = {"t": "the address of a tile", "m": "an address of at least two axes", "#": "a step"}


def _is(kind: str, e: Expr) -> bool:
    if kind == "#":
        return not isinstance(e, Ref) and e.lanes == 1
    if not isinstance(e, Ref) or (e.buf.space == "tile") != (kind == "t"):
        return False
    return len(e.buf.shape) >= 2 if kind == "m" else fits(e.buf) and all(value(i) == 0 for i in e.idx[1:])


def _row(x: Expr, r: E, step: E = 1) -> tuple[Expr, ...]:
    """Where row r of a tile, or of a matrix at an address, begins."""
    assert isinstance(x, Ref)
    *outer, row, column = x.idx
    return (*outer, row + const(r) * step, column)


def _move(b: Builder, to: Expr, source: Expr, tile: Expr, steps: tuple[E, E]) -> None:
    assert isinstance(to, Ref) and isinstance(source, Ref) and isinstance(tile, Ref)
    rows, lanes = sizes(tile.buf)
    with b.loop("r", rows) as r:
        b.store(to.buf, _row(to, r, steps[0]), load(source.buf, _row(source, r, steps[1]), lanes), lanes)


def _zero(b: Builder, t: Expr) -> None:
    assert isinstance(t, Ref)
    rows, lanes = sizes(t.buf)
    with b.loop("r", rows) as r:
        b.store(t.buf, _row(t, r), 0, lanes)


def _dot(b: Builder, sums: Expr, x: Expr, y: Expr) -> None:
    assert isinstance(sums, Ref) and isinstance(x, Ref) and isinstance(y, Ref)
    (rows, lanes), (steps, _), of = sizes(sums.buf), sizes(y.buf), 32 // y.buf.dtype.bits
    with b.loop("r", rows) as r, b.loop("q", steps) as q:
        acc = load(sums.buf, _row(sums, r), lanes)
        *tile, row, column = _row(x, r)
        left = load(x.buf, (*tile, row, column + q * of), of)
        right = load(y.buf, _row(y, q), of * lanes)
        whole = sums.buf.dtype is i32
        total = call("dot4", acc, left, right) if whole else acc + call("dot2", left, right)
        b.store(sums.buf, _row(sums, r), total, lanes)


_MEANINGS: dict[str, Callable[..., None]] = {
    "tile_zero": _zero,
    "tile_load": lambda b, t, x, step: _move(b, t, x, t, (1, step)),
    "tile_dot": _dot,
    "tile_store": lambda b, y, t, step: _move(b, y, t, t, (step, 1)),
}
EFFECTS = frozenset(_MEANINGS)
