"""Shapes of products with decoded weights that fit a device, and their estimated time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates.contraction.decoded_kernel import FLIGHT, HELD, ROWS, TILE, Decoded, Shape
from dnnc.backends.cuda.templates.reduction.partial import SPLITS
from dnnc.passes.rewrites.channels_last import DEPTH

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

RINGS = 2  # rounds of codes in shared memory, where sums of more tiles take the registers
FLIGHTS = (FLIGHT, 8)  # those that are weighed
WARPS = 16  # of a block at most
# what follows is fitted to 3,000 times of kernels of 39 products on two H200
CLOCK = 1.755  # GHz
SHARE_OF_COPIES = 0.91  # of the rate of copies, with which all SMs read codes
LATENCY, START = 1040, 400  # cycles of each wave of blocks, and of a launch
LATE = 860  # cycles of a round that is asked for behind the wait for the kernel ahead of this one, of two at most
RING = 860  # that codes take longer by shared memory
STEP, SERIAL = 84, 22  # of a step of a warp, and steps that memory does not hide
EARLY = 0.72  # of the codes of the first round, which the kernel ahead of this one hides
UNEVEN = 0.2  # of a block that the busiest SM has more than its share, where it has room for one
CLUSTER = {1: 0, 2: 1740, 4: 2000, 8: 2400}  # cycles until blocks of a cluster have met
FEW = 0.75  # blocks for each SM, of which few ask for little at once
FASTEST = 46  # bytes a cycle that an SM gets of memory where others ask for none
DEEPEST = 4  # rounds of codes in shared memory, of sums whose tiles registers hold
ROUND = 1920  # cycles from asking for the codes of a round until they are used up, of a busy memory
X_RATE = 59  # bytes a cycle that an SM gets of the second-level cache
BUSY = 57  # cycles that a scheduler of an SM needs to decode 512 bytes of codes and multiply them with 8 rows
FULL, LONE = 30, 0.55  # warps of an SM that keep its schedulers busy; the power of the time that fewer take longer
SUMS = 111  # bytes of sums that a block adds up in a cycle


def shapes(d: Decoded, target: GpuTarget) -> list[Shape]:
    """All divisions of columns and sum that fill warps."""
    _, m, n, k = d.c.sizes
    tiles = -(-m // ROWS)
    out = []
    splits = SPLITS if target.has_tma else (1,)
    for strips, slices, split, most in product((1, 2, 4, 8), (1, 2, 4, 8, 16), splits, FLIGHTS):
        s = Shape(strips * d.strip, slices, split, steps_of(d, most))
        rounds = k // DEPTH // s.flight
        if n % s.cols or strips * slices > WARPS or slices * split > rounds or (split > 1 and tiles * ROWS % split):
            continue
        if tiles > HELD and rounds >= slices * split * RINGS:
            s = replace(s, stages=RINGS)
        each, few = _each(d, s), n // s.cols * split < target.sms * FEW
        made = [s] if most == FLIGHT or (each == 1 and tiles == 1 and s.flight == most) else []
        if most == FLIGHT and tiles <= HELD and few and 1 < each <= DEEPEST:
            made.append(replace(s, stages=each))
        for x in made:
            fits = _shared_bytes(d, x) <= target.shared_bytes
            if fits and strips * slices * 32 * _registers(d, x) <= target.registers:
                out.append(x)
    return out


def _shared_bytes(d: Decoded, s: Shape) -> int:
    rows = 0 if d.norm is None else d.norm.rows.size * d.c.red.size * 2 + 1024
    beside = sum(d.strip // TILE * 2 * x.dtype.bytes for x in (d.scale, d.zeros) if x is not None)
    ring = s.stages * s.flight * s.cols // d.strip * s.slices * 32 * (16 + beside)
    return s.slices * -(-d.c.rows.size // ROWS) * ROWS * (s.cols + 8) * 4 + rows + ring


def _registers(d: Decoded, s: Shape) -> int:
    """Of a thread, about: codes, elements of x and sums of so many tiles of rows; of one round it holds no next one."""
    tiles, each = -(-d.c.rows.size // ROWS), _each(d, s)
    sums, x = 8 * d.strip // TILE, 16 if tiles <= HELD else 8
    once = 16 if each == 1 and tiles <= HELD else 0
    ahead = max(s.flight - FLIGHT, 0) * 4 * (1 if each == 1 else 1 + tiles)
    codes, share = (16, 7) if tiles <= HELD else (48, 4)
    return codes + tiles * (sums + x) * share // 4 + (16 if d.zeros is not None else 0) + ahead - once


def _each(d: Decoded, s: Shape) -> int:
    """Rounds of a warp."""
    return -(-(d.c.red.size // DEPTH // s.flight) // (s.slices * s.split))


def steps_of(d: Decoded, most: int) -> int:
    """Steps of a round: a power of two that divides the sum, and blocks unless these have more."""
    n, steps, block = most, d.c.red.size // DEPTH, d.block // DEPTH
    while n > 1 and (steps % n or (d.block < d.c.red.size and block % n and n % block)):
        n //= 2
    return n


def cycles(d: Decoded, s: Shape, target: GpuTarget) -> float:
    """Estimated cycles of the busiest multiprocessor."""
    _, m, n, k = d.c.sizes
    tiles, rounds = -(-m // ROWS), _each(d, s)
    warps = s.cols // d.strip * s.slices
    blocks = n // s.cols * s.split
    threads = warps * 32
    by_registers = target.registers // (threads * _registers(d, s))
    together = max(1, min(by_registers, target.threads_per_sm // threads, target.blocks_per_sm))
    most = -(-blocks // int(target.sms * SPLITS[s.split]))
    at_once = min(most, together)
    waves, rest = divmod(most, at_once)
    codes, x = s.cols * k // s.split * d.bits // 8, m * k // s.split * 2
    flying = warps * s.flight * max(s.stages, 1) * 512
    hidden = EARLY * min(flying, codes) if d.early else 0

    def read(many: int, of: float) -> float:
        """Cycles of so many blocks on an SM that read `of` bytes of codes."""
        return of / min(FASTEST, many * flying / ROUND) if many else 0

    each = read(at_once, at_once * (waves * codes - hidden)) + read(rest, rest * codes)
    if together > most:
        each *= 1 + UNEVEN / most
    memory = max(blocks * codes * CLOCK / (SHARE_OF_COPIES * target.bandwidth), each)
    decoding: float = codes / 512 * BUSY * (1 + tiles) / 8 * max(1, FULL / (warps * at_once)) ** LONE
    others = most * (x / X_RATE * (0.5 if s.cols > d.strip else 1) + decoding)
    ring = s.stages > 0 and tiles <= HELD
    late: float = RING * ring
    if tiles == 1:
        late += STEP * min(rounds * s.flight, SERIAL) + (LATE * min(rounds - 1, 2) if d.early and not ring else 0)
    end = s.slices * s.split * tiles * ROWS * s.cols * 4 / SUMS
    return START + late + max(memory, others) + -(-most // at_once) * (LATENCY + end + CLUSTER[s.split])
