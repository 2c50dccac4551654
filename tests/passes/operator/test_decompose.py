"""Expansions of elementary functions: interpreted in float32 against Python's functions in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dnnc.ir.expr import Op, walk
from dnnc.ir.operator import pieces
from dnnc.ir.operator.interp import run_kernel
from dnnc.ir.operator.stmt import Kernel, exprs, walk_stmts
from dnnc.ir.operator.text import parse_kernel, show_kernel
from dnnc.ir.operator.verify import verify_kernel
from dnnc.passes.operator.decompose import EXPANSIONS, QUARTERS, decompose

Array = np.ndarray[Any, Any]
INF, NAN = math.inf, math.nan
LARGEST_EXP = float(np.nextafter(np.float32(88.72284), np.float32(0)))  # the largest float32 whose exp is one
SMALLEST_EXP = float(np.float32(-86.989))  # the smallest, nearly, whose exp is not taken for 0: 2^-125.5


def kernel(name: str, n: int, lanes: int = 1) -> Kernel:
    at = f"{lanes}*i:+{lanes}" if lanes > 1 else "i"
    return parse_kernel(f"def k(x: f32[{n}], y: f32[{n}]):\n    for i in range({n // lanes}):\n        y[{at}] = {name}(x[{at}])\n")


def apply(name: str, x: Array, lanes: int = 1, spelled: tuple[str, ...] = ()) -> Array:
    y = np.full_like(x, NAN)
    k = decompose(kernel(name, x.size, lanes), spelled)
    assert name not in calls(k) and ("piece" in calls(k)) == bool(spelled)
    run_kernel(verify_kernel(k), {"x": x, "y": y})
    return y


def calls(k: Kernel) -> set[str]:
    """The intrinsics that a kernel uses."""
    return {x.name for f in k.funcs for s in walk_stmts(f.body) for e in exprs(s) for x in walk(e) if isinstance(x, Op)}


def grid(low: float, high: float, points: int = 4000) -> Array:
    """Points at equal distances with jitter, and both ends."""
    x = np.linspace(low, high, points) + np.random.default_rng(0).uniform(-0.5, 0.5, points) * (high - low) / points
    return np.concatenate([np.clip(x, low, high), [low, high]]).astype(np.float32)


def magnitudes(low: float, high: float) -> Array:
    """Both signs of numbers of all magnitudes between 2^low and 2^high."""
    x = np.exp2(grid(low, high, 3000).astype(np.float64))
    return np.concatenate([x, -x]).astype(np.float32)


def quarters() -> Array:
    """The float32 numbers next to multiples of pi / 2, where sines, cosines and tangents are tiny or huge."""
    n = np.concatenate([np.arange(1, 1000), 3 ** np.arange(1, 38, dtype=np.float64)])
    return (n * (math.pi / 2)).astype(np.float32)


TABLES = ("piece", "scale")  # of CPUs with AVX-512
WAYS = [*((name, ()) for name in EXPANSIONS if name != "pow"), ("exp", TABLES), ("tanh", TABLES)]

# where each function is compared, and by how many units in the last place it may be off. Where the device fuses multiply and add, exp stays
# below 2 and log below 1; the interpreter rounds the product as well.
REGIONS: dict[str, tuple[Callable[[float], float], float, list[Array]]] = {
    "exp": (math.exp, 2.5, [grid(SMALLEST_EXP, LARGEST_EXP), grid(-1, 1), magnitudes(-40, 3)]),
    "log": (math.log, 1.0, [np.abs(magnitudes(-126, 127)), grid(0.5, 2), grid(0.99, 1.01), np.abs(magnitudes(-149, -126))]),
    "erf": (math.erf, 2.0, [grid(-5, 5), grid(-1, 1), magnitudes(-100, 1), grid(0.91, 0.93)]),
    "tanh": (math.tanh, 2.0, [grid(-11, 11), grid(-1, 1), magnitudes(-126, 3), grid(0.34, 0.35)]),
    "log1p": (math.log1p, 1.5, [np.abs(magnitudes(-149, 127)), grid(-0.999, 1), grid(0.4, 0.5), -np.abs(magnitudes(-149, -1)), grid(1, 1000)]),
    "expm1": (math.expm1, 1.5, [grid(-100, LARGEST_EXP), grid(-1, 1), magnitudes(-149, 6), grid(0.34, 0.35)]),
    "sin": (math.sin, 1.5, [grid(-10, 10), grid(-1, 1), grid(-1e5, 1e5), magnitudes(-149, 127.99), quarters()]),
    "cos": (math.cos, 1.5, [grid(-10, 10), grid(-1, 1), grid(-1e5, 1e5), magnitudes(-149, 127.99), quarters()]),
    "tan": (math.tan, 3.0, [grid(-10, 10), grid(-1, 1), grid(-1e5, 1e5), magnitudes(-149, 127.99), quarters()]),
    "asin": (math.asin, 2.5, [grid(-1, 1), grid(0.49, 0.51), grid(0.999, 1), magnitudes(-149, 0)]),
    "acos": (math.acos, 2.5, [grid(-1, 1), grid(0.49, 0.51), grid(0.999, 1), grid(-1, -0.999), magnitudes(-149, 0)]),
    "atan": (math.atan, 3.0, [grid(-5, 5), grid(0.41, 0.42), grid(2.4, 2.43), magnitudes(-149, 127)]),
    "sinh": (math.sinh, 2.5, [grid(-89.4, 89.4), grid(-1, 1), magnitudes(-149, 6), grid(88.7, 89.4)]),
    "cosh": (math.cosh, 2.0, [grid(-89.4, 89.4), grid(-1, 1), magnitudes(-149, 6), grid(88.7, 89.4)]),
    "asinh": (math.asinh, 3.0, [grid(-10, 10), grid(-1, 1), magnitudes(-149, 127), grid(2.0**33 - 2**14, 2.0**33 + 2**14)]),
    "acosh": (math.acosh, 3.0, [grid(1, 2), grid(1, 100), np.abs(magnitudes(0, 127)), grid(2.0**33 - 2**14, 2.0**33 + 2**14)]),
    "atanh": (math.atanh, 3.0, [grid(-0.9999, 0.9999), grid(-0.1, 0.1), -np.abs(magnitudes(-149, -0.001)), grid(9e-5, 2e-4)]),
}


def ulps(got: Array, want: Array) -> Array:
    """Distances in units in the last place of the float32 nearest to the wanted number."""
    return np.abs(got.astype(np.float64) - want) / np.spacing(np.abs(want.astype(np.float32))).astype(np.float64)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "spelled"), WAYS)
def test_error(name: str, spelled: tuple[str, ...]) -> None:
    f, bound, regions = REGIONS[name]
    for x in regions:
        want = np.array([f(v) for v in x.tolist()])
        off = ulps(apply(name, x, spelled=spelled), want)
        assert off.max() <= bound, f"{name}({x[off.argmax()]!r}) is off by {off.max():.2f} ulp"


SPECIAL: dict[str, list[tuple[float, float]]] = {
    "exp": [(0.0, 1.0), (-0.0, 1.0), (INF, INF), (-INF, 0.0), (NAN, NAN), (1e-40, 1.0), (-1e-40, 1.0), (88.72284, INF), (88.73, INF), (3.4e38, INF), (-87.34, 0.0), (-3.4e38, 0.0)],
    "log": [(0.0, -INF), (-0.0, -INF), (INF, INF), (-INF, NAN), (NAN, NAN), (1.0, 0.0), (-1e-40, NAN), (-1.0, NAN)],
    "erf": [(0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (NAN, NAN), (4.0, 1.0), (-4.0, -1.0), (3.4e38, 1.0)],
    "tanh": [(0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (NAN, NAN), (10.0, 1.0), (-10.0, -1.0), (-3.4e38, -1.0), (1e-40, 1e-40), (-1e-45, -1e-45)],
    "log1p": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, NAN), (NAN, NAN), (-1.0, -INF), (-1.5, NAN), (3.4028234e38, 88.72284), (1e-40, 1e-40), (-1e-45, -1e-45)],
    "expm1": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -1.0), (NAN, NAN), (88.73, INF), (3.4e38, INF), (-20.0, -1.0), (-3.4e38, -1.0), (1e-40, 1e-40), (-1e-45, -1e-45)],
    "sin": [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN), (NAN, NAN), (1e-40, 1e-40), (-1e-45, -1e-45)],
    "cos": [(0.0, 1.0), (-0.0, 1.0), (INF, NAN), (-INF, NAN), (NAN, NAN), (-1e-40, 1.0)],
    "tan": [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN), (NAN, NAN), (1e-40, 1e-40), (-1e-45, -1e-45)],
    "asin": [(0.0, 0.0), (-0.0, -0.0), (1.0, 1.5707964), (-1.0, -1.5707964), (1.0000001, NAN), (-2.0, NAN), (INF, NAN), (NAN, NAN), (-1e-45, -1e-45)],
    "acos": [(0.0, 1.5707964), (-0.0, 1.5707964), (1.0, 0.0), (-1.0, 3.1415927), (1.0000001, NAN), (-2.0, NAN), (-INF, NAN), (NAN, NAN)],
    "atan": [(0.0, 0.0), (-0.0, -0.0), (INF, 1.5707964), (-INF, -1.5707964), (3.4e38, 1.5707964), (NAN, NAN), (1e-40, 1e-40), (-1e-45, -1e-45)],
    "sinh": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -INF), (89.42, INF), (-3.4e38, -INF), (NAN, NAN), (1e-40, 1e-40), (-1e-45, -1e-45)],
    "cosh": [(0.0, 1.0), (-0.0, 1.0), (INF, INF), (-INF, INF), (-89.42, INF), (3.4e38, INF), (NAN, NAN), (1e-40, 1.0)],
    "asinh": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -INF), (3.4028234e38, 89.415985), (NAN, NAN), (1e-40, 1e-40), (-1e-45, -1e-45)],
    "acosh": [(1.0, 0.0), (INF, INF), (-INF, NAN), (0.99, NAN), (0.0, NAN), (-1.0, NAN), (-3.0, NAN), (3.4028234e38, 89.415985), (NAN, NAN)],
    "atanh": [(0.0, 0.0), (-0.0, -0.0), (1.0, INF), (-1.0, -INF), (1.0000001, NAN), (-INF, NAN), (INF, NAN), (NAN, NAN), (1e-40, 1e-40), (-1e-45, -1e-45)],
}  # fmt: skip


@pytest.mark.parametrize(("name", "spelled"), WAYS)
def test_special_values(name: str, spelled: tuple[str, ...]) -> None:
    x, want = (np.array(column, np.float32) for column in zip(*SPECIAL[name]))
    got = apply(name, x, spelled=spelled)
    same = (np.isnan(got) & np.isnan(want)) | ((got == want) & (np.signbit(got) == np.signbit(want)))
    assert same.all(), f"{name} of {x[~same]} is {got[~same]} instead of {want[~same]}"


def powers(x: Array, y: Array) -> Array:
    """x^y as expanded, of as many numbers as fill vectors."""
    n, lanes = x.size, 64
    text = f"def k(x: f32[{n}], y: f32[{n}], z: f32[{n}]):\n    for i in range({n // lanes}):\n"
    k = decompose(parse_kernel(f"{text}        z[{lanes}*i:+{lanes}] = pow(x[{lanes}*i:+{lanes}], y[{lanes}*i:+{lanes}])\n"))
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
    assert normal.sum() > 3000 and off.max() <= bound, f"{x[off.argmax()]!r} ** {y[off.argmax()]!r} is off by {off.max():.2f} ulp"


def test_powers_of_special_values() -> None:
    """Those of C's pow, results that are not normal numbers taken for zero."""
    values = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, INF, -INF, NAN, 1e-40, -1e-40, 3e38, -1e30, 2.0**24 + 2, 2.5, -0.75]
    values += [-8.0, 127.0, 128.0, -126.0, -127.0, 1.0 - 2**-24, 1.0 + 2**-23, -1.0 - 2**-23, 1e9, -1e9, 3.4e38, -3.4e38]
    x, y = (v.ravel().astype(np.float32) for v in np.meshgrid(values, values))
    got = powers(x, y)
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
        want = np.where(np.abs(want) < 2.0**-126, np.copysign(np.float32(0), want), want)
        close = (np.abs(got - want) <= 4e-7 * np.abs(want)) | (got == want) | (np.isnan(got) & np.isnan(want))
    right = close & ((np.signbit(got) == np.signbit(want)) | np.isnan(want))
    assert right.all(), [f"{a!r} ** {b!r} is {c!r}, not {d!r}" for a, b, c, d in zip(x[~right], y[~right], got[~right], want[~right])]


