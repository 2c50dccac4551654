"""Names values that a statement computes several times: its text is a tree, the expression a graph.

In: a function of a kernel. Out: the same with names, for decomposed and printed kernels.

`((a + b) * (a + b))` is printed as it stands while the text stays small. A chain of operations that read an operand
twice doubles its text at each of them, so from LIMIT nodes on the shared operands are bound first:

    t0: f32x16 = a[i:+16] + b[i:+16]
    y[i:+16] = t0 * t0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from dnnc.ir.expr import Expr, Load, Op, Ref, children, rebuild
from dnnc.ir.loops.stmt import Alloc, Block, Eval, For, Func, Let, Stmt, Store, exprs, let_var, map_stmt, walk_stmts

LIMIT = 4000  # nodes of the tree
LEAST = 6  # nodes of what is worth a name


def tree_size(e: Expr, memo: dict[Expr, int]) -> int:
    """Nodes of an expression as a tree."""
    for x in _in_order(e, memo):
        memo[x] = 1 + sum(memo[c] for c in children(x))
    return memo[e]


def _in_order(e: Expr, known: dict[Expr, int]) -> Iterator[Expr]:
    """The nodes that are not known yet, operands first, each once; chains may be longer than Python's stack."""
    stack = [e]
    while stack:
        x = stack[-1]
        missing = [c for c in children(x) if c not in known] if x not in known else []
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        if x not in known:
            yield x


def with_names(f: Func) -> Func:
    """The function with names for what is shared, where its text would be long without; else the same function."""
    changed = False

    def fresh() -> Iterator[str]:
        taken = {p.name for p in f.params}.union(*(_named(s) for s in walk_stmts(f.body)))
        yield from (n for k in count() if (n := f"t{k}") not in taken)

    names = fresh()

    def go(b: Block) -> Block:
        nonlocal changed
        out: list[Stmt] = []
        for s in b:
            made = bind_shared(s, names) if isinstance(s, (Store, Let, Eval)) else [map_stmt(s, lambda e: e, go)]
            changed = changed or len(made) > 1
            out += made
        return tuple(out)

    body = go(f.body)
    return replace(f, body=body) if changed else f


def _named(s: Stmt) -> set[str]:
    """The names that a statement brings."""
    return {s.var.name} if isinstance(s, (For, Let)) else {s.buf.name} if isinstance(s, Alloc) else set()


def bind_shared(s: Stmt, fresh: Iterator[str]) -> list[Stmt]:
    """The statement, behind the names that it then uses. Names are taken from `fresh`."""
    sizes: dict[Expr, int] = {}
    roots = exprs(s)
    if sum(tree_size(e, sizes) for e in roots) <= LIMIT:
        return [s]
    readers: dict[Expr, int] = dict.fromkeys(roots, 1)
    for e in sizes:
        for c in children(e):
            readers[c] = readers.get(c, 0) + 1
    indices = set(s.idx) if isinstance(s, Store) else set()
    for e in reversed(sizes):  # what reads comes first
        if e in indices or isinstance(e, (Load, Ref)):
            indices.update(children(e))
    lets: list[Stmt] = []
    done: dict[Expr, Expr] = {}
    for e in list(sizes):  # operands come first
        r = rebuild(e, lambda c: done.get(c, c))
        if readers[e] > 1 and e not in indices and _nameable(e, sizes[e]):
            name = let_var(next(fresh), r)
            lets.append(Let(name, r))
            r = name
        done[e] = r
    return [*lets, map_stmt(s, lambda e: done.get(e, e), lambda b: b)]


def _nameable(e: Expr, size: int) -> bool:
    """Floats: a truth value has no type of its own, and integers mostly are indices, which stay what they are for
    bounds to be seen. What is read under a mask is named as well: it would be read once for each name.
    """
    return e.dtype.is_float and ((isinstance(e, Op) and size >= LEAST) or (isinstance(e, Load) and e.limit is not None))
