"""A scatter in which a GPU's block owns rows of the result, sorts their updates, and reduces each row's segment.

A block has one of `shares` sets of rows and one of `slabs` ranges of their columns. In each round its threads

1. read the rows of `per` updates each and list those of the set, as keys `row in the set * size + update`;
2. sort the keys unless they are in order (a bitonic network; keys differ, so the updates of a row keep their order);
3. reduce: each group of threads has an equal part of the sorted keys, a thread of it some columns. Rows that begin and
   end within the part go to the result at once; what the part's first row has is handed to the group in whose part
   that row begins. Of a row with many updates, more of them are read at once.

So a row with many updates is the work of all groups, and the parts of its sum depend on the updates alone: the bits are
the same in every run. They are those of another order of additions than that of a walk of the updates.

A set is every so many rows, so that rows with many updates, which tables often begin with, are in different sets; of
narrow rows it is a range. All sizes are known; there are updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dnnc.ir.dtype import DType, i32, i64
from dnnc.ir.expr import Expr, cast, const, load, maximum, minimum, select, substitute, value
from dnnc.ir.loops.stmt import Block, Buffer, Builder, call
from dnnc.passes.lower.scatter import Scattered, combine
from dnnc.passes.schedule.owners import Places, unflattened, within

WARP = 32
STRIPE = 128  # bytes of a row from which on a GPU's memory does not care which rows a block has
BATCH = 8  # updates of a column that a thread reads before it adds the first one
RUN = 28  # the same, where all of them are of one row: their registers leave room for a second block
MOST_GROUPS = 32  # whose parts of one row are added up one after the other


def by_blocks(s: Scattered, shares: int, threads: int, per: int, slabs: int = 1) -> Block:
    """The schedule of this module. `threads` and `per` are powers of two."""
    return _Blocks(s, shares, threads, per, slabs).build()


class _Blocks:
    def __init__(self, s: Scattered, shares: int, threads: int, per: int, slabs: int) -> None:
        self.b, self.s, self.places = Builder(), s, Places.of(s)
        self.threads, self.per, self.slabs = threads, per, slabs
        self.rows, self.updates, self.width = (
            int(value(x) or 0) for x in (self.places.count, self.places.updates, self.places.width)
        )
        self.size, self.wide = threads * per, -(-self.width // slabs)
        self.rounds = -(-self.updates // self.size)
        self.across = min(threads, WARP, 1 << (self.wide - 1).bit_length())
        self.columns = -(-self.wide // self.across)  # of a thread
        self.groups = min(threads // self.across, MOST_GROUPS)
        self.striped = self.width * s.out.dtype.bytes >= STRIPE
        self.chunk = -(-self.rows // min(shares, self.rows))
        self.sets = min(shares, self.rows) if self.striped else -(-self.rows // self.chunk)
        self.sum_type: DType = s.out.dtype.computed
        self.key_type = i32 if self.chunk * self.size < 1 << 31 else i64

    def build(self) -> Block:
        b = self.b
        with b.loop("b", self.sets * self.slabs, "block.x") as block:
            self.set, self.slab = block // self.slabs, block % self.slabs
            self.keys = b.alloc("keys", self.key_type, self.size, space="shared")
            self.totals = b.alloc("totals", i64, -(-self.threads // WARP), space="shared")
            self.heads = b.alloc("heads", self.sum_type, self.groups * self.columns * self.across, space="shared")
            self.first = b.alloc("first", i64, self.groups, space="shared")
            self.last = b.alloc("last", i64, self.groups, space="shared")
            with b.loop("t", self.threads, "thread.x") as self.t:
                self.group, self.lane = self.t // self.across, self.t % self.across
                if self.s.starts:
                    self._start()
                with b.loop("round", self.rounds) as self.turn:
                    total = self._list()
                    with b.when(const(0) < self._unordered(total)):
                        self._sort(total)
                    self._reduce(total)
        return b.block()

    # --- rows and columns ---------------------------------------------------------------------------------------------

    def _row(self, k: Expr) -> Expr:
        """The row with a number in the set."""
        return k * self.sets + self.set if self.striped else self.set * self.chunk + k

    def _number(self, row: Expr) -> Expr:
        """A row's number in the set; out of [0, chunk) for rows of others."""
        if not self.striped:
            return row - self.set * self.chunk
        return select((row % self.sets).eq(self.set), row // self.sets, const(-1))

    def _inside(self, k: Expr) -> Expr:
        return select(const(0) <= k, select(k < self.chunk, const(1), const(0)), const(0))

    def _place(self, k: Expr, at: Sequence[Expr]) -> tuple[Expr, ...]:
        """The index of an element in a row of the set; `at` has the indices along the columns."""
        return tuple(self.places.place(self.b.let("row", within(self._row(k), self.rows)), at)) or (const(0),)

    @contextmanager
    def _column(self, c: Expr, updated: bool) -> Iterator[list[Expr]]:
        """Where a thread has a column `c`: its indices. `updated`: where the updates, too, are as wide as that."""
        b, s, columns = self.b, self.s, self.places.columns
        column = c * self.across + self.lane
        there = self.slab * self.wide + column
        at = unflattened(there, [s.out.shape[k] for k, _ in columns])
        with b.when(column < self.wide), b.when(there < self.width):
            if not updated:
                yield at
                return
            fits: Expr = const(1)
            for i, (_, u) in zip(at, columns):
                fits = select(i < s.extents[u], fits, const(0))
            with b.when(const(0) < fits):
                yield at

    def _start(self) -> None:
        """Write the rows of the set as they are before the updates."""
        b, teams = self.b, self.threads // self.across
        with b.loop("k", -(-self.chunk // teams)) as k:
            mine = k * teams + self.group
            with b.when(mine < self.chunk), b.when(self._row(mine) < self.rows), b.loop("c", self.columns) as c:
                with self._column(c, updated=False) as at:
                    self.s.start(b, self.places.place(self._row(mine), at))
        b.do("barrier")

    # --- 1 and 2: the keys --------------------------------------------------------------------------------------------

    def _list(self) -> Expr:
        """Write the keys of the set's updates in this round, in the order of these; return their number."""
        b, t, per = self.b, self.t, self.per
        at, n, place = (b.alloc(name, i64, count) for name, count in (("at", per), ("n", 1), ("place", 1)))
        b.store(n, (0,), const(0))
        with b.loop("j", per, "unroll") as j:
            number = self.turn * self.size + t * per + j
            b.store(at, (j,), const(-1))
            with b.when(number < self.updates):
                update = self.places.update(
                    within(number, self.updates), [self.s.over[u] for _, u in self.places.columns]
                )
                b.store(at, (j,), self._number(b.let("row", self.places.row(update))))
            b.store(n, (0,), n[0] + self._inside(at[j]))
        self._sum_before(n, place)
        with b.loop("j", per, "unroll") as j, b.when(const(0) < self._inside(at[j])):
            key = at[j] * self.size + t * per + j
            b.store(self.keys, (within(place[0], self.size),), cast(key, self.key_type))
            b.store(place, (0,), place[0] + 1)
        b.do("barrier")
        return b.let("total", minimum(self._of_warps(), self.size))

    def _unordered(self, total: Expr) -> Expr:
        """How many keys are smaller than the one before."""
        b, n, place = self.b, self.b.alloc("unordered", i64, 1), self.b.alloc("before", i64, 1)
        b.store(n, (0,), const(0))
        with b.loop("c", (total + (self.threads - 1)) // self.threads) as c:
            at = b.let("here", within(c * self.threads + self.t, self.size - 1))
            with b.when(at + 1 < total):
                b.store(n, (0,), n[0] + select(self.keys[at + 1] < self.keys[at], const(1), const(0)))
        b.do("barrier")  # all have read the sums of warps
        self._sum_before(n, place)
        return self._of_warps()

    def _of_warps(self) -> Expr:
        """The sum over the block, behind `_sum_before`."""
        total: Expr = const(0)
        for w in range(-(-self.threads // WARP)):
            total = total + self.totals[w]
        return self.b.let("sum", total)

    def _sum_before(self, n: Buffer, place: Buffer) -> None:
        """place = the sum of n over the threads before this one; totals = the sums of warps."""
        b, t = self.b, self.t
        b.store(place, (0,), n[0])
        for k in range(WARP.bit_length() - 1):
            before = b.let("before", call("shfl_up", place[0], 1 << k))
            b.store(place, (0,), place[0] + select(t % WARP < (1 << k), const(0), before))
        with b.when((t % WARP).eq(const(WARP - 1))):
            b.store(self.totals, (t // WARP,), place[0])
        b.do("barrier")
        start: Expr = place[0] - n[0]
        for w in range(self.threads // WARP - 1):
            start = start + select(const(w) < t // WARP, self.totals[w], const(0))
        b.store(place, (0,), start)

    def _sort(self, total: Expr) -> None:
        """Sort the keys by a bitonic network whose stages all rise (the first step of a stage compares mirrored).

        A pair that reaches behind the last key is in order, as if the keys there were infinite. Steps within 64 keys
        are those of one warp, which needs no barrier of the block.
        """
        b, one = self.b, const(1)
        rounds = (minimum(total, self.size // 2) + (self.threads - 1)) // self.threads
        with b.loop("stage", self.size.bit_length() - 1) as stage, b.when(call("shl", one, stage) < total):
            with b.loop("step", stage + 1) as step:
                half = b.let("half", call("shl", one, stage - step))
                with b.loop("c", rounds) as c:
                    pair = b.let("pair", c * self.threads + self.t)
                    blocks = b.let("blocks", call("shl", call("shr", pair, stage - step), stage - step))
                    low = b.let("low", pair + blocks)
                    apart = select(step.eq(const(0)), 2 * half - 1 - 2 * (pair - blocks), half)
                    high = b.let("high", low + apart)
                    with b.when(high < total):
                        low, high = within(low, self.size), within(high, self.size)
                        a, z = b.let("a", self.keys[low]), b.let("z", self.keys[high])
                        with b.when(z < a):
                            b.store(self.keys, (low,), z)
                            b.store(self.keys, (high,), a)
                # a step reaches over 2 * half keys, the next stage's first step over twice its stage's
                ahead = select(step.eq(stage), call("shl", const(4), stage), const(0))
                b.branch(maximum(2 * half, ahead) <= 2 * WARP, lambda: b.do("syncwarp"), lambda: b.do("barrier"))
        b.do("barrier")

    # --- 3: the segments ----------------------------------------------------------------------------------------------

    def _reduce(self, total: Expr) -> None:
        b, none = self.b, const(-1)
        acc = b.alloc("acc", self.sum_type, self.columns)
        last, here = (b.alloc(name, i64, 1) for name in ("tail", "next"))
        with b.when(self.group < self.groups):
            part = b.let("part", (total + (self.groups - 1)) // self.groups)
            begin = b.let("begin", minimum(self.group * part, total))
            end = b.let("end", minimum(begin + part, total))
            with b.when(self.lane.eq(const(0))):
                b.store(self.first, (self.group,), none)
                b.store(self.last, (self.group,), none)
            with b.when(begin < end):
                head = b.let("head", self._key(begin)[0])
                b.store(last, (0,), none)
                b.store(here, (0,), begin)
                with b.loop("q", (end - begin + (BATCH - 1)) // BATCH), b.when(here[0] < end):
                    self._step(here, end, head, last, acc)
                with b.when(last[0].eq(head)):
                    self._each_column(lambda c, at: b.store(self.heads, (self._head(self.group, c),), acc[c]))
                with b.when(self.lane.eq(const(0))):
                    b.store(self.first, (self.group,), head)
                    b.store(self.last, (self.group,), last[0])
        b.do("barrier")
        with b.when(self.group < self.groups):
            self._join(acc)
        b.do("barrier")

    def _key(self, at: Expr) -> tuple[Expr, Expr]:
        """(a row's number in the set, an update) of a sorted key."""
        key = self.b.let("key", cast(self.keys[within(at, self.size)], i64))
        update = key % self.size + self.turn * self.size
        return self.b.let("k", key // self.size), self.b.let("number", within(update, self.updates))

    def _head(self, group: Expr, c: Expr) -> Expr:
        return (minimum(group, self.groups - 1) * self.columns + c) * self.across + self.lane

    def _each_column(self, body: Callable[[Expr, list[Expr]], None]) -> None:
        with self.b.loop("c", self.columns, "unroll") as c, self._column(c, updated=True) as at:
            body(c, at)

    def _old(self, place: tuple[Expr, ...]) -> Expr:
        """What an element holds before the updates of a round."""
        s = self.s
        if s.initial is not None and self.rounds == 1:
            return cast(cast(substitute(s.initial, dict(zip(s.axes, place))), s.out.dtype), self.sum_type)
        return cast(load(s.out, place), self.sum_type)

    def _write(self, place: tuple[Expr, ...], old: Expr | None, new: Expr) -> None:
        v = new if old is None else combine(self.s.how, old, new)
        self.b.store(self.s.out, place, cast(v, self.s.out.dtype))

    def _combine(self, acc: Expr, v: Expr) -> Expr:
        return v if self.s.how == "last" else combine(self.s.how, acc, v)

    def _step(self, here: Buffer, end: Expr, head: Expr, last: Buffer, acc: Buffer) -> None:
        """Take RUN keys if they are of the row before them, else BATCH."""
        b, start = self.b, self.b.let("start", here[0])
        if self.size < RUN:
            self._batch(start, end, head, last, acc)
            b.store(here, (0,), start + BATCH)
            return
        far = b.let("far", self._key(minimum(start + (RUN - 1), end - 1))[0])
        same = select(far.eq(last[0]), const(1), const(0))
        run = const(0) < b.let("run", select(start + RUN <= end, same, const(0)))
        b.store(here, (0,), start + select(run, const(RUN), const(BATCH)))
        b.branch(
            run,
            lambda: self._run(b.let("at_run", within(start, self.size - RUN + 1)), acc),
            lambda: self._batch(start, end, head, last, acc),
        )

    def _batch(self, begin: Expr, end: Expr, head: Expr, last: Buffer, acc: Buffer) -> None:
        """Take BATCH keys: all is read before anything is written, so that a thread waits for memory once."""
        b, s = self.b, self.s
        rows, numbers = b.alloc("rows", i64, BATCH + 1), b.alloc("numbers", i64, BATCH)
        new, old = b.alloc("new", self.sum_type, BATCH), b.alloc("old", self.sum_type, BATCH)
        b.store(rows, (0,), last[0])
        with b.loop("j", BATCH, "unroll") as j:
            row, number = self._key(minimum(begin + j, end - 1))
            b.store(rows, (j + 1,), row)
            b.store(numbers, (j,), number)
        with b.loop("c", self.columns, "unroll") as c, self._column(c, updated=True) as at:
            with b.loop("j", BATCH, "unroll") as j:
                update = dict(zip(s.over, self.places.update(within(numbers[j], self.updates), at)))
                b.store(new, (j,), substitute(s.value, update))
                if s.how != "last":
                    b.store(old, (j,), self._old(self._place(maximum(rows[j], const(0)), at)))
            with b.loop("j", BATCH, "unroll") as j, b.when(begin + j < end):
                before, row = b.let("before", rows[j]), b.let("row", rows[j + 1])

                def to_others() -> None:
                    b.store(self.heads, (self._head(self.group, c),), acc[c])

                def to_result() -> None:
                    self._write(self._place(before, at), None if s.how == "last" else old[j], acc[c])

                with b.when(before.ne(row)), b.when(const(0) <= before):
                    b.branch(before.eq(head), to_others, to_result)
                b.store(acc, (c,), select(before.ne(row), new[j], self._combine(acc[c], new[j])))
        b.store(last, (0,), rows[BATCH])

    def _run(self, begin: Expr, acc: Buffer) -> None:
        """Take RUN keys of the row that the key before them has."""
        b, s = self.b, self.s
        new = b.alloc("new", self.sum_type, RUN)
        with b.loop("c", self.columns, "unroll") as c, self._column(c, updated=True) as at:
            with b.loop("j", RUN, "unroll") as j:
                _, number = self._key(begin + j)
                update = dict(zip(s.over, self.places.update(number, at)))
                b.store(new, (j,), substitute(s.value, update))
            with b.loop("j", RUN, "unroll") as j:
                b.store(acc, (c,), self._combine(acc[c], new[j]))

    def _join(self, acc: Buffer) -> None:
        """Write the rows at the ends of parts, each by the group in whose part it begins."""
        b, group = self.b, self.group
        head, last = b.let("head", self.first[group]), b.let("end", self.last[group])
        before = b.alloc("before", i64, 1)
        b.store(before, (0,), const(-1))
        with b.when(const(0) < group):
            b.store(before, (0,), self.last[maximum(group - 1, const(0))])
        begins = b.let("begins", select(before[0].eq(head), const(0), const(1)))

        def own(c: Expr, at: list[Expr]) -> None:
            """The first row, which begins here and ends here."""
            place = self._place(head, at)
            self._write(place, None if self.s.how == "last" else self._old(place), self.heads[self._head(group, c)])

        def joined(c: Expr, at: list[Expr]) -> None:
            """The last row: what it has here, and in the parts that follow."""
            sum_, going = b.alloc("whole", self.sum_type, 1), b.alloc("going", i64, 1)
            b.store(sum_, (0,), select(head.eq(last), self.heads[self._head(group, c)], acc[c]))
            b.store(going, (0,), const(1))
            with b.loop("g", self.groups - 1 - group) as g:
                other = b.let("other", minimum(group + 1 + g, self.groups - 1))
                goes = select(self.first[other].eq(last), going[0], const(0))
                b.store(going, (0,), goes)
                with b.when(const(0) < going[0]):
                    b.store(sum_, (0,), self._combine(sum_[0], self.heads[self._head(other, c)]))
                    b.store(going, (0,), select(self.last[other].eq(last), const(1), const(0)))
            place = self._place(last, at)
            self._write(place, None if self.s.how == "last" else self._old(place), sum_[0])

        with b.when(const(0) <= head):
            with b.when(head.ne(last)), b.when(const(0) < begins):
                self._each_column(own)
            with b.when(const(0) < select(head.eq(last), begins, const(1))):
                self._each_column(joined)
