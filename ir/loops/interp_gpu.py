"""Effects in the interpreter: barriers and asynchronous copies, exactly ordered. Hopper's: interp_hopper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.ir.expr import Expr, Ref
from dnnc.ir.loops.interp_memory import Memory, View
from dnnc.ir.loops.interp_races import Team
from dnnc.ir.loops.interp_values import KernelError, column, uniform

if TYPE_CHECKING:
    from dnnc.ir.loops.interp_eval import Evaluator

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


@dataclass(slots=True, eq=False)
class Reading:
    """Elements of shared memory that an engine reads for who[0], in its group."""

    memory: Memory
    off: Array
    who: Array
    group: int


@dataclass(slots=True, eq=False)
class Product:
    """Accumulators in flight: registers off[k] of copies[k] of a private memory, in a group of who[0]'s products."""

    memory: Memory
    off: Array
    who: Array
    group: int
    copies: Array


@dataclass(slots=True)
class Mbarrier:
    count: int
    left: int
    clock: Array  # what waiters of the last complete phase learn
    gathered: Array  # what the arrivals of the current phase know
    phase: int = 0
    bytes: int = 0  # of copies that are announced and have not been issued
    fenced: bool = False  # known to the copy engine
    copies: list[Copy] = field(default_factory=list)


@dataclass(slots=True)
class BlockState:
    """What a block of threads has besides memory; a fresh one for each block."""

    team: Team | None = None
    groups: Array = None  # of every thread: the number of committed groups of copies into shared memory
    stores: Array = None  # and of copies out of it
    flight: list[Copy] = field(default_factory=list)
    mbarriers: dict[tuple[Memory, int], Mbarrier] = field(default_factory=dict)
    fences: dict[int, list[int]] = field(default_factory=dict)  # when threads executed fence_async
    readings: list[Reading] = field(default_factory=list)  # by copies out of shared memory
    tiles: list[Reading] = field(default_factory=list)  # by products
    products: list[Product] = field(default_factory=list)
    wgmma_groups: dict[int, int] = field(
        default_factory=dict
    )  # of every warp group: the number of committed groups of products
    wgmma_ready: dict[int, bool] = field(default_factory=dict)
    blocks: int = 1  # of a cluster: they run as one team, each with shared memory of its own
    block_size: int = 0  # threads
    peeked: bool = False  # into the shared memory of another block, since the last barrier of the cluster

    def start(self, threads: int, blocks: int = 1) -> None:
        self.team, self.blocks, self.block_size = Team(threads), blocks, threads // blocks
        self.groups, self.stores = np.zeros(threads, np.int64), np.zeros(threads, np.int64)


def threads_of(it: Evaluator, what: str) -> Array:
    """The active threads."""
    thread = it.state.thread
    if thread is None:
        raise KernelError(f"{what} stands outside of every thread loop")
    return np.asarray(thread[it.active()])


def number(it: Evaluator, e: Expr, what: str) -> int:
    v = it.eval(e)
    found = np.unique(np.asarray(v) if uniform(v) else v[it.active()])
    if len(found) != 1:
        raise KernelError(f"{what} differs between threads")
    return int(found[0])


# --- barriers ---------------------------------------------------------------------------------------------------------


def barrier(it: Evaluator) -> None:
    s = it.state
    if s.parallel:
        raise KernelError("barrier() inside of a parallel loop: threads have different numbers of iterations")
    if s.mask is not None:
        raise KernelError("barrier() is reached by a part of the threads")
    if it.grid.team is not None:
        for members in np.arange(it.team.size).reshape(it.grid.blocks, -1):
            it.team.join(members)
    elif s.iteration is None:
        it.iterations.reset()


def syncwarp(it: Evaluator) -> None:
    threads = threads_of(it, "syncwarp")
    for warp in np.unique(threads // 32):
        it.team.join(threads[threads // 32 == warp])


# --- cp.async ---------------------------------------------------------------------------------------------------------


def issue(it: Evaluator, view: View, who: Array, off: Array, value: Array, group: Array | None) -> Copy:
    """Check that a copy may start, and mark its elements as under way. One entry per element."""
    mem = view.memory
    if mem.in_flight is None:
        mem.in_flight = np.zeros(mem.size, np.bool_)
    if mem.in_flight[off].any():
        raise KernelError(f"two copies into {view.name(off[mem.in_flight[off]][0])} are in flight at once")
    if mem.pinned is not None and mem.pinned[off].any():
        raise KernelError(
            f"a copy into {view.name(off[mem.pinned[off] > 0][0])} starts while it is still read asynchronously"
        )
    message = it.team.access(view, who, off, True, record=False)
    if message:
        raise KernelError(f"race: {message}")
    mem.in_flight[off] = True
    clock = it.team.clock
    return Copy(mem, off, value, who, who * 0 if group is None else group[who], clock[who, who])


def land(it: Evaluator, c: Copy, when: Array) -> None:
    mem = c.memory
    mem.data[c.off] = c.value
    assert mem.in_flight is not None
    mem.in_flight[c.off] = False
    if mem.written is not None:
        mem.written[c.off] = True
    if mem.copied is None:
        mem.copied = np.zeros(mem.size, np.bool_)
    mem.copied[c.off] = True
    it.team.landed(mem, c.who, c.off, when)


def cp_async(it: Evaluator, dst: Expr, src: Expr, limit: Expr | None = None) -> None:
    assert isinstance(dst, Ref) and isinstance(src, Ref)
    threads_of(it, "cp_async")
    to = it.place(dst.buf, dst.idx, dst.lanes)
    value = it.read(it.place(src.buf, src.idx, dst.lanes, limit), dst.lanes)
    rows = it.state.rows
    full = np.broadcast_to(column(value), (rows, dst.lanes)) if dst.lanes > 1 else np.broadcast_to(value, (rows,))
    row, off = it.spots(to)
    assert it.state.thread is not None
    it.grid.flight.append(issue(it, to.view, it.state.thread[row], off, full[it.active()].reshape(-1), it.grid.groups))


def cp_async_commit(it: Evaluator) -> None:
    it.grid.groups[threads_of(it, "cp_async_commit")] += 1


def cp_async_wait(it: Evaluator, n: Expr) -> None:
    """All but the newest n groups have landed: visible to the issuing thread now, to others after a barrier."""
    newest = np.full(it.team.size, -1)
    threads = threads_of(it, "cp_async_wait")
    newest[threads] = it.grid.groups[threads] - number(it, n, "the count of cp_async_wait")
    still = []
    for c in it.grid.flight:
        done = c.group < newest[c.who]
        if done.any():
            who = c.who[done]
            land(
                it,
                Copy(c.memory, c.off[done], c.value[done], who, c.group[done], c.when[done]),
                it.team.clock[who, who],
            )
        if not done.all():
            keep = ~done
            still.append(Copy(c.memory, c.off[keep], c.value[keep], c.who[keep], c.group[keep], c.when[keep]))
    it.grid.flight = still


def nothing(it: Evaluator, *args: Expr) -> None:
    """Hints."""


EFFECTS: dict[str, Callable[..., None]] = {
    "barrier": barrier, "syncwarp": syncwarp, "prefetch": nothing, "pdl_wait": nothing, "pdl_launch": nothing,
    "cp_async": cp_async, "cp_async_commit": cp_async_commit, "cp_async_wait": cp_async_wait,
}  # fmt: skip
