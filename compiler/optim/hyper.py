"""Hyperparameters of a group as numbers: Python's in define-by-run, float64 scalars of the program in a compiled step.

What a rule computes of numbers alone, such as Adam's bias corrections, is computed in float64 once for each group, and
rounded to the dtype of the parameters at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from dnnc.array.core import Array
from dnnc.array.elementwise import sqrt as array_sqrt
from dnnc.array.elementwise import where
from dnnc.array.promotion import DType

STRIDE = (
    2  # elements from one number of a program's vector to the next: 16 bytes, where any kernel can read it as it is
)
Number = Any  # a Python number, or a float64 array without axes


def flat_numbers(group: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, float]:
    """The numeric options of a group: `lr`, and `beta1` and `beta2` of `betas`. Flags, None and texts are none."""
    found: dict[str, float] = {}
    for name in names:
        value = group[name]
        if isinstance(value, (tuple, list)):
            found.update((f"{name.removesuffix('s')}{k}", float(v)) for k, v in enumerate(value, 1) if v is not None)
        elif not isinstance(value, (bool, str, type(None))):
            found[name] = float(value)
    return found


class Hyper:
    """The numbers of one group in one step, by attribute. `step` counts from 1."""

    def __init__(self, numbers: Mapping[str, Number]) -> None:
        self.numbers = dict(numbers)
        self._at: dict[DType, SimpleNamespace] = {}

    def __getattr__(self, name: str) -> Number:
        try:
            return self.numbers[name]
        except KeyError:
            raise AttributeError(name) from None

    def at(self, dtype: DType) -> SimpleNamespace:
        """The numbers as operands beside arrays of a dtype."""
        if dtype not in self._at:
            self._at[dtype] = SimpleNamespace(
                **{n: v.astype(dtype) if isinstance(v, Array) else v for n, v in self.numbers.items()}
            )
        return self._at[dtype]


def sqrt(x: Number) -> Number:
    return array_sqrt(x) if isinstance(x, Array) else math.sqrt(x)


def choose(test: Any, then: Number, other: Number) -> Number:
    """`then if test else other`"""
    if not isinstance(test, Array):
        return then if test else other
    return where(test, *(v if isinstance(v, Array) else np.float64(v) for v in (then, other)))
