"""Schedule primitive `scan`: prefix sums (cumsum, cumprod) by teams of threads, in one pass over a row.

    for p in range(rows):
        for s in range(n):                      n * n steps as it is written:
            acc = 0
            for r in range(n):
                if r <= s: acc = acc + e(r)     or r < s, s <= r, s < r: from either end, with or without the element
                                                itself
            y[p, s] = f(acc)

A thread takes `width` neighbours at a time and sums them up; the sums of the threads of a warp are exchanged in
log2(32) steps, those of warps by shared memory; the rest follows. The order depends on the team's size alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Var, const, free, op, substitute, terms, value, walk
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, Builder, For, If, Store, call
from dnnc.passes.schedule.loops import is_index_sum, is_reduction
from dnnc.passes.schedule.parallel_legality import obstacle
from dnnc.passes.schedule.state import find

WARP = 32


@dataclass(frozen=True)
class Sums:
    """The parts of the loop along which sums run."""

    n: Expr  # elements of the loop
    s: Var  # its variable
    r: Var  # that of the reduction within it
    start: Expr  # what sums begin with
    acc: Buffer  # where the naive nest adds up
    how: str  # the operation
    term: Expr  # an element, in terms of r and of the loops around
    before: bool  # the element itself is not counted
    backward: bool  # sums run from the end
    out: Store  # stores the result, in terms of s and of the loops around


def scan(b: Block, name: str, size: int, rows: int, width: int) -> Block:
    """Map the rows of outermost loop `name` to teams of `size` threads; warps take `rows` of them a block."""
    loop = find(b, name)
    if len(b) != 1 or b[0] is not loop or size % WARP or size & (size - 1) or (size > WARP and rows > 1):
        raise ScheduleError(f"{name} is not the outermost loop, or {rows} teams of {size} threads cannot meet")
    if value(loop.extent) != 1 and (why := obstacle(loop)):
        raise ScheduleError(f"{name} cannot be shared among blocks: {why}")
    (inner,) = loop.body
    if not isinstance(inner, For) or value(loop.lo) != 0:
        raise ScheduleError(f"{name} holds no scan")
    x = sums_of(inner)
    count, n = value(loop.extent), value(x.n)
    if not count or not n:
        raise ScheduleError(f"the sizes of {name} and of the loop in it are not known")
    return _Teams(x, loop.var, count, n, size, rows, width).block()


def sums_of(loop: For) -> Sums:
    """The parts of a loop along which sums run; ScheduleError where it is none."""
    try:
        alloc, start, reduction, out = loop.body
        assert (
            isinstance(alloc, Alloc)
            and isinstance(start, Store)
            and isinstance(reduction, For)
            and isinstance(out, Store)
        )
        (guard,) = reduction.body
        assert (
            isinstance(guard, If) and not guard.other and isinstance(guard.cond, Op) and guard.cond.name in ("<", "<=")
        )
        (st,) = guard.then
        assert isinstance(st, Store) and st.buf is alloc.buf is start.buf and out.buf.space == "global"
        assert value(reduction.extent - loop.extent) == 0 and value(loop.lo) == value(reduction.lo) == 0
    except (AssertionError, ValueError):
        raise ScheduleError(f"{loop.var.name} holds no scan") from None
    s, r = loop.var, reduction.var
    gap = guard.cond.args[1] - guard.cond.args[0]  # s - r or r - s
    ts, k = terms(gap)
    if k or dict(ts) not in ({s: 1, r: -1}, {s: -1, r: 1}):
        raise ScheduleError(f"{guard.cond!r} is no condition of a scan")
    term = _term(st)
    if (
        s in free(term)
        or any(isinstance(x, Load) and x.buf is out.buf for x in walk(term))
        or any(r in free(e) for e in (*out.idx, out.value))
    ):
        raise ScheduleError("what is summed depends on where the sum ends")
    how = st.value.name if isinstance(st.value, Op) and st.value.name != "fma" else "+"
    return Sums(loop.extent, s, r, start.value, alloc.buf, how, term, guard.cond.name == "<", dict(ts)[s] < 0, out)


def _term(st: Store) -> Expr:
    """What a step of a reduction adds to its accumulator."""
    own = st.buf.at(*st.idx)
    if is_index_sum(st):
        return st.value - own
    if not is_reduction(st) or not isinstance(st.value, Op):
        raise ScheduleError(f"{st.buf.name} is no plain reduction")
    if st.value.name == "fma":
        return op("*", *st.value.args[:2])
    return next(a for a in st.value.args if a is not own)


class _Teams:
    """Teams of `size` threads for `count` rows of `n` elements; `row` is the variable that counts them."""

    def __init__(self, x: Sums, row: Var, count: int, n: int, size: int, rows: int, width: int) -> None:
        self.x, self.row, self.count, self.n = x, row, count, n
        self.size, self.rows, self.width = size, rows, width
        self.b = Builder()

    def plus(self, a: Expr, e: Expr) -> Expr:
        return op(self.x.how, a, e)

    def block(self) -> Block:
        x, b = self.x, self.b
        warps = self.size // WARP
        with b.loop("b", -(-self.count // self.rows), "block.x") as i:
            part = b.alloc("part", x.acc.dtype, warps, space="shared") if warps > 1 else None
            with b.loop("t", self.size * self.rows, "thread.x") as t:
                row = i * self.rows + t // self.size
                with b.when(row < self.count):
                    carry = b.alloc("carry", x.acc.dtype, 1)
                    b.store(carry, (0,), x.start)
                    step = self.size * self.width
                    with b.loop("g", -(-self.n // step)) as g:
                        self.step(row, g * step + t % self.size * self.width, t, carry, part)
        return b.block()

    def step(self, row: Expr, first: Expr, t: Expr, carry: Buffer, part: Buffer | None) -> None:
        """The elements of one step, of which this thread has those from `first` on."""
        x, b = self.x, self.b
        sums = b.alloc("sums", x.acc.dtype, self.width)
        with b.loop("e", self.width, "unroll") as e:
            b.store(sums, (e,), x.start)
            with b.when(first + e < self.n):
                b.store(sums, (e,), substitute(x.term, {self.row: row, x.r: self.place(first + e)}))
        with b.loop("e", self.width, "unroll", 1) as e:
            b.store(sums, (e,), self.plus(sums[e - 1], sums[e]))
        before, total = b.alloc("before", x.acc.dtype, 1), b.alloc("total", x.acc.dtype, 1)
        b.store(before, (0,), x.start)
        b.store(total, (0,), sums[self.width - 1])
        with b.loop("o", 5, "unroll") as o:
            other = b.let("other", call("shfl_xor", total[0], call("shl", 1, o)))
            with b.when(op("<", const(0), t % WARP & call("shl", 1, o))):
                b.store(before, (0,), self.plus(other, before[0]))
            b.store(total, (0,), self.plus(total[0], other))
        if part is not None:
            self.over_warps(t, part, before, total)
        b.store(before, (0,), self.plus(carry[0], before[0]))
        with b.loop("e", self.width, "unroll") as e, b.when(first + e < self.n):
            self.write(row, first, e, before[0], sums)
        b.store(carry, (0,), self.plus(carry[0], total[0]))

    def place(self, k: Expr) -> Expr:
        """The element of the row that is the k-th on the way."""
        return self.n - 1 - k if self.x.backward else k

    def over_warps(self, t: Expr, part: Buffer, before: Buffer, total: Buffer) -> None:
        """The sums of earlier warps, and of all."""
        x, b = self.x, self.b
        warp = t // WARP
        with b.when((t % WARP).eq(0)):
            b.store(part, (warp,), total[0])
        b.do("barrier")
        earlier = b.alloc("earlier", x.acc.dtype, 1)
        b.store(earlier, (0,), x.start)
        b.store(total, (0,), x.start)
        with b.loop("w", self.size // WARP, "unroll") as w:
            with b.when(w < warp):
                b.store(earlier, (0,), self.plus(earlier[0], part[w]))
            b.store(total, (0,), self.plus(total[0], part[w]))
        b.store(before, (0,), self.plus(earlier[0], before[0]))
        b.do("barrier")  # the next step writes part again

    def write(self, row: Expr, first: Expr, e: Expr, before: Expr, sums: Buffer) -> None:
        x, b = self.x, self.b
        if x.before:
            b.store(acc := b.alloc(x.acc.name, x.acc.dtype, 1), (0,), before)
            with b.when(op("<", const(0), e)):
                b.store(acc, (0,), self.plus(before, sums[op("max", e - 1, const(0))]))
            result = acc[0]
        else:
            result = self.plus(before, sums[e])
        env: dict[Expr, Expr] = {self.row: row, x.s: self.place(first + e), x.acc[0]: result}
        b.store(x.out.buf, tuple(substitute(j, env) for j in x.out.idx), substitute(x.out.value, env))
