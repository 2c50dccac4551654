"""Loop-invariant code motion in rows: what a loop computes for each element though nothing changes it.

In: the body of a schedule. Out: the same with sums, or single expressions, ahead of the loops that only read them.

Compilers move single instructions out of loops, but not the dozens with branches that a logarithm takes.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Ref, Var, children, const, free, rebuild, walk
from dnnc.ir.loops.intrinsics import COSTLY
from dnnc.ir.loops.stmt import (
    Alloc,
    Block,
    Buffer,
    For,
    If,
    Let,
    Stmt,
    Store,
    accesses,
    exprs,
    let_var,
    map_stmt,
    stored,
    walk_stmts,
)
from dnnc.passes.schedule.state import edit

Keep = Callable[[Expr], tuple[Block, Expr]]  # a number -> the statements that compute it, and how it is read then


def hoist_numbers(b: Block) -> Block:
    """`for i in range(n): y[i] = x[i] - log(s[0])`  ->  `number: f32 = log(s[0]); for i in range(n): y[i] = x[i] -
    number`

    Of floats, in loops that run one after the other. Legal where the loop writes none of what the number is made of, be
    it the thread's own or, under no condition, an operand of something costly.
    """
    names = {s.var.name for s in walk_stmts(b) if isinstance(s, Let)}

    def named(e: Expr) -> tuple[Block, Expr]:
        v = let_var(_fresh(names), e)
        return (Let(v, e),), v

    return _hoisted(b, named)


def keep_numbers(b: Block) -> Block:
    """`for i in range(n): y[i] = x[i] - log(s[0])`  ->  `number: f32[1] @ register; number[0] = log(s[0]); for i in
    range(n): y[i] = x[i] - number[0]`

    The same as registers, which `distribute` makes vectors of where the vectors go across rows.
    """
    names = {s.buf.name for s in walk_stmts(b) if isinstance(s, Alloc)}

    def stored_(e: Expr) -> tuple[Block, Expr]:
        buf = Buffer(_fresh(names), e.dtype, (const(1),), "register")
        return (Alloc(buf), Store(buf, (const(0),), e)), buf[0]

    return _hoisted(b, stored_)


def sink(b: Block, name: str) -> Block:
    """`for c in range(n): {s: f32[1] @ register; s[0] = ..; y[c] = f(s[0])}`  ->  `s: f32[1] @ register; s[0] = ..; for
    c in range(n): y[c] = f(s[0])`

    Several results may be stored last. Legal where all ahead of them is invariant, and writes nothing but what is
    declared among it.
    """

    def go(s: For) -> Block:
        before, last = numbers_and_results(s.body)
        own = {x.buf for x in before if isinstance(x, Alloc)}
        for x in walk_stmts(tuple(before)):
            if any(s.var in free(e) for e in exprs(x)):
                raise ScheduleError(f"{name} cannot be sunk: not only its last statements depend on it")
            if not isinstance(x, (Alloc, Store, For, If, Let)) or (isinstance(x, Store) and x.buf not in own):
                raise ScheduleError(
                    f"{name} cannot be sunk: a statement ahead of the last ones does more than compute a number"
                )
        if stored(last) & {*own, *(x.buf for x in accesses(before))}:
            raise ScheduleError(f"{name} cannot be sunk: its last statements change what those before them compute")
        return (*before, For(s.var, s.lo, s.hi, s.kind, last))

    return edit(b, name, go)


def numbers_and_results(b: Block) -> tuple[Block, Block]:
    """The statements of a body, and the last: one, or where it is a store, all next to it of what is not declared."""
    declared = {x.buf for x in b if isinstance(x, Alloc)}
    at = len(b) - 1
    while 0 < at and all(isinstance(x, Store) and x.buf not in declared for x in b[at - 1 :]):
        at -= 1
    return b[:at], b[at:]


def _hoisted(b: Block, keep: Keep) -> Block:
    out: list[Stmt] = []
    for s in b:
        if isinstance(s, If):
            out.append(If(s.cond, _hoisted(s.then, keep), _hoisted(s.other, keep)))
        elif isinstance(s, For):
            *numbers, loop = _split(s, keep) if s.kind == "range" else (s,)
            assert isinstance(loop, For)
            out += [*numbers, For(loop.var, loop.lo, loop.hi, loop.kind, _hoisted(loop.body, keep))]
        else:
            out.append(s)
    return tuple(out)


def _split(loop: For, keep: Keep) -> Block:
    inside = list(walk_stmts(loop.body))
    changing = {loop.var, *(s.var for s in inside if isinstance(s, (For, Let)))}
    written = stored(loop.body)
    found: dict[Expr, Expr] = {}
    ahead: list[Stmt] = []
    guarded = {s for x in inside if isinstance(x, If) for s in walk_stmts((x,))}
    for s in inside:
        if isinstance(s, Store):
            for e in _numbers(s.value, changing, written, s not in guarded):
                if e not in found:
                    made, found[e] = keep(e)
                    ahead += made
    if not found:
        return (loop,)

    def go(e: Expr) -> Expr:
        return found[e] if e in found else rebuild(e, go)

    def block(b: Block) -> Block:
        return tuple(
            Store(s.buf, s.idx, go(s.value), s.lanes, s.limit)
            if isinstance(s, Store)
            else map_stmt(s, lambda e: e, block)
            for s in b
        )

    return (*ahead, For(loop.var, loop.lo, loop.hi, loop.kind, block(loop.body)))


def _fresh(names: set[str]) -> str:
    name = next(n for n in ("number", *(f"number_{k}" for k in range(1, len(names) + 2))) if n not in names)
    names.add(name)
    return name


def _numbers(e: Expr, changing: set[Var], written: Container[Buffer], always: bool) -> list[Expr]:
    """Return the largest invariant parts of an expression. `always`: it is computed whenever the loop runs."""
    out: list[Expr] = []
    stack, seen = [e], {e}
    while stack:
        x = stack.pop()
        if isinstance(x, Op) and x.lanes == 1 and x.dtype.is_float and _fixed(x, changing, written, always):
            out.append(x)
            continue
        for c in children(x) if isinstance(x, Op) else ():
            if c not in seen:
                seen.add(c)
                stack.append(c)
    return out


def _fixed(e: Op, changing: set[Var], written: Container[Buffer], always: bool) -> bool:
    """True if it is loop-invariant, and made of numbers that are in registers or worth computing ahead."""
    if not changing.isdisjoint(free(e)):
        return False
    parts = list(walk(e))
    loads = [x for x in parts if isinstance(x, Load)]
    costly = always and any(isinstance(x, Op) and x.name in COSTLY for x in parts)
    kept = all((x.buf.space in ("register", "local") or costly) and x.buf not in written for x in loads)
    return (
        bool(loads) and kept and not any(isinstance(x, Ref) or (isinstance(x, Op) and x.name == "guard") for x in parts)
    )
