"""Contractions with one short side (a matrix times few vectors): the long operand is read once, at the rate of memory.

Where the long operand lies along the sum, the lanes of a warp take vectors of it (as many `lanes` as a short sum has
vectors; the others take other elements of the long side); `per` elements of the long side share what is read of the
short operand, `parts` warps divide the sum. Where it lies along its side, a lane takes a vector of columns and a share
of the sum. Either way shuffles and then shared memory bring the shares together, and one thread finishes each element.
What is constant is asked for before the kernel ahead of this one has ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import mma
from dnnc.backends.cuda.templates.contraction.staging import readable, vector_of
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.ir.dtype import i8, i32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, cast, const, minimum, substitute, walk
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, call
from dnnc.passes.lower.form import Contraction, Operand
from dnnc.passes.schedule.problem import Knobs, Problem, varied

SHORT = 8  # elements of the short side at most: each has its own sums
# the same of 16-bit floats: of more, products and conversions take longer than reading, and tensor cores do better
HALVES = 4
IN_FLIGHT = 8  # vectors of the long operand that a thread asks for before it waits
WARPS = 16  # of an SM, that keep enough loads in flight
THREADS = (32, 64, 128, 256, 512, 1024)
ORDER = ("parts", "lanes", "wide", "threads")
QUAD = 4  # bytes of a sum that one instruction adds up
SHALLOW = 8  # elements of the sum at least


def sides(c: Contraction) -> tuple[Operand, Operand]:
    """The long operand and the short one."""
    return (c.a, c.b) if c.rows.size > c.cols.size else (c.b, c.a)


def _lanes(c: Contraction) -> tuple[str, int]:
    """Along which direction the long operand is read, and in vectors of how many elements."""
    long, _ = sides(c)
    others = (c.batch, c.rows, c.cols, c.red)
    along = "side" if long.in_order(long.axis, others) and not long.in_order(c.red, others) else "sum"
    axis, other = (long.axis, c.red) if along == "side" else (c.red, long.axis)
    lanes = 16 // max([x.buf.dtype.bytes for x in long.loads], default=4)
    while lanes > 1 and not readable(long.value, axis, other, lanes):
        lanes //= 2
    return along, lanes


def applies(c: Contraction) -> bool:
    long, short = sides(c)
    return short.axis.size <= SHORT and not (long.conds or short.conds) and c.red.size >= SHALLOW


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    c = problem.contraction
    if c is None or not applies(c):
        return []
    if sides(c)[1].axis.size > HALVES and target.major >= 8 and mma.matrix_contraction(problem) is not None:
        return []
    return divisions(c, target)


def divisions(c: Contraction, target: GpuTarget) -> list[Knobs]:
    """Knobs that suit the sizes: vectors of the long operand and threads of a block."""
    long, short = sides(c)
    along, lanes = _lanes(c)
    outputs, enough = c.batch.size * long.axis.size, target.sms * WARPS
    if along == "sum":
        vectors = -(-c.red.size // lanes)
        found: list[Knobs] = []
        few = next((n for n in (2, 4, 8, 16) if vectors <= n), 32)
        if few < 32:
            return [(("per", 1), ("parts", 1), ("threads", t), ("lanes", few)) for t in (128, 64)]
        shared = (2, 1, 4) if lanes < 8 else (2, 1)  # of 16-bit floats, more would not fit into registers
        for per in shared if outputs >= 4 * enough and short.axis.size <= 4 else (1, 2):
            parts = next((p for p in (1, 2, 4, 8) if outputs // per * p >= enough or vectors <= 32 * p), 8)
            found.append((("per", per), ("parts", parts), ("threads", max(128, 32 * parts))))
        return found
    sizes = [
        w for w in ((8, 4, 16, 32) if c.red.size >= 32 else (16, 32)) if w * lanes <= max(long.axis.size, lanes * 4)
    ]
    sizes.sort(key=lambda w: (-(-long.axis.size // (w * lanes)) * c.batch.size < 0.9 * target.sms, abs(w - 8)))
    return [
        (("wide", w), ("threads", t))
        for w in sizes[:2]
        for t in ((512, 256) if c.red.size >= 1024 else (256, 128))
        if t // w <= c.red.size * (2 if c.red.size >= 32 else 1)
    ]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    c = problem.contraction
    return [] if c is None or not applies(c) else every_division(c, target)


def every_division(c: Contraction, target: GpuTarget) -> list[Knobs]:
    """Return work shares that fit registers and shared memory, blocks of 64 to 512 threads first."""
    long, short = sides(c)
    along, lanes = _lanes(c)
    n, found = short.axis.size, []
    blocks = sorted((t for t in THREADS if t <= target.max_threads), key=lambda t: (not 64 <= t <= 512, t))
    flights: list[dict[str, int]] = [{}, {"flight": 4}, {"flight": 16}]
    if along == "sum":
        vectors = -(-c.red.size // lanes)
        for t, more, per, parts in itertools.product(blocks, flights, (1, 2, 4, 8), (1, 2, 4, 8, 16)):
            busy = _registers(more, 1 if per >= IN_FLIGHT else per, per * n + n * lanes)
            if (
                t % (32 * parts)
                or per > max(long.axis.size, 1)
                or (parts > 1 and vectors < 32 * parts)
                or not _room(t, busy, target)
            ):
                continue
            found.append(varied((("per", per), ("parts", parts), ("threads", t)), **more))
            if parts == 1 and not more:
                found += [
                    (("per", per), ("parts", 1), ("threads", t), ("lanes", w))
                    for w in (2, 4, 8, 16)
                    if vectors <= 16 * w
                ]
        return found
    for t, more, w in itertools.product(blocks, flights, (2, 4, 8, 16, 32)):
        shared = t // 32 * n * w * lanes * c.dtype.bytes
        if (
            w <= t
            and w * lanes <= max(long.axis.size, lanes * 4)
            and t // w <= 2 * c.red.size
            and shared <= target.shared_default
        ):
            if _room(t, _registers(more, 1, n * lanes + IN_FLIGHT * n), target):
                found.append(varied((("wide", w), ("threads", t)), **more))
    return found


def _registers(more: Mapping[str, int], per: int, others: int) -> int:
    """Of a thread, about: vectors of 16 bytes under way, sums and what they are multiplied with, addresses."""
    return more.get("flight", IN_FLIGHT) * 4 * max(per // IN_FLIGHT, 1) + others + 40


def _room(threads: int, registers: int, target: GpuTarget) -> bool:
    return registers <= min(255, target.registers // threads)


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    c = problem.contraction
    if c is None or not applies(c):
        raise ScheduleError("the nest is no contraction with a short side")
    return made(c, knobs, early(problem, target))


def early(problem: Problem, target: GpuTarget) -> frozenset[str]:
    """The buffers that may be read while the kernel before still runs."""
    return problem.constants if target.major >= 9 else frozenset()


def made(
    c: Contraction, knobs: Mapping[str, int | str], constants: frozenset[str], prologue: Prologue | None = None
) -> Kernel:
    """The kernel of these knobs; see Gemv."""
    numbers = {k: int(v) for k, v in knobs.items()}
    return (AlongSum if "per" in numbers else AlongSide)(c, numbers, constants, prologue).build()


class Prologue(Protocol):
    """What the threads of a block do together before they multiply."""

    def shared(self, b: Builder) -> None:
        """Its shared memory."""

    def constants(self, b: Builder, t: Expr) -> None:
        """Thread t reads what no kernel writes."""

    def run(self, b: Builder, t: Expr) -> None:
        """The rest, at the end of which all threads have met."""


class Gemv:
    """What both kernels share: where things are, and how a finished element is stored.

    Where the long operand is among the `constants`, its first vectors are asked for while the kernel before this one
    still runs; so is what the end of the nest reads beside the sum.
    """

    def __init__(
        self, c: Contraction, knobs: Mapping[str, int], constants: frozenset[str], prologue: Prologue | None
    ) -> None:
        self.c, self.threads, self.constants, self.prologue = c, knobs["threads"], constants, prologue
        self.long, self.short = sides(c)
        self.early = bool(constants) and all(x.buf.name in constants for x in self.long.loads)
        self.fetched: dict[Expr, Expr] = {}  # loads of the nest's end -> where their values are
        self.lanes = _lanes(c)[1]
        self.n = self.short.axis.size
        self.batch: dict[Expr, Expr] = {}
        self.rounds = 1  # in which threads finish the block's elements, one each

    def at(self, side: dict[Expr, Expr], k: dict[Expr, Expr]) -> dict[Expr, Expr]:
        return {**self.batch, **side, **k}

    @property
    def stored_as(self) -> Expr:
        """A long operand's element in registers, converted at its use: nothing waits for it before."""
        e = self.long.value
        return (
            e.args[0] if isinstance(e, Op) and e.name == f"cast_{self.c.dtype}" and isinstance(e.args[0], Load) else e
        )

    def begin(self, b: Builder, t: Expr, read: Callable[[Expr], None], place: tuple[Expr, Expr, Expr]) -> None:
        """Thread t reads the long operand's first vectors, before dependencies if constant; then the prologue.

        `place`: whether the thread has an element to finish in the first round, and where on the long and the short
            side that is.
        """
        if self.early:
            b.do("pdl_launch")
        read(const(0))
        self.fetch(b, place, True)
        if self.prologue is not None:
            self.prologue.constants(b, t)
        if self.early:
            b.do("pdl_wait")
        self.fetch(b, place, False)
        if self.prologue is not None:
            self.prologue.run(b, t)

    def fetch(self, b: Builder, place: tuple[Expr, Expr, Expr], constant: bool) -> None:
        """Read what the end of the nest needs beside the sum: those operands that are constant, or the others."""
        e = self.c.store.value
        loads = [
            x
            for x in walk(e)
            if isinstance(x, Load) and x.buf.space == "global" and (x.buf.name in self.constants) == constant
        ]
        loads = [x for x in dict.fromkeys(loads) if not any(isinstance(y, Load) for i in x.idx for y in walk(i))]
        if self.rounds > 1:
            return
        cond, long, short = place
        row, col = (long, short) if self.long is self.c.a else (short, long)
        used = (*self.c.store.idx, e)
        env = {
            **self.batch,
            **self.c.rows.at(self.c.rows.inside(row, 1, *used)),
            **self.c.cols.at(self.c.cols.inside(col, 1, *used)),
        }
        for x in loads:
            own = b.alloc("own", x.dtype, 1)
            with b.when(cond & (long < self.long.axis.size)):
                b.store(own, (0,), substitute(x, env))
            self.fetched[x] = own[0]

    def shared(self, b: Builder, *shape: int) -> Buffer:
        """Shared memory for shares of sums, and the prologue's."""
        if self.prologue is not None:
            self.prologue.shared(b)
        return b.alloc("part", self.c.dtype, *shape, space="shared")

    def update(self, acc: Expr, long: Expr, short: Expr) -> Expr:
        return self.c.update(acc, long, short) if self.long is self.c.a else self.c.update(acc, short, long)

    def finish(self, b: Builder, long: Expr, short: Expr, tile: Buffer, at: tuple[Expr, ...]) -> None:
        row, col = (long, short) if self.long is self.c.a else (short, long)
        c = replace(self.c, store=replace(self.c.store, value=substitute(self.c.store.value, self.fetched)))
        with b.when(row < c.rows.size):
            store_row(b, c, self.batch, row, col, tile, at, 1)

    def zero(self, b: Builder, acc: Buffer, rows: int, columns: int) -> None:
        with b.loop("i", rows, "unroll") as i, b.loop("j", columns, "unroll") as j:
            b.store(acc, (i, j), const(0, self.c.dtype))

    def fold(self, b: Builder, acc: Buffer, rows: int, columns: int, masks: list[int]) -> None:
        """Add up what the lanes hold whose numbers differ in these bits."""
        for mask in masks:
            with b.loop("i", rows, "unroll") as i, b.loop("j", columns, "unroll") as j:
                b.store(acc, (i, j), acc[i, j] + call("shfl_xor", acc[i, j], const(mask)))


