"""Schedule primitives on memory: distribute (fission with scalar expansion), prefetch, vectorize."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, count

from dnnc.ir.bounds import nonneg
from dnnc.ir.dtype import DType, i64
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import (
    Expr,
    Load,
    Op,
    Ref,
    Var,
    const,
    factors,
    free,
    load,
    op,
    ref,
    substitute,
    terms,
    value,
    var,
    walk,
)
from dnnc.ir.loops.stmt import (
    Alloc,
    Block,
    Buffer,
    Builder,
    Eval,
    For,
    If,
    Let,
    Stmt,
    Store,
    accesses,
    call,
    loop_var,
    stored,
    substitute_block,
    walk_stmts,
)
from dnnc.passes.schedule.buffers import swap_buffers
from dnnc.passes.schedule.loops import is_reduction
from dnnc.passes.schedule.state import edit, find, loops, make_loop, only, replace_stmt


def distribute(b: Block, name: str, depth: int) -> Block:
    """Loop fission: `for i, j: {x: f32[1] @ register; s1; s2; ..}` -> `x: f32[I, J, 1]; for i, j: s1; for i, j: s2; ..`

    Makes a naive nest tileable: a reduction's accumulator becomes a tile. The k-th copy of a loop is called NAME_k (the
        first keeps
    its name; a k that another loop has is left out). Legal when the statements meet only in register buffers declared
    inside, or in buffers that nobody writes.
    """

    def go(s: For) -> Block:
        nest = [s]
        while len(nest) < depth:
            nest.append(only(nest[-1]))
        inner, vs = _unguarded(nest[-1].body), [loop.var for loop in nest]
        private = [a.buf for a in inner if isinstance(a, Alloc)]
        rest = [x for x in inner if not isinstance(x, Alloc)]
        parts = _separable(rest, set(private))
        if len(parts) == 1 < len(rest):
            raise ScheduleError(f"{name} cannot be distributed: its first and its last statement meet in memory")
        big = {p: _expanded(p, nest) for p in private}
        out: list[Stmt] = [Alloc(n) for n in big.values()]
        offsets = [v - loop.lo for v, loop in zip(vs, nest)]
        taken = {loop.var.name for loop in loops(b)}
        ends = (f"_{k}" for k in count(1) if not any(f"{v.name}_{k}" in taken for v in vs))
        for part, end in zip(parts, chain(("",), ends)):
            body = swap_buffers(
                part, big, lambda buf, idx: (*offsets, *(idx if len(big[buf].shape) > len(nest) else ()))
            )
            fresh: list[Expr] = [var(v.name + end, v.dtype, v.lo, v.hi) for v in vs]
            body = substitute_block(body, dict(zip(vs, fresh)))
            for loop, v in reversed(list(zip(nest, fresh))):
                assert isinstance(v, Var)
                body = (For(v, loop.lo, loop.hi, loop.kind, body),)
            out += body
        return tuple(out)

    return edit(b, name, go)


def fission(b: Block, name: str, middle: str) -> Block:
    """`for i: {s1; for j: s2; s3}`  ->  `for i: s1; for i_m: for j: s2; for i_l: s3` for a `middle` j, from 0 on.

    Legal when the parts meet in no memory that one of them writes, but for the places of results, which each has its
    own of (or writes the same values to, as tiles that overlap at an end).
    """

    def go(s: For) -> Block:
        at = next((k for k, x in enumerate(s.body) if isinstance(x, For) and x.var.name == middle), None)
        if at is None:
            raise ScheduleError(f"{middle} is not right inside of {name}")
        parts = [p for p in (s.body[:at], s.body[at : at + 1], s.body[at + 1 :]) if p]
        for p in parts:
            own = {x.buf for x in walk_stmts(p) if isinstance(x, Alloc)}
            for other in (q for q in parts if q is not p):
                if (stored(p) | own) & _read(other) or own & stored(other):
                    raise ScheduleError(f"{name} cannot be cut at {middle}: its parts meet in memory")
        inner = s.body[at]
        assert isinstance(inner, For)
        again = make_loop(
            middle, inner.extent, inner.kind, lambda v: substitute_block(inner.body, {inner.var: v + inner.lo})
        )
        parts = [(again,) if p[0] is inner else p for p in parts]
        out: list[Stmt] = []
        for p, end in zip(parts, ("", "_m", "_l")):
            v = var(s.var.name + end, s.var.dtype, s.var.lo, s.var.hi)
            assert isinstance(v, Var)
            out.append(For(v, s.lo, s.hi, s.kind, substitute_block(p, {s.var: v})))
        return tuple(out)

    return edit(b, name, go)


def _unguarded(b: Block) -> Block:
    """`if c: {s1; s2}` -> `if c: s1; if c: s2`; guards of safe statements vanish, others sink inward.

    Safe: it writes only what is declared under the guard (so nothing past it is read) and stays inside of what it
        reads.
    """
    if len(b) != 1 or not isinstance(b[0], If) or b[0].other:
        return b
    cond, body = b[0].cond, b[0].then
    own = {s.buf for s in body if isinstance(s, Alloc)}
    return tuple(s if isinstance(s, Alloc) or _harmless(s, own) else _sunk(cond, s) for s in body)


def _harmless(s: Stmt, own: set[Buffer]) -> bool:
    if not stored((s,)) <= own:
        return False
    for x in accesses((s,)):
        if isinstance(x, Ref) or not all(nonneg(i) and nonneg(d - 1 - i) for i, d in zip(x.idx, x.buf.shape)):
            return False
    return True


def _sunk(cond: Expr, s: Stmt) -> Stmt:
    if isinstance(s, For):
        return For(s.var, s.lo, s.hi, s.kind, tuple(_sunk(cond, x) for x in s.body))
    return If(cond, (s,))


def _separable(rest: Sequence[Stmt], private: set[Buffer]) -> list[Block]:
    """Statements in runs, none of which writes what another one reads or writes, but for private buffers."""
    parts: list[Block] = []
    for x in rest:
        k = next((k for k, part in enumerate(parts) if _meet(part, (x,), private)), len(parts))
        parts[k:] = [tuple(y for part in parts[k:] for y in part) + (x,)]
    return parts


def _meet(a: Block, b: Block, private: set[Buffer]) -> bool:
    """Does one of two blocks write what the other one reads or writes?"""
    wrote, writes = stored(a) - private, stored(b) - private
    return bool(wrote & (writes | _read(b)) or writes & _read(a))


def _read(b: Block) -> set[Buffer]:
    return {x.buf for x in accesses(b)}


def _expanded(p: Buffer, nest: list[For]) -> Buffer:
    extents = tuple(loop.extent for loop in nest)
    if any(value(e) is None for e in extents):
        raise ScheduleError(
            f"{p.name} cannot be expanded over {[loop.var.name for loop in nest]}: an extent is not constant"
        )
    scalar = all(value(d) == 1 for d in p.shape)
    return Buffer(p.name, p.dtype, (*extents, *(() if scalar else p.shape)), p.space)


def prefetch(b: Block, at: str, buf: str, index: tuple[Expr, ...]) -> Block:
    """Insert a prefetch of one cache line at the start of a loop's body; a hint, so any address is legal."""
    target = next((x.buf for x in accesses(find(b, at).body) if x.buf.name == buf), None)
    if target is None:
        raise ScheduleError(f"loop {at} does not access {buf}")
    return edit(b, at, lambda s: (For(s.var, s.lo, s.hi, s.kind, (Eval("prefetch", (ref(target, index),)), *s.body)),))


