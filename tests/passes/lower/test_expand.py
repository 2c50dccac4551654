"""The pass that expands intrinsics: which it expands, where, and what it joins."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.lower.expand import EXPANSIONS, QUARTERS, decompose
from support.expansion_checks import INF, NAN, TABLES, Array, apply, calls, grid, kernel, ulps


def raised(x: Array, exponent: float, supported: tuple[str, ...]) -> tuple[Array, set[str]]:
    """x^exponent, and the intrinsics that this takes."""
    n = x.size
    k = parse_kernel(
        f"def k(x: f32[{n}], y: f32[{n}]):\n    for i in range({n}):\n        y[i] = pow(x[i], {exponent})\n"
    )
    k, y = decompose(k, supported), np.full_like(x, NAN)
    run_kernel(verify_kernel(k), {"x": x, "y": y})
    return y, calls(k)


@pytest.mark.parametrize("exponent", [k / 4 for k in sorted(QUARTERS)])
def test_powers_of_quarters_are_products_of_roots(exponent: float) -> None:
    x = np.exp2(np.random.default_rng(0).uniform(-120, 120, 2000)).astype(np.float32)
    x = np.concatenate([x, -x[:100]])
    got, used = raised(x, exponent, ("recip",))
    assert not used & {"shl", "floor", "pow"}
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), np.full(x.size, exponent))
    normal = (np.abs(want) < 3e38) & (np.abs(want) > 2e-38)
    off = np.where(normal, ulps(np.where(normal, got, 1), np.where(normal, want, 1)), 0)
    assert normal.sum() > 400 and off.max() <= 3.0, f"{x[off.argmax()]!r} ** {exponent} is off by {off.max():.2f} ulp"
    assert np.array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.parametrize("exponent", [k / 4 for k in sorted(QUARTERS)])
def test_powers_of_quarters_of_special_values(exponent: float) -> None:
    x = np.array([0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, -2.0, 1e-40, 3.4e38, -3.4e38], np.float32)
    got, _ = raised(x, exponent, ("recip",))
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), np.full(x.size, exponent)).astype(np.float32)
        differ = np.abs(got - want)
    small = (np.abs(want) < 2.0**-126) & (np.abs(got) < 2.0**-126)
    close = small | (differ <= 4e-7 * np.abs(want)) | (got == want) | (np.isnan(got) & np.isnan(want))
    right = close & ((np.signbit(got) == np.signbit(want)) | np.isnan(want))
    assert right.all(), [
        f"{a!r} ** {exponent} is {c!r}, not {d!r}" for a, c, d in zip(x[~right], got[~right], want[~right])
    ]


def test_other_powers_and_strict_numerics_take_logarithms() -> None:
    x = np.array([2.0, 3.0], np.float32)
    assert (
        "shl" in raised(x, 0.75, ())[1]
        and "shl" in raised(x, 0.7, ("recip",))[1]
        and "shl" in raised(x, 2.75, ("recip",))[1]
    )


def test_what_the_target_spells_stays() -> None:
    k = parse_kernel("def k(x: f32[8], y: f32[8]):\n    for i in range(8):\n        y[i] = exp(x[i]) + tanh(x[i])\n")
    assert "tanh" in calls(decompose(k, supported=("tanh",))) and "exp" not in calls(decompose(k, supported=("tanh",)))
    assert show_kernel(decompose(k, supported=tuple(EXPANSIONS))) == show_kernel(k)


def test_other_types_stay() -> None:
    text = "def k(x: f64[8], y: f64[8]):\n    for i in range(8):\n        y[i] = exp(x[i])\n"
    assert show_kernel(decompose(parse_kernel(text))) == text


def test_nested_calls_and_guards_are_reached() -> None:
    k = parse_kernel(
        """\
def k(n: dim[1, 8], x: f32[8], y: f32[8]):
    for i in range(8):
        if i < n:
            a: f32 = exp(log(x[i]))
            y[i] = tanh(a)
"""
    )
    done = decompose(k)
    assert not calls(done) & set(EXPANSIONS)
    x, y = np.linspace(0.5, 4, 8, dtype=np.float32), np.zeros(8, np.float32)
    run_kernel(verify_kernel(done), {"n": 5, "x": x, "y": y})
    np.testing.assert_allclose(y[:5], np.tanh(x[:5].astype(np.float64)), rtol=4e-7)
    assert not y[5:].any()


def scaled(x: Array) -> Array:
    return apply("exp", x, supported=TABLES)


def test_exp_where_targets_scale_by_powers_of_two() -> None:
    ends = np.array([88.73, 1e5, 2e38, 3.4e38, -3.4e38, 1e30, -1e30, -104.0, -110.0], np.float32)
    np.testing.assert_array_equal(scaled(ends), np.array([INF, INF, INF, INF, 0, INF, 0, 0, 0], np.float32))
    least = np.float32(-87.33654)
    edge = scaled(np.array([least, np.nextafter(least, np.float32(-99)), -88.0, -95.0], np.float32))
    assert edge[0] >= 2.0**-126 and not edge[1:].any()


def test_a_negated_operand_of_the_scaled_exp_is_compared_as_it_is() -> None:
    """The negation is left to multiplications, which take it for free; the numbers are those of the negated operand."""
    x = np.concatenate([grid(-100, 100), np.array([INF, -INF, NAN, 0.0, -0.0, 87.33654, 87.33655], np.float32)])
    text = show_kernel(kernel("exp", x.size))
    k = decompose(parse_kernel(text.replace("exp(x[i])", "exp(-0.0 - x[i])")), TABLES)
    assert re.search(r"select\(87\.33\S* < x\[i\]", show_kernel(k)), show_kernel(k)
    y = np.full_like(x, NAN)
    run_kernel(verify_kernel(k), {"x": x, "y": y})
    np.testing.assert_array_equal(y, scaled(-x))
