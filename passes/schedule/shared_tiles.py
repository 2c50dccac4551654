"""Schedule primitive `transpose_tiles`: loads along one loop, stores along another, by shared memory.

    for r in range(R): for c in range(C): y[.., r, c] = f(x[.., c, r])          neighbours of x are far apart in y

    for b in block.x(tiles):
        x_t: f32[32, 33] @ shared                     rows start in different banks
        for t in thread.x(256):
            for q in unroll(4): x_t[t // 32 + 8*q, t % 32] = x[.., c0 + t // 32 + 8*q, r0 + t % 32]
            barrier()
            for q in unroll(4): y[.., r0 + t // 32 + 8*q, c0 + t % 32] = f(x_t[t % 32, t // 32 + 8*q])

Neighbouring threads load neighbours along r and store neighbours along c. Small types go in pairs or fours, so that
each thread moves four bytes, in tiles that are larger by as much. Loops around the two become blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Var, const, free, load, substitute, terms, value, walk
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, Eval, For, If, Stmt, Store, loop_var
from dnnc.passes.schedule.parallel_legality import obstacle
from dnnc.passes.schedule.wide import adjacent

LANES = 32  # threads along the side of a tile
WORD = 4  # bytes that a thread moves at a time


def transpose_tiles(b: Block, row: str, column: str, threads: int = 256) -> Block:
    """Tile two loops of a perfect nest with one store: `column` is the store's axis, `row` the loads'."""
    nest: list[For] = []
    body = b
    while len(body) == 1 and isinstance(body[0], For):
        nest.append(body[0])
        body = body[0].body
    by = {s.var.name: s for s in nest}
    if (
        row not in by
        or column not in by
        or len(body) != 1
        or not isinstance(st := body[0], Store)
        or st.buf.space != "global"
    ):
        raise ScheduleError(f"{row} and {column} are not loops of a perfect nest around one store")
    for s in nest:
        if not value(s.extent) or value(s.lo) != 0:
            raise ScheduleError(
                f"{s.var.name} has {s.extent!r} iterations; a grid needs a constant number of at least one"
            )
        if value(s.extent) != 1 and (why := obstacle(s)):
            raise ScheduleError(f"{s.var.name} cannot be spread over blocks: {why}")
    return _Tiles(nest, by[row].var, by[column].var, st, threads).block()


@dataclass(frozen=True)
class _At:
    """Return the thread's loop variables in step q; `fast` is the first of those that it moves at once."""

    env: dict[Expr, Expr]
    fast: Expr
    slow: Expr


