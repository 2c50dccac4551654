"""Scatters in shares of the result: each share sees the updates in their order and applies those of its own elements,
so no two shares write one element.

`by_axis` cuts an axis of the result that is an axis of the updates: a batch, or columns. `by_rows` cuts the elements
that data names into ranges; a share lists its updates in a block of them, without branches, and then applies these:

    for p in parallel(parts):
        for k in range(chunk): if p*chunk + k < rows: y[p*chunk + k, ..] = initial
        for block in range(blocks):
            for k in range(size): rows[k] = row of update block*size + k
            n[0] = 0
            for q in range(size):
                mine[n[0]] = rows[q] and q
                n[0] = n[0] + (p*chunk <= rows[q] < p*chunk + chunk)
            for q in range(n[0]): y[row of mine[q], ..] = combine(y[row of mine[q], ..], value of mine[q])

`by_threads` gives a GPU's threads a place each, and each walks all updates of its place. In `row_segments` a block's
threads sort the updates of its rows together.

The loop over shares is parallel without a proof: the condition says that rows differ. The interpreter finds races.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from dnnc.ir.dtype import i64
from dnnc.ir.expr import (
    E,
    Expr,
    Load,
    const,
    free,
    maximum,
    minimum,
    select,
    substitute,
    unwrap,
    value,
    walk,
)
from dnnc.ir.loops.stmt import Block, Buffer, Builder
from dnnc.ir.types import product
from dnnc.passes.lower.scatter import Scattered

LINE = 64  # bytes of a cache line
MOST_LINES = 16  # of a row and of an update that are fetched ahead
MOST_FOUND = 8  # updates whose rows a thread finds at once
AHEAD = 4096  # bytes of updates that are fetched ahead


@dataclass(frozen=True)
class Places:
    """The axes of a scatter by their part in a walk of its updates.

    `rows`: axes of the result that tell, together, which row an update goes to; `walked`: axes of the updates that are
        walked; `columns`: the other
    axes of the result, with their axes of the updates.
    """

    scattered: Scattered
    rows: tuple[int, ...]
    walked: tuple[int, ...]
    columns: tuple[tuple[int, int], ...]

    @staticmethod
    def of(s: Scattered) -> Places:
        read = {v for k in s.named for v in free(s.index[k])}
        columns = tuple((k, u) for k, u in s.whole.items() if s.over[u] not in read)
        rows = tuple(k for k in range(len(s.axes)) if k not in dict(columns))
        inner = [u for _, u in columns]
        return Places(s, rows, tuple(u for u in range(len(s.over)) if u not in inner), columns)

    @property
    def count(self) -> Expr:
        """Rows of the result."""
        return const(product([unwrap(self.scattered.out.shape[k]) for k in self.rows]))

    @property
    def updates(self) -> Expr:
        """Rows of updates."""
        return const(product([unwrap(self.scattered.extents[u]) for u in self.walked]))

    @property
    def width(self) -> Expr:
        """Elements of a row of the result."""
        return const(product([unwrap(self.scattered.out.shape[k]) for k, _ in self.columns]))

    @property
    def vector(self) -> bool:
        """Do neighbours in memory get updates that are neighbours?"""
        last = (len(self.scattered.axes) - 1, len(self.scattered.over) - 1)
        return bool(self.scattered.axes) and last in self.columns

    def row(self, u: Sequence[Expr]) -> Expr:
        """The number of the row that an update goes to."""
        at = self.scattered.at(u)
        return flattened([at[k] for k in self.rows], [self.scattered.out.shape[k] for k in self.rows])

    def place(self, row: Expr, at: Sequence[Expr]) -> list[Expr]:
        """The index of an element of a row; `at` has the indices along the columns."""
        inner = dict(zip((k for k, _ in self.columns), at))
        outer = dict(zip(self.rows, unflattened(row, [self.scattered.out.shape[k] for k in self.rows])))
        return [{**inner, **outer}[k] for k in range(len(self.scattered.axes))]

    def update(self, number: Expr, at: Sequence[Expr]) -> list[Expr]:
        """The index of an element of an update of the walk."""
        inner = dict(zip((u for _, u in self.columns), at))
        outer = dict(zip(self.walked, unflattened(number, [self.scattered.extents[u] for u in self.walked])))
        return [{**inner, **outer}[u] for u in range(len(self.scattered.over))]


def flattened(idx: Sequence[Expr], shape: Sequence[Expr]) -> Expr:
    r: Expr = const(0)
    for i, n in zip(idx, shape):
        r = r * n + i
    return r


def unflattened(i: Expr, shape: Sequence[Expr]) -> list[Expr]:
    """The index of element `i` of an array: that along the first axis needs no remainder."""
    out: list[Expr] = []
    inner: Expr = const(1)
    for k, n in reversed(list(enumerate(shape))):
        out.insert(0, i // inner if k == 0 else i // inner % n)
        inner = inner * n
    return out


def within(i: E, n: E) -> Expr:
    """An index that is in range, in a form in which that can be proved."""
    return minimum(maximum(const(i), const(0)), const(n) - 1)


def by_axis(s: Scattered, axis: int, parts: Expr | int, outer: str = "p", kind: str = "range") -> Block:
    """A share has `ceil(n / parts)` places along a result axis of the updates; loop `outer` counts shares."""
    b = Builder()
    n, u = s.out.shape[axis], s.whole[axis]
    chunk = (n + parts - 1) // parts
    with b.loop(outer, parts, kind) as p:
        if s.starts:
            _nest(b, "i", s.out.shape[: len(s.axes)], lambda at: s.start(b, at), axis, p * chunk, chunk)
        _nest(b, "u", s.extents, lambda at: s.update(b, at, [b.let("at", i) for i in s.at(at)]), u, p * chunk, chunk)
    return b.block()


def _nest(
    b: Builder,
    name: str,
    shape: Sequence[Expr],
    body: Callable[[list[Expr]], None],
    axis: int,
    first: Expr,
    chunk: Expr,
) -> None:
    """Loops over an array, along one axis over `chunk` places from `first` on, as far as there are some."""
    at: list[Expr] = []
    with ExitStack() as scopes:
        for k, d in enumerate(shape):
            alone = k == axis and value(chunk) == 1
            v = const(0) if alone else scopes.enter_context(b.loop(f"{name}{k}", chunk if k == axis else d))
            at.append(first + v if k == axis else v)
        scopes.enter_context(b.when(at[axis] < shape[axis]))
        body(at)


def by_rows(s: Scattered, parts: int, size: int, prefetch: bool, outer: str = "p") -> Block:
    """A share has `ceil(rows / parts)` rows and lists updates by `size`. `prefetch`: fetch ahead."""
    b, places = Builder(), Places.of(s)
    rows, count = places.count, places.updates
    chunk = (rows + (parts - 1)) // parts
    with b.loop(outer, parts) as p:
        first = p * chunk
        if s.starts:
            with b.loop("w", chunk) as k, b.when(first + k < rows):
                _columns(
                    b,
                    "i",
                    [s.out.shape[a] for a, _ in places.columns],
                    lambda at: s.start(b, places.place(first + k, at)),
                )
        at, mine = (b.alloc(name, i64, size, space="local") for name in ("rows", "mine"))
        n = b.alloc("n", i64, 1)
        with ExitStack() as scopes:
            for d in (count, rows, *(s.extents[u] for u in places.walked), *(s.out.shape[k] for k in places.rows)):
                scopes.enter_context(b.when(const(0) < d))
            block = scopes.enter_context(b.loop("block", (count + (size - 1)) // size))
            last = minimum(size, count - block * size)
            with b.loop("k", last) as q:
                b.store(at, (q,), places.row(places.update(block * size + q, [s.over[u] for _, u in places.columns])))
            b.store(n, (0,), const(0))
            with b.loop("q", last) as q:
                ahead = b.let("ahead", at[q] - first)
                b.store(mine, (n[0] % size,), ahead * size + q)
                b.store(n, (0,), n[0] + select(const(0) <= ahead, select(ahead < chunk, const(1), const(0)), const(0)))
            with b.loop("q", n[0]) as q:
                _ahead(b, places, mine, n[0], q, first, block * size, prefetch)
                row, number = _listed(b, places, mine, q, first, block * size)
                sizes = [s.extents[u] for _, u in places.columns]
                _columns(b, "u", sizes, lambda at: s.update(b, places.update(number, at), places.place(row, at)))
    return b.block()


def _columns(b: Builder, name: str, sizes: Sequence[Expr], body: Callable[[list[Expr]], None]) -> None:
    with ExitStack() as scopes:
        body([scopes.enter_context(b.loop(f"{name}{k}", d)) for k, d in enumerate(sizes)])


def _listed(b: Builder, places: Places, mine: Buffer, q: Expr, first: Expr, start: Expr) -> tuple[Expr, Expr]:
    """The row, and the number of the update, of an entry of a share's list."""
    size = mine.shape[0]
    entry = b.let("entry", mine[within(q, size)])
    return b.let("row", within(entry // size + first, places.count)), b.let(
        "number", within(entry % size + start, places.updates)
    )


def _ahead(
    b: Builder, places: Places, mine: Buffer, n: Expr, q: Expr, first: Expr, start: Expr, prefetch: bool
) -> None:
    """Fetch the row and the update's operands a few updates ahead, which hardware would not predict."""
    s = places.scattered
    width, per_line = value(places.width), LINE // s.out.dtype.bytes
    if not prefetch or width is None or not places.vector:
        return
    steps = max(AHEAD // (width * s.out.dtype.bytes), 2)
    row, number = _listed(b, places, mine, minimum(q + steps, n - 1), first, start)
    tops = [value(s.out.shape[k]) or 1 for k, _ in places.columns]
    for line in range(min(-(-width // per_line), MOST_LINES)):
        at = [const(x) for x in _numbers(line * per_line, tops)]
        fetched = [(s.out, tuple(places.place(row, at)))]
        env: dict[Expr, Expr] = dict(zip(s.over, places.update(number, at)))
        inner = {s.over[u] for _, u in places.columns}
        fetched += [(x.buf, x.idx) for x in walk(s.value) if isinstance(x, Load) and not inner.isdisjoint(free(x))]
        for buf, idx in fetched[:1] + [(buf, tuple(substitute(i, env) for i in idx)) for buf, idx in fetched[1:]]:
            b.do("prefetch", buf.ref(*idx))


def _numbers(flat: int, shape: Sequence[int]) -> list[int]:
    return [int(value(x) or 0) for x in unflattened(const(flat), [const(d) for d in shape])]


def by_threads(s: Scattered, shares: int, threads: int) -> Block:
    """A thread for each place along the axes that the updates have too, and each of `shares` ranges of the elements
    that data names along the others.

    It walks the updates of its place. Threads that are neighbours have places that are neighbours. All sizes are known.
    """
    b = Builder()
    named, whole = s.named, sorted(s.whole)
    walked = [u for u in range(len(s.over)) if u not in s.whole.values()]
    shape = s.out.shape
    places, rows = (const(product([unwrap(shape[k]) for k in axes])) for axes in (whole, named))
    chunk = (rows + (shares - 1)) // shares
    count = value(places * shares)
    if not count:
        return ()
    width = min(threads, count)
    with b.loop("b", -(-count // width), "block.x") as block, b.loop("t", width, "thread.x") as t:
        number = block * width + t
        with b.when(number < count):
            at = dict(zip(whole, unflattened(number % places if shares > 1 else number, [shape[k] for k in whole])))
            first = b.let("first", number // places * chunk) if shares > 1 else const(0)
            if s.starts:
                with b.loop("k", chunk) as k, b.when(first + k < rows):
                    there = dict(zip(named, unflattened(first + k, [shape[a] for a in named])))
                    s.start(b, [{**at, **there}[a] for a in range(len(s.axes))])
            fits = [at[k] < s.extents[u] for k, u in s.whole.items()]
            mine = {u: at[k] for k, u in s.whole.items()}
            few = len(walked) == 1 and shares > 1 and 1 < (value(s.extents[walked[0]]) or 0) <= MOST_FOUND

            def row_of(place: Sequence[Expr]) -> Expr:
                return flattened([place[k] for k in named], [shape[k] for k in named])

            with ExitStack() as scopes:
                for cond in fits:
                    scopes.enter_context(b.when(cond))
                if few:  # all are asked for before any is waited for
                    found = b.alloc("rows", i64, s.extents[walked[0]])
                    with b.loop("q", s.extents[walked[0]], "unroll") as q:
                        b.store(found, (q,), row_of(s.at([{**mine, walked[0]: q}[k] for k in range(len(s.over))])))
                kind = "unroll" if few else "range"
                mine.update((u, scopes.enter_context(b.loop(f"u{u}", s.extents[u], kind))) for u in walked)
                u = [mine[k] for k in range(len(s.over))]
                if few:
                    row = b.let("row", found[mine[walked[0]]])
                    sizes = [shape[k] for k in named]
                    there = dict(zip(named, map(within, unflattened(row, sizes), sizes)))
                    place = [{**at, **there}[k] for k in range(len(s.axes))]
                else:
                    place = [b.let("at", i) for i in s.at(u)]
                    row = b.let("row", row_of(place))
                if shares > 1:
                    scopes.enter_context(b.when(first <= row))
                    scopes.enter_context(b.when(row < first + chunk))
                s.update(b, u, place)
    return b.block()
