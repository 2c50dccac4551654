"""A tile whose sums lie in parts, with thread groups of a block or blocks of a cluster: how they meet.

Each group leaves its sums in the shared memory of its block. Then every thread finishes some vectors of the tile: it
adds all groups' sums in their order, whatever the timing; blocks of a cluster take some rows of the tile each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dnnc.ir.dtype import DType, f32, i32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, const
from dnnc.ir.loops.stmt import Buffer, Builder, call

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

LANES = 4  # sums that a thread adds at a time
PAD = 8  # elements after a row of sums: neighbouring rows begin in different banks
# blocks of a cluster -> the share of all multiprocessors that such clusters can use: each lies in a group of 16 or 18
SPLITS = {1: 1.0, 2: 1.0, 4: 0.92, 8: 0.85}
SHARE = 1200  # cycles of a cluster's two barriers
OWN_BYTES, PEER_BYTES = (
    128,
    25,
)  # bytes a cycle that an SM moves to and from its own shared memory, and reads of other blocks'

Place = Callable[[Expr, Expr, Expr], tuple[Expr, ...]]  # (group, row, column) -> where the group has that sum
Finish = Callable[[Expr, Expr, Buffer], None]  # (row, column, LANES sums from there on): stores them


def splits(target: GpuTarget, dtype: DType, tiles: int, rows: int) -> tuple[int, ...]:
    """By how many blocks a tile's sum may be worth sharing: `peer` reads numbers of 32 bits."""
    if not target.has_tma or dtype not in (f32, i32) or tiles >= 2 * target.sms:
        return (1,)
    return tuple(n for n in SPLITS if rows % n == 0 and tiles * n <= 8 * target.sms)


def busiest(target: GpuTarget, tiles: int, split: int) -> int:
    """Blocks of the busiest SM."""
    return -(-tiles * split // max(int(target.sms * SPLITS[split]), 1))


def meeting(sums: int, slices: int, split: int) -> float:
    """Estimated cycles of an SM in which the parts of a tile of so many sums of 4 bytes are written and read."""
    if slices * split == 1:
        return 0
    return sums * slices * 4 / OWN_BYTES + sums * slices * 4 / (PEER_BYTES if split > 1 else OWN_BYTES)


@contextmanager
def cluster(b: Builder, split: int) -> Iterator[Expr]:
    """The loop over the blocks of a cluster; no loop where a block is alone."""
    if split == 1:
        yield const(0)
    else:
        with b.loop("part", split, "cluster") as part:
            yield part


@dataclass(frozen=True)
class Parts:
    """A `rows` x `cols` tile sums in `slices` parts of `split` blocks; `threads` of each block finish it."""

    rows: int
    cols: int
    slices: int
    split: int
    threads: int

    def __post_init__(self) -> None:
        if self.rows % self.split or self.cols % LANES:
            raise ScheduleError(
                f"{self.rows} rows of {self.cols} sums cannot be shared by {self.split} blocks in vectors of {LANES}"
            )

    def memory(self, b: Builder, dtype: DType) -> Buffer:
        """Shared memory for the parts of this block, by group, row and column."""
        return b.alloc("sums", dtype, self.slices, self.rows, self.cols + PAD, space="shared")

    def finish(self, b: Builder, sums: Buffer, part: Expr, thread: Expr, store: Finish) -> None:
        """`combine` where every thread has written its sums into `memory` and goes on to here. Blocks of a cluster
        read all parts before they store: nobody may end while another one still reads its sums, and who has no more to
        read need not wait for what was stored.
        """
        if self.split == 1:
            b.do("barrier")
            self.combine(b, sums, lambda *place: place, part, thread, store)
            return
        if self.slices > 1:  # a block's parts meet first: what others have is far away
            b.do("barrier")
            here = replace(self, split=1)
            for _, row, col in here.shares(b, const(0), thread):
                total = b.alloc("total", sums.dtype, LANES)
                here.add(b, sums, row, col, total, (const(0),), lambda *place: place)
                b.store(sums, (0, row, col), total.at(0, lanes=LANES), LANES)
        b.do("cluster_barrier")
        totals, joined = b.alloc("totals", sums.dtype, self.turns, LANES), replace(self, slices=1)
        for turn, row, col in self.shares(b, part, thread):
            joined.add(b, sums, row, col, totals, (turn, const(0)), lambda *place: place)
        b.do("cluster_arrive")
        for turn, row, col in self.shares(b, part, thread):
            own = b.alloc("total", sums.dtype, LANES)
            b.store(own, (0,), totals.at(turn, 0, lanes=LANES), LANES)
            store(row, col, own)
        b.do("cluster_wait")

    def combine(self, b: Builder, sums: Buffer, at: Place, part: Expr, thread: Expr, store: Finish) -> None:
        """All parts -> finished rows of block `part` of the cluster, between barriers of writers and readers."""
        for _, row, col in self.shares(b, part, thread):
            total = b.alloc("total", sums.dtype, LANES)
            self.add(b, sums, row, col, total, (const(0),), at)
            store(row, col, total)

    @property
    def turns(self) -> int:
        """In which threads finish the block's rows, LANES sums each."""
        return -(-(self.rows // self.split * (self.cols // LANES)) // self.threads)

    def shares(self, b: Builder, part: Expr, thread: Expr) -> Iterator[tuple[Expr, Expr, Expr]]:
        """The turns of a thread, with the row and the first column of its sums in each."""
        vectors, rows = self.cols // LANES, self.rows // self.split
        with b.loop("turn", self.turns, "unroll") as turn:
            e = b.let("e", turn * self.threads + thread)
            with b.when(e < rows * vectors):
                yield turn, b.let("r", part * rows + e // vectors % rows), b.let("c", e % vectors * LANES)

    def add(
        self, b: Builder, sums: Buffer, row: Expr, col: Expr, into: Buffer, place: tuple[Expr, ...], at: Place
    ) -> None:
        """Add all parts of LANES sums, always in the same order."""
        b.store(into, place, const(0, sums.dtype), LANES)
        with b.loop("s", self.slices, "unroll") as s:
            if self.split == 1:
                b.store(into, place, into.at(*place, lanes=LANES) + sums.at(*at(s, row, col), lanes=LANES), LANES)
                return
            theirs = b.alloc("theirs", sums.dtype, self.split, LANES)  # all are asked for before any is waited for
            with b.loop("q", self.split, "unroll") as q:
                b.store(theirs, (q, 0), call("peer", sums.ref(*at(s, row, col), lanes=LANES), q), LANES)
            with b.loop("q", self.split, "unroll") as q:
                b.store(into, place, into.at(*place, lanes=LANES) + theirs.at(q, 0, lanes=LANES), LANES)