class AlongSum(Gemv):
    def __init__(
        self, c: Contraction, knobs: Mapping[str, int], constants: frozenset[str], prologue: Prologue | None
    ) -> None:
        super().__init__(c, knobs, constants, prologue)
        self.per, self.parts, self.wide = knobs["per"], knobs["parts"], knobs.get("lanes", 32)
        self.teams = self.threads // 32 // self.parts  # groups of `parts` warps
        if 32 % self.wide or (self.wide < 32 and self.parts > 1):
            raise ScheduleError(f"{self.wide} lanes of {self.parts} warps are no part of a warp")
        if self.teams < 1 or self.teams * self.parts * 32 != self.threads:
            raise ScheduleError(f"{self.threads} threads are no whole number of groups of {self.parts} warps")
        self.teams *= 32 // self.wide
        self.rounds = -(-self.per * self.n // self.wide)
        self.together = 1  # elements of the sum in one step
        self.short_value = self.short.value
        raw = mma.raw_operand(self.short, c.dtype) if c.dtype is i32 else None
        if raw is not None and self.lanes % QUAD == 0 and i8 in (raw.value.dtype, self.stored_as.dtype):
            if self.stored_as.dtype in mma.READ[i32]:
                self.together, self.short_value = QUAD, raw.value
        self.vectors = c.red.size // self.lanes
        turns = -(-self.vectors // (self.wide * self.parts))
        self.unroll = max(1, min(turns, knobs.get("flight", IN_FLIGHT) // self.per))
        self.steps = -(-turns // self.unroll)

    def build(self) -> Kernel:
        c, b = self.c, Builder()
        blocks = -(-self.long.axis.size // (self.per * self.teams))
        with b.loop("block", c.batch.size * blocks, "block.x") as block:
            self.batch = c.batch.named(b, block // blocks)
            part = self.shared(b, self.teams, self.parts, self.per * self.n)
            with b.loop("w", self.threads // 32, "warp") as w, b.loop("l", 32, "lane") as lane:
                self.team, self.part = w // self.parts * (32 // self.wide) + lane // self.wide, w % self.parts
                self.first = b.let("first", (block % blocks * self.teams + self.team) * self.per)
                self.body(b, w * 32 + lane, lane % self.wide, part)
        return c.kernel.with_body(b.block())

    def body(self, b: Builder, t: Expr, lane: Expr, part: Buffer) -> None:
        c = self.c
        acc = b.alloc("sum", c.dtype, self.per, self.n)
        self.zero(b, acc, self.per, self.n)
        vl = b.alloc("long", self.stored_as.dtype, self.unroll, self.per, self.lanes)
        vs = b.alloc("short", self.short_value.dtype, self.n, self.lanes)

        def read(step: Expr) -> None:
            with b.loop("u", self.unroll, "unroll") as u, b.loop("i", self.per, "unroll") as i:
                self.read_long(b, vl, u, i, self.place(step, u, lane))

        self.begin(b, t, read, self.place_of(lane))
        with b.loop("step", self.steps) as step:
            with b.loop("u", self.unroll, "unroll") as u:
                self.read_short(b, vs, self.place(step, u, lane))
                with (
                    b.loop("i", self.per, "unroll") as i,
                    b.loop("s", self.n, "unroll") as s,
                    b.loop("j", self.lanes // self.together, "unroll") as j,
                ):
                    b.store(acc, (i, s), self.step(acc[i, s], vl, (u, i, j), vs, (s, j)))
            if self.steps > 1:
                with b.when(step < self.steps - 1):
                    read(step + 1)
        self.fold(b, acc, self.per, self.n, [m for m in (16, 8, 4, 2, 1) if m < self.wide])
        with b.loop("i", self.per, "unroll") as i, b.loop("s", self.n, "unroll") as s, b.when(lane.eq(0)):
            b.store(part, (self.team, self.part, i * self.n + s), acc[i, s])
        b.do("barrier")
        self.combine(b, lane, part)

    def step(self, acc: Expr, vl: Buffer, long: tuple[Expr, ...], vs: Buffer, short: tuple[Expr, ...]) -> Expr:
        """One step of a sum; of bytes, which `dot4` adds up in fours, its second operand i8."""
        if self.together == 1:
            return self.update(acc, cast(vl[long], self.c.dtype), vs[short])
        x, y = (v.at(*at[:-1], at[-1] * QUAD, lanes=QUAD) for v, at in ((vl, long), (vs, short)))
        return call("dot4", acc, *((x, y) if y.dtype is i8 else (y, x)))

    def place(self, step: Expr, u: Expr, lane: Expr) -> Expr:
        return ((step * self.unroll + u) * self.parts + self.part) * self.wide + lane

    def whole(self, k: Expr) -> Expr:
        return k < self.vectors

    def stretch(self, side: dict[Expr, Expr], k: Expr) -> Callable[[Expr], dict[Expr, Expr]]:
        """The variables of a lane of vector k of the sum."""
        inside = self.c.red.inside(k, self.lanes, self.long.value, self.short.value)
        return lambda j: self.at(side, self.c.red.at(inside, self.lanes, j))

    def read_long(self, b: Builder, vl: Buffer, u: Expr, i: Expr, k: Expr) -> None:
        row = minimum(self.first + i, self.long.axis.size - 1)
        if self.steps * self.unroll * self.parts * self.wide != self.vectors:
            b.store(vl, (u, i, 0), const(0, vl.dtype), self.lanes)
        with b.when(self.whole(k)):
            at = self.long.axis.at(row)
            b.store(vl, (u, i, 0), vector_of(self.stored_as, self.stretch(at, k), self.lanes), self.lanes)

    def read_short(self, b: Builder, vs: Buffer, k: Expr) -> None:
        """The same stretch of the sum of the short operand, in vectors where it has them."""
        wide = readable(self.short_value, self.c.red, self.short.axis, self.lanes)
        with b.loop("s", self.n, "unroll") as s:
            at = self.short.axis.at(s)
            if self.steps * self.unroll * self.parts * self.wide != self.vectors:
                b.store(vs, (s, 0), const(0, vs.dtype), self.lanes)
            with b.when(self.whole(k)):
                if wide:
                    b.store(vs, (s, 0), vector_of(self.short_value, self.stretch(at, k), self.lanes), self.lanes)
                else:
                    with b.loop("j", self.lanes, "unroll") as j:
                        b.store(vs, (s, j), substitute(self.short_value, self.stretch(at, k)(j)))

    def combine(self, b: Builder, lane: Expr, part: Buffer) -> None:
        """One lane for each element, of the team's first warp; elements take turns where lanes are few."""
        total = b.alloc("total", self.c.dtype, 1)
        with b.loop("turn", self.rounds) as turn:
            e = turn * self.wide + lane
            mine, long, short = self.place_of(e)
            with b.when(mine):
                b.store(total, (0,), const(0, self.c.dtype))
                with b.loop("p", self.parts, "unroll") as p:
                    b.store(total, (0,), total[0] + part[self.team, p, e])
                with b.when(long < self.long.axis.size):
                    self.finish(b, long, short, total, (const(0),))

    def place_of(self, e: Expr) -> tuple[Expr, Expr, Expr]:
        """Whether the team has such an element to finish in its first warp, and where it is."""
        return (self.part < 1) & (e < self.per * self.n), self.first + e // self.n, e % self.n


class AlongSide(Gemv):
    def __init__(
        self, c: Contraction, knobs: Mapping[str, int], constants: frozenset[str], prologue: Prologue | None
    ) -> None:
        super().__init__(c, knobs, constants, prologue)
        self.wide = knobs["wide"]  # vectors of a block
        if self.wide > 32 or 32 % self.wide or self.threads % 32:
            raise ScheduleError(f"{self.wide} vectors do not divide a warp")
        self.rounds = -(-self.n * self.wide * self.lanes // self.threads)
        self.slices = self.threads // self.wide
        turns = -(-c.red.size // self.slices)
        self.unroll = min(turns, knobs.get("flight", IN_FLIGHT))
        self.steps = -(-turns // self.unroll)

    def build(self) -> Kernel:
        c, b = self.c, Builder()
        width = self.wide * self.lanes
        blocks = -(-self.long.axis.size // width)
        with b.loop("block", c.batch.size * blocks, "block.x") as block:
            self.batch = c.batch.named(b, block // blocks)
            self.first = b.let("first", block % blocks) * self.wide
            part = self.shared(b, self.threads // 32, self.n, width)
            with b.loop("w", self.threads // 32, "warp") as w, b.loop("l", 32, "lane") as lane:
                self.body(b, w, lane, part)
        return c.kernel.with_body(b.block())

    def body(self, b: Builder, w: Expr, lane: Expr, part: Buffer) -> None:
        c, t = self.c, w * 32 + lane
        mine, share = lane % self.wide, t // self.wide
        acc = b.alloc("sum", c.dtype, self.n, self.lanes)
        self.zero(b, acc, self.n, self.lanes)
        vl = b.alloc("long", self.stored_as.dtype, self.unroll, self.lanes)
        vs = b.alloc("short", c.dtype, self.unroll, self.n)
        side = b.let("side", minimum(self.first + mine, self.long.axis.size // self.lanes - 1))

        def place(step: Expr, u: Expr) -> Expr:
            return (step * self.unroll + u) * self.slices + share

        def read(step: Expr) -> None:
            with b.loop("u", self.unroll, "unroll") as u:
                self.read_long(b, vl, u, side, place(step, u))

        self.begin(b, t, read, self.place_of(t))
        with b.loop("step", self.steps) as step:
            with b.loop("u", self.unroll, "unroll") as u:
                self.read_short(b, vs, u, place(step, u))
            with (
                b.loop("u", self.unroll, "unroll") as u,
                b.loop("s", self.n, "unroll") as s,
                b.loop("j", self.lanes, "unroll") as j,
            ):
                b.store(acc, (s, j), self.update(acc[s, j], cast(vl[u, j], c.dtype), vs[u, s]))
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
            b.store(
                vl,
                (u, 0),
                vector_of(self.stored_as, lambda j: self.at(self.long.axis.at(side, self.lanes, j), at), self.lanes),
                self.lanes,
            )

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
        total = b.alloc("total", self.c.dtype, 1)
        width = self.wide * self.lanes
        with b.loop("turn", self.rounds) as turn:
            at = turn * self.threads + t
            mine, long, short = self.place_of(at)
            with b.when(mine):
                b.store(total, (0,), const(0, self.c.dtype))
                with b.loop("p", self.threads // 32, "unroll") as p:
                    b.store(total, (0,), total[0] + part[p, at // width, at % width])
                with b.when(long < self.long.axis.size):
                    self.finish(b, long, short, total, (const(0),))

    def place_of(self, at: Expr) -> tuple[Expr, Expr, Expr]:
        """Whether there is such an element of the block, and where it is."""
        width = self.wide * self.lanes
        return at // width < self.n, self.first * self.lanes + at % width, at // width
