"""Results too large for any cache, and the stores that take them past it.

In: a kernel. Out: the buffers to stream. An ordinary store first reads the line that it writes, a third of what a copy
moves; a non-temporal one of whole vectors does not (Intel, Optimization Reference Manual, 9.4.1.2; 1.4 times the speed
of x + 1 for 10^7 floats). Such lines are not in the caches afterwards, where results of this size would not have
stayed. The instructions need addresses that are multiples of their size: so such a kernel exists twice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

from dnnc.ir.expr import Const, Linear, Load, value
from dnnc.ir.loops.stmt import Alloc, Buffer, Func, Store, accesses, walk_stmts

LEAST = 32 << 20  # bytes of a result: what a chip of a server's CPU has for all of its cores
AHEAD = 2048  # bytes between what is read and what is asked for: what arrives in the time that memory takes
LINE = 64  # bytes of a line of the cache
FENCE = "llvm.x86.sse.sfence"  # other threads may read what a kernel wrote when it has returned


def streamed(func: Func, features: frozenset[str] | None) -> frozenset[Buffer]:
    """Return large results that a kernel writes in whole vectors and never reads; none without x86 AVX."""
    if features is None or "avx" not in features:
        return frozenset()
    large = {b for b in func.buffers if b.space == "global" and _bytes(b) >= LEAST}
    if not large:
        return frozenset()
    large -= {a.buf for a in accesses(func.body)}
    return frozenset(s.buf for s in walk_stmts(func.body) if isinstance(s, Store) and s.buf in large and whole(s))


def whole(s: Store | Load) -> bool:
    """Does it access half a line, or lines, at a multiple of that, if its buffer starts at one?"""
    size = s.lanes * s.buf.dtype.bytes
    if s.limit is not None or any(i.lanes > 1 for i in s.idx) or not (size == LINE // 2 or size % LINE == 0):
        return False
    return _multiple(s, min(size, LINE) // s.buf.dtype.bytes)


def walks(func: Func) -> bool:
    """True if a kernel sums nothing, so that loads stream memory: prefetched, as hardware stops at each page."""
    return not any(isinstance(s, Alloc) for s in walk_stmts(func.body))


def read_ahead(e: Load) -> bool:
    """Is a load, in such a kernel, one of many of a large operand?"""
    return e.buf.space == "global" and _bytes(e.buf) >= LEAST and whole(e)


def dispatch(symbol: str, params: Sequence[str], buffers: Collection[str], past: str, through: str) -> str:
    """Return a function that calls `past` if the buffers are line-aligned, else `through`."""
    names = [p.rsplit(" ", 1)[1] for p in params]
    types = [p.rsplit(" ", 1)[0] for p in params]
    lines, bits = [], "0"
    for k, b in enumerate(buffers):
        lines += [f"  %.a{k} = ptrtoint ptr {b} to i64", f"  %.o{k} = or i64 {bits}, %.a{k}"]
        bits = f"%.o{k}"
    args = ", ".join(f"{t.removesuffix(' noalias')} {n}" for t, n in zip(types, names))
    return "\n".join([
        f"define void @{symbol}({', '.join(params)}) nounwind {{", "entry:", *lines,
        f"  %.low = and i64 {bits}, {LINE - 1}", "  %.whole = icmp eq i64 %.low, 0",
        "  br i1 %.whole, label %.past, label %.through",
        f".past:\n  call void @{past}({args})\n  ret void", f".through:\n  call void @{through}({args})\n  ret void",
        "}",
    ])  # fmt: skip


def _bytes(b: Buffer) -> int:
    """0 where the shape is open."""
    shape = [value(d) for d in b.shape]
    return prod(int(d or 0) for d in shape) * b.dtype.bytes


def _multiple(s: Store | Load, lanes: int) -> bool:
    at = s.buf.offset(s.idx)
    if isinstance(at, Const):
        return int(at.value) % lanes == 0
    return isinstance(at, Linear) and at.const % lanes == 0 and all(c % lanes == 0 for _, c in at.terms)
