"""NumPy meanings of warp matrix instructions on [threads, lanes], laid out as PTX `mma.sync`, `ldmatrix`."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any

_LANE = np.arange(32)
_GROUP, _IN_GROUP = _LANE[:, None] // 4, _LANE[:, None] % 4
# (row, column) of every register of every lane, [32, registers]
_A_ROW, _A_COL = _GROUP + np.array([0, 0, 8, 8, 0, 0, 8, 8]), 2 * _IN_GROUP + np.array([0, 1, 0, 1, 8, 9, 8, 9])
_B_ROW, _B_COL = 2 * _IN_GROUP + np.array([0, 1, 8, 9]), _GROUP + np.zeros(4, np.int64)
_D_ROW, _D_COL = _GROUP + np.array([0, 0, 8, 8]), 2 * _IN_GROUP + np.array([0, 1, 0, 1])
_BYTE = np.arange(4)  # of a register
_A8_ROW, _A8_COL = _A_ROW[:, 0::2].repeat(4, 1), np.concatenate([4 * _IN_GROUP + _BYTE + k for k in (0, 0, 16, 16)], 1)
_B8_ROW, _B8_COL = np.concatenate([4 * _IN_GROUP + _BYTE + k for k in (0, 16)], 1), _GROUP + np.zeros(8, np.int64)


def _warps(a: Array) -> Array:
    return a.reshape(-1, 32, *a.shape[1:])


def mma_m16n8k16(d: Array, a: Array, b: Array) -> Array:
    """d + a @ b: d is 16 x 8 in 4 registers a lane, a 16 x 16 in 8, b 16 x 8 in 4. Products and sums in float32."""
    warps = len(d) // 32
    left, right = np.zeros((warps, 16, 16), np.float32), np.zeros((warps, 16, 8), np.float32)
    left[:, _A_ROW, _A_COL] = _warps(a)
    right[:, _B_ROW, _B_COL] = _warps(b)
    return (_warps(d) + (left @ right)[:, _D_ROW, _D_COL]).reshape(d.shape).astype(np.float32)


def mma_m16n8k32(d: Array, a: Array, b: Array) -> Array:
    """d + a @ b: d is 16 x 8 in 4 registers a lane, a 16 x 32 in 16 elements of a byte, b 32 x 8 in 8. Sums of
    integers are exact modulo 2^32, those of floats in float32.
    """
    warps, kind = len(d) // 32, np.asarray(d).dtype
    left, right = np.zeros((warps, 16, 32), kind), np.zeros((warps, 32, 8), kind)
    left[:, _A8_ROW, _A8_COL] = _warps(a).astype(kind)
    right[:, _B8_ROW, _B8_COL] = _warps(b).astype(kind)
    return (_warps(d) + (left @ right)[:, _D_ROW, _D_COL]).reshape(d.shape).astype(kind)


_A32_COL = np.concatenate([2 * _IN_GROUP + np.array([0, 1]) + k for k in (0, 8, 16, 24)], 1)  # of the second factor


def mma_sp_m16n8k32(d: Array, a: Array, b: Array, places: Array, part: Array) -> Array:
    """d + a @ b: d is 16 x 8 in 4 registers a lane, a 16 x 32 in 8, b 32 x 8 in 8. Two of each four neighbours of a row
    of a are there; lanes 2 * part and the next of each four say which, as in `wgmma_sp`.
    """
    warps = len(d) // 32
    left, right = np.zeros((warps, 16, 16), np.float32), np.zeros((warps, 32, 8), np.float32)
    left[:, _A_ROW, _A_COL] = _warps(a)
    right[:, _A32_COL, _GROUP + np.zeros(8, np.int64)] = _warps(b)
    lanes = 2 * int(np.ravel(part)[0]) + np.arange(2)
    word = np.broadcast_to(places, (len(d),)).astype(np.uint32).reshape(warps, 8, 4)[:, :, lanes]
    halves = np.stack([word & 0xFFFF, word >> 16], 1)  # warp, half, g, lanes
    nibbles = (halves[..., None] >> np.arange(0, 16, 4)).reshape(warps, 16, 8)  # of 8 groups
    at = np.stack([nibbles & 3, nibbles >> 2 & 3], -1).astype(np.int64)
    if (at[..., 0] >= at[..., 1]).any():
        raise ValueError("mma_sp_m16n8k32: places of two elements of a group must rise")
    whole = np.zeros((warps, 16, 8, 4), np.float32)
    np.put_along_axis(whole, at, left.reshape(warps, 16, 8, 2), -1)
    made = _warps(d) + (whole.reshape(warps, 16, 32) @ right)[:, _D_ROW, _D_COL]
    return made.reshape(d.shape).astype(np.float32)


NIBBLES = 4 * np.array([0, 4, 1, 5, 2, 6, 3, 7])  # shifts of the codes of a word, in the order in which they come apart


def halves(codes: Array, zero: Array, dtype: Any) -> Array:
    """Codes less a zero point, in 16 bits: eight of 4 bits of a word, its first half and its second in turn, or eight
    bytes as they are.
    """
    q = np.asarray(codes)
    q = q >> NIBBLES.astype(np.uint32) & 15 if q.dtype == np.uint32 else q
    return (q.astype(np.float32) - np.asarray(zero).astype(np.float32)).astype(dtype)


def words(x: Array) -> Array:
    """Neighbouring lanes of 8 or 16 bits as words of 32: [threads, lanes], of one word [threads]."""
    w = np.ascontiguousarray(x).view(np.uint32)
    return w[..., 0] if w.shape[-1] == 1 else w


def of_words(w: Array, dtype: Any) -> Array:
    """The lanes whose `words` these are."""
    w = np.asarray(w)
    return np.ascontiguousarray(w if w.ndim > 1 else w.reshape(-1, 1)).view(dtype)


def ldmatrix_x4(rows: Array) -> Array:
    """Load four matrices of 8 rows of 16 bytes: lane 8*m + r addresses row r of matrix m; each lane gets 4 bytes of
    each: one element of 32 bits, two of 16, four of 8.
    """
    lanes = rows.shape[-1]
    own = lanes // 4
    m = _warps(rows).reshape(-1, 4, 8, lanes)  # warp, matrix, row, column
    return np.stack([m[:, k // own, _LANE // 4, own * (_LANE % 4) + k % own] for k in range(lanes)], -1).reshape(
        rows.shape
    )


def ldmatrix_x4_trans(rows: Array) -> Array:
    """As ldmatrix_x4 with each matrix transposed."""
    m = _warps(rows).reshape(-1, 4, 8, 8)
    return np.stack([m[:, k // 2, 2 * (_LANE % 4) + k % 2, _LANE // 4] for k in range(8)], -1).reshape(rows.shape)


def shfl_xor(x: Array, mask: Array) -> Array:
    """What the lane `lane ^ mask` of the same warp holds."""
    return x[np.arange(len(x)) ^ mask]


def shfl_up(x: Array, n: Array) -> Array:
    """What the lane n below holds; the lowest n lanes keep their own."""
    lane = np.arange(len(x)) % 32
    return x[np.arange(len(x)) - np.where(lane >= n, n, 0)]


def shfl_down(x: Array, n: Array) -> Array:
    """What the lane n above holds; the highest n lanes keep their own."""
    lane = np.arange(len(x)) % 32
    return x[np.arange(len(x)) + np.where(lane + n < 32, n, 0)]


def shfl(x: Array, lane: Array) -> Array:
    """What a lane of the same warp holds."""
    return x[np.arange(len(x)) // 32 * 32 + lane % 32]


def mma_m16n8k8(d: Array, a: Array, b: Array) -> Array:
    """d + a @ b in TF32 (10 mantissa bits, ties away). Lane registers: 4 of d and of a (16 x 8), 2 of b (8 x 8)."""
    return _mma_m16n8k8(d, _tf32(a), _tf32(b))


def mma_m16n8k8_cut(d: Array, a: Array, b: Array) -> Array:
    """The same of operands that are cut off after 10 mantissa bits."""
    return _mma_m16n8k8(d, _tf32(a, 0), _tf32(b, 0))


def _mma_m16n8k8(d: Array, a: Array, b: Array) -> Array:
    warps = len(d) // 32
    left, right = np.zeros((warps, 16, 8), np.float32), np.zeros((warps, 8, 8), np.float32)
    left[:, _GROUP + np.array([0, 8, 0, 8]), _IN_GROUP + np.array([0, 0, 4, 4])] = _warps(a)
    right[:, _IN_GROUP + np.array([0, 4]), _GROUP + np.zeros(2, np.int64)] = _warps(b)
    return (_warps(d) + (left @ right)[:, _D_ROW, _D_COL]).reshape(d.shape).astype(np.float32)


def _tf32(x: Array, half_unit: int = 0x1000) -> Array:
    """Float32 numbers with 10 mantissa bits. `half_unit`: of the last one, for rounding; 0 cuts off."""
    finite = np.isfinite(x)
    bits = (np.ascontiguousarray(x, np.float32).view(np.uint32) + np.uint32(half_unit)) & np.uint32(0xFFFFE000)
    return np.where(finite, bits.view(np.float32), x)
