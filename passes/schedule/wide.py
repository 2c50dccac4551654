"""Wide memory accesses of GPU threads: loads and stores of up to 16 bytes of neighbouring elements.

In comes what a thread does for runs of elements, `for c in range(n): for v in unroll(8): y[.., 8*c + v] = f(x[.., 8*c +
v])`; out comes

    x_w: f16[4, 8] @ register
    for k in unroll(4): x_w[k, 0:+8] = x[.., 8*c(k):+8]          all loads first: several are under way at once
    for k in unroll(4):
        y_w: f16[8] @ register
        for v in unroll(8): y_w[v] = f(x_w[k, v])
        y[.., 8*c(k):+8] = y_w[0:+8]

The arithmetic stays scalar, so anything may stand in it: guards, gathers, loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dnnc.ir.expr import Expr, Load, Var, const, free, load, substitute, terms, value, walk
from dnnc.ir.loops.stmt import (
    Alloc,
    Block,
    Buffer,
    For,
    If,
    Let,
    Stmt,
    Store,
    accesses,
    exprs,
    loop_var,
    stored,
    substitute_block,
)

PLACE = loop_var("k.", const(0), const(1 << 30))  # in a run's body: the number of the chunk among those of its thread
Tiles = Mapping[Expr, Buffer]


@dataclass(frozen=True)
class Run:
    """`for c in range(count): for v in unroll(width): body`; without v, body is for one element."""

    c: Var
    count: int  # an expression in `sweep`, whose sizes are known at run time only
    v: Var | None
    width: int
    body: Block

    def canonical(self, e: Expr) -> Expr:
        """An expression in terms that are equal for runs of equal sizes."""
        env: dict[Expr, Expr] = {self.c: loop_var("c.", const(0), const(self.count))}
        if self.v is not None:
            env[self.v] = loop_var("v.", const(0), const(self.width))
        return substitute(e, env)


def run_of(s: For) -> Run | None:
    """A loop as a run: the loop over the elements of a chunk, if it has one, is an `unroll` loop right inside."""
    n = value(s.extent)
    if n is None or s.kind != "range" or value(s.lo) != 0:
        return None
    if (
        len(s.body) == 1
        and isinstance(inner := s.body[0], For)
        and inner.kind == "unroll"
        and (width := value(inner.extent)) is not None
    ):
        return Run(s.var, n, inner.var, width, inner.body)
    return Run(s.var, n, None, 1, s.body)


def adjacent(buf: Buffer, idx: tuple[Expr, ...], v: Var, width: int) -> bool:
    """Are the elements for v = 0, 1, .., width - 1 neighbours, the first at a multiple of the width?"""
    ts, k = terms(buf.offset(idx))
    rest = [(t, c) for t, c in ts if t is not v]
    if dict(ts).get(v) != 1 or any(v in free(t) for t, _ in rest) or any(v in free(i) for i in idx[:-1]):
        return False
    return k % width == 0 and all(c % width == 0 for _, c in rest)


def loads_ahead(run: Run) -> list[Load]:
    """Return parameter loads that may precede the run: unconditional, at places that are invariant in it."""
    outside = {run.c} | ({run.v} if run.v is not None else set())
    inner = {s.var for s in run.body if isinstance(s, (Let, For))}
    written = stored(run.body)
    out: dict[Load, None] = {}
    for s in run.body:
        if isinstance(s, (If, For)):
            continue
        for e in exprs(s):
            for x in walk(e):
                if (
                    not isinstance(x, Load)
                    or x.buf.space != "global"
                    or x.lanes > 1
                    or not free(x) & outside
                    or free(x) & inner
                ):
                    continue
                if x.buf in written and not _read_first(run.body, x):
                    continue
                if run.v is None or adjacent(x.buf, x.idx, run.v, run.width):
                    out[x] = None
    return list(out)


def _read_first(b: Block, x: Load) -> bool:
    """Is a buffer that one statement writes read before that only, by several statements at the place that is
    written?
    """
    touching = [s for s in b if x.buf in _touched(s)]
    *before, last = touching
    if not before:
        return True
    same = isinstance(last, Store) and last.idx == x.idx and all(a.idx == x.idx for a in accesses(b) if a.buf is x.buf)
    return same and not any(x.buf in stored((s,)) for s in before)


def _touched(s: Stmt) -> set[Buffer]:
    return {x.buf for x in accesses((s,))} | stored((s,))


def load_chunks(run: Run, loads: Sequence[Load], tiles: Tiles, k: Expr, c: Expr) -> Block:
    """The loads of chunk c into place k of their tiles."""
    out: list[Stmt] = []
    for x in loads:
        at = tuple(substitute(i, _start(run, c)) for i in x.idx)
        out.append(Store(tiles[x], (k, const(0)), load(x.buf, at, run.width), run.width))
    return tuple(out)


def _start(run: Run, c: Expr) -> dict[Expr, Expr]:
    return {run.c: c, **({run.v: const(0)} if run.v is not None else {})}


def new_tiles(run: Run, loads: Sequence[Load], chunks: int, name: Callable[[str], str]) -> dict[Expr, Buffer]:
    """A register tile for the chunks of each load."""
    return {
        x: Buffer(name(x.buf.name + "_w"), x.buf.dtype, (const(chunks), const(run.width)), "register") for x in loads
    }


def compute_chunk(run: Run, tiles: Tiles, k: Expr, c: Expr, name: Callable[[str], str]) -> Block:
    """What is done for chunk c, its loads from place k of the tiles, its stores at once after all elements."""
    lane: Expr = const(0) if run.v is None else run.v
    env: dict[Expr, Expr] = {x: load(t, (k, lane)) for x, t in tiles.items()}
    env |= {run.c: c, PLACE: k}
    if run.v is None:
        return substitute_block(run.body, env)
    head: list[Stmt] = []
    tail: list[Stmt] = []
    body: list[Stmt] = []
    for s in run.body:
        if (
            isinstance(s, Store)
            and s.buf.space == "global"
            and s.lanes == 1
            and adjacent(s.buf, s.idx, run.v, run.width)
        ):
            out = Buffer(name(s.buf.name + "_w"), s.buf.dtype, (const(run.width),), "register")
            at = tuple(substitute(i, _start(run, c)) for i in s.idx)
            head.append(Alloc(out))
            tail.append(Store(s.buf, at, load(out, (0,), run.width), run.width))
            s = Store(out, (run.v,), s.value)
        body.append(s)
    loop = For(run.v, const(0), const(run.width), "unroll", substitute_block(tuple(body), env))
    return (*head, loop, *tail)
