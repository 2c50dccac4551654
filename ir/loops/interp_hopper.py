"""Hopper's effects in the interpreter: mbarriers, TMA copies, warp group tensor cores (see `hopper.py`).

Copies and products are carried out at once, but what they touch is kept out of bounds until somebody has waited for
them: elements that a copy writes are `in_flight`, elements that an engine reads are `pinned`, accumulators are
`in_flight` too. A product reads on behalf of the tensor core of its warp group, a member of the team of its own;
threads learn of its reads when they wait for it, and pass that on by arriving at mbarriers. So a stage that is released
too early is a race, whatever order the roles ran in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.ir.errors import count
from dnnc.ir.expr import Expr, Ref
from dnnc.ir.loops.hopper import GROUP, SWIZZLE_ROWS, WGMMA_ROWS, wgmma_positions
from dnnc.ir.loops.interp_gpu import Mbarrier, Product, Reading, issue, land, nothing, number, threads_of
from dnnc.ir.loops.interp_memory import Memory, View
from dnnc.ir.loops.interp_values import KernelError
from dnnc.ir.loops.stmt import Buffer

if TYPE_CHECKING:
    from dnnc.ir.loops.interp_eval import Evaluator, Place, State

Array = Any

# --- mbarriers --------------------------------------------------------------------------------------------------------


Named = list[tuple[Mbarrier, Array]]  # mbarriers, each with the active threads that mean it


def _places(it: Evaluator, r: Expr) -> list[tuple[Place, int, Array]]:
    """(place, offset, threads) for every element that active threads mean: blocks of a cluster have one each."""
    assert isinstance(r, Ref)
    at, threads = it.place(r.buf, r.idx), threads_of(it, "an mbarrier")
    off = np.broadcast_to(at.off, (it.state.rows,))[it.active()]
    found = [(at, int(o), threads[off == o]) for o in np.unique(off)]
    if len({int(t) // it.grid.block_size for _, _, ts in found for t in ts[:1]}) < len(found):
        raise KernelError(f"threads of a block name {len(found)} different elements of {r.buf.name} at once")
    return found


def _mbarriers(it: Evaluator, r: Expr, what: str) -> Named:
    out: Named = []
    for at, off, threads in _places(it, r):
        bar = it.grid.mbarriers.get((at.view.memory, off))
        if bar is None:
            raise KernelError(f"{what}: {at.view.name(off)} was never initialized by mbar_init")
        out.append((bar, threads))
    it.touch(at, False)
    return out


def mbar_init(it: Evaluator, r: Expr, count: Expr) -> None:
    n = number(it, count, "the count of mbar_init")
    for at, off, _ in (found := _places(it, r)):
        zero = np.zeros(len(it.team.clock), np.int32)
        it.grid.mbarriers[at.view.memory, off] = Mbarrier(n, n, zero, zero)
    it.touch(found[0][0], True)


def mbar_fence(it: Evaluator) -> None:
    threads_of(it, "mbar_fence")
    for bar in it.grid.mbarriers.values():
        bar.fenced = True


def mbar_arrive(it: Evaluator, r: Expr, what: str = "mbar_arrive", expected: int = 0) -> None:
    for bar, threads in _mbarriers(it, r, what):
        bar.gathered = np.maximum(bar.gathered, it.team.clock[threads].max(0))
        bar.left -= len(threads)
        bar.bytes += expected * len(threads)
        if bar.left < 0:
            raise KernelError(f"{what}: {bar.count - bar.left} arrivals in a phase that expects {bar.count}")
        _complete(it, bar)
        it.team.tick(threads)


def mbar_expect(it: Evaluator, r: Expr, size: Expr) -> None:
    mbar_arrive(it, r, "mbar_expect", number(it, size, "the bytes of mbar_expect"))


def _complete(it: Evaluator, bar: Mbarrier) -> None:
    """The phase ends when all have arrived and all bytes have; only then the copies are sure to have landed."""
    if bar.left or bar.bytes:
        return
    for c in bar.copies:
        land(it, c, c.when)
    bar.phase, bar.left, bar.clock, bar.gathered, bar.copies = (
        bar.phase ^ 1,
        bar.count,
        bar.gathered,
        bar.gathered * 0,
        [],
    )


def mbar_wait(it: Evaluator, r: Expr, parity: Expr) -> Iterator[None]:
    it.start()
    found, p = _mbarriers(it, r, "mbar_wait"), number(it, parity, "the parity of mbar_wait")
    while any(bar.phase == p for bar, _ in found):
        yield
    it.progress += 1
    for bar, threads in found:
        it.team.clock[threads] = np.maximum(it.team.clock[threads], bar.clock)


# --- the copy engine --------------------------------------------------------------------------------------------------


def _index(it: Evaluator, r: Ref, row: int) -> list[int]:
    return [int(v if np.ndim(v) == 0 else np.ravel(v)[row]) for v in map(it.eval, r.idx)]


def _window(it: Evaluator, buf: Buffer, row: int) -> View:
    """The buffer as the thread in this row of the state sees it."""
    view = it.view(buf)
    return replace(view, base=int(view.base[row])) if isinstance(view.base, np.ndarray) else view


def _box(it: Evaluator, r: Ref, row: int, rows: int, lanes: int) -> tuple[View, Array, Array]:
    """Return the view, offsets of rows x lanes from the element that the thread's row means, and which exist."""
    view, index = _window(it, r.buf, row), _index(it, r, row)
    at: list[Array] = [np.full((rows, lanes), i) for i in index]
    at[-1] = at[-1] + np.arange(lanes)
    if len(at) > 1:
        at[-2] = at[-2] + np.arange(rows)[:, None]
    inside = np.logical_and.reduce([(0 <= i) & (i < n) for i, n in zip(at, view.shape)])
    return view, view.offset([np.where(inside, i, 0) for i in at], True) + np.zeros((rows, lanes), np.int64), inside


