"""Contractions with one short side (a matrix times few vectors): the long operand is read once, at the rate of memory.

Where the long operand lies along the sum, the lanes of a warp take vectors of it; `per` elements of the long side share what is read of the
short operand, `parts` warps divide the sum. Where it lies along its side, a lane takes a vector of columns and a share of the
sum. Either way shuffles and then shared memory bring the shares together, and one thread finishes each element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import mma
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.backends.cuda.templates.nest import Contraction, Operand, contraction_of
from dnnc.backends.cuda.templates.staging import readable, vector_of
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, const, minimum, substitute
from dnnc.ir.operator.stmt import Buffer, Builder, Kernel, call
from dnnc.passes.schedule.problem import Knobs, Problem

SHORT = 8  # elements of the short side at most: each has its own sums
HALVES = 4  # the same of 16-bit floats: of more, products and conversions take longer than reading, and tensor cores do better
IN_FLIGHT = 8  # vectors of the long operand that a thread asks for before it waits
WARPS = 16  # of an SM, that keep enough loads in flight


def _sides(c: Contraction) -> tuple[Operand, Operand]:
    """The long operand and the short one."""
    return (c.a, c.b) if c.rows.size > c.cols.size else (c.b, c.a)


def _lanes(c: Contraction) -> tuple[str, int]:
    """Along which direction the long operand is read, and in vectors of how many elements."""
    long, _ = _sides(c)
    others = (c.batch, c.rows, c.cols, c.red)
    along = "side" if long.in_order(long.axis, others) and not long.in_order(c.red, others) else "sum"
    axis, other = (long.axis, c.red) if along == "side" else (c.red, long.axis)
    lanes = 16 // max([x.buf.dtype.bytes for x in long.loads], default=4)
    while lanes > 1 and not readable(long.value, axis, other, lanes):
        lanes //= 2
    return along, lanes


def applies(c: Contraction) -> bool:
    long, short = _sides(c)
    return short.axis.size <= SHORT and not (long.conds or short.conds) and c.red.size >= 32


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    c = contraction_of(problem)
    if c is None or not applies(c):
        return []
    long, short = _sides(c)
    if short.axis.size > HALVES and target.major >= 8 and mma.half_contraction(problem) is not None:
        return []
    along, lanes = _lanes(c)
    outputs, enough = c.batch.size * long.axis.size, target.sms * WARPS
    if along == "sum":
        vectors = -(-c.red.size // lanes)
        found: list[Knobs] = []
        for per in (2, 1, 4) if outputs >= 4 * enough and short.axis.size <= 4 else (1, 2):
            parts = next((p for p in (1, 2, 4, 8) if outputs // per * p >= enough or vectors <= 32 * p), 8)
            found.append((("per", per), ("parts", parts), ("threads", max(128, 32 * parts))))
        return found
    sizes = [w for w in (8, 4, 16, 32) if w * lanes <= max(long.axis.size, lanes * 4)]
    sizes.sort(key=lambda w: (-(-long.axis.size // (w * lanes)) * c.batch.size < 0.9 * target.sms, abs(w - 8)))
    return [(("wide", w), ("threads", t)) for w in sizes[:2] for t in ((512, 256) if c.red.size >= 1024 else (256, 128)) if t // w <= c.red.size * 2]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    c = contraction_of(problem)
    if c is None or not applies(c):
        raise ScheduleError("the nest is no contraction with a short side")
    numbers = {k: int(v) for k, v in knobs.items()}
    long, _ = _sides(c)
    early = target.major >= 9 and all(x.buf.name in problem.constants for x in long.loads)
    return (_AlongSum if "per" in numbers else _AlongSide)(c, numbers, early).build()


class _Gemv:
    """What both kernels share: where things are, and how a finished element is stored.

    `early`: the long operand is constant, so its first vectors are asked for while the kernel before this one still runs."""

    def __init__(self, c: Contraction, knobs: Mapping[str, int], early: bool) -> None:
        self.c, self.threads, self.early = c, knobs["threads"], early
        self.long, self.short = _sides(c)
        self.lanes = _lanes(c)[1]
        self.n = self.short.axis.size
        self.batch: dict[Expr, Expr] = {}

    def at(self, side: dict[Expr, Expr], k: dict[Expr, Expr]) -> dict[Expr, Expr]:
        return {**self.batch, **side, **k}

    def begin(self, b: Builder, read: Callable[[Expr], None]) -> None:
        """Read the first vectors of the long operand, ahead of the kernel before where they are constant."""
        if not self.early:
            return read(const(0))
        b.do("pdl_launch")
        read(const(0))
        b.do("pdl_wait")

    def update(self, acc: Expr, long: Expr, short: Expr) -> Expr:
        return self.c.update(acc, long, short) if self.long is self.c.a else self.c.update(acc, short, long)

    def finish(self, b: Builder, long: Expr, short: Expr, tile: Buffer, at: tuple[Expr, ...]) -> None:
        row, col = (long, short) if self.long is self.c.a else (short, long)
        with b.when(row < self.c.rows.size):
            store_row(b, self.c, self.batch, row, col, tile, at, 1)

    def zero(self, b: Builder, acc: Buffer, rows: int, columns: int) -> None:
        with b.loop("i", rows, "unroll") as i, b.loop("j", columns, "unroll") as j:
            b.store(acc, (i, j), const(0, self.c.dtype))

    def fold(self, b: Builder, acc: Buffer, rows: int, columns: int, masks: list[int]) -> None:
        """Add up what the lanes hold whose numbers differ in these bits."""
        for mask in masks:
            with b.loop("i", rows, "unroll") as i, b.loop("j", columns, "unroll") as j:
                b.store(acc, (i, j), acc[i, j] + call("shfl_xor", acc[i, j], const(mask)))


class _AlongSum(_Gemv):
    def __init__(self, c: Contraction, knobs: Mapping[str, int], early: bool) -> None:
        super().__init__(c, knobs, early)
        self.per, self.parts = knobs["per"], knobs["parts"]
        self.teams = self.threads // 32 // self.parts  # groups of `parts` warps
        if self.teams < 1 or self.teams * self.parts * 32 != self.threads:
            raise ScheduleError(f"{self.threads} threads are no whole number of groups of {self.parts} warps")
        self.vectors = c.red.size // self.lanes
        turns = -(-self.vectors // (32 * self.parts))
        self.unroll = max(1, min(turns, IN_FLIGHT // self.per))
        self.steps = -(-turns // self.unroll)

    def build(self) -> Kernel:
        c, b = self.c, Builder()
        blocks = -(-self.long.axis.size // (self.per * self.teams))
        with b.loop("block", c.batch.size * blocks, "block.x") as block:
            self.batch = c.batch.named(b, block // blocks)
            part = b.alloc("part", c.dtype, self.teams, self.parts, self.per * self.n, space="shared")
            with b.loop("w", self.teams * self.parts, "warp") as w, b.loop("l", 32, "lane") as lane:
                self.team, self.part = w // self.parts, w % self.parts
                self.first = b.let("first", (block % blocks * self.teams + self.team) * self.per)
                self.body(b, lane, part)
        return c.kernel.with_body(b.block())

    def body(self, b: Builder, lane: Expr, part: Buffer) -> None:
        c = self.c
        acc = b.alloc("sum", c.dtype, self.per, self.n)
        self.zero(b, acc, self.per, self.n)
        vl = b.alloc("long", c.dtype, self.unroll, self.per, self.lanes)
        vs = b.alloc("short", c.dtype, self.n, self.lanes)

        def read(step: Expr) -> None:
            with b.loop("u", self.unroll, "unroll") as u, b.loop("i", self.per, "unroll") as i:
                self.read_long(b, vl, u, i, self.place(step, u, lane))

        self.begin(b, read)
        with b.loop("step", self.steps) as step:
            with b.loop("u", self.unroll, "unroll") as u:
                self.read_short(b, vs, self.place(step, u, lane))
                with b.loop("i", self.per, "unroll") as i, b.loop("s", self.n, "unroll") as s, b.loop("j", self.lanes, "unroll") as j:
                    b.store(acc, (i, s), self.update(acc[i, s], vl[u, i, j], vs[s, j]))
            if self.steps > 1:
                with b.when(step < self.steps - 1):
                    read(step + 1)
        self.fold(b, acc, self.per, self.n, [16, 8, 4, 2, 1])
        with b.loop("i", self.per, "unroll") as i, b.loop("s", self.n, "unroll") as s, b.when(lane.eq(0)):
            b.store(part, (self.team, self.part, i * self.n + s), acc[i, s])
        b.do("barrier")
        self.combine(b, lane, part)

    def place(self, step: Expr, u: Expr, lane: Expr) -> Expr:
        return ((step * self.unroll + u) * self.parts + self.part) * 32 + lane

    def whole(self, k: Expr) -> Expr:
        return k < self.vectors

    def stretch(self, side: dict[Expr, Expr], k: Expr) -> Callable[[Expr], dict[Expr, Expr]]:
        """The variables of a lane of vector k of the sum."""
        inside = self.c.red.inside(k, self.lanes, self.long.value, self.short.value)
        return lambda j: self.at(side, self.c.red.at(inside, self.lanes, j))

    def read_long(self, b: Builder, vl: Buffer, u: Expr, i: Expr, k: Expr) -> None:
        row = minimum(self.first + i, self.long.axis.size - 1)
        if self.steps * self.unroll * self.parts * 32 != self.vectors:
            b.store(vl, (u, i, 0), const(0, vl.dtype), self.lanes)
        with b.when(self.whole(k)):
            at = self.long.axis.at(row)
            b.store(vl, (u, i, 0), vector_of(self.long.value, self.stretch(at, k), self.lanes), self.lanes)

    def read_short(self, b: Builder, vs: Buffer, k: Expr) -> None:
        """The same stretch of the sum of the short operand, in vectors where it has them."""
        wide = readable(self.short.value, self.c.red, self.short.axis, self.lanes)
        with b.loop("s", self.n, "unroll") as s:
            at = self.short.axis.at(s)
            if self.steps * self.unroll * self.parts * 32 != self.vectors:
                b.store(vs, (s, 0), const(0, vs.dtype), self.lanes)
            with b.when(self.whole(k)):
                if wide:
                    b.store(vs, (s, 0), vector_of(self.short.value, self.stretch(at, k), self.lanes), self.lanes)
                else:
                    with b.loop("j", self.lanes, "unroll") as j:
                        b.store(vs, (s, j), substitute(self.short.value, self.stretch(at, k)(j)))

    def combine(self, b: Builder, lane: Expr, part: Buffer) -> None:
        """One lane for each element of the team's first warp."""
        count = self.per * self.n
        total = b.alloc("total", self.c.dtype, 1)
        with b.when((self.part < 1) & (lane < count)):
            b.store(total, (0,), const(0, self.c.dtype))
            with b.loop("p", self.parts, "unroll") as p:
                b.store(total, (0,), total[0] + part[self.team, p, lane])
            long = self.first + lane // self.n
            with b.when(long < self.long.axis.size):
                self.finish(b, long, lane % self.n, total, (const(0),))


