"""Tiles of attention that fit a device, and their cost, fitted to 2,500 kernels of 76 problems on an H200."""

from __future__ import annotations

import itertools
from math import ceil
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates.attention.kernel import Shape
from dnnc.backends.cuda.templates.attention.mma import is_kept, rounded
from dnnc.backends.cuda.templates.attention.nest import Attention
from dnnc.ir.expr import Load, walk

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

SMALL = 16  # queries up to which clusters divide the keys
TENSOR = ((128, 4), (128, 8), (64, 2), (64, 4), (32, 2), (16, 1))  # rows over warps
ORDINARY = ((64, 4), (32, 4), (32, 2), (16, 2), (16, 1), (4, 1))
MORE_TENSOR, MORE_ORDINARY = ((256, 8), (64, 1), (32, 1)), ((128, 8), (64, 8), (32, 8), (16, 4), (8, 2), (8, 1))
THREADS = 256  # of a block at most
ADDRESSES = 12  # of copies that cost no registers
CLUSTERED = 0.9  # share of the SMs on which clusters find room


def shapes(a: Attention, target: GpuTarget, half: bool, wide: bool = False) -> list[Shape]:
    """All that fit the device and make sense for the sizes; `wide`: and those that have never been the fastest."""
    _, m, n, _, _ = a.sizes
    found = []
    more = () if not wide else MORE_TENSOR if half else MORE_ORDINARY
    rings = (2, 3, 4) if wide else (2, 3)
    for rows, warps in (*(TENSOR if half else ORDINARY), *more):
        if rows >= 2 * m and rows > (16 if half else 4):
            continue  # half of the rows would not exist
        for keys, stages, slices in itertools.product(
            (32, 64, 128) if half else (16, 32, 64, 128), rings, (1, 2, 4, 8)
        ):
            if rows == 4 and keys > 32:
                continue  # a step is short enough as it is, and longer ones run out of registers
            for parts in (1, 2, 4, 8) if target.has_tma and m <= SMALL else (1,):
                s = Shape(rows, warps, keys, stages, slices, parts)
                if (s.shares == 1 or keys * (s.shares - 1) < n) and _fits(a, target, s, half):
                    found.append(s)
    return found


def _fits(a: Attention, target: GpuTarget, s: Shape, half: bool) -> bool:
    if shared_bytes(a, s, half) > target.shared_bytes - 1024 or s.threads > THREADS:
        return False
    return registers(a, s, half) <= min(255, target.registers // s.threads)


def _widths(a: Attention, half: bool) -> tuple[int, int]:
    """Elements of a row of Q and K, and of V, as tiles hold them."""
    return (
        (rounded(a.depth.size), rounded(a.cols.size)) if half else (rounded(a.depth.size, 4), rounded(a.cols.size, 32))
    )


def registers(a: Attention, s: Shape, half: bool) -> int:
    """Of a thread, about: what 208 kernels with heads of 32 to 128 elements have, a few more where it matters."""
    depth, cols = _widths(a, half)
    wm = s.rows // s.warps
    if not half:
        return wm // 4 * (cols // 8 + s.keys // 8 + 8) + 48
    masked = wm * s.keys // 64 if is_masked(a) else 0
    copies = sum(
        s.keys * n // (256 * s.warps) for n in (depth, cols) if n & (n - 1)
    )  # of 16 bytes: each has an address where rows are no power of two
    addresses = max(copies - ADDRESSES, 0) * 13 // 5
    kept = depth // 4 if is_kept(a, s) else 0
    staged = (
        sum(x % 2 != 0 for x in (a.depth.size, a.cols.size)) * s.keys * max(depth, cols) // (64 * s.warps)
    )  # elements that no copy moves
    return wm // 16 * (cols // 2 + s.keys // 2 + kept + 20) + staged + masked + addresses + 40


def is_masked(a: Attention) -> bool:
    """Does anything in memory change the scores?"""
    return any(isinstance(x, Load) and x.buf is not a.dots for x in walk(a.score))


def shared_bytes(a: Attention, s: Shape, half: bool) -> int:
    depth, cols = _widths(a, half)
    size, pad = (2, 8) if half else (4, 4)
    rows, slots = s.rows * s.slices, s.keys * s.stages * s.slices
    tiles = (s.rows * (depth + pad) + slots * (depth + cols + 2 * pad)) * size
    return tiles + (rows * (cols + 8) * 4 if s.shares > 1 else 0) + (0 if half else rows * (s.keys + 4) * 4)


def cost(a: Attention, target: GpuTarget, s: Shape, half: bool) -> float:
    """Estimate cycles: rounds of blocks that wait for first tiles, step, and join what is divided."""
    batch, m, n, d, e = a.sizes
    blocks, size = batch * -(-m // s.rows) * s.parts, 2 if half else 4
    by_registers = target.registers // (max(registers(a, s, half), 64) * s.threads)
    together = max(
        1,
        min(
            by_registers, target.shared_per_sm // (shared_bytes(a, s, half) + 1024), target.threads_per_sm // s.threads
        ),
    )
    here = min(-(-blocks // target.sms), together)  # blocks of an SM at a time
    steps = -(-n // (s.keys * s.shares))
    tile = s.slices * s.keys * (d + e) * size
    rate = (
        24 if half and blocks >= target.sms else 48
    )  # bytes that an SM gets of the second-level cache in a cycle; less where all ask for it
    wait = 500 + (1000 if half and is_masked(a) else 0)  # the mask's elements are asked for when they are needed
    work = _tensor_work(a, s) if half else _ordinary_work(a, s)
    step = max(work * max(here * s.warps * s.slices / 4, 1), work * 1.4 + wait, here * tile / rate)
    first = here * (s.rows * d * size + tile * min(s.stages - 1, steps)) / rate
    join = (
        (300 + 64 * s.shares if s.shares > 1 else 0)
        + (1200 if s.parts > 1 else 0)
        + (150 * steps if s.slices > 1 else 0)
    )
    full = blocks / (target.sms * together * (CLUSTERED if s.parts > 1 else 1))
    end = _widths(a, half)[1] * s.rows / s.warps / 8
    return (ceil(full) if full < 3 else full + 0.5) * (3000 + first + steps * step + join + end)


def _tensor_work(a: Attention, s: Shape) -> float:
    """Cycles of a quarter SM for a warp's step: 8 per fragment product; reading and the rest overlap in part."""
    depth, cols = _widths(a, True)
    wm = s.rows // s.warps
    products = wm / 16 * s.keys / 8 * (depth + cols) / 16
    reads = s.keys / 16 * (depth + cols) / 16 + (0 if is_kept(a, s) else wm / 16 * depth / 16)
    return products * 8 + reads * 8 + (wm * s.keys / 32 * 7 + products + 100) * 0.36


def _ordinary_work(a: Attention, s: Shape) -> float:
    depth, cols = _widths(a, False)
    wm = s.rows / s.warps
    reads = s.keys * (depth + cols) / 128 * (1 + 2 * wm / s.keys)
    return wm * s.keys * (depth + cols) / 32 * 0.8 + wm * s.keys / 32 * 14 + 150 + reads * 6