def raised(x: Array, exponent: float, spelled: tuple[str, ...]) -> tuple[Array, set[str]]:
    """x^exponent, and the intrinsics that this takes."""
    n = x.size
    k = parse_kernel(f"def k(x: f32[{n}], y: f32[{n}]):\n    for i in range({n}):\n        y[i] = pow(x[i], {exponent})\n")
    k, y = decompose(k, spelled), np.full_like(x, NAN)
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
    assert right.all(), [f"{a!r} ** {exponent} is {c!r}, not {d!r}" for a, c, d in zip(x[~right], got[~right], want[~right])]


def test_other_powers_and_strict_numerics_take_logarithms() -> None:
    x = np.array([2.0, 3.0], np.float32)
    assert "shl" in raised(x, 0.75, ())[1] and "shl" in raised(x, 0.7, ("recip",))[1] and "shl" in raised(x, 2.75, ("recip",))[1]


def test_denormal_results() -> None:
    tiny = np.array([1e-40, -1e-40, 1e-45], np.float32)
    np.testing.assert_allclose(apply("erf", tiny).astype(np.float64), tiny.astype(np.float64) * 2 / math.sqrt(math.pi), rtol=0, atol=1.5e-45)
    assert apply("exp", np.array([SMALLEST_EXP, -86.99], np.float32)).tolist() == [pytest.approx(2.0**-125.5, rel=2e-3), 0.0]


