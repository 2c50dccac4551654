"""Loops and branches: equal results in a program, in Python and in NumPy; what bodies read and give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.frontends.trace import Spec, trace
from dnnc.ir.errors import InputError

RNG = np.random.default_rng(32)
X, W = RNG.standard_normal((4, 3)), RNG.standard_normal((3, 3))


def both(fn: Callable[..., Any], *args: Any) -> list[list[Any]]:
    """The results of a function as a program, and as it runs by itself."""
    out = []
    for made in (dnnc.jit(fn, threads=1)(*map(np.asarray, args)), fn(*map(xp.asarray, args))):
        out.append([np.asarray(m) for m in (made if isinstance(made, tuple) else (made,))])
    return out


def ops(g: Any) -> list[str]:
    return [n.op.name for n in g.nodes()]


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_cond_runs_one_branch(sign: int) -> None:
    def f(x: Any, w: Any) -> Any:
        y = xp.exp(w)
        return dnnc.cond(xp.all(x > 0), lambda a: (a @ y, 1), lambda a: (a @ y - w[0], 2.5), x)

    x = sign * np.abs(X)
    want = (x @ np.exp(W), 1.0) if sign > 0 else (x @ np.exp(W) - W[0], 2.5)
    for (a, b), exact in zip(both(f, x, W), (True, False)):
        np.testing.assert_allclose(a, want[0], rtol=1e-12)
        assert b == want[1] and (b.dtype == np.float64 or not exact)


def test_branches_hold_their_own_work_and_share_what_is_around() -> None:
    def f(x: Any) -> Any:
        y = xp.exp(x)
        return dnnc.cond(xp.sum(x) > 0, lambda: xp.sin(y), lambda: xp.cos(x))

    g = trace(f, Spec((3,)))
    (node,) = (n for n in g.nodes() if n.op.name == "cond")
    assert ops(g).count("exp") == 1 and "sin" not in ops(g) and "cos" not in ops(g)
    assert [ops(b) for b in node.subgraphs()] == [["sin"], ["cos"]] and len(node.inputs) == 3


def test_writing_to_an_operand_stays_in_the_branch() -> None:
    def zero(a: Any) -> Any:
        a[0] = 0.0
        return a

    def f(x: Any) -> Any:
        return dnnc.cond(x[0] > 0, zero, lambda a: a, x), x

    x = np.array([3.0, 4.0])
    (made, same), _ = both(f, x)
    assert made.tolist() == [0, 4] and same.tolist() == [3, 4]


@pytest.mark.slow
def test_while_loop_ends_by_what_it_computes() -> None:
    def f(x: Any, w: Any) -> Any:
        w = w * 0.5
        return dnnc.while_loop(lambda s: xp.max(xp.abs(s[0])) > 0.1, lambda s: (s[0] @ w * 0.5, s[1] + 1), (x, 0))

    x, k = X, 0
    while np.abs(x).max() > 0.1:
        x, k = x @ (W * 0.5) * 0.5, k + 1
    assert k > 2
    for a, n in both(f, X, W):
        np.testing.assert_allclose(a, x, rtol=1e-9)
        assert n == k and n.dtype == np.int64


def test_while_loop_that_never_runs() -> None:
    for (a,) in both(lambda x: dnnc.while_loop(lambda s: xp.sum(s) > 1e9, lambda s: s * 2, x), X):
        assert np.array_equal(a, X)


@pytest.mark.slow
def test_a_complex_state() -> None:
    def f(c: Any) -> Any:
        return dnnc.while_loop(
            lambda s: s["k"] < 5, lambda s: {"z": s["z"] * s["z"] + c, "k": s["k"] + 1}, {"z": c * 0, "k": 0}
        )["z"]

    c = np.array([0.1 + 0.2j, -0.5 + 0.3j])
    z = c * 0
    for _ in range(5):
        z = z * z + c
    for (a,) in both(f, c):
        np.testing.assert_allclose(a, z, rtol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_stacks_rows(reverse: bool) -> None:
    def f(x: Any, w: Any) -> Any:
        return dnnc.scan(lambda s, r: (xp.tanh(s @ w + r), s + r), xp.zeros(3), x, reverse=reverse)

    s, rows = np.zeros(3), []
    for r in X[::-1] if reverse else X:
        rows.append(s + r)
        s = np.tanh(s @ W + r)
    for last, stacked in both(f, X, W):
        np.testing.assert_allclose(last, s, rtol=1e-10)
        np.testing.assert_allclose(stacked, rows[::-1] if reverse else rows, rtol=1e-10)


@pytest.mark.slow
def test_scan_by_length_and_within_a_loop() -> None:
    def f(x: Any) -> Any:
        def outer(s: Any) -> Any:
            total, _ = dnnc.scan(lambda t, _: (t + s["v"] * x, None), x * 0, length=3)
            return {"v": total, "k": s["k"] + 1}

        return dnnc.while_loop(lambda s: s["k"] < 2, outer, {"v": x, "k": 0})["v"]

    for (a,) in both(f, X):
        np.testing.assert_allclose(a, 9 * X**3, rtol=1e-12)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            lambda x: dnnc.while_loop(lambda s: xp.sum(s) > 0, lambda s: s[:1], x),
            r"state must be float32 of shape \(3,\) as before, got .* \(1,\)",
        ),
        (lambda x: dnnc.while_loop(lambda s: s > 0, lambda s: s, x), r"one truth value, got bool of shape \(3,\)"),
        (
            lambda x: dnnc.while_loop(lambda s: s[1] < 3, lambda s: (s[0], s[1] + 0.5), (x, 0)),
            r"state\.1 must be int64",
        ),
        (
            lambda x: dnnc.while_loop(lambda s: s[1] < 3, lambda s: s[0], (x, 0)),
            r"expected state\.0, state\.1, got state",
        ),
        (
            lambda x: dnnc.cond(x[0] > 0, lambda: x, lambda: (x, x)),
            r"the second branch: expected result, got result\.0, result\.1",
        ),
        (lambda x: dnnc.scan(lambda s, r: s, x, x), r"a pair \(state, y\)"),
        (lambda x: dnnc.scan(lambda s, r: (s, None), x), "no xs and no length"),
        (lambda x: dnnc.scan(lambda s, r: (s, None), x, x, length=5), "xs: 3, length: 5"),
    ],
)
def test_errors_of_bodies(fn: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as e:
        trace(fn, Spec((3,)))
    assert str(e.value).startswith(__file__)


@pytest.mark.slow
def test_bodies_share_large_constants_and_products() -> None:
    big = RNG.standard_normal((12, 12)) / 12
    w, product = xp.asarray(big), xp.asarray(big) @ xp.asarray(big)

    def f(x: Any) -> Any:
        return dnnc.scan(lambda s, _: ((s @ w + s @ product) * 0.5, None), x, length=4)[0]

    g = trace(f, Spec((2, 12), "float64"))
    (node,) = (n for n in g.nodes() if n.op.name == "loop")
    (body,) = node.subgraphs()
    assert max(c.size for c in body.constants.values()) == 1 and ops(body).count("matmul") == 2
    s = x = RNG.standard_normal((2, 12))
    for _ in range(4):
        s = (s @ big + s @ (big @ big)) * 0.5
    for (a,) in both(f, x):
        np.testing.assert_allclose(a, s, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_traced_integer_is_an_index() -> None:
    def f(x: Any) -> Any:
        def step(s: Any) -> Any:
            made = s["made"]
            made[s["k"], 1] = xp.sum(x[s["k"]])
            return {"made": made, "k": s["k"] + 1, "last": x[..., s["k"] - 1]}

        s = dnnc.while_loop(lambda s: s["k"] < 3, step, {"made": x * 0, "k": 0, "last": x[:, 0]})
        return s["made"], s["last"], x[s["k"] - 1, s["k"] - 2]

    want = np.zeros_like(X)
    want[:3, 1] = X[:3].sum(1)
    for made, last, one in both(f, X):
        np.testing.assert_allclose(made, want, rtol=1e-12)
        assert np.array_equal(last, X[:, 1]) and one == X[2, 1]