class _AlongSide(_Gemv):
    def __init__(self, c: Contraction, knobs: Mapping[str, int], early: bool) -> None:
        super().__init__(c, knobs, early)
        self.wide = knobs["wide"]  # vectors of a block
        if self.wide > 32 or 32 % self.wide or self.threads % 32:
            raise ScheduleError(f"{self.wide} vectors do not divide a warp")
        self.slices = self.threads // self.wide
        turns = -(-c.red.size // self.slices)
        self.unroll = min(turns, IN_FLIGHT)
        self.steps = -(-turns // self.unroll)

    def build(self) -> Kernel:
        c, b = self.c, Builder()
        width = self.wide * self.lanes
        blocks = -(-self.long.axis.size // width)
        with b.loop("block", c.batch.size * blocks, "block.x") as block:
            self.batch = c.batch.named(b, block // blocks)
            self.first = b.let("first", block % blocks) * self.wide
            part = b.alloc("part", c.dtype, self.threads // 32, self.n, width, space="shared")
            with b.loop("w", self.threads // 32, "warp") as w, b.loop("l", 32, "lane") as lane:
                self.body(b, w, lane, part)
        return c.kernel.with_body(b.block())

    def body(self, b: Builder, w: Expr, lane: Expr, part: Buffer) -> None:
        c, t = self.c, w * 32 + lane
        mine, share = lane % self.wide, t // self.wide
        acc = b.alloc("sum", c.dtype, self.n, self.lanes)
        self.zero(b, acc, self.n, self.lanes)
        vl = b.alloc("long", c.dtype, self.unroll, self.lanes)
        vs = b.alloc("short", c.dtype, self.unroll, self.n)
        side = b.let("side", minimum(self.first + mine, self.long.axis.size // self.lanes - 1))

        def place(step: Expr, u: Expr) -> Expr:
            return (step * self.unroll + u) * self.slices + share

        def read(step: Expr) -> None:
            with b.loop("u", self.unroll, "unroll") as u:
                self.read_long(b, vl, u, side, place(step, u))

        self.begin(b, read)
        with b.loop("step", self.steps) as step:
            with b.loop("u", self.unroll, "unroll") as u:
                self.read_short(b, vs, u, place(step, u))
            with b.loop("u", self.unroll, "unroll") as u, b.loop("s", self.n, "unroll") as s, b.loop("j", self.lanes, "unroll") as j:
                b.store(acc, (s, j), self.update(acc[s, j], vl[u, j], vs[u, s]))
            if self.steps > 1:
                with b.when(step < self.steps - 1):
                    read(step + 1)
        self.fold(b, acc, self.n, self.lanes, [m for m in (16, 8, 4, 2, 1) if m >= self.wide])
        with b.when(lane < self.wide), b.loop("s", self.n, "unroll") as s:
            b.store(part, (w, s, mine * self.lanes), acc.at(s, 0, lanes=self.lanes), self.lanes)
        b.do("barrier")
        self.combine(b, t, part)

    def read_long(self, b: Builder, vl: Buffer, u: Expr, side: Expr, k: Expr) -> None:
        with ExitStack() as guards:
            if self.steps * self.unroll * self.slices != self.c.red.size:
                b.store(vl, (u, 0), const(0, vl.dtype), self.lanes)
                guards.enter_context(b.when(k < self.c.red.size))
            at = self.c.red.at(self.c.red.inside(k, 1))
            b.store(vl, (u, 0), vector_of(self.long.value, lambda j: self.at(self.long.axis.at(side, self.lanes, j), at), self.lanes), self.lanes)

    def read_short(self, b: Builder, vs: Buffer, u: Expr, k: Expr) -> None:
        with ExitStack() as guards:
            if self.steps * self.unroll * self.slices != self.c.red.size:
                with b.loop("s", self.n, "unroll") as s:
                    b.store(vs, (u, s), const(0, vs.dtype))
                guards.enter_context(b.when(k < self.c.red.size))
            at = self.c.red.at(self.c.red.inside(k, 1))
            with b.loop("s", self.n, "unroll") as s:
                b.store(vs, (u, s), substitute(self.short.value, self.at(self.short.axis.at(s), at)))

    def combine(self, b: Builder, t: Expr, part: Buffer) -> None:
        """One thread for each element, in as many turns as that takes."""
        width = self.wide * self.lanes
        total = b.alloc("total", self.c.dtype, 1)
        with b.loop("turn", -(-self.n * width // self.threads)) as turn:
            at = turn * self.threads + t
            with b.when(at // width < self.n):
                b.store(total, (0,), const(0, self.c.dtype))
                with b.loop("p", self.threads // 32, "unroll") as p:
                    b.store(total, (0,), total[0] + part[p, at // width, at % width])
                long = self.first * self.lanes + at % width
                with b.when(long < self.long.axis.size):
                    self.finish(b, long, at // width, total, (const(0),))