def _whole(view: View, inside: Array, what: str) -> None:
    if not inside.all():
        raise KernelError(f"{what}: the box reaches outside of {view.buf.name}")


def _touch(it: Evaluator, view: View, who: int, off: Array, write: bool, record: bool = True) -> None:
    """Every check of an access by a member of the team to given elements."""
    mem = view.memory
    if mem.in_flight is not None and mem.in_flight[off].any():
        raise KernelError(
            f"{view.name(off[mem.in_flight[off]][0])} is touched while an asynchronous copy into it is in flight"
        )
    if mem.written is not None and not write and not mem.written[off].all():
        raise KernelError(f"read of {view.name(off[~mem.written[off]][0])}, which nobody has written")
    if not mem.tracked:
        return
    message = None
    if view.buf.space != "shared" and it.state.iteration is not None:
        message = it.blocks.access(view, np.full(len(off), it.state.iteration), off, write)
    message = message or it.team.access(view, np.full(len(off), who), off, write, record)
    if message:
        raise KernelError(f"race: {message}")


Source = Callable[
    ["Evaluator", Ref, int, int, int], tuple[View, Array, Array]
]  # of (reference, row of the state, height, width)


def tma_load(it: Evaluator, dst: Expr, src: Expr, rows: Expr, r: Expr) -> None:
    _load(it, dst, src, rows, r, _box)


def tma_im2col(it: Evaluator, dst: Expr, src: Expr, rows: Expr, r: Expr, *window: Expr) -> None:
    _load(it, dst, src, rows, r, lambda it, src, row, height, width: _pixels(it, src, row, height, width, window))


def _load(it: Evaluator, dst: Expr, src: Expr, rows: Expr, r: Expr, find: Source) -> None:
    """One thread of a block, with the mbarrier that it means."""
    assert isinstance(dst, Ref) and isinstance(src, Ref)
    height, row_of = number(it, rows, "the height of the box"), np.flatnonzero(it.active())
    for bar, threads in _mbarriers(it, r, "tma_load"):
        if len(threads) != 1:
            raise KernelError(f"tma_load must be issued by one thread, {len(threads)} are active")
        if not bar.fenced:
            raise KernelError(
                "tma_load: mbar_fence() is missing after mbar_init: the copy engine may not see the mbarrier"
            )
        row = int(row_of[threads_of(it, "tma_load") == threads[0]][0])
        _start_copy(
            it, _box(it, dst, row, height, dst.lanes), find(it, src, row, height, dst.lanes), bar, int(threads[0])
        )


