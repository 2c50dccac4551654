"""From a naive loop nest to tensor expressions, so that operator IR by hand is scheduled like all else.

    for i in range(M):                              y[i, j] = max(t[i, j] + b[j], 0.0)
        for j in range(N):
            acc: f32[1] @ register
            acc[0] = 0.0                       ->   t[i, j] = sum over k of x[i, k] * w[k, j]
            for k in range(K):
                acc[0] = fma(x[i, k], w[k, j], acc[0])
            y[i, j] = max(acc[0] + b[j], 0.0)

A nest is naive when each element of a result is stored once, at the variables of all loops around it, and what is
summed up on the way lies in register buffers of one element. That is the form in which `passes/lower/nests.py` writes
kernels. Loops have no kinds, for these are schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from dnnc.ir.dtype import i64
from dnnc.ir.errors import ParseError, ShapeError, count
from dnnc.ir.expr import (
    Const,
    Expr,
    Load,
    Op,
    Var,
    cast,
    const,
    extent,
    load,
    op,
    rebuild,
    show,
    substitute,
    terms,
    unwrap,
    value,
    var,
    walk,
)
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, For, If, Kernel, Let, Stmt, Store, walk_stmts
from dnnc.ir.te import Stage, Tensor, identity
from dnnc.ir.types import Dim, product


@dataclass
class Scope:
    """Where a statement stands: the loops around it, outermost first, and what names mean there."""

    loops: tuple[Var, ...] = ()
    env: dict[Expr, Expr] = field(default_factory=dict)
    sums: dict[Buffer, Expr | None] = field(default_factory=dict)  # register buffers, and the value in each


def outputs_of(kernel: Kernel) -> list[Buffer]:
    """The parameters that a kernel writes, in order."""
    written = {s.buf for s in walk_stmts(kernel.entry.body) if isinstance(s, Store)}
    return [b for b in kernel.entry.buffers if b in written]


def raised(kernel: Kernel, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a kernel for operands, which are its buffers that it only reads.

    ShapeError: the operands do not have the dtypes and shapes of its parameters. ParseError: it is no naive nest; shows
    the statement and says what is expected.
    """
    outputs = outputs_of(kernel)
    inputs = [b for b in kernel.entry.buffers if b not in outputs]
    dims = bound(kernel, inputs, operands)
    r = _Raiser(kernel.name, dict(zip(inputs, operands)), outputs, dims)
    r.block(kernel.entry.body, Scope(env=dict(dims)))
    missing = [b.name for b in outputs if b not in r.results]
    if missing or len(kernel.funcs) > 1 or not outputs:
        raise ParseError(
            f"kernel {kernel.name}: expected one function that stores its results, got none for "
            f"{', '.join(missing) or 'any'}"
        )
    return tuple(r.results[b] for b in outputs)


def bound(kernel: Kernel, inputs: Sequence[Buffer], operands: Sequence[Tensor]) -> dict[Expr, Expr]:
    """The values of a kernel's sizes for operands of these shapes."""
    if len(inputs) != len(operands):
        raise ShapeError(
            f"kernel {kernel.name} reads {count(len(inputs), 'array')} "
            f"({', '.join(b.name for b in inputs)}), {len(operands)} "
            "are given"
        )
    env: dict[Expr, Expr] = {}
    for b, t in zip(inputs, operands):
        if b.dtype is not t.dtype or len(b.shape) != len(t.shape):
            raise ShapeError(
                f"kernel {kernel.name}: {b.name} is {b.dtype}{list(b.shape)}, got {t.dtype}{list(t.shape)}"
            )
        env.update((d, n) for d, n in zip(b.shape, t.shape) if isinstance(d, Var) and d not in env)
    for b, t in zip(inputs, operands):
        for d, n in zip(b.shape, t.shape):
            if substitute(d, env) is not n:
                known = ", ".join(f"{x.name}={n!r}" for x, n in env.items() if isinstance(x, Var))
                raise ShapeError(
                    f"kernel {kernel.name}: {b.name} is {b.dtype}{list(b.shape)}{' with ' + known if known else ''}, "
                    f"got {list(t.shape)}"
                )
    unknown = [p.name for p in kernel.entry.scalars if p not in env]
    if unknown:
        raise ShapeError(f"kernel {kernel.name}: no operand has the size {', '.join(unknown)}")
    for p in kernel.entry.scalars:
        size, lo, hi = value(env[p]), p.lo, p.hi
        if size is not None and (
            (isinstance(lo, int) and size < lo) or (isinstance(hi, int) and size > hi) or size % p.div
        ):
            raise ShapeError(
                f"kernel {kernel.name}: {p.name} must be in [{lo}, {hi}] and divisible by {p.div}, got {size}"
            )
    return env