@pytest.mark.parametrize(("name", "spelled"), WAYS)
def test_monotone_between_pieces(name: str, spelled: tuple[str, ...]) -> None:
    """Where two pieces of the definition meet there is no step back of more than the error."""
    edges = {
        "erf": [0.92],
        "tanh": [0.4995 * math.log(2), 0.9995 * math.log(2)],
        "exp": [0.5 * math.log(2)],
        "log": [math.sqrt(0.5), 2.0**-126],
        "log1p": [math.sqrt(2) - 1, math.sqrt(0.5) - 1, 1.0, 1e-8],
        "expm1": [0.5 * math.log(2), 1e-8],
        "sin": [math.pi / 4, -math.pi / 4],
        "cos": [-math.pi / 4, -0.75 * math.pi],
        "tan": [math.pi / 4, 0.75 * math.pi],
        "asin": [0.5, -0.5],
        "acos": [],  # falls
        "atan": [0.41421357, 2.4142136],
        "sinh": [0.5 * math.log(2), 1e-4],
        "cosh": [0.5 * math.log(2), 1.5 * math.log(2)],
        "asinh": [2.0**33],
        "acosh": [2.0**33, math.sqrt(2)],
        "atanh": [1e-4, 0.5],
    }
    if spelled:
        edges["tanh"] = [pieces.LIMIT, *((k + 0.5) * pieces.WIDTH for k in range(31))]
        edges["exp"] = [(k + 0.5) * math.log(2) / 32 for k in range(-33, 33)]
    for edge in edges[name]:
        x = np.sort(np.float32(edge) * (1 + np.arange(-64, 64) * 2.0**-23))
        y = apply(name, x.astype(np.float32), spelled=spelled)
        assert (np.diff(y) >= -2 * np.spacing(np.abs(y[:-1]))).all()


