"""Roofline estimate of a schedule, for machines without a learned model and as base of the features.

In: the Work of a kernel, a Choice, the Limits of a machine. Out: a Plan: what the knobs make of the kernel (tiles, what
is computed in vain, shares of registers and caches) and the seconds of its arithmetic, of its traffic with the
second-level cache and with memory, and of what is fixed. Nothing is scheduled. Seconds are nominal, for ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from dnnc.autotune.model.work import Work, work_of
from dnnc.passes.schedule.problem import Choice, Problem

if TYPE_CHECKING:
    from dnnc.ir.target import Limits

SM_CORES = 128  # multiply-adds of f32 that a multiprocessor begins in a cycle
WGMMA, MMA = 2048, 1024  # multiply-adds of 16-bit floats a cycle of a multiprocessor
SFU = 16  # transcendental functions a cycle of a multiprocessor
GPU_LATENCY, CPU_LATENCY = 700, 4  # cycles: of a load from memory; of a multiply-add
SERIAL_BELOW = 16384
COPIED, PUT = (
    6,
    14,
)  # instructions to bring a vector into shared memory: copied there, or by way of registers (less than 4 bytes)
BLOCK = 2  # cycles from the start of a block to that of the next
ISSUED = 4 * 32  # lanes for which a multiprocessor begins instructions in a cycle
CROWDED = 0.02  # of the time for each accumulator past half of the registers, where taps and borders need some as well
Knobs = Mapping[str, "int | str"]


def clock(limits: Limits) -> float:
    """Cycles a second: of a core that starts two vector FMAs a cycle, of an SM that starts 128."""
    return limits.flops / limits.cores / (2 * SM_CORES if limits.kind == "gpu" else 4 * limits.lanes)


def rate(limits: Limits) -> float:
    """Bytes a cycle of a core out of the second-level cache."""
    return limits.l2_bandwidth / limits.cores / clock(limits)


@dataclass(frozen=True)
class Plan:
    """What a schedule makes of a kernel."""

    rows: float = 1  # results that are computed at a time
    cols: float = 1
    red: float = 1  # elements of their sums before the next ones are fetched
    pieces: float = 1  # of the work, dealt to the units
    waste: float = 1  # computed over needed results, at least 1
    threads: float = 1  # of a block; 1 on a CPU
    registers: float = 0  # share of a unit's registers in use
    near: float = 0  # bytes in use at a time over those of the first-level cache
    far: float = 0  # bytes in use at a time over those of the second-level cache
    together: float = 1  # blocks of a unit at one time
    loads: float = 1  # elements loaded for each multiply-add
    # time that it takes to ask for the operands of a step, over that of its arithmetic; 0 where hardware copies them
    fetch: float = 0
    # seconds of arithmetic, of traffic with the second-level cache and with memory, and of what is always there
    compute: float = 0
    cache: float = 0
    memory: float = 0
    fixed: float = 0
    # iterations of the loops that are shared at least, where several pieces may stay together; 0: as many as pieces
    items: float = 0

    @property
    def seconds(self) -> float:
        return (
            max(self.compute, self.cache, self.memory) + 0.15 * (self.compute + self.cache + self.memory) + self.fixed
        )


def roofline(problem: Problem, choice: Choice, limits: Limits) -> float:
    """Estimated seconds of a call."""
    return plan(work_of(problem), choice, limits).seconds


def plan(w: Work, choice: Choice, limits: Limits) -> Plan:
    """What a choice makes of a kernel; a template that is not known here counts as one pass over memory."""
    makers = _CUDA if limits.kind == "gpu" else _LLVM
    return makers.get(choice.template, _streamed)(w, dict(choice.knobs), limits)


def number(knobs: Knobs, name: str, default: int = 1) -> int:
    """A knob; the default where the template has none of this name."""
    v = knobs.get(name, default)
    return int(v) if not isinstance(v, str) else default


def up(n: float, d: float) -> float:
    """How many of d hold n."""
    return float(ceil(n / max(d, 1)))


def _balance(pieces: float, units: float) -> float:
    """How much longer the busiest unit works than all of them would on average."""
    return up(pieces, units) * units / max(pieces, 1.0)


def _memory(w: Work, limits: Limits) -> float:
    """Seconds to read and write everything once: constants from memory, the rest from the cache that holds it."""
    cold = sum(b.nbytes for b in w.buffers if b.constant)
    warm = w.nbytes - cold
    l2 = limits.l2 * (limits.cores if limits.kind == "cpu" else 0.7)
    near = limits.l2_bandwidth if warm <= l2 else limits.bandwidth * (2 if warm <= limits.l3 else 1)
    return cold / limits.bandwidth + warm / near


def _shared(w: Work, k: Knobs) -> bool:
    """Do a CPU's threads share the work?"""
    said = number(k, "serial", -1)
    return w.batch * w.rows * w.cols * w.red >= SERIAL_BELOW if said < 0 else not said


