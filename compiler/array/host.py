"""Results of functions that run on the host: what they read has a history, which they do not continue.

An array that depends on one that requires a gradient stays tracked through such a function, by a call that cannot be
differentiated: `backward` then says which function cut the history, where it would else give a gradient without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from dnnc.array.core import Array, from_buffer, taken_apart
from dnnc.array.lazy import Call
from dnnc.array.promotion import kind_of
from dnnc.array.structure import TRACKED
from dnnc.ir.errors import GradientError
from dnnc.ir.op import OpDef


def contents(x: Array) -> np.ndarray[Any, Any]:
    """What an array holds, on the host."""
    return x._contents()


def computed(function: str, data: Any, *given: Array) -> Array:
    """What a function computed on the host of the arrays `given`, as an array where the first of them lives."""
    made = from_buffer(np.asarray(data), given[0].device)
    inputs = tuple(p for x in given for p in x._parts)
    if kind_of(made.dtype) in "fc" and any(p.tracked for p in inputs):
        x = made._pairs or made._parts[0]
        x.tracked, x.origin = TRACKED, Call(_record(function), inputs, {}, (x.type,))
        if made._pairs is not None:
            made._set(taken_apart(x))
            made._pairs = x
    return made


@cache
def _record(function: str) -> OpDef:
    """An op that no graph runs: it stands in histories alone."""

    def vjp(b: Any, n: Any, cotangents: Sequence[Any], needed: Sequence[int]) -> Mapping[int, Any]:
        raise GradientError(
            f"dnnc.array.{function} runs on the host and has no derivative; apply it to dnnc.stop_gradient(x), or "
            "compute what it gives from other functions"
        )

    return OpDef(function.replace(".", "_"), lambda *types: types, host=lambda *arrays: arrays, vjp=vjp)
