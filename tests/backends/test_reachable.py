"""The second look of the kernel check: what rounding reaches is right, everything else is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dnnc.backends.reachable import Sample, bounds, judge, noise
from dnnc.driver import compile
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from support.devices import install
from support.faults import campaign, cancelling
from support.random_graphs import random_graph

MASKED = "add(where(m, s, low), where(n, s, low))"  # -inf in float32 where both masks are set, a number in float64
RIGHT = {
    "mask": f"s: f32[4, 8], m: bool[4, 8], n: bool[4, 8], *, low: f32[1] = [-3.4028234663852886e+38]|{MASKED}",
    "exp of mask": f"s: f32[4, 8], m: bool[4, 8], n: bool[4, 8], *, low: f32[1] = "
    f"[-3.4028234663852886e+38]|exp(mul({MASKED}, 1e-38))",
    "half mask": f"s: f16[4, 8], m: bool[4, 8], n: bool[4, 8], *, low: f16[1] = [-65504.0]|{MASKED}",
    "empty rows": "s: f32[4, 8], m: bool[4, 1], *, low: f32[1] = [-inf]|softmax(where(m, s, low), axis=-1)",
    "equal rows": "x: f32[12, 1], g: f32[64]|layer_norm(expand(add(mul(x, 3.0), 100.0), shape=(12, 64)), g, axis=-1, "
    "epsilon=1e-12)",
    "many ties": "x: f32[64, 400]|argmax(add(mul(x, 0.0001), 10000.0), axis=1)",
    "last of many ties": (
        "x: f32[64, 400]|argmin(add(mul(x, 0.0001), 10000.0), axis=1, keepdims=True, select_last=True)"
    ),
    "ties as floats": "x: f32[64, 400]|cast(reshape(argmax(add(mul(x, 0.0001), 10000.0), axis=1), shape=(8, 8)), "
    "to=f32)",
    "saturated": "x: f32[64, 40]|argmax(sigmoid(mul(x, 100.0)), axis=1)",
    "half ties": "x: f16[16, 40], w: f16[40, 300]|argmax(matmul(x, w), axis=1)",
    "pole": "x: f32[64, 40]|div(x, reduce_sum(sub(x, reduce_mean(x, axes=(1,), keepdims=True)), axes=(1,), "
    "keepdims=True))",
    "half of a step": "x: f32[64, 40]|quantize_linear(div(round(mul(x, 100.0)), 200.0), 0.1, dtype=i8)",
    "product": "x: f16[8, 40]|reduce_prod(mul(x, 5.0), axes=(1,))",
    "long product": "x: f32[8, 2000]|reduce_prod(mul(x, 5.0), axes=(1,))",
    "running sum": "x: bf16[8, 400]|cumsum(sub(x, reduce_mean(x, axes=(1,), keepdims=True)), axis=1)",
    "sorted ties": "x: f32[8, 64]|sort(round(mul(x, 3.3)), axis=1)",
    "equality": "x: f32[64, 40]|less(reduce_sum(x, axes=(1,)), reduce_sum(mul(x, 1.0000001), axes=(1,)))",
}


def graph(name: str) -> Graph:
    params, value = RIGHT[name].split("|")
    if value.startswith("sort"):
        return parse(f"def g({params}):\n    values, order = {value}\n    return values, order")
    return parse(f"def g({params}):\n    return {value}")


@pytest.mark.family("kernels")
@pytest.mark.parametrize("numerics", ["standard", "strict"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_pass(name: str, numerics: str) -> None:
    compile(graph(name), cache=False, strict_compile=True, numerics=numerics)


@pytest.mark.family("kernels")
@pytest.mark.parametrize("seed", [118, 328, 385, *range(14)])
def test_right_kernels_of_chains_that_cancel_pass(seed: int) -> None:
    """The first three overflow on the way to integers and booleans."""
    compile(cancelling(seed), cache=False, strict_compile=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_pass_on_the_interpreted_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    compile(graph(name), target="cuda", cache=False, strict_compile=True)


def sample(text: str, arrays: list[Any], got: Any) -> Sample:
    g = parse(text)
    want = run(g, arrays, "float64")[0]
    points = np.stack(np.unravel_index(np.arange(want.size), want.shape), 1).astype(np.int64)
    return Sample(g, g, arrays, points, np.asarray(got).reshape(-1), want.reshape(-1), g.outputs[0].type.dtype, 40, "")


def refused(s: Sample) -> bool:
    return judge(s, np.random.default_rng(0)) is not None


@pytest.mark.parametrize("last", [False, True])
def test_the_rule_for_exact_ties_is_checked(last: bool) -> None:
    x = np.float32([[1, 3, 3, 0], [2, 2, 1, 2]]) / 4
    text = f"def g(x: f32[2, 4]):\n    return argmax(round(mul(x, 4.0)), axis=1, select_last={last})"
    first, final = np.int64([1, 0]), np.int64([2, 3])
    assert not refused(sample(text, [x], final if last else first))
    assert refused(sample(text, [x], first if last else final))


def test_indices_are_as_good_as_the_values_that_they_name() -> None:
    text = "def g(x: f32[2, 4]):\n    return argmax(add(x, 10000.0), axis=1)"
    x = np.float32([[0, 1e-5, 2e-5, -9], [1e-5, 0, -9, 2e-5]])
    for got, wrong in (
        ([0, 0], False),
        ([1, 1], False),
        ([3, 3], True),
        ([2, 2], True),
        ([2, 4], True),
        ([-2, 3], True),
    ):
        assert refused(sample(text, [x], np.int64(got))) == wrong, got


def test_indices_of_inputs_are_exact() -> None:
    x = np.float32([[1, np.nextafter(np.float32(1), np.float32(2)), 0]])
    text = "def g(x: f32[1, 3]):\n    return argmax(x, axis=1)"
    assert not refused(sample(text, [x], np.int64([1])))
    assert refused(sample(text, [x], np.int64([0])))


def test_beside_a_pole_small_values_and_nan_are_wrong() -> None:
    text = "def g(x: f32[1, 3], s: f32[1, 3]):\n    return div(x, sub(s, 1.0))"
    arrays = [np.float32([[1, 2, 3]]), np.float32([[1, 1, 3]])]
    for got, wrong in (
        ([np.inf, np.inf, 1.5], False),
        ([-1e7, 1e8, 1.5], False),
        ([1.0, 1e8, 1.5], True),
        ([np.nan, 1e8, 1.5], True),
    ):
        assert refused(sample(text, arrays, np.float32([got]))) == wrong, got


def test_below_a_fraction_sums_that_cancel_are_poles() -> None:
    """In some orders they leave exactly 0. What reaches them of many errors is no even spread; alone they are small."""
    half = np.random.default_rng(0).uniform(-1, 1, (64, 20)).astype(np.float32)
    x = np.concatenate([half, -half], 1)
    x[:, 0] = np.nextafter(x[:, 0], np.float32(2))
    total = "reduce_sum(x, axes=(1,), keepdims=True)"
    for value, got, wrong in ((f"div(1.0, {total})", np.inf, False), (total, np.inf, True), (total, 1e-3, True)):
        s = sample(f"def g(x: f32[64, 40]):\n    return {value}", [x], np.zeros(0))
        s = replace(s, got=np.full(s.want.shape, got, np.float32), k=40)
        for seed in range(4):
            assert (judge(s, np.random.default_rng(seed)) is not None) == wrong, (value, got, seed)


def test_outputs_beside_huge_ones_have_a_bound_of_their_own() -> None:
    want = np.float64([-3e38, 0.5, 0.25, 0.0])
    limit = bounds(BY_NAME["f32"], 1, want, "")
    assert limit[0] > 1e30 and limit[1] == limit[2] < 1e-5
    assert np.unique(bounds(BY_NAME["f32"], 1, want[1:], "")).size == 1


def test_an_overflow_that_the_types_do_not_have_is_wrong() -> None:
    text = "def g(x: f32[1, 2]):\n    return mul(x, 2.0)"
    assert refused(sample(text, [np.float32([[1, 2]])], np.float32([2, np.inf])))
    assert refused(sample(text, [np.float32([[1, 2]])], np.float32([np.nan, 4])))


@pytest.mark.slow
def test_planted_faults_are_refused() -> None:
    tried, caught, refused = campaign([random_graph(s)[0] for s in range(5)])
    assert not refused and caught.total() > 0.85 * tried.total()


@pytest.mark.slow
def test_planted_faults_in_chains_that_cancel_are_refused() -> None:
    """Some have no effect there: what a fault leaves out is rounded away, or all results are NaN."""
    tried, caught, refused = campaign([cancelling(s) for s in range(28)])
    assert not refused and caught.total() > 0.65 * tried.total()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (70, 500), (4000, 5, 3), (6, 1, 50, 40), (2, 2, 2, 2, 2, 2, 2)])
def test_noise_is_uniform_and_no_neighbours_share_it(shape: tuple[int, ...]) -> None:
    made = noise(0.5, shape, np.random.default_rng(7))
    assert made.shape == shape and (np.abs(made) <= 0.5).all()
    for axis, n in enumerate(shape):
        line = np.moveaxis(made, axis, 0).reshape(n, -1)
        assert all(len(np.unique(line[:, k])) == n for k in range(min(line.shape[1], 20)))
        if n >= 1000:
            assert abs(line[:, 0].mean()) < 4 * 0.5 / np.sqrt(3 * n)


def test_noise_of_a_large_value_takes_little_memory() -> None:
    made = noise(1.0, (1024, 50257), np.random.default_rng(7))
    low, high = np.lib.array_utils.byte_bounds(made)
    assert high - low < made.nbytes / 500
