"""Evaluates expressions and memory accesses for all rows (threads) of a state at once, fully checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.ir.expr import Const, Expr, Linear, Load, Op, Product, Ref, Var, show_at
from dnnc.ir.loops import interp_gpu, interp_hopper
from dnnc.ir.loops.interp_memory import Memory, View
from dnnc.ir.loops.interp_races import Iterations, Team
from dnnc.ir.loops.interp_values import KernelError, column, constant, linear, operate, tidy, uniform
from dnnc.ir.loops.intrinsics import TABLE
from dnnc.ir.loops.stmt import Buffer

Array = Any


@dataclass(slots=True)
class State:
    """The place of a group of rows. Copied on change, so leaving a loop or an arm restores the old one."""

    env: dict[Var, Array]
    views: dict[Buffer, View]
    rows: int = 1
    mask: Array | None = None  # [rows]; None is all
    iteration: Array | None = None  # identity among parallel iterations or blocks: int or [rows]
    thread: Array | None = None  # number in the team: [rows]
    parallel: bool = False  # inside a parallel loop


@dataclass(slots=True)
class Place:
    """Elements of a view: an offset, [rows], or [rows or 1, lanes]. `live` (same rank): which exist; None: all."""

    view: View
    off: Array
    live: Array | None


class Evaluator:
    """State of the interpreter of statements. `spmd`: several CPU threads run the code outside of parallel loops."""

    def __init__(self, spmd: bool) -> None:
        self.spmd = spmd
        self.state = State({}, {})
        self.iterations = Iterations("iteration")
        self.blocks = Iterations("block")
        self.grid = interp_gpu.BlockState()
        self.progress = 0  # statements done, to tell a deadlock
        self._memo: dict[Expr, Array] = {}
        self._consts: dict[Const, Array] = {}

    # --- values -------------------------------------------------------------------------------------------------------

    def value(self, e: Expr) -> Array:
        """The value of an expression of a statement; shared sub-expressions are evaluated once."""
        self.start()
        return self.eval(e)

    def start(self) -> None:
        """A statement begins: nothing evaluated before holds."""
        self._memo = {}

    def eval(self, e: Expr) -> Array:
        kind = type(e)
        if kind is Var:
            v = self.state.env.get(e)  # type: ignore[call-overload]
            if v is None:
                raise KernelError(f"{e!r} is not defined here")
            return v
        if kind is Const:
            v = self._consts.get(e)  # type: ignore[call-overload]
            if v is None:
                v = self._consts[e] = constant(e)  # type: ignore[arg-type, index]
            return v
        v = self._memo.get(e)
        if v is None:
            v = self._memo[e] = self.compute(e)
        return v

    def compute(self, e: Expr) -> Array:
        if isinstance(e, (Linear, Product)):
            return linear(e, self.eval)
        if isinstance(e, Load):
            return self.read(self.place(e.buf, e.idx, e.lanes, e.limit), e.lanes)
        if isinstance(e, Ref):  # an address as operand of a warp instruction: what lies there
            return self.read(self.place(e.buf, e.idx, e.lanes, None), e.lanes)
        assert isinstance(e, Op)
        if e.name == "peer":
            return interp_hopper.peer(self, *e.args)
        args = [self.eval(a) for a in e.args]
        if e.name == "trusted" and self.state.mask is not None:  # of threads that are not here it says nothing
            args[0] = np.where(column(self.state.mask, e.lanes > 1), args[0], args[1])
        record = TABLE.get(e.name)
        return self.collective(e, args) if record is not None and record.collective else operate(e, args)

    def collective(self, e: Op, args: list[Array]) -> Array:
        s = self.state
        if s.rows % 32:
            raise KernelError(f"{e.name} needs whole warps, there are {s.rows} threads")
        if s.mask is not None:
            active = s.mask.reshape(-1, 32)
            if not active.all(1)[active.any(1)].all():
                raise KernelError(f"{e.name} is reached by a part of a warp")
        record = TABLE[e.name]
        assert record.meaning is not None
        full = [
            np.broadcast_to(v, (s.rows, *np.shape(v)[1:])) if k == 0 or not uniform(v) else v
            for k, v in enumerate(args)
        ]
        return np.asarray(record.meaning(*full)).astype(e.dtype.numpy, copy=False)

    # --- memory -------------------------------------------------------------------------------------------------------

    def view(self, buf: Buffer) -> View:
        v = self.state.views.get(buf)
        if v is None:
            raise KernelError(f"buffer {buf.name} is not defined here")
        return v

    def place(self, buf: Buffer, idx: tuple[Expr, ...], lanes: int = 1, limit: Expr | None = None) -> Place:
        """Locate an access, with every index checked against its axis where the access is live."""
        view = self.view(buf)
        index = [self.eval(i) for i in idx]
        if lanes == 1 and limit is None and all(map(uniform, index)):
            for i, n in zip(index, view.shape):
                if not (0 <= i < n if uniform(n) else bool(((0 <= i) & (i < n))[self.active()].all())):
                    raise self.outside(buf, idx, index, view, None)
            return self.checked(Place(view, view.offset(index, False), None))
        wide = lanes > 1 or limit is not None
        live = None if self.state.mask is None else column(self.state.mask, wide)
        if wide:
            index = [np.asarray(i).reshape(1, 1) if uniform(i) else column(i) for i in index]
            if all(i.lanes == 1 for i in idx):
                index[-1] = index[-1] + np.arange(lanes)
        if limit is not None:
            below = np.arange(lanes) < column(np.atleast_1d(self.eval(limit)))
            live = below if live is None else live & below
        for i, n in zip(index, view.shape):
            bad = np.less(i, 0) | np.greater_equal(i, column(n, wide))
            if (bad if live is None else bad & live).any():
                raise self.outside(buf, idx, index, view, live)
        off = view.offset(index, wide)
        if live is not None:
            off = np.where(live, off, 0)
        return self.checked(Place(view, off, live))

    def checked(self, at: Place) -> Place:
        """A called Func's buffer may promise more than the caller's memory holds."""
        if at.view.foreign:
            bad = (np.asarray(at.off) < 0) | (np.asarray(at.off) >= at.view.memory.size)
            if (bad if at.live is None else bad & at.live).any():
                raise KernelError(
                    f"{at.view.buf.name}: element {np.max(at.off)} is outside of the memory passed in, "
                    f"{at.view.memory.size} elements"
                )
        return at

    def outside(
        self, buf: Buffer, idx: tuple[Expr, ...], index: list[Array], view: View, live: Array | None
    ) -> KernelError:
        for axis, (i, n) in enumerate(zip(index, view.shape)):
            n = column(n, np.ndim(i) == 2)
            bad = np.asarray((i < 0) | (i >= n))
            bad = bad if live is None else bad & live
            if bad.any():
                at, size = (int(np.broadcast_to(x, bad.shape)[bad][0]) for x in (i, n))
                return KernelError(
                    f"{show_at(buf, idx, 1, None)}: index {at} of axis {axis} is outside of 0..{size - 1}"
                )
        return KernelError(f"{buf.name}: index out of bounds")

    def active(self) -> Array:
        s = self.state
        return np.ones(s.rows, np.bool_) if s.mask is None else s.mask

    def copies(self, mem: Memory) -> Array:
        """Which copy of a private memory each row has."""
        return np.arange(self.state.rows) // (self.state.rows // len(mem.data))

    def read(self, at: Place, lanes: int) -> Array:
        mem = at.view.memory
        if mem.size == 0:
            return np.zeros((1, lanes), mem.data.dtype) if lanes > 1 else mem.data.dtype.type(0)
        if mem.private and mem.in_flight is not None:
            self.settled(at)
        if not mem.private:
            self.touch(at, False)
            r = mem.data[at.off]
        elif len(mem.data) == 1:
            r = mem.data[0, at.off]
        else:
            r = mem.data[column(self.copies(mem), np.ndim(at.off) == 2), at.off]
        if at.live is not None:
            r = np.where(at.live, r, mem.data.dtype.type(0))
        return tidy(r[:, 0]) if lanes == 1 and np.ndim(r) == 2 else r

    def write(self, at: Place, v: Array) -> None:
        mem, s = at.view.memory, self.state
        if mem.private and mem.in_flight is not None:
            self.settled(at)
        if not mem.private:
            self.touch(at, True, v)
        rows: Array = 0 if not mem.private or len(mem.data) == 1 else self.copies(mem)
        wide = np.ndim(at.off) == 2 or np.ndim(v) == 2
        rows, v, live = column(rows, wide), column(v, wide), at.live
        if s.mask is not None and live is None:
            live = column(s.mask, wide)
        elif s.mask is not None:
            live = live & column(s.mask, wide)
        off = at.off
        if live is not None:
            shape = np.broadcast_shapes(np.shape(off), np.shape(live), np.shape(rows), np.shape(v))
            live = np.broadcast_to(live, shape)
            rows, off, v = (np.broadcast_to(x, shape)[live] for x in (rows, off, v))
        if mem.private:
            mem.data[rows, off] = v
        else:
            mem.data[off] = v

    def settled(self, at: Place) -> None:
        """Registers may not be touched while a product of the tensor cores is still computing them."""
        mem = at.view.memory
        assert mem.in_flight is not None
        row, off = self.spots(at)
        if mem.in_flight[self.copies(mem)[row], off].any():
            raise KernelError(f"{at.view.buf.name} is touched before wgmma_wait")

    def spots(self, at: Place) -> tuple[Array, Array]:
        """(row, offset) of every element touched."""
        s = self.state
        off = np.asarray(at.off)
        wide = off.ndim == 2
        shape = (s.rows, off.shape[1]) if wide else (s.rows,)
        live = np.broadcast_to(
            column(self.active(), wide) if at.live is None else at.live & column(self.active(), wide), shape
        )
        return np.broadcast_to(column(np.arange(s.rows), wide), shape)[live], np.broadcast_to(off, shape)[live]

    def spread(self, at: Place, v: Array) -> Array:
        """What a store writes, one entry per element as `spots` lists them."""
        off = np.asarray(at.off)
        wide = off.ndim == 2
        shape = (self.state.rows, off.shape[1]) if wide else (self.state.rows,)
        live = column(self.active(), wide) if at.live is None else at.live & column(self.active(), wide)
        values: Array = np.broadcast_to(column(v, wide), shape)[np.broadcast_to(live, shape)]
        return values

    def touch(self, at: Place, write: bool, v: Array | None = None) -> None:
        """What may go wrong with memory that threads share; `v` is what a store writes."""
        mem, s = at.view.memory, self.state
        if (
            mem.written is None
            and mem.in_flight is None
            and (not mem.tracked or (s.iteration is None and s.thread is None and not self.spmd))
        ):
            return
        rows, off = self.spots(at)
        verb = "write to" if write else "read of"
        if mem.in_flight is not None and mem.in_flight[off].any():
            raise KernelError(
                f"{verb} {at.view.name(off[mem.in_flight[off]][0])} while an asynchronous copy into it is in flight"
            )
        if mem.written is not None:
            if not write and not mem.written[off].all():
                raise KernelError(f"read of {at.view.name(off[~mem.written[off]][0])}, which nobody has written")
            if write:
                mem.written[off] = True
        if write and mem.pinned is not None and mem.pinned[off].any():
            raise KernelError(
                f"write to {at.view.name(off[mem.pinned[off] > 0][0])} while it is still read asynchronously"
            )
        if write and mem.copied is not None:
            mem.copied[off] = False
        value = self.spread(at, v) if v is not None and s.parallel and s.iteration is not None else None
        message = self.race(at.view, rows, off, write, value)
        if message:
            raise KernelError(f"race: {message}")

    def race(self, view: View, rows: Array, off: Array, write: bool, value: Array | None) -> str | None:
        s = self.state
        if not view.memory.tracked:
            return None
        if self.spmd and not s.parallel and s.thread is None and s.iteration is None and write:
            return (
                "every thread executes this, outside of a parallel loop, and writes "
                f"{view.name(off[0]) if len(off) else view.buf.name}"
            )
        if s.iteration is not None and view.buf.space != "shared":
            who = s.iteration[rows] if isinstance(s.iteration, np.ndarray) else np.full(len(rows), s.iteration)
            message = (self.iterations if s.parallel else self.blocks).access(view, who, off, write, value)
            if message:
                return message
        return self.team.access(view, s.thread[rows], off, write) if s.thread is not None else None

    @property
    def team(self) -> Team:
        assert self.grid.team is not None
        return self.grid.team
