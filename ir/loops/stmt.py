"""Statements, buffers, functions and kernels of the operator IR.

    func ::= def NAME(param, ...): stmt+          param: K: dim[lo, hi, divisor]  |  A: f32[M, K] [@ strides(lda, 1)]
    stmt ::= for i in KIND(hi) | KIND(lo, hi): stmt+
           KIND: range unroll vector parallel | block.x block.y block.z cluster thread.x warp lane
           | if e: stmt+ [else: stmt+]  |  x: f32x16 = e
           | acc: f32[14, 32] @ register | local | shared | shared.swizzle8 | tile
           | B[e, ..., e:+16:n] = e                store of 16 lanes, of which the first n
           | f(arg, ...)                           effect (barrier, prefetch, cp_async ...) or call of a Func

`parallel` iterations are divided among the threads of the call in contiguous ranges; they may not touch what another
one writes. On the CPU every thread executes the whole kernel, so outside of a parallel loop nothing but `barrier()`,
Let and Alloc may stand.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Union

import numpy as np

from dnnc.ir.bounds import bounds
from dnnc.ir.dtype import DType, i64
from dnnc.ir.errors import Loc
from dnnc.ir.expr import E, Expr, Load, Ref, Var, children, const, load, op, reads, ref, substitute, unwrap, value, var
from dnnc.ir.loops.intrinsics import TABLE
from dnnc.ir.sparse import Pattern
from dnnc.ir.types import Array

LOOP_KINDS = tuple("range unroll vector parallel block.x block.y block.z cluster thread.x warp lane".split())
SPACES = ("global", "register", "local", "shared", "tile")


@dataclass(frozen=True, eq=False)
class Buffer:
    """A typed array. `offset` is the only place where an index becomes an address.

    space: `global` is a parameter; `register` a tile that must vanish into registers; `local` a thread's own memory;
    `shared` a block's memory; `tile` registers of two dimensions (`tiles.py`). Strides are in elements, None is
    row-major. A swizzle XORs the 16-byte chunk of a row with row % swizzle.
    """

    name: str
    dtype: DType
    shape: tuple[Expr, ...]
    space: str = "global"
    strides: tuple[Expr, ...] | None = None
    swizzle: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "_offsets", {})

    def __getitem__(self, idx: E | tuple[E, ...]) -> Expr:
        return load(self, idx if isinstance(idx, tuple) else (idx,))

    def at(self, *idx: E, lanes: int = 1, limit: E | None = None) -> Expr:
        return load(self, idx, lanes, limit)

    def ref(self, *idx: E, lanes: int = 1) -> Expr:
        return ref(self, idx, lanes)

    def full_strides(self) -> tuple[Expr, ...]:
        if self.strides is not None:
            return self.strides
        s: list[Expr] = [const(1)]
        for d in self.shape[:0:-1]:
            s.insert(0, s[0] * d)
        return tuple(s[: len(self.shape)])

    def offset(self, idx: tuple[Expr, ...]) -> Expr:
        """Offset of an element from the start, in elements: one linear form."""
        memo: dict[tuple[Expr, ...], Expr] = self._offsets  # type: ignore[attr-defined]
        r = memo.get(idx)
        if r is None:
            at = idx
            if self.swizzle:
                chunk = 16 // self.dtype.bytes
                at = (*idx[:-1], ((idx[-1] // chunk) ^ (idx[-2] % self.swizzle)) * chunk + idx[-1] % chunk)
            r = const(0)
            for i, s in zip(at, self.full_strides()):
                r = r + i * s
            memo[idx] = r
        return r

    def size(self) -> Expr:
        """Elements from the first to the last, both included."""
        n: Expr = const(1)
        for d, s in zip(self.shape, self.full_strides()):
            n = n + (d - 1) * s
        return n


@dataclass(frozen=True, slots=True, eq=False)
class Stmt:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class For(Stmt):
    var: Var
    lo: Expr
    hi: Expr
    kind: str
    body: Block

    @property
    def extent(self) -> Expr:
        return self.hi if value(self.lo) == 0 else self.hi - self.lo


@dataclass(frozen=True, slots=True, eq=False)
class If(Stmt):
    cond: Expr
    then: Block
    other: Block = ()


@dataclass(frozen=True, slots=True, eq=False)
class Let(Stmt):
    var: Var
    value: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Alloc(Stmt):
    buf: Buffer


@dataclass(frozen=True, slots=True, eq=False)
class Store(Stmt):
    buf: Buffer
    idx: tuple[Expr, ...]
    value: Expr
    lanes: int = 1
    limit: Expr | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Eval(Stmt):
    """An intrinsic with an effect, or the call of a Func of the same kernel."""

    name: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SparseRows(Eval):
    """`sparse_rows(addr(y[..]), addr(x[..]), addr(w[..]), run, next, part, "24x2 1x1 512x256 ...")`: a run of groups of
    rows of a sparse matrix times vectors, y[r, :] = sum over its stored elements (r, k) of w[n] * x[k, :], in the order
    of columns. The last run may have fewer groups; the last group has all of its rows.

    Args are addresses of a vector of y and of x, whose last axes but one count rows and columns, so that all of these
    are neighbours in memory; that of the float32 values, as words of 32 bits, of the whole matrix in the order of
    groups (`Pattern.by_groups`); the run's number; that of a run of which a part is prefetched, and the part.

    With `taps`, columns are those of a window, "24x1@0:1:57:58 ...": column k is at element x[k // 4, taps[k % 4] + l]
    for lane l. With `span`, "24x1/288 ...", a run is one group and so many of its columns, and the group's runs follow
    each other: sums begin with 0 in the first one, and with y in those behind it.

    With `finish`, rows of the last group that the matrix has not are not stored, and sums are results:

        sparse_rows(.., part, count, addr(b[..]), addr(z[..]), "24x2,bias,add,max:0.0 1x1 512x256 ...")
        y[r, l] = max(0, sum + b[r] + z[r, l]) for lanes l < count, 0 for others

    Steps are `bias` (float32, one for each row, neighbours), `add` (vectors as those of y), `max:C` and `min:C`, as
    `fmax(C, x)` and `fmin(C, x)` are; the former two at most once, and their addresses in this order.
    """

    pattern: Pattern
    group: int  # rows
    run: int  # groups
    finish: tuple[tuple[str, float], ...] | None = None  # steps, and their numbers
    taps: tuple[int, ...] = (0,)  # elements from the vector of a window's first column to those of all
    span: int = 0  # columns of a run; 0: all

    @property
    def head(self) -> str:
        """`24x2,bias,max:0.0`, `24x1/288@0:1:57:58`"""
        steps = [] if self.finish is None else [n if n in ("bias", "add") else f"{n}:{c!r}" for n, c in self.finish]
        columns = (f"/{self.span}" if self.span else "") + ("@" + ":".join(map(str, self.taps)) if self.window else "")
        return f"{self.group}x{self.run}{columns}" + ("" if self.finish is None else "," + ",".join(steps))

    @staticmethod
    def parse(text: str, args: tuple[Expr, ...]) -> SparseRows:
        """The statement that `head` and a pattern say."""
        head, pattern = text.split(" ", 1)
        sizes, *steps = head.split(",")
        sizes, _, offsets = sizes.partition("@")
        rows, _, span = sizes.partition("/")
        group, run = map(int, rows.split("x"))
        pairs = (s.partition(":") for s in steps if s)
        finish = tuple((name, float(number or 0)) for name, _, number in pairs) if steps else None
        taps = tuple(map(int, offsets.split(":"))) if offsets else (0,)
        return SparseRows("sparse_rows", args, Pattern.parse(pattern), group, run, finish, taps, int(span or 0))

    def reference(self, step: str) -> Expr | None:
        """The address that a step reads."""
        names = [n for n, _ in self.finish or () if n in ("bias", "add")]
        return self.args[7 + names.index(step)] if step in names else None

    @property
    def window(self) -> bool:
        """Are columns those of a window?"""
        return self.taps != (0,)

    @property
    def spans(self) -> int:
        """Runs of a group."""
        return -(-self.pattern.columns // self.span) if self.span else 1

    @property
    def runs(self) -> int:
        rows: int = self.pattern.blocks.shape[0]
        return -(-rows // (self.group * self.run)) * self.spans


@dataclass(frozen=True, slots=True, eq=False)
class ImmediateRows(Eval):
    """`immediate_rows(addr(y[0]), group, addr(x[..]), "64@1 1x1 512x256 ..")`: a group of rows of a sparse matrix times
    a vector: y[r] = sum over its stored elements (r, k) of w * x[k], in the order of columns. The elements are a part
    of the code. Rows of the last group that the matrix has not are 0.

    Args are the address of as many registers as a group has rows, the number of the group, and the address of x for
    column 0, all of float32. Index `axis` of x counts columns. Columns of a window have several addresses, with the
    condition of each: column 9 * c + t is 0 where condition t does not hold.

        immediate_rows(addr(y[0]), group, addr(x[..]), inside, addr(x[..]), inside, .., "64@1 1x1 512x2304 ..")

    `values`: float32 in the order of groups (`Pattern.by_groups`).
    """

    pattern: Pattern
    rows: int  # of a group
    axis: int
    values: bytes

    @property
    def text(self) -> str:
        return f"{self.rows}@{self.axis} {self.pattern} {base64.b64encode(self.values).decode()}"

    @staticmethod
    def parse(text: str, args: tuple[Expr, ...]) -> ImmediateRows:
        """The statement that `text` says."""
        head, block, shape, bits, *values = text.split(" ")
        rows, axis = map(int, head.split("@"))
        pattern = Pattern.parse(f"{block} {shape} {bits}")
        return ImmediateRows("immediate_rows", args, pattern, rows, axis, base64.b64decode("".join(values)))

    @property
    def groups(self) -> int:
        return -(-self.pattern.rows // self.rows)

    @property
    def taps(self) -> tuple[tuple[Expr, Expr | None], ...]:
        """Addresses of the columns of a window, and their conditions; the only one has none."""
        more = self.args[2:]
        return ((more[0], None),) if len(more) == 1 else tuple(zip(more[::2], more[1::2]))

    def members(self, group: int) -> tuple[Array, Array, Array]:
        """Columns, rows within the group and values of its stored elements, in their order."""
        every = self.pattern.by_groups(self.rows)
        begin = int(every[:group].sum())
        columns, rows = np.nonzero(every[group])
        return columns, rows, np.frombuffer(self.values, "<f4")[begin : begin + len(rows)]


Block = tuple[Stmt, ...]
Param = Union[Buffer, Var]


@dataclass(frozen=True, slots=True, eq=False)
class Func:
    name: str
    params: tuple[Param, ...]
    body: Block

    @property
    def buffers(self) -> list[Buffer]:
        return [p for p in self.params if isinstance(p, Buffer)]

    @property
    def scalars(self) -> list[Var]:
        return [p for p in self.params if isinstance(p, Var)]


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """One fused group: helper Funcs first, the entry last. `locs` says which nodes it computes."""

    funcs: tuple[Func, ...]
    locs: tuple[Loc, ...] = ()

    @property
    def entry(self) -> Func:
        return self.funcs[-1]

    @property
    def name(self) -> str:
        return self.entry.name

    def with_body(self, body: Block) -> Kernel:
        return replace(self, funcs=(*self.funcs[:-1], replace(self.entry, body=body)))


# --- walking and rewriting --------------------------------------------------------------------------------------------


def map_stmt(s: Stmt, fe: Callable[[Expr], Expr], fb: Callable[[Block], Block]) -> Stmt:
    """Rebuild a statement with fe applied to its expressions and fb to its blocks."""
    if isinstance(s, For):
        return For(s.var, fe(s.lo), fe(s.hi), s.kind, fb(s.body))
    if isinstance(s, If):
        return If(fe(s.cond), fb(s.then), fb(s.other))
    if isinstance(s, Let):
        return Let(s.var, fe(s.value))
    if isinstance(s, Store):
        return Store(s.buf, tuple(map(fe, s.idx)), fe(s.value), s.lanes, None if s.limit is None else fe(s.limit))
    if isinstance(s, Eval):
        return replace(s, args=tuple(map(fe, s.args)))
    return s


def with_pattern(kernel: Kernel, old: Pattern, new: Pattern) -> Kernel:
    """A kernel whose code is of another pattern, for as many rows and columns."""

    def go(block: Block) -> Block:
        return tuple(map(changed, block))

    def changed(s: Stmt) -> Stmt:
        if isinstance(s, SparseRows):
            return replace(s, pattern=new) if s.pattern == old else s
        return map_stmt(s, lambda e: e, go) if blocks(s) else s

    return replace(kernel, funcs=tuple(replace(f, body=go(f.body)) for f in kernel.funcs))


def substitute_block(b: Block, env: dict[Expr, Expr]) -> Block:
    """Replace variables in a block. Changed bounds make new loop and let variables; decided branches vanish."""

    def go(block: Block, env: dict[Expr, Expr]) -> Block:
        out: list[Stmt] = []
        for s in block:
            if isinstance(s, For):
                lo, hi = substitute(s.lo, env), substitute(s.hi, env)
                v = loop_var(s.var.name, lo, hi)
                out.append(For(v, lo, hi, s.kind, go(s.body, env if v is s.var else {**env, s.var: v})))
            elif isinstance(s, Let):
                e = substitute(s.value, env)
                v = let_var(s.var.name, e)
                if v is not s.var:
                    env = {**env, s.var: v}
                out.append(Let(v, e))
            elif isinstance(s, If) and (known := value(substitute(s.cond, env))) is not None:
                out.extend(go(s.then if known else s.other, env))
            else:
                out.append(map_stmt(s, lambda e: substitute(e, env), lambda x: go(x, env)))
        return tuple(out)

    return go(b, dict(env))


def loop_var(name: str, lo: Expr, hi: Expr) -> Var:
    """The variable of `for name in range(lo, hi)`: it knows its bounds."""
    return var(name, i64, unwrap(lo), unwrap(hi - 1))


def let_var(name: str, e: Expr) -> Var:
    """The variable of `name: t = e`; an integer one is only a name for an index, so its bounds are its value's."""
    if e.dtype is i64 and e.lanes == 1:
        lo, hi = bounds(e)
        return var(name, i64, lo, hi)
    return var(name, e.dtype, lanes=e.lanes)


def exprs(s: Stmt) -> tuple[Expr, ...]:
    """The expressions of a statement itself, not of its blocks."""
    if isinstance(s, For):
        return s.lo, s.hi
    if isinstance(s, If):
        return (s.cond,)
    if isinstance(s, Let):
        return (s.value,)
    if isinstance(s, Store):
        return (*s.idx, s.value) if s.limit is None else (*s.idx, s.value, s.limit)
    return s.args if isinstance(s, Eval) else ()


def blocks(s: Stmt) -> tuple[Block, ...]:
    if isinstance(s, For):
        return (s.body,)
    return (s.then, s.other) if isinstance(s, If) else ()


def walk_stmts(b: Block) -> Iterator[Stmt]:
    """Every statement, parents first."""
    stack = [*reversed(b)]
    while stack:
        s = stack.pop()
        yield s
        if isinstance(s, For):
            stack += s.body[::-1]
        elif isinstance(s, If):
            stack += s.other[::-1]
            stack += s.then[::-1]


def accesses(b: Block) -> Iterator[Load | Ref]:
    """Every load and address in a block."""
    for s in walk_stmts(b):
        for e in exprs(s):
            yield from reads(e)


def stored(b: Block) -> set[Buffer]:
    """Buffers that a block writes, itself or through a call or a copy."""
    out: set[Buffer] = set()
    for s in walk_stmts(b):
        if isinstance(s, Store):
            out.add(s.buf)
        elif (
            isinstance(s, Eval) and s.name != "prefetch"
        ):  # of a copy the first operand is written; the others may be barriers
            copies = s.name.startswith(("cp_async", "tma_", "tile_")) or isinstance(s, (SparseRows, ImmediateRows))
            out |= {
                a.buf
                for k, a in enumerate(s.args)
                if isinstance(a, Ref) and (not copies or k == 0 or a.buf.space == "shared")
            }
    return out


def count_stmts(k: Kernel) -> int:
    return sum(1 for f in k.funcs for _ in walk_stmts(f.body))


# --- builder ----------------------------------------------------------------------------------------------------------


class Builder:
    """Writes a block in order; `with b.loop("i", n) as i:` nests. Templates and lowering make code with it."""

    def __init__(self) -> None:
        self._stack: list[list[Stmt]] = [[]]
        self._used: dict[str, int] = {}

    def emit(self, s: Stmt) -> None:
        self._stack[-1].append(s)

    def fresh(self, name: str) -> str:
        """`name`, or `name_1`, `name_2` ... when it is taken."""
        n = self._used.get(name, -1) + 1
        self._used[name] = n
        return name if n == 0 else self.fresh(f"{name}_{n}")

    @contextmanager
    def loop(self, name: str, hi: E, kind: str = "range", lo: E = 0) -> Iterator[Var]:
        lo_, hi_ = const(lo), const(hi)
        v = loop_var(self.fresh(name), lo_, hi_)
        self._stack.append([])
        yield v
        body = tuple(self._stack.pop())
        if body:
            self.emit(For(v, lo_, hi_, kind, body))

    @contextmanager
    def when(self, cond: Expr) -> Iterator[None]:
        """`if cond:`; nothing is written when it is statically false, no branch when statically true."""
        self._stack.append([])
        yield
        body = tuple(self._stack.pop())
        known = value(cond)
        if known is None:
            self.emit(If(cond, body))
        elif known:
            self._stack[-1].extend(body)

    def branch(self, cond: Expr, then: Callable[[], None], other: Callable[[], None]) -> None:
        arms: list[Block] = []
        for arm in (then, other):
            self._stack.append([])
            arm()
            arms.append(tuple(self._stack.pop()))
        self.emit(If(cond, arms[0], arms[1]))

    def let(self, name: str, e: Expr) -> Expr:
        if not children(e):
            return e
        v = let_var(self.fresh(name), e)
        self.emit(Let(v, e))
        return v

    def alloc(self, name: str, dtype: DType, *shape: E, space: str = "register", swizzle: int = 0) -> Buffer:
        buf = Buffer(self.fresh(name), dtype, tuple(map(const, shape)), space, None, swizzle)
        self.emit(Alloc(buf))
        return buf

    def store(self, buf: Buffer, idx: tuple[E, ...], v: E, lanes: int = 1, limit: E | None = None) -> None:
        self.emit(
            Store(buf, tuple(map(const, idx)), const(v, buf.dtype), lanes, None if limit is None else const(limit))
        )

    def sparse_rows(
        self,
        at: tuple[Expr, Expr, Expr],
        number: Expr,
        ahead: tuple[Expr, Expr],
        pattern: Pattern,
        rows: tuple[int, int],
        finish: tuple[tuple[str, float], ...] | None = None,
        more: tuple[Expr, ...] = (),
        taps: tuple[int, ...] = (0,),
        span: int = 0,
    ) -> None:
        """`rows`: of a group, and groups of a run; `more`: the count of lanes and addresses for `finish`."""
        self.emit(SparseRows("sparse_rows", (*at, number, *ahead, *more), pattern, *rows, finish, taps, span))

    def do(self, name: str, *args: E) -> None:
        self.emit(Eval(name, tuple(map(const, args))))

    def block(self) -> Block:
        return tuple(self._stack[0])


def call(name: str, *args: E, dtype: DType | None = None, lanes: int = 0) -> Expr:
    """An intrinsic as an expression; its record gives the result type."""
    record = TABLE.get(name)
    if record is not None and record.type is not None:
        dtype, lanes = record.type(*(const(a) for a in args))
    return op(name, *args, dtype=dtype, lanes=lanes)
