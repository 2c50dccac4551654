"""Expansions of exponentials, logarithms, powers, erf and tanh."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dnnc.ir.loops import pieces
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.lower.expand import decompose
from support.expansion_checks import CHECKS, INF, NAN, TABLES, Array, Function, apply, calls, grid, magnitudes, ulps

LARGEST_EXP = float(np.nextafter(np.float32(88.72284), np.float32(0)))  # the largest float32 whose exp is one
SMALLEST_EXP = float(np.float32(-86.989))  # the smallest, nearly, whose exp is not taken for 0: 2^-125.5

# Where a device fuses multiply and add, exp stays below 2 ulp and log below 1; the interpreter rounds the product as
# well.
EXPANDED = {f.name: f for f in [
    Function(
        "exp", math.exp, 2.5,
        (grid(SMALLEST_EXP, LARGEST_EXP), grid(-1, 1), magnitudes(-40, 3),),
        ((0.0, 1.0), (-0.0, 1.0), (INF, INF), (-INF, 0.0), (NAN, NAN), (1e-40, 1.0), (-1e-40, 1.0), (88.72284, INF),
        (88.73, INF), (3.4e38, INF), (-87.34, 0.0), (-3.4e38, 0.0),),
        (0.5 * math.log(2),),
    ),
    Function(
        "log", math.log, 1.0,
        (np.abs(magnitudes(-126, 127)), grid(0.5, 2), grid(0.99, 1.01), np.abs(magnitudes(-149, -126)),),
        ((0.0, -INF), (-0.0, -INF), (INF, INF), (-INF, NAN), (NAN, NAN), (1.0, 0.0), (-1e-40, NAN), (-1.0, NAN),),
        (math.sqrt(0.5), 2.0**-126,),
    ),
    Function(
        "erf", math.erf, 2.0,
        (grid(-5, 5), grid(-1, 1), magnitudes(-100, 1), grid(0.91, 0.93),),
        ((0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (NAN, NAN), (4.0, 1.0), (-4.0, -1.0), (3.4e38, 1.0),),
        (0.92,),
    ),
    Function(
        "tanh", math.tanh, 2.0,
        (grid(-11, 11), grid(-1, 1), magnitudes(-126, 3), grid(0.34, 0.35),),
        ((0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (NAN, NAN), (10.0, 1.0), (-10.0, -1.0), (-3.4e38, -1.0),
        (1e-40, 1e-40), (-1e-45, -1e-45),),
        (0.4995 * math.log(2), 0.9995 * math.log(2),),
    ),
    Function(
        "log1p", math.log1p, 1.5,
        (np.abs(magnitudes(-149, 127)), grid(-0.999, 1), grid(0.4, 0.5), -np.abs(magnitudes(-149, -1)), grid(1, 1000),),
        ((0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, NAN), (NAN, NAN), (-1.0, -INF), (-1.5, NAN),
        (3.4028234e38, 88.72284), (1e-40, 1e-40), (-1e-45, -1e-45),),
        (math.sqrt(2) - 1, math.sqrt(0.5) - 1, 1.0, 1e-8,),
    ),
    Function(
        "expm1", math.expm1, 1.5,
        (grid(-100, LARGEST_EXP), grid(-1, 1), magnitudes(-149, 6), grid(0.34, 0.35),),
        ((0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -1.0), (NAN, NAN), (88.73, INF), (3.4e38, INF), (-20.0, -1.0),
        (-3.4e38, -1.0), (1e-40, 1e-40), (-1e-45, -1e-45),),
        (0.5 * math.log(2), 1e-8,),
    ),
]}  # fmt: skip
FUNCTIONS = [
    *EXPANDED.values(),
    replace(EXPANDED["exp"], supported=TABLES, edges=tuple((k + 0.5) * math.log(2) / 32 for k in range(-33, 33))),
    replace(EXPANDED["tanh"], supported=TABLES, edges=(pieces.LIMIT, *((k + 0.5) * pieces.WIDTH for k in range(31)))),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_expansions(function: Function, check: Callable[[Function], None]) -> None:
    check(function)


def powers(x: Array, y: Array) -> Array:
    """x^y as expanded, of as many numbers as fill vectors."""
    n, lanes = x.size, 64
    text = f"def k(x: f32[{n}], y: f32[{n}], z: f32[{n}]):\n    for i in range({n // lanes}):\n"
    k = decompose(
        parse_kernel(f"{text}        z[{lanes}*i:+{lanes}] = pow(x[{lanes}*i:+{lanes}], y[{lanes}*i:+{lanes}])\n")
    )
    assert "pow" not in calls(k)
    z = np.full_like(x, NAN)
    run_kernel(verify_kernel(k), {"x": x, "y": y, "z": z})
    return z


@pytest.mark.parametrize(
    ("low", "high", "most", "bound"),
    [(2**-126, 2**127, 3, 1.0), (1e-3, 1e3, 13, 1.1), (0.5, 2, 300, 3.5), (0.7, 1.42, 400, 3.5), (0.9, 1.1, 1000, 1.1)],
)
def test_powers(low: float, high: float, most: float, bound: float) -> None:
    rng = np.random.default_rng(0)
    x = np.exp(rng.uniform(math.log(low), math.log(high), 6400)).astype(np.float32)
    y = rng.uniform(-most, most, 6400).astype(np.float32)
    want = np.power(x.astype(np.float64), y)
    normal = (want < 3e38) & (want > 2e-38)
    off = np.where(normal, ulps(powers(x, y), np.where(normal, want, 1)), 0)
    assert normal.sum() > 3000 and off.max() <= bound, (
        f"{x[off.argmax()]!r} ** {y[off.argmax()]!r} is off by {off.max():.2f} ulp"
    )


def test_powers_of_special_values() -> None:
    """Those of C's pow, results that are not normal numbers taken for zero."""
    values = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -0.5,
        2.0,
        -2.0,
        3.0,
        -3.0,
        INF,
        -INF,
        NAN,
        1e-40,
        -1e-40,
        3e38,
        -1e30,
        2.0**24 + 2,
        2.5,
        -0.75,
    ]
    values += [
        -8.0,
        127.0,
        128.0,
        -126.0,
        -127.0,
        1.0 - 2**-24,
        1.0 + 2**-23,
        -1.0 - 2**-23,
        1e9,
        -1e9,
        3.4e38,
        -3.4e38,
    ]
    x, y = (v.ravel().astype(np.float32) for v in np.meshgrid(values, values))
    got = powers(x, y)
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
        want = np.where(np.abs(want) < 2.0**-126, np.copysign(np.float32(0), want), want)
        close = (np.abs(got - want) <= 4e-7 * np.abs(want)) | (got == want) | (np.isnan(got) & np.isnan(want))
    right = close & ((np.signbit(got) == np.signbit(want)) | np.isnan(want))
    assert right.all(), [
        f"{a!r} ** {b!r} is {c!r}, not {d!r}" for a, b, c, d in zip(x[~right], y[~right], got[~right], want[~right])
    ]


def test_denormal_results() -> None:
    tiny = np.array([1e-40, -1e-40, 1e-45], np.float32)
    np.testing.assert_allclose(
        apply("erf", tiny).astype(np.float64), tiny.astype(np.float64) * 2 / math.sqrt(math.pi), rtol=0, atol=1.5e-45
    )
    assert apply("exp", np.array([SMALLEST_EXP, -86.99], np.float32)).tolist() == [
        pytest.approx(2.0**-125.5, rel=2e-3),
        0.0,
    ]
