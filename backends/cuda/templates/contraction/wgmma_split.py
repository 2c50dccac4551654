"""Split-k: where tiles are too few for all SMs, a cluster's blocks each sum a part of a tile.

Each block of the cluster runs the ring of `wgmma_kernel.py` over its own steps and leaves its sums in its shared
memory. Then each finishes some rows of the tile: it adds all blocks' sums in their order, whatever the timing.
"""

from __future__ import annotations

from dnnc.backends.cuda.templates.contraction.wgmma_kernel import SUM_PAD, Product, Tiling, Writer
from dnnc.backends.cuda.templates.reduction.partial import LANES, Parts
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, const, load
from dnnc.ir.loops.hopper import GROUP, WGMMA_ROWS
from dnnc.ir.loops.stmt import Buffer, Func, Kernel, Store, loop_var
from dnnc.passes.schedule.memory import Vectorizer


class SplitWriter(Writer):
    def __init__(self, p: Product, t: Tiling) -> None:
        super().__init__(p, t)
        if self.kt % t.split or t.bm % t.split or p.n % LANES:
            raise ScheduleError(
                f"{self.kt} steps of a sum, {t.bm} rows and {p.n} columns cannot be shared by {t.split} blocks"
            )
        self.kt //= t.split

    def kernel(self) -> Kernel:
        b, t = self.b, self.t
        with b.loop("block", self.tiles, "block.x") as block, b.loop("part", t.split, "cluster") as part:
            self.origin = part * self.kt
            self.allocate()
            with b.loop("t", t.threads, "thread.x") as thread:
                self.prepare(thread)
                b.branch(
                    thread < t.consumers * GROUP,
                    lambda: self.consume(block, thread),
                    lambda: self.produce(block, thread),
                )
                b.do("cluster_barrier")
                with b.when(thread < t.consumers * GROUP):
                    self.combine(*self.corner(block), part, thread)
                b.do("cluster_barrier")  # nobody may end while another one still reads its sums
        return Kernel((Func(self.p.name, self.p.params, b.block()),), self.p.locs)

    def allocate_results(self) -> None:
        self.sums = self.b.alloc("sums", self.p.sums, self.t.consumers, WGMMA_ROWS, self.t.bn + SUM_PAD, space="shared")

    def produce(self, block: Expr, thread: Expr) -> None:
        with self.b.when(thread < self.t.consumers * GROUP + 1):
            self.begin_producer(block)
            self.fill(const(0), *self.corner(block))

    def consume(self, block: Expr, thread: Expr) -> None:
        self.begin_consumer(thread)
        self.compute(const(0), *self.corner(block))

    def finish_tile(self, done: Expr, z: tuple[Expr, ...], row: Expr, col: Expr) -> None:
        """Registers -> this block's sums."""
        b = self.b
        with b.loop("j", self.t.bn // 8, "unroll") as j, b.loop("h", 2, "unroll") as h:
            at = (self.w, self.warp * 16 + h * 8 + self.lane // 4, j * 8 + self.lane % 4 * 2)
            b.store(self.sums, at, load(self.acc, (j * 4 + h * 2,), 2), 2)

    def combine(self, z: tuple[Expr, ...], row: Expr, col: Expr, part: Expr, thread: Expr) -> None:
        """The sums of all blocks -> some rows of the result."""
        b, t, p = self.b, self.t, self.p

        def finish(r: Expr, c: Expr, total: Buffer) -> None:
            with b.when(row + r < p.m), b.when(col + c + (LANES - 1) < p.n):
                j = loop_var("j.", const(0), const(LANES))
                made = p.finish(z[0] if z else const(0), row + r, col + c, j, load(total, (j,)))
                b.emit(Vectorizer(j, const(0), LANES).store(Store(p.c, p.place(z, row + r, col + c, j, LANES), made)))

        parts = Parts(t.bm, t.bn, 1, t.split, t.consumers * GROUP)
        parts.combine(b, self.sums, lambda _, r, c: (r // WGMMA_ROWS, r % WGMMA_ROWS, c), part, thread, finish)