# --- CPU --------------------------------------------------------------------------------------------------------------


def _cpu_tile(w: Work, k: Knobs, limits: Limits) -> Plan:
    """A register tile of `mr` rows by `nv` vectors."""
    mr, nv = number(k, "mr", 8), number(k, "nv", 2)
    deep = w.cols < limits.lanes <= w.batch * w.cols  # a depthwise convolution: channels are the lanes
    cols, batch = (w.cols * w.batch, 1) if deep else (w.cols, w.batch)
    wide = nv * limits.lanes
    across, down = up(cols, wide), w.rows / max(w.run, 1) * up(w.run, mr)
    kc = min(number(k, "kc", w.red) or w.red, w.red)
    fma, loads = mr * nv / 2, (mr + nv) / 2 * 1.05
    steps = max(fma, loads, CPU_LATENCY if mr * nv < 8 else 0.0, nv * limits.lanes * w.element / rate(limits))
    tiles = batch * across * down
    cycles = tiles * (w.red * steps + 20 + mr * nv * up(w.red, kc)) + _others(w, limits)
    rows_bytes, panels = (
        batch * w.rows * w.red / max(w.taps, 1) * w.element,
        float(w.weights if not deep else cols * w.red * w.element),
    )
    crowd = 1.0 if w.taps == 1 and not w.guarded else 1 + CROWDED * max(mr * nv - limits.registers // 2, 0)
    units = limits.cores if _shared(w, k) else 1
    rows_bytes, panels = (
        batch * w.rows * w.red / max(w.taps, 1) * w.element,
        float(w.weights if not deep else cols * w.red * w.element),
    )
    lines = w.rows / max(w.run, 1)
    near, beyond, held = _traffic(
        str(k.get("order", "panels")), (rows_bytes, panels), (batch, lines, lines * up(w.run, mr), across), limits.l2
    )
    return Plan(
        mr, wide, kc, tiles, tiles * mr * wide / max(w.outputs, 1), 1, (mr * nv + nv + 1) / limits.registers,
        (mr + wide) * kc * w.element / limits.near,
        held / limits.l2, 1, (mr + nv) / (mr * nv), 0, cycles * crowd * _balance(tiles, units) / units / clock(limits),
        near / limits.l2_bandwidth * limits.cores / units,
        _memory(w, limits) + max(beyond - rows_bytes - panels, 0.0) / (2 * limits.bandwidth),
        _started(limits, units), tiles if k.get("order") == "tiles" else batch * across * lines,
    )  # fmt: skip


def _traffic(
    order: str, sizes: tuple[float, float], counts: tuple[float, float, float, float], l2: int
) -> tuple[float, float, float]:
    """Bytes out of the L2, bytes from beyond it, and the bytes that it has to hold so that these are few.

    Args:
        order: of the loops outside of a tile: all rows of an image's line pass each panel ("rows"), all rows of all
            lines and batches do ("panels"), or all panels pass each tile ("tiles").
        sizes: bytes of the rows and of the panels, all batches together.
        counts: batches, lines of a batch, tiles of rows of a batch, panels.
        l2: bytes of the cache.
    """
    rows, panels = sizes
    batch, lines, down, across = counts
    if order == "tiles":
        held = panels / batch
        read = panels * down
        return rows + read, rows + (read if held > l2 else panels), held
    if order == "rows":
        line, weights = rows / batch / lines, panels / batch
        again = rows * across, panels * lines
        beyond = (again[0] if line > l2 else rows) + (again[1] if weights > l2 else panels)
        return sum(again), beyond, max(line, weights if lines > 1 else 0.0)
    return rows * across + panels, (rows * across if rows > l2 else rows) + panels, rows


def _started(limits: Limits, units: int) -> float:
    """Seconds of a call of a CPU: the threads meet, or one is called."""
    return limits.start / 4 if units > 1 else limits.start / 20


def _others(w: Work, limits: Limits) -> float:
    """Cycles of all arithmetic beside multiply-adds of a sum, in vectors."""
    _, compared, divided, hard, cast, _ = w.ops
    few = min(compared, w.outputs * 8)  # conditions of padding are decided by loop bounds
    return (few * 0.5 + divided * 8 + hard * 12 + min(cast, w.outputs * 4)) / limits.lanes


def _winograd(w: Work, k: Knobs, limits: Limits) -> Plan:
    """`tg` tiles of `tile` x `tile` results at a time, transformed, multiplied and transformed back."""
    m, tg, share, mr, nv = (number(k, n) for n in ("tile", "tg", "share", "mr", "nv"))
    side = max(round(w.run**0.5), 1) if w.run == w.rows else w.run
    tiles = up(side, m) * up(w.rows / side, m)
    points, channels, panels = (m + 2) ** 2, w.red / 9, up(w.cols, limits.lanes)
    strips = up(tiles, tg)
    step = max(mr * nv / 2, (mr + nv) / 2 * 1.05, CPU_LATENCY, nv * limits.lanes * 4 / rate(limits))
    work = points * up(tg, mr) * up(panels / share, nv) * (step * channels + mr * nv + 20)
    moves = tg * (channels + w.cols / share) / limits.lanes * points * 3
    held = points * tg * (channels + w.cols / share) * 4
    pieces = strips * share * w.batch
    traffic = strips * points * channels * w.cols * 4 + 2 * held * pieces
    return Plan(
        mr, nv * limits.lanes, channels, pieces, strips * tg * m * m / max(w.rows, 1), 1,
        (mr * nv + nv + 1) / limits.registers,
        channels * nv * limits.lanes * 4 / limits.near, held / limits.l2, 1, (mr + nv) / (mr * nv), 0,
        (work + moves) * pieces * _balance(pieces, limits.cores) / limits.cores / clock(limits),
        traffic / limits.l2_bandwidth, _memory(w, limits), limits.start,
    )  # fmt: skip


def _cpu_pass(w: Work, k: Knobs, limits: Limits) -> Plan:
    """One or a few passes over memory, in vectors where it is walked in order."""
    lanes = number(k, "lanes", limits.lanes)
    jumping = sum(b.touches for b in w.buffers if b.across > b.element and b.inner > b.element)
    turned = w.kind == "map" and lanes <= limits.lanes and number(k, "turn") == 1  # tiles are transposed in registers
    real = min(lanes, limits.lanes)
    touched = sum(b.touches for b in w.buffers)
    wide = 1.05 if lanes > limits.lanes else 1.0  # two registers for each value
    cycles = (
        (sum(w.ops[:2]) * 0.5 + touched * 0.5) / real
        + _others(w, limits) * limits.lanes / real
        + (jumping * 4 / real if turned else jumping * 2)
    )
    latency = CPU_LATENCY * w.rows * w.red / real / number(k, "chains", 4) if w.kind == "reduce" else 0.0
    units = limits.cores if _shared(w, k) else 1
    return Plan(
        number(k, "chains", number(k, "unroll")), lanes, w.red, float(w.rows), 1, 1, 0,
        w.cols * w.red * w.element / limits.near,
        w.nbytes / limits.cores / limits.l2, 1, 1, 0, max(cycles * wide, latency) / units / clock(limits),
        touched * w.element / (limits.l2_bandwidth * units / limits.cores),
        _memory(w, limits) * (limits.cores / units) ** 0.5, _started(limits, units),
    )  # fmt: skip


# --- GPU --------------------------------------------------------------------------------------------------------------


def _resident(limits: Limits, shared: float, registers: float, threads: float, blocks: float) -> float:
    """Blocks that an SM holds at one time."""
    room = limits.near // max(shared, 1), limits.registers // (registers * threads), limits.threads // threads
    return max(1.0, min(*room, up(blocks, limits.cores)))


def _gpu_tile(speed: Callable[[Knobs, Work], float]) -> Callable[[Work, Knobs, Limits], Plan]:
    """Tiles of `bm` by `bn` results in steps of `bk`; `speed`: multiply-adds a cycle of a multiprocessor."""

    def made(w: Work, k: Knobs, limits: Limits) -> Plan:
        bm, bn, bk = number(k, "bm", 64), number(k, "bn", 64), number(k, "bk", 64)
        slices, split, stages = number(k, "slices"), number(k, "split"), number(k, "stages", 2)
        threads = threads_of(k, bm, bn) * slices
        tiles = w.batch * up(w.rows, bm) * up(w.cols, bn)
        blocks = tiles * split
        shared = stages * slices * (bm + bn) * bk * w.element
        own = "down" in k or "tm" in k  # threads fetch; otherwise hardware copies
        registers = bm * bn * slices / threads + 50 + (held(w, (bm, bn), bk * slices) / threads if own else 0)
        together = _resident(limits, shared, registers, threads, blocks)
        together = float(number(k, "resident", int(together)))
        steps = up(w.red, bk * slices * split)
        products = bm * bn * bk * slices / speed(k, w)
        fetch = _fetch(w, (bm, bn), bk * slices) if own else 0.0
        busy = max(products, fetch) + min(products, fetch) / 2  # both ask the same schedulers
        step = (
            max(busy, (bm + bn) * bk * slices * w.element / rate(limits), GPU_LATENCY / (together * max(stages - 1, 1)))
            + 60 / together
        )
        rounds = up(blocks, limits.cores)
        end = 800 + bm * bn / 16 + (1500 if split > 1 else 0) + (bm * bn / 32 if slices > 1 else 0)
        cycles = rounds * (steps * step + bm * bn / 64 * (1 + w.ops[3] / max(w.outputs, 1) * 2)) + up(
            rounds, together
        ) * (2 * GPU_LATENCY + end)
        traffic = blocks * w.red / split * (bm + bn) * w.element
        return Plan(
            bm, bn, bk, blocks, tiles * bm * bn / max(w.outputs, 1), threads,
            registers * threads * together / limits.registers, shared * together / limits.near,
            w.nbytes / limits.l2, together, (bm + bn) / (bm * bn), fetch / products, cycles / clock(limits),
            traffic / limits.l2_bandwidth, _memory(w, limits), limits.start,
        )  # fmt: skip

    return made


def _fetch(w: Work, sides: tuple[int, int], depth: int) -> float:
    """Cycles in which a multiprocessor begins the instructions that bring a step of both factors into shared memory."""
    vectors = ((side * depth / b.grain, b.grain * b.element) for side, b in zip(sides, w.fetched))
    return sum(n * (COPIED if nbytes >= 4 else PUT) for n, nbytes in vectors) / ISSUED


def held(w: Work, sides: tuple[int, int], depth: int) -> float:
    """Registers of a block that hold the vectors of a step on their way to shared memory."""
    return sum(side * depth / b.grain for side, b in zip(sides, w.fetched) if b.grain * b.element < 4)


def threads_of(k: Knobs, bm: int, bn: int) -> int:
    """Threads of a block that computes a tile, but for its slices."""
    if "tm" in k:
        return max(bm // number(k, "tm") * (bn // number(k, "tn")), 32)
    if "down" in k:
        return 32 * number(k, "down") * number(k, "across")
    return 128 * (bm // 64) + 128  # a producer's warps and a warpgroup for 64 rows


def _mma_rate(k: Knobs, w: Work) -> float:
    wm, wn = number(k, "bm", 64) / number(k, "down"), number(k, "bn", 64) / number(k, "across")
    warps = number(k, "down") * number(k, "across") * number(k, "slices")
    return MMA * 2 / w.element * min(1.0, wm * wn / (wm + wn) / 32) * min(1.0, warps / 4)


def _wgmma_rate(k: Knobs, w: Work) -> float:
    return WGMMA * (1.0 if number(k, "bm") * number(k, "resident") >= 128 else 0.6)


def _simt_rate(k: Knobs, w: Work) -> float:
    tm, tn = number(k, "tm", 8), number(k, "tn", 8)
    products, reads = tm * tn / 4, tm + tn
    return SM_CORES * 4 / max(w.element, 4) * products / (1.05 * max(products, reads) + 0.25 * min(products, reads))


def _attention(w: Work, k: Knobs, limits: Limits) -> Plan:
    rows, warps, keys = number(k, "rows", 64), number(k, "warps", 4), number(k, "keys", 64)
    stages, slices, parts = number(k, "stages", 2), number(k, "slices"), number(k, "parts")
    threads = 32 * warps * slices
    blocks = w.batch * up(w.rows, rows) * parts
    shared = (rows * w.red / 2 + keys * stages * slices * w.red) * w.element
    registers = rows / warps * (w.red / 2 + keys) / 32 + 60
    together = _resident(limits, shared, registers, threads, blocks)
    speed = (MMA if w.element == 2 else SM_CORES) * min(1.0, together * warps * slices / 4)
    steps = up(w.cols, keys * slices * parts)
    products = rows * keys * slices * w.red / speed + rows * keys * slices / SFU / 4
    step = max(products, slices * keys * w.red * w.element / rate(limits), GPU_LATENCY / together)
    end = (300 + 64 * slices * parts if slices * parts > 1 else 0) + (1200 if parts > 1 else 0)
    full = blocks / (limits.cores * together)
    cycles = ceil(full) * (3000 + steps * step * together + end)
    traffic = blocks * w.cols / parts * w.red * w.element
    return Plan(
        rows, keys, w.red, blocks, up(w.rows, rows) * rows / w.rows, threads,
        registers * threads * together / limits.registers, shared * together / limits.near,
        w.nbytes / limits.l2, together, 1 / rows, 0, cycles / clock(limits), traffic / limits.l2_bandwidth,
        _memory(w, limits), limits.start,
    )  # fmt: skip


def _gemv(w: Work, k: Knobs, limits: Limits) -> Plan:
    threads, per, parts, wide = number(k, "threads", 128), number(k, "per"), number(k, "parts"), number(k, "wide", 0)
    long, short = max(w.rows, w.cols), min(w.rows, w.cols)
    vector = 16 // w.element
    blocks = w.batch * (up(long, wide * vector) if wide else up(long * parts * number(k, "lanes", 32), per * threads))
    together = max(1.0, min(limits.threads // threads, 32.0))
    flight = blocks / limits.cores / together
    cycles = up(blocks, limits.cores * together) * (
        3 * GPU_LATENCY + w.red * long * w.batch * short / max(blocks, 1) / SM_CORES * 2 * together
    )
    return Plan(
        short, wide * vector if wide else per, w.red / max(parts, 1), blocks, 1, threads, 0,
        short * w.red * w.element / limits.near, w.nbytes / limits.l2, together,
        1 / short, 0, cycles / clock(limits), w.nbytes / limits.l2_bandwidth,
        _memory(w, limits) / max(min(1.0, flight * 2), 0.05), limits.start,
    )  # fmt: skip


def _streamed(w: Work, k: Knobs, limits: Limits) -> Plan:
    """Passes over memory by blocks of threads; on a CPU, `_cpu_pass`."""
    if limits.kind != "gpu":
        return _cpu_pass(w, k, limits)
    threads, team = number(k, "threads", 256), number(k, "team")
    wanted = max(number(k, "bytes", 4) // w.element, 1)
    vector = (
        min((min(b.grain, wanted) for b in w.buffers if b.across == b.element), default=1)
        if w.kind == "map"
        else wanted
    )
    each = vector * number(k, "chunks") * number(k, "lanes") * number(k, "row")
    if "team" in k:
        threads = team * number(k, "rows")
        blocks = up(w.rows, number(k, "rows"))
    else:
        blocks = up(w.outputs, threads * each)
    together = max(1.0, limits.threads // max(threads, 32))
    full = blocks / (limits.cores * together)
    jumping = sum(b.touches * min(32, b.inner) for b in w.buffers if b.inner > 16 and b.across > 16)
    if number(k, "tile", 0):
        jumping = 0.0
    moved = sum(b.nbytes for b in w.buffers) + jumping
    asked = sum(b.touches / (vector if b.across == b.element else 1) for b in w.buffers)
    busy = min(1.0, full * (2 if each * w.element >= 16 else 1)) ** 0.5 or 1.0
    serial = w.red * w.passes / max(team, 1)
    cycles = (
        up(full, 1) * (2 * GPU_LATENCY + serial * 20)
        + blocks * BLOCK
        + (w.flops + 16 * (w.ops[2] + w.ops[3])) / (SM_CORES * max(min(limits.cores, blocks), 1))
    )
    return Plan(
        number(k, "rows"), each, serial, blocks,
        blocks * threads * each / max(w.outputs * (w.red if "team" in k else 1), 1), threads, 0,
        w.red * w.element / limits.near, w.nbytes / limits.l2, together, 1, asked / max(w.outputs * w.red, 1),
        cycles / clock(limits), moved / limits.l2_bandwidth,
        (_memory(w, limits) + jumping / limits.l2_bandwidth) / busy, limits.start,
    )  # fmt: skip


# templates of tiles -> multiply-adds a cycle of a multiprocessor
TILED: dict[str, Callable[[Knobs, Work], float]] = {
    "wgmma": _wgmma_rate,
    "mma": _mma_rate,
    "tf32": _mma_rate,
    "simt": _simt_rate,
}
_LLVM: dict[str, Callable[[Work, Knobs, Limits], Plan]] = {"contraction": _cpu_tile, "winograd": _winograd}
_CUDA: dict[str, Callable[[Work, Knobs, Limits], Plan]] = {
    **{name: _gpu_tile(speed) for name, speed in TILED.items()},
    "attention": _attention, "gemv": _gemv, "gemv_norm": _gemv,
}  # fmt: skip
