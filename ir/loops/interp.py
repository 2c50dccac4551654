"""Operator-IR interpreter: the exact oracle for kernels. In: a Kernel and NumPy arrays, which it writes in place.

All threads step together, each a row of the arrays; where they diverge, a mask says who is active. Iterations of
`parallel` loops are threads too. Lock step would hide races, so these are detected (interp_races). An `if` one of whose
arms can wait (mbar_wait) runs its arms as coroutines. Independent loops are widened for speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dnnc.ir.dtype import i64
from dnnc.ir.errors import InputError
from dnnc.ir.expr import Ref, Var, value
from dnnc.ir.loops import interp_gpu, interp_hopper, tiles
from dnnc.ir.loops.interp_eval import Evaluator, State
from dnnc.ir.loops.interp_independent import SEQUENTIAL, independent, writes
from dnnc.ir.loops.interp_memory import PRIVATE, Memory, View, garbage, make_view
from dnnc.ir.loops.interp_sparse import immediate_rows, sparse_rows
from dnnc.ir.loops.interp_values import KernelError, index_value, spread, uniform
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
    walk_stmts,
)
from dnnc.ir.loops.text import show_stmt

Array = Any
TEAM = ("cluster", "thread.x", "warp", "lane")
MAX_ROWS = 1 << 14


def run_kernel(kernel: Kernel, args: Mapping[str, Array], threads: int = 2) -> None:
    """Run a kernel on `args` (by parameter name), as `threads` CPU threads or as a grid of blocks would.

    Arrays are C-contiguous, of the buffer's NumPy dtype and at least its size, of any shape, and are written in place;
    scalars are integers or floats. InputError if they are not so; VerifyError with the statement for an access out of
    bounds, a race, a read of unwritten shared memory, a barrier that some threads miss, and a deadlock.
    """
    with np.errstate(all="ignore"):
        Interpreter(kernel, threads).run(args)


class Interpreter(Evaluator):
    """`widen` off runs every sequential loop in sequence: slower, for tests of that very thing."""

    def __init__(self, kernel: Kernel, threads: int, widen: bool = True) -> None:
        self.kernel, self.widen = kernel, widen
        self.funcs = {f.name: f for f in kernel.funcs}
        entry = kernel.entry
        self.written = writes(entry.body, self.funcs)
        super().__init__(
            threads > 1 and any(isinstance(s, For) and s.kind == "parallel" for s in walk_stmts(entry.body))
        )
        self.widths: dict[For, tuple[frozenset[Buffer], frozenset[Buffer]] | None] = {}
        self.meanings: dict[Stmt, Block] = {}  # of statements of tiles
        self.waits: dict[Stmt, bool] = {}
        self.waiting: Stmt | None = None  # the last mbar_wait met
        self.allocated: dict[Buffer, Memory] = {}

    # --- entering -----------------------------------------------------------------------------------------------------

    def run(self, args: Mapping[str, Array]) -> None:
        entry = self.kernel.entry
        names = [p.name for p in entry.params]
        if set(names) != set(args):
            raise InputError(f"{entry.name} takes {', '.join(names)}; got {', '.join(args) or 'nothing'}")
        env: dict[Var, Array] = {p: _scalar(p, args[p.name]) for p in entry.scalars}
        arrays = {p: _flat(entry.name, p, args[p.name]) for p in entry.buffers}
        views = {p: make_view(p, mem, 0, env) for p, mem in self.memories(arrays).items()}
        for b, v in views.items():
            need = index_value(b.size(), env) if all(v.shape) else 0
            if v.memory.size < need:
                raise InputError(f"{entry.name}: {b.name} needs {need} elements, the array has {v.memory.size}")
        self.state = State(env, views)
        self.drain(self.co_block(entry.body), entry.name)

    def memories(self, arrays: dict[Buffer, Array]) -> dict[Buffer, Memory]:
        """One Memory per array; arguments that are the same array share one, so that loops and races see the alias."""
        out: dict[Buffer, Memory] = {}
        for p, a in arrays.items():
            out[p] = next((out[q] for q in out if a.size and _same(arrays[q], a)), None) or Memory(a)
            out[p].tracked |= p in self.written
            for q in out:
                if out[q] is not out[p] and (out[p].tracked or out[q].tracked) and np.may_share_memory(arrays[q], a):
                    raise InputError(
                        f"{self.kernel.name}: the arrays of {q.name} and {p.name} overlap in part, and one of them is "
                        "written"
                    )
        return out

    def drain(self, steps: Iterator[None], name: str) -> None:
        for _ in steps:
            assert self.waiting is not None
            raise _quote(KernelError(f"{name}: deadlock: every thread waits for an mbarrier"), self.waiting)

    # --- statements ---------------------------------------------------------------------------------------------------

    def block(self, b: Block) -> None:
        for s in b:
            try:
                self.step(s)
            except KernelError as e:
                raise _quote(e, s) from None

    def step(self, s: Stmt) -> None:
        self.progress += 1
        if isinstance(s, Store):
            self.store(s)
        elif isinstance(s, Let):
            self.state.env[s.var] = self.value(s.value)
        elif isinstance(s, For):
            for _ in self.loop(s):
                self.block(s.body)
        elif isinstance(s, If):
            outer = self.state
            for mask, arm in self.arms(s):
                self.state = replace(outer, env=dict(outer.env), mask=mask)
                self.block(arm)
            self.state = outer
        elif isinstance(s, Alloc):
            self.alloc(s.buf)
        elif isinstance(s, Eval):
            self.effect(s)

    def store(self, s: Store) -> None:
        if s.value.dtype is not s.buf.dtype:
            raise KernelError(
                f"{s.value.dtype} is stored into {s.buf.name}, which holds {s.buf.dtype}: a cast is missing"
            )
        v = self.value(s.value)
        lanes = max([s.lanes, *(i.lanes for i in s.idx)])
        if s.value.lanes not in (1, lanes):
            raise KernelError(f"{s.value.lanes} lanes are stored into {lanes}")
        self.write(self.place(s.buf, s.idx, lanes, s.limit), v)

    def alloc(self, buf: Buffer) -> None:
        st = self.state
        n = max(int(np.max(index_value(buf.size(), st.env))), 0)
        if buf.space in PRIVATE:
            mem = Memory(garbage((st.rows, n), buf.dtype), private=True)
        else:
            size = n * self.grid.blocks  # a cluster's blocks have one each, behind one another
            old = self.allocated.get(buf)  # the same bytes as in the last iteration, whose readers may lag behind
            mem = (
                old
                if old is not None and old.size == size
                else Memory(garbage((size,), buf.dtype), tracked=True, born_empty=True)
            )
            mem.written = np.zeros(size, np.bool_)
            self.allocated[buf] = mem
        own = 0 if mem.private or self.grid.blocks == 1 or st.thread is None else st.thread // self.grid.block_size * n
        st.views[buf] = make_view(buf, mem, own, st.env)

    def arms(self, s: If) -> list[tuple[Array | None, Block]]:
        c, outer = self.value(s.cond), self.state.mask
        if uniform(c):
            return [(outer, s.then if c else s.other)]
        out: list[tuple[Array | None, Block]] = []
        for mine, arm in ((c, s.then), (~c, s.other)):
            mask = mine if outer is None else mine & outer
            if arm and mask.any():
                out.append((None if mask.all() else mask, arm))
        return out

    def effect(self, s: Eval) -> None:
        if isinstance(s, SparseRows):
            sparse_rows(self, s)
            return
        if isinstance(s, ImmediateRows):
            immediate_rows(self, s)
            return
        if s.name in self.funcs:
            self.call(self.funcs[s.name], s)
            return
        if s.name in tiles.EFFECTS:
            if s not in self.meanings:
                self.meanings[s] = tiles.meaning(s)
            self.block(self.meanings[s])
            return
        act = interp_gpu.EFFECTS.get(s.name) or interp_hopper.EFFECTS.get(s.name)
        if act is None:
            raise KernelError(f"{s.name} is no effect that the interpreter knows")
        self.start()
        act(self, *s.args)

    def call(self, f: Func, s: Eval) -> None:
        """Scalars go by value; an address passes the memory from that element on."""
        self.start()
        outer = self.state
        env = {p: self.eval(a) for p, a in zip(f.params, s.args) if isinstance(p, Var)}
        views: dict[Buffer, View] = {}
        for p, a in zip(f.params, s.args):
            if isinstance(p, Buffer):
                if not isinstance(a, Ref) or a.buf.dtype is not p.dtype:
                    raise KernelError(f"{f.name} takes an address of {p.dtype} for {p.name}, got {a!r}")
                view = self.view(a.buf)
                views[p] = make_view(
                    p, view.memory, view.offset([self.eval(i) for i in a.idx], False), env, foreign=True
                )
        self.state = replace(outer, env=env, views=views)
        self.drain(self.co_block(f.body), f.name)
        self.state = outer

    # --- loops --------------------------------------------------------------------------------------------------------

    def loop(self, s: For) -> Iterator[None]:
        """Set the state for each turn of a loop's body; several iterations may go in one turn."""
        lo, hi = self.value(s.lo), self.value(s.hi)
        outer = self.state
        self.state = replace(outer, env=dict(outer.env), views=dict(outer.views))
        if not (uniform(lo) and uniform(hi)):
            if s.kind not in SEQUENTIAL:
                raise KernelError(f"the bounds of a {s.kind} loop differ between threads")
            yield from self.diverging(s, lo, hi)
        elif s.kind == "parallel":
            yield from self.parallel(s, int(lo), int(hi))
        elif s.kind in TEAM:
            yield from self.members(s, int(lo), int(hi))
        elif s.kind in SEQUENTIAL and hi - lo > 1 and self.may_widen(s):
            step = max(MAX_ROWS // outer.rows, 1)
            for i in range(int(lo), int(hi), step):
                self.state = self.wider(outer, s.var, i, min(step, int(hi) - i))
                yield
        else:
            for i in range(int(lo), int(hi)):
                if s.kind.startswith("block"):
                    self.grid, self.allocated = interp_gpu.BlockState(), {}
                    self.state.iteration = self.blocks.fresh(1)
                self.state.env[s.var] = i
                yield
            if s.kind.startswith("block"):
                self.grid = interp_gpu.BlockState()
        self.state = outer

    def diverging(self, s: For, lo: Array, hi: Array) -> Iterator[None]:
        st, active = self.state, self.active()
        first, last = (np.broadcast_to(v, active.shape)[active] for v in (lo, hi))
        for i in range(int(first.min()), int(last.max())):
            mask = active & (lo <= i) & (i < hi)
            if mask.any():
                st.env[s.var], st.mask = i, None if mask.all() else mask
                self.state = st
                yield

    def may_widen(self, s: For) -> bool:
        if s not in self.widths:
            self.widths[s] = independent(s)
        found = self.widths[s]
        if found is None or not self.widen:
            return False
        touched, written = found
        mine = {b: self.view(b).memory for b in touched}
        return all(sum(m is mine[b] for m in mine.values()) == 1 for b in written)

    @staticmethod
    def wider(st: State, var: Var, start: int, n: int) -> State:
        """Every row becomes n rows, which differ in `var`."""
        if n == 1:
            return replace(st, env={**st.env, var: start}, views=dict(st.views))
        rows = st.rows
        env = {k: spread(v, rows, n) for k, v in st.env.items()}
        env[var] = np.tile(np.arange(start, start + n), rows)
        views = {b: v.spread(rows, n) for b, v in st.views.items()}
        mask, iteration, thread = (spread(v, rows, n) for v in (st.mask, st.iteration, st.thread))
        if rows == 1 and thread is not None:
            thread = np.repeat(thread, n)
        return replace(st, env=env, views=views, rows=rows * n, mask=mask, iteration=iteration, thread=thread)

    def parallel(self, s: For, lo: int, hi: int) -> Iterator[None]:
        outer = self.state
        if outer.parallel or outer.thread is not None or outer.iteration is not None:
            raise KernelError(
                "a parallel loop may stand only at the top of a CPU kernel, not inside of another one or of a block"
            )
        step, leave = max(MAX_ROWS // outer.rows, 1), self.private_outside(s.body)
        for i in range(lo, hi, step):
            n = min(step, hi - i)
            st = self.wider(outer, s.var, i, n)
            first = self.iterations.fresh(n)
            st.parallel, st.iteration = True, first if n == 1 else first + np.arange(n)
            self.own_copies(st, leave)
            self.state = st
            yield
        self.state = outer
        self.forget(leave)

    def members(self, s: For, lo: int, hi: int) -> Iterator[None]:
        """Run cluster, thread.x, warp and lane loops: rows of a team, clocks going on from the block's last one."""
        outer, n, inner = self.state, hi - lo, self.team_size(s.body)
        if outer.parallel or n < 1:
            raise KernelError(
                f"a {s.kind} loop of {n} threads" + (" inside of a parallel loop" if outer.parallel else "")
            )
        if outer.thread is None:
            if self.grid.team is None:
                self.grid.start(n * inner, n if s.kind == "cluster" else 1)
            if self.team.size != n * inner:
                raise KernelError(
                    f"{n * inner} threads here, {self.team.size} in the thread loops before: a block has one size"
                )
        leave = self.private_outside(s.body)
        st = self.wider(outer, s.var, lo, n)
        mine = np.tile(np.arange(n), outer.rows) * inner
        st.thread = mine if outer.thread is None else np.repeat(outer.thread, n) + mine
        self.own_copies(st, leave)
        self.state = st
        yield
        self.state = outer
        self.forget(leave)
        if s.kind == "cluster" and self.grid.peeked:
            raise KernelError(
                "a block of the cluster may end while another one reads its shared memory: cluster_barrier() is "
                "missing after the last peer"
            )

    def team_size(self, b: Block) -> int:
        """Threads of the thread loops nested in a block."""
        sizes = [1]
        for s in b:
            if isinstance(s, For):
                n = int(self.value(s.hi) - self.value(s.lo)) if s.kind in TEAM else 1
                sizes.append(n * self.team_size(s.body))
            elif isinstance(s, If):
                sizes += [self.team_size(s.then), self.team_size(s.other)]
        return max(sizes)

    def private_outside(self, b: Block) -> list[Buffer]:
        """Give each thread its own copy of outer private buffers that it writes, undefined before and after."""
        return [x for x in writes(b, self.funcs) if x in self.state.views and self.state.views[x].memory.private]

    def own_copies(self, st: State, bufs: list[Buffer]) -> None:
        for b in bufs:
            st.views[b] = replace(
                st.views[b], memory=Memory(garbage((st.rows, st.views[b].memory.size), b.dtype), private=True)
            )

    def forget(self, bufs: list[Buffer]) -> None:
        for b in bufs:
            data = self.state.views[b].memory.data
            data[...] = garbage(data.shape, b.dtype)

    # --- roles that wait ----------------------------------------------------------------------------------------------

    def can_wait(self, s: Stmt) -> bool:
        if s not in self.waits:
            self.waits[s] = any(isinstance(x, Eval) and x.name == "mbar_wait" for x in walk_stmts((s,)))
        return self.waits[s]

    def co_block(self, b: Block) -> Iterator[None]:
        """Run a block; yields where all its threads wait for others."""
        for s in b:
            try:
                if not self.can_wait(s):
                    self.step(s)
                elif isinstance(s, For):
                    for _ in self.loop(s):
                        yield from self.co_block(s.body)
                elif isinstance(s, If):
                    yield from self.roles(s)
                else:
                    assert isinstance(s, Eval)
                    self.waiting = s
                    yield from interp_hopper.mbar_wait(self, *s.args)
            except KernelError as e:
                raise _quote(e, s) from None

    def roles(self, s: If) -> Iterator[None]:
        """The arms are coroutines with states of their own; each runs until it waits."""
        outer = self.state
        live = [
            (replace(outer, env=dict(outer.env), views=dict(outer.views), mask=mask), self.co_block(arm))
            for mask, arm in self.arms(s)
        ]
        while live:
            before, waiting = self.progress, []
            for st, steps in live:
                self.state = st
                if next(steps, self) is not self:
                    waiting.append((self.state, steps))
            live = waiting
            if live and self.progress == before:
                yield
        self.state = outer


def _quote(e: KernelError, s: Stmt) -> KernelError:
    if e.quoted:
        return e
    new = KernelError(f"{e}\n  at: {show_stmt(s).splitlines()[0]}")
    new.quoted = True
    return new


def _same(a: Array, b: Array) -> bool:
    return bool(a.ctypes.data == b.ctypes.data and a.dtype == b.dtype and a.size == b.size)


def _scalar(p: Var, v: Any) -> Array:
    if p.dtype is not i64:
        return np.asarray(v).astype(p.dtype.numpy)[()]
    n = int(v)
    lo, hi = (value(b) if b is not None else None for b in (p.lo, p.hi))
    if (lo is not None and n < lo) or (hi is not None and n > hi) or n % p.div:
        raise InputError(
            f"{p.name} = {n} breaks what the kernel was built for: {lo} <= {p.name} <= {hi}, a multiple of {p.div}"
        )
    return n


def _flat(kernel: str, p: Buffer, a: Any) -> Array:
    if not isinstance(a, np.ndarray) or a.dtype != p.dtype.numpy or not a.flags.c_contiguous:
        found = f"{a.dtype}, strides {a.strides}" if isinstance(a, np.ndarray) else type(a).__name__
        raise InputError(f"{kernel}: {p.name} must be a C-contiguous NumPy array of {p.dtype.numpy}, got {found}")
    return a.reshape(-1)