def _start_copy(
    it: Evaluator, to: tuple[View, Array, Array], source: tuple[View, Array, Array], bar: Mbarrier, who: int
) -> None:
    (inside, off, fits), (outside, from_, exists) = to, source
    _whole(inside, fits, "tma_load")
    _touch(it, outside, who, from_[exists], False)
    value = np.where(exists, outside.memory.data[from_], outside.memory.data.dtype.type(0)).reshape(-1)
    copy = issue(it, inside, np.full(off.size, who), off.reshape(-1), value, None)
    bar.copies.append(copy)
    bar.bytes -= off.size * inside.buf.dtype.bytes
    if bar.bytes < 0:
        raise KernelError(f"tma_load: copies bring {-bar.bytes} bytes more than mbar_expect has announced")
    np.maximum.at(bar.gathered, copy.who, copy.when)
    it.team.tick(np.array([who]))
    _complete(it, bar)


def _pixels(
    it: Evaluator, src: Ref, row: int, height: int, width: int, window: tuple[Expr, ...]
) -> tuple[View, Array, Array]:
    """Like _box, of the pixels that a filter's tap meets."""
    values = [it.eval(e) for e in window]
    numbers = [int(v if np.ndim(v) == 0 else np.ravel(v)[row]) for v in values]
    n = len(numbers) // 6
    first, tap, sizes, strides, dilations, begin = (numbers[k : k + n] for k in range(0, 6 * n, n))
    view, (image, *_, channel) = _window(it, src.buf, row), _index(it, src, row)
    left = int(np.ravel_multi_index((image, *first), (image + 1, *sizes))) + np.arange(height)[:, None]
    place = [channel + np.arange(width)]
    for t, size, k, d, before in reversed(list(zip(tap, sizes, strides, dilations, begin))):
        place.insert(0, left % size * k + t * d - before)
        left = left // size
    at = [np.broadcast_to(i, (height, width)) for i in (left, *place)]
    inside = np.logical_and.reduce([(0 <= i) & (i < n) for i, n in zip(at, view.shape)])
    return view, view.offset([np.where(inside, i, 0) for i in at], True), inside


def tma_store(it: Evaluator, dst: Expr, src: Expr, rows: Expr) -> None:
    """Every active thread stores a box of its own."""
    assert isinstance(dst, Ref) and isinstance(src, Ref)
    threads, height = threads_of(it, "tma_store"), number(it, rows, "the height of the box")
    for row, who in zip(np.flatnonzero(it.active()), map(int, threads)):
        source, from_, exists = _box(it, src, int(row), height, src.lanes)
        _whole(source, exists, "tma_store")
        to, off, inside = _box(it, dst, int(row), height, src.lanes)
        reading = Reading(source.memory, from_.reshape(-1), np.array([who]), int(it.grid.stores[who]))
        _engine_reads(it, source, who, reading.off, "tma_store")
        _pin(reading)
        it.grid.readings.append(reading)
        _touch(it, to, who, off[inside], True)
        to.memory.data[off[inside]] = source.memory.data[from_[inside]]


def bulk_commit(it: Evaluator) -> None:
    it.grid.stores[threads_of(it, "bulk_commit")] += 1


def bulk_wait(it: Evaluator, n: Expr) -> None:
    threads, keep = threads_of(it, "bulk_wait"), number(it, n, "the count of bulk_wait")
    still = []
    for r in it.grid.readings:
        who = int(r.who[0])
        if who not in threads or r.group >= it.grid.stores[who] - keep:
            still.append(r)
            continue
        _unpin(it, r, who)
    it.grid.readings = still


def fence_async(it: Evaluator) -> None:
    threads = threads_of(it, "fence_async")
    for t in threads:
        it.grid.fences.setdefault(int(t), []).append(int(it.team.clock[t, t]))
    it.team.tick(threads)