class _Tiles:
    def __init__(self, nest: list[For], row: Var, column: Var, st: Store, threads: int) -> None:
        self.nest, self.row, self.column, self.st, self.threads = nest, row, column, st, threads
        self.crossing = [
            x for x in walk(st.value) if isinstance(x, Load) and x.buf is not st.buf and _crosses(x, row, column)
        ]
        if not self.crossing:
            raise ScheduleError(f"no load runs along {row.name} and jumps along {column.name}")
        if len({x.buf for x in self.crossing}) < len(self.crossing):
            raise ScheduleError("a buffer is read at two places")
        self.width = self.moved_at_once()
        self.side = LANES * self.width
        self.t = loop_var("t", const(0), const(threads))
        self.start, self.blocks = self.tiles_of_blocks()

    def moved_at_once(self) -> int:
        width: int = WORD // min(WORD, self.st.buf.dtype.bytes, *(x.buf.dtype.bytes for x in self.crossing))
        extents = [s.extent for s in self.nest if s.var in (self.row, self.column)]
        while width > 1:
            loads = all(adjacent(x.buf, x.idx, self.row, width) for x in self.crossing)
            if (
                loads
                and adjacent(self.st.buf, self.st.idx, self.column, width)
                and all(value(n % width) == 0 for n in extents)
            ):
                break
            width //= 2
        return width

    def tiles_of_blocks(self) -> tuple[dict[Expr, Expr], int]:
        """The first element of a block's tile along each loop, and the number of blocks."""
        total, sizes = 1, []
        for s in self.nest:
            side = self.side if s.var in (self.row, self.column) else 1
            sizes.append((s.var, -(-(value(s.extent) or 0) // side), side))
            total *= sizes[-1][1]
        left: Expr = loop_var("b", const(0), const(total))
        start: dict[Expr, Expr] = {}
        for v, n, side in reversed(sizes):
            start[v] = left % n * side
            left = left // n
        return start, total

    def block(self) -> Block:
        tiles = {x: self.tile(x.buf) for x in self.crossing}
        inner = (*self.steps("q", self.row, self.column, lambda at: self.fill(at, tiles)), Eval("barrier", ()),
                 *self.steps("q_1", self.column, self.row, lambda at: self.drain(at, tiles)))  # fmt: skip
        threads = For(self.t, const(0), const(self.threads), "thread.x", inner)
        b = loop_var("b", const(0), const(self.blocks))
        return (For(b, const(0), const(self.blocks), "block.x", (*map(Alloc, tiles.values()), threads)),)

    def tile(self, buf: Buffer) -> Buffer:
        """A row longer by four bytes, or by an element that is larger, starts in another bank."""
        shape = (const(self.side), const(self.side + max(WORD // buf.dtype.bytes, 1)))
        return Buffer(f"{buf.name}_t", buf.dtype, shape, "shared")

    def steps(self, name: str, fast: Var, slow: Var, emit: Callable[[_At], Block]) -> Block:
        count = self.side * LANES // self.threads
        q = loop_var(name, const(0), const(count))
        a, c = self.t % LANES * self.width, self.t // LANES + q * (self.threads // LANES)
        env = {**self.start, fast: self.start[fast] + a, slow: self.start[slow] + c}
        inside = [
            env[s.var] + (self.width - 1 if s.var is fast else 0) < s.extent
            for s in self.nest
            if s.var in (self.row, self.column)
        ]
        body: Block = emit(_At(env, a, c))
        for cond in reversed(inside):
            if value(cond) != 1:
                body = (If(cond, body),)
        return (For(q, const(0), const(count), "unroll", body),)

    def fill(self, at: _At, tiles: dict[Load, Buffer]) -> Block:
        n = self.width
        return tuple(
            Store(tile, (at.slow, at.fast), load(x.buf, [substitute(i, at.env) for i in x.idx], n), n)
            for x, tile in tiles.items()
        )

    def drain(self, at: _At, tiles: dict[Load, Buffer]) -> Block:
        st, n = self.st, self.width
        idx = tuple(substitute(i, at.env) for i in st.idx)
        v = loop_var("v", const(0), const(n))
        lane: Expr = v if n > 1 else const(0)
        found: dict[Expr, Expr] = {x: tile[at.fast + lane, at.slow] for x, tile in tiles.items()}
        e = substitute(substitute(st.value, found), {**at.env, self.column: at.env[self.column] + lane})
        if n == 1:
            return (Store(st.buf, idx, e),)
        out = Buffer(f"{st.buf.name}_w", st.buf.dtype, (const(n),), "register")
        each: Stmt = For(v, const(0), const(n), "unroll", (Store(out, (v,), e),))
        return (Alloc(out), each, Store(st.buf, idx, load(out, (0,), n), n))


def _crosses(x: Load, row: Var, column: Var) -> bool:
    """Does a load step along the rows and jump along the columns?"""
    if (
        x.lanes > 1
        or x.limit is not None
        or x.buf.space != "global"
        or any(isinstance(y, Load) for i in x.idx for y in walk(i))
    ):
        return False
    at = x.buf.offset(x.idx)
    ts, _ = terms(at)
    steps = dict(ts).get(row) == 1 and not any(row in free(t) for t, _ in ts if t is not row)
    return steps and column in free(at) and dict(ts).get(column) != 1
