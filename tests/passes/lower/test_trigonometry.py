"""Expansions of trigonometric and hyperbolic functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from support.expansion_checks import CHECKS, INF, NAN, Array, Function, grid, magnitudes


def quarters() -> Array:
    """The float32 numbers next to multiples of pi / 2, where sines, cosines and tangents are tiny or huge."""
    n = np.concatenate([np.arange(1, 1000), 3 ** np.arange(1, 38, dtype=np.float64)])
    return (n * (math.pi / 2)).astype(np.float32)


FUNCTIONS = [
    Function(
        "sin", math.sin, 1.5,
        (grid(-10, 10), grid(-1, 1), grid(-1e5, 1e5), magnitudes(-149, 127.99), quarters(),),
        ((0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN), (NAN, NAN), (1e-40, 1e-40), (-1e-45, -1e-45),),
        (math.pi / 4, -math.pi / 4,),
    ),
    Function(
        "cos", math.cos, 1.5,
        (grid(-10, 10), grid(-1, 1), grid(-1e5, 1e5), magnitudes(-149, 127.99), quarters(),),
        ((0.0, 1.0), (-0.0, 1.0), (INF, NAN), (-INF, NAN), (NAN, NAN), (-1e-40, 1.0),),
        (-math.pi / 4, -0.75 * math.pi,),
    ),
    Function(
        "tan", math.tan, 3.0,
        (grid(-10, 10), grid(-1, 1), grid(-1e5, 1e5), magnitudes(-149, 127.99), quarters(),),
        ((0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN), (NAN, NAN), (1e-40, 1e-40), (-1e-45, -1e-45),),
        (math.pi / 4, 0.75 * math.pi,),
    ),
    Function(
        "asin", math.asin, 2.5,
        (grid(-1, 1), grid(0.49, 0.51), grid(0.999, 1), magnitudes(-149, 0),),
        ((0.0, 0.0), (-0.0, -0.0), (1.0, 1.5707964), (-1.0, -1.5707964), (1.0000001, NAN), (-2.0, NAN), (INF, NAN),
        (NAN, NAN), (-1e-45, -1e-45),),
        (0.5, -0.5,),
    ),
    Function(
        "acos", math.acos, 2.5,
        (grid(-1, 1), grid(0.49, 0.51), grid(0.999, 1), grid(-1, -0.999), magnitudes(-149, 0),),
        ((0.0, 1.5707964), (-0.0, 1.5707964), (1.0, 0.0), (-1.0, 3.1415927), (1.0000001, NAN), (-2.0, NAN), (-INF, NAN),
        (NAN, NAN),),
    ),
    Function(
        "atan", math.atan, 3.0,
        (grid(-5, 5), grid(0.41, 0.42), grid(2.4, 2.43), magnitudes(-149, 127),),
        ((0.0, 0.0), (-0.0, -0.0), (INF, 1.5707964), (-INF, -1.5707964), (3.4e38, 1.5707964), (NAN, NAN),
        (1e-40, 1e-40), (-1e-45, -1e-45),),
        (0.41421357, 2.4142136,),
    ),
    Function(
        "sinh", math.sinh, 2.5,
        (grid(-89.4, 89.4), grid(-1, 1), magnitudes(-149, 6), grid(88.7, 89.4),),
        ((0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -INF), (89.42, INF), (-3.4e38, -INF), (NAN, NAN), (1e-40, 1e-40),
        (-1e-45, -1e-45),),
        (0.5 * math.log(2), 1e-4,),
    ),
    Function(
        "cosh", math.cosh, 2.0,
        (grid(-89.4, 89.4), grid(-1, 1), magnitudes(-149, 6), grid(88.7, 89.4),),
        ((0.0, 1.0), (-0.0, 1.0), (INF, INF), (-INF, INF), (-89.42, INF), (3.4e38, INF), (NAN, NAN), (1e-40, 1.0),),
        (0.5 * math.log(2), 1.5 * math.log(2),),
    ),
    Function(
        "asinh", math.asinh, 3.0,
        (grid(-10, 10), grid(-1, 1), magnitudes(-149, 127), grid(2.0**33 - 2**14, 2.0**33 + 2**14),),
        ((0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -INF), (3.4028234e38, 89.415985), (NAN, NAN), (1e-40, 1e-40),
        (-1e-45, -1e-45),),
        (2.0**33,),
    ),
    Function(
        "acosh", math.acosh, 3.0,
        (grid(1, 2), grid(1, 100), np.abs(magnitudes(0, 127)), grid(2.0**33 - 2**14, 2.0**33 + 2**14),),
        ((1.0, 0.0), (INF, INF), (-INF, NAN), (0.99, NAN), (0.0, NAN), (-1.0, NAN), (-6e4, NAN), (-8388609.0, NAN),
        (-3.4e38, NAN), (-3.0, NAN), (3.4028234e38, 89.415985), (NAN, NAN),),
        (2.0**33, math.sqrt(2),),
    ),
    Function(
        "atanh", math.atanh, 3.0,
        (grid(-0.9999, 0.9999), grid(-0.1, 0.1), -np.abs(magnitudes(-149, -0.001)), grid(9e-5, 2e-4),),
        ((0.0, 0.0), (-0.0, -0.0), (1.0, INF), (-1.0, -INF), (1.0000001, NAN), (-INF, NAN), (INF, NAN), (NAN, NAN),
        (1e-40, 1e-40), (-1e-45, -1e-45),),
        (1e-4, 0.5,),
    ),
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_expansions(function: Function, check: Callable[[Function], None]) -> None:
    check(function)
