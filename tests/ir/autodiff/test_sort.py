"""Gradients of sort and top-k: each value's cotangent goes back to where the value stood."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.pullbacks import WAYS, compiled, second_differences


@pytest.mark.family("samples")
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("run", WAYS)
def test_sort_of_rows_with_equal_elements(seed: int, run: Any) -> None:
    """Sorting is stable, as PyTorch's is if asked."""
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 9, int(rng.integers(1, 4))))
    axis, descending = int(rng.integers(len(shape))), bool(rng.integers(2))
    keep = int(rng.integers(0, shape[axis] + 1))
    x = rng.integers(-3, 4, shape).astype(np.float64)
    t = torch.tensor(x, requires_grad=True)
    y = t.sort(dim=axis, descending=descending, stable=True).values.narrow(axis, 0, keep)
    g = rng.standard_normal(tuple(y.shape))
    y.backward(torch.tensor(g))
    (found,) = run(lambda b, x: b.sort(x, axis=axis, descending=descending, keep=keep)[0], [x], g)
    np.testing.assert_array_equal(found, t.grad.numpy())


@pytest.mark.slow
@pytest.mark.parametrize(
    "n,keep,target",
    [*((n, k, "llvm") for n, k in ((300, 200), (1100, 1000))), (40, 30, "cuda-interpreted")],
)
def test_the_most_of_long_rows(n: int, keep: int, target: str) -> None:
    """Elements lie further apart than float32 rounds, so that each has its place."""
    rng = np.random.default_rng(0)
    x = rng.permutation(n).astype(np.float32)[None]
    g = rng.standard_normal((1, keep)).astype(np.float32)
    want = np.zeros_like(x)
    want[0, np.argsort(x[0])[:keep]] = g[0]
    build = lambda b, x: b.sort(x, axis=1, keep=keep)[0]  # noqa: E731
    found = compiled(build, [x], g, target=target)
    np.testing.assert_array_equal(found[0], want)


def test_a_loss_of_the_largest_has_second_derivatives() -> None:
    rng = np.random.default_rng(0)

    def build(b: Any, x: Any) -> Any:
        y = b.sort(b.mul(x, x), axis=1, descending=True, keep=3)[0]
        return b.mul(y, y)

    mine, differences = second_differences(
        build, [rng.standard_normal((2, 7))], rng.standard_normal((2, 3)), 0, 0, 1e-5
    )
    assert mine == pytest.approx(differences, rel=1e-7)
