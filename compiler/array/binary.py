"""Binary products: signs of numbers as bits of words, 32 in each, and sums of their products by counts of bits."""

from __future__ import annotations

from typing import Any

from dnnc.array.core import Array, array_of
from dnnc.array.creation import asarray
from dnnc.array.lazy import apply
from dnnc.ir.dtype import u32
from dnnc.ir.errors import InputError
from dnnc.ir.ops.binary import WORD


def sign_words(x: Any) -> Array:
    """Signs of rows [..., n] as uint32 words [..., ceil(n / 32)]: bits are 1 for negative numbers, the lowest first."""
    return array_of(apply("sign_words", asarray(x)._parts[0]))


def binary_matmul(x: Any, y: Any, bits: int) -> Array:
    """Sums of products of signs, int32 [m, n]: words x [m, k] and y [k, n] of `bits` signs, 1 or -1 each.

    The words of a matrix of columns are `sign_words(w.T).T`.
    """
    a, b = (asarray(v)._parts[0] for v in (x, y))
    words = a.type.dtype is b.type.dtype is u32 and a.type.rank == b.type.rank == 2
    if not words or a.type.shape[1] != b.type.shape[0] or a.type.shape[1] != -(-bits // WORD):
        raise InputError(
            f"binary_matmul: expected words uint32 [m, k] and [k, n] of {bits} signs, got {a.type} and {b.type}"
        )
    made: Array = bits - 2 * array_of(apply("differing_bits", a, b))
    return made