def vectorize(b: Block, *names: str) -> Block:
    """`for j in range(16): C[.., j] = A[.., j] + x`  ->  `C[.., 0:+16] = A[.., 0:+16] + x`

    A guard `if a + j < n` becomes the limit of the accesses inside. Loads that are not unit stride gather."""
    for name in names:
        loop = find(b, name)
        lanes = value(loop.extent)
        if lanes is None:
            raise ScheduleError(f"{name} cannot be a vector: its extent is not constant")
        b = edit(b, name, lambda s: Vectorizer(s.var, s.lo, lanes).block(s.body))
    return b


def vector_reduce(b: Block, name: str, lanes: int, chains: int, outer: str | None = None) -> Block:
    """`for r in range(n): acc[0] = acc[0] + e` -> `chains` vector accumulators over blocks of r, then combined.

    The order of the sum changes: element r goes to lane r % lanes of chain (r // lanes) % chains, then chains, then a
        tree of halves.
    The last n % lanes elements come in one masked step.

    `outer`: a loop of the same sum around it; the accumulators are kept, and combined after it.
    """

    def go(s: For) -> Block:
        around, inner = s, s
        while inner.var.name != name:
            inner = only(inner)
        s = inner
        if (
            len(s.body) != 1
            or not isinstance(st := s.body[0], Store)
            or not is_reduction(st)
            or any(x.var in free(i) for x in loops((around,)) for i in st.idx)
        ):
            raise ScheduleError(f"{name} is no plain reduction into one element")
        assert isinstance(st.value, Op)
        how = "+" if st.value.name == "fma" else st.value.name
        own = next(a for a in st.value.args if isinstance(a, Load) and a.buf is st.buf)
        start = const(_IDENTITY[how](st.buf.dtype), st.buf.dtype)
        part = Buffer(f"{st.buf.name}_{name}", st.buf.dtype, (const(chains), const(lanes)), "register")
        first, steps, last = Builder(), Builder(), Builder()
        first.emit(Alloc(part))
        with first.loop(f"{name}u_init", chains, "unroll") as u:
            first.store(part, (u, 0), start, lanes)
        n = s.extent
        with steps.loop(f"{name}o", n // (lanes * chains)) as o, steps.loop(f"{name}u", chains, "unroll") as u:
            _vector_step(steps, s, st, own, part, u, s.lo + o * (lanes * chains) + u * lanes, lanes, None, start)
        done = n // (lanes * chains) * (lanes * chains)
        if value(n % (lanes * chains)) != 0:
            with steps.loop(f"{name}t", (n - done + (lanes - 1)) // lanes) as t:
                _vector_step(
                    steps, s, st, own, part, const(0), s.lo + done + t * lanes, lanes, n - done - t * lanes, start
                )
        total: Expr = part.at(0, 0, lanes=lanes)
        for c in range(1, chains):
            total = op(how, total, part.at(c, 0, lanes=lanes))
        across = op(how, own, call({"+": "hsum", "*": "hprod"}.get(how, "hmax" if "max" in how else "hmin"), total))
        last.store(st.buf, st.idx, across)
        return (*first.block(), *replace_stmt((around,), inner, steps.block), *last.block())

    return edit(b, outer or name, go)


_IDENTITY: dict[str, Callable[[DType], float | int]] = {
    "+": lambda t: 0.0 if t.is_float else 0,
    "*": lambda t: 1.0 if t.is_float else 1,
    "max": lambda t: float("-inf") if t.is_float else t.range[0],
    "min": lambda t: float("inf") if t.is_float else t.range[1],
    "fmax": lambda t: float("-inf") if t.is_float else t.range[0],
    "fmin": lambda t: float("inf") if t.is_float else t.range[1],
}


def _vector_step(
    bld: Builder,
    s: For,
    st: Store,
    own: Load,
    part: Buffer,
    u: Expr,
    at: Expr,
    lanes: int,
    limit: Expr | None,
    start: Expr,
) -> None:
    """One vector of terms into chain u; lanes past `limit` keep their sums."""
    vec = Vectorizer(s.var, at, lanes)
    vec.limit = limit
    assert isinstance(st.value, Op)
    acc = part.at(u, 0, lanes=lanes)
    terms_ = [vec.expr(a) for a in st.value.args if a is not own]
    live = None if limit is None else op("<", op("lanes", const(lanes), dtype=i64, lanes=lanes), limit)
    if st.value.name == "fma":
        total = op("fma", *terms_, acc)
        # a factor may be NaN in a lane that is not there: 0 / 0
        bld.store(part, (u, const(0)), total if live is None else op("select", live, total, acc), lanes)
        return
    if live is not None:
        terms_[0] = op("select", live, terms_[0], start)
    ordered = (acc, *terms_) if st.value.args[0] is own else (*terms_, acc)
    bld.store(part, (u, const(0)), op(st.value.name, *ordered), lanes)


class Vectorizer:
    """Rewrites statements over v = lo, lo+1, .. lo+lanes-1 into statements on vectors."""

    def __init__(self, v: Var, lo: Expr, lanes: int) -> None:
        self.v, self.lo, self.lanes = v, lo, lanes
        self.lane = loop_var("lane.", const(0), const(lanes))
        self.limit: Expr | None = None
        self.lets: dict[Expr, Expr] = {}
        self.memo: dict[tuple[Expr, Expr | None], Expr] = {}

    def block(self, b: Block) -> Block:
        out: list[Stmt] = []
        for s in b:
            out += self.stmt(s)
        return tuple(out)

    def stmt(self, s: Stmt) -> Block:
        if isinstance(s, Store):
            return (self.store(s),)
        if isinstance(s, If):
            return self.guarded(s)
        if isinstance(s, Let):
            e = self.expr(s.value)
            if e.dtype is i64 and e.lanes == 1:
                return (Let(s.var, e),) if self.v not in free(s.value) else self.reject(f"let {s.var.name}")
            v = var(s.var.name, e.dtype, lanes=e.lanes)
            self.lets[s.var] = v
            return (Let(v, e),)
        if isinstance(s, For) and self.v not in free(s.lo) | free(s.hi):
            return (For(s.var, s.lo, s.hi, s.kind, self.block(s.body)),)
        return self.reject(f"a {type(s).__name__}")

    def reject(self, what: str) -> Block:
        raise ScheduleError(f"{self.v.name} cannot be a vector: it holds {what}; distribute it first")

    def guarded(self, s: If) -> Block:
        if self.v not in free(s.cond):
            return (If(s.cond, self.block(s.then), self.block(s.other)),)
        c = s.cond
        if s.other or self.limit is not None or not (isinstance(c, Op) and c.name in ("<", "<=")):
            return self.reject(f"the guard {c!r}")
        gap = c.args[1] - c.args[0] + int(c.name == "<=")  # v < n  <=>  0 < n - v
        if dict(terms(gap)[0]).get(self.v) != -1:
            return self.reject(f"the guard {c!r}")
        self.limit = substitute(gap, {self.v: self.lo})
        out = self.block(s.then)
        self.limit = None
        return out

    def store(self, s: Store) -> Store:
        if not any(self.v in free(i) for i in s.idx):
            hint = "a reduction" if is_reduction(s) else "overwritten by every lane"
            raise ScheduleError(
                f"{self.v.name} cannot be a vector: it does not index the store to {s.buf.name}, which is {hint}"
            )
        if s.lanes > 1:
            raise ScheduleError(
                f"{self.v.name} cannot be a vector: it holds a store of {s.lanes} lanes to {s.buf.name}"
            )
        at = self.contiguous(s.buf, s.idx)
        if at is None:
            raise ScheduleError(f"{self.v.name} cannot be a vector: it is not unit stride in the store to {s.buf.name}")
        # lanes of a thread's own memory past the limit are never read back
        inside = s.buf.space != "global" and nonneg(s.buf.shape[-1] - at[-1] - self.lanes)
        limit = None if inside else self.limit
        return Store(s.buf, at, self.expr(s.value), self.lanes, limit)

    def contiguous(self, buf: Buffer, idx: tuple[Expr, ...]) -> tuple[Expr, ...] | None:
        """The index of lane 0 when the lanes lie one after another, else None."""
        if any(not free(i).isdisjoint(self.lets) for i in idx):
            self.reject(f"an index of {buf.name} that is named ahead and differs between lanes")
        if value(buf.full_strides()[-1]) != 1:
            return None
        idx = self.by_lane(idx)
        if any(self.lane in free(i) for i in idx[:-1]):
            return None
        if dict(terms(idx[-1])[0]).get(self.lane) != 1 or any(
            self.lane in free(t) for t, _ in terms(idx[-1])[0] if t is not self.lane
        ):
            return None
        return (*idx[:-1], substitute(idx[-1], {self.lane: const(0)}))

    def by_lane(self, idx: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Index as a function of the lane: // and % of a blocked axis fold where the lanes share a block."""
        return tuple(substitute(i, {self.v: self.lo + self.lane}) if self.v in free(i) else i for i in idx)

    def expr(self, e: Expr) -> Expr:
        if e in self.lets:
            return self.lets[e]
        if self.v not in free(e) and not (self.lets and free(e) & self.lets.keys()):
            return e
        key = (e, self.limit)
        r = self.memo.get(key)
        if r is None:
            r = self.memo[key] = self.widen(e)
        return r

    def widen(self, e: Expr) -> Expr:
        if e.dtype is i64 and not isinstance(e, (Load, Op)):
            return self.indices(e)
        if isinstance(e, Load):
            if e.lanes > 1:
                raise ScheduleError(
                    f"{self.v.name} cannot be a vector: it holds the vector {e!r}, and there are none of vectors"
                )
            at = self.contiguous(e.buf, e.idx)
            if at is not None:
                inside = self.limit is None or nonneg(
                    e.buf.shape[-1] - at[-1] - self.lanes
                )  # padding may be read, it is not used
                return load(e.buf, at, self.lanes, None if inside else self.limit)
            same = self.by_lane(e.idx)
            if not any(self.lane in free(i) for i in same):  # one element for all lanes
                return load(e.buf, same)
            asked = any(isinstance(x, Load) for x in walk(same[-1]))
            if (
                self.limit is None and not asked and not any(self.lane in free(i) for i in same[:-1])
            ):  # of one row, in another order
                of_lane = Vectorizer(self.lane, const(0), self.lanes)
                return load(e.buf, (*same[:-1], of_lane.expr(same[-1])), 1, self.limit)
            return load(e.buf, [self.expr(i) for i in e.idx], 1, self.limit)
        assert isinstance(e, Op), e
        args = [self.expr(a) for a in e.args]
        if e.name == "guard" and self.limit is not None:  # a lane that is not there cannot be wrong
            args[0] = op("select", op("<", self.lane_numbers(), self.limit), args[0], args[1])
        if e.name in ("min", "max", "<", "<=", "==", "!=", "+", "-", "*", "/", "//", "%", "&", "|", "^", "select"):
            return op(e.name, *args)
        return op(e.name, *args, dtype=e.dtype)

    def indices(self, e: Expr) -> Expr:
        """An index that varies with v: its linear part as base + stride * lanes."""
        pairs, k = terms(e)
        base: Expr = const(k)
        vec: Expr | None = None
        for t, c in pairs:
            if self.v not in free(t):
                base = base + t * c
                continue
            part = self.lane_numbers() if t is self.v else self.expr(t) if isinstance(t, Op) else self.product(t)
            if t is self.v:
                base = base + self.lo * c
            part = part if c == 1 else op("*", part, const(c))
            vec = part if vec is None else op("+", vec, part)
        assert vec is not None
        return vec if value(base) == 0 else op("+", vec, base)

    def product(self, t: Expr) -> Expr:

        parts = [self.lane_numbers() + self.lo if f is self.v else self.expr(f) for f in factors(t)]
        r = parts[0]
        for p in parts[1:]:
            r = op("*", r, p)
        return r

    def lane_numbers(self) -> Expr:
        return op("lanes", const(self.lanes), dtype=i64, lanes=self.lanes)