def _pin(r: Reading | Product) -> None:
    if r.memory.pinned is None:
        r.memory.pinned = np.zeros(r.memory.size, np.int32)
    np.add.at(r.memory.pinned, r.off, 1)


def _unpin(it: Evaluator, r: Reading | Product, reader: int) -> None:
    """The read is over now, not when it was issued: that is what others have to know before they write."""
    assert r.memory.pinned is not None
    np.subtract.at(r.memory.pinned, r.off, 1)
    it.team.cells(r.memory)[2][r.off, reader] = it.team.clock[reader, reader]


def _engine_reads(it: Evaluator, view: View, reader: int, off: Array, what: str) -> None:
    """An engine reads shared memory: written, ordered after the writers, and fenced by them unless a copy wrote it."""
    mem = view.memory
    _touch(it, view, reader, off, False, record=False)
    writer, when, _ = it.team.cells(mem)
    by_threads = np.ones(len(off), np.bool_) if mem.copied is None else ~mem.copied[off]
    for w in np.unique(writer[off][by_threads]) - 1:
        if w < 0:
            continue
        mine = off[by_threads & (writer[off] == w + 1)]
        fences = np.array([*it.grid.fences.get(int(w), []), np.iinfo(np.int32).max])
        late = fences[np.searchsorted(fences, when[mine])] >= it.team.clock[reader, w]
        if late.any():
            raise KernelError(
                f"{what} reads {view.name(mine[late][0])}, written by thread {w} without fence_async() before the "
                "barrier"
            )


# --- matrices ---------------------------------------------------------------------------------------------------------


def stmatrix_x4(it: Evaluator, dst: Expr, v: Expr, order: tuple[int, ...] = (0, 3, 1, 2, 4)) -> None:
    """`order`: of warp, 8 groups of lanes, their lanes, matrix, elements, to warp, matrix and places in it."""
    assert isinstance(dst, Ref)
    threads = threads_of(it, "stmatrix_x4")
    if len(threads) % 32 or (threads.reshape(-1, 32) != threads.reshape(-1, 32)[:, :1] + np.arange(32)).any():
        raise KernelError("stmatrix_x4 is reached by a part of a warp")
    rows = it.state.rows
    value = np.broadcast_to(it.eval(v), (rows, 8)).reshape(-1, 32, 4, 2)  # warp, lane, matrix, 2 elements
    it.write(it.place(dst.buf, dst.idx, 8), value.reshape(-1, 8, 4, 4, 2).transpose(order).reshape(rows, 8))


def stmatrix_x4_trans(it: Evaluator, dst: Expr, v: Expr) -> None:
    stmatrix_x4(it, dst, v, (0, 3, 2, 4, 1))


def _warp_groups(it: Evaluator, what: str) -> Array:
    """First threads of the active warp groups."""
    threads = threads_of(it, what)
    first = threads[::GROUP] if len(threads) % GROUP == 0 else np.array([-1])
    if (first % GROUP).any() or (threads.reshape(-1, GROUP) != first[:, None] + np.arange(GROUP)).any():
        raise KernelError(f"{what} is reached by a part of a warp group")
    return first


def wgmma(it: Evaluator, acc: Expr, a: Expr, b: Expr, keep: Expr) -> None:
    _multiply(it, acc, a, b, keep, _rows_of)


def wgmma_kn(it: Evaluator, acc: Expr, a: Expr, b: Expr, keep: Expr) -> None:
    _multiply(it, acc, a, b, keep, _columns_of)


