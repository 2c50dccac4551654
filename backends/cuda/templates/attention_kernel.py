"""Attention tile by tile, after Dao, "FlashAttention-2", section 3: what the kernels of all types share.

    for block in block.x(batches * row tiles):
        for w in warp(slices * warps): for l in lane(32):          a warp has rows of its own; slices of warps divide the keys
            Q to shared memory, the first tiles of K and V on their way there
            for step: wait for its tile; start tile step + stages - 1
                scores = Q K^T                                       in registers
                peak = max(top, scores); scores = exp(scores - peak); mixed, sums *= exp(top - peak); top = peak
                mixed += scores V
            y = epilogue(mixed / sums)                               through shared memory, so that a warp stores whole rows

Scores of keys that do not exist are -inf. Where all scores so far are, 0 takes the place of their maximum, so that no inf - inf occurs that
the definition does not have; rows that end so have no weights, their sum is NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from dnnc.backends.cuda.templates.attention_nest import Attention
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.backends.cuda.templates.staging import Mover, Tile, readable, vector_of
from dnnc.ir.dtype import DType, f32
from dnnc.ir.expr import Const, Expr, Op, const, fma, free, load, maximum, minimum, select, walk
from dnnc.ir.operator.stmt import Buffer, Builder, Kernel, call

INF, NAN = float("inf"), float("nan")
CHUNK = 8  # columns that a lane stores


@dataclass(frozen=True)
class Shape:
    """A block's tile: `rows` over `warps`, `keys` of a step; `slices` groups of such warps, each with tiles of keys of its own."""

    rows: int
    warps: int
    keys: int
    stages: int = 2
    slices: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.slices


@dataclass(frozen=True)
class Grid:
    """How a warp's scores lie in the registers of its lanes: `stats` rows a lane, `turns` pieces of `lanes` neighbouring keys in each.

    at(row, turn) -> index of a piece; row(k) -> the warp's row; key(turn) -> the tile's key; `masks`: lanes that share a row differ in these bits.
    """

    stats: int
    turns: int
    lanes: int
    at: Callable[[Expr, Expr], tuple[Expr, ...]]
    row: Callable[[Expr], Expr]
    key: Callable[[Expr], Expr]
    masks: tuple[int, ...]


