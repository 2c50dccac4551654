"""Effects of Hopper (sm_90a): names and operands for `intrinsics.py`'s table, wgmma shapes and layouts.

Data moves and products run beside the threads: the copy engine (TMA) and the tensor cores read and write on their own,
through the *async proxy*. Threads learn of it by mbarriers (copies into shared memory), by `bulk_wait` (copies out of
it) and by `wgmma_wait`. Threads' writes become visible to the engines by `fence_async()` before the barrier.

    mbar_init(b, arrivals)           one thread; then mbar_fence() and a barrier before anybody uses b
    mbar_arrive(b)                   each active thread arrives once
    mbar_expect(b, bytes)            arrive, and let the phase wait for so many bytes of copies as well
    mbar_wait(b, parity)             until the phase of that parity is complete
    tma_prefetch()                   the copy engine fetches what it must know of the buffers of this kernel's copies
    tma_load(to, from, rows, b)      one thread: a box of rows x lanes; what lies outside of the source is 0
    tma_im2col(to, from, rows, b, pixel, tap, sizes, strides, dilations, pads before)
                                     one thread: a row of `to` for each of so many neighbouring pixels of a
                                     convolution's result of these sizes, from this pixel of the image on that `from`
                                     names in a buffer [n, *axes, channels]: lanes channels of the pixel that the tap of
                                     the filter meets there; what lies outside of the image is 0. Each of the last six
                                     are as many numbers as there are axes, 1 to 3
    tma_fetch(from, rows)            one thread: a box that will be read soon is brought into the L2 cache
    tma_store(to, from, rows)        one thread: the box that lies at `from`; what lies outside of the destination is
                                     dropped
    bulk_commit()                    close a group of stores
    bulk_wait_read(n), bulk_wait(n)  all but the newest n groups of this thread have read their source (have arrived)
    fence_async()                    what this thread wrote to shared memory so far, the engines may read
    stmatrix_x4(to, v)               a warp: four 8 x 8 matrices; lane 8*m + r gives the address of row r of matrix m, v
                                     holds 2 elements of each
    stmatrix_x4_trans(to, v)         the same with each matrix transposed
    wgmma(acc, a, b, keep)           128 threads: acc = (keep != 0 ? acc : 0) + a @ b^T, asynchronously; a is 64 x k, b
                                     is n x k; k is 32 bytes. Bytes of integers are added up in i32, exactly
    wgmma_sp(acc, a, b, places, keep, part)
                                     the same with two of each four neighbours of a row of a: a is 64 x 32 bytes of
                                     them, b is n x 64 bytes of 16-bit floats. `places`, a u32 of each thread, has 2
                                     bits for each element, the lower place first: lanes 4*g + 2*part + h of warp w
                                     have row 16*w + g in the lower half and row 16*w + g + 8 in the upper one, of
                                     groups 4*h to 4*h + 3. `part` is the number 0 or 1
    wgmma_kn(acc, a, b, keep)        the same as wgmma with b lying as k x n: blocks of 64 columns one after the other,
                                     [block, k, 64]
    wgmma_fence()                    registers of this thread are ready for the next group of products
    wgmma_commit()                   close a group of products
    wgmma_wait(n[, acc])             all but the newest n are complete; acc, which they computed, may be used from here
                                     on
    named_barrier(id, threads)       a barrier of a part of the block, whole warps
    cluster_barrier()                a barrier of all threads of all blocks of a cluster
    cluster_arrive(), cluster_wait() its two halves: what a thread does ahead of the first is done for others behind
                                     the second
    peer(addr, rank)                 a value: what lies at this address of a shared buffer in block `rank` of the
                                     cluster
    peer_store(addr, rank, v)        v goes to this address of a shared buffer in block `rank`; that block reads it
                                     behind a cluster_barrier()
    peer_send(addr, rank, v, b)      the same on its own, beside the threads; the mbarrier b of block `rank` counts its
                                     bytes, in no order with mbar_expect. Who waits for the phase knows what the sender
                                     knew
    first_level_cache()              the kernel lives from this cache: as little shared memory as it can do with
    resident(n)                      registers are to suffice for n blocks of this kernel on a multiprocessor
    regs_give(n), regs_take(n)       128 threads leave registers to others, or take them: n each from here on
"""

from __future__ import annotations

import numpy as np

EFFECTS = (
    "mbar_init", "mbar_fence", "mbar_arrive", "mbar_expect", "mbar_wait", "tma_prefetch", "tma_load", "tma_im2col",
    "tma_fetch", "tma_store", "bulk_commit", "bulk_wait_read",
    "bulk_wait", "fence_async", "stmatrix_x4", "stmatrix_x4_trans",
    "wgmma", "wgmma_sp", "wgmma_kn", "wgmma_fence", "wgmma_commit", "wgmma_wait",
    "named_barrier", "cluster_barrier", "cluster_arrive", "cluster_wait",
    "peer_store", "peer_send", "first_level_cache", "resident", "regs_give", "regs_take",
)  # fmt: skip

GROUP = 128  # threads of a warp group
WGMMA_ROWS = 64  # rows of one product
SWIZZLE_ROWS = 8  # the pattern of a swizzle repeats after so many rows of 128 bytes


def wgmma_positions(
    n: int,
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int64]], np.ndarray[tuple[int, int], np.dtype[np.int64]]]:
    """(row, column) of a warp group's accumulators, each [128, n / 2]: register 4*j + 2*h + e of a 64 x n tile."""
    t, r = np.arange(GROUP)[:, None], np.arange(n // 2)[None, :]
    row = 16 * (t // 32) + t % 32 // 4 + 8 * (r // 2 % 2)
    column = 8 * (r // 4) + 2 * (t % 4) + r % 2
    return row, column
