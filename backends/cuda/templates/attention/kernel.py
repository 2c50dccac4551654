"""Attention tile by tile, after Dao, "FlashAttention-2", section 3: what the kernels of all types share.

    for block in block.x(batches * row tiles):
        for w in warp(slices * warps): for l in lane(32):          a warp has rows of its own; slices of warps divide
                                                                   the keys
            Q to shared memory, the first tiles of K and V on their way there
            for step: wait for its tile; start tile step + stages - 1
                scores = Q K^T                                       in registers
                peak = max(top, scores); scores = exp(scores - peak); mixed, sums *= exp(top - peak); top = peak
                mixed += scores V
            y = epilogue(mixed / sums)                               from registers; shares of a row meet in shared
                                                                     memory before

Scores of keys that do not exist are -inf. Where all scores so far are, 0 takes the place of their maximum, so that no
inf - inf occurs that the definition does not have; rows that end so have no weights, their sum is NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from dnnc.backends.cuda.templates.attention.nest import Attention
from dnnc.backends.cuda.templates.contraction.staging import Mover, Tile, readable, vector_of
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.ir.dtype import DType, f32
from dnnc.ir.expr import Const, Expr, Load, Op, const, fma, free, load, maximum, minimum, select, walk
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, call

INF, NAN = float("inf"), float("nan")
CHUNK = 8  # columns that a lane stores
MOST_MASKS = 32  # numbers of a lane that change the scores of a step


@dataclass(frozen=True)
class Shape:
    """A tile: `rows` over `warps`, `keys` of a step; `slices` of warps and `parts` of a cluster divide keys."""

    rows: int
    warps: int
    keys: int
    stages: int = 2
    slices: int = 1
    parts: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.slices

    @property
    def shares(self) -> int:
        """Warps that have the same rows: tiles of keys in a step."""
        return self.slices * self.parts


@dataclass(frozen=True)
class Grid:
    """A warp's scores in lane registers: `stats` rows a lane, `turns` pieces of `lanes` adjacent keys each.

    at(row, turn) -> index of a piece; row(k) -> the warp's row; key(turn) -> the tile's key; `masks`: lanes that share
    a row differ in these bits. Of the mean it is `wide` neighbouring columns in `pieces` pieces, col(piece) -> the
    first column, place(row, piece) -> index.
    """

    stats: int
    turns: int
    lanes: int
    at: Callable[[Expr, Expr], tuple[Expr, ...]]
    row: Callable[[Expr], Expr]
    key: Callable[[Expr], Expr]
    masks: tuple[int, ...]
    wide: int
    pieces: int
    col: Callable[[Expr], Expr]
    place: Callable[[Expr, Expr], tuple[Expr, ...]]


class Flash(ABC):
    """The kernel of one attention and one shape. Derived classes have the two products."""

    pad: int  # elements after each row of a tile in shared memory, so that neighbouring rows begin in different banks

    def __init__(self, a: Attention, shape: Shape, dtype: DType, depth: int, cols: int) -> None:
        self.a, self.s, self.dtype = a.with_whole_queries(dtype).stored_as(dtype), shape, dtype
        self.depth, self.cols = depth, cols  # elements of a row of Q and K, and of V, as they lie in shared memory
        self.wm = shape.rows // shape.warps
        self.steps = -(-a.keys.size // (shape.keys * shape.shares))
        self.tiles = self.plan()

    # --- what is different --------------------------------------------------------------------------------------------

    @abstractmethod
    def plan(self) -> tuple[Tile, Tile, Tile]:
        """How Q, K and V come into shared memory."""

    @abstractmethod
    def grid(self) -> Grid:
        """Where scores lie."""

    @abstractmethod
    def start(self, b: Builder) -> tuple[Buffer, Buffer]:
        """Accumulators of the mean, and memory of the scores' size; Q is in shared memory."""

    @abstractmethod
    def multiply(self, b: Builder, slot: Expr, scores: Buffer) -> None:
        """scores = Q K^T"""

    @abstractmethod
    def mix(self, b: Builder, slot: Expr, scores: Buffer, mixed: Buffer) -> None:
        """mixed += scores V"""

    # --- the kernel ---------------------------------------------------------------------------------------------------

    def build(self) -> Kernel:
        a, s, b = self.a, self.s, Builder()
        tiles = -(-a.rows.size // s.rows)
        with b.loop("block", a.batch.size * tiles, "block.x") as block, ExitStack() as cluster:
            self.part: Expr = cluster.enter_context(b.loop("part", s.parts, "cluster")) if s.parts > 1 else const(0)
            self.batch = a.batch.named(b, block // tiles)
            self.origin = b.let("origin", block % tiles * s.rows)
            self.allocate(b)
            with b.loop("w", s.warps * s.slices, "warp") as w, b.loop("l", 32, "lane") as lane:
                self.w, self.lane = w, lane
                self.body(b)
        return a.kernel.with_body(b.block())

    def allocate(self, b: Builder) -> None:
        """Shared memory: tiles, and where keys are divided the mean, largest score and sum of weights of each share."""
        s = self.s
        slots = (1, s.stages * s.slices, s.stages * s.slices)
        self.shared = tuple(t.shared(b, name, n, self.pad) for t, name, n in zip(self.tiles, ("qs", "ks", "vs"), slots))
        if s.shares > 1:
            self.out = b.alloc("out", f32, s.warps * s.slices, self.wm, self.cols + 4, space="shared")
            self.ends = b.alloc("ends", f32, s.warps * s.slices, self.wm, 4, space="shared")

    def body(self, b: Builder) -> None:
        s = self.s
        self.warp, self.slice = self.w % s.warps, self.w // s.warps
        self.row = b.let("row", self.warp * self.wm)
        computed = not self.tiles[0].direct
        queries = self.queries_mover(b)
        if not computed:  # else behind the copies of keys, which they would hold up
            queries.fetch(b, const(0), const(0))
        b.do("cp_async_commit")
        self.regs = [None if t.direct else b.alloc("next", self.dtype, t.turns, t.lanes) for t in self.tiles[1:]]
        ahead = s.stages - 1
        for p in range(ahead):
            self.fetch(b, const(p), const(p), p < self.steps)
            self.put(b, const(p), p < self.steps)
            b.do("cp_async_commit")
        if computed:
            queries.fetch(b, const(0), const(0))
        queries.put(b, const(0))
        b.do("cp_async_wait", ahead)
        b.do("barrier")
        mixed, scores = self.start(b)
        self.top, self.sums = (b.alloc(name, f32, self.grid().stats) for name in ("top", "sums"))
        with b.loop("r", self.grid().stats, "unroll") as r:
            b.store(self.top, (r,), const(-INF, f32))
            b.store(self.sums, (r,), const(0.0, f32))
        with b.loop("step", self.steps) as step:
            self.ask_for_masks(b, step)
            b.do("cp_async_wait", ahead - 1)
            b.do("barrier")
            self.step(b, step, mixed, scores)
        self.finish(b, mixed)

    def queries_mover(self, b: Builder) -> Mover:
        tile = self.tiles[0]
        regs = None if tile.direct else b.alloc("first", self.dtype, tile.turns, tile.lanes)
        return Mover(tile, self.shared[0], self.batch, self.origin, self.w * 32 + self.lane, regs)

    def step(self, b: Builder, step: Expr, mixed: Buffer, scores: Buffer) -> None:
        s = self.s
        ahead = step + (s.stages - 1)
        slot = b.let("slot", ahead % s.stages)
        with b.when(ahead < self.steps):
            self.fetch(
                b, b.let("next", minimum(ahead, self.steps - 1)), slot
            )  # whose bounds show that whole tiles need no guards
        b.do("cp_async_commit")
        here = b.let("here", step % s.stages + self.slice * s.stages)
        self.multiply(b, here, scores)
        self.softmax(b, scores, b.let("key", self.number(step) * s.keys), mixed)
        self.mix(b, here, scores, mixed)
        if any(r is not None for r in self.regs):
            with b.when(ahead < self.steps):
                self.put(b, slot)

    def number(self, step: Expr) -> Expr:
        """Which tile of keys this warp has in a step."""
        return (step * self.s.parts + self.part) * self.s.slices + self.slice

    def movers(self, step: Expr) -> tuple[tuple[Mover, Expr], tuple[Mover, Expr]]:
        """Tile K and V for a step and return their tiles of the sum: keys are the side of K and the sum of V."""
        number = self.number(step)
        t = self.warp * 32 + self.lane
        k = Mover(self.tiles[1], self.shared[1], self.batch, number * self.s.keys, t, self.regs[0])
        return (k, const(0)), (Mover(self.tiles[2], self.shared[2], self.batch, const(0), t, self.regs[1]), number)

    def fetch(self, b: Builder, step: Expr, slot: Expr, exists: bool = True) -> None:
        for m, number in self.movers(step) if exists else ():
            m.fetch(b, number, slot + self.slice * self.s.stages)

    def put(self, b: Builder, slot: Expr, exists: bool = True) -> None:
        for m, _ in self.movers(const(0)) if exists else ():
            m.put(b, slot + self.slice * self.s.stages)

    # --- the softmax --------------------------------------------------------------------------------------------------

    @property
    def factor(self) -> float | None:
        """Fold the one positive constant that makes products scores, if any; `top` and scores then are products."""
        return None

    def softmax(self, b: Builder, scores: Buffer, first: Expr, mixed: Buffer) -> None:
        """Turn scores into weights relative to the running maximum, and rescale what was summed before."""
        g = self.grid()
        if self.factor is None:
            self.transform(b, scores, first)
        if self.a.keys.size % self.s.keys or self.steps * self.s.shares * self.s.keys != self.a.keys.size:
            self.cut(b, scores, first)
        with b.loop("r", g.stats, "unroll") as r:
            peak = b.alloc("peak", f32, 1)
            b.store(peak, (0,), self.top[r])
            with b.loop("j", g.turns, "unroll") as j, b.loop("c", g.lanes, "unroll") as c:
                b.store(peak, (0,), maximum(peak[0], scores[lane_of(g.at(r, j), c)]))
            self.across(b, peak, const(0), maximum)
            safe = b.let("safe", select(peak[0].eq(-INF), const(0.0, f32), peak[0]))
            by = b.let("by", self.weight(self.top[r], safe))
            b.store(self.top, (r,), peak[0])
            b.store(self.sums, (r,), self.sums[r] * by)
            with b.loop("j", g.turns, "unroll") as j:
                at = g.at(r, j)
                b.store(scores, at, self.weight(scores.at(*at, lanes=g.lanes), safe), g.lanes)
                with b.loop("c", g.lanes, "unroll") as c:
                    b.store(self.sums, (r,), self.sums[r] + scores[lane_of(at, c)])
            with b.loop("j", g.pieces, "unroll") as j:
                b.store(mixed, g.place(r, j), mixed.at(*g.place(r, j), lanes=g.wide) * by, g.wide)

    def across(self, b: Builder, stats: Buffer, r: Expr, f: Callable[[Expr, Expr], Expr]) -> None:
        """Join what the lanes hold that share a row."""
        for mask in self.grid().masks:
            b.store(stats, (r,), f(stats[r], call("shfl_xor", stats[r], const(mask))))

    def weight(self, x: Expr, top: Expr) -> Expr:
        """e^(x - top) of scores."""
        return call("exp", x - top)

    def ask_for_masks(self, b: Builder, step: Expr) -> None:
        """What changes the scores of a step, the same for all rows, before the step's tiles are waited for."""
        g, a, s = self.grid(), self.a, self.s
        self.masks: dict[Load, Buffer] = {}
        if self.factor is not None or g.turns * g.lanes > MOST_MASKS:
            return
        for x in dict.fromkeys(x for x in walk(a.score) if isinstance(x, Load) and x.buf is not a.dots):
            if x.buf.space != "global" or a.rows.vars & free(x) or not a.keys.vars & free(x):
                continue
            lanes = g.lanes if readable(x, a.keys, a.rows, g.lanes) else 1
            self.masks[x] = held = b.alloc("mask", x.dtype, g.turns, g.lanes)
            with b.loop("j", g.turns, "unroll") as j, b.loop("c", g.lanes // lanes, "unroll") as c:
                key = self.number(step) * s.keys + g.key(j) + c * lanes
                key = minimum(key // lanes, a.keys.size // lanes - 1)
                made = vector_of(x, lambda k: {**self.batch, **a.keys.at(key, lanes, k)}, lanes)
                b.store(held, (j, c * lanes), made, lanes)

    def transform(self, b: Builder, scores: Buffer, first: Expr) -> None:
        """Products become scores: scaled, masked."""
        g, a = self.grid(), self.a
        e = _fused(a.score, load(a.dots, (0,)))
        if e is load(a.dots, (0,)):
            return
        lanes = g.lanes if readable(e, a.keys, a.rows, g.lanes) else 1
        inner = a.rows.vars & free(e)
        with b.loop("r", g.stats, "unroll") as r:
            row = b.let("at", minimum(self.origin + self.row + g.row(r), a.rows.size - 1)) if inner else const(0)
            fixed = {**self.batch, **a.rows.at(row)}
            with b.loop("j", g.turns, "unroll") as j, b.loop("c", g.lanes // lanes, "unroll") as c:
                at = g.at(r, j)
                key = minimum((first + g.key(j) + c * lanes) // lanes, a.keys.size // lanes - 1)

                def lane(k: Expr) -> dict[Expr, Expr]:
                    ahead: dict[Expr, Expr] = {x: held[j, c * lanes + k] for x, held in self.masks.items()}
                    dots = {load(a.dots, (0,)): scores[lane_of(at, c * lanes + k)]}
                    return {**ahead, **fixed, **a.keys.at(key, lanes, k), **dots}

                b.store(scores, lane_of(at, c * lanes), vector_of(e, lane, lanes), lanes)

    def cut(self, b: Builder, scores: Buffer, first: Expr) -> None:
        """Keys past the last one are never the largest and weigh nothing."""
        g, n = self.grid(), self.a.keys.size
        with b.when(n < first + self.s.keys):
            with (
                b.loop("j", g.turns, "unroll") as j,
                b.loop("r", g.stats, "unroll") as r,
                b.loop("c", g.lanes, "unroll") as c,
            ):
                at = lane_of(g.at(r, j), c)
                b.store(scores, at, select(first + g.key(j) + c < n, scores[at], const(-INF, f32)))

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self, b: Builder, mixed: Buffer) -> None:
        g, s = self.grid(), self.s
        with b.loop("r", g.stats, "unroll") as r:
            self.across(b, self.sums, r, lambda x, y: x + y)
        if s.shares == 1:
            self.store(b, mixed)
            return
        with b.loop("r", g.stats, "unroll") as r:
            with b.when(self.leads()):
                b.store(self.ends, (self.w, g.row(r), 0), self.top[r])
                b.store(self.ends, (self.w, g.row(r), 1), self.sums[r])
                b.store(self.ends, (self.w, g.row(r), 2), const(0.0, f32), 2)
            with b.loop("j", g.pieces, "unroll") as j:
                b.store(self.out, (self.w, g.row(r), g.col(j)), mixed.at(*g.place(r, j), lanes=g.wide), g.wide)
        b.do("barrier" if s.parts == 1 else "cluster_barrier")
        self.combine(b)

    def leads(self) -> Expr:
        """Is this lane the one that speaks for its rows?"""
        return (self.lane % (2 * self.grid().masks[-1])).eq(0)

    def store(self, b: Builder, mixed: Buffer) -> None:
        """From the registers that hold it."""
        g = self.grid()
        with b.loop("r", g.stats, "unroll") as r:
            row = b.let("at", self.origin + self.row + g.row(r))
            inverse = b.let("inverse", inverse_of(self.top[r], self.sums[r]))
            with b.when(row < self.a.rows.size), b.loop("j", g.pieces, "unroll") as j:
                env = {**self.batch, load(self.a.inverse, (0,)): inverse}
                store_row(b, self.a.mean, env, row, g.col(j), mixed, g.place(r, j), g.wide)

    def combine(self, b: Builder) -> None:
        """Join shares of rows, each relative to its own maximum, into results: by all threads, chunk by chunk. The
        order of sums does not depend on timing.
        """
        s = self.s
        chunks, threads = -(-self.cols // CHUNK), s.threads * s.parts
        turns = -(-s.rows * chunks // threads)
        t = self.w * 32 + self.lane + self.part * s.threads

        def store(p: Expr, row: Expr, q: Expr, held: Expr) -> None:
            batch = {**self.batch, load(self.a.inverse, (0,)): inverse[held]}
            store_row(b, self.a.mean, batch, self.origin + row, q * CHUNK, piece, (held, const(0)), CHUNK)

        def each(made: Callable[[Expr, Expr, Expr, Expr], None], kind: str, at_once: bool) -> None:
            with b.loop("p", turns, kind) as p:
                at = b.let("at", p * threads + t)
                row, q = b.let("row", at // chunks), b.let("q", at % chunks)
                with b.when((row < s.rows) & (self.origin + row < self.a.rows.size)):
                    made(p, row, q, p if at_once else const(0))
                    if not at_once:
                        store(p, row, q, const(0))

        kept = turns if s.parts > 1 else 1
        piece, inverse = b.alloc("piece", f32, kept, CHUNK), b.alloc("inverse", f32, kept)
        self.total, self.best = b.alloc("total", f32, 1), b.alloc("best", f32, 1)

        def join(p: Expr, row: Expr, q: Expr, held: Expr) -> None:
            self.join(b, row, q, held, piece, inverse)

        if s.parts == 1:
            each(join, "range", False)
            return
        each(join, "unroll", True)
        b.do("cluster_arrive")  # who has read all need not wait for what is stored
        each(store, "unroll", True)
        b.do("cluster_wait")  # nobody may end while another one still reads what it has

    def join(self, b: Builder, row: Expr, q: Expr, held: Expr, piece: Buffer, inverse: Buffer) -> None:
        """`piece[held]` and `inverse[held]` of chunk q of a row, of all its shares."""
        s, total, best = self.s, self.total, self.best
        w, r = minimum(row // self.wm, s.warps - 1), row % self.wm
        ends = b.alloc("theirs", f32, s.parts, 4)
        pieces = b.alloc("pieces", f32, s.parts, CHUNK)

        def ask(z: Expr, buf: Buffer, to: Buffer, first: Expr, count: int) -> None:
            """Ask for numbers of all parts before any is waited for."""
            with b.loop("part", s.parts, "unroll") as part, b.loop("h", count // 4, "unroll") as h:
                b.store(to, (part, h * 4), self.theirs(part, buf, w + z * s.warps, r, first + h * 4), 4)

        b.store(best, (0,), const(-INF, f32))
        with b.loop("z", s.slices, "unroll") as z:
            ask(z, self.ends, ends, const(0), 4)
            if s.slices == 1:
                ask(z, self.out, pieces, q * CHUNK, CHUNK)
            with b.loop("part", s.parts, "unroll") as part:
                b.store(best, (0,), maximum(best[0], ends[part, 0]))
        safe = b.let("safe", select(best[0].eq(-INF), const(0.0, f32), best[0]))
        b.store(total, (0,), const(0.0, f32))
        b.store(piece, (held, 0), const(0.0, f32), CHUNK)
        with b.loop("z", s.slices, "unroll") as z:
            if s.slices > 1:
                ask(z, self.ends, ends, const(0), 4)
                ask(z, self.out, pieces, q * CHUNK, CHUNK)
            with b.loop("part", s.parts, "unroll") as part:
                by = b.let("by", self.weight(ends[part, 0], safe))
                b.store(total, (0,), fma(ends[part, 1], by, total[0]))
                added = fma(pieces.at(part, 0, lanes=CHUNK), by, piece.at(held, 0, lanes=CHUNK))
                b.store(piece, (held, 0), added, CHUNK)
        b.store(inverse, (held,), inverse_of(best[0], total[0]))

    def theirs(self, part: Expr, buf: Buffer, w: Expr, r: Expr, at: Expr) -> Expr:
        """Four floats of a share."""
        return call("peer", buf.ref(w, r, at, lanes=4), part) if self.s.parts > 1 else buf.at(w, r, at, lanes=4)


def inverse_of(top: Expr, total: Expr) -> Expr:
    return select(top.eq(-INF), const(NAN, f32), const(1.0, f32) / total)


def lane_of(at: tuple[Expr, ...], c: Expr) -> tuple[Expr, ...]:
    return (*at[:-1], at[-1] + c)


def scale_of(score: Expr, dots: Expr) -> float | None:
    """The factor of `dots * factor`, if it is positive."""
    if score is dots:
        return 1.0
    if isinstance(score, Op) and score.name == "*" and score.args[0] is dots and isinstance(c := score.args[1], Const):
        return float(c.value) if c.value > 0 else None
    return None


def _fused(e: Expr, dots: Expr) -> Expr:
    """`dots * x + y` as one rounding."""
    if isinstance(e, Op) and e.name == "+":
        for x, y in (e.args, e.args[::-1]):
            if isinstance(x, Op) and x.name == "*" and any(z is dots for z in walk(x)):
                return fma(x.args[0], x.args[1], y)
    return e
