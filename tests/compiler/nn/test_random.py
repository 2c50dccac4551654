"""`dnnc.random`: keys, distributions, state, and draws in traced functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import random
from dnnc.ir.errors import InputError
from dnnc.ir.ops.random import philox

N = 20_000


@pytest.mark.slow
def test_keys() -> None:
    assert random.key((3 << 32) + 5).tolist() == [5, 3] and random.key(-1).tolist() == [2**32 - 1] * 2
    k = random.key(7)
    words = philox(np.array([[0, 0, 0, 0]], np.uint32), np.array([7, 0], np.uint32))
    assert random.bits(k, (4,)).tolist() == words[0].tolist()  # the published generator
    keys = {tuple(r) for r in random.split(k, 50).tolist()}
    keys |= {tuple(random.fold_in(k, n).tolist()) for n in range(20)}
    assert len(keys) == 70 and tuple(random.bits(k, (2,)).tolist()) not in keys
    assert random.fold_in(k, xp.asarray(3)).tolist() == random.fold_in(k, 3).tolist()
    with pytest.raises(InputError, match=r"expected a key \(uint32 of shape \(2,\)\), got int64 of shape \(3,\)"):
        random.uniform(np.arange(3), (2,))
    with pytest.raises(InputError, match="expected an integer, got a float"):
        random.key(0.5)  # type: ignore[arg-type]


@pytest.mark.slow
def test_distributions() -> None:
    k = random.key(1)
    u = np.asarray(random.uniform(k, (N,), minval=-1, maxval=3))
    assert u.min() >= -1 and u.max() < 3 and abs(u.mean() - 1) < 0.03 and u.dtype == np.float32
    x = np.asarray(random.normal(k, (N,), "float64"))
    assert abs(x.mean()) < 0.03 and abs(x.std() - 1) < 0.02
    b = np.asarray(random.bernoulli(k, 0.3, (N,)))
    assert b.dtype == bool and abs(b.mean() - 0.3) < 0.02
    assert random.bernoulli(k, xp.asarray([0.0, 1.0])).tolist() == [False, True]
    r = np.asarray(random.randint(k, (N,), -2, 3))
    assert set(r.tolist()) == {-2, -1, 0, 1, 2} and abs(r.mean()) < 0.05
    assert random.randint(k, (3,), 0, 9, "int8").dtype == xp.int8
    e, g = np.asarray(random.exponential(k, (N,))), np.asarray(random.gumbel(k, (N,)))
    assert abs(e.mean() - 1) < 0.03 and abs(g.mean() - 0.5772) < 0.03
    with pytest.raises(InputError, match=r"no integers in \[3, 3\)"):
        random.randint(k, (), 3, 3)


@pytest.mark.slow
def test_orders_and_classes() -> None:
    k = random.key(2)
    assert sorted(random.permutation(k, 100).tolist()) == list(range(100)) != random.permutation(k, 100).tolist()
    x = xp.asarray(np.arange(12).reshape(3, 4))
    p = np.asarray(random.permutation(k, x, axis=1))
    assert sorted(p[0].tolist()) == [0, 1, 2, 3] and np.array_equal(p[1] - p[0], [4] * 4)
    logits = xp.asarray(np.log([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]))
    c = np.asarray(random.categorical(k, logits, shape=(N, 2)))
    shares = np.stack([(c == j).mean(0) for j in range(3)], 1)
    np.testing.assert_allclose(shares, np.exp(np.asarray(logits)), atol=0.02)
    t = np.asarray(random.truncated_normal(k, -1.0, 0.5, (N,), "float64"))
    assert t.min() >= -1 and t.max() <= 0.5
    density = [math.exp(-v * v / 2) / math.sqrt(2 * math.pi) for v in (-1.0, 0.5)]
    mass = (math.erf(0.5 / math.sqrt(2)) + math.erf(1 / math.sqrt(2))) / 2
    assert abs(t.mean() - (density[0] - density[1]) / mass) < 0.02
    y = np.linspace(-0.999999, 0.999999, 4001)
    back = np.vectorize(math.erf)(np.asarray(random.erf_inverse(xp.asarray(y))))
    np.testing.assert_allclose(back, y, rtol=1e-12, atol=1e-14)


def test_state() -> None:
    random.seed(4)
    a, b = random.uniform(None, (3,)), random.uniform(None, (3,))
    state = random.get_state()
    c = random.uniform(None, (3,))
    random.seed(4)
    assert random.uniform(None, (3,)).tolist() == a.tolist() != b.tolist()
    random.set_state(state)
    assert state == (4, 2) and random.uniform(None, (3,)).tolist() == c.tolist()


@pytest.mark.parametrize("number", [0, 255, 256, 1 << 32, (1 << 32) + 300])
def test_keys_of_the_default_generator(number: int) -> None:
    state = random.get_state()
    random.set_state((7, number))
    made = [random.next_key(None, "a draw").tolist() for _ in range(2)]
    random.set_state(state)
    for k, key in enumerate(made, number):
        counter = np.array([[k % (1 << 32), k >> 32, random.SEEDED, 0]], np.uint32)
        assert key == philox(counter, np.array([7, 0], np.uint32))[0, :2].tolist()


def mask(x: Any, key: Any = None) -> Any:
    return F.dropout(x, 0.5, key=key)


@pytest.mark.slow
def test_traced_draws() -> None:
    x = xp.ones((40,))
    traced = dnnc.jit(mask)
    for seed in (1, 2):
        assert traced(x, random.key(seed)).tolist() == mask(x, random.key(seed)).tolist()  # equal bits
    assert traced.traces == 1 and traced(x, random.key(1)).tolist() != traced(x, random.key(2)).tolist()
    with pytest.raises(InputError, match=r"test_random.py:\d+: dropout: a draw in a traced function needs a key"):
        dnnc.jit(lambda x: mask(x))(x)
    with pytest.raises(InputError, match="needs a key"):
        dnnc.grad(lambda x: xp.sum(mask(x)))(x)
    keys = random.split(random.key(3), 4)
    rows = dnnc.vmap(lambda k: random.uniform(k, (3,)))(keys)
    assert np.array_equal(np.asarray(rows), np.stack([np.asarray(random.uniform(keys[j, :], (3,))) for j in range(4)]))


@pytest.mark.slow
def test_draws_in_loops_differ_by_iteration() -> None:
    """Masks of a scan differ in each step, nested ones too, and the gradient sees the same ones."""
    x = np.ones((5, 64))

    def rows(x: Any) -> Any:
        inner = lambda r: dnnc.scan(lambda s, _: (s, mask(r)), 0.0, length=2)[1]  # noqa: E731
        return dnnc.scan(lambda s, r: (s, inner(r)), 0.0, x)[1]

    def drawn(x: Any, key: Any) -> Any:
        with random.stream(key):
            return rows(x)

    y = np.asarray(dnnc.jit(drawn)(x, random.key(1)))
    assert len({r.tobytes() for r in y.reshape(10, 64)}) == 10
    g = np.asarray(dnnc.jit(lambda x, k: dnnc.grad(lambda x: xp.sum(drawn(x, k)))(x))(x, random.key(1)))
    assert np.array_equal(g, y.sum(1))

    def last(key: Any) -> Any:
        with random.stream(key):
            step = lambda s: (s[0] + 1, mask(xp.ones((64,))), s[1])  # noqa: E731
            return dnnc.while_loop(lambda s: s[0] < 2, step, (0, xp.zeros((64,)), xp.zeros((64,))))

    _, a, b = dnnc.jit(last)(random.key(1))
    assert a.tolist() != b.tolist()


@pytest.mark.slow
def test_gradients_see_the_same_mask() -> None:
    x, key = xp.asarray(np.linspace(1, 2, 50)), random.key(9)
    y = np.asarray(mask(x, key))
    g = np.asarray(dnnc.grad(lambda x: xp.sum(mask(x, key)))(x))
    assert np.array_equal(g, np.where(y != 0, 2.0, 0.0)) and 10 < (g == 0).sum() < 40
    x.requires_grad = True
    y = mask(x)
    np.asarray(y)  # seen before
    xp.sum(y).backward()
    assert np.array_equal(np.asarray(x.grad) != 0, np.asarray(y) != 0)


@pytest.mark.slow
def test_kinds_of_dropout() -> None:
    x, k = xp.ones((8, 16, 5)), random.key(1)
    kept = np.asarray(F.dropout1d(x, 0.5, key=k))
    assert np.all((kept == 0).all(2) | (kept == 2).all(2)) and 30 < (kept[:, :, 0] == 0).sum() < 98
    normal = random.normal(random.key(2), (N,), "float64")
    y = np.asarray(F.alpha_dropout(normal, 0.3, True, key=k))
    assert abs(y.mean()) < 0.03 and abs(y.std() - 1) < 0.03
    assert F.dropout(x, 1.0).tolist() == xp.zeros((8, 16, 5)).tolist() and F.dropout(x, 0.9, training=False) is x
    hard = np.asarray(F.gumbel_softmax(xp.zeros((50, 4)), hard=True, key=k))
    assert np.array_equal(hard.sum(1), np.ones(50)) and set(hard.ravel().tolist()) == {0.0, 1.0}
    with pytest.raises(InputError, match=r"p=1\.5: expected a probability"):
        F.dropout(x, 1.5)


@pytest.mark.slow
def test_dropout_of_attention() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (xp.asarray(rng.standard_normal((2, 3, 4))) for _ in range(3))
    mask = xp.asarray(np.array([[True, False, True], [False] * 3, [True] * 3]))  # the second row sees no key
    key = random.key(1)

    def mixed(p: float, q: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask, p, dropout_key=key)

    np.testing.assert_allclose(np.asarray(mixed(1e-7, q)), np.asarray(mixed(0.0, q)), 1e-5)
    for p in (0.0, 1e-7, 0.5):
        g = np.asarray(dnnc.grad(lambda q: xp.sum(mixed(p, q) ** 2))(q))
        assert np.isfinite(g).all() and np.all(g[:, 1] == 0) and np.any(g[:, 2] != 0)
    assert not np.array_equal(np.asarray(mixed(0.5, q)), np.asarray(mixed(0.0, q)))


@pytest.mark.slow
def test_random_slopes() -> None:
    x = -xp.ones((2000,))
    y = np.asarray(F.rrelu(x, 0.1, 0.3, True, key=random.key(1)))
    assert -0.3 < y.min() < -0.29 and -0.11 < y.max() <= -0.1 and abs(y.mean() + 0.2) < 0.01
