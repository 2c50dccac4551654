"""Products of few rows with weights of 4 or 8 bits, decoded in registers: bandwidth is that of the codes.

    for block in block.x(column tiles), part in cluster(split):
        for w in warp(..): for l in lane(32):
            codes of the first steps are on their way, also while the kernel ahead of this one ends
            for step: q = codes of 32 x 32 weights; x = a vector of each row
                sums of the block += mma(halves(q), x)
                totals += scale * sums of the block           behind the last step of a block
            the warps' totals meet in shared memory, those of a cluster's blocks as well; y = epilogue(totals)

Weights are the first factor of the tensor core, 16 columns at a time, so that 8 rows of x fill the second one. They lie
as lanes read them: 16 bytes of a lane are 8 elements of a sum of 4 columns (8 bits: 2), each warp reads 512 bytes in a
piece, step after step, without shared memory. A sum may be in any order: a lane of the tensor core multiplies
neighbouring elements of x, in the order in which codes come apart. Codes less their zero point are exact in 16 bits, so
scales multiply sums in float32, once for each block.

Rows that a norm makes are computed by every block for itself, in shared memory, while its first codes are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from dnnc.backends.cuda.templates.contraction.gemv_norm import Norm, Rows
from dnnc.backends.cuda.templates.contraction.staging import vector_of
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.backends.cuda.templates.reduction.partial import LANES, Parts, cluster
from dnnc.ir.dtype import DType, f32, i32, u32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Ref, cast, const, minimum, value
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel, call
from dnnc.passes.lower.form import Contraction
from dnnc.passes.rewrites.channels_last import DEPTH, WIDTH

ROWS = 8  # of x that fill the tensor core's second factor
VECTOR = 8  # elements of a sum that a lane has of a column in one step
TILE = 16  # columns that fill its first one
HELD = 2  # tiles of rows whose elements are asked for ahead of their use: more would not fit into registers
FLIGHT = 4  # steps of which a warp asks for the codes ahead
COPIED = (4, 8, 16)  # bytes of a vector that goes to shared memory beside the threads


@dataclass(frozen=True)
class Shape:
    """`cols` columns of a block, whose sum is divided among `slices` groups of warps and `split` blocks."""

    cols: int
    slices: int
    split: int
    flight: int = FLIGHT
    stages: int = 0  # rounds of codes that shared memory holds; none: registers hold one
    resident: int = 1


@dataclass(frozen=True)
class Decoded:
    """A contraction c with the weights' buffers: codes, scales (f32 or 16 bits), zero points (u8) if blocks have some.

    bits: of a code; zero: what each code is moved by; block: elements of a sum that share a scale.
    """

    c: Contraction
    codes: Buffer
    scale: Buffer
    zeros: Buffer | None
    bits: int
    zero: int
    block: int
    early: bool
    norm: Norm | None = None  # of which the rows of x are made
    known: frozenset[str] = frozenset()  # constants

    @property
    def strip(self) -> int:
        """Columns of a warp's vector."""
        return WIDTH * 4 // self.bits


def whole(x: Expr) -> Expr:
    """As words of 32 bits: parts of words that a turn of a loop leaves to the next one are taken apart as soon as they
    are read, and so a warp waits for them.
    """
    return x if x.dtype.bits == 32 else call("words", x)


