"""Verifier of the operator IR: static, one function per invariant, by linear facts. No proof is an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dnnc.ir.bounds import nonneg
from dnnc.ir.dtype import bf16, boolean, f32, i8, i32, i64, u8, u32
from dnnc.ir.errors import VerifyError, count, locations
from dnnc.ir.expr import (
    COMPARE,
    Const,
    E,
    Expr,
    Load,
    Op,
    Ref,
    Var,
    const,
    factors,
    free,
    load,
    logical_not,
    maximum,
    op,
    show,
    show_at,
    substitute,
    terms,
    unwrap,
    value,
    var,
    walk,
)
from dnnc.ir.loops import tiles
from dnnc.ir.loops.intrinsics import TABLE, cast_target, known
from dnnc.ir.loops.stmt import (
    Alloc,
    Block,
    Buffer,
    Eval,
    For,
    Func,
    If,
    ImmediateRows,
    Kernel,
    Let,
    SparseRows,
    Stmt,
    Store,
    blocks,
    count_stmts,
    exprs,
    walk_stmts,
)
from dnnc.ir.loops.text import show_stmt

MAX_STATEMENTS = 300
LONG = 7  # steps of a proof that an index lies in its buffer, where the usual number does not do
SHARED_LIMIT = 227 * 1024
ARITHMETIC = ("+", "-", "*", "/", "min", "max", "fmin", "fmax", "fma", *COMPARE)


def verify_kernel(kernel: Kernel, limited: bool = True) -> Kernel:
    """Check all invariants, the limit of statements if `limited`. VerifyError names function, statement, nodes."""
    names = {f.name for f in kernel.funcs}
    n = count_stmts(kernel)
    if limited and n > MAX_STATEMENTS:
        raise VerifyError(
            f"{kernel.name} has {n} statements, more than {MAX_STATEMENTS}: unrolling belongs to the "
            f"printer{locations(kernel.locs)}"
        )
    for f in kernel.funcs:
        for message in _Check(f, names).run():
            raise VerifyError(f"{f.name}{locations(kernel.locs)}: {message}")
    return kernel


class _Check:
    def __init__(self, func: Func, funcs: set[str]) -> None:
        self.func, self.funcs = func, funcs
        self.lets: dict[Expr, Expr] = {}
        self.unrolled: set[Var] = set()
        self.shared = self.tiles = 0

    def run(self) -> Iterator[str]:
        scope: set[object] = set(self.func.params)
        for p in self.func.buffers:
            for d in p.shape:
                missing = [v.name for v in free(d) if v not in scope]
                if missing:
                    yield f"the shape of {p.name} uses {', '.join(missing)}, which is no parameter"
        yield from self.block(self.func.body, scope, (), False)
        if any(isinstance(s, For) and s.kind == "parallel" for s in walk_stmts(self.func.body)):
            yield from _written_by_all(self.func.body)
        if self.shared > SHARED_LIMIT:
            yield f"{self.shared} bytes of shared memory; a block has {SHARED_LIMIT}"
        if self.tiles > tiles.TILES:
            yield f"{self.tiles} tiles; a function has {tiles.TILES}"

    def block(self, b: Block, scope: set[object], facts: tuple[Expr, ...], inside: bool) -> Iterator[str]:
        scope = set(scope)
        for s in b:
            for message in self.stmt(s, scope, facts, inside):
                yield message if "\n" in message else f"{message}\n  in: {show_stmt(s).splitlines()[0].strip()}"

    def stmt(self, s: Stmt, scope: set[object], facts: tuple[Expr, ...], inside: bool) -> Iterator[str]:
        for e in exprs(s):
            yield from self.expression(e, s, scope, facts)
        if isinstance(s, Store):
            yield from self.store(s, scope, facts)
        elif isinstance(s, Let):
            scope.add(s.var)
            if s.var.dtype is i64 and s.var.lanes == 1:
                self.lets[s.var] = substitute(s.value, self.lets)
        elif isinstance(s, Alloc):
            yield from self.alloc(s.buf)
            scope.add(s.buf)
        elif isinstance(s, Eval):
            yield from self.effect(s, inside)
            if isinstance(s, SparseRows):
                yield from self.sparse_rows(s, facts)
            elif isinstance(s, ImmediateRows):
                yield from self.immediate_rows(s, facts)
            elif s.name in tiles.EFFECTS:
                wrong = list(tiles.problems(s))
                yield from wrong or self.block(tiles.meaning(s), scope, facts, inside)
        elif isinstance(s, For):
            yield from self.loop(s, scope, facts, inside)
        elif isinstance(s, If):
            yield from self.branch(s, scope, facts, inside)

    def expression(self, e: Expr, s: Stmt, scope: set[object], facts: tuple[Expr, ...]) -> Iterator[str]:
        for x in walk(e):
            if isinstance(x, Var) and x not in scope:
                yield f"{x.name} is not defined here"
            elif isinstance(x, (Load, Ref)):
                if x.buf not in scope:
                    yield f"buffer {x.buf.name} is not defined here"
                if isinstance(x, Ref) and any(i.lanes > 1 for i in x.idx):
                    yield f"an address is one place, not that of each lane: {show(x)}"
                elif isinstance(x, Load):
                    yield from self.in_bounds(x.buf, x.idx, x.lanes, x.limit, facts)
                elif not isinstance(s, Eval) or s.name != "prefetch":
                    yield from self.in_bounds(x.buf, x.idx, 1, None, facts)
            elif isinstance(x, Op):
                yield from self.operation(x, facts)

    def operation(self, x: Op, facts: tuple[Expr, ...]) -> Iterator[str]:
        if not known(x.name) and x.name not in ("+", "-", "*", "/", "//", "%", "&", "|", "^", *COMPARE):
            yield f"unknown operation {x.name}"
        if (
            cast_target(x.name) is None
            and not (x.name in TABLE and (TABLE[x.name].collective or TABLE[x.name].regroups))
            and x.name not in ("hsum", "hmax", "hmin", "hprod", "lanes")
        ):
            widths = {a.lanes for a in x.args if not isinstance(a, Ref)} - {1}
            if len(widths) > 1:
                yield f"mixes {sorted(widths)} lanes in {show(x)}"
        if x.name in ARITHMETIC and len({a.dtype for a in x.args}) > 1:
            yield f"mixes {', '.join(sorted({a.dtype.name for a in x.args}))} in {show(x)}"
        if x.name == "dot4" and not _is_dot4(*x.args):
            yield f"dot4 takes i32 lanes, bytes for each of them or for one, and i8 for each; got {show(x)}"
        if x.name == "dot2" and not (all(a.dtype is bf16 for a in x.args) and x.args[0].lanes in (2, 2 * x.lanes)):
            yield f"dot2 takes two bf16 for each of its f32 lanes, or two for all; got {show(x)}"
        if x.name in ("//", "%") and x.lanes == 1 and not _shown(self.inlined(x.args[1]) - 1, facts):
            yield f"cannot show {show(x.args[1])} >= 1 in {show(x)}"

    def store(self, s: Store, scope: set[object], facts: tuple[Expr, ...]) -> Iterator[str]:
        if s.buf not in scope:
            yield f"buffer {s.buf.name} is not defined here"
        if s.value.dtype is not s.buf.dtype:
            yield f"stores {s.value.dtype} into {s.buf.dtype}"
        if s.value.lanes not in (1, s.lanes):
            yield f"stores {s.value.lanes} lanes into {s.lanes}"
        yield from self.in_bounds(s.buf, s.idx, s.lanes, s.limit, facts)

    def alloc(self, buf: Buffer) -> Iterator[str]:
        n = 1
        for d in buf.shape:
            size = value(d)
            if size is None:
                yield f"{buf.space} memory {buf.name} needs a constant shape, got {show(d)}"
                return
            n *= size
        if buf.space == "shared":
            self.shared += n * buf.dtype.bytes
        elif buf.space == "tile":
            self.tiles += value(buf.shape[0]) or 0
            if not tiles.fits(buf):
                yield f"{buf.name} are no tiles of at most {tiles.ROWS} rows of {tiles.ROW} bytes"

    def effect(self, s: Eval, inside: bool) -> Iterator[str]:
        if s.name not in self.funcs and not (s.name in TABLE and TABLE[s.name].effect):
            yield f"unknown effect or function {s.name}"
        if s.name == "barrier" and inside:
            yield "a barrier inside of a parallel loop is not reached by all threads"

    def sparse_rows(self, s: SparseRows, facts: tuple[Expr, ...]) -> Iterator[str]:
        """Both ends of what is read and written; the run's number."""
        y, x, w, run, ahead, *_ = s.args
        if not (isinstance(y, Ref) and isinstance(x, Ref) and isinstance(w, Ref)):
            yield "sparse_rows takes three addresses, the numbers of two runs, and a part of the second one"
            return
        if y.buf.dtype is not f32 or x.buf.dtype is not f32 or w.buf.dtype is not u32 or len(w.idx) != 1:
            yield f"sparse_rows takes f32 vectors and u32 words; got {y.buf.dtype}, {x.buf.dtype}, {w.buf.dtype}"
        for number in map(self.inlined, (run, ahead)):
            if not _shown(number, facts) or not _shown(s.runs - 1 - number, facts):
                yield f"cannot show that {show(number)} is one of {s.runs} runs of groups"
        steps = [n for n, _ in s.finish or ()]
        names = [n for n in steps if n in ("bias", "add")]
        wanted = 6 if s.finish is None else 7 + len(names)
        known = len(set(names)) == len(names) and all(n in ("bias", "add", "max", "min") for n in steps)
        refs = [r for n in ("bias", "add") if (r := s.reference(n)) is not None] if known else []
        if not known or len(s.args) != wanted or not all(isinstance(r, Ref) and r.buf.dtype is f32 for r in refs):
            yield f"sparse_rows with {s.head} takes {wanted} operands, addresses of f32 for bias and add"
            return
        if (s.span and (s.run > 1 or s.finish is not None)) or s.pattern.columns % len(s.taps):
            yield f"sparse_rows with {s.head}: a span of columns is of one group without steps, a row of x has all taps"
            return
        rows = s.group * s.run
        ends: list[E] = [rows - 1]
        if s.finish is not None:  # the last run has what is left
            ends.append(s.pattern.blocks.shape[0] - 1 - self.inlined(run) * rows)
        vectors: list[tuple[Ref, list[E]]] = [(y, ends)]
        if s.window:
            yield from self.window(x, s, facts)
        else:
            vectors.append((x, [s.pattern.columns - 1]))
        if isinstance(z := s.reference("add"), Ref):
            vectors.append((z, ends))
        if isinstance(bias := s.reference("bias"), Ref):
            yield from self.run_of(bias.buf, (*bias.idx, 0), ends, 1, facts)
        for at, last in vectors:
            if len(at.idx) < 2 or unwrap(at.buf.full_strides()[-2]) != at.lanes:
                yield f"the vectors of {at.buf.name} are no neighbours in memory"
                return
            yield from self.run_of(at.buf, at.idx, last, at.lanes, facts)
        yield from self.in_bounds(w.buf, (w.idx[0] + max(s.pattern.count - 1, 0),), 1, None, facts)

    def immediate_rows(self, s: ImmediateRows, facts: tuple[Expr, ...]) -> Iterator[str]:
        """Both ends of what is read and written; the number of the group."""
        if len(s.args) < 3 or not isinstance(y := s.args[0], Ref) or not all(isinstance(x, Ref) for x, _ in s.taps):
            yield "immediate_rows takes an address, the number of a group, and addresses, several with conditions"
            return
        if y.buf.dtype is not f32 or y.buf.space != "register":
            yield f"immediate_rows writes f32 in registers; got {y.buf.dtype} {y.buf.space}"
        if s.pattern.columns % len(s.taps):
            yield f"immediate_rows has {s.pattern.columns} columns of windows of {len(s.taps)}"
        if len(s.values) != 4 * s.pattern.stored or (s.pattern.height, s.pattern.width) != (1, 1):
            yield f"immediate_rows has {len(s.values)} bytes of values for {s.pattern.stored} elements"
        group = self.inlined(s.args[1])
        if not _shown(group, facts) or not _shown(s.groups - 1 - group, facts):
            yield f"cannot show that {show(group)} is one of {s.groups} groups"
        yield from self.in_bounds(y.buf, (*y.idx[:-1], y.idx[-1] + (s.rows - 1)), 1, None, facts)
        for x, inside in s.taps:
            assert isinstance(x, Ref)
            if x.buf.dtype is not f32 or (inside is not None and inside.dtype is not boolean):
                yield f"immediate_rows takes f32 and conditions; got {x.buf.dtype}, {inside and inside.dtype}"
            if not 0 <= s.axis < len(x.idx) or value(x.buf.full_strides()[s.axis]) is None:
                yield f"the columns of {x.buf.name} are not as far from each other as code can tell"
                return
            last = x.idx[s.axis] + (s.pattern.columns // len(s.taps) - 1)
            yield from self.in_bounds(x.buf, (*x.idx[: s.axis], last, *x.idx[s.axis + 1 :]), 1, None, facts)

    def window(self, x: Ref, s: SparseRows, facts: tuple[Expr, ...]) -> Iterator[str]:
        """The corners of what the columns of a window read."""
        if len(x.idx) < 2 or len(x.idx) != len(x.buf.shape) or value(x.buf.full_strides()[-2]) is None:
            yield f"the rows of {x.buf.name} are not as far from each other as code can tell"
            return
        for row in (0, s.pattern.columns // len(s.taps) - 1):
            for tap in (min(s.taps), max(s.taps)):
                place = (*x.idx[:-2], x.idx[-2] + row, x.idx[-1] + tap)
                yield from self.in_bounds(x.buf, place, x.lanes, None, facts)

    def run_of(
        self, buf: Buffer, idx: tuple[E, ...], ends: Sequence[E], lanes: int, facts: tuple[Expr, ...]
    ) -> Iterator[str]:
        """Neighbours along the last axis but one, from an index on as many as the least of `ends` says."""

        def at(k: E) -> list[str]:
            *outer, row, lane = idx
            place = (*map(const, outer), const(row) + k, *([const(lane)] if len(idx) == len(buf.shape) else []))
            return list(self.in_bounds(buf, place, lanes, None, facts))

        yield from at(0)
        yield from min(map(at, ends), key=len)

    def loop(self, s: For, scope: set[object], facts: tuple[Expr, ...], inside: bool) -> Iterator[str]:
        if s.kind in ("unroll", "vector") and not free(s.lo) | free(s.hi) <= self.unrolled:
            yield (
                f"the extent of {'an' if s.kind == 'unroll' else 'a'} {s.kind} loop must be constant (unroll loops "
                "around it are)"
            )
        if s.kind == "unroll":
            self.unrolled.add(s.var)
        if s.kind == "parallel" and inside:
            yield "a parallel loop stands inside of another one"
        yield from self.block(s.body, scope | {s.var}, (*facts, *_nonempty(s)), inside or s.kind == "parallel")

    def branch(self, s: If, scope: set[object], facts: tuple[Expr, ...], inside: bool) -> Iterator[str]:
        c = self.inlined(s.cond)
        yield from self.block(s.then, scope, (*facts, *_facts(c)), inside)
        yield from self.block(s.other, scope, (*facts, *_facts(logical_not(c))), inside)

    def inlined(self, e: Expr) -> Expr:
        return substitute(e, self.lets) if self.lets and not free(e).isdisjoint(self.lets) else e

    def in_bounds(
        self, buf: Buffer, idx: tuple[Expr, ...], lanes: int, limit: Expr | None, facts: tuple[Expr, ...]
    ) -> Iterator[str]:
        where = show_at(buf, idx, lanes, limit)
        if len(idx) != len(buf.shape):
            yield (
                f"{buf.name} has {count(len(buf.shape), 'dimension')}, "
                f"{count(len(idx), 'index', 'indices')} are given in {where}"
            )
            return
        for k, (i, d) in enumerate(zip(idx, buf.shape)):
            if i.lanes > 1:
                yield from self.vector_index(
                    i, d, where, facts if limit is None else (*facts, lane_number(i.lanes) < self.inlined(limit))
                )
                continue
            i = self.inlined(i)
            width: Expr = const(1)
            if k == len(idx) - 1 and not any(x.lanes > 1 for x in idx):
                width = const(lanes) if limit is None else self.inlined(limit)
                if limit is not None and (nonneg(d - i - lanes, facts)):
                    width = const(lanes)  # the limit may be what it likes
            if not _shown(i, facts, LONG):
                yield f"cannot show {show(i)} >= 0 in {where}"
            room = d - i  # min(n, max(d - i, 0)) elements fit wherever i lies: none are read where it is beyond d
            fits = isinstance(width, Op) and width.name == "min" and any(a is maximum(room, 0) for a in width.args)
            if not fits and not _shown(room - width, facts, LONG):
                yield f"cannot show {show(i)} + {show(width)} <= {show(d)} in {where}"

    def vector_index(self, i: Expr, d: Expr, where: str, facts: tuple[Expr, ...]) -> Iterator[str]:
        """Every lane of a gather's index: `lanes(n)` is taken as a variable in [0, n)."""
        scalar = scalarise(self.inlined(i))
        if not _shown(scalar, facts):
            yield f"cannot show {show(i)} >= 0 in {where}"
        if not _shown(d - 1 - scalar, facts):
            yield f"cannot show {show(i)} < {show(d)} in {where}"


def _shown(e: Expr, facts: tuple[Expr, ...], longer: int = 0) -> bool:
    """Is e >= 0 shown? `longer`: steps of another proof, where the usual one fails.

    Facts that contradict each other show everything: the statement is in a branch that is never taken.
    """
    return nonneg(e, facts) or (longer > 0 and nonneg(e, facts, longer)) or any(_refuted(f, facts) for f in facts)


def _refuted(fact: Expr, facts: tuple[Expr, ...]) -> bool:
    """Do the other facts exclude this one?"""
    if isinstance(fact, Const):
        return not value(fact)
    if not (isinstance(fact, Op) and fact.name in ("<", "<=") and fact.args[0].dtype is i64):
        return False
    left, right = fact.args
    return nonneg(left - right - int(fact.name == "<="), tuple(f for f in facts if f is not fact))


def _is_dot4(acc: Expr, a: Expr, b: Expr) -> bool:
    return (
        acc.dtype is i32
        and a.dtype in (u8, i8)
        and b.dtype is i8
        and b.lanes == 4 * acc.lanes
        and a.lanes in (4, b.lanes)
    )


def _written_by_all(b: Block) -> Iterator[str]:
    """Stores outside of the parallel loops of a function that has some: every thread would execute them."""
    for s in b:
        if isinstance(s, Store) and s.buf.space == "global":
            yield (
                f"every thread writes {s.buf.name} outside of a parallel loop\n"
                f"  in: {show_stmt(s).splitlines()[0].strip()}"
            )
        elif not (isinstance(s, For) and s.kind == "parallel"):
            for inner in blocks(s):
                yield from _written_by_all(inner)


def _nonempty(s: For) -> tuple[Expr, ...]:
    """Inside of a loop over c*n*m iterations, n and m not negative, both are at least 1."""
    ts, k = terms(s.extent)
    if len(ts) != 1 or k > 0 or ts[0][1] < 1:
        return ()
    parts = factors(ts[0][0])
    return tuple(const(0) < f for f in parts if not nonneg(f - 1)) if all(nonneg(f) for f in parts) else ()


def _facts(c: Expr) -> tuple[Expr, ...]:
    """A condition as a conjunction of `<` and `<=`."""
    if isinstance(c, Op) and c.name == "&":
        return (*_facts(c.args[0]), *_facts(c.args[1]))
    if isinstance(c, Op) and c.name == "not" and isinstance(inner := c.args[0], Op) and inner.name in ("<", "<="):
        return (op("<=" if inner.name == "<" else "<", inner.args[1], inner.args[0]),)
    return () if isinstance(c, Const) and value(c) else (c,)


def lane_number(lanes: int) -> Expr:
    return var("lane.", lo=0, hi=lanes - 1)


def scalarise(e: Expr) -> Expr:
    """One lane of a vector of indices, with the lane number as a variable."""
    if e.lanes == 1:
        return e
    assert isinstance(e, (Op, Load))
    if isinstance(e, Load):
        return _load_lane(e)
    if e.name == "lanes":
        return lane_number(e.lanes)
    if (
        e.name == "guard"
        or cast_target(e.name) is not None
        or e.name not in ("+", "-", "*", "//", "%", "min", "max", "select")
    ):
        return op(e.name, *(scalarise(a) for a in e.args), dtype=e.dtype)
    return op(e.name, *(scalarise(a) for a in e.args))


def _load_lane(e: Load) -> Expr:
    """A lane of a loaded vector: a number of which nothing is known."""
    return load(e.buf, [scalarise(i) for i in e.idx])