class Flash(ABC):
    """The kernel of one attention and one shape. Derived classes have the two products."""

    pad: int  # elements after each row of a tile in shared memory, so that neighbouring rows begin in different banks
    height: int  # rows whose results a warp stores at once

    def __init__(self, a: Attention, shape: Shape, dtype: DType, depth: int, cols: int) -> None:
        self.a, self.s, self.dtype = a.stored_as(dtype), shape, dtype
        self.depth, self.cols = depth, cols  # elements of a row of Q and K, and of V, as they lie in shared memory
        self.wm = shape.rows // shape.warps
        self.steps = -(-a.keys.size // (shape.keys * shape.slices))
        self.tiles = self.plan()

    # --- what is different ------------------------------------------------------------------------------------------------------

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

    @abstractmethod
    def decay(self, b: Builder, mixed: Buffer, by: Buffer) -> None:
        """Every row of mixed times its factor."""

    @abstractmethod
    def spill(self, b: Builder, mixed: Buffer, i: Expr) -> None:
        """Piece i of mixed, `height` rows, to the warp's part of `out`."""

    def power(self, x: Expr) -> Expr:
        """e^x"""
        return call("exp", x)

    # --- the kernel -------------------------------------------------------------------------------------------------------------

    def build(self) -> Kernel:
        a, s, b = self.a, self.s, Builder()
        tiles, warps = -(-a.rows.size // s.rows), s.warps * s.slices
        with b.loop("block", a.batch.size * tiles, "block.x") as block:
            self.batch = a.batch.named(b, block // tiles)
            self.origin = b.let("origin", block % tiles * s.rows)
            slots = (1, s.stages * s.slices, s.stages * s.slices)
            self.shared = tuple(t.shared(b, name, n, self.pad) for t, name, n in zip(self.tiles, ("qs", "ks", "vs"), slots))
            self.out = b.alloc("out", f32, warps, self.height, self.cols + 4, space="shared")
            self.ends = b.alloc("ends", f32, warps, 2, self.height, space="shared")
            self.more(b, warps)
            with b.loop("w", warps, "warp") as w, b.loop("l", 32, "lane") as lane:
                self.w, self.lane = w, lane
                self.body(b)
        return a.kernel.with_body(b.block())

    def more(self, b: Builder, warps: int) -> None:
        """Further shared memory."""

    def body(self, b: Builder) -> None:
        s = self.s
        self.warp, self.slice = self.w % s.warps, self.w // s.warps
        self.row = b.let("row", self.warp * self.wm)
        self.bring_queries(b)
        self.regs = [None if t.direct else b.alloc("next", self.dtype, t.turns, t.lanes) for t in self.tiles[1:]]
        ahead = s.stages - 1
        for p in range(ahead):
            self.fetch(b, const(p), const(p), p < self.steps)
            self.put(b, const(p), p < self.steps)
            b.do("cp_async_commit")
        b.do("cp_async_wait", ahead)
        b.do("barrier")
        mixed, scores = self.start(b)
        self.top, self.sums = (b.alloc(name, f32, self.grid().stats) for name in ("top", "sums"))
        with b.loop("r", self.grid().stats, "unroll") as r:
            b.store(self.top, (r,), const(-INF, f32))
            b.store(self.sums, (r,), const(0.0, f32))
        with b.loop("step", self.steps) as step:
            b.do("cp_async_wait", ahead - 1)
            b.do("barrier")
            self.step(b, step, mixed, scores)
        self.finish(b, mixed)

    def bring_queries(self, b: Builder) -> None:
        tile = self.tiles[0]
        regs = None if tile.direct else b.alloc("first", self.dtype, tile.turns, tile.lanes)
        mover = Mover(tile, self.shared[0], self.batch, self.origin, self.w * 32 + self.lane, regs)
        mover.fetch(b, const(0), const(0))
        mover.put(b, const(0))
        b.do("cp_async_commit")

    def step(self, b: Builder, step: Expr, mixed: Buffer, scores: Buffer) -> None:
        s = self.s
        ahead = step + (s.stages - 1)
        slot = b.let("slot", ahead % s.stages)
        with b.when(ahead < self.steps):
            self.fetch(b, ahead, slot)
        b.do("cp_async_commit")
        here = b.let("here", step % s.stages + self.slice * s.stages)
        self.multiply(b, here, scores)
        first = b.let("key", (step * s.slices + self.slice) * s.keys)
        self.softmax(b, scores, first, mixed)
        self.mix(b, here, scores, mixed)
        if any(r is not None for r in self.regs):
            with b.when(ahead < self.steps):
                self.put(b, slot)

    def movers(self, step: Expr) -> tuple[tuple[Mover, Expr], tuple[Mover, Expr]]:
        """Of the tiles of K and V of a step, and which tile of the sum they bring: keys are the side of K and the sum of V."""
        number = step * self.s.slices + self.slice
        t = self.warp * 32 + self.lane
        k = Mover(self.tiles[1], self.shared[1], self.batch, number * self.s.keys, t, self.regs[0])
        return (k, const(0)), (Mover(self.tiles[2], self.shared[2], self.batch, const(0), t, self.regs[1]), number)

    def fetch(self, b: Builder, step: Expr, slot: Expr, exists: bool = True) -> None:
        for m, number in self.movers(step) if exists else ():
            m.fetch(b, number, slot + self.slice * self.s.stages)

    def put(self, b: Builder, slot: Expr, exists: bool = True) -> None:
        for m, _ in self.movers(const(0)) if exists else ():
            m.put(b, slot + self.slice * self.s.stages)

    # --- the softmax ------------------------------------------------------------------------------------------------------------

    @property
    def factor(self) -> float | None:
        """The one constant, positive, by which products become scores, if that is all; then `top` and scores in registers are products."""
        return None

    def softmax(self, b: Builder, scores: Buffer, first: Expr, mixed: Buffer) -> None:
        """Scores become weights relative to the largest score so far; what was summed before is brought to the same scale."""
        g = self.grid()
        if self.factor is None:
            self.transform(b, scores, first)
        if self.a.keys.size % self.s.keys or self.steps * self.s.slices * self.s.keys != self.a.keys.size:
            self.cut(b, scores, first)
        peak, by = b.alloc("peak", f32, g.stats), b.alloc("by", f32, g.stats)
        with b.loop("r", g.stats, "unroll") as r:
            b.store(peak, (r,), self.top[r])
        with b.loop("j", g.turns, "unroll") as j, b.loop("r", g.stats, "unroll") as r, b.loop("c", g.lanes, "unroll") as c:
            b.store(peak, (r,), maximum(peak[r], scores[lane_of(g.at(r, j), c)]))
        with b.loop("r", g.stats, "unroll") as r:
            self.across(b, peak, r, maximum)
            safe = b.let("safe", select(peak[r].eq(-INF), const(0.0, f32), peak[r]))
            b.store(by, (r,), self.weight(self.top[r], safe))
            b.store(self.top, (r,), peak[r])
            b.store(self.sums, (r,), self.sums[r] * by[r])
            b.store(peak, (r,), safe)
        with b.loop("j", g.turns, "unroll") as j, b.loop("r", g.stats, "unroll") as r:
            at = g.at(r, j)
            b.store(scores, at, self.weight(scores.at(*at, lanes=g.lanes), peak[r]), g.lanes)
            with b.loop("c", g.lanes, "unroll") as c:
                b.store(self.sums, (r,), self.sums[r] + scores[lane_of(at, c)])
        self.decay(b, mixed, by)

    def across(self, b: Builder, stats: Buffer, r: Expr, f: Callable[[Expr, Expr], Expr]) -> None:
        """Join what the lanes hold that share a row."""
        for mask in self.grid().masks:
            b.store(stats, (r,), f(stats[r], call("shfl_xor", stats[r], const(mask))))

    def weight(self, x: Expr, top: Expr) -> Expr:
        return self.power(x - top)

    def transform(self, b: Builder, scores: Buffer, first: Expr) -> None:
        """Products become scores: scaled, masked."""
        g, a = self.grid(), self.a
        e = _fused(a.score, load(a.dots, (0,)))
        if e is load(a.dots, (0,)):
            return
        lanes = g.lanes if readable(e, a.keys, a.rows, g.lanes) else 1
        inner = {loop.var for loop in a.rows.loops} & free(e)
        with b.loop("r", g.stats, "unroll") as r:
            row = b.let("at", minimum(self.origin + self.row + g.row(r), a.rows.size - 1)) if inner else const(0)
            fixed = {**self.batch, **a.rows.at(row)}
            with b.loop("j", g.turns, "unroll") as j, b.loop("c", g.lanes // lanes, "unroll") as c:
                at = g.at(r, j)
                key = minimum((first + g.key(j) + c * lanes) // lanes, a.keys.size // lanes - 1)

                def lane(k: Expr) -> dict[Expr, Expr]:
                    return {**fixed, **a.keys.at(key, lanes, k), load(a.dots, (0,)): scores[lane_of(at, c * lanes + k)]}  # noqa: B023

                b.store(scores, lane_of(at, c * lanes), vector_of(e, lane, lanes), lanes)

    def cut(self, b: Builder, scores: Buffer, first: Expr) -> None:
        """Keys past the last one are never the largest and weigh nothing."""
        g, n = self.grid(), self.a.keys.size
        with b.when(n < first + self.s.keys):
            with b.loop("j", g.turns, "unroll") as j, b.loop("r", g.stats, "unroll") as r, b.loop("c", g.lanes, "unroll") as c:
                at = lane_of(g.at(r, j), c)
                b.store(scores, at, select(first + g.key(j) + c < n, scores[at], const(-INF, f32)))

    # --- the end ----------------------------------------------------------------------------------------------------------------

    def finish(self, b: Builder, mixed: Buffer) -> None:
        g, s = self.grid(), self.s
        with b.loop("r", g.stats, "unroll") as r:
            self.across(b, self.sums, r, lambda x, y: x + y)
        per = g.stats * self.height // self.wm  # of a lane, in one piece
        with b.loop("i", self.wm // self.height, "unroll") as i:
            self.spill(b, mixed, i)
            with b.loop("r", per, "unroll") as r, b.when(self.leads()):
                row = g.row(r)
                b.store(self.ends, (self.w, 0, row), self.top[i * per + r])
                b.store(self.ends, (self.w, 1, row), self.ending(self.top[i * per + r], self.sums[i * per + r]))
            if s.slices == 1:
                b.do("syncwarp")
                self.store(b, i)
                b.do("syncwarp")
        if s.slices > 1:
            b.do("barrier")
            self.combine(b)

    def leads(self) -> Expr:
        """Is this lane the one that speaks for its rows?"""
        lane = self.lane
        for mask in self.grid().masks:
            lane = lane - lane // mask % 2 * mask
        return self.lane.eq(lane)

    def ending(self, top: Expr, total: Expr) -> Expr:
        """What belongs to a row beside its largest score: one over the sum of its weights, or that sum where slices are still to be joined."""
        if self.s.slices > 1:
            return total
        return inverse_of(top, total)

    def store(self, b: Builder, i: Expr) -> None:
        """The warp's piece i from `out`."""
        chunks = -(-self.cols // CHUNK)
        with b.loop("p", -(-self.height * chunks // 32), "unroll") as p:
            r, q = (p * 32 + self.lane) // chunks, (p * 32 + self.lane) % chunks
            row = self.origin + self.row + i * self.height + r
            with b.when((r < self.height) & (row < self.a.rows.size)):
                env = {**self.batch, load(self.a.inverse, (0,)): self.ends[self.w, 1, r]}
                store_row(b, self.a.mean, env, row, q * CHUNK, self.out, (self.w, r, q * CHUNK), CHUNK)

    def combine(self, b: Builder) -> None:
        """The slices' rows, each relative to its own largest score, to rows of the result: by all threads of the block, a chunk at a time."""
        s, a = self.s, self.a
        chunks = -(-self.cols // CHUNK)
        piece, total, best = b.alloc("piece", f32, CHUNK), b.alloc("total", f32, 1), b.alloc("best", f32, 1)
        t = self.w * 32 + self.lane
        with b.loop("p", -(-s.rows * chunks // s.threads)) as p:
            at = b.let("at", p * s.threads + t)
            row, q = b.let("row", at // chunks), b.let("q", at % chunks)
            with b.when((row < s.rows) & (self.origin + row < a.rows.size)):
                w, r = minimum(row // self.height, s.warps - 1), row % self.height
                b.store(best, (0,), self.ends[w, 0, r])
                with b.loop("z", s.slices - 1, "unroll") as z:
                    b.store(best, (0,), maximum(best[0], self.ends[w + (z + 1) * s.warps, 0, r]))
                safe = b.let("safe", select(best[0].eq(-INF), const(0.0, f32), best[0]))
                b.store(total, (0,), const(0.0, f32))
                b.store(piece, (0,), const(0.0, f32), CHUNK)
                with b.loop("z", s.slices, "unroll") as z:
                    by = b.let("by", self.weight(self.ends[w + z * s.warps, 0, r], safe))
                    b.store(total, (0,), fma(self.ends[w + z * s.warps, 1, r], by, total[0]))
                    b.store(piece, (0,), fma(self.out.at(w + z * s.warps, r, q * CHUNK, lanes=CHUNK), by, piece.at(0, lanes=CHUNK)), CHUNK)
                inverse = b.let("inverse", inverse_of(best[0], total[0]))
                store_row(b, a.mean, {**self.batch, load(a.inverse, (0,)): inverse}, self.origin + row, q * CHUNK, piece, (const(0),), CHUNK)


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

