"""Gradients of gathers and scatters against PyTorch, closed forms, differences: duplicates, negative indices, ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.pullbacks import TARGETS, WAYS, compiled, cotangents, ops, pulled, second_differences

Array = Any
SEEDS = range(12)  # random shapes and indices
HOW = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def leaf(x: Array) -> Any:
    return torch.tensor(x, dtype=torch.float64, requires_grad=True)


def shape_of(rng: np.random.Generator, rank: int) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.integers(1, 6, rank))


# --- gathers ----------------------------------------------------------------------------------------------------------


@pytest.mark.family("samples")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("run", WAYS)
def test_gather(seed: int, run: Any) -> None:
    """Along any axis, by indices of any rank, also negative ones and the same again."""
    rng = np.random.default_rng(seed)
    shape = shape_of(rng, int(rng.integers(1, 4)))
    axis = int(rng.integers(-len(shape), len(shape)))
    n = shape[axis]
    at = rng.integers(-n, n, shape_of(rng, int(rng.integers(0, 3)))).astype(rng.choice(["i8", "i4"]))
    x = rng.standard_normal(shape)
    t = leaf(x)
    a = axis % len(shape)
    y = t.index_select(a, torch.tensor(at.reshape(-1) % n)).reshape(*shape[:a], *at.shape, *shape[a + 1 :])
    g = rng.standard_normal(tuple(y.shape))
    y.backward(torch.tensor(g))
    (found,) = run(lambda b, x, at: b.gather(x, at, axis=axis), [x, at], g)
    np.testing.assert_allclose(found, t.grad.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "at,without",
    [
        (np.arange(12) // 3, True),  # each row again and again
        (np.arange(10) // 3, True),  # the last one less often
        (np.array([2, 0, 3, 1]), True),  # a permutation
        (np.array([1, 2]), True),  # a range
        (np.array([-3, -2, -1]), True),
        (np.array([1, 1, 3]), False),
        (np.array([3, 2]), False),
        (np.array([[0, 2], [2, 0]]), False),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("run", WAYS)
def test_gather_by_constants(at: Array, without: bool, axis: int, run: Any) -> None:
    """Nothing is scattered where constant indices repeat, permute or cut out rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 3) if axis == 0 else (3, 4))
    g = rng.standard_normal(np.take(x, at, axis).shape)
    want = np.zeros_like(x)
    np.add.at(want, (at,) if axis == 0 else (slice(None), at), g)

    def build(b: Any, x: Any) -> Any:
        return b.gather(x, b.constant(at), axis=axis)

    assert without is all(not name.startswith("scatter") for name in ops(pulled(build, [x], [0])))
    found = run(build, [x], g)
    np.testing.assert_allclose(found[0], want, rtol=1e-12)