def wgmma_sp(it: Evaluator, acc: Expr, a: Expr, b: Expr, places: Expr, keep: Expr, part: Expr) -> None:
    words = np.broadcast_to(it.eval(places), (it.state.rows,)).astype(np.uint32)
    lanes = 2 * number(it, part, "the part of wgmma_sp") + np.arange(2)

    def expand(left: Array, rows: Array) -> Array:
        """[64, 32] of pairs [64, 16], whose places the threads of these rows of the state have."""
        word = words[rows].reshape(4, 8, 4)[:, :, lanes]  # warp, g, lanes
        halves = np.stack([word & 0xFFFF, word >> 16], 1)  # warp, half, g, lanes
        nibbles = (halves[..., None] >> np.arange(0, 16, 4)).reshape(WGMMA_ROWS, 8)  # of 8 groups
        at = np.stack([nibbles & 3, nibbles >> 2 & 3], -1)
        if (at[..., 0] >= at[..., 1]).any():
            raise KernelError("wgmma_sp: places of two elements of a group must rise")
        out = np.zeros((WGMMA_ROWS, 8, 4), left.dtype)
        np.put_along_axis(out, at.astype(np.int64), left.reshape(WGMMA_ROWS, 8, 2), -1)
        return out.reshape(WGMMA_ROWS, 32)

    _multiply(it, acc, a, b, keep, lambda it, r, n, row: _rows_of(it, r, n, row, 64), expand)


Tile = Callable[["Evaluator", Ref, int, int], tuple[View, Array]]


def _multiply(
    it: Evaluator,
    acc: Expr,
    a: Expr,
    b: Expr,
    keep: Expr,
    right_tile: Tile,
    expand: Callable[[Array, Array], Array] = lambda left, rows: left,
) -> None:
    assert isinstance(acc, Ref) and isinstance(a, Ref) and isinstance(b, Ref)
    firsts, kept = _warp_groups(it, "wgmma"), number(it, keep, "the last operand of wgmma")
    n, place = 2 * acc.lanes, it.place(acc.buf, acc.idx, acc.lanes)
    registers, row_of = place.view.memory, {int(t): k for k, t in enumerate(it.state.thread)}  # type: ignore[arg-type]
    r, c = wgmma_positions(n)
    for first in firsts:
        group = int(first) // GROUP
        if not it.grid.wgmma_ready.get(group):
            raise KernelError("wgmma: wgmma_fence() is missing since the last group was committed")
        rows = np.array([row_of[int(t)] for t in first + np.arange(GROUP)])
        agent = it.team.size + group
        it.team.clock[agent] = np.maximum(it.team.clock[agent], it.team.clock[first : first + GROUP].max(0))
        kind = registers.data.dtype.type
        left = expand(_operand(it, _rows_of(it, a, WGMMA_ROWS, rows[0]), group).astype(kind), rows)
        right = _operand(it, right_tile(it, b, n, rows[0]), group).astype(kind)
        copies = it.copies(registers)[rows] if len(registers.data) > 1 else rows * 0
        off = np.broadcast_to(place.off, (it.state.rows, acc.lanes))[rows]
        old = registers.data[copies[:, None], off] if kept else kind(0)
        registers.data[copies[:, None], off] = old + (left @ right.T)[r, c]
        if registers.in_flight is None:
            registers.in_flight = np.zeros(registers.data.shape, np.bool_)
        registers.in_flight[copies[:, None], off] = True
        it.grid.products.append(Product(registers, off, np.array([first]), it.grid.wgmma_groups.get(group, 0), copies))


def _start(it: Evaluator, r: Ref, row: int, wide: int) -> tuple[View, list[int]]:
    """Where a tile begins for the thread in this row of the state. `wide`: bytes of its rows."""
    if r.buf.swizzle != SWIZZLE_ROWS or r.buf.space != "shared":
        raise KernelError(f"wgmma reads {r.buf.name}, which is no shared.swizzle{SWIZZLE_ROWS} buffer")
    index = _index(it, r, row)
    if index[-2] % SWIZZLE_ROWS or (index[-1] * r.buf.dtype.bytes) % wide or r.lanes * r.buf.dtype.bytes != wide:
        raise KernelError(
            f"wgmma: a tile of {r.buf.name} must start at a multiple of 8 rows and {wide} bytes, and be {wide} bytes "
            "wide"
        )
    return _window(it, r.buf, row), index


def _located(view: View, at: list[Array]) -> tuple[View, Array]:
    _whole(view, np.logical_and.reduce([(0 <= i) & (i < n) for i, n in zip(at, view.shape)]), "wgmma")
    return view, view.offset(at, True)


