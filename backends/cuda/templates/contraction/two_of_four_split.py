"""2:4 sparse weights where tiles are too few for all multiprocessors: a cluster's blocks each sum a part of a tile.

As in `wgmma_split.py`, but sums lie by pixels in shared memory, so that rows of the result are finished in vectors.
"""

from __future__ import annotations

from dnnc.backends.cuda.templates.contraction.two_of_four_kernel import SPLIT_PAD, PairWriter
from dnnc.backends.cuda.templates.contraction.wgmma_split import SplitWriter
from dnnc.backends.cuda.templates.reduction.partial import LANES, Parts
from dnnc.ir.expr import Expr, const, load
from dnnc.ir.loops.hopper import GROUP
from dnnc.ir.loops.stmt import Buffer, Store, loop_var
from dnnc.ir.pairs import ROWS
from dnnc.passes.schedule.memory import Vectorizer


class SplitPairWriter(SplitWriter, PairWriter):
    def allocate_results(self) -> None:
        self.sums = self.b.alloc("sums", self.p.sums, self.t.bn, ROWS + SPLIT_PAD, space="shared")

    def finish_tile(self, done: Expr, z: tuple[Expr, ...], row: Expr, col: Expr) -> None:
        """Registers -> this block's sums."""
        b = self.b
        with b.loop("c", self.t.bn // 16, "unroll") as c, b.loop("r", 8, "unroll") as r:
            pixel, at = self.place(self.w * (ROWS // 2), c * 16, r)
            b.store(self.sums, (pixel, at), load(self.acc, (c * 8 + r,)))

    def combine(self, z: tuple[Expr, ...], row: Expr, col: Expr, part: Expr, thread: Expr) -> None:
        """The sums of all blocks -> some pixels of the result."""
        b, t, p = self.b, self.t, self.p

        def finish(r: Expr, c: Expr, total: Buffer) -> None:
            with b.when(col + r < p.m), b.when(row + c + (LANES - 1) < p.n):
                j = loop_var("j.", const(0), const(LANES))
                made = p.finish(const(0), col + r, row + c, j, load(total, (j,)))
                b.emit(Vectorizer(j, const(0), LANES).store(Store(p.c, p.place(z, col + r, row + c, j, LANES), made)))

        parts = Parts(t.bn, ROWS, 1, t.split, t.consumers * GROUP)
        parts.combine(b, self.sums, lambda _, r, c: (r, c), part, thread, finish)
