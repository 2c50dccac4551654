"""A `sort_digits` -> one naive kernel: rows of keys sorted by digits, lowest first; the schedules' meaning.

    for each row:
        count how often each digit has each value, in one walk of the row
        for each digit:
            sum the counts up: where the keys of each value begin
            for each key in order: write it behind those of its value

A digit that all keys share is a copy. Rows are independent; a row's steps are not, so nothing is fused to the op.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from dnnc.ir.dtype import i64, u32, u64
from dnnc.ir.expr import Expr, Var, cast, const, free, value
from dnnc.ir.graph import Node
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel, call
from dnnc.ir.ops.common import clamp
from dnnc.passes.lower.form import Scan
from dnnc.passes.lower.nests import Lowered

SHORT = 4096  # keys of a row below which digits have 8 bits: their counts are few beside the keys
NARROW, WIDE = 8, 11  # bits of a digit; counts of 11 bits still fit into the first-level cache


def lower_digits(node: Node) -> Lowered:
    """The naive kernel of a `sort_digits`."""
    (x,) = node.inputs
    assert x is not None
    given, made = (Buffer(name, u64, tuple(map(const, v.type.shape))) for name, v in (("x0", x), ("y", node.output)))
    b = Builder()
    with ExitStack() as loops:
        at = tuple(loops.enter_context(b.loop(f"i{k}", d)) for k, d in enumerate(given.shape[:-1]))
        row = _Row(b, given, made, at, int(node.attrs["low"]), int(node.attrs["high"]))
        row.write()
    dims = tuple(sorted({v for d in given.shape for v in free(d)}, key=lambda v: v.name))
    kernel = Kernel((Func("sort_digits", (*dims, given, made), b.block()),), node.locs)
    return Lowered(kernel, (x, node.output), dims, Scan(outer=at, steps=row.n * (1 + len(row.shifts))), (1,))


@dataclass(frozen=True)
class _Row:
    """Writes the steps of the row `at`, whose keys are sorted by their bits from `low` to `high`."""

    b: Builder
    given: Buffer
    made: Buffer
    at: tuple[Var, ...]
    low: int
    high: int

    @property
    def n(self) -> int:
        n = value(self.given.shape[-1])
        assert n is not None, "type rule: a row of keys has a constant size"
        return n

    @property
    def shifts(self) -> range:
        """Where digits begin."""
        return range(self.low, self.high, NARROW if self.n < SHORT else WIDE)

    def write(self) -> None:
        b, n, keep = self.b, self.n, value(self.made.shape[-1])
        if not n or not keep:
            return
        shifts = self.shifts
        values = 1 << (width := shifts.step)
        counts = b.alloc("counts", u32, len(shifts) * values, space="local")
        with b.loop("d", len(shifts) * values) as d:
            b.store(counts, (d,), 0)
        with b.loop("k", n) as k:
            key = b.let("key", self.given[(*self.at, k)])
            for p, shift in enumerate(shifts):
                place = b.let("place", self.digit(key, shift, width) + p * values)
                b.store(counts, (place,), counts[place] + const(1, u32))
        spare = [b.alloc("keys", u64, n, space="local") for _ in shifts[1:3]]
        source: tuple[Buffer, tuple[Var, ...]] = self.given, self.at
        for p, shift in enumerate(shifts):
            last = p == len(shifts) - 1
            to: tuple[Buffer, tuple[Var, ...]] = (self.made, self.at) if last else (spare[p % 2], ())
            self.step(source, to, counts, p * values, shift, width, keep if last else n)
            source = to

    def digit(self, key: Expr, shift: int, width: int) -> Expr:
        return cast(call("shr", key, const(shift, u64)), i64) & ((1 << min(width, self.high - shift)) - 1)

    def step(
        self,
        source: tuple[Buffer, tuple[Var, ...]],
        to: tuple[Buffer, tuple[Var, ...]],
        counts: Buffer,
        first: int,
        shift: int,
        width: int,
        keep: int,
    ) -> None:
        """Move keys to where those of their digit belong; `first` is where its counts begin."""
        b = self.b
        own = b.let("own", self.digit(source[0][(*source[1], 0)], shift, width) + first)

        def copy() -> None:
            with b.loop("k", keep) as k:
                b.store(to[0], (*to[1], k), source[0][(*source[1], k)])

        def scatter() -> None:
            total = b.alloc("total", u32, 1)
            b.store(total, (0,), 0)
            with b.loop("d", 1 << width) as d:
                count = b.let("count", counts[first + d])
                b.store(counts, (first + d,), total[0])
                b.store(total, (0,), total[0] + count)
            with b.loop("k", self.n) as k:
                key = b.let("key", source[0][(*source[1], k)])
                place = b.let("place", self.digit(key, shift, width) + first)
                behind = b.let("behind", counts[place])
                b.store(counts, (place,), behind + const(1, u32))
                where = cast(behind, i64)
                if keep < self.n:
                    with b.when(where < keep):
                        b.store(to[0], (*to[1], clamp(where, keep)), key)
                else:
                    b.store(to[0], (*to[1], clamp(where, keep)), key)

        b.branch(counts[own].eq(const(self.n, u32)), copy, scatter)
