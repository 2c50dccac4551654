"""Schedule primitive `cascade`: no float sum adds more than `longest` terms one after another.

    acc: f32[16] @ register                    acc: f32[16] @ register
    acc[0:+16] = 0.0                           acc[0:+16] = 0.0
    for n in range(4):                         for n in range(4):
        for h in range(56):                        for h in range(56):
            for w in range(56):         ->             acc_h: f32[16] @ register
                acc[0:+16] = acc[0:+16] + e            acc_h[0:+16] = 0.0
                                                       for w in range(56):
                                                           acc_h[0:+16] = acc_h[0:+16] + e
                                                       acc[0:+16] = acc[0:+16] + acc_h[0:+16]

The rounding error of a sum grows with its longest chain of additions (Higham, "The accuracy of floating point
summation", 1993). A loop whose body already adds many terms gets a sum of its own for each iteration, and a long loop
for each piece of about the square root of its length, which costs one addition in `short`. The order depends on the
loops alone, not on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add

from dnnc.ir.bounds import bounds
from dnnc.ir.dtype import DType
from dnnc.ir.expr import Expr, Load, Op, Ref, Var, const, extent, free, load, minimum, value, walk
from dnnc.ir.loops.stmt import (
    Alloc,
    Block,
    Buffer,
    For,
    If,
    Kernel,
    Let,
    Stmt,
    Store,
    exprs,
    loop_var,
    stored,
    substitute_block,
    walk_stmts,
)
from dnnc.passes.schedule.buffers import swap_buffers
from dnnc.passes.schedule.loops import is_reduction
from dnnc.passes.schedule.state import make_loop

LONGEST = 512  # additions one after another
SHORT = 32  # additions for which a sum of their own costs little where each waits for memory
PIECE = 256  # iterations of a loop of unknown length that have a sum of their own
HORIZONTAL = ("hsum", "hprod", "hmax", "hmin")  # make one number of a vector

Order = tuple[tuple[str, Expr], ...]  # names and extents of the loops of a reduction


@dataclass(frozen=True)
class Sum:
    """How a block adds to a buffer in registers: whole vectors, each of which is one element of a tile."""

    chain: int  # additions to one element, one after another
    least: int  # the same where sizes that are not known are least
    used: frozenset[Var]  # loops that choose the element
    limit: Expr | None  # of the lanes of every vector

    def outside(self, v: Var) -> Sum:
        """The same, seen from around a loop."""
        return replace(self, used=self.used - {v})


Sums = dict[Buffer, Sum | None]  # None: what the block does with the buffer is not just adding to it


def cascade(b: Block, short: int = SHORT, longest: int = LONGEST, row: int = LONGEST + 1) -> Block:
    """Bound the chains of all float sums in registers; sums that are also read within their loop stay as they are.

    Args:
        b: a block of loops.
        short: additions for which a sum of their own costs little, at most half of `longest`.
        longest: additions that may follow one another.
        row: terms of a row that has a sum of its own, whether that bounds a chain or not. The order is then the same
            for all sizes from `row` to `longest`, so that one kernel can serve them.
    """
    names = {s.var.name for s in walk_stmts(b) if isinstance(s, For)}
    return _Cascade(names, short, longest, row).block(b)[0]


class _Cascade:
    def __init__(self, names: set[str], short: int, longest: int, row: int) -> None:
        self.names, self.short, self.longest, self.row = names, short, longest, row

    def block(self, b: Block) -> tuple[Block, Sums]:
        """The block with bounded chains, and what it adds to buffers declared outside of it."""
        out: list[Stmt] = []
        sums: Sums = {}
        for s in b:
            if isinstance(s, For):
                made, more = self.loop(s)
            elif isinstance(s, If):
                then, in_then = self.block(s.then)
                other, in_other = self.block(s.other)
                made, more = (If(s.cond, then, other),), joined(in_then, in_other, max)
                more |= {buf: None for buf in _read(s.cond)}
            else:
                made, more = (s,), sums_of(s)
            out += made
            sums = joined(sums, more, add)
        for s in b:
            if isinstance(s, Alloc):
                sums.pop(s.buf, None)
        return tuple(out), sums

    def loop(self, s: For) -> tuple[Block, Sums]:
        body, sums = self.block(s.body)
        few, most = bounds(s.extent)
        count, few = self.longest * PIECE if most is None else most, max(few or 0, 0)
        over = {buf: x for buf, x in sums.items() if x is not None and s.var not in x.used and whole(x, s)}
        chain = max((x.chain for x in over.values()), default=0)
        rows = min((x.least for x in over.values()), default=0) >= self.row
        made = For(s.var, s.lo, s.hi, s.kind, body)
        if s.kind == "range" and count > 1 and (rows or count * chain > self.longest):
            if rows or chain >= self.short:
                made = For(s.var, s.lo, s.hi, s.kind, self.apart(over, s.var.name, body))
                chain = 1
            while count * chain > self.longest:
                piece = self.piece(value(made.extent), chain)
                known = value(made.extent) is not None
                made, count, chain = self.pieces(made, over, piece), -(-count // piece), 1
                if not known:  # one level of pieces has to do
                    count = min(count, self.longest)
            sums |= {buf: Sum(1, 1, x.used, x.limit) for buf, x in over.items()}
        return (made,), {
            buf: x and (x if s.var in x.used else replace(x, chain=x.chain * count, least=x.least * few)).outside(s.var)
            for buf, x in sums.items()
        }

    def pieces(self, s: For, sums: dict[Buffer, Sum], piece: int) -> For:
        """`for r: ..` -> `for ro: for r in a piece: ..`, with sums of their own for each piece."""
        name = self.fresh(f"{s.var.name}p")

        def body(at: Expr) -> Block:
            lo = s.lo + at * piece
            hi = lo + piece if value(s.extent % piece) == 0 else minimum(lo + piece, s.hi)
            v = loop_var(s.var.name, lo, hi)
            inner = For(v, lo, hi, s.kind, substitute_block(s.body, {s.var: v}))
            return self.apart(sums, name, (inner,))

        return make_loop(name, (s.extent + (piece - 1)) // piece, s.kind, body)

    def piece(self, count: int | None, chain: int) -> int:
        """The iterations, of `chain` additions each, that have a sum of their own.

        A divisor of their number that makes about as many pieces as a piece has additions, or else pieces of nearly
        one length.
        """
        least, most = -(-self.short // chain), self.longest // chain
        if count is None:
            return max(PIECE // chain, 1)
        wanted = min(max(min(math.isqrt(count * chain) // chain, PIECE), least), most)
        double = min(2 * wanted, most)
        sizes = (*range(wanted, double + 1), *range(wanted - 1, least - 1, -1))
        return next((n for n in sizes if count % n == 0), -(-count // -(-count // double)))

    def apart(self, sums: dict[Buffer, Sum], name: str, b: Block) -> Block:
        """Add up the terms of a block in buffers of their own, and these sums to the buffers."""
        parts = {buf: Buffer(f"{buf.name}_{name}", buf.dtype, buf.shape, buf.space) for buf in sums}
        out: list[Stmt] = []
        for buf, x in sums.items():
            out.append(Alloc(parts[buf]))
            out += self.each(parts[buf], x, partial(_zero, buf.dtype))
        out += swap_buffers(b, parts)
        for buf, x in sums.items():
            out += self.each(buf, x, partial(_total, buf, parts[buf], x.limit))
        return tuple(out)

    def each(self, buf: Buffer, x: Sum, made: Callable[[tuple[Expr, ...], int], Expr]) -> Block:
        """Store every vector of a tile."""
        lanes = value(buf.shape[-1]) or 1
        loops = [loop_var(self.fresh(f"{buf.name}_{k}"), const(0), d) for k, d in enumerate(buf.shape[:-1])]
        idx = (*loops, const(0))
        body: Block = (Store(buf, idx, made(idx, lanes), lanes, x.limit),)
        for v, d in zip(reversed(loops), reversed(buf.shape[:-1])):
            body = (For(v, const(0), d, "unroll", body),)
        return body

    def fresh(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name


def sums_of(s: Stmt) -> Sums:
    """What one statement, no loop or branch, does with buffers in registers."""
    out: Sums = {}
    if isinstance(s, Store) and s.buf.space == "register" and s.buf.dtype.is_float and is_reduction(s):
        assert isinstance(s.value, Op)
        if s.value.name in ("+", "fma") and s.lanes == value(s.buf.shape[-1]):
            used = frozenset(v for i in s.idx for v in free(i))
            out[s.buf] = Sum(1, 1, used, s.limit)
    every = {buf for e in exprs(s) for buf in _read(e)} | stored((s,))
    return {buf: out.get(buf) for buf in every if buf.space == "register"}


def whole(x: Sum, s: For) -> bool:
    """Can all elements of a tile be set ahead of a loop? Their lanes must then be the same in all iterations."""
    if x.limit is None:
        return True
    inside = {t.var for t in walk_stmts((s,)) if isinstance(t, (For, Let))}
    return not free(x.limit) & inside and not _read(x.limit)


def joined(a: Sums, b: Sums, how: Callable[[int, int], int]) -> Sums:
    """What two blocks do with buffers."""
    out = {**a, **b}
    for buf in a.keys() & b.keys():
        x, y = a[buf], b[buf]
        same = x is not None and y is not None and x.limit is y.limit
        lengths = (how(x.chain, y.chain), how(x.least, y.least)) if same and x and y else (0, 0)
        out[buf] = Sum(*lengths, x.used | y.used, x.limit) if same and x and y else None
    return out


def _read(e: Expr) -> set[Buffer]:
    return {x.buf for x in walk(e) if isinstance(x, (Load, Ref))}


def _zero(dtype: DType, idx: tuple[Expr, ...], lanes: int) -> Expr:
    return const(0.0, dtype)


def _total(buf: Buffer, part: Buffer, limit: Expr | None, idx: tuple[Expr, ...], lanes: int) -> Expr:
    return load(buf, idx, lanes, limit) + load(part, idx, lanes, limit)


# --- the order --------------------------------------------------------------------------------------------------------


def in_rows(kernel: Kernel, reductions: Sequence[Sequence[Var]]) -> bool:
    """Does a kernel combine the terms of every reduction in the order of its loops, each lane a reduction, with sums of
    their own for the rows of a sum? Kernels of one nest, and of the same nest at several sizes, then compute the same
    bits.
    """
    orders = {tuple((v.name, extent(v)) for v in loops) for loops in reductions}
    every = [e for s in walk_stmts(kernel.entry.body) for e in exprs(s)]
    across = not any(isinstance(x, Op) and x.name.startswith(HORIZONTAL) for e in every for x in walk(e))
    return across and _in_rows(kernel.entry.body, (), {}, orders)


def _in_rows(b: Block, around: tuple[For, ...], own: Mapping[Buffer, int], orders: set[Order]) -> bool:
    """The same of a block in these loops; `own`: how many of them are around each buffer."""
    names = {name for order in orders for name, _ in order}
    for s in b:
        if isinstance(s, Alloc):
            own = {**own, s.buf: len(around)}
        elif isinstance(s, For):
            if not _in_rows(s.body, (*around, s), own, orders):
                return False
        elif isinstance(s, If):
            if not all(_in_rows(x, around, own, orders) for x in (s.then, s.other)):
                return False
        elif isinstance(s, Store) and s.buf in own and any(s.buf in _read(e) for e in exprs(s)):
            over = [x for x in around[own[s.buf] :] if not any(x.var in free(i) for i in s.idx)]
            order = tuple((x.var.name, x.extent) for x in around if x.var.name in names)
            if not is_reduction(s) or not any(order == known[: len(order)] for known in orders):
                return False
            if any(x.var.name not in names or value(x.lo) != 0 for x in over):
                return False
            assert isinstance(s.value, Op)
            if s.value.name in ("+", "fma") and [x.var.name for x in over] != [name for name, _ in order[-1:]]:
                return False
    return True
