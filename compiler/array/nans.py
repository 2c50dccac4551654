"""Reductions that leave NaN out. Gradients of elements that are NaN are 0."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dnnc.array.core import Array, cast
from dnnc.array.elementwise import conj, divide, isnan, logical_not, multiply, real, sqrt, subtract, where
from dnnc.array.manipulation import Axes
from dnnc.array.promotion import float_of, kind_of
from dnnc.array.searching import argmax, argmin
from dnnc.array.statistical import all as all_
from dnnc.array.statistical import count_nonzero, prod, sum
from dnnc.array.statistical import max as max_
from dnnc.array.statistical import min as min_

INEXACT = "fc"  # kinds of dtypes that have NaN


def _without(x: Array, value: float) -> Array:
    """The array with a number in the place of NaN."""
    return where(isnan(x), value, x) if kind_of(x.dtype) in INEXACT else x


def _count(x: Array, axis: Axes, keepdims: bool, dtype: Any) -> Array:
    """How many elements are not NaN."""
    return cast(count_nonzero(logical_not(isnan(x)), axis=axis, keepdims=keepdims), dtype)


def nansum(x: Array, /, axis: Axes = None, dtype: Any = None, *, keepdims: bool = False) -> Array:
    """Sum of the elements that are not NaN."""
    return sum(_without(x, 0), axis=axis, dtype=dtype, keepdims=keepdims)


def nanprod(x: Array, /, axis: Axes = None, dtype: Any = None, *, keepdims: bool = False) -> Array:
    """Product of the elements that are not NaN."""
    return prod(_without(x, 1), axis=axis, dtype=dtype, keepdims=keepdims)


def nanmean(x: Array, /, axis: Axes = None, *, keepdims: bool = False) -> Array:
    """Mean of the elements that are not NaN; NaN where there are none."""
    y = cast(x, float_of(x.dtype))
    return divide(nansum(y, axis, keepdims=keepdims), _count(y, axis, keepdims, y.dtype))


def nanvar(x: Array, /, axis: Axes = None, *, correction: float = 0, keepdims: bool = False) -> Array:
    """Variance of the elements that are not NaN; NaN where `correction` leaves none of them."""
    y = cast(x, float_of(x.dtype))
    d = where(isnan(y), 0, subtract(_without(y, 0), nanmean(y, axis, keepdims=True)))
    total = real(sum(multiply(d, conj(d)), axis=axis, keepdims=keepdims))
    left = subtract(_count(y, axis, keepdims, total.dtype), correction)
    return divide(total, where(left > 0, left, math.nan))


def nanstd(x: Array, /, axis: Axes = None, *, correction: float = 0, keepdims: bool = False) -> Array:
    """Standard deviation of the elements that are not NaN."""
    return sqrt(nanvar(x, axis, correction=correction, keepdims=keepdims))


def nanmax(x: Array, /, axis: Axes = None, *, keepdims: bool = False) -> Array:
    """Largest of the elements that are not NaN; NaN where there are none."""
    return _extreme(max_, -math.inf, x, axis, keepdims)


def nanmin(x: Array, /, axis: Axes = None, *, keepdims: bool = False) -> Array:
    """Smallest of the elements that are not NaN; NaN where there are none."""
    return _extreme(min_, math.inf, x, axis, keepdims)


def _extreme(reduce: Any, value: float, x: Array, axis: Axes, keepdims: bool) -> Array:
    made: Array = reduce(_without(x, value) if kind_of(x.dtype) == "f" else x, axis=axis, keepdims=keepdims)
    return where(all_(isnan(x), axis=axis, keepdims=keepdims), math.nan, made) if kind_of(x.dtype) == "f" else made


def nanargmax(x: Array, /, axis: int | None = None, *, keepdims: bool = False) -> Array:
    """Index of the first largest element that is not NaN, 0 where all are."""
    return argmax(_without(x, -math.inf) if np.dtype(x.dtype).kind != "c" else x, axis, keepdims=keepdims)


def nanargmin(x: Array, /, axis: int | None = None, *, keepdims: bool = False) -> Array:
    """Index of the first smallest element that is not NaN, 0 where all are."""
    return argmin(_without(x, math.inf) if np.dtype(x.dtype).kind != "c" else x, axis, keepdims=keepdims)
