"""Hopper matrix product: C[z, m, n] = finish(sum over k of A[z, m, k] * B[z, n, k]) in 16-bit floats or bytes.

One block per multiprocessor, or a few that hide each other's beginnings and ends, walk over tiles of the result. The
last warps are the producer: one thread of them lets the copy engine (TMA) fill a ring of stages in shared memory. The
others are consumers, 64 rows of the tile each: they multiply a stage (wgmma, sums in registers of 32 bits), give it
back, and at the end finish their sums in registers, put them into shared memory and let the copy engine store them;
where rows of the tile lie apart (a batch ends, heads lie one after the other) they store vectors of 16 bytes
themselves. Two mbarriers a stage say that it is full, and empty again. Boxes that reach past the end of a matrix are
filled with zeros when they are read, and cut off when they are stored, so sizes need not be multiples of the tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dnnc.ir.dtype import FLOAT8, DType, f32, u64
from dnnc.ir.errors import Loc
from dnnc.ir.expr import E, Expr, const, load, minimum, value
from dnnc.ir.loops.hopper import GROUP, WGMMA_ROWS
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel, Param, Store, loop_var
from dnnc.passes.schedule.memory import Vectorizer

ROW = 128  # bytes of a row of a stage: what a swizzle permutes
STORED = 16  # bytes that a thread stores at a time
STORE_BUFFERS = 2  # per consumer: one is filled while the other is stored
STEP = 32  # bytes of the sum in one wgmma
WARP = 32
MAX_AXES = 5  # of a matrix that the copy engine stores
PROMOTED = 8  # steps of 128 elements of 8-bit floats that tensor cores add up: on an H100 0.11 % is lost, of 16 0.25 %
PROMOTED_COLUMNS = 192  # of a tile whose sums lie in registers twice
SUM_PAD = 8  # floats after a row of partial sums: neighbouring rows then begin in different banks
BARRIERS = 1024  # bytes kept for mbarriers and alignment
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40  # a thread's, of 168 that three warp groups have each

# (batch, row, column, lane, sum) -> the element of the result at column + lane
Finish = Callable[[Expr, Expr, Expr, Expr, Expr], Expr]


@dataclass(frozen=True)
class Tiling:
    """bm x bn elements of the result at a time, a ring of `stages`, at most `blocks` blocks, of which `resident` share
    a multiprocessor; `group` neighbouring row tiles share columns.

    With split > 1 a cluster of so many blocks shares a tile, each taking a part of the sum. With one consumer the
    producer is a warp, to save registers; in clusters, and where registers change hands, it is a warp group.
    """

    bm: int
    bn: int
    stages: int
    group: int
    blocks: int
    split: int = 1
    resident: int = 1

    @property
    def consumers(self) -> int:
        return self.bm // WGMMA_ROWS

    @property
    def threads(self) -> int:
        return self.consumers * GROUP + (WARP if self.consumers == 1 and self.split == 1 else GROUP)

    @property
    def stage_bytes(self) -> int:
        return (self.bm + self.bn) * ROW

    @property
    def shared_bytes(self) -> int:
        if self.split > 1:
            return self.stages * self.stage_bytes + self.bm * (self.bn + SUM_PAD) * 4 + BARRIERS
        return self.stages * self.stage_bytes + self.consumers * STORE_BUFFERS * WGMMA_ROWS * ROW + BARRIERS


@dataclass(frozen=True)
class Window:
    """How the rows of A lie in an image [n, *axes, channels] of 1 to 3 axes: row (n, p, q) of the product is a pixel of
    a convolution's result, and the sum runs over the filter's taps (r, s) and, for each, over the image's channels.
    """

    shape: tuple[int, ...]  # of the result
    taps: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]  # padding before the first pixel along each axis
    channels: int


@dataclass(frozen=True)
class Product:
    """Operands as [z, rows, k] (b_rows_are_k: B is [z, k, n]), without z where all batches share one matrix."""

    name: str
    params: tuple[Param, ...]  # all parameters of the kernel, a, b and c among them
    a: Buffer
    b: Buffer
    c: Buffer
    batch: int
    m: int
    n: int
    k: int
    finish: Finish  # the value to store, in the type of c
    b_rows_are_k: bool = False
    window: Window | None = None  # A is an image [n, *axes, k], B is [tap, n, k]
    locs: tuple[Loc, ...] = ()
    fixed: str = ""  # which of "a" and "b" no kernel writes: it may be read while the kernel before this one still runs
    # other matrices [m, n] of which the epilogue reads the element at its row and column
    beside: tuple[Buffer, ...] = ()
    # sizes whose product is m (n), where rows (columns) of the result do not lie at one distance: it is [z, *cols[:-1],
    # *rows, cols[-1]]; empty: it is [z, m, n]
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()
    again: bool = False  # may a result be computed and stored twice? Not where the epilogue reads it
    work: int = 0  # operations on an element beyond those that every epilogue has
    sums: DType = f32

    @property
    def promotes(self) -> bool:
        """Are sums of few steps added in float32?"""
        return self.a.dtype in FLOAT8 and self.k > PROMOTED * ROW

    def suits(self, t: Tiling) -> bool:
        """Do rows of a tile's results fill what is stored at a time, and do all sums fit into registers? Split sums are
        stored in vectors of the result.
        """
        if self.promotes and (t.bn > PROMOTED_COLUMNS or (t.resident > 1 and t.bn * t.resident > 256)):
            return False
        if t.split > 1:
            return self.aligned
        width = ROW // self.c.dtype.bytes
        # pieces that overlap: for tiles between the usual ones, which matter where the widest do not fit
        odd = self.promotes and self.again and not self.b_rows_are_k and self.in_boxes and t.bn > width
        return t.bn % width == 0 or odd

    def place(self, z: tuple[Expr, ...], row: Expr, col: Expr, lane: E = 0, lanes: int = 1) -> tuple[Expr, ...]:
        """Return an element's index; it must exist if rows or columns lie apart; col is a multiple of `lanes`."""
        batch = (z or (const(0),)) if len(self.c.shape) > max(len(self.rows), 1) + max(len(self.cols), 1) else ()
        rows = digits(minimum(row, self.m - 1), self.rows) if len(self.rows) > 1 else (row,)
        if len(self.cols) < 2:
            return (*batch, *rows, col + lane)
        block = minimum(col // self.cols[-1], self.n // self.cols[-1] - 1)
        return (*batch, *digits(block, self.cols[:-1]), *rows, col // lanes % (self.cols[-1] // lanes) * lanes + lane)

    @property
    def aligned(self) -> bool:
        """Do rows of the result begin at multiples of 16 bytes?"""
        return all(value(s * self.c.dtype.bytes % STORED) == 0 for s in self.c.full_strides()[:-1])

    @property
    def in_boxes(self) -> bool:
        """Can the copy engine store what a consumer has, 128 bytes of 64 rows at a time?"""
        width = ROW // self.c.dtype.bytes
        whole = (len(self.rows) < 2 or self.rows[-1] % WGMMA_ROWS == 0) and (
            len(self.cols) < 2 or self.cols[-1] % width == 0
        )
        return self.aligned and whole and len(self.c.shape) <= MAX_AXES

    @property
    def in_vectors(self) -> bool:
        """Can 16 bytes of a row be stored at a time?"""
        return self.aligned and (self.cols[-1] if self.cols else self.n) * self.c.dtype.bytes % STORED == 0


def digits(i: Expr, sizes: tuple[int, ...]) -> tuple[Expr, ...]:
    """A number's digits, the last one fastest; the first one may be as large as it likes."""
    out: list[Expr] = []
    for n in sizes[:0:-1]:
        out.append(i % n)
        i = i // n
    return (i, *reversed(out))


def divisor(n: int, most: int) -> int:
    """The largest divisor of n up to `most`."""
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


def steps_of(p: Product, bk: int) -> int:
    """Stages that a sum takes; the channels of each tap of a window are filled up."""
    if p.window is None:
        return -(-p.k // bk)
    return math.prod(p.window.taps) * -(-p.window.channels // bk)


class Writer:
    releases = 1  # of a stage, by each consumer

    def __init__(self, p: Product, t: Tiling) -> None:
        self.p, self.t, self.b = p, t, Builder()
        for param in p.params:
            self.b.fresh(param.name)  # loops and buffers take other names
        self.bk = ROW // p.a.dtype.bytes
        self.mt, self.nt, self.kt = -(-p.m // t.bm), -(-p.n // t.bn), steps_of(p, self.bk)
        self.tiles = p.batch * self.mt * self.nt
        self.blocks = min(self.tiles, t.blocks)
        self.group = divisor(self.mt, t.group)
        self.origin: Expr = const(0)  # the first step of the sum
        self.ahead = 0  # steps whose mbarriers were armed before the loop over tiles

    # --- what both roles know -----------------------------------------------------------------------------------------

    def kernel(self) -> Kernel:
        """The kernel; ScheduleError when `finish` reads what cannot be read several columns at a time."""
        t, b = self.t, self.b
        with b.loop("block", self.blocks, "block.x") as block:
            self.allocate()
            with b.loop("t", t.threads, "thread.x") as thread:
                self.prepare(thread)
                consumes = thread < t.consumers * GROUP
                b.branch(consumes, lambda: self.consume(block, thread), lambda: self.produce(block, thread))
        return Kernel((Func(self.p.name, self.p.params, b.block()),), self.p.locs)

    def allocate(self) -> None:
        """The ring, its mbarriers, and where results are put."""
        b, t, p = self.b, self.t, self.p
        self.sa = b.alloc("sa", p.a.dtype, t.stages, t.bm, self.bk, space="shared", swizzle=8)
        if p.b_rows_are_k:  # blocks of 64 columns, each a row of the sum behind the other
            self.sb = b.alloc("sb", p.b.dtype, t.stages, t.bn // self.bk, self.bk, self.bk, space="shared", swizzle=8)
        else:
            self.sb = b.alloc("sb", p.b.dtype, t.stages, t.bn, self.bk, space="shared", swizzle=8)
        self.allocate_barriers()
        self.allocate_results()

    def allocate_barriers(self) -> None:
        self.full, self.empty = (self.b.alloc(x, u64, self.t.stages, space="shared") for x in ("full", "empty"))

    def allocate_results(self) -> None:
        if not (self.p.in_boxes or self.p.in_vectors):
            return
        shape = (self.t.consumers, STORE_BUFFERS, WGMMA_ROWS, ROW // self.p.c.dtype.bytes)
        self.out = self.b.alloc("out", self.p.c.dtype, *shape, space="shared", swizzle=8)

    def prepare(self, thread: Expr) -> None:
        b = self.b
        if self.t.resident > 1:
            b.do("resident", self.t.resident)
        with b.when(thread < 1):
            with b.loop("i", self.t.stages, "unroll") as i:
                b.do("mbar_init", self.full.ref(i), 1)
                b.do("mbar_init", self.empty.ref(i), self.t.consumers * self.releases)
            b.do("mbar_fence")
            b.do("tma_prefetch")
        b.do("pdl_launch")
        b.do("barrier")

    def each_tile(self, block: Expr, body: Callable[[Expr, tuple[Expr, ...], Expr, Expr], None]) -> None:
        """body(tiles done before, (batch,) or (), first row, first column) for every tile of this block."""
        b = self.b
        with b.loop("turn", -(-self.tiles // self.blocks)) as turn:
            tile = b.let("tile", turn * self.blocks + block)
            with b.when(tile < self.tiles):
                body(turn, *self.corner(tile))

    def corner(self, tile: Expr) -> tuple[tuple[Expr, ...], Expr, Expr]:
        """(batch,) or (), first row and first column of a tile."""
        b, p, t = self.b, self.p, self.t
        row = b.let(
            "row", (tile // (self.group * self.nt) % (self.mt // self.group) * self.group + tile % self.group) * t.bm
        )
        col = b.let("col", tile // self.group % self.nt * t.bn)
        return (b.let("z", tile // (self.mt * self.nt) % p.batch),) if p.batch > 1 else (), row, col

    def stage(self, step: Expr) -> tuple[Expr, Expr]:
        """Which stage a step of the whole run uses, and the parity of the round."""
        return self.b.let("s", step % self.t.stages), self.b.let("parity", step // self.t.stages % 2)

    @staticmethod
    def of(buf: Buffer, z: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """The index of a batch's matrix in a buffer."""
        return (z or (const(0),)) if len(buf.shape) == 3 else ()

    # --- the producer -------------------------------------------------------------------------------------------------

    def produce(self, block: Expr, thread: Expr) -> None:
        if self.t.consumers > 1:
            self.b.do("regs_give", PRODUCER_REGISTERS)
        with self.b.when(thread < self.t.consumers * GROUP + 1):
            self.begin_producer(block)
            self.each_tile(block, self.fill)

    def begin_producer(self, block: Expr) -> None:
        """Weights of the first stages come while the kernel before this one ends; everything else waits for it."""
        b = self.b
        if self.p.fixed:
            self.ahead = min(self.t.stages, self.kt)
            z, row, col = self.corner(block)
            with b.loop("ahead", self.ahead) as step:
                b.do("mbar_expect", self.full.ref(step), self.t.stage_bytes)
                self.load(self.p.fixed, z, row, col, step, step)
        b.do("pdl_wait")

    def fill(self, done: Expr, z: tuple[Expr, ...], row: Expr, col: Expr) -> None:
        b, p = self.b, self.p
        self.fetch(row, col)
        with b.loop("step", self.kt) as step:
            s, parity = self.stage(done * self.kt + step)
            with b.when(const(self.ahead - 1) < done * self.kt + step):
                b.do("mbar_wait", self.empty.ref(s), 1 - parity)
                b.do("mbar_expect", self.full.ref(s), self.t.stage_bytes)
                self.load(p.fixed, z, row, col, s, step)
            self.load("".join(x for x in "ab" if x not in p.fixed), z, row, col, s, step)

    def fetch(self, row: Expr, col: Expr) -> None:
        """What the epilogue reads of other matrices comes into the L2 cache while the sum is computed."""
        for x in self.p.beside:
            width = ROW // x.dtype.bytes
            with self.b.loop("piece", self.t.bn // width, "unroll") as piece:
                at = col + piece * width
                with self.b.when(at < self.p.n):
                    self.b.do("tma_fetch", x.ref(row, at, lanes=width), self.t.bm)

    def load(self, which: str, z: tuple[Expr, ...], row: Expr, col: Expr, s: Expr, step: Expr) -> None:
        """Start the copies of a step's part of A and B into a stage."""
        at = step + self.origin
        if "a" in which and self.p.window is not None:
            self.load_window(self.p.window, row, s, at)
        elif "a" in which:
            source = self.p.a.ref(*self.of(self.p.a, z), row, at * self.bk, lanes=self.bk)
            self.b.do("tma_load", self.sa.ref(s, 0, 0, lanes=self.bk), source, self.t.bm, self.full.ref(s))
        if "b" in which:
            self.load_b(z, col, s, at)

    def load_b(self, z: tuple[Expr, ...], col: Expr, s: Expr, at: Expr) -> None:
        b, p, bk = self.b, self.p, self.bk
        if p.b_rows_are_k:
            with b.loop("j", self.t.bn // bk, "unroll") as j:
                begin = minimum(
                    col + j * bk, const((p.n - 1) // bk * bk)
                )  # what lies past the end is not stored, so any columns will do
                source = p.b.ref(*self.of(p.b, z), at * bk, begin, lanes=bk)
                b.do("tma_load", self.sb.ref(s, j, 0, 0, lanes=bk), source, bk, self.full.ref(s))
            return
        source = p.b.ref(*self.of(p.b, z), col, at * bk, lanes=bk)
        if p.window is not None:
            chunks = -(-p.window.channels // bk)
            source = p.b.ref(at // chunks, col, at % chunks * bk, lanes=bk)
        b.do("tma_load", self.sb.ref(s, 0, 0, lanes=bk), source, self.t.bn, self.full.ref(s))

    def load_window(self, w: Window, row: Expr, s: Expr, step: Expr) -> None:
        b, bk = self.b, self.bk
        chunks = -(-w.channels // bk)
        tap, channel = b.let("tap", step // chunks), step % chunks * bk
        number, *pixel = digits(row, (1, *w.shape))
        image = self.p.a.ref(number, *(0 for _ in w.shape), channel, lanes=bk)
        at = (*pixel, *digits(tap, w.taps))
        geometry = (*w.shape, *w.strides, *w.dilations, *w.begin)
        b.do("tma_im2col", self.sa.ref(s, 0, 0, lanes=bk), image, self.t.bm, self.full.ref(s), *at, *geometry)

    # --- the consumers ------------------------------------------------------------------------------------------------

    def consume(self, block: Expr, thread: Expr) -> None:
        if self.t.consumers > 1:
            self.b.do("regs_take", CONSUMER_REGISTERS)
        self.begin_consumer(thread)
        self.each_tile(block, self.compute)
        if self.p.in_boxes:
            with self.b.when(self.leader):
                self.b.do("bulk_wait", 0)

    def begin_consumer(self, thread: Expr) -> None:
        b = self.b
        b.do("pdl_wait")
        self.w = b.let("w", thread // GROUP)
        self.leader = (thread % GROUP).eq(0)
        self.warp, self.lane = b.let("warp", thread // 32 % 4), b.let("lane", thread % 32)
        self.acc = b.alloc("acc", self.p.sums, self.t.bn // 2)
        # sums of 8-bit floats lose digits on tensor cores, so those of a few steps are added in float32
        self.part = b.alloc("part", f32, self.t.bn // 2) if self.p.promotes else self.acc

    def release(self, step: Expr) -> None:
        with self.b.when(self.leader):
            self.b.do("mbar_arrive", self.empty.ref(step % self.t.stages))

    def compute(self, done: Expr, z: tuple[Expr, ...], row: Expr, col: Expr) -> None:
        b, acc, promotes = self.b, self.part.ref(0, lanes=self.t.bn // 2), self.p.promotes
        if promotes:
            with b.loop("r", self.t.bn // 4, "unroll") as r:
                b.store(self.acc, (r * 2,), const(0.0, f32), 2)
        with b.loop("step", self.kt) as step:
            s, parity = self.stage(done * self.kt + step)
            b.do("mbar_wait", self.full.ref(s), parity)
            b.do("wgmma_fence")
            steps, k = ROW // STEP, STEP // self.p.a.dtype.bytes
            before = step % PROMOTED if promotes else step  # steps whose sum is kept
            with b.loop("kk", steps, "unroll") as kk:
                left = self.sa.ref(s, self.w * WGMMA_ROWS, kk * k, lanes=k)
                if self.p.b_rows_are_k:
                    b.do("wgmma_kn", acc, left, self.sb.ref(s, 0, kk * k, 0, lanes=self.bk), before * steps + kk)
                else:
                    b.do("wgmma", acc, left, self.sb.ref(s, 0, kk * k, lanes=k), before * steps + kk)
            b.do("wgmma_commit")
            b.do("wgmma_wait", 1)
            with b.when(const(0) < step):
                self.release(done * self.kt + step + (self.t.stages - 1))  # the stage before this one
            if promotes:
                with b.when((step % PROMOTED).eq(PROMOTED - 1)):
                    self.promote()
        b.do("wgmma_wait", 0, acc)
        if promotes and self.kt % PROMOTED:
            self.promote()
        self.release(done * self.kt + (self.kt - 1))
        self.finish_tile(done, z, row, col)

    def promote(self) -> None:
        """Add the sum of the last steps to the tile's."""
        b = self.b
        b.do("wgmma_wait", 0, self.part.ref(0, lanes=self.t.bn // 2))
        with b.loop("r", self.t.bn // 2, "unroll") as r:
            b.store(self.acc, (r,), self.acc[r] + self.part[r])

    def finish_tile(self, done: Expr, z: tuple[Expr, ...], row: Expr, col: Expr) -> None:
        """128 bytes of each row at a time: registers -> shared memory -> result. The last piece may overlap the one
        before it.
        """
        b, p, width = self.b, self.p, ROW // self.p.c.dtype.bytes
        row = b.let("first", row + self.w * WGMMA_ROWS)
        if not (p.in_boxes or p.in_vectors):
            self.store_elements(z, row, col)
            return
        pieces = -(-self.t.bn // width)
        with b.loop("q", pieces, "unroll") as q:
            buffer = b.let("buffer", (done * pieces + q) % STORE_BUFFERS)  # they take turns over all tiles
            first = q * width if self.t.bn % width == 0 else minimum(q * width, self.t.bn - width)
            v = self.values(z, row, col, first) if p.c.dtype.bytes == 2 else None
            self.begin_piece()
            if v is not None:
                self.fill_matrices(v, buffer)
            else:
                self.fill_pairs(z, row, col, first, buffer)
            self.store_piece(z, row, col + first, buffer)

    def begin_piece(self) -> None:
        """Wait until the next store buffer may be filled."""
        if self.p.in_boxes:
            with self.b.when(self.leader):
                self.b.do("bulk_wait_read", STORE_BUFFERS - 1)
            self.b.do("named_barrier", self.w + 1, GROUP)

    def store_piece(self, z: tuple[Expr, ...], row: Expr, col: Expr, buffer: Expr) -> None:
        """A store buffer -> 64 rows of the result."""
        (self.store_box if self.p.in_boxes else self.store_vectors)(z, row, col, buffer)

    def store_box(self, z: tuple[Expr, ...], row: Expr, col: Expr, buffer: Expr) -> None:
        """A store buffer -> result, by the copy engine."""
        b, p, width = self.b, self.p, ROW // self.p.c.dtype.bytes
        b.do("fence_async")
        b.do("named_barrier", self.w + 1, GROUP)
        with b.when(self.leader):
            with b.when(row < p.m), b.when(col < p.n):
                place, box = (
                    p.c.ref(*p.place(z, row, col), lanes=width),
                    self.out.ref(self.w, buffer, 0, 0, lanes=width),
                )
                b.do("tma_store", place, box, WGMMA_ROWS)
            b.do("bulk_commit")  # a group even where there is nothing to store: groups and buffers take turns

    def store_vectors(self, z: tuple[Expr, ...], row: Expr, col: Expr, buffer: Expr) -> None:
        """A store buffer -> result, 8 neighbouring threads a row. One barrier for each buffer will do: who fills this
        one again has passed that of the other one, which each thread reaches when it has read this one.
        """
        b, p, lanes = self.b, self.p, STORED // self.p.c.dtype.bytes
        vectors = ROW // STORED
        b.do("named_barrier", self.w + 1, GROUP)
        with b.loop("i", WGMMA_ROWS * vectors // GROUP, "unroll") as i:
            r = b.let("r", i * (GROUP // vectors) + (self.warp * 32 + self.lane) // vectors)
            c = b.let("c", self.lane % vectors * lanes)
            with b.when(row + r < p.m), b.when(col + c < p.n):
                b.store(
                    p.c, p.place(z, row + r, col + c, lanes=lanes), load(self.out, (self.w, buffer, r, c), lanes), lanes
                )

    def store_elements(self, z: tuple[Expr, ...], row: Expr, col: Expr) -> None:
        """Registers -> result, one by one."""
        b, p = self.b, self.p
        with b.loop("j", self.t.bn // 8, "unroll") as j, b.loop("h", 2, "unroll") as h:
            r = b.let("r", row + self.warp * 16 + h * 8 + self.lane // 4)
            with b.when(r < p.m), b.loop("e", 2, "unroll") as e:
                c = b.let("c", col + j * 8 + self.lane % 4 * 2 + e)
                with b.when(c < p.n):
                    total = load(self.acc, (j * 4 + h * 2 + e,))
                    b.store(p.c, p.place(z, r, c), p.finish(z[0] if z else const(0), r, c, const(0), total))

    def values(self, z: tuple[Expr, ...], row: Expr, col: Expr, first: Expr) -> Buffer:
        """Fill a 16-bit store buffer from column `first` of the tile on, all values computed before, so that the
        epilogue's reads overlap.
        """
        b, width = self.b, ROW // 2
        v = b.alloc("v", self.p.c.dtype, width // 16, 8)
        with b.loop("c", width // 16, "unroll") as c, b.loop("j", 2, "unroll") as j, b.loop("h", 2, "unroll") as h:
            at = (row + self.warp * 16 + h * 8 + self.lane // 4, col + first + c * 16 + j * 8 + self.lane % 4 * 2)
            self.finish_pair(z, at, (first + c * 16 + j * 8) // 2 + h * 2, v, (c, j * 4 + h * 2))
        return v

    def fill_matrices(self, v: Buffer, buffer: Expr) -> None:
        """16 columns of a warp's rows at a time."""
        with self.b.loop("c", ROW // 32, "unroll") as c:
            place = self.out.ref(self.w, buffer, self.warp * 16 + self.lane % 16, c * 16 + self.lane // 16 * 8, lanes=8)
            self.b.do("stmatrix_x4", place, load(v, (c, 0), 8))

    def fill_pairs(self, z: tuple[Expr, ...], row: Expr, col: Expr, first: Expr, buffer: Expr) -> None:
        """A store buffer of results of 32 or 8 bits, from column `first` of the tile on."""
        b, width = self.b, ROW // self.p.c.dtype.bytes
        with b.loop("j", width // 8, "unroll") as j, b.loop("h", 2, "unroll") as h:
            inside = (self.warp * 16 + h * 8 + self.lane // 4, j * 8 + self.lane % 4 * 2)
            at = (row + inside[0], col + first + inside[1])
            self.finish_pair(z, at, (first + j * 8) // 2 + h * 2, self.out, (self.w, buffer, *inside))

    def finish_pair(
        self, z: tuple[Expr, ...], at: tuple[Expr, Expr], register: Expr, to: Buffer, place: tuple[Expr, ...]
    ) -> None:
        """Two neighbouring results. Outside of the matrix they repeat its last row and columns, unstored."""
        j = loop_var("j.", const(0), const(2))
        row, col = minimum(at[0], const(self.p.m - 1)), minimum(at[1], const(self.p.n - 2))
        made = self.p.finish(z[0] if z else const(0), row, col, j, load(self.acc, (register + j,)))
        self.b.emit(Vectorizer(j, const(0), 2).store(Store(to, (*place[:-1], place[-1] + j), made)))
