"""How the threads of a block bring a tile of an operand from global into shared memory.

A tile is `extent` elements of the operand's side times `depth` elements of the sum. Its elements are moved in vectors
of `lanes` along the direction in which they lie in memory (`along` the side or the sum), neighbouring threads taking
neighbouring vectors. Indices past the end of the side repeat its last ones, which nobody stores; past the end of the
sum, and where a guard of the nest says so, a 0 is put. Vectors that need no conversion go straight to shared memory
(cp.async); others are fetched into registers first and put there later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from dnnc.backends.cuda.target import GpuTarget
from dnnc.ir.dtype import boolean
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import (
    E,
    Expr,
    Load,
    Op,
    const,
    free,
    maximum,
    minimum,
    rebuild,
    ref,
    select,
    substitute,
    terms,
    value,
    walk,
)
from dnnc.ir.loops.stmt import Buffer, Builder, loop_var
from dnnc.passes.lower.form import Axis, Contraction, Operand
from dnnc.passes.schedule.memory import Vectorizer

LATENCY = 700  # cycles from asking global memory to having
MOST_PADDED = 16  # turns: copies without a branch keep an address and a byte count each in registers
L2_RATE = 40  # bytes a cycle that an SM gets of the second-level cache


@dataclass(frozen=True)
class Tile:
    """`rows`: what a row of the tile in shared memory stands for, an element of the side or of the sum."""

    operand: Operand
    red: Axis
    extent: int
    depth: int
    lanes: int
    along: str  # "side" | "sum"
    rows: str  # "side" | "sum"
    threads: int
    span: int  # elements of the sum of a round of all groups of threads

    @property
    def vectors(self) -> int:
        return self.extent * self.depth // self.lanes

    @property
    def turns(self) -> int:
        """Vectors that a thread moves."""
        return -(-self.vectors // self.threads)

    @property
    def direct(self) -> bool:
        """Can the vectors be copied as they are, 4 to 16 bytes at a time?"""
        e = self.operand.value
        return (
            isinstance(e, Load)
            and self.lanes * e.dtype.bytes in (4, 8, 16)
            and (self.lanes == 1 or self.rows != self.along)
        )

    @property
    def padded(self) -> bool:
        """Do copies of no bytes put the zeros past the end of the sum, without a branch?"""
        whole = self.red.size % self.span == 0
        return self.direct and not whole and not self.operand.conds and self.turns <= MOST_PADDED

    def place(self, turn: Expr, t: Expr) -> tuple[Expr, Expr]:
        """The vector that thread t moves in a turn: (side, sum), of which the one that `along` names counts vectors."""
        at = t + turn * self.threads
        fast = (self.extent if self.along == "side" else self.depth) // self.lanes
        return (at % fast, at // fast) if self.along == "side" else (at // fast, at % fast)

    def shared(self, b: Builder, name: str, slots: int, pad: int) -> Buffer:
        """Shared memory for tiles, with `pad` elements after each row, so that rows start in different banks."""
        size = (self.extent, self.depth) if self.rows == "side" else (self.depth, self.extent)
        return b.alloc(name, self.operand.value.dtype, slots, size[0], size[1] + pad, space="shared")


def plan_tile(
    c: Contraction, operand: Operand, extent: int, depth: int, threads: int, slices: int, rows: str = ""
) -> Tile:
    """Return the widest vectors, up to 16 bytes, along the operand's direction; `rows` of the shared tile keep it."""
    others = (c.batch, c.rows, c.cols, c.red)
    along = "sum" if operand.dense_loads(c.red, others) > operand.dense_loads(operand.axis, others) else "side"
    axis, other = (operand.axis, c.red) if along == "side" else (c.red, operand.axis)
    size = extent if along == "side" else depth
    lanes = 16 // operand.value.dtype.bytes
    while lanes > 1 and (size % lanes or not _whole(operand, axis, other, lanes)):
        lanes //= 2
    return Tile(
        operand,
        c.red,
        extent,
        depth,
        lanes,
        along,
        rows or ("sum" if along == "side" else "side"),
        threads,
        depth * slices,
    )