class Writer:
    """The kernel of one product and one shape."""

    def __init__(self, d: Decoded, s: Shape) -> None:
        self.d, self.c, self.s, self.b = d, d.c, s, Builder()
        self.tiles = -(-d.c.rows.size // ROWS)
        self.strips = s.cols // d.strip
        self.warps = self.strips * s.slices
        self.pairs = d.strip // TILE  # of the tensor core's first factor
        self.rounds = d.c.red.size // DEPTH // s.flight
        self.each = -(-self.rounds // (s.slices * s.split))  # rounds of a warp
        self.once = d.block >= d.c.red.size  # is there one scale for each column?
        self.stages = min(s.stages, self.each)
        self.unit = s.flight if self.once else min(s.flight, d.block // DEPTH)  # steps until scales are needed
        if s.cols % d.strip or s.flight % self.unit or d.c.red.size % (DEPTH * s.flight) or d.c.cols.size % s.cols:
            raise ScheduleError(f"steps of {s.flight} and {s.cols} columns do not divide blocks and weights")
        x = d.c.a.value
        assert isinstance(x, Load)
        self.type = x.dtype
        self.rows = None if d.norm is None else Rows(d.norm, self.warps * 32, d.known)
        self.parts = Parts(self.tiles * ROWS, s.cols, s.slices, s.split, self.warps * 32)

    def build(self) -> Kernel:
        d, b, c = self.d, self.b, self.c
        for p in c.kernel.entry.params:
            b.fresh(p.name)
        with (
            b.loop("block", c.cols.size // self.s.cols, "block.x") as self.block,
            cluster(b, self.s.split) as self.part,
        ):
            sums = self.parts.memory(b, f32)
            self.rings = self.shared()
            if self.rows is not None:
                self.rows.shared(b)
            if self.s.resident > 1:
                b.do("resident", self.s.resident)
            with b.loop("w", self.warps, "warp") as w, b.loop("l", 32, "lane") as self.lane:
                self.thread = w * 32 + self.lane
                self.slice = b.let("slice", w // self.strips)
                self.strip = b.let("strip", w % self.strips)
                self.body(sums)
                self.parts.finish(b, sums, self.part, w * 32 + self.lane, self.finish)
        own = {x.name: x for x in (d.codes, d.scale, d.zeros) if x is not None}
        entry = c.kernel.entry
        params = tuple(own.get(p.name, p) for p in entry.params)
        return Kernel((*c.kernel.funcs[:-1], Func(entry.name, params, b.block())), c.kernel.locs)

    def finish(self, row: Expr, col: Expr, tile: Buffer) -> None:
        with self.b.when(row < self.c.rows.size):
            start = self.block * self.s.cols + col
            store_row(self.b, self.c, {}, row, start, tile, (const(0),), LANES)

    def body(self, sums: Buffer) -> None:
        b, s, held = self.b, self.s, self.tiles <= HELD
        first = b.let("first", (self.part * s.slices + self.slice) * self.each)  # round of this warp
        shape = (self.pairs, self.tiles, 4)
        self.total = b.alloc("total", f32, *shape)
        self.acc = self.total if self.once else b.alloc("acc", f32, *shape)
        self.q = b.alloc("q", u32, 1 if self.rings else s.flight, 4)
        self.x = b.alloc("x", u32, s.flight if held else 1, self.tiles, VECTOR // 2)
        self.numbers = {x: b.alloc("n" + x.name, *self.held(x)) for x in self.beside if x not in self.rings}
        self.clear(self.total)
        if self.d.early:
            b.do("pdl_launch")
        else:
            b.do("pdl_wait")
        self.ahead(first)
        if self.rows is not None:
            self.rows.constants(b, self.thread)
        if self.d.early:
            b.do("pdl_wait")
        if self.rows is not None:
            self.rows.run(b, self.thread)
        if held:
            with b.loop("u", s.flight, "unroll") as u:
                self.read_x(first, u, u)
        with b.loop("round", self.each) as turn:
            step = b.let("at", first + turn)
            if self.rings:
                b.do("cp_async_wait", self.stages - 1)
            with b.when(step < self.rounds) if self.uneven else nullcontext():
                with b.loop("v", s.flight // self.unit, "unroll") as v:
                    if not self.once:
                        self.clear(self.acc)
                    with b.loop("u", self.unit, "unroll") as u:
                        at = v * self.unit + u
                        if not held:
                            self.read_x(step, at, const(0))
                        self.multiply(at, v, at if held else const(0), turn)
                        with b.when(turn < self.each - 1):
                            if not self.rings:
                                self.read_codes(step + 1, at)
                            if held:
                                self.read_x(step + 1, at, at)
                    if not self.once:
                        self.scale(v, turn)
                        with b.when(turn < self.each - 1):
                            self.read_numbers(step + 1, v)
            if self.rings:
                with b.when(turn < self.each - self.stages):
                    self.copy(step + self.stages, turn)
                b.do("cp_async_commit")
        if self.once:
            self.scale(const(0), const(0))
        self.leave(sums)

    @property
    def uneven(self) -> bool:
        """Do some warps have a round less?"""
        return self.rounds % (self.s.slices * self.s.split) != 0

    def clear(self, buf: Buffer) -> None:
        b = self.b
        with b.loop("h", self.pairs, "unroll") as h, b.loop("j", self.tiles, "unroll") as j:
            b.store(buf, (h, j, 0), const(0.0, f32), 4)

    def column(self) -> Expr:
        """The number of the warp's strip."""
        return self.block * self.strips + self.strip

    @property
    def vector(self) -> int:
        """Elements of the buffer of codes that are 16 bytes."""
        return 16 * 8 // self.d.codes.dtype.bits

    def shared(self) -> dict[Buffer, Buffer]:
        """Shared memory for rounds of codes, and of what lies beside them in vectors that can be copied: a thread reads
        there what it has copied itself.
        """
        if not self.stages:
            return {}
        per = {self.d.codes: (self.s.flight, self.vector)}
        per |= {x: (self.units, n) for x in self.beside if (n := self.pairs * 2) * x.dtype.bytes in COPIED}
        return {
            x: self.b.alloc("ring", x.dtype, self.stages, many, self.warps * 32, n, space="shared")
            for x, (many, n) in per.items()
            if x is self.d.codes or not self.once
        }

    def ahead(self, first: Expr) -> None:
        """Ask for the first rounds."""
        b = self.b
        if self.rings:
            for k in range(self.stages):
                self.copy(first + k, const(k))
                b.do("cp_async_commit")
        else:
            with b.loop("u", self.s.flight, "unroll") as u:
                self.read_codes(first, u)
        with b.loop("v", self.units, "unroll") as v:
            self.read_numbers(first, v)

    def copy(self, turn: Expr, to: Expr) -> None:
        """Copy a round into its slot of the rings."""
        b, codes = self.b, self.d.codes
        start, slot = minimum(turn, self.rounds - 1) * self.s.flight, to % self.stages
        for x, ring in self.rings.items():
            with b.loop("u", self.s.flight if x is codes else self.units, "unroll") as u:
                if x is codes:
                    source = codes.ref(self.column(), start + u, self.lane, 0, lanes=self.vector)
                else:
                    source = self.beside_at(x, start, u)
                b.do("cp_async", ring.ref(slot, u, self.thread, 0, lanes=source.lanes), source)

    def read_codes(self, turn: Expr, u: Expr) -> None:
        step = minimum(turn, self.rounds - 1) * self.s.flight + u
        codes = self.d.codes.at(self.column(), step, self.lane, 0, lanes=self.vector)
        self.b.store(self.q, (u, 0), whole(codes), 4)

    def read_x(self, turn: Expr, u: Expr, to: Expr) -> None:
        """A vector of each row: lane 4*g + t has elements 8*t and so on of row g of each tile of rows."""
        b, c = self.b, self.c
        k = (minimum(turn, self.rounds - 1) * self.s.flight + u) * (DEPTH // VECTOR) + self.lane % 4
        k = c.red.inside(k, VECTOR, c.a.value)
        with b.loop("j", self.tiles, "unroll") as j:
            row = minimum(j * ROWS + self.lane // 4, c.rows.size - 1)
            here = c.rows.at(c.rows.inside(row, 1, c.a.value))
            made = vector_of(c.a.value, lambda i: {**here, **c.red.at(k, VECTOR, i)}, VECTOR)
            b.store(self.x, (to, j, 0), whole(made), VECTOR // 2)

    @property
    def beside(self) -> tuple[Buffer, ...]:
        """Scales, and zero points."""
        return tuple(x for x in (self.d.scale, self.d.zeros) if x is not None)

    def read_numbers(self, turn: Expr, v: Expr) -> None:
        """Scales and zero points of a block into registers."""
        start = minimum(turn, self.rounds - 1) * self.s.flight
        for x, held in self.numbers.items():
            ref = self.beside_at(x, start, v)
            read = x.at(*ref.idx, lanes=ref.lanes)
            read = read if held.dtype is x.dtype else whole(read)
            self.b.store(held, (v, 0), read, read.lanes)

    def beside_at(self, x: Buffer, start: Expr, v: Expr) -> Ref:
        """Where numbers of a block lie: those of a lane's columns, g, g + 8, g + 16 and g + 24 of 32."""
        n, column = self.pairs * 2, self.column()
        per = WIDTH // self.d.strip  # strips of a row of numbers
        block = const(0) if self.once else (start + v * self.unit) // (self.d.block // DEPTH)
        at = self.lane // 4 * 4 + (column % per * n if per > 1 else 0)
        made = x.ref(block, column // per, at, lanes=n)
        assert isinstance(made, Ref)
        return made

    @property
    def units(self) -> int:
        """Blocks of a round."""
        return 1 if self.once else self.s.flight // self.unit

    def held(self, x: Buffer) -> tuple[DType, int, int]:
        """Type and shape of registers for a lane's numbers of some blocks: words where they fill them."""
        n = self.pairs * 2
        words = x.dtype.bits < 32 and n * x.dtype.bits % 32 == 0
        return (u32, self.units, n * x.dtype.bits // 32) if words else (x.dtype, self.units, n)

    def number(self, x: Buffer, v: Expr, turn: Expr) -> Buffer:
        """Those of unit v, one by one."""
        n = self.pairs * 2
        own = self.b.alloc("own", x.dtype, n)
        if x in self.rings:
            self.b.store(own, (0,), self.rings[x].at(turn % self.stages, v, self.thread, 0, lanes=n), n)
            return own
        held = self.numbers[x]
        read = held.at(v, 0, lanes=value(held.shape[1]) or 1)
        self.b.store(own, (0,), read if held.dtype is x.dtype else call(f"{x.dtype}_words", read), n)
        return own

    def multiply(self, u: Expr, v: Expr, held: Expr, turn: Expr) -> None:
        """32 elements of the sum, in two steps of the tensor core."""
        b, d = self.b, self.d
        w = b.alloc("w", self.type, 2, 8)  # two columns of a lane
        a = b.alloc("a", self.type, 2, 8)  # the tensor core's first factor in both steps
        zeros = self.zero_points(const(0) if self.once else v, turn)
        if self.rings:
            read = self.rings[d.codes].at(turn % self.stages, u, self.thread, 0, lanes=self.vector)
            b.store(self.q, (0, 0), whole(read), 4)
            u = const(0)
        halves = f"halves_{self.type}"
        with b.loop("h", self.pairs, "unroll") as h:
            with b.loop("e", 2, "unroll") as e:
                which = h * 2 + e
                code = self.q.at(u, which)
                if d.bits == 8:
                    code = call(f"{d.codes.dtype}_words", self.q.at(u, which * 2, lanes=2))
                b.store(w, (e, 0), call(halves, code, zeros(which)), 8)
                with b.loop("p", 2, "unroll") as p, b.loop("r", 2, "unroll") as r:
                    b.store(a, (p, r * 4 + e * 2), w.at(e, p * 4 + r * 2, lanes=2), 2)
            with b.loop("j", self.tiles, "unroll") as j:
                low, high = (call(f"{self.type}_words", self.x.at(held, j, at, lanes=2)) for at in (0, 2))
                pairs = (call("zip_low", low, high), call("zip_high", low, high)) if d.bits == 4 else (low, high)
                for half, right in enumerate(pairs):
                    left = a.at(half, 0, lanes=8)
                    b.store(self.acc, (h, j, 0), call("mma_m16n8k16", self.acc.at(h, j, 0, lanes=4), left, right), 4)

    def zero_points(self, v: Expr, turn: Expr) -> Callable[[Expr], Expr]:
        """Of a lane's columns in the block of unit v."""
        z = self.d.zeros
        if z is None:
            return lambda which: const(self.d.zero, i32)
        own = self.number(z, v, turn)
        return lambda which: cast(own[which], i32) + self.d.zero

    def scale(self, v: Expr, turn: Expr) -> None:
        """Sums of a block times its scales to the totals: registers 0 and 1 are of column g, 2 and 3 of g + 8."""
        b, s = self.b, self.number(self.d.scale, v, turn)
        with b.loop("h", self.pairs, "unroll") as h, b.loop("j", self.tiles, "unroll") as j:
            with b.loop("r", 4, "unroll") as r:
                made = self.acc[h, j, r] * cast(s[h * 2 + r // 2], f32)
                b.store(self.total, (h, j, r), made if self.once else self.total[h, j, r] + made)

    def leave(self, sums: Buffer) -> None:
        """A warp's totals in shared memory, rows of x by columns."""
        b, g, t = self.b, self.lane // 4, self.lane % 4
        with b.loop("h", self.pairs, "unroll") as h, b.loop("j", self.tiles, "unroll") as j:
            with b.loop("r", 4, "unroll") as r:
                col = self.strip * self.d.strip + h * TILE + r // 2 * 8 + g
                b.store(sums, (self.slice, j * ROWS + t * 2 + r % 2, col), self.total[h, j, r])
