"""Images in vectors of pixels, as products of sparse weights read and write them; what makes results of their sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dnnc.ir.dtype import f32
from dnnc.ir.expr import Const, Expr, Load, Op, const, free, walk
from dnnc.ir.loops.stmt import Buffer
from dnnc.ir.types import TensorType
from dnnc.passes.lower.form import Axis, Contraction
from dnnc.passes.rewrites.orders import pixel_blocks


@dataclass(frozen=True)
class Grid:
    """Rows of images as vectors of pixels: `blocks` of each row, the last of which may have lanes past its `width`."""

    rows: int
    width: int
    blocks: int

    @property
    def vectors(self) -> int:
        return self.rows * self.blocks


def grid_of(t: TensorType, lanes: int) -> Grid | None:
    """The vectors of an image in blocks of pixels; None for others."""
    if not t.static or t.rank < 3 or t.encoding != pixel_blocks(t.rank, lanes):
        return None
    n, _, *rows, width = map(int, map(str, t.shape))
    return Grid(n * math.prod(rows), width, -(-width // lanes))


@dataclass(frozen=True)
class Finish:
    """What makes results of sums: steps of `sparse_rows`, and the elements that they read."""

    steps: tuple[tuple[str, float], ...]
    reads: tuple[tuple[Buffer, tuple[Expr, ...], int], ...]


def finish_of(form: Contraction, rows: Axis, pixels: Axis, grid: Grid | None, lanes: int) -> Finish | None:
    """The epilogue as steps of `sparse_rows`, where results lie as its sums do; None where it is more than that."""
    s, e = form.store, form.store.value
    if grid is None or form.more or len(rows.loops) != 1 or len(s.idx) < 2:
        return None
    row, lane = rows.loops[0], pixels.loops[-1]
    if s.idx[-2:] != (row, lane):
        return None
    if grid.width % lanes:  # lanes that do not exist are 0
        if not (isinstance(e, Op) and e.name == "select" and e.args[2] is const(0.0, f32)):
            return None
        if any(isinstance(x, Load) for x in walk(e.args[0])):
            return None
        e = e.args[1]
    steps: list[tuple[str, float]] = []
    reads: list[tuple[Buffer, tuple[Expr, ...], int]] = []
    while isinstance(e, Op) and e.name in ("fmax", "fmin", "+"):
        first, second = e.args
        if e.name != "+":
            if not isinstance(first, Const):
                return None
            steps.append((e.name[1:], float(first.value)))
            e = second
            continue
        if not isinstance(second, Load):
            return None
        if second.idx[-1:] == (row,) and not any(free(i) for i in second.idx[:-1]):
            steps.append(("bias", 0.0))
            reads.append((second.buf, second.idx, 1))
        elif second.idx == s.idx and second.buf.shape == s.buf.shape:
            steps.append(("add", 0.0))
            reads.append((second.buf, second.idx, lanes))
        else:
            return None
        e = first
    names = [n for n, _ in steps if n in ("bias", "add")]
    if e is not form.acc[0] or len(set(names)) != len(names):
        return None
    return Finish(tuple(reversed(steps)), tuple(reversed(reads)))