@pytest.mark.parametrize(("name", "spelled"), WAYS)
def test_vectors_compute_the_same(name: str, spelled: tuple[str, ...]) -> None:
    x = np.concatenate([grid(-9, 9, 300), np.array([v for v, _ in SPECIAL[name]], np.float32), np.zeros(16, np.float32)])
    x = x[: x.size // 16 * 16]
    assert np.array_equal(apply(name, x, 1, spelled), apply(name, x, 16, spelled), equal_nan=True)


@pytest.mark.parametrize(("name", "spelled"), WAYS)
def test_what_is_left_has_a_spelling_everywhere(name: str, spelled: tuple[str, ...]) -> None:
    k = decompose(kernel(name, 8), spelled)
    assert not calls(k) & {*EXPANSIONS, *TABLES} - {*spelled}
    assert show_kernel(parse_kernel(show_kernel(k))) == show_kernel(k)


def test_what_the_target_spells_stays() -> None:
    k = parse_kernel("def k(x: f32[8], y: f32[8]):\n    for i in range(8):\n        y[i] = exp(x[i]) + tanh(x[i])\n")
    assert "tanh" in calls(decompose(k, spelled=("tanh",))) and "exp" not in calls(decompose(k, spelled=("tanh",)))
    assert show_kernel(decompose(k, spelled=tuple(EXPANSIONS))) == show_kernel(k)


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
    return apply("exp", x, spelled=TABLES)


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
