"""When the outputs of a model count as right, on any device.

Floats are compared by their largest error over the largest expected number. A quantized model rounds to 8 bits in
between: two engines that sum in another order fall on neighbouring steps here and there, so nearly all elements, not
all, have to lie within one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.tools.peers import error

Array = np.ndarray[Any, Any]
LEVELS = 256  # of 8 bits
SHARE = 0.99  # of a quantized model's elements, within one step
FAR = 0.1  # no element of a quantized model may be off by more


def largest_error(got: Sequence[Array], want: Sequence[Array]) -> float:
    """Over all outputs; infinite where their number, a shape or a special value differs."""
    return (
        max((error(np.asarray(g), np.asarray(w)) for g, w in zip(got, want)), default=0.0)
        if len(got) == len(want)
        else float("inf")
    )


def share_within_a_step(got: Sequence[Array], want: Sequence[Array]) -> float:
    """The share of elements that are at most one step of 8 bits away, in the output where it is lowest."""
    shares = [1.0]
    for g, w in zip(got, want):
        x, y = np.asarray(g, np.float64), np.asarray(w, np.float64)
        if x.shape != y.shape:
            return 0.0
        finite = np.isfinite(y)
        near = np.abs(x[finite] - y[finite]) <= step_of(y[finite]) * (1 + 1e-5)
        shares.append(float(np.mean(near)) if near.size else 1.0)
    return min(shares)


def step_of(x: Array) -> float:
    """The distance of neighbouring numbers where there are at most 256 of them; else what 8 bits with a sign make of
    the largest one.
    """
    levels = np.unique(x)
    if 1 < levels.size <= LEVELS:
        return float(np.diff(levels).min())
    return float(np.abs(x).max(initial=0.0)) * 2 / (LEVELS - 2)


def is_right(largest: float, share: float, bound: float, quantized: bool) -> bool:
    """By `largest_error` and `share_within_a_step`; `bound`: of the largest error of a model in floats."""
    return largest <= FAR and share >= SHARE if quantized else largest <= bound