def _whole(operand: Operand, axis: Axis, other: Axis, lanes: int) -> bool:
    """Can the operand be read in vectors, and does each guard hold for all lanes of one or for none?"""
    if not readable(operand.value, axis, other, lanes):
        return False
    q, j = loop_var("q.", const(0), const(axis.size // lanes)), loop_var("j.", const(0), const(lanes))
    return not any(j in free(substitute(x, axis.at(q, lanes, j))) for x in operand.conds)


def readable(e: Expr, axis: Axis, other: Axis, lanes: int) -> bool:
    """Do vectors along an axis lie in memory one element after the other, aligned and none of them cut?"""
    if axis.inner % lanes or axis.size == 1:
        return False
    q, o = loop_var("q.", const(0), const(axis.size // lanes)), loop_var("o.", const(0), const(other.size))
    start = {**axis.at(q, lanes), **other.at(o)}
    for x in walk(e):
        if isinstance(x, Load) and x.buf.space != "register" and axis.vars & free(x.buf.offset(x.idx)):
            ts, k = terms(substitute(x.buf.offset(x.idx), start))
            if k % lanes or any(coef % lanes for _, coef in ts):
                return False
    try:
        vector_of(e, lambda j: {**axis.at(q, lanes, j), **other.at(o)}, lanes)
    except ScheduleError:
        return False
    return True


def in_vectors(e: Expr, axis: Axis, lanes: int) -> Expr:
    """Return `e` in a form that has aligned vectors along `axis`. Where the bound of a piece is a multiple of `lanes`,
    `v < 32 ? x[min(v, 31)] : y[max(v - 32, 0)]` compares and clamps the number of a vector, not of an element.
    """
    if len(axis.loops) != 1 or lanes == 1 or axis.size % lanes:
        return e
    (v,) = axis.loops
    vector, lane = v // lanes, v % lanes

    def clamped(e: Expr, low: bool, bound: int) -> Expr:
        """Within the piece below `bound`, or from there on."""

        def go(x: Expr) -> Expr:
            if isinstance(x, Op) and x.name in ("min", "max"):
                if low and x is minimum(v, bound - 1):
                    return minimum(vector, bound // lanes - 1) * lanes + lane
                if not low and x is maximum(v - bound, 0):
                    return maximum(vector - bound // lanes, 0) * lanes + lane
                if not low and x is maximum(v, bound):
                    return maximum(vector, bound // lanes) * lanes + lane
            return rebuild(x, go)

        return go(e)

    def go(x: Expr) -> Expr:
        if isinstance(x, Op) and x.name == "select" and isinstance(c := x.args[0], Op) and c.name in ("<", "<="):
            small, large = c.args
            if small is v and (n := value(large)) is not None:
                bound, then, other = n + (c.name == "<="), x.args[1], x.args[2]
            elif large is v and (n := value(small)) is not None:
                bound, then, other = n + (c.name == "<"), x.args[2], x.args[1]
            else:
                return rebuild(x, go)
            if bound % lanes == 0 and 0 < bound < axis.size:
                parts = clamped(go(then), True, bound), clamped(go(other), False, bound)
                return select(vector < bound // lanes, *parts)
        return rebuild(x, go)

    return go(e)


def vector_of(e: Expr, at: Callable[[Expr], dict[Expr, Expr]], lanes: int) -> Expr:
    """Vector of an expression, `at(j)` giving lane j's variables. ScheduleError unless loads are unit stride."""
    if lanes == 1:
        return substitute(e, at(const(0)))
    j = loop_var("j.", const(0), const(lanes))
    made = Vectorizer(j, const(0), lanes).expr(substitute(e, at(j)))
    if any(isinstance(x, Load) and any(i.lanes > 1 for i in x.idx) for x in walk(made)):
        raise ScheduleError(f"{e!r} would gather")
    return made


@dataclass(frozen=True)
class Mover:
    """The code that moves tiles of one operand into `buf[slot]`, in shared memory.

    `batch`: the batch loops' variables; `origin`: the first index of the block's tile on the operand's side; `t`: the
        thread's number in
    its group; `regs`: where its share waits, if it is not copied directly.
    """

    tile: Tile
    buf: Buffer
    batch: dict[Expr, Expr]
    origin: Expr
    t: Expr
    regs: Buffer | None

    def fetch(self, b: Builder, step: Expr, slot: Expr) -> None:
        """Start moving tile number `step` of the sum."""
        tile = self.tile
        with b.loop("r", tile.turns, "unroll") as r, ExitStack() as guards:
            self.share(b, r, guards)
            at, cond = self.where(b, r, step)
            known = value(cond)
            if self.regs is None:
                e = tile.operand.value
                assert isinstance(e, Load)
                to, start = self.spot(slot, r), [substitute(i, at(const(0))) for i in e.idx]

                if known is None and tile.padded:
                    limit = select(cond, const(tile.lanes), const(0))
                    b.do("cp_async", self.buf.ref(*to, lanes=tile.lanes), ref(e.buf, start, tile.lanes), limit)
                    return

                def copy() -> None:
                    b.do("cp_async", self.buf.ref(*to, lanes=tile.lanes), ref(e.buf, start, tile.lanes))

                def nothing() -> None:
                    b.store(self.buf, to, const(0, e.dtype), tile.lanes)

                if known is None:
                    b.branch(cond, copy, nothing)
                else:
                    (copy if known else nothing)()
                return
            if not known:  # never, or not certain
                b.store(self.regs, (r, 0), const(0, self.regs.dtype), tile.lanes)
            guards.enter_context(b.when(cond))
            b.store(self.regs, (r, 0), vector_of(tile.operand.value, at, tile.lanes), tile.lanes)

    def share(self, b: Builder, r: Expr, guards: ExitStack) -> None:
        """The last turn may have nothing to move for some threads."""
        if self.tile.vectors % self.tile.threads:
            guards.enter_context(b.when(self.t + r * self.tile.threads < self.tile.vectors))

    def where(self, b: Builder, r: Expr, step: Expr) -> tuple[Callable[[Expr], dict[Expr, Expr]], Expr]:
        """The variables of a lane of this thread's vector, and what must hold for it to be read."""
        tile, n = self.tile, self.tile.lanes
        side, k = tile.place(r, self.t)
        wide, deep = (n, 1) if tile.along == "side" else (1, n)
        axis = tile.operand.axis
        side = b.let("at", minimum(side + self.origin // wide, axis.size // wide - 1))
        k = b.let("q", k + step * (tile.depth // deep))

        whole = tile.red.size % tile.span == 0
        step_in = k if whole else tile.red.inside(k, deep, tile.operand.value, *tile.operand.conds)
        if tile.padded:
            step_in = minimum(k, tile.red.size // deep - 1)

        def at(j: Expr) -> dict[Expr, Expr]:
            here = (
                (axis.at(side, n, j), tile.red.at(step_in))
                if tile.along == "side"
                else (axis.at(side), tile.red.at(step_in, n, j))
            )
            return {**self.batch, **here[0], **here[1]}

        cond = const(whole, boolean) | (k < tile.red.size // deep)
        for c in tile.operand.conds:
            cond = cond & substitute(c, at(const(0)))
        return at, cond

    def spot(self, slot: Expr, r: Expr, lane: E = 0) -> tuple[Expr, Expr, Expr]:
        """Where a lane of the thread's vector goes."""
        side, k = self.tile.place(r, self.t)
        n = self.tile.lanes
        side, k = (side * n + lane, k) if self.tile.along == "side" else (side, k * n + lane)
        return (slot, side, k) if self.tile.rows == "side" else (slot, k, side)

    def put(self, b: Builder, slot: Expr) -> None:
        """What was fetched into registers to its place."""
        tile, n = self.tile, self.tile.lanes
        if self.regs is None:
            return
        with b.loop("r", tile.turns, "unroll") as r, ExitStack() as guards:
            self.share(b, r, guards)
            if tile.rows != tile.along:
                b.store(self.buf, self.spot(slot, r), self.regs.at(r, 0, lanes=n), n)
            else:
                with b.loop("j", n, "unroll") as j:
                    b.store(self.buf, self.spot(slot, r, j), self.regs.at(r, j))


@dataclass(frozen=True)
class Ring:
    """The tiles of both operands, step by step: `stages` of them are in shared memory or on their way there.

    The sum's steps are dealt out: block `part` of a cluster takes `steps` rounds in a row, in each of which each of
    `slices` groups of threads (this is group `slice`) takes one. A block begins with round `first`: blocks that read
    the same rows at the same time would wait for the same banks of the second-level cache.
    """

    movers: Sequence[Mover]
    stages: int
    steps: int
    part: Expr
    slice: Expr
    slices: int
    first: Expr = field(default_factory=lambda: const(0))

    def run(self, b: Builder, products: Callable[[Expr], None]) -> None:
        """Call `products(slot)` for each step, when the step's tiles are there."""
        ahead = self.stages - 1
        copies, waits = (any((m.regs is None) == direct for m in self.movers) for direct in (True, False))
        with b.loop("p", min(ahead, self.steps)) as p:
            self.fetch(b, p, p)
            self.put(b, p)
            if copies:
                b.do("cp_async_commit")
        for _ in range(ahead - self.steps if copies else 0):
            b.do("cp_async_commit")
        with b.loop("step", self.steps) as step:
            if copies:
                b.do("cp_async_wait", ahead - 1)
            b.do("barrier")
            slot = b.let("slot", (step + ahead) % self.stages)
            with b.when(step + ahead < self.steps):
                self.fetch(b, step + ahead, slot)
            if copies:
                b.do("cp_async_commit")
            products(b.let("here", step % self.stages + self.slice * self.stages))
            if waits:
                with b.when(step + ahead < self.steps):
                    self.put(b, slot)

    def fetch(self, b: Builder, step: Expr, slot: Expr) -> None:
        if self.steps > 1 and value(self.first) != 0:
            step = b.let("round", (step + self.first) % self.steps)
        for m in self.movers:
            m.fetch(b, (self.part * self.steps + step) * self.slices + self.slice, slot + self.slice * self.stages)

    def put(self, b: Builder, slot: Expr) -> None:
        for m in self.movers:
            m.put(b, slot + self.slice * self.stages)


def resident(target: GpuTarget, warps: int, registers: int, shared: int) -> int:
    """Blocks of so many warps, registers a thread and bytes of shared memory that an SM runs at once."""
    limits = (
        target.registers // (registers * warps * 32),
        target.shared_per_sm // (shared + 1024),
        target.threads_per_sm // (32 * warps),
    )
    return max(1, min(*limits, target.blocks_per_sm))
