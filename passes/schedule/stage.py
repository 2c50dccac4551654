"""Schedule primitive `stage`: what a loop reads of a buffer, copied ahead of it into the thread's own memory.

With a dtype the copy converts, whole vectors at a time: a tile that is broadcast by element would convert each one.
"""

from __future__ import annotations

from dnnc.ir.bounds import bounds, nonneg
from dnnc.ir.dtype import DType
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Ref, Var, cast, const, free, load, maximum, minimum, rebuild, terms, value
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, Builder, Eval, For, Stmt, Store, accesses, map_stmt, walk_stmts
from dnnc.passes.schedule.state import edit, loops

LIMIT = 1 << 16  # elements of a copy: 256 KB of float32, on the thread's stack and in its L2 cache


def stage(b: Block, at: str, buf: str, dtype: DType, lanes: int) -> Block:
    """`for k in range(64): ..cast_f32(x[i, k])..`  ->  `x_s: f32[1, 64] @ local; x_s[0, ..] = cast_f32(x[i, ..]); for k
    in range(64): ..x_s[0, k]..`

    The copy holds, along each axis, all that the loop may read at one place of the loops around it. Legal when the loop
    reads single elements of a buffer that it does not write, at indices whose part that varies inside has constant
    bounds. Elements of the copy that fall outside of the buffer (padding, which is never read) repeat its border.
    """

    def go(s: For) -> Block:
        source, idx = _source(s, buf)
        inner = frozenset(x.var for x in loops((s,)))
        box = [_range(i, inner, buf) for i in idx]
        shape = [size for _, size in box[:-1]]
        width = max(box[-1][1], lanes)
        total = width
        for n in shape:
            total *= n
        if total > LIMIT:
            raise ScheduleError(f"a copy of {buf} would take {total} elements, the limit is {LIMIT}")
        tile = Buffer(f"{buf}_{at}", dtype, tuple(map(const, (*shape, width))), "local")
        bld = Builder()
        bld.emit(Alloc(tile))
        _copy(bld, source, tile, [base for base, _ in box], lanes, at)
        origin = tuple(base for base, _ in box)
        return (*bld.block(), _reading(s, source, tile, origin))

    return edit(b, at, go)


def _source(s: For, name: str) -> tuple[Buffer, tuple[Expr, ...]]:
    """The buffer of that name and the index at which the loop reads it."""
    reads = [x for x in accesses((s,)) if x.buf.name == name]
    if not reads:
        raise ScheduleError(f"loop {s.var.name} does not read {name}")
    if any(isinstance(x, Ref) or x.lanes > 1 or x.limit is not None or x.idx != reads[0].idx for x in reads):
        raise ScheduleError(f"{name} cannot be staged: {s.var.name} reads vectors of it, or at several places")
    if any(isinstance(x, Store) and x.buf is reads[0].buf for x in walk_stmts((s,))):
        raise ScheduleError(f"{name} cannot be staged: {s.var.name} writes it")
    return reads[0].buf, reads[0].idx


def _range(i: Expr, inner: frozenset[Var], name: str) -> tuple[Expr, int]:
    """Lowest index, in terms of outer variables, and how many follow."""
    pairs, k = terms(i)
    base: Expr = const(k)
    low = high = 0
    for t, c in pairs:
        inside = free(t) & inner
        if not inside:
            base = base + t * c
            continue
        lo, hi = bounds(t)
        if inside != free(t) or lo is None or hi is None:
            raise ScheduleError(f"{name} cannot be staged: the bounds of {t!r} are not known")
        low, high = low + min(c * lo, c * hi), high + max(c * lo, c * hi)
    return base + low, high - low + 1


def _copy(bld: Builder, source: Buffer, tile: Buffer, origin: list[Expr], lanes: int, at: str) -> None:
    """Return vector starts, the last overlapping; those that reach past the buffer's last axis are cut off."""
    width = value(tile.shape[-1]) or 0
    if not nonneg(origin[-1]):
        raise ScheduleError(f"{source.name} cannot be staged: {origin[-1]!r} may be negative")
    vs: list[Expr] = []
    opened = []
    for k, d in enumerate((*tile.shape[:-1], const(-(-width // lanes)))):
        if value(d) == 1:
            vs.append(const(0))
            continue
        opened.append(bld.loop(f"s{k}_{at}", d))
        vs.append(opened[-1].__enter__())
    lead = [_inside(o + v, d) for o, v, d in zip(origin, vs, source.shape[:-1])]
    at_lane = vs[-1] * lanes if width % lanes == 0 else minimum(vs[-1] * lanes, const(width - lanes))
    first = origin[-1] + at_lane
    left = source.shape[-1] - first
    limit = None if nonneg(source.shape[-1] - origin[-1] - width) else minimum(maximum(left, const(0)), const(lanes))
    bld.store(tile, (*vs[:-1], at_lane), cast(load(source, (*lead, first), lanes, limit), tile.dtype), lanes)
    for scope in reversed(opened):
        scope.__exit__(None, None, None)


def _inside(i: Expr, size: Expr) -> Expr:
    """An index of an axis; one outside of it becomes its border's."""
    if not nonneg(size - 1 - i):
        i = minimum(i, size - 1)
    return i if nonneg(i) else maximum(i, const(0))


def _reading(s: For, source: Buffer, tile: Buffer, origin: tuple[Expr, ...]) -> For:
    """The loop with its reads of `source` from the copy."""
    memo: dict[Expr, Expr] = {}

    def expr(e: Expr) -> Expr:
        r = memo.get(e)
        if r is None:
            if isinstance(e, Load) and e.buf is source:
                r = load(tile, [i - o for i, o in zip(e.idx, origin)])
            else:
                r = rebuild(e, expr)
                if isinstance(r, Op) and r.name.startswith("cast_") and r.args[0].dtype is r.dtype:
                    r = r.args[0]
            memo[e] = r
        return r

    def block(b: Block) -> Block:
        return tuple(stmt(x) for x in b)

    def stmt(x: Stmt) -> Stmt:
        # a prefetch of the buffer is gone with its reads
        return x if isinstance(x, (Alloc, Eval)) else map_stmt(x, expr, block)

    found = stmt(s)
    assert isinstance(found, For)
    return found
