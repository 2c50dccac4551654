"""Stochastic rounding of float32 to a 16-bit float: up with the probability of the fraction, so that means are kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.array.core import Array, array_of
from dnnc.array.elementwise import abs as absolute
from dnnc.array.elementwise import floor, isfinite, where
from dnnc.array.lazy import apply
from dnnc.array.promotion import DType
from dnnc.ir.dtype import f32, u32

WIDE = np.dtype(np.float32)
# bits of a mantissa, exponent of the smallest normal number
NARROW = {"float16": (10, -14), "bfloat16": (7, -126)}


def stochastically_rounded(x: Array, dtype: DType, key: Array) -> Array:
    """A float32 array as one of a 16-bit float type, rounded to one of its two neighbours.

    Args:
        x: float32.
        dtype: float16 or bfloat16.
        key: uint32[2]; equal keys give equal results on all targets.

    Returns:
        The array of `dtype`. The expectation of an element is `x`, within 2**-24 of the distance of its neighbours.
    """
    bits, lowest = NARROW[dtype.name]
    dropped = 23 - bits
    size = absolute(x)
    below = _bits(size) // (1 << dropped) * (1 << dropped)  # bits of the neighbour towards zero
    power = below // (1 << 23) * (1 << 23)  # those of the power of two of its exponent
    normal = _float(below)
    spacing = _float(power) * 2.0**-bits
    least = 2.0 ** (lowest - bits)  # the spacing of subnormal numbers
    if lowest > -126:
        small = size < 2.0**lowest
        steps = floor(where(small, size * (1 / least), 0.0))
        normal, spacing = where(small, steps * least, normal), where(small, least, spacing)
    fraction = (size - normal) / spacing  # exact: all are multiples of the spacing of float32
    draws = array_of(apply("random_uniform", key._parts[0], shape=x.shape, dtype=f32))
    rounded = normal + where(draws < fraction, spacing, 0.0)
    return where(isfinite(x) & (x != 0), where(x < 0, -rounded, rounded), x).astype(dtype)


def _bits(x: Array) -> Array:
    return array_of(apply("bit_cast", x._parts[0], to=u32))


def _float(bits: Array) -> Any:
    return array_of(apply("bit_cast", bits._parts[0], to=f32))
