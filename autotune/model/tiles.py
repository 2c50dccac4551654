"""Parts of a tiled GPU contraction's time: features that tell schedules of one kernel apart.

In: the Work of a kernel, a Choice, the Limits of a machine. Out: for the templates that compute tiles out of shared
memory, logarithms to base 2 of the cycles that a multiprocessor spends asking for each factor, multiplying, reading
shared memory, waiting and ending, over what the kernel takes at the least; then what decides them. The roofline has one
estimate out of the same figures, which takes the slowest part; what hides what is left to be learned.
"""

from __future__ import annotations

from math import ceil, log2
from typing import TYPE_CHECKING

from dnnc.autotune.model.roofline import (
    COPIED,
    GPU_LATENCY,
    ISSUED,
    PUT,
    TILED,
    Knobs,
    clock,
    held,
    number,
    rate,
    threads_of,
    up,
)
from dnnc.autotune.model.work import Work
from dnnc.passes.schedule.problem import Choice

if TYPE_CHECKING:
    from dnnc.ir.target import Limits

NAMES = (
    "rows_asked", "cols_asked", "products", "shared", "waiting", "finish", "start", "l2", "warps", "waves", "tail",
    "rows_vectors", "cols_vectors",
    "rows_idle", "cols_idle", "registers", "warp_rows", "warp_cols", "cols_grown", "rows_grown", "steps", "red_grown",
    "estimate", "longest", "parts",
    "gathered",
)  # fmt: skip
NONE = (0.0,) * len(NAMES)  # of other templates
GATHERED = 2.5  # times the instructions for an element of which taps and borders decide where it lies
MOST_REGISTERS = 255
LINE = 128  # bytes of shared memory that a multiprocessor reads in a cycle
FIXED = 2 * GPU_LATENCY + 800  # cycles of a block beside its steps


def spent(w: Work, choice: Choice, limits: Limits) -> tuple[float, ...]:
    """The numbers that NAMES names; zeros where the template computes no tiles."""
    speed = TILED.get(choice.template)
    if speed is None or limits.kind != "gpu":
        return NONE
    k = dict(choice.knobs)
    bm, bn, bk = (number(k, n, 64) for n in ("bm", "bn", "bk"))
    slices, split, stages = number(k, "slices"), number(k, "split"), number(k, "stages", 2)
    threads = threads_of(k, bm, bn) * slices
    own = choice.template != "wgmma"  # threads fetch; otherwise hardware copies
    depth = bk * slices
    vectors = [side * depth / b.grain if own else 0.0 for side, b in zip((bm, bn), w.fetched)] or [0.0, 0.0]
    wm, wn = _warp_tile(k, bm, bn)
    registers = min(_registers(w, k, (bm, bn), depth, threads, own), MOST_REGISTERS)
    room = (
        limits.near // max(stages * depth * (bm + bn) * w.element, 1),
        limits.registers // (ceil(registers / 8) * 8 * threads),
        limits.threads // threads,
    )
    together = max(1.0, float(min(room)))
    blocks = w.batch * up(w.rows, bm) * up(w.cols, bn) * split
    rounds, waves = up(blocks, limits.cores), blocks / (limits.cores * together)
    steps = up(w.red, depth * split)
    gathered = w.taps > 1 or w.guarded
    asked = [
        rounds * steps * n * (COPIED if b.grain * b.element >= 4 else PUT) / ISSUED for n, b in zip(vectors, w.fetched)
    ] or [0.0, 0.0]
    asked[0] *= GATHERED if gathered else 1.0
    products = rounds * steps * bm * bn * depth / speed(k, w)
    read = (bm * number(k, "across") + bn * number(k, "down")) * w.element / LINE if "down" in k else 0.0
    shared, l2 = rounds * steps * depth * read, rounds * steps * (bm + bn) * depth * w.element / rate(limits)
    waiting = ceil(waves) * steps * GPU_LATENCY / max(stages - 1, 1)
    finish, start = rounds * bm * bn / 64 * (1 + w.ops[3] / max(w.outputs, 1) * 2), ceil(waves) * FIXED
    least = shortest(w, limits) * clock(limits)
    busy = max(sum(asked) + products + finish, l2, shared)
    parts = [*asked, products, shared, waiting, finish, start, l2]
    return (
        *(log(x / least) for x in parts), log(threads * min(together, rounds) / 32), log(max(waves, 1e-3)),
        ceil(waves) / waves if waves > 1 else 1.0,
        *(log(n / threads) for n in vectors), *(ceil(n / threads) / (n / threads) if n else 1.0 for n in vectors),
        log(registers), log(wm), log(wn),
        up(w.cols, bn) * bn / max(w.cols, 1), up(w.rows, bm) * bm / max(w.rows, 1), log(steps),
        steps * depth * split / max(w.red, 1),
        log((busy + max(waiting - busy, 0.0) / 2 + start) / least), log(max(busy, waiting) / least),
        log(rounds * bm * bn * 4 / least) if split > 1 else -10.0, float(gathered),
    )  # fmt: skip


def shortest(w: Work, limits: Limits) -> float:
    """Seconds that the arithmetic or the traffic with memory takes at the peak."""
    peak = limits.matrix_flops if w.element == 2 else limits.flops
    return max(w.flops / peak, w.nbytes / limits.bandwidth) + limits.start


def _warp_tile(k: Knobs, bm: int, bn: int) -> tuple[float, float]:
    """Results of a warp, or of a thread where each computes its own."""
    if "down" in k:
        return bm / number(k, "down"), bn / number(k, "across")
    return number(k, "tm", 64), number(k, "tn", bn)


def _registers(w: Work, k: Knobs, block: tuple[int, int], depth: int, threads: int, own: bool) -> float:
    """Of a thread: sums, fragments of both factors, vectors on their way to shared memory, addresses."""
    fragments = sum(_warp_tile(k, *block)) * (w.element / 8 if "down" in k else 1) * 1.5
    sums = block[0] * block[1] * number(k, "slices")
    return (sums + (held(w, block, depth) if own else 0)) / threads + fragments + 30


def log(x: float) -> float:
    """log2, of zero and less that of something tiny."""
    return log2(x) if x > 1e-12 else -40.0