def _rows_of(it: Evaluator, r: Ref, rows: int, row: int, wide: int = 32) -> tuple[View, Array]:
    """Offsets of a tile whose rows lie along the sum, [rows, k], `wide` bytes each."""
    view, index = _start(it, r, row, wide)
    at: list[Array] = [np.full((rows, r.lanes), i) for i in index]
    at[-2], at[-1] = at[-2] + np.arange(rows)[:, None], at[-1] + np.arange(r.lanes)
    return _located(view, at)


def _columns_of(it: Evaluator, r: Ref, columns: int, row: int) -> tuple[View, Array]:
    """Offsets of a tile that lies in blocks of 64 columns, [columns, k]."""
    view, index = _start(it, r, row, 128)
    k = 32 // r.buf.dtype.bytes
    at: list[Array] = [np.full((columns, k), i) for i in index]
    c = np.arange(columns)[:, None]
    at[-3], at[-2], at[-1] = at[-3] + c // r.lanes, at[-2] + np.arange(k), at[-1] + c % r.lanes
    return _located(view, at)


def _operand(it: Evaluator, tile: tuple[View, Array], group: int) -> Array:
    """The tensor core of a warp group reads a tile of shared memory."""
    view, off = tile
    agent = it.team.size + group
    _engine_reads(it, view, agent, off.reshape(-1), "wgmma")
    reading = Reading(view.memory, off.reshape(-1), np.array([agent]), it.grid.wgmma_groups.get(group, 0))
    _pin(reading)
    it.grid.tiles.append(reading)
    return view.memory.data[off]


