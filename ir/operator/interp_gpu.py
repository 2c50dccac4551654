"""Effects of the operator IR as the interpreter performs them: barriers, asynchronous copies, mbarriers. Exact as to who may see what when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.ir.expr import Expr, Ref
from dnnc.ir.operator.interp_memory import Memory
from dnnc.ir.operator.interp_races import Team
from dnnc.ir.operator.interp_values import KernelError, column, uniform

if TYPE_CHECKING:
    from dnnc.ir.operator.interp_eval import Evaluator, Place

Array = Any


@dataclass(slots=True)
class Copy:
    """Elements under way: entry k was issued by thread who[k] in its group[k], when its clock stood at when[k]."""

    memory: Memory
    off: Array
    value: Array
    who: Array
    group: Array
    when: Array


@dataclass(slots=True)
class Mbarrier:
    count: int
    left: int
    clock: Array  # what waiters of the last complete phase learn
    gathered: Array  # what the arrivals of the current phase know
    phase: int = 0
    copies: list[Copy] = field(default_factory=list)


@dataclass(slots=True)
class BlockState:
    """What a block of threads has besides memory; a fresh one for each block."""

    team: Team | None = None
    groups: Array = None  # of every thread: the number of committed groups
    flight: list[Copy] = field(default_factory=list)
    mbarriers: dict[tuple[Memory, int], Mbarrier] = field(default_factory=dict)

    def start(self, threads: int) -> None:
        self.team = Team(threads)
        self.groups = np.zeros(threads, np.int64)


def _threads(it: Evaluator, what: str) -> Array:
    """The active threads."""
    thread = it.state.thread
    if thread is None:
        raise KernelError(f"{what} stands outside of every thread loop")
    return np.asarray(thread[it.active()])


def _offset(it: Evaluator, r: Ref, what: str) -> tuple[Place, int]:
    """The one element that all active threads mean."""
    at = it.place(r.buf, r.idx)
    off = np.asarray(at.off)
    found = np.unique(off if off.ndim == 0 else off[it.active()])
    if len(found) != 1:
        raise KernelError(f"{what}: threads name {len(found)} different elements of {r.buf.name} at once")
    return at, int(found[0])


def _number(it: Evaluator, e: Expr, what: str) -> int:
    v = it.eval(e)
    found = np.unique(np.asarray(v) if uniform(v) else v[it.active()])
    if len(found) != 1:
        raise KernelError(f"{what} differs between threads")
    return int(found[0])


# --- barriers -----------------------------------------------------------------------------------------------------------------


def barrier(it: Evaluator) -> None:
    s = it.state
    if s.parallel:
        raise KernelError("barrier() inside of a parallel loop: threads have different numbers of iterations")
    if s.mask is not None:
        raise KernelError("barrier() is reached by a part of the threads")
    if it.grid.team is not None:
        it.team.join(np.arange(it.team.size))
    elif s.iteration is None:
        it.iterations.reset()


def syncwarp(it: Evaluator) -> None:
    threads = _threads(it, "syncwarp")
    for warp in np.unique(threads // 32):
        it.team.join(threads[threads // 32 == warp])


# --- cp.async -----------------------------------------------------------------------------------------------------------------


def _issue(it: Evaluator, dst: Place, value: Array, group: Array | None) -> Copy:
    """Check that a copy may start, and mark its elements as under way."""
    rows, off = it.spots(dst)
    mem, thread = dst.view.memory, it.state.thread
    assert thread is not None
    who = thread[rows]
    if mem.in_flight is None:
        mem.in_flight = np.zeros(mem.size, np.bool_)
    if mem.in_flight[off].any():
        raise KernelError(f"two copies into {dst.view.name(off[mem.in_flight[off]][0])} are in flight at once")
    message = it.team.access(dst.view, who, off, True, record=False)
    if message:
        raise KernelError(f"race: {message}")
    mem.in_flight[off] = True
    clock = it.team.clock
    return Copy(mem, off, value, who, who * 0 if group is None else group[who], clock[who, who])


def _land(it: Evaluator, c: Copy, when: Array) -> None:
    c.memory.data[c.off] = c.value
    assert c.memory.in_flight is not None
    c.memory.in_flight[c.off] = False
    if c.memory.written is not None:
        c.memory.written[c.off] = True
    it.team.landed(c.memory, c.who, c.off, when)


def cp_async(it: Evaluator, dst: Expr, src: Expr, limit: Expr | None = None) -> None:
    assert isinstance(dst, Ref) and isinstance(src, Ref)
    _threads(it, "cp_async")
    to = it.place(dst.buf, dst.idx, dst.lanes)
    value = it.read(it.place(src.buf, src.idx, dst.lanes, limit), dst.lanes)
    rows = it.state.rows
    full = np.broadcast_to(column(value), (rows, dst.lanes)) if dst.lanes > 1 else np.broadcast_to(value, (rows,))
    it.grid.flight.append(_issue(it, to, full[it.active()].reshape(-1), it.grid.groups))


def cp_async_commit(it: Evaluator) -> None:
    it.grid.groups[_threads(it, "cp_async_commit")] += 1


def cp_async_wait(it: Evaluator, n: Expr) -> None:
    """All but the newest n groups have landed: visible to the issuing thread now, to others after a barrier."""
    newest = np.full(it.team.size, -1)
    threads = _threads(it, "cp_async_wait")
    newest[threads] = it.grid.groups[threads] - _number(it, n, "the count of cp_async_wait")
    still = []
    for c in it.grid.flight:
        done = c.group < newest[c.who]
        if done.any():
            who = c.who[done]
            _land(it, Copy(c.memory, c.off[done], c.value[done], who, c.group[done], c.when[done]), it.team.clock[who, who])
        if not done.all():
            keep = ~done
            still.append(Copy(c.memory, c.off[keep], c.value[keep], c.who[keep], c.group[keep], c.when[keep]))
    it.grid.flight = still


# --- mbarriers and TMA --------------------------------------------------------------------------------------------------------


def _mbarrier(it: Evaluator, r: Expr, what: str) -> Mbarrier:
    assert isinstance(r, Ref)
    at, off = _offset(it, r, what)
    bar = it.grid.mbarriers.get((at.view.memory, off))
    if bar is None:
        raise KernelError(f"{what}: {at.view.name(off)} was never initialised by mbar_init")
    it.touch(at, False)
    return bar


def mbar_init(it: Evaluator, r: Expr, count: Expr) -> None:
    assert isinstance(r, Ref)
    _threads(it, "mbar_init")
    at, off = _offset(it, r, "mbar_init")
    it.touch(at, True)
    n = _number(it, count, "the count of mbar_init")
    zero = np.zeros(it.team.size, np.int32)
    it.grid.mbarriers[at.view.memory, off] = Mbarrier(n, n, zero, zero)


def mbar_arrive(it: Evaluator, r: Expr) -> None:
    threads, bar = _threads(it, "mbar_arrive"), _mbarrier(it, r, "mbar_arrive")
    bar.gathered = np.maximum(bar.gathered, it.team.clock[threads].max(0))
    bar.left -= len(threads)
    if bar.left < 0:
        raise KernelError(f"mbar_arrive: {bar.count - bar.left} arrivals in a phase that expects {bar.count}")
    if bar.left == 0:
        for c in bar.copies:
            _land(it, c, c.when)
        bar.phase, bar.left, bar.clock, bar.copies = bar.phase ^ 1, bar.count, bar.gathered, []
    it.team.tick(threads)


def mbar_wait(it: Evaluator, r: Expr, parity: Expr) -> Iterator[None]:
    """Wait until the phase of this parity is complete."""
    it.start()
    threads, bar = _threads(it, "mbar_wait"), _mbarrier(it, r, "mbar_wait")
    p = _number(it, parity, "the parity of mbar_wait")
    while bar.phase == p:
        yield
    it.progress += 1
    it.team.clock[threads] = np.maximum(it.team.clock[threads], bar.clock)


def tma_load(it: Evaluator, dst: Expr, src: Expr, rows: Expr, r: Expr) -> None:
    """A box of rows x lanes; its bytes count against the mbarrier, at which the thread arrives afterwards."""
    assert isinstance(dst, Ref) and isinstance(src, Ref)
    if len(_threads(it, "tma_load")) != 1:
        raise KernelError("tma_load must be issued by one thread")
    bar = _mbarrier(it, r, "tma_load")
    for k in range(_number(it, rows, "the height of the box")):
        to = it.place(dst.buf, (*dst.idx[:-2], dst.idx[-2] + k, dst.idx[-1]), dst.lanes)
        value = it.read(it.place(src.buf, (*src.idx[:-2], src.idx[-2] + k, src.idx[-1]), dst.lanes), dst.lanes)
        row = np.broadcast_to(value, (it.state.rows, dst.lanes))[it.active()].reshape(-1)
        copy = _issue(it, to, row, None)
        bar.copies.append(copy)
        np.maximum.at(bar.gathered, copy.who, copy.when)


def nothing(it: Evaluator, *args: Expr) -> None:
    """Hints."""


EFFECTS: dict[str, Callable[..., None]] = {
    "barrier": barrier, "syncwarp": syncwarp, "prefetch": nothing,
    "cp_async": cp_async, "cp_async_commit": cp_async_commit, "cp_async_wait": cp_async_wait,
    "mbar_init": mbar_init, "mbar_arrive": mbar_arrive, "tma_load": tma_load,
}  # fmt: skip