class _Raiser:
    def __init__(
        self, name: str, operands: dict[Buffer, Tensor], outputs: Sequence[Buffer], dims: dict[Expr, Expr]
    ) -> None:
        self.name, self.operands, self.outputs, self.dims = name, operands, outputs, dims
        self.results: dict[Buffer, Tensor] = {}

    def fail(self, s: Stmt | Expr, message: str) -> NoReturn:
        shown = (
            f"`{s.buf.name}[...] = {show(s.value)}`"
            if isinstance(s, Store)
            else show(s)
            if isinstance(s, Expr)
            else type(s).__name__.lower()
        )
        raise ParseError(
            f"kernel {self.name}: {shown}: {message}; expected a naive nest, as in the documentation of custom_op"
        )

    # --- statements ---------------------------------------------------------------------------------------------------

    def block(self, b: Block, scope: Scope) -> None:
        for s in b:
            if isinstance(s, Let):
                scope.env[s.var] = self.value(s.value, scope)
            elif isinstance(s, Alloc):
                if s.buf.space != "register" or value(_size(s.buf.shape)) != 1:
                    self.fail(s, f"{s.buf.name} must be a register buffer of one element")
                scope.sums[s.buf] = None
            elif isinstance(s, Store):
                self.store(s, scope)
            elif isinstance(s, For):
                self.loop(s, scope)
            else:
                self.fail(s, "only loops, names, register buffers and stores can stand here")

    def loop(self, s: For, scope: Scope) -> None:
        found = self.update(s, scope)
        if found is None:
            v = self.variable(s, scope)
            self.block(s.body, Scope((*scope.loops, v), {**scope.env, s.var: v}, dict(scope.sums)))
            return
        store, reduce, cond, inner = found
        scope.sums[store.buf] = self.accumulated(store, reduce, cond, inner)

    def variable(self, s: For, scope: Scope, prefix: str = "i") -> Var:
        """A loop's variable, which counts from 0 to a size."""
        hi = substitute(s.hi, scope.env)
        if s.kind != "range" or value(s.lo) != 0:
            self.fail(s, "loops are `for i in range(n)`: from 0, and of no other kind")
        if any(isinstance(x, Var) and x in scope.loops for x in walk(hi)):
            self.fail(hi, "the end of a loop may not depend on another loop; leave out what is too much by `if`")
        return var(f"{prefix}{len(scope.loops)}", lo=0, hi=unwrap(hi - 1))

    def update(
        self, s: For, scope: Scope, reduce: Sequence[Var] = (), cond: Expr | None = None, seen: Sequence[Expr] = ()
    ) -> tuple[Store, Sequence[Var], Expr | None, Scope] | None:
        """The one statement of loops that add up into a register buffer; None where the loop does something else."""
        v = self.variable(s, scope, "r")
        inner = Scope((*scope.loops, v), {**scope.env, s.var: v}, dict(scope.sums))
        body: Block = s.body
        reduce, seen = [*reduce, v], list(seen)
        while True:
            while body and isinstance(body[0], Let):
                seen.append(body[0].value)
                inner.env[body[0].var] = self.value(body[0].value, inner)
                body = body[1:]
            only = body[0] if len(body) == 1 else None
            if isinstance(only, For):
                return self.update(only, inner, reduce, cond, seen)
            if isinstance(only, If) and not only.other:
                seen.append(only.cond)
                here = self.value(only.cond, inner)
                cond = here if cond is None else cond & here
                body = only.then
                continue
            if not isinstance(only, Store) or only.buf not in inner.sums:
                return None
            if any(isinstance(x, Load) and x.buf is only.buf for e in seen for x in walk(e)):
                self.fail(only, f"what is added up may not depend on {only.buf.name} itself")
            return only, reduce, cond, inner

    def accumulated(self, s: Store, reduce: Sequence[Var], cond: Expr | None, scope: Scope) -> Expr:
        """The value of a register buffer after the loops that add up into it."""
        start = scope.sums[s.buf]
        if start is None:
            self.fail(s, f"{s.buf.name} has no value before the loop")
        combine, term = self.combined(s, scope)
        outer = scope.loops[: len(scope.loops) - len(reduce)]
        dtype = s.buf.dtype
        stage = Stage(outer, const(term, dtype), tuple(reduce), combine, cond)
        t = Tensor(s.buf.name, dtype, tuple(extent(v) for v in outer), stage=stage)
        total = load(t, outer)
        if isinstance(start, Const) and start.value == identity(combine, dtype):
            return total
        return _joined(combine, start, total)

    def combined(self, s: Store, scope: Scope) -> tuple[str, Expr]:
        """How a store combines what is in its register buffer with a term: `acc = acc + e` and its like."""
        own = load(s.buf, s.idx)
        others = {b: v for b, v in scope.sums.items() if b is not s.buf}
        inner = Scope(scope.loops, scope.env, others)
        e = s.value
        if isinstance(e, Op) and e.name == "fma" and e.args[2] is own:
            return "sum", self.value(e.args[0], inner) * self.value(e.args[1], inner)
        if e.dtype is i64 and any(t is own and c == 1 for t, c in terms(e)[0]):
            return "sum", self.value(e - own, inner)
        names = {"+": "sum", "*": "prod", "max": "max", "min": "min", "fmax": "fmax"}
        if isinstance(e, Op) and e.name in names and len(e.args) == 2 and sum(a is own for a in e.args) == 1:
            return names[e.name], self.value(e.args[0] if e.args[1] is own else e.args[1], inner)
        self.fail(s, f"{s.buf.name} is combined by +, *, min, max, fmax or fma of itself and a term")

    def store(self, s: Store, scope: Scope) -> None:
        if s.lanes != 1 or s.limit is not None:
            self.fail(s, "stores are of one element")
        if s.buf in scope.sums:
            scope.sums[s.buf] = self.value(s.value, scope)
            return
        if s.buf in self.results:
            self.fail(s, f"{s.buf.name} is stored twice")
        idx = [substitute(i, scope.env) for i in s.idx]
        shape = [substitute(d, self.dims) for d in s.buf.shape]
        plain = [i for i in idx if isinstance(i, Var)]
        fits = all(i in plain or (value(i) == 0 and value(d) == 1) for i, d in zip(idx, shape))
        if (
            not fits
            or len(set(plain)) < len(plain)
            or set(plain) != set(scope.loops)
            or any(extent(i) is not d for i, d in zip(idx, shape) if isinstance(i, Var))
        ):
            self.fail(s, f"every element of {s.buf.name} is stored once, at the variables of the loops around it")
        axes = tuple(i if isinstance(i, Var) else var(f"o{k}", lo=0, hi=0) for k, i in enumerate(idx))
        e = self.value(s.value, scope)
        wide = s.buf.dtype.computed
        if isinstance(e, Op) and e.name == f"cast_{s.buf.dtype.name}" and e.args[0].dtype is wide:
            e = e.args[0]  # the store rounds
        self.results[s.buf] = Tensor(s.buf.name, s.buf.dtype, tuple(shape), stage=Stage(axes, cast(e, wide)))

    def value(self, e: Expr, scope: Scope) -> Expr:
        """An expression of tensors, of one of buffers."""

        def go(x: Expr) -> Expr:
            if isinstance(x, Var):
                return scope.env.get(x, x)
            if isinstance(x, Load):
                if x.buf in scope.sums:
                    held = scope.sums[x.buf]
                    if held is None:
                        self.fail(x, f"{x.buf.name} has no value yet")
                    return held
                if x.buf not in self.operands or x.lanes != 1 or x.limit is not None:
                    self.fail(x, "only operands and register buffers are read, an element at a time")
                return load(self.operands[x.buf], map(go, x.idx))
            return rebuild(x, go)

        return go(e)


def _size(shape: Sequence[Expr]) -> Dim:
    return product([unwrap(d) for d in shape])


def _joined(combine: str, a: Expr, b: Expr) -> Expr:
    name = {"sum": "+", "prod": "*"}.get(combine, combine)
    return op(name, a, b)
