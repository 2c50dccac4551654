"""Gradients of determinants and inverses against PyTorch and cofactors, singular matrices among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.pullbacks import TARGETS, compiled, cotangents, ops, pulled, second_differences


@pytest.mark.parametrize("name", ["det", "inverse"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7])
def test_regular_matrices(n: int, name: str) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((2, 3, n, n)) + 2 * np.eye(n)
    t = torch.tensor(x, requires_grad=True)
    y = torch.linalg.det(t) if name == "det" else torch.linalg.inv(t)
    g = rng.standard_normal(tuple(y.shape))
    y.backward(torch.tensor(g))
    build = lambda b, x: b.op(name, x)  # noqa: E731
    (found,) = cotangents(build, [x], g)
    np.testing.assert_allclose(found, t.grad.numpy(), rtol=1e-9, atol=1e-9)
    assert not {"eliminate_vjp", "clear_column_vjp"} & {op.rsplit("_", 1)[0] for op in ops(pulled(build, [x], [0]))}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name,n", [("det", 2), ("det", 3), ("det", 5), ("inverse", 3)])
def test_kernels(name: str, n: int, target: str) -> None:
    rng = np.random.default_rng(n)
    x = (rng.standard_normal((4, n, n)) + 3 * np.eye(n)).astype(np.float32)
    g = rng.standard_normal((4,) if name == "det" else x.shape).astype(np.float32)
    build = lambda b, x: b.op(name, x)  # noqa: E731
    (want,) = cotangents(build, [x], g)
    (found,) = compiled(build, [x], g, target=target)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def cofactors(x: Any) -> Any:
    n = len(x)
    drop = lambda i, j: np.delete(np.delete(x, i, 0), j, 1)  # noqa: E731
    return np.array([[(-1) ** (i + j) * np.linalg.det(drop(i, j)) for j in range(n)] for i in range(n)])


@pytest.mark.parametrize("n,rank", [(2, 0), (2, 1), (3, 1), (3, 2), (4, 2), (4, 3)])
def test_singular_matrices(n: int, rank: int) -> None:
    """Cofactors are right there, also where a pivot is zero early."""
    rng = np.random.default_rng(n)
    whole = rng.integers(-3, 4, (n, rank)).astype(np.float64) @ rng.integers(-3, 4, (rank, n))
    early = whole.copy()
    early[:, 0] = 0
    (found,) = cotangents(lambda b, x: b.det(x), [np.stack([whole, early])], np.array([1.0, 2.0]))
    np.testing.assert_allclose(found[0], cofactors(whole), atol=1e-10)
    np.testing.assert_allclose(found[1], 2 * cofactors(early), atol=1e-10)


def test_large_singular_matrices_have_no_number_by_accident() -> None:
    (found,) = cotangents(lambda b, x: b.det(x), [np.ones((5, 5))], np.array(1.0))
    assert np.isnan(found).all()


@pytest.mark.parametrize("name,n", [("det", 2), ("det", 3), ("det", 5), ("inverse", 3)])
def test_second_derivatives(name: str, n: int) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((2, n, n)) + 2 * np.eye(n)
    g = rng.standard_normal((2,) if name == "det" else x.shape)
    mine, differences = second_differences(lambda b, x: b.op(name, x), [x], g, 0, 0, 1e-5)
    assert mine == pytest.approx(differences, rel=1e-6)