def wgmma_fence(it: Evaluator) -> None:
    for first in _warp_groups(it, "wgmma_fence"):
        it.grid.wgmma_ready[int(first) // GROUP] = True


def wgmma_commit(it: Evaluator) -> None:
    for first in _warp_groups(it, "wgmma_commit"):
        group = int(first) // GROUP
        it.grid.wgmma_groups[group] = it.grid.wgmma_groups.get(group, 0) + 1
        it.grid.wgmma_ready[group] = False


def wgmma_wait(it: Evaluator, n: Expr, acc: Expr | None = None) -> None:
    """What the groups have read may be overwritten from here on; what they computed may be used if it is named."""
    keep = number(it, n, "the count of wgmma_wait")
    for first in _warp_groups(it, "wgmma_wait"):
        group = int(first) // GROUP
        agent, newest = it.team.size + group, it.grid.wgmma_groups.get(group, 0) - keep
        it.team.tick(np.array([agent]))
        for r in [r for r in it.grid.tiles if int(r.who[0]) == agent and r.group < newest]:
            _unpin(it, r, agent)
            it.grid.tiles.remove(r)
        threads = first + np.arange(GROUP)
        it.team.clock[threads, agent] = it.team.clock[agent, agent]
        if isinstance(acc, Ref):
            _settle(it, it.view(acc.buf).memory, int(first), newest)


def _settle(it: Evaluator, registers: Memory, first: int, newest: int) -> None:
    """Accumulators of a warp group of which no product is under way any more."""
    mine = [p for p in it.grid.products if int(p.who[0]) == first and p.memory is registers]
    if any(p.group >= newest for p in mine):
        return
    for p in mine:
        assert registers.in_flight is not None
        registers.in_flight[p.copies[:, None], p.off] = False
        it.grid.products.remove(p)


# --- barriers of a part of the block, and of a cluster ----------------------------------------------------------------


def named_barrier(it: Evaluator, which: Expr, size: Expr) -> None:
    threads, n = threads_of(it, "named_barrier"), number(it, size, "the size of named_barrier")
    ids = np.broadcast_to(it.eval(which), (it.state.rows,))[it.active()]
    blocks = threads // it.grid.block_size
    for block, i in sorted({(int(b), int(i)) for b, i in zip(blocks, ids)}):
        members = threads[(blocks == block) & (ids == i)]
        if len(members) != n:
            raise KernelError(f"named_barrier {i} is reached by {count(len(members), 'thread')}, it waits for {n}")
        it.team.join(members)


def cluster_barrier(it: Evaluator) -> None:
    if it.state.mask is not None:
        raise KernelError("cluster_barrier() is reached by a part of the threads")
    it.team.join(np.arange(it.team.size))
    it.grid.peeked = False


def cluster_wait(it: Evaluator) -> None:
    """Nothing: threads are in step, so that they met where they arrived."""


def peer(it: Evaluator, r: Expr, rank: Expr) -> Array:
    """What lies at an address in the same shared buffer of another block of the cluster."""
    assert isinstance(r, Ref)
    outer = it.state
    it.state = _of_peer(it, r, rank)
    found = it.read(it.place(r.buf, r.idx, r.lanes), r.lanes)
    it.state = outer
    return found


def peer_store(it: Evaluator, r: Expr, rank: Expr, value: Expr) -> None:
    """Write to an address of the same shared buffer in another block of the cluster."""
    assert isinstance(r, Ref)
    threads_of(it, "peer_store")
    outer, v = it.state, it.eval(value)
    it.state = _of_peer(it, r, rank)
    it.write(it.place(r.buf, r.idx, r.lanes), v)
    it.state = outer


def peer_send(it: Evaluator, r: Expr, rank: Expr, value: Expr, b: Expr) -> None:
    """Start copies of registers into the memory of another block, which its mbarrier counts."""
    assert isinstance(r, Ref) and isinstance(b, Ref)
    threads, outer, v = threads_of(it, "peer_send"), it.state, it.eval(value)
    it.state = _of_peer(it, r, rank)
    at = it.place(r.buf, r.idx)
    off = it.spots(at)[1]
    it.state = outer
    it.state = _of_peer(it, b, rank)
    bars = it.spots(it.place(b.buf, b.idx))[1]
    it.state = outer
    values = np.broadcast_to(v, (outer.rows,))[it.active()]
    for where in np.unique(bars):
        bar, mine = it.grid.mbarriers.get((it.view(b.buf).memory, int(where))), bars == where
        if bar is None:
            raise KernelError(f"peer_send: {b.buf.name} of that block was never initialized by mbar_init")
        who = threads[mine]
        bar.copies.append(issue(it, at.view, who, off[mine], values[mine], None))
        bar.bytes -= len(who) * r.buf.dtype.bytes
        bar.gathered = np.maximum(bar.gathered, it.team.clock[who].max(0))
        it.team.tick(who)
        _complete(it, bar)


def _of_peer(it: Evaluator, r: Ref, rank: Expr) -> State:
    """The state in which the buffer of an address is that of another block."""
    view, n = it.view(r.buf), it.grid.blocks
    part = it.eval(rank)
    if r.buf.space != "shared" or np.min(part) < 0 or np.max(part) >= n:
        raise KernelError(f"{r.buf.name} of block {np.max(part)}: a cluster of {n} blocks shares shared memory")
    it.grid.peeked = True
    return replace(it.state, views={**it.state.views, r.buf: replace(view, base=part * (view.memory.size // n))})


EFFECTS: dict[str, Callable[..., None]] = {
    "mbar_init": mbar_init, "mbar_fence": mbar_fence, "mbar_arrive": mbar_arrive, "mbar_expect": mbar_expect,
    "tma_load": tma_load, "tma_im2col": tma_im2col, "tma_store": tma_store, "bulk_commit": bulk_commit,
    "bulk_wait": bulk_wait, "bulk_wait_read": bulk_wait,
    "fence_async": fence_async, "stmatrix_x4": stmatrix_x4, "stmatrix_x4_trans": stmatrix_x4_trans,
    "wgmma": wgmma, "wgmma_sp": wgmma_sp, "wgmma_kn": wgmma_kn,
    "wgmma_fence": wgmma_fence, "wgmma_commit": wgmma_commit,
    "wgmma_wait": wgmma_wait, "named_barrier": named_barrier, "cluster_barrier": cluster_barrier,
    "cluster_arrive": cluster_barrier, "cluster_wait": cluster_wait,
    "peer_store": peer_store, "peer_send": peer_send, "resident": nothing, "regs_give": nothing, "regs_take": nothing,
    "first_level_cache": nothing, "tma_prefetch": nothing, "tma_fetch": nothing,
}  # fmt: skip