@pytest.mark.family("samples")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("run", WAYS)
def test_gather_elements(seed: int, run: Any) -> None:
    rng = np.random.default_rng(seed)
    shape = shape_of(rng, int(rng.integers(1, 4)))
    axis = int(rng.integers(len(shape)))
    sizes = tuple(int(rng.integers(1, 9 if k == axis else n + 1)) for k, n in enumerate(shape))
    at = rng.integers(-shape[axis], shape[axis], sizes)
    x, g = rng.standard_normal(shape), rng.standard_normal(sizes)
    t = leaf(x)
    t.gather(axis, torch.tensor(at % shape[axis])).backward(torch.tensor(g))
    (found,) = run(lambda b, x, at: b.gather_elements(x, at, axis=axis), [x, at], g)
    np.testing.assert_allclose(found, t.grad.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("run", WAYS)
def test_one_element_of_each_row(axis: int, run: Any) -> None:
    """Nothing is scattered; negative indices count from the end."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 3, 5))
    sizes = (1, 3, 5) if axis == 0 else (4, 3, 1)
    at, g = rng.integers(-x.shape[axis], x.shape[axis], sizes), rng.standard_normal(sizes)
    want = np.zeros_like(x)
    np.put_along_axis(want, at, g, axis)

    def build(b: Any, x: Any, at: Any) -> Any:
        return b.gather_elements(x, at, axis=axis)

    assert not any(name.startswith("scatter") for name in ops(pulled(build, [x, at], [0])))
    (found,) = run(build, [x, at], g)
    np.testing.assert_array_equal(found, want)


@pytest.mark.family("samples")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("run", WAYS)
def test_gather_nd(seed: int, run: Any) -> None:
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(0, 3))
    width = int(rng.integers(1, 3))
    shape = shape_of(rng, batch + width + int(rng.integers(0, 2)))
    lead = (*shape[:batch], *shape_of(rng, int(rng.integers(0, 3))))
    if len(lead) == 0:
        lead = (3,)
    sizes = shape[batch : batch + width]
    at = np.stack([rng.integers(-n, n, lead) for n in sizes], -1)
    x = rng.standard_normal(shape)
    t = leaf(x)
    free = len(lead) - batch
    first = [torch.arange(n).reshape(-1, *[1] * (len(lead) - k - 1)) for k, n in enumerate(shape[:batch])]
    assert free >= 0
    y = t[(*first, *(torch.tensor(at[..., k] % n) for k, n in enumerate(sizes)))]
    g = rng.standard_normal(tuple(y.shape))
    y.backward(torch.tensor(g))
    (found,) = run(lambda b, x, at: b.gather_nd(x, at, batch_dims=batch), [x, at], g)
    np.testing.assert_allclose(found, t.grad.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("axis", [0, 1])
def test_kernels_of_gather(axis: int, dtype: Any, target: str) -> None:
    """Rows that many positions read are summed in float32, in one order."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, 6)).astype(dtype)
    at = rng.integers(0, 3, (5, 20))
    y = np.take(x, at, axis)
    g = rng.standard_normal(y.shape).astype(dtype)
    (found,) = compiled(lambda b, x, at: b.gather(x, at, axis=axis), [x, at], g, target=target)
    want = np.zeros(x.shape)
    np.add.at(want, (at,) if axis == 0 else (slice(None), at), g.astype(np.float64))
    assert found.dtype == dtype
    np.testing.assert_allclose(found, want, rtol=2e-3 if dtype is np.float16 else 1e-5, atol=1e-5)


# --- scatters ---------------------------------------------------------------------------------------------------------


def updates(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Small whole numbers, with zeros and ties among them."""
    return rng.integers(-2, 3, shape).astype(np.float64)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.family("samples")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("run", WAYS)
def test_scatter_elements(seed: int, how: str, run: Any) -> None:
    """Duplicates, zeros in products and equal extrema, as PyTorch's scatter_reduce has them."""
    rng = np.random.default_rng(seed)
    shape = shape_of(rng, int(rng.integers(1, 4)))
    axis = int(rng.integers(len(shape)))
    sizes = tuple(int(rng.integers(1, 9 if k == axis else n + 1)) for k, n in enumerate(shape))
    at = rng.integers(-shape[axis], shape[axis], sizes)
    x, u, g = updates(rng, shape), updates(rng, sizes), rng.standard_normal(shape)
    t, v = leaf(x), leaf(u)
    t.scatter_reduce(axis, torch.tensor(at % shape[axis]), v, HOW[how]).backward(torch.tensor(g))
    found = run(
        lambda b, x, at, u: b.scatter_elements(x, at, u, axis=axis, reduction=how), [x, at, u], g, wanted=(0, 2)
    )
    for f, want in zip(found, (t.grad, v.grad), strict=True):
        np.testing.assert_allclose(f, want.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["none", *HOW])
@pytest.mark.family("samples")
@pytest.mark.parametrize("seed", SEEDS)
def test_scatter_nd(seed: int, how: str) -> None:
    """The same as a scatter of elements along one axis of all rows; of a replaced element the last update counts."""
    rng = np.random.default_rng(seed)
    width = int(rng.integers(1, 3))
    shape = shape_of(rng, width + int(rng.integers(0, 2)))
    lead = shape_of(rng, int(rng.integers(0, 3)))
    at = np.stack([rng.integers(-n, n, lead) for n in shape[:width]], -1).reshape(*lead, width)
    x, g = updates(rng, shape), rng.standard_normal(shape)
    u = updates(rng, (*lead, *shape[width:]))
    found = cotangents(lambda b, x, at, u: b.scatter_nd(x, at, u, reduction=how), [x, at, u], g, wanted=(0, 2))
    rows = np.ravel_multi_index(tuple((at % shape[:width]).reshape(-1, width).T), shape[:width])
    flat = int(np.prod(shape[:width])), int(np.prod(shape[width:]))
    if how == "none":
        of_x, of_u = g.reshape(flat).copy(), np.zeros((len(rows), flat[1]))
        of_x[rows] = 0
        for k, r in enumerate(rows):
            if r not in rows[k + 1 :]:
                of_u[k] = g.reshape(flat)[r]
    else:
        t, v = leaf(x.reshape(flat)), leaf(u.reshape(-1, flat[1]))
        where = torch.tensor(rows)[:, None].expand(-1, flat[1])
        t.scatter_reduce(0, where, v, HOW[how]).backward(torch.tensor(g.reshape(flat)))
        of_x, of_u = t.grad.numpy(), v.grad.numpy()
    np.testing.assert_allclose(found[0], of_x.reshape(shape), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found[1], of_u.reshape(u.shape), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("target", TARGETS)
def test_of_updates_of_one_element_the_last_one_counts(target: str) -> None:
    x, at, u = np.zeros(4, np.float32), np.array([1, 3, 1, -3]), np.arange(4, dtype=np.float32)
    g = np.array([1, 2, 3, 4], np.float32)
    build = lambda b, x, at, u: b.scatter_elements(x, at, u, axis=0)  # noqa: E731
    found = compiled(build, [x, at, u], g, (0, 2), target)
    np.testing.assert_array_equal(found[0], [1, 0, 3, 0])
    np.testing.assert_array_equal(found[1], [0, 4, 0, 2])


def test_constant_indices_without_duplicates_need_no_numbers() -> None:
    def build(b: Any, x: Any, u: Any) -> Any:
        return b.scatter_nd(x, b.constant(np.array([[2], [0]])), u)

    x, u = np.zeros((3, 2)), np.ones((2, 2))
    assert ops(pulled(build, [x, u], [1])) == ["gather_nd"]
    twice = lambda b, x, u: b.scatter_nd(x, b.constant(np.array([[2], [-1]])), u)  # noqa: E731
    assert ops(pulled(twice, [x, u], [1])).count("scatter_nd") == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("how", ["none", *HOW])
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_of_scatter(target: str, how: str, dtype: Any) -> None:
    rng = np.random.default_rng(4)
    at = rng.integers(-5, 5, (7, 1))
    x, u = updates(rng, (5, 3)).astype(dtype), updates(rng, (7, 3)).astype(dtype)
    g = rng.integers(-9, 9, x.shape).astype(dtype)
    build = lambda b, x, at, u: b.scatter_nd(x, at, u, reduction=how)  # noqa: E731
    want = cotangents(build, [x, at, u], g, wanted=(0, 2))
    for f, w in zip(compiled(build, [x, at, u], g, (0, 2), target), want, strict=True):
        np.testing.assert_allclose(f, w, rtol=1e-3 if dtype is np.float16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
@pytest.mark.parametrize("of,by", [(0, 2), (2, 0), (2, 2), (2, 3), (0, 3)])
def test_second_derivatives_of_products(of: int, by: int, zeros: int) -> None:
    """A product with zeros is a polynomial: its derivatives depend on the zeros, too."""
    rng = np.random.default_rng(zeros)
    x, u, g = rng.standard_normal((3, 2)), rng.standard_normal((6, 2)), rng.standard_normal((3, 2))
    at = np.array([[1], [0], [1], [1], [0], [1]])
    u[[0, 2, 5][:zeros]] = 0

    def build(b: Any, x: Any, at: Any, u: Any) -> Any:
        return b.scatter_nd(x, at, u, reduction="mul")

    if by == 3:  # the cotangent itself
        found, want = cotangents(build, [x, at, u], g, (of,)), cotangents(build, [x, at, u], 2 * g, (of,))
        np.testing.assert_allclose(2 * found[0], want[0], rtol=1e-12)
        return
    mine, differences = second_differences(build, [x, at, u], g, by, of, 1e-4)
    assert mine == pytest.approx(differences, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("how", ["none", "add"])
def test_gradients_of_gradients_end_in_gathers(how: str) -> None:
    """The gradient is linear in the cotangent: what comes back to it is the gather itself."""
    rng = np.random.default_rng(0)
    x, at = rng.standard_normal((5, 2)), rng.integers(0, 5, 7)
    mine, differences = second_differences(
        lambda b, x, at: b.mul(b.gather(b.mul(x, x), at, axis=0), 1.0), [x, at], rng.standard_normal((7, 2)), 0, 0, 1e-5
    )
    assert mine == pytest.approx(differences, rel=1e-7)
    build = lambda b, x, at, u: b.scatter_nd(b.mul(x, x), at, b.mul(u, u), reduction=how)  # noqa: E731
    arrays = [x, at[:, None], rng.standard_normal((7, 2))]
    for k in (0, 2):
        mine, differences = second_differences(build, arrays, rng.standard_normal((5, 2)), k, k, 1e-5)
        assert mine == pytest.approx(differences, rel=1e-7)


# --- triangles, reversed sequences, one_hot ---------------------------------------------------------------------------


def test_triangles_and_reversed_sequences_are_their_own_transposes() -> None:
    rng = np.random.default_rng(0)
    x, g, n = rng.standard_normal((5, 3)), rng.standard_normal((5, 3)), np.array([5, 0, 2])
    (found,) = cotangents(lambda b, x: b.trilu(x, k=1, upper=False), [x], g)
    np.testing.assert_array_equal(found, np.tril(g, 1))
    build = lambda b, x, n: b.reverse_sequence(x, n)  # noqa: E731
    (found,) = cotangents(build, [x, n], g)
    want = np.stack([np.concatenate([g[:k, j][::-1], g[k:, j]]) for j, k in enumerate(n)], 1)
    np.testing.assert_array_equal(found, want)
    assert ops(pulled(build, [x, n], [0])) == ["reverse_sequence"]


@pytest.mark.parametrize("run", WAYS)
def test_one_hot_has_gradients_of_its_two_values(run: Any) -> None:
    rng = np.random.default_rng(0)
    at, values, g = np.array([1, -1, 7, 0]), np.array([0.5, 2.0]), rng.standard_normal((4, 3))
    hit = np.zeros((4, 3), bool)
    hit[0, 1] = hit[1, 2] = hit[3, 0] = True
    (found,) = run(lambda b, at, v: b.one_hot(at, v, depth=3), [at, values], g, (1,))
    np.testing.assert_allclose(found, [g[~hit].sum(), g[hit].sum()], rtol=1e-12)
