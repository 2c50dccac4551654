"""Schedule primitives for GPUs: loops become blocks and threads, rows are computed by teams of threads.

A GPU has no vector arithmetic, so nothing becomes a vector but memory accesses: `wide` loads and stores move up to 16
bytes of a thread's neighbouring elements at once through register tiles, and the arithmetic between them stays scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Var, const, free, substitute, value
from dnnc.ir.loops.stmt import (
    Alloc,
    Block,
    Buffer,
    For,
    If,
    Store,
    accesses,
    exprs,
    loop_var,
    stored,
    substitute_block,
    walk_stmts,
)
from dnnc.passes.schedule.buffers import swap_buffers
from dnnc.passes.schedule.hoist_invariants import numbers_and_results
from dnnc.passes.schedule.parallel_legality import obstacle
from dnnc.passes.schedule.state import edit, make_loop
from dnnc.passes.schedule.wide import Run, compute_chunk, load_chunks, loads_ahead, new_tiles, run_of


def solo(b: Block) -> Block:
    """The whole kernel in one thread: `s`  ->  `for b in block.x(1): for t in thread.x(1): s`"""
    return (make_loop("b", 1, "block.x", lambda _: (make_loop("t", 1, "thread.x", lambda _: b),)),)


def wrap(b: Block, name: str) -> Block:
    """`s`  ->  `for name in range(1): s`: a kernel of one row."""
    return (make_loop(name, 1, "range", lambda _: b),)


def spread(b: Block, name: str, threads: int) -> Block:
    """`for i in range(n): s` -> `for b in block.x(ceil(n / T)): for t in thread.x(T): if T*b + t < n: s`."""

    def go(s: For) -> Block:
        n = _count(s)
        _check_apart(s)
        width = min(threads, n)
        return _grid(
            -(-n // width),
            width,
            lambda i, t: _when([i * width + t < n], substitute_block(s.body, {s.var: s.lo + i * width + t})),
        )

    return edit(b, name, go)


def stream(b: Block, name: str, threads: int, chunks: int) -> Block:
    """`for c in range(n): {for v in unroll(8): s}` -> a grid; each thread has `chunks` chunks, `threads` apart.

    A thread does all loads of its chunks before it computes, 16 bytes at a time (see wide). Neighbouring threads have
    neighbouring chunks. A last chunk that is cut off by a guard `if 8*c + v < m` around s is done element by element.
    """

    def go(s: For) -> Block:
        run = run_of(s)
        if run is None:
            raise ScheduleError(f"{name} does not count the chunks of a run")
        _check_apart(s)
        width = min(threads, run.count)
        return _grid(-(-run.count // (width * chunks)), width, lambda i, t: _chunks(run, i, t, width, chunks))

    return edit(b, name, go)


def sweep(b: Block, name: str, blocks: int, threads: int, chunks: int) -> Block:
    """`for c in range(n): {for v in unroll(8): s}`  ->  a grid of so many blocks, whatever n is, whose threads go over
    the chunks in strides:

    `for b in block.x(B): for t in thread.x(T): for r in range(ceil(n / B*T*chunks)): s of the chunks (B*r + b)*T*chunks
        + t, ...`

    For sizes that are known at run time only. Loads and stores are those of `stream`.
    """

    def go(s: For) -> Block:
        inner = s.body[0] if len(s.body) == 1 else None
        lane = inner if isinstance(inner, For) and inner.kind == "unroll" and value(inner.extent) is not None else None
        if s.kind != "range" or value(s.lo) != 0:
            raise ScheduleError(f"{name} does not count the chunks of a run")
        _check_apart(s)
        run = (
            Run(s.var, 0, None, 1, s.body)
            if lane is None
            else Run(s.var, 0, lane.var, int(value(lane.extent) or 1), lane.body)
        )
        run = replace(run, count=s.extent)  # type: ignore[arg-type]
        step = blocks * threads * chunks

        def strides(i: Expr, t: Expr) -> Block:
            return (
                make_loop(
                    "r",
                    (s.extent + (step - 1)) // step,
                    "range",
                    lambda r: _chunks(run, r * blocks + i, t, threads, chunks),
                ),
            )

        return _grid(blocks, threads, strides)

    return edit(b, name, go)


def _chunks(run: Run, b: Expr, t: Expr, width: int, chunks: int) -> Block:
    names: dict[str, int] = {}

    def fresh(base: str) -> str:
        names[base] = names.get(base, -1) + 1
        return f"{base}_{names[base]}" if names[base] else base

    def each(emit: Callable[[Expr, Expr], Block]) -> Block:
        q = loop_var(fresh("q"), const(0), const(chunks))
        k: Expr = q if chunks > 1 else const(0)
        c = b * (width * chunks) + k * width + t
        body = _when([c < run.count], emit(k, c))
        return (For(q, const(0), const(chunks), "unroll", body),) if chunks > 1 else body

    whole, limit = _unguarded(run)
    loads = loads_ahead(whole)
    tiles = new_tiles(whole, loads, chunks, fresh)

    def full(c: Expr) -> list[Expr]:
        return [] if limit is None else [substitute(limit, {run.c: c})]

    def compute(k: Expr, c: Expr) -> Block:
        wide = compute_chunk(whole, tiles, k, c, fresh)
        if limit is None:
            return wide
        return (If(full(c)[0], wide, compute_chunk(run, {}, k, c, fresh)),)

    head = tuple(Alloc(x) for x in tiles.values())
    return (
        *head,
        *(each(lambda k, c: _when(full(c), load_chunks(whole, loads, tiles, k, c))) if loads else ()),
        *each(compute),
    )


def _unguarded(run: Run) -> tuple[Run, Expr | None]:
    """A run whose body is `if 8*c + v < m: s` -> the run of s, and the condition under which a chunk is whole."""
    if (
        run.v is None
        or len(run.body) != 1
        or not isinstance(s := run.body[0], If)
        or s.other
        or run.v not in free(s.cond)
    ):
        return run, None
    last = substitute(s.cond, {run.v: const(run.width - 1)})
    return replace(run, body=s.then), last


def share_rows(b: Block) -> Block:
    """Thread-private memory of a kernel with one thread a block moves to shared memory, which is nearer."""
    local = [s.buf for s in walk_stmts(b) if isinstance(s, Alloc) and s.buf.space == "local"]
    return swap_buffers(b, {x: Buffer(x.name, x.dtype, x.shape, "shared") for x in local})


def sink(b: Block, *names: str) -> Block:
    """`for i: for j: {s; y[i, j] = e}` -> `for i: {s; for j: y[i, j] = e}` where only the last stores read j."""
    nest: list[For] = []
    body = b
    while len(body) == 1 and isinstance(body[0], For):
        nest.append(body[0])
        body = body[0].body
    before, last = numbers_and_results(body)
    by = {s.var.name: s for s in nest}
    if not set(names) <= by.keys() or not isinstance(last[-1], Store):
        raise ScheduleError(f"{', '.join(names)} are not loops of a perfect nest that ends in a store")
    read = {x.buf for x in accesses(before)} & stored(last)
    if read:
        raise ScheduleError(f"{', '.join(sorted(b.name for b in read))} is read before it is written")
    inner = [s for s in nest if s.var.name in names]
    if any(s.var in _free(before) for s in inner):
        raise ScheduleError(f"what comes before the store depends on {', '.join(names)}")
    out = last
    for s in reversed(inner):
        out = (For(s.var, s.lo, s.hi, s.kind, out),)
    out = (*before, *out)
    for s in reversed([s for s in nest if s not in inner]):
        out = (For(s.var, s.lo, s.hi, s.kind, out),)
    return out


def _free(b: Block) -> frozenset[Var]:
    return frozenset().union(*(free(e) for s in walk_stmts(b) for e in exprs(s)))


def _grid(blocks: int, threads: int, body: object) -> Block:
    def inner(i: Expr) -> Block:
        return (make_loop("t", threads, "thread.x", lambda t: body(i, t)),)  # type: ignore[operator]

    return (make_loop("b", blocks, "block.x", inner),)


def _count(s: For) -> int:
    n = value(s.extent)
    if n is None or n < 1:
        raise ScheduleError(f"{s.var.name} has {s.extent!r} iterations; a grid needs a constant number of at least one")
    return n


def _check_apart(s: For) -> None:
    why = obstacle(s) if value(s.extent) != 1 else ""
    if why:
        raise ScheduleError(f"{s.var.name} cannot be spread over threads: {why}")


def _when(conds: Sequence[Expr], body: Block) -> Block:
    """The body under those conditions that are not known to hold."""
    for c in reversed(conds):
        if value(c) != 1:
            body = (If(c, body),)
    return body
