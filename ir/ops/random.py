"""Random bits as a pure function of a key: Philox 4x32-10, a generator without state (Salmon et al., 2011).

Element k of the result, in row-major order, is word k % 4 of the block whose counter is k // 4. So results do not
depend on how the work is split, and two ops with different keys are independent streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.dtype import DType, f32, f64, u32, u64
from dnnc.ir.expr import Expr, cast, const, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import PURE, OpDef, require
from dnnc.ir.ops.common import Array, dim, sample
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # what the key's words grow by in each round
MASK = 0xFFFFFFFF
TAU = 6.283185307179586

Dims = tuple[Dim, ...]


def _bits_type(key: TensorType, *, shape: Dims) -> TensorType:
    require(key.dtype is u32 and key.shape == (2,), "a key is u32[2]; got {}", key)
    return TensorType(u32, shape)


def _bits(key: Tensor, *, shape: Dims) -> Tensor:
    def element(*i: Expr) -> Expr:
        flat: Expr = const(0)
        for j, n in zip(i, shape):
            flat = flat * n + j
        block, lane = flat // 4, flat % 4
        low, high = cast(cast(block, u64), u32), cast(call("shr", cast(block, u64), const(32, u64)), u32)
        words = _rounds([low, high, const(0, u32), const(0, u32)], [key[0], key[1]])
        return select(lane.eq(0), words[0], select(lane.eq(1), words[1], select(lane.eq(2), words[2], words[3])))

    return te.compute(shape, u32, element)


def _rounds(c: list[Expr], k: list[Expr]) -> list[Expr]:
    for _ in range(ROUNDS):
        (h0, l0), (h1, l1) = _wide_product(MULTIPLIERS[0], c[0]), _wide_product(MULTIPLIERS[1], c[2])
        c = [h1 ^ c[1] ^ k[0], l1, h0 ^ c[3] ^ k[1], l0]
        k = [k[0] + WEYL[0], k[1] + WEYL[1]]
    return c


def _wide_product(m: int, x: Expr) -> tuple[Expr, Expr]:
    """The upper and the lower half of a product of 32-bit words."""
    p = const(m, u64) * cast(x, u64)
    return cast(call("shr", p, const(32, u64)), u32), cast(p, u32)


def philox(counter: Array, key: Array) -> Array:
    """The four words [..., 4] of blocks whose counters are the four words [..., 4]."""
    c = [counter[..., j].astype(np.uint64) for j in range(4)]
    k = [int(key[0]), int(key[1])]
    for _ in range(ROUNDS):
        p0, p1 = c[0] * np.uint64(MULTIPLIERS[0]), c[2] * np.uint64(MULTIPLIERS[1])
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            p1 & np.uint64(MASK),
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            p0 & np.uint64(MASK),
        ]
        k = [(k[0] + WEYL[0]) & MASK, (k[1] + WEYL[1]) & MASK]
    return np.stack(c, -1).astype(np.uint32)


def _bits_numpy(key: Array, *, shape: Any) -> Array:
    count = int(np.prod(shape, dtype=np.int64))
    block = np.arange(-(-count // 4), dtype=np.uint64)
    zero = np.zeros_like(block)
    counters = np.stack([block & np.uint64(MASK), block >> np.uint64(32), zero, zero], -1)
    return philox(counters, key).reshape(-1)[:count].reshape(shape)


def _bits_flops(key: TensorType, *, shape: Dims) -> Dim:
    return dim(const(product(shape)) * (6 * ROUNDS))


# --- distributions ----------------------------------------------------------------------------------------------------


def _floats_type(key: TensorType, *, shape: Dims, dtype: DType = f32) -> TensorType:
    _bits_type(key, shape=shape)
    require(dtype in (f32, f64), "random numbers are f32 or f64 (cast them to others); got {}", dtype)
    return TensorType(dtype, shape)


def _part(b: Any, v: Any, k: int) -> Any:
    """v[k]"""
    rest = v.type.shape[1:]
    return b.reshape(
        b.slice(v, starts=(k, *(0,) * len(rest)), steps=(1,) * (1 + len(rest)), shape=(1, *rest)), shape=rest
    )


def _uniform(b: Any, key: Any, *, shape: Dims, dtype: DType) -> Any:
    """In [0, 1): 24 random bits, of f64 53 (27 of a first and 26 of a second word)."""
    if dtype is f32:
        top = b.shift_right(b.random_bits(key, shape=shape), b.constant(8, dtype=u32))
        return b.mul(b.cast(top, to=f32), 2.0**-24)
    words = b.random_bits(key, shape=(2, *shape))
    high = b.cast(b.shift_right(_part(b, words, 0), b.constant(5, dtype=u32)), to=f64)
    low = b.cast(b.shift_right(_part(b, words, 1), b.constant(6, dtype=u32)), to=f64)
    return b.mul(b.add(b.mul(high, 2.0**26), low), 2.0**-53)


def _normal(b: Any, key: Any, *, shape: Dims, dtype: DType) -> Any:
    """Box and Muller: sqrt(-2 log(1 - u)) cos(2 pi v) of two uniform numbers."""
    both = b.random_uniform(key, shape=(2, *shape), dtype=dtype)
    u, v = _part(b, both, 0), _part(b, both, 1)
    radius = b.sqrt(b.mul(b.log(b.sub(b.constant(1.0, dtype=dtype), u)), -2.0))
    return b.mul(radius, b.cos(b.mul(v, TAU)))


RANDOM_OPS: tuple[OpDef, ...] = (
    OpDef(
        "random_bits",
        _bits_type,
        _bits,
        reference=_bits_numpy,
        flops=_bits_flops,
        traits=PURE,
        samples=(
            sample("u32[2]", shape=(3, 7), domain=(0, 4e9)),
            sample("u32[2]", shape=(), domain=(0, 9)),
            sample("u32[2]", shape=(65,)),
        ),
    ),
    OpDef(
        "random_uniform",
        _floats_type,
        decompose=_uniform,
        traits=PURE,
        samples=(
            sample("u32[2]", shape=(4, 5), domain=(0, 4e9)),
            sample("u32[2]", shape=(9,), dtype=f64, domain=(0, 4e9)),
        ),
    ),
    OpDef(
        "random_normal",
        _floats_type,
        decompose=_normal,
        traits=PURE,
        samples=(
            sample("u32[2]", shape=(4, 5), domain=(0, 4e9)),
            sample("u32[2]", shape=(), dtype=f64, domain=(0, 4e9)),
        ),
    ),
)
