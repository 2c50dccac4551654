"""Loop primitives: split, fuse, join, reorder, peel, annotate, hoist_guards; each checks its legality."""

from __future__ import annotations

from dnnc.ir.bounds import bounds, nonneg
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import (
    Expr,
    Linear,
    Load,
    Op,
    const,
    free,
    maximum,
    minimum,
    op,
    select,
    substitute,
    terms,
    value,
    walk,
)
from dnnc.ir.loops.stmt import (
    Alloc,
    Block,
    For,
    If,
    Stmt,
    Store,
    accesses,
    exprs,
    loop_var,
    map_stmt,
    stored,
    substitute_block,
    walk_stmts,
)
from dnnc.passes.schedule.parallel_legality import obstacle
from dnnc.passes.schedule.state import edit, find, loops, make_loop, only, renamed

TAILS = ("exact", "overlap", "clamp", "guard", "peel")


def split(b: Block, name: str, factor: int, names: tuple[str, str], tail: str = "exact") -> Block:
    """`for i in range(n): s`  ->  `for io in range(n // f): for ii in range(f): s[i -> f*io + ii]`

    tail, where f does not divide n: overlap (the last tile starts at n - f; the body must be safe to repeat, n >= f) |
    clamp (iterations past the end repeat the last; any n, body safe to repeat) | guard (`if f*io + ii < n`; vectorize
    turns it into a limit) | peel (a loop of its own, called NAME_t, over the rest).
    """

    def go(s: For) -> Block:
        n, lo = s.extent, s.lo
        exact = value(n % factor) == 0
        if exact or tail == "exact":
            if not exact:
                raise ScheduleError(
                    f"{factor} does not divide the extent {n!r} of {name}; choose a tail of {', '.join(TAILS[1:])}"
                )
            return (_tiles(s, n // factor, factor, names, lambda io, ii: lo + io * factor + ii),)
        if tail == "peel":
            main = _tiles(s, n // factor, factor, names, lambda io, ii: lo + io * factor + ii)
            end = unused(b, s, "_t")
            rest = make_loop(
                name + end,
                n % factor,
                "range",
                lambda v: substitute_block(renamed(s.body, end), {s.var: lo + n // factor * factor + v}),
            )
            return (main, rest) if value(n // factor) != 0 else (rest,)
        count = (n + (factor - 1)) // factor
        if tail == "overlap":
            _check_repeatable(s)
            return (_tiles(s, count, factor, names, lambda io, ii: lo + minimum(io * factor, n - factor) + ii),)
        if tail == "clamp":
            _check_repeatable(s)
            return (_tiles(s, count, factor, names, lambda io, ii: lo + minimum(io * factor + ii, n - 1)),)
        if tail != "guard":
            raise ScheduleError(f"unknown tail {tail}; there are {', '.join(TAILS)}")
        return (_tiles(s, count, factor, names, lambda io, ii: lo + io * factor + ii, guard=lo + n),)

    return edit(b, name, go)


def unused(b: Block, s: For, suffix: str) -> str:
    """A suffix under which a copy of s has loops that b has not: `_t`, then `_tt`, ..."""
    taken = {x.var.name for x in loops(b)}
    while any(x.var.name + suffix in taken for x in loops((s,))):
        suffix += suffix[-1]
    return suffix


def _tiles(s: For, count: Expr, factor: int, names: tuple[str, str], at: object, guard: Expr | None = None) -> For:
    def inner(io: Expr) -> Block:
        def body(ii: Expr) -> Block:
            i = at(io, ii)  # type: ignore[operator]
            block = substitute_block(s.body, {s.var: i})
            if guard is None or value(i < guard) == 1:
                return block
            return (If(i < guard, block),)

        return (make_loop(names[1], factor, "range", body),)

    return make_loop(names[0], count, s.kind, inner)


def _check_repeatable(s: For) -> None:
    private = {a.buf for a in walk_stmts(s.body) if isinstance(a, Alloc)}
    read = {x.buf for x in accesses(s.body)}
    bad = sorted(
        {w.buf.name for w in walk_stmts(s.body) if isinstance(w, Store) and w.buf in read and w.buf not in private}
    )
    if bad:
        raise ScheduleError(
            f"{s.var.name} cannot overlap: a repeated iteration would read what it wrote in {', '.join(bad)}"
        )


def fuse(b: Block, outer: str, inner: str, name: str) -> Block:
    """`for i in range(n): for j in range(m): s`  ->  `for ij in range(n*m): s[i -> ij // m, j -> ij % m]`"""

    def go(s: For) -> Block:
        t = only(s)
        if t.var.name != inner or value(s.lo) != 0 or value(t.lo) != 0 or s.var in free(t.hi):
            raise ScheduleError(f"{outer} and {inner} are not a rectangular nest from 0")
        m = t.extent
        if not nonneg(const(m) - 1):  # a divisor must be known to be positive
            raise ScheduleError(f"{inner} may be empty")
        return (
            make_loop(name, s.extent * m, s.kind, lambda v: substitute_block(t.body, {s.var: v // m, t.var: v % m})),
        )

    return edit(b, outer, go)


def join(b: Block, first: str, second: str) -> Block:
    """`for i in range(n): s` `for k in range(n): t` -> `for i in range(n): s; t[k -> i]`, if adjacent, independent."""
    a, c = find(b, first), find(b, second)
    if a.lo is not c.lo or a.hi is not c.hi or a.kind != c.kind:
        raise ScheduleError(
            f"{first} ({a.kind} over {a.extent!r}) and {second} ({c.kind} over {c.extent!r}) are not the same loop"
        )
    if any(x.buf in stored((write,)) for write, read in ((a, c), (c, a)) for x in accesses((read,))):
        raise ScheduleError(f"one of {first} and {second} reads what the other writes")
    at = next((k for k, s in enumerate(b) if s is a), None)
    if at is None or b[at + 1 : at + 2] != (c,):
        raise ScheduleError(f"{second} does not come right behind {first} at top level")
    return (*b[:at], For(a.var, a.lo, a.hi, a.kind, (*a.body, *substitute_block(c.body, {c.var: a.var}))), *b[at + 2 :])


def reorder(b: Block, *names: str) -> Block:
    """Permute a perfect nest. Legal if each element's updates are the same in any order of iterations."""
    outer = next((s.var.name for s in walk_stmts(b) if isinstance(s, For) and s.var.name in names), None)
    if outer is None:
        raise ScheduleError(f"no loop is called {names[0]}")

    def go(s: For) -> Block:
        nest, between = (
            [s],
            [],
        )  # guards between the loops go inside: they are pure, and hoist_guards takes them out again
        while len(nest) < len(names):
            conds, body = guards_of(nest[-1].body)
            if any(_reads_memory(c) for c in conds):
                raise ScheduleError(f"a guard inside {nest[-1].var.name} reads memory")
            between += conds
            nest.append(only(For(nest[-1].var, nest[-1].lo, nest[-1].hi, nest[-1].kind, body)))
        by = {loop.var.name: loop for loop in nest}
        if set(by) != set(names):
            raise ScheduleError(f"the nest is {', '.join(by)}; asked for {', '.join(names)}")
        if any(loop.var in free(e) for loop in nest for inner in nest for e in (inner.lo, inner.hi)):
            raise ScheduleError(f"the bounds of {', '.join(by)} depend on one another")
        _check_order_free(nest)
        body = guarded(between, nest[-1].body)
        for n in reversed(names):
            loop = by[n]
            body = (For(loop.var, loop.lo, loop.hi, loop.kind, body),)
        return body

    return edit(b, outer, go)


def _check_order_free(nest: list[For]) -> None:
    """Check that each store is indexed by its loops or is a reduction `x = f(.., x)`, and none else meets."""
    body = nest[-1].body
    private = {a.buf for a in walk_stmts(body) if isinstance(a, Alloc)}
    for st in walk_stmts(body):
        if not isinstance(st, Store) or st.buf in private:
            continue
        for other in walk_stmts(body):
            for e in exprs(other):
                for x in walk(e):
                    if isinstance(x, Load) and x.buf is st.buf and x.idx != st.idx:
                        raise ScheduleError(
                            f"{st.buf.name} is read at another index than it is written: the order of iterations "
                            "matters"
                        )
        used = frozenset().union(*(free(i) for i in st.idx))
        over = [loop for loop in nest if loop.var not in used and bounds(loop.extent)[1] != 1]
        if over and not (is_reduction(st) or is_index_sum(st)):
            raise ScheduleError(
                f"{st.buf.name} is overwritten by iterations of {over[0].var.name}: the last one must stay the last"
            )


def is_reduction(st: Store) -> bool:
    """`x[i] = x[i] + e`, `x[i] = fma(a, b, x[i])`, `x[i] = max(x[i], e)` ...: iterations commute (within rounding)."""
    v = st.value
    if not isinstance(v, Op):
        return False
    own = [a for a in v.args if isinstance(a, Load) and a.buf is st.buf and a.idx == st.idx]
    rest = [a for a in v.args if a not in own]
    if len(own) != 1 or any(isinstance(x, Load) and x.buf is st.buf for a in rest for x in walk(a)):
        return False
    return v.name in ("+", "*", "min", "max", "fmin", "fmax") or (v.name == "fma" and v.args[2] is own[0])


def is_index_sum(st: Store) -> bool:
    """`x[i] = x[i] + e` in i64, where sums are linear forms."""
    ts, _ = terms(st.value) if isinstance(st.value, Linear) else ((), 0)
    reads = [t for t, _ in ts if any(isinstance(x, Load) and x.buf is st.buf for x in walk(t))]
    return len(reads) == 1 and isinstance(reads[0], Load) and reads[0].idx == st.idx and (reads[0], 1) in ts


def peel(b: Block, name: str, first: int = 1, last: int = 1) -> Block:
    """Peel the first and last iterations, where guards fold: `s[0]; for i in range(1, n-1): s; s[n-1]`."""

    def go(s: For) -> Block:
        n, lo = value(s.extent), value(s.lo)
        if n is None or lo is None:
            raise ScheduleError(f"{name} has no constant extent to peel")
        out: list[Stmt] = []
        heads, tails = min(first, n), min(last, max(n - first, 0))
        for k in range(heads):
            out += substitute_block(renamed(s.body, unused(b, s, f"_f{k}")), {s.var: const(lo + k)})
        if n > heads + tails:
            out.append(
                make_loop(name, n - heads - tails, s.kind, lambda v: substitute_block(s.body, {s.var: v}), lo + heads)
            )
        for k in range(tails):
            out += substitute_block(renamed(s.body, unused(b, s, f"_l{k}")), {s.var: const(lo + n - tails + k)})
        return tuple(out)

    return edit(b, name, go)


def single(b: Block, *names: str) -> Block:
    """`for i in range(n, n + 1): s`  ->  `s[i -> n]`"""

    def go(s: For) -> Block:
        if value(s.extent) != 1:
            raise ScheduleError(f"{s.var.name} has {s.extent!r} iterations, not one")
        return substitute_block(s.body, {s.var: s.lo})

    for name in names:
        b = edit(b, name, go)
    return b


def all_single(b: Block) -> Block:
    """`single` of all loops that have one iteration, several of one name as well."""
    out: list[Stmt] = []
    for s in b:
        made = map_stmt(s, lambda e: e, all_single) if isinstance(s, (For, If)) else s
        if isinstance(made, For) and value(made.extent) == 1:
            out += substitute_block(made.body, {made.var: made.lo})
        else:
            out.append(made)
    return tuple(out)


def annotate(b: Block, kind: str, *names: str) -> Block:
    """Set the kind of loops: unroll, parallel, block.x, thread.x ... Parallel iterations must write apart."""
    for name in names:
        loop = find(b, name)
        if kind not in ("unroll", "range"):
            why = obstacle(loop)
            if why:
                raise ScheduleError(f"{name} cannot run in parallel: {why}")
        b = edit(b, name, lambda s: (For(s.var, s.lo, s.hi, kind, s.body),))
    return b


def hoist_guards(b: Block) -> Block:
    """`for i: if c: s`  ->  `if c: for i: s` wherever c does not depend on i (loop unswitching), innermost loop first.

    Unit loops: `for i in range(1): if i + j < n: s` -> `if j < n: for i in range(1): s`
    """
    out: list[Stmt] = []
    for s in b:
        if isinstance(s, For):
            conds, body = guards_of(hoist_guards(s.body))
            conds = [substitute(c, {s.var: s.lo}) if value(s.extent) == 1 else c for c in conds]
            stays = [c for c in conds if s.var in free(c) or _reads_memory(c)]
            out += guarded(
                [c for c in conds if c not in stays], (For(s.var, s.lo, s.hi, s.kind, guarded(stays, body)),)
            )
        elif isinstance(s, If):
            out.append(If(s.cond, hoist_guards(s.then), hoist_guards(s.other)))
        else:
            out.append(s)
    return tuple(out)


def choose(b: Block, name: str | None = None) -> Block:
    """`if x[i] > t: s = min(s, i)`  ->  `s = min(s, select(x[i] > t, i, MAX))`: vectors choose lane by lane.

    Where numbers that are read decide, and nothing else is read than by the condition: what a guard keeps away from
    may not be there. `name`: in this loop alone.
    """
    if name is not None:
        return edit(b, name, lambda loop: choose((loop,)))
    out: list[Stmt] = []
    for s in b:
        if isinstance(s, For):
            out.append(For(s.var, s.lo, s.hi, s.kind, choose(s.body)))
            continue
        inner = s.then[0] if isinstance(s, If) and len(s.then) == 1 and not s.other else None
        neutral = _neutral(inner) if isinstance(inner, Store) else None
        if neutral is None or not isinstance(s, If) or not isinstance(inner, Store) or not isinstance(inner.value, Op):
            out.append(s)
            continue
        read = {x for x in walk(s.cond) if isinstance(x, Load)}
        first, second = inner.value.args
        own, term = (first, second) if isinstance(first, Load) and first.buf is inner.buf else (second, first)
        if read and all(x in read for x in walk(term) if isinstance(x, Load)):
            chosen = op(inner.value.name, own, select(s.cond, term, neutral))
            out.append(Store(inner.buf, inner.idx, chosen, inner.lanes, inner.limit))
        else:
            out.append(s)
    return tuple(out)


def _neutral(st: Store) -> Expr | None:
    """What a reduction may take in without a change; None where there is no such number."""
    v, d = st.value, st.buf.dtype
    own = isinstance(v, Op) and is_reduction(st) and any(isinstance(a, Load) and a.buf is st.buf for a in v.args)
    if not isinstance(v, Op) or not own or v.name not in ("+", "min", "max"):
        return None
    if v.name == "+":
        return const(0, d)
    if d.is_int:
        return const(d.range[v.name == "min"], d)
    return const(float("inf") if v.name == "min" else float("-inf"), d)


def guards_of(b: Block) -> tuple[list[Expr], Block]:
    """`if a: if b: s` -> ([a, b], s)."""
    conds: list[Expr] = []
    while len(b) == 1 and isinstance(b[0], If) and not b[0].other:
        conds.append(b[0].cond)
        b = b[0].then
    return conds, b


def guarded(conds: list[Expr], b: Block) -> Block:
    for c in reversed(conds):
        b = (If(c, b),)
    return b


def narrow(b: Block) -> Block:
    """`for i in range(lo, hi): if a <= i: s`  ->  `for i in range(max(lo, a), hi): s`; likewise `i < e` lowers hi.

    A guard becomes loop bounds: no branch inside, which would make the accumulators of a tile cross basic blocks."""
    out: list[Stmt] = []
    for s in b:
        if isinstance(s, For):
            out.append(_narrowed(For(s.var, s.lo, s.hi, s.kind, narrow(s.body))))
        elif isinstance(s, If):
            out.append(If(s.cond, narrow(s.then), narrow(s.other)))
        else:
            out.append(s)
    return tuple(out)


def _narrowed(s: For) -> For:
    conds, body = guards_of(s.body)
    for c in conds if s.kind == "range" else ():
        if not (isinstance(c, Op) and c.name in ("<", "<=")) or _reads_memory(c):
            continue
        gap = c.args[1] - c.args[0] - int(c.name == "<")  # the guard is gap >= 0
        slope = dict(terms(gap)[0]).get(s.var, 0)
        rest = gap - s.var * slope
        if slope == 0 or s.var in free(rest):
            continue
        last = _quotient(rest, abs(slope))
        if last is None:
            continue
        lo, hi = (maximum(s.lo, 0 - last), s.hi) if slope > 0 else (s.lo, minimum(s.hi, last + 1))
        v = loop_var(s.var.name, lo, hi)
        left = guarded([x for x in conds if x is not c], body)
        return _narrowed(For(v, lo, hi, s.kind, substitute_block(left, {s.var: v})))
    return s


def _quotient(e: Expr, divisor: int) -> Expr | None:
    """e / divisor, rounded down; None where it may be negative, by how much is not known, and digits are asked for."""
    if divisor == 1:
        return e
    low = bounds(e)[0]
    if low is None:
        return None
    more = max(-(low // divisor), 0)
    return (e + more * divisor) // divisor - more


def _reads_memory(e: Expr) -> bool:
    return any(isinstance(x, Load) for x in walk(e))
